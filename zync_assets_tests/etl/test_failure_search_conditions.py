"""Records on which the condition of a group, or the partition of an output, can't be computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.etl import failure_search
from zync_assets.local.services import Services
from zync_assets_tests.mini import BOTH, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[[str], Mini]
GROUP = """
transforms:
  - name: gather
    type: group
    records: {l: $left, r: $right}
    group-by: value.id
    complete-when: count(*) = CAST(max(value.v) AS INT)
    out: $out
    key: concat('k', coalesce(first(l).value.id, first(r).value.id))
    value: {n: count(*), l: first(l).value.v}
"""
COPY = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {v: in.value.v}}
"""


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    return lambda text: mini(services, spark, tmp_path, unique, text)


def reasons(it: Mini) -> list[tuple[str, int, str]]:
    return [(entry["topic"], entry["first"], entry["text"]) for entry in it.ledger("quarantined")]


@pytest.mark.slow
def test_a_record_on_which_complete_when_fails_is_in_quarantine_and_its_group_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = make(BOTH + GROUP)
    it.send(it.left, row(1, "2"), row(2, "x"), row(3, "3"), row(4, "9"))
    it.send(it.right, row(1, "2"), row(2, "1"))
    it.step()
    assert it.values() == [{"n": 2, "l": "2"}, {"n": 1, "l": None}]
    [(topic, offset, reason)] = reasons(it)
    assert (topic, offset) == (it.left, 1)
    assert reason.startswith("complete-when: `count(*)` = CAST")
    assert "CAST_INVALID_INPUT" in reason
    it.send(it.right, row(3, "y"), row(3, "z"))
    # The first job finds all failing records. The second job finds no further record.
    monkeypatch.setattr(failure_search, "MOST_JOBS", 2)
    it.step()
    assert len(it.values()) == 2
    assert {place[:2] for place in reasons(it)} == {(it.left, 1), (it.right, 2), (it.right, 3)}
    it.send(it.right, row(3, "3"), row(3, "3"))
    it.step()
    assert it.values()[2:] == [{"n": 3, "l": "3"}]
    assert it.classes(it.left) == {"done": 2, "quarantined": 1, "pending": 1}
    assert it.classes(it.right) == {"done": 4, "quarantined": 2}
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed


@pytest.mark.slow
def test_a_record_without_a_group_waits_whatever_fails_beside_it(make: Make) -> None:
    """No group asks whether a record with a null key completes it."""
    it = make(BOTH + GROUP)
    it.send(it.left, row(None, "x"))
    it.send(it.right, row(1, "2"))
    it.step()
    it.send(it.left, row(None, "y"), row(2, "z"))
    it.step()
    assert reasons(it)[0][:2] == (it.left, 2)
    assert it.classes(it.left) == {"pending": 2, "quarantined": 1}


@pytest.mark.slow
def test_a_record_whose_partition_fails_is_in_quarantine(make: Make) -> None:
    it = make(BOTH.replace("create: {", 'partition-by: "CAST(value.v AS INT)", create: {partitions: 3, ') + COPY)
    it.send(it.left, row(1, "1"), row(2, "x"), row(3, "5"))
    it.step()
    found = {place["value"]["v"]: place["kafka"]["partition"] for place in it.staged()}
    assert found == {"1": 1, "5": 2}
    [(topic, offset, reason)] = reasons(it)
    assert (topic, offset) == (it.left, 1)
    assert reason.startswith("partition-by: CAST(value.v AS INT)")
    assert "CAST_INVALID_INPUT" in reason
    assert it.classes(it.left) == {"done": 2, "quarantined": 1}
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed
