"""The rebuild of event rules: staging gets the results of the present rules over the raw history.

    history.rebuild_events  transforms the raw records below *seen* again by the rules, into a scratch pool, batch by batch
    rebuild_rows            the scratch pool's outputs that change the row of a key; they follow the staged outputs
    rebuild_account         the account of the inputs, from the scratch pool

One commit holds the outputs and the account. Offsets continue, and staged outputs stay as they are. The rebuild compares the
row of each key in staging and in the scratch pool. As in a consumer, a record sets the fields of its own schema, and a
tombstone deletes the row. If the rows differ, the rebuild emits the scratch pool's records of the key, from the first record
that sets a differing field. If the new row lacks a field of the staged row, a tombstone comes first.

The account changes, because records of the future go by it. A record that an old rule used up must wait if it waits by the
present rules, or its counterpart would never find it. By the new account, records may be done whose output an older record
of the key made before, or whose output was overwritten. The head therefore keeps where inputs and outputs stood
(``Head.rebuilt``): checks compare only later outputs with the classes of their sources.

A topic without a staged output gets all records of the scratch pool, in their order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import fields_of, original
from zync_assets.errors import CommitConflict, EtlError
from zync_assets.etl import positions
from zync_assets.etl.batch import ResultFrame, ResultRows, Transform, no_rows
from zync_assets.etl.failures import Failure, Place
from zync_assets.etl.partitions import by_in_lake_names, by_sql
from zync_assets.etl.plan import EtlPlan, Recomputed, plan_etl
from zync_assets.etl.positions import Bound
from zync_assets.etl.retries import Retries, waits_on
from zync_assets.etl.rules.kind import LACKING, OutputColumns, union
from zync_assets.etl.rules.output_schemas import record_fields
from zync_assets.etl.rules.shapes import COLUMN as HEADERS
from zync_assets.etl.rules.shapes import made_sql, type_sql
from zync_assets.etl.views.query import same_sql
from zync_assets.etl.views.rebuild import refuse_other_keys
from zync_assets.lake import staging
from zync_assets.lake.head import Head
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.spark import frames
from zync_assets.spark.frames import checkpoint
from zync_assets.spark.sql import name_sql, path_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

_log = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")


def event_rules(pipeline: Pipeline, pool: str) -> tuple[Rule, ...]:
    """The rules of a staging pool, without views."""
    return tuple(rule for rule in pipeline.rules_of(pool) if rule.view is None)


def rebuild_events_plan(pipeline: Pipeline, pool: str, recomputed: Recomputed) -> EtlPlan:
    """The plan of the commit. CommitConflict if a batch took records, or a replay, since the scratch pool reached *seen*."""
    plan, scratch, old = plan_etl(pipeline, pool), recomputed.state.head.inputs, recomputed.replayed
    for (topic, partition), position in plan.head.inputs.items():
        is_other = scratch.get((topic, partition), position).seen != position.seen
        is_other = is_other or plan.head.replayed.get(topic) != old.get(topic)
        if is_other and topic in _account_inputs(pipeline, pool, recomputed):
            raise CommitConflict(f"pool {pool}: another process transformed {topic} meanwhile; run again")
    ranges: dict[str, Any] = dict.fromkeys(plan.ranges, ())
    waits = waits_on(plan.state)
    return replace(plan, ranges=ranges, retries=Retries(), cuts={}, waits=waits, recomputed=recomputed)


def _account_inputs(pipeline: Pipeline, pool: str, recomputed: Recomputed) -> set[str]:
    """The inputs whose account is rebuilt."""
    return {topic for topic, _ in recomputed.state.head.inputs} - _tables(pipeline, pool)


def _tables(pipeline: Pipeline, pool: str) -> set[str]:
    """The inputs that are tables of views, which may have put records into quarantine."""
    return {table.topic for rule in pipeline.rules_of(pool) if rule.view is not None for table in rule.tables}


def rebuild_rows(transform: Transform) -> ResultRows:
    """The result rows of a rebuild. They count as further outputs of matches: the scratch pool has counted their sources."""
    recomputed = transform.plan.recomputed
    assert recomputed is not None
    _refuse_others(transform, recomputed)
    topic_frames = [
        rows for topic in recomputed.topics if (rows := _topic_rows(transform, recomputed, topic)) is not None
    ]
    frame = union(topic_frames) if topic_frames else no_rows(transform).selectExpr("*", "true AS extra")
    return ResultRows([ResultFrame(frame, frozenset(transform.types), ["extra"])], {})


def _refuse_others(transform: Transform, recomputed: Recomputed) -> None:
    """Raises EtlError if the account changes and another output topic would change too. The account would call the records of
    that change done, and they would have no output."""
    pipeline = transform.pipeline
    rules = event_rules(pipeline, transform.plan.pool)
    others = dict.fromkeys(rule.out for rule in rules if rule.out not in recomputed.topics)
    if not others or is_rebuilt(transform.spark, pipeline, transform.plan):
        return
    for topic in others:
        rows = _topic_rows(transform, recomputed, topic)
        if rows is not None and not rows.isEmpty():
            raise EtlError(
                f"topic {topic}: its outputs change, too, and its rules share the account of inputs with the rules of"
                f" {', '.join(recomputed.topics)}. Records that only {topic} gets would count as done. Nothing was staged."
                f" Rebuild all: {pipeline.command('rebuild')}"
            )


def rebuild_bounds(transform: Transform, parts: Sequence[str]) -> list[Bound]:
    """The bounds of the buckets of a rebuild's result rows: spans of the scratch pool's offsets. ``parts``: of ``ord``."""
    recomputed = transform.plan.recomputed
    assert recomputed is not None
    ends = [recomputed.state.head.output_ends(recomputed.prefix + topic).get(0, 0) for topic in recomputed.topics]
    count = sum(ends) // positions.BUCKET_RECORDS
    starts = [max(ends) * 2 * part // count for part in range(1, count)]
    return [tuple({"high": 1, "offset": start}.get(name, 0) for name in parts) for start in starts]


@dataclass(frozen=True)
class _Topic:
    """An output topic in a rebuild. ``key``, ``value``: the types of its columns, None for a side that it does not have."""

    name: str
    targets: Mapping[str, OutputColumns]
    key: DataType | None
    value: DataType | None

    @property
    def fields(self) -> list[tuple[str, str, DataType]]:
        """Name, SQL and type of each field that a record may set; a value that is no struct is one field."""
        from pyspark.sql.types import StructType

        if not isinstance(self.value, StructType):
            return [] if self.value is None else [("", "v", self.value)]
        return [(item.name, f"v.{name_sql(item.name)}", item.dataType) for item in self.value]

    def records(self, frame: DataFrame) -> DataFrame:
        """The records of an output frame with their key ``k`` and value ``v`` in the topic's types."""
        sides = {"k": ("key", self.key), "v": ("value", self.value)}
        columns = [
            f"{'CAST(NULL AS STRING)' if kind is None else made_sql(name, frame.schema[name].dataType, kind)} AS {side}"
            for side, (name, kind) in sides.items()
        ]
        headers = "headers" if "headers" in frame.columns else f"CAST(NULL AS {HEADERS})"
        about = ("kafka.partition AS p", "kafka.offset AS o", "rule", "source", "schema", "left_out")
        return frame.selectExpr(*columns, *about, f"{headers} AS headers")

    def set_by_rules(self) -> dict[str, str]:
        """Field → whether a record of the scratch pool sets it, as SQL."""
        from pyspark.sql.types import StructType

        fields_by_rule = {
            rule: set(target.value[1].names)
            for rule, target in self.targets.items()
            if target.value is not None and isinstance(target.value[1], StructType)
        }
        rules_by_field = {
            name: [text_sql(rule) for rule in self.targets if not name or name in fields_by_rule.get(rule, ())]
            for name, _, _ in self.fields
        }
        return {
            name: f"rule IN ({', '.join(rules) or 'NULL'}){_unless_left_out(name)}"
            for name, rules in rules_by_field.items()
        }

    def set_by_schemas(self, state: StagingState) -> dict[str, str]:
        """Field → whether a staged record sets it, as SQL."""
        texts = {name: text for name, (topic, text) in state.head.schemas.items() if topic == self.name}
        column = staging.value_column(self.name)
        kind = state.schema.field(column).type if column in state.schema.names else pa.null()
        items = {item.name: item for item in (fields_of(kind) if pa.types.is_struct(kind) else ())}
        conditions: dict[str, str] = {}
        for name, _, _ in self.fields:
            item = items.get(name)
            schemas = [key for key, text in texts.items() if not name or (item is not None and has_field(text, item))]
            conditions[name] = f"schema IN ({', '.join(map(text_sql, schemas)) or 'NULL'}){_unless_left_out(name)}"
        return conditions


def _unless_left_out(name: str) -> str:
    path = text_sql(path_sql(("value", name)))
    return f" AND NOT coalesce(array_contains(left_out, {path}), false)" if name else ""


def has_field(schema: str, item: pa.Field) -> bool:
    """Whether the records of an output schema have a field of the value."""
    fields = record_fields(json.loads(schema)["value"]["schema"])
    return fields is None or any(field["name"] in (item.name, original(item)) for field in fields)


def _topic_rows(transform: Transform, recomputed: Recomputed, name: str) -> DataFrame | None:
    """The rebuilt outputs of a topic; None while its rules have no types, and for a topic of tombstones alone: no key has a
    row."""
    from pyspark.sql import functions as F

    state, kind = transform.plan.state, transform.types.get(name)
    assert state is not None
    if kind is None or not kind.targets:
        return None
    sides = [[getattr(target, side) for target in kind.targets.values()] for side in ("key", "value")]
    key, value = (next((side[2] for side in targets if side is not None), None) for targets in sides)
    topic = _Topic(name, kind.targets, key, value)
    scratch = topic.records(frames.output_frame(transform.spark, recomputed.state, recomputed.prefix + name))
    if all(item.next == item.base for item in state.head.positions(name).values()):
        return _outputs(
            transform, topic, scratch.selectExpr(*_RECORD, "1L AS high", "0 AS place", "o * 2 + 1 AS number")
        )
    if value is None:
        return None
    staged = topic.records(frames.output_frame(transform.spark, state, name))
    _check_keys(transform, topic, scratch, staged)
    new = _latest_rows(topic, scratch, topic.set_by_rules(), "new")
    old = _latest_rows(topic, staged, topic.set_by_schemas(state), "old")
    kinds = [target.key[1] for target in topic.targets.values() if target.key is not None]
    refuse_other_keys(name, old.selectExpr("last_old.schema AS schema"), state.head, kinds)
    changed_keys = checkpoint(_differing_rows(topic, new, old))
    emits = changed_keys.selectExpr("last.p AS staged_in", "explode(emits) AS at")
    records = scratch.join(emits, F.expr("o = at"))
    records = records.selectExpr(*_RECORD, "staged_in", "1L AS high", "0 AS place", "o * 2 + 1 AS number")
    first = "CASE WHEN size(emits) > 0 THEN struct(1L AS high, 0 AS place, emits[0] * 2 AS number)"
    first = f"{first} ELSE struct(0L AS high, last.p AS place, last.o AS number) END"
    deleted_keys = changed_keys.where("deletes").selectExpr("k", "last", "last.p AS staged_in", f"{first} AS at")
    kinds = {"v": "string" if value is None else type_sql(value), "left_out": "array<string>", "headers": HEADERS}
    nulls = [f"CAST(NULL AS {kind}) AS {column}" for column, kind in kinds.items()]
    tombstones = deleted_keys.selectExpr("k", "last.rule AS rule", "last.source AS source", *nulls, "staged_in", "at.*")
    result_records = records.unionByName(tombstones)
    _check_partitions(transform, topic, result_records)
    return _outputs(transform, topic, result_records)


_RECORD = ("k", "v", "rule", "source", "left_out", "headers")


def _check_keys(transform: Transform, topic: _Topic, scratch: DataFrame, staged: DataFrame) -> None:
    """A warning about records without a key. EtlError for a key in several partitions."""
    if not scratch.where("k IS NULL").isEmpty() or not staged.where("k IS NULL").isEmpty():
        _log.warning(
            "topic %s: records without a key are not compared, since nothing says which of them follow each other. To publish all"
            " records again, name another output topic.",
            topic.name,
        )
    if transform.pipeline.output(topic.name).partition_by is None:
        return
    frames.refuse_scattered_keys(staged.selectExpr("k AS key", "p AS partition"), topic.name, "staged")


def _check_partitions(transform: Transform, topic: _Topic, records: DataFrame) -> None:
    """EtlError if a record would go to another partition than the staged records of its key, by ``partition-by``."""
    by, state = transform.pipeline.output(topic.name).partition_by, transform.plan.state
    if by is None or state is None:
        return
    by = by_in_lake_names(by, transform.types[topic.name])
    number_sql = by_sql(by, len(state.head.positions(topic.name)))
    keyed = records.where("staged_in IS NOT NULL").selectExpr("k AS key", "v AS value", "staged_in")
    moves = keyed.selectExpr("key", "staged_in", f"coalesce({number_sql}, 0) AS place").where("place <> staged_in")
    for row in moves.selectExpr("to_json(struct(key)) AS text", "staged_in", "place").limit(1).collect():
        raise EtlError(
            f"topic {topic.name}: a record with the {row['text']} would go to partition {row['place']}, and the staged records of"
            f" the key are in partition {row['staged_in']}. Nothing was staged. Write a partition-by over the key alone, or name"
            " another output topic: it gets all records again."
        )


def _latest_rows(topic: _Topic, records: DataFrame, sets: Mapping[str, str], side: str) -> DataFrame:
    """A row for each key that is not deleted: the key, the last record, and for each field its value, and the offset of the last
    record that sets it. The names of the columns end in ``side``. ``sets``: field → whether a record sets it."""
    from pyspark.sql import functions as F

    live = records.where("k IS NOT NULL").selectExpr(
        "*", "max(CASE WHEN v IS NULL THEN o END) OVER (PARTITION BY k) AS gone"
    )
    live = live.where("v IS NOT NULL AND (gone IS NULL OR o > gone)")
    columns = [f"max_by(struct(rule, source, p, o, schema), o) AS last_{side}"]
    for at, (name, sql, _) in enumerate(topic.fields):
        columns.append(f"max(o) FILTER (WHERE {sets[name]}) AS at{at}_{side}")
        columns.append(f"max_by({sql}, o) FILTER (WHERE {sets[name]}) AS field{at}_{side}")
    return live.groupBy("k").agg(*map(F.expr, columns)).withColumnRenamed("k", f"k_{side}")


def _differing_rows(topic: _Topic, new: DataFrame, old: DataFrame) -> DataFrame:
    """The keys whose row differs: the staged key ``k``, its ``last`` record, ``deletes`` (whether a tombstone is needed), and
    ``emits`` (the offsets of the scratch pool's records that make the new row of the old one, ascending)."""
    from pyspark.sql import functions as F

    ats = [f"at{at}_new" for at, _ in enumerate(topic.fields)]
    differs = [
        f"((at{at}_new IS NULL) <> (at{at}_old IS NULL) OR NOT {same_sql(f'field{at}_new', f'field{at}_old', kind)})"
        for at, (_, _, kind) in enumerate(topic.fields)
    ]
    lacks = " OR ".join(f"at{at}_new IS NULL AND at{at}_old IS NOT NULL" for at, _ in enumerate(topic.fields))
    since = ", ".join(f"CASE WHEN {difference} THEN {at} END" for difference, at in zip(differs, ats, strict=True))
    pairs = new.join(old, F.expr("k_new <=> k_old"), "full_outer")
    pairs = pairs.where(f"(k_new IS NULL) <> (k_old IS NULL) OR {' OR '.join(differs)}")
    pairs = pairs.selectExpr(
        "k_old AS k",
        "last_old AS last",
        f"k_old IS NOT NULL AND (k_new IS NULL OR {lacks}) AS deletes",
        f"array_distinct(array_compact(array({', '.join(ats)}))) AS ats",
        f"array_min(array({since})) AS since",
    )
    emits = "array_sort(filter(ats, at -> deletes OR k IS NULL OR at >= since)) AS emits"
    return pairs.selectExpr("k", "last", "deletes", emits)


def _outputs(transform: Transform, topic: _Topic, records: DataFrame) -> DataFrame:
    """Result rows of records. ``records``: with ``high``, ``place`` and ``number``, by which they are ordered."""
    labels, ordering = transform.labels, transform.ordering
    indexes = {name: labels.rules.index(name) for name in topic.targets}
    rules = " ".join(f"WHEN {text_sql(name)} THEN {at}" for name, at in indexes.items())
    # A tombstone of a removed rule has the key of another rule.
    keyed_rules = [
        name for name, target in topic.targets.items() if target.key and target.key[1].simpleString() != "void"
    ]
    other_index = indexes[(keyed_rules or list(indexes))[0]]
    places = " ".join(f"WHEN {text_sql(name)} THEN {at}" for at, name in enumerate(labels.topics))
    # An input that the file has no more can't be named.
    place_struct = f"struct(CASE it.topic {places} ELSE 0 END AS place, it.partition AS partition, it.offset AS offset)"
    parts = {"high": "high", "place": "place", "offset": "number", "low": "0L"}
    order = ", ".join(f"{parts.get(name, '0')} AS {name}" for name in ordering.parts)
    target = next(iter(topic.targets.values()))
    sides = [(side, name) for side, name in zip("kv", (target.key, target.value), strict=True) if name is not None]
    return records.selectExpr(
        "'out' AS kind",
        f"CASE rule {rules} ELSE {other_index} END AS rule",
        f"struct({order}) AS ord",
        f"transform(source, it -> {place_struct}) AS source",
        "size(source) - 1 AS last",
        "0 AS waited",
        "CAST(NULL AS bigint) AS hash",
        "true AS extra",
        *(f"{side} AS {name_sql(column[0])}" for side, column in sides),
        *([f"headers AS {staging.HEADERS_COLUMN}"] if target.headers else []),
        f"left_out AS {LACKING}",
    )


def refuse_failures(plan: EtlPlan, failures: Mapping[Place, Failure]) -> None:
    """EtlError if an output of a rebuild fails. No record of the account can go into quarantine for it."""
    if plan.recomputed is not None and failures:
        first = failures[min(failures)]
        raise EtlError(
            f"pool {plan.pool}: topic {first.topic}, partition {first.partition}, offset {first.offset}: {first.reason}. Nothing"
            " was staged. Correct the rule, or the output topic."
        )


def is_rebuilt(spark: SparkSession, pipeline: Pipeline, plan: EtlPlan) -> bool:
    """Whether the account is that of the scratch pool already."""
    recomputed, state = plan.recomputed, plan.state
    assert recomputed is not None
    assert state is not None
    inputs = _account_inputs(pipeline, plan.pool, recomputed)

    def facts(head: Head) -> tuple[object, ...]:
        counts = {place: count for place, count in head.counts.items() if place[0] in inputs and count}
        return counts, {place: count for place, count in head.waiting.items() if place[1] in inputs and count}

    if facts(state.head) != facts(recomputed.state.head):
        return False
    # Both have the same number of rows.
    old, new = (_named_places(spark, pool_state, inputs) for pool_state in (state, recomputed.state))
    return old is None or new is None or new.exceptAll(old).isEmpty()


_NAMED = ("pending", "quarantined", "expired")
"""The classes whose records a user can list."""


def _named_places(spark: SparkSession, state: StagingState, topics: Collection[str]) -> DataFrame | None:
    """The records of some topics in the classes _NAMED, however many there are, with the rules of pending ones. An expired record
    is ``listed`` if quarantine has it. None without such records."""
    from pyspark.sql import functions as F

    if not any(count for (topic, _, kind), count in state.head.counts.items() if topic in topics and kind in _NAMED):
        return None
    place = ["topic", "partition", "first"]
    entries = frames.ledger_frame(spark, state).where(F.col("topic").isin(sorted(topics)))
    named = entries.where(F.col("kind").isin(*_NAMED))
    completed = entries.where("kind = 'completed'").select(*place, "kind").withColumn("kind", F.lit("pending"))
    offsets, listed = "explode(sequence(first, end - 1)) AS offset", "kind = 'expired' AND text IS NOT NULL AS listed"
    named = named.join(completed, [*place, "kind"], "left_anti")
    # Expired records of several rules may be one entry.
    return named.selectExpr("topic", "partition", offsets, "kind", "IF(kind = 'pending', rule, NULL) AS rule", listed)


def rebuild_account(
    pipeline: Pipeline, plan: EtlPlan, head: Head, folder: str
) -> tuple[Head, list[DataFile], list[DataFile]]:
    """The account after a rebuild: the head, the files of the ledger, and the files that go. ``head``: with the positions of the
    outputs; ``folder``: of new files, below the table."""
    recomputed, state = plan.recomputed, plan.state
    assert recomputed is not None
    assert state is not None
    account_inputs, new = _account_inputs(pipeline, plan.pool, recomputed), recomputed.state.head
    others = {topic for topic, _ in new.inputs} - account_inputs
    # One file at a time: a ledger may be larger than the memory.
    files = [
        ledger_file
        for name, pool_state, topics in (("kept", state, account_inputs), ("rebuilt", recomputed.state, others))
        for at, item in enumerate(pool_state.ledger_files)
        if (ledger_file := _without(pool_state, topics, item, f"{folder}/{name}-{at}", state.table.uri)) is not None
    ]
    views = {rule.out for rule in pipeline.rules_of(plan.pool) if rule.view is not None}
    outputs = {place: item.next for place, item in head.outputs.items() if place[0] not in views}
    waiting = _merged_entries(head.waiting, new.waiting, lambda place: place[1] in account_inputs)
    waits = {**head.waits, **new.waits}
    waiting_rules = {rule for (rule, _), count in waiting.items() if count}
    inputs = _merged_entries(head.inputs, new.inputs, lambda place: place[0] in account_inputs)
    tables = _tables(pipeline, plan.pool)
    new_head = replace(
        head,
        inputs=inputs,
        counts=_merged_entries(head.counts, new.counts, lambda place: place[0] in account_inputs),
        waiting=waiting,
        replayed=_merged_entries(head.replayed, new.replayed, lambda topic: topic in account_inputs),
        joins={**head.joins, **new.joins},
        waits={rule: since for rule, since in waits.items() if rule in waiting_rules},
        several=head.several | new.several,
        rebuilt=outputs | {place: item.seen for place, item in inputs.items() if place[0] not in tables},
    )
    return new_head, files, state.ledger_files


def _merged_entries(old: Mapping[K, V], new: Mapping[K, V], is_new: Callable[[K], bool]) -> dict[K, V]:
    """The entries of ``new`` for the keys that ``is_new`` names, and those of ``old`` for the others."""
    old_entries = {key: value for key, value in old.items() if not is_new(key)}
    return old_entries | {key: value for key, value in new.items() if is_new(key)}


def _without(state: StagingState, topics: Collection[str], item: DataFile, path: str, uri: str) -> DataFile | None:
    """A ledger file without the entries of some topics, as a new file; None for no entry. ``path``: of the new file, below the
    table ``uri``."""
    rows = staging.read_entries(state, [item])
    rows = rows.filter(pc.invert(pc.is_in(rows["topic"], pa.array(sorted(topics), pa.string()))))
    name, _, last = path.rpartition("/")
    path = f"{name}/{staging.ACCOUNT_FOLDER}/{last}.parquet"
    return staging.write_entries(uri, path, rows) if rows.num_rows else None
