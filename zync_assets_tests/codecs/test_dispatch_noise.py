"""Noise in place of records and schemas. Noise is a bad record and does not change its neighbours. The fast path and the
record-by-record path return the same results."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from zync_assets.codecs import dispatch
from zync_assets.codecs.batches import DecodedBatch
from zync_assets.codecs.connect import codec
from zync_assets.codecs.dispatch import make_decoder
from zync_assets.codecs.evolution import holds
from zync_assets.codecs.json.values import json_reader
from zync_assets.errors import SchemaUnknown
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs import connect_generated, generated
from zync_assets_tests.codecs.generated import EXAMPLES, datums, framed, same

NOISE = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

PIECES = st.sampled_from(
    [
        b"\xff" * 9 + b"\x01",
        b"\xff" * 11,
        b"\xfe\xff\xff\xff\x0f",
        b"\x80",
        b"\0",
        b"\x01",
        b"\x02" * 40,
        b"\x7f\xff\xc0\0",
    ]
)
"""Avro's numbers at their ends and past them, none that ends, lengths that lie, the bytes of a NaN."""
WORDS = r"""
    null NaN -Infinity 1e999 1e-9999999 1e99999999999999999999 -0 999999999999999999999999999999 true "" [] {} 0 "x" }{
    "int" {"type":"long"} ["null"] [[]] {"type":{}} {"a":{"b":[1]}} \ud800 "\ud800"
"""
TEXTS = st.sampled_from(WORDS.split())


@st.composite
def mutated(draw: st.DrawFn, whole: bytes, pieces: st.SearchStrategy[bytes]) -> bytes:
    """The bytes with some cut out, put in or put in their place, a few times."""
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(whole)))
        end = min(len(whole), first + draw(st.sampled_from([0, 0, 1, 1, 2, 8])))
        whole = whole[:first] + draw(st.one_of(st.just(b""), st.binary(max_size=3), pieces)) + whole[end:]
    return whole


@st.composite
def altered(draw: st.DrawFn, document: Any) -> str:
    """A JSON document with one or two of its parts another one, or, seldom, with noise in its text."""
    text = json.dumps(document)
    if draw(st.integers(0, 4)) == 0:
        return draw(mutated(text.encode(), TEXTS.map(str.encode))).decode(errors="replace")
    for _ in range(draw(st.integers(1, 2))):
        # Replaces a whole value of compact JSON, so that the text mostly stays a JSON document.
        ends = [at for at, char in enumerate(text) if char in ",]}"]
        begins = [at + 1 for at, char in enumerate(text) if char in ":,["]
        if ends and begins:
            begin = draw(st.sampled_from(begins))
            end = next((at for at in ends if at >= begin), len(text))
            text = text[:begin] + draw(TEXTS) + text[end:]
    return text


def check(payloads: list[bytes], good: list[bool], by_column: Any, by_record: Any) -> None:
    """Both ways agree, and a good record is what it is without the others. The ways: (payloads, type or None) → Decoded."""
    column = pa.array(payloads, pa.binary())
    # A schema can widen the column for later records. Decodes into the type after the whole batch.
    target = by_column(column, None).values.type
    one, other = by_column(column, target), by_record(column, target)
    one.values.validate(full=True)
    assert one.bad == other.bad
    assert same(one.values, other.values)
    kept = [index for index, fine in enumerate(good) if fine]
    # An altered record may be valid, and may be the first record to give the column a type.
    assume(holds(target, by_column(column.take(pa.array(kept, pa.int64())), None).values.type))
    assert not {item.index for item in one.bad} & set(kept)
    alone: DecodedBatch = by_column(column.take(pa.array(kept, pa.int64())), target)
    assert same(one.values.take(pa.array(kept, pa.int64())), alone.values)


@st.composite
def avro_batches(draw: st.DrawFn) -> tuple[dict[int, str], list[bytes], list[bool]]:
    """Schemas by id, records, and which of these are good. Id 1 is sound, 2 is noise like it, others are unknown."""
    kind = draw(generated.kinds(depth=2, top=draw(st.booleans())))
    whole = datums(kind.schema, draw(st.lists(kind.data, min_size=1, max_size=4)))
    schemas = {1: json.dumps(kind.schema), 2: draw(altered(kind.schema))}
    payloads: list[bytes] = []
    good: list[bool] = []
    for datum in whole:
        how = draw(st.sampled_from(["good", "noise", "mutated", "mutated", "schema", "frame"]))
        good.append(how == "good")
        if how == "noise":
            payloads.append(framed(1, draw(st.binary(max_size=40))))
        elif how == "mutated":
            payloads.append(framed(1, draw(mutated(datum, PIECES))))
        elif how == "schema":
            payloads.append(framed(2, draw(st.one_of(st.just(datum), st.binary(max_size=20)))))
        elif how == "frame":
            payloads.append(draw(mutated(framed(1, datum)[:5], st.just(b"\xff"))) + datum)
        else:
            payloads.append(framed(1, datum))
    return schemas, payloads, good


@pytest.mark.usefixtures("both_ways")
@NOISE
@given(avro_batches())
def test_avro(batch: tuple[dict[int, str], list[bytes], list[bool]]) -> None:
    schemas, payloads, good = batch

    def schema_of(number: int) -> str:
        if number not in schemas:
            raise SchemaUnknown(f"no schema {number}")
        return schemas[number]

    def way(native: bool) -> Any:
        return lambda column, target: make_decoder(SideFormat("avro"), schema_of, target, native=native).decode(column)

    check(payloads, good, way(True), way(False))


@st.composite
def connect_batches(draw: st.DrawFn) -> tuple[list[bytes], list[bool]]:
    kind = draw(connect_generated.kinds(depth=2))
    payloads: list[bytes] = []
    good: list[bool] = []
    for value in draw(st.lists(kind.data, min_size=1, max_size=4)):
        whole = kind.envelope(value)
        document = json.loads(whole)
        how = draw(st.sampled_from(["good", "noise", "mutated", "schema", "payload", "both"]))
        good.append(how == "good")
        if how == "noise":
            payloads.append(draw(st.binary(max_size=40)))
        elif how == "mutated":
            payloads.append(draw(mutated(whole, TEXTS.map(str.encode))))
        elif how == "good":
            payloads.append(whole)
        else:
            schema, payload = (json.dumps(document[name]) for name in ("schema", "payload"))
            schema = schema if how == "payload" else draw(altered(document["schema"]))
            payload = payload if how == "schema" else draw(altered(document["payload"]))
            payloads.append(f'{{"schema":{schema},"payload":{payload}}}'.encode(errors="replace"))
    return payloads, good


@NOISE
@given(connect_batches())
@example(([b'{"schema":null,"payload":1e99999999999999999999}', b"1e99999999999999999999"], [False, False]))
@example(([b'{"schema":{"type":"double"},"payload":1e99999999999999999999}'], [False]))
def test_connect_json(batch: tuple[list[bytes], list[bool]]) -> None:
    def by_column(column: pa.Array, target: pa.DataType | None) -> DecodedBatch:
        return make_decoder(SideFormat("connect-json"), str, target).decode(column)

    def by_record(column: pa.Array, target: pa.DataType | None) -> DecodedBatch:
        with patch.object(codec, "has_columns", lambda _: False):
            return by_column(column, target)

    check(*batch, by_column, by_record)


DDL = (
    "id bigint, text string, at timestamp, day date, price decimal(9,2), big decimal(38,10), raw binary, ok boolean,"
    " ratio double, small tinyint, deep struct<a: array<struct<b: float>>>"
)
ROW: dict[str, Any] = {
    "id": 1,
    "text": "x",
    "at": "2024-01-01T00:00:00Z",
    "day": "2024-01-01",
    "price": "1.10",
    "big": 1.5,
    "raw": "AA==",
    "ok": True,
    "ratio": 0.5,
    "small": 7,
    "deep": {"a": [{"b": 1.5}, None]},
}


@st.composite
def json_batches(draw: st.DrawFn) -> tuple[str, list[bytes], list[bool]]:
    """With a map, all is read record by record."""
    maps = draw(st.booleans())
    ddl = f"{DDL}, m map<int, decimal(5,1)>" if maps else DDL
    row = {**ROW, "m": {"1": 2.5}} if maps else ROW
    payloads: list[bytes] = []
    good: list[bool] = []
    for how in draw(
        st.lists(st.sampled_from(["good", "noise", "mutated", "altered", "altered"]), min_size=1, max_size=4)
    ):
        good.append(how == "good")
        if how == "noise":
            payloads.append(draw(st.binary(max_size=40)))
        elif how == "mutated":
            payloads.append(draw(mutated(json.dumps(row).encode(), TEXTS.map(str.encode))))
        elif how == "altered":
            payloads.append(draw(altered(row)).encode(errors="replace"))
        else:
            payloads.append(json.dumps(row).encode())
    return ddl, payloads, good


@settings(NOISE, max_examples=EXAMPLES)
@given(json_batches())
@example(
    (DDL, [b'{"ratio":1e99999999999999999999}', b'{"big":1e99999999999999999999}', b'{"id":2}'], [False, False, True])
)
@example(
    (DDL, [b'{"price":1e-9999999}', b'{"big":"0.1E-999999999"}', b'{"big":"1\\u0065-999\\u0039999"}'], [False] * 3)
)
@example((DDL, [b'{"x":1e99999999999999999999}', b'{"x":-1e-99999999999999999999}'], [False, False]))
@example((f"{DDL}, m map<int, int>", [b'{"m":{"1e99999999999999999999":1}}', b'{"m":{"[[":1}}'], [False, False]))
@example((DDL, [b'{"at":"0001-01-01T00:00:00+23:59"}', b'{"at":"9999-12-31T23:59:59-23:59"}'], [False, False]))
def test_json(batch: tuple[str, list[bytes], list[bool]]) -> None:
    ddl, payloads, good = batch

    def by_column(column: pa.Array, target: pa.DataType | None) -> DecodedBatch:
        return make_decoder(SideFormat("json", ddl), str, target).decode(column)

    def by_record(column: pa.Array, target: pa.DataType | None) -> DecodedBatch:
        with patch.object(dispatch, "columns_reader", json_reader):
            return by_column(column, target)

    check(payloads, good, by_column, by_record)
