"""A real broker with a listener for each login mechanism, and the client's settings for each listener."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from zync_assets.local.processes import free_ports
from zync_assets.local.services import Services, down, up
from zync_assets_tests.network.certificates import Authority
from zync_assets_tests.network.tokens import AUDIENCE, CLIENT, ISSUER, Tokens, token_server

USER = "zync"
LIMITED = ("reader", "rules", "publisher", "owner", "watcher", "auditor", "source")
"""Users that may do what ACLs allow, where all others may do everything; they come in by the listener BARE."""
LISTENERS = {
    "TLS": "SSL",
    "MUTUAL": "SSL",
    "PLAIN": "SASL_SSL",
    "SCRAM": "SASL_SSL",
    "OAUTH": "SASL_SSL",
    "BARE": "SASL_PLAINTEXT",
}
"""Listener → Kafka's protocol. BARE is SASL PLAIN without TLS; SCRAM takes both lengths."""
LOGIN = "org.apache.kafka.common.security"


@dataclass(frozen=True)
class Secured:
    """The broker. ``ways``: mechanism → the ``kafka:`` properties that the listener accepts."""

    services: Services
    ports: Mapping[str, int]
    ways: Mapping[str, Mapping[str, str]]
    secret: str
    authority: Authority
    stranger: Authority
    tokens: Tokens
    folder: Path


def _jaas(module: str, **options: str) -> str:
    given = "".join(f' {name}="{value}"' for name, value in options.items())
    return f"{LOGIN}.{module} required{given};"


def broker_properties(
    ports: Mapping[str, int], store: Path, authority: Path, secret: str, tokens: Tokens
) -> dict[str, str]:
    """The listeners' settings, to be added to those of a local broker."""
    return {
        "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
        "advertised.listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in LISTENERS.items()),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(store),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority),
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.plain.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.plain.plain.sasl.jaas.config": _jaas("plain.PlainLoginModule", **{f"user_{USER}": secret}),
        "listener.name.bare.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.bare.plain.sasl.jaas.config": _jaas(
            "plain.PlainLoginModule", **{f"user_{name}": secret for name in (USER, *LIMITED)}
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:{USER};User:CN=client;User:{CLIENT}",
        "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.scram.scram-sha-256.sasl.jaas.config": _jaas("scram.ScramLoginModule"),
        "listener.name.scram.scram-sha-512.sasl.jaas.config": _jaas("scram.ScramLoginModule"),
        "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.oauth.oauthbearer.sasl.jaas.config": _jaas("oauthbearer.OAuthBearerLoginModule"),
        "listener.name.oauth.oauthbearer.sasl.server.callback.handler.class": (
            f"{LOGIN}.oauthbearer.OAuthBearerValidatorCallbackHandler"
        ),
        "listener.name.oauth.oauthbearer.sasl.oauthbearer.jwks.endpoint.url": f"{tokens.url}/keys",
        "listener.name.oauth.oauthbearer.sasl.oauthbearer.expected.audience": AUDIENCE,
        "listener.name.oauth.oauthbearer.sasl.oauthbearer.expected.issuer": ISSUER,
    }


def client_properties(
    ports: Mapping[str, int], authority: Authority, secret: str, tokens: Tokens
) -> dict[str, dict[str, str]]:
    """Mechanism → what a client says to be let in."""
    client = authority.client("client")
    trust = {"ssl.ca.location": str(authority.path)}

    def way(listener: str, **properties: str) -> dict[str, str]:
        protocol = LISTENERS[listener]
        named = {name.replace("_", "."): value for name, value in properties.items()}
        secure = trust if protocol.endswith("SSL") else {}
        return {"bootstrap.servers": f"127.0.0.1:{ports[listener]}", "security.protocol": protocol, **secure, **named}

    user = {"sasl_username": USER, "sasl_password": secret}
    return {
        "SSL": way("TLS"),
        "mutual TLS": way("MUTUAL", ssl_certificate_location=str(client.certificate), ssl_key_location=str(client.key)),
        "SASL PLAIN, no TLS": way("BARE", sasl_mechanism="PLAIN", **user),
        "SASL PLAIN": way("PLAIN", sasl_mechanism="PLAIN", **user),
        "SCRAM-SHA-256": way("SCRAM", sasl_mechanism="SCRAM-SHA-256", **user),
        "SCRAM-SHA-512": way("SCRAM", sasl_mechanism="SCRAM-SHA-512", **user),
        "OAUTHBEARER": way(
            "OAUTH",
            sasl_mechanism="OAUTHBEARER",
            sasl_oauthbearer_method="oidc",
            sasl_oauthbearer_client_id=CLIENT,
            sasl_oauthbearer_client_secret=tokens.secret,
            sasl_oauthbearer_token_endpoint_url=f"{tokens.url}/token",
        ),
    }


@pytest.fixture(scope="session")
def secured() -> Iterator[Secured]:
    """The broker, for the whole run of this process."""
    secret = "pass-" + secrets.token_hex(8)
    with token_server() as tokens, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority, stranger = Authority(folder, "authority"), Authority(folder, "stranger")
        # For this address alone: the same broker is called localhost by who has the wrong name.
        store = authority.server("broker", "127.0.0.1").both
        ports = dict(zip(LISTENERS, free_ports(len(LISTENERS)), strict=True))
        properties = broker_properties(ports, store, authority.path, secret, tokens)
        try:
            with pytest.MonkeyPatch.context() as patch:
                # Kafka asks only addresses that its command line allows.
                patch.setenv("JDK_JAVA_OPTIONS", f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={tokens.url}/keys")
                services = up(folder / "services", broker_properties=properties)
            _add_users(services, secret)
            ways = {
                "PLAINTEXT": {"bootstrap.servers": services.bootstrap_servers},
                **client_properties(ports, authority, secret, tokens),
            }
            yield Secured(services, ports, ways, secret, authority, stranger, tokens, folder)
        finally:
            down(folder / "services", clean=True)


def _add_users(services: Services, secret: str) -> None:
    admin = AdminClient({"bootstrap.servers": services.bootstrap_servers})
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        wanted = UserScramCredentialUpsertion(USER, ScramCredentialInfo(mechanism, 4096), secret.encode())
        admin.alter_user_scram_credentials([wanted])[USER].result(20)
