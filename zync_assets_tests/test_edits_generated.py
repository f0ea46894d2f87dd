"""Random edits of rules and views between steps that fail: after a rebuild, every output and every table is as the file says."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from zync_assets.checks.output_checks import run_all
from zync_assets.errors import EtlError
from zync_assets.local.services import Services
from zync_assets.runner import etl_all, ingest_all, publish_all, rebuild_all
from zync_assets.sinks.steps import sink_all
from zync_assets_tests.mini import Mini, mini
from zync_assets_tests.quarantine.test_replay_generated import a_commit_fails

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = dict[str, Any]
Rows = dict[tuple[Any, ...], Row]

IDS, GROUPS = 8, ("x", "y", None)
JOINS: dict[str, Callable[[Row | None], bool]] = {
    "l": lambda right: True,
    "l LEFT JOIN r ON r.id = l.id": lambda right: True,
    "l JOIN r ON r.id = l.id": lambda right: right is not None,
}
"""The `from` of a view → whether a row of the left table has a row of the view, by the row of the right table."""

INPUT = '  - {topic: $%s, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v bigint, c string"}'
OUTPUT = "  - {topic: $out.%s, pool: %s, format: json, create: {replication-factor: 1}, hold: false}"
SINK = "  - {name: %s, type: sqlite, url: shop.db, from: [%s.$out.%s], table: %s, key: [%s], evolve: widen}"
POOLS = {"copies": "Copies", "pairs": "Pairs", "joined": "Views", "grouped": "Views"}
KEYS = {"copies": ("at",), "pairs": ("a", "b"), "joined": ("id",), "grouped": ("c",)}


@dataclass(frozen=True)
class File:
    """The rules of a pipeline file. ``weight`` stands in both views."""

    copy_name: str = "copy"
    former_copy_name: str | None = None
    has_lookup: bool = False
    factor: int = 1
    has_pairs: bool = True
    join: str = "l LEFT JOIN r ON r.id = l.id"
    is_even: bool = False
    has_groups: bool = True
    weight: int = 1
    is_reversed: bool = False

    @property
    def outputs(self) -> list[str]:
        absent = {"pairs": not self.has_pairs, "grouped": not self.has_groups}
        return [name for name in POOLS if not absent.get(name)]

    @property
    def views(self) -> tuple[Any, ...]:
        """The settings of the views. An edit of any of these settings asks for a rebuild."""
        return self.join, self.is_even, self.has_groups, self.weight

    def text(self) -> str:
        former_name = f"was: {self.former_copy_name}, " if self.former_copy_name else ""
        lookup = "lookup: {r: {table: $right, on: r.id = in.value.id, missing: 'null'}}, " if self.has_lookup else ""
        looked_up = ", w: r.v" if self.has_lookup else ""
        right = ", r: $right" if " r " in self.join else ""
        sum_sql = f"l.v * {self.weight}" + (" + coalesce(r.v, 0)" if right else "")
        rules = {
            "copies": f"name: {self.copy_name}, {former_name}type: stateless, in: $left, where: value IS NOT NULL, {lookup}"
            f"key: {{at: in.kafka.offset}}, value: {{at: in.kafka.offset, v: in.value.v * {self.factor}{looked_up}}}",
            "pairs": "name: pair, type: denorm, left: $left, right: $right, where: value IS NOT NULL,"
            " join-on: left.value.id = right.value.id, key: {a: left.value.v, b: right.value.v},"
            f" value: {{a: left.value.v, b: right.value.v, n: left.value.v * {self.factor}}}",
            "joined": f"name: joined, type: view, tables: {{l: $left{right}}}, from: {self.join}, "
            + ("where: l.v % 2 = 0, " if self.is_even else "")
            + f'key: {{id: l.id}}, value: {{id: l.id, n: "{sum_sql}"}}',
            "grouped": "name: grouped, type: view, tables: {l: $left}, from: l, key: {c: \"coalesce(l.c, 'none')\"},"
            f" value: {{c: \"coalesce(l.c, 'none')\", n: count(*), s: sum(l.v * {self.weight})}}",
        }
        names = self.outputs[::-1] if self.is_reversed else self.outputs
        sinks = [SINK % (name, POOLS[name], name, name, ", ".join(KEYS[name])) for name in names]
        sections = {
            "inputs": [INPUT % "left", INPUT % "right"],
            "outputs": [OUTPUT % (name, POOLS[name]) for name in names],
            "transforms": [f"  - {{{rules[name]}, out: $out.{name}}}" for name in names],
            "sinks": sinks,
        }
        text = "\n".join(line for name, lines in sections.items() for line in (f"{name}:", *lines)) + "\n"
        return text.replace("$out.", "${out}.")

    def edited(self, chance: Random) -> File:
        copy = ("copy", "copy2") if self.copy_name == "copy2" else ("copy2", "copy")
        edits = [
            {"copy_name": copy[0], "former_copy_name": copy[1]},
            {"has_lookup": not self.has_lookup},
            {"factor": self.factor * 10},
            {"has_pairs": not self.has_pairs},
            {"join": chance.choice([join for join in JOINS if join != self.join])},
            {"is_even": not self.is_even},
            {"has_groups": not self.has_groups},
            {"weight": self.weight + 1},
            {"is_reversed": not self.is_reversed},
        ]
        edit = {name: value for item in chance.sample(edits, chance.randint(1, 3)) for name, value in item.items()}
        return replace(self, **{"former_copy_name": None, **edit})


class Story:
    """The steps of a pipeline, and the records of its topics by offset. ``is_dirty``: a view waits for a rebuild."""

    def __init__(self, it: Mini, file: File, seed: int) -> None:
        self.it, self.file, self.chance = it, file, Random(seed)
        self.records: dict[str, list[tuple[int, Row | None]]] = {it.left: [], it.right: []}
        self.count, self.is_dirty = 0, False

    def send(self, count: int) -> None:
        for _ in range(count):
            topic, id = self.chance.choice([self.it.left, self.it.left, self.it.right]), self.chance.randrange(IDS)
            self.count += 1
            row = None if self.chance.random() < 0.15 else {"id": id, "v": self.count, "c": self.chance.choice(GROUPS)}
            self.it.send(topic, (str(id), row))
            self.records[topic].append((id, row))

    def session(self) -> SparkSession:
        return self.it.spark

    def edit(self) -> None:
        file = self.file.edited(self.chance)
        self.is_dirty |= file.views != self.file.views
        self.file, self.it = file, self.it.edited(file.text())

    def ingest(self) -> None:
        list(ingest_all(self.it.pipeline, self.session, [item.topic for item in self.it.pipeline.inputs]))

    def etl(self) -> None:
        # An edited view stops its pool alone.
        with suppress(*([EtlError] if self.is_dirty else [])):
            list(etl_all(self.it.pipeline, self.session, whole=self.chance.random() < 0.5))

    def sink(self) -> None:
        list(sink_all(self.it.pipeline, self.session))

    def publish(self) -> None:
        list(publish_all(self.it.pipeline, self.session, [item.topic for item in self.it.pipeline.outputs]))

    def rebuild(self) -> None:
        list(rebuild_all(self.it.pipeline, self.session, self.chance.choice(["views", "views", "state"])))
        self.is_dirty = False

    def finish(self) -> None:
        for act in (self.ingest, self.rebuild, self.etl, self.sink, self.publish):
            act()

    # ---- the model

    def wanted(self) -> dict[str, Rows]:
        """The rows of each output, without those of `w`, which depend on the cuts of batches."""
        left, right = self.records[self.it.left], self.records[self.it.right]
        lefts, rights = ({id: row for id, row in dict(side).items() if row is not None} for side in (left, right))
        copies = {(at,): {"v": row["v"] * self.file.factor} for at, (_, row) in enumerate(left) if row is not None}
        pairs: Rows = {}
        for id in range(IDS):
            sides = ([row["v"] for each, row in side if each == id and row is not None] for side in (left, right))
            pairs |= {(a, b): {"n": a * self.file.factor} for a, b in zip(*sides, strict=False)}
        joined: Rows = {}
        for id, row in lefts.items():
            other = rights.get(id)
            if JOINS[self.file.join](other) and not (self.file.is_even and row["v"] % 2):
                more = other["v"] if other is not None and " r " in self.file.join else 0
                joined[(id,)] = {"n": row["v"] * self.file.weight + more}
        grouped: Rows = defaultdict(lambda: {"n": 0, "s": 0})
        for row in lefts.values():
            group = grouped[(row["c"] or "none",)]
            group["n"] += 1
            group["s"] += row["v"] * self.file.weight
        found = {"copies": copies, "pairs": pairs, "joined": joined, "grouped": dict(grouped)}
        return {name: found[name] for name in self.file.outputs}

    def staged(self, name: str) -> Rows:
        """The latest value of each key of an output, as delta-rs reads them."""
        topic, rows = f"{self.it.out}.{name}", dict[str, Row | None]()
        filters = [("topic", "=", topic)]
        table = DeltaTable(f"{self.it.lake}/{POOLS[name]}").to_pyarrow_table(filters=filters).to_pylist()
        for row in sorted(table, key=lambda row: row["kafka"]["offset"]):
            rows[json.dumps(row[f"key:{topic}"])] = row[f"value:{topic}"]
        return _by_key(name, [row for row in rows.values() if row is not None])

    def table(self, name: str) -> Rows:
        with sqlite3.connect(self.it.pipeline.path.parent / "shop.db") as connection:
            connection.row_factory = sqlite3.Row
            return _by_key(name, [dict(row) for row in connection.execute(f"SELECT * FROM {name}")])

    def check(self) -> None:
        wanted = self.wanted()
        assert {name: self.staged(name) for name in wanted} == wanted
        assert {name: self.table(name) for name in wanted} == wanted
        assert [
            result for result in run_all(self.it.pipeline) if result.severity == "error" and not result.passed
        ] == []


def _by_key(name: str, rows: list[Row]) -> Rows:
    keys = KEYS[name]
    return {tuple(row.pop(key) for key in keys): {k: v for k, v in row.items() if k != "w"} for row in rows}


@pytest.fixture(params=range(1, 5))
def story(
    request: pytest.FixtureRequest, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> Iterator[Story]:
    file = File()
    yield Story(mini(services, spark, tmp_path, unique, file.text()), file, request.param)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_a_rebuild_every_row_is_as_the_file_says(story: Story) -> None:
    chance = story.chance
    story.send(30)
    story.finish()
    story.check()
    for _ in range(6):
        story.send(chance.randrange(12))
        story.edit()
        for act in chance.choices([story.ingest, story.etl, story.rebuild, story.sink, story.publish], k=5):
            story.send(chance.randrange(3))
            if chance.random() < 0.4:
                with a_commit_fails(chance):
                    act()
            else:
                act()
        story.finish()
        story.check()
