"""The checks as Dagster's asset checks: one result each, every time, over the ranges that the run materialised.

They are ops of their own: a result that an asset's function yields comes before the IO manager has written anything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetKey,
    AssetMaterialization,
    DagsterEventType,
    multi_asset_check,
)
from dagster_pyspark import LazyPySparkResource

from zync_assets.assets.names import Names, on_grid, range_of
from zync_assets.assets.reports import last_offset
from zync_assets.assets.resources import session
from zync_assets.audit import guard
from zync_assets.checks import output_checks, raw_checks, remote_checks
from zync_assets.checks.output_checks import record_check
from zync_assets.checks.state_checks import ROWS_MATCH, rows_match
from zync_assets.errors import ZyncError
from zync_assets.lake.check_results import CheckResult
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Sink, SinkTable

# No postponed annotations here: Dagster looks at those of its functions as objects.


LAKE_MARK = "zync/kept_in_lake"
"""Metadata of a blocking check's result: the lake keeps it, and says until when it blocks."""

Ranges = Sequence[OffsetRange] | None
Look = Callable[[AssetCheckExecutionContext], CheckResult]


def build_checks(names: Names) -> list[AssetChecksDefinition]:
    """All checks of a pipeline's own assets; a source topic has its check with it."""
    pipeline = names.pipeline
    checks: list[AssetChecksDefinition] = []
    for item in pipeline.inputs:
        checks += _raw(names, item.topic)
    for pool in pipeline.staging_pools:
        checks += _staging(names, pool)
    for output in pipeline.outputs:
        checks.append(_topic_check(names, output.topic))
    for sink in pipeline.sinks:
        for table in sink.tables:
            checks += _sink(names, sink, table)
    return checks


def _raw(names: Names, topic: str) -> Iterator[AssetChecksDefinition]:
    pipeline = names.pipeline
    asset = names.pool_key(pipeline.input(topic).pool, topic)
    checks = {
        raw_checks.MONOTONIC: (raw_checks.monotonic_offsets, "Offsets ascend, and no two files overlap."),
        raw_checks.NO_LOSS: (
            raw_checks.no_unexplained_loss,
            "Every record that Kafka still holds below the next offset is here or in quarantine, exactly once.",
        ),
        raw_checks.SCHEMA_CHANGE: (raw_checks.schema_change, "Records came with one writer schema a side."),
        raw_checks.QUARANTINE_SIZE: (raw_checks.quarantine_size, "Nothing is in quarantine."),
    }
    for name, (function, description) in checks.items():
        blocking = name in raw_checks.BLOCKING

        def look(
            context: AssetCheckExecutionContext,
            function: Callable[..., CheckResult] = function,
            blocking: bool = blocking,
        ) -> CheckResult:
            ranges = run_ranges(context, asset)
            if blocking:
                return record_check(pipeline, pipeline.input(topic).pool, partial(function, pipeline, topic, ranges))
            return function(pipeline, topic, ranges)

        yield _check(names, asset, name, description, blocking, look)


def _staging(names: Names, pool: str) -> Iterator[AssetChecksDefinition]:
    pipeline = names.pipeline
    outputs = [item.topic for item in pipeline.outputs_of(pool)]
    keys = {topic: names.pool_key(pool, topic) for topic in outputs}

    def coverage(context: AssetCheckExecutionContext) -> CheckResult:
        run_parts = {topic: run_ranges(context, key) for topic, key in keys.items()}
        ranges: Mapping[str, Sequence[OffsetRange]] | None = None
        snapshot = Snapshot(pipeline)
        if any(part is not None for part in run_parts.values()):
            # All that was committed since the check passed last: a run that died had no check.
            ranges = guard.account_backlog(snapshot, pool) or {topic: part or () for topic, part in run_parts.items()}
        check = partial(guard.exactly_once_done_coverage, pipeline, pool, ranges, snapshot)
        return snapshot.run_check(pool, check)

    whole_pool = _once_a_run(coverage)
    age_look = _once_a_run(lambda _: output_checks.pending_age(pipeline, pool))
    order_look = _once_a_run(lambda _: output_checks.source_order(pipeline, pool))
    # Each topic of the pool has the pool's checks too. A failed check of the pool therefore blocks every downstream asset.
    for topic, key in keys.items():

        def contiguous(context: AssetCheckExecutionContext, topic: str = topic, key: AssetKey = key) -> CheckResult:
            ranges = run_ranges(context, key)
            return record_check(pipeline, pool, partial(guard.contiguous_output_offsets, pipeline, topic, ranges))

        yield _check(
            names,
            key,
            guard.COVERAGE,
            "Every input record below seen is in exactly one class of the account, and every done one made one output.",
            True,
            whole_pool,
        )
        yield _check(names, key, guard.CONTIGUOUS, "Outputs are numbered without a gap or a double.", True, contiguous)
        yield _check(
            names,
            key,
            output_checks.PENDING_AGE,
            "No record has waited for its counterpart for too long.",
            False,
            age_look,
        )
        yield _check(
            names,
            key,
            output_checks.SOURCE_ORDER,
            "No record came after later records of its source were transformed.",
            False,
            order_look,
        )


def _sink(names: Names, sink: Sink, table: SinkTable) -> Iterator[AssetChecksDefinition]:
    asset, pipeline = names.sink_key(sink.name, table.name), names.pipeline

    def position(context: AssetCheckExecutionContext) -> CheckResult:
        expected: dict[int, int] = {}
        for event in _events(context, asset):
            part, last = range_of(event.partition or ""), last_offset(event)
            if part is not None and last is not None:
                expected[part.partition] = max(expected.get(part.partition, 0), last + 1)
        return remote_checks.sink_position(pipeline, sink, table, expected)

    text = "The target's next offset is the one that was written up to, and belongs to the lake's table."
    yield _check(names, asset, remote_checks.SINK_POSITION, text, False, position)
    text = "No record of the table is in quarantine."
    look = partial(remote_checks.sink_quarantine, pipeline, sink, table)
    yield _check(names, asset, remote_checks.SINK_QUARANTINE, text, False, lambda _: look())
    yield _row_check(names, sink, table)


def _row_check(names: Names, sink: Sink, table: SinkTable) -> AssetChecksDefinition:
    """The comparison of every row of a target table. It has no result in a run that writes the table: it would take as long
    as to load the table again."""
    asset, spark_key = names.sink_key(sink.name, table.name), names.resource("spark")
    text = f"Every row is what its records make it. Runs alone, in the job {names.rows_job} or when it is asked for."
    spec = AssetCheckSpec(ROWS_MATCH, asset=asset, description=text)

    @multi_asset_check(
        name=names.check_op(ROWS_MATCH, asset),
        specs=[spec],
        description=text,
        can_subset=True,
        required_resource_keys={spark_key},
    )
    def check(context: AssetCheckExecutionContext) -> Iterator[AssetCheckResult]:
        if any(_events(context, asset)):
            return
        spark: LazyPySparkResource = getattr(context.resources, spark_key)
        try:
            result = rows_match(names.pipeline, partial(session, spark), sink, table)
            passed, summary, numbers = result.passed, result.summary, result.numbers
        except ZyncError as error:
            passed, summary, numbers = False, str(error), {}
        yield AssetCheckResult(passed=passed, description=summary, metadata=dict(numbers))

    return check


def reachable(names: Names, topic: str) -> AssetChecksDefinition:
    """The check of a source topic."""
    return _check(
        names,
        names.topic_key(topic),
        remote_checks.REACHABLE,
        "The broker knows the topic, the pipeline may look at it, and every partition has a leader. The sensor reports it"
        " too, when it changed.",
        False,
        lambda _: remote_checks.reachable(names.pipeline, topic),
    )


def _topic_check(names: Names, topic: str) -> AssetChecksDefinition:
    asset = names.topic_key(topic)
    return _check(
        names,
        asset,
        remote_checks.STAGING_EQUALS_TOPIC,
        "The record at each offset of the topic is the one that staging numbers so, byte for byte.",
        False,
        lambda context: remote_checks.staging_equals_topic(names.pipeline, topic, run_ranges(context, asset)),
    )


def _check(
    names: Names, asset: AssetKey, name: str, description: str, blocking: bool, look: Look
) -> AssetChecksDefinition:
    """One check. Made as a multi-asset check of one: ``asset_check`` names its op itself, and alike for ``a.b`` and
    ``a_b``."""
    spec = AssetCheckSpec(name, asset=asset, description=description, blocking=blocking)

    @multi_asset_check(name=names.check_op(name, asset), specs=[spec], description=description)
    def check(context: AssetCheckExecutionContext) -> Iterator[AssetCheckResult]:
        try:
            result = look(context)
            passed, severity, summary, numbers = result.passed, result.severity, result.summary, result.numbers
        except ZyncError as error:
            # A check that can't look has a result all the same: a missing one would hold nothing back.
            # The lake keeps nothing of it: it is neither a pass nor a block.
            passed, severity, summary, numbers = False, "error" if blocking else "warn", str(error), {}
        yield AssetCheckResult(
            passed=passed,
            severity=AssetCheckSeverity.ERROR if severity == "error" else AssetCheckSeverity.WARN,
            description=summary,
            metadata={**numbers, **({LAKE_MARK: True} if blocking else {})},
        )

    return check


def _once_a_run(look: Look) -> Look:
    """A function that runs ``look`` once per Dagster run, and returns the same result to the run's other checks."""
    results: dict[str, CheckResult] = {}

    def first_look(context: AssetCheckExecutionContext) -> CheckResult:
        if context.run.run_id not in results:
            results.clear()
            results[context.run.run_id] = look(context)
        return results[context.run.run_id]

    return first_look


def run_ranges(context: AssetCheckExecutionContext, asset: AssetKey) -> Ranges:
    """The ranges of an asset that this run has materialised, also beyond the run's own keys.

    None (every range) for a run that only checks.
    """
    keys = {item.partition for item in _events(context, asset) if item.partition}
    return on_grid(keys) or None


def _events(context: AssetCheckExecutionContext, asset: AssetKey) -> Iterator[AssetMaterialization]:
    for record in context.instance.get_records_for_run(
        context.run.run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION
    ).records:
        event = record.event_log_entry.asset_materialization
        if event is not None and event.asset_key == asset:
            yield event
