"""JSON texts to columns, and columns to JSON texts, a column at a time.

``columns_reader`` reads many JSON texts of one struct type at once. Three readers do this, the quickest first. Each leaves the
texts to the next reader that it does not read with certainty:

1. ``scan``: one compiled pass over the texts. It knows structs of plain values, and runs where compiled code pays.
2. pyarrow's JSON reader.
3. ``values``, text by text. It defines the meaning of a text.

A text is unsafe for pyarrow if pyarrow refuses the text, or may read it differently. Such a text has:

- NaN or an infinity, which are not JSON, or a value that is no object
- deep nesting or a number of a thousand digits, beyond Python's limits
- a minus zero or, beside decimals, a very small exponent

The functions of ``values`` convert the strings of dates, timestamps and base64.

``json_texts`` writes columns as JSON texts, a column at a time, and reverses ``values``.
"""

from __future__ import annotations

import base64
import decimal
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from zync_assets.codecs.arrays import (
    Mask,
    base64_bytes,
    is_valid,
    list_of,
    list_parts,
    numbers,
    pays,
    pc,
    ready,
    struct_of,
    text_parts,
)
from zync_assets.codecs.json.values import json_reader, scalar_reader

# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false


_FEW = 64
"""A block of so many texts that fails is left over whole."""
_PARTS = 8

_AN_OBJECT = rb"(?s)\A[ \t\r\n]*\{.*\}[ \t\r\n]*\z"
"""A text that begins and ends so can't run on into the next: nowhere but between two documents may ``}`` be followed by
``{``, and strings hold no line feeds. So as many rows as texts means a row a text."""
_DOUBTFUL = rb"NaN|Infinity|[0-9]{1000}"
_DOUBTFUL_DECIMAL = _DOUBTFUL + rb"|[eE]-[0-9]{6}|\\u00(3[0-9]|[46]5|2[bBdD])"
"""pyarrow ends the process over a decimal such as 1e-9999999, as a number or in a string, where any character may be escaped."""
_DEEP = 400
_USUAL_TIME = r"\A[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3}|\.[0-9]{6})?Z\z"
"""A timestamp as most programs write it, of this age. pyarrow has a year 0, and Python does not."""


@lru_cache(maxsize=1024)
def has_columns(type: pa.DataType) -> bool:
    """Whether pyarrow can read the type: a struct, with no maps and no structs without fields in it."""
    return pa.types.is_struct(type) and _readable(type)


def _readable(type: pa.DataType) -> bool:
    if pa.types.is_struct(type):
        return type.num_fields > 0 and all(_readable(field.type) for field in type)
    return _readable(type.value_type) if pa.types.is_list(type) else not pa.types.is_map(type)


Convert = Callable[[pa.Array], tuple[pa.Array, dict[int, str]]]
"""Binary payloads → values, null where bad, and the errors by index."""


def columns_reader(type: pa.DataType) -> Convert:
    """As ``values.json_reader``, with the same results, sooner."""
    judge, decimals = json_reader(type), _has_decimals(type)
    if not has_columns(type):
        return judge

    def without_scan(payloads: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        plain = np.flatnonzero(_is_plain(payloads, decimals))
        values, odd = _read_texts(type, payloads.take(pa.array(plain)))
        return _with_rest(payloads, plain, values, odd, judge)

    def read(payloads: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        payloads = payloads.cast(pa.binary())
        if not pays(len(payloads)):
            return without_scan(payloads)
        # The scan loads numba.
        from zync_assets.codecs.json.scan import scan

        scanned_texts = scan(type, payloads)
        if scanned_texts is None:
            return without_scan(payloads)
        array, odd = scanned_texts
        values, wrong = _typed_column(type, array)
        return _with_rest(payloads, np.arange(len(payloads)), values, odd | wrong, without_scan)

    return read


def _with_rest(
    payloads: pa.Array, rows: Any, values: pa.Array, odd: Mask, convert: Convert
) -> tuple[pa.Array, dict[int, str]]:
    """All values. ``values``: of the payloads ``rows``; ``odd``: marks wrong values. ``convert`` reads the other payloads."""
    other_mask = np.ones(len(payloads), np.bool_)
    other_mask[rows[~odd]] = False
    other_rows = np.flatnonzero(other_mask)
    if not len(other_rows):
        return values, {}
    other_values, errors = convert(payloads.take(pa.array(other_rows)))
    value_indices = np.empty(len(payloads), np.int64)
    value_indices[rows] = np.arange(len(rows))
    value_indices[other_rows] = len(rows) + np.arange(len(other_rows))
    all_values = pa.concat_arrays([values, other_values]).take(pa.array(value_indices))
    return all_values, {int(other_rows[index]): error for index, error in errors.items()}


def _has_decimals(type: pa.DataType) -> bool:
    if pa.types.is_struct(type):
        return any(_has_decimals(field.type) for field in type)
    return _has_decimals(type.value_type) if pa.types.is_list(type) else pa.types.is_decimal(type)


def _is_plain(payloads: pa.Array, decimals: bool) -> Mask:
    is_plain = _is_object(payloads)
    doubtful = pc.match_substring_regex(payloads, _DOUBTFUL_DECIMAL if decimals else _DOUBTFUL)
    is_plain &= ~doubtful.fill_null(True).to_numpy(zero_copy_only=False)
    # A document with so deep a nesting has as many closing brackets.
    long = np.flatnonzero(pc.greater_equal(pc.binary_length(payloads), 2 * _DEEP).fill_null(False))
    texts = payloads.take(pa.array(long))
    brackets = pc.add(pc.count_substring(texts, b"["), pc.count_substring(texts, b"{"))
    is_plain[long] &= brackets.to_numpy() < _DEEP
    return is_plain


def _is_object(payloads: pa.Array) -> Mask:
    """Whether the texts match ``_AN_OBJECT``. The pattern is tried on texts with white space alone."""
    bounds, letters = text_parts(payloads)
    is_object = np.zeros(len(payloads), np.bool_)
    rows = np.flatnonzero(np.diff(bounds) > 1)
    is_object[rows] = (letters[bounds[rows]] == ord("{")) & (letters[bounds[rows + 1] - 1] == ord("}"))
    other_rows = np.flatnonzero(~is_object)
    matches = pc.match_substring_regex(payloads.take(pa.array(other_rows)), _AN_OBJECT)
    is_object[other_rows] = matches.fill_null(False).to_numpy(zero_copy_only=False)
    return is_object & payloads.is_valid().to_numpy(zero_copy_only=False)


def _read_texts(type: pa.DataType, texts: pa.Array) -> tuple[pa.Array, Mask]:
    """Values, and which texts are odd: to be read again."""
    if len(texts) == 0:
        return pa.nulls(0, type), np.zeros(0, np.bool_)
    try:
        return _typed_column(type, _read(type, texts))
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


def _typed_column(type: pa.DataType, array: pa.Array) -> tuple[pa.Array, Mask]:
    """pyarrow's column converted to ``type``, and a mask of the odd rows, which ``values`` must read."""
    kinds = pa.types
    count, valid = len(array), is_valid(array)
    odd: Mask = np.zeros(count, np.bool_)
    if kinds.is_struct(type):
        children: list[pa.Array] = []
        for field, column in zip(type, array.flatten(), strict=True):
            part, wrong = _typed_column(field.type, column)
            children.append(part)
            odd |= wrong
        return struct_of(type, children, count, valid), odd
    if kinds.is_list(type):
        offsets, values = list_parts(array)
        items, wrong = _typed_column(type.value_type, values)
        before = np.concatenate([[0], np.cumsum(wrong)])
        return list_of(type, offsets, items, valid), before[offsets[1:]] > before[offsets[:-1]]
    if kinds.is_floating(type):
        values = pc.cast(array, type, safe=False)
        doubles = values.fill_null(1.0).to_numpy(zero_copy_only=False)
        odd = ~np.isfinite(doubles) | ((doubles == 0) & np.signbit(doubles))
        return values, odd
    if kinds.is_string(type):
        array.validate(full=True)
        return array, odd
    if kinds.is_binary(type):
        return base64_bytes(array, valid)
    if kinds.is_timestamp(type):
        return _time_column(type, array)
    if kinds.is_decimal(type):
        # pyarrow compares the digits of a literal with the precision, before it adds the zeros of the scale.
        least, most = (pa.scalar(decimal.Decimal((sign, (9,) * type.precision, -type.scale)), type) for sign in (1, 0))
        is_odd = pc.or_(pc.less(array, least), pc.greater(array, most))
        return array, is_odd.fill_null(False).to_numpy(zero_copy_only=False)
    return _scalar_column(type, array) if kinds.is_date(type) else (array, odd)


def _time_column(type: pa.DataType, array: pa.Array) -> tuple[pa.Array, Mask]:
    """As ``_scalar_column``, for timestamps. Texts of the usual form are read a hundred times as fast."""
    usual_times = _compiled_times(array) if ready() else _usual_times(array)
    if usual_times is None:
        return _scalar_column(type, array)
    values, unusual = usual_times
    other_values, wrong = _scalar_column(type, array.filter(unusual))
    odd = np.zeros(len(array), np.bool_)
    odd[unusual.to_numpy(zero_copy_only=False)] = wrong
    return pc.replace_with_mask(values.cast(type), unusual, other_values), odd


def _usual_times(array: pa.Array) -> tuple[pa.Array, pa.Array] | None:
    """Times, and which of the texts have another form. None if pyarrow refuses a text."""
    usual = pc.match_substring_regex(array, _USUAL_TIME)
    try:
        values = pc.if_else(usual, array, pa.scalar(None, pa.string())).cast(pa.timestamp("us", "UTC"))
    except ValueError:
        return None
    return values, pc.invert(usual).fill_null(False)


def _compiled_times(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """As ``_usual_times``, by a compiled loop."""
    from zync_assets.codecs import loops

    bounds, letters = text_parts(array)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    micros, unusual = np.zeros(len(array), np.int64), np.zeros(len(array), np.bool_)
    loops.read_times(letters, bounds, valid, micros, unusual)
    return numbers(micros, pa.timestamp("us", "UTC"), valid), pa.array(unusual)


def _scalar_column(type: pa.DataType, array: pa.Array) -> tuple[pa.Array, Mask]:
    """Strings converted to ``type``, and a mask of the odd rows. Converts equal texts only once."""
    encoding = array.dictionary_encode()
    read, entries, wrong = scalar_reader(type), [], []
    for text in encoding.dictionary.to_pylist():
        value: Any = None
        try:
            value = read(text, "value")
            wrong.append(False)
        except ValueError:
            wrong.append(True)
        entries.append(value)
    values = pa.array(entries, type).take(encoding.indices)
    marks = pa.array(wrong, pa.bool_()).take(encoding.indices).fill_null(False)
    return values, marks.to_numpy(zero_copy_only=False)


# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false


def json_texts(values: pa.Array) -> pa.Array:
    """A compact JSON text for each value, as binary; null for null. ValueError for NaN and infinities."""
    valid = pa.scalar(True) if values.null_count == 0 else values.is_valid()
    return pc.if_else(valid, _texts(values), pa.scalar(None, pa.string())).cast(pa.binary())


def _texts(array: pa.Array) -> pa.Array:
    """As strings; nulls are the word null."""
    kinds = pa.types
    if kinds.is_null(array.type):
        return pa.array(["null"] * len(array), pa.string())
    if kinds.is_struct(array.type):
        texts = _struct(array)
    elif kinds.is_list(array.type) or kinds.is_large_list(array.type) or kinds.is_map(array.type):
        texts = _items(array)
    elif kinds.is_boolean(array.type) or kinds.is_integer(array.type) or kinds.is_decimal(array.type):
        texts = array.cast(pa.string())
    elif kinds.is_floating(array.type):
        if not pc.all(pc.is_finite(array), min_count=0).as_py():
            raise ValueError("NaN and infinities have no form in JSON")
        texts = array.cast(pa.string())
    elif kinds.is_string(array.type) or kinds.is_large_string(array.type):
        texts = _quote(array.cast(pa.string()))
    elif kinds.is_timestamp(array.type):
        texts = _enclose('"', pc.strftime(array.cast(pa.timestamp("us", tz="UTC")), "%Y-%m-%dT%H:%M:%SZ"), '"')
    elif kinds.is_date(array.type):
        texts = _enclose('"', array.cast(pa.string()), '"')
    elif kinds.is_binary(array.type) or kinds.is_large_binary(array.type):
        texts = pa.array(
            [None if value is None else f'"{base64.b64encode(value).decode()}"' for value in array.to_pylist()],
            pa.string(),
        )
    else:
        raise ValueError(f"JSON has no form for {array.type}")
    return texts.fill_null("null")


def _enclose(before: str, array: pa.Array, after: str) -> pa.Array:
    return pc.binary_join_element_wise(before, array, after, "")


def _quote(array: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(array, r'[\x00-\x1f"\\]'), min_count=0).as_py():
        array = pc.replace_substring(array, "\\", "\\\\")
        array = pc.replace_substring(array, '"', '\\"')
        for code in range(0x20):
            if pc.any(pc.match_substring(array, chr(code)), min_count=0).as_py():
                array = pc.replace_substring(array, chr(code), json.dumps(chr(code))[1:-1])
    return _enclose('"', array, '"')


def _struct(array: pa.Array) -> pa.Array:
    fields = [array.type.field(index).name for index in range(array.type.num_fields)]
    parts: list[Any] = []
    for at, (name, column) in enumerate(zip(fields, array.flatten(), strict=True)):
        parts += [("," if at else "{") + json.dumps(name, ensure_ascii=False) + ":", _texts(column)]
    texts = pc.binary_join_element_wise(*parts, "}", "") if parts else pa.array(["{}"] * len(array), pa.string())
    return texts if array.null_count == 0 else pc.if_else(array.is_valid(), texts, pa.scalar(None, pa.string()))


def _items(array: pa.Array) -> pa.Array:
    offsets, values = list_parts(array)
    if pa.types.is_map(array.type):
        keys, items = values.flatten()
        if not pa.types.is_string(keys.type):
            keys = keys.cast(pa.string())
        parts = pc.binary_join_element_wise(",", _quote(keys), ":", _texts(items), "")
        before, after = "{", "}"
    else:
        parts = pc.binary_join_element_wise(",", _texts(values), "")
        before, after = "[", "]"
    count = len(array)
    if len(values) == 0:
        texts = pa.array([before + after] * count, pa.string())
    else:
        # The items' texts stand one after the other: a list's text is a part of them, without the first comma.
        _, starts, data = parts.buffers()
        bounds = np.frombuffer(starts, np.int32, len(parts) + 1, parts.offset * 4)[offsets]
        inner = np.empty(2 * count + 1, dtype=np.int32)
        inner[0:-1:2] = bounds[:-1] + (np.diff(offsets) > 0)
        inner[1::2] = bounds[1:]
        inner[-1] = bounds[-1]
        pairs = pa.Array.from_buffers(pa.string(), 2 * count, [None, pa.py_buffer(inner), data])
        texts = _enclose(before, pairs.take(pa.array(np.arange(0, 2 * count, 2))), after)
    return texts if array.null_count == 0 else pc.if_else(array.is_valid(), texts, pa.scalar(None, pa.string()))
