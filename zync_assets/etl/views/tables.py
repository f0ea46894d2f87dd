"""Tables of views: how an input's records become rows, and the columns that hold the rows in the staging table.

A table is an input topic with the expressions for its key, its row, and its deletion. All views of a pool that define a table
alike share the table's state. The rows are two groups of files in the staging table:

    topic=#state:<table>      versions of rows: the last record of a key in a batch. A deleted row is null.
    topic=#replaced:<table>   the versions that a later batch replaced, whole again

Indexes by other columns than the key: ``state_index``.

The live version of a key is the version that no file of replaced versions has. A version is known by its record (partition and
offset). Any condition on rows therefore finds a version and its replacement alike. A look-up needs no order of the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import (
    NO_ROW,
    Default,
    default_of,
    deletes_sql,
    fields_of,
    is_envelope,
    lake_type_of,
    type_at,
)
from zync_assets.codecs.spark_types import arrow_type, parse_ddl, spark_type
from zync_assets.errors import EtlError, RegistryError
from zync_assets.etl.rules.shapes import expression_type, note_schema, schema_of, shape_type, type_sql, unify
from zync_assets.lake.head import Head, TableEntry
from zync_assets.lake.raw import ORDER, RawState
from zync_assets.lake.raw_files import KAFKA_TYPE, ORDER_TYPE
from zync_assets.lake.staging import INDEX, REPLACED, STATE, StagingState
from zync_assets.lake.storage import wider_schema
from zync_assets.pipeline import Input, Pipeline, Rule, Shape, SideFormat, ViewTable
from zync_assets.queries import view_definition
from zync_assets.spark import frames
from zync_assets.spark.sql import edited, name_sql, shape_sql, text_as_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

VERSION = "version"
"""The column that says which record made a version of a row."""
ROW_VERSION = "z_version"
"""The version of a row, beside columns that a user names."""
VERSION_TYPE = pa.struct(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("high", pa.int64()),
        ("low", pa.int64()),
        ("offsets", pa.list_(pa.int64())),
    ]
)
"""``partition``, ``offset``: of the record; ``high``, ``low``: its place in the order of outputs; ``offsets``: those of all
records of the key in the batch of the version."""


REMOVED = "removed"
"""The prefix of the entry of a view that the pipeline file no longer has."""


@dataclass(frozen=True)
class Table:
    """A table of views. ``name``: the name of its state; ``topic``: its input topic; ``defaults``: the columns whose default the
    rows from before the column have. The other fields are those of ``pipeline.ViewTable``."""

    name: str
    topic: str
    key: Shape
    row: str | None
    deleted: str | None
    by_time: bool = False
    defaults: tuple[str, ...] = ()

    @property
    def versions(self) -> str:
        """The group of the files with versions of rows."""
        return f"{STATE}{self.name}"

    @property
    def replaced(self) -> str:
        """The group of the files with replaced versions."""
        return f"{REPLACED}{self.name}"

    def index(self, column: str) -> str:
        """The group of the files with the index by a column of the rows."""
        return f"{INDEX}{self.name}:{column.lower()}"

    @property
    def key_column(self) -> str:
        return f"state-key:{self.name}"

    @property
    def row_column(self) -> str:
        return f"state-row:{self.name}"

    @property
    def definition(self) -> str:
        """The table's definition as JSON, for the account's head."""
        others = ({"by_time": True} if self.by_time else {}) | ({"defaults": self.defaults} if self.defaults else {})
        return json.dumps({"key": self.key, "row": self.row, "deleted": self.deleted, **others}, sort_keys=True)


def table_of(item: ViewTable) -> Table:
    """The table of an alias. A table with the default expressions has its topic's name."""
    plain = item.key == "key" and item.row is None and item.deleted is None and not item.by_time
    text = json.dumps([item.key, item.row, item.deleted, *([True] if item.by_time else [])], sort_keys=True)
    name = item.topic if plain else f"{item.topic}#{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return Table(name, item.topic, item.key, item.row, item.deleted, item.by_time)


def stored_tables(head: Head) -> list[Table]:
    """The tables whose state a pool has."""
    return [stored_table(name, item) for name, item in sorted(head.tables.items())]


def stored_table(name: str, entry: TableEntry) -> Table:
    """The table whose state a pool has under a name."""
    definition = json.loads(entry.definition)
    defaults = tuple(definition.pop("defaults", ()))
    return Table(name, entry.topic, **definition, defaults=defaults)


_ROWS = {"value": (), "value.after": ("after",)}
"""``row`` of a table → the path of the row in the value, where the row has the columns of the topic's records."""


def column_defaults(table: Table, raw: RawState | None) -> dict[str, Default]:
    """The columns of a table's rows that came after some of the raw records, with their defaults. None of a row that another
    expression of the user makes."""
    if raw is None or not raw.with_ids or "value" not in raw.schema.names:
        return {}
    value = raw.schema.field("value").type
    path = _ROWS.get(table.row or ("value.after" if is_envelope(value) else "value"))
    row = type_at(value, path) if path is not None else None
    items = fields_of(row) if row is not None and pa.types.is_struct(row) else []
    return {item.name: default for item in items if (default := default_of(item)) is not None}


def stored_type(table: Table, state: StagingState) -> TableType | None:
    """The types of a table's state as it is stored; None before its first row."""
    have = {item.name: item for item in state.schema}
    names = (ORDER, VERSION, table.key_column, table.row_column)
    if not all(name in have for name in names):
        return None
    key, row = (spark_type(have[name].type) for name in names[2:])
    return TableType(table, key, row, "", "", "", pa.schema([have[name] for name in names]))


def tables_of(rules: Iterable[Rule]) -> dict[str, Table]:
    """The tables of the rules, by name."""
    tables = (table_of(item) for rule in rules for item in rule.tables)
    return {table.name: table for table in tables}


def definition_of(rule: Rule) -> str:
    """The definition of a view as JSON: everything that its result depends on."""
    assert rule.view is not None
    return rule.view.definition or lake_definition(rule)


def lake_definition(rule: Rule) -> str:
    """As ``definition_of``, by the names that the expressions have now."""
    assert rule.view is not None
    return view_definition(rule.view, rule.key, rule.value, rule.headers, rule.out)


def _output_of(entry: str) -> str | None:
    """The output topic of an entry of ``Head.views``. Pools of older versions have none for a view that was removed."""
    return None if entry == REMOVED else json.loads(entry)[-1]


def _entry(views: Mapping[str, str], rule: Rule, rules: Iterable[Rule]) -> str | None:
    """The entry of a view's result: the entry of its name, or that of a view which had its output topic under another name."""
    if rule.name in views:
        return views[rule.name]
    present = {other.name for other in rules if other.view is not None and other.out == rule.out}
    former = [text for name, text in views.items() if name not in present and _output_of(text) == rule.out]
    return next((text for text in former if text in _entries(rule)), former[0] if former else None)


def _entries(rule: Rule) -> tuple[str, ...]:
    """The entries of a view whose definition is unchanged. Pools of older versions have the names of the file or of the lake."""
    return definition_of(rule), lake_definition(rule), rule.view.file_definition if rule.view is not None else ""


def has_result(views: Mapping[str, str], rule: Rule, rules: Iterable[Rule]) -> bool:
    """Whether a pool has the result of a view as the rule is now, under whatever name. ``views``: as in ``Head.views``;
    ``rules``: of the pool."""
    return _entry(views, rule, rules) in _entries(rule)


def has_changed(views: Mapping[str, str], rule: Rule, rules: Iterable[Rule]) -> bool:
    """Whether a view's output topic has another result: of the view as it was, or of a view that it replaces."""
    return _entry(views, rule, rules) not in (None, *_entries(rule))


def new_views(rules: Sequence[Rule], state: StagingState | None) -> tuple[str, ...]:
    """The views without a result whose tables are in the state of the pool. Their results need no new record."""
    if state is None:
        return ()
    return tuple(
        rule.name
        for rule in rules
        if rule.view is not None
        and _entry(state.head.views, rule, rules) is None
        and all(_is_known(table_of(item), state) for item in rule.tables)
    )


def _is_known(table: Table, state: StagingState) -> bool:
    return table.name in state.head.tables and stored_type(table, state) is not None


def removed_views(views: Mapping[str, str], results: Mapping[str, str], rules: Iterable[Rule]) -> dict[str, str]:
    """The entries of views that the pipeline file no longer has, and whose results are not maintained. An entry keeps the
    view's output topic until another view has the topic. ``views``: the entries before; ``results``: the entries of the views
    that have a result now."""
    names, outputs = {rule.name for rule in rules}, set(map(_output_of, results.values()))
    removed_outputs = {name: _output_of(text) for name, text in views.items() if name not in names}
    return {
        name: json.dumps([REMOVED, output])
        for name, output in removed_outputs.items()
        if output is None or output not in outputs
    }


@dataclass(frozen=True)
class TableType:
    """A table whose topic has a schema. ``key``, ``row``: the types in the records at hand; ``schema``: the columns of the
    table's files, old and new types united."""

    table: Table
    key: DataType
    row: DataType
    key_sql: str
    row_sql: str
    deleted_sql: str
    schema: pa.Schema = field(repr=False)

    @property
    def state_key(self) -> DataType:
        return spark_type(self.schema.field(self.table.key_column).type)

    @property
    def state_row(self) -> DataType:
        return spark_type(self.schema.field(self.table.row_column).type)


_ENVELOPE_ROW = f"""CASE
  WHEN value IS NOT NULL AND value.after IS NULL AND coalesce(value.op, '') NOT IN ('d', 't')
  THEN raise_error({text_sql(NO_ROW)}) ELSE value.after END"""
"""The row of an envelope. A flattened record in a topic of envelopes has none, and must not delete the row of its key. A truncate
fails because it has no key."""


def table_type(table: Table, frame: DataFrame, state: StagingState | None, raw: RawState | None = None) -> TableType:
    """The types of a table. ``frame``: the records of its topic, whose values have a schema; ``raw``: their raw table, for
    the defaults of columns.

    Raises EtlError for an expression that Spark can't resolve, and FieldMissing for a missing field.
    """
    value = schema_of(frame)["value"].dataType
    row_sql = table.row or (_ENVELOPE_ROW if is_envelope(arrow_type(value)) else "value")
    is_deleted = f"coalesce({table.deleted}, false)" if table.deleted is not None else deletes_sql(arrow_type(value))
    deleted = f"({is_deleted})"
    key = shape_type({"": frame}, table.key, f"table {table.name}", "key")
    row = expression_type({"": frame}, f"({row_sql})", f"table {table.name}", "row")
    expression_type({"": frame}, deleted, f"table {table.name}", "deleted")
    for side, kind in (("key", key), ("row", row)):
        if kind.simpleString() == "void":
            raise EtlError(
                f"table {table.name}: its {side} has no type, because all values are null. Give the table another {side}:"
            )
    columns = [pa.field(ORDER, ORDER_TYPE), pa.field(VERSION, VERSION_TYPE)]
    have = {item.name: item for item in state.schema} if state else {}
    for side, name, kind in (("key", table.key_column, key), ("row", table.row_column, row)):
        before = spark_type(have[name].type) if name in have else None
        columns.append(pa.field(name, arrow_type(unify([(f"table {table.name}", kind)], table.topic, side, before))))
    # With the notes of the staging table's columns, by which Spark finds files with narrower types.
    schema = wider_schema(pa.schema([have[item.name] for item in columns if item.name in have]), pa.schema(columns))
    defaults = {name: item for name, item in column_defaults(table, raw).items() if name in table.defaults}
    values = {name: (frames.schema_condition(item.ids), item.text) for name, item in defaults.items()}
    row_sql = with_values(f"({row_sql})", row, values)
    return TableType(table, key, row, shape_sql(table.key), row_sql, deleted, schema)


def with_values(row_sql: str, row: DataType, values: Mapping[str, tuple[str, str]]) -> str:
    """A row with other values in some columns, as SQL. ``values``: column → a condition, and the value as text if it is true."""
    from pyspark.sql.types import StructType

    if not values or not isinstance(row, StructType):
        return row_sql
    parts: list[str] = []
    for item in row:
        name, value = name_sql(item.name), f"{row_sql}.{name_sql(item.name)}"
        if item.name in values:
            condition, text = values[item.name]
            value = f"CASE WHEN {condition} THEN {text_as_sql(text, type_sql(item.dataType))} ELSE {value} END"
        parts.append(f"{value} AS {name}")
    is_other = " OR ".join(dict.fromkeys(f"({condition})" for condition, _ in values.values()))
    new_row = f"CAST(struct({', '.join(parts)}) AS {type_sql(row)})"
    return f"(CASE WHEN ({is_other}) AND {row_sql} IS NOT NULL THEN {new_row} ELSE {row_sql} END)"


def declared_frame(pipeline: Pipeline, spark: SparkSession, topic: str, frame: DataFrame | None) -> DataFrame | None:
    """The records of a table's topic. Keys or values that have not come yet have the type that the pipeline file declares, or
    that of the registry's newest schema. A LEFT JOIN then has a result before its table has a row. ``frame``: the records; None
    without a raw table."""
    from pyspark.sql.types import NullType, StructField, StructType

    schema = None if frame is None else schema_of(frame)
    absent = [side for side in ("key", "value") if schema is None or isinstance(schema[side].dataType, NullType)]
    sides = {side: kind for side in absent if (kind := _declared(pipeline, pipeline.input(topic), side)) is not None}
    if frame is None or schema is None:
        columns = [f"CAST(NULL AS {type_sql(spark_type(KAFKA_TYPE))}) AS kafka"]
        columns += [f"CAST(NULL AS {type_sql(kind)}) AS {side}" for side, kind in sides.items()]
        return spark.range(0).selectExpr(*columns) if len(sides) == len(absent) else None
    if not sides:
        return frame
    columns = [f"CAST(NULL AS {type_sql(kind)}) AS {side}" for side, kind in sides.items()]
    typed_frame = frame.selectExpr(f"* EXCEPT ({', '.join(sides)})", *columns)
    return note_schema(
        typed_frame,
        StructType([StructField(column.name, sides.get(column.name, column.dataType)) for column in schema]),
    )


def _declared(pipeline: Pipeline, item: Input, side: str) -> DataType | None:
    """The type of keys or values that is known before a record; None where the records tell it."""
    # Spark's workers import this module. The parser of SQL would cost each of them memory.
    from zync_assets.pipeline_file.missing_fields import newest_type

    form: SideFormat = getattr(item, side)
    if form.format == "json" and form.ddl is not None:
        return spark_type(lake_type_of(parse_ddl(form.ddl)))
    plain = {"string": pa.string(), "bytes": pa.binary(), "json": pa.string()}
    if form.format in plain:
        return spark_type(plain[form.format])
    try:
        newest = None if item.shape is not None else newest_type(pipeline, item, side, ())
    except RegistryError:
        return None
    return None if newest is None else spark_type(lake_type_of(newest))


def leaves_of(sql: str, kind: DataType) -> Iterator[tuple[str, DataType]]:
    """The fields of a key, each as SQL, with its type."""
    from pyspark.sql.types import StructType

    if not isinstance(kind, StructType):
        yield sql, kind
        return
    for item in kind:
        yield from leaves_of(f"{sql}.{name_sql(item.name)}", item.dataType)


def key_paths(shape: Shape, path: str) -> list[tuple[str, str]]:
    """(expression, its place below ``path``) of each field of a key."""
    if isinstance(shape, str):
        return [(shape, path)]
    paths: list[tuple[str, str]] = []
    for name, part in (shape or {}).items():
        paths += key_paths(part, f"{path}.{name_sql(name)}")
    return paths


def key_columns(
    shape: Shape, path: str, column: pa.Array | pa.ChunkedArray
) -> list[tuple[tuple[str, str], pa.Array | pa.ChunkedArray]]:
    """The fields of a key (``key_paths``), each with its values in a column of keys."""
    if isinstance(shape, str):
        return [((shape, path), column)]
    columns: list[tuple[tuple[str, str], pa.Array | pa.ChunkedArray]] = []
    for at, (name, part) in enumerate((shape or {}).items()):
        columns += key_columns(part, f"{path}.{name_sql(name)}", pc.struct_field(column, [at]))
    return columns


def substituted(shape: Shape, substitutes: Mapping[str, str]) -> Shape:
    """The shape with other expressions in place of some."""
    return edited(shape, lambda sql: substitutes.get(sql, sql))


def cast_sql(shape: Shape, kind: DataType) -> str:
    """A key as SQL, each field with its type: an equal expression may have a narrower one."""
    from pyspark.sql.types import StructType

    if isinstance(shape, Mapping) and isinstance(kind, StructType):
        types = {item.name: item.dataType for item in kind}
        return f"named_struct({', '.join(f'{text_sql(name)}, {cast_sql(part, types[name])}' for name, part in shape.items())})"
    return f"CAST({shape_sql(shape)} AS {type_sql(kind)})"


def place_sql(sql: str, kind: DataType) -> str:
    """The place of a key in the order of a state's files: struct(high, low), of its first two fields.

    A number keeps its place when its column gets a wider type. Texts have the place of their hash.
    """
    parts = [_number_sql(*leaf) for leaf in leaves_of(sql, kind)][:2]
    high, low = [*parts, "0L", "0L"][:2]
    return f"named_struct('high', {high}, 'low', {low})"


def _number_sql(sql: str, kind: DataType) -> str:
    from pyspark.sql import types as spark

    if isinstance(kind, spark.IntegralType | spark.BooleanType):
        number = f"CAST({sql} AS BIGINT)"
    elif isinstance(kind, spark.NumericType):
        number = f"try_cast(floor({sql}) AS BIGINT)"
    elif isinstance(kind, spark.DateType):
        number = f"CAST(unix_date({sql}) AS BIGINT)"
    elif isinstance(kind, spark.TimestampType):
        number = f"unix_micros({sql})"
    elif isinstance(kind, spark.StringType | spark.BinaryType):
        number = f"xxhash64(CAST({sql} AS BINARY))"
    else:
        number = f"xxhash64(to_json(named_struct('it', {sql})))"
    return f"coalesce({number}, 0L)"


def null_sql(sql: str, kind: DataType) -> str:
    """Whether a key is null, or one of its fields."""
    return " OR ".join(f"{leaf} IS NULL" for leaf, _ in leaves_of(sql, kind))


def without_versions(
    frame: DataFrame, replaced: DataFrame, *, few: bool = False, version: str = "version"
) -> DataFrame:
    """The rows whose version is not replaced. ``few``: Spark copies the replaced versions to each task; ``version``: the column
    of both frames."""
    from pyspark.sql import functions as F

    replaced = F.broadcast(replaced) if few else replaced
    replaced_places = replaced.selectExpr(f"{version}.partition AS z_partition", f"{version}.offset AS z_offset")
    is_replaced = F.expr(f"{version}.partition = z_partition AND {version}.offset = z_offset")
    return frame.join(replaced_places, is_replaced, "left_anti")
