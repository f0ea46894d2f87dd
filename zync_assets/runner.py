"""The steps, again and again until there is nothing left: what the ``zync`` command runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from zync_assets.errors import (
    BrokerUnavailable,
    CommitConflict,
    DataLoss,
    LakeUnavailable,
    RegistryUnavailable,
    SetupError,
    SparkLost,
    SparkUnavailable,
    TrustError,
    ZyncError,
)
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.plan import EtlCommit, plan_etl, read_raw, transform
from zync_assets.etl.retries import NOTHING, Retry
from zync_assets.ingest.commit import RawCommit, commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.topics import TopicState, survey
from zync_assets.lake.quarantine import Selection, held
from zync_assets.pipeline import Input, Pipeline
from zync_assets.publish.commit import PublishCommit, publish
from zync_assets.publish.plan import plan_publish, read_staging
from zync_assets.quarantine.replay import ReplayCommit, commit_replay, drop_once, plan_replay
from zync_assets.spark.session import Session

Progress = Callable[[str, int, int], None]
"""A function that receives the name of the present work, the finished amount, and the total (records or offsets)."""

CONFLICTS = 5
"""The most commit conflicts in a row before a step gives up."""

LOSSES = 5
"""The most losses in a row to Kafka's retention before ingest gives up. A loss: records vanish during the read."""

EVERYWHERE = (RegistryUnavailable, SetupError, TrustError)
"""Errors that every topic and every pool would have."""

PASSING = (BrokerUnavailable, RegistryUnavailable, LakeUnavailable, SparkUnavailable, SparkLost)
"""Errors that may pass by themselves: the command ``run`` waits them out."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


def quiet(what: str, done: int, total: int) -> None:
    """Tells nobody."""


def ingest_all(
    pipeline: Pipeline,
    session: Session,
    topics: Sequence[str],
    progress: Progress = quiet,
    patience: float | None = None,
) -> Iterator[RawCommit]:
    """Ingest each topic up to the end that it had when this began, a commit a batch.

    A topic's error holds back no other topic: it is raised when the others are done. ``patience``: seconds to wait for a
    partition's leader, by default as long as for a broker.
    """
    known = survey(pipeline.kafka, topics, patience=patience)
    troubles: list[ZyncError] = list(known.errors.values())
    for topic in topics:
        if topic in known.problems:
            continue
        total = done = 0
        try:
            while True:
                made, lag = _retried(lambda topic=topic: _ingest_once(pipeline, session, topic, known.states))
                if made is None:
                    break
                total = total or lag
                done += sum(part.end - part.first for part in made.ranges)
                progress(f"ingest {topic}", done, total)
                yield made
        except EVERYWHERE:
            raise
        except ZyncError as error:
            troubles.append(error)
    _raise_first(troubles)


def _ingest_once(
    pipeline: Pipeline, session: Session, topic: str, known: Mapping[str, TopicState]
) -> tuple[RawCommit | None, int]:
    for _ in range(LOSSES):
        plan = plan_ingest(pipeline, topic, known=known)
        if plan.nothing_to_do:
            return None, 0
        try:
            return commit_raw(pipeline, read_input(session(), pipeline, plan)), plan.lag
        except DataLoss as error:
            if plan.input.on_data_loss == "fail":
                raise
            # Accepted, and it came between the plan and the read: a new plan begins after it.
            _log.warning("%s; going on after it", error)
            known = survey(pipeline.kafka, [topic]).states
    raise DataLoss(
        f"topic {topic}: retention removed records {LOSSES} times in a row while they were read; raise the topic's retention,"
        " or run it more often."
    )


def etl_all(pipeline: Pipeline, session: Session, retry: Retry = NOTHING) -> Iterator[EtlCommit]:
    """Run ETL for every staging pool until nothing new is found; what ``retry`` asks for is in the first batch.

    A pool's error holds back no other pool: it is raised when the others are done.
    """
    troubles: list[ZyncError] = []
    for pool in pipeline.staging_pools:
        asked = retry
        try:
            while (
                made := _retried(lambda pool=pool, asked=asked: etl_once(pipeline, session, pool, asked))
            ) is not None:
                asked = NOTHING
                yield made
        except EVERYWHERE:
            raise
        except ZyncError as error:
            troubles.append(error)
    _raise_first(troubles)


def etl_once(pipeline: Pipeline, session: Session, pool: str, retry: Retry = NOTHING) -> EtlCommit | None:
    """One ETL batch; None if there is nothing new, nor anything to look at again."""
    plan = plan_etl(pipeline, pool, retry)
    if plan.nothing_to_do:
        return None
    spark = session()
    slices = {topic: read_raw(spark, pipeline, plan, topic) for topic in plan.ranges}
    return commit_staging(pipeline, transform(spark, pipeline, plan, slices))


def replay_all(pipeline: Pipeline, session: Session, selection: Selection) -> Iterator[ReplayCommit | EtlCommit]:
    """Replay the selected records of quarantine.

    Ingest's quarantine comes first: records that can be decoded now go into the raw tables. ETL then matches these records,
    and matches the selected records again that a rule failed on.
    """
    for item in pipeline.inputs:
        if not selection.topics or item.topic in selection.topics:
            made = _retried(lambda item=item: _replay_once(pipeline, session, item, selection))
            if made is not None:
                yield made
    yield from etl_all(pipeline, session, Retry(failed=selection))


def _replay_once(pipeline: Pipeline, session: Session, item: Input, selection: Selection) -> ReplayCommit | None:
    plan = plan_replay(pipeline, item, selection)
    return None if plan is None else commit_replay(session(), pipeline, plan)


def drop_all(pipeline: Pipeline, selection: Selection) -> int:
    """Move the selected records from quarantine to the class dropped; returns their number. Needs no JVM.

    Raises ZyncError for a record whose topic no rule reads, because no staging pool keeps an account of the topic.
    """
    for record in held(pipeline, selection):
        if not pipeline.readers_of(record.topic) and record.stage != "etl":
            raise ZyncError(
                f"topic {record.topic}, partition {record.partition}, offset {record.offset} can't be dropped: no rule reads"
                " the topic, so that there is no account of its records. Nothing was dropped. Name other topics with --topic,"
                f" or give this one a rule and run {pipeline.command('etl')}"
            )
    dropped: set[tuple[str, int, int]] = set()
    for pool in pipeline.staging_pools:
        dropped |= _retried(lambda pool=pool: drop_once(pipeline, pool, selection))
    return len(dropped)


def publish_all(
    pipeline: Pipeline,
    session: Session,
    topics: Sequence[str],
    progress: Progress = quiet,
    patience: float | None = None,
) -> Iterator[PublishCommit]:
    """Publish each output topic up to the end in staging at the start of the topic.

    A topic's error does not stop the other topics: the error is raised at the end. ``patience``: seconds to wait for a
    partition's leader; default: as long as for a broker.
    """
    known = {} if patience is None else survey(pipeline.kafka, topics, patience=patience).errors
    troubles: list[ZyncError] = list(known.values())
    for topic in topics:
        if topic in known:
            continue
        try:
            made = _retried(lambda topic=topic: _publish_once(pipeline, session, topic, progress))
        except EVERYWHERE:
            raise
        except ZyncError as error:
            troubles.append(error)
            continue
        if made is not None:
            yield made
    _raise_first(troubles)


def _raise_first(troubles: Sequence[ZyncError]) -> None:
    """The first of the errors of several topics or pools, one that stays before one that may pass; the others are logged."""
    if troubles:
        lasting = [error for error in troubles if not isinstance(error, PASSING)]
        first = (lasting or list(troubles))[0]
        for error in dict.fromkeys(map(str, troubles)):
            if error != str(first):
                _log.warning("%s", error)
        raise first


def _publish_once(pipeline: Pipeline, session: Session, topic: str, progress: Progress) -> PublishCommit | None:
    plan = plan_publish(pipeline, topic)
    if plan.nothing_to_do:
        return None
    batch = read_staging(session(), pipeline, plan)
    return publish(pipeline, batch, lambda done, total: progress(f"publish {topic}", done, total))


def _retried(once: Callable[[], T]) -> T:
    """Plan and commit again when another writer was first: its commit is as good as ours."""
    for _ in range(CONFLICTS):
        try:
            return once()
        except CommitConflict as error:
            _log.warning("%s; going on after it", error)
    return once()
