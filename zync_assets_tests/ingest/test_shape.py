"""``shape:`` of an input: what it leaves out never reaches the lake and is explained, what it keeps is mapped and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from zync_assets import offsets
from zync_assets.checks.output_checks import run_all
from zync_assets.errors import BadRecords, FieldMissing, SchemaError
from zync_assets.ingest import shape
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.ingest.repeats import Gaps
from zync_assets.lake.quarantine_table import EVERYTHING, Selection, quarantined_records
from zync_assets.lake.raw import open_raw
from zync_assets.lake.raw_files import KAFKA_TYPE
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline_file.conditions import without_root
from zync_assets.quarantine.replay import ReplayCommit
from zync_assets.runner import replay_all
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

if TYPE_CHECKING:
    Make = Callable[..., Mini]

COPY = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id}}
  - {name: gone, type: stateless, where: value is null, in: $left, out: $out, key: in.key, value: null}
"""


def text(shape: str, rules: str = COPY, more: str = "") -> str:
    return BOTH.replace("{topic: $left, ", f"{{topic: $left, shape: {shape}, {more}", 1) + rules


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    return lambda shape, rules=COPY, more="", partitions=1: mini(
        services, spark, tmp_path, unique, text(shape, rules, more), partitions
    )


def sound(it: Mini) -> None:
    results = list(run_all(it.pipeline))
    assert results
    assert [f"{item.name}: {item.summary}" for item in results if not item.passed] == []


def values(it: Mini) -> list[tuple[int, Any]]:
    return [(found["kafka"]["offset"], found["value"]) for found in it.raw(it.left)]


def lake_bytes(it: Mini) -> bytes:
    return b"".join(path.read_bytes() for path in Path(it.lake).rglob("*") if path.is_file())


def test_records_are_filtered_and_mapped_and_the_account_knows_them(make: Make) -> None:
    it = make("{where: value is null or value.op <> 'x', value: {id: value.id, n: length(value.v)}}")
    it.send(
        it.left, row(1, "personal"), row(2, "secret", op="x"), row(3, "secret", op="x"), None, row(5, "secret", op="x")
    )
    done = it.ingest()[it.left]
    assert (done.records, done.left_out, done.quarantined, done.until) == (2, 3, 0, {0: 5})
    assert values(it) == [(0, {"id": 1, "n": 8}), (3, None)]
    it.etl()
    assert [found["value"] and found["value"]["id"] for found in it.staged()] == [1, None]
    assert it.classes(it.left) == {"done": 2}
    assert [(entry["first"], entry["end"]) for entry in it.ledger("dropped")] == [(1, 3), (4, 5)]
    it.publish()
    sound(it)
    # Neither values nor headers: the lake has nothing of what was left out or mapped away.
    assert b"secret" not in lake_bytes(it)
    assert b"personal" not in lake_bytes(it)


def test_batches_go_on_and_fields_come_as_the_source_gets_them(make: Make) -> None:
    it = make("{value: value.after}")
    plain = 'value-format: json, schema: "op string, id bigint, v string"'
    it = it.edited(text("{value: value.after}").replace(plain, "value-format: connect-json", 1))

    def enveloped(after: dict[str, str], payload: dict[str, Any]) -> bytes:
        fields = [{"field": name, "type": kind, "optional": True} for name, kind in after.items()]
        inner = {"type": "struct", "fields": fields, "optional": True, "field": "after"}
        schema = {"type": "struct", "fields": [inner], "optional": False}
        return json.dumps({"schema": schema, "payload": {"after": payload}}).encode()

    it.send(it.left, enveloped({"id": "int64"}, {"id": 1}))
    it.ingest()
    it.send(it.left, enveloped({"id": "int64", "name": "string"}, {"id": 2, "name": "b"}))
    it.send(it.left, enveloped({"id": "int64"}, {"id": 3}))
    assert it.ingest()[it.left].added_fields == ("value.name",)
    it.send(it.left, enveloped({"id": "int64"}, {"id": 4}))
    it.ingest()
    assert [(offset, value["id"], value.get("name")) for offset, value in values(it)] == [
        (0, 1, None),
        (1, 2, "b"),
        (2, 3, None),
        (3, 4, None),
    ]


def test_a_shape_may_name_a_field_before_the_first_record_that_has_it(make: Make) -> None:
    shape = "{value: {id: value.id}}"
    it = make(shape)
    it.send(it.left, row(1))
    it.ingest()
    text = "inputs:" + it.pipeline.path.read_text().partition("inputs:")[2]
    now = it.edited(text.replace("v string", "v string, w int").replace(shape, "{value: {id: value.id, w: value.w}}"))
    now.send(now.left, {**row(2), "w": 5}, row(3))
    assert now.ingest()[now.left].added_fields == ("value.w",)
    assert [found["value"] for found in now.raw(now.left)] == [
        {"id": 1, "w": None},
        {"id": 2, "w": 5},
        {"id": 3, "w": None},
    ]
    wrong = now.edited(text.replace(shape, "{value: {id: value.nowhere}}"))
    wrong.send(wrong.left, row(4))
    with pytest.raises(FieldMissing, match="nowhere"):
        wrong.ingest()


def test_a_record_that_the_shape_fails_on_costs_only_itself(make: Make) -> None:
    it = make("{where: value.op <> 'x', value: {id: value.id, n: CAST(value.v AS INT)}}")
    records = [row(number, str(number)) for number in range(5)]
    records[1], records[2], records[3] = row(1, "no number"), row(2, "x", op="x"), row(3, "?")
    it.send(it.left, *records)
    it.send(it.left, b"{")
    done = it.ingest()[it.left]
    assert (done.records, done.left_out, done.quarantined) == (2, 1, 3)
    assert it.next(it.left) == {0: 6}
    it.etl()
    assert it.classes(it.left) == {"done": 2, "quarantined": 3}
    entries = quarantine(it)
    assert [(entry["kafka"]["offset"], entry["stage"]) for entry in entries] == [
        (1, "shape"),
        (3, "shape"),
        (5, "value"),
    ]
    assert json.loads(entries[0]["value"])["v"] == "no number"
    assert "CAST_INVALID_INPUT" in entries[0]["error"]
    assert all(item.passed for item in run_all(it.pipeline) if item.severity == "error")


@pytest.mark.slow
def test_a_record_on_which_the_shape_overflows_java_s_stack_costs_only_itself(make: Make) -> None:
    it = make("{where: \"value.v rlike '^(a|b)*$$'\", value: {id: value.id}}")
    it.send(it.left, row(1, "ab"), row(2, "ab" * 200_000), row(3, "c"), row(4))
    done = it.ingest()[it.left]
    assert (done.records, done.left_out, done.quarantined) == (2, 1, 1)
    [entry] = quarantine(it)
    assert entry["kafka"]["offset"] == 1
    assert "more stack than Java has" in entry["error"]


@pytest.mark.slow
def test_many_failures_among_many_records_take_few_jobs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that nest and repeat, nulls, and conditions that fail: all are found at once."""
    monkeypatch.setattr(shape, "TEXTS", 3)
    runs: list[object] = []
    collect = shape._Job._collect  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(shape._Job, "_collect", lambda job, frame: runs.append(job) or collect(job, frame))  # pyright: ignore[reportPrivateUsage, reportUnknownLambdaType]
    it = make("{where: CAST(value.op AS INT) = 1, value: {id: value.id, n: {m: CAST(value.v AS INT)}}}")
    records: list[Any] = [row(number, "1", "1") for number in range(1200)]
    for number in range(0, 1200, 30):
        records[number] = row(number, "x", "1") if number % 60 else row(number, "1", "x")
    records[7], records[8] = row(7, "x", "2"), b"null"
    it.send(it.left, *records)
    done = it.ingest()[it.left]
    assert (done.quarantined, done.records, done.left_out) == (40, 1158, 2)
    assert [entry["kafka"]["offset"] for entry in quarantine(it)] == list(range(0, 1200, 30))
    assert len(runs) <= 3 + shape.TEXTS


def quarantine(it: Mini) -> list[dict[str, Any]]:
    from deltalake import DeltaTable

    rows = DeltaTable(f"{it.lake}/~quarantine/Raw/{it.left}").to_pyarrow_table().to_pylist()
    return sorted((found for found in rows if found["stage"] != "dropped"), key=lambda found: found["kafka"]["offset"])


def test_where_bad_records_are_not_let_in_nothing_is_committed_and_the_offset_is_named(make: Make) -> None:
    it = make(
        "{value: {n: CAST(value.v AS INT)}}",
        rules=COPY.replace("in.value.id", "in.value.n"),
        more="on-bad-record: fail, ",
    )
    it.send(it.left, row(1, "1"), row(2, "two"))
    with pytest.raises(BadRecords, match=r"partition 0, offset 1: shape: .*CAST_INVALID_INPUT"):
        it.ingest(it.left)
    assert open_raw(it.lake, "Raw", it.left) is None


def test_too_many_failures_stop_the_run_and_name_the_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "MOST_FAILURES", 6)
    it = make("{value: {id: CAST(value.v AS INT)}}")
    it.send(it.left, *[row(number, "x") for number in range(10)])
    with pytest.raises(SchemaError, match=r"too many records, the first at partition 0, offset 0: .*try_cast"):
        it.ingest(it.left)
    assert open_raw(it.lake, "Raw", it.left) is None


def test_times_are_the_same_wherever_batches_are_cut_and_left_out_records_count(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets, "LEAST", 2)
    times = [1_700_000_000_000 + at for at in (5, 90, 10, 7, 95, 3)]
    it = make("{where: value.op <> 'x'}")
    records = [row(1), row(2, op="x"), row(3), row(4), row(5, op="x"), row(6)]
    it.send(it.left, *records, times=times)
    it.ingest()
    assert [found["kafka"]["time"].microsecond // 1000 for found in it.raw(it.left)] == [5, 90, 90, 95]
    it.send(it.left, row(7), times=times[:1])
    it.ingest()
    assert it.raw(it.left)[-1]["kafka"]["time"].microsecond // 1000 == 95


def test_a_shape_that_names_the_time_has_the_carried_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "LEAST", 2)
    it = make("{value: {id: value.id, at: unix_millis(kafka.time)}}")
    it.send(it.left, *[row(number) for number in range(6)], times=[5000, 9000, 1000, 2000, 3000, 9500])
    it.ingest()
    it.send(it.left, row(7), times=[1000])
    it.ingest()
    assert [value["at"] for _, value in values(it)] == [5000, 9000, 9000, 9000, 9000, 9500, 9500]


@pytest.mark.slow
def test_partitions_and_joins(make: Make) -> None:
    it = make("{where: value.id % 2 = 0, key: upper(key)}", rules=JOIN, partitions=2)
    for partition in range(2):
        it.send(it.left, *[row(number + 10 * partition) for number in range(6)], partition=partition)
        it.send(it.right, *[row(number + 10 * partition) for number in range(6)], partition=partition)
    it.step()
    assert {value["id"] for value in it.values()} == {0, 2, 4, 10, 12, 14}
    assert {found["key"] for found in it.staged()} == {"K0", "K2", "K4"}
    it.publish()
    assert all(item.passed for item in run_all(it.pipeline) if item.severity == "error")


def test_nothing_is_left_and_nothing_but_tombstones_is_there(make: Make) -> None:
    it = make("{where: value.op = 'u' or (value is null and key <> 'k0'), value: {id: value.id, op: value.op}}")
    it.send(it.left, None, None)
    it.ingest()
    assert values(it) == [(1, None)]
    it.send(it.left, row(1), row(2))
    assert it.ingest()[it.left].records == 0
    assert it.next(it.left) == {0: 4}
    it.send(it.left, row(3, op="u"))
    it.ingest()
    assert values(it) == [(1, None), (4, {"id": 3, "op": "u"})]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("{where: value.op}", "shape.where: value.op is string; it must be a condition"),
        ("{where: value.id.nothing = 1}", "shape.where"),
        ("{value: {a: value.id.nothing}}", "shape.value"),
    ],
)
def test_what_does_not_fit_the_records_is_told(make: Make, shape: str, message: str) -> None:
    it = make(shape)
    it.send(it.left, row(1))
    with pytest.raises(SchemaError, match=rf"input {it.left}, ") as error:
        it.ingest(it.left)
    assert message in str(error.value)


def test_the_lazy_batch_has_what_the_table_gets(make: Make, spark: SparkSession) -> None:
    it = make("{where: value.id > 1, value: {id: value.id}}")
    it.send(it.left, row(1), row(2), row(3))
    frame = read_input(spark, it.pipeline, plan_ingest(it.pipeline, it.left)).dataframe()
    assert frame.columns == ["kafka", "key", "value", "key_schema_id", "value_schema_id"]
    assert [found["value"]["id"] for found in frame.collect()] == [2, 3]


def test_left_out_offsets_become_ranges_without_a_gap() -> None:
    gaps = Gaps()
    batches = [gaps.add(places(*offsets)) for offsets in ([3, 4], [], [5, 7], [9])]
    found = [*batches, gaps.last_range()]
    spans = [(each["kafka"]["offset"], each["end"]) for batch in found for each in batch.to_pylist()]
    assert spans == [(3, 6), (7, 8), (9, 10)]
    assert all(each["kafka"]["headers"] is None for batch in found for each in batch.to_pylist())


def places(*offsets: int) -> pa.StructArray:
    header = [{"key": "h", "value": b"secret"}]
    rows = [
        {"topic": "t", "partition": 0, "offset": at, "time": 0, "timestamp": 0, "headers": header} for at in offsets
    ]
    return pa.array(rows, KAFKA_TYPE)


def test_a_side_that_is_always_null_is_null_in_the_expression() -> None:
    assert without_root("value.op = 'u' OR value IS NULL", "value") == "NULL = 'u' OR NULL IS NULL"
    assert without_root("filter(key.a, value -> value > 1)", "value") == "filter(key.a, value -> value > 1)"
    assert without_root("coalesce(value.items[0].a.b.c.d, size(value.items), value.a.b.c.d, 1)", "value") == (
        "coalesce(NULL, NULL, NULL, 1)"
    )


@pytest.mark.slow
def test_a_replay_goes_through_the_shape_that_there_is_now(make: Make) -> None:
    """Undecodable records, records that the shape still fails on, and records that it excludes stay in quarantine."""
    it = make("{value: {id: value.id, n: CAST(value.v AS INT)}}")
    it.send(it.left, row(0, "7"), row(1, "no number"), row(2, "x"), b"{", row(4, "8"), row(5, "?"))
    it.step()
    assert it.classes(it.left) == {"done": 2, "quarantined": 4}
    mended = "{where: value.v <> 'x', value: {id: value.id, n: \"CAST(nullif(value.v, 'no number') AS INT)\"}}"
    now = it.edited(text(mended))
    found = [one for one in replay_all(now.pipeline, lambda: it.spark, EVERYTHING) if isinstance(one, ReplayCommit)]
    assert [one.records for one in found] == [1]
    reasons = found[0].reasons
    assert list(reasons) == [(0, 3), (0, 5), (0, 2)]
    assert reasons[0, 3].startswith("value: ")
    assert reasons[0, 5] == "its shape fails on the record"
    assert reasons[0, 2].startswith("its shape leaves the record out")
    assert values(it) == [(0, {"id": 0, "n": 7}), (1, {"id": 1, "n": None}), (4, {"id": 4, "n": 8})]
    assert [record.offset for record in quarantined_records(now.pipeline)] == [2, 3, 5]
    assert b"no number" not in b"".join(path.read_bytes() for path in Path(it.lake, "Raw").rglob("*.parquet"))
    assert it.classes(it.left) == {"done": 3, "quarantined": 3}
    assert [value["id"] for value in it.values()] == [0, 4, 1]
    assert [
        f"{one.name}: {one.summary}" for one in run_all(now.pipeline) if one.severity == "error" and not one.passed
    ] == []
    assert list(replay_all(now.pipeline, lambda: it.spark, Selection(ranges=(OffsetRange(0, 1, 2),)))) == []
