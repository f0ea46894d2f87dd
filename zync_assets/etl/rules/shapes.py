"""Shapes of rules as Spark SQL: their types, the common type of an output topic's rules, and the headers of outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from zync_assets.codecs.evolution import wider_type
from zync_assets.codecs.spark_types import original_name, spark_type
from zync_assets.errors import EtlError, FieldMissing
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.pipeline import Headers, Shape
from zync_assets.spark.failures import short
from zync_assets.spark.sql import JSON_TEXT, leaves, name_sql, shape_sql, text_sql

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

Question = tuple[Mapping[str, "DataFrame"], str]
"""An expression over the record frames of some sides, as ``expression_type`` takes them."""
_MISSING = ("FIELD_NOT_FOUND", "UNRESOLVED_COLUMN")
"""Conditions of Spark's errors for a name that a record does not have."""
ITEM = "item"
"""The side of a rule with ``explode`` that is an element of the array."""
_SCHEMAS: WeakKeyDictionary[DataFrame, StructType] = WeakKeyDictionary()
_TYPES: RecentCache[tuple[object, ...], DataType] = RecentCache(10_000)
"""The known types of expressions, by the types of their sides. A question to Spark takes longer than a small batch."""


def expression_type(sides: Mapping[str, DataFrame], sql: str, rule: str, key: str) -> DataType:
    """The type of an expression over record frames, each under its side's name, or one frame's own columns (side "").

    Every field of the type may be null. Raises EtlError with Spark's text if Spark can't resolve the expression, and
    FieldMissing for a missing field.
    """
    from pyspark.errors import AnalysisException

    place = _place(sides, sql)
    result_type = _TYPES.get(place)
    if result_type is None:
        try:
            result_type = _selection(sides, [f"{sql} AS `it`"]).schema["it"].dataType
        except AnalysisException as error:
            kind = FieldMissing if (error.getCondition() or "").startswith(_MISSING) else EtlError
            raise kind(f"rule {rule}, {key}: {sql}: {field_error(error) or short(error)}") from error
        result_type = nullable(result_type)
        _TYPES.put(place, result_type)
    return result_type


def field_error(error: PySparkException) -> str | None:
    """The text for an error about a field of a value without fields; None for another error."""
    parameters = error.getMessageParameters() or {}
    if error.getCondition() != "INVALID_EXTRACT_BASE_FIELD_TYPE" or not parameters.keys() >= {"base", "other"}:
        return None
    base, kind = parameters["base"].strip('"'), parameters["other"].strip('"').lower()
    if base == ITEM:
        return (
            f"an element of the array is {kind}, and has no fields. Write {ITEM} alone, or explode an array of structs."
        )
    cure = f" {JSON_TEXT}" if kind == "string" else ""
    return f"{base} is {kind}, and has no fields. Write it without the field's name, or name a struct.{cure}"


def shape_type(sides: Mapping[str, DataFrame], shape: Shape, rule: str, key: str) -> DataType:
    """The type of a whole shape. Raises EtlError, with the field's name, if Spark can't resolve the field's expression."""
    try:
        return expression_type(sides, shape_sql(shape), rule, key)
    except EtlError:
        for path, sql in leaves(shape, key):
            expression_type(sides, f"({sql})", rule, path)
        raise


def learn_types(questions: Iterable[Question]) -> None:
    """Ask Spark for the types of many expressions at once, because every question to a Spark server is a request.

    If Spark can't resolve an expression, no type is learned. ``expression_type`` then finds the failing expression.
    """
    from pyspark.errors import AnalysisException

    groups: dict[tuple[tuple[str, int], ...], list[Question]] = {}
    unknown = {_place(sides, sql): (sides, sql) for sides, sql in questions}
    for place, (sides, sql) in unknown.items():
        if place not in _TYPES:
            sides_key = tuple((side, id(frame)) for side, frame in sides.items())
            groups.setdefault(sides_key, []).append((sides, sql))
    unlearned = [question for group in groups.values() for question in group]
    if len(unlearned) < 2:
        return
    numbers = iter(range(len(unlearned)))
    try:
        frames = [
            _selection(group[0][0], [f"{sql} AS `it{next(numbers)}`" for _, sql in group]) for group in groups.values()
        ]
        columns = reduce(lambda one, other: one.crossJoin(other), frames).schema
    except AnalysisException:
        return
    if columns.names == [f"it{number}" for number in range(len(unlearned))]:
        for question, item in zip(unlearned, columns, strict=True):
            _TYPES.put(_place(*question), nullable(item.dataType))


def schema_of(frame: DataFrame) -> StructType:
    """A record frame's schema, asked for once."""
    schema = _SCHEMAS.get(frame)
    if schema is None:
        schema = _SCHEMAS[frame] = frame.schema
    return schema


def has_schema(frame: DataFrame) -> bool:
    """Whether a topic's values have a type yet: it has none before the first value that is not null."""
    return schema_of(frame)["value"].dataType.simpleString() != "void"


def note_schema(frame: DataFrame, schema: StructType) -> DataFrame:
    """The frame, its schema known without asking: of ``kafka``, ``key`` and ``value`` at the least."""
    _SCHEMAS[frame] = schema
    return frame


def _place(sides: Mapping[str, DataFrame], sql: str) -> tuple[object, ...]:
    return (sql, *((side, schema_of(frame)) for side, frame in sides.items()))


def _selection(sides: Mapping[str, DataFrame], columns: Sequence[str]) -> DataFrame:
    frames = [
        # A frame of rows has its rows under their alias already.
        frame.selectExpr(f"struct(kafka, key, value) AS `{side}`")
        if side and side not in schema_of(frame).names
        else frame
        for side, frame in sides.items()
    ]
    return reduce(lambda one, other: one.crossJoin(other), frames).selectExpr(*columns)


def nullable(kind: DataType) -> DataType:
    """The type with every field one that may be null: a literal's can't, but the column is null for other rules' records,
    and readers stumble over a required field of a null struct."""
    from pyspark.sql.types import ArrayType, MapType, StructField, StructType

    if isinstance(kind, StructType):
        return StructType([StructField(item.name, nullable(item.dataType)) for item in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(nullable(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(nullable(kind.keyType), nullable(kind.valueType))
    return kind


def uncollated(kind: DataType) -> DataType:
    """The type without collations, which the lake does not keep."""
    from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType

    if isinstance(kind, StructType):
        return StructType([StructField(item.name, uncollated(item.dataType), item.nullable) for item in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(uncollated(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(uncollated(kind.keyType), uncollated(kind.valueType), kind.valueContainsNull)
    return StringType() if isinstance(kind, StringType) else kind


def unify(parts: Iterable[tuple[str, DataType]], topic: str, side: str, table: DataType | None = None) -> DataType:
    """One type with the fields of every rule, in the order of their appearance.

    ``parts``: (rule, its type); ``table``: the type in the staging pool, whose fields come first. A field's type in the pool
    may be narrower or wider than in the rules. Raises EtlError if a field has two types in the rules, or a type to which the
    pool's type can't be widened.
    """
    from pyspark.sql.types import NullType

    path = f"topic {topic}, {side}"
    merged: DataType = NullType()
    owners: dict[str, str] = {}
    for who, kind in parts:
        merged = _unify(merged, kind, path, owners, defaultdict(lambda who=who: who), wide=False)
        _claim(kind, path, owners, who)
    if table is None:
        return merged
    return _unify(table, merged, path, defaultdict(lambda: "the staging pool"), owners, wide=True)


def _claim(kind: DataType, path: str, owners: dict[str, str], who: str) -> None:
    """Note the first rule that gives each field a type."""
    from pyspark.sql.types import ArrayType, MapType, NullType, StructType

    if not isinstance(kind, NullType):
        owners.setdefault(path, who)
    if isinstance(kind, StructType):
        for item in kind:
            _claim(item.dataType, f"{path}.{item.name}", owners, who)
    if isinstance(kind, ArrayType):
        _claim(kind.elementType, f"{path}[]", owners, who)
    if isinstance(kind, MapType):
        _claim(kind.keyType, f"{path} (key)", owners, who)
        _claim(kind.valueType, f"{path}{{}}", owners, who)


def _unify(
    have: DataType, added: DataType, path: str, first: Mapping[str, str], second: Mapping[str, str], *, wide: bool
) -> DataType:
    """``first`` and ``second``: path → the rule, or the pool, that gives the field its type. ``wide``: two types may become a
    wider one, and the structs of two arrays or maps may have other fields."""
    from pyspark.sql.types import ArrayType, MapType, NullType, StructField, StructType

    if isinstance(have, NullType):
        return added
    if isinstance(added, NullType) or have.simpleString() == added.simpleString():
        return have
    if isinstance(have, StructType) and isinstance(added, StructType):
        fields = {item.name: item.dataType for item in have}
        names = {name.lower(): name for name in fields}
        for item in added:
            other_name = names.get(item.name.lower(), item.name)
            field_path = f"{path}.{item.name}"
            if other_name != item.name:
                raise EtlError(
                    f"{path}: {item.name} in {second[field_path]} and {other_name} differ in case alone; the lake can't tell them"
                    " apart. Write them alike."
                )
            field_type = fields.get(item.name, NullType())
            fields[item.name] = _unify(field_type, item.dataType, field_path, first, second, wide=wide)
        return StructType([StructField(name, kind) for name, kind in fields.items()])
    if wide and isinstance(have, ArrayType) and isinstance(added, ArrayType):
        return ArrayType(_unify(have.elementType, added.elementType, f"{path}[]", first, second, wide=wide))
    if wide and isinstance(have, MapType) and isinstance(added, MapType):
        key = _unify(have.keyType, added.keyType, f"{path} (key)", first, second, wide=wide)
        return MapType(key, _unify(have.valueType, added.valueType, f"{path}{{}}", first, second, wide=wide))
    common = wider(have, added) if wide else None
    if common is None:
        cure = "CAST the rule's, or name another output" if wide else "CAST one of them"
        raise EtlError(
            f"{path} is {added.simpleString()} in {second[path]} and {have.simpleString()} in {first[path]}. A field of an"
            f" output topic has one type in all rules: {cure}."
        )
    return common


def wider(one: DataType, other: DataType) -> DataType | None:
    """The narrowest type that holds the numbers of both, inside arrays, maps and structs of the same fields too."""
    from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType

    if one.simpleString() == other.simpleString():
        return one
    if isinstance(one, ArrayType) and isinstance(other, ArrayType):
        inner = wider(one.elementType, other.elementType)
        return None if inner is None else ArrayType(inner)
    if isinstance(one, MapType) and isinstance(other, MapType):
        key, inner = wider(one.keyType, other.keyType), wider(one.valueType, other.valueType)
        return None if key is None or inner is None else MapType(key, inner)
    if isinstance(one, StructType) and isinstance(other, StructType):
        kinds = [wider(a.dataType, b.dataType) for a, b in zip(one, other, strict=False) if a.name == b.name]
        whole = len(one) == len(other) == len(kinds)
        named_kinds = zip(one.names, kinds, strict=False)
        fields = [StructField(name, kind) for name, kind in named_kinds if kind is not None]
        return StructType(fields) if whole and len(fields) == len(kinds) else None
    if isinstance(one, StringType) or isinstance(other, StringType):
        return None
    from pyspark.sql.pandas.types import to_arrow_type

    common = wider_type(to_arrow_type(one), to_arrow_type(other))
    return None if common is None else spark_type(common)


def void_fields(kind: DataType, path: str = "") -> list[str]:
    """The paths of the fields that have no type, since every rule makes them NULL."""
    from pyspark.sql.types import NullType, StructType

    if isinstance(kind, NullType):
        return [path]
    if isinstance(kind, StructType):
        return [
            void_path for item in kind for void_path in void_fields(item.dataType, f"{path}.{item.name}".strip("."))
        ]
    return []


def own_type(kind: DataType, whole: DataType) -> DataType:
    """A rule's type, with the fields that it has and no others; a field that it makes NULL has the topic's type."""
    from pyspark.sql.types import NullType, StructField, StructType

    if isinstance(kind, NullType):
        return whole
    if isinstance(kind, StructType) and isinstance(whole, StructType):
        return StructType([StructField(item.name, own_type(item.dataType, whole[item.name].dataType)) for item in kind])
    return kind


def made_sql(shape: Shape, have: DataType, want: DataType) -> str:
    """A shape as an SQL expression of the topic's wider type ``want``. Fields that the rule lacks are null.

    ``have``: the type of the shape itself.
    """
    from pyspark.sql.types import NullType, StructType

    if isinstance(have, NullType):
        return f"CAST(NULL AS {type_sql(want)})"
    if isinstance(shape, Mapping) and isinstance(have, StructType) and isinstance(want, StructType):
        kinds = {item.name: item.dataType for item in have}
        parts = [
            (item.name, made_sql(shape.get(item.name), kinds.get(item.name, NullType()), item.dataType))
            for item in want
        ]
        return _struct_sql(parts)
    return _widened(shape_sql(shape), have, want)


def _widened(sql: str, have: DataType, want: DataType, depth: int = 0) -> str:
    """An expression, the structs in it with the fields of ``want``. ``depth``: the number of arrays and maps around it."""
    from pyspark.sql.types import ArrayType, MapType, NullType, StructType

    if isinstance(have, NullType):
        return f"CAST(NULL AS {type_sql(want)})"
    if have.simpleString() == want.simpleString():
        return sql
    # Spark's CAST keeps the number of the fields of a struct.
    has_parts, item = (ArrayType, MapType, StructType), f"item_{depth}"
    if isinstance(have, ArrayType) and isinstance(want, ArrayType) and isinstance(want.elementType, has_parts):
        return f"transform({sql}, {item} -> {_widened(item, have.elementType, want.elementType, depth + 1)})"
    if isinstance(have, MapType) and isinstance(want, MapType) and isinstance(want.valueType, has_parts):
        value_sql = _widened(item, have.valueType, want.valueType, depth + 1)
        sql = f"transform_values({sql}, (key_{depth}, {item}) -> {value_sql})"
        has_key = have.keyType.simpleString() == want.keyType.simpleString()
        return sql if has_key else f"CAST({sql} AS {type_sql(want)})"
    if not isinstance(want, StructType):
        return f"CAST({sql} AS {type_sql(want)})"
    kinds = {item.name: item.dataType for item in have} if isinstance(have, StructType) else {}
    parts = [
        (
            field.name,
            _widened(f"{sql}.{name_sql(field.name)}", kinds.get(field.name, NullType()), field.dataType, depth),
        )
        for field in want
    ]
    return f"CASE WHEN {sql} IS NOT NULL THEN {_struct_sql(parts)} END"


def _struct_sql(parts: Sequence[tuple[str, str]]) -> str:
    return f"named_struct({', '.join(f'{text_sql(name)}, {sql}' for name, sql in parts)})"


def type_sql(kind: DataType) -> str:
    """A type as Spark SQL writes it, with every field's name quoted."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{name_sql(item.name)}: {type_sql(item.dataType)}' for item in kind)}>"
    if isinstance(kind, ArrayType):
        return f"array<{type_sql(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{type_sql(kind.keyType)}, {type_sql(kind.valueType)}>"
    return kind.simpleString()


COLUMN = "array<struct<key:string,value:binary>>"
"""The type of the column, as Spark writes it."""


def headers_sql(headers: Headers) -> str:
    """One expression for all headers. Of a mapping, those that are null are left out."""
    if isinstance(headers, str):
        keyed_headers = f"filter({headers}, header -> header.key IS NOT NULL)"
        header_structs = "named_struct('key', header.key, 'value', CAST(header.value AS BINARY))"
        return f"transform({keyed_headers}, header -> {header_structs})"
    header_structs = ", ".join(
        f"named_struct('key', {text_sql(name)}, 'value', CAST(({sql}) AS BINARY))" for name, sql in headers.items()
    )
    return f"filter(array({header_structs}), header -> header.value IS NOT NULL)"


def check_headers(sides: Mapping[str, DataFrame], headers: Headers, rule: str) -> None:
    """EtlError if an expression can't be resolved over the record frames of a rule's sides, or has a type that headers
    don't have."""
    if isinstance(headers, str):
        kind = expression_type(sides, f"({headers})", rule, "headers")
        if not _is_array_of_headers(kind):
            raise EtlError(
                f"rule {rule}, headers: {headers} is {kind.simpleString()}; write a mapping of names to expressions, or an"
                " array of structs of key and value such as in.kafka.headers"
            )
        return
    for name, sql in headers.items():
        kind = expression_type(sides, f"({sql})", rule, f"headers.{name}")
        if kind.simpleString() not in ("string", "binary", "void"):
            raise EtlError(
                f"rule {rule}, headers.{name}: {sql} is {kind.simpleString()}; a header is text or bytes. CAST it AS STRING."
            )


def _is_array_of_headers(kind: DataType) -> bool:
    from pyspark.sql.types import ArrayType, StructType

    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = {item.name.lower(): item.dataType.simpleString() for item in kind.elementType}
    return fields.get("key") == "string" and fields.get("value") in ("string", "binary")


def key_fields(kind: DataType) -> str:
    """The names of a key's fields, nested fields too; an empty text for a key without fields. Keys with different field names
    are different keys, even where the fields are null."""
    from pyspark.sql.types import StructType

    if not isinstance(kind, StructType):
        return ""
    return f"{{{', '.join(sorted(original_name(item.name) + key_fields(item.dataType) for item in kind))}}}"
