"""Positions before and after an ETL batch: the arithmetic of the account's head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from zync_assets.errors import KafkaError, TopicMissing
from zync_assets.etl.account import Fact
from zync_assets.kafka.topics import topic_states
from zync_assets.lake import staging
from zync_assets.lake.reopen import Taken
from zync_assets.lake.staging import Head, OutputPosition, Position, StagingState
from zync_assets.pipeline import Output, Pipeline
from zync_assets.steps.etl_plan import EtlPlan
from zync_assets.steps.outputs import OutputType


def output_positions(pipeline: Pipeline, pool: str, head: Head) -> dict[tuple[str, int], OutputPosition]:
    """(output topic, partition) → position. The end of a new output's topic in Kafka fixes the output's base."""
    fresh = [item for item in pipeline.outputs_of(pool) if (item.topic, 0) not in head.outputs]
    found = topic_states(pipeline.kafka, [item.topic for item in fresh]) if fresh else {}
    positions = dict(head.outputs)
    for item in fresh:
        state = found.get(item.topic)
        if state is None:
            positions[item.topic, 0] = _absent(item)
            continue
        end = state.partitions[0].end
        used = [f"partition {part.partition}: {part.end}" for part in state.partitions if part.end]
        if used and item.start_at != "end":
            raise KafkaError(
                f"topic {item.topic} holds records already (its ends: {', '.join(used)}), and output numbers begin at 0. Give"
                " the output an empty topic, or set start-at: end."
            )
        positions[item.topic, 0] = OutputPosition(end, end, state.topic_id, len(state.partitions))
    return positions


def _absent(item: Output) -> OutputPosition:
    if item.create is None:
        raise TopicMissing(f"topic {item.topic} is not there. Create it, or add create: to the output.")
    if item.start_at == "end":
        raise TopicMissing(
            f"topic {item.topic} is not there, and start-at: end needs it. Create it, or remove start-at."
        )
    return OutputPosition(0, 0, None, None)


def next_head(
    plan: EtlPlan,
    found: Sequence[Fact],
    outputs: Mapping[tuple[str, int], OutputPosition],
    ends: Mapping[str, int],
    types: Mapping[str, OutputType],
    quarantined: Mapping[tuple[str, int], int],
    failed: Sequence[Taken],
    joins: Mapping[str, str],
    nullable: Collection[tuple[str, tuple[str, ...]]] = (),
) -> Head:
    """The account's head after a batch. ``quarantined``: records that could not be decoded, by input partition; ``failed``:
    records that waited and go into quarantine; ``joins``: of the rules, as in ``Head``; ``nullable``: topics and fields that
    records have as null, or leave out, though their schema has no null."""
    head = plan.head
    counts, waiting = Counter(head.counts), Counter(head.waiting)
    records = Counter[tuple[str, int]](quarantined)
    records.subtract(plan.reopening.records())
    for item in (*plan.reopening.taken, *failed):
        counts[item.topic, item.part.partition, item.kind] -= item.records
        if item.rule is not None:
            waiting[item.rule, item.topic] -= item.records
    for item in failed:
        counts[item.topic, item.part.partition, "quarantined"] += item.records
    for item in plan.reopening.gone:
        counts[item.topic, item.part.partition, "expired"] += item.records
    for (topic, partition), count in quarantined.items():
        counts[topic, partition, "quarantined"] += count
    for row in found:
        name = "done" if row.kind == "out" else row.kind
        counts[row.topic, row.partition, name] += row.entries
        if row.old:
            counts[row.topic, row.partition, "pending"] -= row.entries
            waiting[row.rule or "", row.topic] -= row.entries
        else:
            records[row.topic, row.partition] += row.entries
        if row.kind == "pending":
            waiting[row.rule or "", row.topic] += row.entries
    inputs = dict(head.inputs)
    for topic, ranges in plan.ranges.items():
        for part in ranges:
            old = inputs.get((topic, part.partition), Position(part.first, part.first))
            count = old.records + records[topic, part.partition]
            inputs[topic, part.partition] = Position(old.first, part.end, count, _table_id(plan, topic))
    positions = {place: replace(item, next=ends[place[0]]) for place, item in outputs.items()}
    schemas = dict(head.schemas)
    used = {row.rule for row in found if row.kind == "out"}
    for topic, kind in types.items():
        schemas |= {kind.target(name).fingerprint: (topic, kind.texts[name]) for name in kind.texts if name in used}
    replayed = {**head.replayed, **(plan.reopening.replays or {})}
    fields = {topic: {*head.nullable.get(topic, ())} for topic in {*head.nullable, *(topic for topic, _ in nullable)}}
    for topic, path in nullable:
        fields[topic].add(path)
    null = {topic: frozenset(paths) for topic, paths in fields.items()}
    known = {**head.joins, **joins}
    return Head(head.batch + 1, inputs, positions, dict(counts), dict(waiting), schemas, replayed, null, known)


def _table_id(plan: EtlPlan, topic: str) -> str | None:
    state = plan.raw[topic]
    return None if state is None else state.table_id


def new_counts(found: Sequence[Fact]) -> dict[str, int]:
    counts = Counter[str]()
    for row in found:
        if row.kind == "out":
            counts["outputs"] += row.rows
            counts["done"] += row.entries
        else:
            counts[row.kind] += row.entries
    return dict(counts)


def table_schema(state: StagingState | None, types: Mapping[str, OutputType]) -> pa.Schema:
    """The staging table's columns, old ones first, with those of the outputs widened."""
    fields = {item.name: item for item in (state.schema if state else staging.BASE_SCHEMA)}
    for kind in types.values():
        fields |= {name: pa.field(name, arrow) for name, arrow in kind.columns.items()}
    return pa.schema(list(fields.values()))
