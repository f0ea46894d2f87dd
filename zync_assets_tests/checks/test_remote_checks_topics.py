"""A published topic against staging: equal it passes; a foreign, lost or shifted record is named."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer

from zync_assets.checks.remote_checks import header_differences, staging_equals_topic
from zync_assets.kafka.topics import create_topic, delete_topic, topic_state
from zync_assets.lake import staging
from zync_assets.lake.head import Head, OutputPosition
from zync_assets.lake.log import DataFile
from zync_assets.lake.publication import commit_publish_state, open_publish_state
from zync_assets.lake.raw_files import HEADERS_TYPE
from zync_assets.lake.staging import BASE_SCHEMA
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Output, Pipeline, SideFormat
from zync_assets_tests.checks.chain import Chain
from zync_assets_tests.mini import send

Pair = tuple[str | None, bytes | None]

ROWS: Sequence[tuple[str | None, str | None]] = [("a", "1"), ("b", "2"), (None, "3"), ("a", None), ("c", "")]
SAME: list[Pair] = [(key, None if value is None else value.encode()) for key, value in ROWS]


@pytest.fixture
def pipeline(services: Services, unique: str, tmp_path: Path) -> Pipeline:
    """Five outputs staged for a topic that is not there yet, keys and values strings."""
    text = SideFormat("string")
    kafka = {"bootstrap.servers": services.bootstrap_servers}
    made = Pipeline(
        "p", tmp_path, kafka, None, str(tmp_path / "lake"), {}, (), (Output(unique, "Staging", text, text),), ()
    )
    key, value = staging.key_column(unique), staging.value_column(unique)
    schema = pa.schema([*BASE_SCHEMA, pa.field(key, pa.string()), pa.field(value, pa.string())])
    rows = [
        {"kafka": {"topic": unique, "partition": 0, "offset": at}, "schema": "s", key: row[0], value: row[1]}
        for at, row in enumerate(ROWS)
    ]
    folder = Path(made.lake) / "Staging" / f"topic={unique}"
    folder.mkdir(parents=True)
    in_file = pa.schema([item for item in schema if item.name not in ("topic", "account")])
    pq.write_table(pa.Table.from_pylist(rows, schema=in_file), folder / "rows.parquet")
    side = {"format": "string", "schema": "string"}
    position = OutputPosition(0, len(ROWS), None, None)
    text_of_schema = json.dumps({"key": side, "value": side})
    head = Head(1, outputs={(unique, 0): position}, schemas={"s": (unique, text_of_schema)})
    size = (folder / "rows.parquet").stat().st_size
    item = DataFile(f"topic={unique}/rows.parquet", size, len(ROWS), 0, 0, len(ROWS) - 1, group=unique)
    staging.commit_batch(made.lake, "Staging", None, head, schema, [item])
    return made


def publish(pipeline: Pipeline, records: list[Pair], config: dict[str, str] | None = None) -> str:
    topic = pipeline.outputs[0].topic
    create_topic(pipeline.kafka, topic, 1, 1, config or {})
    send(pipeline, topic, records)
    return topic


def publish_with_a_marker(pipeline: Pipeline, config: dict[str, str] | None = None) -> str:
    """Rows 0, 1, 3 and 4 at their offsets; at 2 the end of a transaction."""
    topic = publish(pipeline, SAME[:1], config)
    producer = Producer({"bootstrap.servers": pipeline.kafka["bootstrap.servers"], "transactional.id": topic})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, SAME[1][1], SAME[1][0], 0)
    producer.commit_transaction()
    # A commit is answered before its marker is written.
    while topic_state(pipeline.kafka, topic).partitions[0].end < 3:
        time.sleep(0.02)
    send(pipeline, topic, SAME[3:])
    return topic


def test_what_the_chain_published_is_equal(sound_chain: Chain) -> None:
    found = staging_equals_topic(sound_chain.pipeline, sound_chain.new)
    assert (found.passed, found.severity, found.subject) == (True, "error", f"kafka/{sound_chain.new}")
    assert found.numbers["compared"] == 7


def verify(pipeline: Pipeline, topic: str, end: int) -> None:
    """Commit like a publisher that has verified the topic's records up to ``end``."""
    before = open_publish_state(pipeline.lake, "Staging", topic)
    topic_id = topic_state(pipeline.kafka, topic).topic_id
    commit_publish_state(pipeline.lake, "Staging", before, window=end, verified_end=end, topic_id=topic_id)


def test_equal_records_pass(pipeline: Pipeline) -> None:
    topic = publish(pipeline, SAME)
    verify(pipeline, topic, 5)
    found = staging_equals_topic(pipeline, topic)
    assert found.passed
    assert (found.numbers["compared"], found.numbers["lag"]) == (5, 0)


def test_what_no_publisher_has_verified_is_lag(pipeline: Pipeline) -> None:
    topic = pipeline.outputs[0].topic
    assert staging_equals_topic(pipeline, topic).summary == "nothing published yet"
    publish(pipeline, SAME[:2])
    found = staging_equals_topic(pipeline, topic)
    assert found.passed
    assert (found.numbers["compared"], found.numbers["lag"]) == (2, 5)
    verify(pipeline, topic, 2)
    assert staging_equals_topic(pipeline, topic).numbers["lag"] == 3


@pytest.mark.parametrize("other", [("a", b"other"), ("other", b"1"), ("a", None), (None, b"1")])
def test_the_first_different_record_is_named(pipeline: Pipeline, other: Pair) -> None:
    topic = publish(pipeline, [*SAME[:2], other, *SAME[3:]])
    found = staging_equals_topic(pipeline, topic)
    assert (found.passed, found.summary) == (False, "the record at offset 2 is not staging's")
    assert staging_equals_topic(pipeline, topic, [OffsetRange(0, 3, 5)]).passed
    assert not staging_equals_topic(pipeline, topic, [OffsetRange(0, 2, 3)]).passed


@pytest.mark.parametrize(("place", "other"), [(3, ("a", b"")), (4, ("c", None))])
def test_null_and_empty_differ(pipeline: Pipeline, place: int, other: Pair) -> None:
    topic = publish(pipeline, [*SAME[:place], other, *SAME[place + 1 :]])
    assert staging_equals_topic(pipeline, topic).summary == f"the record at offset {place} is not staging's"


def test_a_record_beyond_staging_is_foreign(pipeline: Pipeline) -> None:
    found = staging_equals_topic(pipeline, publish(pipeline, [*SAME, ("x", b"y")]))
    assert not found.passed
    assert found.summary == "the record at offset 5 is not staging's: staging ends there, the topic at 6"


def test_an_offset_without_a_record(pipeline: Pipeline) -> None:
    found = staging_equals_topic(pipeline, publish_with_a_marker(pipeline))
    assert found.summary == "the topic holds no record at offset 2, where staging holds one"


def test_a_compacted_topic_may_lack_records(pipeline: Pipeline) -> None:
    found = staging_equals_topic(pipeline, publish_with_a_marker(pipeline, {"cleanup.policy": "compact"}))
    assert found.passed
    assert (found.numbers["compared"], found.numbers["compacted"]) == (4, 1)


def test_a_topic_that_was_created_again_or_is_gone(pipeline: Pipeline) -> None:
    topic = publish(pipeline, SAME)
    verify(pipeline, topic, 5)
    assert staging_equals_topic(pipeline, topic).passed
    delete_topic(pipeline.kafka, topic)
    assert staging_equals_topic(pipeline, topic).summary == f"topic {topic} was published to and is gone"
    publish(pipeline, SAME)
    found = staging_equals_topic(pipeline, topic)
    assert not found.passed
    assert "was deleted and created again" in found.summary


def test_a_topic_that_lost_its_end(pipeline: Pipeline) -> None:
    topic = publish(pipeline, SAME[:3])
    verify(pipeline, topic, 5)
    assert "was published up to 5: it has lost records" in staging_equals_topic(pipeline, topic).summary


def test_staging_that_lost_a_file(pipeline: Pipeline) -> None:
    topic = publish(pipeline, SAME)
    path = Path(pipeline.lake) / "Staging" / f"topic={topic}" / "rows.parquet"
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for damage in (content[:100], content[: len(content) // 2], content[:4] + bytes(footer - 4) + content[footer:]):
        path.write_bytes(damage)
        found = staging_equals_topic(pipeline, topic)
        assert not found.passed
        assert "rows.parquet can't be read: " in found.summary and "Restore it from a copy" in found.summary
    path.unlink()
    found = staging_equals_topic(pipeline, topic)
    assert not found.passed
    assert "rows.parquet can't be read: " in found.summary and "No such file" in found.summary


def test_no_headers_and_none_are_one() -> None:
    some = pa.array([[], None, [{"key": "a", "value": b""}], [{"key": "a", "value": None}]], HEADERS_TYPE)
    other = pa.array([None, [], [{"key": "a", "value": b""}], [{"key": "a", "value": b""}]], HEADERS_TYPE)
    assert np.flatnonzero(header_differences(some, other)).tolist() == [3]
