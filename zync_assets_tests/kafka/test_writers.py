"""Records of several partitions, each at its own offset, and an error in one of the partitions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, Producer

from zync_assets.errors import ForeignRecord, KafkaError, RecordTooLarge
from zync_assets.kafka import client
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import create_topic, high_watermarks
from zync_assets.kafka.writer import InOrder, SharedProducer
from zync_assets.kafka.writers import TimedRecord, TimedWriter, Writers
from zync_assets.kafka.zero_copy import Handover, Report
from zync_assets.offsets import OffsetRange
from zync_assets_tests.kafka.test_writer import REBUILD, batch, numbered
from zync_assets_tests.odd_topics import configure

PARTS = [OffsetRange(partition, 0, 4_000) for partition in range(3)]


@pytest.fixture
def three(kafka: dict[str, str], unique: str) -> str:
    """A topic of three partitions."""
    create_topic(kafka, unique, 3, 1, {"max.message.bytes": "2000"})
    return unique


def written(kafka: dict[str, str], topic: str, partition: int, end: int) -> list[bytes | None]:
    """The values of a partition below an offset."""
    return [row["value"] for each in read_range(kafka, topic, partition, 0, end) for row in each.to_pylist()]


def test_each_record_lands_at_its_offset_in_its_partition(kafka: dict[str, str], three: str) -> None:
    with Writers(kafka, three, PARTS, REBUILD) as writers:
        for first in (0, 2_000):
            windows = {
                part.partition: [numbered(first, 1_000), numbered(first + 1_000, 1_000)]
                for part in PARTS[first // 2000 :]
            }
            writers.check_records(windows)
            marks = writers.marks(windows)
            assert {partition: window for partition, (window, _) in marks.items()} == dict.fromkeys(
                windows, first + 2_000
            )
            writers.write(windows)
    assert high_watermarks(kafka, three, range(3)) == {0: 2_000, 1: 4_000, 2: 4_000}
    for part in PARTS[1:]:
        assert written(kafka, three, part.partition, 4_000) == [b"%d" % number for number in range(4_000)]


def test_an_error_in_one_partition_ends_all_writers(kafka: dict[str, str], three: str) -> None:
    producer = Producer(kafka)
    producer.produce(three, b"foreign", partition=1)
    assert producer.flush(10) == 0
    with (
        pytest.raises(ForeignRecord, match=f"{three}/1 holds a record at offset 0"),
        Writers(kafka, three, PARTS, REBUILD) as made,
    ):
        made.write({part.partition: [numbered(0, 3)] for part in PARTS})
    assert high_watermarks(kafka, three, range(3))[1] == 1
    with pytest.raises(RecordTooLarge, match="offset 3 of"), Writers(kafka, three, PARTS[2:], REBUILD) as made:
        made.check_records({2: [numbered(0, 3), batch([b"x" * 3_000])]})


def test_a_topic_without_a_limit_is_written_to(kafka: dict[str, str], unique: str) -> None:
    create_topic(kafka, unique, 2, 1, {"max.message.bytes": str(2**31 - 1)})
    with Writers(kafka, unique, [OffsetRange(0, 0, 3)], REBUILD) as writers:
        writers.write({0: [numbered(0, 3)]})
    with TimedWriter(kafka, unique, 1, 0) as writer:
        writer.write([TimedRecord(None, (), None, b"a")])
    assert high_watermarks(kafka, unique, range(2)) == {0: 3, 1: 1}


@pytest.mark.parametrize("refused", [0, 2_500])
def test_a_record_that_the_broker_refuses_leaves_a_prefix_in_each_partition(
    kafka: dict[str, str], unique: str, refused: int
) -> None:
    # A compacted topic takes no record without a key: only the broker knows.
    create_topic(kafka, unique, 3, 1, {"cleanup.policy": "compact"})
    values: list[bytes | None] = [b"%d" % number for number in range(30_000)]
    keys: list[bytes | None] = [b"%d" % number for number in range(30_000)]
    lacking = [*keys[:refused], None, *keys[refused + 1 :]]
    with (
        pytest.raises(KafkaError, match=rf"{unique}/1 from offset \d+ on.*validate"),
        Writers(kafka, unique, PARTS, REBUILD) as made,
    ):
        made.write({partition: [batch(values, lacking if partition == 1 else keys)] for partition in range(3)})
    ends = high_watermarks(kafka, unique, range(3))
    assert ends[1] <= refused
    for partition, end in ends.items():
        assert written(kafka, unique, partition, end) == values[:end]


@pytest.mark.parametrize("ends", [False, True])
def test_an_error_names_the_partition_whose_record_the_broker_refused(
    kafka: dict[str, str], three: str, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The broker's refusal of one record makes librdkafka drop the records of the other partitions. The reports on these may come
    first."""
    local, refusal = ClientError(ClientError._GAPLESS_GUARANTEE), ClientError(ClientError.INVALID_RECORD)
    end = [KafkaException(ClientError(ClientError._FATAL))] if ends else []
    dropped = [Report(2, 1, local, None), Report(1, 1, local, None)]
    answers = iter([*end, dropped, [], [Report(1, 1, refusal, None)]])

    def reports(*_: float) -> list[Report]:
        answer = next(answers)
        if isinstance(answer, KafkaException):
            raise answer
        return answer

    producer = SharedProducer(kafka, three)
    for part in PARTS:
        InOrder(kafka, three, part.partition, part.first, REBUILD, producer)
    monkeypatch.setattr(Handover, "reports", reports)
    with pytest.raises(KafkaError, match=f"{three}/1 from offset 0 on"):
        producer.serve(0)
    producer.close()


def test_a_record_of_another_writer_is_found_in_its_partition(kafka: dict[str, str], three: str) -> None:
    with (
        pytest.raises(ForeignRecord, match=f"{three}/1 holds a record at offset 1 "),
        Writers(kafka, three, PARTS, REBUILD) as made,
    ):
        # The first record of each partition is confirmed by itself.
        made.write({part.partition: [numbered(0, 1)] for part in PARTS})
        producer = Producer(kafka)
        producer.produce(three, b"foreign", partition=1)
        assert producer.flush(10) == 0
        made.write({part.partition: [numbered(1, 2_000)] for part in PARTS})
    for partition, end in high_watermarks(kafka, three, (0, 2)).items():
        assert written(kafka, three, partition, end) == [b"%d" % number for number in range(end)]


@pytest.mark.parametrize("hours", [(0, 0, 5, 0), (0, 5, 5, 5)])
def test_a_timestamp_that_the_topic_does_not_take_is_told_with_the_cure(
    kafka: dict[str, str], three: str, hours: Sequence[int]
) -> None:
    """Several such records of a batch have another error in librdkafka than a single one."""
    times = [int(time.time() * 1000) + count * 3_600_000 for count in hours]
    with (
        pytest.raises(KafkaError, match=f"Raise message.timestamp.after.max.ms .* of {three} "),
        TimedWriter(kafka, three, 0, 0) as writer,
    ):
        writer.write([TimedRecord(at, (), None, b"a") for at in times])
    configure(kafka, three, message_timestamp_after_max_ms=str(2**63 - 1))
    (first,) = high_watermarks(kafka, three, [0]).values()
    assert 1 <= first <= 2
    with TimedWriter(kafka, three, 0, first) as writer:
        writer.write([TimedRecord(at, (), None, b"a") for at in times[first:]])
    assert high_watermarks(kafka, three, [0]) == {0: 4}


def test_a_refusal_is_over_once_a_broker_has_answered(
    kafka: dict[str, str], three: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TimedWriter(kafka, three, 0, 0) as writer:
        connection = writer._connection  # pyright: ignore[reportPrivateUsage]
        connection._note(ClientError(ClientError._AUTHENTICATION, "refused"))  # pyright: ignore[reportPrivateUsage]
        writer.write([TimedRecord(None, (), None, b"a")])
        monkeypatch.setattr(client, "PATIENCE", 0)
        connection.raise_refusal("writing", 0)
