"""Arrow arrays for codecs: nested arrays and their parts, conversion with bad values set apart, and values in Python.

``pc`` is ``pyarrow.compute``. pyarrow creates its functions at import, so that a type checker knows none of them.

``pays`` and ``ready`` say when loops compiled by numba replace the loops of numpy and of the Kafka client, and pyarrow's JSON
reader. A process takes half a second to load numba and its compiled loops. A million records save that time. A process therefore
starts without numba, and a process with few records never loads it.

Python has no time before the year 1 or after the year 9999. ``python_rows`` gives such a time as text.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute


log = logging.getLogger(__name__)

ENOUGH = 500_000
"""Records of a process from which on it pays."""

_CURE = "set NUMBA_CACHE_DIR to a folder that can be written to"

_record_count = 0


def pays(records: int) -> bool:
    """Whether compiled code pays for ``records`` more records, in addition to the records that this process has handled."""
    global _record_count
    _record_count += records
    return ready()


def ready() -> bool:
    """Whether compiled code pays now."""
    return _record_count >= ENOUGH and _possible()


@cache
def _possible() -> bool:
    """numba keeps what it compiled beside the code or in the user's cache, and refuses where it can write to neither."""
    if (problem := obstacle()) is None:
        import numba

        try:
            numba.njit(cache=True)(_no_operation)
        except RuntimeError as error:
            problem = f"{error}; {_CURE}"
    if problem is not None:
        log.warning("records are read without compiled loops, more slowly: %s", problem)
    return problem is None


def obstacle() -> str | None:
    """Why numba can keep no compiled code, and the cure; None if it can. Loads nothing."""
    cache_folder = os.environ.get("NUMBA_CACHE_DIR")
    folders = [Path(cache_folder)] if cache_folder else [Path(__file__).parent, Path.home() / ".cache"]
    if any(_nearest_folder(folder).is_dir() and os.access(_nearest_folder(folder), os.W_OK) for folder in folders):
        return None
    return f"numba can write its compiled code to none of {', '.join(map(str, folders))}; {_CURE}"


def _nearest_folder(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def _no_operation() -> None: ...


Mask = npt.NDArray[np.bool_]


def validity_buffer(valid: Mask | None) -> pa.Buffer | None:
    """Arrow's bitmap of the valid values; None when all are."""
    if valid is None or bool(valid.all()):
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def is_valid(array: pa.Array) -> Mask | None:
    """Which values are not null; None when all are."""
    if array.null_count == 0:
        return None
    return array.is_valid().to_numpy(zero_copy_only=False)


def numbers(values: npt.NDArray[np.generic], type: pa.DataType, valid: Mask | None = None) -> pa.Array:
    """An array of a fixed-width type over numpy's memory."""
    return pa.Array.from_buffers(type, len(values), [validity_buffer(valid), pa.py_buffer(values)])


def struct_of(type: pa.StructType, children: Sequence[pa.Array], length: int, valid: Mask | None) -> pa.Array:
    return pa.Array.from_buffers(type, length, [validity_buffer(valid)], children=list(children))


def list_of(type: pa.DataType, offsets: npt.NDArray[np.int32], values: pa.Array, valid: Mask | None) -> pa.Array:
    """A list or map array; ``offsets`` has one more entry than there are lists, a map's values are structs."""
    buffers = [validity_buffer(valid), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(type, len(offsets) - 1, buffers, children=[values])


def list_parts(array: pa.Array) -> tuple[npt.NDArray[np.int32], pa.Array]:
    """A list array's offsets from 0, and just the values that they cover (a map's: keys and items as a struct)."""
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int32)
    base, end = int(offsets[0]), int(offsets[-1])
    if pa.types.is_map(array.type):
        entry = pa.struct([pa.field("key", array.type.key_type, nullable=False), ("value", array.type.item_type)])
        values = struct_of(entry, [array.keys, array.items], len(array.keys), None)
    else:
        values = array.values
    return offsets - base, values.slice(base, end - base)


def with_type(array: pa.Array, type: pa.DataType) -> pa.Array:
    """The same values as ones of a type that differs in the names of fields alone."""
    kinds = pa.types
    if kinds.is_struct(type):
        inner = zip(array.flatten(), (type.field(at).type for at in range(type.num_fields)), strict=True)
        return struct_of(type, [with_type(child, kind) for child, kind in inner], len(array), is_valid(array))
    if kinds.is_list(type):
        offsets, values = list_parts(array)
        return list_of(type, offsets, with_type(values, type.value_type), is_valid(array))
    if kinds.is_map(type):
        offsets, values = list_parts(array)
        keys, items = values.flatten()
        entries = map_entries(type, with_type(keys, type.key_type), with_type(items, type.item_type))
        return list_of(type, offsets, entries, is_valid(array))
    return array


def map_entries(type: pa.MapType, keys: pa.Array, items: pa.Array) -> pa.Array:
    """The struct array that a map array of ``type`` is made over."""
    return struct_of(pa.struct([type.key_field, type.item_field]), [keys, items], len(keys), None)


def spread(array: pa.Array, valid: Mask) -> pa.Array:
    """``array``'s values at the places where ``valid`` is true, nulls elsewhere."""
    if len(array) == len(valid):
        return array
    if len(array) == 0:
        return pa.nulls(len(valid), array.type)
    indices = np.cumsum(valid, dtype=np.int64) - 1
    return array.take(pa.Array.from_buffers(pa.int64(), len(valid), [validity_buffer(valid), pa.py_buffer(indices)]))


def pick(array: pa.Array, indices: npt.NDArray[np.int64]) -> pa.Array:
    """The values at ``indices``, in memory of their own (a slice would drag its neighbours along)."""
    return array.take(pa.array(indices))


_PARTS = 8
"""The number of parts into which an array is cut when a value in it fails. With 8 parts, one bad value needs few tries, and so
does an array of bad values."""


_UNKNOWN = 255
_SEXTETS: npt.NDArray[np.uint8] = np.full(256, _UNKNOWN, np.uint8)
for _at, _letter in enumerate(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"):
    _SEXTETS[_letter] = _at
_PADDING = ord("=")


def base64_bytes(array: pa.Array, valid: Mask | None, *, empty_is_odd: bool = False) -> tuple[pa.Array, Mask]:
    """The bytes of base64 texts with padding (RFC 4648, section 4), and which texts are odd: no such base64.

    ``empty_is_odd``: whether a text without characters is odd, too.
    """
    read = _compiled_base64 if ready() else _base64
    return read(array, np.ones(len(array), np.bool_) if valid is None else valid, empty_is_odd)


def text_parts(array: pa.Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """The bounds of an array's texts, one more than there are texts, and the bytes that the bounds point into."""
    _, ends, data = array.buffers()
    bounds = np.frombuffer(ends, np.int32)[array.offset : array.offset + len(array) + 1]
    return bounds, np.frombuffer(data or b"", np.uint8)


def _compiled_base64(array: pa.Array, has_value: Mask, empty_is_odd: bool) -> tuple[pa.Array, Mask]:
    """As ``base64_bytes``, by a compiled loop."""
    from zync_assets.codecs import loops

    count = len(array)
    text_ends, letters = text_parts(array)
    byte_ends, odd = np.zeros(count + 1, np.int32), np.zeros(count, np.bool_)
    content = np.empty(int(text_ends[-1] - text_ends[0]) // 4 * 3 + 3, np.uint8)
    loops.read_base64(letters, text_ends, has_value, _SEXTETS, empty_is_odd, byte_ends, content, odd)
    buffers = [validity_buffer(has_value & ~odd), pa.py_buffer(byte_ends), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), count, buffers), odd


def _base64(array: pa.Array, has_value: Mask, empty_is_odd: bool) -> tuple[pa.Array, Mask]:
    """As ``base64_bytes``, by numpy: four characters become three bytes, wherever their text begins."""
    count = len(array)
    lengths = pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    odd = has_value & ((lengths % 4 != 0) | ((lengths == 0) & empty_is_odd))
    lengths[odd] = 0
    # A truncated text would shift the texts after it. It is read as empty.
    texts = pc.if_else(pa.array(has_value & ~odd), array, "").cast(pa.binary())
    letters = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[: lengths.sum()]
    ends = np.cumsum(lengths)
    padding = np.zeros(count, np.int64)
    nonempty = lengths > 0
    has_padding = letters[ends[nonempty] - 1] == _PADDING
    padding[nonempty] = has_padding.astype(np.int64) + (has_padding & (letters[ends[nonempty] - 2] == _PADDING))
    sextets = _SEXTETS[letters]
    padding_places = np.concatenate([ends[padding >= place] - place for place in (1, 2)])
    sextets[padding_places] = 0
    is_unknown = sextets == _UNKNOWN
    if is_unknown.any():
        unknown_counts = np.concatenate([[0], np.cumsum(is_unknown)])
        odd |= unknown_counts[ends] > unknown_counts[ends - lengths]
    quads = sextets.reshape(-1, 4).astype(np.uint32)
    triples = (quads[:, 0] << 18) | (quads[:, 1] << 12) | (quads[:, 2] << 6) | quads[:, 3]
    data = np.column_stack([triples >> 16, (triples >> 8) & 255, triples & 255]).astype(np.uint8).ravel()
    mask = np.ones(len(data), np.bool_)
    mask[np.concatenate([(ends // 4 * 3)[padding >= place] - place for place in (1, 2)])] = False
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths // 4 * 3 - padding, out=offsets[1:])
    buffers = [validity_buffer(has_value & ~odd), pa.py_buffer(offsets), pa.py_buffer(data[mask])]
    return pa.Array.from_buffers(pa.binary(), count, buffers), odd


def isolate(
    array: pa.Array, convert: Callable[[pa.Array], pa.Array], errors: type[Exception] | tuple[type[Exception], ...]
) -> tuple[pa.Array, dict[int, str]]:
    """``convert(array)``, value by value where it fails: null at those it fails for, with the error by index."""
    error_by_index: dict[int, str] = {}

    def convert_range(first: int, count: int) -> list[pa.Array]:
        values = array if count == len(array) else pick(array, np.arange(first, first + count))
        try:
            return [convert(values)]
        except errors as error:
            if count == 1:
                error_by_index[first] = str(error)
                return [convert(pa.nulls(1, array.type))]
        size = -(-count // _PARTS)
        ends = range(first, first + count, size)
        return [chunk for at in ends for chunk in convert_range(at, min(size, first + count - at))]

    if len(array) == 0:
        return convert(array), error_by_index
    parts = convert_range(0, len(array))
    return (parts[0] if len(parts) == 1 else pa.concat_arrays(parts)), error_by_index


def python_rows(rows: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """The rows by column names; maps become dicts, of equal keys the last."""
    try:
        return rows.to_pylist(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        numeric_schema = pa.schema([field.with_type(numeric_type(field.type)) for field in rows.schema])
        numeric_rows = rows.cast(numeric_schema).to_pylist(maps_as_pydicts="lossy")
        return [{field.name: _with_times(row[field.name], field.type) for field in rows.schema} for row in numeric_rows]


def numeric_type(kind: pa.DataType) -> pa.DataType:
    """The type with a number in place of each time and date."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(numeric_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(numeric_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(numeric_type(kind.key_type), numeric_type(kind.item_type))
    return kind


def _with_times(value: Any, kind: pa.DataType) -> Any:
    """A value of the type ``numeric_type(kind)`` as one of ``kind``."""
    if value is None:
        return None
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return _moment(value, kind)
    if pa.types.is_struct(kind):
        return {field.name: _with_times(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_with_times(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        return {_with_times(key, kind.key_type): _with_times(item, kind.item_type) for key, item in value.items()}
    return value


def _moment(number: int, kind: pa.DataType) -> Any:
    try:
        return pa.scalar(number, kind).as_py()
    except (OverflowError, ValueError):
        is_date = pa.types.is_date32(kind)
        text = pc.strftime(pa.array([number], kind), format="%Y-%m-%d" if is_date else "%Y-%m-%dT%H:%M:%S")[0].as_py()
        zone = "" if is_date or kind.tz is None else "+00:00"
        return re.sub(r"\.0+$", "", text) + zone
