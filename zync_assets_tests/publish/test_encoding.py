"""Compares staging's records with the topic's records, one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from zync_assets.publish.encoding import ENCODED_SCHEMA, first_difference


def batches(*rows: tuple[int, str], size: int = 2) -> Iterator[pa.RecordBatch]:
    made = [{"offset": offset, "key": b"k", "value": value.encode(), "headers": None} for offset, value in rows]
    for at in range(0, len(made), size):
        yield pa.RecordBatch.from_pylist(made[at : at + size], schema=ENCODED_SCHEMA)


STAGED = ((5, "a"), (6, "b"), (7, "c"), (8, "d"))


@pytest.mark.parametrize(
    ("theirs", "differs", "compacted"),
    [
        (STAGED, (None, 4), (None, 4)),
        (((5, "a"), (6, "x"), (7, "c"), (8, "d")), (6, 1), (6, 1)),
        (((5, "a"), (8, "d")), (6, 1), (None, 2)),
        (((7, "c"),), (5, 0), (None, 1)),
        (((5, "a"), (7, "x")), (6, 1), (7, 1)),
        (((5, "a"), (6, "b"), (7, "c")), (8, 3), (None, 3)),
        ((*STAGED, (9, "e")), (9, 4), (9, 4)),
        ((), (5, 0), (None, 0)),
    ],
)
def test_the_first_record_that_differs_is_found(
    theirs: tuple[tuple[int, str], ...], differs: tuple[int | None, int], compacted: tuple[int | None, int]
) -> None:
    """Of a compacted topic a record may be gone; one that is there must be staging's."""
    assert first_difference(batches(*STAGED), batches(*theirs, size=3)) == differs
    assert first_difference(batches(*STAGED), batches(*theirs, size=3), gaps_until=9) == compacted


@pytest.mark.parametrize(
    ("theirs", "differs"),
    [
        ((), (7, 0)),
        (((5, "a"),), (7, 1)),
        (((5, "a"), (8, "d")), (7, 1)),
        (((7, "c"), (8, "d")), (None, 2)),
    ],
)
def test_a_gap_past_the_announced_end_is_no_compaction(
    theirs: tuple[tuple[int, str], ...], differs: tuple[int | None, int]
) -> None:
    """The marker of a foreign transaction takes an offset and shows no record."""
    assert first_difference(batches(*STAGED), batches(*theirs), gaps_until=7) == differs


def test_an_id_of_the_registry_may_differ_where_it_means_the_same_schema() -> None:
    def row(key: bytes, value: bytes | None) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([{"offset": 5, "key": key, "value": value}], schema=ENCODED_SCHEMA)

    def alike(side: str, own: int, other: int) -> bool:
        return (side, own, other) == ("value", 1, 7)

    def differs(mine: tuple[bytes, bytes | None], theirs: tuple[bytes, bytes | None]) -> bool:
        return first_difference(row(*mine), row(*theirs), alike=alike)[0] is not None

    one, seven, eight = (b"\0\0\0\0" + bytes([number]) for number in (1, 7, 8))
    assert not differs((b"k", one + b"datum"), (b"k", seven + b"datum"))
    assert differs((b"k", one + b"datum"), (b"k", eight + b"datum"))
    assert differs((b"k", one + b"datum"), (b"k", seven + b"other"))
    assert differs((b"k", one + b"datum"), (b"j", seven + b"datum"))
    assert differs((one + b"k", None), (seven + b"k", None))
    assert differs((b"k", one), (b"k", None))
    assert differs((b"k", b"\0\0\0"), (b"k", b"\0\0\1"))
