"""The IO manager of topics: reads a range of ``kafka/<topic>``, publishes to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa
from dagster import InputContext, IOManager, OutputContext
from dagster_pyspark import LazyPySparkResource

from zync_assets.assets import frames, partitions, report
from zync_assets.assets.failure import publishing, spoken
from zync_assets.assets.names import Names
from zync_assets.assets.resources import session
from zync_assets.codecs.spark_types import spark_ddl
from zync_assets.errors import KafkaError, RangeUnknown
from zync_assets.kafka.source import Source
from zync_assets.kafka.topics import topic_state
from zync_assets.lake import staging
from zync_assets.offsets import OffsetRange, format_key, key_of, normalize
from zync_assets.pipeline import Input, Pipeline, SideFormat
from zync_assets.steps.ingest import IngestPlan, RawBatch, plan_ingest, read_input
from zync_assets.steps.publish import OutputBatch, PublishCommit, publish

UNLIMITED = 1 << 60
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
        with spoken():
            place = context.asset_key.to_user_string()
            keys = partitions.served(context.asset_partition_keys, place) if context.has_asset_partitions else None
            wanted = context.dagster_type.typing_type
            if wanted is RawBatch:
                return read_input(self._session, self._pipeline, plan_ranges(self._pipeline, topic, keys or []))
            return frames.converted(self._records(topic, keys).dataframe(), wanted, place)

    def handle_output(self, context: OutputContext, obj: object) -> None:
        """Publish a batch; report the run's ranges and every other that it reached."""
        if not isinstance(obj, OutputBatch):
            place, kind = context.asset_key.to_user_string(), type(obj).__name__
            raise TypeError(f"{place}: an OutputBatch is published, not {kind}")
        with spoken():
            plan = obj.plan
            done = PublishCommit(obj.topic, OffsetRange(0, plan.end, plan.end), 0, 0.0)
            if not plan.nothing_to_do:
                with publishing(self._names, context.step_context.instance, obj.topic):
                    done = publish(self._pipeline, obj)
            numbers = {"published": done.records, "compared": done.verified, "seconds": round(done.seconds, 3)}
            context.add_output_metadata(numbers)
            report.published(self._pipeline, context, obj.topic, done.range)

    def _records(self, topic: str, keys: Sequence[OffsetRange] | None) -> RawBatch:
        """A lazy batch of all that Kafka holds of some ranges of an input or output topic."""
        found = topic_state(self._pipeline.kafka, topic)
        held = [OffsetRange(item.partition, item.low, item.end) for item in found.partitions]
        if keys is not None:
            whole = normalize(keys)
            held = [
                OffsetRange(part.partition, max(part.first, key.first), min(part.end, key.end))
                for part in held
                for key in whole
                if key.partition == part.partition and key.first < part.end and key.end > part.first
            ]
        ranges = tuple(part for part in held if not part.empty)
        if any(item.topic == topic for item in self._pipeline.inputs):
            plan = plan_ingest(self._pipeline, topic)
            batch = read_input(self._session, self._pipeline, plan)
            return replace(batch, plan=replace(plan, ranges=ranges))
        output = self._pipeline.output(topic)
        state = staging.open_staging(self._pipeline.lake, output.pool)
        have = {item.name: item.type for item in state.schema} if state else {}
        key_type, value_type = have.get(staging.key_column(topic)), have.get(staging.value_column(topic))
        key, value = _readable(output.key, key_type), _readable(output.value, value_type)
        source = Source(self._pipeline.kafka, self._pipeline.registry, topic, key, value, key_type, value_type)
        item = Input(topic, output.pool, output.key, output.value)
        return RawBatch(IngestPlan(item, found, None, ranges, {}, (), 0), source, self._session)


def _readable(side: SideFormat, kind: pa.DataType | None) -> SideFormat:
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
    plan = plan_ingest(pipeline, topic, within=within, limit=UNLIMITED)
    reached = {**(plan.state.next if plan.state else {}), **plan.first}
    reached |= {part.partition: part.end for part in plan.lost}
    reached |= {part.partition: part.end for part in plan.ranges}
    pool = pipeline.input(topic).pool
    for key in sorted(keys):
        if key.partition in plan.topic_state.away:
            raise plan.topic_state.away[key.partition]
        if key.partition not in reached:
            there = ", ".join(format_key(key_of(partition, at)) for partition, at in sorted(reached.items()))
            raise RangeUnknown(
                f"{pool}/{topic}, range {format_key(key)}: topic {topic} has no partition {key.partition}."
                f" Its open ranges are {there}."
            )
        upcoming = reached[key.partition]
        if key.first > upcoming:
            raise KafkaError(
                f"{pool}/{topic}, range {format_key(key)} lies ahead of the next offset {upcoming} of partition"
                f" {key.partition}. Run {format_key(key_of(key.partition, upcoming))} first."
            )
    return plan_ingest(pipeline, topic, within=within, known={topic: plan.topic_state})
