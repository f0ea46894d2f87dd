"""Records that a replay of ingest's quarantine brings after a sink has passed their offsets."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.errors import TargetRefused
from zync_assets.lake import archive
from zync_assets.lake.quarantine_table import EVERYTHING, Selection
from zync_assets.local.services import Services
from zync_assets.runner import replay_all
from zync_assets.sinks import replay
from zync_assets.sinks.replay import LATE, refused_records, wanted_from
from zync_assets.sinks.steps import sink_all
from zync_assets.sinks.target import Merge, Place, TableSpec
from zync_assets_tests.mini import die, mini, run
from zync_assets_tests.quarantine.test_replay import Late
from zync_assets_tests.test_exactly_once import breaking
from zync_assets_tests.test_writers_side_by_side import AVRO, COPY, fastavro_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINKS = """
sinks:
  - {name: rows, type: sqlite, url: shop.db, from: [Raw.$left], table: rows, key: [value.id], evolve: add}
  - {name: log, type: sqlite, url: shop.db, from: [Raw.$left], table: log, mode: insert, evolve: add}
"""
ROWS, LOG = "SELECT id, more FROM rows ORDER BY id", "SELECT id, kafka_offset FROM log ORDER BY rowid"


class Passed(Late):
    """A topic with records 1, 2 and 3. Two sinks have written the records 1 and 3, and passed the record 2, which is in
    quarantine."""

    def __init__(
        self,
        services: Services,
        spark: SparkSession,
        folder: Path,
        unique: str,
        sinks: str = SINKS,
        times: Sequence[int] = (1000, 5000, 2000),
        topics: str = AVRO + COPY,
    ) -> None:
        super().__init__(mini(services, spark, folder, unique, topics + sinks), times)
        self.it.ingest()
        self.write()

    def send(self, id: int) -> None:
        """A later record of the narrow schema, in the lake."""
        narrow = {**self.wide, "fields": self.wide["fields"][:1]}
        self.it.send(self.it.left, b"\0" + self.known.to_bytes(4, "big") + fastavro_bytes(narrow, {"id": id}))
        self.it.ingest()

    def replay(self) -> None:
        """The record 2 comes into the raw table."""
        self.mend()
        list(replay_all(self.it.pipeline, lambda: self.it.spark, EVERYTHING))

    def write(self) -> None:
        list(sink_all(self.it.pipeline, lambda: self.it.spark))

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(self.it.pipeline.path.parent / "shop.db") as connection:
            return connection.execute(statement).fetchall()

    def quarantine(self) -> list[tuple[str, int]]:
        return [(item.table.name, item.bad.offset) for item in refused_records(self.it.pipeline, Selection())]


@pytest.fixture
def passed(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Passed:
    return Passed(services, spark, tmp_path, unique)


def test_a_raw_record_of_a_replay_is_written_once(passed: Passed) -> None:
    assert passed.sql(LOG) == [(1, 0), (3, 2)]
    passed.replay()
    passed.write()
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None)]
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 1)]
    passed.write()
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 1)]
    assert passed.quarantine() == []


@pytest.mark.slow
def test_the_command_of_the_replay_writes_it(passed: Passed) -> None:
    passed.mend()
    done = CliRunner().invoke(main, ["quarantine", "replay", str(passed.it.pipeline.path)])
    assert (done.exit_code, done.stdout) == (0, "1 replayed, 0 left\n")
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None)]
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 1)]


def test_a_table_that_fails_holds_back_no_other_table_of_a_replay(passed: Passed) -> None:
    passed.mend()
    passed.sql("ALTER TABLE rows RENAME TO others")
    done = CliRunner().invoke(main, ["quarantine", "replay", str(passed.it.pipeline.path)])
    assert (done.exit_code, done.stdout) == (1, "1 replayed, 0 left\n")
    assert "sink rows, table rows is not there" in done.stderr
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 1)]
    passed.sql("ALTER TABLE others RENAME TO rows")
    passed.write()
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None)]


@pytest.mark.slow
def test_a_record_that_a_sink_has_not_passed_comes_in_its_place(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    late = Late(mini(services, spark, tmp_path, unique, AVRO + COPY + SINKS))
    late.it.ingest()
    late.mend()
    list(replay_all(late.it.pipeline, lambda: spark, EVERYTHING))
    list(sink_all(late.it.pipeline, lambda: spark))
    list(sink_all(late.it.pipeline, lambda: spark))
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        assert sorted(connection.execute(LOG).fetchall()) == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.slow
def test_a_later_record_of_the_key_stays_and_a_warning_names_the_cure(
    passed: Passed, caplog: pytest.LogCaptureFixture
) -> None:
    passed.send(2)
    passed.write()
    passed.replay()
    passed.write()
    assert passed.sql(ROWS) == [(1, None), (2, None), (3, None)]
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 3), (2, 1)]
    assert passed.quarantine() == []
    assert "sink rows, table rows: 1 record of a replay came after later records of the same keys" in caplog.text
    assert caplog.text.count("load the table again: zync sink ") == 1
    command = f"sink {passed.it.pipeline.path} --sink rows --reset rows"
    assert command in caplog.text
    assert CliRunner().invoke(main, command.split()).exit_code == 0
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None)]


@pytest.mark.slow
def test_the_command_changes_a_table_that_lacks_a_column_of_a_refused_record(passed: Passed) -> None:
    passed.replay()
    with breaking(replay, "_prepare", after=False):
        passed.write()
    assert passed.quarantine() == [("rows", 1), ("log", 1)]
    done = CliRunner().invoke(main, ["quarantine", "replay", str(passed.it.pipeline.path)])
    assert (done.exit_code, done.stdout) == (0, "2 replayed, 0 left\n")
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None)]


@pytest.mark.slow
def test_the_command_names_the_column_where_the_table_may_not_change(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    passed = Passed(services, spark, tmp_path, unique, SINKS.replace("evolve: add", "evolve: none"))
    command = ["quarantine", "replay", str(passed.it.pipeline.path)]
    passed.mend()
    for _ in range(2):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 1
        assert "sink rows, table rows: column more is missing. Set evolve: add, or run:\n" in done.stderr
        assert "sink log, table log: column more is missing." in done.stderr
        assert passed.quarantine() == [("rows", 1), ("log", 1)]
    for table in ("rows", "log"):
        passed.sql(f"ALTER TABLE {table} ADD COLUMN more TEXT")
    assert CliRunner().invoke(main, command).exit_code == 0
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None)]


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_an_error_on_the_way_writes_no_record_twice(passed: Passed, after: bool) -> None:
    passed.replay()
    with breaking(replay, "_replay", after=after):
        passed.write()
    assert passed.sql("SELECT DISTINCT error FROM zync_quarantine") == ([] if after else [(LATE,)])
    passed.send(4)
    passed.write()
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None), (4, None)]
    assert sorted(passed.sql(LOG)) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert passed.quarantine() == []


POINTS = ("sink:late",)
"""The crash points of late records."""


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_command_run_again_writes_each_record_once(passed: Passed, point: str) -> None:
    passed.replay()
    die(passed.it.pipeline, point, "sink")
    assert passed.sql(LOG) == [(1, 0), (3, 2)]
    run(passed.it.pipeline, "sink")
    assert passed.sql(ROWS) == [(1, None), (2, "x"), (3, None)]
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 1)]
    assert passed.quarantine() == []


@pytest.mark.slow
def test_a_refused_record_stays_and_is_tried_once(passed: Passed, caplog: pytest.LogCaptureFixture) -> None:
    for table in ("rows", "log"):
        passed.sql(
            f"CREATE TRIGGER {table}_of_two BEFORE INSERT ON {table} WHEN NEW.id = 2 BEGIN SELECT RAISE(ABORT, 'no two'); END"
        )
    passed.replay()
    passed.write()
    passed.write()
    assert caplog.text.count("the target refused 1 record of a replay. The first is partition 0, offset 1") == 2
    assert passed.quarantine() == [("rows", 1), ("log", 1)]
    passed.sql("DROP TRIGGER rows_of_two")
    passed.sql("DROP TRIGGER log_of_two")
    done = CliRunner().invoke(main, ["quarantine", "replay", str(passed.it.pipeline.path)])
    assert (done.exit_code, done.stdout) == (0, "2 replayed, 0 left\n")
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 1)]


def test_records_are_written_again_in_the_largest_parts_that_the_target_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[list[int]] = []

    def apply(merge: Merge, name: str, rows: list[pa.RecordBatch]) -> None:
        offsets = [offset for _, offset in merge.cured]
        if 5 in offsets:
            raise TargetRefused("no five")
        parts.append(offsets)
        assert rows[0].column(replay.OFFSET).to_pylist() == sorted(offsets, key=lambda offset: (offset % 2, offset))

    monkeypatch.setattr(replay, "open_target", lambda _: SimpleNamespace(apply=apply))
    monkeypatch.setattr(replay, "loaded", lambda _, batches: batches)
    layout: Any = SimpleNamespace(key_names=["c0"], spec=SimpleNamespace(mode="upsert"))
    sink: Any = None
    merge = Merge(Place("p", "s", "Raw.t"), TableSpec("t", (), (), "upsert"), "", {}, {})
    offsets = range(12)
    columns = {"c0": [offset % 2 for offset in offsets], replay.TIME: offsets, replay.PARTITION: [0] * 12}
    rows = pa.RecordBatch.from_pydict({**columns, replay.OFFSET: offsets})
    writer = replay.PartWriter(replay.ReplayTask(sink, layout, "run", merge, {(0, 2): "too late"}))
    writer.apply(rows)
    assert parts == [[0, 1], [3], [4], [6, 7, 8, 9, 10, 11]]
    assert writer.reasons.pop((0, 2)) == "too late"
    assert writer.reasons.pop((0, 5)) == "no five"
    assert writer.reasons == {(0, offset): None for offset in offsets if offset not in (2, 5)}


@pytest.mark.slow
def test_retention_keeps_a_record_that_a_sink_wants(passed: Passed) -> None:
    it = passed.it
    assert wanted_from(it.pipeline, it.left) == {0: 3}
    passed.replay()
    assert wanted_from(it.pipeline, it.left) == {0: 1}
    passed.write()
    assert wanted_from(it.pipeline, it.left) == {0: 3}


RETENTION = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro, retention: 1h}
  - {topic: $right, pool: Raw, key-format: string, value-format: avro}
"""


@pytest.mark.slow
def test_a_record_among_removed_records_changes_no_row(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A later record of its key was written and removed. Nothing tells of it."""
    passed = Passed(services, spark, tmp_path, unique, topics=RETENTION)
    it = passed.it
    passed.send(2)
    passed.write()
    assert it.raw(it.left) == []
    passed.replay()
    passed.write()
    assert passed.sql("SELECT * FROM rows ORDER BY id") == [(1,), (2,), (3,)]
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 3), (2, 1)]
    assert passed.quarantine() == [("rows", 1)]
    assert "sink rows, table rows: 1 record of a replay left the rows as they were" in caplog.text
    assert wanted_from(it.pipeline, it.left) == {0: 4}
    done = CliRunner().invoke(main, ["quarantine", "replay", str(it.pipeline.path)])
    assert (done.exit_code, done.stdout) == (1, "0 replayed, 1 left\n")
    assert "stays: retention removed the records around it" in done.stderr
    # The command gives the table the record's column, and no value.
    assert passed.sql(ROWS) == [(1, None), (2, None), (3, None)]
    drop = ["quarantine", "drop", str(it.pipeline.path), "--sink", "rows"]
    assert CliRunner().invoke(main, drop).exit_code == 0
    assert passed.quarantine() == []


@pytest.mark.slow
def test_a_position_of_an_older_version_begins_to_count_with_the_next_batch(passed: Passed) -> None:
    passed.replay()
    passed.write()
    # Older versions counted no replays. Whether the sink has the record is then unknown.
    passed.sql("DELETE FROM zync_positions WHERE partition < 0")
    passed.write()
    passed.send(4)
    passed.write()
    assert passed.sql(LOG) == [(1, 0), (3, 2), (2, 1), (4, 3)]
    assert passed.sql("SELECT sink, next FROM zync_positions WHERE partition < 0") == [("rows", 1), ("log", 1)]


@pytest.mark.slow
def test_an_archive_takes_a_record_between_objects_and_refuses_one_within_an_object(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A reader takes an object within the range of another object for a shorter form of it."""
    sinks = "sinks:\n  - {name: keep, type: files, url: 'archive?format=jsonl', from: [Raw.$left]}\n"
    passed = Passed(services, spark, tmp_path, unique, sinks)
    passed.replay()
    passed.write()
    assert archived(tmp_path) == {"0-2": [1, 3]}
    ((table, _),) = passed.quarantine()
    reset = ["sink", str(passed.it.pipeline.path), "--reset", table]
    assert CliRunner().invoke(main, reset).exit_code == 0
    assert archived(tmp_path) == {"0-2": [1, 2, 3]}
    assert passed.quarantine() == []


@pytest.mark.slow
def test_an_archive_of_many_objects_refuses_a_record_within_an_early_one(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state lists its last objects. A file has the others."""
    monkeypatch.setattr(archive, "MOST_OBJECTS", 0)
    sinks = "sinks:\n  - {name: keep, type: files, url: 'archive?format=jsonl', from: [Raw.$left]}\n"
    passed = Passed(services, spark, tmp_path, unique, sinks)
    passed.send(4)
    passed.write()
    passed.replay()
    passed.write()
    assert archived(tmp_path) == {"0-2": [1, 3], "3-3": [4]}
    assert [offset for _, offset in passed.quarantine()] == [1]


@pytest.mark.slow
def test_an_archive_has_a_replayed_record_in_an_object_between_its_neighbours(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The records 1 and 3 are of other hours."""
    sinks = "sinks:\n  - {name: keep, type: files, url: 'archive?format=jsonl', from: [Raw.$left]}\n"
    hour = 3_600_000
    passed = Passed(services, spark, tmp_path, unique, sinks, times=[hour, 2 * hour, 3 * hour])
    passed.replay()
    passed.write()
    assert archived(tmp_path) == {"0-0": [1], "1-1": [2], "2-2": [3]}
    assert passed.quarantine() == []
    passed.send(4)
    passed.write()
    assert [id for ids in archived(tmp_path).values() for id in ids] == [1, 2, 3, 4]


def archived(folder: Path) -> dict[str, list[int]]:
    """The range of each object → the ids of its records, by offset."""
    paths = sorted((folder / "archive").rglob("*.jsonl.gz"), key=lambda path: path.name)
    return {
        path.name.partition(".")[0]: [json.loads(line)["value"]["id"] for line in gzip.open(path, "rt")]
        for path in paths
    }


@pytest.mark.slow
def test_clickhouse_has_the_record_once(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    from zync_assets_tests.sinks.test_clickhouse import query

    url = f"chdb://{tmp_path}/shop"
    passed = Passed(
        services, spark, tmp_path, unique, SINKS.replace("sqlite, url: shop.db", f"clickhouse, url: '{url}'")
    )
    passed.replay()
    passed.write()
    passed.write()
    assert query(tmp_path / "shop", "SELECT id, more FROM rows FINAL ORDER BY id") == [(1, None), (2, "x"), (3, None)]
    assert query(tmp_path / "shop", "SELECT id FROM log FINAL ORDER BY id") == [(1,), (2,), (3,)]
    assert passed.quarantine() == []
