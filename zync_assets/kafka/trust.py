"""Errors of TLS and of logins at brokers: which side does not trust the other, the reason, and the cure.

The libraries below say "certificate verify failed" for every reason. OpenSSL knows the reason (``X509_V_ERR_*``), and Python's
``ssl`` passes it on as ``verify_code``.

librdkafka tries again after each of these errors, but their reasons do not pass by themselves. The code of an error is not
enough to find the reason. A refused certificate comes as ``_SSL`` or as ``_TRANSPORT``. A token endpoint that is down comes as
``_AUTHENTICATION``.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError as ClientError

from zync_assets.errors import AuthenticationFailed, CertificateRejected, TrustError

SECONDS = 3.0
"""How long a look at a server may take."""

_HOST_MISMATCH = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_TIMES = {9: "is not valid yet", 10: "has expired"}  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_UNKNOWN_ISSUER = frozenset({18, 19, 20, 21})  # self-signed, or an issuer that is in no list of trusted ones


NO_AUTHORITIES = str(Path(__file__).parent)
"""A folder without certificates. The machine's list of authorities takes up to 40 ms of CPU time to read."""


def load_authorities(context: ssl.SSLContext, response: Any) -> None:
    """Read the machine's authorities before a client without any follows a redirect to https. ``response``: of httpx.

    They are those that the client reads for an address of https: OpenSSL's own list may be elsewhere, or empty.
    """
    is_to_tls = response.has_redirect_location and response.headers["location"].lower().startswith("https:")
    if not is_to_tls or context.cert_store_stats()["x509"]:
        return
    if file := os.environ.get("SSL_CERT_FILE"):
        context.load_verify_locations(cafile=file)
    elif folder := os.environ.get("SSL_CERT_DIR"):
        context.load_verify_locations(capath=folder)
    else:
        import certifi

        context.load_verify_locations(cafile=certifi.where())


def missing_file(properties: Mapping[str, str]) -> str | None:
    """The first property that names a file that is not there, with the cure. Libraries give OpenSSL's code, or no name."""
    for name, path in properties.items():
        if name.endswith(".location") and path and not Path(path).exists():
            return f"{name}: there is no {path}; correct the path"
    return None


def certificate_fault(host: str, port: int, ca: str | None, ca_name: str, address_name: str) -> str | None:
    """The fault of the certificate at ``host:port``, with the cure; None for a valid certificate or without an answer.

    ``ca``: a file or a folder of trusted certificates, or PEM text, or None for the system's. ``ca_name`` and
    ``address_name``: the names of the settings that hold ``ca`` and the address.
    """
    try:
        trust = _trust(ca)
        with socket.create_connection((host, port), SECONDS) as plain, trust.wrap_socket(plain, server_hostname=host):
            return None
    except ssl.SSLCertVerificationError as error:
        return explanation(error, host, port, ca, ca_name, address_name)
    except (OSError, ValueError):
        return None


def explanation(
    error: ssl.SSLCertVerificationError, host: str, port: int, ca: str | None, ca_name: str, address_name: str
) -> str:
    """As ``certificate_fault``, for an error that has occurred."""
    if error.verify_code in _HOST_MISMATCH:
        names = _names(host, port, ca)
        hosts = f": it is for {', '.join(names)}" if names else ""
        return (
            f"the certificate of {host}:{port} is for another host{hosts}; write a name that the certificate has in"
            f" {address_name}, or give the server a certificate for {host}"
        )
    if error.verify_code in _UNKNOWN_ISSUER:
        ca_text = f"the CA in {ca_name}" + (f" ({ca})" if _is_path(ca) else "")
        issuer = ca_text if ca else f"a CA that this machine knows, and {ca_name} is not set"
        return (
            f"the certificate of {host}:{port} is not signed by {issuer}; set {ca_name} to the file of the CA that"
            " signed it"
        )
    if error.verify_code in _TIMES:
        return (
            f"the certificate of {host}:{port} {_TIMES[error.verify_code]}; renew it, or correct this machine's clock"
        )
    return f"the certificate of {host}:{port} is not taken: {error.verify_message}; correct it, or {ca_name}"


def _trust(ca: str | None) -> ssl.SSLContext:
    if not ca:
        context = ssl.create_default_context()
    elif not _is_path(ca):
        context = ssl.create_default_context(cadata=ca)
    elif Path(ca).is_dir():
        context = ssl.create_default_context(capath=ca)
    else:
        context = ssl.create_default_context(cafile=ca)
    # Newer Pythons are stricter by default than the clients whose refusal this explains.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _is_path(ca: str | None) -> bool:
    return bool(ca) and "-----BEGIN" not in str(ca)


def _names(host: str, port: int, ca: str | None) -> list[str]:
    """The hosts that the certificate is for; a server that is trusted but for its name shows them."""
    with contextlib.suppress(OSError, ValueError):
        context = _trust(ca)
        context.check_hostname = False
        with (
            socket.create_connection((host, port), SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificate: Any = secure.getpeercert() or {}
            return [str(value) for _, value in certificate.get("subjectAltName", ())]
    return []


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
_WRONG_LISTENER = re.compile(r"broker listener\?|SSL listener\?|security\.protocol|not valid in current SASL state")
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


def listener_cure(text: str) -> str | None:
    """The cure if a report of librdkafka looks like the wrong protocol for the listener; None for another report.

    >>> listener_cure("Disconnected: connecting to a PLAINTEXT broker listener?")
    'correct security.protocol, or the port in bootstrap.servers: the listener seems to have another protocol'
    """
    if not _WRONG_LISTENER.search(text):
        return None
    return "correct security.protocol, or the port in bootstrap.servers: the listener seems to have another protocol"


def _login_cure(kafka: Mapping[str, str], name: str, words: str) -> str:
    if (cure := listener_cure(words)) is not None:
        return cure
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
