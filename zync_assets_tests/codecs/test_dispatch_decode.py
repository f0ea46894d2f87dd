"""Payloads to columns: framing, writers that change, schemas that can't be had, text, bytes and JSON."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, topic_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from zync_assets.codecs.avro.types import arrow_type
from zync_assets.codecs.batches import BadPayload, decode_way
from zync_assets.codecs.dispatch import Decoder, make_decoder, make_encoder
from zync_assets.errors import RegistryUnavailable, SchemaError, SchemaUnknown
from zync_assets.local.services import Services
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.generated import datums, framed

pytestmark = pytest.mark.usefixtures("both_ways")

AVRO = SideFormat("avro")


def record(name: str, /, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": key, "type": type} for key, type in fields.items()]}


def avro(schemas: dict[int, Any], target: pa.DataType | None = None, *, native: bool = True) -> Decoder:
    """A decoder over a registry that holds ``schemas``; id 99 stands for a registry that is down."""

    def schema_of(schema_id: int) -> str:
        if schema_id == 99:
            raise RegistryUnavailable("no answer from the registry")
        if schema_id not in schemas:
            raise SchemaUnknown("40403")
        return json.dumps(schemas[schema_id])

    return make_decoder(AVRO, schema_of, target, native=native)


def written(schema_id: int, schema: Any, *values: Any) -> list[bytes]:
    return [framed(schema_id, datum) for datum in datums(schema, list(values))]


V1 = record("Row", id="int", name=["null", "string"])
V2 = record("Row", id="int", name=["null", "string"], place=record("Place", zip="string"), since="long")


def test_a_debezium_envelope_goes_column_by_column() -> None:
    row = record(
        "Value", ID="long", price=["null", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}]
    )
    row["namespace"] = "shop.public.orders"
    envelope = record(
        "Envelope",
        before=["null", row],
        after=["null", "shop.public.orders.Value"],
        source=record("Source", lsn=["null", "long"], table="string"),
        op="string",
        ts_ms=["null", "long"],
    )
    source = {"lsn": None, "table": "orders"}
    values = [
        {
            "before": None,
            "after": {"ID": 1, "price": decimal.Decimal("12.30")},
            "source": source,
            "op": "c",
            "ts_ms": 5,
        },
        {"before": {"ID": 1, "price": None}, "after": None, "source": source, "op": "d", "ts_ms": None},
    ]
    decoded = avro({1: envelope}).decode(pa.array([*written(1, envelope, *values), None]))
    assert decode_way(json.dumps(envelope)) == "native"
    assert decoded.values.to_pylist() == [*values, None]
    assert decoded.schema_ids.to_pylist() == [1, 1, None]


@pytest.mark.parametrize("native", [True, False])
def test_writers_in_one_batch_share_the_column(native: bool) -> None:
    old = written(1, V1, {"id": 1, "name": "a"}, {"id": 3, "name": None})
    new = written(2, V2, {"id": 2, "name": "b", "place": {"zip": "z"}, "since": 7})
    decoder = avro({1: V1, 2: V2}, native=native)
    assert decoder.type == pa.null()
    decoded = decoder.decode(pa.array([old[0], new[0], None, old[1]]))
    assert decoded.bad == ()
    assert decoder.type == pa.struct(
        [("id", pa.int32()), ("name", pa.string()), ("place", pa.struct([("zip", pa.string())])), ("since", pa.int64())]
    )
    assert decoded.values.type == decoder.type
    assert decoded.values.to_pylist() == [
        {"id": 1, "name": "a", "place": None, "since": None},
        {"id": 2, "name": "b", "place": {"zip": "z"}, "since": 7},
        None,
        {"id": 3, "name": None, "place": None, "since": None},
    ]
    assert decoded.schema_ids.to_pylist() == [1, 2, None, 1]


def test_the_first_record_s_schema_names_the_column_whatever_its_id() -> None:
    first = record("Row", id="int", name="string")
    fields = [{"name": "title", "type": "string", "aliases": ["name"]}, {"name": "id", "type": "long"}]
    renamed = {"type": "record", "name": "Row", "fields": fields}
    payloads = [*written(9, first, {"id": 1, "name": "a"}), *written(3, renamed, {"id": 2, "title": "b"})]
    decoded = avro({9: first, 3: renamed}).decode(pa.array(payloads))
    assert decoded.values.to_pylist() == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    assert [(item.index, item.schema_id, len(item.before)) for item in decoded.arrivals] == [(0, 9, 0), (1, 3, 1)]


def test_the_column_keeps_its_order_and_types_and_takes_narrower_values() -> None:
    target = pa.struct([("name", pa.binary()), ("id", pa.int64()), ("gone", pa.string())])
    decoder = avro({2: V2}, target)
    decoded = decoder.decode(pa.array(written(2, V2, {"id": 2, "name": "b", "place": {"zip": "z"}, "since": 7})))
    assert [decoder.type.field(index).name for index in range(5)] == ["name", "id", "gone", "place", "since"]
    assert decoder.type.field("id").type == pa.int64()
    assert decoded.values.to_pylist() == [{"name": b"b", "id": 2, "gone": None, "place": {"zip": "z"}, "since": 7}]


def test_a_writer_that_does_not_fit_the_column_makes_its_records_bad_and_says_where() -> None:
    other = record("Row", id="int", place=record("Place", zip="long"))
    target = pa.struct([("id", pa.int32()), ("place", pa.struct([("zip", pa.string())]))])
    payloads = [*written(1, V1, {"id": 1, "name": "a"}), *written(2, other, {"id": 2, "place": {"zip": 1}})]
    decoder = avro({1: V1, 2: other}, target)
    decoded = decoder.decode(pa.array(payloads))
    ((index, error),) = [(bad.index, bad.error) for bad in decoded.bad]
    assert (index, error.partition(". ")[0]) == (
        1,
        "schema id 2: value.place.zip: int64 does not fit into the lake's string",
    )
    assert "let the connector write the table to a new topic" in error
    assert decoded.values.to_pylist() == [{"id": 1, "place": None, "name": "a"}, None]


def test_a_value_that_does_not_fit_the_column_is_bad_alone() -> None:
    writer = record("Row", name="bytes")
    decoded = avro({1: writer}, pa.struct([("name", pa.string())])).decode(
        pa.array(written(1, writer, {"name": b"a"}, {"name": b"\xff"}, {"name": b"c"}))
    )
    assert [item.index for item in decoded.bad] == [1]
    assert decoded.values.to_pylist() == [{"name": "a"}, None, {"name": "c"}]


def test_garbage_does_not_widen_the_column() -> None:
    decoder = avro({1: V1, 2: V2})
    decoder.decode(pa.array([*written(1, V1, {"id": 1, "name": "a"}), framed(2, b"\x02")]))
    assert decoder.type == pa.struct([("id", pa.int32()), ("name", pa.string())])


def test_each_kind_of_garbage_is_named_and_its_neighbours_stay() -> None:
    good = written(1, V1, {"id": 1, "name": "a"})[0]
    schema_17 = framed(17, b"\x02\x00")
    payloads = [
        good,
        b"",
        b"\0\0",
        b"{'a': 1}",
        good + b"!",
        good[:-1],
        schema_17,
        framed(1, b"\x02\x02\x02\xff"),
        None,
        good,
    ]
    decoded = avro({1: V1}).decode(pa.array(payloads, pa.binary()))
    errors = {item.index: item.error for item in decoded.bad}
    assert "too short" in errors[1]
    assert "too short" in errors[2]
    assert "first byte is 123" in errors[3]
    assert "1 bytes too many" in errors[4]
    assert "ends before its schema" in errors[5]
    assert "unknown schema id 17" in errors[6]
    assert "not UTF-8" in errors[7]
    assert set(errors) == {1, 2, 3, 4, 5, 6, 7}
    assert [value["id"] if value else None for value in decoded.values.to_pylist()] == [1, *[None] * 8, 1]
    assert decoded.schema_ids.to_pylist() == [1, None, None, None, 1, 1, 17, 1, None, 1]


def test_an_outage_is_raised_and_an_unknown_id_is_asked_for_again() -> None:
    schemas: dict[int, Any] = {}
    decoder = avro(schemas)
    with pytest.raises(RegistryUnavailable):
        decoder.decode(pa.array([framed(99, b"")]))
    payloads = pa.array(written(1, V1, {"id": 1, "name": "a"}))
    assert len(decoder.decode(payloads).bad) == 1
    schemas[1] = V1
    assert decoder.decode(payloads).bad == ()


def test_fields_that_differ_in_case_alone_are_two_columns() -> None:
    both = record("Row", id="int", ID="int")
    decoded = avro({1: both}).decode(pa.array([framed(1, b"\x02\x04")]))
    assert decoded.bad == ()
    assert decoded.values.to_pylist() == [{"id": 1, "%49D": 2}]


@pytest.mark.parametrize("type", [pa.binary(), pa.large_binary()])
def test_slices_and_large_arrays(type: pa.DataType) -> None:
    payloads = pa.array([*written(1, V1, *({"id": i, "name": f"n{i}"} for i in range(40))), None, b"x"], type)
    whole = avro({1: V1}).decode(payloads)
    for first, count in [(0, 5), (7, 20), (38, 4), (41, 1), (3, 0)]:
        part = avro({1: V1}, whole.values.type).decode(payloads.slice(first, count))
        assert part.values.equals(whole.values.slice(first, count))
        assert [item.index for item in part.bad] == [
            i.index - first for i in whole.bad if first <= i.index < first + count
        ]


def test_nothing_but_nulls_leaves_the_type_open() -> None:
    decoder = avro({})
    decoded = decoder.decode(pa.array([None, None], pa.binary()))
    assert (decoder.type, decoded.values.to_pylist(), decoded.bad) == (pa.null(), [None, None], ())
    assert avro({}).decode(pa.array([], pa.binary())).values.to_pylist() == []


@pytest.mark.parametrize(
    ("schema", "values"), [("string", ["a", ""]), ("long", [1, -(1 << 63)]), ("bytes", [b"", b"\xff"])]
)
def test_single_datums(schema: str, values: list[Any]) -> None:
    assert avro({1: schema}).decode(pa.array(written(1, schema, *values))).values.to_pylist() == values


def test_batches_larger_than_one_chunk_with_damage_inside() -> None:
    payloads = written(1, V1, *({"id": i, "name": "x" * (i % 7)} for i in range(40_000)))
    for index in range(100, 40_000, 5000):
        payloads[index] = payloads[index][:6]
    decoded = avro({1: V1}).decode(pa.array(payloads))
    assert [item.index for item in decoded.bad] == list(range(100, 40_000, 5000))
    ids = decoded.values.field("id").to_pylist()
    assert all(ids[index] == index for index in range(40_000) if index % 5000 != 100)


def test_long_arrays_and_blocks_of_an_unusual_form() -> None:
    schema = {"type": "array", "items": "string"}
    long = [[str(i) for i in range(500)], ["a"]]
    blocks = [framed(1, b"\x02\x02a\x02\x02b\x00"), framed(1, b"\x01\x04\x02c\x00")]
    decoded = avro({1: schema}).decode(pa.array([*written(1, schema, *long), *blocks]))
    assert decoded.values.to_pylist() == [*long, ["a", "b"], ["c"]]


def test_a_key_that_stands_twice_in_a_map_counts_once() -> None:
    twice = framed(1, b"\x04\x02a\x02\x02a\x04\x00")
    once = framed(1, b"\x02\x02a\x02\x00")
    decoded = avro({1: {"type": "map", "values": "int"}}).decode(pa.array([once, twice]))
    assert decoded.values.to_pylist() == [[("a", 1)], [("a", 2)]]


TREE = record("Node", value=["int", "string"], raw="bytes", next=["null", "Node"])


def test_a_record_inside_itself_is_json_and_comes_back() -> None:
    leaf = {"value": ("string", "é"), "raw": b"\xff\0", "next": None}
    values = [{"value": ("int", 1), "raw": b"", "next": ("Node", {**leaf, "next": ("Node", leaf)})}, leaf]
    payloads = pa.array(written(1, TREE, *values))
    decoded = avro({1: TREE}).decode(payloads)
    assert decode_way(json.dumps(TREE)) == "fastavro"
    inner = json.loads(decoded.values[0].as_py()["next"])
    assert inner == {
        "value": {"string": "é"},
        "raw": "\xff\0",
        "next": {"value": {"string": "é"}, "raw": "\xff\0", "next": None},
    }
    assert make_encoder("avro", json.dumps(TREE), 1).encode(decoded.values).payloads.equals(payloads)


def test_a_record_that_goes_too_deep_is_bad_and_ends_nothing() -> None:
    deep = record("Deep", next=["null", "Deep"])
    decoded = avro({1: deep}).decode(pa.array([framed(1, b"\x02" * 200_000 + b"\0"), framed(1, b"\0")]))
    assert [item.error for item in decoded.bad] == ["schema id 1: nested too deep"]
    assert decoded.values.to_pylist() == [None, {"next": None}]


def test_a_field_that_differs_from_the_column_s_in_case_alone_is_a_column_of_its_own() -> None:
    decoder = avro({1: record("Row", ID="int")}, pa.struct([("id", pa.int32())]))
    decoded = decoder.decode(pa.array([framed(1, b"\x02")]))
    assert decoded.values.to_pylist() == [{"id": None, "%49D": 1}]
    assert decoder.type == pa.struct([("id", pa.int32()), ("%49D", pa.int32())])


@pytest.mark.parametrize("native", [True, False])
def test_a_number_too_large_for_an_int_is_bad_alone(native: bool) -> None:
    decoded = avro({1: "int"}, native=native).decode(
        pa.array([framed(1, datum) for datum in datums("long", [7, 1 << 31, -8])])
    )
    assert [item.index for item in decoded.bad] == [1]
    assert decoded.values.to_pylist() == [7, None, -8]


def test_values_out_of_a_type_s_range_are_bad_alone() -> None:
    schema = record("Row", price={"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 1})
    late = record("Row", at={"type": "long", "logicalType": "timestamp-millis"})
    money = avro({1: schema}).decode(pa.array(written(1, schema, {"price": b"\x7f"}, {"price": b"\x7f\xff"})))
    assert (money.values[0].as_py(), [item.index for item in money.bad]) == ({"price": decimal.Decimal("12.7")}, [1])
    times = avro({1: late}).decode(pa.array(written(1, late, {"at": 1 << 62}, {"at": -1})))
    assert [item.index for item in times.bad] == [0]
    moment = datetime.datetime(1969, 12, 31, 23, 59, 59, 999000, tzinfo=datetime.UTC)
    assert times.values[1].as_py() == {"at": moment}


BY_TOPIC = {"subject.name.strategy": topic_subject_name_strategy}


@pytest.mark.parametrize("precision", [3, 17, 18, 19, 38])
def test_decimals_of_every_length_are_read_as_python_reads_them(precision: int) -> None:
    schema = record(
        "Row", price=["null", {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": 0}]
    )
    plain = record("Row", price=["null", "bytes"])
    edges = {
        sign * (base**power + more)
        for base in (2, 10)
        for power in range(64)
        for more in (-1, 0, 1)
        for sign in (-1, 1)
    }
    shortest = [number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True) for number in edges]
    longer = [(b"\xff" if raw[0] >= 0x80 else b"\0") * more + raw for raw in shortest for more in (1, 7, 8)]
    given = [None, b"", *shortest, *longer]
    for part in ([raw for raw in given if raw is None or len(raw) <= 8], given):
        decoded = avro({1: schema}).decode(pa.array(written(1, plain, *({"price": raw} for raw in part))))
        numbers = [None if raw is None else int.from_bytes(raw, "big", signed=True) for raw in part]
        fitting = [number is None or abs(number) < 10**precision for number in numbers]
        assert [item.index for item in decoded.bad] == [index for index, fits in enumerate(fitting) if not fits]
        prices = [row and row["price"] for row in decoded.values.to_pylist()]
        assert prices == [number if fits else None for number, fits in zip(numbers, fitting, strict=True)]


def test_confluents_own_serializers_speak_the_same(services: Services, unique: str) -> None:
    client = SchemaRegistryClient({"url": services.registry_url})
    schema = json.dumps(V2)
    value = {"id": 5, "name": "n", "place": {"zip": "z"}, "since": -1}
    context = SerializationContext(unique, MessageField.VALUE)
    theirs = AvroSerializer(client, schema, conf=BY_TOPIC)(value, context)  # pyright: ignore[reportCallIssue]
    schema_id = client.get_latest_version(f"{unique}-value").schema_id
    decoded = avro({schema_id: V2}).decode(pa.array([theirs]))
    assert decoded.values.to_pylist() == [value]
    ours = make_encoder("avro", schema, schema_id).encode(decoded.values).payloads[0].as_py()
    assert AvroDeserializer(client, conf=BY_TOPIC)(ours, context) == value  # pyright: ignore[reportCallIssue]


def no_schemas(_: int) -> str:
    raise AssertionError("only Avro asks for schemas")


def test_text_must_be_utf8_and_bytes_are_taken_as_they_are() -> None:
    payloads = pa.array([b"a", b"\xff", None, "é".encode(), b""])
    text = make_decoder(SideFormat("string"), no_schemas, None).decode(payloads)
    assert text.values.to_pylist() == ["a", None, None, "é", ""]
    assert text.bad == (BadPayload(1, "not UTF-8"),)
    assert text.schema_ids.to_pylist() == [None] * 5
    assert make_decoder(SideFormat("json"), no_schemas, None).decode(payloads).values.equals(text.values)
    raw = make_decoder(SideFormat("bytes"), no_schemas, None).decode(payloads)
    assert (raw.values.equals(payloads), raw.bad) == (True, ())


def test_json_is_read_to_its_type_and_what_does_not_fit_is_bad_alone() -> None:
    side = SideFormat(
        "json", "id int, at timestamp, on date, price decimal(5,2), tags array<string>, raw binary, by map<string,long>"
    )
    texts: list[bytes | None] = [
        b'{"id":1,"at":"2026-01-31T12:00:00Z","on":"2026-01-31","price":1.5,"tags":["a",null],"raw":"/w==","by":{"k":1},"more":{}}',
        b'{"id":"1"}',
        b'{"id":3000000000}',
        b'{"id":1',
        b"null",
        None,
        b'{"at":"yesterday"}',
        b'{"price":1.555}',
        b'{"tags":[1]}',
        b" {}\n",
        b"[1]",
        b'{"tags":["\\ud800"]}',
        b"1}\n{",
        b'{"id":true}',
        b'{"price":"NaN"}',
        b'{"by":{"\\ud800":1}}',
        '{"id":1}'.encode("utf-16"),
    ]
    decoded = make_decoder(side, no_schemas, None).decode(pa.array(texts, pa.binary()))
    empty = dict.fromkeys(["id", "at", "on", "price", "tags", "raw", "by"])
    moment = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    full = {
        "id": 1,
        "at": moment,
        "on": moment.date(),
        "price": decimal.Decimal("1.50"),
        "tags": ["a", None],
        "raw": b"\xff",
        "by": [("k", 1)],
    }
    assert decoded.values.to_pylist() == [full, *[None] * 8, empty, *[None] * 7]
    assert [item.index for item in decoded.bad] == [1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16]
    assert decoded.bad[0].error == 'value.id: "1" is not a whole number (int32)'


def test_a_format_whose_type_is_not_the_column_s_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"value\.id: string does not fit into the lake's int32"):
        make_decoder(SideFormat("json", "id string"), no_schemas, pa.struct([("id", pa.int32())]))
    with pytest.raises(SchemaError, match=r"^key\.id: string does not fit"):
        make_decoder(SideFormat("json", "id string"), no_schemas, pa.struct([("id", pa.int32())]), "key")


def test_the_error_of_a_key_names_the_fields_of_the_key() -> None:
    old, new = record("Key", id="int"), record("Key", id="int", region="string")
    text = record("Key", id="string")
    schemas = {1: old, 2: new, 3: text}
    [payload], [misfit] = written(2, new, {"id": 1, "region": "x"}), written(3, text, {"id": "x"})
    keys = pa.array([payload, misfit], pa.binary())

    def errors(fixed_schema: bool) -> list[str]:
        decoder = make_decoder(
            AVRO,
            lambda number: json.dumps(schemas[number]),
            arrow_type(json.dumps(old)),
            "key",
            schema_ids=(1,),
            fixed_schema=fixed_schema,
        )
        return [bad.error for bad in decoder.decode(keys).bad]

    assert "schema id 2 is new: added key.region (string)" in errors(True)
    [error] = errors(False)
    assert error.startswith("schema id 3: key.id: string does not fit into the lake's int32")
