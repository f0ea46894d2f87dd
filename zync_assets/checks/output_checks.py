"""The checks of outputs: of a staging pool, of a published topic, and all checks of a pipeline.

- A staging pool: its account against raw and outputs, its numbering, records that are pending for long, and records that
  came too late for their place in the source's order.
- A published topic: Kafka and staging hold the same records, by content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from zync_assets.audit.account import read_facts
from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.checks import raw_checks
from zync_assets.checks.sink_checks import sink_results
from zync_assets.codecs.arrays import pc
from zync_assets.errors import KafkaError, LakeError, SchemaError, TableDamaged
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import TopicState, high_watermark, is_compacted, topic_states
from zync_assets.lake import raw
from zync_assets.lake.check_results import CheckResult, Number, conclude
from zync_assets.lake.head import OutputPosition
from zync_assets.lake.parquet_rows import DamagedFile, integers, read_columns, rows_at
from zync_assets.lake.publication import PublishState, WrittenSchema, rollback_error
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, normalize, subtract
from zync_assets.pipeline import Pipeline, table_name, topic_path
from zync_assets.pipeline_file.keys import joining_kinds
from zync_assets.publish.encoding import (
    ENCODED_SCHEMA,
    alike_ids,
    encoded_rows,
    header_differences,
    is_same,
    staged_topic,
)

PENDING_AGE = "pending_age"


MAX_AGE_SECONDS = 86_400
"""How long a record may wait for its counterpart before ``pending_age`` warns."""


def pending_age(
    pipeline: Pipeline,
    pool: str,
    max_age_seconds: float = MAX_AGE_SECONDS,
    now: float | None = None,
    snapshot: Snapshot | None = None,
) -> CheckResult:
    """Warns where a record has waited for longer than ``max_age_seconds``, or waits for ever: its join key is null, or
    the pipeline file has its rule no more.

    ``now``: seconds since the epoch, the present by default. A record's age is counted from its raw time.
    """
    snapshot = snapshot or Snapshot(pipeline)
    try:
        state = snapshot.staging(pool)
    except TableDamaged as error:
        return conclude(PENDING_AGE, pool, "warn", [str(error)], "", {"pending": 0})
    if state is None:
        return conclude(PENDING_AGE, pool, "warn", [], "nothing transformed yet", {"pending": 0})
    if not pipeline.rules_of(pool):
        return conclude(PENDING_AGE, pool, "warn", [], "another pipeline file has the rules", {"pending": 0})
    moment = time.time() if now is None else now
    problems: list[str] = []
    numbers: dict[str, Number] = {"pending": sum(state.head.waiting.values())}
    numbers |= {f"pending_{rule}_{topic}": n for (rule, topic), n in sorted(state.head.waiting.items()) if n}
    joins = pipeline.joins_of(pool)
    problems += [
        f"{n} records of {topic} wait for rule {rule}, which the pipeline file has no more as a {joining_kinds()} rule of"
        f" {topic} for {pool}. Run `{pipeline.command('etl', '--retry-unmatched')}` to give them to the other rules"
        for (rule, topic), n in sorted(state.head.waiting.items())
        if n and (rule, topic) not in joins
    ]
    if numbers["pending"]:
        try:
            problems += _age_problems(snapshot, state, max_age_seconds, moment, numbers)
        except (DamagedFile, LakeError) as error:
            problems.append(str(error))
    return conclude(PENDING_AGE, pool, "warn", problems, f"{numbers['pending']} records wait", numbers)


SOURCE_ORDER = "source_order"


def source_order(pipeline: Pipeline, pool: str, snapshot: Snapshot | None = None) -> CheckResult:
    """Warns where records came after ETL had taken records that are later in the source's order, and where ETL took a
    transaction without all its changes.

    The outputs of late records follow outputs of later changes. The check counts late records, and names one record of each
    partition. The check counts incomplete transactions, and names the last of each domain.
    """
    try:
        state = (snapshot or Snapshot(pipeline)).staging(pool)
    except TableDamaged as error:
        return conclude(SOURCE_ORDER, pool, "warn", [str(error)], "", {"late": 0})
    late = state.head.late if state else {}
    transactions = state.head.transactions if state else {}
    problems = [
        f"{item.records} records of {topic}, partition {partition}, came after later records of their source were transformed;"
        f" {topic} {partition}:{item.offset} is the first of the last batch with such records. Their outputs are out of order."
        " Set a longer order-delay in the pipeline file"
        for (topic, partition), item in sorted(late.items())
    ]
    problems += [
        f"{item.incomplete} transactions of {domain} were transformed without all their changes, the last of them {item.last}:"
        " the changes did not come within the limit. Staging has had states that the source did not have. Set a longer"
        " transactions.limit in the pipeline file"
        for domain, item in sorted(transactions.items())
        if item.incomplete
    ]
    numbers: dict[str, Number] = {"late": sum(item.records for item in late.values())}
    numbers |= {f"late_{topic}_{partition}": item.records for (topic, partition), item in sorted(late.items())}
    if transactions:
        numbers["incomplete_transactions"] = sum(item.incomplete for item in transactions.values())
    return conclude(SOURCE_ORDER, pool, "warn", problems, "every record came in the order of its source", numbers)


def raw_time(snapshot: Snapshot, topic: str, partition: int, offset: int) -> float | None:
    """The time of a raw record, in seconds since the epoch; None where there is no such record, and of a topic that is no
    input any more. Raises LakeError."""
    inputs = {item.topic for item in snapshot.pipeline.inputs}
    state = snapshot.raw(topic) if topic in inputs else None
    if state is None:
        return None
    files = raw.raw_files(state, [OffsetRange(partition, offset, offset + 1)])
    row = rows_at(state.table.uri, files, partition, [offset], []).get(offset)
    return None if row is None else row["kafka"]["time"].timestamp()


def _age_problems(
    snapshot: Snapshot, state: StagingState, max_age: float, now: float, numbers: dict[str, Number]
) -> Iterator[str]:
    facts, *_ = read_facts(state)
    # A record's time never runs back within its partition: the lowest pending offset is the oldest.
    oldest: list[tuple[float, str]] = []
    for (topic, partition), place_facts in facts.items():
        waiting = place_facts.waiting
        when = raw_time(snapshot, topic, partition, int(waiting[0])) if len(waiting) else None
        if when is not None:
            oldest.append((when, f"{topic} {partition}:{waiting[0]}"))
    if oldest:
        when, place = min(oldest)
        age = max(0.0, now - when)
        numbers["oldest_seconds"] = round(age, 3)
        numbers["oldest"] = place
        if age > max_age:
            yield f"{place} has waited for {age:.0f} s, longer than {max_age:.0f} s"
    null_keys = _null_keys(state)
    numbers["null_keys"] = null_keys
    if null_keys:
        yield f"pending records with a null join key, which nothing will ever match: {null_keys}"


def _null_keys(state: StagingState) -> int:
    """The number of pending records with a null join key. Null equals nothing: such records stay pending for ever."""
    count = 0
    for item in state.ledger_files:
        for batch in read_columns(state.uri(item), ["account.kind", "account.hash"]):
            rows = pa.Table.from_batches([batch]).flatten()
            null = pc.and_(pc.equal(rows["account.kind"], "pending"), pc.is_null(rows["account.hash"]))
            count += pc.sum(null).as_py() or 0
    return count


NO_END = 1 << 62
"""An offset past every record."""
STAGING_EQUALS_TOPIC = "staging_equals_topic"
REACHABLE = "reachable"


def reachable(pipeline: Pipeline, topic: str) -> CheckResult:
    """The broker knows an input topic, lets this pipeline look at it, and every partition has a leader."""
    subject = topic_path(topic)
    try:
        state = topic_states(pipeline.kafka, [topic]).get(topic)
    except KafkaError as error:
        return conclude(REACHABLE, subject, "error", [str(error)], "", {})
    if state is None:
        problem = f"topic {topic} is not there. Create it, or take it out of inputs."
        return conclude(REACHABLE, subject, "error", [problem], "", {})
    records = sum(item.end - item.low for item in state.partitions)
    numbers = {"partitions": len(state.partitions), "offsets": records}
    return conclude(REACHABLE, subject, "error", [], f"all {len(state.partitions)} partitions have leaders", numbers)


def staging_equals_topic(
    pipeline: Pipeline, topic: str, ranges: Iterable[OffsetRange] | None = None, *, backlog: bool = False
) -> CheckResult:
    """Check that the published record at offset k of the topic equals, byte for byte, the record that staging numbers k.

    Reads ``ranges`` of the topic, or the whole topic; if ``backlog``, all that publish has not verified. Records that
    retention or a compacted topic's compaction removed are not compared. Raises BrokerUnavailable, RegistryError.
    """
    pool, subject = pipeline.output(topic).pool, topic_path(topic)
    # Each before the one that it is made from: the pipeline may be at work, and must not look like damage.
    snapshot = Snapshot(pipeline)
    publish_state = snapshot.publish_state(pool, topic)
    if backlog:
        ranges = [OffsetRange(0, publish_state.verified_end or 0, NO_END)]
    topic_state = topic_states(pipeline.kafka, [topic]).get(topic)
    high = high_watermark(pipeline.kafka, topic, 0) if topic_state else 0
    try:
        state = snapshot.staging(pool)
    except TableDamaged as error:
        return conclude(STAGING_EQUALS_TOPIC, subject, "error", [str(error)], "", {"compared": 0})
    position = state.head.outputs.get((topic, 0)) if state else None
    recreate = pipeline.command("to-kafka", "--recreate", topic)
    loss = rollback_error(pool, topic, publish_state.verified_end, position.next if position else None, recreate)
    if loss is not None:
        return conclude(STAGING_EQUALS_TOPIC, subject, "error", [str(loss)], "", {"compared": 0})
    if state is None or position is None:
        return conclude(STAGING_EQUALS_TOPIC, subject, "error", [], "nothing staged yet", {"compared": 0})
    numbers: dict[str, Number] = {"compared": 0, "staged": position.next - position.base}
    if topic_state is None:
        has_history = publish_state.has_topic() or position.topic_id is not None
        problems = [f"topic {topic} was published to and is gone"] if has_history else []
        return conclude(STAGING_EQUALS_TOPIC, subject, "error", problems, "nothing published yet", numbers)
    problems = list(_identity_problems(topic_state, position, publish_state, recreate))
    if not problems:
        try:
            problems += _watermark_problems(high, position, publish_state, numbers)
            problems += _content_problems(pipeline, state, topic_state, high, position, publish_state, ranges, numbers)
        except (LakeError, SchemaError) as error:
            problems.append(str(error))
        except FileNotFoundError as error:
            problems.append(
                f"a file of {table_name(pool, topic)} is in the log and not in the lake: {error.filename or error}"
            )
    good = f"{numbers['compared']} records are staging's"
    return conclude(STAGING_EQUALS_TOPIC, subject, "error", problems, good, numbers)


def _identity_problems(
    topic_state: TopicState, position: OutputPosition, publish_state: PublishState, recreate: str
) -> Iterator[str]:
    if publish_state.has_topic():
        same_topic = publish_state.belongs_to(topic_state.topic_id)
    else:
        same_topic = position.topic_id in (None, topic_state.topic_id)
    if not same_topic:
        yield (
            f"topic {topic_state.topic} was deleted and created again (its id is now {topic_state.topic_id});"
            f" to publish all of staging to it: {recreate}"
        )


def _watermark_problems(
    high: int, position: OutputPosition, publish_state: PublishState, numbers: dict[str, Number]
) -> Iterator[str]:
    numbers |= {
        "high_watermark": high,
        "lag": max(0, position.next - max(position.base, publish_state.verified_end or 0)),
    }
    if high > position.next:
        yield f"the record at offset {position.next} is not staging's: staging ends there, the topic at {high}"
    if publish_state.verified_end is not None and high < publish_state.verified_end:
        yield f"the topic ends at offset {high} and was published up to {publish_state.verified_end}: it has lost records"


def _content_problems(
    pipeline: Pipeline,
    state: StagingState,
    topic_state: TopicState,
    high: int,
    position: OutputPosition,
    publish_state: PublishState,
    ranges: Iterable[OffsetRange] | None,
    numbers: dict[str, Number],
) -> Iterator[str]:
    first = max(position.base, topic_state.partitions[0].low)
    whole = [OffsetRange(0, first, max(first, min(position.next, high)))]
    parts = normalize(whole) if ranges is None else subtract(whole, subtract(whole, ranges))
    tolerates_gaps = bool(parts) and is_compacted(pipeline.kafka, topic_state.topic)
    outputs = staged_topic(state, topic_state.topic, pipeline.registry)
    schemas: set[WrittenSchema] = set()
    comparisons, gaps = 0, 0
    for part in parts:
        ours = _RowBuffer(encoded_rows(outputs, part.first, part.end, schemas))
        # Nothing is published in transactions: what one holds is foreign, be it open, committed or aborted.
        theirs = read_range(pipeline.kafka, topic_state.topic, 0, part.first, part.end, uncommitted=True)
        for mine, other in _side_by_side(ours, theirs, part):
            offsets = integers(other.column("offset"))
            missing = np.setdiff1d(integers(mine["offset"]), offsets, assume_unique=True)
            gaps += len(missing)
            if len(missing) and not tolerates_gaps:
                yield f"the topic holds no record at offset {missing[0]}, where staging holds one"
                return
            counterpart = mine.take(pa.array(offsets - integers(mine["offset"])[0]))
            differs = _differs(counterpart["key"], other.column("key")) | _differs(
                counterpart["value"], other.column("value")
            )
            differs |= header_differences(counterpart["headers"], other.column("headers"))
            alike = alike_ids(outputs, schemas, publish_state)
            for at in np.flatnonzero(differs).tolist():
                left, right = (
                    tuple(table[name][at].as_py() for name in ENCODED_SCHEMA.names) for table in (counterpart, other)
                )
                if not is_same(left, right, alike):
                    yield f"the record at offset {offsets[at]} is not staging's"
                    return
            comparisons += len(offsets)
            numbers |= {"compared": comparisons, "compacted": gaps}


@dataclass
class _RowBuffer:
    """Staged rows, taken up to an offset at a time."""

    batches: Iterator[pa.RecordBatch]
    remainder: pa.Table = field(default_factory=ENCODED_SCHEMA.empty_table)

    def take(self, count: int) -> pa.Table:
        while self.remainder.num_rows < count:
            self.remainder = pa.concat_tables([self.remainder, pa.Table.from_batches([next(self.batches)])])
        rows, self.remainder = self.remainder.slice(0, count), self.remainder.slice(count)
        return rows


def _side_by_side(
    ours: _RowBuffer, theirs: Iterable[pa.RecordBatch], part: OffsetRange
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Kafka's records batch by batch, each with all staged rows of its span; at last what staging has beyond."""
    first = part.first
    for batch in theirs:
        end = int(integers(batch.column("offset"))[-1]) + 1
        yield ours.take(end - first), pa.Table.from_batches([batch])
        first = end
    if first < part.end:
        yield ours.take(part.end - first), ENCODED_SCHEMA.empty_table()


def _differs(mine: pa.ChunkedArray, other: pa.ChunkedArray) -> np.ndarray:
    """A mask of the rows in which two columns differ. Null equals only null."""
    equal = pc.fill_null(pc.equal(mine, other), False)
    both_null = pc.and_(pc.is_null(mine), pc.is_null(other))
    return ~np.asarray(pc.or_(equal, both_null).to_numpy(), dtype=bool)


def run_all(pipeline: Pipeline) -> Iterator[CheckResult]:
    """The results one by one, in the order of the data's way. The results of blocking checks are kept in the lake.

    Each check has a snapshot of its own, because the checks of a large lake take long. Raises ZyncError where a check can't
    look.
    """
    for item in pipeline.inputs:
        for check in raw_checks.BLOCKING.values():
            yield record_check(pipeline, item.pool, partial(check, pipeline, item.topic, None))
        yield raw_checks.schema_change(pipeline, item.topic)
        yield raw_checks.quarantine_size(pipeline, item.topic)
    for pool in pipeline.staging_pools:
        yield record_check(pipeline, pool, partial(exactly_once_done_coverage, pipeline, pool))
        for output in pipeline.outputs_of(pool):
            yield record_check(pipeline, pool, partial(contiguous_output_offsets, pipeline, output.topic))
        yield pending_age(pipeline, pool)
        yield source_order(pipeline, pool)
        for output in pipeline.outputs_of(pool):
            yield staging_equals_topic(pipeline, output.topic)
    yield from sink_results(pipeline)


def record_check(pipeline: Pipeline, pool: str, check: Callable[..., CheckResult]) -> CheckResult:
    """Run a blocking check of a pool on a snapshot of its own, which it gets as ``snapshot``, and keep the result."""
    snapshot = Snapshot(pipeline)
    return snapshot.run_check(pool, partial(check, snapshot=snapshot))
