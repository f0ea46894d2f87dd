"""Dagster's definitions of a pipeline, in one call, and what the pipelines of a code location share.

What the pipelines of a code location share (source topics), and what one pipeline alone may have (tables of a
lake).

A code location is a process. ``Definitions.merge`` shows no pipeline the others, so this module remembers each pipeline
file that the process has built. A file that is built again takes the place of its earlier definitions.

Dagster's definitions of a pipeline, in one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dagster import (
    AssetChecksDefinition,
    AssetKey,
    AssetSelection,
    BetaWarning,
    Definitions,
    InitResourceContext,
    define_asset_job,
    in_process_executor,
    io_manager,
)

from zync_assets.assets.checks import build_checks, reachable
from zync_assets.assets.graph import Labels, build_assets, group_names, source
from zync_assets.assets.io_managers import KafkaIOManager, PoolIOManager
from zync_assets.assets.names import PIPELINE_TAG, Names, SourceTopic
from zync_assets.assets.resources import KafkaResource, RegistryResource, connected, spark_resource
from zync_assets.assets.sensor import build_sensor
from zync_assets.errors import SetupError
from zync_assets.pipeline import Pipeline

_topics: dict[AssetKey, SourceTopic] = {}
_tables: dict[tuple[str, str, str], Names] = {}
"""(lake, pool, topic) → the pipeline that has the table's asset."""


def claim_tables(names: Names) -> None:
    """Note the tables of a pipeline as its assets. SetupError for a table that is an asset of another pipeline file."""
    pipeline = names.pipeline
    lake = str(pipeline.lake).rstrip("/")
    tables = [(lake, item.pool, item.topic) for item in (*pipeline.inputs, *pipeline.outputs)]
    for table in tables:
        other = _tables.get(table)
        if other is not None and other.file != names.file and other.file.exists():
            place = "/".join(table[1:])
            raise SetupError(
                f"{other.file} and {names.file} both name table {place} of lake {lake}, and a table is one asset."
                f" Write the rules of both files into one file, or name another pool than {table[1]} in one of them, or"
                " leave one of them out of this code location."
            )
    _tables.update(dict.fromkeys(tables, names))


def sources(names: Names, labels: Labels, resources: Mapping[str, object]) -> dict[str, SourceTopic]:
    """Input topic → the topic's asset. It is the asset of another pipeline that reads the topic from the same brokers, or
    it is made now. ``resources``: of this pipeline."""
    found: dict[str, SourceTopic] = {}
    for item in names.pipeline.inputs:
        key = names.topic_key(item.topic)
        there = _topics.get(key)
        if (
            there is None
            or there.file == names.file
            or not there.file.exists()
            or not _same_brokers(names, there.names)
        ):
            reader = {name: resources[name] for name in (names.resource("kafka_io"), names.resource("spark"))}
            made = source(names, labels, item.topic)
            there = _topics[key] = SourceTopic(names, made, reachable(names, item.topic), reader)
        found[item.topic] = there
    return found


def _same_brokers(names: Names, others: Names) -> bool:
    """Whether two pipelines name a broker in common; true where the environment does not say yet which they name."""
    mine, theirs = _brokers(names), _brokers(others)
    return not mine or not theirs or bool(mine & theirs)


def _brokers(names: Names) -> set[str]:
    try:
        properties = names.pipeline.kafka
        text = properties.get("bootstrap.servers") or properties.get("metadata.broker.list") or ""
    except SetupError:
        return set()
    return {item.strip().lower() for item in text.split(",") if item.strip()}


NOTHING: Mapping[str, Any] = {}


def build_definitions(
    pipeline: Pipeline,
    *,
    kafka: KafkaResource | None = None,
    registry: RegistryResource | None = None,
    resources: Mapping[str, object] = NOTHING,
    sensor_running: bool = False,
    key_prefix: str | Sequence[str] = (),
    owners: Sequence[str] | None = None,
    groups: str | Mapping[str, str] = NOTHING,
    tags: Mapping[str, str] = NOTHING,
) -> Definitions:
    """Assets, checks, jobs, the sensor and the resources of a pipeline. Needs neither network nor JVM.

    The result merges with definitions of your own and of other pipelines. Jobs, ops, resources and the sensor end in
    the pipeline's name. No executor is set but that of the pipeline's jobs.

    ``kafka``, ``registry``: take the place of the file's connections, and are shown as resources
    ``kafka_of_<pipeline>`` and ``registry_of_<pipeline>``.
    ``resources``: ``spark``, ``kafka_io`` and ``pool_io`` take the place of the pipeline's own; others are added.
    ``sensor_running``: whether the sensor is on from the start.
    ``key_prefix``: the first parts of every asset key, as a sequence or with slashes.
    ``owners``: of every asset, such as ``team:sales``; by default the team of the pipeline's name.
    ``groups``: one group for all assets, or a mapping from the groups ``source_topics``, ``output_topics`` and the
    pools' names to other groups.
    ``tags``: of every asset, beside ``zync/pipeline``.

    A topic that several pipelines of a process read is one asset, with the labels of the pipeline that was built first.

    SetupError if a table of the lake is an asset of another pipeline file already, or if ``groups`` names no group of
    the pipeline.

        >>> from pathlib import Path
        >>> from dagster import Definitions, asset
        >>> from zync_assets import build_definitions, load_pipeline
        >>> _ = Path("shop.yaml").write_text("inputs: [{topic: orders, pool: Raw, format: json}]")
        >>> @asset(deps=[["shop", "Raw", "orders"]])
        ... def report() -> None: ...
        >>> shop = build_definitions(load_pipeline("shop.yaml"), key_prefix="shop", owners=["team:sales"])
        >>> defs = Definitions.merge(shop, Definitions(assets=[report]))
        >>> sorted(key.to_user_string() for key in defs.resolve_all_asset_keys())
        ['report', 'shop/Raw/orders', 'shop/kafka/orders']
        >>> [job.name for job in shop.jobs]
        ['ingest_orders_of_shop', 'check_shop']
    """
    names = Names(connected(pipeline, kafka, registry), tuple(_parts(key_prefix)))
    labels = Labels(
        tuple([f"team:{pipeline.name}"] if owners is None else owners),
        {**tags, PIPELINE_TAG: pipeline.name},
        _groups(pipeline, groups),
    )
    shown = {names.resource(name): item for name, item in (("kafka", kafka), ("registry", registry)) if item}
    with warnings.catch_warnings():
        # Single-run backfills are what a range run needs; Dagster calls the parameter beta.
        warnings.simplefilter("ignore", BetaWarning)
        given = {**_resources(names), **shown, **{_resource_key(names, name): item for name, item in resources.items()}}
        names = replace(names, sources=sources(names, labels, given))
        claim_tables(names)
        topics = list(names.sources.values())
        checks = [*(item.check for item in topics), *build_checks(names)]
        jobs = [*build_jobs(names), _checks_job(names, checks)]
        return Definitions(
            assets=[*(item.asset for item in topics), *build_assets(names, labels)],
            asset_checks=checks,
            jobs=jobs,
            sensors=[build_sensor(names, jobs, running=sensor_running)],
            resources={**given, **{key: item for topic in topics for key, item in topic.resources.items()}},
        )


def _parts(key_prefix: str | Sequence[str]) -> Sequence[str]:
    return [part for part in key_prefix.split("/") if part] if isinstance(key_prefix, str) else key_prefix


def _groups(pipeline: Pipeline, groups: str | Mapping[str, str]) -> Mapping[str, str]:
    known = group_names(pipeline)
    if isinstance(groups, str):
        return dict.fromkeys(known, groups)
    for name in groups:
        if name not in known:
            raise SetupError(f"groups: {pipeline.path} has no group {name}. Its groups are {', '.join(known)}.")
    return groups


def _resource_key(names: Names, name: str) -> str:
    return names.resource(name) if name in ("spark", "kafka_io", "pool_io") else name


def build_jobs(names: Names) -> list[Any]:
    """One job for each partitions definition: a run has the keys of one."""
    pipeline = names.pipeline
    ingest = [
        _job(
            names,
            names.ingest_job(item.topic),
            AssetSelection.assets(names.pool_key(item.pool, item.topic)),
            f"Ingests {item.topic} into {item.pool}, and checks it.",
        )
        for item in pipeline.inputs
    ]
    staging = [
        _job(
            names,
            names.staging_job(pool),
            AssetSelection.assets(*names.staging_job_assets(pool)),
            f"ETL into {pool}, its checks, and publishing of its topics.",
        )
        for pool in pipeline.staging_pools
    ]
    return [*ingest, *staging]


def _checks_job(names: Names, checks: Sequence[AssetChecksDefinition]) -> Any:
    keys = [key for definition in checks for key in definition.check_keys]
    description = f"Every check of pipeline {names.pipeline.name}, over everything. No JVM."
    return _job(names, names.checks_job, AssetSelection.checks(*keys), description)


def _job(names: Names, name: str, selection: AssetSelection, description: str) -> Any:
    # One process a run: its steps share one Spark session.
    return define_asset_job(
        name,
        selection,
        description=description,
        tags={PIPELINE_TAG: names.pipeline.name},
        executor_def=in_process_executor,
    )


def _resources(names: Names) -> dict[str, object]:
    spark = names.resource("spark")

    @io_manager(required_resource_keys={spark}, description="Reads topics, publishes to them.")
    def kafka_io(context: InitResourceContext) -> KafkaIOManager:
        return KafkaIOManager(names, getattr(context.resources, spark))

    @io_manager(required_resource_keys={spark}, description="Commits to the pools of the lake, reads them.")
    def pool_io(context: InitResourceContext) -> PoolIOManager:
        return PoolIOManager(names, getattr(context.resources, spark))

    return {
        spark: spark_resource(names.pipeline),
        names.resource("kafka_io"): kafka_io,
        names.resource("pool_io"): pool_io,
    }
