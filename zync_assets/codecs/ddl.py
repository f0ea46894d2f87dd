"""Spark's DDL for types (``a int, b struct<c: string>`` or a single type) as Arrow types, without a JVM."""

from __future__ import annotations

import re
from collections import Counter

import pyarrow as pa

from zync_assets.errors import SchemaError

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
_SHOWN = 200
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
    found = _SPACE.match(text, at)
    return found.end() if found else at


class _Parser:
    def __init__(self, ddl: str) -> None:
        self.ddl = ddl if len(ddl) <= _SHOWN else f"{ddl[:_SHOWN]}…"
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

    def error(self, what: str, position: int | None = None) -> SchemaError:
        if position is None:
            position = self.tokens[self.at][2] if self.at < len(self.tokens) else self.size
        return SchemaError(f"the DDL type {self.ddl!r}: {what} at character {position + 1}")

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
        found = self.one_type()
        self.depth -= 1
        return found

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
        given = self.numbers(2) if self.peek() == "(" else []
        precision, scale = [*given, *[10, 0][len(given) :]]
        if not 1 <= precision <= 38 or not 0 <= scale <= precision:
            raise self.error(f"decimal({precision},{scale}) is out of range; a precision up to 38 and a scale up to it")
        return pa.decimal128(precision, scale)

    def numbers(self, most: int) -> list[int]:
        self.take("(")
        found: list[int] = []
        while True:
            if not re.fullmatch("[0-9]{1,9}", self.peek()) or len(found) == most:
                raise self.error("a number expected" if len(found) < most else "')' expected")
            found.append(int(self.peek()))
            self.at += 1
            if self.peek() != ",":
                break
            self.at += 1
        self.take(")")
        return found
