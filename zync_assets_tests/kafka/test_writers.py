"""Records of several partitions, each at its own offset, and an error in one of the partitions."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from zync_assets.errors import ForeignRecord, RecordTooLarge
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import create_topic, high_watermarks
from zync_assets.kafka.writers import Writers
from zync_assets.offsets import OffsetRange
from zync_assets_tests.kafka.test_writer import REBUILD, batch, numbered

PARTS = [OffsetRange(partition, 0, 4_000) for partition in range(3)]


@pytest.fixture
def three(kafka: dict[str, str], unique: str) -> str:
    """A topic of three partitions."""
    create_topic(kafka, unique, 3, 1, {"max.message.bytes": "2000"})
    return unique


def test_each_record_lands_at_its_offset_in_its_partition(kafka: dict[str, str], three: str) -> None:
    with Writers(kafka, three, PARTS, REBUILD) as writers:
        for first in (0, 2_000):
            windows = {
                part.partition: [numbered(first, 1_000), numbered(first + 1_000, 1_000)]
                for part in PARTS[first // 2000 :]
            }
            writers.check_sizes(windows)
            marks = writers.marks(windows)
            assert {partition: window for partition, (window, _) in marks.items()} == dict.fromkeys(
                windows, first + 2_000
            )
            writers.write(windows)
    assert high_watermarks(kafka, three, range(3)) == {0: 2_000, 1: 4_000, 2: 4_000}
    for part in PARTS[1:]:
        rows = [row for each in read_range(kafka, three, part.partition, 0, 4_000) for row in each.to_pylist()]
        assert [row["value"] for row in rows] == [b"%d" % number for number in range(4_000)]


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
        made.check_sizes({2: [numbered(0, 3), batch([b"x" * 3_000])]})
