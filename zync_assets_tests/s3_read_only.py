"""``python -m zync_assets_tests.s3_read_only HOST:PORT``: a proxy that acts like an S3 server for a key without write rights.

The proxy refuses write requests with Amazon's answer, and forwards other requests. It prints its port, and ends when its
input closes.
"""

from __future__ import annotations

import http.client
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # The signature covers the host that was asked.
        inner = http.client.HTTPConnection(sys.argv[1], timeout=30)
        inner.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            inner.putheader(name, value)
        inner.endheaders()
        answer = inner.getresponse()
        self._answer(answer.status, answer.read(), answer.getheaders())
        inner.close()

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(403, DENIED, [])

    do_POST = do_DELETE = do_PUT

    def _answer(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        self.send_response_only(status)
        sizes = [value for name, value in headers if name.lower() == "content-length"]
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", sizes[0] if self.command == "HEAD" and sizes else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Front) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_port, flush=True)
        sys.stdin.read()
        server.shutdown()
