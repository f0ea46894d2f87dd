"""A schema registry with Confluent's API (Apicurio Registry 2.6) in a folder."""

from __future__ import annotations

import http.client
import urllib.request
from pathlib import Path

from zync_assets.local.processes import token_option

LOG = "registry.log"

# In memory, Apicurio's default, schema ids end with the process while the records that carry them don't. And an id
# that was given out must not be lost by a kill: by default H2 writes up to half a second later.
DATABASE = "jdbc:h2:file:./registry;WRITE_DELAY=0"


def url(port: int) -> str:
    """The address for clients of Confluent's API."""
    return f"http://127.0.0.1:{port}/apis/ccompat/v7"


def command(java: Path, jar: Path, token: str, port: int) -> list[str]:
    """The command line of the registry, to be run in its folder."""
    heap = ["-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    settings = [
        "-Dquarkus.http.host=127.0.0.1",
        f"-Dquarkus.http.port={port}",
        f"-Dquarkus.datasource.jdbc.url={DATABASE}",
    ]
    return [str(java), *heap, token_option(token), *settings, "-jar", str(jar)]


def ready(folder: Path, port: int) -> bool:
    """Whether the registry's log reports the port, and the port answers. The log rules out another server on the port."""
    try:
        if f"Listening on: http://127.0.0.1:{port}" not in (folder / LOG).read_text(errors="replace"):
            return False
    except FileNotFoundError:
        return False
    # The environment's proxies are not for addresses of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url(port)}/subjects", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False
