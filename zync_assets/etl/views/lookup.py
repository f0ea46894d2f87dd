"""Look-ups: the values that rows must have, and the fields of a view's key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zync_assets.etl.rules.shapes import type_sql
from zync_assets.etl.views.state import Range, within_sql
from zync_assets.pipeline import Shape
from zync_assets.spark.sql import name_sql, shape_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType


def kept(frame: DataFrame) -> DataFrame:
    """The frame, computed now and once. Its plan is short, whatever it was made from: plans of plans would grow without end."""
    from pyspark import StorageLevel

    return frame.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)


@dataclass(frozen=True)
class Values:
    """Values that rows of an alias must have. ``frame``: the columns ``k0``, ``k1`` …; ``own``: the expressions over the alias
    that must equal them; ``ranges``: of the plain column ``column``, outside of which no row is wanted."""

    frame: DataFrame
    own: Sequence[str]
    column: str | None = None
    ranges: Sequence[Range] = ()
    null_safe: bool = False

    def within(self, rows: DataFrame) -> DataFrame:
        """The rows (``row``) within the ranges."""
        return rows if self.column is None else rows.where(within_sql(f"row.{name_sql(self.column)}", self.ranges))

    def keep(self, frame: DataFrame) -> DataFrame:
        """The rows with one of the values."""
        from pyspark.sql import functions as F

        sign = "<=>" if self.null_safe else "="
        equal = " AND ".join(f"({sql}) {sign} k{at}" for at, sql in enumerate(self.own))
        return frame.join(self.frame, F.expr(equal), "left_semi")


def key_paths(shape: Shape, path: str) -> list[tuple[str, str]]:
    """(expression, its place below ``path``) of each field of a key."""
    if isinstance(shape, str):
        return [(shape, path)]
    found: list[tuple[str, str]] = []
    for name, part in (shape or {}).items():
        found += key_paths(part, f"{path}.{name_sql(name)}")
    return found


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
