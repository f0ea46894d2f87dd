"""What a sensor looks at: how far topics, raw tables, staging tables and output topics are. No JVM, no records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zync_assets.errors import BrokerUnavailable, ZyncError
from zync_assets.kafka.topics import TopicState, topic_states
from zync_assets.pipeline import Pipeline
from zync_assets.steps.etl import EtlPlan, plan_etl
from zync_assets.steps.ingest import IngestPlan, plan_ingest
from zync_assets.steps.publish import PublishPlan, plan_publish

BROKER_SECONDS = 5.0
"""How long a sensor waits for the broker."""


@dataclass(frozen=True)
class Facts:
    """Plans by input topic, staging pool and output topic. One that can't be made is in ``problems`` instead."""

    topics: Mapping[str, TopicState]
    ingest: Mapping[str, IngestPlan]
    etl: Mapping[str, EtlPlan]
    publish: Mapping[str, PublishPlan]
    problems: Mapping[str, str] = field(default_factory=dict)
    """Topic or pool → what is wrong."""


def gather(pipeline: Pipeline) -> Facts:
    """The facts of a pipeline now. Raises BrokerUnavailable."""
    names = [item.topic for item in pipeline.inputs] + [item.topic for item in pipeline.outputs]
    topics = topic_states(pipeline.kafka, names, BROKER_SECONDS)
    ingest: dict[str, IngestPlan] = {}
    etl: dict[str, EtlPlan] = {}
    publish: dict[str, PublishPlan] = {}
    problems: dict[str, str] = {}
    # Staging before raw before topics would do too: whatever moves meanwhile is seen by the next look.
    for item in pipeline.inputs:
        try:
            ingest[item.topic] = plan_ingest(pipeline, item.topic, known=topics)
        except BrokerUnavailable:
            raise
        except ZyncError as error:
            problems[item.topic] = str(error)
    for pool in pipeline.staging_pools:
        try:
            etl[pool] = plan_etl(pipeline, pool)
        except ZyncError as error:
            problems[pool] = str(error)
    for output in pipeline.outputs:
        try:
            publish[output.topic] = plan_publish(pipeline, output.topic)
        except BrokerUnavailable:
            raise
        except ZyncError as error:
            problems[output.topic] = str(error)
    return Facts(topics, ingest, etl, publish, problems)
