"""The columns of a sink's table, made of the types of its source.

A record of Debezium's envelope (``before``, ``after``, ``op``) is its row ``after`` where rows are upserted, and a delete
where ``op`` is ``d``. Of other records, ``codecs.fields.deletes_sql`` tells the deletes. A field that the source did not send
leaves its column as it is.

Where rows are upserted, a condition chooses rows. A record that does not meet it deletes the row of its key. A record that
leaves out a field of the condition tells nothing of it: it updates the row if there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import NO_ROW, connect_note_of, deletes_sql, fields_of, is_envelope, type_at
from zync_assets.codecs.spark_types import original_name, spark_type
from zync_assets.errors import SinkError, TargetRefused
from zync_assets.etl.rules.output_schemas import named_sides, side_fields, split_key
from zync_assets.pipeline import Sink, SinkTable
from zync_assets.sinks.fold import (
    CREATION,
    DELETE,
    OFFSET,
    OP,
    SET,
    UPSERT,
    Mask,
    PartialRecords,
    Records,
    changed,
    clear_left_out,
    own_values,
    timed_versions,
)
from zync_assets.sinks.target import Column, TableSpec, Target, checked_times, in_units, time_of
from zync_assets.spark.sql import name_sql, text_as_sql

COORDINATES = ("topic", "partition", "offset")
PARTITION, IS_DELETE, GROUP, LEFT_OUT = "zync_partition", "zync_delete", "zync_schema", "zync_left_out"
IS_UPDATE, FAILED, TIME = "zync_update", "zync_failed", "zync_time"
"""Columns of a source's frame beside the columns of the table and OFFSET. TIME: the carried time of a raw record."""

NO_VALUE = "value IS NULL"
"""The condition of a tombstone."""
_COORDINATE_TYPES = {"topic": pa.string(), "partition": pa.int32(), "offset": pa.int64()}
_JSON = (
    r"map('ignoreNullFields', 'false', 'timestampFormat', 'yyyy-MM-dd\'T\'HH:mm:ss.SSSSSSXXX',"
    r" 'timestampNTZFormat', 'yyyy-MM-dd\'T\'HH:mm:ss.SSSSSS')"
)


@dataclass(frozen=True)
class SourceColumn:
    """A column with its value in a record. ``sql``: over ``kafka``, ``key`` and ``value``. ``name``: of the field in the
    source's value, whose absence leaves the column as it is; None: every record has the column. ``path``: of the column's field;
    None: the column is an expression. ``units``: microseconds in the unit of a number that becomes a time; 0: no such number.
    ``unset``: whether a record leaves the column as it is for another reason, as SQL; None: no record does. The value of such a
    record is null, and a null in a key is refused. ``has_other``: whether ``sql`` has another value where the field is null.
    ``default``: the condition for a record from before the field, and the field's default, as SQL."""

    column: Column
    sql: str
    name: str | None = None
    path: tuple[str, ...] | None = None
    units: int = 0
    unset: str | None = None
    has_other: bool = False
    default: tuple[str, str] | None = None


@dataclass(frozen=True)
class Layout:
    """How the records of a source become rows of a table.

    ``delete_sql``: whether a record deletes its row; null for a record that is no change of a row.
    ``schemas``: fingerprint → the fields that a staged record of the schema has, None for all. ``function``: as ``Sink.before``.
    ``update_sql``: whether a record makes no new row.
    """

    spec: TableSpec
    columns: tuple[SourceColumn, ...]
    delete_sql: str
    where: tuple[str, ...] = ()
    schemas: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    function: str | None = None
    update_sql: str | None = None

    def select(self, *, staged: bool, guarded: Collection[str] | None = None) -> list[str]:
        """The expressions of a source's frame. The columns of the table are ``c0``, ``c1`` and so on.

        ``u1`` is true where a record leaves the column ``c1`` as it is.
        ``guarded``: the SQL of columns that Spark computes only where the frame's column FAILED is null. None: the frame has no
        column FAILED.
        """
        safe = "{}" if guarded is None else f"CASE WHEN {FAILED} IS NULL THEN {{}} END"
        parts = [safe.format(_value(item)) if item.sql in (guarded or ()) else _value(item) for item in self.columns]
        parts = [f"{sql} AS c{number}" for number, sql in enumerate(parts)]
        parts += [
            f"coalesce({item.unset}, false) AS u{at}" for at, item in enumerate(self.columns) if item.unset is not None
        ]
        groups = ["schema", "left_out", "NULL"] if staged else ["NULL", "NULL", "kafka.time"]
        marks = ["kafka.partition", "kafka.offset", safe.format(self.delete_sql), *groups]
        names = [PARTITION, OFFSET, IS_DELETE, GROUP, LEFT_OUT, TIME]
        if self.update_sql is not None:
            marks, names = [*marks, f"coalesce({safe.format(self.update_sql)}, false)"], [*names, IS_UPDATE]
        if guarded is not None:
            marks, names = [*marks, FAILED], [*names, FAILED]
        return parts + [f"{sql} AS {name}" for sql, name in zip(marks, names, strict=True)]

    @property
    def key_names(self) -> list[str]:
        """The names of the key's columns in a source's frame."""
        return [f"c{number}" for number, item in enumerate(self.columns) if item.column.name in self.spec.key]

    def records(self, batch: pa.RecordBatch) -> Records:
        """The records of a source's frame. TargetRefused for a record that is no change, and for a null in a key column."""
        deletes = _deletes(batch)
        arrays = [_target_values(batch.column(number), item) for number, item in enumerate(self.columns)]
        rows = self._rows(arrays)
        is_set = self._is_set(batch, rows)
        if self.function is not None:
            rows = own_values(rows, [column.name for column in self.spec.others], is_set)
        is_delete = deletes.to_numpy(zero_copy_only=False)
        is_update = batch.column(IS_UPDATE).to_numpy(zero_copy_only=False) if self.update_sql is not None else None
        return Records(rows, is_delete, is_set, self._versions(batch), is_update)

    def _versions(self, batch: pa.RecordBatch) -> pa.Array:
        marks = (batch.column(name) for name in (TIME, PARTITION, OFFSET))
        return timed_versions(*marks) if self.spec.is_timed else batch.column(OFFSET)

    def _rows(self, arrays: Sequence[pa.Array]) -> pa.RecordBatch:
        """The columns of the table, of the values of ``columns``. Raises as ``records``."""
        rows = pa.RecordBatch.from_arrays(arrays, names=[item.column.name for item in self.columns])
        if self.function is not None:
            types = {item.name: pa.string() if item.as_json else item.type for item in self.spec.columns}
            # Records are shared out, and folded, in the order of their keys before the function.
            keys = self.spec.key if self.spec.mode == "upsert" else ()
            rows = changed(self.function, rows, types, keys)
        for name in self.spec.key:
            if rows.column(name).null_count:
                raise TargetRefused(f"the key column {name} is null")
        return rows.select([column.name for column in self.spec.columns])

    @property
    def is_whole(self) -> bool:
        """Whether no record leaves a column as it is."""
        return self.spec.mode == "insert" or not (self.schemas or any(item.unset for item in self.columns))

    def appended(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a source's frame as a load table takes them, one for each record."""
        deletes = _deletes(batch)
        rows = self._rows([_target_values(batch.column(number), item) for number, item in enumerate(self.columns)])
        op = pc.if_else(deletes, DELETE, UPSERT)
        marks = [op, pa.nulls(len(rows), pa.string()), self._versions(batch)]
        return pa.RecordBatch.from_arrays([*rows.columns, *marks], names=[*rows.schema.names, OP, SET, OFFSET])

    def _is_set(self, batch: pa.RecordBatch, rows: pa.RecordBatch) -> Mask:
        """By row and by column outside the key: whether the record has the column.

        A record that lacks a column has none that the user's function adds as a null: the function lacked a value for it.
        """
        names = [column.name for column in self.spec.others]
        by_name = {item.column.name: (number, item) for number, item in enumerate(self.columns)}
        is_set = np.ones((batch.num_rows, len(names)), np.bool_)
        if self.schemas:
            sources = [by_name[name][1].name if name in by_name else None for name in names]
            clear_left_out(is_set, batch.column(GROUP), batch.column(LEFT_OUT), self.schemas, sources)
        for at, name in enumerate(names):
            if name in by_name and by_name[name][1].unset is not None:
                is_set[:, at] &= ~batch.column(f"u{by_name[name][0]}").to_numpy(zero_copy_only=False)
        is_partial = ~is_set.all(axis=1)
        for at, name in enumerate(names):
            if name not in by_name:
                is_set[:, at] = ~(is_partial & rows.column(name).is_null().to_numpy(zero_copy_only=False))
        return is_set


def _deletes(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Whether a record of a source's frame deletes its row. TargetRefused for a record that is no change of a row."""
    deletes = batch.column(IS_DELETE)
    if deletes.null_count:
        raise TargetRefused(NO_ROW)
    return deletes


def make_layout(
    sink: Sink,
    table: SinkTable,
    target: Target,
    sides: Mapping[str, pa.DataType],
    comment: str,
    schemas: Mapping[str, str],
    placeholder: str | None,
    types: Mapping[str, pa.DataType],
    later_fields: Mapping[str, str | None] | None = None,
) -> Layout:
    """The layout of a source's records.

    ``sides``: the types of ``key`` and ``value``, of those that any record has. ``schemas``: fingerprint → output schema, of a
    staged topic; ``later_fields``: as in ``lake.staging``. ``types``: the types of the expressions of ``before: {set: ...}``.
    Raises SinkError if the key is missing.
    """
    root, kind, upserts = "value", sides.get("value", pa.null()), sink.mode == "upsert"
    envelope = upserts and not table.staged and is_envelope(kind) and type_at(kind, ["before"]) is not None
    deletes = NO_VALUE if table.staged else deletes_sql(kind)
    before = kind.field("before").type if envelope else pa.null()
    if envelope:
        root, kind = "value.after", kind.field("after").type
        deletes = f"CASE WHEN {NO_VALUE} OR value.op = 'd' THEN true WHEN value.after IS NOT NULL THEN false END"
    fields = {name: side_fields(text, "value") for name, text in schemas.items()}
    if table.staged and sink.before is None:
        # Earlier versions made columns of numbers for the times of staged topics. They stay so.
        numbers = cache(lambda: target.columns_of(TableSpec(table.name, (), (), sink.mode), "number"))
        sides = named_sides(sides, schemas.values(), lambda name: sink.rename.get(name, name) in numbers())
        kind = sides.get("value", pa.null())
    # A user's function changes values, so that the database can't give old rows the result of a default.
    limits = (target.days, target.odd_instants) if upserts and sink.before is None else None
    partial = PartialRecords(root, kind, fields, upserts and not table.staged, placeholder, limits, later_fields or {})
    values = {item.column.name: item for item in _side(root, kind, "value", partial)}
    in_key = {name: _with_before(item, kind, before) for name, item in values.items()} if envelope else values
    keys = _key(sink, table, sides, in_key)
    if upserts and not sink.key and (forms := split_key(schemas.values())):
        own, texts = forms[-1][0], " or ".join("(" + ", ".join(form) + ")" for form in forms)
        names = ", ".join(sorted({f"key.{name}" for form in forms for name in form}))
        raise SinkError(
            f"sink {sink.name}, {table.source}: the keys of the records are {texts}, because a rule was edited. Say in a sink of"
            f" its own what the key of the table is, such as key: [{own}] and before: {{set: {{{own}: 'coalesce({names})'}}}}."
        )
    if sink.mode == "insert":
        places = [_coordinate(name, f"kafka_{name}") for name in COORDINATES]
        of_key = {} if "key" not in sides else {item.column.name: item for item in _side("key", sides["key"], "key")}
        all_columns = {item.column.name: item for item in places} | of_key | values
        key_columns = {item.column.name: item for item in keys} or {item.column.name: item for item in places}
        columns = {**key_columns, **all_columns, **key_columns}
    else:
        key_columns = {item.column.name: item for item in keys}
        columns = {**key_columns, **values, **key_columns}
    for name, sql in sink.added.items():
        unset = " OR ".join(partial.lacks(sql)) if sink.mode == "upsert" else ""
        columns[name] = SourceColumn(Column(name, types[name], ""), sql, unset=unset or None)
    # A sink of several tables may rename a column that only some of the tables have.
    renamed = sink.rename if len(sink.tables) < 2 and "value" in sides else ()
    for word, option_names in (("include", sink.include or ()), ("rename", renamed)):
        if unknown_names := [name for name in option_names if name not in columns]:
            raise SinkError(
                f"sink {sink.name}, {table.source}: columns: {word} names {unknown_names[0]}, and the records have"
                f" {', '.join(columns)}. Correct the name."
            )
    if sink.include is not None:
        columns = {name: item for name, item in columns.items() if name in sink.include or name in key_columns}
    items = [
        replace(
            item,
            column=replace(
                item.column, name=sink.rename.get(name, name), as_json=not target.is_native(item.column.type)
            ),
        )
        for name, item in columns.items()
        if not pa.types.is_null(item.column.type)
    ]
    names = [item.column.name for item in items]
    if clashes := [name for name in names if name.lower() in (OP, SET, OFFSET, CREATION)]:
        raise SinkError(
            f"sink {sink.name}, {table.source}: a load table has a column {clashes[0]} too. Give yours another name with columns:"
            " {rename: ...}."
        )
    spellings = [name.lower() if target.ignores_case else name for name in names]
    if duplicates := [name for name, spelling in zip(names, spellings, strict=True) if spellings.count(spelling) > 1]:
        raise SinkError(
            f"sink {sink.name}, {table.source}: two columns would be called {duplicates[0]}. Give one another name with columns:"
            " {rename: ...}."
        )
    if spans := [
        item for item in items if pa.types.is_duration(item.column.type) or pa.types.is_interval(item.column.type)
    ]:
        raise SinkError(
            f"sink {sink.name}, {table.source}: column {spans[0].column.name} is an interval, which targets do not have. Make it"
            " a text with before: {set: ...} and CAST(... AS STRING)."
        )
    key = tuple(sink.rename.get(name, name) for name in key_columns)
    spec = TableSpec(table.name, tuple(item.column for item in items), key, sink.mode, comment)
    if sink.before is not None:
        spec = replace(spec, columns=_function_columns(sink.before, spec))
    layout = Layout(spec, tuple(items), deletes if upserts else "false", schemas=partial.schemas, function=sink.before)
    layout = _with_condition(layout, sink, [_value(item) for item in items if item.column.name in key], partial)
    if not envelope or {item.sql for item in keys}.isdisjoint(item.sql for item in in_key.values()):
        return layout
    # The key is a part of the row, which a tombstone lacks. Debezium's delete before the tombstone has deleted the row.
    return replace(layout, where=("value IS NOT NULL", *layout.where))


def _with_condition(layout: Layout, sink: Sink, keys: Sequence[str], partial: PartialRecords) -> Layout:
    """A layout with the conditions of the sink. ``keys``: the key columns' SQL."""
    # Spark's workers load no parser.
    from zync_assets.pipeline_file.conditions import is_of_key

    where = () if sink.where is None else (sink.where,)
    if sink.mode == "insert":
        return replace(layout, where=where)
    # No condition drops a record that is no change of a row: such a record is refused.
    stays = f"coalesce(NOT ({layout.delete_sql}), true)"
    if sink.where is None or is_of_key(sink.where):
        return replace(layout, where=where if sink.delete else (*where, stays))
    unsure = " OR ".join(partial.lacks(sink.where)) or None
    meets = f"coalesce({sink.where}, false)"
    no_change = None if layout.delete_sql == NO_VALUE else f"({layout.delete_sql}) IS NULL"
    if exemption := " OR ".join(sql for sql in (no_change, unsure) if sql is not None):
        # First, since the condition could fail on Debezium's placeholder.
        meets = f"CASE WHEN {exemption} THEN true ELSE {meets} END"
    if not sink.delete:
        return replace(layout, where=(meets, stays), update_sql=unsure)
    # A record without a whole key has no row to delete.
    has_key = " AND ".join(f"{key} IS NOT NULL" for key in keys)
    condition = f"coalesce({layout.delete_sql}, true) OR {meets} OR ({has_key})"
    return replace(layout, delete_sql=f"({layout.delete_sql}) OR NOT ({meets})", where=(condition,), update_sql=unsure)


def _function_columns(function: str, spec: TableSpec) -> tuple[Column, ...]:
    """The columns after the user's function. The function gets a frame without rows, and its result shows the columns."""
    fields = [pa.field(item.name, pa.string() if item.as_json else item.type) for item in spec.columns]
    schema = changed(function, pa.RecordBatch.from_pylist([], schema=pa.schema(fields))).schema
    columns = {item.name: item for item in spec.columns}
    if missing_keys := [name for name in spec.key if name not in schema.names]:
        raise SinkError(f"before: function {function} must keep the key column {missing_keys[0]}.")
    if void_names := [item.name for item in schema if pa.types.is_null(item.type)]:
        raise SinkError(f"before: function {function} must give column {void_names[0]} a type, for an empty batch too.")
    return tuple(
        columns[item.name] if item.name in columns and columns[item.name].as_json else Column(item.name, item.type)
        for item in schema
    )


def _key(
    sink: Sink, table: SinkTable, sides: Mapping[str, pa.DataType], values: Mapping[str, SourceColumn]
) -> list[SourceColumn]:
    kind = sides.get("key", pa.null())
    of_key = {item.column.name: item for item in _side("key", kind, "key")}
    if not sink.key:
        if sink.mode == "upsert" and (not of_key or pa.types.is_null(kind)):
            raise SinkError(
                f"sink {sink.name}, {table.source}: no record has a key yet. Write key: with the key columns, such as"
                " [value.id], or mode: insert."
            )
        return list(of_key.values()) if sink.mode == "upsert" else []
    return [_key_column(name, sink, table, kind, of_key, values) for name in sink.key]


def _key_column(
    name: str,
    sink: Sink,
    table: SinkTable,
    kind: pa.DataType,
    of_key: Mapping[str, SourceColumn],
    values: Mapping[str, SourceColumn],
) -> SourceColumn:
    side, dot, field_name = name.partition(".")
    if dot and side == "kafka" and field_name in COORDINATES:
        return _coordinate(field_name, f"kafka_{field_name}")
    if not dot or side == "key":
        column_name = field_name if dot else name
        if column_name in of_key:
            return of_key[column_name]
        if of_key and not pa.types.is_struct(kind) and len(sink.key) == 1:
            (single,) = of_key.values()
            single = replace(single, column=replace(single.column, name=column_name))
            return single if dot or name not in values else _with_field(single, values[name])
    column_name = field_name if dot and side == "value" else name
    if side != "key" and column_name in values:
        return replace(values[column_name], name=None)
    names = ", ".join([*(f"key.{item}" for item in of_key), *(f"value.{item}" for item in values)])
    raise SinkError(
        f"sink {sink.name}, {table.source}: key: names {name}, and the records have {names or 'no fields'}. Correct the name."
    )


def _with_field(key: SourceColumn, item: SourceColumn) -> SourceColumn:
    """The column of a record's own key, and of a field of its value for a record without a key."""
    kind, own_kind, sql = item.column.type, key.column.type, _value(item)
    if kind != own_kind and pa.types.is_string(own_kind) and not (pa.types.is_nested(kind) or pa.types.is_binary(kind)):
        kind, sql = own_kind, f"CAST({sql} AS STRING)"
    return replace(key, sql=f"coalesce({key.sql}, {sql})", has_other=True) if kind == own_kind else key


def _with_before(item: SourceColumn, after: pa.DataType, before: pa.DataType) -> SourceColumn:
    """The column of an envelope's row as a part of the key. A delete has its key in ``before``."""
    assert item.path is not None
    name = item.path[-1]
    at = before.get_field_index(name) if pa.types.is_struct(before) else -1
    if at < 0 or before.field(at).type != after.field(name).type:
        return item
    return replace(item, sql=f"if(value.after IS NULL, value.before.{name_sql(name)}, {item.sql})", path=None)


def _coordinate(name: str, column: str) -> SourceColumn:
    return SourceColumn(Column(column, _COORDINATE_TYPES[name], f"kafka.{name}"), f"kafka.{name}", path=("kafka", name))


def _side(root: str, kind: pa.DataType, side: str, partial: PartialRecords | None = None) -> Iterator[SourceColumn]:
    """The columns of a key or a value: a struct's fields, or the one value itself. ``partial``: of a value."""
    if pa.types.is_null(kind):
        return
    if not pa.types.is_struct(kind):
        yield SourceColumn(Column(side, kind, side), root, path=(root,))
        return
    for item in fields_of(kind):
        name = original_name(item.name)
        note = connect_note_of(item)
        column_type, units = time_of(item, note)
        column = Column(name, column_type, f"{side}.{name}", note=note.name)
        source_name, path = name if side == "value" else None, (*root.split("."), item.name)
        unset = partial.unset(item) if partial is not None else None
        source = SourceColumn(column, f"{root}.{name_sql(item.name)}", source_name, path, units, unset)
        yield source if partial is None else _with_default(source, partial, partial.default(item))


def _with_default(source: SourceColumn, partial: PartialRecords, default: tuple[str, pa.Array] | None) -> SourceColumn:
    """The column with a default (``PartialRecords.default``), unless the target does not hold its value."""
    if default is None:
        return source
    condition, values = default
    try:
        (value,) = _target_values(values, source)
        partial.check_default(value, source.column.note)
    except TargetRefused:
        return source
    sql = text_as_sql(values.cast(pa.string())[0].as_py(), spark_type(values.type).simpleString())
    return replace(source, column=replace(source.column, default=value), default=(condition, sql))


def _value(item: SourceColumn) -> str:
    """The SQL of a column's value as the frame has it."""
    # An expression could fail on Debezium's placeholder.
    default = "" if item.default is None else "WHEN {} THEN {} ".format(*item.default)
    unset = "" if item.unset is None else f"WHEN coalesce({item.unset}, false) THEN NULL "
    sql = f"CASE {default}{unset}ELSE {item.sql} END" if default or unset else item.sql
    return f"to_json({sql}, {_JSON})" if item.column.as_json else sql


def _target_values(values: pa.Array, item: SourceColumn) -> pa.Array:
    column = item.column
    kind = pa.string() if column.as_json else column.type
    if item.units:
        values = in_units(values, item.units, column)
    return checked_times(values if values.type == kind else values.cast(kind), column)
