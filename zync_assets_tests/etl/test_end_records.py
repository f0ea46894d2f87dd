"""The places of transactions whose ids hold no end, by the changes with these ids."""

from __future__ import annotations

from dataclasses import replace

from zync_assets.etl.transactions import OpenTransaction
from zync_assets_tests.etl.test_transactions import both, change, closed


def test_changes_show_the_places_of_transactions_whose_ids_hold_no_end() -> None:
    """An END record without changes in the inputs has the place of the one before it, and one that came twice counts once."""
    domain = replace(both(change(10, "a", 1, 11), change(10, "a", 2, 12), change(20, "c", 1, 21)), first=1)
    records = [(0, "old", {}), (0, "a", {"orders": 2}), (0, "b", {"audit": 4}), (0, "a", {"orders": 2})]
    domain.ends = closed(*records, (0, "c", {"orders": 1}))
    ends = domain.placed()
    assert ends.names.to_pylist() == ["a", "b", "c"]
    assert list(zip(ends.highs, ends.lows, strict=True)) == [(10, 13), (10, 13), (20, 22)]
    assert [ends.bound(at) for at in range(3)] == [(20, 21), (20, 21), (20, 22)]
    found = domain.whole()
    assert (found.order, found.next_offset((10, 13)), found.next_offset((9, 0))) == ((20, 22), 3, None)
    domain.ends = closed(*records[:2], (0, "b", {"status": 1}), (0, "c", {"orders": 1}))
    found = domain.whole()
    assert (found.order, found.blocker) == ((10, 13), OpenTransaction("b", ("status",)))


def test_a_lost_end_record_does_not_make_a_transaction_whole() -> None:
    """The record of ``a`` is in quarantine. One change of ``b`` is there, and the other topic lacks one."""
    domain = replace(both(change(10, "a", 1, 11), change(20, "b", 1, 21)), first=0)
    domain.ends = closed((0, "b", {"orders": 2}))
    assert domain.placed().bound(0) == (20, 22)
    assert domain.whole().blocker == OpenTransaction("b", ("orders",))
