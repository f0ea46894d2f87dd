"""Look-ups: the values that rows must have, and the fields of a view's key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.etl.rules.shapes import type_sql
from zync_assets.pipeline import Shape
from zync_assets.spark.sql import int_sql, listed_sql, long_sql, name_sql, shape_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField


def checkpoint(frame: DataFrame, *, eager: bool = True) -> DataFrame:
    """The frame, with its rows computed only once: now if ``eager``, else at the first use. Its plan reads the computed rows,
    however long the plan before was. Otherwise, plans that contain plans would grow without end."""
    from pyspark import StorageLevel

    return frame.localCheckpoint(eager=eager, storageLevel=StorageLevel.DISK_ONLY)


@dataclass(frozen=True)
class KeyFilter:
    """A filter of an alias's rows by the values of expressions.

    ``own``: the expressions over the alias. ``frame``: the allowed values, in the columns ``z_k0``, ``z_k1`` …; None if the
    filter is a ``span`` alone. ``column``: a plain column among the expressions. ``values``: the allowed values of the column;
    ``listed``: the same values as SQL. ``span``: the least and the greatest allowed value of the column, in place of a list.
    ``null_safe``: whether null equals null.
    """

    frame: DataFrame | None
    own: Sequence[str]
    column: str | None = None
    listed: Sequence[str] = ()
    null_safe: bool = False
    span: tuple[int, int] | None = None
    values: pa.Array | pa.ChunkedArray | None = None

    def within(self, rows: DataFrame) -> DataFrame:
        """The rows (``row``) with one of the listed values, or in the span."""
        return rows if self.column is None else rows.where(self._condition(f"row.{name_sql(self.column)}"))

    @property
    def is_exact(self) -> bool:
        """Whether ``within`` alone gives the rows."""
        return self.column is not None and (self.span is None or self.frame is None)

    def keep(self, frame: DataFrame, alias: str) -> DataFrame:
        """The rows with one of the values. ``alias``: the column of the rows."""
        from pyspark.sql import functions as F

        if self.frame is None or self.is_exact:
            return frame.where(self._condition(f"{name_sql(alias)}.{name_sql(self.column or '')}"))
        sign = "<=>" if self.null_safe else "="
        equal = " AND ".join(f"({sql}) {sign} z_k{at}" for at, sql in enumerate(self.own))
        return frame.join(self.frame, F.expr(equal), "left_semi")

    def _condition(self, sql: str) -> str:
        if self.span is not None:
            return f"{sql} BETWEEN {long_sql(self.span[0])} AND {long_sql(self.span[1])}"
        return listed_sql(sql, self.listed)


def listed_values(kind: DataType, values: Sequence[Any]) -> list[str] | None:
    """Values of a plain column as SQL; None for a column of another type than integers and texts."""
    from pyspark.sql import types as spark

    if isinstance(kind, spark.LongType | spark.IntegerType) and all(type(value) is int for value in values):
        if isinstance(kind, spark.LongType):
            return [long_sql(value) for value in values]
        return [int_sql(value) for value in values if -(2**31) <= value < 2**31]
    if kind == spark.StringType() and all(type(value) is str for value in values):
        return [text_sql(value) for value in values]
    return None


def with_list(key_filter: KeyFilter, item: StructField | None, table: pa.Table) -> KeyFilter | None:
    """The filter with fetched values in a list. ``item``: the plain column that must equal them. None if they can't be listed."""
    if item is None or len(key_filter.own) > 1 or (key_filter.null_safe and table["z_k0"].null_count):
        return None
    value_list = listed_values(item.dataType, sorted(set(table["z_k0"].drop_null().to_pylist())))
    return (
        None
        if value_list is None
        else replace(key_filter, frame=None, column=item.name, listed=value_list, values=table["z_k0"])
    )


def is_kept(kind: DataType, other: DataType) -> bool:
    """Whether a value is the same after a cast to another type, if it equals a value of that type.

    Spark compares two types by a common one. A text equals a number of another spelling, 0.0 equals -0.0, and a collation makes
    texts equal.
    """
    from pyspark.sql import types as spark

    numbers: list[DataType] = [spark.ByteType(), spark.ShortType(), spark.IntegerType(), spark.LongType()]
    if kind in numbers and other in numbers:
        return numbers.index(kind) <= numbers.index(other)
    whole = spark.StringType(), spark.BooleanType(), spark.DateType(), spark.TimestampType(), spark.TimestampNTZType()
    return kind == other and (kind in whole or isinstance(kind, spark.DecimalType | spark.BinaryType))


def plain_field(row: DataType, sql: str, alias: str) -> StructField | None:
    """The field of a row that an expression is; None if the expression is no plain column of the alias, or is not there."""
    from pyspark.sql.types import StructType

    name = plain_column(sql, alias)
    if name is None or not isinstance(row, StructType):
        return None
    return next((item for item in row if item.name.lower() == name.lower()), None)


def integral_column(row: DataType, sql: str, alias: str) -> str | None:
    """The column of integers that an expression is; None if it is none."""
    from pyspark.sql.types import IntegralType

    item = plain_field(row, sql, alias)
    return item.name if item is not None and isinstance(item.dataType, IntegralType) else None


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
    if isinstance(shape, str):
        return substitutes.get(shape, shape)
    return None if shape is None else {name: substituted(part, substitutes) for name, part in shape.items()}


def cast_sql(shape: Shape, kind: DataType) -> str:
    """A key as SQL, each field with its type: an equal expression may have a narrower one."""
    from pyspark.sql.types import StructType

    if isinstance(shape, Mapping) and isinstance(kind, StructType):
        types = {item.name: item.dataType for item in kind}
        return f"named_struct({', '.join(f'{text_sql(name)}, {cast_sql(part, types[name])}' for name, part in shape.items())})"
    return f"CAST({shape_sql(shape)} AS {type_sql(kind)})"


def plain_column(sql: str, alias: str) -> str | None:
    """The name of the column, if the expression is a plain column of the alias."""
    before, dot, name = sql.strip().partition(".")
    plain = dot and before.strip("`").lower() == alias.lower() and name.strip("`").isidentifier()
    return name.strip("`") if plain else None
