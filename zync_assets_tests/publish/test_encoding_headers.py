"""A rule's headers reach Kafka, and publish compares the headers too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from zync_assets.checks.remote_checks import staging_equals_topic
from zync_assets.errors import EtlError, ForeignRecord
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import create_topic, topic_states
from zync_assets.kafka.writer import InOrder
from zync_assets.kafka.zero_copy import HEADERS
from zync_assets.lake.publication import commit_publish_state, open_publish_state
from zync_assets.lake.raw_files import HEADERS_TYPE
from zync_assets.local.services import Services
from zync_assets.publish.encoding import MOST_SOURCES, sent_headers
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULES = """
transforms:
  - name: copy
    type: stateless
    in: $left
    where: value.op = 'c'
    out: $out
    key: in.key
    value: {id: in.value.id}
    headers:
      table: "'left'"
      v: in.value.v
      trace: element_at(filter(in.kafka.headers, h -> h.key = 'trace'), 1).value
  - {name: pass, type: stateless, in: $left, where: value.op = 'u', out: $out, key: in.key,
     value: {id: in.value.id}, headers: in.kafka.headers}
  - {name: bare, type: stateless, in: $left, where: value.op = 'd', out: $out, key: in.key, value: null}
"""
PROVENANCE = BOTH.replace("topic: $out, ", "topic: $out, provenance: true, ")


def records(it: Mini) -> list[dict[str, Any]]:
    end = topic_states(it.pipeline.kafka, [it.out])[it.out].partitions[0].end
    return [found for batch in read_range(it.pipeline.kafka, it.out, 0, 0, end) for found in batch.to_pylist()]


def pairs(it: Mini) -> list[list[tuple[str, bytes | None]] | None]:
    """Each record's headers, in order."""
    return [
        None if found["headers"] is None else [(item["key"], item["value"]) for item in found["headers"]]
        for found in records(it)
    ]


def test_headers_are_made_kept_left_out_and_verified(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH + RULES)
    it.send(it.left, row(1, "ä"), headers=[("trace", b"\xff"), ("other", b"x")])
    it.send(it.left, row(2, "b"), row(3, op="d"))
    it.send(it.left, row(4, op="u"), headers=[("a", b"1"), ("a", None)])
    it.send(it.left, {"op": "c", "id": 5})
    # A producer in Java can give a header any name.
    odd = pa.array([[{"key": "a\0b", "value": b"1"}, {"key": "", "value": None}]], HEADERS)
    sent = {"key": pa.array([b"k"]), "value": pa.array([json.dumps(row(6, op="u")).encode()]), "headers": odd}
    with InOrder(it.pipeline.kafka, it.left, 0, 5, "zync to-kafka") as writer:
        writer.write(pa.record_batch(sent))
    it.step()
    it.publish()
    assert pairs(it) == [
        [("table", b"left"), ("v", "ä".encode()), ("trace", b"\xff")],
        [("table", b"left"), ("v", b"b")],
        None,
        [("a", b"1"), ("a", None)],
        [("table", b"left")],
        [("a\0b", b"1"), ("", None)],
    ]
    assert staging_equals_topic(it.pipeline, it.out).passed


def test_provenance_names_each_raw_record_and_stays_as_it_was_staged(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PROVENANCE + JOIN)
    it.send(it.right, row(1), row(7))
    it.send(it.left, row(7))
    it.step()
    without = it.edited(BOTH + JOIN)
    without.send(it.left, row(1))
    without.step()
    without.publish()
    made = [
        None if found is None else [(name, json.loads(value or b"")) for name, value in found] for found in pairs(it)
    ]
    assert made == [
        [
            ("source", {"topic": it.left, "partition": 0, "offset": 0}),
            ("source", {"topic": it.right, "partition": 0, "offset": 1}),
        ],
        None,
    ]
    assert staging_equals_topic(it.pipeline, it.out).passed
    assert "headers" not in {item.name for item in DeltaTable(f"{it.lake}/Staging").schema().fields}


def test_a_record_that_differs_in_its_headers_alone_is_foreign(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PROVENANCE + JOIN)
    it.send(it.right, row(7))
    it.send(it.left, row(7))
    it.step()
    (staged,) = it.staged()
    topic = create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    before = open_publish_state(it.lake, "Staging", it.out)
    commit_publish_state(it.lake, "Staging", before, window=1, verified_end=0, topic_id=topic.topic_id)
    producer = Producer({**it.pipeline.kafka, "linger.ms": 0})
    producer.produce(it.out, json.dumps(staged["value"], separators=(",", ":")), staged["key"], 0)
    assert producer.flush(10) == 0
    with pytest.raises(ForeignRecord, match="offset 0"):
        it.publish()
    assert not staging_equals_topic(it.pipeline, it.out).passed


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ("{n: in.value.id}", "headers.n: in.value.id is bigint; a header is text or bytes. CAST it AS STRING"),
        ("in.value.v", "is string; write a mapping"),
        ("{n: in.value.v.nothing}", "headers.n"),
    ],
)
def test_what_is_no_header_is_told_with_its_rule(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, headers: str, message: str
) -> None:
    rule = "transforms:\n  - {name: r, type: stateless, in: $left, out: $out, key: in.key, value: in.value, headers: "
    it = mini(services, spark, tmp_path, unique, f"{BOTH}{rule}{headers}}}\n")
    it.send(it.left, row(1))
    with pytest.raises(EtlError, match="rule r, ") as error:
        it.step()
    assert message in str(error.value)


def test_own_headers_come_before_those_of_provenance() -> None:
    own = pa.array([[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], None, []], HEADERS_TYPE)
    place = {"topic": "t.x", "partition": 3, "offset": 9}
    source = pa.array([[place], [place, place], []])
    made = sent_headers(own, source, 3).to_pylist()
    text = {"key": "source", "value": b'{"topic":"t.x","partition":3,"offset":9}'}
    assert made == [[{"key": "a", "value": b"1"}, {"key": "b", "value": None}, text], [text, text], None]
    assert sent_headers(own.slice(1), source.slice(1), 2).to_pylist() == made[1:]
    assert sent_headers(None, None, 2).to_pylist() == [None, None]


def test_the_headers_of_many_raw_records_name_the_last_and_count_the_others() -> None:
    def places(count: int) -> list[dict[str, Any]]:
        return [{"topic": "t", "partition": 0, "offset": offset} for offset in range(count)]

    own = pa.array([None, [{"key": "a", "value": b"1"}], None, None], HEADERS_TYPE)
    source = pa.array([places(2), places(MOST_SOURCES + 5), places(MOST_SOURCES), places(MOST_SOURCES + 1)])
    made = [[item["value"] for item in row] for row in sent_headers(own, source, 4).to_pylist()]
    texts = [json.dumps(place, separators=(",", ":")).encode() for place in places(MOST_SOURCES + 5)]
    assert made[0] == texts[:2]
    assert made[1] == [b"1", b'{"more":5}', *texts[5:]]
    assert made[2] == texts[:MOST_SOURCES]
    assert made[3] == [b'{"more":1}', *texts[1 : MOST_SOURCES + 1]]
