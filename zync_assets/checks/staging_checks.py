"""Checks of a staging pool: its account against raw and outputs, its numbering, and what waits for long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from zync_assets.checks import coverage
from zync_assets.checks.account import read_facts
from zync_assets.checks.columns import DamagedFile, positions, read_columns
from zync_assets.checks.result import CheckResult, Number, conclude
from zync_assets.compute import pc
from zync_assets.errors import LakeError, TableDamaged
from zync_assets.lake import raw, staging
from zync_assets.lake.rows import rows_at
from zync_assets.lake.staging import StagingState
from zync_assets.lake.tables import DataFile
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline

COVERAGE = "exactly_once_done_coverage"
CONTIGUOUS = "contiguous_output_offsets"
PENDING_AGE = "pending_age"

MAX_AGE_SECONDS = 86_400
"""How long a record may wait for its counterpart before ``pending_age`` warns."""


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
    good = f"{numbers.get('sources', 0)} done records made {numbers.get('outputs', 0)} outputs, each once"
    return conclude(COVERAGE, pool, "error", problems, good, numbers)


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
    return conclude(CONTIGUOUS, subject, "error", problems, f"{records} outputs follow each other", numbers)


def pending_age(
    pipeline: Pipeline, pool: str, max_age_seconds: float = MAX_AGE_SECONDS, now: float | None = None
) -> CheckResult:
    """Warns where a record has waited for longer than ``max_age_seconds``, or waits for ever: its join key is null, or
    the pipeline file has its rule no more.

    ``now``: seconds since the epoch, the present by default. A record's age is counted from its raw time.
    """
    try:
        state = staging.open_staging(pipeline.lake, pool)
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
        f"{n} records of {topic} wait for rule {rule}, which the pipeline file has no more as a denorm rule of {topic} for"
        f" {pool}. Run `{pipeline.command('etl', '--retry-unmatched')}` to give them to the other rules"
        for (rule, topic), n in sorted(state.head.waiting.items())
        if n and (rule, topic) not in joins
    ]
    if numbers["pending"]:
        try:
            problems += _age_problems(pipeline, state, max_age_seconds, moment, numbers)
        except (DamagedFile, LakeError) as error:
            problems.append(str(error))
    return conclude(PENDING_AGE, pool, "warn", problems, f"{numbers['pending']} records wait", numbers)


def raw_time(pipeline: Pipeline, topic: str, partition: int, offset: int) -> float | None:
    """The time of a raw record, in seconds since the epoch; None where there is no such record, and of a topic that is no
    input any more. Raises LakeError."""
    pools = {item.topic: item.pool for item in pipeline.inputs}
    found = raw.open_raw(pipeline.lake, pools[topic], topic) if topic in pools else None
    if found is None:
        return None
    files = raw.raw_files(found, [OffsetRange(partition, offset, offset + 1)])
    row = rows_at(found.opened.uri, files, partition, [offset], []).get(offset)
    return None if row is None else row["kafka"]["time"].timestamp()


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


def _age_problems(
    pipeline: Pipeline, state: StagingState, max_age: float, now: float, numbers: dict[str, Number]
) -> Iterator[str]:
    facts, _ = read_facts(state)
    # A record's time never runs back within its partition: the lowest pending offset is the oldest.
    oldest: list[tuple[float, str]] = []
    for (topic, partition), found in facts.items():
        waiting = found.waiting
        when = raw_time(pipeline, topic, partition, int(waiting[0])) if len(waiting) else None
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
    """Pending records without a hash. Null equals nothing, so that none of them is ever completed."""
    count = 0
    for item in state.ledger_files:
        for batch in read_columns(state.uri(item), ["account.kind", "account.hash"]):
            rows = pa.Table.from_batches([batch]).flatten()
            null = pc.and_(pc.equal(rows["account.kind"], "pending"), pc.is_null(rows["account.hash"]))
            count += pc.sum(null).as_py() or 0
    return count
