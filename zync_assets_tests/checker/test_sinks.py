"""The checker's look at the tables of sinks: it passes sound tables, and finds each kind of damage."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zync_assets_tests.checker.database import Database, read_database
from zync_assets_tests.checker.delta import DataFile
from zync_assets_tests.checker.evidence import Evidence, OutputFile, Raw, RawFile, Staging
from zync_assets_tests.checker.sinks import problems
from zync_assets_tests.checker.statement import SinkTable, Statement

STATEMENT = Statement(
    (),
    "Staging",
    (),
    (),
    sinks=(SinkTable("latest", "Staging", "new", "latest"), SinkTable("all", "Raw", "orders", "orders", "insert")),
)
FILE = DataFile(Path("some.parquet"), "new", None, None, None, 0, None)
RECORD = {"type": "record", "name": "R", "fields": [{"name": name, "type": "string"} for name in ("item", "state")]}
SCHEMA = {
    "key": {"schema": {**RECORD, "fields": [{"name": "id", "type": "int"}]}},
    "value": {"schema": ["null", RECORD]},
}


def staged(offset: int, key: int, value: dict[str, Any] | None, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    place = {"topic": "new", "partition": 0, "offset": offset}
    return {"kafka": place, "key:new": {"id": key}, "value:new": value, "schema": "s", "left_out": left_out}


def raw_record(partition: int, offset: int, key: str, op: str | None) -> dict[str, Any]:
    value = {"op": op, "after": {"item": "tea", "note": None}} if op else None
    return {"kafka": {"partition": partition, "offset": offset}, "key": key, "value": value}


def evidence() -> Evidence:
    """Two staged keys, one of them partly updated, a third deleted; three raw records in two partitions."""
    outputs = [
        staged(0, 1, {"item": "tea", "state": "new"}),
        staged(1, 2, {"item": "cup", "state": None}),
        staged(2, 1, {"item": None, "state": "paid"}, ("value.item",)),
        staged(3, 3, {"item": "pot", "state": "new"}),
        staged(4, 3, None),
    ]
    head = [{"kind": "schema", "topic": "new", "rule": "s", "text": json.dumps(SCHEMA)}]
    staging = Staging(1, head, 1, [], {"new": [OutputFile(FILE, outputs)]}, {}, "staging-id")
    rows = [raw_record(0, 0, "a", "c"), raw_record(0, 2, "b", "c"), raw_record(1, 0, "c", None)]
    raw = Raw("raw-id", {0: 0, 1: 0}, {0: 3, 1: 1}, {}, [RawFile(FILE, rows)], [], {})
    return Evidence({}, {"orders": raw}, staging, database=database())


def database() -> Database:
    after = '{"item":"tea","note":null}'
    places = {"kafka_topic": "orders"}
    return Database(
        {
            "latest": [{"id": 1, "item": "tea", "state": "paid"}, {"id": 2, "item": "cup", "state": None}],
            "orders": [
                {**places, "kafka_partition": 0, "kafka_offset": 0, "key": "a", "op": "c", "after": after},
                {**places, "kafka_partition": 0, "kafka_offset": 2, "key": "b", "op": "c", "after": after},
                {**places, "kafka_partition": 1, "kafka_offset": 0, "key": "c", "op": None, "after": None},
            ],
            "zync_positions": [
                position("latest", "Staging.new", 0, 5, "staging-id"),
                position("all", "Raw.orders", 0, 3, "raw-id"),
                position("all", "Raw.orders", 1, 1, "raw-id"),
            ],
            "zync_quarantine": [],
        },
        [],
    )


def position(sink: str, source: str, partition: int, upcoming: int, origin: str) -> dict[str, Any]:
    return {"sink": sink, "source": source, "partition": partition, "next": upcoming, "origin": origin}


def found(damaged: Database | None, *, drained: bool = True) -> list[str]:
    return list(problems(STATEMENT, replace(evidence(), database=damaged), Counter(), drained=drained))


def test_sound_tables_pass() -> None:
    assert found(database()) == []


def test_a_sink_that_is_behind_is_sound_until_all_is_drained() -> None:
    behind = database()
    behind.tables["zync_positions"][0]["next"] = 2
    behind.tables["latest"][0]["state"] = "new"
    assert found(behind, drained=False) == []
    assert found(behind) == ["latest: the position of partition 0 is 2, and records up to 5 are there"]


DAMAGE: dict[str, tuple[Callable[[Database], object], str]] = {
    "a lost row": (lambda it: it.tables["latest"].pop(), "1 rows wanted, 0 there"),
    "a doubled row": (lambda it: it.tables["orders"].append(it.tables["orders"][0]), "1 rows wanted, 2 there"),
    "a stale column": (lambda it: it.tables["latest"][0].update(state="new"), "latest: 0 rows wanted, 1 there"),
    "an erased column": (lambda it: it.tables["latest"][0].update(item=None), "latest: 0 rows wanted, 1 there"),
    "a ghost row": (
        lambda it: it.tables["latest"].append({"id": 3, "item": "pot", "state": "new"}),
        "0 rows wanted, 1 there",
    ),
    "a position too far": (lambda it: it.tables["zync_positions"][0].update(next=6), "is 6, and the source ends at 5"),
    "a position that is gone": (
        lambda it: it.tables["zync_positions"].pop(),
        "partition 1 is None, and records up to 1",
    ),
    "a position of another lake": (lambda it: it.tables["zync_positions"][1].update(origin="old"), "of the table old"),
    "a position of nothing": (lambda it: it.tables["zync_positions"][1].update(source="Raw.x"), "none here"),
    "two positions": (
        lambda it: it.tables["zync_positions"].append({**it.tables["zync_positions"][0]}),
        "latest: a partition has two positions",
    ),
    "a refused record": (lambda it: it.tables["zync_quarantine"].append({"offset": 1}), "refused a record"),
    "a load table": (lambda it: it.left.append("shop.db-zync_load_1"), "load tables of killed runs are left"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_tables_is_caught(name: str) -> None:
    damage, text = DAMAGE[name]
    damaged = database()
    damage(damaged)
    assert any(text in line for line in found(damaged)), found(damaged)


def test_a_missing_database_is_a_finding_when_all_is_drained() -> None:
    assert found(None, drained=False) == []
    assert found(None) == ["no sink has written its database"]


def test_a_database_is_read_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    assert read_database(path) is None
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute('CREATE TABLE "odd ""name" (id INTEGER, item TEXT)')
        connection.execute('INSERT INTO "odd ""name" VALUES (1, NULL)')
    path.with_name("shop.db-zync_load_1").touch()
    assert read_database(path) == Database({'odd "name': [{"id": 1, "item": None}]}, ["shop.db-zync_load_1"])
