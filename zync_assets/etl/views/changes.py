"""The changes of a batch: for each key of a table, the row before the batch and the row after it.

A batch writes the changes as files of the state, and reads these files for the views. The files hold the rows as columns, so
that a view reads only the columns that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.account import Fact
from zync_assets.etl.failures import MOST_FAILURES, Failure, Place
from zync_assets.etl.rules.kind import Ordering
from zync_assets.etl.rules.shapes import made_sql, type_sql
from zync_assets.etl.views.query import CAUSE, CAUSES, ORD
from zync_assets.etl.views.state import (
    SAMPLE,
    Places,
    Range,
    SlicePlace,
    StateFiles,
    StateReader,
    slice_bounds,
    slice_place_sql,
    sliced,
    write_new_rows,
    write_state,
)
from zync_assets.etl.views.tables import TableType, leaves_of, null_sql, place_sql
from zync_assets.spark.failures import raised_text
from zync_assets.spark.frames import checkpoint, union
from zync_assets.spark.sql import is_placeholder, name_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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

    ``frame``: key, row, partition, offset, high, low. ``places``: of the keys, None for a large batch. ``span``: the least and
    the greatest place of the keys. ``bounds``: of the slices of a large batch. ``opens``: whether a row lacks an unchanged value
    that Debezium did not send. ``measured``: whether rows may be large.
    """

    kind: TableType
    frame: DataFrame = field(repr=False)
    places: Places | None
    span: Range
    bounds: Sequence[SlicePlace]
    opens: bool
    measured: bool = False


def record_rows(kind: TableType, records: DataFrame, ordering: Ordering) -> DataFrame:
    """A table's rows in records: key, row (null: deleted), partition, offset, high, low. ``records``: as in ``kind``."""
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


def table_records(
    parts: Mapping[str, tuple[TableType, DataFrame]],
    placeholder: str | None,
    *,
    small: bool,
    measured: bool = False,
    checks: Mapping[str, Sequence[str]] | None = None,
) -> tuple[list[TableRecords], list[Fact]]:
    """The batch's records of each table, and the facts about these records. A single Spark job reads all tables.

    ``parts``: name of a table → its type and its ``record_rows``; ``placeholder``: see ``Pipeline.unavailable_value``;
    ``checks``: name of a table → expressions over ``row``. The job computes the expressions, and fails if one fails. Raises
    RowFailures for records without a key.
    """
    frames: list[DataFrame] = []
    sampled = f"pmod(xxhash64(partition, offset), {SAMPLE}) = 0"
    for name, (kind, rows) in parts.items():
        place = place_sql("key", kind.state_key)
        key_hash = "xxhash64(key)" if _has_hash(kind) else "0L"
        place_expression = (
            f"named_struct('high', {place}.high, 'low', {key_hash})"
            if small
            else f"CASE WHEN {sampled} THEN {slice_place_sql(kind)} END"
        )
        opens = " OR ".join(f"({condition})" for _, condition in _placeholders(kind, placeholder, "row"))
        frames.append(
            rows.selectExpr(
                f"{text_sql(name)} AS name",
                "partition",
                f"({null_sql('key', kind.state_key)}) AS keyless",
                f"coalesce({opens or 'false'}, false) AS open",
                f"{place}.high AS high",
                f"{place_expression} AS place",
                f"CASE WHEN row IS NOT NULL THEN xxhash64({', '.join((checks or {}).get(name, ())) or '0'}) END AS checked",
            )
        )
    if not frames:
        return [], []
    sums = (
        "count(*) AS count",
        "count_if(keyless) AS keyless",
        "bool_or(open) AS open",
        f"{'collect_set' if small else 'collect_list'}(place) AS places",
        "min(high) AS least",
        "max(high) AS most",
        "max(checked) AS checked",
    )
    from pyspark.sql import functions as F

    all_rows = union(frames).coalesce(1) if small else union(frames)
    row_sums = all_rows.groupBy("name", "partition").agg(*map(F.expr, sums)).collect()
    if any(row["keyless"] for row in row_sums):
        raise RowFailures(_keyless_failures(parts, {row["name"] for row in row_sums if row["keyless"]}))
    records: list[TableRecords] = []
    facts: dict[tuple[str, int], Fact] = {}
    for name, (kind, rows) in parts.items():
        table_sums = [row for row in row_sums if row["name"] == name]
        for row in table_sums:
            place = kind.table.topic, row["partition"]
            facts[place] = Fact(APPLIED, None, None, *place, False, row["count"], 0)
        if table_sums:
            found_places = [tuple(place) for row in table_sums for place in row["places"]]
            places = _places(kind, set(found_places)) if small else None
            bounds = slice_bounds(() if small else found_places, sum(row["count"] for row in table_sums))
            rows = rows.coalesce(1) if small else rows
            span = min(row["least"] for row in table_sums), max(row["most"] for row in table_sums)
            opens = any(row["open"] for row in table_sums)
            records.append(TableRecords(kind, rows, places, span, bounds, opens, measured))
    return records, list(facts.values())


def _has_hash(kind: TableType) -> bool:
    """Whether look-ups compare a hash of the whole key. The first part of a place does not tell keys of several fields apart."""
    return len(list(leaves_of("key", kind.state_key))) > 1 and "map<" not in kind.state_key.simpleString()


def _places(kind: TableType, places: Collection[tuple[int, int]]) -> Places:
    hashes = sorted({key_hash for _, key_hash in places}) if _has_hash(kind) else ()
    return Places(sorted({high for high, _ in places}), hashes)


def _keyless_failures(parts: Mapping[str, tuple[TableType, DataFrame]], names: Iterable[str]) -> dict[Place, Failure]:
    """The failures of records without a key."""
    failure_by_place: dict[Place, Failure] = {}
    for name in sorted(names):
        kind, rows = parts[name]
        text = (
            f"its key in table {name} is null, or a part of the key is; give the table another key. A truncate of Debezium (its"
            " op is t) has no key: the table keeps its rows until each of them is deleted"
        )
        places = rows.where(null_sql("key", kind.state_key)).select("partition", "offset").limit(MOST_FAILURES + 1)
        for row in places.collect():
            place = kind.table.topic, row["partition"], row["offset"]
            failure_by_place[place] = Failure(*place, f"table {name}", text)
    return failure_by_place


def _placeholders(kind: TableType, placeholder: str | None, row: str) -> list[tuple[str, str]]:
    """(column, whether it is the placeholder) of the columns that Debezium may leave out of an update. ``row``: the row's SQL."""
    from pyspark.sql.types import StructType

    if placeholder is None or not isinstance(kind.state_row, StructType):
        return []
    conditions = (
        (item.name, is_placeholder(f"{row}.{name_sql(item.name)}", item.dataType, placeholder))
        for item in kind.state_row
    )
    return [(name, condition) for name, condition in conditions if condition is not None]


@dataclass(frozen=True)
class Change:
    """The changes of a table in a batch. ``before``: the table's files before the batch; ``files``: the changes. ``pairs``: the
    changes of a small batch: key, row, version, old_row, old_version (null: the key is new)."""

    kind: TableType
    before: StateFiles
    files: StateFiles
    pairs: DataFrame | None = field(default=None, repr=False)


def write_changes(
    reader: StateReader, records: TableRecords, old_files: StateFiles, folder: str, placeholder: str | None
) -> Change:
    """Write the changes of a batch as files of the state, which no commit names yet.

    EtlError for a key that comes in two partitions.
    """
    from pyspark.sql import functions as F

    kind, places = records.kind, records.places
    if places is not None:
        latest = _with_old(_latest(kind, records, placeholder, _old_versions(reader, kind, old_files, places)))
        pairs = checkpoint(_pairs(kind, records, placeholder, latest), eager=False)
        files = write_state(_versions(pairs), kind, reader.uri, folder, small=True)
        return Change(kind, old_files, files, pairs)
    overlapping_files = old_files.within(records.span)
    if not overlapping_files.versions and not records.opens and not kind.table.by_time:
        error_sql = _split_sql(kind, "least(before, partition)", "greatest(before, partition)")
        files = write_new_rows(
            reader, kind, records.frame, error_sql, folder, bounds=records.bounds, measured=records.measured
        )
        return Change(kind, old_files, files)
    latest = _latest(kind, records, placeholder)
    if not overlapping_files.versions:
        checked = _checked(kind, _version_sql("partition", "last"), "lowest", "highest")
        frame = latest.selectExpr("0 AS gone", "key", "row", f"{checked} AS version")
    else:
        old = reader.live(kind, overlapping_files).selectExpr("key AS old_key", "row AS old_row", "version AS old")
        frame = _versions(_pairs(kind, records, placeholder, latest.join(old, F.expr("key = old_key"), "left")))
    frame = sliced(frame, kind, records.bounds)
    return Change(kind, old_files, write_state(frame, kind, reader.uri, folder, small=False))


def _old_versions(reader: StateReader, kind: TableType, old_files: StateFiles, places: Places) -> DataFrame:
    """The versions of the keys at places, and a few others: key, version (struct(gone, row, the fields that order versions))."""
    fields = dict.fromkeys(["partition", *_order(kind), "offset"])
    if not old_files.versions:
        version = ", ".join(f"{name}: {'INT' if name == 'partition' else 'BIGINT'}" for name in fields)
        version = f"STRUCT<gone: INT, row: {type_sql(kind.state_row)}, version: STRUCT<{version}>>"
        kinds = (type_sql(kind.state_key), "key"), (version, "version")
        return reader.spark.range(0).selectExpr(*(f"CAST(NULL AS {text}) AS {name}" for text, name in kinds))
    version = f"struct({', '.join(f'version.{name}' for name in fields)}) AS version"
    version_frames = [
        reader.rows(kind, files, places).selectExpr("key", f"struct({gone} AS gone, row, {version}) AS version")
        for gone, files in ((0, old_files.versions), (1, old_files.replaced))
        if files
    ]
    return union(version_frames).repartition(1)


def _with_old(latest: DataFrame) -> DataFrame:
    """The last records with the row before them: old_key (null: the key is new), old_row, old. ``latest``: has the column
    ``versions`` of the key."""
    is_same = "other.version.partition = it.version.partition AND other.version.offset = it.version.offset"
    is_live = f"it.gone = 0 AND NOT exists(versions, other -> other.gone = 1 AND {is_same})"
    old = latest.selectExpr("* EXCEPT (versions)", f"get(filter(versions, it -> {is_live}), 0) AS old")
    return old.selectExpr(
        "* EXCEPT (old)",
        "CASE WHEN old IS NOT NULL THEN key END AS old_key",
        "old.row AS old_row",
        "old.version AS old",
    )


def latest_rows(records: TableRecords, placeholder: str | None) -> DataFrame:
    """The last row of each key: key, row (null: deleted)."""
    return _latest(records.kind, records, placeholder).select("key", "row")


def _latest(
    kind: TableType, records: TableRecords, placeholder: str | None, versions: DataFrame | None = None
) -> DataFrame:
    """The last record of each key: key, row, last (struct(partition, offset, high, low)), its partition, offsets, lowest and
    highest partition. With unchanged values that were not sent: ``rows``, all rows of the key in order. With ``versions``
    (``_old_versions``): also ``versions``, those of the key. One task takes both then, and Spark sets up one aggregation."""
    from pyspark.sql import functions as F

    frame, filter_sql = records.frame, ""
    if versions is not None:
        frame = frame.unionByName(versions, allowMissingColumns=True).coalesce(1)
        filter_sql = " FILTER (WHERE offset IS NOT NULL)"
    at = f"struct({', '.join(_order(kind))})"
    columns = [
        f"max_by(struct(row, struct(partition, offset, high, low) AS at), {at}){filter_sql} AS latest",
        f"sort_array(collect_list(struct(partition, offset)){filter_sql}) AS places",
        "min(partition) AS lowest",
        "max(partition) AS highest",
    ]
    if records.opens:
        # By the order alone: Spark compares no maps, and a row may have one.
        order = "(a, b) -> CASE WHEN a.at < b.at THEN -1 WHEN a.at > b.at THEN 1 ELSE 0 END"
        columns.append(f"array_sort(collect_list(struct({at} AS at, row)){filter_sql}, {order}) AS rows")
    if versions is not None:
        columns.append("collect_list(version) AS versions")
    latest = frame.groupBy("key").agg(*map(F.expr, columns))
    if versions is not None:
        latest = latest.where("lowest IS NOT NULL")
    row = "latest.row"
    if records.opens:
        row = _fold_sql(kind, placeholder, f"CAST(NULL AS {type_sql(kind.state_row)})")
    # A version has the offsets of one partition.
    offsets = "transform(filter(places, it -> it.partition = latest.at.partition), it -> it.offset) AS offsets"
    return latest.selectExpr("*", f"{row} AS row", "latest.at AS last", offsets, "latest.at.partition AS partition")


def _order(kind: TableType) -> Sequence[str]:
    """The fields by which the records of a key are sorted."""
    return ("high", "low", "partition", "offset") if kind.table.by_time else ("offset",)


def _fold_sql(kind: TableType, placeholder: str | None, start: str) -> str:
    """SQL for the last of ``rows``. A value that Debezium did not send is taken from the row before."""
    from pyspark.sql.types import StructType

    assert isinstance(kind.state_row, StructType)
    open_columns = dict(_placeholders(kind, placeholder, "it.row"))
    parts: list[str] = []
    for item in kind.state_row:
        name = name_sql(item.name)
        value = f"it.row.{name}"
        if item.name in open_columns:
            value = f"CASE WHEN {open_columns[item.name]} THEN coalesce(kept.{name}, {value}) ELSE {value} END"
        parts.append(f"{text_sql(item.name)}, {value}")
    row_struct = f"CAST(named_struct({', '.join(parts)}) AS {type_sql(kind.state_row)})"
    return f"aggregate(rows, {start}, (kept, it) -> CASE WHEN it.row IS NOT NULL THEN {row_struct} END)"


def _version_sql(partition: str, at: str, cause: str | None = None) -> str:
    cause = cause or at
    return (
        f"named_struct('partition', {partition}, 'offset', {at}.offset, 'high', {cause}.high, 'low', {cause}.low,"
        " 'offsets', offsets)"
    )


def _pairs(kind: TableType, records: TableRecords, placeholder: str | None, latest: DataFrame) -> DataFrame:
    """The pairs of a ``Change``. A replaced version has the order and the offsets of the records that replaced it. A record
    that a replay brings after later records of its key changes nothing. The frame fails for a key in two partitions."""
    row = _fold_sql(kind, placeholder, "old_row") if records.opens else "row"
    old_version = f"CASE WHEN old_key IS NOT NULL THEN {_version_sql('old.partition', 'old', 'last')} END"
    lowest, highest = "least(lowest, old.partition)", "greatest(highest, old.partition)"
    is_later = " > ".join(
        f"struct({', '.join(f'{side}.{name} AS {name}' for name in _order(kind))})" for side in ("last", "old")
    )
    condition = f"old_key IS NULL OR {is_later}"
    if not kind.table.by_time:
        # Keys in two partitions must stay in the frame, so that it fails (``_checked``).
        condition += " OR lowest <> old.partition OR highest <> old.partition"
    return latest.where(condition).selectExpr(
        "key",
        f"{row} AS row",
        f"{_checked(kind, _version_sql('partition', 'last'), lowest, highest)} AS version",
        "old_row",
        f"{old_version} AS old_version",
    )


def _versions(pairs: DataFrame) -> DataFrame:
    """The versions that pairs make and replace: gone, key, row, version."""
    new_struct, old_struct = (
        "named_struct('gone', 0, 'row', row, 'version', version)",
        "named_struct('gone', 1, 'row', old_row, 'version', old_version)",
    )
    versions = f"CASE WHEN old_version IS NULL THEN array({new_struct}) ELSE array({new_struct}, {old_struct}) END"
    rows = pairs.selectExpr("key", f"explode({versions}) AS each")
    return rows.selectExpr("each.gone AS gone", "key", "each.row AS row", "each.version AS version")


def _checked(kind: TableType, version: str, lowest: str, highest: str) -> str:
    """A version as SQL. It fails for a key that comes in two partitions, where the table forbids this."""
    if kind.table.by_time:
        return version
    return f"CASE WHEN {lowest} <> {highest} THEN {_split_sql(kind, lowest, highest)} ELSE {version} END"


def _split_sql(kind: TableType, lowest: str, highest: str) -> str:
    """Fails for a key that comes in two partitions."""
    begin = text_sql(f"{_SPLIT}table {kind.table.name}: the record key ")
    places = f"CAST({lowest} AS STRING), ' and ', CAST({highest} AS STRING)"
    return f"raise_error(concat({begin}, to_json(struct(key)), ' comes in partitions ', {places}))"


_SPLIT = "[split key] "
"""Marks the text of a task's error."""


def is_split(error: Exception) -> bool:
    """Whether an error is about a key in two partitions."""
    return raised_text(error, _SPLIT) is not None


def split_error(pool: str, error: Exception) -> EtlError | None:
    """The error for a key in two partitions; None for another error."""
    if (text := raised_text(error, _SPLIT)) is None:
        return None
    return EtlError(
        f"pool {pool}, {text}. The last record of the key is not known. Nothing was committed. Let the"
        " producer keep each key in one partition, or give the table a key: that tells the rows apart,"
        " or key-in-many-partitions: latest-time."
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
    counts = Counter((failure.topic, failure.partition) for failure in failures)
    return [Fact("quarantined", None, None, *place, False, count, 0) for place, count in counts.items()]


def cause_sql(ordering: Ordering, topic: str, offsets: str | None, last: str) -> tuple[str, str]:
    """ORD and CAUSE of a version that some records of the table's topic made, or the record ``last`` alone."""
    place = ordering.places[topic]
    values = {
        "rank": str(list(ordering.groups).index(ordering.domains.get(topic))),
        "high": "version.high",
        "low": "version.low",
        "place": str(place),
        "partition": "version.partition",
        "offset": last,
    }
    order_struct = f"struct({', '.join(f'{values[name]} AS {name}' for name in ordering.parts)})"

    def source_struct(offset: str) -> str:
        return f"named_struct('place', {place}, 'partition', version.partition, 'offset', {offset})"

    cause = f"array({source_struct(last)})"
    if offsets is not None:
        # Spark interprets a lambda.
        cause = f"CASE WHEN size({offsets}) = 1 THEN {cause} ELSE transform({offsets}, it -> {source_struct('it')}) END"
    return f"{order_struct} AS {ORD}", f"{cause} AS {CAUSE}"


def no_cause_sql(ordering: Ordering) -> tuple[str, str]:
    """ORD and CAUSE of a row that the batch does not change."""
    kinds = {"rank": "INT", "place": "INT", "partition": "INT"}
    order = ", ".join(f"{name}: {kinds.get(name, 'BIGINT')}" for name in ordering.parts)
    return f"CAST(NULL AS STRUCT<{order}>) AS {ORD}", f"CAST(NULL AS {CAUSES}) AS {CAUSE}"
