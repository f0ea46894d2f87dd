"""Readings of the ends of a pipeline's input topics, each reading of all topics together, and the frontier that they confirm.

The lake keeps the last few readings of a raw pool's topics in one small JSON object. A lost or an old object only delays ETL: a
reading is a fact about the past and stays true. A topic that was created again is known by its id.

The *frontier* of a domain is an order. Every record of a lower order is in the raw tables, whatever its topic. A batch takes
only records below the frontier, so that no topic runs ahead. Each stream of the domain confirms an order, and the frontier is
the lowest of these orders. A stream confirms an order in two ways:

- The stream has a record of this order. The stream's records of lower orders are all before this record.
- The stream is ingested up to its end in a reading. An earlier reading found a record of a lower order in some stream. The
  time between both readings covers records that a producer still had in flight at the earlier reading. An end before an open
  Kafka transaction does not count: the records of the transaction were sent, and nobody can read them yet.

The records of a transaction topic count for the second way too, and the frontier does not wait for the topic.
``etl.transactions`` moves the frontier to the end of a transaction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import pyarrow as pa

from zync_assets.lake import storage
from zync_assets.lake.log import Order
from zync_assets.lake.raw_files import LOWEST
from zync_assets.lake.sequence import END, LEAST, Stream, after, file_below

MOST = 8
"""The most readings that are kept. Some of them are older than any sensible delay."""


@dataclass(frozen=True)
class TopicEnds:
    """The ends of a topic's partitions. ``topic_id``: None for a topic that was not there."""

    topic_id: str | None
    ends: Mapping[int, int] = field(default_factory=dict[int, int])
    """Partition → end. A partition without a leader is missing."""
    open: frozenset[int] = frozenset()
    """Partitions with an open Kafka transaction. Its records are past the end, and may be older than the reading."""


@dataclass(frozen=True)
class Reading:
    """The ends of several topics. ``began`` and ``ended``: when they were read, in seconds since the epoch."""

    began: float
    ended: float
    topics: Mapping[str, TopicEnds]

    def end(self, topic: str, partition: int) -> int | None:
        """The end of a partition; 0 for a topic that was not there; None if the end is unknown."""
        topic_ends = self.topics.get(topic)
        if topic_ends is None:
            return None
        return 0 if topic_ends.topic_id is None else topic_ends.ends.get(partition)

    def whole_end(self, topic: str, partition: int) -> int | None:
        """The end of a partition, as ``end``; None also where an open transaction has records past the end."""
        topic_ends = self.topics.get(topic)
        return None if topic_ends is None or partition in topic_ends.open else self.end(topic, partition)

    def without(self, topics: Collection[str]) -> Reading:
        """The reading without some topics, whose ends are unknown then."""
        return replace(self, topics={name: ends for name, ends in self.topics.items() if name not in topics})


def read_readings(lake: str, pool: str) -> list[Reading]:
    """The kept readings of a raw pool's topics, the earliest first; none where the object is missing or damaged. LakeError if
    the object can't be read."""
    uri = storage.readings_uri(lake, pool)
    system, path = storage.filesystem(uri)
    with storage.access_errors(uri, "can't be read"):
        try:
            with system.open_input_file(path) as file:
                rows = json.loads(file.read())
            return [_parse_row(item) for item in rows]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return []


def keep_reading(lake: str, pool: str, reading: Reading, delay: float, limit: float = math.inf) -> list[Reading]:
    """Keep a reading beside the earlier ones, and return all. Writes nothing if the newest kept readings say the same.

    ``delay``, ``limit``: seconds between two readings that ETL compares. LakeError if the lake can't be written.
    """
    kept_readings = read_readings(lake, pool)
    new_readings = thinned([*kept_readings, reading], delay, limit)
    if new_readings != kept_readings:
        _write(storage.readings_uri(lake, pool), new_readings)
    return new_readings


def thinned(readings: Sequence[Reading], delay: float, limit: float = math.inf) -> list[Reading]:
    """The readings that ETL can use, the earliest first and MOST at the most.

    Of equal readings in a row, the first and the last say everything. If ``delay`` lies between both, no later reading with
    the same ends says more. The readings of quiet topics therefore stay as they are. Other readings are kept at a distance of
    a quarter of ``delay``, but for the newest, and for a reading that the next one confirms. With a ``limit``, the last of equal
    readings is renewed after that time.
    """
    useful_readings: list[Reading] = []
    for item in sorted(readings, key=lambda item: item.ended):
        alike_count = _alike_count(useful_readings, item)
        if alike_count and are_confirmed(useful_readings, delay) and item.began < useful_readings[-1].ended + limit:
            continue
        close = len(useful_readings) > 1 and useful_readings[-1].ended < useful_readings[-2].ended + delay / 4
        if alike_count > 1 or (not alike_count and close and item.began < useful_readings[-1].ended + delay):
            useful_readings.pop()
        useful_readings.append(item)
    return useful_readings[-MOST:]


def are_confirmed(readings: Sequence[Reading], delay: float) -> bool:
    """Whether the newest ends were read twice, with ``delay`` between both readings."""
    alike_count = _alike_count(readings, readings[-1]) if readings else 0
    return alike_count > 1 and readings[-alike_count].ended + delay <= readings[-1].began


def _alike_count(readings: Sequence[Reading], reading: Reading) -> int:
    """The number of the last readings with the ends of another one."""
    return len(list(takewhile(lambda item: item.topics == reading.topics, reversed(readings))))


def _write(uri: str, readings: Sequence[Reading]) -> None:
    system, path = storage.filesystem(uri)
    storage.make_folder(uri.rsplit("/", 1)[0])
    text = json.dumps([_row(item) for item in readings]).encode()
    # delta-rs's file takes Python's bytes alone, and Arrow passes it a buffer unless a buffered stream copies the text.
    with (
        storage.access_errors(uri, "can't be written"),
        pa.BufferedOutputStream(system.open_output_stream(path), len(text) + 1) as file,
    ):
        file.write(text)


def _row(reading: Reading) -> dict[str, object]:
    topics = {
        topic: {
            "id": item.topic_id,
            "ends": {str(partition): end for partition, end in sorted(item.ends.items())},
            "open": sorted(item.open),
        }
        for topic, item in sorted(reading.topics.items())
    }
    return {"began": reading.began, "ended": reading.ended, "topics": topics}


def _parse_row(row: Mapping[str, Any]) -> Reading:
    topics = {
        topic: TopicEnds(
            item["id"],
            {int(partition): end for partition, end in item["ends"].items()},
            frozenset(item.get("open", ())),  # earlier versions did not look
        )
        for topic, item in row["topics"].items()
    }
    return Reading(row["began"], row["ended"], topics)


@dataclass(frozen=True)
class Frontier:
    """``order``: all records of lower orders are ingested. ``behind``: the stream that confirms the lowest order; None if no
    stream holds the frontier back."""

    order: Order
    behind: Stream | None = None


def frontier(streams: Sequence[Stream], orders: Mapping[tuple[str, int], Order]) -> Frontier:
    """The frontier of a domain. A single stream is its own sequence, and has no frontier (END). ``orders``: the result of
    ``confirmed_orders``."""
    if len(streams) < 2:
        return Frontier(END)
    return min((Frontier(orders[stream.name], stream) for stream in streams), key=lambda item: item.order)


def confirmed_orders(
    streams: Sequence[Stream], readings: Iterable[Reading], delay: float
) -> dict[tuple[str, int], Order]:
    """(topic, partition) → the order that the stream confirms, for the streams of a domain and of its transaction topic.

    ``delay``: the least seconds between the two readings that confirm an order.
    """
    reading_orders = [(item, _highest_order(streams, item)) for item in readings]
    return {stream.name: _confirmed(stream, reading_orders, delay) for stream in streams}


def _confirmed(stream: Stream, reading_orders: Sequence[tuple[Reading, Order | None]], delay: float) -> Order:
    """The order that a stream confirms. ``reading_orders``: each reading with the highest order below its ends."""
    best = stream.highest or LOWEST
    for later, _ in reading_orders:
        end = later.whole_end(stream.topic, stream.partition)
        if end is None or stream.next < end:
            continue
        for earlier, order in reading_orders:
            if earlier is not later and order is not None and earlier.ended + delay <= later.began:
                best = max(best, after(order))
    return best


def _highest_order(streams: Iterable[Stream], reading: Reading) -> Order | None:
    """The highest order of the records below the ends of a reading, as far as they were ingested; None if none was."""
    ends = ((stream, reading.end(stream.topic, stream.partition)) for stream in streams)
    orders = [order for stream, end in ends if end is not None and (order := _order_below(stream, end)) is not None]
    return max(orders, default=None)


def _order_below(stream: Stream, end: int) -> Order | None:
    """The highest order below an offset if all records are below it. Otherwise a bound that the highest order reaches."""
    item = file_below(stream, end)
    if item is None:
        return None
    if end >= stream.next:
        return stream.highest or LOWEST
    if (item.last or 0) >= end:
        return item.min_order or LOWEST
    return ((item.max_order or LOWEST)[0], LEAST)
