"""Partition keys: fixed ranges of offsets, ``partition:first-last``, the last of each Kafka partition open.

Dagster keeps dynamic keys in the order in which they were added and hands a run's keys over in no order at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dagster import DagsterInstance, DynamicPartitionsDefinition

from zync_assets.assets.names import Names
from zync_assets.errors import RangeUnknown
from zync_assets.offsets import RANGE_SIZE, OffsetRange, format_key, key_of, keys_over, parse_key


def raw_definition(names: Names, topic: str) -> DynamicPartitionsDefinition:
    """The partitions of ``kafka/<topic>`` and of the topic in its raw pool."""
    return DynamicPartitionsDefinition(name=names.raw_partitions(topic))


def staging_definition(names: Names, pool: str) -> DynamicPartitionsDefinition:
    """The partitions of all topics of a staging pool and of their ``kafka/*``."""
    return DynamicPartitionsDefinition(name=names.staging_partitions(pool))


def range_of(key: str) -> OffsetRange | None:
    """The range of a key; None if the key is not of the grid, such as ``june``, ``0:0-499999`` or ``00:0-999999``."""
    try:
        found = parse_key(key)
    except ValueError:
        return None
    return found if found == key_of(found.partition, found.first) and format_key(found) == key else None


def on_grid(keys: Iterable[str]) -> list[OffsetRange]:
    """The ranges of those keys that are of the grid, sorted as numbers."""
    return sorted(found for key in keys if (found := range_of(key)) is not None)


def served(keys: Iterable[str], place: str) -> list[OffsetRange]:
    """The ranges of a run's keys, sorted as numbers. ``place``: the asset's path, for the error.

    RangeUnknown if a key is not of the grid. The error names the right keys.
    """
    asked = list(keys)
    for key in asked:
        if range_of(key) is None:
            raise RangeUnknown(
                f"{place} has no range {key!r}. A key is partition:first-last, and a range has {RANGE_SIZE} offsets."
                f" Run {' and '.join(_nearest(key))} instead, and delete the partition {key!r} in Dagster."
            )
    return on_grid(asked)


def _nearest(key: str) -> list[str]:
    """The keys of the grid that hold the first and the last offset of a key; the first of all if the key is no range."""
    try:
        found = parse_key(key)
    except ValueError:
        return [format_key(key_of(0, 0))]
    ends = dict.fromkeys((found.first, found.end - 1))
    return list(dict.fromkeys(format_key(key_of(found.partition, offset)) for offset in ends))


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
