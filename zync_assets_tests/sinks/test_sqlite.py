"""SQLite as a target: the conformance of any target, and what is SQLite's own."""

from __future__ import annotations

import math
import re
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import exc

from zync_assets.errors import SinkError, TableUnfit
from zync_assets.sinks.sqlite import SqliteTarget
from zync_assets.sinks.target import Column, TableSpec
from zync_assets_tests.sinks.batches import apply, apply_days, assert_defaults_of_older_rows_alone, one, text
from zync_assets_tests.sinks.conformance import assert_conforms, assert_refuses


def test_sqlite_conforms(tmp_path: Path) -> None:
    def load_files() -> list[str]:
        return [item.name for item in tmp_path.iterdir() if item.name != "it.db"]

    assert_conforms("sqlite", f"sqlite:///{tmp_path}/it.db", load_files)


def spec(**types: pa.DataType) -> TableSpec:
    columns = tuple(Column(name, kind) for name, kind in types.items())
    return TableSpec("rows", columns, (columns[0].name,), "upsert")


def test_a_value_that_sqlite_would_change_is_refused(tmp_path: Path) -> None:
    target = SqliteTarget(f"sqlite:///{tmp_path}/it.db")
    table = spec(id=pa.int64(), number=pa.float64())
    assert assert_refuses(target, table, [((1, ""), {"number": math.nan})]) == (
        "the column number is nan, and SQLite has no such number"
    )


def test_a_table_that_does_not_fit_is_left_as_it_is_and_the_error_has_the_ddl(tmp_path: Path) -> None:
    target = SqliteTarget(f"sqlite:///{tmp_path}/it.db")
    target.prepare(spec(id=pa.int64(), name=pa.string()), create=True, evolve="none")
    with pytest.raises(TableUnfit, match=r"Set evolve: add, or run:\nALTER TABLE rows ADD COLUMN more TEXT;"):
        target.prepare(spec(id=pa.int64(), more=pa.string()), create=True, evolve="none")
    with pytest.raises(TableUnfit, match="column name is TEXT, and its source is bigint; change the column"):
        target.prepare(spec(id=pa.int64(), name=pa.int64()), create=True, evolve="widen")
    with pytest.raises(TableUnfit) as error:
        target.prepare(spec(id=pa.int64(), name=pa.int64(), more=pa.string()), create=True, evolve="add")
    assert "more" not in str(error.value)  # The sink may add the column.
    with pytest.raises(TableUnfit, match=r"no primary key or unique constraint is on \(name\)"):
        target.prepare(spec(name=pa.string(), id=pa.int64()), create=True, evolve="widen")
    with pytest.raises(TableUnfit, match=r"table gone is not there\. Set create: true, or run:\nCREATE TABLE gone"):
        target.prepare(TableSpec("gone", spec(id=pa.int64()).columns, ("id",), "upsert"), create=False, evolve="none")


def test_a_table_that_was_made_by_hand_gains_no_column_by_default(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "it.db")) as database:
        database.execute("CREATE TABLE rows (id INTEGER NOT NULL PRIMARY KEY)")
    target, table = SqliteTarget(f"sqlite:///{tmp_path}/it.db"), spec(id=pa.int64(), more=pa.string())
    with pytest.raises(TableUnfit, match=r"column more is missing\. Set evolve: add, or run:"):
        target.prepare(table, create=True, evolve="own")
    target.prepare(table, create=True, evolve="add")


def test_a_table_whose_name_has_a_schema_gains_a_column(tmp_path: Path) -> None:
    target = SqliteTarget(f"sqlite:///{tmp_path}/it.db")
    for table in (spec(id=pa.int64()), spec(id=pa.int64(), more=pa.string())):
        target.prepare(replace(table, name="main.rows", comment="web-shop: Raw.rows"), create=True, evolve="own")


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (
            "TABLE rows (id TEXT NOT NULL, v TEXT)",
            "no primary key or unique constraint is on (id); run: CREATE UNIQUE INDEX",
        ),
        (
            "TABLE rows (id TEXT NOT NULL, v TEXT); CREATE UNIQUE INDEX some ON rows (id) WHERE v > 'a'",
            "no primary key or unique constraint is on (id); run: CREATE UNIQUE INDEX",
        ),
        (
            "TABLE rows (id TEXT COLLATE NOCASE PRIMARY KEY, v TEXT)",
            "the key's column id takes texts for equal that differ",
        ),
        (
            "TABLE rows (id TEXT PRIMARY KEY, v TEXT AS (id || 'x'))",
            "the database itself generates column v; leave it out",
        ),
        (
            "TABLE kept (id TEXT PRIMARY KEY, v TEXT); CREATE VIEW rows AS SELECT * FROM kept",
            "it is a view; name the view's",
        ),
    ],
)
def test_a_table_that_takes_no_row_by_its_key_is_refused_with_the_cure(tmp_path: Path, made: str, problem: str) -> None:
    target, table = SqliteTarget(f"sqlite:///{tmp_path}/it.db"), spec(id=pa.string(), v=pa.string())
    with sqlite3.connect(tmp_path / "it.db") as connection:
        connection.executescript(f"CREATE {made}")
    with pytest.raises(TableUnfit) as error:
        target.prepare(table, create=False, evolve="none")
    assert problem in str(error.value)
    if "run: " in problem:
        with sqlite3.connect(tmp_path / "it.db") as connection:
            connection.executescript(str(error.value).split("run: ")[1])
        target.prepare(table, create=False, evolve="none")
        apply(target, table, [text("a", "1"), text("A", "2")])


def test_a_number_of_days_becomes_a_date_in_a_new_column_alone(tmp_path: Path) -> None:
    apply_days(SqliteTarget(f"sqlite:///{tmp_path}/it.db"))
    with sqlite3.connect(tmp_path / "it.db") as connection:
        rows = connection.execute("SELECT old, day FROM rows ORDER BY id").fetchall()
    assert rows == [(-1, None), (19782, "2024-02-29"), (None, "1969-12-31")]


def test_the_statements_for_a_key_column_that_is_missing_run_in_their_order(tmp_path: Path) -> None:
    target, table = SqliteTarget(f"sqlite:///{tmp_path}/it.db"), spec(id=pa.string(), v=pa.string())
    with sqlite3.connect(tmp_path / "it.db") as connection:
        connection.execute("CREATE TABLE rows (v TEXT)")
    with pytest.raises(TableUnfit) as error:
        target.prepare(table, create=False, evolve="none")
    with sqlite3.connect(tmp_path / "it.db") as connection:
        connection.executescript("".join(re.findall("(?:ALTER|CREATE) .*?;", str(error.value))))
    target.prepare(table, create=False, evolve="none")


def test_a_text_does_not_go_into_a_column_that_would_make_it_a_number(tmp_path: Path) -> None:
    """DATE and JSON have the affinity NUMERIC. A date in a DATE column stays a text."""
    target = SqliteTarget(f"sqlite:///{tmp_path}/it.db")
    with sqlite3.connect(tmp_path / "it.db") as connection:
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, day DATE, doc JSON, n NUMERIC)")
    for name, kind in (("day", "DATE"), ("doc", "JSON")):
        with pytest.raises(TableUnfit, match=f"column {name} is {kind}, and its source is string; change the column"):
            target.prepare(spec(id=pa.int64(), **{name: pa.string()}), create=False, evolve="widen")
    table = spec(id=pa.int64(), day=pa.date32(), n=pa.int64())
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"day": date(2024, 1, 2), "n": 2**62 + 1})])
    with sqlite3.connect(tmp_path / "it.db") as connection:
        assert connection.execute("SELECT day, n, typeof(n) FROM rows").fetchall() == [
            ("2024-01-02", 2**62 + 1, "integer")
        ]
    assert [row["n"] for batch in target.rows(table) for row in batch.to_pylist()] == [2**62 + 1]


@pytest.mark.parametrize("create", [True, False])
def test_a_table_in_a_schema_is_refused_with_the_cure(tmp_path: Path, create: bool) -> None:
    target = SqliteTarget(f"sqlite:///{tmp_path}/it.db")
    with pytest.raises(TableUnfit, match=r"^table shop\.rows: SQLite has no schema shop\. Write table: rows\.$"):
        target.prepare(
            TableSpec("shop.rows", (Column("id", pa.int64()),), ("id",), "upsert"), create=create, evolve="add"
        )


def test_a_file_that_can_t_be_opened_is_named_with_the_cure(tmp_path: Path) -> None:
    table, folder = spec(id=pa.int64()), tmp_path / "no such folder"
    for path, words in (
        (tmp_path, f"{tmp_path} is a folder. Name a file in the sink's url, such as {tmp_path}/rows.db."),
        (folder / "it.db", f"the folder {folder} of the sink's url is not there. Run:\nmkdir -p '{folder}'"),
    ):
        with pytest.raises(SinkError) as error:
            SqliteTarget(f"sqlite:///{path}").prepare(table, create=True, evolve="none")
        assert str(error.value) == words
    subprocess.run(str(error.value).partition("Run:\n")[2], shell=True, check=True)
    SqliteTarget(f"sqlite:///{folder}/it.db").prepare(table, create=True, evolve="none")


def test_a_full_disk_is_named_with_the_cure(tmp_path: Path) -> None:
    with sqlite3.connect(":memory:") as connection, pytest.raises(sqlite3.OperationalError) as full:
        connection.executescript("PRAGMA max_page_count = 1; CREATE TABLE rows (id TEXT)")
    error = SqliteTarget(f"sqlite:///{tmp_path}/it.db").error(exc.OperationalError(None, None, full.value))
    assert type(error) is SinkError
    assert str(error).startswith(f"{tmp_path}/it.db: the disk is full. Make room")


def test_what_a_killed_run_left_is_found_beside_any_file(tmp_path: Path) -> None:
    (tmp_path / "rows[1].db-zync_load_0").touch()
    assert SqliteTarget(f"sqlite:///{tmp_path / 'rows[1].db'}").tables() == ["zync_load_0"]


def test_the_default_of_a_new_column_is_for_older_rows_alone(tmp_path: Path) -> None:
    assert_defaults_of_older_rows_alone(SqliteTarget(f"sqlite:///{tmp_path / 'shop.db'}"))
    # The user's own column takes no null.
    it = SqliteTarget(f"sqlite:///{tmp_path / 'own.db'}")
    with sqlite3.connect(tmp_path / "own.db") as connection:
        connection.execute("CREATE TABLE rows (id BIGINT PRIMARY KEY, v TEXT, w TEXT NOT NULL DEFAULT 'mine')")
        table = spec(id=pa.int64(), v=pa.string())
        table = replace(table, columns=(*table.columns, Column("w", pa.string(), default=pa.scalar("default"))))
        it.prepare(table, create=False, evolve="none")
        apply(it, table, [one(1, {"v": "a"})])
        assert connection.execute("SELECT * FROM rows").fetchall() == [(1, "a", "mine")]
