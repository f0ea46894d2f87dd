"""The guard before a step: the blocking checks of a staging pool, and tables that went back.

- The two blocking checks compare a staging pool's account with raw and outputs, and look at its numbering.
- ETL and publishing stop at a failed check, because published records can't be removed from a topic.
- A step stops at a lost table. A raw table with fewer offsets than ETL has transformed was restored or removed, and a new
  ingest may bring other records to the same offsets. A missing staging table was removed if its output topics hold records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa

from zync_assets.audit import coverage
from zync_assets.audit.coverage import MONOTONIC, file_problems, log_problems
from zync_assets.codecs.arrays import pc
from zync_assets.errors import CheckFailed, KafkaError, LakeError, TableDamaged
from zync_assets.kafka.topics import survey
from zync_assets.lake import raw, storage, stores
from zync_assets.lake.check_results import (
    Block,
    CheckResult,
    CheckState,
    Look,
    Number,
    TopicPartition,
    conclude,
    count_text,
    remedy,
)
from zync_assets.lake.head import Head
from zync_assets.lake.log import DataFile
from zync_assets.lake.parquet_rows import MISSING, RESTORE, DamagedFile, positions, read_columns
from zync_assets.lake.raw import RawState
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, intersection
from zync_assets.pipeline import Input, Pipeline, pool_path, table_name

COVERAGE = "exactly_once_done_coverage"
CONTIGUOUS = "contiguous_output_offsets"

LOOKS = 3
"""How often a pool is looked at, where something is wrong and another process has gone on meanwhile."""

PUBLISH_OUTCOME = "Nothing was published."


def exactly_once_done_coverage(
    pipeline: Pipeline,
    pool: str,
    ranges: Mapping[str, Sequence[OffsetRange]] | None = None,
    snapshot: Snapshot | None = None,
) -> CheckResult:
    """Each input offset below seen is in exactly one class of the account; each done record exists in raw and made
    exactly one output; each output's sources are done; the counters agree.

    ``ranges`` narrows it to one batch: output topics → the outputs whose rows are read, input topics → the new offsets
    whose done records must have made these. The ledger is covered whole either way.
    """
    snapshot = snapshot or Snapshot(pipeline)
    try:
        state = snapshot.staging(pool)
    except TableDamaged as error:
        return conclude(COVERAGE, pool, "error", [str(error)], "", {"records": 0})
    if state is None:
        return conclude(COVERAGE, pool, "error", [], "nothing transformed yet", {"records": 0})
    problems, numbers = _coverage(snapshot, state, ranges)
    for _ in range(LOOKS - 1):
        later = Snapshot(pipeline)
        later_state = later.staging(pool) if problems else None
        if later_state is None or later_state.head.batch == state.head.batch:
            break
        # Another process committed a batch during the look, and retention may have removed records of it.
        snapshot, state = later, later_state
        problems, numbers = _coverage(snapshot, state, ranges)
    summary = f"{numbers.get('sources', 0)} done records made {numbers.get('outputs', 0)} outputs, each once"
    return conclude(COVERAGE, pool, "error", problems, summary, numbers, coverage_look(snapshot, pool, state, ranges))


def _coverage(
    snapshot: Snapshot, state: StagingState, ranges: Mapping[str, Sequence[OffsetRange]] | None
) -> tuple[list[str], dict[str, Number]]:
    numbers: dict[str, Number] = {"batches": state.head.batch}
    try:
        return list(coverage.problems(snapshot, state, ranges, numbers)), numbers
    except DamagedFile as error:
        return [str(error)], numbers


def contiguous_output_offsets(
    pipeline: Pipeline, topic: str, ranges: Iterable[OffsetRange] | None = None, snapshot: Snapshot | None = None
) -> CheckResult:
    """An output topic's rows are numbered base..next without a gap or a double, sorted within files, as the log says.

    Rows are read of the files in ``ranges`` only (all if None); the log is looked at whole.
    """
    snapshot = snapshot or Snapshot(pipeline)
    pool = pipeline.output(topic).pool
    subject = pool_path(pool, topic)
    try:
        state = snapshot.staging(pool)
    except TableDamaged as error:
        return conclude(CONTIGUOUS, subject, "error", [str(error)], "", {"records": 0})
    if state is None:
        return conclude(CONTIGUOUS, subject, "error", [], "nothing transformed yet", {"records": 0})
    files = state.output_files(topic)
    parts = None if ranges is None else list(ranges)
    own_files = [item for item in files if parts is None or item.meets(parts)]
    problems = [*_numbering_problems(state, topic, files)]
    for item in own_files:
        problems += _file_problems(state, topic, item)
    records = sum(item.records for item in own_files)
    numbers: dict[str, Number] = {"files": len(own_files), "records": records}
    summary = f"the offsets of {count_text(records, 'output')} have no gap"
    look = numbering_look(snapshot, topic, state, parts)
    return conclude(CONTIGUOUS, subject, "error", problems, summary, numbers, look)


def coverage_look(
    snapshot: Snapshot,
    pool: str,
    state: StagingState,
    ranges: Mapping[str, Sequence[OffsetRange]] | None = None,
) -> Look:
    """The look of the account's check: at ``ranges``, or at every input and output of the account."""
    extent = {place: (item.first, item.seen) for place, item in state.head.inputs.items()}
    extent |= {place: (item.base, item.next) for place, item in state.head.outputs.items()}
    if not snapshot.check_state(pool).has_begun(Look(COVERAGE, pool, state.table_id, {})):
        extent = _of_older_lakes(snapshot, pool, state, extent)
    return Look(COVERAGE, pool, state.table_id, _look_ranges(extent, state, ranges), extent, together=True)


def numbering_look(
    snapshot: Snapshot, topic: str, state: StagingState, ranges: Sequence[OffsetRange] | None = None
) -> Look:
    """The look of the numbering's check: at ``ranges`` of an output topic, or at the whole topic."""
    pool = snapshot.pipeline.output(topic).pool
    subject = pool_path(pool, topic)
    extent = {place: (item.base, item.next) for place, item in state.head.outputs.items() if place[0] == topic}
    if not snapshot.check_state(pool).has_begun(Look(CONTIGUOUS, subject, state.table_id, {})):
        extent = _of_older_lakes(snapshot, pool, state, extent)
    topic_ranges = None if ranges is None else {topic: ranges}
    return Look(CONTIGUOUS, subject, state.table_id, _look_ranges(extent, state, topic_ranges), extent)


def _of_older_lakes(
    snapshot: Snapshot, pool: str, state: StagingState, extent: Mapping[TopicPartition, tuple[int, int]]
) -> dict[TopicPartition, tuple[int, int]]:
    """The extent of checks in a pool that was published before the lake kept check results.

    Checks begin at the first unpublished outputs, and after the inputs that ETL has seen. A check of years of old data would
    take too long.
    """
    verified_ends = {place: snapshot.publish_state(pool, *place).verified_end or 0 for place in state.head.outputs}
    if not any(verified_ends.values()):
        return dict(extent)
    outputs = {place: max(item.base, verified_ends[place]) for place, item in state.head.outputs.items()}
    return {place: (min(outputs.get(place, end), end), end) for place, (_, end) in extent.items()}


def _look_ranges(
    extent: Mapping[TopicPartition, tuple[int, int]],
    state: StagingState,
    ranges: Mapping[str, Sequence[OffsetRange]] | None,
) -> dict[str, tuple[OffsetRange, ...]]:
    """The existing offsets of the requested ``ranges``, by topic; every existing offset if ``ranges`` is None."""
    firsts = {place: item.first for place, item in state.head.inputs.items()}
    firsts |= {place: item.base for place, item in state.head.outputs.items()}
    ranges_by_topic: dict[str, tuple[OffsetRange, ...]] = {}
    for (topic, partition), (_, end) in extent.items():
        all_ranges = [OffsetRange(partition, min(firsts[topic, partition], end), end)]
        parts = all_ranges if ranges is None else intersection(all_ranges, ranges.get(topic, ()))
        ranges_by_topic[topic] = (*ranges_by_topic.get(topic, ()), *parts)
    return ranges_by_topic


def _numbering_problems(state: StagingState, topic: str, files: Sequence[DataFile]) -> Iterator[str]:
    """By the log and the head alone."""
    partitions = {partition: item for (name, partition), item in state.head.outputs.items() if name == topic}
    files_by_part: dict[int | None, list[DataFile]] = {}
    for item in files:
        files_by_part.setdefault(item.partition, []).append(item)
        if item.partition not in partitions:
            yield f"file {item.path} holds outputs of partition {item.partition}, which the account does not know"
    for partition, position in sorted(partitions.items()):
        own_files = files_by_part.get(partition, [])
        edges = [position.base, *[(item.last or 0) + 1 for item in own_files]]
        starts = [*[item.first or 0 for item in own_files], position.next]
        for reach, start in zip(edges, starts, strict=True):
            if reach < start:
                yield f"partition {partition}: outputs {reach} to {start - 1} are not there"
            elif reach > start:
                yield f"partition {partition}: outputs {start} to {reach - 1} are there more than once"


def _file_problems(state: StagingState, topic: str, item: DataFile) -> Iterator[str]:
    uri, records, next_offset = state.uri(item), 0, item.first or 0
    try:
        for batch in read_columns(uri, ["kafka.topic"]):
            names = pa.Table.from_batches([batch]).flatten()["kafka.topic"]
            if not pc.all(pc.fill_null(pc.equal(names, topic), False), min_count=0).as_py():
                yield f"file {item.path} holds an output of another topic than {topic}"
                break
        for partitions, offsets in positions(uri):
            if (partitions != item.partition).any():
                yield f"file {item.path} holds an output of another partition than {item.partition}"
            wrong = np.flatnonzero(offsets != np.arange(next_offset, next_offset + len(offsets)))
            if len(wrong):
                at = int(wrong[0])
                yield f"file {item.path}: row {records + at} has offset {offsets[at]} in place of {next_offset + at}"
            records, next_offset = records + len(offsets), next_offset + len(offsets)
    except DamagedFile as error:
        yield str(error)
        return
    if records != item.records or next_offset - 1 != item.last:
        yield (
            f"file {item.path} holds {records} outputs from {item.first};"
            f" the log says {item.records}, up to {item.last}"
        )


def refuse_unsound(snapshot: Snapshot, topic: str, *, whole: bool = False, outcome: str = PUBLISH_OUTCOME) -> None:
    """CheckFailed unless all that would be published to an output topic has passed the blocking checks of its staging pool.

    Only what was staged since the checks passed last is looked at; all of the pool if ``whole``. Also refuses while a
    check of the pool, or of a raw table that the pool is made from, has failed and not passed since. ``outcome``: what the
    error says of the step.
    """
    pipeline = snapshot.pipeline
    pool = pipeline.output(topic).pool
    state = snapshot.staging(pool)
    if state is None:
        return

    check_state = snapshot.check_state(pool)
    is_known = (COVERAGE, pool) in snapshot.passed
    account = {} if is_known else backlog(check_state, coverage_look(snapshot, pool, state))
    numbering = backlog(check_state, numbering_look(snapshot, topic, state))
    if whole or account:
        check = partial(exactly_once_done_coverage, pipeline, pool, None if whole else account, snapshot)
        require_pass(snapshot, pool, check, outcome, soon=not whole)
    snapshot.passed.add((COVERAGE, pool))
    if whole or account or numbering:
        parts = None if whole else numbering.get(topic, [])
        check = partial(contiguous_output_offsets, pipeline, topic, parts, snapshot)
        require_pass(snapshot, pool, check, outcome, soon=not whole)
    for block in pool_blocks(snapshot, pool, [topic]):
        raise CheckFailed(f"topic {topic}: {str(block).rstrip('.')}. {outcome} {remedy(pipeline)}")


def refuse_blocks(snapshot: Snapshot, reader: str, topics: Iterable[str], outcome: str) -> None:
    """CheckFailed while a blocking check of one of these raw tables has failed and not passed since.

    ``reader``: the name of the reading step, such as ``pool Staging``. ``outcome``: what the error says of the step.
    """
    for block in raw_blocks(snapshot, topics):
        raise CheckFailed(f"{reader}: {str(block).rstrip('.')}. {outcome} {remedy(snapshot.pipeline)}")


def refuse_disorder(snapshot: Snapshot, reader: str, ranges: Mapping[str, Sequence[OffsetRange]], outcome: str) -> None:
    """CheckFailed unless the raw files of a batch's new records hold the offsets that the Delta log says, each once and in
    ascending order.

    A range that check ``monotonic_offsets`` has passed costs no look. A look is not kept: the next attempt at the batch
    looks again, and goes on once the table is repaired. ``reader`` and ``outcome``: as in ``refuse_blocks``.
    """
    pipeline = snapshot.pipeline
    for topic, parts in ranges.items():
        state, item = snapshot.raw(topic), pipeline.input(topic)
        if state is None or not parts:
            continue
        check_state = snapshot.check_state(item.pool)
        look = Look(MONOTONIC, pool_path(item.pool, topic), state.table_id, {topic: tuple(parts)})
        new_ranges = [part for part in parts if (check_state.progress(look, (topic, part.partition)) or 0) < part.end]
        files = raw.raw_files(state, new_ranges)
        in_files = (problem for file in files for problem in file_problems(state.table.uri, file))
        for problem in chain(log_problems(state, files), in_files):
            line = " ".join(problem.split()).removesuffix(RESTORE).rstrip(" .")
            cure = "Restore the file from a copy, or the table to a version from before."
            if MISSING in line:
                # A version from before has fewer records than were ingested, which is refused.
                cure = f"Restore the file from a copy, or {stores.ANEW}."
            raise CheckFailed(
                f"{reader}: table {state.table.uri}: {line}. {outcome} {cure} This shows every problem:"
                f" {pipeline.command('check')}"
            )


def pool_blocks(snapshot: Snapshot, pool: str, outputs: Iterable[str]) -> list[Block]:
    """The failed checks that hold back some output topics of a staging pool."""
    blocks = raw_blocks(snapshot, [item.topic for item in snapshot.pipeline.inputs_of(pool)])
    check_state = snapshot.check_state(pool)
    if check_state.blocks and (state := snapshot.staging(pool)) is not None:
        blocks += check_state.blocks_of([pool, *(pool_path(pool, topic) for topic in outputs)], [state.table_id])
    return blocks


def raw_blocks(snapshot: Snapshot, topics: Iterable[str]) -> list[Block]:
    """The failed checks of some inputs' raw tables."""
    table_blocks: list[Block] = []
    for item in map(snapshot.pipeline.input, topics):
        check_state = snapshot.check_state(item.pool)
        if check_state.blocks and (state := snapshot.raw(item.topic)) is not None:
            table_blocks += check_state.blocks_of([pool_path(item.pool, item.topic)], [state.table_id])
    return table_blocks


def account_backlog(snapshot: Snapshot, pool: str) -> Mapping[str, Sequence[OffsetRange]]:
    """Topic → the offsets of a pool's inputs and outputs that the check of its account has not passed yet."""
    state = snapshot.staging(pool)
    return {} if state is None else backlog(snapshot.check_state(pool), coverage_look(snapshot, pool, state))


def backlog(check_state: CheckState, look: Look) -> Mapping[str, Sequence[OffsetRange]]:
    """Topic → the offsets of the look's extent that no look has passed yet; empty where all have."""
    ranges: dict[str, list[OffsetRange]] = {}
    for (topic, partition), (begin, end) in look.extent.items():
        progress = check_state.progress(look, (topic, partition))
        first = begin if progress is None else progress
        if first < end:
            ranges.setdefault(topic, []).append(OffsetRange(partition, first, end))
    return ranges


def require_pass(
    snapshot: Snapshot, pool: str, check: Callable[[], CheckResult], outcome: str, *, soon: bool = False
) -> None:
    """Run a blocking check and keep its result. CheckFailed if the check fails. ``outcome``: such as "Nothing was published."."""
    result = snapshot.run_check(pool, check, soon=soon)
    if not result.passed:
        way_out = remedy(snapshot.pipeline)
        cure = "" if way_out in result.summary else f" {way_out}"
        raise CheckFailed(f"{result.subject}: {result.name}: {result.summary.rstrip('.')}. {outcome}{cure}")


def check_rollback(item: Input, head: Head, state: RawState | None) -> None:
    """LakeError where a staging pool's account has seen more of an input than there is. ``state`` is not older than ``head``."""
    for partition, offset in head.seen(item.topic).items():
        next_offset = state.next.get(partition, 0) if state else 0
        if offset > next_offset:
            has = f"its next offset is {next_offset}" if state else "the table is not there"
            raise LakeError(
                f"table {table_name(item.pool, item.topic)}: partition {partition} was transformed up to offset {offset},"
                f" and {has}: it went back to an older version, or is gone. Nothing was done: what is ingested again need"
                " not be what was."
                " Put the newer table back, or begin anew: give the input another pool, and its outputs another staging pool"
                " and other topics."
            )


def check_begins(pipeline: Pipeline, pool: str) -> None:
    """KafkaError where an output topic of a pool without a staging table holds records: the lake vanished, or the topic is
    somebody else's. An output with ``start-at: end`` may begin on such a topic. A topic that can't be asked tells nothing."""
    outputs = [item for item in pipeline.outputs_of(pool) if item.start_at != "end" and not item.is_scratch]
    for topic, state in survey(pipeline.kafka, [item.topic for item in outputs]).states.items():
        ends = [f"partition {part.partition}: {part.end}" for part in state.partitions if part.end]
        if ends:
            raise KafkaError(
                f"topic {topic} holds records already (its ends: {', '.join(ends)}), and the lake has no table"
                f" {storage.staging_uri(pipeline.lake, pool)}, which they came from if this pipeline ran before. Nothing was"
                " done. If the lake was removed, moved or is not mounted, put it back. If the pipeline is new, give the"
                " output an empty topic, or set start-at: end."
            )


def check_before_ingest(pipeline: Pipeline, item: Input, raw_state: RawState | None) -> None:
    """LakeError and KafkaError as ``check_rollback`` and ``check_begins``, before a batch is added to an input's raw table.
    LakeError for a damaged raw table. ``raw_state``: the table, None before the first batch."""
    heads: list[Head] = []
    snapshot = Snapshot(pipeline, {item.topic: raw_state})
    if raw_state is None and not any(map(snapshot.has_staging, pipeline.staging_pools)):
        for pool in pipeline.readers_of(item.topic):
            check_begins(pipeline, pool)
    for pool in pipeline.staging_pools:
        # ETL reports a damaged staging table. Ingest continues, because Kafka's retention removes records meanwhile.
        with suppress(LakeError):
            if (state := snapshot.staging(pool)) is not None:
                heads.append(state.head)
    for head in heads:
        try:
            check_rollback(item, head, raw_state)
        except LakeError:
            # Another process may have ingested and transformed since the table was opened.
            check_rollback(item, head, raw.open_raw(pipeline.lake, item.pool, item.topic))
    if raw_state is not None:
        raw.check_whole(raw_state)
