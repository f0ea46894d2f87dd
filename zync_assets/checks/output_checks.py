"""The checks of a staging pool, and all checks of a pipeline.

- Its account fits the raw tables and the outputs, and the numbering of the outputs has no gap.
- No record is pending for long.
- No record came too late for its place in the source's order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from threading import Thread

from zync_assets.audit.account import null_key_records, read_account
from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.checks import raw_checks
from zync_assets.checks.remote_checks import reachable, sink_results, staging_equals_topic
from zync_assets.conflicts import EVERYWHERE, PASSING, raise_first
from zync_assets.errors import LakeError, LeaderMissing, TableDamaged, TopicMissing, ZyncError
from zync_assets.lake.check_results import CheckResult, Number, conclude, keep_accepted
from zync_assets.lake.parquet_rows import DamagedFile
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file.keys import joining_kinds

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
