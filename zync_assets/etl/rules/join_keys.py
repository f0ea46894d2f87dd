"""Join keys: the common type of both sides, and the hash by which pending records are found.

Spark's ``=`` decides which records pair. The hash finds the pending records that may be equal. Two keys that are equal for
``=`` must therefore have the same hash, in whichever batches they come. A column may get a wider type while records are
pending, and the other side's type may be unknown when a record becomes pending. The hash therefore ignores the width of a
number, and the differences between letters that a collation ignores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.rules.shapes import expression_type, type_sql, wider
from zync_assets.pipeline import Denorm
from zync_assets.spark.sql import name_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_WITHOUT_EQUALITY = ("map", "variant", "interval", "geometry", "geography")
"""Spark's names of the types whose values it does not compare; ``interval`` is that of months, days and microseconds."""


def key_types(rule: Denorm, frames: Mapping[str, DataFrame]) -> list[DataType]:
    """The type of each part of the join key: of two numbers the wider, since a source alters one of two columns first.

    ``frames``: side → record frame, of those sides that have a schema by now. EtlError if an expression of ``join-on``
    can't be resolved, if the two of an equality have different types, or if Spark has no ``=`` for the type.
    """
    found: list[DataType] = []
    for pair in rule.join_on if frames else ():
        asked = {side: sql for side, sql in zip(("left", "right"), pair, strict=True) if side in frames}
        kinds = [expression_type({side: frames[side]}, f"({sql})", rule.name, "join-on") for side, sql in asked.items()]
        for sql, kind in zip(asked.values(), kinds, strict=True):
            if not _has_equality(kind):
                raise EtlError(
                    f"rule {rule.name}, join-on: {sql} is {kind.simpleString()}, and Spark has no `=` for such values."
                    " Join on a field of it, or on its text: to_json(…)."
                )
        one = _key_type(kinds[0], kinds[-1])
        if one is None:
            cure = "COLLATE both alike" if any(_is_collated(kind) for kind in kinds) else "CAST one of them"
            raise EtlError(
                f"rule {rule.name}, join-on: {pair[0]} is {kinds[0].simpleString()} and {pair[1]} is"
                f" {kinds[1].simpleString()}. {cure}."
            )
        found.append(one)
    return found


def _key_type(one: DataType, other: DataType) -> DataType | None:
    """The type of a part of a join key; a side that is always null pairs with nothing, whatever its type."""
    from pyspark.sql.types import NullType, StringType

    if isinstance(one, NullType):
        return StringType() if isinstance(other, NullType) else other
    return one if isinstance(other, NullType) else wider(one, other)


def hash_sql(names: Sequence[str], kinds: Sequence[DataType]) -> str:
    """The hash of a join key in the columns ``names`` of the types ``kinds``; null where a part of the key is null."""
    known = " AND ".join(f"{name} IS NOT NULL" for name in names)
    hashed = ", ".join(_hashed_sql(name, kind) for name, kind in zip(names, kinds, strict=True))
    return f"CASE WHEN {known} THEN xxhash64({hashed}) END"


def join_text(rule: Denorm, kinds: Sequence[DataType]) -> str:
    """The definition of a rule's join hashes, as JSON: the rule's topics, its ``join-on``, and the hashed types.

    The account keeps the text beside the pending records. Pending records of another text have other hashes.
    """
    types = [kind.simpleString() if _is_collated(kind) else _hashed_type(kind).simpleString() for kind in kinds]
    return json.dumps({"left": rule.left, "right": rule.right, "on": rule.join_on, "hashed": types})


def is_hashed_as_ever(kinds: Sequence[DataType]) -> bool:
    """Whether the hashes of such keys are those of the versions that kept no ``join_text``."""
    return not any(_is_collated(kind) or _has_number_in_array(kind) for kind in kinds)


def _hashed_sql(sql: str, kind: DataType, depth: int = 0) -> str:
    """The SQL expression that is hashed for a value. Values of any types that are equal for ``=`` give equal results."""
    from pyspark.sql.types import ArrayType, StringType, StructType

    if not _is_collated(kind):
        return f"CAST({sql} AS {type_sql(_hashed_type(kind))})"
    if isinstance(kind, ArrayType):
        item = f"item{depth}"
        return f"transform({sql}, {item} -> {_hashed_sql(item, kind.elementType, depth + 1)})"
    if isinstance(kind, StructType):
        return (
            f"struct({', '.join(_hashed_sql(f'{sql}.{name_sql(each.name)}', each.dataType, depth) for each in kind)})"
        )
    assert isinstance(kind, StringType)
    text, name = f"CAST({sql} AS STRING)", str(kind.collation)
    if name.endswith("_RTRIM"):
        text, name = f"rtrim({text})", name.removesuffix("_RTRIM")
    # UTF8_LCASE compares the lower case of each letter by itself. lower() makes another sigma at the end of a word.
    known = {"UTF8_BINARY": text, "UTF8_LCASE": f"translate(lower({text}), '\u03c2', '\u03c3')"}
    # Spark has no public function for ICU's sort keys. Every text then has the same hash, and `=` finds the equal texts.
    return known.get(name, "CAST(NULL AS STRING)")


def _hashed_type(kind: DataType) -> DataType:
    """A type as it is hashed: every number is a double, since Spark rounds an integer and a decimal of one value alike. Two
    numbers that become one double share a hash."""
    from pyspark.sql.types import ArrayType, DoubleType, NumericType, StructField, StructType

    if isinstance(kind, StructType):
        return StructType([StructField(item.name, _hashed_type(item.dataType)) for item in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(_hashed_type(kind.elementType))
    return DoubleType() if isinstance(kind, NumericType) else kind


def _is_collated(kind: DataType) -> bool:
    """Whether a text in the type has a collation of its own."""
    from pyspark.sql.types import StringType

    return any(isinstance(part, StringType) and part.collation != "UTF8_BINARY" for part in _parts(kind))


def _has_number_in_array(kind: DataType) -> bool:
    """Whether an array in the type holds numbers that are not doubles."""
    from pyspark.sql.types import ArrayType, DoubleType, NumericType

    return any(
        isinstance(part, NumericType) and not isinstance(part, DoubleType)
        for array in _parts(kind)
        if isinstance(array, ArrayType)
        for part in _parts(array)
    )


def _has_equality(kind: DataType) -> bool:
    return not any(part.typeName() in _WITHOUT_EQUALITY for part in _parts(kind))


def _parts(kind: DataType) -> list[DataType]:
    """The type, and all types in its arrays and structs."""
    from pyspark.sql.types import ArrayType, StructType

    inner = [item.dataType for item in kind] if isinstance(kind, StructType) else []
    inner += [kind.elementType] if isinstance(kind, ArrayType) else []
    return [kind, *(part for each in inner for part in _parts(each))]
