"""Outputs that can't be encoded, and the columns that the source left out. ETL finds both before it numbers the outputs. Publish
would stop at the offset of an output without an encoding for ever.

A cheap SQL condition marks suspicious outputs, and a check of every text finds texts that are not UTF-8. Spark casts binary to
a string without a look at the bytes, and Arrow and Parquet carry the bytes on. Spark tasks encode the marked outputs with the
code of publish. Most batches mark no output and encode nothing. The condition is true for every record that can't be encoded,
and for few other records: JSON has no NaN and no infinities, most languages have no years past 9999, and a record has a largest
size.

PostgreSQL keeps large values apart (TOAST) and does not log those that an update leaves unchanged. Debezium puts a placeholder
there, ``unavailable.value.placeholder`` in its configuration. A record omits an output field that is the placeholder, so that the
placeholder overwrites no value downstream. ``spark.sql.is_placeholder`` has the forms of the placeholder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.arrays import isolate
from zync_assets.etl.account import Labels
from zync_assets.etl.failures import Failure, Place
from zync_assets.etl.output_types import OutputType
from zync_assets.etl.rules.output_schemas import parse_group
from zync_assets.kafka.topics import RecordLimits, known_limits, new_topic_config, topic_states
from zync_assets.lake import staging
from zync_assets.pipeline import SOURCE_HEADER, Output, Pipeline
from zync_assets.publish.encoding import MOST_SOURCES, RowSchema, encoder_of, payloads, row_schema, without_fields
from zync_assets.spark.sql import is_placeholder, name_sql, path_sql, placeholder_texts, text_sql

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


def text_errors(array: pa.Array) -> dict[int, str]:
    """Index → what is wrong, of the values that hold text which is not UTF-8, at any depth."""
    _, errors = isolate(array, _validated, pa.ArrowInvalid)
    return {index: "text that is not UTF-8" if "UTF8" in error else error for index, error in errors.items()}


def _validated(array: pa.Array) -> pa.Array:
    array.validate(full=True)
    return array


def left_out(column: str, kind: DataType, side: str, placeholder: str | None) -> tuple[str, str] | None:
    """A column's SQL with null for unavailable fields, and the SQL of their paths beneath ``side`` (null: none).

    None where no field of the type can hold the placeholder, which then costs nothing.
    """
    from pyspark.sql.types import StructType

    if placeholder is None or not isinstance(kind, StructType):
        return None
    fields = list(_fields(column, kind, (side,), placeholder))
    if not fields:
        return None
    # Short, since every batch plans it: IF takes null for false, and one IN looks at all strings.
    texts = [inner for _, inner, _, is_text in fields if is_text]
    is_unavailable = " OR ".join(
        [f"{form} IN ({', '.join(texts)})" for form in map(text_sql, placeholder_texts(placeholder)) if texts]
        + [condition for _, _, condition, is_text in fields if not is_text]
    )
    paths = ", ".join(f"IF({condition}, {text_sql(path_sql(path))}, NULL)" for path, _, condition, _ in fields)
    value = f"IF({is_unavailable}, {_cleared(column, kind, placeholder)}, {column})"
    return value, f"IF({is_unavailable}, array_compact(array({paths})), NULL)"


def _fields(
    column: str, kind: StructType, path: tuple[str, ...], placeholder: str
) -> Iterator[tuple[tuple[str, ...], str, str, bool]]:
    """Path, SQL, condition of each field that can hold the placeholder, and whether it is a string; at any depth of structs."""
    from pyspark.sql.types import StringType, StructType

    for item in kind:
        inner, name = f"{column}.{name_sql(item.name)}", (*path, item.name)
        if isinstance(item.dataType, StructType):
            yield from _fields(inner, item.dataType, name, placeholder)
        elif (condition := is_placeholder(inner, item.dataType, placeholder)) is not None:
            yield name, inner, condition, isinstance(item.dataType, StringType)


def _cleared(column: str, kind: StructType, placeholder: str) -> str:
    from pyspark.sql.types import StructType

    parts: list[str] = []
    for item in kind:
        inner = f"{column}.{name_sql(item.name)}"
        condition = is_placeholder(inner, item.dataType, placeholder)
        if isinstance(item.dataType, StructType):
            inner = _cleared(inner, item.dataType, placeholder)
        elif condition is not None:
            inner = f"IF({condition}, NULL, {inner})"
        parts.append(f"{text_sql(item.name)}, {inner}")
    return f"IF({column} IS NULL, NULL, named_struct({', '.join(parts)}))"


_ESCAPED = 6
"""The most bytes that a byte of text takes in JSON (``\\u0001``); in base64 it is less than two."""
_NUMBER = 48
"""More than any number or time takes."""


def odd_sql(
    sql: str, kind: DataType, form: str, depth: int = 0, *, times: bool = True, texts: bool = False
) -> str | None:
    """Whether a value holds something that may have no form, as a condition (null: no); None if its type can't.

    ``sql``: an expression of the type; ``form``: the output's format. ``times``: a time may have no form. Without times, what the
    condition finds has none. ``texts``: texts are looked at too.
    """
    from pyspark.sql.types import (
        ArrayType,
        BinaryType,
        DateType,
        DoubleType,
        FloatType,
        MapType,
        StringType,
        StructType,
        TimestampNTZType,
        TimestampType,
    )

    if isinstance(kind, FloatType | DoubleType) and form == "json":
        return f"(isnan({sql}) OR abs({sql}) = double('Infinity'))"
    if isinstance(kind, BinaryType) and form == "string":
        return f"(NOT is_valid_utf8(CAST({sql} AS STRING)))"
    if texts and isinstance(kind, StringType):
        return f"(NOT is_valid_utf8({sql}))"
    if times and isinstance(kind, DateType | TimestampType | TimestampNTZType):
        return f"(year({sql}) NOT BETWEEN 2 AND 9998)"

    def inside(sql: str, kind: DataType, depth: int) -> str | None:
        return odd_sql(sql, kind, form, depth, times=times, texts=texts)

    def exists(sql: str, kind: DataType) -> str | None:
        inner = inside(f"x{depth}", kind, depth + 1)
        return None if inner is None else f"exists({sql}, x{depth} -> {inner})"

    conditions: list[str | None] = []
    if isinstance(kind, StructType):
        conditions = [inside(f"{sql}.{name_sql(item.name)}", item.dataType, depth) for item in kind]
    elif isinstance(kind, ArrayType):
        conditions = [exists(sql, kind.elementType)]
    elif isinstance(kind, MapType):
        conditions = [exists(f"map_keys({sql})", kind.keyType), exists(f"map_values({sql})", kind.valueType)]
    parts = [part for part in conditions if part is not None]
    return f"({' OR '.join(parts)})" if parts else None


def size_sql(sql: str, kind: DataType, depth: int = 0) -> str:
    """An expression for a number of bytes that a value takes at most, in any format."""
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructType

    if isinstance(kind, StringType | BinaryType):
        return f"({_ESCAPED} * coalesce(octet_length({sql}), 0) + 12)"
    if isinstance(kind, StructType):
        fields = [size_sql(f"{sql}.{name_sql(item.name)}", item.dataType, depth) for item in kind]
        names = sum(_ESCAPED * len(item.name.encode()) + 4 for item in kind)
        return f"({' + '.join([*fields, str(names + 12)])})"
    if isinstance(kind, ArrayType):
        return _sum(sql, kind.elementType, depth)
    if isinstance(kind, MapType):
        return (
            f"({_sum(f'map_keys({sql})', kind.keyType, depth)} + {_sum(f'map_values({sql})', kind.valueType, depth)})"
        )
    return str(_NUMBER)


def _sum(sql: str, kind: DataType, depth: int) -> str:
    inner = size_sql(f"x{depth}", kind, depth + 1)
    if inner.isdigit():
        return f"(coalesce(size({sql}), 0) * {inner}L + 12)"
    return f"(coalesce(aggregate({sql}, 12L, (a{depth}, x{depth}) -> a{depth} + {inner}), 12L))"


LARGE = 1_000_000
"""ETL measures records from this size in bytes on. Kafka's default for ``max.message.bytes`` is 1,048,588. A topic may have
a lower limit that neither Kafka's answer nor ``create`` shows. Publish then finds a record over the limit before it
announces the record's window. A higher ``max.message.bytes`` lets the record pass."""

_MAX_BYTES = "max.message.bytes"
_AROUND = 100
"""An upper limit for the bytes of a record batch around the key, value and headers of its one record."""


class EncodingFailures(Exception):
    """Some outputs can't be encoded. ``failures``: the place of the record that completed the output → failure."""

    def __init__(self, failures: Mapping[Place, Failure]) -> None:
        super().__init__(f"{len(failures)} outputs can't be encoded")
        self.failures = failures


@dataclass(frozen=True)
class RowChecks:
    """What may keep an output of a topic from its encoding, as SQL over result rows.

    ``odd``: whether the output holds something that may have no form. ``limit``: an output of more bytes may be too large.
    ``sides``: column and type. ``others``: the bytes beside the columns.
    """

    odd: str
    limit: int
    sides: Sequence[tuple[str, DataType]]
    others: Sequence[str]

    def size(self, row: str = "") -> str:
        """The most bytes of an output. ``row``: the name of the struct that holds its columns, or none."""
        prefix = f"{row}." if row else ""
        sizes = [size_sql(f"{prefix}{name_sql(name)}", kind) for name, kind in self.sides]
        return " + ".join([*sizes, *(part.format(prefix) for part in self.others)])

    @property
    def suspect(self) -> str:
        """Whether an output may be impossible to encode, as a condition (null: no)."""
        return f"{self.odd} OR coalesce({self.size()} > {self.limit}, false)"


def row_checks(
    pipeline: Pipeline,
    labels: Labels,
    kind: OutputType,
    present: Collection[str],
    limits: Mapping[str, RecordLimits],
    *,
    texts: bool = False,
) -> RowChecks | None:
    """The checks of a topic's outputs; None for a topic without columns. The parameters are those of ``suspect_sql`` and
    ``odd_sql``."""
    from zync_assets.codecs.spark_types import spark_type

    item = pipeline.output(kind.topic)
    sides = [(name, spark_type(arrow)) for name, arrow in kind.columns.items() if name in present]
    if not sides:
        return None
    odd = [
        condition
        for name, type in sides
        if (condition := odd_sql(name_sql(name), type, side_format(item, name), texts=texts)) is not None
    ]
    schemas = max((_schema_bytes(kind.topic, text) for text in kind.texts.values()), default=0)
    sizes = [f"least(size({{0}}source), {MOST_SOURCES + 1}) * {most_source_bytes(labels.topics)}"]
    sizes = [*(sizes if item.provenance else ()), str(schemas + _AROUND)]
    topic_limits = limits.get(kind.topic, RecordLimits(LARGE))
    if topic_limits.needs_key:
        key = staging.key_column(kind.topic)
        odd.append(f"{name_sql(key)} IS NULL" if any(name == key for name, _ in sides) else "true")
    condition = " OR ".join(f"coalesce({part}, false)" for part in odd) or "false"
    return RowChecks(condition, min(LARGE, topic_limits.size), sides, sizes)


def most_source_bytes(topics: Iterable[str]) -> int:
    """The most bytes that the header of one raw record takes. ``topics``: the possible topics of the record."""
    longest = max((len(topic) for topic in topics), default=0)
    # Two numbers, of 10 and of 19 digits, and the lengths of the header's name and value.
    return len(SOURCE_HEADER) + len('{"topic":"","partition":,"offset":}') + longest + 10 + 19 + 10


def side_format(item: Output, column: str) -> str:
    """The format of a column of an output."""
    forms = {staging.key_column(item.topic): item.key.format, staging.value_column(item.topic): item.value.format}
    return forms.get(column, "bytes")


def suspect_sql(
    pipeline: Pipeline,
    labels: Labels,
    types: Mapping[str, OutputType],
    present: Collection[str],
    limits: Mapping[str, RecordLimits],
) -> str:
    """A condition for result rows (see ``etl.rules.kind``) with the columns ``present``: an output that may be impossible to
    encode; null or false: it is not. ``limits``: see ``output_limits``."""
    checks = {topic: row_checks(pipeline, labels, kind, present, limits) for topic, kind in types.items()}
    suspects = ((labels.of_topic(topic), check.suspect) for topic, check in checks.items() if check is not None)
    cases = [f"WHEN rule IN ({rules}) THEN {suspect}" for rules, suspect in suspects]
    return f"kind = 'out' AND CASE {' '.join(cases)} ELSE false END" if cases else "false"


@lru_cache(maxsize=1024)
def _schema_bytes(topic: str, text: str) -> int:
    """The bytes of the schemas that stand in each record of an output schema."""
    schema = row_schema(topic, text)
    sides = (schema.key, schema.value)
    return sum(encoder_of(side).overhead for side in sides if side.schema)


def text_problems(rows: pa.RecordBatch, columns: Collection[str]) -> dict[int, str]:
    """Why rows can't be outputs, by index: a column holds text that is not UTF-8."""
    problems: dict[int, str] = {}
    for name in columns:
        side = name.partition(":")[0]
        plural = side == staging.HEADERS_COLUMN
        for index, error in text_errors(rows.column(name)).items():
            problems.setdefault(index, f"its {side} {'hold' if plural else 'holds'} {error}")
    return problems


def encoding_errors(
    topic: str, texts: Mapping[str, str], limits: RecordLimits | None, rows: pa.RecordBatch
) -> dict[int, str]:
    """Why rows can't be sent, by index. ``rows``: as they are staged, their texts UTF-8; ``texts``: output schemas by
    fingerprint; ``limits``: the records that the topic takes, if known."""
    # Here: nearly every batch does without the Kafka client.
    from zync_assets.kafka.writer import oversize_records

    def schema_of(group: str) -> RowSchema:
        name, paths = parse_group(group)
        return without_fields(row_schema(topic, texts[name]), paths)

    encoded_rows = payloads(topic, rows, schema_of)
    errors = dict(encoded_rows.errors)
    if limits is not None:
        record_batch = pa.RecordBatch.from_arrays(encoded_rows.columns, names=["key", "value", "headers"])
        for index, size in oversize_records(record_batch, limits.size):
            errors.setdefault(
                index, f"it takes {size} bytes, and {topic} takes {limits.size} at most (max.message.bytes)"
            )
        keys = record_batch["key"] if limits.needs_key else pa.array([], pa.binary())
        for index in keys.is_null().to_numpy(zero_copy_only=False).nonzero()[0].tolist():
            errors.setdefault(
                index, f"it has no key, and {topic} is compacted: Kafka takes no record without a key there"
            )
    return errors


def output_limits(pipeline: Pipeline, topics: Collection[str]) -> dict[str, RecordLimits]:
    """Topic → the limits of its records. A missing topic has the limits that ``create`` will give it.

    Topics whose limits are unknown are left out.
    """
    outputs = [pipeline.output(topic) for topic in topics]
    real_topics = [item.topic for item in outputs if not item.is_scratch]
    limits = {item.topic: None for item in outputs if item.is_scratch}
    limits |= known_limits(pipeline.kafka, real_topics) if real_topics else {}
    creates = {topic: create for topic in topics if (create := pipeline.output(topic).create) is not None}
    # Kafka shows a topic's existence with fewer rights than the topic's configuration.
    hidden = [topic for topic, create in creates.items() if topic not in limits and _MAX_BYTES not in create.config]
    absent = {topic for topic, limit in limits.items() if limit is None}
    if hidden:
        absent |= set(hidden) - topic_states(pipeline.kafka, hidden).keys()
    limits_by_topic = {topic: limit for topic, limit in limits.items() if limit is not None}
    for topic, create in creates.items():
        if topic in absent or (topic not in limits_by_topic and _MAX_BYTES in create.config):
            limits_by_topic[topic] = new_topic_config(pipeline.kafka, create.config)[1]
    return limits_by_topic
