"""A step that lost to another writer plans and commits again; every other error is raised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zync_assets.conflicts import CONFLICTS, retried
from zync_assets.errors import BrokerUnavailable, CommitConflict, EtlError, ZyncError


class Table:
    """A table that other writers advance: ``errors`` are what our commits raise, one after the other."""

    def __init__(self, *errors: ZyncError, moving: bool = False) -> None:
        self.errors: Iterator[ZyncError] = iter(errors)
        self.moving = moving
        self.version = 0
        self.log: list[str] = []

    def read(self) -> int:
        return self.version

    def commit(self, version: int) -> str:
        if self.moving:
            self.version += 1
        for error in self.errors:
            raise error
        return f"committed on {version}"

    def run(self, first: int | None = None) -> str:
        return retried(self.read, self.commit, lambda version: version, first, self.log.append)


def test_a_conflict_is_tried_again_on_a_new_plan() -> None:
    table = Table(CommitConflict("another writer was first; run again"), moving=True)
    assert table.run() == "committed on 1"
    assert table.log == ["another writer was first; going on after it"]


def test_a_batch_that_was_read_already_is_committed_first() -> None:
    assert Table().run(first=7) == "committed on 7"


def test_another_error_of_an_older_batch_is_tried_again_if_another_writer_was_first() -> None:
    with pytest.raises(EtlError, match="a file is missing"):
        Table(EtlError("a file is missing")).run(first=0)
    assert Table(EtlError("a file is missing"), moving=True).run(first=0) == "committed on 1"
    with pytest.raises(EtlError, match="a file is missing"):
        Table(EtlError("a file is missing"), moving=True).run()


def test_an_outage_is_raised_without_a_new_plan() -> None:
    table = Table(BrokerUnavailable("no broker"), moving=True)
    with pytest.raises(BrokerUnavailable):
        table.run()
    assert (table.version, table.log) == (1, [])


def test_conflicts_without_end_are_an_error() -> None:
    table = Table(*[CommitConflict("another writer was first")] * (CONFLICTS + 1))
    with pytest.raises(CommitConflict):
        table.run()
    assert len(table.log) == CONFLICTS
