"""Every way into a registry, and what a network does to requests: a real registry behind a real server with TLS and logins."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import load_pem_x509_certificate

from zync_assets.errors import RegistryError, RegistryUnavailable, SchemaUnknown
from zync_assets.kafka.registry import Registry
from zync_assets.local.services import Services
from zync_assets.pipeline import RegistryConfig
from zync_assets_tests.network.certificates import Authority
from zync_assets_tests.network.front import Front, front

TABLE = "table: ways into the registry: accepted, wrong secret, wrong CA, wrong host"
SECRET = "registry-secret"
BASIC = "Basic " + base64.b64encode(f"zync:{SECRET}".encode()).decode()
SCHEMA = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]})
WAYS: dict[str, tuple[str | None, dict[str, str]]] = {
    "TLS": (None, {}),
    "TLS, basic auth": (BASIC, {"basic.auth.user.info": f"zync:{SECRET}"}),
    "TLS, bearer token": (f"Bearer {SECRET}", {"bearer.auth.token": SECRET}),
}
"""Way → what the server wants, and what the pipeline's ``registry:`` says."""


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """The authority that signed the registry's certificate, and a foreign authority."""
    folder = tmp_path_factory.mktemp("certificates")
    return Authority(folder, "authority"), Authority(folder, "stranger")


@pytest.fixture
def plain(services: Services) -> Iterator[Front]:
    """The server without TLS."""
    with front(services.registry_url) as made:
        yield made


def registry(url: str, **properties: str) -> Registry:
    """A client that waits a little only."""
    hasty = {"retries.wait.ms": "5", "max.retries": "2"}
    return Registry(
        RegistryConfig(url, {**hasty, **{name.replace("_", "."): value for name, value in properties.items()}})
    )


def refused(config: RegistryConfig, words: str) -> str:
    with pytest.raises(RegistryError) as caught:
        Registry(config).subjects()
    assert not isinstance(caught.value, RegistryUnavailable)
    assert words in str(caught.value)
    assert SECRET not in str(caught.value) and "wrong-secret" not in str(caught.value)
    return "refused"


@pytest.mark.parametrize("name", WAYS)
def test_a_way_into_the_registry(
    services: Services, authorities: tuple[Authority, Authority], unique: str, name: str, record_property: Any
) -> None:
    ours, stranger = authorities
    wanted, login = WAYS[name]
    with front(services.registry_url, ours.server("registry", "127.0.0.1")) as server:
        server.wanted = wanted
        trust = {"ssl.ca.location": str(ours.path)}
        client = Registry(RegistryConfig(server.url, {**trust, **login}))
        assert json.loads(client.schema(client.register(unique, SCHEMA))) == json.loads(SCHEMA)
        row = ["accepted"]

        wrong = {property: value.replace(SECRET, "wrong-secret") for property, value in login.items()}
        config = RegistryConfig(server.url, {**trust, **wrong})
        row.append(
            refused(config, f"refused the login (HTTP status 401): listing subjects; check {next(iter(login))}")
            if login
            else "-"
        )
        other = RegistryConfig(server.url, {**login, "ssl.ca.location": str(stranger.path)})
        row.append(refused(other, f"not signed by the CA in ssl.ca.location ({stranger.path})"))
        elsewhere = RegistryConfig(server.url.replace("127.0.0.1", "localhost"), {**trust, **login})
        row.append(refused(elsewhere, "is for another host: it is for 127.0.0.1; write a name"))
    record_property(TABLE, " | ".join([name, *row]))


def test_mutual_tls(services: Services, authorities: tuple[Authority, Authority], record_property: Any) -> None:
    ours, stranger = authorities
    with front(services.registry_url, ours.server("registry", "127.0.0.1"), str(ours.path)) as server:
        rows: list[str] = []
        for issuer in (ours, stranger):
            client = issuer.client("client")
            files = {"ssl.certificate.location": str(client.certificate), "ssl.key.location": str(client.key)}
            config = RegistryConfig(server.url, {"ssl.ca.location": str(ours.path), **files})
            if issuer is ours:
                assert isinstance(Registry(config).subjects(), list)
                rows.append("accepted")
            else:
                rows.append(refused(config, "refused this client's certificate"))
    record_property(TABLE, " | ".join(["mutual TLS", *rows, "-", "-"]))


def test_a_login_that_is_wanted_and_not_given_is_named(plain: Front) -> None:
    plain.wanted = BASIC
    with pytest.raises(RegistryError, match=r"set basic\.auth\.user\.info or bearer\.auth\.token"):
        registry(plain.url).subjects()


def test_a_login_in_the_address_is_used_and_never_logged(plain: Front, caplog: pytest.LogCaptureFixture) -> None:
    plain.wanted = BASIC
    with caplog.at_level(logging.DEBUG):
        registry(plain.url.replace("://", f"://zync:{SECRET}@")).subjects()
    assert caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_followed_with_what_was_posted(plain: Front, unique: str, status: int) -> None:
    plain.moves.append(f"{status} {plain.url}")
    client = registry(plain.url)
    id = client.register(unique, SCHEMA)
    assert plain.asked == [f"POST /subjects/{unique}/versions?normalize=False"] * 2
    assert id == registry(plain.url).register(unique, SCHEMA)


def test_a_redirect_to_another_host_takes_no_login_along(services: Services, plain: Front) -> None:
    with front(services.registry_url) as other:
        other.wanted = BASIC
        plain.moves.append(f"307 {other.url}")
        with pytest.raises(RegistryError, match="HTTP status 401"):
            registry(plain.url, basic_auth_user_info=f"zync:{SECRET}").subjects()
        assert len(other.asked) == 1


def test_a_redirect_to_https_is_verified(
    services: Services, plain: Front, authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of an http address has no authorities before the redirect."""
    ours, stranger = authorities
    with front(services.registry_url, ours.server("registry", "127.0.0.1")) as secure:
        for authority, words in ((stranger, "is not signed by a CA that this machine knows"), (ours, None)):
            monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
            plain.moves.append(f"307 {secure.url}")
            if words is None:
                assert isinstance(registry(plain.url).subjects(), list)
            else:
                refused(RegistryConfig(plain.url, {}), words)


@pytest.mark.parametrize("trusted", ["file", "folder", "list"])
def test_a_redirect_to_https_trusts_whom_a_client_of_the_https_address_trusts(
    services: Services,
    plain: Front,
    authorities: tuple[Authority, Authority],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trusted: str,
) -> None:
    """SSL_CERT_FILE alone, else SSL_CERT_DIR, else the list of certifi, wherever OpenSSL looks."""
    ours, stranger = authorities
    (tmp_path / "with").mkdir()
    # OpenSSL looks for a file by the hash of the subject, without the head of its DER sequence.
    subject = load_pem_x509_certificate(ours.path.read_bytes()).subject.public_bytes()[2:]
    number = int.from_bytes(hashlib.sha1(subject, usedforsecurity=False).digest()[:4], "little")
    (tmp_path / "with" / f"{number:08x}.0").write_bytes(ours.path.read_bytes())
    variables = {
        "file": {"SSL_CERT_FILE": str(stranger.path), "SSL_CERT_DIR": str(tmp_path / "with")},
        "folder": {"SSL_CERT_FILE": "", "SSL_CERT_DIR": str(tmp_path / "with")},
        "list": {"SSL_CERT_FILE": "", "SSL_CERT_DIR": ""},
    }
    for name, value in variables[trusted].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("certifi.where", lambda: str(ours.path))
    with front(services.registry_url, ours.server("registry", "127.0.0.1")) as secure:
        plain.moves.append(f"307 {secure.url}")
        for url in (secure.url, plain.url):
            if trusted == "file":
                refused(RegistryConfig(url, {}), "is not signed by a CA that this machine knows")
            else:
                assert isinstance(registry(url).subjects(), list)


def test_redirects_in_a_circle_end(plain: Front) -> None:
    plain.moves.extend([f"302 {plain.url}"] * 40)
    with pytest.raises(RegistryError, match="redirects in a circle"):
        registry(plain.url).subjects()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(plain: Front, status: int) -> None:
    plain.moves.extend([status, status])
    assert isinstance(registry(plain.url).subjects(), list)
    assert len(plain.asked) == 3


def test_an_id_that_one_of_several_servers_does_not_know_yet_is_asked_for_again(plain: Front, unique: str) -> None:
    """Its records would go into quarantine, and a replay would put them after the later ones."""
    id = registry(plain.url).register(unique, SCHEMA)
    plain.asked.clear()
    plain.moves.extend(["unknown"] * 2)
    assert json.loads(registry(plain.url).schema(id)) == json.loads(SCHEMA)
    assert len(plain.asked) == 3


def test_an_unknown_id_is_waited_for_as_long_as_the_settings_say(plain: Front) -> None:
    """A wait of chance would put the records of a server that lags into quarantine at times."""
    client, begin = registry(plain.url, max_retries="3", retries_wait_ms="200"), time.monotonic()
    with pytest.raises(SchemaUnknown):
        client.schema(987654321)
    assert time.monotonic() - begin >= 0.2 + 0.4 + 0.8


def test_ids_that_stay_unknown_are_waited_for_once(plain: Front) -> None:
    client = registry(plain.url)
    for number, most in ((987654321, 3), (987654322, 4)):
        with pytest.raises(SchemaUnknown, match=str(number)):
            client.schema(number)
        assert len(plain.asked) == most


def test_a_registry_that_stays_out_is_unavailable(plain: Front) -> None:
    plain.moves.extend([503] * 3)
    with pytest.raises(RegistryUnavailable, match="could not answer: listing subjects"):
        registry(plain.url).subjects()
    assert not plain.moves


@pytest.mark.parametrize("answer", [b"{}", b"null", b"[]", b"<html>", b'{"x": 1}'])
def test_an_answer_that_is_not_a_registry_s_is_refused(plain: Front, unique: str, answer: bytes) -> None:
    client, words = registry(plain.url), r"the answer is not one of a registry; check `registry:`"
    id = client.register(unique, SCHEMA)
    plain.moves.extend([answer] * 3)
    with pytest.raises(RegistryError, match=rf"registering subject {unique}-2: {words}"):
        registry(plain.url).register(f"{unique}-2", SCHEMA)
    with pytest.raises(RegistryError, match=rf"schema id {id}: {words}"):
        client.schema(id)
    # The answer was not kept.
    assert json.loads(client.schema(id)) == json.loads(SCHEMA)


def test_a_right_that_the_login_lacks_is_named_in_the_registry_s_words(plain: Front) -> None:
    plain.moves.append(403)
    with pytest.raises(RegistryError, match=r"refused: listing subjects: .*; give the login of registry the right"):
        registry(plain.url).subjects()


def test_a_registry_that_says_nothing_is_given_up_and_asked_again(plain: Front) -> None:
    plain.moves.append("hang")
    assert isinstance(registry(plain.url, timeout="0.5").subjects(), list)
    assert len(plain.asked) == 2
    plain.moves.append("hang")
    with pytest.raises(RegistryUnavailable, match="or give a slow registry a longer timeout"):
        registry(plain.url, timeout="0.2", max_retries="0").subjects()


def test_a_refusal_is_not_tried_again(plain: Front) -> None:
    plain.wanted = BASIC
    with pytest.raises(RegistryError):
        registry(plain.url).subjects()
    assert len(plain.asked) == 1


def test_a_schema_is_asked_for_once(plain: Front, unique: str) -> None:
    id = registry(plain.url).register(unique, SCHEMA)
    plain.asked.clear()
    for _ in range(3):
        assert json.loads(registry(plain.url).schema(id)) == json.loads(SCHEMA)
    assert len(plain.asked) == 1


def test_a_schema_is_asked_for_anew_once_by_an_object(plain: Front, unique: str) -> None:
    id = registry(plain.url).register(unique, SCHEMA)
    registry(plain.url).schema(id)
    plain.asked.clear()
    other = registry(plain.url)
    assert [json.loads(other.schema(id, anew)) for anew in (True, True, False)] == [json.loads(SCHEMA)] * 3
    assert len(plain.asked) == 1


def test_a_property_that_a_library_repeats_is_hidden() -> None:
    with pytest.raises(RegistryError) as caught:
        Registry(RegistryConfig(f"http://127.0.0.1:1,zync:{SECRET}@elsewhere")).subjects()
    assert SECRET not in str(caught.value)
