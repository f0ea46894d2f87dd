"""Finds outputs that can't be encoded, before ETL numbers them. Publish would stop at the offset of such an output for ever.

A cheap SQL condition marks suspicious outputs (``etl.encodable``), and a check of every text finds texts that are not
UTF-8. Spark tasks encode the marked outputs with the code of publish. Most batches mark no output and encode nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

import pyarrow as pa

from zync_assets.codecs.utf8 import text_errors
from zync_assets.etl.encodable import odd_sql, size_sql
from zync_assets.etl.labels import Labels
from zync_assets.kafka.topics import known_limits, new_topic_config, topic_states
from zync_assets.lake import staging
from zync_assets.pipeline import Pipeline
from zync_assets.sql_text import name_sql
from zync_assets.steps.encoding import RowSchema, encoder_of, less, payloads, row_schema
from zync_assets.steps.etl_failures import Failure, Place
from zync_assets.steps.headers import most_source_bytes
from zync_assets.steps.left_out import parse_group
from zync_assets.steps.outputs import OutputType

LARGE = 1_000_000
"""ETL measures records from this size in bytes on. Kafka's default for ``max.message.bytes`` is 1,048,588. A topic may have
a lower limit that neither Kafka's answer nor ``create`` shows. Publish then finds a record over the limit before it
announces the record's window. A higher ``max.message.bytes`` lets the record pass."""

_MAX_BYTES = "max.message.bytes"
_AROUND = 100
"""An upper limit for the bytes of a record batch around the key, value and headers of its one record."""


class Unfit(Exception):
    """Some outputs can't be encoded. ``failures``: the place of the record that completed the output → failure."""

    def __init__(self, failures: Mapping[Place, Failure]) -> None:
        super().__init__(f"{len(failures)} outputs can't be encoded")
        self.failures = failures


def suspect_sql(
    pipeline: Pipeline,
    labels: Labels,
    types: Mapping[str, OutputType],
    present: Collection[str],
    limits: Mapping[str, int],
) -> str:
    """A condition for result rows (see ``matching``) with the columns ``present``: an output that may be impossible to
    encode; null or false: it is not. ``limits``: see ``size_limits``."""
    from zync_assets.codecs.spark_types import spark_type

    cases: list[str] = []
    for topic, kind in types.items():
        item = pipeline.output(topic)
        forms = {staging.key_column(topic): item.key.format, staging.value_column(topic): item.value.format}
        sides = [
            (name_sql(name), spark_type(arrow), forms.get(name, "bytes"))
            for name, arrow in kind.columns.items()
            if name in present
        ]
        odd = [found for sql, type, form in sides if (found := odd_sql(sql, type, form)) is not None]
        if sides:
            sizes = [size_sql(sql, type) for sql, type, _ in sides]
            if item.provenance:
                sizes.append(f"size(source) * {most_source_bytes(labels.topics)}")
            schemas = max((_schema_bytes(topic, text) for text in kind.texts.values()), default=0)
            odd.append(f"{' + '.join(sizes)} + {schemas + _AROUND} > {min(LARGE, limits.get(topic, LARGE))}")
        if odd:
            found = " OR ".join(f"coalesce({part}, false)" for part in odd)
            cases.append(f"WHEN rule IN ({labels.of_topic(topic)}) THEN {found}")
    return f"kind = 'out' AND CASE {' '.join(cases)} ELSE false END" if cases else "false"


@lru_cache(maxsize=1024)
def _schema_bytes(topic: str, text: str) -> int:
    """The bytes of the schemas that stand in each record of an output schema."""
    schema = row_schema(topic, text)
    sides = (schema.key, schema.value)
    return sum(encoder_of(side).overhead for side in sides if side.schema)


def text_problems(rows: pa.RecordBatch, columns: Collection[str]) -> dict[int, str]:
    """Why rows can't be outputs, by index: a column holds text that is not UTF-8."""
    found: dict[int, str] = {}
    for name in columns:
        side = name.partition(":")[0]
        plural = side == staging.HEADERS_COLUMN
        for index, error in text_errors(rows.column(name)).items():
            found.setdefault(index, f"its {side} {'hold' if plural else 'holds'} {error}")
    return found


def encoding_errors(topic: str, texts: Mapping[str, str], limit: int | None, rows: pa.RecordBatch) -> dict[int, str]:
    """Why rows can't be sent, by index. ``rows``: as they are staged, their texts UTF-8; ``texts``: output schemas by
    fingerprint; ``limit``: bytes of a record batch, if known."""
    # Here: nearly every batch does without the Kafka client.
    from zync_assets.kafka.writer import oversized

    def schema_of(group: str) -> RowSchema:
        name, paths = parse_group(group)
        return less(row_schema(topic, texts[name]), paths)

    made = payloads(topic, rows, schema_of)
    errors = dict(made.errors)
    if limit is not None:
        sent = pa.RecordBatch.from_arrays(made.columns, names=["key", "value", "headers"])
        for index, size in oversized(sent, limit):
            errors.setdefault(index, f"it takes {size} bytes, and {topic} takes {limit} at most (max.message.bytes)")
    return errors


def size_limits(pipeline: Pipeline, topics: Collection[str]) -> dict[str, int]:
    """Topic → its ``max.message.bytes``. For a missing topic, the value that ``create`` will give the topic.

    Topics whose limit is unknown are left out.
    """
    limits = known_limits(pipeline.kafka, list(topics))
    creates = {topic: create for topic in topics if (create := pipeline.output(topic).create) is not None}
    # Kafka shows a topic's existence with fewer rights than the topic's configuration.
    hidden = [topic for topic, create in creates.items() if topic not in limits and _MAX_BYTES not in create.config]
    absent = {topic for topic, limit in limits.items() if limit is None}
    if hidden:
        absent |= set(hidden) - topic_states(pipeline.kafka, hidden).keys()
    known = {topic: limit for topic, limit in limits.items() if limit is not None}
    for topic, create in creates.items():
        if topic in absent or (topic not in known and _MAX_BYTES in create.config):
            known[topic] = new_topic_config(pipeline.kafka, create.config)[1]
    return known
