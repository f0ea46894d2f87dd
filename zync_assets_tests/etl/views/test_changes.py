"""The rows that records make: unchanged values that Debezium did not send, and keys in two partitions."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.checks.state_checks import state_equals_raw
from zync_assets.errors import EtlError
from zync_assets.etl.views.state_fold import RUNS
from zync_assets.local.services import Services
from zync_assets.pipeline import UNAVAILABLE_VALUE
from zync_assets_tests.mini import make_pipeline, mini_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """
inputs:
  - {{topic: {topic}, pool: Raw, format: json, key-schema: id bigint,
     value-schema: "op string, after struct<id bigint, size bigint, note string>"}}
outputs:
  - {{topic: {topic}.out, pool: Staging, format: json, create: {{}}}}
transforms:
  - {{type: view, tables: {{t: {topic}}}, from: t, key: {{id: t.id}}, value: {{size: t.size, note: t.note}}, out: {topic}.out}}
"""


def change(id: int, size: int, note: str = UNAVAILABLE_VALUE, op: str = "u") -> tuple[str, dict[str, Any]]:
    return f'{{"id": {id}}}', {"op": op, "after": {"id": id, "size": size, "note": note}}


def test_rows_of_debezium(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    topic = f"{unique}.rows"
    it = mini_of(make_pipeline(services, tmp_path, TEXT.format(topic=topic), partitions=2), spark)
    # Within one batch, and after an earlier batch, the row keeps the value that was not sent.
    it.send(topic, change(1, 1, "long", "c"), change(1, 2), change(2, 1, "other", "c"))
    it.step()
    it.send(topic, change(1, 3), change(1, 4), ('{"id": 2}', {"op": "d", "after": None}), ('{"id": 2}', None))
    it.step()
    found = [(row["key"]["id"], row["value"]) for row in it.staged()]
    assert found == [
        (1, {"size": 2, "note": "long"}),
        (2, {"size": 1, "note": "other"}),
        (1, {"size": 4, "note": "long"}),
        (2, None),
    ]
    assert it.classes(topic) == {"done": 7}
    sources = [[item["offset"] for item in row["source"]] for row in it.staged()]
    assert sources == [[0, 1], [2], [3, 4], [5, 6]]
    it.send(topic, change(1, 5, "moved"), partition=1)
    it.ingest()
    with pytest.raises(EtlError, match=r'table .*: the record key .*"id":1.* comes in partitions 0 and 1\. '):
        it.etl()


def test_a_truncate_leaves_the_rows_and_says_so(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    topic = f"{unique}.rows"
    it = mini_of(make_pipeline(services, tmp_path, TEXT.format(topic=topic), partitions=1), spark)
    it.send(topic, change(1, 1, "a", "c"), (None, {"op": "t", "after": None}), change(2, 1, "b", "c"))
    it.step()
    assert it.values() == [{"size": 1, "note": "a"}, {"size": 1, "note": "b"}]
    (entry,) = it.ledger("quarantined")
    assert entry["first"] == 1
    assert "A truncate of Debezium (its op is t) has no key: the table keeps its rows" in entry["text"]


def test_a_flattened_record_among_envelopes_leaves_the_row_and_says_so(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The connector was changed to send rows in place of envelopes."""
    topic = f"{unique}.rows"
    it = mini_of(make_pipeline(services, tmp_path, TEXT.format(topic=topic), partitions=1), spark)
    it.send(topic, change(1, 1, "a", "c"), ('{"id": 1}', {"id": 1, "size": 2, "note": "b"}), change(2, 1, "c", "c"))
    it.send(topic, ('{"id": 2}', None))
    it.step()
    assert it.values() == [{"size": 1, "note": "a"}]
    (entry,) = it.ledger("quarantined")
    assert entry["first"] == 1
    assert "an envelope without `after` changes a row only if its op is d" in entry["text"]


FLAT = TEXT.replace(
    '"op string, after struct<id bigint, size bigint, note string>"',
    '"id bigint, size bigint, note string, __deleted string"',
)
SHAPED = TEXT.replace('note string>"}}', 'note string>", shape: {{value: value.after}}}}')


@pytest.mark.parametrize(
    "text", [FLAT, pytest.param(SHAPED, marks=pytest.mark.slow)], ids=["ExtractNewRecordState", "shape"]
)
def test_rows_that_are_no_envelopes_keep_what_was_not_sent(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, text: str
) -> None:
    topic = f"{unique}.rows"
    it = mini_of(make_pipeline(services, tmp_path, text.format(topic=topic), partitions=1), spark)
    for changes in ([change(1, 1, "long", "c"), change(1, 2)], [change(1, 3)]):
        it.send(topic, *(((key, value["after"]) if text is FLAT else (key, value)) for key, value in changes))
        it.step()
    assert it.values() == [{"size": 2, "note": "long"}, {"size": 3, "note": "long"}]
    assert state_equals_raw(it.pipeline, "Staging", lambda: spark).passed


@pytest.mark.slow
@pytest.mark.parametrize("of_each_size", ["small", pytest.param("large", marks=pytest.mark.slow)], indirect=True)
def test_a_value_of_any_type_that_was_not_sent_stays(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, of_each_size: None
) -> None:
    topic, text = f"{unique}.rows", UNAVAILABLE_VALUE
    types = "words: array<string>, map: map<string, string>, numbers: array<int>, raw: binary"
    fields = "words: t.words, map: t.map, numbers: t.numbers, raw: t.raw"
    file = TEXT.replace("size bigint, note string", types).replace("size: t.size, note: t.note", fields)
    it = mini_of(make_pipeline(services, tmp_path, file.format(topic=topic), partitions=1), spark)
    sent = {"words": ["x", "y"], "map": {"k": "l"}, "numbers": [4, 2], "raw": base64.b64encode(b"z").decode()}
    raw = base64.b64encode(text.encode()).decode()
    unsent = {"words": [text], "map": {text: text}, "numbers": list(text.encode()), "raw": raw}
    for rest in (sent, unsent, sent | {"numbers": [5]} | {"words": [text]}, unsent):
        it.send(topic, ('{"id": 1}', {"op": "u", "after": {"id": 1, **rest}}))
        it.step()
    value = {"words": ["x", "y"], "map": [("k", "l")], "numbers": [4, 2], "raw": b"z"}
    assert it.values() == [value, value | {"numbers": [5]}]
    assert state_equals_raw(it.pipeline, "Staging", lambda: spark).passed


@pytest.mark.slow
def test_a_key_in_two_partitions_by_time(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    topic = f"{unique}.rows"
    text = TEXT.format(topic=topic).replace(
        f"{{t: {topic}}}", f"{{t: {{topic: {topic}, key-in-many-partitions: latest-time}}}}"
    )
    it = mini_of(make_pipeline(services, tmp_path, text, partitions=2), spark)
    it.send(topic, change(1, 1, "a"), change(2, 1, "b"), times=[1_000, 4_000])
    it.send(topic, change(1, 2, "c"), change(2, 2, "d"), partition=1, times=[2_000, 3_000])
    it.step()
    assert {row["key"]["id"]: row["value"]["note"] for row in it.staged()} == {1: "c", 2: "b"}
    # Earlier records change nothing, and later ones go on with the row of the other partition.
    it.send(topic, change(1, 3, "e"), ('{"id": 2}', {"op": "d", "after": None}), partition=1, times=[3_500, 3_600])
    it.send(topic, change(1, 4), partition=0, times=[5_000])
    it.step()
    assert [(row["key"]["id"], row["value"]) for row in it.staged()[2:]] == [(1, {"size": 4, "note": "e"})]
    assert it.classes(topic) == {"done": 7}
    assert state_equals_raw(it.pipeline, "Staging", lambda: spark).passed


@pytest.mark.slow
def test_a_fold_keeps_the_deletion_of_a_row_by_time(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """An earlier record of the other partition does not bring the row back."""
    topic = f"{unique}.rows"
    text = TEXT.format(topic=topic).replace(
        f"{{t: {topic}}}", f"{{t: {{topic: {topic}, key-in-many-partitions: latest-time}}}}"
    )
    it = mini_of(make_pipeline(services, tmp_path, text, partitions=2), spark)
    it.send(topic, change(1, 1, "a"), ('{"id": 1}', {"op": "d", "after": None}), times=[1_000, 7_000])
    for time in range(7_001, 7_003 + RUNS):
        it.step()
        it.send(topic, change(2, time, "x"), times=[time])
    it.send(topic, change(1, 5, "f"), partition=1, times=[6_000])
    it.step()
    assert {row["key"]["id"] for row in it.staged() if row["value"] is not None} == {2}
    assert state_equals_raw(it.pipeline, "Staging", lambda: spark).passed
