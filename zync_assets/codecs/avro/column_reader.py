"""Avro binary → Arrow, a column at a time (Avro specification 1.12, "Binary Encoding").

All records of a batch are read side by side: each step reads one field of every record with numpy, each record at a
position of its own. So no byte is looked at by Python code one at a time, a record's length is known exactly, and a
record that is damaged spoils nothing but itself.

Only the encoding that writers use is read here. Whatever else a record holds (an error, or a rarity such as an array
in several blocks) makes it *odd*: its row is to be read again by fastavro, whose word counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import Mask, list_of, map_entries, numbers, pc, ready, spread, struct_of, validity_buffer
from zync_assets.codecs.avro.schema import Node
from zync_assets.codecs.avro.types import members, plain_type

# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false


Ints = npt.NDArray[np.int64]

CHUNK, LARGE_CHUNK = 16_384, 65_536
"""Records that are read side by side, by numpy and by compiled loops: of numpy's many steps for each field, the positions and
values have to stay in the processor's cache."""

_STOP = np.uint64(0x8080808080808080)
_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_JOINS = [
    (1, np.uint64(0x7F007F007F007F00), np.uint64(1)),
    (2, np.uint64(0x3FFF00003FFF0000), np.uint64(2)),
    (4, np.uint64(0x0FFFFFFF00000000), np.uint64(4)),
]
"""The steps that join the 7-bit groups of a varint, pair by pair: (length, mask, shift). A step is for varints of more bytes
than ``length``. In each pair, ``mask`` selects the higher half, which then moves down by ``shift`` bits."""
_FEW, _MANY = 16, 64
_ALL: Mask = np.empty(0, dtype=np.bool_)
"""For compiled loops: all records are valid."""


class ByteSource:
    """The bytes of a batch, readable as bytes and as words at any position. ``odd``: per record.

    ``data`` ends with ``decoder.PADDING`` zeros, and is shorter than Arrow's limit of 2 GiB.
    """

    def __init__(self, data: npt.NDArray[np.uint8], records: int) -> None:
        if len(data) > np.iinfo(np.int32).max:
            raise ValueError(f"{len(data)} bytes are too much for one batch; decode less than 2 GiB at a time")
        count = len(data) - 7
        self.bytes = data
        self.words = np.ndarray((count,), dtype="<u8", buffer=data.data, strides=(1,))
        self.halves = np.ndarray((count,), dtype="<u4", buffer=data.data, strides=(1,))
        self.buffer = pa.py_buffer(data)
        self.odd: Mask = np.zeros(records, dtype=np.bool_)
        self.loops = _loops()


@dataclass
class ByteSpan:
    """The positions of some records in the bytes: next byte, end, and index of the record. Reading moves ``pos``."""

    source: ByteSource
    pos: Ints
    end: Ints
    rows: Ints

    def subset(self, mask: Mask) -> ByteSpan:
        return ByteSpan(self.source, self.pos[mask], self.end[mask], self.rows[mask])

    def flag(self, mask: Mask) -> None:
        if mask.any():
            self.source.odd[self.rows[mask]] = True

    def move(self, pos: Ints) -> None:
        """Go on at ``pos``; a record that has no so many bytes is odd and stays at its end."""
        over = pos > self.end
        if over.any():
            self.flag(over)
            pos = np.minimum(pos, self.end)
        self.pos = pos


def decode_columns(node: Node, source: ByteSource, starts: Ints, ends: Ints) -> pa.Array:
    """The records at ``starts`` to ``ends``, of the plain type; meaningless where ``source.odd`` is set afterwards."""
    parts: list[pa.Array] = []
    size = CHUNK if source.loops is None else LARGE_CHUNK
    for first in range(0, len(starts), size):
        last = min(first + size, len(starts))
        span = ByteSpan(source, starts[first:last].copy(), ends[first:last], np.arange(first, last))
        parts.append(_read(node, span, None))
        span.flag(span.pos != span.end)
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays(parts) if parts else pa.nulls(0, plain_type(node))


def _read(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    """One value of each record (of the valid ones; null at the others)."""
    reader = _PRIMITIVES.get(node.kind)
    if reader is not None:
        return reader(node, span, valid)
    if valid is not None:
        if not valid.any():
            return pa.nulls(len(valid), plain_type(node))
        if not valid.all():
            if node.kind == "record" and span.source.loops is not None:
                # These pass over the others at less cost than it takes to set some apart and to put nulls between them.
                return _read_record(node, span, valid)
            part = span.subset(valid)
            values = _NESTED[node.kind](node, part)
            span.pos[valid] = part.pos
            return spread(values, valid)
    return _NESTED[node.kind](node, span)


def _loops() -> ModuleType | None:
    """Compiled loops, for a process that has much to read."""
    if not ready():
        return None
    from zync_assets.codecs import loops

    return loops


def _varints(loops: ModuleType, span: ByteSpan, valid: Mask | None, lengths: bool) -> Ints:
    values, odd = np.empty(len(span.pos), np.int64), np.zeros(len(span.pos), np.bool_)
    mask = _ALL if valid is None else valid
    if loops.read_varints(span.source.bytes, span.pos, span.end, mask, values, odd, lengths):
        span.flag(odd)
    return values


def _long(span: ByteSpan, valid: Mask | None) -> Ints:
    """A zigzag varint of each record."""
    if span.source.loops is not None:
        return _varints(span.source.loops, span, valid, False)
    words = span.source.words[span.pos]
    if not (words & np.uint64(0x80)).any():
        raw = words & np.uint64(0x7F)
        length = np.uint8(1)
    else:
        raw = ~words
        raw &= _STOP
        longer = None if raw.all() else raw == 0
        # All bits up to the lowest one that is set: the varint's own.
        raw ^= raw - np.uint64(1)
        length = np.bitwise_count(raw) >> 3
        raw &= words
        raw &= _BITS
        longest = length.max()
        for size, high, shift in _JOINS:
            if longest > size:
                # The higher half of each pair moves down to the lower one, over the bits between them.
                upper = raw & high
                upper -= upper >> shift
                raw -= upper
        if longer is not None:
            _long_tail(span, longer if valid is None else longer & valid, raw, length)
    sign = raw & np.uint64(1)
    np.negative(sign, out=sign)
    raw >>= np.uint64(1)
    raw ^= sign
    span.move(span.pos + (length if valid is None else length * valid))
    return raw.view(np.int64)


def _long_tail(span: ByteSpan, longer: Mask, raw: npt.NDArray[np.uint64], length: npt.NDArray[np.integer[Any]]) -> None:
    """The ninth and tenth byte of the varints that have them."""
    at = span.pos[longer] + 8
    ninth = span.source.bytes[np.minimum(at, len(span.source.bytes) - 2)].astype(np.uint64)
    tenth = span.source.bytes[np.minimum(at + 1, len(span.source.bytes) - 1)].astype(np.uint64)
    continuation = ninth >= 0x80
    value = raw[longer] | ((ninth & np.uint64(0x7F)) << np.uint64(56))
    value |= np.where(continuation, tenth & np.uint64(1), np.uint64(0)) << np.uint64(63)
    raw[longer] = value
    length[longer] = np.where(continuation, 10, 9)
    odd = np.zeros(len(longer), dtype=np.bool_)
    odd[longer] = continuation & (tenth > 1)
    span.flag(odd)


def _length(span: ByteSpan, valid: Mask | None) -> Ints:
    """A length in bytes or a count of each record: odd ones and those of invalid records are 0."""
    if span.source.loops is not None:
        return _varints(span.source.loops, span, valid, True)
    values = _long(span, valid)
    if valid is not None:
        values = np.where(valid, values, 0)
    wrong = (values < 0) | (values > span.end - span.pos)
    if wrong.any():
        span.flag(wrong)
        values = np.where(wrong, 0, values)
    return values


def _read_int(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    values = _long(span, valid)
    narrow = values.astype(np.int32)
    wrong = narrow != values
    span.flag(wrong if valid is None else wrong & valid)
    return numbers(narrow, pa.int32(), valid)


def _read_long(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    return numbers(_long(span, valid), pa.int64(), valid)


def _read_float(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    double = node.kind == "double"
    values = (span.source.words if double else span.source.halves)[span.pos]
    size = 8 if double else 4
    span.move(span.pos + (size if valid is None else np.where(valid, size, 0)))
    return numbers(values, pa.float64() if double else pa.float32(), valid)


def _read_boolean(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    values = span.source.bytes[span.pos]
    wrong = values > 1
    span.flag(wrong if valid is None else wrong & valid)
    span.move(span.pos + (1 if valid is None else valid.astype(np.int64)))
    bits = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [validity_buffer(valid), bits])


def _read_bytes(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    if node.kind == "fixed":
        length = np.full(len(span.pos), node.size) if valid is None else np.where(valid, node.size, 0)
        over = span.pos + length > span.end
        if over.any():
            span.flag(over)
            length = np.where(over, 0, length)
    else:
        length = _length(span, valid)
    values = _take_bytes(span, length)
    if node.kind == "string":
        values = _text(values, span)
    if valid is None:
        return values
    _, offsets_buffer, data = values.buffers()
    return pa.Array.from_buffers(values.type, len(length), [validity_buffer(valid), offsets_buffer, data])


def _take_bytes(span: ByteSpan, length: Ints) -> pa.Array:
    """The next ``length`` bytes of each record."""
    count = len(length)
    if span.source.loops is not None:
        ends = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(length, out=ends[1:])
        content = np.empty(ends[-1], np.uint8)
        span.source.loops.take_bytes(span.source.bytes, span.pos, length, ends, content)
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(content)])
    offsets = np.empty(2 * count + 1, dtype=np.int32)
    offsets[0:-1:2] = span.pos
    offsets[1::2] = span.pos + length
    offsets[-1] = offsets[-2]
    span.pos = span.pos + length
    gaps = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), span.source.buffer])
    return gaps.take(pa.array(np.arange(0, 2 * count, 2)))


def _text(values: pa.Array, span: ByteSpan) -> pa.Array:
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        pass
    odd = np.zeros(len(values), dtype=np.bool_)
    _find_bad_text(values, 0, odd)
    span.flag(odd)
    empty = pa.scalar(b"", pa.binary())
    return pc.if_else(pa.array(odd), empty, values).cast(pa.string())


def _find_bad_text(values: pa.Array, first: int, odd: Mask) -> None:
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        if len(values) == 1:
            odd[first] = True
            return
        half = len(values) // 2
        _find_bad_text(values[:half], first, odd)
        _find_bad_text(values[half:], first + half, odd)


def _read_enum(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    index = _long(span, valid)
    wrong = (index < 0) | (index >= len(node.symbols))
    if wrong.any():
        span.flag(wrong if valid is None else wrong & valid)
        index = np.where(wrong, 0, index)
    return pa.array(node.symbols, pa.string()).take(numbers(index, pa.int64(), valid))


def _read_option(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    has_value = _option_mask(node, span, valid)
    return _read(node.child, span, None if has_value.all() else has_value)


def _option_mask(node: Node, span: ByteSpan, valid: Mask | None) -> Mask:
    """Which records have the option's value, by its tag."""
    if span.source.loops is not None:
        has_value, odd = np.empty(len(span.pos), np.bool_), np.zeros(len(span.pos), np.bool_)
        mask = _ALL if valid is None else valid
        if span.source.loops.read_tags(span.source.bytes, span.pos, span.end, mask, node.null_index, has_value, odd):
            span.flag(odd)
        return has_value
    tag = span.source.bytes[span.pos]
    has_value = tag == 2 * (1 - node.null_index)
    wrong = ~has_value & (tag != 2 * node.null_index)
    if valid is not None:
        has_value &= valid
        wrong &= valid
    span.flag(wrong)
    span.move(span.pos + (1 if valid is None else valid.astype(np.int64)))
    return has_value


def _read_null(node: Node, span: ByteSpan, valid: Mask | None) -> pa.Array:
    return pa.nulls(len(span.pos), pa.string())


def _read_record(node: Node, span: ByteSpan, valid: Mask | None = None) -> pa.Array:
    visible = {name for name, _ in members(node)}
    children: list[pa.Array] = []
    for name, child in node.fields:
        values = _read(child, span, valid)
        if name in visible:
            children.append(values)
    if not children:
        return pa.array(np.ones(len(span.pos), dtype=np.bool_), mask=None if valid is None else ~valid)
    return struct_of(plain_type(node), children, len(span.pos), valid)


def _read_union(node: Node, span: ByteSpan) -> pa.Array:
    index = _long(span, None)
    wrong = (index < 0) | (index >= len(node.branches))
    span.flag(wrong)
    has_value = np.zeros(len(index), dtype=np.bool_)
    children: list[pa.Array] = []
    for number, branch in enumerate(node.branches):
        if branch.kind != "null":
            in_branch = index == number
            has_value |= in_branch
            children.append(_read(branch, span, in_branch))
    if not children:
        return pa.nulls(len(index), pa.bool_())
    return struct_of(plain_type(node), children, len(index), has_value)


def _read_items(node: Node, span: ByteSpan) -> pa.Array:
    """Read arrays or maps, each with a single block and the end mark 0. Reads the k-th items of all records side by side."""
    count = _length(span, None)
    has_items = count > 0
    rows = np.arange(len(count))
    keys: list[pa.Array] = []
    items: list[pa.Array] = []
    owners: list[Ints] = []
    step = 0
    while (active := count > step).any():
        if step >= _MANY and np.count_nonzero(active) < _FEW:
            span.flag(active)
            count = np.where(active, 0, count)
            break
        part = span if active.all() else span.subset(active)
        if node.kind == "map":
            keys.append(_read(_KEY, part, None))
        items.append(_read(node.child, part, None))
        if part is not span:
            span.pos[active] = part.pos
        owners.append(rows[active])
        step += 1
    if has_items.any():
        after = span.source.bytes[span.pos]
        span.flag(has_items & (after != 0))
        span.move(span.pos + has_items)
    return _gather(node, span, count, keys, items, owners)


def _gather(
    node: Node, span: ByteSpan, count: Ints, keys: list[pa.Array], items: list[pa.Array], owners: list[Ints]
) -> pa.Array:
    """Lists out of the first items of all, the second items of all, and so on."""
    type = plain_type(node)
    offsets = np.zeros(len(count) + 1, dtype=np.int32)
    if not owners:
        return list_of(type, offsets, _values(node, type, keys, items), None)
    owner = np.concatenate(owners)
    valid_items = np.flatnonzero(count[owner] > 0)
    order = pa.array(valid_items[np.argsort(owner[valid_items], kind="stable")])
    np.cumsum(np.bincount(owner[valid_items], minlength=len(count)), out=offsets[1:])
    keys = [pa.concat_arrays(keys).take(order)] if keys else []
    values = _values(node, type, keys, [pa.concat_arrays(items).take(order)])
    if keys and len(owners) > 1:
        _flag_double_keys(keys[0], owner[order.to_numpy()], span)
    return list_of(type, offsets, values, None)


def _values(node: Node, type: pa.DataType, keys: list[pa.Array], items: list[pa.Array]) -> pa.Array:
    values = items[0] if items else pa.nulls(0, plain_type(node.child))
    if node.kind == "array":
        return values
    return map_entries(type, keys[0] if keys else pa.nulls(0, pa.string()), values)


def _flag_double_keys(keys: pa.Array, owner: Ints, span: ByteSpan) -> None:
    encoding = keys.dictionary_encode()
    code = encoding.indices.to_numpy().astype(np.int64) + owner * np.int64(len(encoding.dictionary))
    values, first, times = np.unique(code, return_index=True, return_counts=True)
    if len(values) < len(code):
        double = np.zeros(len(span.pos), dtype=np.bool_)
        double[owner[first[times > 1]]] = True
        span.flag(double)


_KEY = Node("string")
_PRIMITIVES = {
    "null": _read_null,
    "boolean": _read_boolean,
    "int": _read_int,
    "long": _read_long,
    "float": _read_float,
    "double": _read_float,
    "bytes": _read_bytes,
    "string": _read_bytes,
    "fixed": _read_bytes,
    "enum": _read_enum,
    "option": _read_option,
}
_NESTED = {"record": _read_record, "union": _read_union, "array": _read_items, "map": _read_items}
