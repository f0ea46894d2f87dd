"""A real S3 server of the test run's own: S3Proxy over a folder, from Maven Central as the broker is.

It checks signatures and does conditional puts. An object is a file of its folder, so that who judges a lake needs no S3.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from zync_assets.local.java import Bundle, bundle_folder, find_java
from zync_assets.local.processes import free_port
from zync_assets_tests.services import server_process

VERSION = "4.1.0"
_OTHERS = (
    *("com.azure", "com.microsoft.azure", "io.projectreactor", "net.java.dev.jna", "org.apache.sshd", "io.grpc"),
    *("com.google.cloud", "com.google.apis", "com.google.api", "com.google.api.grpc", "com.google.api-client"),
    *("com.google.auth", "com.google.http-client", "com.google.oauth-client", "com.google.protobuf", "io.opencensus"),
    *("com.github.openstack4j.core", "com.github.openstack4j.core.connectors", "ch.qos.logback"),
)
"""S3Proxy's modules for other clouds. A file system as the store does not need these modules."""
IVY = f"""<ivy-module version="2.0">
  <info organisation="zync" module="tests-s3"/>
  <configurations><conf name="jars"/></configurations>
  <dependencies>
    <dependency org="org.gaul" name="s3proxy" rev="{VERSION}" conf="jars->runtime,master"/>
    <dependency org="com.fasterxml.jackson.core" name="jackson-annotations" rev="2.21" force="true"
                conf="jars->runtime,master"/>
    <dependency org="org.slf4j" name="slf4j-simple" rev="2.0.17" conf="jars->runtime,master"/>
    {"".join(f'<exclude org="{name}"/>' for name in _OTHERS)}
  </dependencies>
</ivy-module>
"""
BUNDLE = Bundle("tests-s3", IVY, f"S3Proxy {VERSION} (30 MB)", "S3Proxy")
START_SECONDS = 60.0


@dataclass(frozen=True)
class S3:
    """A running server. ``folder`` holds a folder for each bucket."""

    endpoint: str
    folder: Path
    key: str = field(default_factory=lambda: f"key-{secrets.token_hex(6)}")
    secret: str = field(default_factory=lambda: f"secret-{secrets.token_hex(12)}")

    def bucket(self, name: str) -> Path:
        """The folder of a bucket. Creates a missing bucket."""
        made = self.folder / name
        made.mkdir(exist_ok=True)
        return made

    @property
    def settings(self) -> Mapping[str, str]:
        """As in a pipeline file."""
        return {"endpoint": self.endpoint, "access-key-id": self.key, "secret-access-key": self.secret}

    def lake(self, place: str, **changed: str) -> str:
        """The value of ``lake:`` for ``bucket/folder``; ``changed``: other settings, with ``_`` for ``-``."""
        found = {**self.settings, **{name.replace("_", "-"): value for name, value in changed.items()}}
        inner = ", ".join(f'{name}: "{value}"' for name, value in found.items())
        return f'{{uri: "s3://{place}", {inner}}}'


@contextmanager
def serving(folder: Path) -> Generator[S3]:
    """A server over the buckets in ``folder``."""
    jars = bundle_folder(BUNDLE, find_java) / "jars"
    endpoint = f"http://127.0.0.1:{free_port()}"
    found = S3(endpoint, folder)
    settings = {
        "s3proxy.endpoint": endpoint,
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": found.key,
        "s3proxy.credential": found.secret,
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(folder),
    }
    with tempfile.TemporaryDirectory() as scratch:
        path, log = Path(scratch, "s3proxy.conf"), Path(scratch, "s3proxy.log")
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        # S3Proxy writes its error output to its log. The log needs a file of its own.
        java = [find_java(), "-Xmx256m", "-XX:TieredStopAtLevel=1", f"-Dorg.slf4j.simpleLogger.logFile={log}"]
        command = [*java, "-cp", f"{jars}/*", "org.gaul.s3proxy.Main", "--properties", path]
        with server_process(command, Path(scratch), Path(scratch, "output"), {}, stop="KILL"):
            _await(endpoint, log)
            yield found


@contextmanager
def read_only(s3: S3) -> Generator[S3]:
    """The server as a key sees it that may read and list alone."""
    # A process of its own: delta-rs holds the interpreter while it waits for an answer.
    command = [sys.executable, "-m", "zync_assets_tests.s3_read_only", s3.endpoint.removeprefix("http://")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield replace(s3, endpoint=f"http://127.0.0.1:{process.stdout.readline().strip()}")
        process.stdin.close()


def _await(endpoint: str, log: Path) -> None:
    port = int(endpoint.rpartition(":")[2])
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"S3Proxy did not answer: {log.read_text() if log.exists() else 'no log'}")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """An S3 server for the whole run, with the bucket ``lakes``."""
    with serving(tmp_path_factory.mktemp("buckets")) as found:
        found.bucket("lakes")
        yield found
