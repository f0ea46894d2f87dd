"""Partition keys in Dagster: fixed ranges of offsets, ``partition:first-last``. The last key of each Kafka partition is open.

Dagster keeps dynamic keys in the order in which they were added and hands a run's keys over in no order at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from dagster import DagsterInstance

from zync_assets.errors import RangeUnknown
from zync_assets.offsets import RANGE_SIZE, OffsetRange, format_key, key_of, normalize, parse_key


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


def new_keys(old_keys: Collection[str], keys: Iterable[str]) -> list[str]:
    """The keys that are not in ``old_keys``, in their order."""
    return [key for key in keys if key not in old_keys]


def keys_of(spans: Iterable[OffsetRange]) -> Iterator[str]:
    """The keys of all ranges in some spans, each once, ascending as numbers. ``spans``: begin and end at ranges."""
    # A tick writes every key of a long history. An OffsetRange for each key would take ten times as long.
    for span in normalize(spans):
        for first in range(span.first, span.end, RANGE_SIZE):
            yield f"{span.partition}:{first}-{first + RANGE_SIZE - 1}"


def add_keys(instance: DagsterInstance, name: str, keys: Iterable[OffsetRange]) -> None:
    """Add the keys that a definition lacks, ascending."""
    missing_keys = new_keys(set(instance.get_dynamic_partitions(name)), keys_of(keys))
    if missing_keys:
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
