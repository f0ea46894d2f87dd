"""The checks of target tables. They ask the target, and need no JVM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from zync_assets.errors import DataLoss, SinkError, TargetUnavailable, ZyncError
from zync_assets.lake.check_results import CheckResult, Number, Severity, conclude, count_text
from zync_assets.lake.snapshot import Snapshot
from zync_assets.pipeline import Pipeline, Sink, SinkTable
from zync_assets.sinks.plan import plan_sink, reset_command
from zync_assets.sinks.replay import late_spots
from zync_assets.sinks.target import OUTAGE_CURE, TableSpec

SINK_POSITION, SINK_QUARANTINE = "sink_position", "sink_quarantine"


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
