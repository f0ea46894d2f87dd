"""The extent of a partition key in a raw table, in a staging table, and in a topic. Reads logs and footers only, without a
JVM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.errors import LakeError
from zync_assets.kafka.topics import TopicState
from zync_assets.lake import storage
from zync_assets.lake.raw import RawState, is_replay, raw_files
from zync_assets.lake.staging import StagingState, key_column, value_column
from zync_assets.lake.tables import DataFile
from zync_assets.offsets import OffsetRange, format_key


@dataclass(frozen=True)
class Extent:
    """A key's range, and the processed part of the range.

    ``first`` and ``end``: the processed offsets are ``first <= offset < end``; equal before the first offset. ``rows``: the
    number of processed records, None if only a read of the records could count them. ``complete``: the range is full.
    """

    key: OffsetRange
    first: int
    end: int
    complete: bool
    rows: int | None

    @property
    def last(self) -> int | None:
        return self.end - 1 if self.end > self.first else None


def raw_extents(state: RawState, keys: Iterable[OffsetRange]) -> list[Extent]:
    """The extent of each key in the raw table. Counts records by files; LakeError if the log and the files disagree."""
    found: list[Extent] = []
    files = raw_files(state)
    for key in sorted(keys):
        upcoming = state.next.get(key.partition, 0)
        low = max(state.first.get(key.partition, 0), state.kept.get(key.partition, 0))
        part = _clipped(key, low, upcoming)
        rows = _count(state.opened.uri, [item for item in files if _meets(item, part)], part)
        found.append(Extent(key, part.first, part.end, upcoming >= key.end, rows))
    return found


def staging_extents(state: StagingState | None, topic: str, keys: Iterable[OffsetRange]) -> list[Extent]:
    """The extent of each key of an output topic in the staging table. LakeError for a gap in the offsets."""
    found: list[Extent] = []
    files = state.output_files(topic) if state else []
    for key in sorted(keys):
        position = state.head.outputs.get((topic, key.partition)) if state else None
        if state is None or position is None:
            found.append(Extent(key, key.first, key.first, False, 0))
            continue
        part = _clipped(key, position.base, position.next)
        own = [item for item in files if _meets(item, part)]
        rows = _count(state.opened.uri, own, part)
        if rows != part.end - part.first:
            raise LakeError(
                f"table {state.opened.uri}: {topic}, range {format_key(key)} holds {rows} records where offsets"
                f" {part.first} to {part.end - 1} are numbered. Restore the table to a version before that was so."
            )
        found.append(Extent(key, part.first, part.end, position.next >= key.end, rows))
    return found


def topic_extents(
    state: TopicState, keys: Iterable[OffsetRange], published: Mapping[int, OffsetRange] | None = None
) -> list[Extent]:
    """The extent of each key in a topic.

    ``published``: for an output topic, partition → the offsets at which the topic's records equal staging's. Other records
    in the topic are foreign. The published offsets have no gaps, and so give the number of records.
    """
    places = {item.partition: item for item in state.partitions}
    found: list[Extent] = []
    for key in sorted(keys):
        place = places.get(key.partition)
        ours = published.get(key.partition) if published is not None else None
        if place is None or (published is not None and ours is None):
            found.append(Extent(key, key.first, key.first, False, None if published is None else 0))
            continue
        low, end = (max(place.low, ours.first), min(place.end, ours.end)) if ours else (place.low, place.end)
        part = _clipped(key, low, end)
        found.append(Extent(key, part.first, part.end, end >= key.end, part.end - part.first if ours else None))
    return found


def staging_schema(state: StagingState, topic: str) -> pa.Schema:
    """The columns of ``Pool.Topic``, as ``zync query`` has them: ``key`` and ``value`` are the topic's own."""
    names = {
        "kafka": "kafka",
        key_column(topic): "key",
        value_column(topic): "value",
        "rule": "rule",
        "source": "source",
    }
    have = state.schema
    return pa.schema([have.field(name).with_name(new) for name, new in names.items() if name in have.names])


def topic_schema(state: StagingState, topic: str) -> pa.Schema:
    """The columns of an output topic: of its records, not of the staging rows that they are made of."""
    have = staging_schema(state, topic)
    return pa.schema([field for field in have if field.name in ("key", "value")])


def _clipped(key: OffsetRange, first: int, end: int) -> OffsetRange:
    low = min(max(key.first, first), key.end)
    return OffsetRange(key.partition, low, max(low, min(key.end, end)))


def _meets(item: DataFile, part: OffsetRange) -> bool:
    return item.partition == part.partition and (item.first or 0) < part.end and (item.last or 0) >= part.first


def _count(uri: str, files: Sequence[DataFile], part: OffsetRange) -> int:
    """The records of a range. Every file must be there, whole; those that reach past the range are looked into."""
    ordered = [item for item in files if not part.empty]
    # A replay's file lies between the offsets of others.
    for one, other in pairwise([item for item in ordered if not is_replay(item)]):
        if (other.first or 0) <= (one.last or 0):
            raise LakeError(
                f"table {uri}: the files {one.path} and {other.path} share offsets of partition {part.partition}:"
                " records are there twice. Restore the table to a version before that was so."
            )
    total = 0
    for item in ordered:
        place = storage.join(uri, item.path)
        if storage.file_size(place) != item.size:
            raise LakeError(f"file {place} is not as long as the table says; it was changed. Restore it.")
        inside = (item.first or 0) >= part.first and (item.last or 0) < part.end
        total += item.records if inside else _inside(place, part)
    return total


def _inside(place: str, part: OffsetRange) -> int:
    system, path = storage.filesystem(place)
    table = pq.ParquetFile(path, filesystem=system).read(columns=["kafka.offset"]).flatten()
    offsets = table["kafka.offset"].to_numpy()
    return int(((offsets >= part.first) & (offsets < part.end)).sum())
