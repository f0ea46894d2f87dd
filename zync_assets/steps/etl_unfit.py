"""Outputs that can't be encoded, found before they get a number: afterwards the number is theirs, and publishing would stop
at it for ever.

A cheap condition marks those that may be (``etl.encodable``); these are encoded, in Spark tasks, by the encoders that
publishing uses. Where there are none, which is nearly always, nothing is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa

from zync_assets.etl.encodable import odd_sql, size_sql
from zync_assets.etl.labels import Labels
from zync_assets.kafka.topics import known_limits
from zync_assets.lake import staging
from zync_assets.pipeline import Pipeline
from zync_assets.sql_text import name_sql
from zync_assets.steps.etl_failures import Failure, Place
from zync_assets.steps.outputs import OutputType

LARGE = 1_000_000
"""Bytes from which on a record is measured: Kafka's default for ``max.message.bytes`` is 1,048,588. Where a topic takes less
than that, and neither the topic's configuration can be seen nor does ``create`` say so, a record that is larger than it takes
is found before its window is announced; raising ``max.message.bytes`` lets it pass."""


class Unfit(Exception):
    """Some outputs can't be encoded: the failures, by the record that completed each."""

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
        sizes = " + ".join(size_sql(sql, type) for sql, type, _ in sides)
        if sizes:
            odd.append(f"{sizes} > {min(LARGE, limits.get(topic, LARGE))}")
        if odd:
            found = " OR ".join(f"coalesce({part}, false)" for part in odd)
            cases.append(f"WHEN rule IN ({labels.of_topic(topic)}) THEN {found}")
    return f"kind = 'out' AND CASE {' '.join(cases)} ELSE false END" if cases else "false"


def encoding_errors(
    topic: str, texts: Mapping[int, str], columns: Mapping[str, pa.DataType], limit: int | None, batch: pa.RecordBatch
) -> dict[int, str]:
    """Why rows can't be encoded, by index. ``texts``: output schemas by the rule's index; ``limit``: bytes of a record batch."""
    # Here: nearly every batch does without.
    from zync_assets.codecs.encode import make_encoder
    from zync_assets.kafka.writer import batch_size

    errors: dict[int, str] = {}
    rules = batch.column("rule").to_numpy()
    for rule in np.unique(rules).tolist():
        places = np.flatnonzero(rules == rule)
        own = batch.take(pa.array(places))
        schema = json.loads(texts[rule])
        sent: dict[str, pa.Array] = {}
        for side, name in (("key", staging.key_column(topic)), ("value", staging.value_column(topic))):
            text = schema[side]["schema"]
            if text is None or name not in columns:
                continue
            encoder = make_encoder(schema[side]["format"], json.dumps(text), 1)
            encoded = encoder.encode(own.column(name).cast(columns[name]))
            for bad in encoded.bad:
                errors.setdefault(int(places[bad.index]), f"its {side} can't be encoded: {bad.error}")
            sent[side] = encoded.payloads
        if limit is None:
            continue
        if staging.HEADERS_COLUMN in columns:
            sent["headers"] = own.column(staging.HEADERS_COLUMN)
        for at, place in enumerate(places.tolist()):
            record = {"key": None, "value": None, **{side: column[at].as_py() for side, column in sent.items()}}
            if place not in errors and (size := batch_size(record)) > limit:
                errors[place] = f"it takes {size} bytes, and {topic} takes {limit} at most (max.message.bytes)"
    return errors


def size_limits(pipeline: Pipeline, topics: Collection[str]) -> dict[str, int]:
    """The size that each topic takes, without those of which it is not known: what the topic says, else what ``create``
    does."""
    texts = {
        name: item.create.config.get("max.message.bytes", "")
        for name in topics
        if (item := pipeline.output(name)).create
    }
    created = {name: int(text) for name, text in texts.items() if text.isdigit()}
    return created | known_limits(pipeline.kafka, list(topics))
