"""The IO managers. An IO manager reads a batch for the asset downstream, and commits the batch of the asset upstream.

- ``kafka_io`` reads ranges of ``kafka/<topic>``, and publishes to the topic.
- ``sink_io`` writes to the tables of target databases.
- ``pool_io`` reads raw and staging tables, and commits ingest and ETL. Before ETL, every raw record of a batch has passed
  the blocking checks of its table.

A user's own asset gets records in the type that its argument is annotated with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from dagster import DagsterInvariantViolationError, InputContext, IOManager, OutputContext
from dagster_pyspark import LazyPySparkResource

from zync_assets.assets import reports, runs
from zync_assets.assets.facts import errors_as_failures, topic_check_on_error
from zync_assets.assets.names import AWAITS_TAG, Names, run_keys
from zync_assets.assets.resources import session
from zync_assets.audit.guard import require_pass
from zync_assets.checks.raw_checks import BLOCKING, raw_look
from zync_assets.codecs.spark_types import spark_ddl
from zync_assets.errors import KafkaError, LakeError, RangeUnknown
from zync_assets.etl.plan import EtlBatch, EtlCommit, EtlPlan, RawSlice, plan_etl, read_raw
from zync_assets.etl.streams import confirm_ends, read_ends
from zync_assets.ingest.commit import RawCommit
from zync_assets.ingest.plan import LEADER_SECONDS, IngestPlan, RawBatch, plan_ingest, read_input
from zync_assets.ingest.source import TopicSource
from zync_assets.kafka.topics import TopicState, topic_state
from zync_assets.lake import raw, staging, storage
from zync_assets.lake.raw import RawState, raw_files
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange, format_key, intersection, key_of, normalize
from zync_assets.pipeline import Input, Pipeline, SideFormat, pool_path, table_name
from zync_assets.publish.commit import PublishCommit
from zync_assets.publish.plan import OutputBatch
from zync_assets.runner import commit_etl, ingest_once, publish_once, read_etl, read_output
from zync_assets.sinks.commit import WRITE_OUTCOME
from zync_assets.sinks.plan import SinkBatch
from zync_assets.sinks.steps import planned, read_sink, remedies, sink_table
from zync_assets.spark.failures import spark_failures
from zync_assets.spark.frames import in_ranges, output_frame, raw_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def records_as(frame: DataFrame, kind: object, place: str) -> object:
    """A Spark DataFrame as ``kind``: itself (where the argument has no annotation, too), a pyarrow Table, or a polars
    LazyFrame. The last two bring all rows into this process. LakeError for another type, and for rows that can't be read."""
    name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind)}"
    if kind is Any or (name.startswith("pyspark.sql.") and name.endswith(".DataFrame")):
        return frame
    with spark_failures(lambda text: LakeError(f"{place} can't be read: {text}")):
        if kind is pa.Table:
            return frame.toArrow()
        if name.startswith("polars.") and name.endswith(".LazyFrame"):
            import polars

            return polars.from_arrow(frame.toArrow()).lazy()  # type: ignore[union-attr]
    raise LakeError(
        f"{place} can't be read as {name}. Annotate the argument with pyspark.sql.DataFrame, pyarrow.Table or"
        " polars.LazyFrame."
    )


def pool_frame(
    spark: SparkSession, pipeline: Pipeline, pool: str, topic: str, keys: Sequence[OffsetRange] | None
) -> DataFrame:
    """The records of a topic in a pool, of some ranges or (None) all. LakeError where there is no table yet.

    The frame is lazy, and Spark would report a missing or damaged file in the asset's own code. A look at the files therefore
    comes first: LakeError names the file.
    """
    if pool in pipeline.staging_pools:
        state = staging.open_staging(pipeline.lake, pool)
        if state is None:
            raise LakeError(f"pool {pool} has no table yet. Run ETL first.")
        all_ranges = [
            OffsetRange(partition, item.base, item.next)
            for (name, partition), item in state.head.outputs.items()
            if name == topic
        ]
        parts = all_ranges if keys is None else normalize(keys)
        storage.require_files(state.table.uri, [item.path for item in state.output_files(topic, parts)])
        return output_frame(spark, state, topic, parts)
    raw_state = raw.open_raw(pipeline.lake, pool, topic)
    if raw_state is None:
        raise LakeError(f"{table_name(pool, topic)} has no table yet. Ingest the topic first.")
    ranges = None if keys is None else normalize(keys)
    files = raw_files(raw_state, ranges)
    storage.require_files(raw_state.table.uri, [item.path for item in files])
    return in_ranges(raw_frame(spark, raw_state, files), files, ranges)


def input_ranges(context: InputContext) -> list[OffsetRange] | None:
    """The ranges of the upstream asset that a step reads; None for the whole asset.

    A step without these partitions gets every key that Dagster knows. The lake may hold ranges whose keys the sensor has not
    added yet: all keys stand for the whole asset. RangeUnknown for a key that is no range.
    """
    if not context.has_asset_partitions:
        return None
    place, keys = context.asset_key.to_user_string(), context.asset_partition_keys
    definition = context.asset_partitions_def
    try:
        step = context.step_context
    except DagsterInvariantViolationError:
        # No step: a script loads one partition of the asset.
        return run_keys(keys, place)
    own_definitions = [step.partitions_def_for_output(item.name) for item in step.op_def.output_defs]
    if definition not in own_definitions and set(keys) >= set(
        definition.get_partition_keys(dynamic_partitions_store=context.instance)
    ):
        return None
    return run_keys(keys, place)


NO_LIMIT = 1 << 60
"""More offsets than a topic has."""


class KafkaIOManager(IOManager):
    """``kafka_io``. One object serves one run."""

    def __init__(self, names: Names, spark: LazyPySparkResource) -> None:
        self._names = names
        self._pipeline = names.pipeline
        self._session = partial(session, spark)

    def load_input(self, context: InputContext) -> object:
        """The records of a topic as the argument of an asset.

        An argument annotated ``RawBatch`` gets the new records in the run's ranges, for ``pool_io`` to commit. A Spark
        DataFrame, a pyarrow Table or a polars LazyFrame gets every decoded record of the ranges that Kafka still holds.
        """
        topic = context.asset_key.path[-1]
        with errors_as_failures():
            place, keys = context.asset_key.to_user_string(), input_ranges(context)
            kind = context.dagster_type.typing_type
            if kind is RawBatch:
                # Of all inputs together, before any of them is ingested.
                read_ends(self._pipeline, LEADER_SECONDS)
                return read_input(self._session, self._pipeline, plan_ranges(self._pipeline, topic, keys or []))
            return records_as(self._records(topic, keys).dataframe(), kind, place)

    def handle_output(self, context: OutputContext, obj: object) -> None:
        """Publish a batch; report the run's ranges and every other that it reached."""
        if not isinstance(obj, OutputBatch):
            place, kind = context.asset_key.to_user_string(), type(obj).__name__
            raise TypeError(f"{place}: an OutputBatch is published, not {kind}")
        with errors_as_failures():
            reader = partial(read_output, self._pipeline, self._session, obj.topic)
            with topic_check_on_error(self._names, context.step_context.instance, obj.topic):
                commit = publish_once(self._pipeline, reader, first=obj, log=context.log.info)
            end_ranges = tuple(OffsetRange(part.partition, part.end, part.end) for part in obj.plan.parts)
            commit = commit or PublishCommit(obj.topic, end_ranges, 0, 0.0)
            numbers = {
                "published": commit.records,
                "compared": commit.verified_records,
                "seconds": round(commit.seconds, 3),
            }
            context.add_output_metadata(numbers)
            reports.report_topic(Snapshot(self._pipeline), context, obj.topic, commit.ranges)

    def _records(self, topic: str, keys: Sequence[OffsetRange] | None) -> RawBatch:
        """A lazy batch of all that Kafka holds of some ranges of an input or output topic."""
        kafka_state = topic_state(self._pipeline.kafka, topic)
        kafka_ranges = [OffsetRange(item.partition, item.low, item.end) for item in kafka_state.partitions]
        ranges = tuple(normalize(kafka_ranges) if keys is None else intersection(kafka_ranges, keys))
        if any(item.topic == topic for item in self._pipeline.inputs):
            plan = plan_ingest(self._pipeline, topic)
            batch = read_input(self._session, self._pipeline, plan)
            return replace(batch, plan=replace(plan, ranges=ranges))
        output = self._pipeline.output(topic)
        state = staging.open_staging(self._pipeline.lake, output.pool)
        types = {item.name: item.type for item in state.schema} if state else {}
        key_type, value_type = types.get(staging.key_column(topic)), types.get(staging.value_column(topic))
        key, value = _read_format(output.key, key_type), _read_format(output.value, value_type)
        source = TopicSource(self._pipeline.kafka, self._pipeline.registry, topic, key, value, key_type, value_type)
        item = Input(topic, output.pool, output.key, output.value)
        return RawBatch(IngestPlan(item, kafka_state, None, ranges, {}, (), 0), source, self._session)


def _read_format(side: SideFormat, kind: pa.DataType | None) -> SideFormat:
    """The format of an output's side, for reading it back: JSON says nothing of its types, the staging table does."""
    if side.format != "json" or kind is None:
        return side
    return replace(side, ddl=spark_ddl(kind))


def plan_ranges(pipeline: Pipeline, topic: str, keys: Sequence[OffsetRange]) -> IngestPlan:
    """The plan of the first ingest batch within some keys of a topic.

    RangeUnknown for a key of a partition that the topic does not have. KafkaError for a key that lies ahead of the next
    offset; the error names the key to run first.
    """
    within = normalize(keys)
    plan = plan_ingest(pipeline, topic, within=within, limit=NO_LIMIT)
    ends = {**(plan.state.next if plan.state else {}), **plan.first}
    ends |= {part.partition: part.end for part in plan.losses}
    ends |= {part.partition: part.end for part in plan.ranges}
    pool = pipeline.input(topic).pool
    for key in sorted(keys):
        if key.partition in plan.topic_state.away:
            raise plan.topic_state.away[key.partition]
        if key.partition not in ends:
            open_ranges = ", ".join(format_key(key_of(partition, at)) for partition, at in sorted(ends.items()))
            raise RangeUnknown(
                f"{pool_path(pool, topic)}, range {format_key(key)}: topic {topic} has no partition {key.partition}."
                f" Its open ranges are {open_ranges}."
            )
        next_offset = ends[key.partition]
        if key.first > next_offset:
            raise KafkaError(
                f"{pool_path(pool, topic)}, range {format_key(key)} lies ahead of the next offset {next_offset} of partition"
                f" {key.partition}. Run {format_key(key_of(key.partition, next_offset))} first."
            )
    return _plan_within(pipeline, topic, within, {topic: plan.topic_state})


def _plan_within(
    pipeline: Pipeline, topic: str, within: Sequence[OffsetRange], topic_states: Mapping[str, TopicState]
) -> IngestPlan:
    """The plan of the next batch of a run: the earliest new offsets of all partitions, while some within the run's keys are new.

    After new partitions, the records of a key are in several of them. A run of one of them must not have later records alone.
    """
    plan = plan_ingest(pipeline, topic, within=within, topic_states=topic_states)
    return plan if plan.nothing_to_do else plan_ingest(pipeline, topic, topic_states=topic_states)


def require_checks(
    pipeline: Pipeline,
    states: Mapping[str, RawState | None],
    ranges: Mapping[str, Sequence[OffsetRange]],
    outcome: str = "Nothing was transformed.",
) -> None:
    """CheckFailed unless the blocking checks have passed over the given offsets of each input topic. ``states``: topic → its
    raw table; ``outcome``: what the error says of the step.

    The checks run here over what they have not passed yet: the run that ingested it may have died before its checks, or
    ``zync`` ingested it. Offsets that have passed cost no look at a record. Raises BrokerUnavailable.
    """
    snapshot = Snapshot(pipeline, states)
    for topic, parts in ranges.items():
        pool, state = pipeline.input(topic).pool, states[topic]
        if state is None or not parts:
            continue
        for name, check in BLOCKING.items():
            look, check_state = raw_look(name, snapshot, topic, state, parts), snapshot.check_state(pool)
            firsts = [max(part.first, check_state.progress(look, (topic, part.partition)) or 0) for part in parts]
            new_ranges = [
                OffsetRange(part.partition, first, part.end)
                for part, first in zip(parts, firsts, strict=True)
                if first < part.end
            ]
            if new_ranges:
                pool_check = partial(check, pipeline, topic, new_ranges, snapshot)
                require_pass(snapshot, pool, pool_check, outcome)


STAGING_POOL = "zync/staging_pool"
"""Metadata of an input: the staging pool that ETL reads it for."""
SINK, SINK_TABLE = "zync/sink", "zync/sink_table"
"""Metadata of an input: the sink and the table that the input is read for."""


class PoolIOManager(IOManager):
    """``pool_io``. One object serves one run."""

    def __init__(self, names: Names, spark: LazyPySparkResource) -> None:
        self._names = names
        self._pipeline = names.pipeline
        self._session = partial(session, spark)
        self._plan: tuple[tuple[str, int], EtlPlan] | None = None
        self._last_commit: tuple[EtlBatch, EtlCommit | None, Snapshot] | None = None
        """The ETL batch of the run, its commit, and the tables after it."""

    def load_input(self, context: InputContext) -> object:
        """The records of a pool as the argument of an asset.

        An argument annotated ``RawSlice`` gets the records of a raw table that are new to ETL. ``OutputBatch`` gets the
        staged records that Kafka lacks, and ``SinkBatch`` the records that a target table lacks. A Spark DataFrame, a pyarrow
        Table or a polars LazyFrame gets every record of the ranges.
        """
        pool, topic = context.asset_key.path[-2:]
        kind = context.dagster_type.typing_type
        with errors_as_failures():
            if kind is RawSlice:
                return read_raw(self._session, self._pipeline, self._plan_of(context), topic)
            if kind is SinkBatch:
                metadata = context.definition_metadata
                return self._sink_batch(str(metadata[SINK]), str(metadata[SINK_TABLE]))
            place, keys = context.asset_key.to_user_string(), input_ranges(context)
            if kind is OutputBatch:
                with topic_check_on_error(self._names, context.instance, topic):
                    batch = read_output(self._pipeline, self._session, topic)
                reports.refuse_partitions(pool, batch.plan.state, keys or ())
                reports.refuse_ahead(pool, batch.plan.state, keys or ())
                return batch
            return records_as(pool_frame(self._session(), self._pipeline, pool, topic, keys), kind, place)

    def _sink_batch(self, sink: str, table: str) -> SinkBatch:
        """The next batch of a target table, after the blocking checks of all raw records that the table lacks."""
        with remedies(sink, table):
            batch = read_sink(self._pipeline, self._session, sink, table)
        plan = batch.plan
        if isinstance(plan.state, RawState):
            topic = plan.table.topic
            require_checks(self._pipeline, {topic: plan.state}, {topic: plan.missing}, WRITE_OUTCOME)
        return batch

    def handle_output(self, context: OutputContext, obj: object) -> None:
        """Commit a batch, if there is anything in it; verify and report the ranges of the run and all that it reached.

        An ETL batch comes once for each output topic: the first call commits, the others find it done.
        """
        with errors_as_failures():
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
        """Commit batch by batch up to the ends that the run's keys had when the run began: one commit has a bound."""
        within = normalize(run_keys(context.asset_partition_keys, context.asset_key.to_user_string()))
        topic_states = {batch.topic: batch.plan.topic_state}
        commits: list[RawCommit] = []
        while True:
            ranges = batch.plan.ranges
            commit, _ = ingest_once(
                self._pipeline, self._session, batch.topic, None, ranges, first=batch, log=context.log.info
            )
            if commit is None:
                break
            commits.append(commit)
            plan = _plan_within(self._pipeline, batch.topic, within, topic_states)
            if plan.nothing_to_do:
                break
            batch = read_input(self._session, self._pipeline, plan)
        confirm_ends(self._pipeline, LEADER_SECONDS)
        if commits:
            context.add_output_metadata(
                {
                    "ingested": sum(commit.records for commit in commits),
                    "quarantined": sum(commit.quarantined for commit in commits),
                    "left out": sum(commit.left_out for commit in commits),
                    "repeats": sum(commit.repeats for commit in commits),
                    "lost offsets": sum(commit.lost_offsets for commit in commits),
                    "schema changes": "\n".join(str(change) for commit in commits for change in commit.schema_changes)
                    or "none",
                    "commits": len(commits),
                    "seconds": round(sum(commit.seconds for commit in commits), 3),
                }
            )
        reports.report_raw(
            Snapshot(self._pipeline), context, batch.topic, [part for commit in commits for part in commit.ranges]
        )

    def _stage(self, context: OutputContext, batch: EtlBatch) -> None:
        if self._last_commit is None or self._last_commit[0] is not batch:
            reader = partial(self._next_batch, batch.plan.pool)
            commit = commit_etl(self._pipeline, reader, batch, context.log.info)
            self._last_commit = (batch, commit, Snapshot(self._pipeline))
        _, commit, snapshot = self._last_commit
        topic = context.asset_key.path[-1]
        if commit is not None:
            input_ranges = {
                name: [format_key(part) for part in parts] for name, parts in commit.consumed.items() if parts
            }
            context.add_output_metadata(
                {
                    "batch": commit.batch,
                    **{name: count for name, count in commit.counts.items() if name != reports.PENDING},
                    reports.INPUT_RANGES: json.dumps(input_ranges),
                    "seconds": round(commit.seconds, 3),
                }
            )
        reports.report_staging(snapshot, context, topic, commit.outputs.get(topic, ()) if commit else ())

    def _next_batch(self, pool: str) -> EtlBatch:
        """The next ETL batch, after the blocking checks of its raw records."""
        batch = read_etl(self._pipeline, self._session, pool)
        require_checks(self._pipeline, batch.plan.raw, batch.plan.ranges)
        return batch

    def _plan_of(self, context: InputContext) -> EtlPlan:
        """The plan of the present attempt of a step. The inputs share the plan, so that their slices belong to one batch."""
        step = (context.step_context.step.key, context.step_context.previous_attempt_count)
        if self._plan is None or self._plan[0] != step:
            if text := context.step_context.run_tags.get(AWAITS_TAG):
                runs.await_ingest(self._names, context.instance, runs.raw_ends(text))
            plan = plan_etl(self._pipeline, str(context.definition_metadata[STAGING_POOL]))
            require_checks(self._pipeline, plan.raw, plan.ranges)
            self._plan = (step, plan)
        return self._plan[1]


class SinkIOManager(IOManager):
    """``sink_io``. One object serves one run."""

    def __init__(self, names: Names, spark: LazyPySparkResource) -> None:
        self._pipeline = names.pipeline
        self._session = partial(session, spark)

    def load_input(self, context: InputContext) -> object:
        """A table of a target database is no input of an asset here: read it with the database's own client."""
        place = context.asset_key.to_user_string()
        raise LakeError(
            f"{place} lies in a target database. Depend on it with deps=, and read it with the database's client."
        )

    def handle_output(self, context: OutputContext, obj: object) -> None:
        """Write the batch and later batches up to the end of the source, or of the run's turn. Report every reached range."""
        if not isinstance(obj, SinkBatch):
            raise TypeError(f"{context.asset_key.to_user_string()}: a SinkBatch is written, not {type(obj).__name__}")
        sink, table = obj.plan.sink, obj.plan.table
        with errors_as_failures():
            seconds = runs.turn_seconds(context.step_context.run_tags)
            commits = list(sink_table(self._pipeline, self._session, sink.name, table.name, obj, seconds=seconds))
            if commits:
                context.add_output_metadata(
                    {
                        "written": sum(commit.records for commit in commits),
                        "quarantined": sum(commit.quarantined for commit in commits),
                        "commits": len(commits),
                        "left": commits[-1].left,
                        "seconds": round(sum(commit.seconds for commit in commits), 3),
                    }
                )
            reports.report_table(
                context, planned(self._pipeline, sink, table), [part for commit in commits for part in commit.ranges]
            )
