"""Writers that change: the column's values against fastavro's own schema resolution (Avro specification, "Schema Resolution")."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets.codecs.avro_types import avro_schema
from zync_assets.codecs.decode import make_decoder
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.generated import datums, framed

INT = st.integers(-(1 << 31), (1 << 31) - 1)
FLOAT = st.floats(width=32, allow_nan=False)

# For each field: the lake's type if it is there already, and what writers may send for it.
FIELDS: dict[str, tuple[pa.DataType, list[tuple[Any, st.SearchStrategy[Any]]]]] = {
    "whole": (pa.int64(), [("int", INT), ("long", st.integers(-(1 << 63), (1 << 63) - 1))]),
    "real": (pa.float64(), [("int", INT), ("long", INT), ("float", FLOAT), ("double", st.floats(allow_nan=False))]),
    "text": (pa.string(), [("string", st.text(max_size=5)), ("bytes", st.text(max_size=5).map(str.encode))]),
    "raw": (pa.binary(), [("bytes", st.binary(max_size=5)), ("string", st.text(max_size=5))]),
    "list": (pa.list_(pa.int64()), [({"type": "array", "items": "int"}, st.lists(INT, max_size=3))]),
    "maybe": (pa.int64(), [(["null", "int"], st.none() | INT), (["long", "null"], st.none() | INT)]),
}


@st.composite
def writers(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, unique=True))
    chosen = {name: draw(st.sampled_from(FIELDS[name][1])) for name in names}
    schema = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": name, "type": type} for name, (type, _) in chosen.items()],
    }
    values = st.fixed_dictionaries({name: data for name, (_, data) in chosen.items()})
    return schema, draw(st.lists(values, min_size=1, max_size=3))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(writers(), min_size=1, max_size=4))
def test_the_column_holds_what_avro_s_resolution_gives(data: st.DataObject, wrote: list[tuple[Any, list[Any]]]) -> None:
    there = data.draw(st.permutations(sorted(FIELDS)))
    target = pa.struct([(name, FIELDS[name][0]) for name in there])
    records = [
        (number, datum, datums(schema, [datum])[0]) for number, (schema, values) in enumerate(wrote) for datum in values
    ]
    records = data.draw(st.permutations(records))
    decoder = make_decoder(SideFormat("avro"), lambda number: json.dumps(wrote[number][0]), target)
    decoded = decoder.decode(pa.array([framed(number, datum) for number, _, datum in records]))
    reader = fastavro.parse_schema(json.loads(avro_schema(target, "Row", None)))
    expected = [
        fastavro.schemaless_reader(io.BytesIO(datum), fastavro.parse_schema(wrote[number][0]), reader)
        for number, _, datum in records
    ]
    assert decoded.bad == ()
    assert decoder.type == target
    assert decoded.values.to_pylist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(writers(), min_size=2, max_size=4))
def test_a_column_s_fields_never_move_vanish_or_change(wrote: list[tuple[Any, list[Any]]]) -> None:
    decoder = make_decoder(SideFormat("avro"), lambda number: json.dumps(wrote[number][0]), None)
    before: list[pa.Field] = []
    for number, (schema, values) in enumerate(wrote):
        decoded = decoder.decode(pa.array([framed(number, datum) for datum in datums(schema, values)]))
        after = list(decoder.type)
        assert after[: len(before)] == before
        assert {field.name for field in after[len(before) :]} <= set(values[0])
        # A schema that does not go into the column, or bytes that are no text: nothing else is wrong with any record.
        assert all("does not fit" in item.error for item in decoded.bad)
        before = after
