"""Connect JSON to columns, and columns to Connect JSON.

``ConnectDecoder`` decodes Connect JSON with any mixture of schemas into a column. Every record contains its own schema. Records
with the same text before the payload have the same schema. The decoder parses the schema once, and reads these payloads
together. A record without schema and payload (``schemas.enable=false``), or with a null schema, is plain JSON. Its value has
the type of the DDL, or is the JSON text if the format has no DDL.

``ConnectEncoder`` writes a column as Connect JSON. Each record has its payload and the same schema.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import isolate, pc
from zync_assets.codecs.avro.schema import Node
from zync_assets.codecs.avro.types import lake_type as avro_lake_type
from zync_assets.codecs.avro.values import from_lake as from_avro_lake
from zync_assets.codecs.batches import DecodedBatch, EncodedBatch, Group, assemble, bad_records
from zync_assets.codecs.connect.payloads import has_columns, parse_at, parse_json, read_columns, row_reader, write_row
from zync_assets.codecs.connect.schema import Connect, from_lake, lake_type, note_of, parse_connect, plain_type, to_lake
from zync_assets.codecs.evolution import Arrival, check_writable, conform, merge_types, misfit, type_differences
from zync_assets.codecs.json.columns import json_texts
from zync_assets.codecs.json.values import json_reader
from zync_assets.errors import SchemaError

Ints = npt.NDArray[np.int64]

_HEAD = re.compile(r'[ \t\n\r]*\{[ \t\n\r]*"schema"[ \t\n\r]*:[ \t\n\r]*')
_PAYLOAD = re.compile(r'[ \t\n\r]*,[ \t\n\r]*"payload"[ \t\n\r]*:[ \t\n\r]*')
_SWEEPS = 64
"""The most schemas that are searched in all records of a batch at once. The decoder parses other records singly."""
_MOST_HEADS = 4096
_NO_HEAD = -1
_NOTHING = -2
"""A null record, or an empty one."""


@dataclass(frozen=True, eq=False)
class _Head:
    """How records of one schema begin, up to the payload."""

    data: bytes
    characters: int
    node: Connect


@dataclass(frozen=True)
class _Text:
    """A payload that is plain JSON, as it was written."""

    text: str


class ConnectDecoder:
    """See ``codecs.dispatch.Decoder``. Keeps the schemas that it has seen, and the column's type."""

    def __init__(self, target: pa.DataType | None, plain: pa.DataType | None, fixed_schema: bool = False) -> None:
        """``plain``: the type of records without a schema; None: their text. ``fixed_schema``: see ``make_decoder``."""
        self._plain = plain
        self._fixed_schema = fixed_schema and target is not None
        self._arrivals: list[Arrival] = []
        self._type = merge_types(target, pa.null() if plain is None else plain)
        self._schemas: dict[str, Connect | str] = {}
        self._types: dict[str, Connect] = {}
        self._heads: dict[bytes, _Head] = {}
        self._lengths: tuple[int, ...] = ()
        self._merged_nodes: set[Connect] = set()

    @property
    def type(self) -> pa.DataType:
        return self._type

    def decode(self, payloads: pa.Array) -> DecodedBatch:
        errors: dict[int, str] = {}
        self._arrivals = []
        by_schema: dict[Connect, list[Group]] = {}
        heads, head_indices = self._sort_by_head(payloads)
        odd = head_indices == _NO_HEAD
        for node, of_node in _by_node(heads).items():
            rows = np.flatnonzero(np.isin(head_indices, of_node))
            odd[rows] = True
            if has_columns(node):
                skip = np.array([len(head.data) for head in heads])[head_indices[rows]]
                texts, whole = _texts_after(payloads, rows, skip)
                values, wrong = read_columns(node, texts)
                is_good = whole & ~wrong
                by_schema[node] = [Group(rows[is_good], values.filter(pa.array(is_good)))]
                odd[rows[is_good]] = False
        head_by_row = {
            row: heads[head_indices[row]] if head_indices[row] >= 0 else None for row in np.flatnonzero(odd).tolist()
        }
        texts = self._read_rows(payloads, head_by_row, by_schema, errors)
        groups = [group for node, parts in by_schema.items() if (group := self._of_schema(node, parts, errors))]
        if texts:
            groups += self._of_texts(texts, errors)
        values = assemble(self._type, groups, len(payloads), errors)
        return DecodedBatch(values, pa.nulls(len(payloads), pa.int32()), bad_records(errors), tuple(self._arrivals))

    def _sort_by_head(self, payloads: pa.Array) -> tuple[list[_Head], Ints]:
        """The distinct beginnings, and for each record the index of its beginning, _NO_HEAD or _NOTHING."""
        lengths = pc.binary_length(payloads).fill_null(0).to_numpy(zero_copy_only=False)
        head_indices = np.where(lengths > 0, _NO_HEAD, _NOTHING)
        rows = np.flatnonzero(lengths > 0)
        heads: list[_Head] = []
        while len(rows) and len(heads) < _SWEEPS:
            head = self._head(payloads[int(rows[0])].as_py())
            if head is None:
                rows = rows[1:]
                continue
            has_head = pc.starts_with(payloads, pattern=head.data).fill_null(False).to_numpy(zero_copy_only=False)[rows]
            head_indices[rows[has_head]] = len(heads)
            heads.append(head)
            rows = rows[~has_head]
        index_by_head = {head: index for index, head in enumerate(heads)}
        for row in rows.tolist():
            head = self._head(payloads[row].as_py())
            if head is not None:
                head_indices[row] = index_by_head.setdefault(head, len(index_by_head))
        return list(index_by_head), head_indices

    def _head(self, payload: bytes) -> _Head | None:
        """How the record begins, up to its payload; None if it is not written as JsonConverter does, or its schema is
        wrong."""
        for length in self._lengths:
            head = self._heads.get(payload[:length])
            if head is not None:
                return head
        try:
            text = payload.decode()
            begin = _HEAD.match(text)
            if begin is None:
                return None
            schema, end = parse_at(text, begin.end())
            match = _PAYLOAD.match(text, end)
            node = self._schema(schema)
        except (ValueError, RecursionError):
            return None
        if match is None or not isinstance(node, Connect):
            return None
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
            self._lengths = ()
        head = _Head(text[: match.end()].encode(), match.end(), node)
        self._heads[head.data] = head
        if len(head.data) not in self._lengths:
            self._lengths = (*self._lengths, len(head.data))
        return head

    def _schema(self, document: Any) -> Connect | str | None:
        """The parsed schema, or the error text of a bad schema; None for a null schema."""
        if document is None:
            return None
        text = json.dumps(document, sort_keys=True, default=float)
        schema = self._schemas.get(text)
        if schema is None:
            try:
                schema = parse_connect(text)
                # Schemas that differ only in names and comments are the same object.
                schema = self._types.setdefault(repr(schema), schema)
            except SchemaError as error:
                schema = str(error)
            if len(self._schemas) >= _MOST_HEADS:
                self._schemas.clear()
                self._types.clear()
            self._schemas[text] = schema
        return schema

    def _read_rows(
        self,
        payloads: pa.Array,
        head_by_row: dict[int, _Head | None],
        by_schema: dict[Connect, list[Group]],
        errors: dict[int, str],
    ) -> dict[int, str]:
        """Parse records singly, and add their values to ``by_schema``. Returns row → text of the records without a schema."""
        rows: dict[Connect, dict[int, Any]] = {}
        texts: dict[int, str] = {}
        for row in sorted(head_by_row):
            try:
                node, value = self._record(payloads[row].as_py().decode(), head_by_row[row])
                if node is None:
                    if value is not None:
                        texts[row] = value.text
                else:
                    rows.setdefault(node, {})[row] = row_reader(node)(value)
            except UnicodeDecodeError:
                errors[row] = "not UTF-8"
            except RecursionError:
                errors[row] = "nested too deep"
            except json.JSONDecodeError as error:
                errors[row] = f"no JSON: {error}"
            except ValueError as error:
                errors[row] = str(error)
        for node, values in rows.items():
            by_schema.setdefault(node, []).append(_group(values, plain_type(node), errors))
        return texts

    def _record(self, text: str, head: _Head | None) -> tuple[Connect | None, Any]:
        """A record's schema and payload; without a schema, None and its payload's text (None for null)."""
        if head is not None:
            try:
                payload, end = parse_at(text, head.characters)
                if text[end:].strip(" \t\n\r") == "}":
                    return head.node, payload
            except ValueError:
                pass
        if not text.strip(" \t\n\r"):
            # Connect's converter takes such a record for null.
            return None, None
        document = parse_json(text)
        if not isinstance(document, dict) or document.keys() != {"schema", "payload"}:
            return None, None if document is None else _Text(text)
        node, payload = self._schema(document["schema"]), document["payload"]
        if isinstance(node, str):
            raise ValueError(node)
        if node is None:
            return None, None if payload is None else _Text(json.dumps(json.loads(text)["payload"], ensure_ascii=False))
        return node, payload

    def _of_schema(self, node: Connect, groups: list[Group], errors: dict[int, str]) -> Group | None:
        """Merge the groups of one schema, in the lake's type. Omits records whose values are out of the type's range."""
        rows = np.concatenate([group.rows for group in groups])
        if len(rows) == 0:
            return None
        plain = pa.concat_arrays([group.values for group in groups])
        values, misfits = isolate(plain, lambda part: to_lake(node, part), ValueError)
        errors.update({int(rows[index]): f"payload: out of range: {error}" for index, error in misfits.items()})
        if len(misfits) == len(rows) or not self._merge(node, rows, errors):
            return None
        is_good = np.ones(len(rows), np.bool_)
        is_good[list(misfits)] = False
        return Group(rows[is_good], values.filter(pa.array(is_good)))

    def _merge(self, node: Connect, rows: Ints, errors: dict[int, str]) -> bool:
        if node not in self._merged_nodes:
            before = () if pa.types.is_null(self._type) else (self._type,)
            try:
                merged_type = merge_types(self._type, lake_type(node), "payload")
            except SchemaError as error:
                errors.update({int(row): misfit(error) for row in rows})
                self._arrivals.append(Arrival(int(rows.min()), None, lake_type(node), before, note_of(node)))
                return False
            arrival = Arrival(int(rows.min()), None, merged_type, before, note_of(node))
            self._arrivals.append(arrival)
            if arrival.changes and self._fixed_schema:
                reason = "; ".join(type_differences(self._type, merged_type, "payload"))
                errors.update({int(row): f"the schema is new: {reason}" for row in rows})
                return False
            self._type = merged_type
            self._merged_nodes.add(node)
        return True

    def _of_texts(self, texts: dict[int, str], errors: dict[int, str]) -> list[Group]:
        rows = np.array(list(texts), np.int64)
        plain = pa.array(list(texts.values()), pa.string())
        if self._plain is not None:
            values, value_errors = json_reader(self._plain)(plain.cast(pa.binary()))
            errors.update({int(rows[index]): error for index, error in value_errors.items()})
            is_good = np.ones(len(rows), np.bool_)
            is_good[list(value_errors)] = False
            return [Group(rows[is_good], values.filter(pa.array(is_good)))]
        try:
            self._type = merge_types(self._type, pa.string(), "payload")
        except SchemaError:
            reason = (
                f"a record without schema and payload, and the lake's column is {self._type}; give it schema: a DDL"
            )
            errors.update(dict.fromkeys(texts, reason))
            return []
        return [Group(rows, plain)]


def _by_node(heads: list[_Head]) -> dict[Connect, list[int]]:
    indices: dict[Connect, list[int]] = {}
    for index, head in enumerate(heads):
        indices.setdefault(head.node, []).append(index)
    return indices


def _texts_after(payloads: pa.Array, rows: Ints, skip: Ints) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """The texts of some records after their first ``skip`` bytes, and whether each text ends with a closing bracket.

    ``rows``: the indexes of the records, ascending.
    """
    _, ends, data = payloads.buffers()
    bounds = np.frombuffer(ends, np.int32)[payloads.offset : payloads.offset + len(payloads) + 1]
    inner = np.empty(2 * len(rows), np.int32)
    inner[0::2] = bounds[rows] + skip
    inner[1::2] = bounds[rows + 1]
    pieces = pa.Array.from_buffers(pa.binary(), len(inner) - 1, [None, pa.py_buffer(inner), data])
    texts = pieces.take(pa.array(np.arange(0, len(inner), 2)))
    return texts, np.frombuffer(data, np.uint8)[inner[1::2] - 1] == ord("}")


def _group(values: dict[int, Any], type: pa.DataType, errors: dict[int, str]) -> Group:
    rows = np.array(list(values), np.int64)
    try:
        return Group(rows, pa.array(list(values.values()), type))
    except (ValueError, OverflowError, TypeError):
        pass
    parts: list[pa.Array] = []
    good_rows: list[int] = []
    for row, value in values.items():
        try:
            parts.append(pa.array([value], type))
            good_rows.append(row)
        except (ValueError, OverflowError, TypeError) as error:
            errors[row] = f"payload: out of range: {error}"
    return Group(np.array(good_rows, np.int64), pa.concat_arrays(parts) if parts else pa.nulls(0, type))


_END = b"}"


@dataclass(frozen=True)
class ConnectEncoder:
    """See ``codecs.dispatch.Encoder``. ``schema``: Connect's schema as JSON, copied into each record without a change.

    ``avro``: the Avro schema behind ``schema``, if known. Both schemas have the same plain values.
    """

    schema: str
    avro: Node | None = None

    @property
    def overhead(self) -> int:
        return len(self._head) + len(_END)

    @property
    def _head(self) -> bytes:
        return b'{"schema":' + self.schema.encode() + b',"payload":'

    def encode(self, values: pa.Array) -> EncodedBatch:
        node, avro = parse_connect(self.schema), self.avro
        type = lake_type(node) if avro is None else avro_lake_type(avro)
        check_writable(values.type, type)

        def payloads(part: pa.Array) -> pa.Array:
            lake_values = conform(part, type)
            return _payloads(node, from_lake(node, lake_values) if avro is None else from_avro_lake(avro, lake_values))

        texts, errors = isolate(values, payloads, ValueError)
        return EncodedBatch(pc.binary_join_element_wise(self._head, texts, _END, b""), bad_records(errors))


def _payloads(node: Connect, plain: pa.Array) -> pa.Array:
    """As binary; null for null."""
    if _as_columns(node):
        try:
            return json_texts(plain)
        except ValueError:
            # NaN and infinities: JsonConverter writes them as strings.
            pass
    payloads = [None if value is None else _text(node, value).encode() for value in plain.to_pylist()]
    return pa.array(payloads, pa.binary())


def _text(node: Connect, value: object) -> str:
    return json.dumps(write_row(node, value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@lru_cache(maxsize=1024)
def _as_columns(node: Connect) -> bool:
    """All but structs without fields, and maps that are arrays of pairs."""
    if has_columns(node):
        return True
    inner = [child for _, child in node.fields] + ([node.items] if node.items else [])
    hollow = node.kind == "struct" and not node.fields
    return not hollow and (node.kind != "map" or node.by_name) and all(_as_columns(child) for child in inner)
