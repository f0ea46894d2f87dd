"""The check of the views' state. It runs in Spark, and only where someone asks for it."""

from __future__ import annotations

from zync_assets.etl.views.rebuild import state_counts
from zync_assets.etl.views.tables import stored_tables
from zync_assets.lake.check_results import CheckResult, conclude
from zync_assets.lake.snapshot import Snapshot
from zync_assets.pipeline import Pipeline
from zync_assets.spark.session import Session

STATE = "state_equals_raw"


def state_equals_raw(pipeline: Pipeline, pool: str, session: Session) -> CheckResult:
    """The state of each table of views is the latest row of each key in the raw pool, below *seen*.

    Raises EtlError if retention removed raw records that the state was made from.
    """
    snapshot = Snapshot(pipeline)
    state = snapshot.staging(pool)
    problems: list[str] = []
    rows = 0
    inputs = {item.topic for item in pipeline.inputs}
    for table in stored_tables(state.head) if state is not None else ():
        raw = snapshot.raw(table.topic) if table.topic in inputs else None
        if state is None or raw is None:
            continue
        found = state_counts(session(), state, raw, table, pipeline.unavailable_value)
        rows += found.rows
        if found.differing:
            problems.append(
                f"table {table.name}: {found.differing} keys have another row in the raw pool. Make the state again:"
                f" {pipeline.command('rebuild', '--state')}"
            )
    return conclude(STATE, pool, "error", problems, f"{rows} rows of state equal the raw pool", {"rows": rows})
