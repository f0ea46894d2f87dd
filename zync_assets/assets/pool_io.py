"""The IO manager of pools: commits what was ingested and what ETL made, reads raw and staging tables."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

from dagster import InputContext, IOManager, OutputContext
from dagster_pyspark import LazyPySparkResource

from zync_assets.assets import frames, partitions, report
from zync_assets.assets.failure import publishing, spoken
from zync_assets.assets.names import Names
from zync_assets.assets.resources import session
from zync_assets.checks.gate import require_checked
from zync_assets.errors import CommitConflict, ZyncError
from zync_assets.offsets import format_key, normalize
from zync_assets.steps.etl import EtlBatch, EtlCommit, EtlPlan, RawSlice, commit_staging, plan_etl, read_raw, transform
from zync_assets.steps.ingest import RawBatch, RawCommit, commit_raw, plan_ingest, read_input
from zync_assets.steps.publish import OutputBatch, plan_publish, read_staging

STAGING_POOL = "zync/staging_pool"
"""Metadata of an input: the staging pool that ETL reads it for."""


class PoolIOManager(IOManager):
    """``pool_io``. One object serves one run."""

    def __init__(self, names: Names, spark: LazyPySparkResource) -> None:
        self._names = names
        self._pipeline = names.pipeline
        self._session = partial(session, spark)
        self._plan: tuple[tuple[str, int], EtlPlan] | None = None
        self._committed: tuple[EtlBatch, EtlCommit | None] | None = None

    def load_input(self, context: InputContext) -> object:
        """The records of a pool as the argument of an asset.

        An argument annotated ``RawSlice`` gets the records of a raw table that are new to ETL. ``OutputBatch`` gets the
        staged records that Kafka lacks. A Spark DataFrame, a pyarrow Table or a polars LazyFrame gets every record of the
        ranges.
        """
        pool, topic = context.asset_key.path[-2:]
        wanted = context.dagster_type.typing_type
        with spoken():
            if wanted is RawSlice:
                return read_raw(self._session, self._pipeline, self._plan_of(context), topic)
            place = context.asset_key.to_user_string()
            keys = partitions.served(context.asset_partition_keys, place) if context.has_asset_partitions else None
            if wanted is OutputBatch:
                report.refuse_partitions(pool, keys or ())
                with publishing(self._names, context.instance, topic):
                    plan = plan_publish(self._pipeline, topic)
                report.refuse_ahead(pool, plan.state, keys or ())
                return read_staging(self._session, self._pipeline, plan)
            return frames.converted(
                frames.pool_frame(self._session(), self._pipeline, pool, topic, keys), wanted, place
            )

    def handle_output(self, context: OutputContext, obj: object) -> None:
        """Commit a batch, if there is anything in it; verify and report the ranges of the run and all that it reached.

        An ETL batch comes once for each output topic: the first call commits, the others find it done.
        """
        with spoken():
            if isinstance(obj, RawBatch):
                self._ingest(context, obj)
            elif isinstance(obj, EtlBatch):
                self._stage(context, obj)
            else:
                raise TypeError(
                    f"{context.asset_key.to_user_string()}: a RawBatch or an EtlBatch is committed,"
                    f" not {type(obj).__name__}"
                )

    def _ingest(self, context: OutputContext, batch: RawBatch) -> None:
        """Commit batch by batch up to the ends that the topic had when the run began: one commit has a bound, a run has
        its keys."""
        within = normalize(partitions.served(context.asset_partition_keys, context.asset_key.to_user_string()))
        known = {batch.topic: batch.plan.topic_state}
        done: list[RawCommit] = []
        while True:
            made = self._commit_raw(context, batch)
            if made is None:
                break
            done.append(made)
            plan = plan_ingest(self._pipeline, batch.topic, within=within, known=known)
            if plan.nothing_to_do:
                break
            batch = read_input(self._session, self._pipeline, plan)
        if done:
            context.add_output_metadata(
                {
                    "ingested": sum(made.records for made in done),
                    "quarantined": sum(made.quarantined for made in done),
                    "left out": sum(made.left_out for made in done),
                    "schema changes": "\n".join(str(change) for made in done for change in made.schema_changes)
                    or "none",
                    "commits": len(done),
                    "seconds": round(sum(made.seconds for made in done), 3),
                }
            )
        report.ingested(self._pipeline, context, batch.topic, [part for made in done for part in made.ranges])

    def _commit_raw(self, context: OutputContext, batch: RawBatch) -> RawCommit | None:
        """Commit, once more on a new plan if another writer was first; None where nothing is left to commit."""
        if batch.plan.nothing_to_do:
            return None
        try:
            return commit_raw(self._pipeline, batch)
        except ZyncError as error:
            again = plan_ingest(self._pipeline, batch.topic, within=batch.plan.ranges)
            same = (
                batch.plan.state is not None and again.state is not None and again.state.next == batch.plan.state.next
            )
            if again.state is None or (same and not isinstance(error, CommitConflict)):
                raise
            context.log.info("Another writer of %s was first (%s); looking again.", batch.topic, error)
            return None if again.nothing_to_do else commit_raw(self._pipeline, replace(batch, plan=again))

    def _stage(self, context: OutputContext, batch: EtlBatch) -> None:
        if self._committed is None or self._committed[0] is not batch:
            self._committed = (batch, self._commit_staging(context, batch))
        done, topic = self._committed[1], context.asset_key.path[-1]
        if done is not None:
            consumed = {name: [format_key(part) for part in parts] for name, parts in done.consumed.items() if parts}
            context.add_output_metadata(
                {
                    "batch": done.batch,
                    **{name: count for name, count in done.counts.items() if name != report.PENDING},
                    report.CONSUMED: json.dumps(consumed),
                    "seconds": round(done.seconds, 3),
                }
            )
        report.staged(self._pipeline, context, topic, done.outputs.get(topic, ()) if done else ())

    def _commit_staging(self, context: OutputContext, batch: EtlBatch) -> EtlCommit | None:
        """Commit, once more on a new plan if another writer was first; None where nothing is left to commit."""
        if batch.plan.nothing_to_do:
            return None
        try:
            return commit_staging(self._pipeline, batch)
        except ZyncError as error:
            plan = plan_etl(self._pipeline, batch.plan.pool)
            # A retention that was first leaves the batch number as it is.
            if plan.head.batch == batch.plan.head.batch and not isinstance(error, CommitConflict):
                raise
            context.log.info("Another writer of pool %s was first (%s); looking again.", batch.plan.pool, error)
            if plan.nothing_to_do:
                return None
            require_checked(self._pipeline, plan.ranges)
            slices = {topic: read_raw(batch.spark, self._pipeline, plan, topic) for topic in plan.ranges}
            return commit_staging(self._pipeline, transform(batch.spark, self._pipeline, plan, slices))

    def _plan_of(self, context: InputContext) -> EtlPlan:
        """The plan of the present attempt of a step. The inputs share the plan, so that their slices belong to one batch."""
        step = (context.step_context.step.key, context.step_context.previous_attempt_count)
        if self._plan is None or self._plan[0] != step:
            plan = plan_etl(self._pipeline, str(context.definition_metadata[STAGING_POOL]))
            require_checked(self._pipeline, plan.ranges)
            self._plan = (step, plan)
        return self._plan[1]
