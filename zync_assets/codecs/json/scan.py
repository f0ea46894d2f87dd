"""JSON texts to a struct of plain values, by one compiled pass over the texts (``loops``).

A scan reads a number, a text or a boolean where the type has this kind of value, in any order of the fields. It checks the whole
text, unknown fields too. Another reader reads an odd text. A text is odd if it:

- is no JSON object, or has a field twice
- has a value of another kind, or an integer that does not fit
- has half a surrogate, or a name with an escaped character
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import Mask, numbers, pc, struct_of, text_parts, validity_buffer
from zync_assets.codecs.json import loops

MOST_CELLS = 4_000_000
"""Values of texts that are read together. Each takes 17 bytes, also where a text lacks the field."""
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Nodes:
    """The values of a type as ``loops.scan_texts`` needs them. Node 0 is the whole value. The children of a struct lie side by
    side."""

    types: list[pa.DataType]
    kinds: npt.NDArray[np.uint8]
    firsts: Longs
    counts: Longs
    names: npt.NDArray[np.uint8]
    name_ends: Longs
    least: Longs
    most: Longs
    scales: Longs


def scan(type: pa.DataType, payloads: pa.Array) -> tuple[pa.Array, Mask] | None:
    """The values of JSON texts, and which texts are odd: their values are null. None if the type or a text needs another reader.

    ``payloads``: binary. Binary values, dates and timestamps stay texts, and a float is a double.
    """
    nodes = _nodes(type)
    if nodes is None:
        return None
    try:
        payloads.cast(pa.string())
    except ValueError:
        return None  # not UTF-8
    size = max(1, MOST_CELLS // len(nodes.types))
    parts = [_scan(nodes, payloads.slice(at, size)) for at in range(0, max(1, len(payloads)), size)]
    return pa.concat_arrays([array for array, _ in parts]), np.concatenate([odd for _, odd in parts])


def _scan(nodes: _Nodes, payloads: pa.Array) -> tuple[pa.Array, Mask]:
    """As ``scan``, for a few UTF-8 texts."""
    count, places = len(payloads), len(nodes.types)
    bounds, letters = text_parts(payloads)
    values, lengths = (np.zeros((places, count), np.int64) for _ in range(2))
    states, odd = np.zeros((places, count), np.uint8), np.zeros(count, np.bool_)
    about = nodes.kinds, nodes.firsts, nodes.counts, nodes.names, nodes.name_ends, nodes.least, nodes.most, nodes.scales
    loops.scan_texts(letters, bounds.astype(np.int64), *about, values.ravel(), lengths.ravel(), states.ravel(), odd)
    odd |= payloads.is_null().to_numpy(zero_copy_only=False)

    def strings(node: int, has_text: Mask) -> pa.Array:
        """The texts at a node, null where there is none."""
        node_lengths = np.where(has_text, lengths[node], 0)
        text_ends = np.zeros(count + 1, np.int32)
        np.cumsum(node_lengths, out=text_ends[1:])
        content = np.empty(int(text_ends[-1]), np.uint8)
        loops.copy_strings(letters, states[node], values[node], node_lengths, text_ends, content)
        buffers = [validity_buffer(has_text), pa.py_buffer(text_ends), pa.py_buffer(content)]
        return pa.Array.from_buffers(pa.string(), count, buffers)

    def column(node: int) -> pa.Array:
        kind, valid = nodes.kinds[node], states[node] == loops.VALUE
        if kind == loops.STRUCT:
            first = int(nodes.firsts[node])
            children = [column(child) for child in range(first, first + int(nodes.counts[node]))]
            fields = [pa.field(item.name, child.type) for item, child in zip(nodes.types[node], children, strict=True)]
            return struct_of(pa.struct(fields), children, count, valid)
        if kind == loops.STRING:
            return strings(node, valid | (states[node] == loops.ESCAPED))
        if kind == loops.BOOL:
            return pa.array(values[node].astype(np.bool_), mask=~valid)
        if kind == loops.INT:
            return numbers(values[node].astype(nodes.types[node].to_pandas_dtype()), nodes.types[node], valid)
        if kind == loops.DECIMAL:
            low = values[node]
            return numbers(np.column_stack([low, low >> 63]), nodes.types[node], valid)
        doubles = numbers(values[node].view(np.float64), pa.float64(), valid)
        has_text = states[node] == loops.TEXT
        return (
            pc.if_else(pa.array(has_text), strings(node, has_text).cast(pa.float64()), doubles)
            if has_text.any()
            else doubles
        )

    return column(0), odd


@lru_cache(maxsize=1024)
def _nodes(type: pa.DataType) -> _Nodes | None:
    """None for a type with lists or maps, and for a struct without fields."""
    types, names, firsts = [type], [b""], [0]
    for at, kind in enumerate(types):
        if _kind(kind) is None:
            return None
        firsts += [0] * (len(types) - len(firsts))
        if pa.types.is_struct(kind):
            firsts[at] = len(types)
            types += [item.type for item in kind]
            names += [item.name.encode() for item in kind]
    limits = [_limits(kind) for kind in types]
    return _Nodes(
        types,
        np.array([_kind(kind) for kind in types], np.uint8),
        np.array(firsts, np.int64),
        np.array([kind.num_fields if pa.types.is_struct(kind) else 0 for kind in types], np.int64),
        np.frombuffer(b"".join(names) or b" ", np.uint8),
        np.cumsum([0, *map(len, names)], dtype=np.int64),
        np.array([least for least, _ in limits], np.int64),
        np.array([most for _, most in limits], np.int64),
        np.array([kind.scale if pa.types.is_decimal(kind) else 0 for kind in types], np.int64),
    )


def _limits(type: pa.DataType) -> tuple[int, int]:
    """The least and the greatest integer, of a decimal without its point."""
    if pa.types.is_decimal(type):
        most = 10 ** min(type.precision, loops.DIGITS) - 1
        return -most, most
    bits = type.bit_width if pa.types.is_integer(type) else 64
    return -(1 << bits - 1), (1 << bits - 1) - 1


def _kind(type: pa.DataType) -> int | None:
    kinds = pa.types
    if kinds.is_struct(type):
        return loops.STRUCT if type.num_fields else None
    if kinds.is_signed_integer(type):
        return loops.INT
    if kinds.is_floating(type):
        return loops.FLOAT
    if kinds.is_boolean(type):
        return loops.BOOL
    if kinds.is_decimal128(type):
        return loops.DECIMAL if 0 <= type.scale <= loops.DIGITS else None
    is_text = kinds.is_string(type) or kinds.is_binary(type) or kinds.is_date(type) or kinds.is_timestamp(type)
    return loops.STRING if is_text else None
