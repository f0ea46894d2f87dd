"""Dagster's definitions of a pipeline, in one call.

The pipelines of a code location share source topics. A table of a lake belongs to one pipeline alone.

A code location is a process. ``Definitions.merge`` shows no pipeline the others, so this module remembers each pipeline
file whose definitions the process holds. A file that is built again takes the place of its earlier definitions.
"""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import ref

from dagster import (
    AssetCheckKey,
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
from zync_assets.assets.graph import AssetLabels, build_assets, group_names, source
from zync_assets.assets.io_managers import KafkaIOManager, PoolIOManager, SinkIOManager
from zync_assets.assets.names import PIPELINE_TAG, Names, SourceTopic
from zync_assets.assets.resources import KafkaResource, RegistryResource, spark_resource, with_connections
from zync_assets.assets.sensor import build_sensor
from zync_assets.checks.state_checks import ROWS_MATCH
from zync_assets.errors import SetupError
from zync_assets.pipeline import Pipeline, pool_path
from zync_assets.pipeline_file.loader import load_pipeline

# Dagster keeps the variables of the function that makes the first Definitions of a process. Here there are none.
Definitions()

_builds: list[ref[Names]] = []
"""The pipelines of this process, the last build of each file. Definitions that nobody holds any more do not count."""


def claim(names: Names) -> None:
    """Note that a pipeline is in this process. ``names``: with its sources.

    SetupError if another pipeline file in this process has the pipeline's name, one of its tables or one of its asset keys.
    """
    if any(_conflict(names, neighbour) for neighbour in _neighbours(names)):
        # Definitions that nobody holds may wait for the garbage collector.
        gc.collect()
        for neighbour in _neighbours(names):
            if text := _conflict(names, neighbour):
                raise SetupError(f"{text}, or leave one of the two files out of this code location.")
    _builds[:] = [*(item for item in _builds if (build := item()) is not None and build.file != names.file), ref(names)]


def _neighbours(names: Names) -> list[Names]:
    """The other pipelines of this process. A file that was removed or renamed does not count."""
    builds = [item() for item in _builds]
    return [item for item in builds if item is not None and item.file != names.file and item.file.exists()]


def _conflict(names: Names, neighbour: Names) -> str | None:
    """What two pipelines can't both have in one code location, and the cure; None where they can stand side by side."""
    pipeline, neighbour_pipeline, files = names.pipeline, neighbour.pipeline, f"{neighbour.file} and {names.file}"
    if pipeline.name == neighbour_pipeline.name:
        return (
            f"{files} are both pipeline {pipeline.name}, and the names of jobs and resources in Dagster end in the pipeline's"
            f' name. Write another name at the top of {names.file}, such as "name: {pipeline.name}_2"'
        )
    tables = _tables(neighbour_pipeline)
    for table in _tables(pipeline):
        if table in tables:
            lake, pool, topic = table
            return (
                f"{files} both name table {pool_path(pool, topic)} of lake {lake}, and a table is one asset. Write the rules of"
                f" both files into one file, or name another pool than {pool} in one of them"
            )
    outputs = (
        {item.topic for item in neighbour_pipeline.outputs} if _brokers(names) & _brokers(neighbour) else set[str]()
    )
    for output in pipeline.outputs:
        if output.topic in outputs and names.topic_key(output.topic) == neighbour.topic_key(output.topic):
            return (
                f"{files} both publish topic {output.topic}, and a topic has one publisher: the numbers of staging are the"
                " offsets of Kafka. Name another topic in one of them"
            )
    common = {item.topic for item in pipeline.inputs} & {item.topic for item in neighbour_pipeline.inputs}
    common_keys = {names.topic_key(topic) for topic in common} if _same_brokers(names, neighbour) else set[AssetKey]()
    assets = _assets(neighbour)
    for key, place in _assets(names).items():
        if key in assets and key not in common_keys:
            return (
                f"{files} both make asset {key.to_user_string()}: the first for {assets[key]}, the second for {place}."
                f' Give one of them a prefix, as in key_prefix="{pipeline.name}" of build_definitions or of defs.yaml'
            )
    return None


def _tables(pipeline: Pipeline) -> dict[tuple[str, str, str], None]:
    """(lake, pool, topic) of a pipeline's tables."""
    lake = str(pipeline.lake).rstrip("/")
    return dict.fromkeys((lake, item.pool, item.topic) for item in (*pipeline.inputs, *pipeline.outputs))


def _assets(names: Names) -> dict[AssetKey, str]:
    """Asset key → the table or topic that the asset stands for."""
    pipeline, brokers = names.pipeline, ",".join(sorted(_brokers(names)))
    places: dict[AssetKey, str] = {}
    for kind, items in (("input", pipeline.inputs), ("output", pipeline.outputs)):
        for item in items:
            places[names.topic_key(item.topic)] = f"the {kind} topic {item.topic}{brokers and f' of brokers {brokers}'}"
            places[names.pool_key(item.pool, item.topic)] = f"the table of lake {pipeline.lake}"
    for sink in pipeline.sinks:
        for table in sink.tables:
            places[names.sink_key(sink.name, table.name)] = (
                f"the table {table.name} of the sink {sink.name} of {pipeline.name}"
            )
    return places


def sources(names: Names, labels: AssetLabels, resources: Mapping[str, object]) -> dict[str, SourceTopic]:
    """Input topic → the topic's asset. It is the asset of another pipeline that reads the topic from the same brokers, or
    it is made now. ``resources``: of this pipeline."""
    topics: dict[str, SourceTopic] = {}
    neighbours = [neighbour for neighbour in reversed(_neighbours(names)) if _same_brokers(names, neighbour)]
    for item in names.pipeline.inputs:
        key = names.topic_key(item.topic)
        neighbour_topics = [
            neighbour.sources[item.topic] for neighbour in neighbours if item.topic in neighbour.sources
        ]
        source_topic = next(
            (topic for topic in neighbour_topics if topic.asset.key == key and topic.file != names.file), None
        )
        if source_topic is None:
            reader = {name: resources[name] for name in (names.resource("kafka_io"), names.resource("spark"))}
            source_topic = SourceTopic(names, source(names, labels, item.topic), reachable(names, item.topic), reader)
        topics[item.topic] = source_topic
    return topics


def _same_brokers(names: Names, neighbour: Names) -> bool:
    """Whether two pipelines name a broker in common; true where the environment does not say yet which they name."""
    brokers, neighbour_brokers = _brokers(names), _brokers(neighbour)
    return not brokers or not neighbour_brokers or bool(brokers & neighbour_brokers)


def _brokers(names: Names) -> set[str]:
    try:
        properties = names.pipeline.kafka
        text = properties.get("bootstrap.servers") or properties.get("metadata.broker.list") or ""
    except SetupError:
        return set()
    return {item.strip().lower() for item in text.split(",") if item.strip()}


NOTHING: Mapping[str, Any] = {}


def build_definitions(
    pipeline: Pipeline | str | os.PathLike[str],
    *,
    kafka: KafkaResource | None = None,
    registry: RegistryResource | None = None,
    resources: Mapping[str, object] = NOTHING,
    sensor_running: bool = False,
    key_prefix: str | Sequence[str] = (),
    owners: Sequence[str] = (),
    groups: str | Mapping[str, str] = NOTHING,
    tags: Mapping[str, str] = NOTHING,
) -> Definitions:
    """Assets, checks, jobs, the sensor and the resources of a pipeline. Needs neither network nor JVM.

    ``pipeline``: a pipeline, or the path of its file.
    The result merges with definitions of your own and of other pipelines. Jobs, ops, resources and the sensor end in
    the pipeline's name. No executor is set but that of the pipeline's jobs.

    ``kafka``, ``registry``: take the place of the file's connections, and are shown as resources
    ``kafka_of_<pipeline>`` and ``registry_of_<pipeline>``.
    ``resources``: ``spark``, ``kafka_io`` and ``pool_io`` take the place of the pipeline's own; others are added.
    ``sensor_running``: whether the sensor is on from the start.
    ``key_prefix``: the first parts of every asset key, as a sequence or with slashes.
    ``owners``: of every asset, such as ``team:sales``.
    ``groups``: one group for all assets, or a mapping from the groups ``source_topics``, ``output_topics`` and the
    pools' names to other groups.
    ``tags``: of every asset, beside ``zync/pipeline``.

    A topic that several pipelines of a process read is one asset, with the labels of the pipeline that was built first.

    SetupError if another pipeline file of the process has the pipeline's name, one of its tables or one of its asset keys.
    SetupError if ``groups`` names no group of the pipeline, and for an argument of another type.

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
    _check_arguments(
        {
            "kafka": kafka,
            "registry": registry,
            "resources": resources,
            "sensor_running": sensor_running,
            "key_prefix": key_prefix,
            "owners": owners,
            "groups": groups,
            "tags": tags,
        }
    )
    pipeline = pipeline if isinstance(pipeline, Pipeline) else load_pipeline(pipeline)
    names = Names(with_connections(pipeline, kafka, registry), tuple(_parts(key_prefix)))
    labels = AssetLabels(
        tuple(owners),
        {**tags, PIPELINE_TAG: pipeline.name},
        _groups(pipeline, groups),
    )
    connections = {names.resource(name): item for name, item in (("kafka", kafka), ("registry", registry)) if item}
    with warnings.catch_warnings():
        # Single-run backfills are what a range run needs; Dagster calls the parameter beta.
        warnings.simplefilter("ignore", BetaWarning)
        all_resources = {
            **_resources(names),
            **connections,
            **{_resource_key(names, name): item for name, item in resources.items()},
        }
        names = replace(names, sources=sources(names, labels, all_resources))
        claim(names)
        topics = list(names.sources.values())
        checks = [*(item.check for item in topics), *build_checks(names)]
        jobs = [*build_jobs(names), *_checks_jobs(names, checks)]
        return Definitions(
            assets=[*(item.asset for item in topics), *build_assets(names, labels)],
            asset_checks=checks,
            jobs=jobs,
            sensors=[build_sensor(names, jobs, running=sensor_running)],
            resources={**all_resources, **{key: item for topic in topics for key, item in topic.resources.items()}},
        )


def _check_arguments(arguments: Mapping[str, object]) -> None:
    """SetupError for an argument of ``build_definitions`` of another type. The error shows no value: it may be a secret."""
    for name, (is_right, form) in _FORMS.items():
        value = arguments[name]
        if not is_right(value):
            raise SetupError(f"build_definitions: {name} must be {form}, not {type(value).__name__}.")


def _are_texts(value: object) -> bool:
    """Whether a value is a list or a tuple of texts, none of which is empty."""
    if not isinstance(value, list | tuple):
        return False
    texts = cast("Sequence[object]", value)
    return all(isinstance(text, str) and text for text in texts)


_FORMS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "kafka": (lambda value: value is None or isinstance(value, KafkaResource), "a KafkaResource"),
    "registry": (lambda value: value is None or isinstance(value, RegistryResource), "a RegistryResource"),
    "resources": (lambda value: isinstance(value, Mapping), "a mapping of names to resources"),
    "sensor_running": (lambda value: isinstance(value, bool), "True or False"),
    "key_prefix": (lambda value: isinstance(value, str) or _are_texts(value), "text, or a list of texts"),
    "owners": (_are_texts, 'a list of texts, such as ["team:sales"]'),
    "groups": (lambda value: isinstance(value, str | Mapping), "text, or a mapping of groups"),
    "tags": (lambda value: isinstance(value, Mapping), "a mapping of texts"),
}
"""Argument of ``build_definitions`` → whether a value is one, and its form in words."""


def _parts(key_prefix: str | Sequence[str]) -> Sequence[str]:
    parts = [part for part in key_prefix.split("/") if part] if isinstance(key_prefix, str) else key_prefix
    for part in parts:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", part):
            raise SetupError(f"key_prefix: {part!r} must consist of letters, digits, `.`, `_` and `-`.")
    return parts


def _groups(pipeline: Pipeline, groups: str | Mapping[str, str]) -> Mapping[str, str]:
    own_groups = group_names(pipeline)
    if isinstance(groups, str):
        return dict.fromkeys(own_groups, groups)
    for name in groups:
        if name not in own_groups:
            raise SetupError(f"groups: {pipeline.path} has no group {name}. Its groups are {', '.join(own_groups)}.")
    return groups


def _resource_key(names: Names, name: str) -> str:
    return names.resource(name) if name in ("spark", "kafka_io", "pool_io", "sink_io") else name


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
    sinks = [
        _job(
            names,
            names.sink_job(sink.name, table.name),
            # Without the comparison of all rows, which runs in a job of its own.
            AssetSelection.assets(names.sink_key(sink.name, table.name)) - AssetSelection.checks(*_row_keys(names)),
            f"Writes {table.source} to the table {table.name} of {sink.name}, and checks it.",
        )
        for sink in pipeline.sinks
        for table in sink.tables
    ]
    return [*ingest, *staging, *sinks]


def _row_keys(names: Names) -> list[AssetCheckKey]:
    tables = [(sink.name, table.name) for sink in names.pipeline.sinks for table in sink.tables]
    return [AssetCheckKey(names.sink_key(sink, table), ROWS_MATCH) for sink, table in tables]


def _checks_jobs(names: Names, checks: Sequence[AssetChecksDefinition]) -> list[Any]:
    """The jobs of checks alone."""
    pipeline, rows = names.pipeline.name, _row_keys(names)
    keys = [key for definition in checks for key in definition.check_keys if key not in rows]
    description = f"Every check of pipeline {pipeline} that needs no JVM, over everything."
    jobs = [_job(names, names.checks_job, AssetSelection.checks(*keys), description)]
    if rows:
        description = f"Compares every row of the target tables of pipeline {pipeline} with its records, in Spark."
        jobs.append(_job(names, names.rows_job, AssetSelection.checks(*rows), description))
    return jobs


def _job(names: Names, name: str, selection: AssetSelection, description: str) -> Any:
    # All steps of a run are in one process, so that they share one Spark session.
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

    @io_manager(required_resource_keys={spark}, description="Writes to the tables of target databases.")
    def sink_io(context: InitResourceContext) -> SinkIOManager:
        return SinkIOManager(names, getattr(context.resources, spark))

    return {
        spark: spark_resource(names.pipeline),
        names.resource("kafka_io"): kafka_io,
        names.resource("pool_io"): pool_io,
        **({names.resource("sink_io"): sink_io} if names.pipeline.sinks else {}),
    }
