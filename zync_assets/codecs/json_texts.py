"""Columns → JSON texts, a column at a time: the way back of ``json_values``."""

# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pyarrow as pa

from zync_assets.codecs.nested import list_parts
from zync_assets.compute import pc


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
        made = _struct(array)
    elif kinds.is_list(array.type) or kinds.is_large_list(array.type) or kinds.is_map(array.type):
        made = _items(array)
    elif kinds.is_boolean(array.type) or kinds.is_integer(array.type) or kinds.is_decimal(array.type):
        made = array.cast(pa.string())
    elif kinds.is_floating(array.type):
        if not pc.all(pc.is_finite(array), min_count=0).as_py():
            raise ValueError("NaN and infinities have no form in JSON")
        made = array.cast(pa.string())
    elif kinds.is_string(array.type) or kinds.is_large_string(array.type):
        made = _quoted(array.cast(pa.string()))
    elif kinds.is_timestamp(array.type):
        made = _between('"', pc.strftime(array.cast(pa.timestamp("us", tz="UTC")), "%Y-%m-%dT%H:%M:%SZ"), '"')
    elif kinds.is_date(array.type):
        made = _between('"', array.cast(pa.string()), '"')
    elif kinds.is_binary(array.type) or kinds.is_large_binary(array.type):
        made = pa.array(
            [None if one is None else f'"{base64.b64encode(one).decode()}"' for one in array.to_pylist()], pa.string()
        )
    else:
        raise ValueError(f"JSON has no form for {array.type}")
    return made.fill_null("null")


def _between(before: str, array: pa.Array, after: str) -> pa.Array:
    return pc.binary_join_element_wise(before, array, after, "")


def _quoted(array: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(array, r'[\x00-\x1f"\\]'), min_count=0).as_py():
        array = pc.replace_substring(array, "\\", "\\\\")
        array = pc.replace_substring(array, '"', '\\"')
        for code in range(0x20):
            if pc.any(pc.match_substring(array, chr(code)), min_count=0).as_py():
                array = pc.replace_substring(array, chr(code), json.dumps(chr(code))[1:-1])
    return _between('"', array, '"')


def _struct(array: pa.Array) -> pa.Array:
    fields = [array.type.field(index).name for index in range(array.type.num_fields)]
    parts: list[Any] = []
    for at, (name, column) in enumerate(zip(fields, array.flatten(), strict=True)):
        parts += [("," if at else "{") + json.dumps(name, ensure_ascii=False) + ":", _texts(column)]
    made = pc.binary_join_element_wise(*parts, "}", "") if parts else pa.array(["{}"] * len(array), pa.string())
    return made if array.null_count == 0 else pc.if_else(array.is_valid(), made, pa.scalar(None, pa.string()))


def _items(array: pa.Array) -> pa.Array:
    offsets, values = list_parts(array)
    if pa.types.is_map(array.type):
        keys, items = values.flatten()
        if not pa.types.is_string(keys.type):
            keys = keys.cast(pa.string())
        texts = pc.binary_join_element_wise(",", _quoted(keys), ":", _texts(items), "")
        before, after = "{", "}"
    else:
        texts = pc.binary_join_element_wise(",", _texts(values), "")
        before, after = "[", "]"
    count = len(array)
    if len(values) == 0:
        made = pa.array([before + after] * count, pa.string())
    else:
        # The items' texts stand one after the other: a list's text is a part of them, without the first comma.
        _, starts, data = texts.buffers()
        bounds = np.frombuffer(starts, np.int32, len(texts) + 1, texts.offset * 4)[offsets]
        inner = np.empty(2 * count + 1, dtype=np.int32)
        inner[0:-1:2] = bounds[:-1] + (np.diff(offsets) > 0)
        inner[1::2] = bounds[1:]
        inner[-1] = bounds[-1]
        both = pa.Array.from_buffers(pa.string(), 2 * count, [None, pa.py_buffer(inner), data])
        made = _between(before, both.take(pa.array(np.arange(0, 2 * count, 2))), after)
    return made if array.null_count == 0 else pc.if_else(array.is_valid(), made, pa.scalar(None, pa.string()))
