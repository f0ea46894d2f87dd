"""Random schemas and random data: bytes → columns → bytes, damaged or not, column by column or by fastavro."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zync_assets.codecs.avro.types import arrow_type
from zync_assets.codecs.batches import DecodedBatch, decode_way
from zync_assets.codecs.dispatch import make_decoder, make_encoder
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.generated import QUIET, Kind, datums, framed, kinds, recursive_kinds, same

pytestmark = pytest.mark.usefixtures("both_ways")

AVRO = SideFormat("avro")


@st.composite
def batches(draw: st.DrawFn) -> tuple[Kind, list[Any]]:
    kind = draw(kinds(depth=3, top=draw(st.booleans())))
    return kind, draw(st.lists(kind.data, min_size=1, max_size=8))


def decode(schema: Any, payloads: pa.Array, *, native: bool) -> DecodedBatch:
    decoded = make_decoder(AVRO, lambda _: json.dumps(schema), None, native=native).decode(payloads)
    decoded.values.validate(full=True)
    return decoded


@QUIET
@given(batches())
def test_values_are_those_that_were_written(batch: tuple[Kind, list[Any]]) -> None:
    kind, values = batch
    payloads = pa.array([framed(3, datum) for datum in datums(kind.schema, values)])
    expected = [kind.lake(value) for value in values]
    assert decode_way(json.dumps(kind.schema)) == "native"
    for native in (True, False):
        decoded = decode(kind.schema, payloads, native=native)
        assert decoded.bad == ()
        assert decoded.values.type == arrow_type(json.dumps(kind.schema))
        assert decoded.values.to_pylist() == expected
        assert decoded.schema_ids.to_pylist() == [3] * len(values)


@QUIET
@given(batches())
def test_columns_become_the_same_bytes_again(batch: tuple[Kind, list[Any]]) -> None:
    kind, values = batch
    schema = json.dumps(kind.schema)
    payloads = pa.array([framed(3, datum) for datum in datums(kind.schema, values)])
    column = decode(kind.schema, payloads, native=True).values
    tombstones = column.is_null()
    for native in (True, False):
        encoded = make_encoder("avro", schema, 3, native=native).encode(column)
        assert encoded.bad == ()
        assert encoded.payloads.is_null().equals(tombstones)
        assert encoded.payloads.drop_null().equals(payloads.filter(column.is_valid()))


@QUIET
@given(recursive_kinds().flatmap(lambda kind: st.tuples(st.just(kind), st.lists(kind.data, min_size=1, max_size=4))))
def test_a_record_inside_itself_becomes_the_same_bytes_again(batch: tuple[Kind, list[Any]]) -> None:
    kind, values = batch
    schema = json.dumps(kind.schema)
    payloads = pa.array([framed(3, datum) for datum in datums(kind.schema, values)])
    assert decode_way(schema) == "fastavro"
    decoded = decode(kind.schema, payloads, native=True)
    assert decoded.bad == ()
    assert make_encoder("avro", schema, 3).encode(decoded.values).payloads.equals(payloads)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Kind, list[bytes], list[bytes]]:
    """A batch, and the same with some records changed, cut, or gone on after their end."""
    kind, values = draw(batches())
    whole = [framed(3, datum) for datum in datums(kind.schema, values)]
    broken: list[bytes] = []
    for payload in whole:
        how = draw(st.sampled_from(["whole", "changed", "cut", "longer"]))
        if how == "changed" and payload:
            at = draw(st.integers(0, len(payload) - 1))
            payload = payload[:at] + draw(st.binary(min_size=1, max_size=1)) + payload[at + 1 :]
        elif how == "cut":
            payload = payload[: draw(st.integers(0, len(payload)))]
        elif how == "longer":
            payload = payload + draw(st.binary(min_size=1, max_size=11))
        broken.append(payload)
    return kind, whole, broken


@QUIET
@given(damaged())
@example((Kind("long", st.none(), int), [framed(3, b"\0")], [framed(3, b"\xff" * 9 + b"\x7f")]))
@example(
    (Kind({"type": "array", "items": "int"}, st.none(), int), [framed(3, b"\0")], [framed(3, b"\x02\x02\x02\x04\0")])
)
def test_damage_is_told_alike_by_both_ways_and_costs_only_itself(batch: tuple[Kind, list[bytes], list[bytes]]) -> None:
    kind, whole, broken = batch
    payloads = pa.array(broken, pa.binary())

    def schema_of(_: int) -> str:
        return json.dumps(kind.schema)

    by_column = make_decoder(AVRO, schema_of, arrow_type(schema_of(3))).decode(payloads)
    by_record = make_decoder(AVRO, schema_of, arrow_type(schema_of(3)), native=False).decode(payloads)
    assert by_column.bad == by_record.bad
    assert same(by_column.values, by_record.values)
    bad = {item.index for item in by_column.bad}
    undamaged = decode(kind.schema, pa.array(whole), native=False).values
    for index, (before, after) in enumerate(zip(whole, broken, strict=True)):
        if before == after:
            assert index not in bad
            assert same(by_column.values.slice(index, 1).take([0]), undamaged.slice(index, 1).take([0]))
        elif len(after) < 5:
            assert index in bad
