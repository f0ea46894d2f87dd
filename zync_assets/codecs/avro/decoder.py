"""Confluent's wire format: a 0, the schema's id in four bytes (big-endian), then Avro's bytes.

Confluent Avro → a column, whatever mixture of writer schemas it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import Mask, isolate, numbers
from zync_assets.codecs.avro.column_reader import ByteSource, decode_columns
from zync_assets.codecs.avro.schema import Node, digest, is_hollow, note_of, parse
from zync_assets.codecs.avro.types import lake_type, plain_type
from zync_assets.codecs.avro.values import TrailingBytes, row_reader, to_lake
from zync_assets.codecs.batches import DecodedBatch, Group, assemble, bad_records, is_native
from zync_assets.codecs.evolution import Arrival, merge_types, misfit, type_differences
from zync_assets.errors import SchemaError, SchemaUnknown

HEADER = 5
PADDING = 32
"""Zeros after a batch's last byte, so that whole words can be read at any place in it."""


@dataclass(frozen=True)
class Frames:
    """A batch of payloads taken apart: all their bytes (and padding), and where in them each datum starts and ends.

    ``ids`` are schema ids. ``valid``: the payload is not null and has a header; ``error``: what is wrong, by index.
    """

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    valid: Mask
    errors: dict[int, str]


def unframe(payloads: pa.Array) -> Frames:
    """The header of each payload, checked. ``payloads``: binary or large binary, nulls and slices allowed."""
    count = len(payloads)
    wide = pa.types.is_large_binary(payloads.type)
    _, offset_buffer, data_buffer = payloads.buffers()
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.zeros(0, np.uint8)
    kind = np.dtype(np.int64 if wide else np.int32)
    offsets = np.frombuffer(offset_buffer, kind, count + 1, payloads.offset * kind.itemsize).astype(np.int64)
    base, last = int(offsets[0]), int(offsets[-1])
    offsets -= base
    starts, ends = offsets[:-1], offsets[1:]
    has_value = payloads.is_valid().to_numpy(zero_copy_only=False)
    long_enough = ends - starts >= HEADER
    padded_data = np.zeros(last - base + PADDING, np.uint8)
    padded_data[: last - base] = data[base:last]
    magic = padded_data[starts] == 0
    words = np.ndarray((len(padded_data) - 3,), dtype=">i4", buffer=padded_data.data, strides=(1,))
    ids = words[starts + 1].astype(np.int32)
    valid = has_value & long_enough & magic
    errors = {
        int(index): _error(bool(long_enough[index]), int(ends[index] - starts[index]), int(padded_data[starts[index]]))
        for index in np.flatnonzero(has_value & ~valid)
    }
    return Frames(padded_data, starts + HEADER, ends, ids, valid, errors)


def _error(long_enough: bool, length: int, first: int) -> str:
    if not long_enough:
        return f"{length} bytes are too short for Avro with a schema id (5 bytes and the datum)"
    return f"no Avro with a schema id: the first byte is {first}, not 0"


def header(schema_id: int) -> bytes:
    """The five bytes before a datum."""
    return b"\0" + schema_id.to_bytes(4, "big")


Ints = npt.NDArray[np.int64]


class AvroDecoder:
    """See ``codecs.dispatch.Decoder``. Keeps the schemas that it has seen, and the column's type."""

    def __init__(
        self,
        schema_of: Callable[[int], str],
        target: pa.DataType | None,
        name: str,
        native: bool,
        schema_ids: Sequence[int] = (),
        fixed_schema: bool = False,
    ) -> None:
        self._schema_of = schema_of
        self._name = name
        self._native = native
        self._schema_ids = dict.fromkeys(schema_ids)
        self._fixed_schema = fixed_schema and bool(schema_ids)
        self._schema_types: tuple[pa.DataType, ...] | None = None
        self._refusals: dict[int, str] = {}
        self._arrivals: list[Arrival] = []
        self._type = pa.null() if target is None else target
        self._writers: dict[int, Node | str] = {}
        self._merged_ids: set[int] = set()

    @property
    def type(self) -> pa.DataType:
        return self._type

    def decode(self, payloads: pa.Array) -> DecodedBatch:
        frames = unframe(payloads)
        errors = dict(frames.errors)
        groups: list[Group] = []
        self._arrivals = []
        for schema_id in _distinct_ids(frames.ids[frames.valid]):
            rows = np.flatnonzero(frames.valid & (frames.ids == schema_id))
            group = self._decode_group(schema_id, frames, rows, errors)
            if group is not None:
                groups.append(group)
        values = assemble(self._type, groups, len(payloads), errors)
        return DecodedBatch(
            values, numbers(frames.ids, pa.int32(), frames.valid), bad_records(errors), tuple(self._arrivals)
        )

    def _writer(self, schema_id: int) -> Node | str:
        """The writer's schema, or what is wrong with it."""
        writer = self._writers.get(schema_id)
        if writer is None:
            try:
                writer = parse(self._schema_of(schema_id))
            except SchemaUnknown as error:
                # Not kept: a schema may be registered later.
                return f"unknown schema id {schema_id}: {error}"
            except SchemaError as error:
                writer = f"schema id {schema_id}: {error}"
            self._writers[schema_id] = writer
        return writer

    def _decode_group(self, schema_id: int, frames: Frames, rows: Ints, errors: dict[int, str]) -> Group | None:
        writer = self._writer(schema_id)
        if isinstance(writer, str):
            errors.update(dict.fromkeys(rows.tolist(), writer))
            return None
        starts, ends = frames.starts[rows], frames.ends[rows]
        values, wrong = decode_datums(writer, frames.data, starts, ends, native=self._native)
        for index, error in wrong.items():
            errors[int(rows[index])] = f"schema id {schema_id}: {error}"
        if len(wrong) == len(rows):
            # Nothing fits the schema: it has no say in the column's type.
            return None
        if schema_id not in self._schema_ids and not is_hollow(writer):
            first = next(row for index, row in enumerate(rows.tolist()) if index not in wrong)
            self._arrive(schema_id, first, writer)
        if schema_id in self._refusals:
            errors.update(dict.fromkeys(rows.tolist(), f"schema id {schema_id} is new: {self._refusals[schema_id]}"))
            return None
        if schema_id not in self._merged_ids and not is_hollow(writer):
            try:
                self._type = merge_types(self._type, lake_type(writer), self._name)
            except SchemaError as error:
                errors.update(dict.fromkeys(rows.tolist(), f"schema id {schema_id}: {misfit(error)}"))
                return None
            self._merged_ids.add(schema_id)
        if not wrong:
            return Group(rows, values)
        is_good = np.ones(len(rows), dtype=np.bool_)
        is_good[list(wrong)] = False
        return Group(rows[is_good], values.filter(pa.array(is_good)))

    def _arrive(self, schema_id: int, index: int, writer: Node) -> None:
        """Note a schema that came for the first time; refuse it where only the known ones' columns are wanted."""
        if self._schema_types is None:
            nodes = [self._writer(number) for number in self._schema_ids]
            self._schema_types = tuple(lake_type(node) for node in nodes if isinstance(node, Node))
        type = lake_type(writer)
        arrival = Arrival(
            index, schema_id, type, self._schema_types, note_of(writer), digest(self._schema_of(schema_id))
        )
        self._arrivals.append(arrival)
        self._schema_ids[schema_id] = None
        if self._fixed_schema and arrival.changes:
            self._refusals[schema_id] = "; ".join(type_differences(self._schema_types[-1], type, self._name))
        else:
            self._schema_types = (*self._schema_types, type)


def _distinct_ids(ids: npt.NDArray[np.int32]) -> list[int]:
    """Each id once, in the order in which they come: the column has its fields by the names of the first."""
    if len(ids) and (ids == ids[0]).all():
        return [int(ids[0])]
    unique_ids, first = np.unique(ids, return_index=True)
    return unique_ids[np.argsort(first)].tolist()


def decode_datums(
    node: Node, data: npt.NDArray[np.uint8], starts: Ints, ends: Ints, *, native: bool
) -> tuple[pa.Array, dict[int, str]]:
    """The bare datums at ``starts`` to ``ends`` of ``data``, of the lake's type, null where bad; errors by index."""
    type = plain_type(node)
    if native and is_native(node):
        source = ByteSource(data, len(starts))
        values = decode_columns(node, source, starts, ends)
        odd = np.flatnonzero(source.odd)
    else:
        values = pa.nulls(len(starts), type)
        odd = np.arange(len(starts))
    errors: dict[int, str] = {}
    if len(odd):
        odd_values, errors = _read_rows(node, data, starts, ends, odd)
        if len(odd) == len(starts):
            values = odd_values
        else:
            value_indices = np.arange(len(starts))
            value_indices[odd] = np.arange(len(starts), len(starts) + len(odd))
            values = pa.concat_arrays([values, odd_values]).take(pa.array(value_indices))
    values, misfits = isolate(values, lambda part: to_lake(node, part), ValueError)
    return values, {**{index: f"out of range: {error}" for index, error in misfits.items()}, **errors}


def _read_rows(
    node: Node, data: npt.NDArray[np.uint8], starts: Ints, ends: Ints, odd: Ints
) -> tuple[pa.Array, dict[int, str]]:
    read = row_reader(node)
    raw = data.tobytes() if len(odd) > 64 else data
    rows: list[Any] = []
    errors: dict[int, str] = {}
    for index in odd.tolist():
        try:
            rows.append(read(bytes(raw[starts[index] : ends[index]])))
        # fastavro raises whatever its reading runs into: IndexError, EOFError, ValueError, OverflowError, …
        except Exception as error:
            rows.append(None)
            errors[index] = _explain(error)
    type = plain_type(node)
    try:
        return pa.array(rows, type), errors
    except (ValueError, OverflowError, TypeError):
        pass
    parts: list[pa.Array] = []
    for index, row in zip(odd.tolist(), rows, strict=True):
        try:
            parts.append(pa.array([row], type))
        except (ValueError, OverflowError, TypeError) as error:
            parts.append(pa.nulls(1, type))
            errors[index] = f"out of range: {error}"
    return pa.concat_arrays(parts), errors


def _explain(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the record ends before its schema does"
    if isinstance(error, UnicodeDecodeError):
        return "a string is not UTF-8"
    if isinstance(error, IndexError):
        return "the index of a union's branch or of an enum's symbol is out of range"
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, TrailingBytes):
        return f"the record goes on after its schema's end: {error}"
    return f"{type(error).__name__}: {error}"
