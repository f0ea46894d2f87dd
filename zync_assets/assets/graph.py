"""A pipeline's assets: ``kafka/<input>`` → ``<Raw pool>/<input>`` → ``<Staging pool>/<output>`` → ``kafka/<output>``.

Their functions hold no work: a batch is read by the IO manager upstream and committed by the one downstream.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    MetadataValue,
    multi_asset,
)
from dagster_pyspark import LazyPySparkResource

from zync_assets.assets import reports
from zync_assets.assets.facts import errors_as_failures
from zync_assets.assets.io_managers import SINK, SINK_TABLE, STAGING_POOL
from zync_assets.assets.names import Names, argument, raw_definition, run_keys, staging_definition
from zync_assets.assets.resources import session
from zync_assets.etl.plan import EtlBatch, RawSlice, transform
from zync_assets.etl.rules import explain_rules, kind_of
from zync_assets.ingest.plan import RawBatch
from zync_assets.pipeline import Output, Pipeline, Sink, SinkTable, pool_path
from zync_assets.publish.plan import OutputBatch
from zync_assets.sinks.plan import SinkBatch

# No postponed annotations here: Dagster looks at those of its functions as objects.


SINGLE_RUN = BackfillPolicy.single_run()
SOURCES, TARGETS = "source_topics", "output_topics"
"""The groups of topics: two, so that the graph can be read from left to right."""
TABLE_NAME = "dagster/table_name"
"""Metadata of a table. Dagster takes two assets with one value for one table, also in different code locations."""


@dataclass(frozen=True)
class AssetLabels:
    """What the assets of a pipeline say beside their names. ``groups``: a group that this module gives → the group to
    show instead."""

    owners: tuple[str, ...]
    tags: Mapping[str, str]
    groups: Mapping[str, str] = field(default_factory=dict[str, str])

    def group(self, name: str) -> str:
        return self.groups.get(name, name)


def group_names(pipeline: Pipeline) -> list[str]:
    """The groups of a pipeline's assets, from left to right."""
    pools = [item.pool for item in (*pipeline.inputs, *pipeline.outputs)]
    return list(dict.fromkeys([SOURCES, *pools, TARGETS, *(sink.name for sink in pipeline.sinks)]))


def table_place(pipeline: Pipeline, pool: str, topic: str) -> str:
    """A topic of a pool with its lake."""
    return f"{str(pipeline.lake).rstrip('/')}/{pool_path(pool, topic)}"


def target_place(pipeline: Pipeline, sink: Sink, table: SinkTable) -> str:
    """A target table with its host and database, or its file or folder. Without the user, the password and the options.

    The form of the URL of a user's class is not known, and the URL may hold a password. Its place is the sink's name.
    """
    if ":" in sink.kind:
        return f"{pipeline.name}/{sink.name}/{table.name}"
    address = re.split(r"[?#]", sink.url, maxsplit=1)[0]
    scheme, mark, place = address.rpartition("://")
    if sink.kind == "sqlite":
        return f"{address.removeprefix('sqlite:///')}/{table.name}"
    if not mark or sink.kind == "files":
        return f"{address.rstrip('/')}/{table.name}"
    # The pipeline file has no @ behind the host: a user or a password spells it %40.
    return f"{scheme}://{place.rpartition('@')[2].rstrip('/')}/{table.name}"


def build_assets(names: Names, labels: AssetLabels) -> list[AssetsDefinition | AssetSpec]:
    """All assets that a pipeline makes; those of source topics are in ``names.sources``."""
    pipeline = names.pipeline
    return [
        *(raw(names, labels, item.topic) for item in pipeline.inputs),
        *(asset for pool in pipeline.staging_pools for asset in _staging(names, labels, pool)),
        *(publication(names, labels, item) for item in pipeline.outputs),
        *(target_table(names, labels, sink, table) for sink in pipeline.sinks for table in sink.tables),
    ]


def source(names: Names, labels: AssetLabels, topic: str) -> AssetSpec:
    """The asset of a source topic, which no run makes."""
    item = names.pipeline.input(topic)
    table = names.pool_key(item.pool, topic).to_user_string()
    return AssetSpec(
        names.topic_key(topic),
        description=(
            f"The Kafka topic **{topic}**, as its producer writes it (keys: {item.key.format}, values:"
            f" {item.value.format}). zync only reads the topic. The metadata of a range are its offsets. The last observation"
            f" among the asset's events has the `lag`: how many offsets {table} is behind."
        ),
        partitions_def=raw_definition(names, topic),
        group_name=labels.group(SOURCES),
        kinds={"kafka", item.value.format},
        owners=labels.owners,
        tags=labels.tags,
    ).with_io_manager_key(names.resource("kafka_io"))


def raw(names: Names, labels: AssetLabels, topic: str) -> AssetsDefinition:
    """The asset of an input topic's raw table."""
    item = names.pipeline.input(topic)

    @multi_asset(
        name=names.read_op(topic),
        description=f"Ingests {topic}: read from Kafka, decoded, committed with the next offsets.",
        ins={
            "batch": AssetIn(
                names.topic_key(topic), dagster_type=RawBatch, input_manager_key=names.resource("kafka_io")
            )
        },
        outs={
            "committed": AssetOut(
                key=names.pool_key(item.pool, topic),
                dagster_type=RawBatch,
                io_manager_key=names.resource("pool_io"),
                description=(
                    f"The raw table of topic **{topic}**: every record once, keys and values as typed columns. To"
                    " materialise a complete range again verifies the range. The last range grows to the topic's end."
                ),
                group_name=labels.group(item.pool),
                kinds={"deltalake", "spark"},
                owners=labels.owners,
                tags=labels.tags,
                metadata={TABLE_NAME: table_place(names.pipeline, item.pool, topic)},
            )
        },
        partitions_def=raw_definition(names, topic),
        backfill_policy=SINGLE_RUN,
    )
    def ingest(batch: Any) -> RawBatch:
        return batch

    return ingest


def _staging(names: Names, labels: AssetLabels, pool: str) -> list[AssetsDefinition | AssetSpec]:
    """The assets of a staging pool's topics. If the file has no rule for the pool, another pipeline file fills the pool."""
    if names.pipeline.rules_of(pool):
        return [staging(names, labels, pool)]
    return [_foreign_asset(names, labels, item) for item in names.pipeline.outputs_of(pool)]


def _foreign_asset(names: Names, labels: AssetLabels, item: Output) -> AssetSpec:
    return AssetSpec(
        names.pool_key(item.pool, item.topic),
        description=f"The staged records of topic **{item.topic}**. Another pipeline file has the rules that make them.",
        partitions_def=staging_definition(names, item.pool),
        group_name=labels.group(item.pool),
        kinds={"deltalake"},
        owners=labels.owners,
        tags=labels.tags,
        metadata={TABLE_NAME: table_place(names.pipeline, item.pool, item.topic)},
    ).with_io_manager_key(names.resource("pool_io"))


def staging(names: Names, labels: AssetLabels, pool: str) -> AssetsDefinition:
    """All output topics of a pool as one asset function: they are committed together, so none can be made alone."""
    pipeline, spark_key = names.pipeline, names.resource("spark")
    topics = [item.topic for item in pipeline.inputs_of(pool)]
    outputs = pipeline.outputs_of(pool)

    @multi_asset(
        name=names.etl_op(pool),
        description=f"ETL of pool {pool}: the rules over all new raw records; outputs and account in one commit.",
        ins={
            argument(topic): AssetIn(
                names.pool_key(pipeline.input(topic).pool, topic),
                dagster_type=RawSlice,
                partition_mapping=AllPartitionMapping(),
                metadata={STAGING_POOL: pool},
                input_manager_key=names.resource("pool_io"),
            )
            for topic in topics
        },
        outs={argument(item.topic): _staging_out(names, labels, item) for item in outputs},
        partitions_def=staging_definition(names, pool),
        backfill_policy=SINGLE_RUN,
        required_resource_keys={spark_key},
        can_subset=False,
    )
    def etl(context: AssetExecutionContext, **slices: Any):
        spark: LazyPySparkResource = getattr(context.resources, spark_key)
        slices_by_topic: dict[str, RawSlice] = {topic: slices[argument(topic)] for topic in topics}
        plan = next(iter(slices_by_topic.values())).plan
        with errors_as_failures():
            keys = run_keys(context.partition_keys, f"pool {pool}")
            reports.refuse_partitions(pool, plan.state, keys)
            if plan.nothing_to_do:
                reports.refuse_ahead(pool, plan.state, keys)
            batch = transform(partial(session, spark), plan, slices_by_topic)
        return batch if len(outputs) == 1 else tuple(batch for _ in outputs)

    return etl


def publication(names: Names, labels: AssetLabels, item: Output) -> AssetsDefinition:
    """The asset of an output topic in Kafka."""
    source_key = names.pool_key(item.pool, item.topic)

    @multi_asset(
        name=names.publish_op(item.topic),
        description=f"Publishes {item.topic} from {item.pool}.",
        ins={
            "batch": AssetIn(
                names.pool_key(item.pool, item.topic),
                dagster_type=OutputBatch,
                input_manager_key=names.resource("pool_io"),
            )
        },
        outs={
            "published": AssetOut(
                key=names.topic_key(item.topic),
                dagster_type=OutputBatch,
                io_manager_key=names.resource("kafka_io"),
                description=(
                    f"The Kafka topic **{item.topic}** for its consumers (keys: {item.key.format}, values:"
                    f" {item.value.format}). The record at offset k is record k of {source_key.to_user_string()}."
                ),
                group_name=labels.group(TARGETS),
                kinds={"kafka", item.value.format},
                owners=labels.owners,
                tags=labels.tags,
            )
        },
        partitions_def=staging_definition(names, item.pool),
        backfill_policy=SINGLE_RUN,
    )
    def publish(batch: Any) -> OutputBatch:
        return batch

    return publish


def target_table(names: Names, labels: AssetLabels, sink: Sink, table: SinkTable) -> AssetsDefinition:
    """The asset of a table in a target database."""
    definition = staging_definition(names, table.pool) if table.staged else raw_definition(names, table.topic)

    @multi_asset(
        name=names.sink_op(sink.name, table.name),
        description=f"Writes {table.source} to the table {table.name} of {sink.name}.",
        ins={
            "batch": AssetIn(
                names.pool_key(table.pool, table.topic),
                dagster_type=SinkBatch,
                metadata={SINK: sink.name, SINK_TABLE: table.name},
                input_manager_key=names.resource("pool_io"),
            )
        },
        outs={
            "written": AssetOut(
                key=names.sink_key(sink.name, table.name),
                dagster_type=SinkBatch,
                io_manager_key=names.resource("sink_io"),
                description=(
                    f"The table **{table.name}** of the sink {sink.name}, written from {table.source} exactly once"
                    f" ({sink.mode})."
                ),
                group_name=labels.group(sink.name),
                kinds={sink.kind} if ":" not in sink.kind else set(),
                owners=labels.owners,
                tags=labels.tags,
                metadata={TABLE_NAME: target_place(names.pipeline, sink, table)},
            )
        },
        partitions_def=definition,
        backfill_policy=SINGLE_RUN,
    )
    def write(batch: Any) -> SinkBatch:
        return batch

    return write


def _staging_out(names: Names, labels: AssetLabels, item: Output) -> AssetOut:
    rules = ", ".join(
        kind_of(rule).title(rule) for rule in names.pipeline.rules_of(item.pool) if rule.out == item.topic
    )
    return AssetOut(
        key=names.pool_key(item.pool, item.topic),
        dagster_type=EtlBatch,
        io_manager_key=names.resource("pool_io"),
        description=(
            f"The records for topic **{item.topic}**. The number of a record is its offset in the topic, and its sources"
            f" are the records that it was made from. Rules: {rules or 'none'}."
        ),
        group_name=labels.group(item.pool),
        kinds={"deltalake", "spark"},
        owners=labels.owners,
        tags=labels.tags,
        metadata={
            TABLE_NAME: table_place(names.pipeline, item.pool, item.topic),
            **_rule_metadata(names.pipeline, item.topic),
        },
    )


def _rule_metadata(pipeline: Pipeline, topic: str) -> dict[str, Any]:
    """The SQL of the rules of an output that read tables, and their tables; nothing for an output without such a rule."""
    rules = reports.table_rules(pipeline, topic)
    if not rules:
        return {}
    names = {rule.name for rule in rules}
    texts = [item.sql for item in explain_rules(pipeline) if item.name in names and item.kind in ("rule", "plan")]
    sql = "\n\n".join(texts)
    tables = dict.fromkeys(f"{table.alias}: {table.topic}" for rule in rules for table in rule.tables)
    return {"sql": MetadataValue.md(f"```sql\n{sql}\n```"), "tables": ", ".join(tables)}
