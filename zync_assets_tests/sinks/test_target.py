"""The classes of targets: what is said where a driver is missing, and whose load tables are left by a killed run."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest

from zync_assets.codecs.fields import MICRO_TIMESTAMP, PLAIN, Note
from zync_assets.errors import SinkError, TargetUnavailable
from zync_assets.sinks.files import FilesTarget
from zync_assets.sinks.sqlite import SqliteTarget
from zync_assets.sinks.target import LOAD_PREFIX, Target, is_alive, open_target, process_mark, time_of
from zync_assets_tests.network.certificates import Authority, Issued
from zync_assets_tests.sinks.conformance import PLACE, sink

DRIVERS = {
    "clickhouse": "clickhouse_connect",
    "databend": "databend_sqlalchemy",
    "mysql": "pymysql",
    "postgres": "psycopg",
}


@pytest.mark.parametrize("kind", sorted(DRIVERS))
def test_the_error_has_the_command_that_installs_a_missing_driver(kind: str) -> None:
    code = (
        f"import sys; sys.modules[{DRIVERS[kind]!r}] = None\n"
        "from zync_assets.sinks.target import open_target\n"
        "from zync_assets_tests.sinks.conformance import sink\n"
        f"open_target(sink({kind!r}, '{kind}://host/shop'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"Install it: pip install 'zync-assets[{kind}]'" in ended.stderr


def test_the_extra_of_mysql_brings_what_its_own_users_log_in_with() -> None:
    """Users of MySQL 8 have caching_sha2_password. Without TLS, PyMySQL encrypts such a password by its extra ``rsa``."""
    requirements = [item for item in metadata.requires("zync_assets") or () if 'extra == "mysql"' in item]
    assert [item.split(">")[0] for item in requirements] == ["PyMySQL[rsa]"]


@contextmanager
def tls_server(issued: Issued | None) -> Generator[int]:
    """The port of a server on another address of the loopback that ends each connection after the handshake. None: no TLS."""
    server = HTTPServer(("127.0.0.2", 0), BaseHTTPRequestHandler)
    if issued is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(issued.certificate, issued.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "ca", "off"), [("clickhouse", "ca_cert", "secure=false"), ("databend", "tls_ca_file", "sslmode=disable")]
)
def test_a_certificate_that_nobody_trusts_is_no_outage_and_the_error_has_the_option(
    tmp_path: Path, kind: str, ca: str, off: str
) -> None:
    authority = Authority(tmp_path, "ca")
    for hosts, option, cure in (
        (["127.0.0.2"], "", f"Name the file of its CA in the url, ?{ca}=FILE"),
        (["other.example"], f"?{ca}={authority.path}", "Write the host's name as the server's certificate has it"),
        ([], "", f"Turn TLS on at the server. In a network that you trust, write ?{off} in the url"),
    ):
        issued = authority.server("server", *hosts) if hosts else None
        with tls_server(issued) as port, pytest.raises(SinkError) as error:
            open_target(sink(kind, f"{kind}://me:secret@127.0.0.2:{port}/shop{option}")).progress(PLACE)
        assert cure in str(error.value) and "secret" not in str(error.value)
        assert not isinstance(error.value, TargetUnavailable)


def dead_mark() -> str:
    """The mark of a process that has ended."""
    code = "from zync_assets.sinks.target import process_mark; print(process_mark())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_run_removes_what_dead_runs_of_its_place_have_left(tmp_path: Path) -> None:
    mine, dead = process_mark(), dead_mark()
    assert is_alive(mine) and not is_alive(dead)
    database = tmp_path / "shop.db"
    names = [f"{PLACE.load_prefix}{mine}_0", f"{PLACE.load_prefix}{dead}_0", f"{LOAD_PREFIX}other_{dead}_0"]
    for name in names:
        (tmp_path / f"shop.db-{name}").touch()
        load = tmp_path / "archive" / "_zync" / "loads" / name
        load.mkdir(parents=True)
        (load / "0.parquet").touch()
    targets: Sequence[Target] = (SqliteTarget(f"sqlite:///{database}"), FilesTarget(str(tmp_path / "archive")))
    for target in targets:
        with target.run(PLACE) as prefix:
            assert is_alive(prefix.removeprefix(PLACE.load_prefix))
        assert sorted(target.tables()) == sorted([names[0], names[2]])


def test_a_time_without_zone_has_none_in_an_array_either() -> None:
    note = Note(item=Note(MICRO_TIMESTAMP, 1))
    for kind, expected in ((pa.timestamp("us", tz="UTC"), pa.timestamp("us")), (pa.int64(), pa.int64())):
        assert time_of(pa.field("times", pa.list_(kind)), note) == (pa.list_(expected), 0)
    instants = pa.list_(pa.timestamp("us", tz="UTC"))
    assert time_of(pa.field("times", instants), PLAIN) == (instants, 0)
