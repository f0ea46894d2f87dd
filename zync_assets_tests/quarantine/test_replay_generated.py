"""Replays beside all other steps, in random stories: a view, the tables of its inputs and its own table end as their source."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.errors import LakeError
from zync_assets.kafka.registry import Registry
from zync_assets.lake import tables
from zync_assets.lake.quarantine_table import EVERYTHING, Selection, quarantined_records
from zync_assets.local.services import Services
from zync_assets.runner import replay_all
from zync_assets.sinks.replay import refused_records
from zync_assets.sinks.sqlite import SqliteTarget
from zync_assets.sinks.steps import replay_sinks, sink_all
from zync_assets_tests.mini import Mini, mini
from zync_assets_tests.test_writers_side_by_side import fastavro_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = dict[str, Any]

PIPELINE = """
inputs:
  - {topic: $left, pool: Raw, format: avro}
  - {topic: $right, pool: Raw, format: avro}
outputs:
  - {topic: $out, pool: Staging, format: avro, create: {replication-factor: 1}}
transforms:
  - name: joined
    type: view
    tables: {l: $left, r: $right}
    from: l LEFT JOIN r ON r.id = l.id
    key: {id: l.id}
    value: {id: l.id, v: l.v, w: r.v}
    out: $out
sinks:
  - {name: lefts, type: sqlite, url: shop.db, from: [Raw.$left], table: lefts, key: [id], evolve: add}
  - {name: rights, type: sqlite, url: shop.db, from: [Raw.$right], table: rights, key: [id], evolve: add}
  - {name: joined, type: sqlite, url: shop.db, from: [Staging.$out], table: joined, key: [id]}
"""
KEYS = 6


class Story:
    """Records of two topics. Each writer's schema has one field more than the schema before. The registry knows a schema later
    than its first records come."""

    def __init__(self, it: Mini, seed: int) -> None:
        self.it, self.chance = it, Random(seed)
        assert it.pipeline.registry is not None
        self.registry = Registry(it.pipeline.registry)
        self.name = it.left.partition(".")[0]
        self.key = {"type": "record", "name": f"{self.name}_key", "fields": [{"name": "id", "type": "long"}]}
        self.key_id = self.registry.register(f"{self.name}-key", json.dumps(self.key))
        self.count, self.number = 0, 0
        self.known = self.registry.register(f"{self.name}-value", json.dumps(self.schema(0)))
        self.records: dict[str, list[tuple[int, Row | None]]] = {it.left: [], it.right: []}

    def schema(self, number: int) -> Row:
        added = [{"name": f"f{at}", "type": ["null", "long"], "default": None} for at in range(number)]
        plain = [{"name": name, "type": "long"} for name in ("id", "v")]
        return {"type": "record", "name": f"{self.name}_value", "fields": [*plain, *added]}

    def send(self, count: int) -> None:
        """Records of random keys. A third has the schema that the registry does not know yet, some are tombstones."""
        for _ in range(count):
            topic, id = self.chance.choice([self.it.left, self.it.right]), self.chance.randrange(KEYS)
            self.count += 1
            row, number = {"id": id, "v": self.count}, self.number + (self.chance.random() < 1 / 3)
            value = None
            if self.chance.random() < 0.85:
                row |= {f"f{at}": self.count for at in range(number)}
                id_bytes = (self.known + number - self.number).to_bytes(4, "big")
                value = b"\0" + id_bytes + fastavro_bytes(self.schema(number), row)
            key = b"\0" + self.key_id.to_bytes(4, "big") + fastavro_bytes(self.key, {"id": id})
            self.it.send(topic, (key, value), partition=id % 2)
            self.records[topic].append((id, None if value is None else row))

    def reveal(self) -> None:
        """The registry gets the schema of the waiting records."""
        self.number += 1
        id = self.registry.register(f"{self.name}-{self.number}", json.dumps(self.schema(self.number)))
        assert id == self.known + 1, "another client of this registry has registered a schema"
        self.known = id

    def step(self) -> None:
        self.it.ingest(*self.chance.sample([self.it.left, self.it.right], self.chance.randint(1, 2)))
        if self.chance.random() < 0.7:
            self.it.etl()
        if self.chance.random() < 0.7:
            list(sink_all(self.it.pipeline, lambda: self.it.spark))

    def replay(self) -> None:
        """As the command does, up to a random part of it."""
        list(replay_all(self.it.pipeline, lambda: self.it.spark, EVERYTHING))
        if self.chance.random() < 0.5:
            replay_sinks(self.it.pipeline, lambda: self.it.spark, (), Selection())

    def finish(self) -> None:
        """Every record goes all the way."""
        self.reveal()
        self.it.ingest()
        list(replay_all(self.it.pipeline, lambda: self.it.spark, EVERYTHING))
        assert quarantined_records(self.it.pipeline) == []
        self.it.etl()
        list(sink_all(self.it.pipeline, lambda: self.it.spark))
        assert list(refused_records(self.it.pipeline, Selection())) == []

    def rows(self, topic: str) -> dict[int, Row]:
        """The latest row of each key."""
        latest = dict(self.records[topic])
        return {id: row for id, row in latest.items() if row is not None}

    def table(self, name: str) -> dict[int, Row]:
        with sqlite3.connect(self.it.pipeline.path.parent / "shop.db") as connection:
            connection.row_factory = sqlite3.Row
            return {row["id"]: dict(row) for row in connection.execute(f"SELECT * FROM {name}")}


@contextmanager
def a_commit_fails(chance: Random) -> Iterator[None]:
    """A commit of the lake or of the target fails as if the process had been killed, before its work or after it."""
    owner, name = chance.choice([(tables, "commit"), (SqliteTarget, "merge")])
    real, left, after = getattr(owner, name), chance.randint(1, 4), chance.random() < 0.5

    def commit(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left != 0:
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        raise LakeError("broken on purpose")

    with pytest.MonkeyPatch.context() as patch, suppress(LakeError):
        patch.setattr(owner, name, commit)
        yield


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_table_ends_as_its_source(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, seed: int
) -> None:
    story = Story(mini(services, spark, tmp_path, unique, PIPELINE, partitions=2), seed)
    chance, it = Random(seed), story.it
    story.send(8)
    for _ in range(12):
        story.send(chance.randrange(7))
        if chance.random() < 0.35:
            story.reveal()
        act = story.replay if chance.random() < 0.4 else story.step
        if chance.random() < 0.4:
            with a_commit_fails(chance):
                act()
        else:
            act()
    story.finish()
    lefts, rights = story.rows(it.left), story.rows(it.right)
    joined = {id: {"id": id, "v": row["v"], "w": rights.get(id, {}).get("v")} for id, row in lefts.items()}
    staged: dict[int, Row | None] = {row["key"]["id"]: row["value"] for row in it.staged()}
    assert {id: row for id, row in staged.items() if row is not None} == joined
    assert story.table("joined") == joined
    for topic, name in ((it.left, "lefts"), (it.right, "rights")):
        table = story.table(name)
        assert table.keys() == story.rows(topic).keys()
        # A record without a field leaves the column as it is.
        assert all(table[id].items() >= row.items() for id, row in story.rows(topic).items())
