"""How much of a backlog a batch takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl.plan import first_batch
from zync_assets.lake.log import DataFile
from zync_assets.offsets import OffsetRange, subtract


def file(partition: int, first: int, last: int, records: int, max_time: int, min_time: int | None = None) -> DataFile:
    return DataFile(f"part-{partition}-{first}.parquet", 1, records, partition, first, last, min_time, max_time)


def test_little_is_taken_whole() -> None:
    ranges = {"a": (OffsetRange(0, 5, 20),), "b": ()}
    assert first_batch(ranges, {"a": [file(0, 5, 9, 5, 1)]}, 100) == ranges


def test_what_is_earlier_goes_first_whatever_its_topic() -> None:
    ranges = {"a": (OffsetRange(0, 0, 20),), "b": (OffsetRange(0, 0, 20),)}
    files = {
        "a": [file(0, 0, 9, 10, 100, 0), file(0, 10, 19, 10, 400, 300)],
        "b": [file(0, 0, 9, 10, 200, 100), file(0, 10, 19, 10, 300, 200)],
    }
    assert first_batch(ranges, files, 15) == {"a": (OffsetRange(0, 0, 10),), "b": (OffsetRange(0, 0, 10),)}
    assert first_batch(ranges, files, 25) == {"a": (OffsetRange(0, 0, 10),), "b": (OffsetRange(0, 0, 20),)}


def test_a_batch_ends_where_no_topic_is_ahead_of_another() -> None:
    """Invoices 0 to 99 in one file, their two statuses each in files of 50 invoices: the third one of statuses would
    have to wait for the second one of invoices."""
    files = {
        "invoices": [file(0, 100 * n, 100 * n + 99, 100, 100 * n + 99, 100 * n) for n in range(3)],
        "statuses": [file(0, 100 * n, 100 * n + 99, 100, 50 * n + 49, 50 * n) for n in range(6)],
    }
    ranges = {topic: (OffsetRange(0, 0, 100 * len(each)),) for topic, each in files.items()}
    even = {"invoices": (OffsetRange(0, 0, 100),), "statuses": (OffsetRange(0, 0, 200),)}
    assert first_batch(ranges, files, 400) == even
    assert first_batch(ranges, files, 900) == ranges


def test_a_time_that_runs_back_does_not_take_a_later_file_first() -> None:
    files = {"a": [file(0, 0, 9, 10, 900), file(0, 10, 19, 10, 100)], "b": [file(0, 0, 9, 10, 500)]}
    ranges = {"a": (OffsetRange(0, 0, 20),), "b": (OffsetRange(0, 0, 10),)}
    assert first_batch(ranges, files, 10) == {"a": (), "b": (OffsetRange(0, 0, 10),)}


def test_offsets_without_records_cost_nothing() -> None:
    """All of them were quarantined, or are gone: the range has no file."""
    ranges = {"a": (OffsetRange(0, 0, 10**9), OffsetRange(1, 0, 10))}
    assert first_batch(ranges, {"a": [file(1, 0, 9, 10, 1)]}, 1) == ranges


backlogs = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 50), st.none() | st.integers(0, 99)), max_size=20
)


@given(backlogs, st.integers(1, 100))
def test_batch_after_batch_takes_all_once_and_none_is_large(
    backlog: list[tuple[str, int, int, int | None]], limit: int
) -> None:
    files: dict[str, list[DataFile]] = {"a": [], "b": []}
    ends: dict[tuple[str, int], int] = {}
    for topic, partition, records, time in backlog:
        first = ends.get((topic, partition), 0)
        files[topic].append(file(partition, first, first + records - 1, records, time))
        ends[topic, partition] = first + records + 3  # a gap, which a marker may leave
    ranges = {
        name: tuple(OffsetRange(p, 0, end) for (topic, p), end in sorted(ends.items()) if topic == name)
        for name in ("a", "b")
    }
    largest = max((item.records for each in files.values() for item in each), default=0)
    rounds = 0
    while any(ranges.values()):
        here = {
            topic: [f for f in each if any(r.partition == f.partition and r.first <= f.first for r in ranges[topic])]
            for topic, each in files.items()
        }
        batch = first_batch(ranges, here, limit)
        taken = [
            f for topic, each in here.items() for f in each
            if any(r.partition == f.partition and r.first <= f.first < r.end for r in batch[topic])
        ]  # fmt: skip
        assert any(batch.values())
        assert sum(f.records for f in taken) < limit + largest
        ranges = {topic: tuple(subtract(parts, batch[topic])) for topic, parts in ranges.items()}
        rounds += 1
    assert rounds <= max(1, len(backlog))
