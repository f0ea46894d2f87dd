"""Which side does not trust the other, and why: librdkafka's reports as errors with a cure.

librdkafka goes on trying whatever the reason; these reasons do not pass by themselves. Codes alone don't tell: a
certificate that was refused comes as ``_SSL`` and as ``_TRANSPORT``, a token endpoint that is down as ``_AUTHENTICATION``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from confluent_kafka import KafkaError as ClientError

from zync_assets.errors import AuthenticationFailed, CertificateRejected, TrustError
from zync_assets.tls import certificate_fault

_LOGIN = frozenset(
    {
        ClientError._AUTHENTICATION,
        ClientError.SASL_AUTHENTICATION_FAILED,
        ClientError.UNSUPPORTED_SASL_MECHANISM,
    }
)
_BAD_SERVER = "certificate verify failed"
_BAD_CLIENT = re.compile(r"SSL alert number (42|43|44|45|46|48|116)\b")
"""Alerts about the certificate that the peer was shown, or was not (RFC 8446, section 6.2)."""
_TOKEN = "Failed to acquire SASL OAUTHBEARER token"
_OUTAGE = re.compile(r"connect to|resolve|timed? ?out|HTTP (response code )?5\d\d|Connection re", re.IGNORECASE)
_PLACE = re.compile(r"^\w+://(?P<host>[^/\s]+):(?P<port>\d+)/\S+: ")
_STATE = re.compile(r" \(after \d+ms in state \w+\)")
_PREFIX = re.compile(r"^(SASL authentication error: )?(Authentication failed: )?")


def is_refusal(error: ClientError) -> bool:
    """Whether one side refused the other, so that trying again with the same settings won't help."""
    text = error.str()
    if text.startswith(_TOKEN):
        return not _OUTAGE.search(text)
    return error.code() in _LOGIN or _BAD_SERVER in text or bool(_BAD_CLIENT.search(text))


def trust_error(error: ClientError, kafka: Mapping[str, str], servers: str, doing: str) -> TrustError:
    """The refusal ``error`` as an error that says which; may look at the broker's certificate once more."""
    text = error.str()
    place = _PLACE.match(text)
    at = f"{place['host']}:{place['port']}" if place else servers
    if _BAD_SERVER in text:
        return CertificateRejected(f"{doing}: {_server_fault(kafka, at)}")
    if _BAD_CLIENT.search(text):
        return AuthenticationFailed(f"{doing}: {_client_fault(kafka, at)}")
    words = _PREFIX.sub("", _STATE.sub("", _PLACE.sub("", text))).rstrip(".")
    name = _first(kafka, "sasl.mechanism", "sasl.mechanisms") or "SASL"
    return AuthenticationFailed(
        f"{doing}: authentication ({name}) failed at {at}: {words}; {_login_cure(kafka, name, words)}"
    )


def _server_fault(kafka: Mapping[str, str], at: str) -> str:
    host, _, port = at.split(",")[0].rpartition(":")
    ca = _first(kafka, "ssl.ca.location", "ssl.ca.pem")
    fault = certificate_fault(host, int(port), ca, "ssl.ca.location", "bootstrap.servers") if port.isdecimal() else None
    return fault or (
        f"the certificate of {at} could not be verified; check ssl.ca.location, and that the certificate is for this host"
    )


def _client_fault(kafka: Mapping[str, str], at: str) -> str:
    if _first(kafka, "ssl.certificate.location", "ssl.certificate.pem", "ssl.keystore.location"):
        return (
            f"authentication (mutual TLS) failed at {at}: the broker refused this client's certificate; set"
            " ssl.certificate.location and ssl.key.location to one that a CA of the broker's signed and that has not expired"
        )
    return (
        f"authentication (mutual TLS) failed at {at}: the broker wants a client's certificate; set"
        " ssl.certificate.location and ssl.key.location"
    )


def _login_cure(kafka: Mapping[str, str], name: str, words: str) -> str:
    if "echanism" in words and "nsupported" in words:
        return "set sasl.mechanism to one that the listener has"
    if name.upper() != "OAUTHBEARER":
        return "check sasl.username and sasl.password"
    if kafka.get("oauth_cb"):
        return f"check what {kafka['oauth_cb']} makes its token of"
    return (
        "check sasl.oauthbearer.client.id, sasl.oauthbearer.client.secret, sasl.oauthbearer.token.endpoint.url and"
        " sasl.oauthbearer.scope"
    )


def _first(kafka: Mapping[str, str], *names: str) -> str | None:
    return next((kafka[name] for name in names if kafka.get(name)), None)
