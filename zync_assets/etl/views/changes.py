"""The changes of a batch: for each key of a table, the row before the batch and the row after it.

A batch writes the changes as files of the state, and reads these files for the views. The files hold the rows as columns, so
that a view reads only the columns that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.account import Fact
from zync_assets.etl.failures import MOST_FAILURES, Failure, Place
from zync_assets.etl.rules.matching import Ordering
from zync_assets.etl.rules.shapes import made_sql, type_sql
from zync_assets.etl.views.state import Reader, StateFiles, ranges_of, write_state
from zync_assets.etl.views.tables import TableType, null_sql, place_sql
from zync_assets.spark.frames import union
from zync_assets.spark.sql import name_sql, text_sql
from zync_assets.spark.tasks import raised_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

APPLIED = "applied"
"""The kind of the facts about records that became rows of a table. They are done."""


class RowFailures(Exception):
    """Records that can't become rows of a table, or whose results can't be made. Nothing was done."""

    def __init__(self, failures: Mapping[Place, Failure]) -> None:
        super().__init__(f"{len(failures)} records fail")
        self.failures = failures


@dataclass(frozen=True)
class TableRecords:
    """The records of a batch for one table.

    ``frame``: key, row, partition, offset, high, low. ``count``: of the records. ``ranges``: of the places of keys, None for a
    large batch. ``opens``: whether a row lacks an unchanged value that Debezium did not send.
    """

    kind: TableType
    frame: DataFrame = field(repr=False)
    count: int
    places: Sequence[int] | None
    opens: bool


def record_rows(kind: TableType, records: DataFrame, ordering: Ordering) -> DataFrame:
    """A table's rows in records: key, row (null: deleted), partition, offset, high, low. ``records``: as in ``matching``."""
    table = kind.table
    row = made_sql(kind.row_sql, kind.row, kind.state_row)
    return records.selectExpr(
        f"{made_sql(table.key, kind.key, kind.state_key)} AS key",
        f"CASE WHEN NOT {kind.deleted_sql} THEN {row} END AS row",
        "kafka.partition AS partition",
        "kafka.offset AS offset",
        f"{'order_high' if ordering.domains else 'unix_micros(time)'} AS high",
        f"{'order_low' if ordering.domains else '0L'} AS low",
    )


def look(
    parts: Mapping[str, tuple[TableType, DataFrame]], placeholder: str | None, *, small: bool
) -> tuple[list[TableRecords], list[Fact]]:
    """The batch's records of each table, and the facts about these records. A single Spark job reads all tables.

    ``parts``: name of a table → its type and its ``record_rows``; ``placeholder``: see ``Pipeline.unavailable_value``.
    Raises RowFailures for records without a key.
    """
    frames: list[DataFrame] = []
    for name, (kind, rows) in parts.items():
        place = f"CAST({place_sql('key', kind.state_key)}.high AS BIGINT)"
        opens = " OR ".join(f"row.{name_sql(path)} = {sql}" for path, sql in _placeholders(kind, placeholder))
        frames.append(
            rows.selectExpr(
                f"{text_sql(name)} AS name",
                "partition",
                f"({null_sql('key', kind.state_key)}) AS keyless",
                f"coalesce({opens or 'false'}, false) AS open",
                f"{place if small else 'CAST(NULL AS BIGINT)'} AS place",
            )
        )
    if not frames:
        return [], []
    sums = (
        "count(*) AS count",
        "count_if(keyless) AS keyless",
        "bool_or(open) AS open",
        "collect_set(place) AS places",
    )
    from pyspark.sql import functions as F

    found = union(frames).groupBy("name", "partition").agg(*map(F.expr, sums)).collect()
    if any(row["keyless"] for row in found):
        raise RowFailures(_keyless(parts, {row["name"] for row in found if row["keyless"]}))
    records: list[TableRecords] = []
    facts: dict[tuple[str, int], Fact] = {}
    for name, (kind, rows) in parts.items():
        own = [row for row in found if row["name"] == name]
        for row in own:
            place = kind.table.topic, row["partition"]
            facts[place] = Fact(APPLIED, None, None, *place, False, row["count"], 0)
        if own:
            places = sorted({place for row in own for place in row["places"]}) if small else None
            count = sum(row["count"] for row in own)
            records.append(TableRecords(kind, rows, count, places, any(row["open"] for row in own)))
    return records, list(facts.values())


def _keyless(parts: Mapping[str, tuple[TableType, DataFrame]], names: Iterable[str]) -> dict[Place, Failure]:
    """The failures of records without a key."""
    found: dict[Place, Failure] = {}
    for name in sorted(names):
        kind, rows = parts[name]
        text = f"its key in table {name} is null, or a part of the key is; give the table another key:"
        places = rows.where(null_sql("key", kind.state_key)).select("partition", "offset").limit(MOST_FAILURES + 1)
        for row in places.collect():
            at = kind.table.topic, row["partition"], row["offset"]
            found[at] = Failure(*at, f"table {name}", text)
    return found


def _placeholders(kind: TableType, placeholder: str | None) -> list[tuple[str, str]]:
    """(column, SQL of the placeholder) of the columns that Debezium may leave out of an update."""
    from pyspark.sql.types import BinaryType, StringType, StructType

    if placeholder is None or not kind.envelope or not isinstance(kind.state_row, StructType):
        return []
    text = text_sql(placeholder)
    forms: dict[type[DataType], str] = {StringType: text, BinaryType: f"CAST({text} AS BINARY)"}
    return [(item.name, forms[type(item.dataType)]) for item in kind.state_row if type(item.dataType) in forms]


@dataclass(frozen=True)
class Change:
    """The changes of a table in a batch. ``before``: the table's files before the batch; ``files``: the changes."""

    kind: TableType
    before: StateFiles
    files: StateFiles


def write_changes(
    reader: Reader, records: TableRecords, before: StateFiles, folder: str, placeholder: str | None, *, small: bool
) -> Change:
    """Write the changes of a batch as files of the state, which no commit names yet.

    EtlError for a key that comes in two partitions.
    """
    kind = records.kind
    ranges = None if records.places is None else ranges_of(records.places)
    found = _latest(kind, records, placeholder)
    old = reader.live(kind, before, ranges) if before.versions else None
    if old is None:
        frame = found.selectExpr("0 AS gone", "key", "row", _version_sql("partition", "last"), "lowest", "highest")
    else:
        old = old.selectExpr("key AS old_key", "row AS old_row", "version AS old")
        from pyspark.sql import functions as F

        pairs = found.join(old, F.expr("key = old_key"), "left")
        frame = _replacing(kind, records, placeholder, pairs)
    files = write_state(_checked(kind, frame), kind, reader.uri, folder, small=small)
    return Change(kind, before, files)


def latest_rows(records: TableRecords, placeholder: str | None) -> DataFrame:
    """The row of each key after all records: key, row (null: deleted)."""
    return _latest(records.kind, records, placeholder).select("key", "row")


def _latest(kind: TableType, records: TableRecords, placeholder: str | None) -> DataFrame:
    """The last record of each key: key, row, last (struct(offset, high, low)), offsets, lowest and highest partition. With
    unchanged values that were not sent: ``rows``, all rows of the key in order."""
    from pyspark.sql import functions as F

    columns = [
        "max_by(struct(row, struct(offset, high, low) AS at), offset) AS latest",
        "sort_array(collect_list(offset)) AS offsets",
        "min(partition) AS lowest",
        "max(partition) AS highest",
    ]
    if records.opens:
        columns.append("sort_array(collect_list(struct(offset, row))) AS rows")
    grouped = records.frame.groupBy("key").agg(*map(F.expr, columns))
    row = "latest.row"
    if records.opens:
        row = _folded(kind, placeholder, f"CAST(NULL AS {type_sql(kind.state_row)})")
    return grouped.selectExpr("*", f"{row} AS row", "latest.at AS last", "highest AS partition")


def _folded(kind: TableType, placeholder: str | None, start: str) -> str:
    """The last of ``rows``, in which each value that was not sent is the one before it."""
    from pyspark.sql.types import StructType

    assert isinstance(kind.state_row, StructType)
    open_columns = dict(_placeholders(kind, placeholder))
    parts: list[str] = []
    for item in kind.state_row:
        name = name_sql(item.name)
        value = f"it.row.{name}"
        if item.name in open_columns:
            value = (
                f"CASE WHEN {value} = {open_columns[item.name]} THEN coalesce(kept.{name}, {value}) ELSE {value} END"
            )
        parts.append(f"{text_sql(item.name)}, {value}")
    made = f"CAST(named_struct({', '.join(parts)}) AS {type_sql(kind.state_row)})"
    return f"aggregate(rows, {start}, (kept, it) -> CASE WHEN it.row IS NOT NULL THEN {made} END)"


def _version_sql(partition: str, at: str, cause: str | None = None) -> str:
    cause = cause or at
    return (
        f"named_struct('partition', {partition}, 'offset', {at}.offset, 'high', {cause}.high, 'low', {cause}.low,"
        " 'offsets', offsets) AS version"
    )


def _replacing(kind: TableType, records: TableRecords, placeholder: str | None, pairs: DataFrame) -> DataFrame:
    """The new versions and the versions that they replace. A replaced version has the order and the offsets of the records that
    replaced it. A record that a replay brings after later records of its key changes nothing."""
    row = _folded(kind, placeholder, "old_row") if records.opens else "row"
    new = f"named_struct('gone', 0, 'row', {row}, {_entry(_version_sql('partition', 'last'))})"
    old = f"named_struct('gone', 1, 'row', old_row, {_entry(_version_sql('old.partition', 'old', 'last'))})"
    both = f"CASE WHEN old_key IS NULL THEN array({new}) ELSE array({new}, {old}) END"
    return (
        pairs.where("old_key IS NULL OR last.offset > old.offset OR lowest <> old.partition OR highest <> old.partition")
        .selectExpr("key", f"explode({both}) AS each", "least(lowest, old.partition) AS lowest",
                    "greatest(highest, old.partition) AS highest")
        .selectExpr("each.gone AS gone", "key", "each.row AS row", "each.version AS version", "lowest", "highest")
    )  # fmt: skip


def _entry(sql: str) -> str:
    return f"'version', {sql.removesuffix(' AS version')}"


def _checked(kind: TableType, frame: DataFrame) -> DataFrame:
    """The frame. It fails for a key that comes in two partitions."""
    begin = text_sql(f"{_SPLIT}table {kind.table.name}: the record key ")
    places = "CAST(lowest AS STRING), ' and ', CAST(highest AS STRING)"
    text = f"concat({begin}, to_json(struct(key)), ' comes in partitions ', {places})"
    version = f"CASE WHEN lowest <> highest THEN raise_error({text}) ELSE version END AS version"
    return frame.selectExpr("gone", "key", "row", version)


_SPLIT = "[split key] "
"""Marks the text of a task's error."""


def split_error(pool: str, error: Exception) -> EtlError | None:
    """The error for a key in two partitions; None for another error."""
    text = raised_text(error, _SPLIT)
    if text is None:
        return None
    return EtlError(
        f"pool {pool}, {text}. The last record of the key is not known. Nothing was committed. Let the"
        " producer keep each key in one partition, or give the table a key: that tells the rows apart."
    )


def untyped_facts(frames: Mapping[str, DataFrame]) -> list[Fact]:
    """The facts about records of topics without a schema: all are tombstones, and none makes a row."""
    return [
        Fact(APPLIED, None, None, topic, row["partition"], False, row["count"], 0)
        for topic, frame in frames.items()
        for row in frame.groupBy("kafka.partition").count().collect()
    ]


def failed_facts(failures: Iterable[Failure]) -> list[Fact]:
    """The facts about failing records of tables."""
    counted = Counter((one.topic, one.partition) for one in failures)
    return [Fact("quarantined", None, None, *place, False, count, 0) for place, count in counted.items()]
