"""Databend as a target, on its embedded engine: the conformance of any target, and what is Databend's own."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from zync_assets.errors import SinkError, TableUnfit, TargetUnavailable
from zync_assets.local.services import Services
from zync_assets.sinks.databend import DatabendTarget
from zync_assets.sinks.databend_engine import EngineSession
from zync_assets.sinks.target import Column
from zync_assets_tests.sinks.batches import apply, apply_days, assert_defaults_of_older_rows_alone, one, spec
from zync_assets_tests.sinks.conformance import PLACE, assert_conforms, assert_refuses
from zync_assets_tests.sinks.story import play

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def query(folder: Path, sql: str) -> list[Any]:
    session = EngineSession(folder)
    try:
        return session.run(sql)[1]
    finally:
        session.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_databend_conforms(tmp_path: Path, seed: int) -> None:
    def load_tables() -> list[str]:
        return [name for (name,) in query(tmp_path, "SHOW TABLES") if name.startswith("zync_load")]

    assert_conforms("databend", f"databend://{tmp_path}", load_tables, seed=seed)


def target(folder: Path) -> DatabendTarget:
    return DatabendTarget(f"databend://{folder}")


@pytest.mark.slow
def test_a_partial_record_needs_no_nullable_columns_and_leaves_defaults(tmp_path: Path) -> None:
    it = target(tmp_path)
    query(tmp_path, 'CREATE TABLE "rows" (id BIGINT NOT NULL, a VARCHAR NOT NULL, b INT DEFAULT 7, v VARIANT)')
    table = spec(id=pa.int64(), a=pa.string(), b=pa.int32(), v=pa.string())
    it.prepare(table, create=False, evolve="none")
    apply(it, table, [one(1, {"a": "x"}), one(2, {"a": "y", "b": None, "v": '{"n": [1, "ü"]}'}), one(3, {"a": "z"})])
    apply(it, table, [one(1, {"b": 1}), one(2, {"v": None}), one(3, None), one(4, {"a": "w", "b": 2})])
    found = query(tmp_path, 'SELECT id, a, b, to_string(v) FROM "rows" ORDER BY id')
    assert found == [(1, "x", 1, None), (2, "y", None, None), (4, "w", 2, None)]


@pytest.mark.slow
def test_a_number_of_days_becomes_a_date_in_a_new_column_alone(tmp_path: Path) -> None:
    apply_days(target(tmp_path))
    rows = query(tmp_path, 'SELECT "old", "day" FROM "rows" ORDER BY id')
    assert rows == [(-1, None), (19782, date(2024, 2, 29)), (None, date(1969, 12, 31))]


@pytest.mark.slow
def test_a_default_with_a_quote_is_an_error_with_its_cure(tmp_path: Path) -> None:
    """Databend keeps a DEFAULT as SQL that it can't parse again."""
    it = target(tmp_path)
    table = spec(id=pa.int64())
    it.prepare(table, create=True, evolve="add")
    late = Column("town", pa.string(), default=pa.scalar("St. John's"))
    with pytest.raises(
        TableUnfit, match=r"DEFAULT with a quote\. Add the column as a VARCHAR, and set it to St\. John's in"
    ):
        it.prepare(replace(table, columns=(*table.columns, late)), create=True, evolve="add")


@pytest.mark.slow
def test_a_value_that_does_not_fit_is_a_refused_record(tmp_path: Path) -> None:
    it = target(tmp_path)
    query(tmp_path, 'CREATE TABLE "rows" (id BIGINT NOT NULL, a VARCHAR NOT NULL, v VARIANT)')
    table = spec(id=pa.int64(), a=pa.string(), v=pa.string())
    for fields, words in (
        ({"v": "1"}, "null value in column `a`"),
        ({"a": None}, "NULL"),
        ({"a": "x", "v": "{no json"}, "parse_json"),
    ):
        assert words in assert_refuses(it, table, [one(1, fields)])
    assert query(tmp_path, 'SELECT * FROM "rows"') == []


@pytest.mark.slow
def test_a_table_that_does_not_fit_is_left_as_it_is_and_the_error_has_the_ddl(tmp_path: Path) -> None:
    it = target(tmp_path)
    table = spec(id=pa.int64(), n=pa.int32(), p=pa.decimal128(5, 2), f=pa.float32())
    with pytest.raises(TableUnfit, match=r'Set create: true, or run:\nCREATE TABLE "rows"'):
        it.prepare(table, create=False, evolve="none")
    it.prepare(table, create=True, evolve="none")
    new = spec(id=pa.int64(), n=pa.int64(), p=pa.decimal128(8, 3), f=pa.float64(), more=pa.string())
    with pytest.raises(TableUnfit, match=r'Set evolve: widen, or run:\nALTER TABLE "rows" MODIFY COLUMN "n" BIGINT'):
        it.prepare(new, create=True, evolve="add")
    it.prepare(new, create=True, evolve="widen")
    apply(it, new, [one(1, {"n": 2**40, "p": Decimal("12345.678"), "f": 0.1, "more": "m"})])
    assert query(tmp_path, 'SELECT n, p, f, more FROM "rows"') == [(2**40, Decimal("12345.678"), 0.1, "m")]
    with pytest.raises(TableUnfit, match=r"column n is BIGINT, and its source is string; change the column"):
        it.prepare(spec(id=pa.int64(), n=pa.string()), create=True, evolve="widen")


@pytest.mark.slow
def test_a_sink_of_a_pipeline_writes_to_databend(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    house = tmp_path / "house"
    play(services, spark, tmp_path, unique, "databend", f"databend://{house}", partial(query, house))


def test_no_error_has_the_password() -> None:
    with pytest.raises(SinkError) as error:
        DatabendTarget("databend://me:secret@[bad/shop").progress(PLACE)
    assert "secret" not in str(error.value)


def test_the_driver_does_not_repeat_what_the_sink_repeats(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(TargetUnavailable, match="Connection refused"):
        DatabendTarget("databend://me:secret@127.0.0.1:1/shop").progress(PLACE)
    assert time.monotonic() - began < 3
    assert capfd.readouterr().err == ""


RIVALS = """
from databend import SessionContext
ours, rival = SessionContext("ten1"), SessionContext("ten1")
run = lambda session, sql: session.sql(sql).collect()
run(ours, "CREATE TABLE positions (next INT)")
run(ours, "CREATE TABLE orders (id INT)")
run(ours, "BEGIN")
run(ours, "INSERT INTO positions VALUES (-1)")
run(rival, "INSERT INTO positions VALUES (7)")
run(ours, "INSERT INTO orders VALUES (1)")
try:
    run(ours, "COMMIT")
except RuntimeError as error:
    assert "Code: 2009" in str(error)
else:
    raise SystemExit("COMMIT changed a table that another transaction has changed")
run(ours, "ROLLBACK")
assert ours.sql("SELECT id FROM orders").to_arrow_table().num_rows == 0
"""


def test_a_commit_fails_if_another_one_has_changed_a_pinned_table(tmp_path: Path) -> None:
    """The merge rests on this word of the engine. Two sessions need one process."""
    ended = subprocess.run(
        [sys.executable, "-c", RIVALS], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_the_default_of_a_new_column_is_for_older_rows_alone(tmp_path: Path) -> None:
    assert_defaults_of_older_rows_alone(target(tmp_path))
