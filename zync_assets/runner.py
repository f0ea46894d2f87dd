"""The steps: planned and committed, again after a conflict, and again until there is nothing left.

The ``zync`` command and Dagster's IO managers commit through the same functions: ``ingest_once``, ``commit_etl`` and
``publish_once``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from threading import Event, Thread
from typing import TypeVar

from zync_assets.conflicts import Log, keep_errors, raise_first, retried
from zync_assets.errors import (
    DataLoss,
    LakeError,
    SparkLost,
    TopicTruncated,
    ZyncError,
)
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.history import rebuild_events
from zync_assets.etl.plan import EtlBatch, EtlCommit, EtlPlan, Rebuild, plan_etl, read_raw, rebuild_plan, transform
from zync_assets.etl.retries import NOTHING, Retry
from zync_assets.etl.rule_changes import refuse_moves, report_changes
from zync_assets.etl.streams import confirm_ends, read_ends, unseen
from zync_assets.etl.views.rebuild import check_definitions, with_known_names
from zync_assets.ingest.commit import RawCommit, commit_raw
from zync_assets.ingest.plan import BATCH_OFFSETS, RawBatch, plan_ingest, read_input, small_inputs
from zync_assets.kafka.topics import Survey, TopicState, survey
from zync_assets.lake import raw, staging
from zync_assets.lake.head import Head
from zync_assets.lake.quarantine_table import Selection, quarantined_records
from zync_assets.offsets import OffsetRange, offset_count, place_text
from zync_assets.pipeline import Pipeline
from zync_assets.publish.commit import PublishCommit, publish
from zync_assets.publish.plan import OutputBatch, plan_publish, read_staging, small_outputs
from zync_assets.quarantine.replay import ReplayCommit, ReplayPlan, commit_drop, commit_replay, plan_drop, plan_replay
from zync_assets.spark.session import Session
from zync_assets.spark.tasks import MANY, side_by_side

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""A function that receives the name of the present work, the finished amount, and the total (records or offsets)."""

TURN_OFFSETS = 1_000_000
"""The most offsets that a batch ingests for a caller that comes again soon. Other topics and steps wait for the batch."""

LOSSES = 5
"""The most losses in a row to Kafka's retention before ingest gives up. A loss: records vanish during the read."""

_log = logging.getLogger(__name__)


def quiet(step: str, count: int, total: int) -> None:
    """Report nothing."""


def ingest_all(
    pipeline: Pipeline,
    session: Session,
    topics: Sequence[str],
    progress: Progress = quiet,
    patience: float | None = None,
    *,
    whole: bool = True,
) -> Iterator[RawCommit]:
    """Ingest each topic up to the end that it had when this began, a commit a batch.

    A topic's error holds back no other topic: it is raised when the others are done. ``patience``: seconds to wait for a
    partition's leader, by default as long as for a broker. ``whole``: False reads one batch of each topic, for a caller that
    comes again soon. True reads the ends again after the ingest (see ``confirm_ends``), and goes on to the later ends. A record
    that came meanwhile would hold back the records that follow it in the source's order.
    """
    troubles: list[ZyncError] = []
    yield from _ingest_to(read_ends(pipeline, patience), pipeline, session, topics, progress, troubles, whole)
    if whole and (later := confirm_ends(pipeline, patience)) is not None:
        yield from _ingest_to(later, pipeline, session, topics, progress, troubles, whole)
    raise_first(troubles)


def _ingest_to(
    topic_ends: Survey,
    pipeline: Pipeline,
    session: Session,
    topics: Sequence[str],
    progress: Progress,
    troubles: list[ZyncError],
    whole: bool,
) -> Iterator[RawCommit]:
    """Ingest each topic up to its end in ``topic_ends``; unless ``whole``, one batch. Adds errors to ``troubles``."""
    troubles += [error for topic, error in topic_ends.errors.items() if topic in topics]
    topics = [topic for topic in topics if topic not in topic_ends.problems]
    once = cache(session)
    small_batches, lone_topics, errors = small_inputs(pipeline, once, topics, topic_ends.states)
    troubles += errors
    limit = BATCH_OFFSETS if whole else TURN_OFFSETS
    works = {
        topic: partial(ingest_once, pipeline, once, topic, topic_ends.states, first=first)
        for topic, first in small_batches.items()
    }
    most = max((batch.plan.lag for batch in small_batches.values()), default=0)
    for topic, (commit, lag) in _side_by_side(once, works, most, lone_topics, troubles):
        if commit is not None:
            progress(f"ingest {topic}", offset_count(commit.ranges), lag)
            yield commit
    for topic in lone_topics:
        total = done_count = 0
        with keep_errors(troubles):
            while True:
                commit, lag = ingest_once(pipeline, session, topic, topic_ends.states, limit=limit)
                if commit is None:
                    break
                total = total or lag
                done_count += offset_count(commit.ranges)
                progress(f"ingest {topic}", done_count, total)
                yield commit
                if not whole:
                    break


def _side_by_side(
    session: Session, works: Mapping[str, Callable[[], T]], most: int, lone_topics: list[str], troubles: list[ZyncError]
) -> Iterator[tuple[str, T]]:
    """Do the work of each topic, and yield each topic with the result of its work.

    ``works``: topic → its work; ``most``: the most new offsets of a topic.
    A topic whose Spark job was lost is added to ``lone_topics``. Another error of a topic is added to ``troubles``.
    """
    if not works:
        return
    for topic, future in zip(works, side_by_side(session(), list(works.values()), most), strict=True):
        with keep_errors(troubles):
            try:
                yield topic, future.result()
            except SparkLost:
                # Perhaps another topic ended Spark's worker. The caller works on this topic again, alone.
                lone_topics.append(topic)


def ingest_once(
    pipeline: Pipeline,
    session: Session,
    topic: str,
    topic_states: Mapping[str, TopicState] | None = None,
    within: Sequence[OffsetRange] | None = None,
    first: RawBatch | None = None,
    log: Log = _log.warning,
    limit: int = BATCH_OFFSETS,
) -> tuple[RawCommit | None, int]:
    """Ingest one batch; the commit, None where nothing is left, and the number of offsets that were left before it.

    ``topic_states``, ``within`` and ``limit``: as for ``plan_ingest``. ``first``: a batch that was read already.
    """

    def read(states: Mapping[str, TopicState] | None = topic_states) -> RawBatch:
        return read_input(
            session, pipeline, plan_ingest(pipeline, topic, within=within, limit=limit, topic_states=states)
        )

    def commit(batch: RawBatch) -> tuple[RawCommit | None, int]:
        for _ in range(LOSSES):
            if batch.plan.nothing_to_do:
                return None, 0
            try:
                return commit_raw(pipeline, batch), batch.plan.lag
            except DataLoss as error:
                if batch.plan.input.on_data_loss == "fail" or isinstance(error, TopicTruncated):
                    raise
                # The pipeline file accepts the loss, which came between the plan and the read: a new plan begins after it.
                log(f"{error}; going on after it")
                batch = read(survey(pipeline.kafka, [topic]).states)
        raise DataLoss(
            f"topic {topic}: retention removed records {LOSSES} times in a row while they were read; raise the topic's"
            " retention, or run it more often."
        )

    return retried(read, commit, lambda batch: batch.plan.state.next if batch.plan.state else None, first, log)


def etl_all(pipeline: Pipeline, session: Session, retry: Retry = NOTHING, *, whole: bool = True) -> Iterator[EtlCommit]:
    """Run ETL for every staging pool until nothing new is found; what ``retry`` asks for is in the first batch.

    A pool's error holds back no other pool: it is raised when the others are done. ``whole``: False runs one batch a pool.
    """
    troubles: list[ZyncError] = []
    for pool in pipeline.staging_pools:
        next_retry = retry
        with keep_errors(troubles):
            while (commit := commit_etl(pipeline, partial(read_etl, pipeline, session, pool, next_retry))) is not None:
                next_retry = NOTHING
                yield commit
                if not whole:
                    break
    raise_first(troubles)


def etl_backlog(pipeline: Pipeline) -> int:
    """The number of offsets that are ingested and new to ETL, summed over the staging pools."""
    total = 0
    for pool in pipeline.staging_pools:
        # Staging is read before raw, so that seen is never past a raw table's next offset.
        state = staging.open_staging(pipeline.lake, pool)
        states = {item.topic: raw.open_raw(pipeline.lake, item.pool, item.topic) for item in pipeline.inputs_of(pool)}
        total += sum(map(offset_count, unseen(states, state.head if state else Head()).values()))
    return total


def read_etl(pipeline: Pipeline, session: Session, pool: str, retry: Retry = NOTHING) -> EtlBatch:
    """The next ETL batch of a staging pool. The batch is lazy and starts no session."""
    return _read_plan(pipeline, session, plan_etl(pipeline, pool, retry))


def _read_plan(pipeline: Pipeline, session: Session, plan: EtlPlan) -> EtlBatch:
    # Each slice asks for the session. The session would set its properties again each time.
    once = cache(session)
    slices = {topic: read_raw(once, pipeline, plan, topic) for topic in plan.ranges}
    return transform(once, plan, slices)


def rebuild_all(
    pipeline: Pipeline, session: Session, kind: Rebuild = "views", topics: Sequence[str] = ()
) -> Iterator[EtlCommit]:
    """Compute the outputs of views and event rules again, in each staging pool, and stage the differences.

    ``kind``: of the views, see ``EtlPlan``. ``topics``: the output topics whose rules are rebuilt; empty: all.
    """

    def read(pool: str) -> EtlBatch:
        return _read_plan(pipeline, session, rebuild_plan(pipeline, pool, kind))

    for pool in pipeline.staging_pools:
        if any(rule.tables and (not topics or rule.out in topics) for rule in pipeline.rules_of(pool)):
            commit = commit_etl(pipeline, partial(read, pool))
            if commit is not None:
                yield commit
        yield from rebuild_events(pipeline, session, pool, tuple(topics))


def commit_etl(
    pipeline: Pipeline, read: Callable[[], EtlBatch], first: EtlBatch | None = None, log: Log = _log.warning
) -> EtlCommit | None:
    """Commit one ETL batch; None if there is nothing to do. ``first``: a batch that was read already."""
    return retried(read, partial(_commit_staging, pipeline, log), lambda batch: batch.plan.head.batch, first, log)


def _commit_staging(pipeline: Pipeline, log: Log, batch: EtlBatch) -> EtlCommit | None:
    plan, place = batch.plan, (pipeline.name, pipeline.lake, batch.plan.pool)
    refuse_moves(pipeline, plan.pool, plan.head)
    # The edit of an idle pool is news once the next batch goes by the new rules.
    report_changes(pipeline, plan.pool, plan.head, None if plan.nothing_to_do else log)
    if plan.nothing_to_do:
        # A view that was edited while nothing is new does not wait for the next record to be an error.
        check_definitions(with_known_names(pipeline, plan.pool, plan.raw, plan.state), plan.pool, plan.head)
        return None
    if plan.head.batch < _batches.get(place, math.inf):
        _refuse_older_copy(pipeline, plan.pool)
    commit = commit_staging(pipeline, batch)
    _batches[place] = commit.batch
    return commit


ASK_SECONDS = 20.0
"""How long ETL waits for the targets together."""
_batches: dict[tuple[str, str, str], int] = {}
"""Pipeline, lake, staging pool → the last batch of this process. A lower number is of a lake that came from an older copy."""


def _refuse_older_copy(pipeline: Pipeline, pool: str) -> None:
    """LakeError if a target table has outputs that a staging pool lacks, since the lake came from an older copy. ETL might give
    their numbers to other outputs, which the table would lack for ever. A target that can't be asked tells nothing. ETL waits
    for no frozen target, and for no target behind it."""
    places = [(sink, table) for sink in pipeline.sinks for table in sink.tables if table.staged and table.pool == pool]
    if not places:
        return
    from zync_assets.sinks.plan import plan_sink, reset_command

    commands, silent, is_over = list[str](), set[str](), Event()

    def ask() -> None:
        for sink, table in places:
            try:
                plan = None if sink.name in silent else plan_sink(pipeline, sink, table, check=False)
            except Exception:
                # A user's own class may raise anything.
                silent.add(sink.name)
                continue
            if is_over.is_set():
                return
            if plan is not None and plan.progress.origin == plan.origin and plan.is_ahead:
                commands.append(reset_command(plan))

    asker = Thread(target=ask, name="zync-older-copy", daemon=True)
    asker.start()
    asker.join(ASK_SECONDS)
    is_over.set()
    if commands:
        raise LakeError(
            f"pool {pool}: target tables have outputs that staging lacks: it went back to an older version. Nothing was done. Put"
            f" the newer table back; or, to go on from what staging holds, load the target tables again: {'; '.join(commands)}"
        )


def replay_all(pipeline: Pipeline, session: Session, selection: Selection) -> Iterator[ReplayCommit | EtlCommit]:
    """Replay the selected records of quarantine.

    Ingest's quarantine comes first: records that can be decoded now go into the raw tables. ETL then matches these records,
    and matches the selected records again that a rule failed on.
    """
    for item in pipeline.inputs:
        if not selection.topics or item.topic in selection.topics:
            commit = retried(
                partial(plan_replay, pipeline, item, selection), partial(_commit_replay, pipeline, session)
            )
            if commit is not None:
                yield commit
    yield from etl_all(pipeline, session, Retry(failed=selection))


def _commit_replay(pipeline: Pipeline, session: Session, plan: ReplayPlan | None) -> ReplayCommit | None:
    return None if plan is None else commit_replay(session(), pipeline, plan)


def drop_all(pipeline: Pipeline, selection: Selection) -> int:
    """Move the selected records from quarantine to the class dropped; returns their number. Needs no JVM.

    Raises ZyncError for a record whose topic no rule reads, because no staging pool keeps an account of the topic.
    """
    for record in quarantined_records(pipeline, selection):
        if not pipeline.readers_of(record.topic) and record.stage != "etl":
            raise ZyncError(
                f"{place_text(*record.place)} can't be dropped: no rule reads"
                " the topic, so that there is no account of its records. Nothing was dropped. Name other topics with --topic,"
                f" or give this one a rule and run {pipeline.command('etl')}"
            )
    places: set[tuple[str, int, int]] = set()
    for pool in pipeline.staging_pools:
        places |= retried(partial(plan_drop, pipeline, pool, selection), commit_drop)
    return len(places)


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
    once = cache(session)
    if len(topics) < MANY:
        errors = {} if patience is None else survey(pipeline.kafka, topics, patience=patience).errors
        small_batches, lone_topics = dict[str, OutputBatch](), [topic for topic in topics if topic not in errors]
        troubles: list[ZyncError] = list(errors.values())
    else:
        small_batches, lone_topics, troubles = small_outputs(pipeline, once, topics, patience)
    works = {
        topic: partial(publish_once, pipeline, partial(read_output, pipeline, once, topic), first=first)
        for topic, first in small_batches.items()
    }
    most = max((batch.plan.lag for batch in small_batches.values()), default=0)
    for topic, commit in _side_by_side(once, works, most, lone_topics, troubles):
        if commit is not None:
            progress(f"publish {topic}", commit.records, commit.records)
            yield commit
    for topic in lone_topics:
        with keep_errors(troubles):
            topic_progress = partial(progress, f"publish {topic}")
            commit = publish_once(pipeline, partial(read_output, pipeline, session, topic), topic_progress)
            if commit is not None:
                yield commit
    raise_first(troubles)


def read_output(pipeline: Pipeline, session: Session, topic: str) -> OutputBatch:
    """The staged records that Kafka lacks now. The batch is lazy and starts no session."""
    return read_staging(session, plan_publish(pipeline, topic))


def publish_once(
    pipeline: Pipeline,
    read: Callable[[], OutputBatch],
    progress: Callable[[int, int], None] | None = None,
    first: OutputBatch | None = None,
    log: Log = _log.warning,
) -> PublishCommit | None:
    """Publish one batch; None if there is nothing to do. ``first``: a batch that was read already."""

    def commit(batch: OutputBatch) -> PublishCommit | None:
        return None if batch.plan.nothing_to_do else publish(pipeline, batch, progress)

    return retried(read, commit, first=first, log=log)
