"""Why a server's certificate was not taken, in words with a cure.

The libraries below say "certificate verify failed" whatever the reason. OpenSSL knows it (``X509_V_ERR_*``), and Python's
``ssl`` passes it on as ``verify_code``.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

SECONDS = 3.0
"""How long a look at a server may take."""

_HOST_MISMATCH = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_TIMES = {9: "is not valid yet", 10: "has expired"}  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_UNKNOWN_ISSUER = frozenset({18, 19, 20, 21})  # self-signed, or an issuer that is in no list of trusted ones


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
        return explained(error, host, port, ca, ca_name, address_name)
    except (OSError, ValueError):
        return None


def explained(
    error: ssl.SSLCertVerificationError, host: str, port: int, ca: str | None, ca_name: str, address_name: str
) -> str:
    """As ``certificate_fault``, of an error that was met."""
    if error.verify_code in _HOST_MISMATCH:
        names = _names(host, port, ca)
        told = f": it is for {', '.join(names)}" if names else ""
        return (
            f"the certificate of {host}:{port} is for another host{told}; write a name that the certificate has in"
            f" {address_name}, or give the server a certificate for {host}"
        )
    if error.verify_code in _UNKNOWN_ISSUER:
        given = f"the CA in {ca_name}" + (f" ({ca})" if _is_path(ca) else "")
        trusted = given if ca else f"a CA that this machine knows, and {ca_name} is not set"
        return (
            f"the certificate of {host}:{port} is not signed by {trusted}; set {ca_name} to the file of the CA that"
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
            shown: Any = secure.getpeercert() or {}
            return [str(value) for _, value in shown.get("subjectAltName", ())]
    return []
