"""A pipeline's assets: ``kafka/<input>`` → ``<Raw pool>/<input>`` → ``<Staging pool>/<output>`` → ``kafka/<output>``.

Their functions hold no work: a batch is read by the IO manager upstream and committed by the one downstream.
"""

# No postponed annotations here: Dagster looks at those of its functions as objects.

from functools import partial
from typing import Any

from dagster import (
    AllPartitionMapping,
    AssetExecutionContext,
    AssetIn,
    AssetOut,
    AssetsDefinition,
    AssetSpec,
    BackfillPolicy,
    multi_asset,
)
from dagster_pyspark import LazyPySparkResource

from zync_assets.assets import names, partitions, report
from zync_assets.assets.failure import spoken
from zync_assets.assets.pool_io import STAGING_POOL
from zync_assets.assets.resources import session
from zync_assets.pipeline import Denorm, Output, Pipeline
from zync_assets.steps.etl import EtlBatch, RawSlice, transform
from zync_assets.steps.ingest import RawBatch
from zync_assets.steps.publish import OutputBatch

SINGLE_RUN = BackfillPolicy.single_run()
SOURCES, TARGETS = "source_topics", "output_topics"
"""The groups of topics: two, so that the graph can be read from left to right."""


def build_assets(pipeline: Pipeline) -> list[AssetsDefinition | AssetSpec]:
    """All assets of a pipeline."""
    return [
        *(source(pipeline, item.topic) for item in pipeline.inputs),
        *(raw(pipeline, item.topic) for item in pipeline.inputs),
        *(asset for pool in pipeline.staging_pools for asset in _staging(pipeline, pool)),
        *(published(pipeline, item) for item in pipeline.outputs),
    ]


def source(pipeline: Pipeline, topic: str) -> AssetSpec:
    item = pipeline.input(topic)
    return AssetSpec(
        names.topic_key(topic),
        description=(
            f"The Kafka topic **{topic}**, as its producer writes it (keys: {item.key.format}, values:"
            f" {item.value.format}). zync only reads it. What it holds of each range, and how far {item.pool}/{topic}"
            " is behind, is reported here."
        ),
        partitions_def=partitions.raw_definition(pipeline, topic),
        group_name=SOURCES,
        kinds={"kafka", item.value.format},
        owners=_owners(pipeline),
        tags=_tags(pipeline),
    ).with_io_manager_key("kafka_io")


def raw(pipeline: Pipeline, topic: str) -> AssetsDefinition:
    item = pipeline.input(topic)

    @multi_asset(
        name=names.read_op(topic),
        description=f"Ingests {topic}: read from Kafka, decoded, committed with the next offsets.",
        ins={"batch": AssetIn(names.topic_key(topic), dagster_type=RawBatch)},
        outs={
            "committed": AssetOut(
                key=names.pool_key(item.pool, topic),
                dagster_type=RawBatch,
                io_manager_key="pool_io",
                description=(
                    f"The raw table of topic **{topic}**: every record once, keys and values as typed columns. A range"
                    " that is complete is verified when it is materialised again; the open one goes on to the"
                    " topic's end."
                ),
                group_name=item.pool,
                kinds={"deltalake", "spark"},
                owners=_owners(pipeline),
                tags=_tags(pipeline),
                metadata={"dagster/table_name": f"{item.pool}.{topic}"},
            )
        },
        partitions_def=partitions.raw_definition(pipeline, topic),
        backfill_policy=SINGLE_RUN,
    )
    def ingest(batch: Any) -> RawBatch:
        return batch

    return ingest


def _staging(pipeline: Pipeline, pool: str) -> list[AssetsDefinition | AssetSpec]:
    """The assets of a staging pool's topics. If the file has no rule for the pool, another pipeline file fills the pool."""
    if pipeline.rules_of(pool):
        return [staging(pipeline, pool)]
    return [_filled_elsewhere(pipeline, item) for item in pipeline.outputs_of(pool)]


def _filled_elsewhere(pipeline: Pipeline, item: Output) -> AssetSpec:
    return AssetSpec(
        names.pool_key(item.pool, item.topic),
        description=f"The staged records of topic **{item.topic}**. Another pipeline file has the rules that make them.",
        partitions_def=partitions.staging_definition(pipeline, item.pool),
        group_name=item.pool,
        kinds={"deltalake"},
        owners=_owners(pipeline),
        tags=_tags(pipeline),
        metadata={"dagster/table_name": f"{item.pool}.{item.topic}"},
    ).with_io_manager_key("pool_io")


def staging(pipeline: Pipeline, pool: str) -> AssetsDefinition:
    """All output topics of a pool as one asset function: they are committed together, so none can be made alone."""
    topics = [item.topic for item in pipeline.inputs_of(pool)]
    outputs = pipeline.outputs_of(pool)

    @multi_asset(
        name=names.etl_op(pool),
        description=f"ETL of pool {pool}: the rules over all new raw records; outputs and account in one commit.",
        ins={
            names.argument(topic): AssetIn(
                names.pool_key(pipeline.input(topic).pool, topic),
                dagster_type=RawSlice,
                partition_mapping=AllPartitionMapping(),
                metadata={STAGING_POOL: pool},
            )
            for topic in topics
        },
        outs={names.argument(item.topic): _staging_out(pipeline, item) for item in outputs},
        partitions_def=partitions.staging_definition(pipeline, pool),
        backfill_policy=SINGLE_RUN,
        required_resource_keys={"spark"},
        can_subset=False,
    )
    def etl(context: AssetExecutionContext, **slices: Any):
        spark: LazyPySparkResource = context.resources.spark
        given: dict[str, RawSlice] = {topic: slices[names.argument(topic)] for topic in topics}
        plan = next(iter(given.values())).plan
        with spoken():
            keys = partitions.served(context.partition_keys, f"pool {pool}")
            report.refuse_partitions(pool, keys)
            if plan.nothing_to_do:
                report.refuse_ahead(pool, plan.state, keys)
            batch = transform(partial(session, spark), pipeline, plan, given)
        return batch if len(outputs) == 1 else tuple(batch for _ in outputs)

    return etl


def published(pipeline: Pipeline, item: Output) -> AssetsDefinition:
    @multi_asset(
        name=names.publish_op(item.topic),
        description=f"Publishes {item.topic} from {item.pool}.",
        ins={"batch": AssetIn(names.pool_key(item.pool, item.topic), dagster_type=OutputBatch)},
        outs={
            "published": AssetOut(
                key=names.topic_key(item.topic),
                dagster_type=OutputBatch,
                io_manager_key="kafka_io",
                description=(
                    f"The Kafka topic **{item.topic}**, for whoever consumes it (keys: {item.key.format}, values:"
                    f" {item.value.format}). Its record at offset k is record k of {item.pool}/{item.topic}."
                ),
                group_name=TARGETS,
                kinds={"kafka", item.value.format},
                owners=_owners(pipeline),
                tags=_tags(pipeline),
            )
        },
        partitions_def=partitions.staging_definition(pipeline, item.pool),
        backfill_policy=SINGLE_RUN,
    )
    def publish(batch: Any) -> OutputBatch:
        return batch

    return publish


def _staging_out(pipeline: Pipeline, item: Output) -> AssetOut:
    made = ", ".join(
        f"{rule.name} ({rule.left} with {rule.right})" if isinstance(rule, Denorm) else f"{rule.name} ({rule.input})"
        for rule in pipeline.rules_of(item.pool)
        if rule.out == item.topic
    )
    return AssetOut(
        key=names.pool_key(item.pool, item.topic),
        dagster_type=EtlBatch,
        io_manager_key="pool_io",
        description=(
            f"What goes to topic **{item.topic}**, numbered as it will be there, each record with its sources."
            f" Made by {made or 'no rule'}."
        ),
        group_name=item.pool,
        kinds={"deltalake", "spark"},
        owners=_owners(pipeline),
        tags=_tags(pipeline),
        metadata={"dagster/table_name": f"{item.pool}.{item.topic}"},
    )


def _owners(pipeline: Pipeline) -> list[str]:
    return [f"team:{pipeline.name}"]


def _tags(pipeline: Pipeline) -> dict[str, str]:
    return {names.PIPELINE_TAG: pipeline.name}
