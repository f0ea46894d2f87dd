"""Types and names as Spark and the lake hold them, without a JVM.

Delta and Parquet forbid some characters in a column's name, and Spark takes names for equal that differ in case alone. Such a
field has another name in the lake. ``%`` and two hexadecimal digits replace each byte of a character, as in a URL.

    first name      first%20name
    Name, name      Name, %6Eame     (the second of two that differ in case alone)
    5%20off         5%2520off        (a % that two hexadecimal digits follow)

Every other name stays as it is. ``original_name`` is the way back.

Arrow types become Spark types and Spark's DDL (``a int, b struct<c: string>`` or a single type), and back. Arrow tables become
Spark's frames. PySpark's own ``from_arrow_type`` fails on a struct with a field ``wkb``, and Debezium's geometries have this
field.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_FORBIDDEN = re.compile(r"[ ,;{}()=\x00-\x1f\x7f]")
_ESCAPE_PATTERN = re.compile(rf"{_FORBIDDEN.pattern}|%(?=[0-9A-Fa-f]{{2}})")
_CODE_PATTERN = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


def lake_name(name: str, siblings: Collection[str] = ()) -> str:
    """The name of a field in the lake, beside ``siblings``: the lake's names of the fields before it in its struct."""
    names = {sibling.lower() for sibling in siblings}
    candidate = escape(name)
    letter_places = [at for at, letter in enumerate(name) if letter.lower() != letter.upper()]
    for count in range(1, len(letter_places) + 1):
        if candidate.lower() not in names:
            break
        last = letter_places[count - 1] + 1
        candidate = "".join(
            _percent(character) if character == "%" or character.lower() != character.upper() else escape(character)
            for character in name[:last]
        )
        candidate += escape(name[last:])
    return candidate


def escape(name: str) -> str:
    """The name with each forbidden character encoded."""
    return _ESCAPE_PATTERN.sub(lambda match: _percent(match[0]), name)


def has_forbidden(name: str) -> bool:
    """Whether no column of the lake can have the name."""
    return _FORBIDDEN.search(name) is not None


def original_name(name: str) -> str:
    """The name that a field of the lake has in its topic."""
    return _CODE_PATTERN.sub(lambda match: bytes.fromhex(match[0].replace("%", "")).decode(errors="replace"), name)


def _percent(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode())


_TOKEN = re.compile(r"\s*(?:`((?:[^`]|``)*)`|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|([\w]+)|([<>(),:]))")

_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
}
MAX_DEPTH = 100
"""Levels of a type, as of an Avro schema."""
MAX_TYPES = 50_000
_EXCERPT_LENGTH = 200
"""Characters of a DDL text that a message repeats."""
_SPACE = re.compile(r"\s*")


def parse_ddl(ddl: str) -> pa.DataType:
    """The Arrow type of a Spark DDL string: a struct of its columns, or the one type that it names.

    It may be MAX_DEPTH deep and have MAX_TYPES types. NOT NULL and COMMENT are read and left out: everything in the lake
    is nullable. SchemaError says where it stops making sense.
    """
    parser = _Parser(ddl)
    single = parser.try_single()
    return single if single is not None else parser.columns()


def _end_of_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


class _Parser:
    def __init__(self, ddl: str) -> None:
        self.ddl = ddl if len(ddl) <= _EXCERPT_LENGTH else f"{ddl[:_EXCERPT_LENGTH]}…"
        self.size = len(ddl)
        self.depth = 0
        self.types = 0
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while (start := _end_of_space(ddl, at)) < len(ddl):
            match = _TOKEN.match(ddl, at)
            if match is None:
                raise self.error("unexpected character", start)
            kind = ("name", "text", "word", "sign")[(match.lastindex or 1) - 1]
            text = match.group(match.lastindex or 1)
            self.tokens.append(
                (kind, text.replace("``", "`") if kind == "name" else text, match.end() - len(match.group().lstrip()))
            )
            at = match.end()
        self.at = 0

    def error(self, problem: str, position: int | None = None) -> SchemaError:
        if position is None:
            position = self.tokens[self.at][2] if self.at < len(self.tokens) else self.size
        return SchemaError(f"the DDL type {self.ddl!r}: {problem} at character {position + 1}")

    def peek(self) -> str:
        """The next sign or word in lower case; "" at the end or at a quoted name."""
        if self.at >= len(self.tokens) or self.tokens[self.at][0] in ("name", "text"):
            return ""
        return self.tokens[self.at][1].lower()

    def take(self, sign: str) -> None:
        if self.peek() != sign:
            raise self.error(f"{sign!r} expected")
        self.at += 1

    def try_single(self) -> pa.DataType | None:
        """The type, if the whole text is one."""
        try:
            type = self.type()
        except SchemaError:
            type = None
        if type is None or self.at < len(self.tokens):
            # `int int` is a column; `array<int` is a broken type, which columns() would blame on its first word.
            if type is None and len(self.tokens) > 1 and self.tokens[1][1] in ("<", "("):
                self.at = self.depth = 0
                self.type()
            self.at = self.depth = 0
            return None
        return type

    def columns(self) -> pa.DataType:
        type = self.fields("")
        if self.at < len(self.tokens):
            raise self.error("',' or the end expected")
        return type

    def fields(self, end: str) -> pa.DataType:
        fields: list[pa.Field] = []
        while not (end and not fields and self.peek() == end):
            fields.append(self.field())
            if self.peek() != ",":
                break
            self.at += 1
        if twice := [name for name, count in Counter(field.name for field in fields).items() if count > 1]:
            raise SchemaError(f"the DDL type {self.ddl!r}: two fields are called {twice[0]!r}")
        return pa.struct(fields)

    def field(self) -> pa.Field:
        if self.at >= len(self.tokens) or self.tokens[self.at][0] not in ("name", "word"):
            raise self.error("a column name expected")
        name = self.tokens[self.at][1]
        if not name:
            raise self.error("the column's name is empty; a column name")
        self.at += 1
        if self.peek() == ":":
            self.at += 1
        type = self.type()
        if self.peek() == "not":
            self.at += 1
            self.take("null")
        if self.peek() == "comment":
            self.at += 1
            if self.at >= len(self.tokens) or self.tokens[self.at][0] != "text":
                raise self.error("the comment's text in quotes expected")
            self.at += 1
        return pa.field(name, type)

    def type(self) -> pa.DataType:
        if self.depth == MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels")
        if self.types == 2 * MAX_TYPES:  # it may be read twice: as one type, and as columns
            raise self.error(f"more than {MAX_TYPES} types")
        self.types += 1
        self.depth += 1
        kind = self.one_type()
        self.depth -= 1
        return kind

    def one_type(self) -> pa.DataType:
        word = self.peek()
        if word == "":
            raise self.error("a type expected")
        if word == "array":
            self.at += 1
            self.take("<")
            inner = self.type()
            self.take(">")
            return pa.list_(inner)
        if word == "map":
            self.at += 1
            self.take("<")
            key = self.type()
            self.take(",")
            item = self.type()
            self.take(">")
            return pa.map_(key, item)
        if word == "struct":
            self.at += 1
            self.take("<")
            inner = self.fields(">")
            self.take(">")
            return inner
        if word in ("decimal", "dec", "numeric"):
            self.at += 1
            return self.decimal()
        if word in ("varchar", "char", "character"):
            self.at += 1
            self.numbers(1)
            return pa.string()
        if word not in _SIMPLE:
            raise self.error(f"unknown type {self.tokens[self.at][1]!r}")
        self.at += 1
        return _SIMPLE[word]

    def decimal(self) -> pa.DataType:
        arguments = self.numbers(2) if self.peek() == "(" else []
        precision, scale = [*arguments, *[10, 0][len(arguments) :]]
        if not 1 <= precision <= 38 or not 0 <= scale <= precision:
            raise self.error(f"decimal({precision},{scale}) is out of range; a precision up to 38 and a scale up to it")
        return pa.decimal128(precision, scale)

    def numbers(self, most: int) -> list[int]:
        self.take("(")
        numbers: list[int] = []
        while True:
            if not re.fullmatch("[0-9]{1,9}", self.peek()) or len(numbers) == most:
                raise self.error("a number expected" if len(numbers) < most else "')' expected")
            numbers.append(int(self.peek()))
            self.at += 1
            if self.peek() != ",":
                break
            self.at += 1
        self.take(")")
        return numbers


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
        return "struct<" + ",".join(f"{_quote(field.name)}:{spark_ddl(field.type)}" for field in fields) + ">"
    if kinds.is_list(type) or kinds.is_large_list(type):
        return f"array<{spark_ddl(type.value_type)}>"
    if kinds.is_map(type):
        return f"map<{spark_ddl(type.key_type)},{spark_ddl(type.item_type)}>"
    if kinds.is_decimal128(type):
        return f"decimal({type.precision},{type.scale})"
    if kinds.is_timestamp(type):
        return "timestamp" if type.tz else "timestamp_ntz"
    for simple_type, name in _NAMES:
        if type == simple_type:
            return name
    raise SchemaError(f"Spark has no type for {type}")


def spark_schema(schema: pa.Schema) -> StructType:
    """A table's columns as PySpark's object, everything nullable; SchemaError for a type that Spark lacks."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, spark_type(field.type)) for field in schema])


def arrow_frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """The rows of a table as a frame, with the table's columns and types even where it has no row."""
    # Spark ends at the first batch without rows, and loses the batches after it: the table becomes a single batch.
    # Spark Connect takes no table without rows unless it is given the schema.
    return spark.createDataFrame(table.combine_chunks(), spark_schema(table.schema))


def rows_frame(spark: SparkSession, schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> DataFrame:
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
    simple_types: dict[str, DataType] = {
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
    return simple_types[spark_ddl(type)]


def arrow_type(kind: DataType) -> pa.DataType:
    """The Arrow type of a Spark type, everything nullable; SchemaError for one that the lake has no form for."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    nullable = _nullable(kind)
    try:
        column_type = to_arrow_type(nullable)
        spark_ddl(column_type)
    except (PySparkException, SchemaError):
        raise SchemaError(f"the lake has no type for Spark's {kind.simpleString()}; CAST it to another") from None
    return column_type


def _nullable(kind: DataType) -> DataType:
    from pyspark.sql import types as spark

    if isinstance(kind, spark.StructType):
        return spark.StructType([spark.StructField(item.name, _nullable(item.dataType)) for item in kind])
    if isinstance(kind, spark.ArrayType):
        return spark.ArrayType(_nullable(kind.elementType))
    if isinstance(kind, spark.MapType):
        return spark.MapType(_nullable(kind.keyType), _nullable(kind.valueType))
    return kind


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
