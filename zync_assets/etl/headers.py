"""The headers that a rule gives its records, as Spark SQL: an array of structs of ``key`` (string) and ``value`` (binary)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.shapes import expression_type
from zync_assets.pipeline import Headers
from zync_assets.sql_text import text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

COLUMN = "array<struct<key:string,value:binary>>"
"""The type of the column, as Spark writes it."""


def headers_sql(headers: Headers) -> str:
    """One expression for all headers. Of a mapping, those that are null are left out."""
    if isinstance(headers, str):
        kept = f"filter({headers}, header -> header.key IS NOT NULL)"
        each = "named_struct('key', header.key, 'value', CAST(header.value AS BINARY))"
        return f"transform({kept}, header -> {each})"
    each = ", ".join(
        f"named_struct('key', {text_sql(name)}, 'value', CAST(({sql}) AS BINARY))" for name, sql in headers.items()
    )
    return f"filter(array({each}), header -> header.value IS NOT NULL)"


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
