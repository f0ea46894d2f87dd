"""Reads many JSON texts of one struct type at once with pyarrow's JSON reader. Some texts are unsafe for this reader.

``json_values`` reads the unsafe texts, one by one, and defines the meaning of a text. A text is unsafe if pyarrow refuses the
text, or may read it differently: NaN and infinities (not JSON), deep nesting and numbers of a thousand digits (beyond
Python's limits), minus zeros, values that are no objects, and, beside decimals, very small exponents. The functions of
``json_values`` convert the strings of dates, timestamps and base64.
"""

# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from zync_assets.codecs.json_values import json_reader, scalar_reader
from zync_assets.codecs.nested import Mask, is_valid, list_of, list_parts, struct_of
from zync_assets.compute import pc

_FEW = 64
"""A block of so many texts that fails is left over whole."""
_PARTS = 8

_AN_OBJECT = rb"(?s)\A[ \t\r\n]*\{.*\}[ \t\r\n]*\z"
"""A text that begins and ends so can't run on into the next: nowhere but between two documents may ``}`` be followed by
``{``, and strings hold no line feeds. So as many rows as texts means a row a text."""
_DOUBTFUL = rb"NaN|Infinity|[0-9]{1000}"
_DOUBTFUL_DECIMAL = rb"[eE]-[0-9]{6}|\\u00(3[0-9]|[46]5|2[bBdD])"
"""pyarrow ends the process over a decimal such as 1e-9999999, as a number or in a string, where any character may be escaped."""
_DEEP = 400


@lru_cache(maxsize=1024)
def has_columns(type: pa.DataType) -> bool:
    """Whether pyarrow can read the type: a struct, with no maps and no structs without fields in it."""
    return pa.types.is_struct(type) and _readable(type)


def _readable(type: pa.DataType) -> bool:
    if pa.types.is_struct(type):
        return type.num_fields > 0 and all(_readable(field.type) for field in type)
    return _readable(type.value_type) if pa.types.is_list(type) else not pa.types.is_map(type)


def columns_reader(type: pa.DataType) -> Callable[[pa.Array], tuple[pa.Array, dict[int, str]]]:
    """As ``json_values.json_reader``, with the same results, sooner."""
    judge, decimals = json_reader(type), _has_decimals(type)
    if not has_columns(type):
        return judge

    def convert(payloads: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        payloads = payloads.cast(pa.binary())
        plain = np.flatnonzero(_is_plain(payloads, decimals))
        values, odd = _read_texts(type, payloads.take(pa.array(plain)))
        left = np.ones(len(payloads), np.bool_)
        left[plain[~odd]] = False
        rest = np.flatnonzero(left)
        if not len(rest):
            return values, {}
        read, errors = judge(payloads.take(pa.array(rest)))
        place = np.empty(len(payloads), np.int64)
        place[plain] = np.arange(len(plain))
        place[rest] = len(plain) + np.arange(len(rest))
        whole = pa.concat_arrays([values, read]).take(pa.array(place))
        return whole, {int(rest[index]): error for index, error in errors.items()}

    return convert


def _has_decimals(type: pa.DataType) -> bool:
    if pa.types.is_struct(type):
        return any(_has_decimals(field.type) for field in type)
    return _has_decimals(type.value_type) if pa.types.is_list(type) else pa.types.is_decimal(type)


def _is_plain(payloads: pa.Array, decimals: bool) -> Mask:
    good = pc.match_substring_regex(payloads, _AN_OBJECT)
    good = pc.and_(good, pc.invert(pc.match_substring_regex(payloads, _DOUBTFUL)))
    if decimals:
        good = pc.and_(good, pc.invert(pc.match_substring_regex(payloads, _DOUBTFUL_DECIMAL)))
    brackets = pc.add(pc.count_substring(payloads, b"["), pc.count_substring(payloads, b"{"))
    good = pc.and_(good, pc.less(brackets, _DEEP))
    return good.fill_null(False).to_numpy(zero_copy_only=False)


def _read_texts(type: pa.DataType, texts: pa.Array) -> tuple[pa.Array, Mask]:
    """Values, and which texts are odd: to be read again."""
    if len(texts) == 0:
        return pa.nulls(0, type), np.zeros(0, np.bool_)
    try:
        return _typed(type, _read(type, texts))
    except ValueError:
        pass
    if len(texts) <= _FEW:
        return pa.nulls(len(texts), type), np.ones(len(texts), np.bool_)
    size = -(-len(texts) // _PARTS)
    parts = [_read_texts(type, texts.slice(at, size)) for at in range(0, len(texts), size)]
    return pa.concat_arrays([part for part, _ in parts]), np.concatenate([odd for _, odd in parts])


def _read(type: pa.DataType, texts: pa.Array) -> pa.Array:
    lines = pc.binary_join_element_wise(texts, b"\n", b"")
    lines.cast(pa.string())
    size = int(lines.offset) + len(lines)
    ends = np.frombuffer(lines.buffers()[1], np.int32)
    data = lines.buffers()[2].slice(int(ends[lines.offset]), int(ends[size] - ends[lines.offset]))
    read_type = _json_type(type)
    table = pj.read_json(
        pa.BufferReader(data),
        read_options=pj.ReadOptions(use_threads=False, block_size=data.size + 1),
        parse_options=pj.ParseOptions(explicit_schema=pa.schema(list(read_type)), unexpected_field_behavior="ignore"),
    )
    if table.num_rows != len(texts):
        raise ValueError("more than one document in a text")
    columns = [table.column(field.name).combine_chunks() for field in read_type]
    return struct_of(read_type, columns, len(texts), None)


@lru_cache(maxsize=1024)
def _json_type(type: pa.DataType) -> pa.DataType:
    kinds = pa.types
    if kinds.is_struct(type):
        return pa.struct([(field.name, _json_type(field.type)) for field in type])
    if kinds.is_list(type):
        return pa.list_(_json_type(type.value_type))
    if kinds.is_binary(type) or kinds.is_date(type) or kinds.is_timestamp(type):
        return pa.string()
    return pa.float64() if kinds.is_floating(type) else type


def _typed(type: pa.DataType, array: pa.Array) -> tuple[pa.Array, Mask]:
    """pyarrow's column converted to ``type``, and a mask of the odd rows, which ``json_values`` must read."""
    kinds = pa.types
    count, valid = len(array), is_valid(array)
    odd: Mask = np.zeros(count, np.bool_)
    if kinds.is_struct(type):
        made: list[pa.Array] = []
        for field, column in zip(type, array.flatten(), strict=True):
            part, wrong = _typed(field.type, column)
            made.append(part)
            odd |= wrong
        return struct_of(type, made, count, valid), odd
    if kinds.is_list(type):
        offsets, values = list_parts(array)
        items, wrong = _typed(type.value_type, values)
        before = np.concatenate([[0], np.cumsum(wrong)])
        return list_of(type, offsets, items, valid), before[offsets[1:]] > before[offsets[:-1]]
    if kinds.is_floating(type):
        numbers = array.fill_null(1.0).to_numpy(zero_copy_only=False)
        odd = ~np.isfinite(numbers) | ((numbers == 0) & np.signbit(numbers))
        return pc.cast(array, type, safe=False), odd
    if kinds.is_string(type):
        array.validate(full=True)
        return array, odd
    if kinds.is_binary(type) or kinds.is_date(type) or kinds.is_timestamp(type):
        return _converted(type, array)
    return array, odd


def _converted(type: pa.DataType, array: pa.Array) -> tuple[pa.Array, Mask]:
    """Strings converted to ``type``, and a mask of the odd rows. Converts equal texts only once."""
    coded = array.dictionary_encode()
    read, made, wrong = scalar_reader(type), [], []
    for text in coded.dictionary.to_pylist():
        value: Any = None
        try:
            value = read(text, "value")
            wrong.append(False)
        except ValueError:
            wrong.append(True)
        made.append(value)
    values = pa.array(made, type).take(coded.indices)
    marks = pa.array(wrong, pa.bool_()).take(coded.indices).fill_null(False)
    return values, marks.to_numpy(zero_copy_only=False)
