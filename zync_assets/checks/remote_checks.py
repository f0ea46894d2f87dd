"""The checks that ask a broker or a target: of source topics, published topics and target tables. They need no JVM.

- A source topic is reachable.
- A published topic and staging hold the same records, by content.
- A target's position belongs to the lake, and no record of the target is in quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.errors import (
    DataLoss,
    KafkaError,
    LakeError,
    SchemaError,
    SinkError,
    TableDamaged,
    TargetUnavailable,
    ZyncError,
)
from zync_assets.ingest.plan import absent_error, losses_of
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import TopicState, high_watermarks, is_compacted, topic_states
from zync_assets.lake.check_results import CheckResult, Number, Severity, conclude, count_text
from zync_assets.lake.head import OutputPosition
from zync_assets.lake.parquet_rows import integers
from zync_assets.lake.publication import PublishState, WrittenSchema, rollback_error
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, intersection, normalize
from zync_assets.pipeline import Pipeline, Sink, SinkTable, topic_path
from zync_assets.publish.encoding import (
    ENCODED_SCHEMA,
    alike_ids,
    encoded_rows,
    is_same,
    staged_topic,
)
from zync_assets.publish.plan import partition_numbers, partitions_error
from zync_assets.sinks.plan import plan_sink, reset_command
from zync_assets.sinks.replay import late_spots
from zync_assets.sinks.target import OUTAGE_CURE, TableSpec

STAGING_EQUALS_TOPIC, REACHABLE = "staging_equals_topic", "reachable"
SINK_POSITION, SINK_QUARANTINE = "sink_position", "sink_quarantine"
NO_END = 1 << 62
"""An offset past every record."""


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
        for rows, records in _in_pairs(buffer, batches, part):
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


def _in_pairs(
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


def header_differences(headers: pa.Array | pa.ChunkedArray, other_headers: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A mask of the rows in which two columns of headers differ. No headers equal an empty list."""
    if headers.null_count == len(headers) and other_headers.null_count == len(other_headers):
        return np.zeros(len(headers), bool)
    pairs = zip(headers.to_pylist(), other_headers.to_pylist(), strict=True)
    return np.fromiter(((left or None) != (right or None) for left, right in pairs), bool, len(headers))


def sink_subject(sink: Sink, table: SinkTable) -> str:
    """The path of a target table's asset: ``warehouse/orders``."""
    return f"{sink.name}/{table.name}"


def sink_position(
    pipeline: Pipeline,
    sink: Sink,
    table: SinkTable,
    expected: Mapping[int, int] | None = None,
    snapshot: Snapshot | None = None,
) -> CheckResult:
    """The target's position belongs to the lake's table, and is not past its end.

    ``expected``: partition → the next offset that a run has written up to, which the position has reached. Raises
    TargetUnavailable.
    """
    subject = sink_subject(sink, table)
    try:
        plan = plan_sink(pipeline, sink, table, snapshot=snapshot)
    except TargetUnavailable:
        raise
    except (SinkError, DataLoss) as error:
        return conclude(SINK_POSITION, subject, "error", [str(error)], "", {})
    numbers: dict[str, Number] = {"lag": plan.lag}
    numbers |= {f"next_{partition}": next_offset for partition, next_offset in sorted(plan.progress.next.items())}
    problems = [
        f"partition {partition} stands at {plan.progress.next.get(partition)} in the target, and a run wrote up to"
        f" {next_offset}. Another program changed the table zync_positions: restore the target"
        for partition, next_offset in (expected or {}).items()
        if (plan.progress.next.get(partition) or 0) < next_offset
    ]
    if plan.progress.origin is not None and not plan.target().has_table(TableSpec(table.name, (), (), sink.mode)):
        problems.append(
            f"the table is not there, and records were written to it. Load it from the start: {reset_command(plan)}"
        )
    left = [(plan.lag, "offset"), (len(late_spots(plan)), "record of a replay")]
    texts = [
        f"{count_text(count, noun)} {'is' if count == 1 else 'are'} left to write" for count, noun in left if count
    ]
    summary = " and ".join(texts) or "every record is written"
    return conclude(SINK_POSITION, subject, "error", problems, summary, numbers)


def sink_quarantine(pipeline: Pipeline, sink: Sink, table: SinkTable, snapshot: Snapshot | None = None) -> CheckResult:
    """Warns where records of a table are in quarantine. Names the last record, with its error."""
    subject = sink_subject(sink, table)
    try:
        records = plan_sink(pipeline, sink, table, snapshot=snapshot, check=False).progress.bad
    except TargetUnavailable:
        raise
    except ZyncError as error:
        return conclude(SINK_QUARANTINE, subject, "warn", [str(error)], "", {})
    numbers: dict[str, Number] = {"records": len(records)}
    if not records:
        return conclude(SINK_QUARANTINE, subject, "warn", [], "no record is in quarantine", numbers)
    record = max(records, key=lambda item: item.offset)
    text = (
        f"{count_text(len(records), 'record')} {'is' if len(records) == 1 else 'are'} in quarantine; the last is {table.source},"
        f" partition {record.partition}, offset {record.offset} ({record.key}): {record.error.rstrip('.')}."
        f" Correct the cause, and write the records again: {pipeline.command('quarantine replay')}"
    )
    return CheckResult(SINK_QUARANTINE, subject, False, "warn", text, numbers)


_CHECKS: tuple[tuple[str, Severity, Callable[[Pipeline, Sink, SinkTable], CheckResult]], ...] = (
    (SINK_POSITION, "error", sink_position),
    (SINK_QUARANTINE, "warn", sink_quarantine),
)


def sink_results(pipeline: Pipeline) -> Iterator[CheckResult]:
    """The checks of every target table. A target that does not answer fails the checks of its tables, and no others."""
    for sink in pipeline.sinks:
        outage: TargetUnavailable | None = None
        for table in sink.tables:
            for name, severity, check in _CHECKS:
                # Each further check of the target would wait for an answer, too.
                if outage is None:
                    try:
                        yield check(pipeline, sink, table)
                        continue
                    except TargetUnavailable as error:
                        outage = error
                problem = f"sink {sink.name}: {str(outage).rstrip('.')}. {OUTAGE_CURE}"
                yield conclude(name, sink_subject(sink, table), severity, [problem], "", {})
