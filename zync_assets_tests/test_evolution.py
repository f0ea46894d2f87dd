"""Writer schemas that change in mid-topic, through the whole chain: no file is rewritten, and every reader reads all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from zync_assets.checks.raw_checks import schema_change
from zync_assets.codecs.fields import lacked_by, lacking
from zync_assets.errors import RegistryUnavailable, SchemaChanged, SchemaError
from zync_assets.ingest.source import TopicSource, with_lacking_fields
from zync_assets.kafka.registry import Registry
from zync_assets.lake import quarantine_table
from zync_assets.lake.raw import WriterSchema, open_raw, raw_files
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import RegistryConfig, SideFormat
from zync_assets.publish.restore import restore
from zync_assets.spark.frames import parquet_frame
from zync_assets_tests.mini import BOTH, Mini, decoded, framed, mini
from zync_assets_tests.network.front import front

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AVRO = BOTH.replace('value-format: json, schema: "op string, id bigint, v string"', "value-format: avro").replace(
    "{topic: $out, pool: Staging, key-format: string, value-format: json,",
    "{topic: $out, pool: Staging, key-format: string, value-format: avro,",
)
RULES = """
transforms:
  - name: join
    type: denorm
    left: $left
    right: $right
    join-on: left.value.id = right.value.id
    out: $out
    key: left.key
    value: {id: left.value.id, amount: left.value.amount, price: left.value.price}
"""

Writer = Callable[[dict[str, Any]], bytes]


def decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


@pytest.fixture
def it(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Mini:
    return mini(services, spark, tmp_path, unique, AVRO + RULES)


def writer(it: Mini, topic: str, *, subject: str = "", **fields: Any) -> Writer:
    """A writer of a schema of its own; a field's type may come with aliases, as ``(type, *aliases)``.

    ``subject``: of the registry; default: one for the schema alone."""
    registry = Registry(RegistryConfig(it.pipeline.registry.url if it.pipeline.registry else ""))
    made: list[dict[str, Any]] = []
    for name, kind in fields.items():
        kind, *aliases = kind if isinstance(kind, tuple) else (kind,)
        made.append({"name": name, "type": kind, **({"aliases": aliases} if aliases else {})})
    schema = {"type": "record", "name": "Row", "fields": made}
    # A subject each: a source's registry may allow any change.
    own_subject = f"{topic}-{len(json.dumps(schema))}-{abs(hash(json.dumps(schema)))}"
    number = registry.register(subject or own_subject, json.dumps(schema))
    return lambda value: framed(number, schema, value)


def values_by_reader(it: Mini, *without: str) -> dict[str, list[Any]]:
    """The left raw table's values, by offset, as each reader of the lake has them."""
    state = open_raw(it.lake, "Raw", it.left)
    assert state is not None
    uri, files, schema = f"{it.lake}/Raw/{it.left}", raw_files(state), state.schema
    paths = [f"{uri}/{item.path}" for item in files]

    def by_spark() -> list[Any]:
        frame = parquet_frame(it.spark, uri, files, schema).orderBy("kafka.offset")
        return [row["value"].asDict(True) for row in frame.collect()]

    def by_polars() -> list[Any]:
        scanned = polars.scan_parquet(
            paths,
            schema=polars.from_arrow(schema.empty_table()).schema,  # type: ignore[union-attr]
            cast_options=polars.ScanCastOptions(
                integer_cast=["upcast", "allow-float"], float_cast="upcast", missing_struct_fields="insert"
            ),
            missing_columns="insert",
        )
        return scanned.sort(polars.col("kafka").struct.field("offset")).collect()["value"].to_list()

    def by_duckdb() -> list[Any]:
        read = f"SELECT value FROM read_parquet({paths}, union_by_name=true) ORDER BY kafka.offset"
        return [row[0] for row in duckdb.sql(read).fetchall()]

    readers = {"spark": by_spark, "polars": by_polars, "duckdb": by_duckdb}
    found = {name: read() for name, read in readers.items() if name not in without}
    return {"delta-rs": [row["value"] for row in it.raw(it.left)], **found}


@pytest.mark.slow
def test_a_column_that_gets_wider_in_mid_topic_is_read_whole_by_every_reader(it: Mini) -> None:
    old = writer(it, it.left, id="int", amount="int", price="float")
    wide = writer(it, it.left, id="long", amount="long", price="double")
    real = writer(it, it.left, id="long", amount="double", price="double")
    right = writer(it, it.right, id="int")
    it.send(it.left, old({"id": 1, "amount": 5, "price": 1.5}))
    it.send(it.right, right({"id": 2}), right({"id": 3}))
    it.step()
    files = set(DeltaTable(f"{it.lake}/Raw/{it.left}").file_uris())
    it.send(it.left, old({"id": 2, "amount": 6, "price": 2.5}), wide({"id": 3, "amount": 1 << 40, "price": 1e300}))
    done = it.ingest(it.left)[it.left]
    assert (done.records, done.quarantined) == (2, 0)
    it.etl()
    it.send(it.left, real({"id": 4, "amount": 0.25, "price": 0.5}))
    it.ingest(it.left)
    it.send(it.right, right({"id": 1}), right({"id": 4}))
    it.ingest(it.right)
    it.etl()
    expected = [
        {"id": 1, "amount": 5.0, "price": 1.5},
        {"id": 2, "amount": 6.0, "price": 2.5},
        {"id": 3, "amount": float(1 << 40), "price": 1e300},
        {"id": 4, "amount": 0.25, "price": 0.5},
    ]
    for reader, found in values_by_reader(it).items():
        assert found == expected, reader
    assert files <= set(DeltaTable(f"{it.lake}/Raw/{it.left}").file_uris())
    # Record 1 waited, under the hash of an int, for a match that came when its column was wider.
    staged = {row["value"]["id"]: row["value"] for row in it.staged()}
    assert staged == {row["id"]: row for row in expected}
    assert it.publish().records == 4


def test_decimals_get_the_digits_that_both_schemas_need(it: Mini) -> None:
    old = writer(it, it.left, id="long", amount=decimal(6, 2))
    new = writer(it, it.left, id="long", amount=decimal(9, 4))
    it.send(it.left, old({"id": 1, "amount": Decimal("1234.50")}), new({"id": 2, "amount": Decimal("99999.0001")}))
    it.ingest(it.left)
    it.send(it.left, old({"id": 3, "amount": Decimal("-1.25")}))
    it.ingest(it.left)
    expected = [Decimal("1234.5000"), Decimal("99999.0001"), Decimal("-1.2500")]
    # polars does not change a decimal's scale as it reads.
    for reader, values in values_by_reader(it, "polars").items():
        assert [value["amount"] for value in values] == expected, reader


def test_a_field_that_is_renamed_by_alias_stays_one_column_for_rules_and_readers(it: Mini) -> None:
    old = writer(it, it.left, id="long", amount="int", price="double")
    new = writer(it, it.left, key=("long", "id"), total=("long", "amount"), price="double")
    right = writer(it, it.right, id="long")
    it.send(it.left, old({"id": 1, "amount": 5, "price": 0.5}), new({"key": 2, "total": 6, "price": 0.5}))
    it.send(it.right, right({"id": 1}), right({"id": 2}))
    it.step()
    it.send(it.left, new({"key": 3, "total": 7, "price": 0.5}), old({"id": 4, "amount": 8, "price": 0.5}))
    it.send(it.right, right({"id": 3}), right({"id": 4}))
    it.step()
    expected = [{"id": number, "amount": number + 4, "price": 0.5} for number in range(1, 5)]
    for reader, found in values_by_reader(it).items():
        assert found == expected, reader
    assert it.values() == expected


def line_type(**fields: Any) -> dict[str, Any]:
    made = [{"name": name, "type": kind, "default": None} for name, kind in fields.items()]
    return {"type": "record", "name": "Line", "fields": made}


def test_records_in_an_array_and_in_a_map_may_get_a_field(it: Mini) -> None:
    """The whole value is copied: records that are staged keep the fields that they have, also if they are published later."""
    rule = "{name: copy, type: stateless, in: $left, out: $out, key: in.key, value: in.value}"
    it = it.edited(AVRO + "\ntransforms:\n  - " + rule)
    narrow, wide = (
        line_type(sku=["null", "string"], **more)
        for more in ({}, {"note": ["null", {"type": "array", "items": "string"}]})
    )
    old, new = (
        writer(it, it.left, id="long", lines={"type": "array", "items": kind}, places={"type": "map", "values": "Line"})
        for kind in (narrow, wide)
    )
    rows = [
        {"id": 1, "lines": [{"sku": "a"}], "places": {"p": {"sku": "b"}}},
        {"id": 2, "lines": [{"sku": "c", "note": ["x"]}], "places": {"p": {"sku": "d", "note": None}}},
        {"id": 3, "lines": [], "places": {"p": {"sku": "e"}}},
    ]
    it.send(it.left, old(rows[0]))
    it.step()
    it.send(it.left, new(rows[1]), old(rows[2]))
    it.step()
    assert it.classes(it.left) == {"done": 3}
    assert it.pipeline.registry is not None
    registry = Registry(it.pipeline.registry)
    found = [decoded(registry, value) for value in it.published(it.out)]
    assert found[:2] == rows[:2]
    assert found[2] == {"id": 3, "lines": [], "places": {"p": {"sku": "e", "note": None}}}


def policy(it: Mini, word: str) -> Mini:
    """The same topics and lake, with ``on-schema-change`` for the left input."""
    text = (AVRO + RULES).replace("{topic: $left, pool: Raw,", f"{{topic: $left, pool: Raw, on-schema-change: {word},")
    return it.edited(text)


def test_a_change_is_told_once_with_what_it_changes_and_where(it: Mini) -> None:
    old = writer(it, it.left, id="int", name="string", gone="int")
    same = writer(it, it.left, id={"type": "int", "doc": "the same columns"}, name="string", gone="int")
    new = writer(it, it.left, id="long", title=("string", "name"), note=["null", "string"])
    it.send(it.left, old({"id": 1, "name": "a", "gone": 1}), same({"id": 2, "name": "b", "gone": 2}))
    assert it.ingest(it.left)[it.left].schema_changes == ()
    it.send(it.left, new({"id": 3, "title": "c", "note": None}), old({"id": 4, "name": "d", "gone": 4}))
    (change,) = it.ingest(it.left)[it.left].schema_changes
    assert (change.side, change.partition, change.offset, change.in_table) == ("value", 0, 2, True)
    assert set(change.diff) == {
        "removed value.gone",
        "widened value.id from int to bigint",
        "renamed value.name to title",
        "added value.note (string)",
    }
    it.send(it.left, new({"id": 5, "title": "e", "note": "n"}))
    assert it.ingest(it.left)[it.left].schema_changes == ()
    assert [row["value"]["name"] for row in it.raw(it.left)] == ["a", "b", "c", "d", "e"]
    for ranges, told in ((None, True), ([OffsetRange(0, 2, 3)], True), ([OffsetRange(0, 4, 5)], False)):
        found = schema_change(it.pipeline, it.left, ranges)
        assert ("offset 2: " in found.summary and "renamed value.name to title" in found.summary) is told
        assert found.passed is not told


def test_an_input_that_takes_no_change_stops_before_it_and_goes_on_when_it_may(it: Mini) -> None:
    old = writer(it, it.left, id="int")
    new = writer(it, it.left, id="int", note="string")
    strict = policy(it, "error")
    it.send(it.left, old({"id": 1}), new({"id": 2, "note": "x"}))
    with pytest.raises(
        SchemaChanged, match=r"partition 0, offset 1: .*added value\.note \(string\).*on-schema-change: merge"
    ):
        strict.ingest(it.left)
    assert it.next(it.left) == {}
    policy(it, "merge").ingest(it.left)
    it.send(it.left, new({"id": 3, "note": "y"}), old({"id": 4}))
    assert strict.ingest(it.left)[it.left].records == 2
    assert [row["value"]["note"] for row in it.raw(it.left)] == [None, "x", "y", None]


def test_a_schema_that_does_not_fit_is_never_merged_and_the_error_says_so(it: Mini) -> None:
    old, new = writer(it, it.left, id="int"), writer(it, it.left, id="string")
    it.send(it.left, old({"id": 1}), new({"id": "x"}))
    with pytest.raises(
        SchemaChanged, match=r"changed value\.id from int to string.* only be put aside.*to a new topic"
    ):
        policy(it, "error").ingest(it.left)
    done = policy(it, "quarantine").ingest(it.left)[it.left]
    assert (done.records, done.quarantined) == (1, 1)


def test_records_of_a_new_schema_are_put_aside_where_the_file_says_so(it: Mini) -> None:
    old = writer(it, it.left, id="int")
    new = writer(it, it.left, id="int", note="string")
    strict = policy(it, "quarantine")
    it.send(it.left, old({"id": 1}), new({"id": 2, "note": "x"}), old({"id": 3}))
    for _ in range(2):
        done = strict.ingest(it.left)[it.left]
        assert (done.records, done.quarantined, [change.in_table for change in done.schema_changes]) == (2, 1, [False])
        it.send(it.left, new({"id": 2, "note": "x"}), old({"id": 1}), old({"id": 3}))
    assert {tuple(row["value"]) for row in it.raw(it.left)} == {("id",)}
    (held, _) = [each for each in quarantine_table.quarantined_records(strict.pipeline) if each.topic == it.left]
    assert "is new: added value.note (string)" in held.error


def test_what_was_put_aside_is_nothing_that_a_later_schema_is_compared_with(it: Mini) -> None:
    old = writer(it, it.left, id="int")
    new = writer(it, it.left, id="int", note="string")
    alike = writer(it, it.left, id={"type": "int", "doc": "the same columns"}, note="string")
    other = writer(it, it.left, id="int", sum="long")
    strict = policy(it, "quarantine")
    it.send(it.left, old({"id": 1}))
    strict.ingest(it.left)
    records = [new({"id": 2, "note": "x"}), alike({"id": 3, "note": "x"}), other({"id": 4, "sum": 5})]
    for _ in range(2):
        it.send(it.left, *records)
        done = strict.ingest(it.left)[it.left]
        assert (done.records, done.quarantined) == (0, 3)
        assert [change.diff for change in done.schema_changes] == [
            ("added value.note (string)",),
            ("added value.note (string)",),
            ("added value.sum (bigint)",),
        ]
    assert {tuple(row["value"]) for row in it.raw(it.left)} == {("id",)}


CONNECT = AVRO.replace("value-format: avro", "value-format: connect-json", 2) + RULES


def test_a_schema_within_a_record_is_a_change_where_it_adds_to_the_columns(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, CONNECT)

    def connect(**fields: Any) -> dict[str, Any]:
        kinds = [
            {"field": name, "type": "int32" if isinstance(value, int) else "string"} for name, value in fields.items()
        ]
        return {"schema": {"type": "struct", "fields": kinds}, "payload": fields}

    it.send(it.left, connect(id=1), connect(id=2))
    assert it.ingest(it.left)[it.left].schema_changes == ()
    it.send(it.left, connect(id=3), connect(id=4, note="x"))
    text = CONNECT.replace("{topic: $left, pool: Raw,", "{topic: $left, pool: Raw, on-schema-change: error,")
    with pytest.raises(SchemaChanged, match=r"offset 3: .*added value\.note \(string\)"):
        it.edited(text).ingest(it.left)
    (change,) = it.ingest(it.left)[it.left].schema_changes
    assert (change.schema_id, change.offset, change.diff) == (None, 3, ("added value.note (string)",))


def test_a_schema_of_the_file_that_does_not_fit_the_table_is_told_with_topic_and_cure(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH + RULES)
    it.send(it.left, {"op": "c", "id": 1, "v": "a"})
    it.ingest(it.left)
    it = it.edited((BOTH + RULES).replace("id bigint", "id string"))
    it.send(it.left, {"op": "c", "id": 2, "v": "a"})
    words = rf"topic {it.left}: .* of the value do not fit the raw table .*: value.id: string does not fit .*int64.*"
    with pytest.raises(SchemaError, match=rf"{words} Give value-format and value-schema back"):
        it.ingest(it.left)
    assert it.next(it.left) == {0: 1}


def test_an_id_with_another_schema_than_before_puts_its_records_aside(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """As after a loss of the registry's data: all schemas are registered again, and one gets the former id of another one."""
    it = mini(services, spark, tmp_path, unique, AVRO + RULES)
    old, new = writer(it, it.left, id="long"), writer(it, it.left, id="long", note="string")
    before, after = (int.from_bytes(write({"id": 0, "note": ""})[1:5], "big") for write in (old, new))
    it.send(it.left, old({"id": 1}), new({"id": 2, "note": "b"}))
    it.ingest(it.left)
    with front(services.registry_url) as registry:
        registry.others = {f"/schemas/ids/{before}": f"/schemas/ids/{after}"}
        it.send(
            it.left, b"\0" + before.to_bytes(4, "big") + new({"id": 3, "note": "c"})[5:], new({"id": 4, "note": "d"})
        )
        lost = it.changed(services.registry_url, registry.url)
        done = lost.ingest(it.left)[it.left]
        assert (done.records, done.quarantined) == (1, 1)
        [entry] = quarantine_table.quarantined_records(lost.pipeline)
        assert "another schema by this id than when" in entry.error
        with pytest.raises(SchemaError, match=f"schema id {before}: the registry has another schema by this id"):
            list(restore(lost.pipeline, f"Raw.{it.left}", f"{it.left}.again"))
    it = it.changed(registry.url, services.registry_url)
    it.send(it.left, old({"id": 5}))
    assert it.ingest(it.left)[it.left].quarantined == 0


def test_an_id_that_goes_to_another_topic_under_a_running_process_has_the_new_schema(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """As after a loss of the registry's data: the topics register their schemas again, in another order. The bytes fit both."""
    with front(services.registry_url) as registry:
        it = mini(services, spark, tmp_path, unique, AVRO + RULES)
        it = it.changed(services.registry_url, registry.url)
        old, new = writer(it, it.left, id="long", name="string"), writer(it, it.right, id="long", title="string")
        before, after = (int.from_bytes(write({"id": 0, "name": "", "title": ""})[1:5], "big") for write in (old, new))
        it.send(it.left, old({"id": 1, "name": "a"}))
        it.ingest(it.left)
        registry.others = {f"/schemas/ids/{before}": f"/schemas/ids/{after}"}
        it.send(it.right, b"\0" + before.to_bytes(4, "big") + new({"id": 2, "title": "b"})[5:])
        it.ingest(it.right)
    assert [row["value"] for row in it.raw(it.right)] == [{"id": 2, "title": "b"}]


@pytest.mark.slow
def test_a_schema_that_the_registry_no_longer_has_does_not_stop_ingest(services: Services, unique: str) -> None:
    config = RegistryConfig(services.registry_url)
    fields = [{"name": name, "type": ["null", "int"], "default": None} for name in "ab"]
    texts = [json.dumps({"type": "record", "name": "R", "fields": fields[:count]}) for count in (1, 2)]
    ids = [Registry(config).register(f"{unique}-value", text) for text in texts]
    gone = 987654321
    column = pa.struct([pa.field("a", pa.int32()), lacked_by(pa.field("b", pa.int32()), [gone])])
    schema = pa.schema([pa.field("value", column)])
    source = TopicSource({}, config, unique, SideFormat("string"), SideFormat("avro"), None, column)
    writers = [WriterSchema("value", id, 0, place, True) for place, id in enumerate((gone, *ids))]
    found = with_lacking_fields(schema, source, None, writers).field("value").type
    assert [lacking(item) for item in found] == [(), tuple(sorted((ids[0], gone)))]
    away = RegistryConfig("http://127.0.0.1:9", {"max.retries": "0"})
    with pytest.raises(RegistryUnavailable):
        with_lacking_fields(schema, replace(source, registry=away), None, writers)


RENAMED = RULES.replace("amount: left.value.amount", "amount: left.value.total")


@pytest.mark.parametrize("ingested", [True, False], ids=["after its first record", "before its first record"])
def test_a_rule_may_name_a_renamed_field_by_its_new_name(it: Mini, ingested: bool) -> None:
    it = it.edited(AVRO + RENAMED)
    old = writer(it, it.left, id="int", amount="int", price="float")
    new = writer(it, it.left, subject=f"{it.left}-value", id="int", total=("int", "amount"), price="float")
    right = writer(it, it.right, id="int")
    it.send(it.left, old({"id": 1, "amount": 5, "price": 1.5}))
    if ingested:
        it.send(it.left, new({"id": 2, "total": 6, "price": 1.5}))
    it.send(it.right, right({"id": 1}), right({"id": 2}))
    it.step()
    if not ingested:
        it.send(it.left, new({"id": 2, "total": 6, "price": 1.5}))
        it.step()
    assert [(row["value"]["id"], row["value"]["amount"]) for row in it.staged()] == [(1, 5), (2, 6)]
    assert it.publish().records == 2


SHAPED = AVRO.replace(
    "topic: $left,", "topic: $left, shape: {value: {id: value.id, amount: value.total, x: value.none}},"
)


@pytest.mark.parametrize("ingested", [True, False], ids=["after its first record", "before its first record"])
def test_a_shape_may_name_a_renamed_field_by_its_new_name(it: Mini, ingested: bool) -> None:
    it = it.edited(SHAPED + RULES.replace("price: left.value.price", "price: 1"))
    old = writer(it, it.left, id="int", amount="int")
    new = writer(it, it.left, subject=f"{it.left}-value", id="int", total=("int", "amount"))
    it.send(it.left, old({"id": 1, "amount": 5}))
    if not ingested:
        it.ingest(it.left)
    it.send(it.left, new({"id": 2, "total": 6}), old({"id": 3, "amount": 7}))
    it.ingest(it.left)
    it.send(it.left, old({"id": 4, "amount": 8}), new({"id": 5, "total": 9}))
    it.ingest(it.left)
    rows = [(row["value"]["id"], row["value"]["amount"]) for row in it.raw(it.left)]
    assert rows == [(1, 5), (2, 6), (3, 7), (4, 8), (5, 9)]
