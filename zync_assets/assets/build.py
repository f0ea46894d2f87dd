"""Dagster's definitions of a pipeline, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dagster import (
    AssetChecksDefinition,
    AssetSelection,
    BetaWarning,
    Definitions,
    InitResourceContext,
    IOManagerDefinition,
    define_asset_job,
    in_process_executor,
    io_manager,
)

from zync_assets.assets import names
from zync_assets.assets.checks import build_checks
from zync_assets.assets.connections import KafkaResource, RegistryResource, connected
from zync_assets.assets.graph import build_assets
from zync_assets.assets.kafka_io import KafkaIOManager
from zync_assets.assets.pool_io import PoolIOManager
from zync_assets.assets.resources import spark_resource
from zync_assets.assets.sensor import build_sensor
from zync_assets.pipeline import Pipeline

NO_RESOURCES: Mapping[str, object] = {}


def build_definitions(
    pipeline: Pipeline,
    *,
    kafka: KafkaResource | None = None,
    registry: RegistryResource | None = None,
    resources: Mapping[str, object] = NO_RESOURCES,
    sensor_running: bool = False,
) -> Definitions:
    """Assets, checks, jobs, the sensor and the resources ``spark``, ``kafka_io`` and ``pool_io`` of a pipeline.

    ``kafka`` and ``registry`` take the place of the file's connections, and are shown as resources of those names.
    ``resources`` replaces some of these three or adds to them. Needs neither network nor JVM. Merge it with
    definitions of your own: ``Definitions.merge(build_definitions(pipeline), Definitions(assets=[...]))``.
    """
    pipeline = connected(pipeline, kafka, registry)
    shown = {name: given for name, given in (("kafka", kafka), ("registry", registry)) if given is not None}
    with warnings.catch_warnings():
        # Single-run backfills are what a range run needs; Dagster calls the parameter beta.
        warnings.simplefilter("ignore", BetaWarning)
        checks = build_checks(pipeline)
        jobs = [*build_jobs(pipeline), _checks_job(pipeline, checks)]
        return Definitions(
            assets=build_assets(pipeline),
            asset_checks=checks,
            jobs=jobs,
            sensors=[build_sensor(pipeline, jobs, running=sensor_running)],
            resources={**_resources(pipeline), **shown, **resources},
            executor=in_process_executor,
        )


def build_jobs(pipeline: Pipeline) -> list[Any]:
    """One job for each partitions definition: a run has the keys of one."""
    tags = {names.PIPELINE_TAG: pipeline.name}
    ingest = [
        define_asset_job(
            names.ingest_job(item.topic),
            AssetSelection.assets(names.pool_key(item.pool, item.topic)),
            description=f"Ingests {item.topic} into {item.pool}, and checks it.",
            tags=tags,
        )
        for item in pipeline.inputs
    ]
    staging = [
        define_asset_job(
            names.staging_job(pool),
            AssetSelection.assets(*names.staging_job_assets(pipeline, pool)),
            description=f"ETL into {pool}, its checks, and publishing of its topics.",
            tags=tags,
        )
        for pool in pipeline.staging_pools
    ]
    return [*ingest, *staging]


def _checks_job(pipeline: Pipeline, checks: Sequence[AssetChecksDefinition]) -> Any:
    return define_asset_job(
        names.checks_job(pipeline.name),
        AssetSelection.checks(*(key for definition in checks for key in definition.check_keys)),
        description=f"Every check of pipeline {pipeline.name}, over everything. No JVM.",
        tags={names.PIPELINE_TAG: pipeline.name},
    )


def _resources(pipeline: Pipeline) -> dict[str, object]:
    @io_manager(required_resource_keys={"spark"}, description="Reads topics, publishes to them.")
    def kafka_io(context: InitResourceContext) -> KafkaIOManager:
        return KafkaIOManager(pipeline, context.resources.spark)

    @io_manager(required_resource_keys={"spark"}, description="Commits to the pools of the lake, reads them.")
    def pool_io(context: InitResourceContext) -> PoolIOManager:
        return PoolIOManager(pipeline, context.resources.spark)

    managers: dict[str, IOManagerDefinition] = {"kafka_io": kafka_io, "pool_io": pool_io}
    return {"spark": spark_resource(pipeline), **managers}
