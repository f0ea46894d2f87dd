"""Tables in a bucket of a real S3 server. Of two writers, one commits. The error for a refusal names the cure."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zync_assets.errors import CommitConflict, LakeError, LakeUnavailable
from zync_assets.lake import compaction, storage, stores, tables
from zync_assets.lake.readings import Reading, TopicEnds, keep_reading, read_readings
from zync_assets.local.processes import free_port
from zync_assets.pipeline import LakeUri
from zync_assets_tests.lake.rows import SCHEMA, file, records
from zync_assets_tests.s3 import S3, read_only

WRITERS = 6


def place(s3: S3, path: str, **changed: str) -> LakeUri:
    return LakeUri(
        f"s3://{path}", {**s3.settings, **{name.replace("_", "-"): value for name, value in changed.items()}}
    )


def written(uri: str, *offsets: int) -> list[tables.DataFile]:
    return [file(uri, records(offsets))]


def test_a_place_where_no_folder_can_be_made_is_named_with_its_cure() -> None:
    text = "[Errno 2] Cannot create directory '/proc/lake'. Detail: [errno 2] No such file or directory"
    refusal = stores.disk_refusal("lake /proc/lake", text)
    assert str(refusal).startswith("lake /proc/lake: no folder can be made there. Name another folder, and run again")
    text = "[TASK_WRITE_FAILED] Task failed ...\nCaused by: java.io.IOException: Mkdirs failed to create file:/lake/state-0"
    refusal = stores.disk_refusal("the lake, or Spark's own folder", text)
    assert "no folder can be made there: it is read-only, or this user may not write." in str(refusal)


@pytest.mark.parametrize("lake", ["folder", "bucket"])
def test_of_writers_that_create_or_commit_at_once_one_wins(s3: S3, tmp_path: Path, unique: str, lake: str) -> None:
    """There is no lock table: the conditional put of the log entry decides (in a folder, the exclusive creation of a file)."""
    uri = place(s3, f"lakes/{unique}/table") if lake == "bucket" else str(tmp_path / "table")

    def create(number: int) -> bool:
        try:
            tables.create_table(uri, SCHEMA, "", written(uri, number), {"next": number})
        except CommitConflict:
            return False
        return True

    def commit(opened: tables.LakeTable) -> bool:
        try:
            tables.commit(opened, written(uri, 100), {"next": 101})
        except CommitConflict:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        assert sum(pool.map(create, range(WRITERS))) == 1
        opened = [tables.open_table(uri) for _ in range(WRITERS)]
        assert sum(pool.map(commit, [found for found in opened if found])) == 1
    found = tables.open_table(uri)
    assert found is not None
    assert found.number("next") == 101
    assert sum(item.records for item in found.files) == 2


def test_readings_of_ends_are_kept_in_a_bucket(s3: S3, unique: str) -> None:
    uri = place(s3, f"lakes/{unique}")
    found = [Reading(at, at, {"a": TopicEnds("id", {0: end})}) for at, end in ((1.0, 7), (5.0, 9))]
    for item in found:
        keep_reading(uri, "Raw", item, 1)
    assert read_readings(uri, "Raw") == found


def test_what_no_commit_names_is_cleaned_away_in_a_bucket_too(
    s3: S3, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "RETENTION_HOURS", 0)
    uri = place(s3, f"lakes/{unique}/table")
    tables.create_table(uri, SCHEMA, "", written(uri, 1), {})
    [orphan] = written(uri, 2)
    opened = tables.open_table(uri)
    assert opened is not None
    time.sleep(1.1)  # a store knows a file's age in seconds
    assert compaction.clean(opened) == [orphan.path]
    assert storage.list_files(uri, ".parquet") == [item.path for item in opened.files]


@pytest.fixture
def table(s3: S3, unique: str) -> LakeUri:
    uri = place(s3, f"lakes/{unique}/table")
    tables.create_table(uri, SCHEMA, "", written(uri, 1), {})
    return uri


def test_a_bucket_that_is_not_there(s3: S3) -> None:
    uri = place(s3, "nowhere/lake")
    cure = rf"lake s3://nowhere.*: there is no bucket nowhere at {s3.endpoint}. Create it"
    with pytest.raises(LakeError, match=cure):
        tables.open_table(uri)
    with pytest.raises(LakeError, match=cure):
        written(uri, 1)


@pytest.mark.parametrize("changed", [{"secret_access_key": "wrong-hush"}, {"access_key_id": "someone"}])
def test_wrong_credentials(s3: S3, table: LakeUri, changed: dict[str, str]) -> None:
    uri = place(s3, table.removeprefix("s3://"), **changed)
    for use in (lambda: tables.open_table(uri), lambda: written(uri, 2)):
        with pytest.raises(
            LakeError, match=r"does not know the credentials \(\w+\). Correct the keys of lake:"
        ) as error:
            use()
        assert s3.secret not in str(error.value)
        assert "wrong-hush" not in str(error.value)
        assert "Signature:" not in str(error.value)
        assert error.value.__cause__ is None


def test_no_right_to_write(s3: S3, table: LakeUri) -> None:
    with read_only(s3) as sealed:
        uri = place(sealed, table.removeprefix("s3://"))
        opened = tables.open_table(uri)
        assert opened is not None
        with pytest.raises(LakeError, match=r"does not let these credentials do that .*read, write and delete"):
            written(uri, 2)
        with pytest.raises(LakeError, match="does not let these credentials do that"):
            tables.commit(opened, [], {"next": 1})


def test_a_store_that_is_down(s3: S3, unique: str) -> None:
    uri = place(s3, f"lakes/{unique}", endpoint=f"http://127.0.0.1:{free_port()}", max_retries="1")
    with pytest.raises(LakeUnavailable, match=r"no answer from the store at http.*run again when it is up"):
        tables.open_table(uri)


@pytest.mark.parametrize(
    "text",
    [
        "Generic S3 error: Server returned non-2xx status code: 503 Service Unavailable: <Code>SlowDown</Code>",
        "Generic S3 error: 500 Internal Server Error: <Error><Code>InternalError</Code></Error>",
        "AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7",
    ],
)
def test_a_store_in_trouble_is_one_that_may_answer_later(text: str) -> None:
    assert isinstance(stores.refusal("s3://bucket/lake", {}, OSError(text)), LakeUnavailable)


def test_a_store_that_does_not_answer_spark_may_answer_later() -> None:
    away = (
        "org.apache.hadoop.fs.s3a.AWSClientIOException: getFileStatus on s3a://bucket/x: Unable to execute HTTP request"
    )
    assert stores.no_answer(away) is not None
    assert stores.no_answer(f"{away}: no providers in chain") is None
    assert stores.no_answer("java.net.ConnectException: Connection refused") is None


def test_a_file_that_is_not_there_is_no_failing_store(table: LakeUri) -> None:
    system, path = storage.filesystem(storage.join(table, "nothing.parquet"))
    with pytest.raises(FileNotFoundError):
        pq.ParquetFile(path, filesystem=system)
    with pytest.raises(LakeError, match="is not there"):
        storage.file_size(storage.join(table, "nothing.parquet"))


def test_rows_come_back_as_they_were_written(s3: S3, unique: str) -> None:
    uri = place(s3, f"lakes/{unique}/table")
    [item] = written(uri, 3, 4, 7)
    system, path = storage.filesystem(storage.join(uri, item.path))
    assert pq.ParquetFile(path, filesystem=system).read().equals(pa.Table.from_batches([records([3, 4, 7])]))
    assert Path(s3.folder, uri.removeprefix("s3://"), item.path).stat().st_size == item.size


@pytest.fixture
def asked() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A server that knows nobody: its address, and the path and authorization of each request."""
    seen: list[tuple[str, str]] = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization", "")))
            body = b"<?xml version='1.0'?><Error><Code>AuthenticationFailed</Code><Message>no</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


def test_an_azure_lake_asks_its_container_with_its_key(asked: tuple[str, list[tuple[str, str]]]) -> None:
    endpoint, seen = asked
    settings = {
        "account-name": "acc",
        "account-key": base64.b64encode(b"hush" * 8).decode(),
        "azure_storage_endpoint": endpoint,
        "allow_http": "true",
    }
    uri = LakeUri("abfss://box@acc.dfs.core.windows.net/lake/Raw", settings)
    with pytest.raises(LakeError, match=r"does not know the credentials \(AuthenticationFailed\)") as error:
        tables.open_table(uri)
    assert "box" in seen[0][0]
    assert "lake%2FRaw" in seen[0][0] or "lake/Raw" in seen[0][0]
    assert seen[0][1].startswith("SharedKey acc:")
    assert settings["account-key"] not in str(error.value)


def test_a_google_lake_asks_its_bucket_with_its_service_account(
    asked: tuple[str, list[tuple[str, str]]], tmp_path: Path
) -> None:
    endpoint, seen = asked
    account = {
        "gcs_base_url": endpoint,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    path = tmp_path / "key.json"
    path.write_text(json.dumps(account))
    uri = LakeUri("gs://box/lake/Raw", {"service-account": str(path), "allow_http": "true"})
    with pytest.raises(LakeError, match=r"lake gs://box"):
        tables.open_table(uri)
    assert "box" in seen[0][0]
