"""ETL: raw tables → staging table.

    plan_etl         the new offsets since the account's seen positions (no JVM)
    read_raw         the lazy slice of one input
    transform        the lazy batch over all slices
    commit_staging   outputs, account and positions, in one commit

The commit is atomic: after a kill, the next plan begins at the positions of the last commit.
"""

from __future__ import annotations

import time

from zync_assets.audit.guard import refuse_blocked, refuse_disordered
from zync_assets.errors import EtlError, FieldMissing
from zync_assets.etl.batch import EtlRun, JoinsChanged
from zync_assets.etl.encodability import Unfit
from zync_assets.etl.failure_search import find_failures
from zync_assets.etl.failures import NONE, Failure, Failures, Place
from zync_assets.etl.pending import Waiting
from zync_assets.etl.plan import (
    EtlBatch,
    EtlCommit,
    looking_again,
    with_raw,
)
from zync_assets.etl.rules.missing_fields import with_missing_fields
from zync_assets.lake.quarantine import QuarantinedRecord, admit
from zync_assets.lake.snapshot import Snapshot
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file.references import with_lake_names
from zync_assets.spark.tasks import spark_failures

ROUNDS = 20
"""How often a batch is tried, each time without the records that the attempt before failed on."""


def commit_staging(pipeline: Pipeline, batch: EtlBatch) -> EtlCommit:
    """The commit half of an ETL batch.

    A record goes into quarantine if a rule fails on it, or if its output can't be encoded. The commit holds the rest of the
    batch. A rule may name a field that no record has had yet: the field is null, with the type in the registry's newest
    schema.

    Nothing of the batch is visible after an error. Raises CheckFailed if a blocking check of a raw table failed and has not
    passed since, or if a raw file of new records is missing or holds other offsets than the Delta log says. Raises
    CommitConflict if another batch was committed since the plan. Raises BadRecords if the pipeline file does not accept the
    bad records. Raises EtlError for every other failure.
    """
    snapshot = Snapshot(pipeline, batch.plan.raw)
    refuse_blocked(snapshot, batch.plan.pool, batch.plan.ranges)
    refuse_disordered(snapshot, batch.plan.pool, batch.plan.ranges)
    try:
        return _commit(pipeline, batch)
    except FieldMissing as error:
        known = with_missing_fields(pipeline, batch.plan.pool, batch.plan.raw)
        if known is None:
            raise error
        own, raw = known
        return _commit(own, with_raw(pipeline, batch, raw))


def _commit(pipeline: Pipeline, batch: EtlBatch) -> EtlCommit:
    started = time.monotonic()
    place = f"pool {batch.plan.pool}, batch {batch.plan.head.batch + 1}"
    failures = NONE
    with spark_failures(
        lambda text: EtlError(
            f"{place}: {text} Nothing was committed; correct the rule or the data (try_cast gives NULL where cast fails)."
        )
    ):
        pipeline = with_lake_names(pipeline, batch.plan.raw, batch.plan.state)
        waiting = Waiting(batch)
        try:
            for _ in range(ROUNDS):
                found = _attempt(pipeline, batch, waiting, failures, started)
                if isinstance(found, EtlCommit):
                    return found
                if isinstance(found, EtlBatch):
                    batch, waiting = found, Waiting(found)
                    continue
                failures = Failures({**failures.found, **found})
                _admit(pipeline, batch, failures, place)
        finally:
            waiting.release()
    raise EtlError(
        f"{place}: after {ROUNDS} attempts, each without the records that the one before failed on, there are"
        f" {len(failures.found)} of them, and still more. Nothing was committed; correct the rule."
    )


def _attempt(
    pipeline: Pipeline, batch: EtlBatch, waiting: Waiting, failures: Failures, started: float
) -> EtlCommit | EtlBatch | dict[Place, Failure]:
    """The commit, or the records that stand in its way, or the batch that has to be tried in place of this one."""
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        return EtlRun(pipeline, batch, waiting, failures).commit(started)
    except Unfit as found:
        return dict(found.failures)
    except JoinsChanged as changed:
        return looking_again(pipeline, batch, changed.rules)
    except AnalysisException:
        raise
    except (PySparkException, Py4JError) as error:
        found = find_failures(pipeline, batch, waiting, failures)
        if not found:
            raise error
        return found


def _admit(pipeline: Pipeline, batch: EtlBatch, failures: Failures, doing: str) -> None:
    """BadRecords where an input does not let its failing records pass."""
    for item in pipeline.inputs:
        mine = [failure for place, failure in sorted(failures.found.items()) if place[0] == item.topic]
        # Records that this batch takes out of quarantine are among the quarantined records already.
        there = sum(
            taken.records
            for taken in batch.plan.reopening.taken
            if (taken.topic, taken.kind) == (item.topic, "quarantined")
        )
        if mine:
            first = QuarantinedRecord(batch.plan.pool, *mine[0].place, "etl", mine[0].rule, mine[0].said, None, True)
            admit(pipeline, item, batch.plan.raw[item.topic], len(mine) - there, first, doing)
