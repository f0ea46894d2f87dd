"""Partition keys: fixed ranges of offsets, ``partition:first-last``, the last of each Kafka partition open.

Dagster keeps dynamic keys in the order in which they were added and hands a run's keys over in no order at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dagster import DagsterInstance, DynamicPartitionsDefinition

from zync_assets.assets import names
from zync_assets.offsets import OffsetRange, format_key, key_of, keys_over, parse_key
from zync_assets.pipeline import Pipeline


def raw_definition(pipeline: Pipeline, topic: str) -> DynamicPartitionsDefinition:
    """The partitions of ``kafka/<topic>`` and of the topic in its raw pool."""
    pool = pipeline.input(topic).pool
    return DynamicPartitionsDefinition(name=names.raw_partitions(pipeline.name, pool, topic))


def staging_definition(pipeline: Pipeline, pool: str) -> DynamicPartitionsDefinition:
    """The partitions of all topics of a staging pool and of their ``kafka/*``."""
    return DynamicPartitionsDefinition(name=names.staging_partitions(pipeline.name, pool))


def in_order(keys: Iterable[str]) -> list[OffsetRange]:
    """The ranges of some keys, sorted as numbers; ValueError if one is no key of ours."""
    return sorted(parse_key(key) for key in keys)


def touched(first: Mapping[int, int], until: Mapping[int, int]) -> list[OffsetRange]:
    """The keys that hold an offset from ``first`` to before ``until`` (partition → offset), and each partition's open
    one; sorted as numbers."""
    whole = [OffsetRange(p, min(first.get(p, end), end), end) for p, end in until.items()]
    return sorted({*keys_over(whole), *(key_of(p, end) for p, end in until.items())})


def lacking(known: Iterable[str], keys: Iterable[OffsetRange]) -> list[str]:
    """Those of the keys that are not in ``known``, ascending as numbers."""
    have = set(known)
    return [format_key(part) for part in sorted(set(keys)) if format_key(part) not in have]


def add(instance: DagsterInstance, name: str, keys: Iterable[OffsetRange]) -> None:
    """Add the keys that a definition lacks, ascending."""
    new = lacking(instance.get_dynamic_partitions(name), keys)
    if new:
        instance.add_dynamic_partitions(name, new)


def clusters(known: Sequence[str], wanted: Iterable[OffsetRange]) -> list[list[str]]:
    """The parts of ``wanted`` that lie together in ``known``, the keys of a definition in Dagster's order.

    A run takes one key or everything between two, so what lies apart takes several runs.
    """
    asked = {format_key(part) for part in wanted}
    found: list[list[str]] = [[]]
    for key in known:
        if key in asked:
            found[-1].append(key)
        elif found[-1]:
            found.append([])
    return [item for item in found if item]
