"""The fold of a batch: one change per key, equal to all records of the key one after the other. Pure.

Four kinds of change come out, in the column OP:

    upsert    the columns that a record set get their values, and the others stay as they are
    update    the same for a row that exists; there is no new row
    replace   the row was deleted and made again: the columns that no later record set are empty
    delete    the row goes

The column SET has a digit for each column, in their order. ``1``: the change sets the column. ``2``: the change sets the column
if the row is there already. ``3``: the change sets the column if the row is new, to the field's default. ``0``: the column
stays. SET is null if the change sets all columns, but never of an update. A column with an update's value has no default.

The column OFFSET has the version of the key's last record. The column CREATION has the version of the first record after the
last delete that makes the row if it is not there; null if no record does. A version is the record's offset, or its place among
the records of all partitions (``timed_versions``).

``PartialRecords`` says which records leave out a field that an expression names. ``changed`` applies the user's function to
rows before their fold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import DEBEZIUM_DATE, ZONED_TIMESTAMP, default_of, fields_of, lacking
from zync_assets.codecs.spark_types import original_name, spark_type
from zync_assets.errors import SinkError, TargetRefused
from zync_assets.etl.rules.output_schemas import parse_group
from zync_assets.spark import frames
from zync_assets.spark.sql import is_placeholder, name_sql, path_sql, text_sql

OP, SET, OFFSET, CREATION = "zync_op", "zync_set", "zync_offset", "zync_creation"
UPSERT, REPLACE, DELETE, UPDATE = "u", "r", "d", "e"

_EPOCH = date(1970, 1, 1).toordinal()

PARTITION_BITS = 20
"""The bits of a partition in a timed version. A topic has fewer partitions than they count."""

Mask = npt.NDArray[np.bool_]
_OPS = (UPSERT, REPLACE, DELETE, UPDATE)


@dataclass(frozen=True)
class Records:
    """Records sorted by key, and within a key by time, partition and offset.

    ``rows``: the columns of the table. ``is_delete``: by row. ``is_set``: by row and by column of ``columns``, whether the
    record has a value for the column, null included. A value of another column is a default (``codecs.fields.Default``).
    ``versions``: by row. ``is_update``: by row, whether the record makes no new row; None: none.
    """

    rows: pa.RecordBatch
    is_delete: Mask
    is_set: Mask
    versions: pa.Array
    is_update: Mask | None = None

    @property
    def updates(self) -> Mask:
        """``is_update``, by row."""
        return np.zeros(len(self), np.bool_) if self.is_update is None else self.is_update

    def __len__(self) -> int:
        return self.rows.num_rows

    def part(self, first: int, end: int) -> Records:
        """The records ``first <= index < end``."""
        rows = self.rows.slice(first, end - first)
        is_update = None if self.is_update is None else self.is_update[first:end]
        versions = self.versions.slice(first, end - first)
        return Records(rows, self.is_delete[first:end], self.is_set[first:end], versions, is_update)


def fold(records: Records, keys: Sequence[str], columns: Sequence[str]) -> pa.RecordBatch:
    """One row per key: the key columns, ``columns``, OP, SET, OFFSET and CREATION. ``columns``: those outside the key."""
    count = len(records)
    ends = np.flatnonzero(np.append(_begins(records.rows, keys)[1:], True)) if count else np.empty(0, np.int64)
    starts = np.append(0, ends[:-1] + 1) if count else ends
    places = np.arange(count)
    # The last delete of each key; -1 for none. Places only grow, so that a place of an earlier key is below the start.
    deletes = np.maximum.accumulate(np.where(records.is_delete, places, -1))[ends] if count else ends
    was_deleted = deletes >= starts
    row_starts = np.where(was_deleted, deletes + 1, starts)
    # The first record that creates a missing row. Updates before this record change an existing row.
    creation_places = np.where(records.is_delete | records.updates, count, places)
    first_creations = np.append(np.minimum.accumulate(creation_places[::-1])[::-1], count)[row_starts]
    is_upsert = first_creations <= ends
    row_starts = np.where(was_deleted, first_creations, row_starts)
    arrays: list[pa.Array] = [records.rows.column(name).take(pa.array(ends)) for name in keys]
    masks: list[npt.NDArray[np.int8]] = []
    for number, name in enumerate(columns):
        set_places = np.where(records.is_set[:, number] & ~records.is_delete, places, -1)
        at = np.maximum.accumulate(set_places)[ends] if count else ends
        has_value = at >= row_starts
        has_default = ~has_value & is_upsert
        if has_default.any():
            # The record that makes the row comes from before the field, if the record has a default.
            is_valid = np.append(records.rows.column(name).is_valid().to_numpy(zero_copy_only=False), False)
            has_default &= is_valid[np.minimum(first_creations, count)]
        marks = [np.where(is_upsert & (at < first_creations), 2, 1), 3]
        masks.append(np.select([has_value, has_default], marks, 0).astype(np.int8))
        places_of_values = np.where(has_default, first_creations, at)
        arrays.append(records.rows.column(name).take(pa.array(places_of_values, mask=~(has_value | has_default))))
    op = np.where(was_deleted, np.where(is_upsert, 1, 2), np.where(is_upsert, 0, 3))
    is_set = np.column_stack(masks) if masks else np.empty((len(ends), 0), np.int8)
    versions = records.versions
    creation = versions.take(pa.array(first_creations, mask=~is_upsert))
    marks = [
        pa.array(_OPS, pa.string()).take(pa.array(op)),
        set_texts(is_set, op == 3),
        versions.take(pa.array(ends)),
        creation,
    ]
    return pa.RecordBatch.from_arrays([*arrays, *marks], names=[*keys, *columns, OP, SET, OFFSET, CREATION])


def set_texts(marks: npt.NDArray[np.int8], is_update: Mask) -> pa.Array:
    """The column SET. ``marks``: by row and column; ``is_update``: by row."""
    partial = (marks != 1).any(axis=1) | is_update
    texts = np.full(len(marks), None, object)
    if partial.any() and marks.shape[1]:
        shapes, inverse = np.unique(marks[partial], axis=0, return_inverse=True)
        names = np.array(["".join(map(str, shape)) for shape in shapes], object)
        texts[partial] = names[inverse.ravel()]
    elif partial.any():
        texts[partial] = ""
    return pa.array(texts, pa.string())


def inserted_names(names: Sequence[str], shape: str, blanks: Collection[str]) -> list[str]:
    """The columns that a new row sets. ``names``, ``shape``: the columns outside the key, and their SET; ``blanks``: the columns
    that are null without a value. Their DEFAULT is for rows from before the column, and not for a value that was not sent.
    """
    marks = zip(names, shape, strict=True)
    return [name for name, mark in marks if mark in "13" or (mark == "0" and name in blanks)]


def fold_all(parts: Iterable[Records], keys: Sequence[str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The fold of records that come in several parts, sorted as a whole. The last key of a part waits for the next part."""
    tail: Records | None = None
    for part in parts:
        records = part if tail is None else _joined_records(tail, part)
        if not len(records):
            continue
        last_start = int(np.flatnonzero(_begins(records.rows, keys))[-1])
        if last_start:
            yield fold(records.part(0, last_start), keys, columns)
        tail = records.part(last_start, len(records))
    if tail is not None and len(tail):
        yield fold(tail, keys, columns)


def _joined_records(first: Records, second: Records) -> Records:
    rows = pa.Table.from_batches([first.rows, second.rows]).combine_chunks().to_batches()
    return Records(
        rows[0] if rows else first.rows,
        np.concatenate([first.is_delete, second.is_delete]),
        np.concatenate([first.is_set, second.is_set]),
        pa.concat_arrays([first.versions, second.versions]),
        np.concatenate([first.updates, second.updates]),
    )


def timed_versions(times: pa.Array, partitions: pa.Array, offsets: pa.Array) -> pa.Array:
    """The places of records among the records of all partitions, as numbers of 128 bits in 16 bytes, the lowest byte first.

    Of two records, the one with the later time has the higher version, and then the one with the higher partition, and offset.
    A version of a time after 1970 is higher than every offset.
    """
    millis = np.maximum(pc.fill_null(times.cast(pa.int64()), 0).to_numpy() // 1000, 0)
    words = np.column_stack([offsets.to_numpy(), millis << PARTITION_BITS | partitions.to_numpy()]).astype("<u8")
    return pa.Array.from_buffers(pa.binary(16), len(words), [None, pa.py_buffer(words.tobytes())])


def _begins(rows: pa.RecordBatch, keys: Sequence[str]) -> Mask:
    """Whether a row has another key than the row before it. No key column has a null."""
    begins = np.zeros(rows.num_rows, np.bool_)
    begins[:1] = True
    for name in keys:
        column = comparable(rows.column(name))
        differs = pc.not_equal(column.slice(1), column.slice(0, max(0, len(column) - 1)))
        begins[1:] |= differs.to_numpy(zero_copy_only=False)
    return begins


def sorted_rows(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The rows in the order of some columns."""
    columns = {name: comparable(rows.column(name)) for name in names}
    return rows.take(pc.sort_indices(pa.table(columns), [(name, "ascending") for name in columns]))


def comparable(values: pa.Array) -> pa.Array:
    """The values of a key as Arrow can sort and compare them. Equal keys become equal values; the order may be another.

    Arrow sorts no nested values, and no NaN equals itself. Databases and Spark hold all NaN for one value, and -0.0 for 0.0.
    """
    if pa.types.is_nested(values.type):
        return pa.array(map(repr, values.to_pylist()), pa.string())
    if pa.types.is_floating(values.type):
        wide = values.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0
        return pa.array(np.where(np.isnan(wide), np.nan, wide).view(np.int64))
    return values


@dataclass(frozen=True)
class PartialRecords:
    """The records that leave out fields of their row.

    ``root``, ``kind``: SQL and type of the row. ``schemas``: as ``columns.Layout``. ``is_raw``: whether the rows are of a raw
    table. Of such rows, the writer's schema may lack a field, and a value may be ``placeholder``, Debezium's text for a value
    that it did not send (None: every value was sent). ``limits``: the target's ``days`` and ``odd_instants``, if rows have the
    defaults of fields that came later; None if they have none. ``later_fields``: of a staged topic (``staging.later_fields``).
    """

    root: str
    kind: pa.DataType
    schemas: Mapping[str, frozenset[str] | None]
    is_raw: bool
    placeholder: str | None
    limits: tuple[tuple[date, date], re.Pattern[str] | None] | None = None
    later_fields: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])

    def default(self, item: pa.Field) -> tuple[str, pa.Array] | None:
        """The condition for a record from before a field of its row, as SQL, and the field's default; None without one."""
        default, name = default_of(item) if self.is_raw else None, original_name(item.name)
        text = self.later_fields.get(name) if default is None else default.text
        if text is None or self.limits is None:
            return None
        condition = self._lacks_later(item, name) if default is None else frames.schema_condition(default.ids)
        return condition, pa.array([text]).cast(item.type)

    def check_default(self, value: pa.Scalar, note: str) -> None:
        """TargetRefused for a time that the target lacks: it would refuse each row that has the default. ``value``: as the column
        has it; ``note``: of the column (``target.Column``)."""
        (first, last), odd_instants = self.limits or ((date.min, date.max), None)
        default = value.as_py()
        day = default.toordinal() if isinstance(default, date) else None
        if note == DEBEZIUM_DATE and isinstance(default, int):
            day = default + _EPOCH
        if day is not None and not first.toordinal() <= day <= last.toordinal():
            raise TargetRefused(f"{value} is not from {first} to {last}")
        if note == ZONED_TIMESTAMP and odd_instants is not None and odd_instants.match(str(default)):
            raise TargetRefused(f"{value} is no time of the target")

    def _lacks_later(self, item: pa.Field, name: str) -> str:
        """The condition for a staged record without a field that came later, as SQL."""
        named_fields = {print_: fields for print_, fields in self.schemas.items() if fields is not None}
        prints = sorted(print_ for print_, fields in named_fields.items() if name not in fields)
        # An earlier schema lacks only fields that came later. The records of another rule lack other fields, too.
        later = [fields for fields in named_fields.values() if name in fields]
        came = any(
            named_fields[print_] < fields and fields - named_fields[print_] <= self.later_fields.keys()
            for print_ in prints
            for fields in later
        )
        # A batch that has records from before the field and from after it has one schema for both.
        left_out = f"coalesce(array_contains(left_out, {text_sql(path_sql(('value', item.name)))}), false)"
        return f"schema IN ({', '.join(map(text_sql, prints))}) OR {left_out}" if came else left_out

    def unset(self, item: pa.Field) -> str | None:
        """Whether a record leaves out a field of its row, as SQL that may be null; None if no record of a raw table does."""
        if not self.is_raw:
            return None
        column, ids = f"{self.root}.{name_sql(item.name)}", lacking(item)
        conditions = [frames.schema_condition(ids)] if ids else []
        if self.placeholder is not None:
            sql = is_placeholder(column, spark_type(item.type), self.placeholder)
            conditions += [] if sql is None else [sql]
        return " OR ".join(conditions) or None

    def lacks(self, sql: str) -> Iterator[str]:
        """Conditions for a record that leaves out a field of an expression. A single true condition is enough."""
        # Spark's workers load no parser.
        from zync_assets.pipeline_file.expressions import columns, parse

        root = self.root.lower().split(".")
        kind = self.kind
        fields = {item.name.lower(): item for item in fields_of(kind)} if pa.types.is_struct(kind) else {}
        named_fields: list[tuple[pa.Field, Sequence[str]]] = []
        for path in sorted(set(columns(parse(sql).tree))):
            begin = [part.lower() for part in path[: len(root)]]
            if begin == root[: len(path)] and len(path) <= len(root):
                # The whole row.
                named_fields += [(item, ()) for item in fields.values()]
            elif begin == root and path[len(root)].lower() in fields:
                named_fields.append((fields[path[len(root)].lower()], path[len(root) + 1 :]))
        names = {original_name(item.name) for item, _ in named_fields}
        if prints := [
            print_ for print_, field_names in self.schemas.items() if field_names is not None and names - field_names
        ]:
            yield f"schema IN ({', '.join(map(text_sql, sorted(prints)))})"
        if self.schemas and named_fields:
            paths = [("value", item.name, *inner[:at]) for item, inner in named_fields for at in range(len(inner) + 1)]
            texts = ", ".join(text_sql(path_sql(path)) for path in paths)
            yield f"coalesce(arrays_overlap(left_out, array({texts})), false)"
        for item, _ in named_fields:
            if (condition := self.unset(item)) is not None:
                yield f"coalesce({condition}, false)"


def clear_left_out(
    is_set: Mask,
    prints: pa.Array,
    left_out: pa.Array,
    schemas: Mapping[str, frozenset[str] | None],
    sources: Sequence[str | None],
) -> None:
    """Clear ``is_set`` where a staged record leaves out a column's field.

    ``prints``, ``left_out``: by row, the record's schema, and the fields that it left out of its schema; ``schemas``: as
    ``columns.Layout``; ``sources``: by column, the name of its field.
    """
    paths = pc.fill_null(pc.binary_join(left_out.cast(pa.list_(pa.string())), "\n"), "")
    groups = pc.binary_join_element_wise(pc.fill_null(prints, ""), paths, "\n")
    for group in pc.unique(groups).to_pylist():
        print_, absent_paths = parse_group(group)
        fields = schemas.get(print_)
        absent_names = {original_name(path.removeprefix("value.").strip("`")) for path in absent_paths if path}
        is_in_group = pc.equal(groups, group).to_numpy(zero_copy_only=False)
        for at, source in enumerate(sources):
            if source is not None and (source in absent_names or (fields is not None and source not in fields)):
                is_set[is_in_group, at] = False


def own_values(rows: pa.RecordBatch, names: Sequence[str], is_set: Mask) -> pa.RecordBatch:
    """The rows with nulls for columns that their records leave out. A function may make values of nulls, and they are no
    defaults."""
    for number, name in enumerate(names):
        at = rows.schema.get_field_index(name)
        values = pc.if_else(pa.array(is_set[:, number]), rows.column(at), pa.scalar(None, rows.schema.types[at]))
        rows = rows.set_column(at, rows.schema.field(at), values)
    return rows


def changed(
    function: str, rows: pa.RecordBatch, types: Mapping[str, pa.DataType] | None = None, keys: Sequence[str] = ()
) -> pa.RecordBatch:
    """The rows after the user's function. ``types``: the columns of its result for no rows; ``keys``: the columns that must stay
    as they are.

    SinkError if the function can't be imported, fails, or returns something else; TargetRefused if it fails on the value of a
    record.
    """
    module, _, name = function.partition(":")
    try:
        call = getattr(import_module(module), name)
    except Exception as error:
        raise SinkError(
            f"before: function {function}: {_error_text(error)}. Install its module, or put its"
            " folder in PYTHONPATH, where Spark's workers run too."
        ) from None
    try:
        new_rows = call(rows)
    except Exception as error:
        # Any other error is a defect of the function. It would put every record aside.
        if rows.num_rows and isinstance(error, (ValueError, ArithmeticError)):
            raise TargetRefused(f"before: function {function} fails: {_error_text(error)}") from error
        raise SinkError(
            f"before: function {function} failed: {_error_text(error)}. Correct it, and run again."
        ) from error
    if not isinstance(new_rows, pa.RecordBatch) or new_rows.num_rows != rows.num_rows:
        raise SinkError(f"before: function {function} must return an Arrow batch of as many rows as it gets.")
    for name, expected_type in (types or {}).items():
        kind = new_rows.schema.field(name).type if name in new_rows.schema.names else None
        if kind != expected_type:
            raise SinkError(
                f"before: function {function} returns column {name} as {kind or 'nothing'}, and of an empty"
                f" batch as {expected_type}. Let it return the same columns and types for every batch."
            )
    for name in keys:
        if not new_rows.column(name).equals(rows.column(name)):
            raise SinkError(
                f"before: function {function} changes the key column {name}. Let it keep the key columns, and change"
                " the key with before: {set: ...}."
            )
    return new_rows


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
