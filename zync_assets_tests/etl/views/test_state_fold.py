"""The files of a table that are due for a fold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl.views.state import StateFiles
from zync_assets.etl.views.state_fold import RUNS, due_files
from zync_assets.lake.log import DataFile


def run(name: str, *records: int) -> list[DataFile]:
    """The files of one write."""
    return [DataFile(f"{name}/part-{at}.parquet", 1, count) for at, count in enumerate(records)]


def paths(files: StateFiles | None) -> list[str]:
    return [] if files is None else [item.path for item in files.all]


def test_many_files_of_one_write_are_not_due() -> None:
    large = run("batch-1", *[250_000] * 100)
    small = [item for at in range(2, RUNS) for item in run(f"batch-{at}", 1_000)]
    assert paths(due_files(StateFiles([*large, *small]))) == []
    newest = run("batch-99", 1_000)
    # The small files become one. The large ones are left alone.
    assert paths(due_files(StateFiles([*large, *small, *newest]))) == [item.path for item in [*small, *newest]]


def test_all_files_are_due_if_a_quarter_of_the_versions_is_replaced() -> None:
    versions, replaced = run("batch-1", 300, 300), [item for at in range(RUNS) for item in run(f"batch-{at}/gone", 25)]
    assert paths(due_files(StateFiles(versions, replaced))) == [item.path for item in [*versions, *replaced]]
    assert paths(due_files(StateFiles(versions * 5, replaced))) == [item.path for item in replaced]


@given(st.lists(st.lists(st.integers(1, 1_000), min_size=1, max_size=4), max_size=3 * RUNS))
def test_files_of_one_write_are_due_together(runs: list[list[int]]) -> None:
    files = [item for at, records in enumerate(runs) for item in run(f"batch-{at}", *records)]
    due = set(paths(due_files(StateFiles(files))))
    assert not due or len(runs) >= RUNS
    for at, records in enumerate(runs):
        own = {item.path for item in run(f"batch-{at}", *records)}
        assert own <= due or not own & due
