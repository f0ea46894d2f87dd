"""A real HTTP server in front of the real registry, with TLS, logins, redirects and outages. Forwards accepted requests."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias
from urllib.parse import urlsplit

from zync_assets_tests.network.certificates import Issued

Move: TypeAlias = "int | str | bytes"


@dataclass
class Front:
    """The server.

    ``wanted``: the required ``Authorization`` header; ``moves``: the answers to the next requests, in place of
    forwarding: a status, a redirect (``"307 address"``), a body, ``"unknown"`` or ``"hang"``; ``asked``: the received
    requests; ``others``: path → the path that is asked for in its place.
    """

    url: str = ""
    wanted: str | None = None
    moves: deque[Move] = field(default_factory=lambda: deque[Move]())
    asked: list[str] = field(default_factory=lambda: list[str]())
    others: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def front(registry_url: str, certificate: Issued | None = None, client_ca: str | None = None) -> Iterator[Front]:
    """The server on a port of 127.0.0.1, with TLS where there is a ``certificate``."""
    made = Front()
    target = urlsplit(registry_url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve(None)

        def do_POST(self) -> None:
            self._serve(self.rfile.read(int(self.headers["Content-Length"])))

        def _serve(self, body: bytes | None) -> None:
            made.asked.append(f"{self.command} {self.path}")
            move = made.moves.popleft() if made.moves else None
            if move == "hang":
                made.released.wait(30)
                self.close_connection = True
            elif move == "unknown":
                self._answer(404, b'{"error_code": 40403, "message": "Schema not found"}')
            elif isinstance(move, str):
                status, address = move.split()
                self._answer(int(status), b"", address + self.path)
            elif isinstance(move, bytes):
                self._answer(200, move)
            elif move is not None:
                self._answer(move, b"{}")
            elif made.wanted is not None and self.headers["Authorization"] != made.wanted:
                self._answer(401, b'{"error_code": 401, "message": "who are you?"}')
            else:
                self._forward(body)

        def _forward(self, body: bytes | None) -> None:
            connection = http.client.HTTPConnection(str(target.hostname), target.port, timeout=30)
            kept = {name: self.headers[name] for name in ("Accept", "Content-Type") if self.headers[name]}
            path, mark, query = self.path.partition("?")
            connection.request(self.command, target.path + made.others.get(path, path) + mark + query, body, kept)
            answer = connection.getresponse()
            self._answer(answer.status, answer.read())
            connection.close()

        def _answer(self, status: int, body: bytes, location: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # refused handshakes
    scheme = "http"
    if certificate is not None:
        scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        if client_ca is not None:
            # With TLS 1.3 a client may learn of its refused certificate only after its first request.
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(client_ca)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    made.url = f"{scheme}://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.released.set()
        server.shutdown()
        server.server_close()
