"""A small OAuth 2.0 server: client credentials for signed tokens (RFC 6749, section 4.4), and its keys (RFC 7517)."""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

ISSUER = "https://tokens.test"
AUDIENCE = "kafka"
CLIENT = "zync"


@dataclass
class Tokens:
    """The server. ``issued``: every issued token; ``secret``: the secret of the client ``CLIENT``."""

    url: str = ""
    secret: str = field(default_factory=lambda: "oidc-" + secrets.token_hex(8))
    issued: list[str] = field(default_factory=list)
    _key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))

    def token(self, subject: str = CLIENT) -> str:
        """A signed token (RFC 7515) for an hour."""
        now = int(time.time())
        head = {"alg": "RS256", "typ": "JWT", "kid": "1"}
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": subject,
            "iat": now,
            "exp": now + 3600,
            "jti": secrets.token_hex(4),
        }
        signed = b".".join(_encoded(json.dumps(part).encode()) for part in (head, claims))
        signature = self._key.sign(signed, padding.PKCS1v15(), hashes.SHA256())
        self.issued.append((signed + b"." + _encoded(signature)).decode())
        return self.issued[-1]

    def keys(self) -> dict[str, Any]:
        public = self._key.public_key().public_numbers()
        numbers = {
            name: _encoded(value.to_bytes((value.bit_length() + 7) // 8)).decode()
            for name, value in (("n", public.n), ("e", public.e))
        }
        return {"keys": [{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": "1", **numbers}]}

    def knows(self, authorization: str) -> bool:
        given = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        return given == f"{CLIENT}:{self.secret}"


@contextmanager
def token_server() -> Iterator[Tokens]:
    """The server on a port of 127.0.0.1: tokens at ``/token``, keys at ``/keys``."""
    tokens = Tokens()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, tokens.keys())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if tokens.knows(self.headers["Authorization"] or ""):
                self._answer(200, {"access_token": tokens.token(), "token_type": "bearer", "expires_in": 3600})
            else:
                self._answer(401, {"error": "invalid_client"})

        def _answer(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tokens.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield tokens
    finally:
        server.shutdown()
        server.server_close()


def _encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
