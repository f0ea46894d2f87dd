"""A change that a connector sends again is in the raw table once, however ingest is cut. A change that only looks like an
earlier one stays."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets import runner
from zync_assets.checks.output_checks import run_all
from zync_assets.cli.records import trace_rows
from zync_assets.errors import LakeError
from zync_assets.ingest import files as ingest_files
from zync_assets.ingest import repeats
from zync_assets.ingest.files import BatchFiles, RangeReading, batch_files, carry_times, without_repeats
from zync_assets.ingest.order import own_orders
from zync_assets.ingest.source import RecordChunk, TopicSource
from zync_assets.ingest.task import ReadEnd, TopicReader, write_part
from zync_assets.lake.log import DataFile, Order
from zync_assets.lake.raw import ORDER, open_raw
from zync_assets.lake.raw_files import KAFKA_TYPE
from zync_assets.local.services import Services
from zync_assets.offsets import Mark, OffsetRange
from zync_assets.pipeline import Input, SideFormat
from zync_assets_tests.lake.rows import EPOCH
from zync_assets_tests.mini import Mini, mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if TYPE_CHECKING:
    pass

KEY = pa.struct([("id", pa.int64())])
ROW = pa.struct([("v", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
INFINITY = 9
"""A value of ``v`` whose row has a time that Python can't hold."""
SOURCE = pa.struct(
    [
        ("connector", pa.string()),
        ("snapshot", pa.string()),
        ("ts_ms", pa.int64()),
        ("lsn", pa.int64()),
        ("sequence", pa.string()),
    ]
)
TRANSACTION = pa.struct([("id", pa.string()), ("total_order", pa.int64())])
VALUE = pa.struct(
    [
        ("before", ROW),
        ("after", ROW),
        ("op", pa.string()),
        ("ts_ms", pa.int64()),
        ("source", SOURCE),
        ("transaction", TRANSACTION),
    ]
)
SCHEMA = pa.schema([("kafka", KAFKA_TYPE), ("key", KEY), ("value", VALUE)])
SIDE = SideFormat("json")
INPUT = Input("t", "Raw", SIDE, SIDE)


@dataclass(frozen=True)
class Event:
    """A record as the connector sends it, but for the time of the envelope. ``position`` None: a tombstone."""

    id: int | None
    position: int | None
    before: int | None = None
    after: int | None = None
    delay: int = 0
    """Milliseconds that the connector makes the envelope later."""

    def value(self, time: int) -> dict[str, Any] | None:
        if self.position is None:
            return None
        op = "c" if self.before is None else "d" if self.after is None else "u"
        sequence = json.dumps([str(self.position - 1), str(self.position)], separators=(",", ":"))
        source = {
            "connector": "postgresql",
            "snapshot": "false",
            "ts_ms": 1,
            "lsn": self.position,
            "sequence": sequence,
        }
        sides = {"before": row_of(self.before), "after": row_of(self.after)}
        return {
            **sides,
            "op": op,
            "ts_ms": time + self.delay,
            "source": source,
            "transaction": {"id": "7", "total_order": time},
        }


def row_of(v: int | None) -> dict[str, int] | None:
    return None if v is None else {"v": v, "at": 2**62 if v == INFINITY else v}


@dataclass(frozen=True)
class EventReader(TopicReader):
    """Reads events that a test gives, instead of Kafka's records. An event's offset is its place."""

    events: Sequence[Event] = ()
    chunk: int = 2
    rate: int = 1000
    """Milliseconds between two records."""
    with_nulls: bool = True

    def records(self, part: OffsetRange, end: ReadEnd) -> Iterator[pa.RecordBatch]:
        for first in range(part.first, part.end, self.chunk):
            offsets = range(first, min(part.end, first + self.chunk))
            yield records_of(self.events, offsets, self.rate, with_nulls=self.with_nulls)


def records_of(
    events: Sequence[Event], offsets: Iterable[int], rate: int, *, with_nulls: bool = True
) -> pa.RecordBatch:
    """``with_nulls``: null values alone have a column too."""
    rows = [
        {
            "kafka": {"topic": "t", "partition": 0, "offset": offset, "time": EPOCH + timedelta(milliseconds=offset)},
            "key": None if events[offset].id is None else {"id": events[offset].id},
            "value": events[offset].value(rate * offset),
        }
        for offset in offsets
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    if not with_nulls and not batch.column("value").is_valid().to_numpy(zero_copy_only=False).any():
        return batch.select(["kafka", "key"])
    orders = own_orders("t", None, {name: batch.column(name) for name in SCHEMA.names})
    assert orders is not None
    return batch.append_column(ORDER, orders)


@dataclass
class Table:
    """A raw table without its log."""

    files: list[DataFile] = field(default_factory=list)
    marks: dict[int, Mark] = field(default_factory=dict)
    left_out: dict[int, int] = field(default_factory=dict)
    orders: dict[int, Order] = field(default_factory=dict)


def ingested(
    events: Sequence[Event],
    batches: Sequence[Sequence[OffsetRange]],
    chunk: int = 2,
    rate: int = 1000,
    *,
    with_nulls: bool = True,
    bounded: bool = True,
) -> list[int]:
    """The offsets that the raw table has after the batches. A batch has a part for each task. ``bounded``: whether the log has
    the lowest orders of the files: it has none where compaction puts records without orders into a file."""
    table = Table()
    source = TopicSource({}, None, "t", SIDE, SIDE, KEY, VALUE)
    with tempfile.TemporaryDirectory() as lake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest_files, "run_tasks", lambda _, count, work: [work(index) for index in range(count)])
        patch.setattr(repeats, "read_chunks", lambda _, part, now: [chunk_of(events, part)])
        for parts in batches:
            orders = dict(table.orders) or None
            reading = RangeReading(None, lake, INPUT, source, parts, 0, SCHEMA, 1, orders=orders)  # type: ignore[arg-type]
            reader = EventReader(source, parts, 0, {}, orders, {}, None, "", events, chunk, rate, with_nulls)
            ends = [write_part(reader, index, reading.uri) for index in range(len(parts))]
            files, _, table.orders = carry_times(reading, batch_files(reading, ends, SCHEMA, [], {}))
            files = without_repeats(reading, files, table)  # type: ignore[arg-type]
            check_dropped(reading, files, parts)
            table.files += [item if bounded else replace(item, min_order=None) for item in files.files]
            table.left_out[0] = table.left_out.get(0, 0) + files.left_out.get(0, 0)
            table.marks[0] = Mark(max(part.end for part in parts) - 1, 0)
        return [
            row["offset"]
            for item in table.files
            for row in pq.read_table(Path(reading.uri, item.path), columns=["kafka"])["kafka"].to_pylist()
        ]


def chunk_of(events: Sequence[Event], part: OffsetRange) -> RecordChunk:
    records = records_of(events, range(part.first, part.end), 1000)
    return RecordChunk(records, records.slice(0, 0), 0, Mark(part.first, 0))


def check_dropped(reading: RangeReading, files: BatchFiles, parts: Sequence[OffsetRange]) -> None:
    """The side table accounts for each offset that the raw table lacks."""
    offsets = set(range(min(part.first for part in parts), max(part.end for part in parts)))
    for item in files.files:
        rows = pq.read_table(Path(reading.uri, item.path), columns=["kafka"])["kafka"].to_pylist()
        assert (item.records, item.first, item.last) == (len(rows), rows[0]["offset"], rows[-1]["offset"])
        offsets -= {row["offset"] for row in rows}
    left_out = set[int]()
    for item in files.dropped:
        for row in pq.read_table(Path(reading.side_uri, item.path)).to_pylist():
            assert row["error"] == repeats.REPEAT
            left_out |= set(range(row["kafka"]["offset"], row["end"]))
    assert offsets == left_out
    assert files.repeats == files.left_out.get(0, 0) == len(left_out)


@st.composite
def source_events(draw: st.DrawFn) -> list[Event]:
    """Changes of a few rows in the order of the source. Changes of different rows may share a position. A delete has a tombstone,
    and a row may come back with an old value."""
    events: list[Event] = []
    rows: dict[int, int] = {}
    position, ids_there = 10, set[int]()
    for _ in range(draw(st.integers(1, 8))):
        id = draw(st.integers(0, 2))
        if id in ids_there or draw(st.booleans()):
            position, ids_there = position + 1, set()
        ids_there.add(id)
        after = draw(st.integers(0, 1)) if id not in rows or draw(st.booleans()) else None
        events.append(Event(id, position, rows.get(id), after))
        if after is None:
            del rows[id]
            events.append(Event(id, None))
        else:
            rows[id] = after
    return events


@st.composite
def restarts(draw: st.DrawFn) -> tuple[list[Event], list[int], list[list[OffsetRange]]]:
    """The records of a topic whose connector is killed now and then; the offsets of the records that come for the first time;
    and the batches of ingest, a list of parts each."""
    events = draw(source_events())
    starts = [place for place, event in enumerate(events) if event.position is not None]
    sent: list[Event] = []
    first_times: list[int] = []
    end = start = 0
    while end < len(events):
        stop = draw(st.integers(start + 1, len(events)))
        for place in range(start, stop):
            if place >= end:
                first_times.append(len(sent))
            sent.append(events[place])
        end = max(end, stop)
        start = draw(st.sampled_from([place for place in starts if place <= stop]))
    cuts = sorted(draw(st.sets(st.integers(1, len(sent)), max_size=5)) | {len(sent)})
    parts = [OffsetRange(0, first, last) for first, last in zip([0, *cuts], cuts, strict=False) if last > first]
    batches: list[list[OffsetRange]] = []
    for part in parts:
        if batches and draw(st.booleans()):
            batches[-1].append(part)
        else:
            batches.append([part])
    return sent, first_times, batches


@settings(deadline=None, max_examples=40)
@given(restarts(), st.integers(1, 3))
def test_each_change_is_there_once_however_ingest_is_cut(
    story: tuple[list[Event], list[int], list[list[OffsetRange]]], chunk: int
) -> None:
    sent, first_times, batches = story
    assert ingested(sent, batches, chunk) == first_times


def whole(*events: Event) -> list[int]:
    """The offsets in the raw table, ingested at once and one by one: the same."""
    offsets = [OffsetRange(0, offset, offset + 1) for offset in range(len(events))]
    at_once = ingested(events, [[OffsetRange(0, 0, len(events))]])
    assert at_once == ingested(events, [[part] for part in offsets])
    return at_once


def test_changes_of_one_position_and_key_are_changes_unless_the_last_one_comes_again() -> None:
    there, back = Event(1, 10, 0, 1), Event(1, 10, 1, 0)
    assert whole(there, back, there) == [0, 1, 2]
    assert whole(there, there) == [0]
    following = Event(1, 11, 1, 2)
    assert whole(there, back, there, following, there, back, there, following) == [0, 1, 2, 3, 4, 5, 6]
    created, deleted, tombstone = Event(2, 20, None, 1), Event(2, 20, 1, None), Event(2, None)
    assert whole(created, deleted, tombstone, created, deleted, tombstone) == [0, 1, 2, 3, 4, 5]


def test_equal_rows_that_come_at_once_are_rows_of_a_table_without_a_primary_key() -> None:
    """A key of ``message.key.columns`` is not unique, and PostgreSQL gives the rows of a COPY one position."""
    row = Event(1, 10, None, 1)
    assert ingested([row, row], [[OffsetRange(0, 0, 2)]], rate=1) == [0, 1]
    assert ingested([row, row], [[OffsetRange(0, 0, 2)]], rate=1000) == [0]
    again = replace(row, delay=5000)
    assert ingested([row, again, again], [[OffsetRange(0, 0, 3)]], rate=1) == [0, 2], "a restart between equal rows"


@pytest.mark.parametrize(
    ("connector", "fields", "is_unique"),
    [
        ("PostgreSQL", {"lsn": pa.int64(), "ts_ms": pa.int64()}, True),
        ("PostgreSQL without a time", {"lsn": pa.int64()}, False),
        (
            "SQL Server",
            {"change_lsn": pa.string(), "commit_lsn": pa.string(), "event_serial_no": pa.int64(), "ts_ms": pa.int64()},
            True,
        ),
        ("MySQL", {"file": pa.string(), "pos": pa.int64(), "row": pa.int32(), "ts_ms": pa.int64()}, False),
        ("MongoDB", {"ord": pa.int32(), "ts_ms": pa.int64()}, False),
    ],
)
def test_a_source_whose_positions_several_changes_share_has_no_repeats(
    connector: str, fields: dict[str, pa.DataType], is_unique: bool
) -> None:
    """In a compressed transaction of MySQL, a row may get an old value back at an old position."""
    source = pa.struct({"connector": pa.string(), "snapshot": pa.string(), **fields}.items())
    assert repeats.identifies_changes(pa.struct([("op", pa.string()), ("source", source)])) == is_unique, connector


def test_a_record_that_differs_is_another_change() -> None:
    """A log that begins anew comes to an old position with other contents."""
    change, later = Event(1, 10, 0, 1), Event(2, 20, 0, 1)
    assert whole(change, later, change) == [0, 1]
    assert whole(change, later, Event(1, 10, 0, 2)) == [0, 1, 2]
    assert whole(change, later, Event(2, 10, 0, 1)) == [0, 1, 2]
    assert whole(change, later, Event(1, 11, 0, 1)) == [0, 1, 2]


def test_a_part_of_tombstones_alone_has_no_values() -> None:
    """Compaction of a topic leaves the tombstone of a deleted row alone. The first batch of a table does not know its type."""
    change, later, tombstone = Event(1, 10, 0, 1), Event(2, 11, 0, 1), Event(3, None)
    parts = [OffsetRange(0, 0, 2), OffsetRange(0, 2, 3), OffsetRange(0, 3, 5)]
    assert ingested([change, later, tombstone, change, later], [parts], with_nulls=False) == [0, 1, 2]


def test_a_file_with_records_of_no_order_is_searched() -> None:
    change, later = Event(1, 10, 0, 1), Event(2, 11, 0, 1)
    batches = [[OffsetRange(0, 0, 2)], [OffsetRange(0, 2, 4)]]
    assert ingested([change, later, change, later], batches, bounded=False) == [0, 1]


def test_a_time_that_python_cannot_hold_changes_no_other_row() -> None:
    """PostgreSQL's infinity. The rows of a COPY have one position, and ingest ends between two of them."""
    rows = Event(1, 10, None, 1), Event(2, 10, None, INFINITY)
    later = Event(3, 11, None, 1)
    assert whole(*rows, later, *rows) == [0, 1, 2]
    batches = [[OffsetRange(0, 0, 3)], [OffsetRange(0, 3, 4)], [OffsetRange(0, 4, 5)]]
    assert ingested([*rows, later, *rows], batches) == [0, 1, 2]


def test_without_a_key_a_position_below_the_last_one_is_needed() -> None:
    """A table without a primary key may have equal rows, and PostgreSQL gives the rows of a COPY one position."""
    row, later = Event(None, 10, None, 1), Event(None, 20, None, 1)
    assert whole(row, row, later) == [0, 1, 2]
    assert whole(row, row, later, row, row, later) == [0, 1, 2, 3, 4, 5]
    assert whole(row, later, row, later) == [0, 1, 3]


ENVELOPE = (
    "before struct<v:bigint>, after struct<v:bigint>, op string, ts_ms bigint, "
    "source struct<connector:string,snapshot:string,ts_ms:bigint,lsn:bigint,sequence:string>"
)
FILE = f"""
inputs:
  - {{topic: $left, pool: Raw, format: json, key-schema: "id bigint", schema: "{ENVELOPE}"}}
  - {{topic: $right, pool: Raw, format: json, key-schema: "id bigint", schema: "{ENVELOPE}"}}
outputs:
  - {{topic: $out, pool: Staging, format: json, create: {{replication-factor: 1}}}}
order-delay: 0.05
transforms:
  - name: create
    type: denorm
    where: value.op = 'c'
    left: $left
    right: $right
    join-on: left.key.id = right.key.id
    out: $out
    key: left.key
    value: {{l: left.value.after.v, r: right.value.after.v}}
  - {{name: update, type: stateless, where: value.op = 'u', in: $right, out: $out, key: in.key, value: {{r: in.value.after.v}}}}
  - {{name: delete, type: stateless, where: value.op = 'd', in: $left, out: $out, key: in.key, value: null}}
"""


def send(it: Mini, topic: str, *events: Event, time: int = 0) -> None:
    for place, event in enumerate(events):
        value = event.value(time + place)
        if value is not None:
            value = {name: part for name, part in value.items() if name != "transaction"}
        it.send(topic, (json.dumps({"id": event.id}).encode(), value))


def transform(it: Mini) -> None:
    list(runner.etl_all(it.pipeline, lambda: it.spark))


@pytest.mark.slow
def test_a_restarted_connector_adds_no_output(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The connector sends the creations of a row again, of which another topic has the deletion. Nothing waits for a second
    counterpart, and the row does not come back. Ingest ends between a repeated delete and its tombstone."""
    it = mini(services, spark, tmp_path, unique, FILE)
    left = [Event(1, 10, None, 5), Event(2, 11, None, 6), Event(1, 30, 5, None), Event(1, None)]
    right = [Event(1, 12, None, 7), Event(2, 13, None, 8), Event(2, 14, 8, 9)]
    send(it, it.left, *left)
    send(it, it.right, *right)
    list(runner.ingest_all(it.pipeline, lambda: spark, [it.left, it.right]))
    transform(it)
    outputs = it.staged()
    assert [row["key"]["id"] for row in outputs] == [1, 2, 2, 1]
    send(it, it.left, *left[:3], time=1000)
    commit = it.ingest(it.left)[it.left]
    assert (commit.records, commit.repeats, commit.left_out) == (0, 3, 0)
    send(it, it.left, left[3], Event(3, 50, None, 1), time=1000)
    send(it, it.right, *right, Event(3, 51, None, 2), time=1000)
    commits = {commit.topic: commit for commit in runner.ingest_all(it.pipeline, lambda: spark, [it.left, it.right])}
    assert {topic: (commit.records, commit.repeats) for topic, commit in commits.items()} == {
        it.left: (1, 1),
        it.right: (1, 3),
    }
    transform(it)
    rows = it.staged()
    assert rows[: len(outputs)] == outputs
    assert [(row["key"]["id"], row["value"]) for row in rows[len(outputs) :]] == [(3, {"l": 1, "r": 2})]
    it.publish()
    results = list(run_all(it.pipeline))
    assert [(result.name, result.passed) for result in results if not result.passed] == []
    assert it.classes(it.left) == {"done": 4, "dropped": 1}
    state = open_raw(it.lake, "Raw", it.left)
    assert state is not None
    assert state.left_out == {0: 4}
    with pytest.raises(LakeError, match="offset 5 is not pending: ingest left it out: it repeats an earlier change"):
        trace_rows(it.pipeline, it.left, 0, 5)


def test_an_input_in_the_order_of_time_keeps_every_record(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    text = FILE.replace("topic: $left,", "topic: $left, order: time,").replace(
        "topic: $right,", "topic: $right, order: time,"
    )
    it = mini(services, spark, tmp_path, unique, text)
    send(it, it.left, Event(1, 10, None, 5), Event(1, 10, None, 5))
    commit = it.ingest(it.left)[it.left]
    assert (commit.records, commit.repeats) == (2, 0)
