"""Random sequences of writer schemas: compares the resulting column with fastavro's own schema resolution.

The reader's schema comes from the column's final type, with the fields' other names as aliases.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import fastavro
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from zync_assets.codecs.dispatch import make_decoder
from zync_assets.codecs.evolution import conform
from zync_assets.codecs.fields import fields_of, other_names
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.generated import EXAMPLES, datums, framed, same

INT = st.integers(-(1 << 31), (1 << 31) - 1)
LONG = st.integers(-(1 << 63), (1 << 63) - 1)
FLOAT, DOUBLE = st.floats(width=32, allow_nan=False), st.floats(allow_nan=False)
TEXT = st.text(max_size=4)

DEPTH = 2

Choice = tuple[Any, st.SearchStrategy[Any]]

NUMBERS: list[Choice] = [("int", INT), ("long", LONG), ("float", FLOAT), ("double", DOUBLE)]
WHOLE: list[Choice] = [("int", INT), ("long", LONG)]
TEXTS: list[Choice] = [("string", TEXT), ("bytes", TEXT.map(str.encode))]


def optional(choices: list[Choice]) -> list[Choice]:
    return choices + [(["null", kind], st.none() | data) for kind, data in choices]


def arrays(choices: list[Choice]) -> list[Choice]:
    return [({"type": "array", "items": kind}, st.lists(data, max_size=3)) for kind, data in choices]


def maps(choices: list[Choice]) -> list[Choice]:
    return [({"type": "map", "values": kind}, st.dictionaries(TEXT, data, max_size=3)) for kind, data in choices]


LEAVES: dict[str, list[Choice]] = {
    "number": optional(NUMBERS),
    "whole": optional(WHOLE),
    "text": optional(TEXTS),
    "list": arrays(optional(NUMBERS)),
    "table": maps(optional(WHOLE)),
}


@dataclass(frozen=True)
class Writer:
    schema: dict[str, Any]
    values: list[dict[str, Any]]


@st.composite
def records(draw: st.DrawFn, depth: int) -> Choice:
    """A record with some of the fields there are, in any order, each by either of its names, the other one its alias."""
    wanted = draw(st.lists(st.sampled_from([*LEAVES, "deep"] if depth else list(LEAVES)), min_size=1, unique=True))
    fields: list[dict[str, Any]] = []
    data: dict[str, st.SearchStrategy[Any]] = {}
    for field in wanted:
        kind, values = draw(records(depth - 1)) if field == "deep" else draw(st.sampled_from(LEAVES[field]))
        names = draw(st.permutations([field, f"{field}_new"]))
        fields.append({"name": names[0], "aliases": [names[1]], "type": kind})
        data[names[0]] = values
    return {"type": "record", "name": f"Row{depth}", "fields": fields}, st.fixed_dictionaries(data)


@st.composite
def writers(draw: st.DrawFn) -> Writer:
    schema, data = draw(records(DEPTH))
    return Writer(schema, draw(st.lists(data, min_size=1, max_size=3)))


def reader(type: pa.DataType, depth: int = DEPTH) -> Any:
    """The Avro schema of a column: everything may be null."""
    kinds = pa.types
    if kinds.is_struct(type):
        fields = [
            {
                "name": field.name,
                "aliases": list(other_names(field)),
                "type": ["null", reader(field.type, depth - 1)],
                "default": None,
            }
            for field in fields_of(type)
        ]
        return {"type": "record", "name": f"Row{depth}", "fields": fields}
    if kinds.is_list(type):
        return {"type": "array", "items": ["null", reader(type.value_type)]}
    if kinds.is_map(type):
        return {"type": "map", "values": ["null", reader(type.item_type)]}
    return {
        "int32": "int",
        "int64": "long",
        "float": "float",
        "double": "double",
        "binary": "bytes",
        "string": "string",
    }[str(type)]


def as_arrow(value: Any, type: pa.DataType) -> Any:
    """fastavro's value as pyarrow takes it."""
    if value is None:
        return None
    if pa.types.is_struct(type):
        return {field.name: as_arrow(value[field.name], field.type) for field in fields_of(type)}
    if pa.types.is_list(type):
        return [as_arrow(item, type.value_type) for item in value]
    if pa.types.is_map(type):
        return [(key, as_arrow(item, type.item_type)) for key, item in value.items()]
    return value


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(writers(), min_size=2, max_size=4), st.booleans())
def test_a_column_of_many_writers_holds_what_avro_s_resolution_gives(wrote: list[Writer], native: bool) -> None:
    known: pa.DataType | None = None
    batches: list[pa.Array] = []
    for number, writer in enumerate(wrote):
        # A decoder of its own for each, as in batch after batch.
        decoder = make_decoder(SideFormat("avro"), lambda id: json.dumps(wrote[id].schema), known, native=native)
        decoded = decoder.decode(pa.array([framed(number, datum) for datum in datums(writer.schema, writer.values)]))
        assert decoded.bad == ()
        batches.append(decoded.values)
        known = decoder.type
    assert known is not None
    names = [field.name.removesuffix("_new") for field in fields_of(known)]
    assert len(set(names)) == len(names)
    parsed = fastavro.parse_schema(reader(known))
    for writer, batch in zip(wrote, batches, strict=True):
        own = fastavro.parse_schema(json.loads(json.dumps(writer.schema)))
        expected = [
            as_arrow(fastavro.schemaless_reader(io.BytesIO(datum), own, parsed), known)
            for datum in datums(writer.schema, writer.values)
        ]
        assert same(conform(batch, known), pa.array(expected, known))
