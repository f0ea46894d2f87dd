"""The outputs of a match: several are one match if they lie side by side, and two matches of one record are a double."""

from __future__ import annotations

import pyarrow as pa

from zync_assets.audit.coverage import Matches
from zync_assets.lake.staging import SOURCE_TYPE


def sources(*offsets: int, topic: str = "A") -> pa.ListArray:
    return pa.array([[{"topic": topic, "partition": 0, "offset": offset}] for offset in offsets], SOURCE_TYPE)


def matches() -> Matches:
    return Matches(["A"], frozenset(["Out"]), {"items": 1, "total": 1, "copy": 1}, {})


def test_outputs_of_one_match_lie_side_by_side() -> None:
    found, last = matches(), dict[str, list[int]]()
    found.add("Out", 0, pa.array(["items"] * 5), sources(1, 1, 2, 3, 3), last)
    found.add("Out", 0, pa.array(["items", "items", "total"]), sources(3, 4, 3), last)
    found.add("Out", 1, pa.array(["items"]), sources(3), {})
    assert found.doubled == []


def test_a_match_whose_outputs_are_there_again_is_a_double() -> None:
    found = matches()
    found.add("Out", 0, pa.array(["items"] * 3), sources(1, 1, 2), {})
    # Another file.
    found.add("Out", 0, pa.array(["items"] * 2), sources(2, 3), {})
    assert found.doubled == [("items", "A", 0, 2)]
    found = matches()
    found.add("Out", 0, pa.array(["items", "total"] * 3), sources(1, 1, 2, 2, 1, 1), {})
    assert found.doubled == [("items", "A", 0, 1), ("total", "A", 0, 1)]


def test_inputs_of_other_rules_are_not_looked_at() -> None:
    found = matches()
    found.add("Out", 0, pa.array(["copy"] * 3), sources(1, 2, 1, topic="B"), {})
    assert found.doubled == []


def test_merged_outputs_and_those_of_a_rule_that_is_gone_are_not_looked_at() -> None:
    found = matches()
    both = pa.concat_arrays(
        [sources(1, 2), pa.array([sources(1).to_pylist()[0] + sources(2).to_pylist()[0]], SOURCE_TYPE)]
    )
    found.add("Out", 0, pa.array(["items"] * 3), both, {})
    found.add("Out", 0, pa.array(["gone"] * 3), sources(1, 2, 1), {})
    assert found.doubled == []
