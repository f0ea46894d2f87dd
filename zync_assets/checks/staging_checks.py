"""Checks of a staging pool: its account against raw and outputs, its numbering, and what waits for long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa

from zync_assets.audit.account import read_facts
from zync_assets.audit.columns import DamagedFile, read_columns
from zync_assets.audit.result import CheckResult, Number, conclude
from zync_assets.audit.staging import CONTIGUOUS, COVERAGE, contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.compute import pc
from zync_assets.errors import LakeError, TableDamaged
from zync_assets.lake import raw, staging
from zync_assets.lake.rows import rows_at
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline

PENDING_AGE = "pending_age"

__all__ = [
    "CONTIGUOUS",
    "COVERAGE",
    "PENDING_AGE",
    "contiguous_output_offsets",
    "exactly_once_done_coverage",
    "pending_age",
]

MAX_AGE_SECONDS = 86_400
"""How long a record may wait for its counterpart before ``pending_age`` warns."""


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


def _age_problems(
    pipeline: Pipeline, state: StagingState, max_age: float, now: float, numbers: dict[str, Number]
) -> Iterator[str]:
    facts, *_ = read_facts(state)
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
    """The number of pending records with a null join key. Null equals nothing: such records stay pending for ever."""
    count = 0
    for item in state.ledger_files:
        for batch in read_columns(state.uri(item), ["account.kind", "account.hash"]):
            rows = pa.Table.from_batches([batch]).flatten()
            null = pc.and_(pc.equal(rows["account.kind"], "pending"), pc.is_null(rows["account.hash"]))
            count += pc.sum(null).as_py() or 0
    return count
