"""``oauth_cb``: a function's token is what the broker is shown; Amazon MSK's signer, with a stand-in for AWS's library."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from zync_assets.errors import AuthenticationFailed, PipelineFileError, SetupError
from zync_assets.kafka.client import Connection
from zync_assets.kafka.topics import create_topic
from zync_assets.pipeline_file import load
from zync_assets_tests.network.secured import Secured

SIGNER = "aws_msk_iam_sasl_signer"


@pytest.fixture
def msk(secured: Secured) -> dict[str, str]:
    """The ``kafka:`` of a pipeline on MSK, with the address and the CA of this broker."""
    way = secured.ways["OAUTHBEARER"]
    kept = ("bootstrap.servers", "security.protocol", "sasl.mechanism", "ssl.ca.location")
    return {
        **{name: way[name] for name in kept},
        "oauth_cb": "zync_assets.kafka.msk_iam:token",
        "sasl.oauthbearer.config": "region=eu-central-1",
    }


@pytest.fixture
def signed(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A stand-in for AWS's signer that makes tokens which this broker takes; the regions that it was asked for."""
    regions: list[str] = []

    def generate_auth_token(region: str) -> tuple[str, int]:
        regions.append(region)
        return secured.tokens.token(), int((time.time() + 900) * 1000)

    module = ModuleType(SIGNER)
    module.__dict__["MSKAuthTokenProvider"] = SimpleNamespace(generate_auth_token=generate_auth_token)
    monkeypatch.setitem(sys.modules, SIGNER, module)
    yield regions


@pytest.mark.slow
def test_msks_token_is_what_the_broker_is_shown(
    msk: Mapping[str, str], signed: list[str], unique: str, secured: Secured
) -> None:
    before = len(secured.tokens.issued)
    create_topic({**msk, "client.id": unique}, unique, 1, 1, {})
    assert set(signed) == {"eu-central-1"}
    assert len(secured.tokens.issued) - before == len(signed)


def test_a_token_that_the_broker_did_not_sign_up_to_is_refused(
    msk: Mapping[str, str], signed: list[str], monkeypatch: pytest.MonkeyPatch, secured: Secured, unique: str
) -> None:
    forged = secured.tokens.token()[:-8] + "AAAAAAAA"
    monkeypatch.setattr(secured.tokens, "token", lambda: forged)
    with pytest.raises(AuthenticationFailed, match=r"authentication \(OAUTHBEARER\) failed.*msk_iam:token") as caught:
        create_topic({**msk, "client.id": unique}, unique, 1, 1, {})
    assert forged not in str(caught.value)


def test_the_signer_is_optional_and_named_where_it_is_missing(msk: Mapping[str, str]) -> None:
    with pytest.raises(SetupError, match=r"pip install 'zync-assets\[msk\]'"):
        Connection(msk, {})
    with pytest.raises(SetupError, match="region"):
        Connection({**msk, "sasl.oauthbearer.config": ""}, {})


def broken(config: str) -> tuple[str, float]:
    raise ValueError(f"no token with {config}")


def test_a_function_that_fails_is_named_at_once_without_its_words(msk: Mapping[str, str]) -> None:
    with pytest.raises(AuthenticationFailed, match=r"test_client_tokens:broken made no token \(ValueError\)") as caught:
        Connection({**msk, "oauth_cb": f"{__name__}:broken", "sasl.oauthbearer.config": "key=hidden"}, {})
    assert "hidden" not in str(caught.value)
    for name in ("zync_assets.kafka.msk_iam:nothing", "no.such.module:token"):
        with pytest.raises(SetupError, match="module:function"):
            Connection({**msk, "oauth_cb": name}, {})
    with pytest.raises(
        SetupError, match=r"aws_iam is a setting of confluent-kafka's clients.*oauth_cb: module:function"
    ):
        Connection({"sasl.oauthbearer.metadata.authentication.type": "aws_iam"}, {})


def test_the_setting_travels_to_a_worker(msk: Mapping[str, str]) -> None:
    assert pickle.loads(pickle.dumps(msk)) == msk


def test_the_pipeline_file_wants_a_name(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("kafka: {oauth_cb: token}\n")
    with pytest.raises(PipelineFileError, match="oauth_cb: must name a function"):
        load(path)
