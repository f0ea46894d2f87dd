"""The names of a pipeline's parts in Dagster, and the keys of their partitions.

Asset keys hold pool and topic as they are, behind the pipeline's key prefix. Dagster's other names take letters, digits
and underscores alone, so a topic's other characters are spelled out there, each in a way of its own: ``a.b`` and
``a_b`` stay two names. Jobs, ops, sensors and resources end in the pipeline's name, because a code location may have
several pipelines.

A partition key is a fixed range of offsets, ``partition:first-last``. The last key of each Kafka partition is open. Dagster
keeps dynamic keys in the order in which they were added and hands a run's keys over in no order at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dagster import AssetChecksDefinition, AssetKey, AssetSpec, DagsterInstance, DynamicPartitionsDefinition

from zync_assets.errors import RangeUnknown
from zync_assets.offsets import RANGE_SIZE, OffsetRange, format_key, key_of, normalize, parse_key
from zync_assets.pipeline import KAFKA, Pipeline, SinkTable

PIPELINE_TAG = "zync/pipeline"
"""On every job and so on every run of it: the pipeline's name."""
STEP_TAG = "zync/step"
"""On the runs that the sensor asked for: the job that was asked for."""
REST = "rest of "
"""Before the job in STEP_TAG: without the assets whose ops failed in the job's last run."""
LONG_LOAD_TAG = "zync/long-load"
"""The mark of a run that may write a target table for minutes."""
AWAITS_TAG = "zync/awaits"
"""On a run that the sensor asked for together with the ingest of its inputs: ``RawEnds`` as JSON."""

_SPELLING = {"_": "__", ".": "_dot_", "-": "_dash_"}


def identifier(name: str) -> str:
    """A topic's, table's or pipeline's name in letters, digits and underscores; different names give different ones."""
    return re.sub(r"[^A-Za-z0-9]", lambda match: _spelling(match[0]), name)


def _spelling(character: str) -> str:
    return _SPELLING.get(character, f"_x{ord(character):x}_")


def argument(topic: str) -> str:
    """The name of a topic as an input or output of an op. The prefix keeps it apart from names that Dagster reserves."""
    return f"of_{identifier(topic)}"


@dataclass(frozen=True, eq=False)
class SourceTopic:
    """The asset of a source topic, with the parts that belong to the asset.

    All pipelines of a process that read the topic have this one object: Dagster takes two references to one object as
    one definition.
    """

    names: Names
    """The names of the pipeline that was built first. The parts carry these names."""
    asset: AssetSpec
    check: AssetChecksDefinition
    resources: Mapping[str, object]
    """The IO manager that reads the topic, and its Spark session."""

    @property
    def file(self) -> Path:
        return self.names.file


@dataclass(frozen=True, eq=False)
class Names:
    """The names of one pipeline's assets, jobs, ops, sensor and resources."""

    pipeline: Pipeline
    prefix: tuple[str, ...] = ()
    """The first parts of every asset key."""
    sources: Mapping[str, SourceTopic] = field(default_factory=dict[str, SourceTopic])
    """Input topic → the asset of the topic, once it is made."""

    @property
    def file(self) -> Path:
        return self.pipeline.path

    def topic_key(self, topic: str) -> AssetKey:
        """The asset of a Kafka topic: ``kafka/<topic>``."""
        return AssetKey([*self.prefix, KAFKA, topic])

    def pool_key(self, pool: str, topic: str) -> AssetKey:
        """The asset of a topic in a pool: ``<Pool>/<topic>``."""
        return AssetKey([*self.prefix, pool, topic])

    def sink_key(self, sink: str, table: str) -> AssetKey:
        """The asset of a target table: ``<sink>/<table>``. Characters that no topic has are spelled out."""
        # Dagster makes names of ops of the key. It takes the characters of topics, and no others.
        name = re.sub(r"[^A-Za-z0-9_.-]", lambda match: _spelling(match[0]), table)
        return AssetKey([*self.prefix, sink, name])

    def sink_partitions(self, table: SinkTable) -> str:
        """The name of the partitions definition of a target table: that of its source."""
        return self.staging_partitions(table.pool) if table.staged else self.raw_partitions(table.topic)

    def raw_partitions(self, topic: str) -> str:
        """The name of the partitions definition that ``kafka/<topic>`` and ``<Pool>/<topic>`` share; instance-wide."""
        owner = self.sources[topic].names.pipeline if topic in self.sources else self.pipeline
        return f"{owner.name}/{owner.input(topic).pool}/{topic}"

    def staging_partitions(self, pool: str) -> str:
        """The name of the partitions definition of a staging pool's topics and their ``kafka/*``; instance-wide."""
        return f"{self.pipeline.name}/{pool}"

    def follows(self, topic: str) -> bool:
        """Whether the asset of an input topic was made by another pipeline."""
        return topic in self.sources and self.sources[topic].file != self.file

    def staged_assets(self, pool: str) -> list[AssetKey]:
        """The topics of a staging pool; none where another file has their rules."""
        rules, outputs = self.pipeline.rules_of(pool), self.pipeline.outputs_of(pool)
        return [self.pool_key(pool, item.topic) for item in outputs] if rules else []

    def staging_job_assets(self, pool: str) -> list[AssetKey]:
        """The assets that the job of a staging pool makes: the pool's topics, unless another file has their rules, and
        ``kafka/*``."""
        return [*self.staged_assets(pool), *(self.topic_key(item.topic) for item in self.pipeline.outputs_of(pool))]

    def ingest_job(self, topic: str) -> str:
        return self._scoped_name(f"ingest_{identifier(topic)}")

    def staging_job(self, pool: str) -> str:
        return self._scoped_name(f"etl_and_publish_{pool}")

    def sink_job(self, sink: str, table: str) -> str:
        return self._scoped_name(f"sink_{identifier(sink)}_table_{identifier(table)}")

    @property
    def rows_job(self) -> str:
        return f"compare_rows_of_{identifier(self.pipeline.name)}"

    @property
    def checks_job(self) -> str:
        return f"check_{identifier(self.pipeline.name)}"

    @property
    def sensor(self) -> str:
        return f"zync_{identifier(self.pipeline.name)}"

    def read_op(self, topic: str) -> str:
        return self._scoped_name(f"raw_{identifier(topic)}")

    def etl_op(self, pool: str) -> str:
        return self._scoped_name(f"staging_{pool}")

    def publish_op(self, topic: str) -> str:
        return self._scoped_name(f"topic_{identifier(topic)}")

    def sink_op(self, sink: str, table: str) -> str:
        return self._scoped_name(f"write_{identifier(sink)}_table_{identifier(table)}")

    def check_op(self, check: str, asset: AssetKey) -> str:
        return self._scoped_name(f"check_{check}_{'_of_'.join(identifier(part) for part in reversed(asset.path))}")

    def resource(self, name: str) -> str:
        """The key of one of the pipeline's resources: ``spark``, ``kafka_io``, ``pool_io``, ``kafka``, ``registry``."""
        return self._scoped_name(name)

    def _scoped_name(self, name: str) -> str:
        # No identifier holds a single underscore before "of": the parts of a name can be told apart.
        return f"{name}_of_{identifier(self.pipeline.name)}"


def raw_definition(names: Names, topic: str) -> DynamicPartitionsDefinition:
    """The partitions of ``kafka/<topic>`` and of the topic in its raw pool."""
    return DynamicPartitionsDefinition(name=names.raw_partitions(topic))


def staging_definition(names: Names, pool: str) -> DynamicPartitionsDefinition:
    """The partitions of all topics of a staging pool and of their ``kafka/*``."""
    return DynamicPartitionsDefinition(name=names.staging_partitions(pool))


def range_of(key: str) -> OffsetRange | None:
    """The range of a key; None if the key is not of the grid, such as ``june``, ``0:0-499999`` or ``00:0-999999``."""
    try:
        part = parse_key(key)
    except ValueError:
        return None
    return part if part == key_of(part.partition, part.first) and format_key(part) == key else None


def on_grid(keys: Iterable[str]) -> list[OffsetRange]:
    """The ranges of those keys that are of the grid, sorted as numbers."""
    return sorted(part for key in keys if (part := range_of(key)) is not None)


def run_keys(keys: Iterable[str], place: str) -> list[OffsetRange]:
    """The ranges of a run's keys, sorted as numbers. ``place``: the asset's path, for the error.

    RangeUnknown if a key is not of the grid. The error names the right keys.
    """
    key_texts = list(keys)
    for key in key_texts:
        if range_of(key) is None:
            raise RangeUnknown(
                f"{place} has no range {key!r}. A key is partition:first-last, and a range has {RANGE_SIZE} offsets."
                f" Run {' and '.join(_nearest(key))} instead, and delete the partition {key!r} in Dagster."
            )
    return on_grid(key_texts)


def _nearest(key: str) -> list[str]:
    """The keys of the grid that hold the first and the last offset of a key; the first of all if the key is no range."""
    try:
        part = parse_key(key)
    except ValueError:
        return [format_key(key_of(0, 0))]
    ends = dict.fromkeys((part.first, part.end - 1))
    return list(dict.fromkeys(format_key(key_of(part.partition, offset)) for offset in ends))


def spans_between(first: Mapping[int, int], until: Mapping[int, int]) -> list[OffsetRange]:
    """The ranges that hold an offset from ``first`` to before ``until`` (partition → offset), and each partition's open
    range. The ranges of a partition lie together and come as one span."""
    lows = {p: min(first.get(p, end), end) for p, end in until.items()}
    return [OffsetRange(p, key_of(p, lows[p]).first, key_of(p, end).end) for p, end in sorted(until.items())]


def keys_of(spans: Iterable[OffsetRange]) -> Iterator[str]:
    """The keys of all ranges in some spans, each once, ascending as numbers. ``spans``: begin and end at ranges."""
    # A tick writes every key of a long history. An OffsetRange for each key would take ten times as long.
    for span in normalize(spans):
        for first in range(span.first, span.end, RANGE_SIZE):
            yield f"{span.partition}:{first}-{first + RANGE_SIZE - 1}"


def add_keys(instance: DagsterInstance, name: str, keys: Iterable[OffsetRange]) -> None:
    """Add the keys that a definition lacks, ascending."""
    old_keys = set(instance.get_dynamic_partitions(name))
    if missing_keys := [key for key in keys_of(keys) if key not in old_keys]:
        instance.add_dynamic_partitions(name, missing_keys)


def clusters(definition_keys: Sequence[str], ranges: Iterable[OffsetRange]) -> list[list[str]]:
    """The parts of ``ranges`` that lie together in ``definition_keys``, the keys of a definition in Dagster's order.

    A run takes one key or everything between two, so what lies apart takes several runs.
    """
    keys = {format_key(part) for part in ranges}
    groups: list[list[str]] = [[]]
    for key in definition_keys:
        if key in keys:
            groups[-1].append(key)
        elif groups[-1]:
            groups.append([])
    return [item for item in groups if item]
