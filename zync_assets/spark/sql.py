"""Spark SQL: names, texts and shapes as SQL writes them, and the settings that results depend on.

Results or secrets depend on some Spark settings. Every session gets these settings: a local session, a session on a Spark
Connect server, and a session on the shared server. The module also has the forms of Debezium's placeholder for a value that it
did not send.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from zync_assets.pipeline import Shape

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

AnyShape = TypeVar("AnyShape", bound=Shape)


JSON_TEXT = "For the fields of a JSON text, give the input `format: json` and a `schema:`."
"""The cure where a rule names a field of a text."""


def shape_sql(shape: Shape) -> str:
    """A shape as one Spark SQL expression: a mapping becomes a struct, None a null."""
    if shape is None:
        return "NULL"
    if isinstance(shape, str):
        return f"({shape})"
    fields = ", ".join(f"{text_sql(name)}, {shape_sql(part)}" for name, part in shape.items())
    return f"named_struct({fields})"


def leaves(shape: Shape, path: str) -> Iterator[tuple[str, str]]:
    """The expressions of a shape, each with its place: ``value.address.street``."""
    if isinstance(shape, str):
        yield path, shape
    elif shape is not None:
        for name, part in shape.items():
            yield from leaves(part, f"{path}.{name}")


def edited(shape: AnyShape, edit: Callable[[str], str]) -> AnyShape:
    """A shape, headers or a condition with ``edit(expression)`` in place of each expression."""
    if isinstance(shape, Mapping):
        fields: Any = {name: edited(part, edit) for name, part in shape.items()}
        return fields
    text: Any = shape if shape is None else edit(shape)
    return text


def text_sql(text: str) -> str:
    """A string literal."""
    literal = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{literal}'"


def text_as_sql(text: str, type_sql: str) -> str:
    """A value of a type, from its text: ``text_as_sql("7", "int")`` is ``CAST('7' AS int)``."""
    return f"CAST({text_sql(text)} AS {type_sql})"


def int_sql(number: int) -> str:
    """An int. Spark's parser has no literal for the least one: the minus sign is an operator."""
    return str(number) if number > -(2**31) else f"({number + 1} - 1)"


def long_sql(number: int) -> str:
    """A bigint. Spark's parser has no literal for the least one in every place: the minus sign is an operator."""
    return f"{number}L" if number > -(2**63) else f"({number + 1}L - 1L)"


WHOLE_JSON = (
    r"map('ignoreNullFields', 'false', 'timestampFormat', 'yyyy-MM-dd\'T\'HH:mm:ss[.SSSSSS][XXX]',"
    r" 'timestampNTZFormat', 'yyyy-MM-dd\'T\'HH:mm:ss[.SSSSSS]')"
)
"""Options of ``to_json`` with which different values have different texts: Spark's default leaves out nulls and microseconds."""


def json_sql(sql: str) -> str:
    """A value as JSON text, with which values are compared that Spark does not compare."""
    return f"to_json(named_struct('it', {sql}), {WHOLE_JSON})"


def name_sql(name: str) -> str:
    """A column's or field's name, back-quoted."""
    return f"`{name.replace('`', '``')}`"


MOST_IN = 160
"""Values of a list that Parquet gets as a filter: ``spark.sql.parquet.pushdown.inFilterThreshold``."""
_LISTS = 16


def in_sql(sql: str, values: Sequence[str]) -> str:
    """Whether a value is one of ``values``, which are sorted. Parquet skips pages by it.

    Parquet writes its filter as text for each file, and a list as nested as it is long. Several short lists, in a tree, make less
    text than a long one. Rows are compared with the long list first.
    """
    condition = f"{sql} IN ({', '.join(values)})" if values else "false"
    if not MOST_IN < len(values) <= MOST_IN * _LISTS:
        return condition
    size = -(-len(values) // _LISTS)
    lists = [f"{sql} IN ({', '.join(values[at : at + size])})" for at in range(0, len(values), size)]
    while len(lists) > 1:
        lists = [f"({' OR '.join(lists[at : at + 2])})" for at in range(0, len(lists), 2)]
    return f"{condition} AND {lists[0]}"


def search_sql(count: int, is_reached_sql: Callable[[int], str]) -> str:
    """How many of ``count`` ascending bounds a row has reached, by binary search.

    ``is_reached_sql``: the number of a bound → SQL that says whether the row has reached the bound.

    >>> search_sql(2, lambda at: f"x >= {(10, 20)[at]}")
    'IF(x >= 20, 2, IF(x >= 10, 1, 0))'
    """

    def search(low: int, high: int) -> str:
        if low == high:
            return str(low)
        middle = (low + high) // 2
        return f"IF({is_reached_sql(middle)}, {search(middle + 1, high)}, {search(low, middle)})"

    return search(0, count)


def tuple_sql(values: Sequence[str]) -> str:
    """Several numbers that Spark compares as a tuple; a single one stays a number."""
    return (
        values[0]
        if len(values) == 1
        else f"struct({', '.join(f'{value} AS v{at}' for at, value in enumerate(values))})"
    )


def path_sql(path: Sequence[str]) -> str:
    """A field's path as Spark writes it, ``value.address.street``; names with dots are in back quotes."""
    return ".".join(name_sql(name) if "." in name or "`" in name else name for name in path)


_HEX = "hex:"


def placeholder_bytes(text: str) -> bytes:
    """The bytes of a placeholder as Debezium's property says it: UTF-8, or hexadecimal after ``hex:``. ValueError."""
    return bytes.fromhex(text.removeprefix(_HEX)) if text.startswith(_HEX) else text.encode()


def is_placeholder(column: str, kind: DataType, placeholder: str) -> str | None:
    """Whether a value is Debezium's placeholder, as a condition that may be null; None if no value of the type can be.

    PostgreSQL does not log large values that an update leaves unchanged (TOAST). Debezium puts ``unavailable.value.placeholder``
    there, in a form of the column's type (``UnchangedToastedPlaceholder`` of its PostgreSQL connector):

    - a string: the placeholder itself
    - binary: the placeholder's bytes
    - an array of strings or binary: the placeholder as the only item
    - an array of UUIDs: the name-based UUID of the placeholder's bytes
    - an array of numbers, dates or times: an element for each byte
    - an hstore, as a map or as JSON: the placeholder mapped to itself

    Arrays of booleans are ignored, because an array with a true for each byte may be a value.
    """
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType

    raw = placeholder_bytes(placeholder)
    text = raw.decode(errors="replace")
    if isinstance(kind, StringType):
        return f"{column} IN ({', '.join(map(text_sql, placeholder_texts(placeholder)))})"
    if isinstance(kind, BinaryType):
        return f"{column} <=> {_bytes_sql(raw)}"
    if isinstance(kind, ArrayType):
        return " OR ".join(f"{column} <=> {form}" for form in _placeholder_arrays(kind.elementType, raw, text)) or None
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType):
        item_test = f"try_element_at({column}, {text_sql(text)}) = {text_sql(text)}"
        return f"(size({column}) = 1 AND {item_test})"
    return None


def placeholder_texts(placeholder: str) -> tuple[str, str]:
    """The forms of the placeholder as a text: the placeholder, and the JSON of an hstore that maps it to itself."""
    text = placeholder_bytes(placeholder).decode(errors="replace")
    as_hstore = json.dumps({text: text}, ensure_ascii=False, separators=(",", ":"))
    return text, as_hstore


def _placeholder_arrays(item_type: DataType, raw: bytes, text: str) -> list[str]:
    from pyspark.sql import types as T

    numbers = [str(int.from_bytes([byte], "big", signed=True)) for byte in raw]
    forms: list[list[str]] = []
    if isinstance(item_type, T.StringType):
        forms = [[text_sql(text)], [text_sql(str(_uuid(raw)))], [text_sql(number) for number in numbers]]
    elif isinstance(item_type, T.BinaryType):
        forms = [[_bytes_sql(raw)]]
    elif isinstance(item_type, T.DecimalType) and item_type.precision >= 3:
        # The unscaled number is the byte.
        digits = [f"{Decimal(number).scaleb(-item_type.scale):f}" for number in numbers]
        forms = [[f"CAST('{decimal}' AS {item_type.simpleString()})" for decimal in digits]]
    elif isinstance(item_type, T.ByteType | T.ShortType | T.IntegerType | T.LongType | T.FloatType | T.DoubleType):
        forms = [[f"CAST({number} AS {item_type.simpleString()})" for number in numbers]]
    elif isinstance(item_type, T.DateType):
        forms = [[f"date_from_unix_date({number})" for number in numbers]]
    elif isinstance(item_type, T.TimestampType):
        forms = [[f"{unit}({number})" for number in numbers] for unit in ("timestamp_millis", "timestamp_micros")]
    return [f"array({', '.join(form)})" for form in forms]


def _bytes_sql(raw: bytes) -> str:
    return f"X'{raw.hex()}'"


def _uuid(raw: bytes) -> uuid.UUID:
    """Java's ``UUID.nameUUIDFromBytes``: version 3 without a namespace."""
    return uuid.UUID(bytes=hashlib.md5(raw, usedforsecurity=False).digest(), version=3)


PINS: Mapping[str, str] = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "false",
    "spark.sql.storeAssignmentPolicy": "ANSI",
    "spark.sql.requireAllClusterKeysForCoPartition": "false",
    # The parser's rules for quotes, escapes, reserved words and literals.
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.ansi.enforceReservedKeywords": "false",
    "spark.sql.ansi.relationPrecedence": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.legacy.bangEqualsNot": "false",
    "spark.sql.legacy.consecutiveStringLiterals.enabled": "false",
    "spark.sql.legacy.duplicateBetweenInput": "false",
    "spark.sql.legacy.exponentLiteralAsDecimal.enabled": "false",
    # Dates and times.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.timeType.enabled": "false",
    "spark.sql.legacy.fromDayTimeString.enabled": "false",
    "spark.sql.legacy.interval.enabled": "false",
    "spark.sql.legacy.timeParserPolicy": "CORRECTED",
    "spark.sql.legacy.typeCoercion.datetimeToString.enabled": "false",
    # Numbers.
    "spark.sql.decimalOperations.allowPrecisionLoss": "true",
    "spark.sql.legacy.allowNegativeScaleOfDecimal": "false",
    "spark.sql.legacy.decimal.retainFractionDigitsOnTruncate": "false",
    "spark.sql.legacy.literal.pickMinimumPrecision": "true",
    # Texts and bytes.
    "spark.sql.charAsVarchar": "false",
    "spark.sql.preserveCharVarcharTypeInfo": "false",
    "spark.sql.readSideCharPadding": "true",
    "spark.sql.chunkBase64String.enabled": "true",
    "spark.sql.function.concatBinaryAsString": "false",
    "spark.sql.function.eltOutputAsString": "false",
    "spark.sql.icu.caseMappings.enabled": "true",
    "spark.sql.legacy.castComplexTypesToString.enabled": "false",
    "spark.sql.legacy.charVarcharAsString": "false",
    "spark.sql.legacy.codingErrorAction": "false",
    "spark.sql.legacy.javaCharsets": "false",
    "spark.sql.legacy.lpadRpadAlwaysReturnString": "false",
    "spark.sql.legacy.noCharPaddingInPredicate": "false",
    "spark.sql.legacy.truncateForEmptyRegexSplit": "false",
    # Arrays, maps, JSON and variants.
    "spark.sql.mapKeyDedupPolicy": "EXCEPTION",
    "spark.sql.mergeNestedTypeCoercion.enabled": "false",
    "spark.sql.legacy.allowHashOnMapType": "false",
    "spark.sql.legacy.allowNullComparisonResultInArraySort": "false",
    "spark.sql.legacy.createEmptyCollectionUsingStringType": "false",
    "spark.sql.legacy.disableMapKeyNormalization": "false",
    "spark.sql.legacy.doLooseUpcast": "false",
    "spark.sql.legacy.followThreeValuedLogicInArrayExists": "true",
    "spark.sql.legacy.negativeIndexInArrayInsert": "false",
    "spark.sql.legacy.sizeOfNull": "true",
    "spark.sql.json.enableExactStringParsing": "true",
    "spark.sql.json.enablePartialResults": "true",
    "spark.sql.jsonGenerator.ignoreNullFields": "true",
    "spark.sql.jsonGenerator.writeNullIfWithDefaultValue": "true",
    "spark.sql.legacy.json.allowEmptyString.enabled": "false",
    "spark.sql.legacy.useLegacyXMLParser": "false",
    "spark.sql.variant.allowDuplicateKeys": "false",
    # Files: what a column of one is, and that none is passed over.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.fieldId.read.enabled": "false",
    "spark.sql.parquet.ignoreVariantAnnotation": "false",
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    "spark.sql.parquet.int96AsTimestamp": "true",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96TimestampConversion": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.writeLegacyFormat": "false",
    "spark.sql.legacy.parquet.nanosAsLong": "false",
    "spark.sql.legacy.parquet.returnNullStructIfAllFieldsMissing": "false",
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
    # Readers' and writers' options stand in plans. Spark's own pattern has no `fs.azure.account.key`.
    "spark.sql.redaction.options.regex": "(?i)url|secret|password|token|key",
}
"""Setting → value. Unless a comment says why, the value is the default of Spark 4.1."""

_LEGACY = "spark.sql.legacy."


def contradictions(settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Settings that may not be given, each with the reason."""
    for name, value in settings.items():
        pin = PINS.get(name)
        if pin is not None and value.lower() != pin.lower():
            yield name, f"is always {pin} here, because results or secrets depend on it; remove the line"
        elif pin is None and name.startswith(_LEGACY):
            yield name, "makes Spark compute as an older version did, so results would depend on it; remove the line"


def excerpt(sql: str) -> str:
    """The text of an expression, cut where it is long."""
    return sql if len(sql) <= 200 else f"{sql[:200]}…"
