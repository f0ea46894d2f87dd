"""The order of records in their source: each connector's positions, and orders that never run back, however ingest is cut."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets import offsets
from zync_assets.errors import SchemaError
from zync_assets.ingest import files as ingest_files
from zync_assets.ingest.carrier import orders_between
from zync_assets.ingest.files import RangeReading, batch_files, carry_times
from zync_assets.ingest.order import connector_of, own_orders, source_name, transaction_names
from zync_assets.ingest.source import TopicSource
from zync_assets.ingest.task import ReadEnd, TopicReader, write_part
from zync_assets.lake.log import Order
from zync_assets.lake.quarantine_table import EVERYTHING
from zync_assets.lake.raw import ORDER, RawState, open_raw
from zync_assets.lake.raw_files import LOWEST, ORDER_TYPE, orders_around
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input, SideFormat, SourceOrder
from zync_assets.runner import replay_all
from zync_assets_tests.lake.rows import SCHEMA, records
from zync_assets_tests.mini import Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE = [("connector", pa.string()), ("name", pa.string()), ("snapshot", pa.string())]
POSTGRES = pa.struct([*SOURCE, ("sequence", pa.string()), ("lsn", pa.int64())])
MYSQL = pa.struct([*SOURCE, ("file", pa.string()), ("pos", pa.int64()), ("row", pa.int32())])
SQL_SERVER = pa.struct(
    [*SOURCE, ("change_lsn", pa.string()), ("commit_lsn", pa.string()), ("event_serial_no", pa.int64())]
)
MONGODB = pa.struct([*SOURCE, ("ts_ms", pa.int64()), ("ord", pa.int32())])


def envelopes(kind: pa.DataType, sources: Sequence[dict[str, Any] | None]) -> pa.Array:
    """A value for each source; a tombstone for None."""
    rows = [None if each is None else {"op": "u", "source": {"snapshot": "false", **each}} for each in sources]
    return pa.array(rows, pa.struct([("op", pa.string()), ("source", kind)]))


def orders_of(kind: pa.DataType, *sources: dict[str, Any] | None) -> list[Order | None]:
    found = own_orders("t", None, {"value": envelopes(kind, sources)})
    assert found is not None
    assert found.type == ORDER_TYPE
    return [None if each is None else (each["high"], each["low"]) for each in found.to_pylist()]


longs = st.integers(0, 10**18 - 1)


@given(st.lists(st.tuples(st.none() | longs, st.none() | longs, longs, st.booleans(), st.booleans()), max_size=20))
def test_postgres_orders_by_the_last_commit_and_then_by_the_change(
    changes: list[tuple[int | None, int | None, int, bool, bool]],
) -> None:
    sources: list[dict[str, Any]] = []
    expected: list[Order] = []
    for commit, change, lsn, has_sequence, is_spaced in changes:
        texts = [None if each is None else str(each) for each in (commit, change)]
        text = json.dumps(texts, separators=(", " if is_spaced else ",", ":"))
        sources.append({"lsn": lsn, "sequence": text if has_sequence else None})
        expected.append((commit or 0, change) if has_sequence and change is not None else (lsn, lsn))
    assert orders_of(POSTGRES, *sources) == expected


@given(st.lists(st.tuples(st.integers(0, 999_999), st.integers(0, 2**40 - 1), st.integers(0, 2**31 - 1)), max_size=20))
def test_mysql_orders_by_file_position_and_row(places: list[tuple[int, int, int]]) -> None:
    found = orders_of(MYSQL, *({"file": f"mysql-bin.{n:06}", "pos": pos, "row": row} for n, pos, row in places))
    assert found == [(n << 40 | pos, row) for n, pos, row in places]
    assert sorted(places) == [place for _, place in sorted(zip(found, places, strict=True))]


def lsn(log_file: int, block: int, slot: int) -> str:
    return f"{log_file:08x}:{block:08x}:{slot:04X}"


parts = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**26 - 1), st.integers(0, 4095))


@given(st.lists(st.tuples(parts, st.integers(0, 63), parts, st.integers(0, 15)), min_size=1, max_size=20))
def test_sql_server_orders_by_commit_change_and_event(
    changes: list[tuple[tuple[int, int, int], int, tuple[int, int, int], int]],
) -> None:
    """A transaction begins in the log file of its commit or in one of the 63 files before it."""
    keys = [(commit, (max(0, commit[0] - before), *change[1:]), event) for commit, before, change, event in changes]
    found = orders_of(
        SQL_SERVER,
        *({"commit_lsn": lsn(*commit), "change_lsn": lsn(*change), "event_serial_no": e} for commit, change, e in keys),
    )
    ranked = sorted(range(len(keys)), key=lambda index: keys[index])
    for one, other in pairwise(ranked):
        assert (found[one] < found[other]) == (keys[one] < keys[other])  # type: ignore[operator]


def test_sql_server_s_missing_and_odd_positions() -> None:
    found = orders_of(
        SQL_SERVER,
        {"commit_lsn": lsn(1, 2, 3), "change_lsn": None, "event_serial_no": 1},
        {"commit_lsn": None, "change_lsn": lsn(1, 2, 3), "event_serial_no": 1},
        {"commit_lsn": "no LSN of the log file", "change_lsn": None, "event_serial_no": 1},
        {"commit_lsn": lsn(2**32 - 1, 0, 0xFFFF), "change_lsn": lsn(1, 2, 3), "event_serial_no": 99},
    )
    assert found[0] == found[1]
    assert found[2] is None
    assert found[3] is not None


@given(st.lists(st.tuples(st.integers(0, 2**41), st.integers(0, 2**31 - 1)), max_size=20))
def test_mongodb_orders_by_second_and_number(places: list[tuple[int, int]]) -> None:
    found = orders_of(MONGODB, *({"ts_ms": at, "ord": number} for at, number in places))
    assert found == [(at // 1000, number) for at, number in places]


def places(count: int, partition: int = 0) -> pa.Array:
    return pa.array([{"partition": partition}] * count, pa.struct([("partition", pa.int32())]))


def transaction_orders(*ids: str | None, status: str = "END") -> list[Order | None]:
    rows = [{"status": status, "id": each} for each in ids]
    value = pa.array(rows, pa.struct([("status", "string"), ("id", "string")]))
    found = own_orders("shop.transaction", SourceOrder(transactions=True), {"kafka": places(len(rows)), "value": value})
    assert found is not None
    return [None if each is None else (each["high"], each["low"]) for each in found.to_pylist()]


def test_the_order_of_a_transaction_record_lies_between_its_changes_and_the_next_ones() -> None:
    assert transaction_orders("571:24023400", None) == [(24023400, 0), None]
    assert transaction_orders("571:24023400", status="BEGIN") == [None]
    mine = {"sequence": '["24023128","24023360"]', "lsn": 24023360}
    following = {"sequence": '["24023400","24023500"]', "lsn": 24023500}
    assert [order < (24023400, 0) for order in orders_of(POSTGRES, mine, following) if order] == [True, False]
    lsn, next_lsn, last = "0000002d:00000378:0012", "0000002d:00000378:0013", "0000002d:00000378:ffff"
    lsns = [{"commit_lsn": each, "change_lsn": each, "event_serial_no": 2} for each in (lsn, next_lsn, last)]
    (end, end_of_last), changes = transaction_orders(lsn, last), orders_of(SQL_SERVER, *lsns)
    assert [order < end for order in changes if order and end] == [True, False, False]
    assert [order < end_of_last for order in changes if order and end_of_last] == [True, True, True]
    binlog = ["file=mysql-bin.000003,pos=4", "3e11fa47-71ca-11e1-9e33-c80aa9429562:23", "0-1-23"]
    assert transaction_orders(*binlog) == [None] * 3, "the ids hold no end"
    assert transaction_names(pa.array(binlog)).to_pylist() == binlog
    names = transaction_names(pa.array(["571:24023400", "571:24023360", lsn]))
    assert names.to_pylist() == ["571", "571", lsn]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (pa.array([{"id": "0a001b00fe010000", "status": "END"}]), "holds no position"),
        (pa.array([{"id": '{"id": {"$uuid": "d1"}}:3', "status": "END"}]), "of MongoDB.*would wait for ever"),
        (pa.array([{"id": "0-1-23", "status": "END"}]), "has records in partition 1.*one partition"),
        (pa.array([{"id": 571, "status": "END"}]), "ids of type int64"),
        (pa.array([{"op": "c"}]), "without a field id"),
    ],
)
def test_records_of_another_kind_are_refused_as_transactions(value: pa.Array, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        own_orders("t", SourceOrder(transactions=True), {"kafka": places(len(value), 1), "value": value})


@pytest.mark.parametrize("kind", [POSTGRES, MYSQL, SQL_SERVER, MONGODB])
def test_snapshots_come_first_and_tombstones_have_no_order_of_their_own(kind: pa.DataType) -> None:
    place = {"lsn": 5, "file": "b.1", "pos": 5, "row": 5, "commit_lsn": lsn(1, 2, 3), "ts_ms": 5000, "ord": 5}
    place["event_serial_no"] = 1
    own = {item.name: place[item.name] for item in kind if item.name in place}
    snapshots = ("true", "first", "first_in_data_collection", "last_in_data_collection", "last", "initial")
    assert orders_of(kind, *({**own, "snapshot": each} for each in snapshots)) == [LOWEST] * len(snapshots)
    changed, tombstone, incremental, unknown = orders_of(
        kind, own, None, {**own, "snapshot": "incremental"}, {**own, "snapshot": None}
    )
    assert changed is not None
    assert changed == unknown
    assert (tombstone, incremental) == (None, None)


def test_old_debezium_s_snapshot_is_a_truth_value() -> None:
    kind = pa.struct([("connector", pa.string()), ("snapshot", pa.bool_()), ("lsn", pa.int64())])
    found = orders_of(kind, {"snapshot": True, "lsn": 7}, {"snapshot": False, "lsn": 7})
    assert found == [LOWEST, (7, 7)]


def test_values_that_are_no_envelopes_cost_a_look_at_their_type() -> None:
    for kind in (pa.null(), pa.string(), pa.struct([("id", pa.int64())]), pa.struct([("source", pa.string())])):
        assert connector_of(kind) is None
        assert own_orders("t", None, {"value": pa.nulls(3, kind)}) is None
    oracle = pa.struct([*SOURCE, ("scn", pa.string())])
    assert own_orders("t", None, {"value": envelopes(oracle, [{"scn": "5"}])}) is None
    assert own_orders("t", SourceOrder(time=True), {"value": envelopes(POSTGRES, [{"lsn": 5}])}) is None


def test_the_domain_is_the_name_of_the_first_source() -> None:
    values = envelopes(POSTGRES, [None, {"lsn": 1, "name": "shop"}, {"lsn": 2, "name": "other"}])
    assert source_name(pa.RecordBatch.from_arrays([values], ["value"])) == "shop"


def batch_of(offset: int, orders: Sequence[Order | None], has_column: bool) -> pa.RecordBatch:
    made = records(range(offset, offset + len(orders)), [1000] * len(orders))
    own = pa.array([None if each is None else {"high": each[0], "low": each[1]} for each in orders], ORDER_TYPE)
    return made.append_column(ORDER, own) if has_column else made


@dataclass(frozen=True)
class GivenReader(TopicReader):
    """Reads records that a test gives, instead of Kafka's."""

    chunks: dict[OffsetRange, list[pa.RecordBatch]] | None = None

    def records(self, part: OffsetRange, end: ReadEnd) -> Iterator[pa.RecordBatch]:
        assert self.chunks is not None
        end.last_time = 1000
        yield from self.chunks[part]


SIDE = SideFormat("json")
INPUT = Input("t", "Raw", SIDE, SIDE)
own = st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3))


chunks_of = st.lists(st.lists(own, min_size=1, max_size=3), min_size=1, max_size=3)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(chunks_of, min_size=1, max_size=3), min_size=1, max_size=3))
def test_orders_never_run_back_however_ingest_is_cut(batches: list[list[list[list[Order | None]]]]) -> None:
    """A batch of tasks, a task of chunks, a chunk of records. A chunk whose records have no order may lack the column."""
    sent: list[Order | None] = []
    stored: list[Order] = []
    before: dict[int, Order] | None = None
    with tempfile.TemporaryDirectory() as lake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest_files, "run_tasks", lambda _, count, work: [work(index) for index in range(count)])
        for tasks in batches:
            chunks: dict[OffsetRange, list[pa.RecordBatch]] = {}
            for task in tasks:
                first, made = len(sent), []
                for chunk in task:
                    made.append(batch_of(len(sent), chunk, any(each is not None for each in chunk)))
                    sent += chunk
                chunks[OffsetRange(0, first, len(sent))] = made
            ranges = list(chunks)
            source = TopicSource({}, None, "t", SIDE, SIDE, None, None)
            reading = RangeReading(None, lake, INPUT, source, ranges, 0, SCHEMA, 1, orders=before)  # type: ignore[arg-type]
            reader = GivenReader(source, ranges, 0, {}, before, {}, None, "", chunks)
            ends = [write_part(reader, index, reading.uri) for index in range(len(ranges))]
            files, _, after = carry_times(reading, batch_files(reading, ends, SCHEMA, [], {}))
            for item in sorted(files.files, key=lambda item: item.first or 0):
                table = pq.read_table(Path(reading.uri, item.path))
                rows = table.column(ORDER).to_pylist() if ORDER in table.column_names else [None] * item.records
                pairs = [LOWEST if row is None else (row["high"], row["low"]) for row in rows]
                assert item.min_order is None or all(item.min_order <= pair for pair in pairs)
                assert item.max_order is None or all(item.max_order >= pair for pair in pairs)
                assert (item.max_order is None) == (ORDER not in table.column_names)
                stored += pairs
            before = after or before
        assert stored == list(accumulate((each or LOWEST for each in sent), max))
        assert (before or {0: LOWEST})[0] == stored[-1]


def column(order: SourceOrder, kind: pa.DataType, *values: object) -> list[object]:
    array = pa.array([None if each is None else {"At": each} for each in values], pa.struct([("At", kind)]))
    found = own_orders("t", order, {"value": array})
    assert found is not None
    return found.to_pylist()


def test_a_field_is_an_order() -> None:
    order = SourceOrder("value.at", path=("value", "at"))
    pair = pa.struct([("commit", pa.int64()), ("change", pa.int32())])
    assert column(order, pa.int32(), 7, None) == [{"high": 7, "low": 0}, None]
    assert column(order, pa.timestamp("ms"), 7) == [{"high": 7000, "low": 0}]
    assert column(order, pa.date32(), 7) == [{"high": 7, "low": 0}]
    assert column(order, pair, {"commit": 7, "change": 8}) == [{"high": 7, "low": 8}]
    assert own_orders("t", order, {"value": pa.nulls(2)}) is None
    with pytest.raises(SchemaError, match=r"value\.at is string"):
        column(order, pa.string(), "7")
    with pytest.raises(SchemaError, match="no field lsn"):
        column(SourceOrder("value.lsn", path=("value", "lsn")), pa.int64(), 7)


ENVELOPE = (
    "op string, source struct<connector:string,name:string,snapshot:string,lsn:bigint,sequence:string>, id bigint"
)
FILE = f"""
inputs:
  - {{topic: $left, pool: Raw, key-format: string, value-format: json, schema: "{ENVELOPE}"}}
"""


def change(op: str, number: int, lsn: int = 0, commit: int | None = None, snapshot: str = "false") -> dict[str, Any]:
    sequence = json.dumps([None if commit is None else str(commit), str(lsn)], separators=(",", ":"))
    source = {"connector": "postgresql", "name": "shop", "snapshot": snapshot, "lsn": lsn, "sequence": sequence}
    return {"op": op, "id": number, "source": source}


def state_of(it: Mini) -> RawState:
    state = open_raw(it.lake, "Raw", it.left)
    assert state is not None
    return state


def stored_orders(it: Mini) -> list[Order]:
    """The orders of the raw records, by offset."""
    found: list[Order] = []
    for item in state_of(it).files:
        for record in pq.read_table(Path(state_of(it).table.uri, item.path)).to_pylist():
            order = record.get(ORDER)
            found.append(LOWEST if order is None else (order["high"], order["low"]))
    return found


def test_ingest_keeps_the_source_s_order(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    """Two transactions overlap: Debezium sends the one with the lower LSNs last, since it was committed last.

    The raw table begins without orders, as older versions made it.
    """
    it = mini(services, spark, tmp_path, unique, FILE)
    [item] = it.pipeline.inputs
    ordered, timed = it.pipeline, replace(it.pipeline, inputs=(replace(item, order=SourceOrder(time=True)),))
    it.pipeline = timed
    it.send(it.left, change("c", 1, 10, commit=5), change("c", 2, 11, commit=5))
    it.ingest(it.left)
    assert (state_of(it).has_order, state_of(it).domain, stored_orders(it)) == (False, None, [LOWEST] * 2)
    it.pipeline = ordered
    it.send(it.left, change("r", 1, 90, snapshot="true"), change("r", 2, 90, snapshot="last"))
    assert it.ingest(it.left)[it.left].added_fields == ()
    assert (state_of(it).domain, state_of(it).orders) == ("shop", {0: LOWEST})
    it.send(
        it.left,
        change("c", 3, 120, commit=100),
        change("d", 3, 130, commit=100),
        None,
        b"garbage",
        change("u", 1, 110, commit=140),
        change("r", 2, 0, snapshot="incremental"),
        change("u", 2, 125, commit=140),
    )
    it.ingest(it.left)
    changes = [(100, 120), (100, 130), (100, 130), (140, 110), (140, 110), (140, 125)]
    assert stored_orders(it) == [LOWEST] * 4 + changes
    assert state_of(it).orders == {0: (140, 125)}
    bounds = [(None, None), (LOWEST, LOWEST), ((100, 110), (140, 130))]
    assert [(file.min_order, file.max_order) for file in state_of(it).files] == bounds
    assert ORDER not in state_of(it).schema.names
    # Records without an order of their own run on from the table's order, and so do all records in the order of time.
    it.send(it.left, b"garbage", None)
    it.ingest(it.left)
    it.pipeline = timed
    it.send(it.left, change("u", 2, 500, commit=500))
    it.ingest(it.left)
    assert stored_orders(it)[-2:] == [(140, 125)] * 2
    assert state_of(it).domain is None
    before, after = orders_around(state_of(it), 0, np.array([0, 3, 7, 99]))
    assert before.tolist() == [[*LOWEST], [*LOWEST], [100, 130], [140, 125]]
    assert after.tolist() == [[*LOWEST], [*LOWEST], [140, 110], [2**63 - 1] * 2]


def test_a_record_that_comes_late_has_its_own_order_within_those_around_it() -> None:
    before, after = (np.array([order] * 4 + [(40, 0)], np.int64) for order in ((10, 5), (30, 1)))
    own = [None, (10, 4), (20, 0), (12, 9), (99, 0)]
    orders = pa.array([order and dict(zip(ORDER_TYPE.names, order, strict=True)) for order in own], ORDER_TYPE)
    # The last place has equal orders on both sides: the log of the source began again there.
    expectation = [(10, 5), (10, 5), (20, 0), (20, 0), (40, 0)]
    found = orders_between(orders, before, after).to_pylist()
    assert [(order["high"], order["low"]) for order in found] == expectation
    found = orders_between(None, before, after).to_pylist()
    assert [(order["high"], order["low"]) for order in found] == [(10, 5)] * 4 + [(40, 0)]


@pytest.mark.slow
def test_an_expression_orders_records_that_the_shape_excludes_or_quarantine_has(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are read in several tasks, and a corrected expression replays a record into its place."""
    file = """
inputs:
  - topic: $left
    pool: Raw
    key-format: string
    value-format: json
    schema: "op string, id bigint, v string"
    shape: {where: value.op = 'c', value: {id: value.id}}
    order: {by: "$by"}
"""
    it = mini(services, spark, tmp_path, unique, file.replace("$by", "bigint(value.v)"))
    monkeypatch.setattr(offsets, "LEAST", 2)
    it.send(it.left, row(0, "5"), row(1, "9", "x"), row(2, "7"), row(3, "bad"), row(4, "8"), row(5, "11"), None)
    commit = it.ingest(it.left)[it.left]
    assert (commit.left_out, commit.quarantined) == (2, 1)
    assert stored_orders(it) == [(5, 0), (9, 0), (9, 0), (11, 0)]
    assert (state_of(it).domain, state_of(it).orders) == ("mini", {0: (11, 0)})
    again = it.edited(file.replace("$by", "try_cast(value.v AS BIGINT)"))
    list(replay_all(again.pipeline, lambda: spark, EVERYTHING))
    assert [(each["value"]["id"], each["kafka"]["offset"]) for each in again.raw(it.left)] == [
        (number, number) for number in (0, 2, 3, 4, 5)
    ]
    assert stored_orders(again) == [(5, 0), (9, 0), (9, 0), (9, 0), (11, 0)]
    text = it.edited(file.replace("$by", "concat(value.v, 'x')"))
    text.send(it.left, row(6, "12"))
    with pytest.raises(SchemaError, match=r"order\.by: concat\(value\.v, 'x'\) is string"):
        text.ingest(it.left)
