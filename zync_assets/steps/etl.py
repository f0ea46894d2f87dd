"""ETL: raw tables → staging table.

plan_etl         what is new since the account's seen positions (no JVM)
read_raw         the lazy slice of one input
transform        the lazy batch over all slices
commit_staging   outputs, what became of each input, and positions, in one commit
"""

from __future__ import annotations

import time

from zync_assets.errors import EtlError
from zync_assets.pipeline import Pipeline
from zync_assets.steps.etl_plan import EtlBatch, EtlCommit, EtlPlan, RawSlice, plan_etl, read_raw, transform
from zync_assets.steps.etl_run import EtlRun
from zync_assets.steps.failures import spark_failures

__all__ = [
    "EtlBatch",
    "EtlCommit",
    "EtlPlan",
    "RawSlice",
    "commit_staging",
    "plan_etl",
    "read_raw",
    "transform",
]


def commit_staging(pipeline: Pipeline, batch: EtlBatch) -> EtlCommit:
    """The commit half. Raises CommitConflict if another batch was committed since the plan, EtlError if an expression
    fails; nothing of the batch is visible then."""
    started = time.monotonic()
    place = f"pool {batch.plan.pool}, batch {batch.plan.head.batch + 1}"
    with spark_failures(
        lambda text: EtlError(
            f"{place}: {text} Nothing was committed; mend the rule or the data (try_cast gives NULL where cast fails)."
        )
    ):
        return EtlRun(pipeline, batch).commit(started)
