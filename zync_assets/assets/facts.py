"""The facts of a sensor's tick: the progress of topics, raw tables, staging tables and output topics. Reads no records, and
needs no JVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from zync_assets.assets.failure import said
from zync_assets.errors import BrokerUnavailable, LeaderMissing, SetupError, TrustError
from zync_assets.kafka.topics import survey
from zync_assets.pipeline import Pipeline
from zync_assets.steps.etl import EtlPlan, plan_etl
from zync_assets.steps.ingest import LEADER_SECONDS, IngestPlan, plan_ingest
from zync_assets.steps.publish import PublishPlan, plan_publish

BROKER_SECONDS = 5.0
"""How long a sensor waits for the broker."""
BROKER = "broker"
"""The place of a problem that all topics have."""

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """Plans by input topic, staging pool and output topic. One that can't be made is in ``problems`` instead."""

    ingest: Mapping[str, IngestPlan]
    etl: Mapping[str, EtlPlan]
    publish: Mapping[str, PublishPlan]
    problems: Mapping[str, str] = field(default_factory=dict[str, str])
    """Asset path of a topic or table, or pool, or BROKER → what is wrong, with the remedy."""
    unreachable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Input topic → why the broker says nothing of it, or of one of its partitions."""


def gather(pipeline: Pipeline) -> Facts:
    """The facts of a pipeline now. A topic or table with a problem hides no other one."""
    try:
        return _gather(pipeline)
    except (BrokerUnavailable, SetupError, TrustError) as error:
        away = f"No broker, so nothing is known of the topics: {error}"
        return Facts({}, {}, {}, {BROKER: away}, {item.topic: str(error) for item in pipeline.inputs})


def _gather(pipeline: Pipeline) -> Facts:
    names = [item.topic for item in (*pipeline.inputs, *pipeline.outputs)]
    known = survey(pipeline.kafka, names, BROKER_SECONDS, LEADER_SECONDS)
    unled = known.errors
    problems = {f"kafka/{topic}": str(error) for topic, error in unled.items()}
    unreachable = {item.topic: str(unled[item.topic]) for item in pipeline.inputs if item.topic in unled}
    ingest: dict[str, IngestPlan] = {}
    etl: dict[str, EtlPlan] = {}
    publish: dict[str, PublishPlan] = {}

    def put(plans: dict[str, T], name: str, place: str, plan: Callable[[], T]) -> None:
        try:
            plans[name] = plan()
        except LeaderMissing as error:
            problems.setdefault(place, str(error))
        except (BrokerUnavailable, SetupError, TrustError):
            raise
        except Exception as error:
            # Whatever it is, the other topics and tables go on.
            problems[place] = said(error)

    # Staging before raw before topics would do too: whatever moves meanwhile is seen by the next look.
    for item in pipeline.inputs:
        topic = item.topic
        if topic not in known.problems:
            put(
                ingest,
                topic,
                f"{item.pool}/{topic}",
                lambda topic=topic: plan_ingest(pipeline, topic, known=known.states),
            )
        if topic not in known.problems and topic not in known.states and topic not in ingest:
            unreachable[topic] = problems[f"{item.pool}/{topic}"]
    for pool in pipeline.staging_pools:
        put(etl, pool, pool, lambda pool=pool: plan_etl(pipeline, pool))
    for item in pipeline.outputs:
        if item.topic not in unled:
            put(publish, item.topic, f"kafka/{item.topic}", lambda topic=item.topic: plan_publish(pipeline, topic))
    return Facts(ingest, etl, publish, problems, unreachable)
