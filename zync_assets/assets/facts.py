"""The facts of a pipeline for a tick of the sensor, the steps that are due by the facts, and errors as Dagster shows them.

The facts are the progress of topics, raw tables, staging tables and output topics. They come from logs and watermarks. No
record is read, and no JVM starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from dagster import AssetCheckEvaluation, AssetCheckSeverity, AssetKey, DagsterError, DagsterInstance, Failure

from zync_assets.assets.names import AWAITS_TAG, LONG_LOAD_TAG, Names, clusters, on_grid, spans_between
from zync_assets.audit.guard import pool_blocks, raw_blocks
from zync_assets.checks import remote_checks
from zync_assets.checks.remote_checks import sink_subject
from zync_assets.errors import BrokerUnavailable, KafkaError, LeaderMissing, SetupError, TrustError, ZyncError
from zync_assets.etl.plan import EtlPlan, plan_etl
from zync_assets.etl.streams import keep_ends
from zync_assets.ingest.plan import LEADER_SECONDS, IngestPlan, plan_ingest
from zync_assets.kafka.topics import survey
from zync_assets.lake.check_results import Block, CheckResult
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange, key_of, keys_over
from zync_assets.pipeline import Pipeline, Sink, SinkTable, pool_path, topic_path
from zync_assets.publish.plan import PublishPlan, plan_publish, read_output_ends
from zync_assets.sinks.plan import SinkPlan
from zync_assets.sinks.replay import Spot, late_spots
from zync_assets.sinks.steps import planned
from zync_assets.spark.tasks import SMALL_OFFSETS


class TickFailure(DagsterError):
    """A problem that lasts, as the error of a sensor's tick. Dagster shows an error of its own family as it is."""


@contextmanager
def errors_as_failures() -> Generator[None]:
    """Within it an error of this package fails the step with its message alone, without a stack trace."""
    try:
        yield
    except ZyncError as error:
        raise Failure(str(error)) from None


def error_line(error: Exception) -> str:
    """An error in a line: the message of this package's errors, with the type's name before that of any other."""
    text = str(error).strip()
    if isinstance(error, ZyncError):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


@contextmanager
def topic_check_on_error(names: Names, instance: DagsterInstance, topic: str) -> Generator[None]:
    """Within it, an error also runs the topic's check over all that is not verified, and reports the result.

    Dagster skips the check of an asset whose step failed, and this check alone names the record that stands in the way.
    """
    try:
        yield
    except ZyncError:
        instance.report_runless_asset_event(topic_evaluation(names, topic))
        raise


def topic_evaluation(names: Names, topic: str, why: str | None = None) -> AssetCheckEvaluation:
    """The result of an output topic's check now, over all that is not verified. ``why``: a known failure."""
    look = partial(remote_checks.staging_equals_topic, names.pipeline, topic, backlog=True)
    return _evaluation(names.topic_key(topic), remote_checks.STAGING_EQUALS_TOPIC, look, why)


def table_evaluation(names: Names, sink: Sink, table: SinkTable, why: str | None = None) -> AssetCheckEvaluation:
    """The result of the check of a target table's position now. ``why``: a known failure."""
    look = partial(remote_checks.sink_position, names.pipeline, sink, table)
    return _evaluation(names.sink_key(sink.name, table.name), remote_checks.SINK_POSITION, look, why)


def _evaluation(key: AssetKey, name: str, look: Callable[[], CheckResult], why: str | None) -> AssetCheckEvaluation:
    if why is not None:
        return AssetCheckEvaluation(key, name, False, severity=AssetCheckSeverity.ERROR, description=why)
    try:
        result = look()
    except Exception as error:
        # Whatever it is, the other topics and tables go on.
        return AssetCheckEvaluation(key, name, False, severity=AssetCheckSeverity.WARN, description=error_line(error))
    severity = AssetCheckSeverity.ERROR if result.severity == "error" else AssetCheckSeverity.WARN
    return AssetCheckEvaluation(
        key, name, result.passed, metadata=dict(result.numbers), severity=severity, description=result.summary
    )


BROKER_SECONDS = 5.0
"""How long a sensor waits for the broker."""
BROKER = "broker"
"""The place of a problem that all topics have."""

T = TypeVar("T")

RawEnds = Mapping[str, Mapping[int, int]]
"""Input topic → partition → the next offset that the topic's raw table is about to reach."""


@dataclass(frozen=True)
class Facts:
    """Plans by input topic, staging pool and output topic. One that can't be made is in ``problems`` instead."""

    ingest: Mapping[str, IngestPlan]
    etl: Mapping[str, EtlPlan]
    publish: Mapping[str, PublishPlan]
    problems: Mapping[str, str] = field(default_factory=dict[str, str])
    """Asset path of a topic or table, or pool, or BROKER → what is wrong, with the remedy."""
    unreachable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Input topic → why the broker says nothing of it, or of one of its partitions, or has no next record of it."""
    sinks: Mapping[str, SinkPlan] = field(default_factory=dict[str, SinkPlan])
    """Path of a target table's asset → how far the table is."""
    replays: Mapping[str, Sequence[Spot]] = field(default_factory=dict[str, Sequence[Spot]])
    """Path of a target table's asset → the records of replays that the table has passed and lacks."""


def gather(pipeline: Pipeline) -> Facts:
    """The facts of a pipeline now. A topic or table with a problem hides no other one."""
    try:
        return _gather(pipeline)
    except (BrokerUnavailable, SetupError, TrustError) as error:
        away = f"No broker, so nothing is known of the topics: {error}"
        return Facts({}, {}, {}, {BROKER: away}, {item.topic: str(error) for item in pipeline.inputs})


def _gather(pipeline: Pipeline) -> Facts:
    names = [item.topic for item in (*pipeline.inputs, *pipeline.outputs)]
    start = time.time()
    topic_survey = survey(pipeline.kafka, names, BROKER_SECONDS, LEADER_SECONDS)
    end = time.time()
    leader_errors = topic_survey.errors
    problems = {topic_path(topic): str(error) for topic, error in leader_errors.items()}
    unreachable = {
        item.topic: str(leader_errors[item.topic]) for item in pipeline.inputs if item.topic in leader_errors
    }
    ingest: dict[str, IngestPlan] = {}
    etl: dict[str, EtlPlan] = {}
    publish: dict[str, PublishPlan] = {}

    def put(plans: dict[str, T], name: str, place: str, plan: Callable[[], T]) -> Exception | None:
        try:
            plans[name] = plan()
            return None
        except LeaderMissing as error:
            problems.setdefault(place, str(error))
            return error
        except (BrokerUnavailable, SetupError, TrustError):
            raise
        except Exception as error:
            # Whatever it is, the other topics and tables go on.
            problems[place] = error_line(error)
            return error

    # Staging before raw before topics would do too: whatever moves meanwhile is seen by the next look.
    for item in pipeline.inputs:
        topic = item.topic
        if topic not in topic_survey.problems:
            error = put(
                ingest,
                topic,
                pool_path(item.pool, topic),
                lambda topic=topic: plan_ingest(pipeline, topic, topic_states=topic_survey.states),
            )
            if isinstance(error, KafkaError):
                unreachable[topic] = str(error)
    # Before ETL's plans, which compare the kept ends. The plans of ingest have opened the raw tables.
    keep_ends(Snapshot(pipeline, {topic: plan.state for topic, plan in ingest.items()}), topic_survey, start, end)
    for pool in pipeline.staging_pools:
        put(etl, pool, pool, lambda pool=pool: plan_etl(pipeline, pool))
    outputs = [item.topic for item in pipeline.outputs if item.topic not in leader_errors]
    ends = read_output_ends(pipeline, outputs, LEADER_SECONDS)
    for topic in outputs:
        put(publish, topic, topic_path(topic), lambda topic=topic: plan_publish(pipeline, topic, ends))
    sinks: dict[str, SinkPlan] = {}
    replays: dict[str, Sequence[Spot]] = {}
    for sink in pipeline.sinks:
        for table in sink.tables:
            subject = sink_subject(sink, table)
            put(sinks, subject, subject, lambda sink=sink, table=table: planned(pipeline, sink, table))
            if subject in sinks:
                put(replays, subject, subject, lambda plan=sinks[subject]: late_spots(plan))
    return Facts(ingest, etl, publish, problems, unreachable, sinks, replays)


LONG_LOAD = 100_000
"""A load of more offsets may take minutes, if the target is slow."""


@dataclass(frozen=True)
class DueStep:
    """A job that is due. ``partitions``: the name of its definition; ``keys``: the ranges to run, as many as may be; ``ready``:
    the offsets to process, if known."""

    job: str
    assets: frozenset[AssetKey]
    partitions: str
    keys: tuple[OffsetRange, ...]
    ready: tuple[OffsetRange, ...]
    upstream: tuple[AssetKey, ...]
    """The raw tables whose failed checks block the step."""
    selection: tuple[AssetKey, ...] | None = None
    """The assets of the job to run; None for all of them."""
    work: frozenset[AssetKey] = frozenset()
    """The assets with pending work, in a job that can omit some of its assets."""
    optional_assets: Mapping[str, AssetKey] = field(default_factory=dict[str, AssetKey])
    """Op → its asset, for the assets that the job can omit."""

    blocks: Callable[[Snapshot], Sequence[Block]] | None = None
    """The failed checks of the step's sources, by the lake."""
    awaits: RawEnds = field(default_factory=dict[str, Mapping[int, int]])
    """The new records that the step waits for, where ingest is due at the same time and nothing else waits for the step."""
    is_long_load: bool = False
    """Whether the step is the load of a target table that may take minutes."""

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags that tell the step's run, and later ticks, about the step."""
        awaits = {AWAITS_TAG: json.dumps(self.awaits)} if self.awaits else {}
        return awaits | ({LONG_LOAD_TAG: "true"} if self.is_long_load else {})

    def rest(self, failures: Collection[str]) -> DueStep | None:
        """The step without the assets of the ops in ``failures``. None if the job can't omit an asset, or no work remains."""
        without = {self.optional_assets[op] for op in failures if op in self.optional_assets}
        if len(without) < len(failures) or not self.work - without:
            return None
        return replace(
            self, selection=tuple(key for key in self.selection or sorted(self.assets) if key not in without)
        )


@dataclass(frozen=True)
class Grid:
    """The ranges of a partitions definition.

    ``spans``: the ranges up to the present ends, the open range of each partition included, as ``spans_between`` has them;
    ``partitions``: the partitions that Kafka has; ``job``: the job that runs the ranges; ``assets``: what the job makes.
    """

    definition: str
    spans: tuple[OffsetRange, ...]
    partitions: frozenset[int]
    job: str
    assets: frozenset[AssetKey]


def due_steps(names: Names, facts: Facts) -> Iterator[DueStep]:
    """The steps that have work.

    Ingest has work if a topic's end is past the next offset. ETL and publish have work if a raw table's next offset is past
    seen, or the end in staging is past the output topic's end. ETL and publish are one job, so that the pool's checks always
    run before a topic is published. The job starts with the ingest of a small backlog, and awaits it (``_small_backlog``).
    """
    for topic, plan in facts.ingest.items():
        if plan.nothing_to_do:
            continue
        pool = plan.input.pool
        keys = {*keys_over(plan.ranges), *(key_of(p, first) for p, first in plan.first.items())}
        keys |= {key_of(part.partition, part.end) for part in plan.losses}
        yield DueStep(
            names.ingest_job(topic),
            frozenset([names.pool_key(pool, topic)]),
            names.raw_partitions(topic),
            tuple(sorted(keys)),
            plan.ranges,
            (),
        )
    for pool, plan in facts.etl.items():
        outputs = [item.topic for item in names.pipeline.outputs_of(pool)]
        sound_topics = [name for name in outputs if name in facts.publish]
        late_keys = [names.topic_key(name) for name in sound_topics if not facts.publish[name].nothing_to_do]
        awaits: RawEnds = {}
        if plan.nothing_to_do and not late_keys:
            awaits = _small_backlog(names, facts, pool)
            if not awaits:
                continue
        # The lowest open range: no topic of the pool is behind it, and what is reached beside it is reported as well.
        ends = [(partition, item.next) for (name, partition), item in plan.head.outputs.items() if name in outputs]
        first = min((key_of(partition, end) for partition, end in ends), default=key_of(0, 0))
        assets = names.staging_job_assets(pool)
        # A topic with a problem would fail the run, and the other topics would wait with it.
        left_out = {names.topic_key(name) for name in outputs if name not in sound_topics}
        selection = tuple(key for key in assets if key not in left_out)
        if not selection:
            continue
        yield DueStep(
            names.staging_job(pool),
            frozenset(assets),
            names.staging_partitions(pool),
            (first,),
            (),
            tuple(names.pool_key(item.pool, item.topic) for item in names.pipeline.inputs_of(pool)),
            selection if left_out else None,
            frozenset([*late_keys, *(() if plan.nothing_to_do else names.staged_assets(pool))]),
            {names.publish_op(name): names.topic_key(name) for name in sound_topics},
            partial(pool_blocks, pool=pool, outputs=outputs),
            awaits,
        )
    yield from due_sinks(names, facts)


def _small_backlog(names: Names, facts: Facts, pool: str) -> RawEnds:
    """The ends of the new records in the input topics of a staging pool. Empty where ingest takes longer than a run's start."""
    plans = [facts.ingest[item.topic] for item in names.pipeline.inputs_of(pool) if item.topic in facts.ingest]
    if any(plan.lag > SMALL_OFFSETS for plan in plans):
        return {}
    return {plan.input.topic: {part.partition: part.end for part in plan.ranges} for plan in plans if plan.ranges}


def due_sinks(names: Names, facts: Facts) -> Iterator[DueStep]:
    """The target tables that lack records of their sources, those of replays too."""
    for subject, plan in facts.sinks.items():
        sink, table = plan.sink.name, plan.table
        is_known = table.pool in facts.etl if table.staged else table.topic in facts.ingest
        keys = {*keys_over(plan.ranges), *(key_of(*spot) for spot in facts.replays.get(subject, ()))}
        if not keys or not is_known:
            continue
        raw_topics = [table.topic]
        blocks = partial(raw_blocks, topics=raw_topics)
        if table.staged:
            raw_topics = [item.topic for item in names.pipeline.inputs_of(table.pool)]
            blocks = partial(pool_blocks, pool=table.pool, outputs=[table.topic])
        yield DueStep(
            names.sink_job(sink, table.name),
            frozenset([names.sink_key(sink, table.name)]),
            names.sink_partitions(table),
            tuple(sorted(keys)),
            plan.ranges,
            tuple(names.pool_key(names.pipeline.input(topic).pool, topic) for topic in raw_topics),
            blocks=blocks,
            is_long_load=plan.lag > LONG_LOAD,
        )


def grids(names: Names, facts: Facts) -> Iterator[Grid]:
    """The partitions definitions whose ranges are known."""
    for topic, plan in facts.ingest.items():
        state, pool = plan.topic_state, plan.input.pool
        lows = {item.partition: item.low for item in state.partitions}
        starts = {**lows, **plan.first, **(plan.state.first if plan.state else {})}
        ends = {item.partition: item.end for item in state.partitions}
        yield Grid(
            names.raw_partitions(topic),
            tuple(spans_between(starts, ends)),
            frozenset([*starts, *ends, *state.away]),
            names.ingest_job(topic),
            frozenset([names.pool_key(pool, topic), names.topic_key(topic)]),
        )
    for pool, plan in facts.etl.items():
        spans = [key_of(0, 0)] if not plan.head.outputs else []
        for (_, partition), item in plan.head.outputs.items():
            spans += spans_between({partition: item.base}, {partition: item.next})
        yield Grid(
            names.staging_partitions(pool),
            tuple(spans),
            frozenset(span.partition for span in spans),
            names.staging_job(pool),
            frozenset(names.staging_job_assets(pool)),
        )


def keys_of_run(step: DueStep, definition_keys: Sequence[str]) -> list[str]:
    """The keys of one run: those that lie together in Dagster's order and hold most of what waits; none where Dagster
    knows none of the keys yet. A range goes with the range before it, if that is due too: a run can't begin ahead."""

    def waiting_offsets(keys: Sequence[str]) -> int:
        ranges = on_grid(keys)
        return sum(
            min(part.end, key.end) - max(part.first, key.first)
            for part in step.ready
            for key in ranges
            if key.partition == part.partition and key.first < part.end and part.first < key.end
        )

    keys = set(step.keys)
    while True:
        parts = clusters(definition_keys, keys)
        ahead = {key for part in parts for key in _ahead(on_grid(part), step.keys)}
        if not ahead:
            return max(parts, key=waiting_offsets, default=[])
        keys -= ahead


def _ahead(keys: Collection[OffsetRange], due_keys: Collection[OffsetRange]) -> Iterator[OffsetRange]:
    """The keys of a run whose range before is due, and not of the run."""
    for before in set(due_keys).difference(keys):
        after = key_of(before.partition, before.end)
        if after in keys:
            yield after
