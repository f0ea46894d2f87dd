"""The raw history once more, for each kind of pipeline: what ``zync diff`` shows of an edit is what ``zync rebuild`` stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zync_assets.cli.diff import key_differences
from zync_assets.lake.quarantine_table import EVERYTHING
from zync_assets.runner import rebuild_all, replay_all
from zync_assets_tests.etl.test_rebuild import LOOKS, Make, make, rebuilt, rows, sound
from zync_assets_tests.etl.test_streams import SHOP
from zync_assets_tests.etl.test_transaction_records import EVENT, TYPE, Source, source
from zync_assets_tests.mini import BOTH, Mini, row

__all__ = ["make", "source"]
ZED = """
transforms:
  - name: copy
    type: stateless
    where: value.op=="c"
    in: $left
    out: $out
    zed: |
      | out:={key: in.key, value: {l: in.value.v, n: in.value.id + 1}}
"""


def shown(it: Mini, edited: Mini, folder: Path) -> dict[str, Any]:
    """Key → the new row, as ``zync diff`` shows it."""
    folder.mkdir()
    return {str(item.key): item.new for item in key_differences(it.pipeline, edited.pipeline, folder)}


@pytest.mark.slow
def test_a_pipeline_in_zed(make: Make, tmp_path: Path) -> None:
    it = make(BOTH + ZED)
    it.send(it.left, ("a", row(1, "one")), ("b", row(2, "TWO")), ("c", row(3, "three", "x")), ("d", None))
    it.step()
    edited = it.edited(BOTH + ZED.replace("in.value.v", "upper(in.value.v)"))
    wanted = {"a": {"l": "ONE", "n": 2}}
    assert shown(it, edited, tmp_path / "diff") == wanted
    rebuilt(edited)
    assert rows(edited) == {"b": {"l": "TWO", "n": 3}, **wanted}
    sound(edited)


@pytest.mark.slow
def test_a_pipeline_with_transactions(source: Source, tmp_path: Path) -> None:
    """A rebuild takes what ETL has taken, and the transaction that is under way comes later."""
    it = source.it
    source.changes(1, ("left", "c", 1, "a"), ("right", "c", 1, "new"), ("left", "c", 2, "B"), ("right", "c", 2, "new"))
    source.commit(1)
    source.changes(2, ("left", "u", 2, "c"), ("right", "u", 2, "paid"))
    source.commit(2)
    source.changes(3, ("left", "u", 1, "d"))
    source.run()
    text = SHOP.replace(TYPE, EVENT) + f"transactions: {{topic: {source.topic}, format: json}}\n"
    edited = it.edited(text.replace("l: left.value.v", "l: upper(left.value.v)"))
    wanted = {"1": {"l": "A", "r": "new"}}
    assert shown(it, edited, tmp_path / "diff") == wanted
    rebuilt(edited)
    assert rows(edited) == {"2": {"l": "c", "r": "paid"}, **wanted}
    sound(edited)
    source.commit(3)
    Source(edited, source.topic).run()
    assert rows(edited)["1"] == {"l": "d", "r": "new"}
    sound(edited)


@pytest.mark.slow
def test_a_rebuild_that_was_killed_before_a_row_came_looks_the_row_up(make: Make) -> None:
    text = BOTH[: BOTH.index("outputs:")] + LOOKS
    it = make(text.replace("missing: wait, wait: 10m", "missing: quarantine"))
    it.send(it.right, ("k1", row(1, "A")))
    it.send(it.left, ("a", row(1, "x")), ("b", row(2, "y")))
    it.step()
    assert it.classes(it.left) == {"done": 1, "quarantined": 1}
    # The scratch pool has the record without its row, and is there for the next rebuild.
    assert "~rebuild/Staging" in (commit.pool for commit in rebuild_all(it.pipeline, lambda: it.spark, topics=[it.out]))
    it.send(it.right, ("k2", row(2, "B")))
    it.step()
    list(replay_all(it.pipeline, lambda: it.spark, EVERYTHING))
    assert it.values() == [{"l": "x", "t": "A"}, {"l": "y", "t": "B"}]
    assert not any(commit.outputs for commit in rebuilt(it, it.out))
    assert it.classes(it.left) == {"done": 2}
    sound(it)
