"""The two blocking checks of a staging pool: its account against raw and outputs, and its numbering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from zync_assets.audit import coverage
from zync_assets.audit.columns import DamagedFile, positions, read_columns
from zync_assets.audit.result import CheckResult, Number, conclude
from zync_assets.compute import pc
from zync_assets.errors import TableDamaged
from zync_assets.lake import published, staging
from zync_assets.lake.checked import Checked, Look, Place, open_checked
from zync_assets.lake.staging import StagingState
from zync_assets.lake.tables import DataFile
from zync_assets.offsets import OffsetRange, subtract
from zync_assets.pipeline import Pipeline

COVERAGE = "exactly_once_done_coverage"
CONTIGUOUS = "contiguous_output_offsets"

LOOKS = 3
"""How often a pool is looked at, where something is wrong and another process has gone on meanwhile."""


def exactly_once_done_coverage(
    pipeline: Pipeline, pool: str, ranges: Mapping[str, Sequence[OffsetRange]] | None = None
) -> CheckResult:
    """Each input offset below seen is in exactly one class of the account; each done record exists in raw and made
    exactly one output; each output's sources are done; the counters agree.

    ``ranges`` narrows it to one batch: output topics → the outputs whose rows are read, input topics → the new offsets
    whose done records must have made these. The ledger is covered whole either way.
    """
    try:
        state = staging.open_staging(pipeline.lake, pool)
    except TableDamaged as error:
        return conclude(COVERAGE, pool, "error", [str(error)], "", {"records": 0})
    if state is None:
        return conclude(COVERAGE, pool, "error", [], "nothing transformed yet", {"records": 0})
    problems, numbers = _coverage(pipeline, state, ranges)
    for _ in range(LOOKS - 1):
        now = staging.open_staging(pipeline.lake, pool) if problems else None
        if now is None or now.head.batch == state.head.batch:
            break
        # A batch was committed meanwhile, and retention may have taken what it was done with.
        state = now
        problems, numbers = _coverage(pipeline, state, ranges)
    look = coverage_look(pipeline, pool, state, open_checked(pipeline.lake, pool), ranges)
    good = f"{numbers.get('sources', 0)} done records made {numbers.get('outputs', 0)} outputs, each once"
    return conclude(COVERAGE, pool, "error", problems, good, numbers, look)


def _coverage(
    pipeline: Pipeline, state: StagingState, ranges: Mapping[str, Sequence[OffsetRange]] | None
) -> tuple[list[str], dict[str, Number]]:
    numbers: dict[str, Number] = {"batches": state.head.batch}
    try:
        return list(coverage.problems(pipeline, state, ranges, numbers)), numbers
    except DamagedFile as error:
        return [str(error)], numbers


def contiguous_output_offsets(
    pipeline: Pipeline, topic: str, ranges: Iterable[OffsetRange] | None = None
) -> CheckResult:
    """An output topic's rows are numbered base..next without a gap or a double, sorted within files, as the log says.

    Rows are read of the files in ``ranges`` only (all if None); the log is looked at whole.
    """
    pool = pipeline.output(topic).pool
    subject = f"{pool}/{topic}"
    try:
        state = staging.open_staging(pipeline.lake, pool)
    except TableDamaged as error:
        return conclude(CONTIGUOUS, subject, "error", [str(error)], "", {"records": 0})
    if state is None:
        return conclude(CONTIGUOUS, subject, "error", [], "nothing transformed yet", {"records": 0})
    files = state.output_files(topic)
    parts = None if ranges is None else list(ranges)
    selected = [item for item in files if parts is None or _touches(item, parts)]
    problems = [*_numbering_problems(state, topic, files)]
    for item in selected:
        problems += _file_problems(state, topic, item)
    records = sum(item.records for item in selected)
    numbers: dict[str, Number] = {"files": len(selected), "records": records}
    good = f"{records} outputs follow each other"
    look = numbering_look(pipeline, topic, state, open_checked(pipeline.lake, pool), parts)
    return conclude(CONTIGUOUS, subject, "error", problems, good, numbers, look)


def coverage_look(
    pipeline: Pipeline,
    pool: str,
    state: StagingState,
    checked: Checked,
    ranges: Mapping[str, Sequence[OffsetRange]] | None = None,
) -> Look:
    """The look of the account's check: at ``ranges``, or at every input and output of the account."""
    look = Look(COVERAGE, pool, state.table_id, {})
    extent = {place: (item.first, item.seen) for place, item in state.head.inputs.items()}
    extent |= {place: (item.base, item.next) for place, item in state.head.outputs.items()}
    if not checked.began(look):
        extent = _of_older_lakes(pipeline, pool, state, extent)
    return Look(COVERAGE, pool, state.table_id, _looked(extent, state, ranges), extent, together=True)


def numbering_look(
    pipeline: Pipeline,
    topic: str,
    state: StagingState,
    checked: Checked,
    ranges: Sequence[OffsetRange] | None = None,
) -> Look:
    """The look of the numbering's check: at ``ranges`` of an output topic, or at the whole topic."""
    pool = pipeline.output(topic).pool
    subject = f"{pool}/{topic}"
    extent = {place: (item.base, item.next) for place, item in state.head.outputs.items() if place[0] == topic}
    if not checked.began(Look(CONTIGUOUS, subject, state.table_id, {})):
        extent = _of_older_lakes(pipeline, pool, state, extent)
    given = None if ranges is None else {topic: ranges}
    return Look(CONTIGUOUS, subject, state.table_id, _looked(extent, state, given), extent)


def _of_older_lakes(
    pipeline: Pipeline, pool: str, state: StagingState, extent: Mapping[Place, tuple[int, int]]
) -> dict[Place, tuple[int, int]]:
    """The extent of checks in a pool that was published before the lake kept check results.

    Checks begin at the first unpublished outputs, and after the inputs that ETL has seen. A check of years of old data would
    take too long.
    """
    verified = published.verified_ends(pipeline.lake, pool, [topic for topic, _ in state.head.outputs])
    if not any(verified.values()):
        return dict(extent)
    outputs = {place: max(item.base, verified.get(place[0], 0)) for place, item in state.head.outputs.items()}
    return {place: (min(outputs.get(place, end), end), end) for place, (_, end) in extent.items()}


def _looked(
    extent: Mapping[Place, tuple[int, int]], state: StagingState, ranges: Mapping[str, Sequence[OffsetRange]] | None
) -> dict[str, tuple[OffsetRange, ...]]:
    """The existing offsets of the requested ``ranges``, by topic; every existing offset if ``ranges`` is None."""
    firsts = {place: item.first for place, item in state.head.inputs.items()}
    firsts |= {place: item.base for place, item in state.head.outputs.items()}
    found: dict[str, tuple[OffsetRange, ...]] = {}
    for (topic, partition), (_, end) in extent.items():
        whole = [OffsetRange(partition, min(firsts[topic, partition], end), end)]
        parts = whole if ranges is None else subtract(whole, subtract(whole, ranges.get(topic, ())))
        found[topic] = (*found.get(topic, ()), *parts)
    return found


def _touches(item: DataFile, parts: Sequence[OffsetRange]) -> bool:
    return any(
        part.partition == item.partition and (item.first or 0) < part.end and part.first <= (item.last or 0)
        for part in parts
    )


def _numbering_problems(state: StagingState, topic: str, files: Sequence[DataFile]) -> Iterator[str]:
    """By the log and the head alone."""
    known = {partition: item for (name, partition), item in state.head.outputs.items() if name == topic}
    for item in files:
        if item.partition not in known:
            yield f"file {item.path} holds outputs of partition {item.partition}, which the account does not know"
    for partition, position in sorted(known.items()):
        own = [item for item in files if item.partition == partition]
        edges = [position.base, *[(item.last or 0) + 1 for item in own]]
        starts = [*[item.first or 0 for item in own], position.next]
        for reach, start in zip(edges, starts, strict=True):
            if reach < start:
                yield f"partition {partition}: outputs {reach} to {start - 1} are not there"
            elif reach > start:
                yield f"partition {partition}: outputs {start} to {reach - 1} are there more than once"


def _file_problems(state: StagingState, topic: str, item: DataFile) -> Iterator[str]:
    uri, records, following = state.uri(item), 0, item.first or 0
    try:
        for batch in read_columns(uri, ["kafka.topic"]):
            names = pa.Table.from_batches([batch]).flatten()["kafka.topic"]
            if not pc.all(pc.fill_null(pc.equal(names, topic), False), min_count=0).as_py():
                yield f"file {item.path} holds an output of another topic than {topic}"
                break
        for partitions, offsets in positions(uri):
            if (partitions != item.partition).any():
                yield f"file {item.path} holds an output of another partition than {item.partition}"
            wrong = np.flatnonzero(offsets != np.arange(following, following + len(offsets)))
            if len(wrong):
                at = int(wrong[0])
                yield f"file {item.path}: row {records + at} has offset {offsets[at]} in place of {following + at}"
            records, following = records + len(offsets), following + len(offsets)
    except DamagedFile as error:
        yield str(error)
        return
    if records != item.records or following - 1 != item.last:
        yield (
            f"file {item.path} holds {records} outputs from {item.first};"
            f" the log says {item.records}, up to {item.last}"
        )
