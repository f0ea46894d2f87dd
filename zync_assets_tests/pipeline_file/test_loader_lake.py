"""``lake:`` as a folder, a URI, or a URI with what opens the store."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from zync_assets.errors import PipelineFileError
from zync_assets.lake import storage
from zync_assets.lake.stores import KINDS
from zync_assets.pipeline import LakeUri, Pipeline
from zync_assets.pipeline_file import load
from zync_assets.spark.sql import PINS

REST = """
inputs: [{topic: a, pool: Raw, format: string}]
outputs: [{topic: b, pool: Staging, format: string}]
transforms: [{type: stateless, in: a, out: b, key: in.key, value: in.value}]
"""
S3 = 'lake: {uri: "s3://bucket/folder/", endpoint: "http://h:9000", access-key-id: id7, secret-access-key: "${SECRET}"}'


def loaded(folder: Path, text: str, env: Mapping[str, str]) -> Pipeline:
    path = folder / "lake.yaml"
    path.write_text(text + REST)
    return load(path, env)


def test_one_set_of_settings_opens_the_log_the_files_and_spark(tmp_path: Path) -> None:
    lake = loaded(tmp_path, S3, {"SECRET": "hush", "AWS_SESSION_TOKEN": "of other keys"}).lake
    below = pickle.loads(pickle.dumps(storage.raw_uri(lake, "Raw", "a")))
    assert below == "s3://bucket/folder/Raw/a"
    assert isinstance(below, LakeUri)
    log, spark = storage.delta_options(below), storage.spark_options(below)
    assert log is not None
    assert {name: log[name] for name in log if name.startswith("aws_")} == {
        "aws_endpoint_url": "http://h:9000",
        "aws_access_key_id": "id7",
        "aws_secret_access_key": "hush",
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
        "aws_conditional_put": "etag",
    }
    assert spark["fs.s3a.access.key"] == "id7"
    assert spark["fs.s3a.secret.key"] == "hush"
    assert spark["fs.s3a.endpoint"] == "http://h:9000"
    assert storage.spark_path(below) == "s3a://bucket/folder/Raw/a"


def test_no_repr_shows_a_setting(tmp_path: Path) -> None:
    pipeline = loaded(tmp_path, S3, {"SECRET": "hush"})
    assert "s3://bucket/folder" in repr(pipeline)
    assert "hush" not in repr(pipeline)
    assert "id7" not in repr(pipeline)


def test_what_the_file_leaves_out_comes_from_the_environment(tmp_path: Path) -> None:
    env = {
        "AWS_ACCESS_KEY_ID": "id8",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "AWS_SESSION_TOKEN": "t",
        "AWS_ENDPOINT_URL": "https://h",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }
    lake = loaded(tmp_path, "lake: s3://bucket", env).lake
    assert storage.settings(lake) == {
        "endpoint": "https://h",
        "region": "eu-west-1",
        "access-key-id": "id8",
        "secret-access-key": "hush",
        "session-token": "t",
    }


def test_other_stores_by_the_same_settings_and_by_names_of_delta_rs(tmp_path: Path) -> None:
    azure = loaded(
        tmp_path,
        "lake: {uri: abfss://c@acc.dfs.core.windows.net/x, account-key: a2V5, azure_storage_use_emulator: true}",
        {},
    ).lake
    options = storage.delta_options(azure)
    assert options is not None
    assert options["azure_storage_account_key"] == "a2V5"
    assert options["azure_storage_use_emulator"] == "true"
    assert storage.spark_options(azure) == {"fs.azure.account.key.acc.dfs.core.windows.net": "a2V5"}
    google = loaded(tmp_path, "lake: gs://bucket/x", {"GOOGLE_APPLICATION_CREDENTIALS": "/key.json"}).lake
    options = storage.delta_options(google)
    assert options is not None
    assert options["google_service_account"] == "/key.json"
    assert storage.spark_options(google)["fs.gs.auth.service.account.json.keyfile"] == "/key.json"


def test_spark_redacts_every_option_that_is_a_secret() -> None:
    redacted = re.compile(PINS["spark.sql.redaction.options.regex"])
    for kind in KINDS.values():
        for name, item in kind.settings.items():
            secret = name not in ("endpoint", "region", "account-name", "service-account")
            assert not item.hadoop or not secret or redacted.search(item.hadoop), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{endpoint: http://h}", "lake.uri: is missing"),
        ("{uri: s3://b, regoin: x}", "lake.regoin: is no setting of S3; .*did you mean `region`"),
        ("{uri: s3://b, endpoint: h}", "lake.endpoint: must begin with http:// or https://"),
        ("{uri: s3://b, access-key-id: k}", "lake.access-key-id: takes secret-access-key: beside it"),
        ("{uri: ./lake, region: x}", "lake.region: is a setting of an object store"),
        ("ftp://b/x", "lake: is in no kind of store that is known here"),
        ("./lake.yaml", "lake: is a file, or a path below one; name a folder"),
        ("./lake.yaml/x", "lake: is a file, or a path below one; name a folder"),
        ("[a]", "lake: must be a folder, a URI or a mapping"),
    ],
)
def test_an_error_names_the_key_and_the_cure(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PipelineFileError, match=message):
        loaded(tmp_path, f"lake: {text}", {})
