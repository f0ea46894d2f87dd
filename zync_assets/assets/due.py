"""Which steps are due, by the facts alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagster import AssetKey

from zync_assets.assets import partitions
from zync_assets.assets.facts import Facts
from zync_assets.assets.names import Names
from zync_assets.offsets import OffsetRange, key_of, keys_over


@dataclass(frozen=True)
class Step:
    """A job that is due. ``partitions``: the name of its definition; ``keys``: the ranges to run, as many as may be."""

    job: str
    assets: frozenset[AssetKey]
    partitions: str
    keys: tuple[OffsetRange, ...]
    ready: tuple[OffsetRange, ...]
    """The number of offsets to process, if known."""
    upstream: tuple[AssetKey, ...]
    """The raw tables whose failed checks block the step."""
    selection: tuple[AssetKey, ...] | None = None
    """The assets of the job to run; None for all of them."""
    work: frozenset[AssetKey] = frozenset()
    """The assets with pending work, in a job that can omit some of its assets."""
    spared: Mapping[str, AssetKey] = field(default_factory=dict[str, AssetKey])
    """Op → its asset, for the assets that the job can omit."""

    pool: str | None = None
    """The staging pool of an ETL step."""

    def rest(self, failed: Collection[str]) -> Step | None:
        """The step without the assets of the ``failed`` ops. None if the job can't omit an asset, or no work remains."""
        without = {self.spared[op] for op in failed if op in self.spared}
        if len(without) < len(failed) or not self.work - without:
            return None
        return replace(
            self, selection=tuple(key for key in self.selection or sorted(self.assets) if key not in without)
        )


@dataclass(frozen=True)
class Grid:
    """The ranges of a partitions definition.

    ``keys``: the ranges up to the present ends, the open range of each partition included; ``partitions``: the partitions
    that Kafka has; ``job``: the job that runs the ranges; ``assets``: the assets that the job makes.
    """

    definition: str
    keys: tuple[OffsetRange, ...]
    partitions: frozenset[int]
    job: str
    assets: frozenset[AssetKey]


def due(names: Names, facts: Facts) -> Iterator[Step]:
    """The steps that have work.

    Ingest has work if a topic's end is past the next offset. ETL and publish have work if a raw table's next offset is past
    seen, or the end in staging is past the output topic's end. ETL and publish are one job, so that the pool's checks always
    run before a topic is published.
    """
    for topic, plan in facts.ingest.items():
        if plan.nothing_to_do:
            continue
        pool = plan.input.pool
        keys = {*keys_over(plan.ranges), *(key_of(p, first) for p, first in plan.first.items())}
        keys |= {key_of(part.partition, part.end) for part in plan.lost}
        yield Step(
            names.ingest_job(topic),
            frozenset([names.pool_key(pool, topic)]),
            names.raw_partitions(topic),
            tuple(sorted(keys)),
            plan.ranges,
            (),
        )
    for pool, plan in facts.etl.items():
        outputs = [item.topic for item in names.pipeline.outputs_of(pool)]
        sound = [name for name in outputs if name in facts.publish]
        late = [names.topic_key(name) for name in sound if not facts.publish[name].nothing_to_do]
        if plan.nothing_to_do and not late:
            continue
        # The lowest open range: no topic of the pool is behind it, and what is reached beside it is reported as well.
        ends = [(partition, item.next) for (name, partition), item in plan.head.outputs.items() if name in outputs]
        first = min((key_of(partition, end) for partition, end in ends), default=key_of(0, 0))
        assets = names.staging_job_assets(pool)
        # A topic with a problem would fail the run, and the other topics would wait with it.
        left_out = {names.topic_key(name) for name in outputs if name not in sound}
        selection = tuple(key for key in assets if key not in left_out)
        if not selection:
            continue
        yield Step(
            names.staging_job(pool),
            frozenset(assets),
            names.staging_partitions(pool),
            (first,),
            (),
            tuple(names.pool_key(item.pool, item.topic) for item in names.pipeline.inputs_of(pool)),
            selection if left_out else None,
            frozenset([*late, *(() if plan.nothing_to_do else names.staged_assets(pool))]),
            {names.publish_op(name): names.topic_key(name) for name in sound},
            pool,
        )


def grids(names: Names, facts: Facts) -> Iterator[Grid]:
    """The partitions definitions whose ranges are known."""
    for topic, plan in facts.ingest.items():
        state, pool = plan.topic_state, plan.input.pool
        lows = {item.partition: item.low for item in state.partitions}
        first = {**lows, **plan.first, **(plan.state.first if plan.state else {})}
        until = {item.partition: item.end for item in state.partitions}
        yield Grid(
            names.raw_partitions(topic),
            tuple(partitions.touched(first, until)),
            frozenset([*first, *until, *state.away]),
            names.ingest_job(topic),
            frozenset([names.pool_key(pool, topic), names.topic_key(topic)]),
        )
    for pool, plan in facts.etl.items():
        wanted = {key_of(0, 0)} if not plan.head.outputs else set[OffsetRange]()
        for (_, partition), item in plan.head.outputs.items():
            wanted |= set(partitions.touched({partition: item.base}, {partition: item.next}))
        yield Grid(
            names.staging_partitions(pool),
            tuple(sorted(wanted)),
            frozenset(key.partition for key in wanted),
            names.staging_job(pool),
            frozenset(names.staging_job_assets(pool)),
        )


def chosen(step: Step, known: Sequence[str]) -> list[str]:
    """The keys of one run: those that lie together in Dagster's order and hold most of what waits; none where Dagster
    knows none of the keys yet."""

    def waiting(keys: Sequence[str]) -> int:
        whole = partitions.on_grid(keys)
        return sum(
            min(part.end, key.end) - max(part.first, key.first)
            for part in step.ready
            for key in whole
            if key.partition == part.partition and key.first < part.end and part.first < key.end
        )

    return max(partitions.clusters(known, step.keys), key=waiting, default=[])
