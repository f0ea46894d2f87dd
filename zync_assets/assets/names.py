"""How the parts of a pipeline are called in Dagster.

Asset keys hold pool and topic as they are. Dagster's other names take letters, digits and underscores alone, so a
topic's other characters are spelled out there, each in a way of its own: ``a.b`` and ``a_b`` stay two names.
"""

from __future__ import annotations

import re

from dagster import AssetKey

from zync_assets.pipeline import Pipeline

KAFKA = "kafka"
"""The first part of a topic's asset key; no pool can be called that."""

PIPELINE_TAG = "zync/pipeline"
"""On every job and so on every run of it: the pipeline's name."""
STEP_TAG = "zync/step"
"""On the runs that the sensor asked for: the job that was asked for."""
REST = "rest of "
"""Before the job in STEP_TAG: without the assets whose ops failed in the job's last run."""

_SPELLED = {"_": "__", ".": "_dot_", "-": "_dash_"}


def identifier(name: str) -> str:
    """A topic's or pipeline's name in letters, digits and underscores; different names give different ones."""
    return re.sub(r"[._-]", lambda found: _SPELLED[found[0]], name)


def argument(topic: str) -> str:
    """A topic as an input or output of an op; some plain words are taken there."""
    return f"of_{identifier(topic)}"


def topic_key(topic: str) -> AssetKey:
    """The asset of a Kafka topic: ``kafka/<topic>``."""
    return AssetKey([KAFKA, topic])


def pool_key(pool: str, topic: str) -> AssetKey:
    """The asset of a topic in a pool: ``<Pool>/<topic>``."""
    return AssetKey([pool, topic])


def raw_partitions(pipeline: str, pool: str, topic: str) -> str:
    """The name of the partitions definition that ``kafka/<topic>`` and ``<Pool>/<topic>`` share; instance-wide."""
    return f"{pipeline}/{pool}/{topic}"


def staging_partitions(pipeline: str, pool: str) -> str:
    """The name of the partitions definition of a staging pool's topics and their ``kafka/*``; instance-wide."""
    return f"{pipeline}/{pool}"


def ingest_job(topic: str) -> str:
    return f"ingest_{identifier(topic)}"


def staging_job(pool: str) -> str:
    return f"etl_and_publish_{pool}"


def staged_assets(pipeline: Pipeline, pool: str) -> list[AssetKey]:
    """The topics of a staging pool; none where another file has their rules."""
    return [pool_key(pool, item.topic) for item in pipeline.outputs_of(pool)] if pipeline.rules_of(pool) else []


def staging_job_assets(pipeline: Pipeline, pool: str) -> list[AssetKey]:
    """The assets of a staging pool's job: the pool's topics, unless another file has their rules, and ``kafka/*``."""
    return [*staged_assets(pipeline, pool), *(topic_key(item.topic) for item in pipeline.outputs_of(pool))]


def checks_job(pipeline: str) -> str:
    return f"check_{identifier(pipeline)}"


def sensor_name(pipeline: str) -> str:
    return f"zync_{identifier(pipeline)}"


def read_op(topic: str) -> str:
    return f"raw_{identifier(topic)}"


def etl_op(pool: str) -> str:
    return f"staging_{pool}"


def publish_op(topic: str) -> str:
    return f"topic_{identifier(topic)}"


def check_op(check: str, asset: AssetKey) -> str:
    return f"check_{check}_{'_of_'.join(identifier(part) for part in reversed(asset.path))}"
