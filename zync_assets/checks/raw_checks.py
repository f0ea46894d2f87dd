"""The checks of a raw table: order of offsets, completeness compared with Kafka, schemas, and quarantine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from zync_assets.audit.account import Quarantined, read_quarantine, touches
from zync_assets.audit.coverage import MONOTONIC, file_problems, log_problems
from zync_assets.codecs.arrays import pc
from zync_assets.codecs.avro.types import arrow_type
from zync_assets.codecs.evolution import type_differences
from zync_assets.errors import DataLoss, LakeError, RegistryError, SchemaError
from zync_assets.ingest.order import own_orders
from zync_assets.ingest.plan import LEADER_SECONDS, absent_error
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import led_state, topic_state
from zync_assets.lake import raw, storage, tampering
from zync_assets.lake.check_results import CheckResult, Look, Number, Severity, conclude, count_text
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import (
    DamagedFile,
    FileOffsets,
    distinct,
    integers,
    read_columns,
    rows_at,
    rows_within,
)
from zync_assets.lake.quarantine_table import Selection, quarantined_records
from zync_assets.lake.raw import ORDER, RawState, WriterSchema
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange, intersection, normalize, offset_count
from zync_assets.pipeline import Input, Pipeline, pool_path


def schema_changes(
    pipeline: Pipeline, state: RawState, ranges: Iterable[OffsetRange] | None
) -> Mapping[str, list[str]]:
    """Side → one text per writer schema that changed the columns: the schema's first record and its changes.

    The registry holds the schemas. If the registry does not answer, the texts omit the changes.
    """
    parts = None if ranges is None else list(ranges)
    registry = Registry(pipeline.registry) if pipeline.registry else None
    texts_by_side: dict[str, list[str]] = {"key": [], "value": []}
    for side, texts in texts_by_side.items():
        writers = [item for item in state.writers if item.side == side]
        for prior, item in pairwise(writers):
            if item.changes and (parts is None or any(_is_in(item, part) for part in parts)):
                change = f"partition {item.partition}, offset {item.offset}: {_diff(registry, prior, item)}".rstrip(
                    ": "
                )
                name = "a new schema" if item.id is None else f"id {item.id}"
                texts.append(f"{name} from {change}")
    return texts_by_side


def _is_in(item: WriterSchema, part: OffsetRange) -> bool:
    return part.partition == item.partition and part.first <= item.offset < part.end


def _diff(registry: Registry | None, prior: WriterSchema, item: WriterSchema) -> str:
    if registry is None or prior.id is None or item.id is None:
        return ""
    try:
        types = [arrow_type(registry.schema(schema.id)) for schema in (prior, item) if schema.id is not None]
    except (RegistryError, SchemaError):
        return ""
    return "; ".join(type_differences(types[0], types[1], item.side))


NO_LOSS = "no_unexplained_loss"
SCHEMA_CHANGE = "schema_change"
QUARANTINE_SIZE = "quarantine_size"


def monotonic_offsets(
    pipeline: Pipeline, topic: str, ranges: Iterable[OffsetRange] | None = None, snapshot: Snapshot | None = None
) -> CheckResult:
    """Check the order of a raw table's offsets.

    Within a file, offsets strictly ascend and agree with the log. No two files of a partition overlap, except files of
    replays, and no offset is in two files. Every offset lies from the first to before the next offset. The check reads the
    rows of the files in ``ranges`` (of every file if None), and the whole log.
    """
    snapshot = snapshot or Snapshot(pipeline)
    state = snapshot.raw(topic)
    if state is None:
        return _empty_result(MONOTONIC, pipeline, topic, "error")
    problems = [
        f"file {item.path} carries no offsets in the log, so no reader would find it"
        for item in state.table.files
        if item.partition is None
    ]
    all_files = raw.raw_files(state)
    problems += log_problems(state, all_files)
    parts = _ingest_ranges(state, ranges)
    files = all_files if ranges is None else raw.raw_files(state, parts)
    for item in files:
        problems += file_problems(state.table.uri, item)
    problems += _replay_problems(state, all_files)
    if (strange := tampering.strange_file(state.table, all_files)) is not None:
        problems.append(strange)
    records = sum(item.records for item in files)
    return conclude(
        MONOTONIC,
        subject(pipeline, topic),
        "error",
        problems,
        f"the offsets of {count_text(records, 'record')} in {count_text(len(files), 'file')} ascend",
        {"files": len(files), "records": records},
        raw_look(MONOTONIC, snapshot, topic, state, parts),
    )


def no_unexplained_loss(
    pipeline: Pipeline, topic: str, ranges: Iterable[OffsetRange] | None = None, snapshot: Snapshot | None = None
) -> CheckResult:
    """Check that a raw table holds every record that Kafka holds below the next offset.

    Each record is exactly once in the raw table or in quarantine, or lies in a range whose loss was accepted, or in a range
    that ingest left out. Ingest leaves out the records that the input's shape excludes, and repeats. The quarantine holds
    as many entries as were counted. The check reads Kafka again, over ``ranges`` or every ingested offset. Records that
    retention removed since are only counted. Raises TopicMissing, BrokerUnavailable.
    """
    snapshot = snapshot or Snapshot(pipeline)
    state = snapshot.raw(topic)
    if state is None:
        return _empty_result(NO_LOSS, pipeline, topic, "error")
    kafka_state = led_state(pipeline.kafka, topic, LEADER_SECONDS)
    if kafka_state is None:
        raise absent_error(pipeline.input(topic), was_there=True)
    place, parts = subject(pipeline, topic), _ingest_ranges(state, ranges)
    look = raw_look(NO_LOSS, snapshot, topic, state, parts)
    if not state.is_from(kafka_state.topic_id):
        problem = (
            f"topic {topic} was deleted and created again (its id is now {kafka_state.topic_id}):"
            f" {place} can't be compared with it"
        )
        return conclude(NO_LOSS, place, "error", [problem], "", {"compared": 0}, look)
    problems: list[str] = []
    numbers: dict[str, Number] = {}
    totals = {"compared": 0, "missing": 0, "doubled": 0, "gone_from_kafka": 0}
    watermarks = {item.partition: item for item in kafka_state.partitions}
    try:
        side = read_quarantine(snapshot, topic, parts)
        numbers["quarantined"] = len(side.records)
        if state.left_out:
            numbers["left_out"] = sum(state.left_out.values())
        if state.retention_count:
            numbers["removed_by_retention"] = sum(state.retention_count.values())
        problems += _count_problems(state, side)
        for part in parts:
            mark = watermarks.get(part.partition)
            if part.partition in kafka_state.away:
                raise kafka_state.away[part.partition]
            if mark is None or mark.end < part.end:
                end = mark.end if mark else 0
                problems.append(
                    f"partition {part.partition} of topic {topic} ends at offset {end}, and up to offset {part.end}"
                    " was ingested: the topic has lost records"
                )
            low = max(mark.low if mark else 0, state.retention_start.get(part.partition, 0))
            first, end = max(part.first, low), min(part.end, mark.end if mark else 0)
            if first < end:
                reader = _kafka_offsets(pipeline, topic, part.partition, first, end)
                problems += _compare(state, side, OffsetRange(part.partition, first, end), reader, totals)
    except DamagedFile as error:
        problems.append(str(error))
    aside = f" or were left out ({numbers['left_out']} in all)" if numbers.get("left_out") else ""
    summary = f"of {count_text(totals['compared'], 'record')} that Kafka still holds, each is here once{aside}"
    return conclude(NO_LOSS, place, "error", problems, summary, {**totals, **numbers}, look)


BLOCKING: Mapping[str, Callable[..., CheckResult]] = {MONOTONIC: monotonic_offsets, NO_LOSS: no_unexplained_loss}
"""The checks of a raw table that hold back ETL."""


def schema_change(
    pipeline: Pipeline, topic: str, ranges: Iterable[OffsetRange] | None = None, snapshot: Snapshot | None = None
) -> CheckResult:
    """Warns where records came with more than one writer schema on a side; says what the schemas changed that came for the
    first time in ``ranges``, and with which record."""
    snapshot = snapshot or Snapshot(pipeline)
    state = snapshot.raw(topic)
    if state is None:
        return _empty_result(SCHEMA_CHANGE, pipeline, topic, "warn")
    place = subject(pipeline, topic)
    counts: dict[str, dict[int, int]] = {"key": {}, "value": {}}
    try:
        for item in raw.raw_files(state, ranges):
            uri = storage.join(state.table.uri, item.path)
            for batch in read_columns(uri, ["key_schema_id", "value_schema_id"]):
                for side, side_counts in counts.items():
                    ids, times = np.unique(integers(batch[f"{side}_schema_id"]), return_counts=True)
                    for schema_id, count in zip(ids.tolist(), times.tolist(), strict=True):
                        if schema_id >= 0:
                            side_counts[schema_id] = side_counts.get(schema_id, 0) + count
    except DamagedFile as error:
        return conclude(SCHEMA_CHANGE, place, "warn", [str(error)], "", {})
    numbers: dict[str, Number] = {}
    for side, ids in counts.items():
        numbers[f"{side}_schemas"] = len(ids)
        numbers |= {f"{side}_schema_{name}": count for name, count in sorted(ids.items())}
    problems: list[str] = []
    for side, changes in schema_changes(pipeline, state, ranges).items():
        numbers |= {f"{side}_change_{index}": text for index, text in enumerate(changes)}
        ids = sorted(counts[side])
        if len(ids) > 1:
            changes = [f"{side}s came with {len(ids)} writer schemas: ids {', '.join(map(str, ids))}", *changes]
        elif changes:
            changes = [f"{side}s came with a new writer schema", *changes]
        if changes:
            problems.append("; ".join(changes))
    return conclude(SCHEMA_CHANGE, place, "warn", problems, "one writer schema a side", numbers)


def quarantine_size(
    pipeline: Pipeline, topic: str, ranges: Iterable[OffsetRange] | None = None, snapshot: Snapshot | None = None
) -> CheckResult:
    """Warns where a record is in quarantine, since it could not be decoded or since a rule failed on it, or where a loss by
    retention was accepted."""
    snapshot = snapshot or Snapshot(pipeline)
    state = snapshot.raw(topic)
    if state is None:
        return _empty_result(QUARANTINE_SIZE, pipeline, topic, "warn")
    place = subject(pipeline, topic)
    parts = _ingest_ranges(state, ranges)
    try:
        side = read_quarantine(snapshot, topic, parts)
        records = quarantined_records(pipeline, Selection((topic,)), snapshot)
    except (DamagedFile, LakeError) as error:
        return conclude(QUARANTINE_SIZE, place, "warn", [str(error)], "", {})
    inside = [item for item in records if touches(OffsetRange(item.partition, item.offset, item.offset + 1), parts)]
    codec_failures = [item for item in inside if item.stage != "etl"]
    rule_failures = [item for item in inside if item.stage == "etl"]
    cure = f"Correct the cause, then: {pipeline.command('quarantine replay')}"
    problems: list[str] = []
    for failures, fault in ((codec_failures, "could not be decoded"), (rule_failures, "could not be transformed")):
        if failures:
            first = failures[0]
            place_of_first = f"{first.partition}:{first.offset}: {first.error}"
            problems.append(f"{count_text(len(failures), 'record')} {fault}, the first at {place_of_first}. {cure}")
    if side.lost:
        problems.append(f"retention removed {', '.join(map(str, side.lost))} before they were ingested")
    numbers = {
        "quarantined": len(inside),
        "lost_offsets": offset_count(side.lost),
    }
    return conclude(QUARANTINE_SIZE, place, "warn", problems, "nothing in quarantine", numbers)


def raw_look(name: str, snapshot: Snapshot, topic: str, state: RawState, ranges: Sequence[OffsetRange]) -> Look:
    """The look of a blocking check of a raw table, at some ingested ranges."""
    pipeline = snapshot.pipeline
    look = Look(name, subject(pipeline, topic), state.table_id, {topic: tuple(ranges)})
    begin = dict(state.first)
    if not snapshot.check_state(pipeline.input(topic).pool).has_begun(look):
        # The table is older than the lake's check results. Checks begin after the offsets that ETL has seen.
        begin |= {
            p: min(offset, state.next[p]) for p, offset in _account_ends(snapshot, topic).items() if p in state.next
        }
    return replace(look, extent={(topic, p): (begin.get(p, 0), end) for p, end in state.next.items()})


def _account_ends(snapshot: Snapshot, topic: str) -> dict[int, int]:
    """Partition → the lowest seen offset of the staging pools that read the topic."""
    heads: list[dict[int, int]] = []
    for pool in snapshot.pipeline.readers_of(topic):
        try:
            state = snapshot.staging(pool)
        except LakeError:  # a finding of the staging pool's own checks
            state = None
        heads.append(state.head.seen(topic) if state else {})
    partitions = set.intersection(*map(set, heads)) if heads else set[int]()
    return {p: min(head[p] for head in heads) for p in partitions}


def subject(pipeline: Pipeline, topic: str) -> str:
    """The raw table of an input, as results of checks name it: ``Raw/orders``."""
    return pool_path(pipeline.input(topic).pool, topic)


def _empty_result(name: str, pipeline: Pipeline, topic: str, severity: Severity) -> CheckResult:
    return conclude(name, subject(pipeline, topic), severity, [], "nothing ingested yet", {"records": 0})


def _ingest_ranges(state: RawState, ranges: Iterable[OffsetRange] | None) -> list[OffsetRange]:
    """The ingested offsets of ``ranges``; every ingested offset if ``ranges`` is None."""
    all_ranges = [OffsetRange(p, state.first.get(p, 0), end) for p, end in sorted(state.next.items())]
    return normalize(all_ranges) if ranges is None else intersection(all_ranges, ranges)


def _replay_problems(state: RawState, files: Sequence[DataFile]) -> Iterator[str]:
    """Offsets of replays that another file has too."""
    try:
        for partition, offsets in raw.replay_offsets(state).items():
            repeats = offsets[:-1][np.diff(offsets) == 0]
            first, end = int(offsets[0]), int(offsets[-1]) + 1
            batch_files = [item for item in files if item.partition == partition and not raw.is_replay(item)]
            near = [item for item in batch_files if (item.first or 0) < end and first <= (item.last or 0)]
            in_batch = FileOffsets(state.table.uri, near).between(first, end)
            for offset in [*repeats, *np.intersect1d(distinct(in_batch), distinct(offsets), assume_unique=True)][:1]:
                yield f"partition {partition}: offset {offset} was replayed and is there twice"
    except (DamagedFile, LakeError) as error:
        yield str(error)


def _count_problems(state: RawState, side: Quarantined) -> Iterator[str]:
    for partition in sorted({*side.entries, *state.bad}):
        total, count = state.bad.get(partition, 0), side.entries.get(partition, 0)
        if total != count:
            yield f"partition {partition}: {total} quarantined entries were counted and {count} are there"
    for partition in sorted({*np.unique(side.left_out[:, 0]).tolist(), *state.left_out}):
        total, count = state.left_out.get(partition, 0), side.left_out_records(partition)
        if total != count:
            yield f"partition {partition}: {total} records were counted as left out and {count} are there"


def _kafka_offsets(
    pipeline: Pipeline, topic: str, partition: int, first: int, end: int
) -> Iterator[tuple[int, np.ndarray]]:
    """The offsets that Kafka holds, batch by batch, each with the offset from which on it is complete: what retention
    takes meanwhile is skipped."""
    while first < end:
        try:
            for batch in read_range(pipeline.kafka, topic, partition, first, end):
                offsets = integers(batch.column("offset"))
                yield first, offsets
                first = int(offsets[-1]) + 1
            yield first, np.empty(0, np.int64)
            return
        except DataLoss:
            marks = {item.partition: item.low for item in topic_state(pipeline.kafka, topic).partitions}
            low = marks.get(partition, 0)
            if low <= first:
                raise
            first = low


def _compare(
    state: RawState,
    side: Quarantined,
    part: OffsetRange,
    reader: Iterable[tuple[int, np.ndarray]],
    totals: dict[str, int],
) -> list[str]:
    raw_offsets = FileOffsets(state.table.uri, raw.raw_files(state, [part]))
    aside = side.offsets(part.partition)
    missing_offsets: list[int] = []
    doubles: list[int] = []
    for first, offsets in reader:
        end = int(offsets[-1]) + 1 if len(offsets) else part.end
        lake_offsets = np.concatenate([raw_offsets.between(first, end), aside[(aside >= first) & (aside < end)]])
        totals["compared"] += len(offsets)
        if np.array_equal(lake_offsets, offsets):
            continue
        distinct_offsets, times = np.unique(lake_offsets, return_counts=True)
        lost_offsets = side.unexplained(part.partition, np.setdiff1d(offsets, distinct_offsets, assume_unique=True))
        totals["missing"] += len(lost_offsets)
        totals["doubled"] += int((times > 1).sum())
        # Compaction and retention may take a record after it was ingested: no loss of ours.
        totals["gone_from_kafka"] += len(np.setdiff1d(distinct_offsets, offsets, assume_unique=True))
        missing_offsets += lost_offsets[:1].tolist()
        doubles += distinct_offsets[times > 1][:1].tolist()
    place = f"partition {part.partition} of topic {state.table.uri.rsplit('/', 1)[-1]}"
    problems = (
        [f"the record at offset {missing_offsets[0]} in {place} is in Kafka and not in the lake"]
        if missing_offsets
        else []
    )
    return problems + ([f"the record at offset {doubles[0]} in {place} is in the lake twice"] if doubles else [])


def raw_time(snapshot: Snapshot, topic: str, partition: int, offset: int) -> float | None:
    """The time of a raw record, in seconds since the epoch; None where there is no such record, and of a topic that is no
    input any more. Raises LakeError."""
    input_state = _state_of(snapshot, topic)
    if input_state is None:
        return None
    files = raw.raw_files(input_state[1], [OffsetRange(partition, offset, offset + 1)])
    row = rows_at(input_state[1].table.uri, files, partition, [offset], []).get(offset)
    return None if row is None else row["kafka"]["time"].timestamp()


def began_anew(snapshot: Snapshot, topic: str, partition: int, offset: int) -> bool | None:
    """Whether the log of the source began anew before a raw record. The positions of the record, and of later records in its
    file, are then below the order that they have. None where the table does not show the positions."""
    input_state = _state_of(snapshot, topic)
    if input_state is None:
        return None
    item, state = input_state
    files = raw.raw_files(state, [OffsetRange(partition, offset, offset + 1)])
    path = (item.order and item.order.path) or ("value", "source")
    fields = [("kafka", "offset"), path, (ORDER,)]
    answers: list[bool] = []
    try:
        for rows in rows_within(state.table.uri, files, [OffsetRange(partition, offset, 1 << 62)], fields):
            columns = {name: rows.column(name) for name in rows.schema.names}
            positions = own_orders(topic, item.order, columns) if path[0] in columns and ORDER in columns else None
            if positions is not None:
                answers += _below(positions, columns[ORDER])
    except (LakeError, SchemaError):
        return None
    return all(answers) if answers else None


def _below(positions: pa.StructArray, orders: pa.StructArray) -> list[bool]:
    """Whether all of some positions lie below the orders of their records; empty where the records have none. A record of a
    snapshot has none."""
    (high, low), (order_high, order_low) = (
        [pc.struct_field(values, name) for name in ("high", "low")] for values in (positions, orders)
    )
    is_below = pc.or_(pc.less(high, order_high), pc.and_(pc.equal(high, order_high), pc.less(low, order_low)))
    answers = is_below.filter(pc.not_equal(high, pa.scalar(LOWEST[0], pa.int64())))
    return [bool(pc.all(answers).as_py())] if len(answers) else []


def _state_of(snapshot: Snapshot, topic: str) -> tuple[Input, RawState] | None:
    """An input and its raw table; None of a topic that is no input any more, or has no table."""
    item = next((item for item in snapshot.pipeline.inputs if item.topic == topic), None)
    state = None if item is None else snapshot.raw(topic)
    return None if item is None or state is None else (item, state)
