"""Reads many payloads of one Connect schema at once with pyarrow's JSON reader. Some records are unsafe for this reader.

``connect_rows`` reads these records (``odd``): damaged and unusual records, and records that lack a field with a rule in the
schema. pyarrow refuses duplicate and unexpected fields, numbers for strings, and half surrogates. But pyarrow accepts
infinities, knows no base64 and no maps, and reads two documents in a line as two records.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json as pj

from zync_assets.codecs.connect_schema import Connect, nested_type, plain_type
from zync_assets.codecs.nested import Mask, is_valid, list_of, list_parts, struct_of, validity_buffer
from zync_assets.compute import pc

_FEW = 64
"""A block of so many records that fails is left over whole."""
_PARTS = 8


@lru_cache(maxsize=1024)
def has_columns(node: Connect) -> bool:
    """Whether pyarrow can read the type: no maps, no structs without fields."""
    if node.kind == "map" or (node.kind == "struct" and not node.fields):
        return False
    inner = [child for _, child in node.fields] + ([node.items] if node.items else [])
    return all(has_columns(child) for child in inner)


def read_columns(node: Connect, texts: pa.Array) -> tuple[pa.Array, Mask]:
    """Plain values, and which are odd: to be read again by ``connect_rows``.

    ``texts``: binary without nulls, each a payload and the ``}`` that closes the record around it.
    """
    if len(texts) == 0:
        return pa.nulls(0, plain_type(node)), np.zeros(0, np.bool_)
    try:
        return _plain(node, _read(node, texts))
    except ValueError:
        pass
    if len(texts) <= _FEW:
        return pa.nulls(len(texts), plain_type(node)), np.ones(len(texts), np.bool_)
    size = -(-len(texts) // _PARTS)
    parts = [read_columns(node, texts.slice(at, size)) for at in range(0, len(texts), size)]
    return pa.concat_arrays([part for part, _ in parts]), np.concatenate([odd for _, odd in parts])


def _read(node: Connect, texts: pa.Array) -> pa.Array:
    # Each line begins with an object and ends with its bracket, so that none can run on into the next: as many rows as
    # lines means a row a line.
    lines = pc.binary_join_element_wise(b'{"payload":', texts, b"\n", b"")
    lines.cast(pa.string()).validate(full=True)
    size = int(lines.offset) + len(lines)
    ends = np.frombuffer(lines.buffers()[1], np.int32)
    data = lines.buffers()[2].slice(int(ends[lines.offset]), int(ends[size] - ends[lines.offset]))
    table = pj.read_json(
        pa.BufferReader(data),
        read_options=pj.ReadOptions(use_threads=False, block_size=data.size + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=pa.schema([("payload", _json_type(node))]), unexpected_field_behavior="error"
        ),
    )
    if table.num_rows != len(texts):
        raise ValueError("more than one document in a record")
    return pa.concat_arrays(table.column(0).chunks)


@lru_cache(maxsize=1024)
def _json_type(node: Connect) -> pa.DataType:
    return pa.string() if node.kind == "bytes" else nested_type(node, _json_type)


def _plain(node: Connect, array: pa.Array) -> tuple[pa.Array, Mask]:
    """The plain values of what pyarrow read, and which of them are odd."""
    count, valid = len(array), is_valid(array)
    if node.kind in ("struct", "variable-decimal"):
        made: list[pa.Array] = []
        odd = np.zeros(count, np.bool_)
        for (_, child), column in zip(node.fields, array.flatten(), strict=True):
            part, wrong = _plain(child, column)
            made.append(part)
            odd |= wrong | _says_more(child, column, valid)
        return struct_of(plain_type(node), made, count, valid), odd
    if node.kind == "array":
        offsets, values = list_parts(array)
        items, wrong = _plain(node.item, values)
        wrong = wrong | _says_more(node.item, values, None)
        before = np.concatenate([[0], np.cumsum(wrong)])
        return list_of(plain_type(node), offsets, items, valid), before[offsets[1:]] > before[offsets[:-1]]
    if node.kind == "bytes":
        return _unbase64(array, valid, empty_is_odd=node.logical is not None)
    odd = np.zeros(count, np.bool_)
    if node.kind in ("float", "double"):
        odd = pc.invert(pc.is_finite(array)).fill_null(False).to_numpy(zero_copy_only=False)
    elif node.kind == "string":
        array.validate(full=True)
    return array, odd


def _says_more(node: Connect, column: pa.Array, parent: Mask | None) -> Mask:
    """Nulls inside what is there, where the schema asks for a value or has a default for a missing one."""
    if column.null_count == 0 or (node.optional and node.default is None):
        return np.zeros(len(column), np.bool_)
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    return nulls if parent is None else nulls & parent


_UNKNOWN = 255
_SEXTETS: npt.NDArray[np.uint8] = np.full(256, _UNKNOWN, np.uint8)
for _at, _letter in enumerate(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"):
    _SEXTETS[_letter] = _at
_PADDING = ord("=")


def _unbase64(array: pa.Array, valid: Mask | None, *, empty_is_odd: bool) -> tuple[pa.Array, Mask]:
    """Base64 with its padding, all at once: four characters become three bytes, wherever their text begins."""
    count = len(array)
    there = np.ones(count, np.bool_) if valid is None else valid
    lengths = pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    odd = there & ((lengths % 4 != 0) | ((lengths == 0) & empty_is_odd))
    lengths[odd] = 0
    # A truncated text would shift the texts after it. It is read as empty.
    kept = pc.if_else(pa.array(there & ~odd), array, "").cast(pa.binary())
    letters = np.frombuffer(kept.buffers()[2] or b"", np.uint8)[: lengths.sum()]
    ends = np.cumsum(lengths)
    padding = np.zeros(count, np.int64)
    some = lengths > 0
    one = letters[ends[some] - 1] == _PADDING
    padding[some] = one.astype(np.int64) + (one & (letters[ends[some] - 2] == _PADDING))
    sextets = _SEXTETS[letters]
    unused = np.concatenate([ends[padding >= place] - place for place in (1, 2)])
    sextets[unused] = 0
    unknown = np.concatenate([[0], np.cumsum(sextets == _UNKNOWN)])
    odd |= unknown[ends] > unknown[ends - lengths]
    quads = sextets.reshape(-1, 4).astype(np.uint32)
    whole = (quads[:, 0] << 18) | (quads[:, 1] << 12) | (quads[:, 2] << 6) | quads[:, 3]
    data = np.column_stack([whole >> 16, (whole >> 8) & 255, whole & 255]).astype(np.uint8).ravel()
    ours = np.ones(len(data), np.bool_)
    ours[np.concatenate([(ends // 4 * 3)[padding >= place] - place for place in (1, 2)])] = False
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths // 4 * 3 - padding, out=offsets[1:])
    buffers = [validity_buffer(there & ~odd), pa.py_buffer(offsets), pa.py_buffer(data[ours])]
    return pa.Array.from_buffers(pa.binary(), count, buffers), odd
