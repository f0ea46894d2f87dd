"""Positions of an ETL batch: the order and the offsets of its outputs, and the account's head before and after it.

Parallel tasks order and number the outputs. Results are divided into buckets by their order. A bucket is a Spark partition,
and is sorted. An output's offset is the bucket's first offset in the output's topic and partition, plus the number of
outputs before it that the bucket has for the same partition. The bounds of the buckets come from the statistics of the raw
files. ``repartitionByRange`` would sample the rows instead, and so run the joins twice.

A bucket's first offset in a partition is the count of the outputs of the partition in the earlier buckets. A subquery of
the writing query counts the rows, over the same shuffle, and Spark runs a common shuffle once
(``spark.sql.exchange.reuse``). A cache would write and read the rows once more. The writing tasks report their own counts,
and so show whether both queries had the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from zync_assets.errors import KafkaError, TopicMissing
from zync_assets.etl.account import Fact
from zync_assets.etl.output_types import OutputType
from zync_assets.etl.plan import EtlPlan
from zync_assets.etl.retries import ClassRange, next_waits
from zync_assets.kafka.topics import topic_states
from zync_assets.lake import staging
from zync_assets.lake.head import Head, OutputPosition, Partitioning, Position
from zync_assets.lake.sequence import LEAST, OrderKey, OrderSpan, keys_at
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Output, Pipeline
from zync_assets.spark.sql import long_sql, search_sql, tuple_sql

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BUCKET_RECORDS = 150_000
"""The approximate number of new raw records in a bucket."""

SMALL = 20_000
"""The most new raw records of a small batch. A small batch is one Spark task, and the driver fetches its account."""

_DONE = ("out", "ended", "applied")
"""The kinds of result rows, and of the facts about tables of views, whose records are done."""

Bound: TypeAlias = tuple[int, ...]
"""The lowest ``ord`` of a bucket's rows, as a tuple of its parts. The last parts may be missing."""


def bucket_bounds(groups: Sequence[Sequence[OrderSpan]], parts: Sequence[str]) -> list[Bound]:
    """Ascending bounds which cut the records into buckets of about BUCKET_RECORDS.

    ``groups``: the spans of the batch's files, group by group of the ordering; ``parts``: the names of the parts of ``ord``.
    """
    total = sum(span.records for group in groups for span in group)
    if total < 2 * BUCKET_RECORDS:
        return []
    bounds: list[Bound] = []
    for rank, group in enumerate(groups):
        records = sum(span.records for span in group)
        count = max(1, int(records / BUCKET_RECORDS))
        first: list[Bound] = [(rank,)] if rank and len(groups) > 1 else []
        keys = keys_at(group, [records * part / count for part in range(1, count)])
        bounds += [*first, *(_bound(rank, key, parts) for key in keys)]
    return bounds


def _bound(rank: int, key: OrderKey, parts: Sequence[str]) -> Bound:
    bound = [rank if name == "rank" else getattr(key, name) for name in parts]
    while len(bound) > 1 and bound[-1] == LEAST:
        bound.pop()
    return tuple(bound)


def arranged(
    results: DataFrame,
    parts: Sequence[str],
    bounds: Sequence[Bound],
    columns: Sequence[str],
    outs: Sequence[Numbered],
    *,
    together: bool = False,
    query: int = 0,
    ties: Sequence[str | Column] = (),
    unused: Sequence[str] = (),
) -> DataFrame:
    """Result rows in buckets, sorted by ``ord`` within each bucket, with ``columns``, ``bucket`` and ``starts``. In the first
    row of a bucket, ``starts`` lists the number of outputs in the earlier buckets, for each partition of each topic of
    ``outs``. Without earlier buckets, ``starts`` is null.

    ``parts``: the names of the parts of ``ord``; ``outs``: the output topics; ``together``: there is one bucket, and one Spark
    task computes and sorts its rows; ``query``: the number of that bucket, which differs between the queries of a batch;
    ``ties``: further columns to sort rows with equal ``ord`` by; ``unused``: columns of the rows that are not in ``columns``,
    and that the shuffle would move for nothing.
    """
    # Each part of ``ord`` is a column of its own. Spark then compares the first number without a look at the rest of the row.
    order = [f"ord.{name} AS ord_{name}" for name in parts]
    placed_rows = results.selectExpr(
        f"* EXCEPT ({', '.join(['ord', *unused])})",
        *order,
        f"{_bucket_sql(bounds, parts) if bounds else query} AS bucket",
    )
    placed_rows = placed_rows.coalesce(1) if together else placed_rows.repartitionById(len(bounds) + 1, "bucket")
    # Spark sorts a null first: an output comes before the outputs that follow it.
    rows = placed_rows.sortWithinPartitions(*(f"ord_{name}" for name in parts), *ties)
    # Without an output topic every row is a record that waits or goes to no rule, and none is numbered.
    if not bounds or not outs:
        return rows.selectExpr(*columns, "bucket", "CAST(NULL AS array<bigint>) AS starts")
    buckets = len(bounds) + 1
    firsts = _firsts(placed_rows, buckets, outs).scalar().alias("firsts")
    places = sum(item.count for item in outs)
    starts = f"transform(sequence(0, {places - 1}), i -> element_at(firsts, i * {buckets} + bucket + 1))"
    # The lower bits of the id are the row's place in its Spark partition.
    first = f"monotonically_increasing_id() % {1 << 33}L = 0L"
    return rows.select("*", firsts).selectExpr(*columns, "bucket", f"CASE WHEN {first} THEN {starts} END AS starts")


@dataclass(frozen=True)
class Numbered:
    """An output topic whose outputs are numbered. ``rules``: the indexes of its rules, as a list in SQL; ``count``: its
    partitions; ``partition``: the partition of a row of the topic, None for partition 0."""

    rules: str
    count: int = 1
    partition: Column | None = None


def _firsts(placed_rows: DataFrame, buckets: int, outs: Sequence[Numbered]) -> DataFrame:
    """One row with an array: for each topic, partition and bucket, how many of the outputs are in the buckets before.

    Spark shares the shuffle only between queries that read the same columns. This query therefore has an expression over
    every column, which Spark never evaluates.
    """
    from pyspark.sql import functions as F

    counts = "kind = 'out' OR (kind = '' AND CAST(struct(*) AS string) = '')"
    place_counts = placed_rows.select(F.expr(counts).alias("counts"), _place(outs, buckets).alias("place"))
    place_counts = place_counts.groupBy("place").agg(F.expr("count_if(counts) AS number"))
    numbers = place_counts.agg(F.expr("map_from_entries(collect_list(struct(coalesce(place, -1), number))) AS numbers"))
    earlier_numbers = f"slice(numbers, i - i % {buckets} + 1, i % {buckets})"
    places = f"sequence(0, {sum(item.count for item in outs) * buckets - 1})"
    return numbers.selectExpr(
        f"transform({places}, i -> coalesce(try_element_at(numbers, i), 0L)) AS numbers"
    ).selectExpr(f"transform({places}, i -> aggregate({earlier_numbers}, 0L, (sum, number) -> sum + number)) AS firsts")


def _place(outs: Sequence[Numbered], buckets: int) -> Column:
    """The index of a row's topic, partition and bucket; null for a row that is no output of these topics."""
    from pyspark.sql import functions as F

    place, partitions_before = F.lit(None).cast("int"), 0
    for item in outs:
        output_partition = F.lit(partitions_before) if item.partition is None else item.partition + partitions_before
        place = F.when(F.expr(f"rule IN ({item.rules})"), output_partition * buckets + F.col("bucket")).otherwise(place)
        partitions_before += item.count
    return place


def _bucket_sql(bounds: Sequence[Bound], parts: Sequence[str]) -> str:
    """An SQL expression for a row's bucket: the number of reached bounds, by binary search.

    Spark can't fold the index into a constant. Constant bounds would be literals in the generated code, and each batch would
    compile its own code. Spark does not compile a lambda over the array at all. An index of bits, ``place & 0 | 3``, puts the
    whole search into one method, which is too large for Java's compiler: a large batch takes twice as long.
    """
    width = max((len(bound) for bound in bounds), default=1)
    padded = [(*bound, *[LEAST] * (width - len(bound))) for bound in bounds]
    array = f"array({', '.join(tuple_sql([long_sql(part) for part in bound]) for bound in padded)})"
    row = tuple_sql([f"CAST(ord.{name} AS bigint)" for name in parts[:width]])

    return search_sql(len(bounds), lambda at: f"element_at({array}, ord.place * 0 + {at + 1}) <= {row}")


def output_positions(pipeline: Pipeline, pool: str, head: Head) -> dict[tuple[str, int], OutputPosition]:
    """(output topic, partition) → position. The ends of a new output's topic in Kafka fix the output's bases."""
    fresh = [item for item in pipeline.outputs_of(pool) if (item.topic, 0) not in head.outputs]
    topics = [item.topic for item in fresh if not item.is_scratch]
    states = topic_states(pipeline.kafka, topics) if topics else {}
    positions = dict(head.outputs)
    for item in fresh:
        state = states.get(item.topic)
        if state is None:
            count = _partitions_to_create(item)
            positions |= {(item.topic, partition): OutputPosition(0, 0, None, count) for partition in range(count)}
            continue
        for error in state.away.values():
            raise error
        used_partitions = [f"partition {part.partition}: {part.end}" for part in state.partitions if part.end]
        if used_partitions and item.start_at != "end":
            raise KafkaError(
                f"topic {item.topic} holds records already (its ends: {', '.join(used_partitions)}), and output numbers begin at"
                " 0. Give the output an empty topic, or set start-at: end."
            )
        for part in state.partitions:
            if part.is_open:
                # Its records have offsets already, from the end on.
                raise KafkaError(
                    f"topic {item.topic}, partition {part.partition} has an open transaction of another program, and output"
                    " numbers would begin at its first record. Stop that program, and run ETL again once the transaction has"
                    " ended."
                )
            position = OutputPosition(part.end, part.end, state.topic_id, len(state.partitions))
            positions[item.topic, part.partition] = position
    return dict(sorted(positions.items()))


def _partitions_to_create(item: Output) -> int:
    """The partitions that a missing topic will have. TopicMissing if the topic must be there."""
    if item.create is None:
        raise TopicMissing(f"topic {item.topic} is not there. Create it, or add create: to the output.")
    if item.start_at == "end":
        raise TopicMissing(
            f"topic {item.topic} is not there, and start-at: end needs it. Create it, or remove start-at."
        )
    return item.create.partitions


@dataclass(frozen=True)
class Outcome:
    """The results of a batch for the account's head.

    ``ends``: (output topic, partition) → the first output offset of the next batch. ``undecoded``: (topic, partition) → new
    records that could not be decoded. ``failed``: pending records that go into quarantine. ``joins``: of the rules, as in
    ``Head``. ``nullable``: topics and fields that records have as null, or leave out, though their schema has no null.
    ``begun``: rule → the time at which its new pending records begin to wait for a row. ``several``: the inputs of rules with
    several outputs.
    """

    facts: Sequence[Fact]
    ends: Mapping[tuple[str, int], int]
    types: Mapping[str, OutputType]
    undecoded: Mapping[tuple[str, int], int]
    failed: Sequence[ClassRange]
    joins: Mapping[str, str]
    nullable: Collection[tuple[str, tuple[str, ...]]] = ()
    begun: Mapping[str, int] = field(default_factory=dict[str, int])
    partitionings: Mapping[str, Partitioning] = field(default_factory=dict[str, Partitioning])
    """Output topic → what the partitions of the batch's outputs follow from."""
    several: frozenset[str] = frozenset()


def next_head(plan: EtlPlan, outputs: Mapping[tuple[str, int], OutputPosition], outcome: Outcome) -> Head:
    """The account's head after a batch. ``outputs``: the positions before the batch."""
    head = plan.head
    counts, waiting = Counter(head.counts), Counter(head.waiting)
    records = Counter[tuple[str, int]](outcome.undecoded)
    records.subtract(plan.retries.records())
    for item in (*plan.retries.parts, *outcome.failed):
        counts[item.topic, item.part.partition, item.kind] -= item.records
        if item.rule is not None:
            waiting[item.rule, item.topic] -= item.records
    for item in outcome.failed:
        counts[item.topic, item.part.partition, "quarantined"] += item.records
    for item in plan.retries.expired:
        counts[item.topic, item.part.partition, "expired"] += item.records
    for (topic, partition), count in outcome.undecoded.items():
        counts[topic, partition, "quarantined"] += count
    for row in outcome.facts:
        name = "done" if row.kind in _DONE else row.kind
        counts[row.topic, row.partition, name] += row.entries
        if row.old:
            counts[row.topic, row.partition, "pending"] -= row.entries
            waiting[row.taker or row.rule or "", row.topic] -= row.entries
        else:
            records[row.topic, row.partition] += row.entries
        if row.kind == "pending":
            waiting[row.rule or "", row.topic] += row.entries
    inputs = dict(head.inputs)
    for topic, ranges in plan.ranges.items():
        for part in ranges:
            previous = inputs.get((topic, part.partition), Position(part.first, part.first))
            count = previous.records + records[topic, part.partition]
            inputs[topic, part.partition] = Position(previous.first, part.end, count, _table_id(plan, topic))
    positions = {place: replace(item, next=outcome.ends[place]) for place, item in outputs.items()}
    schemas = dict(head.schemas)
    used_rules = {row.rule for row in outcome.facts if row.kind == "out"}
    for topic, kind in outcome.types.items():
        schemas |= {
            kind.targets[name].fingerprint: (topic, kind.texts[name]) for name in kind.texts if name in used_rules
        }
    replayed = {**head.replayed, **(plan.retries.replays or {})}
    fields = {
        topic: {*head.nullable.get(topic, ())} for topic in {*head.nullable, *(topic for topic, _ in outcome.nullable)}
    }
    for topic, path in outcome.nullable:
        fields[topic].add(path)
    null = {topic: frozenset(paths) for topic, paths in fields.items()}
    joins = {**head.joins, **outcome.joins}
    grown_topics = {topic for (topic, partition), item in outputs.items() if outcome.ends[topic, partition] > item.base}
    partitionings = {
        topic: partitioning for topic, partitioning in outcome.partitionings.items() if topic in grown_topics
    }
    reached_orders = {name: part.reached for name, part in plan.cuts.items() if part.reached is not None}
    late_offsets = {**head.late}
    for part in plan.cuts.values():
        for place, item in part.late.items():
            late_offsets[place] = replace(
                item, records=item.records + (late_offsets[place].records if place in late_offsets else 0)
            )
    transactions = {name: part.transactions for name, part in plan.cuts.items() if part.transactions is not None}
    return replace(
        head,
        batch=head.batch + 1,
        inputs=inputs,
        outputs=positions,
        counts=dict(counts),
        waiting=dict(waiting),
        schemas=schemas,
        replayed=replayed,
        nullable=null,
        joins=joins,
        reached={**head.reached, **reached_orders},
        late=late_offsets,
        transactions={**head.transactions, **transactions},
        partitionings={**head.partitionings, **partitionings},
        several=head.several | outcome.several,
        waits=next_waits(plan.waits, outcome.begun, waiting),
    )


def _table_id(plan: EtlPlan, topic: str) -> str | None:
    state = plan.raw[topic]
    return None if state is None else state.table_id


def new_counts(facts: Sequence[Fact]) -> dict[str, int]:
    """Class → the number of records that a batch brought into it. ``outputs``: the number of outputs."""
    counts = Counter[str]()
    for row in facts:
        if row.kind == "out":
            counts["outputs"] += row.rows
            counts["done"] += row.entries
        elif row.kind in _DONE:
            counts["done"] += row.entries
        else:
            counts[row.kind] += row.entries
    return dict(counts)


def table_schema(state: StagingState | None, types: Mapping[str, OutputType]) -> pa.Schema:
    """The staging table's columns, old ones first, with those of the outputs widened."""
    fields = {item.name: item for item in (state.schema if state else ())}
    # Tables of older versions have an account without the hashes of source rows.
    fields |= {item.name: item for item in staging.BASE_SCHEMA}
    for kind in types.values():
        value = staging.value_column(kind.topic)
        later_fields = {**kind.later_fields, **(staging.later_fields(state.schema, value) if state else {})}
        fields |= {name: pa.field(name, arrow) for name, arrow in kind.columns.items()}
        if value in kind.columns:
            fields[value] = staging.with_later_fields(fields[value], later_fields)
    return pa.schema(list(fields.values()))
