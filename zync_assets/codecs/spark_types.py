"""Arrow types as Spark's, without a JVM, and Arrow tables as Spark's frames.

PySpark's own ``from_arrow_type`` fails on a struct with a field ``wkb``, which is what Debezium's geometries are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_NAMES: tuple[tuple[pa.DataType, str], ...] = (
    (pa.bool_(), "boolean"),
    (pa.int8(), "tinyint"),
    (pa.int16(), "smallint"),
    (pa.int32(), "int"),
    (pa.int64(), "bigint"),
    (pa.float32(), "float"),
    (pa.float64(), "double"),
    (pa.string(), "string"),
    (pa.large_string(), "string"),
    (pa.binary(), "binary"),
    (pa.large_binary(), "binary"),
    (pa.date32(), "date"),
    (pa.null(), "void"),
)


def spark_ddl(type: pa.DataType) -> str:
    """The type as Spark writes it, e.g. ``struct<`a`:bigint,`b`:array<string>>``; SchemaError if Spark has none."""
    kinds = pa.types
    if kinds.is_struct(type):
        fields = [type.field(index) for index in range(type.num_fields)]
        return "struct<" + ",".join(f"{_quoted(field.name)}:{spark_ddl(field.type)}" for field in fields) + ">"
    if kinds.is_list(type) or kinds.is_large_list(type):
        return f"array<{spark_ddl(type.value_type)}>"
    if kinds.is_map(type):
        return f"map<{spark_ddl(type.key_type)},{spark_ddl(type.item_type)}>"
    if kinds.is_decimal128(type):
        return f"decimal({type.precision},{type.scale})"
    if kinds.is_timestamp(type):
        return "timestamp" if type.tz else "timestamp_ntz"
    for known, name in _NAMES:
        if type == known:
            return name
    raise SchemaError(f"Spark has no type for {type}")


def spark_schema(schema: pa.Schema) -> StructType:
    """A table's columns as PySpark's object, everything nullable; SchemaError for a type that Spark lacks."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, spark_type(field.type)) for field in schema])


def arrow_frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """The rows of a table as a frame, with the table's columns and types even where it has no row."""
    # Spark Connect takes no table without rows unless it is given the schema.
    return spark.createDataFrame(table, spark_schema(table.schema))


def listed_frame(spark: SparkSession, schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> DataFrame:
    """The rows as a frame. Each row has the values of ``schema``'s fields, in order.

    The rows go to the JVM as Arrow. Spark would read a list in Python workers, which takes a third of a second.
    """
    columns = [pa.array([row[at] for row in rows], kind) for at, kind in enumerate(schema.types)]
    return arrow_frame(spark, pa.Table.from_arrays(columns, schema=schema))


def spark_type(type: pa.DataType) -> DataType:
    """The type as PySpark's object, with every field nullable; SchemaError for a type that Spark lacks."""
    from pyspark.sql import types as spark

    kinds = pa.types
    if kinds.is_struct(type):
        fields = [type.field(index) for index in range(type.num_fields)]
        return spark.StructType([spark.StructField(field.name, spark_type(field.type)) for field in fields])
    if kinds.is_list(type) or kinds.is_large_list(type):
        return spark.ArrayType(spark_type(type.value_type))
    if kinds.is_map(type):
        return spark.MapType(spark_type(type.key_type), spark_type(type.item_type))
    if kinds.is_decimal128(type):
        return spark.DecimalType(type.precision, type.scale)
    made: dict[str, DataType] = {
        "boolean": spark.BooleanType(),
        "tinyint": spark.ByteType(),
        "smallint": spark.ShortType(),
        "int": spark.IntegerType(),
        "bigint": spark.LongType(),
        "float": spark.FloatType(),
        "double": spark.DoubleType(),
        "string": spark.StringType(),
        "binary": spark.BinaryType(),
        "date": spark.DateType(),
        "timestamp": spark.TimestampType(),
        "timestamp_ntz": spark.TimestampNTZType(),
        "void": spark.NullType(),
    }
    return made[spark_ddl(type)]


def arrow_type(kind: DataType) -> pa.DataType:
    """The Arrow type of a Spark type, everything nullable; SchemaError for one that the lake has no form for."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    nullable = _nullable(kind)
    try:
        made = to_arrow_type(nullable)
        spark_ddl(made)
    except (PySparkException, SchemaError):
        raise SchemaError(f"the lake has no type for Spark's {kind.simpleString()}; CAST it to another") from None
    return made


def _nullable(kind: DataType) -> DataType:
    from pyspark.sql import types as spark

    if isinstance(kind, spark.StructType):
        return spark.StructType([spark.StructField(item.name, _nullable(item.dataType)) for item in kind])
    if isinstance(kind, spark.ArrayType):
        return spark.ArrayType(_nullable(kind.elementType))
    if isinstance(kind, spark.MapType):
        return spark.MapType(_nullable(kind.keyType), _nullable(kind.valueType))
    return kind


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
