"""The rebuild of views: the check whether a definition asks for one, the state of a table from its raw records, and a result
compared with the records that are staged.

A rebuild takes no new records. Its outputs are the differences between the result and the last staged record of each key. Offsets
that are published never change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.spark_types import original_name
from zync_assets.errors import EtlError
from zync_assets.etl.failures import Failure, Failures
from zync_assets.etl.rules.kind import Ordering
from zync_assets.etl.rules.output_schemas import record_fields
from zync_assets.etl.rules.shapes import has_schema, key_fields, made_sql
from zync_assets.etl.views.changes import latest_rows, record_rows, table_records
from zync_assets.etl.views.query import removed_records, same_sql
from zync_assets.etl.views.state import StateReader, state_files
from zync_assets.etl.views.state_index import unindexed_rows
from zync_assets.etl.views.tables import (
    Table,
    TableType,
    column_defaults,
    has_changed,
    table_type,
    tables_of,
    with_values,
)
from zync_assets.lake import staging
from zync_assets.lake.head import Head
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.pipeline_file.missing_fields import with_newest_fields
from zync_assets.pipeline_file.references import with_lake_names
from zync_assets.spark import frames
from zync_assets.spark.sql import name_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

_log = logging.getLogger(__name__)


def with_known_names(
    pipeline: Pipeline, pool: str, raw: Mapping[str, RawState | None], state: StagingState | None
) -> Pipeline:
    """As ``with_lake_names``. A view may seem to have another definition than its result, since a new schema renames a field that
    no record has by the new name yet. The registry's newest schema then gives the names."""
    named = with_lake_names(pipeline, raw, state)
    if state is None or not _changed_views(named, pool, state.head):
        return named
    newest_states = with_newest_fields(pipeline, pool, raw)
    return with_lake_names(pipeline, {**raw, **newest_states}, state) if newest_states else named


def check_definitions(pipeline: Pipeline, pool: str, head: Head) -> None:
    """EtlError if the state in the account has other definitions than the views of the pipeline file."""
    rules = pipeline.rules_of(pool)
    if changed_rules := _changed_views(pipeline, pool, head):
        is_single = len(changed_rules) == 1
        # Not the outputs of look-ups: they would follow rows that have changed since.
        topics = [part for rule in changed_rules for part in ("--topic", rule.out)]
        names = ", ".join(rule.name for rule in changed_rules)
        raise EtlError(
            f"pool {pool}: the {'definition of view' if is_single else 'definitions of the views'} {names}"
            f" changed since {'its result was' if is_single else 'their results were'} staged. Nothing was done. Put the old"
            f" definition{'' if is_single else 's'} back, or compute the result{'' if is_single else 's'} again:"
            f" {pipeline.command('rebuild', *topics)}"
        )
    for name, table in tables_of(rules).items():
        entry = head.tables.get(name)
        if entry is None and any(
            topic == table.topic and position.seen > position.first for (topic, _), position in head.inputs.items()
        ):
            raise EtlError(
                f"pool {pool}: table {name} is new, and records of topic {table.topic} were transformed before, so that the pool"
                f" has no state of them. Nothing was done. Make the state from the raw pool: {pipeline.command('rebuild')}"
            )


def _changed_views(pipeline: Pipeline, pool: str, head: Head) -> Sequence[Rule]:
    """The views whose results are of other definitions. ``pipeline``: its rules name fields as the lake does."""
    rules = pipeline.rules_of(pool)
    return [rule for rule in rules if rule.view is not None and has_changed(head.views, rule, rules)]


class Counts(NamedTuple):
    """``rows``: live rows of a state; ``differing``: keys with another row in the raw pool; ``unindexed``: rows that an index
    of the state lacks."""

    rows: int
    differing: int
    unindexed: int = 0


def raw_rows(spark: SparkSession, state: StagingState, raw: RawState, table: Table) -> DataFrame:
    """All raw records of a table's topic that the pool has taken, without those that a rule failed on.

    EtlError if retention removed some of them.
    """
    topic = table.topic
    if removed_ranges := removed_records(state, raw, topic):
        removed = removed_ranges[0]
        raise EtlError(
            f"table {table.name}: retention removed the records of topic {topic}, partition {removed.partition}, offsets"
            f" {removed.first} to {removed.end - 1} from {raw.table.uri}, so that the state can't be made again. Nothing was"
            " done. Restore the raw table to a version with these records, or go on with the present state."
        )
    positions = {part: item for (name, part), item in state.head.inputs.items() if name == topic}
    ranges = [OffsetRange(part, item.first, item.seen) for part, item in positions.items()]
    frame = frames.record_frame(spark, raw, [part for part in ranges if not part.empty])
    condition = _failed_records(state, topic).condition(topic)
    return frame if condition is None else frame.where(f"NOT ({condition})")


def filled_rows(reader: StateReader, state: StagingState, raw: RawState, kind: TableType) -> DataFrame:
    """The rows of a table's state, as ``changes.record_rows``, with the defaults of the columns ``kind.table.defaults``.

    For a table whose raw records retention removed in part. A row of a removed record has the default if the raw table still has
    a later record of its partition from before the column, and all such records are before those with the column. Otherwise
    nothing tells whether the source wrote the null: a warning counts the nulls that stay.
    """
    from pyspark.sql import functions as F

    table = kind.table
    defaults = {name: item for name, item in column_defaults(table, raw).items() if name in table.defaults}
    starts = {part.partition: part.end for part in removed_records(state, raw, table.topic)}
    positions = {part: item for (topic, part), item in state.head.inputs.items() if topic == table.topic}
    # Records that the pool has not taken yet may also show that all removed records are from before the column.
    ranges = [OffsetRange(part, starts.get(part, item.first), raw.next[part]) for part, item in positions.items()]
    records = frames.record_frame(reader.spark, raw, [part for part in ranges if not part.empty]).selectExpr(
        "kafka.partition AS at_partition",
        "kafka.offset AS at_offset",
        *(f"{frames.schema_condition(item.ids)} AS early_{at}" for at, item in enumerate(defaults.values())),
    )
    flags = [f"early_{at}" for at in range(len(defaults))]
    # A record from before the column that follows one with the column is of another writer, and tells nothing of the first.
    order = "max(at_offset) FILTER (WHERE {0}) < min(at_offset) FILTER (WHERE NOT {0})"
    checks = (F.expr(f"coalesce({order.format(flag)}, bool_or({flag})) AS {flag}") for flag in flags)
    sums = records.groupBy("at_partition").agg(*checks).collect()
    live = reader.live(kind, state_files(state, table))
    removed = " OR ".join(f"version.partition = {part} AND version.offset < {end}" for part, end in starts.items())
    values: dict[str, tuple[str, str]] = {}
    for flag, (name, default) in zip(flags, defaults.items(), strict=True):
        early_partitions = [row["at_partition"] for row in sums if row[flag]]
        is_known = f"version.partition IN ({', '.join(map(str, early_partitions))})" if early_partitions else "false"
        column = f"row.{name_sql(name)}"
        if count := live.where(f"({removed}) AND NOT {is_known} AND row IS NOT NULL AND {column} IS NULL").count():
            _log.warning(
                "table %s: %d rows are null in column %s, and may be from before the column: retention removed their raw"
                " records. Take an incremental snapshot of the source's table to write them again.",
                table.name,
                count,
                name,
            )
        values[name] = f"{column} IS NULL AND coalesce({flag}, {is_known})", default.text
    pairs = live.join(records, F.expr("version.partition = at_partition AND version.offset = at_offset"), "left")
    row = f"{with_values('row', kind.state_row, values)} AS row"
    return pairs.selectExpr("key", row, *(f"version.{name}" for name in ("partition", "offset", "high", "low")))


def as_records(kind: TableType, rows: DataFrame) -> tuple[TableType, DataFrame]:
    """Rows of a state (``filled_rows``) as the records of a table, for ``failures.table_failures``."""
    table, deleted = replace(kind.table, key="key"), "(row IS NULL)"
    records = rows.selectExpr("key", "row", "struct(partition, offset) AS kafka")
    return TableType(table, kind.state_key, kind.state_row, "key", "row", deleted, kind.schema), records


def _failed_records(state: StagingState, topic: str) -> Failures:
    """The records of a topic that a rule failed on: those in the pool's quarantine, and those dropped from there."""
    rows = staging.read_ledger(state, ["quarantined", "dropped"])
    rows = rows.filter(pc.and_(pc.equal(rows["topic"], topic), pc.is_valid(rows["text"])))
    places = [(topic, row["partition"], at) for row in rows.to_pylist() for at in range(row["first"], row["end"])]
    return Failures({place: Failure(*place, "", "") for place in places})


def state_counts(
    spark: SparkSession, state: StagingState, raw: RawState, table: Table, placeholder: str | None
) -> Counts:
    """The number of live rows in a table's state, and of the keys with another row in the raw pool. ``placeholder``: see
    ``Pipeline.unavailable_value``. EtlError if retention removed records that the state was made from."""
    from pyspark.sql import functions as F

    raw = replace(raw, with_ids=bool(table.defaults))
    frame = raw_rows(spark, state, raw, table)
    if not has_schema(frame):
        return Counts(0, 0)
    kind, ordering = table_type(table, frame, state, raw), Ordering({table.topic: 0})
    records, _ = table_records({table.name: (kind, record_rows(kind, frame, ordering))}, placeholder, small=False)
    if not records:
        return Counts(0, 0)
    reader, files = StateReader(spark, state.table.uri), state_files(state, table)
    live = reader.live(kind, files).where("row IS NOT NULL")
    live = live.selectExpr("key AS live_key", "row AS live_row")
    latest = latest_rows(records[0], placeholder).where("row IS NOT NULL")
    pairs = live.join(latest, F.expr("live_key = key"), "full_outer")
    is_same = same_sql("live_row", "row", kind.state_row)
    [row] = pairs.selectExpr("count(live_key) AS rows", f"count_if(NOT {is_same}) AS differing").collect()
    return Counts(row["rows"], row["differing"], unindexed_rows(reader, kind, files))


def _key_fields(schema: Any) -> str:
    """As ``shapes.key_fields``, of the schema of an output's keys, as JSON."""
    fields = record_fields(schema)
    if fields is None:
        return ""
    return f"{{{', '.join(sorted(original_name(item['name']) + _key_fields(item['type']) for item in fields))}}}"


def refuse_other_keys(topic: str, live: DataFrame, head: Head, kinds: Collection[DataType]) -> None:
    """EtlError if a staged key has other fields than the keys of the present rules: no tombstone by these rules deletes its row.

    ``live``: with the column ``schema`` of the last staged records of keys; ``kinds``: the types of the rules' keys.
    """
    present_fields = {key_fields(kind) for kind in kinds}
    texts = {name: json.loads(text) for name, (of, text) in head.schemas.items() if of == topic}
    sides = {name: text["key"]["schema"] for name, text in texts.items() if text.get("key")}
    other_fields = {name: fields for name, side in sides.items() if (fields := _key_fields(side)) not in present_fields}
    other_rows = (
        live.where(f"schema IN ({', '.join(map(text_sql, other_fields))})").limit(1).collect() if other_fields else []
    )
    for row in other_rows:
        old_fields, now = other_fields[row["schema"]] or "no fields", " or ".join(sorted(present_fields)) or "no fields"
        raise EtlError(
            f"topic {topic}: staged keys have {old_fields}, and the keys of the present rules have {now}. No record"
            " of the present rules can delete a row of the other keys. Nothing was staged. Name another output topic: it gets"
            " all records again."
        )


def staged_differences(
    rows: DataFrame, staged: DataFrame, topic: str, index: int, ordering: Ordering, head: Head, kind: DataType
) -> DataFrame:
    """The result rows (``kind``) that differ from the last staged record of their key, and a tombstone for each staged key
    that the result lacks.

    ``rows``: the whole result of the view's rule, ``index``; ``staged``: of its output ``topic`` (``frames.output_frame``);
    ``head``: of the staging pool; ``kind``: the type of the rule's key. EtlError as ``refuse_other_keys``.
    """
    from pyspark.sql import functions as F

    key, value = staging.key_column(topic), staging.value_column(topic)
    # The staged records may lack fields of the new definition.
    sides = (
        f"{made_sql(name, staged.schema[name].dataType, rows.schema[column].dataType)} AS staged_{name}"
        for name, column in (("key", key), ("value", value))
    )
    last = frames.latest_records(staged)
    refuse_other_keys(topic, last.select("schema"), head, [kind])
    last = last.selectExpr(*sides, "source AS staged_source")
    pairs = rows.join(last, F.expr(f"{name_sql(key)} <=> staged_key"), "full_outer")
    is_same = same_sql(name_sql(value), "staged_value", rows.schema[value].dataType)
    places = " ".join(f"WHEN {text_sql(name)} THEN {place}" for name, place in ordering.places.items())
    # An input that the file has no more can't be named.
    place_struct = f"struct(CASE it.topic {places} ELSE 0 END AS place, it.partition AS partition, it.offset AS offset)"
    source = f"transform(staged_source, it -> {place_struct})"
    at = {name: f"element_at({source}, -1).{name}" for name in ("place", "partition", "offset")}
    order = ", ".join(f"{({'rank': '0'} | at).get(name, '0L')} AS {name}" for name in ordering.parts)
    tombstone = {
        "kind": "'out'",
        "rule": str(index),
        "ord": f"struct({order})",
        "source": source,
        "last": "CAST(size(staged_source) - 1 AS INT)",
        "waited": "0",
        key: "staged_key",
    }
    columns = [(name_sql(name), tombstone.get(name, "NULL")) for name in rows.columns]
    sql_columns = (
        f"CASE WHEN kind IS NULL THEN {tombstone_sql} ELSE {name} END AS {name}" for name, tombstone_sql in columns
    )
    return pairs.where(f"kind IS NULL OR staged_key IS NULL OR NOT {is_same}").selectExpr(*sql_columns)
