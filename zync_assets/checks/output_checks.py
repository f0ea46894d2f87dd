"""The checks of outputs: of a staging pool, of a published topic, and all checks of a pipeline.

- A staging pool: its account against raw and outputs, its numbering, records that are pending for long, and records that
  came too late for their place in the source's order.
- A published topic: Kafka and staging hold the same records, by content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Thread

import numpy as np
import pyarrow as pa

from zync_assets.audit.account import null_key_records, read_account
from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.checks import raw_checks
from zync_assets.checks.sink_checks import sink_results
from zync_assets.codecs.arrays import pc
from zync_assets.conflicts import EVERYWHERE, PASSING, raise_first
from zync_assets.errors import (
    KafkaError,
    LakeError,
    LeaderMissing,
    SchemaError,
    TableDamaged,
    TopicMissing,
    ZyncError,
)
from zync_assets.ingest.plan import absent_error, losses_of
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import TopicState, high_watermarks, is_compacted, topic_states
from zync_assets.lake.check_results import CheckResult, Number, conclude, keep_accepted
from zync_assets.lake.head import OutputPosition
from zync_assets.lake.parquet_rows import DamagedFile, integers
from zync_assets.lake.publication import PublishState, WrittenSchema, rollback_error
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, intersection, normalize
from zync_assets.pipeline import Pipeline, topic_path
from zync_assets.pipeline_file.keys import joining_kinds
from zync_assets.publish.encoding import (
    ENCODED_SCHEMA,
    alike_ids,
    encoded_rows,
    header_differences,
    is_same,
    staged_topic,
)
from zync_assets.publish.plan import partition_numbers, partitions_error

PENDING_AGE, SOURCE_ORDER = "pending_age", "source_order"
MAX_AGE_SECONDS = 86_400
"""How long a record may wait for its counterpart before ``pending_age`` warns."""


def pending_age(pipeline: Pipeline, pool: str) -> CheckResult:
    """Warns where a record has waited for longer than MAX_AGE_SECONDS, or waits for ever: its join key is null, or the pipeline
    file has its rule no more. A record's age is counted from its raw time.
    """
    snapshot = Snapshot(pipeline)
    try:
        state = snapshot.staging(pool)
    except TableDamaged as error:
        return conclude(PENDING_AGE, pool, "warn", [str(error)], "", {"pending": 0})
    if state is None:
        return conclude(PENDING_AGE, pool, "warn", [], "nothing transformed yet", {"pending": 0})
    if not pipeline.rules_of(pool):
        return conclude(PENDING_AGE, pool, "warn", [], "another pipeline file has the rules", {"pending": 0})
    problems: list[str] = []
    numbers: dict[str, Number] = {"pending": sum(state.head.waiting.values())}
    numbers |= {f"pending_{rule}_{topic}": n for (rule, topic), n in sorted(state.head.waiting.items()) if n}
    rules = pipeline.joins_of(pool).keys() | {
        (r.name, topic) for r in pipeline.rules_of(pool) if r.held for topic in r.topics
    }
    problems += [
        f"{n} records of {topic} wait for rule {rule}, which the pipeline file has no more as a {joining_kinds()} rule of"
        f" {topic} for {pool}. Run `{pipeline.command('etl', '--retry-unmatched')}` to give them to the other rules"
        for (rule, topic), n in sorted(state.head.waiting.items())
        if n and (rule, topic) not in rules
    ]
    if numbers["pending"]:
        try:
            problems += _age_problems(snapshot, pool, state, numbers)
        except (DamagedFile, LakeError) as error:
            problems.append(str(error))
    return conclude(PENDING_AGE, pool, "warn", problems, f"{numbers['pending']} records wait", numbers)


def source_order(pipeline: Pipeline, pool: str, snapshot: Snapshot | None = None) -> CheckResult:
    """Warns where records came after ETL had taken records that are later in the source's order, and where ETL took a
    transaction without all its changes.

    The outputs of late records follow outputs of later changes. The check counts late records, and names one record of each
    partition, and whether the log of the source began anew. The check counts incomplete transactions, and names the last of
    each domain. What ``accept_source_order`` accepted is left out.
    """
    snapshot = snapshot or Snapshot(pipeline)
    try:
        state = snapshot.staging(pool)
    except TableDamaged as error:
        return conclude(SOURCE_ORDER, pool, "warn", [str(error)], "", {"late": 0})
    news = {} if state is None else _unaccepted_counts(snapshot, pool, state)
    late = {place: count for place, count in news.items() if isinstance(place, tuple)}
    transactions = state.head.transactions if state else {}
    cure = f"Then `{pipeline.command('check', '--accept', 'source_order')}` accepts it"
    problems = [
        f"{count} records of {topic}, partition {partition}, came after later records of their source were transformed;"
        f" {topic} {partition}:{offset} is the first of the last batch with such records. Their outputs are out of order."
        f" {_LATE[raw_checks.began_anew(snapshot, topic, partition, offset)]} {cure}"
        for (topic, partition), count in late.items()
        for offset in [state.head.late[topic, partition].offset if state else 0]
    ]
    problems += [
        f"{count} transactions of {domain} were transformed without all their changes, the last of them {item.last}:"
        " the changes did not come within the limit. Staging has had states that the source did not have. Set a longer"
        f" transactions.limit in the pipeline file. {cure}"
        for domain, item in sorted(transactions.items())
        if (count := news.get(domain, 0))
    ]
    numbers: dict[str, Number] = {"late": sum(late.values())}
    numbers |= {f"late_{topic}_{partition}": count for (topic, partition), count in late.items()}
    if transactions:
        numbers["incomplete_transactions"] = sum(news.get(domain, 0) for domain in transactions)
    return conclude(SOURCE_ORDER, pool, "warn", problems, "every record came in the order of its source", numbers)


_DELAY = "Set a longer order-delay in the pipeline file"
_ANEW = "give all inputs of the domain an order.by that adds a constant to the positions, or order: time (order.md shows how)"
_LATE = {
    False: f"{_DELAY}.",
    True: "The log of the source began anew, by a reset, a failover or a restore: the positions of these records lie below"
    f" earlier ones, and no order-delay helps. Therefore, {_ANEW}.",
    None: f"{_DELAY}. But if the log of the source began anew, by a reset, a failover or a restore, {_ANEW}.",
}
"""Whether the log of the source began anew → the cure of late records."""


def accept_source_order(pipeline: Pipeline, pool: str) -> None:
    """Accept the late records and the incomplete transactions of a pool so far. The check counts later ones alone."""
    snapshot = Snapshot(pipeline)
    if (state := snapshot.staging(pool)) is not None:
        counts = {_subject(place): count for place, count in _order_counts(state).items()}
        keep_accepted(snapshot.check_state(pool), SOURCE_ORDER, state.table_id, counts)


def _order_counts(state: StagingState) -> dict[tuple[str, int] | str, int]:
    """The late records of each partition, and the incomplete transactions of each domain."""
    late = {place: item.records for place, item in sorted(state.head.late.items())}
    return {**late, **{domain: item.incomplete for domain, item in sorted(state.head.transactions.items())}}


def _unaccepted_counts(snapshot: Snapshot, pool: str, state: StagingState) -> dict[tuple[str, int] | str, int]:
    check_state = snapshot.check_state(pool)
    accepted = partial(check_state.accepted, SOURCE_ORDER, state.table_id)
    news = {place: count - accepted(_subject(place)) for place, count in _order_counts(state).items()}
    return {place: count for place, count in news.items() if count > 0}


def _subject(place: tuple[str, int] | str) -> str:
    return f"transactions of {place}" if isinstance(place, str) else f"{place[0]}:{place[1]}"


def _age_problems(snapshot: Snapshot, pool: str, state: StagingState, numbers: dict[str, Number]) -> Iterator[str]:
    entries, *_ = read_account(state)
    # A record's time never runs back within its partition: the lowest pending offset is the oldest.
    oldest: list[tuple[float, str]] = []
    for (topic, partition), place_entries in entries.items():
        offsets = place_entries.waiting
        record_time = raw_checks.raw_time(snapshot, topic, partition, int(offsets[0])) if len(offsets) else None
        if record_time is not None:
            oldest.append((record_time, f"{topic} {partition}:{offsets[0]}"))
    if oldest:
        record_time, place = min(oldest)
        age = max(0.0, time.time() - record_time)
        numbers["oldest_seconds"] = round(age, 3)
        numbers["oldest"] = place
        if age > MAX_AGE_SECONDS:
            yield f"{place} has waited for {age:.0f} s, longer than {MAX_AGE_SECONDS:.0f} s"
    # Null equals nothing: a record with a null join key stays pending for ever.
    null_keys = null_key_records(state, snapshot.pipeline.joins_of(pool))
    numbers["null_keys"] = null_keys
    if null_keys:
        yield f"pending records with a null join key, which nothing will ever match: {null_keys}"


_THREADS = 2
"""How many checks run at one time. Their work is in libraries that run beside other Python code."""

NO_END = 1 << 62
"""An offset past every record."""
STAGING_EQUALS_TOPIC, REACHABLE = "staging_equals_topic", "reachable"


def reachable(pipeline: Pipeline, topic: str) -> CheckResult:
    """The broker knows an input topic, lets this pipeline look at it, and has the next offsets. Every partition has a leader."""
    item, subject = pipeline.input(topic), topic_path(topic)
    try:
        raw = Snapshot(pipeline).raw(topic)
        state = topic_states(pipeline.kafka, [topic]).get(topic)
        if state is None:
            raise absent_error(item, was_there=raw is not None)
        if raw is not None:
            losses_of(item, state, raw, raw.next)
    except (KafkaError, TableDamaged) as error:
        return conclude(REACHABLE, subject, "error", [str(error)], "", {})
    numbers = {"partitions": len(state.partitions), "offsets": sum(item.end - item.low for item in state.partitions)}
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
    publish_state, verified = snapshot.publish_state(pool, topic), snapshot.verified_parts(pool, topic)
    topic_state = topic_states(pipeline.kafka, [topic]).get(topic)
    highs = high_watermarks(pipeline.kafka, topic, partition_numbers(topic_state)) if topic_state else {}
    try:
        state = snapshot.staging(pool)
    except TableDamaged as error:
        return conclude(STAGING_EQUALS_TOPIC, subject, "error", [str(error)], "", {"compared": 0})
    positions = state.head.positions(topic) if state else {}
    recreate = pipeline.command("to-kafka", "--recreate", topic)
    loss = rollback_error(pool, topic, verified, state.head.output_ends(topic) if state else {}, recreate)
    if loss is not None:
        return conclude(STAGING_EQUALS_TOPIC, subject, "error", [str(loss)], "", {"compared": 0})
    if state is None or not positions:
        return conclude(STAGING_EQUALS_TOPIC, subject, "error", [], "nothing staged yet", {"compared": 0})
    numbers: dict[str, Number] = {"compared": 0, "staged": sum(item.next - item.base for item in positions.values())}
    if topic_state is None:
        has_history = publish_state.has_topic() or positions[0].topic_id is not None
        problems = [f"topic {topic} was published to and is gone"] if has_history else []
        return conclude(STAGING_EQUALS_TOPIC, subject, "error", problems, "nothing published yet", numbers)
    problems = list(_identity_problems(topic_state, positions[0], publish_state, recreate))
    problems += [str(error)] if not problems and (error := partitions_error(positions, topic_state, recreate)) else []
    if not problems:
        parts = [_Part(p, item, verified.get(p), highs.get(p, 0), len(positions)) for p, item in positions.items()]
        look_ranges = ranges if not backlog else [OffsetRange(p, verified.get(p, 0), NO_END) for p in positions]
        try:
            problems += [line for part in parts for line in part.watermark_problems(numbers)]
            problems += _content_problems(pipeline, state, topic_state, parts, publish_state, look_ranges, numbers)
        except (LakeError, SchemaError) as error:
            problems.append(str(error))
    summary = f"{numbers['compared']} records are staging's"
    return conclude(STAGING_EQUALS_TOPIC, subject, "error", problems, summary, numbers)


@dataclass(frozen=True)
class _Part:
    """A partition of a published topic. ``count``: the partitions of the topic's outputs."""

    partition: int
    position: OutputPosition
    verified_end: int | None
    high: int
    count: int

    @property
    def text(self) -> str:
        """The begin of a problem's line."""
        return "" if self.count == 1 else f"partition {self.partition}: "

    def watermark_problems(self, numbers: dict[str, Number]) -> Iterator[str]:
        position, verified_end = self.position, self.verified_end
        lag = max(0, position.next - max(position.base, verified_end or 0))
        for name, number in (("high_watermark", self.high), ("lag", lag)):
            numbers[name] = int(numbers.get(name, 0)) + number
        if self.high > position.next:
            yield (
                f"{self.text}the record at offset {position.next} is not staging's: staging ends there, the topic at"
                f" {self.high}"
            )
        if verified_end is not None and self.high < verified_end:
            yield (
                f"{self.text}the topic ends at offset {self.high} and was published up to {verified_end}: it has lost records"
            )


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


def _content_problems(
    pipeline: Pipeline,
    state: StagingState,
    topic_state: TopicState,
    places: Sequence[_Part],
    publish_state: PublishState,
    ranges: Iterable[OffsetRange] | None,
    numbers: dict[str, Number],
) -> Iterator[str]:
    lows, all_ranges = {item.partition: item.low for item in topic_state.partitions}, list[OffsetRange]()
    for place in places:
        first = max(place.position.base, lows.get(place.partition, 0))
        all_ranges.append(OffsetRange(place.partition, first, max(first, min(place.position.next, place.high))))
    parts = normalize(all_ranges) if ranges is None else intersection(all_ranges, ranges)
    tolerates_gaps = bool(parts) and is_compacted(pipeline.kafka, topic_state.topic)
    outputs = staged_topic(state, topic_state.topic, pipeline.registry)
    schemas: set[WrittenSchema] = set()
    texts = {place.partition: place.text for place in places}
    comparisons, gaps = 0, 0
    for part in parts:
        buffer = _RowBuffer(encoded_rows(outputs, part, schemas))
        # Nothing is published in transactions: what one holds is foreign, be it open, committed or aborted.
        batches = read_range(pipeline.kafka, topic_state.topic, part.partition, part.first, part.end, uncommitted=True)
        for rows, records in _side_by_side(buffer, batches, part):
            offsets = integers(records.column("offset"))
            gap_offsets = np.setdiff1d(integers(rows["offset"]), offsets, assume_unique=True)
            gaps += len(gap_offsets)
            if len(gap_offsets) and not tolerates_gaps:
                yield f"{texts[part.partition]}the topic holds no record at offset {gap_offsets[0]}, where staging holds one"
                return
            is_complete = len(offsets) == rows.num_rows
            counterpart = rows if is_complete else rows.take(pa.array(offsets - integers(rows["offset"])[0]))
            differs = _differs(counterpart["key"], records.column("key")) | _differs(
                counterpart["value"], records.column("value")
            )
            differs |= header_differences(counterpart["headers"], records.column("headers"))
            alike = alike_ids(outputs, schemas, publish_state)
            for at in np.flatnonzero(differs).tolist():
                left, right = (
                    tuple(table[name][at].as_py() for name in ENCODED_SCHEMA.names) for table in (counterpart, records)
                )
                if not is_same(left, right, alike):
                    yield f"{texts[part.partition]}the record at offset {offsets[at]} is not staging's"
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
    buffer: _RowBuffer, batches: Iterable[pa.RecordBatch], part: OffsetRange
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Kafka's records batch by batch, each with all staged rows of its span; at last what staging has beyond."""
    first = part.first
    for batch in batches:
        end = int(integers(batch.column("offset"))[-1]) + 1
        yield buffer.take(end - first), pa.Table.from_batches([batch])
        first = end
    if first < part.end:
        yield buffer.take(part.end - first), ENCODED_SCHEMA.empty_table()


def _differs(left: pa.ChunkedArray, right: pa.ChunkedArray) -> np.ndarray:
    """A mask of the rows in which two columns differ. Null equals only null."""
    equal = pc.fill_null(pc.equal(left, right), False)
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return ~np.asarray(pc.or_(equal, both_null).to_numpy(), dtype=bool)


def run_all(pipeline: Pipeline) -> Iterator[CheckResult]:
    """The results one by one, in the order of ``each_check``. _THREADS checks run at one time.

    The lake keeps the results of blocking checks. Raises the ZyncError of a check after the other results. Raises an error
    at once if each further check would wait for it, such as a broker's outage.
    """
    troubles: list[ZyncError] = []
    work = [(Future[CheckResult](), check) for check in each_check(pipeline)]
    results = [result for result, _ in work]
    # The last checks take longest: they compare the content of topics. Threads share the iterator, whose step is atomic.
    queue = reversed(work)

    def run() -> None:
        for result, check in queue:
            try:
                result.set_result(check())
            except BaseException as error:
                result.set_exception(error)

    # A check of a large lake takes long, and a process that a person interrupts waits for no daemon.
    for _ in range(_THREADS):
        Thread(target=run, daemon=True).start()
    try:
        for result in results:
            try:
                yield result.result()
            except (LeaderMissing, TopicMissing) as error:
                troubles.append(error)
            except (*PASSING, *EVERYWHERE):
                raise
            except ZyncError as error:
                troubles.append(error)
    finally:
        # The threads start no further check.
        work.clear()
    yield from sink_results(pipeline)
    raise_first(troubles)


def each_check(pipeline: Pipeline) -> list[Callable[[], CheckResult]]:
    """The checks in the order of the data's way, without those of sinks. No two checks share a snapshot."""
    checks: list[Callable[[], CheckResult]] = []
    for item in pipeline.inputs:
        blocking_checks = [partial(check, pipeline, item.topic, None) for check in raw_checks.BLOCKING.values()]
        checks += [partial(record_check, pipeline, item.pool, check) for check in blocking_checks]
        other_checks = reachable, raw_checks.schema_change, raw_checks.quarantine_size
        checks += [partial(check, pipeline, item.topic) for check in other_checks]
    for pool in pipeline.staging_pools:
        topics = [output.topic for output in pipeline.outputs_of(pool)]
        blocking_checks = [partial(exactly_once_done_coverage, pipeline, pool)]
        blocking_checks += [partial(contiguous_output_offsets, pipeline, topic) for topic in topics]
        checks += [partial(record_check, pipeline, pool, check) for check in blocking_checks]
        checks += [partial(check, pipeline, pool) for check in (pending_age, source_order)]
        checks += [partial(staging_equals_topic, pipeline, topic) for topic in topics]
    return checks


def record_check(pipeline: Pipeline, pool: str, check: Callable[..., CheckResult]) -> CheckResult:
    """Run a blocking check of a pool on a snapshot of its own, which it gets as ``snapshot``, and keep the result."""
    snapshot = Snapshot(pipeline)
    return snapshot.run_check(pool, partial(check, snapshot=snapshot))
