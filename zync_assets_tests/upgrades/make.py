"""Make the file of a commit: ``python -m zync_assets_tests.upgrades.make COMMIT``. Takes a minute.

The code of the commit does all that this pipeline's lake, output topics and Dagster instance hold; this code starts the
services and produces the records. What there is then:

    shop.sales     1 is published, 2 is staged only
    shop.notes     nothing: the one record that makes a note fails in its rule, and is in quarantine
    shop.orders    3 waits for its payment, which is ingested and new to ETL; 4 is not ingested
    shop.payments  a record that is no JSON is in quarantine; one that paid nothing is unmatched; 4 is not ingested
"""

from __future__ import annotations

import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import fastavro
from confluent_kafka import Producer

from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic
from zync_assets.local.services import Services, down, up
from zync_assets.pipeline import RegistryConfig

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "item", "type": ["null", "string"]}],
}
LEFT_OUT = ("*.log.new", "broker.log", "registry.log", "services.lock", "compute_logs", "*.trace.db")
"""What the services and Dagster need not find again."""


def environment(services: Services, home: Path) -> dict[str, str]:
    """What the pipeline file asks the environment for, and the Dagster instance."""
    return {
        "KAFKA_BOOTSTRAP_SERVERS": services.bootstrap_servers,
        "SCHEMA_REGISTRY_URL": services.registry_url,
        "DAGSTER_HOME": str(home),
    }


def send_orders(services: Services, *ids: int) -> None:
    registry = Registry(RegistryConfig(services.registry_url))
    known = registry.register("shop.orders-value", json.dumps(ORDER))
    for number in ids:
        body = io.BytesIO()
        fastavro.schemaless_writer(body, fastavro.parse_schema(ORDER), {"id": number, "item": f"item {number}"})
        send(services, "shop.orders", b"\0" + known.to_bytes(4, "big") + body.getvalue(), f"{number}")


def send_payment(services: Services, number: int, paid: int, note: str = "") -> None:
    send(services, "shop.payments", json.dumps({"id": number, "paid": paid, "note": note}).encode(), f"{number}")


def send(services: Services, topic: str, value: bytes, key: str) -> None:
    producer = Producer({"bootstrap.servers": services.bootstrap_servers, "log_level": 0})
    producer.produce(topic, value, key, 0)
    assert producer.flush(30) == 0


def make(commit: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        code, state = Path(name, "code"), Path(name, "state")
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(code)
        try:
            services = up(state)
            file = state / "shop.yaml"
            file.write_text((FOLDER / "shop.yaml").read_text())
            (state / "dagster").mkdir()
            (state / "dagster" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
            given = {**os.environ, **environment(services, state / "dagster"), "PYTHONPATH": str(code)}

            def python(*arguments: Any) -> None:
                subprocess.run([sys.executable, *map(str, arguments)], cwd=state, env=given, check=True)

            def zync(*arguments: Any) -> None:
                python("-c", "from zync_assets.cli.main import main; main()", *arguments)

            for topic in ("shop.orders", "shop.payments"):
                create_topic({"bootstrap.servers": services.bootstrap_servers}, topic, 1, 1, {})
            send_orders(services, 1, 2, 3)
            send_payment(services, 1, 10)
            send(services, "shop.payments", b"no JSON", "bad")
            python(FOLDER / "dagster_runs.py", file)
            send_payment(services, 7, 0)
            send_payment(services, 8, -1, "no number")
            send_payment(services, 2, 20)
            zync("from-kafka", file)
            zync("etl", file)
            send_payment(services, 3, 30)
            zync("from-kafka", file)
            send_orders(services, 4)
            send_payment(services, 4, 40)
        finally:
            down(state)
        pack(state, target)


def pack(state: Path, target: Path) -> None:
    """The folder as a tar of no owner, no time and no order but that of the names."""
    with lzma.open(target, "wb", preset=9 | lzma.PRESET_EXTREME) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for path in sorted(state.rglob("*")):
            inside = path.relative_to(state)
            if path.is_file() and not any(Path(part).match(each) for part in inside.parts for each in LEFT_OUT):
                entry = tar.gettarinfo(path, str(inside))
                entry.uid = entry.gid = entry.mtime = 0
                entry.uname = entry.gname = ""
                with path.open("rb") as content:
                    tar.addfile(entry, content)


if __name__ == "__main__":
    make(sys.argv[1], FOLDER / f"{sys.argv[1]}.tar.xz")
