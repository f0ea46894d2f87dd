"""A sink writes each record once into a table of SQLite, wherever it is killed."""

from __future__ import annotations

import json
import math
import random
import re
import sqlite3
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from zync_assets.checks.remote_checks import sink_results
from zync_assets.checks.state_checks import Differences, rows_match
from zync_assets.cli.main import main
from zync_assets.errors import BadRecords, SinkError, TableUnfit
from zync_assets.kafka.registry import Registry
from zync_assets.lake.quarantine_table import Selection
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import RegistryConfig
from zync_assets.sinks import replay, steps
from zync_assets.sinks.commit import commit_sink
from zync_assets.sinks.plan import plan_sink, read_source
from zync_assets.sinks.replay import LEFT_OUT, OVERTAKEN, drop_refused, refused_records
from zync_assets.sinks.steps import Turn, planned, replay_sinks, reset_sink, sink_all, sink_awake
from zync_assets.sinks.target import Place
from zync_assets_tests.mini import BOTH, Mini, die, framed, mini, row, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULES = """
transforms:
  - {name: whole, type: stateless, where: value.op = 'c', in: $left, out: $out, key: {id: in.value.id},
     value: {id: in.value.id, v: in.value.v, twice: "concat(in.value.v, in.value.v)"}}
  - {name: part, type: stateless, where: value.op = 'u', in: $left, out: $out, key: {id: in.value.id},
     value: {id: in.value.id, v: in.value.v}}
  - {name: gone, type: stateless, where: value.op = 'd', in: $left, out: $out, key: {id: in.value.id}, value: null}
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Staging.$out], table: rows}
"""
TEXT = BOTH.replace("key-format: string, value-format: json, create", "format: avro, create") + RULES


def rows(it: Mini, sql: str = "SELECT * FROM rows ORDER BY id") -> list[tuple[Any, ...]]:
    with sqlite3.connect(it.pipeline.path.parent / "shop.db") as connection:
        return connection.execute(sql).fetchall()


def keyed(registry: Registry, subject: str, schema: dict[str, Any], key: int, value: Any) -> tuple[bytes, bytes]:
    """A record with a key in JSON, and a value in Avro by a schema of the registry."""
    return json.dumps({"id": key}).encode(), framed(registry.register(subject, json.dumps(schema)), schema, value)


def write(it: Mini) -> list[int]:
    """Everything that was staged; the numbers of loaded rows."""
    return [made.records for made in sink_all(it.pipeline, lambda: it.spark)]


def refused_again(it: Mini, spark: SparkSession, selection: Selection | None = None) -> tuple[int, dict[str, str]]:
    """Write refused records again: the number that was written, and record → why it stays."""
    replay = replay_sinks(it.pipeline, lambda: spark, (), selection or Selection())
    assert not replay.troubles
    return replay.count, replay.reasons


def test_a_batch_is_folded_and_written_once(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXT)
    it.send(it.left, row(1, "a"), row(2, "b"), row(1, "A", op="u"), row(3, "c"), row(3, op="d"))
    it.step()
    assert write(it) == [3]
    assert rows(it) == [(1, "A", "aa"), (2, "b", "bb")]
    assert write(it) == []
    # A partial record changes its columns only; a delete and a later insert make a new row.
    it.send(it.left, row(2, "B", op="u"), row(1, op="d"), row(1, "n", op="u"), row(4, "d", op="u"))
    it.step()
    assert write(it) == [3]
    assert rows(it) == [(1, "n", None), (2, "B", "bb"), (4, "d", None)]
    assert rows(it, "SELECT source, partition, next FROM zync_positions") == [(f"Staging.{it.out}", 0, 9)]
    assert not list(tmp_path.glob("shop.db-*"))
    # The check of all rows finds the changes of another program, and names their keys.
    (sink,) = it.pipeline.sinks
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("UPDATE rows SET v = 'x' WHERE id = 2")
        connection.execute("DELETE FROM rows WHERE id = 4")
        connection.execute("INSERT INTO rows VALUES (9, 'y', 'z')")
    differences = rows_match(it.pipeline, lambda: spark, sink, sink.tables[0])
    assert not differences.passed
    assert differences.numbers == {"rows": 5, "differing": 3, "problems": 1}
    assert differences.summary == (
        "3 rows differ, with keys from id=2 to id=9. id=2: another value in v; id=4: the table lacks the row;"
        " id=9: the source has no such row. Load the table again:"
        f" zync sink {it.pipeline.path} --sink shop --reset rows"
    )
    # A column or a table that is gone fails the check, and ends no report.
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        last = connection.execute("SELECT * FROM rows").description[-1][0]
        for change, words in (
            (f"rows RENAME COLUMN {last} TO other", f"another value in v, {last}"),
            ("rows RENAME TO others", "table rows is not there. Load it from the start: zync sink "),
        ):
            connection.execute(f"ALTER TABLE {change}")
            found = rows_match(it.pipeline, lambda: spark, sink, sink.tables[0])
            assert not found.passed
            assert words in found.summary
            assert "zync_assets.errors" not in found.summary
        connection.execute("ALTER TABLE others RENAME TO rows")
        # A changed type of a column fails the check too.
        connection.execute("ALTER TABLE rows RENAME TO others")
        connection.execute(f"CREATE TABLE rows AS SELECT CAST(id AS TEXT) || 'x' AS id, v, other AS {last} FROM others")
    found = rows_match(it.pipeline, lambda: spark, sink, sink.tables[0])
    assert found.summary == (
        "sink shop, table rows: its rows can't be compared: the column id has values that are no int64, because another"
        " program changed its type. Change the column back to a type for int64."
    )
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("DROP TABLE rows")
        connection.execute("ALTER TABLE others RENAME TO rows")
        connection.execute(f"ALTER TABLE rows RENAME COLUMN other TO {last}")
    reset_sink(it.pipeline, lambda: spark, "shop", "rows")
    assert rows(it) == []
    assert write(it) == [4]
    assert rows(it) == [(1, "n", None), (2, "B", "bb"), (4, "d", None)]
    # Another sink of the table begins at the start again, too: its rows are gone.
    other = edited(
        it,
        "".join(
            f"  - {{name: {name}, type: sqlite, url: shop.db, from: [Staging.$out], table: rows, before: {{where: {where}}}}}\n"
            for name, where in (("shop", "key.id < 3"), ("more", "key.id > 2"))
        ),
    )
    write(other)
    (sharer,) = reset_sink(other.pipeline, lambda: spark, "shop", "rows")
    assert sharer.sink == "more"
    assert rows(other) == []
    assert write(other) == [2, 2]
    assert rows(other) == [(1, "n", None), (2, "B", "bb"), (4, "d", None)]
    # A table that is gone is not made again without the records that the position has passed.
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("DROP TABLE rows")
    position = next(found for found in sink_results(it.pipeline) if found.name == "sink_position")
    assert not position.passed
    assert re.search(r"the table is not there, and records were written to it\. .* --reset rows", position.summary)
    # A process says so once even if no record is left to write.
    monkeypatch.setattr(steps, "_cleaned_places", dict[Place, object]())
    with pytest.raises(TableUnfit, match=r"table rows is not there, and sink shop has written .* --reset rows"):
        write(it)
    it.send(it.left, row(5, "e"))
    it.step()
    with pytest.raises(TableUnfit, match=r"table rows is not there, and sink shop has written .* --reset rows"):
        write(it)
    reset_sink(it.pipeline, lambda: spark, "shop", "rows")
    assert write(it) == [5]
    assert rows(it) == [(1, "n", None), (2, "B", "bb"), (4, "d", None), (5, "e", "ee")]


@pytest.mark.slow
def test_a_column_that_was_dropped_is_not_made_again_without_its_values(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    def alter(change: str) -> None:
        with sqlite3.connect(tmp_path / "shop.db") as connection:
            connection.execute(f"ALTER TABLE rows {change}")

    it = mini(services, spark, tmp_path, unique, TEXT)
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.step()
    assert write(it) == [2]
    alter("DROP COLUMN twice")
    it.send(it.left, row(1, "c"))
    it.step()
    lost = "records that are written already have values for twice"
    with pytest.raises(
        TableUnfit, match=rf"ADD COLUMN twice TEXT;\n.* --reset rows\nLoad it .* after this DDL too: {lost}\."
    ):
        write(it)
    adding = TEXT.replace("table: rows}", "table: rows, evolve: add}")
    it = it.edited(adding)
    with pytest.raises(TableUnfit, match=rf"table rows: twice is missing, and {lost}\..* --reset rows$"):
        write(it)
    reset_sink(it.pipeline, lambda: spark, "shop", "rows")
    assert write(it) == [2]
    assert rows(it) == [(1, "c", "cc"), (2, "b", "bb")]
    # A column under another name is not lost.
    alter("RENAME COLUMN twice TO other")
    it.send(it.left, row(2, "d"))
    it.step()
    with pytest.raises(TableUnfit, match="twice is missing"):
        write(it)
    alter("RENAME COLUMN other TO twice")
    assert write(it) == [1]
    # No written record has a value for a new field.
    it = it.edited(adding.replace("v: in.value.v, twice", "v: in.value.v, more: length(in.value.v), twice"))
    it.send(it.left, row(3, "e"))
    it.step()
    assert write(it) == [1]
    assert rows(it, "SELECT id, twice, more FROM rows ORDER BY id") == [(1, "cc", None), (2, "dd", None), (3, "ee", 1)]


def test_a_new_table_gains_the_columns_of_an_input_that_comes_later(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    rules = """
transforms:
  - {name: names, type: stateless, in: $left, out: $out, key: {id: in.value.id}, value: {id: in.value.id, v: in.value.v}}
  - {name: states, type: stateless, in: $right, out: $out, key: {id: in.value.id}, value: {id: in.value.id, w: in.value.v}}
"""
    it = mini(services, spark, tmp_path, unique, TEXT.replace(RULES[: RULES.index("sinks:")], rules))
    it.send(it.right, row(1, "new"))
    it.step()
    assert write(it) == [1]
    assert rows(it) == [(1, "new")]
    it.send(it.left, row(1, "pen"), row(2, "cup"))
    it.step()
    assert write(it) == [2]
    assert rows(it, "SELECT id, v, w FROM rows ORDER BY id") == [(1, "pen", "new"), (2, "cup", None)]


def edited(it: Mini, sinks: str) -> Mini:
    return it.edited(TEXT[: TEXT.index("sinks:")] + "sinks:\n" + sinks)


def test_a_refused_record_is_found_and_put_aside_with_the_message(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXT)
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE rows (id BIGINT PRIMARY KEY, v TEXT CHECK (v <> 'bad'), twice TEXT)")
    records = [row(number, "bad" if number in (3, 11, 12) else f"v{number}") for number in range(20)]
    it.send(it.left, *records)
    it.step()
    made = list(sink_all(it.pipeline, lambda: spark))
    assert sum(commit.quarantined for commit in made) == 3
    wanted = {number: f"v{number}" for number in range(20) if number not in (3, 11, 12)}
    assert {found[0]: found[1] for found in rows(it)} == wanted
    bad = rows(it, 'SELECT "offset", "key", error FROM zync_quarantine ORDER BY "offset"')
    assert bad == [(at, f"id={at}", "CHECK constraint failed: v <> 'bad'") for at in (3, 11, 12)]
    results = {result.name: result for result in sink_results(it.pipeline)}
    assert results["sink_position"].passed
    assert "3 records are in quarantine" in results["sink_quarantine"].summary

    # Neither a limit nor `fail` lets a further one pass; what comes before it is written.
    for more, words in (
        ("max-bad-records: 3", "as many as max-bad-records allows"),
        ("on-bad-record: fail", "refused the record"),
    ):
        strict = edited(
            it, f"  - {{name: shop, type: sqlite, url: shop.db, from: [Staging.$out], table: rows, {more}}}\n"
        )
        strict.send(it.left, row(1, more[:3]), row(2, "bad"))
        strict.step()
        with pytest.raises(BadRecords, match=words):
            write(strict)
        assert rows(it, "SELECT v FROM rows WHERE id = 1") == [(more[:3],)]
        assert [made.quarantined for made in sink_all(it.pipeline, lambda: spark)] == [1]


FAILING = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v string"}
sinks:
  - {name: sets, type: sqlite, url: shop.db, from: [Raw.$left], table: sets, key: [value.id],
     before: {set: {number: CAST(value.v AS INT)}}}
  - {name: chooses, type: sqlite, url: shop.db, from: [Raw.$left], table: chooses, key: [value.id],
     before: {where: 10 / value.id > 1}}
  - {name: calls, type: sqlite, url: shop.db, from: [Raw.$left], table: calls, mode: insert,
     before: {function: "zync_assets_tests.sinks.functions:numbers"}}
"""


@pytest.mark.slow
def test_a_record_on_which_an_expression_fails_is_put_aside(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, FAILING)
    it.send(it.left, *({"id": at, "v": "x" if at == 3 else str(at)} for at in (0, 1, 2, 3, 11)))
    it.ingest()
    assert sum(made.quarantined for made in sink_all(it.pipeline, lambda: spark)) == 3
    assert rows(it, "SELECT id, number FROM sets ORDER BY id") == [(0, 0), (1, 1), (2, 2), (11, 11)]
    assert rows(it, "SELECT id FROM chooses ORDER BY id") == [(1,), (2,), (3,)]
    assert rows(it, "SELECT number FROM calls ORDER BY number") == [(0,), (1,), (2,), (11,)]
    found = {row[0]: row[1:] for row in rows(it, 'SELECT sink, "offset", error FROM zync_quarantine')}
    assert found["sets"][1].startswith(
        "before: set: number: CAST(value.v AS INT) fails: [CAST_INVALID_INPUT] The value 'x' of"
    )
    assert found["chooses"][1].startswith("before: where: 10 / value.id > 1 fails: [DIVIDE_BY_ZERO] Division by zero")
    assert (found["sets"][0], found["chooses"][0]) == (3, 0)
    assert found["calls"][0] == 3
    assert found["calls"][1].startswith(
        "before: function zync_assets_tests.sinks.functions:numbers fails: ArrowInvalid: "
    )
    for sink in it.pipeline.sinks:
        assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
    assert [made.records for made in sink_all(it.pipeline, lambda: spark)] == []
    # A record on which the expression still fails stays, and a corrected expression takes it.
    assert refused_again(it, spark)[0] == 0
    cured = it.edited(FAILING.replace("CAST(value.v", "try_cast(value.v"))
    count, left = refused_again(cured, spark)
    assert (count, len(left)) == (1, 2)
    assert rows(it, "SELECT number FROM sets WHERE id = 3") == [(None,)]

    strict = it.edited(FAILING.replace("key: [value.id],", "key: [value.id], on-bad-record: fail,"))
    strict.send(it.left, {"id": 4, "v": "y"})
    strict.ingest()
    with pytest.raises(BadRecords) as error:
        write(strict)
    where = f"sink sets, table sets, Raw.{it.left}, partition 0, offset 5: before: set: number: CAST(value.v AS INT) fails: "
    assert str(error.value).startswith(f"{where}[CAST_INVALID_INPUT] The value 'y' of")
    cure = "Correct the expression, as with try_cast, and run again; or set on-bad-record: quarantine."
    assert str(error.value).endswith(f". {cure}")
    # If several records fail, no record has a reason: the reason may be of another record.
    more = it.edited(FAILING)
    more.send(it.left, {"id": 0, "v": "z"}, {"id": 0, "v": "u"})
    more.ingest()
    list(sink_all(more.pipeline, lambda: spark))
    several = rows(it, "SELECT DISTINCT error FROM zync_quarantine WHERE sink = 'chooses' AND \"offset\" > 5")
    assert several == [("before: where: 10 / value.id > 1 fails",)]


SET_VALUE = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro}
sinks:
  - {name: sets, type: sqlite, url: shop.db, from: [Raw.$left], table: sets, before: {set: {n: CAST(value.v AS INT)}}}
  - {name: chooses, type: sqlite, url: shop.db, from: [Raw.$left], table: chooses, before: {where: value.v > '1'}}
  - {name: all, type: sqlite, url: shop.db, from: [Raw.$left], table: all_rows, evolve: add,
     before: {set: {n: length(key)}}}
"""


def test_expressions_wait_for_the_first_value(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Tombstones alone do not tell the type of a value."""
    it = mini(services, spark, tmp_path, unique, SET_VALUE)
    schema = {"type": "record", "name": "Row", "fields": [{"name": "v", "type": "string"}]}
    id = Registry(RegistryConfig(services.registry_url)).register(f"{it.left}-value", json.dumps(schema))
    it.send(it.left, ("a", None), ("b", None))
    it.ingest()
    # A sensor requests no run of a sink that waits.
    plans = [planned(it.pipeline, sink, sink.tables[0]) for sink in it.pipeline.sinks]
    assert [plan.sink.name for plan in plans if not plan.nothing_to_do] == ["all"]
    assert [made.sink for made in sink_all(it.pipeline, lambda: spark)] == ["all"]
    it.send(it.left, ("a", framed(id, schema, {"v": "7"})))
    it.ingest()
    list(sink_all(it.pipeline, lambda: spark))
    for table, columns in (("sets", "key, v, n"), ("chooses", "key, v"), ("all_rows", "key, v, n")):
        expected = {"sets": ("a", "7", 7), "chooses": ("a", "7"), "all_rows": ("a", "7", 1)}
        assert rows(it, f"SELECT {columns} FROM {table}") == [expected[table]]


@pytest.mark.slow
def test_a_replay_writes_a_refused_record_unless_a_later_one_of_its_key_was_written(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXT)

    def table(check: str) -> None:
        with sqlite3.connect(tmp_path / "shop.db") as connection:
            connection.execute("DROP TABLE IF EXISTS rows")
            connection.execute(f"CREATE TABLE rows (id BIGINT PRIMARY KEY, v TEXT {check}, twice TEXT)")

    table("CHECK (v NOT LIKE 'bad%')")
    for records in ([row(1, "bad1"), row(2, "bad2"), row(3, "bad3")], [row(2, "b"), row(3, "bad4")]):
        it.send(it.left, *records)
        it.step()
        write(it)
    assert rows(it, "SELECT id, v FROM rows") == [(2, "b")]

    whole = shown(it, it.out, 1)
    assert (whole["stage"], whole["rule"], whole["table_key"]) == ("sink", "shop/rows", "id=2")
    assert (whole["key"], whole["value"]) == ({"id": 2}, {"id": 2, "v": "bad2", "twice": "bad2bad2"})
    assert [(source["topic"], source["offset"]) for source in whole["source"]] == [(it.left, 1)]
    everything = Selection()
    assert [str(item.bad.offset) for item in refused_records(it.pipeline, everything)] == ["0", "1", "2", "4"]
    count, left = refused_again(it, spark)
    assert (count, len(left)) == (0, 4)
    assert sum("CHECK constraint failed" in reason for reason in left.values()) == 3
    table("")
    count, left = refused_again(it, spark)
    assert count == 3
    ((place, reason),) = left.items()
    assert "offset 1" in place
    again = f"zync sink {it.pipeline.path} --sink shop --reset rows"
    assert reason == f"{OVERTAKEN}. If the row lacks values of it, load the table again: {again}"
    assert rows(it, "SELECT id, v FROM rows ORDER BY id") == [(1, "bad1"), (3, "bad4")]
    # A record that the sink leaves out now was not written, and stays in quarantine.
    chosen = edited(
        it,
        "  - {name: shop, type: sqlite, url: shop.db, from: [Staging.$out], table: rows, before: {where: key.id > 2}}\n",
    )
    count, left = refused_again(chosen, spark)
    assert (count, [*left.values()]) == (0, [LEFT_OUT])
    assert drop_refused(it.pipeline, everything) == 1
    assert list(refused_records(it.pipeline, everything)) == []
    assert rows(it, "SELECT next FROM zync_positions") == [(5,)]


MOVED = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string"}
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Raw.$left], table: rows, key: [id], columns: {include: [id, v]}}
"""


@pytest.mark.slow
def test_the_latest_record_of_a_key_wins_after_new_partitions_moved_the_key(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, MOVED, partitions=3)
    second = 1_700_000_000_000
    for partition, text in ((1, "a"), (2, "b"), (0, "c")):
        it.send(it.left, ("one", row(1, text)), partition=partition, times=[second])
        second += 1000
    it.ingest()
    write(it)
    assert rows(it) == [("one", "c")]
    # Its record in partition 1 is refused, and the later record in partition 0 is written. Of another key, both are refused.
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute(
            "CREATE TRIGGER no BEFORE INSERT ON rows WHEN new.v LIKE 'd%' BEGIN SELECT raise(ABORT, 'no'); END"
        )
    for partition, key, text in ((1, "two", "d"), (0, "two", "e"), (1, "six", "d1"), (0, "six", "d2")):
        it.send(it.left, (key, row(2, text)), partition=partition, times=[second])
        second += 1000
        it.ingest()
        write(it)
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("DROP TRIGGER no")
    count, reasons = refused_again(it, spark)
    assert (count, [text.startswith(OVERTAKEN) for text in reasons.values()]) == (2, [True])
    assert rows(it) == [("one", "c"), ("six", "d2"), ("two", "e")]
    # The search for a refused record applies the others in the order of time.
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute(
            "CREATE TRIGGER no BEFORE INSERT ON rows WHEN new.v = 'd' BEGIN SELECT raise(ABORT, 'no'); END"
        )
    for partition, key, text in ((2, "one", "e"), (1, "three", "d"), (0, "one", "f")):
        it.send(it.left, (key, row(1, text)), partition=partition, times=[second])
        second += 1000
    it.ingest()
    write(it)
    assert rows(it) == [("one", "f"), ("six", "d2"), ("two", "e")]
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("DROP TRIGGER no")
    # A backlog of several batches. Partition 0 has the latest record of each key.
    for partition, text in ((2, "f"), (1, "g"), (0, "h")):
        records = [(key, row(number, text)) for number, key in enumerate(("one", "two", "three"))]
        it.send(it.left, *records, partition=partition, times=[second, second + 1, second + 2])
        second += 1000
    it.ingest()
    [sink] = it.pipeline.sinks
    count = 0
    while (plan := plan_sink(it.pipeline, sink, sink.tables[0], 2)).ranges:
        assert plan.offsets <= 2
        commit_sink(read_source(lambda: spark, plan))
        count += 1
    assert count >= 5
    assert rows(it) == [("one", "h"), ("six", "d2"), ("three", "h"), ("two", "h")]
    # One batch takes a backlog that fits, however uneven the partitions are.
    it.send(it.left, *(("one", row(1, text)) for text in "ijklm"), times=range(second, second + 5))
    it.send(it.left, ("one", row(1, "n")), partition=1, times=[second + 5])
    it.ingest()
    plan = plan_sink(it.pipeline, sink, sink.tables[0], 6)
    assert plan.ranges == plan.missing
    commit_sink(read_source(lambda: spark, plan))
    assert ("one", "n") in rows(it)


APPENDED = (
    TEXT[: TEXT.index("sinks:")]
    + "sinks: [{name: shop, type: sqlite, url: shop.db, from: [Raw.$left], table: rows, mode: insert}]"
)


@pytest.mark.slow
def test_rows_without_their_position_are_not_written_twice(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A table of the user's own has no primary key, which would refuse a row that is there already."""
    it = mini(services, spark, tmp_path, unique, APPENDED)
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.ingest()
    assert write(it) == [2]
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE own AS SELECT * FROM rows")
        connection.execute("DROP TABLE rows")
        connection.execute("ALTER TABLE own RENAME TO rows")
        connection.execute("DROP TABLE zync_quarantine")
    # A lost quarantine loses no position.
    it.send(it.left, row(3, "c"))
    it.ingest()
    assert write(it) == [1]
    (sink,) = it.pipeline.sinks
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("DROP TABLE zync_positions")
    with pytest.raises(SinkError, match=rf"table rows: the table has records of {it.left}, and .* no position of them"):
        write(it)
    assert len(rows(it, "SELECT * FROM rows")) == 3
    reset_sink(it.pipeline, lambda: spark, "shop", "rows")
    assert write(it) == [3]
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("INSERT INTO rows SELECT * FROM rows LIMIT 1")
    found = rows_match(it.pipeline, lambda: spark, sink, sink.tables[0])
    assert not found.passed and "the table has the row 2 times" in found.summary


def test_of_two_replays_at_one_time_one_writes_a_record(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of the user's own has no primary key, which would refuse the row of the other."""
    it = mini(services, spark, tmp_path, unique, APPENDED)
    it.send(it.left, row(1, "a"))
    it.ingest()
    write(it)
    refusal = "CREATE TRIGGER odd BEFORE INSERT ON rows WHEN NEW.v = 'odd' BEGIN SELECT RAISE(ABORT, 'odd'); END"
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        for statement in (
            "CREATE TABLE own AS SELECT * FROM rows",
            "DROP TABLE rows",
            "ALTER TABLE own RENAME TO rows",
        ):
            connection.execute(statement)
        connection.execute(refusal)
    it.send(it.left, row(2, "odd"), row(3, "odd"))
    it.ingest()
    assert sum(made.quarantined for made in sink_all(it.pipeline, lambda: spark)) == 2
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("DROP TRIGGER odd")
    (sink,) = it.pipeline.sinks
    before = plan_sink(it.pipeline, sink, sink.tables[0])
    first = Selection(ranges=(OffsetRange(0, 1, 2),))
    assert refused_again(it, spark, first) == (1, {})
    # The second one has read the quarantine before the first one wrote.
    monkeypatch.setattr(replay, "_plans", lambda *_: iter([before]))
    assert drop_refused(it.pipeline, first) == 0
    assert refused_again(it, spark)[1] == {}
    assert rows(it, "SELECT id, v FROM rows ORDER BY id") == [(1, "a"), (2, "odd"), (3, "odd")]
    assert rows(it, "SELECT * FROM zync_quarantine") == []


def test_rows_without_their_position_are_not_written_twice_beside_a_sink_with_a_position(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The sink of another table writes first, and then has a position of the same topic."""
    text, to = APPENDED[: APPENDED.index("sinks:")], "type: sqlite, url: shop.db, from: [Raw.$left]"
    text += f"""sinks:
  - {{name: latest, {to}, table: latest}}
  - {{name: shop, {to}, table: rows, mode: insert}}
  - {{name: other, {to}, table: rows, mode: insert, before: {{where: key IS NULL}}}}
"""
    it = mini(services, spark, tmp_path, unique, text)
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.ingest()
    # Two sinks of the file may append to one table.
    assert write(it) == [2, 2, 0]
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE own AS SELECT * FROM rows")
        connection.execute("DROP TABLE rows")
        connection.execute("ALTER TABLE own RENAME TO rows")
        connection.execute("DROP TABLE zync_positions")
    for _ in range(2):
        with pytest.raises(
            SinkError, match=rf"table rows: the table has records of {it.left}, and .* no position of them"
        ):
            write(it)
    assert rows(it, "SELECT count(*) FROM rows") == [(2,)]
    reset_sink(it.pipeline, lambda: spark, "shop", "rows")
    assert write(it) == [2, 0]


def shown(it: Mini, topic: str, offset: int) -> dict[str, Any]:
    """A record as ``zync quarantine show`` prints it."""
    line = ["quarantine", "show", str(it.pipeline.path), topic, str(offset), "--format", "json"]
    done = CliRunner().invoke(main, line, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


KEPT = (
    TEXT[: TEXT.index("sinks:")].replace("pool: Raw,", "pool: Raw, retention: 30d,", 1)
    + """
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Raw.$left], table: rows, key: [value.id], delete: false,
     columns: {include: [v]}}
  - {name: late, type: sqlite, url: late.db, from: [Raw.$left], table: rows, mode: insert, columns: {include: [v]}}
"""
)


@pytest.mark.slow
def test_retention_waits_until_every_sink_has_written_the_raw_records(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The records of Mini are old: retention removes them as soon as nobody wants them."""
    it = mini(services, spark, tmp_path, unique, KEPT)
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE rows (id BIGINT PRIMARY KEY, v TEXT CHECK (v <> 'bad'))")

    def kept() -> list[int]:
        return [record["kafka"]["offset"] for record in it.raw(it.left)]

    def commit(sink: str) -> None:
        list(sink_all(it.pipeline, lambda: spark, [sink]))

    for number in (1, 2):
        it.send(it.left, row(number, f"v{number}"))
        it.step()
    commit("shop")
    assert kept() == [0, 1]
    commit("late")
    assert kept() == []
    # A refused record stays for its replay, and later records stay with it.
    for number, v in ((3, "v3"), (4, "bad"), (5, "v5")):
        it.send(it.left, row(number, v))
        it.step()
    commit("late")
    commit("shop")
    assert kept() == [3, 4]
    assert shown(it, it.left, 3)["value"] == {"op": "c", "id": 4, "v": "bad"}
    assert rows(it) == [(1, "v1"), (2, "v2"), (3, "v3"), (5, "v5")]
    # The rows of records that retention removed are no difference.
    sink = it.pipeline.sinks[0]
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
    assert "retention removed" not in caplog.text
    reset_sink(it.pipeline, lambda: spark, "shop", "rows")
    commit("shop")
    assert rows(it) == [(5, "v5")]
    assert (
        f"sink shop, table rows: retention removed 3 records of Raw.{it.left} before the table's first" in caplog.text
    )


@pytest.mark.slow
def test_a_column_is_not_made_again_by_default_if_retention_removed_its_values(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    text = KEPT[: KEPT.index("  - {name: late")]
    it = mini(services, spark, tmp_path, unique, text)
    it.send(it.left, row(1, "v1"))
    it.step()
    assert write(it) == [1]
    assert it.raw(it.left) == []
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("ALTER TABLE rows RENAME COLUMN v TO other")
    it.send(it.left, row(2, "v2"))
    it.step()
    words = r"Set evolve: add, or run:\nALTER TABLE rows ADD COLUMN v TEXT;\n(.*\n)*.* may have values for v: retention removed"
    with pytest.raises(TableUnfit, match=words):
        write(it)
    it = it.edited(text.replace("table: rows", "evolve: add, table: rows"))
    assert write(it) == [1]
    assert rows(it) == [(1, "v1", None), (2, None, "v2")]


ENVELOPE = """
inputs:
  - {topic: $left, pool: Raw, key-format: json, key-schema: "id bigint", value-format: json,
     schema: "before struct<id: bigint>, after struct<id: bigint, v string, n struct<a: int>>, op string"}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v string"}
sinks:
  - {name: rows, type: sqlite, url: shop.db, from: [Raw.$left], table: rows}
  - {name: some, type: sqlite, url: shop.db, from: [Raw.$left], table: some, before: {where: value.after.v >= 'b'}}
  - {name: all, type: sqlite, url: shop.db, from: [Raw.$right], table: log, mode: insert,
     columns: {rename: {v: name}}, before: {where: value.id > 1, set: {twice: value.id * 2}}}
  - {name: made, type: sqlite, url: shop.db, from: [Raw.$right], table: made, key: [value.id], delete: false,
     columns: {include: [v]}, before: {function: "zync_assets_tests.sinks.functions:upper"}}
"""


def test_raw_tables_are_written_as_they_are_and_envelopes_as_their_rows(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    it = mini(services, spark, tmp_path, unique, ENVELOPE, partitions=2)

    def change(op: str, key: int, v: str | None = None) -> tuple[bytes, Any]:
        after = None if op == "d" else {"id": key, "v": v, "n": {"a": key}}
        return f'{{"id": {key}}}'.encode(), {"before": None, "after": after, "op": op}

    it.send(it.left, change("c", 1, "a"), change("c", 3, "c"), change("d", 3), (b'{"id": 3}', None))
    it.send(it.left, change("r", 2, "b"), change("u", 2, "__debezium_unavailable_value"), partition=1)
    it.send(it.right, *({"id": number, "v": f"n{number}"} for number in range(4)), None)
    it.ingest()
    write(it)
    assert rows(it) == [(1, "a", '{"a":1}'), (2, "b", '{"a":2}')]
    # A row that does not meet the condition is not there. A value that was not sent leaves a row where it is.
    assert rows(it, "SELECT id FROM some") == [(2,)]
    coordinates = "kafka_topic, kafka_partition, kafka_offset"
    assert rows(it, f"SELECT {coordinates}, id, name, twice FROM log") == [
        (it.right, 0, 2, 2, "n2", 4),
        (it.right, 0, 3, 3, "n3", 6),
    ]
    assert rows(it, "SELECT id, upper FROM made ORDER BY id") == [(number, f"N{number}") for number in range(4)]
    assert write(it) == []
    # Under another name, a sink would append the records again; but another table takes them.
    moved = it.edited(ENVELOPE.replace("name: all,", "name: other,").replace("table: log", "table: log2"))
    assert write(moved) == [2]
    renamed = it.edited(ENVELOPE.replace("name: all,", "name: every,"))
    with pytest.raises(SinkError, match=r"the table has rows, and a sink .* \(all\) has written .* twice\."):
        write(renamed)
    reset_sink(renamed.pipeline, lambda: spark, "every", "log")
    assert write(renamed) == [2]
    assert rows(renamed, "SELECT kafka_offset FROM log") == [(2,), (3,)]
    # So would a pipeline with another name, but for a table of its own.
    moved = Mini(replace(renamed.pipeline, name="moved"), spark, *it.topics)
    with pytest.raises(
        SinkError, match=rf"does not have \(every of {it.pipeline.name}\) .* the pipeline, the old name"
    ):
        list(sink_all(moved.pipeline, lambda: spark, ["every"]))
    own = it.edited(ENVELOPE.replace("name: all,", "name: every,").replace("table: log", "table: other"))
    list(sink_all(replace(own.pipeline, name="own"), lambda: spark, ["every"]))
    assert rows(own, "SELECT kafka_offset FROM other") == [(2,), (3,)]
    reset_sink(moved.pipeline, lambda: spark, "every", "log")
    assert [made.records for made in sink_all(moved.pipeline, lambda: spark, ["every"])] == [2]
    assert rows(moved, "SELECT kafka_offset FROM log") == [(2,), (3,)]
    reset_sink(renamed.pipeline, lambda: spark, "every", "log")
    assert write(renamed) == [2]
    reset_sink(renamed.pipeline, lambda: spark, "every", "log")
    assert write(renamed) == [2]

    # In `zync run`, a target that is away and a table that does not fit hold up nothing else, and rest for a while.
    broken = it.edited(
        ENVELOPE.replace("name: all,", "name: every,").replace(
            "sinks:",
            "sinks:\n  - {name: away, type: postgres, url: 'postgresql://me:secret@127.0.0.1:1/shop',\n"
            "     from: [Raw.*], table: '{whole-topic}'}\n"
            "  - {name: unfit, type: sqlite, url: shop.db, from: [Raw.$right], table: absent, create: false}",
        )
    )
    it.send(it.right, {"id": 9, "v": "n9"})
    it.ingest()
    turns: dict[Place, Turn] = {}
    assert [made.table for made in sink_awake(broken.pipeline, lambda: spark, turns)] == ["log", "made"]
    rests = {place.sink: turn.rest for place, turn in turns.items() if turn.rest is not None}
    assert {sink: rest.seconds for sink, rest in rests.items()} == {"away": 0.5, "unfit": 0.5}
    warnings = [record.getMessage() for record in caplog.records if record.name == "zync_assets.sinks.steps"]
    assert warnings[-2].startswith("sink away, table ") and "secret" not in warnings[-2]
    assert warnings[-1].startswith("sink unfit, table absent is not there. Set create: true, or run:")
    for rest in rests.values():
        rest.until = 0.0
    assert list(sink_awake(broken.pipeline, lambda: spark, turns)) == []
    rests = {place.sink: turn.rest for place, turn in turns.items() if turn.rest is not None}
    assert {sink: rest.seconds for sink, rest in rests.items()} == {"away": 1.0, "unfit": 1.0}
    for rest in rests.values():
        rest.until = math.inf
    assert list(sink_awake(broken.pipeline, lambda: spark, turns)) == []


@pytest.mark.slow
def test_a_column_of_before_stays_where_a_record_leaves_out_its_fields(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXT)
    it = edited(
        it,
        "  - {name: sql, type: sqlite, url: shop.db, from: [Staging.$out], table: set_by_sql,\n"
        "     before: {set: {v: upper(value.v), twice: upper(value.twice), size: length(value.twice), at: kafka.offset,\n"
        "     all: 'to_json(value)'}}}\n"
        "  - {name: function, type: sqlite, url: shop.db, from: [Staging.$out], table: set_by_function,\n"
        "     before: {function: 'zync_assets_tests.sinks.functions:sizes'}}\n",
    )
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.step()
    write(it)
    it.send(it.left, row(1, "new", op="u"), row(3, "c", op="u"))
    it.step()
    write(it)
    whole = '{"id":1,"v":"a","twice":"aa"}'
    assert rows(it, 'SELECT id, v, twice, size, at, "all" FROM set_by_sql ORDER BY id') == [
        (1, "NEW", "AA", 2, 2, whole),
        (2, "B", "BB", 2, 1, whole.replace("1", "2").replace("a", "b")),
        (3, "C", None, None, 3, None),
    ]
    assert rows(it, "SELECT id, v, twice, size_of_v, size_of_twice FROM set_by_function ORDER BY id") == [
        (1, "new", "aa", 3, 2),
        (2, "b", "bb", 1, 2),
        (3, "c", None, 1, None),
    ]


UNSENT = """
inputs:
  - {topic: $left, pool: Raw, format: json, key-schema: id bigint,
     value-schema: "before struct<id: bigint>, after struct<id: bigint, v: string, words: array<string>, map: map<string, string>,
     numbers: array<int>, flags: array<boolean>, code: string>, op string"}
  - {topic: $right, pool: Raw, format: json}
outputs: [{topic: $out, pool: Staging}]
transforms: [{type: stateless, in: $right, out: $out, key: null, value: {v: in.value}}]
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Raw.$left], table: rows,
     before: {set: {upper: upper(value.after.v), most: array_max(value.after.numbers), number: CAST(value.after.code AS INT)}}}
  - {name: chosen, type: sqlite, url: shop.db, from: [Raw.$left], table: chosen, columns: {include: [v, flags]},
     before: {where: CAST(value.after.code AS INT) > 1}}
  - {name: keyed, type: sqlite, url: shop.db, from: [Raw.$left], table: keyed, key: [key.id, value.v],
     columns: {include: [flags]}}
"""


@pytest.mark.slow
def test_values_that_debezium_did_not_send_leave_columns_of_every_type(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, UNSENT)
    text = "__debezium_unavailable_value"
    sent = {"id": 1, "v": "a", "words": ["x", "y"], "map": {"k": "l"}, "numbers": [4, 2], "flags": [True], "code": "12"}
    unsent = {
        "id": 1,
        "v": text,
        "words": [text],
        "map": {text: text},
        "numbers": list(text.encode()),
        "flags": [False],
        "code": text,
    }
    it.send(it.left, *((b'{"id": 1}', {"before": None, "after": after, "op": "u"}) for after in (sent, unsent)))
    it.ingest()
    write(it)
    expected = [(1, "a", '["x","y"]', '{"k":"l"}', "[4,2]", "[false]", "12", "A", 4, 12)]
    assert rows(it) == expected
    assert rows(it, "SELECT * FROM chosen") == [(1, "a", "[false]")]
    # Nothing says which row of such a key a record changes.
    assert rows(it, "SELECT * FROM keyed") == [(1, "a", "[true]")]
    sink = it.pipeline.sinks[0]
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
    it.send(it.left, (b'{"id": 1}', {"before": None, "after": unsent, "op": "u"}))
    it.ingest()
    write(it)
    assert rows(it) == expected


@pytest.mark.slow
def test_a_table_that_refuses_every_record_ends_the_batch(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXT)
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE rows (id BIGINT PRIMARY KEY, v TEXT CHECK (v <> 'bad'), twice TEXT)")
    it.send(it.left, *(row(number, "bad") for number in range(130)))
    it.step()
    with pytest.raises(BadRecords, match="100 records one after the other were refused, and are in quarantine"):
        write(it)
    assert rows(it, "SELECT next FROM zync_positions") == [(100,)]
    # The next run goes on where this one ended.
    assert write(it) == [0]
    assert len(list(refused_records(it.pipeline, Selection()))) == 130
    # The table lacks its key now. The user may drop the table and make a new, empty table.
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.executescript("DROP TABLE rows; CREATE TABLE rows (id BIGINT, v TEXT, twice TEXT)")
    it.send(it.left, row(1, "a"))
    it.step()
    with pytest.raises(TableUnfit, match=r"run: CREATE UNIQUE INDEX .*\nIf you make the table anew, .* --reset rows"):
        write(it)


FLATTENED = """
inputs:
  - {topic: $left, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, v string, w string"}
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Raw.$left], table: rows,
     before: {set: {twice: "concat(value['v'], value.v)"}}}
"""


def test_a_value_that_debezium_did_not_send_leaves_the_column_of_a_flattened_record(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, FLATTENED)
    unsent = "__debezium_unavailable_value"
    values = [{"id": 1, "v": "a", "w": "b"}, {"id": 1, "v": unsent, "w": "c"}, {"id": 1, "v": "d", "w": unsent}]
    for value, expected in zip(values, [("a", "b", "aa"), ("a", "c", "aa"), ("d", "c", "dd")], strict=True):
        it.send(it.left, (b'{"id": 1}', value))
        it.ingest()
        write(it)
        assert rows(it) == [(1, *expected)]


TWO_WRITERS = """
inputs:
  - {topic: $left, pool: Raw, key-format: json, key-schema: id bigint, value-format: avro}
  - {topic: $right, pool: Raw, format: json}
outputs: [{topic: $out, pool: Staging}]
transforms: [{type: stateless, in: $right, out: $out, key: null, value: {v: in.value}}]
sinks:
  - {name: shop, type: sqlite, url: shop.db, from: [Raw.$left], table: rows, before: {set: {twice: value.price * 2}}}
  - {name: cheap, type: sqlite, url: shop.db, from: [Raw.$left], table: cheap, before: {where: value.price < 9}}
"""


@pytest.mark.parametrize("shape", ["", pytest.param(", shape: {where: value.id > 0}", marks=pytest.mark.slow)])
def test_a_field_that_the_writer_s_schema_lacks_leaves_its_column(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, shape: str
) -> None:
    """A shape that filters whole records makes no other fields."""
    it = mini(services, spark, tmp_path, unique, TWO_WRITERS.replace("avro}", f"avro{shape}}}"))
    registry = Registry(RegistryConfig(services.registry_url))

    def record(key: int, **fields: object) -> tuple[bytes, bytes]:
        kinds = [{"name": name, "type": ["null", "string" if name == "name" else "int"]} for name in ("id", *fields)]
        schema = {"type": "record", "name": "Row", "fields": kinds}
        return keyed(registry, f"{unique}-{'-'.join(fields)}", schema, key, {"id": key, **fields})

    it.send(it.left, record(1, name="tea"), record(1, price=5), record(2, price=7), record(2, name="rum"))
    it.ingest(it.left)
    write(it)
    assert rows(it, "SELECT id, name, price, twice FROM rows ORDER BY id") == [(1, "tea", 5, 10), (2, "rum", 7, 14)]
    # A null is a value of its own. A record without the price tells nothing of the condition on the price.
    it.send(it.left, record(1, price=None), record(2, name="gin"))
    it.ingest(it.left)
    write(it)
    assert rows(it, "SELECT id, name, price, twice FROM rows ORDER BY id") == [
        (1, "tea", None, None),
        (2, "gin", 7, 14),
    ]
    assert rows(it, "SELECT id, name, price FROM cheap ORDER BY id") == [(2, "gin", 7)]
    for sink in it.pipeline.sinks:
        assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed


LATER = """
inputs: [{topic: $left, pool: Raw, key-format: json, key-schema: id bigint, format: avro}]
sinks:
  - {name: plain, type: sqlite, url: shop.db, from: [Raw.$left], table: rows, evolve: add}
  - {name: changed, type: sqlite, url: shop.db, from: [Raw.$left], table: changed, evolve: add,
     before: {function: 'zync_assets_tests.sinks.functions:upper'}}
"""


@pytest.mark.slow
def test_rows_from_before_a_column_have_its_default(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A source makes no records for ADD COLUMN ... DEFAULT. Its first schema with the column has the default."""
    it = mini(services, spark, tmp_path, unique, LATER)
    registry = Registry(RegistryConfig(services.registry_url))

    def record(key: int, *defaults: object, op: str = "c", **fields: object) -> tuple[bytes, bytes]:
        later = [{"name": "region", "type": ["string", "null"], "default": text} for text in defaults]
        added = [{"name": "since", "type": {"type": "int", "logicalType": "date"}, "default": 20_000}] * len(defaults)
        columns = [{"name": "id", "type": "int"}, {"name": "v", "type": ["null", "string"]}, *later, *added]
        row = {"type": "record", "name": "Row", "fields": columns}
        sides = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Row"]}]
        schema = {"type": "record", "name": "Envelope", "fields": [*sides, {"name": "op", "type": "string"}]}
        after = None if op == "d" else {"id": key, **fields}
        return keyed(registry, f"{unique}-value", schema, key, {"before": None, "after": after, "op": op})

    old, day = [record(key, v=text) for key, text in enumerate("abcd")], date(2024, 10, 4)
    it.send(it.left, *old)
    it.ingest(it.left)
    write(it)
    # A row that the table has, a row that comes with the column, and a later default. A null is a value of its own.
    it.send(
        it.left,
        record(0, v="A"),
        record(4, v="e"),
        record(1, "it's", v="B", region="us", since=day),
        record(2, "it's", v="C", region=None, since=day),
        record(5, "asia", v="f", region="asia", since=day),
        record(4, v="E"),
        record(3, op="d"),
        record(3, v="D"),
    )
    it.ingest(it.left)
    # The table gets the column with the next batch.
    assert rows_match(it.pipeline, lambda: spark, it.pipeline.sinks[0], it.pipeline.sinks[0].tables[0]).passed
    write(it)
    found = [
        (0, "A", "it's", "2024-10-04"),
        (1, "B", "us", "2024-10-04"),
        (2, "C", None, "2024-10-04"),
        (3, "D", "it's", "2024-10-04"),
        (4, "E", "it's", "2024-10-04"),
        (5, "f", "asia", "2024-10-04"),
    ]
    assert rows(it) == found
    # A function may change the values of a column, so that the default is not the value of its rows.
    assert rows(it, "SELECT id, v, region, upper FROM changed ORDER BY id")[0] == (0, "A", None, "A")
    for sink in it.pipeline.sinks:
        assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
    # From the start of the source, the rows are the same.
    reset_sink(it.pipeline, lambda: spark, "plain", "rows")
    write(it)
    assert rows(it) == found
    # A table without the default has other rows than the source.
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("UPDATE rows SET region = NULL WHERE id = 4")
    sink = it.pipeline.sinks[0]
    assert "id=4: another value in region" in rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).summary


STAGED = """
inputs:
  - {topic: $left, pool: Raw, key-format: json, key-schema: id bigint, format: avro}
  - {topic: $right, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, status string"}
outputs: [{topic: $out, pool: Staging, format: avro, create: {replication-factor: 1}}]
transforms:
  - {name: row, type: stateless, in: $left, out: $out, key: in.key, value: in.value}
  - {name: status, type: stateless, in: $right, out: $out, key: in.key, value: {id: in.value.id, status: in.value.status}}
sinks:
  - {name: staged, type: sqlite, url: shop.db, from: [Staging.$out], table: rows, key: [key.id], evolve: add}
"""


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["several", "one"])
def test_staged_rows_from_before_a_column_have_its_default(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, batches: str
) -> None:
    """Whole rows that pass through a rule. A record of another rule may make the row first."""
    it = mini(services, spark, tmp_path, unique, STAGED)
    registry = Registry(RegistryConfig(services.registry_url))

    def record(key: int, *defaults: object, **fields: object) -> tuple[bytes, bytes]:
        later = [{"name": "region", "type": ["string", "null"], "default": text} for text in defaults]
        columns = [{"name": "id", "type": "long"}, {"name": "v", "type": ["null", "string"]}, *later]
        schema = {"type": "record", "name": "Row", "fields": columns}
        return keyed(registry, f"{unique}-value", schema, key, {"id": key, **fields})

    def status(key: int, text: str) -> tuple[str, dict[str, Any]]:
        return json.dumps({"id": key}), {"id": key, "status": text}

    it.send(it.left, record(1, v="a"), record(2, v="b"))
    it.send(it.right, status(1, "new"), status(8, "lone"))
    if batches == "several":
        it.step()
        write(it)
    it.send(it.left, record(3, v="c"), record(2, "eu", v="B", region="us"), record(4, "asia", v="d", region=None))
    it.send(it.left, record(1, v="A"))
    it.send(it.right, status(9, "lone"), status(4, "paid"), status(6, "paid"))
    it.step()
    # Records of a connector that has not seen the column yet.
    it.send(it.left, record(5, v="e"), record(6, v="f"))
    it.step()
    write(it)
    # A row that another rule's record made has the default if the column was not there yet.
    other = "eu" if batches == "several" else None
    found = [
        (1, "A", "new", "eu"),
        (2, "B", None, "us"),
        (3, "c", None, "eu"),
        (4, "d", "paid", None),
        (5, "e", None, "eu"),
        (6, "f", "paid", other),
        (8, None, "lone", other),
        (9, None, "lone", other),
    ]
    assert rows(it, "SELECT id, v, status, region FROM rows ORDER BY id") == found
    (sink,) = it.pipeline.sinks
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
    reset_sink(it.pipeline, lambda: spark, "staged", "rows")
    write(it)
    assert rows(it, "SELECT id, v, status, region FROM rows ORDER BY id") == found
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed


LATE_COLUMN = """
inputs: [{topic: $left, pool: Raw, key-format: json, key-schema: id bigint, format: avro}]
sinks:
  - {name: plain, type: sqlite, url: shop.db, from: [Raw.$left], table: rows, evolve: add, columns: {include: [v]}}
  - {name: filled, type: sqlite, url: shop.db, from: [Raw.$left], table: filled, evolve: add,
     before: {function: 'zync_assets_tests.sinks.functions:filled'}}
"""


def test_the_first_default_counts_in_whatever_order_partitions_have_the_schemas(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, LATE_COLUMN.replace(", columns: {include: [v]}", ""), partitions=2)
    registry = Registry(RegistryConfig(services.registry_url))

    def record(key: int, default: str = "") -> tuple[bytes, bytes]:
        region = {"name": "region", "type": ["string", "null"], "default": default}
        schema = {
            "type": "record",
            "name": "Row",
            "fields": [{"name": "id", "type": "int"}, *([region] if default else [])],
        }
        return keyed(registry, f"{unique}-value", schema, key, {"id": key, "region": "own"})

    first, second, third, fourth = record(1), record(2, "us"), record(3), record(4, "eu")
    it.send(it.left, third, second, partition=1)
    it.send(it.left, fourth, first)
    it.ingest(it.left)
    write(it)
    assert rows(it) == [(1, "us"), (2, "own"), (3, "us"), (4, "own")]


@pytest.mark.slow
def test_a_default_is_given_to_no_record_of_a_later_schema(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Nor does a value that a function makes of an absent field count as a default."""
    it = mini(services, spark, tmp_path, unique, LATE_COLUMN)
    registry = Registry(RegistryConfig(services.registry_url))

    def record(key: int, **fields: object) -> tuple[bytes, bytes]:
        region = {"name": "region", "type": ["string", "null"], "default": "us"}
        columns = [
            {"name": "id", "type": "int"},
            {"name": "v", "type": "string"},
            *([region] if len(fields) > 1 else []),
        ]
        schema = {"type": "record", "name": "Row", "fields": columns}
        return keyed(registry, f"{unique}-value", schema, key, {"id": key, **fields})

    it.send(it.left, record(1, v="a"))
    it.ingest(it.left)
    write(it)
    it.send(it.left, record(2, v="b", region=None), record(3, v="c"))
    it.ingest(it.left)
    write(it)
    assert rows(it, "SELECT id, v, region FROM filled ORDER BY id") == [
        (1, "a", None),
        (2, "b", "none"),
        (3, "c", None),
    ]
    for sink in it.pipeline.sinks:
        assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
    # The sink has left out a column. Added with its DEFAULT, the column would hide the null of record 2.
    it = it.changed(", columns: {include: [v]}", "")
    it.send(it.left, record(4, v="d", region="eu"))
    it.ingest(it.left)
    with pytest.raises(
        TableUnfit, match="region is missing, and records that are written already have values for region"
    ):
        write(it)
    reset_sink(it.pipeline, lambda: spark, "plain", "rows")
    write(it)
    assert rows(it) == [(1, "a", "us"), (2, "b", None), (3, "c", "us"), (4, "d", "eu")]


def test_a_key_that_an_update_may_change_gives_a_warning(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = ENVELOPE[: ENVELOPE.index("  - {name: some")].replace(
        "key-format: string", "key-format: json, key-schema: id bigint", 1
    )
    sinks = ", key: [{}]}}\n  - {{name: own, type: sqlite, url: shop.db, from: [Raw.$left], table: own, key: [{}]}}\n"
    text = text.replace("table: rows}\n", f"table: rows{sinks.format('value.v', 'id')}")
    it = mini(services, spark, tmp_path, unique, text)
    row = {"id": 1, "v": "a", "n": None}
    it.send(it.left, (b'{"id": 1}', {"before": None, "after": row, "op": "c"}))
    it.ingest()
    write(it)
    it.send(it.left, (b'{"id": 1}', {"before": {"id": 1}, "after": {**row, "v": "b"}, "op": "u"}))
    it.ingest()
    write(it)
    assert rows(it, "SELECT id, v FROM rows ORDER BY v") == [(1, "a"), (1, "b")]
    assert rows(it, "SELECT id, v FROM own") == [(1, "b")]
    warnings = [text for record in caplog.records if "former value stays" in (text := record.getMessage())]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"sink rows, table rows: the keys of Raw.{it.left} lack v. If an update changes such")


@pytest.mark.slow
@pytest.mark.parametrize("partition_by", ["", "partition-by: length(value.v), "])
def test_a_key_whose_records_may_lie_in_several_partitions_gives_a_warning(
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    caplog: pytest.LogCaptureFixture,
    partition_by: str,
) -> None:
    sink = "  - {name: NAME, type: sqlite, url: shop.db, from: [Staging.$out], table: NAME, key: "
    keys = {
        "whole": "[id]}",
        "places": "[kafka.topic, kafka.partition, kafka.offset]}",
        "made": "[v], before: {set: {v: key.id}}}",
    }
    more = "".join(sink.replace("NAME", name) + key + "\n" for name, key in keys.items())
    text = TEXT.replace("create: {", f"{partition_by}create: {{partitions: 3, ")
    text = text.replace("table: rows}", "table: rows, key: [value.v]}")
    it = mini(services, spark, tmp_path, unique, text + more)
    it.send(it.left, row(1, "a"), row(2, "a"), row(3, "a"))
    it.step()
    write(it)
    it.send(it.left, row(4, "b"))
    it.step()
    write(it)
    warnings = [text for record in caplog.records if "in several partitions" in (text := record.getMessage())]
    if partition_by:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert warnings[0].startswith(
            f"sink shop, table rows: the key lacks id of the keys of Staging.{it.out}, and so"
        )


NO_CHANGE = (
    ENVELOPE[: ENVELOPE.index("  - {name: all")]
    + """
  - {name: kept, type: sqlite, url: shop.db, from: [Raw.$left], table: kept, delete: false, before: {where: value.op <> 'r'}}
"""
)


@pytest.mark.slow
def test_an_envelope_that_is_no_change_of_a_row_is_put_aside(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = mini(services, spark, tmp_path, unique, NO_CHANGE)
    for op, after in (("c", {"id": 1, "v": "b"}), ("t", None), ("m", None)):
        it.send(it.left, (b'{"id": 1}', {"before": None, "after": after, "op": op}))
    it.ingest()
    write(it)
    for table in ("rows", "some", "kept"):
        assert rows(it, f"SELECT id, v FROM {table}") == [(1, "b")]
    refused = list(refused_records(it.pipeline, Selection()))
    places = [(item.sink.name, item.bad.offset) for item in refused]
    assert places == [(name, offset) for name in ("rows", "some", "kept") for offset in (1, 2)]
    assert "an envelope without `after` changes a row only if its op is d" in refused[0].bad.error

    # One sink's records are listed, written again and dropped without those of the others.
    def quarantine(word: str, *options: str) -> Result:
        return CliRunner().invoke(main, ["quarantine", word, str(it.pipeline.path), *options, "--format", "json"])

    listed = [json.loads(line)["rule"] for line in quarantine("list", "--sink", "some").stdout.splitlines()]
    assert listed == ["some/some"] * 2
    monkeypatch.setattr("zync_assets.cli.quarantine.REASONS", 1)
    replayed = quarantine("replay", "--sink", "some", "--sink", "kept", "--offsets", "0:1")
    assert json.loads(replayed.stdout) == {"replayed": 0, "left": 2}
    assert replayed.stderr.count(" stays: ") == 1
    assert "1 more record in quarantine. This shows them all: zync quarantine list" in replayed.stderr
    assert json.loads(quarantine("drop", "--sink", "some").stdout) == {"dropped": 2}
    assert {item.sink.name for item in refused_records(it.pipeline, Selection())} == {"rows", "kept"}
    again = quarantine("drop", "--sink", "some")
    assert (again.exit_code, again.stdout) == (1, "")
    assert "the options name no record of quarantine. What is: zync quarantine list" in again.stderr
    wrong = quarantine("drop", "--sink", "other")
    assert wrong.exit_code == 1
    assert "--sink other: the sinks of this pipeline are rows, some, kept." in wrong.stderr


KEY_BY_SQL = """
  - {name: shop, type: sqlite, url: shop.db, from: [Raw.$left], table: rows, columns: {include: [v]},
     before: {set: {id: CAST(value.after.code AS BIGINT)}}}
"""


def test_a_key_by_sql_that_was_not_sent_or_fails_puts_its_record_aside(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, UNSENT[: UNSENT.index("\n  - {name: shop")] + KEY_BY_SQL)
    for code in ("12", "__debezium_unavailable_value", "no number", "13"):
        after = {"id": 1, "v": "a", "code": code}
        it.send(it.left, (b'{"id": 1}', {"before": None, "after": after, "op": "u"}))
    it.ingest()
    write(it)
    assert rows(it, "SELECT id, v FROM rows ORDER BY id") == [(12, "a"), (13, "a")]
    assert [item.bad.offset for item in refused_records(it.pipeline, Selection())] == [1, 2]
    # Records that were given up hinder no comparison of the rows.
    assert drop_refused(it.pipeline, Selection()) == 2
    sink = it.pipeline.sinks[0]
    assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed


def test_keys_of_other_fields_since_an_edit_are_named_with_a_cure_that_works(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXT)
    it.send(it.left, row(1, "a"), row(2, "b"), row(3, "c"))
    it.step()
    write(it)
    other = TEXT.replace("key: {id: in.value.id}", "key: {number: in.value.id}")
    it = it.edited(other)
    it.send(it.left, row(1, "A"), row(2, op="d"))
    it.step()
    cure = "key: [number] and before: {set: {number: 'coalesce(key.id, key.number)'}}"
    words = "the keys of the records are (id) or (number), because a rule was edited"
    with pytest.raises(SinkError, match=re.escape(words)) as caught:
        write(it)
    assert f"{cure}." in str(caught.value)
    sink = "name: cured, type: sqlite, url: shop.db, from: [Staging.$out], table: cured"
    it = it.edited(f"{other[: other.index('sinks:')]}sinks:\n  - {{{sink}, {cure.replace(' and ', ', ')}}}\n")
    write(it)
    assert rows(it, "SELECT number, v FROM cured ORDER BY number") == [(1, "A"), (3, "c")]


POINTS = ("sink:prepared", "sink:loaded", "sink:merging", "sink:merged")
"""The crash points of a sink."""


@pytest.mark.slow
def test_a_killed_sink_run_again_ends_as_if_nothing_had_been(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The command as a real process, killed at each crash point with its JVM and workers."""
    it = mini(services, spark, tmp_path, unique, TEXT)
    chance = random.Random(7)
    wanted: dict[int, tuple[Any, ...]] = {}
    for point in POINTS:
        changes = [(chance.choice("ccuud"), chance.randrange(50), f"v{number}") for number in range(400)]
        it.send(it.left, *(row(key, v, op) for op, key, v in changes))
        for op, key, v in changes:
            if op == "d":
                wanted.pop(key, None)
            else:
                wanted[key] = (v, v + v if op == "c" else wanted.get(key, (None, None))[1])
        it.step()
        die(it.pipeline, point, "sink")
        run(it.pipeline, "sink")
        assert {found[0]: found[1:] for found in rows(it)} == wanted, point
        assert not list(tmp_path.glob("shop.db-*"))
    assert rows(it, "SELECT next FROM zync_positions") == [(it.head.outputs[it.out, 0].next,)]
    # `zync run` goes on without a table that does not fit, and ends with its error.
    sinks = "".join(
        f"  - {{name: {name}, type: sqlite, url: shop.db, from: [Staging.$out], table: {table}, create: {create}}}\n"
        for name, table, create in (("unfit", "absent", "false"), ("shop", "rows", "true"))
    )
    both = edited(it, sinks)
    both.send(it.left, row(100, "last"))
    ended = subprocess.run(
        [*ZYNC, "run", str(both.pipeline.path), "--exit-after", "20s"], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "error: sink unfit, table absent is not there. Set create: true, or run:" in ended.stderr
    assert rows(it, "SELECT v FROM rows WHERE id = 100") == [("last",)]


ZYNC = (sys.executable, "-c", "from zync_assets.cli.main import main; main()")


def test_the_text_of_one_difference_has_no_range_of_keys() -> None:
    one = Differences(5, 1, (("id=2", "another value in v"),), "id=2", "id=2")
    assert str(one) == "1 row differs. id=2: another value in v"
    assert str(one + one).startswith("2 rows differ, with keys from id=2 to id=2. ")
