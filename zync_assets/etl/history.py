"""The raw history once more: scratch pools, into which rules transform the raw records from the first one on.

``zync diff`` compares two scratch pools, and ``zync rebuild`` compares one with the staged outputs. The outputs of a scratch pool
have names that Kafka does not have, and one partition each: their order is the order in which they were made. Nothing of a
scratch pool is published or registered.

The scratch pool of a rebuild is in the lake, below ``~rebuild``. After a kill, the next rebuild goes on with its last batch. The
names of its output topics hold a digest of rules, inputs and outputs: a scratch pool of another file is removed. A scratch pool
that lacks records of a replay below its *seen* is removed too.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from zync_assets.conflicts import retried
from zync_assets.crashes import crash_point
from zync_assets.errors import EtlError
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.encodability import output_limits
from zync_assets.etl.plan import EtlBatch, EtlCommit, EtlPlan, Recomputed, plan_etl, read_raw, transform
from zync_assets.etl.rebuild import event_rules, rebuild_events_plan
from zync_assets.kafka.topics import RecordLimits
from zync_assets.lake import raw, staging, storage, tables
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import CreateTopic, Output, Pipeline
from zync_assets.spark.session import Session

_log = logging.getLogger(__name__)


def scratch(pipeline: Pipeline, prefix: str, lake: str, limits: Mapping[str, RecordLimits] | None = None) -> Pipeline:
    """The pipeline with scratch pools in ``lake``. ``prefix``: of the names of its output topics; ``limits``: output topic → the
    records that it takes."""

    def output(item: Output) -> Output:
        topic_limits = (limits or {}).get(item.topic)
        config = {} if topic_limits is None else topic_limits.config
        create = CreateTopic(1, 1, config)
        return replace(
            item, topic=prefix + item.topic, create=create, start_at="empty", partition_by=None, is_scratch=True
        )

    return replace(
        pipeline,
        lake=lake,
        inputs=tuple(replace(item, retention_ms=None) for item in pipeline.inputs),
        outputs=tuple(map(output, pipeline.outputs)),
        rules=tuple(replace(rule, out=prefix + rule.out) for rule in pipeline.rules),
        sinks=(),
    )


def removed_records(topic: str, table: RawState, firsts: Mapping[int, int]) -> Iterator[str]:
    """The records of a topic, from ``firsts`` on (partition → offset), that retention removed from its raw table."""
    for partition, start in sorted(table.retention_start.items()):
        first = firsts.get(partition, 0)
        if start > first:
            yield f"topic {topic}, partition {partition}, offsets {first} to {start - 1}"


def rebuild_events(pipeline: Pipeline, session: Session, pool: str, topics: tuple[str, ...]) -> Iterator[EtlCommit]:
    """Rebuild the outputs of a pool's event rules (``etl.rebuild``): the commits of the scratch pool, and the commit of what
    differs, if there is any. ``topics``: the output topics; empty: all.

    EtlError if retention removed raw records that the account has, or if records wait for the frontier of their source.
    """
    outs = [rule.out for rule in event_rules(pipeline, pool)]
    out_topics = tuple(dict.fromkeys(topic for topic in outs if not topics or topic in topics))
    if not out_topics or staging.open_staging(pipeline.lake, pool) is None:
        return
    if names := [rule.name for rule in event_rules(pipeline, pool) if rule.lookups and rule.out in out_topics]:
        _log.warning(
            "pool %s: %s see rows as they are now. An output changes if a row that it looked up has changed since. If the row is"
            " gone, a tombstone may take the output back.",
            pool,
            ", ".join(names),
        )
    prefix = f"zync-rebuild-{_digest(pipeline, pool)}."
    scratch_pipeline = _scratch_pool(pipeline, pool, prefix)
    uri = storage.staging_uri(pipeline.lake, scratch_pipeline.staging_pools[0])
    _remove_other_pool(scratch_pipeline, uri, prefix, pipeline, pool)
    yield from _recomputed_commits(scratch_pipeline, session, pipeline, pool)
    if staging.open_staging(scratch_pipeline.lake, scratch_pipeline.staging_pools[0]) is None:
        # The account has no record of the rules' inputs.
        return
    other_commits: list[EtlCommit] = []

    def read() -> Recomputed:
        real = staging.open_staging(pipeline.lake, pool)
        # What another process committed meanwhile.
        other_commits.extend(_recomputed_commits(scratch_pipeline, session, pipeline, pool))
        crash_point("rebuild:recomputed")
        state = staging.open_staging(scratch_pipeline.lake, scratch_pipeline.staging_pools[0])
        assert state is not None
        assert real is not None
        return Recomputed(state, prefix, out_topics, real.head.replayed)

    def commit(recomputed: Recomputed) -> EtlCommit | None:
        plan = rebuild_events_plan(pipeline, pool, recomputed)
        etl_commit = commit_staging(pipeline, _batch(pipeline, session, plan))
        return etl_commit if etl_commit.batch > plan.head.batch else None

    last_commit = retried(read, commit)
    yield from other_commits
    if last_commit is not None:
        yield last_commit
    crash_point("rebuild:committed")
    tables.remove_table(uri)


def _digest(pipeline: Pipeline, pool: str) -> str:
    """A digest of what the outputs of a pool's event rules depend on."""
    inputs = [replace(item, retention_ms=None) for item in pipeline.inputs]
    about = pipeline.unavailable_value, pipeline.missing_field, pipeline.order_delay
    text = repr((event_rules(pipeline, pool), inputs, pipeline.outputs_of(pool), about))
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _scratch_pool(pipeline: Pipeline, pool: str, prefix: str) -> Pipeline:
    """The event rules of a pool with a scratch pool for their outputs."""
    rules = event_rules(pipeline, pool)
    outs = {rule.out for rule in rules}
    outputs = tuple(replace(item, pool=f"~rebuild/{pool}") for item in pipeline.outputs if item.topic in outs)
    # A commit of the scratch pool may end within a transaction, because no consumer reads the pool.
    event_pipeline = replace(pipeline, outputs=outputs, rules=rules, transactions=None, on_rule_change="continue")
    return scratch(event_pipeline, prefix, pipeline.lake, output_limits(pipeline, outs))


def _remove_other_pool(scratch_pipeline: Pipeline, uri: str, prefix: str, pipeline: Pipeline, pool: str) -> None:
    """Remove a scratch pool that is of another pipeline file, or of an account that was restored to an earlier version. Also
    remove a scratch pool whose records looked up rows, if ETL has taken newer records of the looked-up table."""
    state, real = (
        staging.open_staging(scratch_pipeline.lake, scratch_pipeline.staging_pools[0]),
        staging.open_staging(pipeline.lake, pool),
    )
    if state is None or real is None:
        return
    offsets, own_offsets = _seen_offsets(real), _seen_offsets(state)
    ahead = any(offset > offsets.get(place, 0) for place, offset in own_offsets.items())
    looked_up = {item.table.topic for rule in event_rules(pipeline, pool) for item in rule.lookups}
    rows_came = any(place[0] in looked_up and own_offsets.get(place, 0) < offset for place, offset in offsets.items())
    if ahead or rows_came or any(not topic.startswith(prefix) for topic, _ in state.head.outputs):
        tables.remove_table(uri)


def _seen_offsets(state: StagingState) -> dict[tuple[str, int], int]:
    return {place: item.seen for place, item in state.head.inputs.items()}


def _batch(pipeline: Pipeline, session: Session, plan: EtlPlan) -> EtlBatch:
    return transform(session, plan, {topic: read_raw(session, pipeline, plan, topic) for topic in plan.ranges})


def _recomputed_commits(
    scratch_pipeline: Pipeline, session: Session, pipeline: Pipeline, pool: str
) -> Iterator[EtlCommit]:
    """Transform the records in the pool's account into the scratch pool, with one commit for each batch."""
    scratch_pool = scratch_pipeline.staging_pools[0]
    while True:
        state = staging.open_staging(pipeline.lake, pool)
        assert state is not None
        _check_history(scratch_pipeline, pipeline, state)
        until = _seen_offsets(state)

        def read(until: Mapping[tuple[str, int], int] = until) -> EtlBatch:
            plan = plan_etl(scratch_pipeline, scratch_pool, until=until)
            if any(item.kind == "quarantined" for item in plan.retries.parts):
                # A replay since the last batch. Its records would come after later records: the scratch pool begins again.
                tables.remove_table(storage.staging_uri(scratch_pipeline.lake, scratch_pool))
                plan = plan_etl(scratch_pipeline, scratch_pool, until=until)
            return _batch(scratch_pipeline, session, plan)

        commit = retried(
            read, lambda batch: None if batch.plan.nothing_to_do else commit_staging(scratch_pipeline, batch)
        )
        if commit is None:
            _check_reached(scratch_pipeline, state)
            return
        yield replace(commit, outputs={})


def _check_history(scratch_pipeline: Pipeline, pipeline: Pipeline, state: StagingState) -> None:
    """EtlError if retention removed raw records that the account has, or may be about to."""
    removed_ranges: list[str] = []
    for item in scratch_pipeline.inputs_of(scratch_pipeline.staging_pools[0]):
        table = raw.open_raw(scratch_pipeline.lake, item.pool, item.topic)
        firsts = {part: position.first for (topic, part), position in state.head.inputs.items() if topic == item.topic}
        if table is not None:
            starts = {
                part: max(table.retention_start.get(part, 0), state.released(item.topic, part)) for part in firsts
            }
            removed_ranges += removed_records(item.topic, replace(table, retention_start=starts), firsts)
    if removed_ranges:
        raise EtlError(
            f"retention removed raw records that the account has: {'; '.join(removed_ranges)}. Nothing was rebuilt."
            " Restore the raw tables to versions with these records, or go on with the outputs as they are. The"
            f" effect of an edit on new records is that of {pipeline.command('etl')}"
        )


def _check_reached(scratch_pipeline: Pipeline, state: StagingState) -> None:
    """EtlError if the scratch pool lacks records that are in the pool's account."""
    scratch_state = staging.open_staging(scratch_pipeline.lake, scratch_pipeline.staging_pools[0])
    seen_offsets = {} if scratch_state is None else _seen_offsets(scratch_state)
    topics = {item.topic for item in scratch_pipeline.inputs_of(scratch_pipeline.staging_pools[0])}
    for (topic, partition), item in sorted(state.head.inputs.items()):
        next_offset = seen_offsets.get((topic, partition), item.first)
        if topic in topics and next_offset < item.seen:
            raise EtlError(
                f"topic {topic}, partition {partition}: offsets {next_offset} to {item.seen - 1} were transformed before, and"
                " wait for the frontier of their source now. Nothing was rebuilt. Ingest the new topics of the file, and run it"
                " again."
            )
