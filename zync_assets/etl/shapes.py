"""What a rule makes: shapes as Spark SQL, the types that they have, and one type for an output topic over all its rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.pipeline import Shape

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


def shape_sql(shape: Shape) -> str:
    """A shape as one Spark SQL expression: a mapping becomes a struct, None a null."""
    if shape is None:
        return "NULL"
    if isinstance(shape, str):
        return f"({shape})"
    fields = ", ".join(f"'{quoted(name)}', {shape_sql(part)}" for name, part in shape.items())
    return f"named_struct({fields})"


def quoted(name: str) -> str:
    """A text as it stands between single quotes in Spark SQL."""
    return name.replace("\\", "\\\\").replace("'", "\\'")


def analysed(frame: DataFrame, sql: str, rule: str, key: str) -> DataType:
    """The type of an expression over a frame's columns; EtlError, in Spark's words, if Spark can't resolve it."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        return frame.selectExpr(f"{sql} AS `it`").schema["it"].dataType
    except (AnalysisException, ParseException) as error:
        raise EtlError(f"rule {rule}, {key}: {sql}: {short(error)}") from error


def short(error: Exception) -> str:
    """The first line of what Spark says, without its plan and its error class's link."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def unify(parts: Iterable[tuple[str, DataType]], topic: str, side: str) -> DataType:
    """One type that holds the fields of all, in the order in which they appear. ``parts``: (who says so, type).

    Raises EtlError if a field has two types.
    """
    from pyspark.sql.types import NullType

    merged: DataType = NullType()
    owners: dict[str, str] = {}
    for who, kind in parts:
        merged = _unify(merged, kind, f"topic {topic}, {side}", owners, who)
        _claim(kind, f"topic {topic}, {side}", owners, who)
    return merged


def _claim(kind: DataType, path: str, owners: dict[str, str], who: str) -> None:
    """Note who was the first to give each field a type."""
    from pyspark.sql.types import NullType, StructType

    if not isinstance(kind, NullType):
        owners.setdefault(path, who)
    if isinstance(kind, StructType):
        for item in kind:
            _claim(item.dataType, f"{path}.{item.name}", owners, who)


def _unify(have: DataType, more: DataType, path: str, owners: Mapping[str, str], who: str) -> DataType:
    from pyspark.sql.types import NullType, StructField, StructType

    if isinstance(have, NullType):
        return more
    if isinstance(more, NullType) or have.simpleString() == more.simpleString():
        return have
    if isinstance(have, StructType) and isinstance(more, StructType):
        fields = {item.name: item.dataType for item in have}
        written = {name.lower(): name for name in fields}
        for item in more:
            other = written.get(item.name.lower(), item.name)
            if other != item.name:
                raise EtlError(
                    f"{path}: {item.name} in {who} and {other} differ in case alone; the lake can't tell them apart. Write"
                    " them alike."
                )
            known = fields.get(item.name, NullType())
            fields[item.name] = _unify(known, item.dataType, f"{path}.{item.name}", owners, who)
        return StructType([StructField(name, kind) for name, kind in fields.items()])
    raise EtlError(
        f"{path} is {more.simpleString()} in {who} and {have.simpleString()} in {owners[path]}. A field of an output topic"
        " has one type in all rules: CAST one of them."
    )


def void_fields(kind: DataType, path: str = "") -> list[str]:
    """The paths of the fields that have no type, since every rule makes them NULL."""
    from pyspark.sql.types import NullType, StructType

    if isinstance(kind, NullType):
        return [path]
    if isinstance(kind, StructType):
        return [found for item in kind for found in void_fields(item.dataType, f"{path}.{item.name}".strip("."))]
    return []


def own_type(kind: DataType, whole: DataType) -> DataType:
    """A rule's type, with the fields that it has and no others; a field that it makes NULL has the topic's type."""
    from pyspark.sql.types import NullType, StructField, StructType

    if isinstance(kind, NullType):
        return whole
    if isinstance(kind, StructType) and isinstance(whole, StructType):
        return StructType([StructField(item.name, own_type(item.dataType, whole[item.name].dataType)) for item in kind])
    return kind


def project(column: Column, have: DataType, want: DataType) -> Column:
    """A column of a rule's type as one of the topic's wider type; fields that the rule lacks are null."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import NullType, StructType

    if isinstance(have, NullType):
        return F.lit(None).cast(want)
    if have.simpleString() == want.simpleString() or not isinstance(want, StructType):
        return column
    names = {item.name: item.dataType for item in have} if isinstance(have, StructType) else {}
    fields = [
        (
            project(column.getField(item.name), names[item.name], item.dataType)
            if item.name in names
            else F.lit(None).cast(item.dataType)
        ).alias(item.name)
        for item in want
    ]
    return F.when(column.isNull(), F.lit(None).cast(want)).otherwise(F.struct(*fields))
