"""Topics as they are: what Kafka and those who write to it may do to a topic has a defined result.

Ranges of odd topics are read in ``kafka/test_reader``; what retention, transactions and recreated topics mean for ingest is
in ``ingest/test_plan``, for publishing in ``publish/test_commit``. Here everything odd comes at once, through the whole
chain, and the checker judges; and topics change while they are read.
"""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from zync_assets import runner
from zync_assets.checks.output_checks import run_all
from zync_assets.errors import DataLoss, ForeignRecord, KafkaError, RecordTooLarge, TopicMissing, TopicRecreated
from zync_assets.ingest.commit import commit_raw
from zync_assets.ingest.plan import plan_ingest, read_input
from zync_assets.kafka.topics import create_topic, delete_topic, high_watermark, topic_states
from zync_assets.lake.publication import open_publish_state
from zync_assets.local.services import Services
from zync_assets.publish.commit import recreate_topic
from zync_assets.publish.plan import plan_publish
from zync_assets_tests.checker import statement as statements
from zync_assets_tests.checker.evidence import gather
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import Schemas
from zync_assets_tests.mini import BOTH, Mini, ingest, mini, publish, read_topic, row, transform
from zync_assets_tests.odd_topics import (
    Sent,
    add_partitions,
    configure,
    cut,
    in_transactions,
    open_transaction,
    plain,
    until,
)
from zync_assets_tests.shop import EPOCH, Shop, changes, make_shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULE = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id, v: in.value.v}}
"""
ANY_TIME = str(2**63 - 1)
Make = Callable[..., Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make()``: a pipeline that copies, with topics of its own; ``left``: more keys for the left input."""

    def made(left: str = "", create: str = "replication-factor: 1") -> Mini:
        text = BOTH.replace("topic: $left, ", f"topic: $left, {left}").replace("replication-factor: 1", create) + RULE
        return mini(services, spark, tmp_path, unique, text)

    return made


def odd_times(shop: Shop, records: Iterator[tuple[str, int, int, Any, Any]]) -> Iterator[Sent]:
    """Records whose times run backwards, are missing, in the future, or past all calendars."""
    soon = int(time.time() * 1000) + 3_600_000
    odd = (-1, soon, 10**17, EPOCH, EPOCH - 10**9)
    for place, (topic, partition, at, key, value) in enumerate(records):
        yield topic, partition, odd[place // 4 % 5] if place % 4 == 0 else at, key, shop.encoded(topic, value)


@pytest.mark.slow
def test_everything_odd_at_once_is_exactly_once(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    kafka = {"bootstrap.servers": services.bootstrap_servers}
    shop = make_shop(services, tmp_path, unique, partitions=(2, 1), settle="1")
    for topic in (shop.orders, shop.status):
        configure(kafka, topic, message_timestamp_after_max_ms=ANY_TIME)
    compact(kafka, shop)
    for round_, (first, end) in enumerate(itertools.pairwise([0, 12, 24])):
        # Partition 1 of the orders stays idle; that of the second round is new to the pipeline.
        places = {0: 0, 1: 0} if round_ == 0 else {0: 0, 1: 2}
        odd = [
            (topic, places[partition] if topic == shop.orders else 0, at, key, value)
            for topic, partition, at, key, value in odd_times(shop, changes(shop, range(first, end), seed=5))
        ]
        plain(kafka, [record for record in odd if record[0] == shop.orders])
        in_transactions(
            kafka, unique, [record for record in odd if record[0] == shop.status], lambda place: place % 3 == 0
        )
        ingest(shop.pipeline)
        transform(shop.pipeline)
        publish(shop.pipeline)
        if round_ == 0:
            # An output with more partitions is an error (test_partitions).
            add_partitions(kafka, shop.orders, 3)
    statement = statements.shop(unique)
    evidence = gather(services.bootstrap_servers, Path(shop.pipeline.lake), statement)
    report = judge(statement, evidence, Schemas(services.registry_url), drained=True)
    assert report.sound, str(report)
    assert [found for found in run_all(shop.pipeline) if found.severity == "error" and not found.passed] == []
    # It was odd: offsets are missing in both inputs, and times too.
    for topic in (shop.orders, shop.status):
        log = evidence.logs[topic][0]
        assert 0 < len(log.records) < log.end
        assert None in {record.timestamp for record in log.records}
    assert len(read_topic(shop.pipeline, shop.new)) > 20


def compact(kafka: dict[str, str], shop: Shop) -> None:
    """Records in partition 0 of the orders, some of which compaction has taken."""
    hasty = {"segment_ms": "100", "min_cleanable_dirty_ratio": "0.01", "max_compaction_lag_ms": "100"}
    configure(kafka, shop.orders, cleanup_policy="compact", **hasty)
    row_ = {"op": "c", "before": None, "after": {"id": 10**6, "customer": "again", "item": None}}

    waves = itertools.count()

    def taken() -> bool:
        # The broker begins a segment by the records' own times.
        at = EPOCH + 1000 * next(waves)
        plain(
            kafka, [(shop.orders, 0, at, f"again-{place % 3}", shop.encoded(shop.orders, row_)) for place in range(9)]
        )
        time.sleep(0.2)
        log = read_topic(shop.pipeline, shop.orders)
        return len(log) <= log[-1][0]

    until("the broker compacts", taken)
    # Stops compaction, so that the topic no longer changes.
    configure(kafka, shop.orders, cleanup_policy="delete")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["open", "aborted", "committed"])
def test_a_foreign_transaction_in_an_output_topic_is_found_at_once(make: Make, unique: str, end: str) -> None:
    """No read-committed reader gets past an open one."""
    it = make()
    it.send(it.left, row(0), row(1))
    it.step()
    it.publish()
    foreign = open_transaction(it.pipeline.kafka, it.out, unique, b"{}")
    if end != "open":
        (foreign.abort_transaction if end == "aborted" else foreign.commit_transaction)(20)
    until("the record is there", lambda: high_watermark(it.pipeline.kafka, it.out, 0) > 2)
    it.send(it.left, *[row(number) for number in range(2, 9)])
    it.step()
    began = time.monotonic()
    with pytest.raises(ForeignRecord, match=rf"the record at offset 2 .*--recreate {it.out}"):
        it.publish()
    found = next(found for found in run_all(it.pipeline) if found.name == "staging_equals_topic")
    assert not found.passed and "offset 2 " in found.summary
    assert time.monotonic() - began < 50, "it waited for a transaction that is not over"
    recreate_topic(it.pipeline, it.out)
    it.publish()
    assert [offset for offset, _, _ in read_topic(it.pipeline, it.out)] == list(range(9))


@pytest.mark.slow
def test_removed_records_of_another_program_do_not_count_as_published(make: Make) -> None:
    """Retention may remove the foreign records before anybody sees them. Their offsets remain."""
    it = make()
    it.send(it.left, row(0), row(1))
    it.step()
    it.publish()
    plain(it.pipeline.kafka, [(it.out, 0, EPOCH, "foreign", b"{}")] * 2)
    cut(it.pipeline.kafka, it.out, 4)
    it.send(it.left, *[row(number) for number in range(2, 9)])
    it.step()
    with pytest.raises(ForeignRecord, match=rf"the record at offset 2 .*--recreate {it.out}"):
        it.publish()
    recreate_topic(it.pipeline, it.out)
    assert it.publish().records == 9


@pytest.mark.slow
def test_a_record_that_is_too_large_is_found_before_its_window_is_announced(make: Make) -> None:
    """The topic took it when it was staged; its owner has other ideas by now."""
    it = make()
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    it.send(it.left, row(0), row(1), row(2, "x" * 5000))
    it.step()
    configure(it.pipeline.kafka, it.out, max_message_bytes="2000")
    with pytest.raises(
        RecordTooLarge, match=rf"offset 2 of {it.out}/0 takes 50\d\d bytes.*2000.*raise it to 50\d\d or more"
    ):
        it.publish()
    assert high_watermark(it.pipeline.kafka, it.out, 0) == 0
    assert open_publish_state(it.lake, "Staging", it.out).window is None
    configure(it.pipeline.kafka, it.out, max_message_bytes="6000")
    assert it.publish().records == 3


def test_what_a_topic_takes_is_asked_before_a_record_gets_a_number(make: Make) -> None:
    """A topic that was made by hand takes little; the file does not say so."""
    it = make()
    create_topic(it.pipeline.kafka, it.out, 1, 1, {"max.message.bytes": "2000"})
    it.send(it.left, row(0), row(1, "x" * 5000), row(2))
    it.step()
    it.publish()
    assert [value["id"] for value in it.values()] == [0, 2]
    assert it.classes(it.left) == {"done": 2, "quarantined": 1}


def test_a_compacted_topic_takes_no_record_without_a_key(make: Make) -> None:
    """Kafka refuses such a record, and would refuse it in each run. ETL finds it before it gets a number."""
    it = make()
    create_topic(it.pipeline.kafka, it.out, 1, 1, {"cleanup.policy": "compact,delete"})
    it.send(it.left, row(0), (None, row(1)), row(2))
    it.step()
    it.publish()
    assert [value["id"] for value in it.values()] == [0, 2]
    assert it.classes(it.left) == {"done": 2, "quarantined": 1}


def test_a_topic_that_is_compacted_once_its_records_are_staged_gets_none_without_a_key(make: Make) -> None:
    it = make()
    create_topic(it.pipeline.kafka, it.out, 1, 1, {})
    it.send(it.left, row(0), (None, row(1)))
    it.step()
    configure(it.pipeline.kafka, it.out, cleanup_policy="compact")
    with pytest.raises(
        KafkaError, match=rf"offset 1 of {it.out}/0 has no key.*Remove `compact` from the cleanup.policy"
    ):
        it.publish()
    assert high_watermark(it.pipeline.kafka, it.out, 0) == 0
    assert open_publish_state(it.lake, "Staging", it.out).window is None
    configure(it.pipeline.kafka, it.out, cleanup_policy="delete")
    assert it.publish().records == 2


@pytest.mark.parametrize("records", [0, 1, 5])
def test_a_topic_that_is_created_again_while_it_is_read_is_not_ingested(make: Make, records: int) -> None:
    """With fewer records than before, as many, or more: offsets tell nothing, the topic's id does."""
    it = make("on-data-loss: continue, ")
    it.send(it.left, row(0))
    batch = read_input(it.spark, it.pipeline, plan_ingest(it.pipeline, it.left))
    delete_topic(it.pipeline.kafka, it.left)
    create_topic(it.pipeline.kafka, it.left, 1, 1, {})
    it.send(it.left, *[row(10 + number) for number in range(records)])
    with pytest.raises(TopicRecreated, match=rf"{it.left} is another topic .* another pool"):
        commit_raw(it.pipeline, batch)
    assert it.next(it.left) == {}


def test_a_topic_that_goes_while_it_is_read_is_missing(make: Make) -> None:
    it = make()
    it.send(it.left, row(0))
    batch = read_input(it.spark, it.pipeline, plan_ingest(it.pipeline, it.left))
    delete_topic(it.pipeline.kafka, it.left)
    with pytest.raises(TopicMissing, match=it.left):
        commit_raw(it.pipeline, batch)


@pytest.mark.parametrize("accepted", [True, False])
def test_retention_that_overtakes_a_read_is_accounted_for_where_that_is_accepted(
    make: Make, monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    it = make("on-data-loss: continue, " if accepted else "")
    it.send(it.left, *[row(number) for number in range(6)])
    left = [4]

    def overtaken(*arguments: Any) -> Any:
        if left:
            cut(it.pipeline.kafka, it.left, left.pop())
        return read_input(*arguments)

    monkeypatch.setattr(runner, "read_input", overtaken)

    def run() -> None:
        list(runner.ingest_all(it.pipeline, lambda: it.spark, [it.left]))

    if not accepted:
        with pytest.raises(DataLoss, match=f"{it.left}/0 are gone .*begins at 4.*on-data-loss: continue"):
            run()
        return
    run()
    it.etl()
    assert [value["id"] for value in it.values()] == [4, 5]
    assert it.next(it.left) == {0: 6}


@pytest.mark.parametrize(
    "count",
    [pytest.param(6, id="30 MB"), pytest.param(300, id="1.5 GB", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_records_of_5_mb_pass_in_bounded_memory(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, count: int
) -> None:
    limit = str(8 << 20)
    text = (
        BOTH.replace("replication-factor: 1", f"replication-factor: 1, config: {{max.message.bytes: {limit}}}") + RULE
    )
    it = mini(services, spark, tmp_path, unique, text)
    configure(it.pipeline.kafka, it.left, max_message_bytes=limit)
    producer = Producer({**it.pipeline.kafka, "message.max.bytes": limit, "queue.buffering.max.kbytes": 1 << 17})
    for number in range(count):
        producer.produce(it.left, b'{"id": %d, "v": "%s"}' % (number, b"%c" % (97 + number % 26) * (5 << 20)), b"k", 0)
        producer.poll(5 if len(producer) > 10 else 0)
    assert producer.flush(60) == 0
    it.step()
    it.publish()
    assert plan_publish(it.pipeline, it.out).nothing_to_do
    assert high_watermark(it.pipeline.kafka, it.out, 0) == count
    assert it.classes(it.left) == {"done": count}
    found = next(found for found in run_all(it.pipeline) if found.name == "staging_equals_topic")
    assert found.passed and found.numbers["compared"] == count
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10 < 4096


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_backlog_of_a_million_records_beside_an_empty_topic(make: Make) -> None:
    it = make()
    payload = b'{"op": "c", "id": %d, "v": "v"}'
    plain(it.pipeline.kafka, ((it.left, 0, EPOCH + n, b"k", payload % n) for n in range(1_000_000)))
    it.step()
    it.publish()
    assert it.next(it.left) == {0: 1_000_000}
    assert it.next(it.right) == {0: 0}
    assert high_watermark(it.pipeline.kafka, it.out, 0) == 1_000_000
    assert [found for found in run_all(it.pipeline) if found.severity == "error" and not found.passed] == []
    assert topic_states(it.pipeline.kafka, [it.right])[it.right].partitions[0].end == 0
