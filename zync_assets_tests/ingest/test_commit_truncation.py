"""A partition that lost ingested records, and whose offsets have other records now, is an error. What retention, compaction,
transactions, quarantine and shapes do to the last ingested record is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from zync_assets import runner
from zync_assets.errors import TopicTruncated
from zync_assets.ingest import commit as ingest_commit
from zync_assets.ingest.commit import commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import topic_states
from zync_assets.lake.raw import RawState, open_raw
from zync_assets.local.services import Services, down, up
from zync_assets.offsets import Mark, OffsetRange
from zync_assets_tests.mini import BOTH, Mini, mini, row
from zync_assets_tests.odd_topics import configure, cut, open_transaction, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COPY = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id, v: in.value.v}}
"""
TEXT = BOTH.replace("topic: $left, ", "topic: $left, on-data-loss: continue, ") + COPY
SHAPED = TEXT.replace("topic: $left, ", "topic: $left, shape: {where: value.id < 100}, ")
BOTH_PATHS = pytest.mark.parametrize("text", [TEXT, SHAPED], ids=["as it is", "shaped"])


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A broker that a test may stop."""
    home = tmp_path_factory.mktemp("services")
    try:
        yield up(home)
    finally:
        down(home, clean=True)


def state_of(it: Mini) -> RawState:
    state = open_raw(it.lake, "Raw", it.left)
    assert state is not None
    return state


def end_of(it: Mini) -> int:
    return topic_states(it.pipeline.kafka, [it.left])[it.left].partitions[0].end


def send_in_transaction(it: Mini, number: int, *, commit: bool) -> None:
    """A record and the marker of its transaction's end, an offset each."""
    end = end_of(it) + 2
    producer = open_transaction(it.pipeline.kafka, it.left, it.left, b'{"id": %d}' % number)
    (producer.commit_transaction if commit else producer.abort_transaction)(20)
    until("the transaction is over", lambda: end_of(it) == end)


def lose_records(own: Services, it: Mini) -> None:
    """Restart the broker after the loss of the disk with the left topic's records."""
    process = psutil.Process(own.kafka_pid)
    process.kill()
    process.wait(30)
    folders = [path.parent for path in own.state_dir.rglob(f"{it.left}-*/partition.metadata")]
    assert len(folders) == 3
    for folder in folders:
        for path in folder.iterdir():
            if path.name != "partition.metadata":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    up(own.state_dir)


@pytest.mark.slow
@BOTH_PATHS
def test_other_records_at_ingested_offsets_are_an_error(
    own: Services, spark: SparkSession, tmp_path: Path, text: str
) -> None:
    """Kafka's log is lost and grows past the next offset again. Partition 0 ended with a transaction, partition 1 with a bad
    record, and partition 2 with a record that the shape leaves out."""
    it = mini(own, spark, tmp_path, "truncated", text, 3)
    it.send(it.left, row(0))
    send_in_transaction(it, 1, commit=True)
    it.send(it.left, row(0), b"bad", partition=1)
    it.send(it.left, row(0), row(100), partition=2)
    it.ingest(it.left)
    ends = {0: 3, 1: 2, 2: 2}
    assert it.next(it.left) == ends
    lose_records(own, it)
    for partition in ends:
        it.send(it.left, *[row(number) for number in range(10, 15)], partition=partition)
    for partition, end in ends.items():
        plan = plan_ingest(it.pipeline, it.left, within=[OffsetRange(partition, end, 5)])
        with pytest.raises(TopicTruncated, match=f"topic {it.left}, partition {partition}, offset 1: .*another pool"):
            commit_raw(it.pipeline, read_input(spark, it.pipeline, plan))
    # What accepts a loss to retention does not accept this one.
    with pytest.raises(TopicTruncated, match="later records took their offsets"):
        list(runner.ingest_all(it.pipeline, lambda: spark, [it.left]))
    assert it.next(it.left) == ends


def bad_record(it: Mini) -> None:
    it.send(it.left, row(1), b"bad")
    it.ingest(it.left)


def record_out_of_shape(it: Mini) -> None:
    it.send(it.left, row(1), row(100))
    it.ingest(it.left)


def transactions(it: Mini) -> None:
    """The second batch has a committed transaction alone, and the third batch an aborted one, so that it has no record."""
    it.send(it.left, row(1))
    it.ingest(it.left)
    send_in_transaction(it, 2, commit=True)
    it.ingest(it.left)
    mark = state_of(it).marks[0]
    send_in_transaction(it, 3, commit=False)
    it.ingest(it.left)
    assert (mark.offset, state_of(it).marks[0], it.next(it.left)) == (1, mark, {0: 5})


def retention(it: Mini) -> None:
    it.send(it.left, row(1), row(2))
    it.ingest(it.left)
    cut(it.pipeline.kafka, it.left, 2)


def retention_past_the_next_offset(it: Mini) -> None:
    it.send(it.left, row(1))
    it.ingest(it.left)
    it.send(it.left, row(2), row(3))
    cut(it.pipeline.kafka, it.left, 3)


def compaction(it: Mini) -> None:
    settings = {"segment_ms": "100", "min_cleanable_dirty_ratio": "0.01", "max_compaction_lag_ms": "100"}
    configure(it.pipeline.kafka, it.left, cleanup_policy="compact", **settings)
    it.send(it.left, row(1), times=[int(time.time() * 1000)])
    it.ingest(it.left)

    def is_compacted() -> bool:
        it.send(it.left, row(2), times=[int(time.time() * 1000)])
        (records,) = read_range(it.pipeline.kafka, it.left, 0, 0, end_of(it))
        return records["offset"][0].as_py() > 0

    until("the broker compacts", is_compacted)


def table_of_an_older_version(it: Mini) -> None:
    """Its log has no marks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest_commit, "_advance", lambda *arguments: replace(advance(*arguments), marks={}))
        it.send(it.left, row(1))
        it.ingest(it.left)
    assert state_of(it).marks == {}


advance = ingest_commit._advance
CASES = [
    bad_record,
    record_out_of_shape,
    transactions,
    retention,
    retention_past_the_next_offset,
    table_of_an_older_version,
    pytest.param(compaction, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES)
def test_a_topic_that_is_whole_goes_on(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, case: Callable[[Mini], None]
) -> None:
    it = mini(services, spark, tmp_path, unique, SHAPED if case is record_out_of_shape else TEXT)
    case(it)
    it.send(it.left, row(9))
    it.ingest(it.left)
    end = end_of(it)
    assert it.raw(it.left)[-1]["value"] == row(9)
    assert (it.next(it.left), state_of(it).marks[0].offset) == ({0: end}, end - 1)
    it.send(it.left, row(10))
    it.ingest(it.left)
    assert it.raw(it.left)[-1]["value"] == row(10)


@BOTH_PATHS
def test_another_mark_than_the_topic_s_record_is_an_error(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the record at the last ingested offset were another one now."""
    it = mini(services, spark, tmp_path, unique, text)
    with monkeypatch.context() as patch:
        patch.setattr(ingest_commit, "_advance", lambda *arguments: replace(advance(*arguments), marks={0: Mark(1, 7)}))
        it.send(it.left, row(1), row(2))
        it.ingest(it.left)
    it.send(it.left, row(3))
    for _ in range(2):
        with pytest.raises(TopicTruncated, match="later records took their offsets"):
            list(runner.ingest_all(it.pipeline, lambda: spark, [it.left]))
    assert it.next(it.left) == {0: 2}
