"""The guard before ETL and publishing: nothing goes on past a failed check, since what is published can't be taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from zync_assets.audit.raw import MONOTONIC, file_problems, log_problems
from zync_assets.audit.result import CheckResult
from zync_assets.audit.staging import (
    contiguous_output_offsets,
    coverage_look,
    exactly_once_done_coverage,
    numbering_look,
)
from zync_assets.audit.verdict import judged, lifted
from zync_assets.errors import CheckFailed
from zync_assets.lake import raw, staging
from zync_assets.lake.checked import Block, Checked, Look, open_checked
from zync_assets.lake.raw import RawState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline


def refuse_unsound(pipeline: Pipeline, topic: str, *, whole: bool = False) -> None:
    """CheckFailed unless all that would be published to an output topic has passed the blocking checks of its staging pool.

    Only what was staged since the checks passed last is looked at; all of the pool if ``whole``. Also refuses while a
    check of the pool, or of a raw table that the pool is made from, has failed and not passed since.
    """
    pool = pipeline.output(topic).pool
    state = staging.open_staging(pipeline.lake, pool)
    if state is None:
        return
    checked = open_checked(pipeline.lake, pool)
    account, numbering = coverage_look(pipeline, pool, state, checked), numbering_look(pipeline, topic, state, checked)
    if whole:
        _require(pipeline, judged(pipeline, pool, lambda: exactly_once_done_coverage(pipeline, pool)))
        _require(pipeline, judged(pipeline, pool, lambda: contiguous_output_offsets(pipeline, topic)))
    elif (new := unchecked(checked, account)) or unchecked(checked, numbering):
        if new:
            _require(
                pipeline, judged(pipeline, pool, lambda: exactly_once_done_coverage(pipeline, pool, new), soon=True)
            )
        parts = unchecked(checked, numbering).get(topic, [])
        _require(pipeline, judged(pipeline, pool, lambda: contiguous_output_offsets(pipeline, topic, parts), soon=True))
    for block in blocks(pipeline, pool, [topic]):
        raise CheckFailed(f"topic {topic}: {block} Nothing was published. {lifted(pipeline)}")


def refuse_blocked(pipeline: Pipeline, pool: str, topics: Iterable[str]) -> None:
    """CheckFailed while a blocking check of one of a staging pool's raw tables has failed and not passed since."""
    for block in raw_blocks(pipeline, topics):
        raise CheckFailed(f"pool {pool}: {block} Nothing was transformed. {lifted(pipeline)}")


def refuse_disordered(
    pipeline: Pipeline, pool: str, states: Mapping[str, RawState | None], ranges: Mapping[str, Sequence[OffsetRange]]
) -> None:
    """CheckFailed unless the raw files of a batch's new records hold the offsets that the Delta log says, each once and in
    ascending order.

    A range that check ``monotonic_offsets`` has passed costs no look. A look is not kept: the next attempt at the batch
    looks again, and goes on once the table is repaired.
    """
    pools = {pipeline.input(topic).pool for topic, parts in ranges.items() if parts}
    checked = {name: open_checked(pipeline.lake, name) for name in pools}
    for topic, parts in ranges.items():
        state, item = states[topic], pipeline.input(topic)
        if state is None or not parts:
            continue
        look = Look(MONOTONIC, f"{item.pool}/{topic}", state.table_id, {topic: tuple(parts)})
        new = [part for part in parts if (checked[item.pool].passed(look, (topic, part.partition)) or 0) < part.end]
        files = raw.raw_files(state, new)
        in_files = (problem for file in files for problem in file_problems(state.opened.uri, file))
        for problem in chain(log_problems(state, files), in_files):
            raise CheckFailed(
                f"pool {pool}: table {state.opened.uri}: {problem}. Nothing was transformed. Restore the file from a copy,"
                f" or the table to a version from before. This shows every problem: {pipeline.command('check')}"
            )


def blocks(pipeline: Pipeline, pool: str, outputs: Iterable[str]) -> list[Block]:
    """The failed checks that hold back some output topics of a staging pool."""
    found = raw_blocks(pipeline, [item.topic for item in pipeline.inputs_of(pool)])
    checked = open_checked(pipeline.lake, pool)
    if checked.blocks and (state := staging.open_staging(pipeline.lake, pool)) is not None:
        found += checked.blocks_of([pool, *(f"{pool}/{topic}" for topic in outputs)], [state.table_id])
    return found


def raw_blocks(pipeline: Pipeline, topics: Iterable[str]) -> list[Block]:
    """The failed checks of some inputs' raw tables."""
    found: list[Block] = []
    inputs = [pipeline.input(topic) for topic in topics]
    pools = {pool: open_checked(pipeline.lake, pool) for pool in {item.pool for item in inputs}}
    for item in inputs:
        checked = pools[item.pool]
        if checked.blocks and (state := raw.open_raw(pipeline.lake, item.pool, item.topic)) is not None:
            found += checked.blocks_of([f"{item.pool}/{item.topic}"], [state.table_id])
    return found


def newly_staged(pipeline: Pipeline, pool: str) -> Mapping[str, Sequence[OffsetRange]]:
    """Topic → the offsets of a pool's inputs and outputs that the check of its account has not passed yet."""
    state = staging.open_staging(pipeline.lake, pool)
    if state is None:
        return {}
    checked = open_checked(pipeline.lake, pool)
    return unchecked(checked, coverage_look(pipeline, pool, state, checked))


def unchecked(checked: Checked, look: Look) -> Mapping[str, Sequence[OffsetRange]]:
    """Topic → the offsets of the look's extent that no look has passed yet; empty where all have."""
    found: dict[str, list[OffsetRange]] = {}
    for (topic, partition), (begin, end) in look.extent.items():
        passed = checked.passed(look, (topic, partition))
        first = begin if passed is None else passed
        if first < end:
            found.setdefault(topic, []).append(OffsetRange(partition, first, end))
    return found


def _require(pipeline: Pipeline, found: CheckResult) -> None:
    if not found.passed:
        how = "" if lifted(pipeline) in found.summary else f" {lifted(pipeline)}"
        raise CheckFailed(f"{found.subject}: {found.name}: {found.summary} Nothing was published.{how}")
