"""A lake, its topics and a Dagster instance that an earlier version made: today's code goes on with them, and nothing is
lost, doubled or numbered anew."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, TopicPartition
from dagster import AssetKey, DagsterInstance
from deltalake import DeltaTable

from zync_assets.assets import build
from zync_assets.cli.main import main
from zync_assets.kafka.topics import topic_state
from zync_assets.lake.raw import open_raw
from zync_assets.local.services import Services, down, up
from zync_assets_tests import upgrades
from zync_assets_tests.upgrades.dagster_runs import settle
from zync_assets_tests.upgrades.make import environment

FILES = sorted(Path(upgrades.__file__).parent.glob("*.tar.xz"))


@dataclass(frozen=True)
class Shop:
    """What ``upgrades.make`` left, with its services started again."""

    folder: Path
    services: Services

    @property
    def file(self) -> Path:
        return self.folder / "shop.yaml"

    @property
    def home(self) -> Path:
        return self.folder / "dagster"

    def zync(self, command: str, *words: str, code: int = 0) -> list[dict[str, Any]]:
        done = CliRunner().invoke(main, [*command.split(), str(self.file), *words, "--format", "json"])
        assert done.exit_code == code, (done.output, done.exception)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def staged(self, topic: str) -> list[dict[str, Any]]:
        """Output records as delta-rs reads them, by offset."""
        table = DeltaTable(self.folder / "lake" / "Staging").to_pyarrow_table(filters=[("topic", "=", topic)])
        names = ["kafka", "rule", "source", "schema", f"key:{topic}", f"value:{topic}"]
        rows = table.select([name for name in names if name in table.column_names]).to_pylist()
        return sorted(rows, key=lambda row: row["kafka"]["offset"])

    def published(self, topic: str) -> list[tuple[bytes | None, bytes | None]]:
        end = topic_state({"bootstrap.servers": self.services.bootstrap_servers}, topic).partitions[0].end
        reader = Consumer({"bootstrap.servers": self.services.bootstrap_servers, "group.id": "upgrades"})
        reader.assign([TopicPartition(topic, 0, 0)])
        found = reader.consume(end, 30) if end else []
        reader.close()
        assert len(found) == end
        return [(message.key(), message.value()) for message in found]


@pytest.fixture(params=FILES, ids=lambda path: path.name.partition(".")[0])
def shop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    with tarfile.open(request.param) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(tmp_path)
    state = tmp_path / "services.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "lake": str(tmp_path / "lake")}))
    try:
        services = up(tmp_path)
        for name, value in environment(services, tmp_path / "dagster").items():
            monkeypatch.setenv(name, value)
        # The pipelines of all versions have one name, as in processes of their own.
        monkeypatch.setattr(build, "_builds", [])
        yield Shop(tmp_path, services)
    finally:
        down(tmp_path)


@pytest.mark.slow
def test_what_an_earlier_version_made_goes_on(shop: Shop) -> None:
    staged = {topic: shop.staged(topic) for topic in ("shop.sales", "shop.notes")}
    assert [row["value:shop.sales"]["id"] for row in staged["shop.sales"]] == [1, 2]
    [published] = shop.published("shop.sales")
    assert [(row["topic"], row["offset"]) for row in shop.zync("pending")] == [("shop.orders", 2)]
    held = shop.zync("quarantine list")
    assert [(row["topic"], row["offset"], row["stage"]) for row in held] == [
        ("shop.payments", 1, "value"),
        ("shop.payments", 3, "etl"),
    ]

    def marks() -> dict[str, list[int]]:
        states = {
            topic: open_raw(str(shop.folder / "lake"), "Raw", topic) for topic in ("shop.orders", "shop.payments")
        }
        return {topic: [mark.offset for mark in state.marks.values()] for topic, state in states.items() if state}

    assert marks() == {"shop.orders": [], "shop.payments": []}

    # Dagster ingests, transforms and publishes what waits, and knows the ranges and runs from before.
    with DagsterInstance.from_config(str(shop.home)) as instance:
        before = instance.get_runs_count()
        keys = [AssetKey(["Staging", "shop.sales"]), AssetKey(["kafka", "shop.sales"])]
        assert all(instance.get_latest_materialization_event(key) is not None for key in keys)
        settle(shop.file, instance, (shop.home / "cursor.json").read_text() or None)
        assert instance.get_runs_count() > before > 0
    assert marks() == {"shop.orders": [3], "shop.payments": [6]}
    assert shop.zync("run", "--until-idle") == []
    shop.zync("check")
    assert shop.staged("shop.sales")[:2] == staged["shop.sales"]
    assert [row["value:shop.sales"]["id"] for row in shop.staged("shop.sales")] == [1, 2, 3, 4]
    assert shop.published("shop.sales")[0] == published
    assert len(shop.published("shop.sales")) == 4
    assert shop.zync("pending") == []

    # The failed record passes the corrected rule. The record without JSON is dropped. The unmatched record gets a rule.
    text = shop.file.read_text()
    shop.file.write_text(text.replace("CAST(in.value.note AS INT)", "TRY_CAST(in.value.note AS INT)"))
    assert shop.zync("quarantine replay", "--offsets", "0:3") == [{"replayed": 1, "left": 0}]
    assert shop.zync("quarantine drop", "--all") == [{"dropped": 1}]
    shop.file.write_text(shop.file.read_text().replace("value.paid < 0", "value.paid <= 0"))
    assert [row["records"] for row in shop.zync("etl", "--retry-unmatched")] == [1]
    shop.zync("run", "--until-idle")
    assert [row["value:shop.notes"] for row in shop.staged("shop.notes")] == [
        {"id": 8, "number": None},
        {"id": 7, "number": None},
    ]
    assert len(shop.published("shop.notes")) == 2
    assert shop.zync("quarantine list") == []
    rows = shop.zync("query", "select value.id, value.item, value.paid from Staging.`shop.sales` order by kafka.offset")
    assert rows == [{"id": number, "item": f"item {number}", "paid": 10 * number} for number in (1, 2, 3, 4)]
    for offset in range(4):
        made, *sources = shop.zync("trace", "shop.sales", str(offset))
        assert {made["value"]["id"]} == {row["value"]["id"] for row in sources} == {offset + 1}
    shop.zync("check")
