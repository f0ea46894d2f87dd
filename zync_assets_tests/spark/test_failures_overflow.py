"""The search for records that overflow Java's stack, by Spark jobs over ever fewer records."""

from __future__ import annotations

import pytest

from zync_assets.offsets import OffsetRange
from zync_assets.spark.failures import is_overflow, overflow_records


@pytest.mark.parametrize("bad", [[], [0], [999], [17, 18], [3, 500, 501, 998]])
def test_every_record_that_overflows_is_found_with_two_jobs_for_each_halving(bad: list[int]) -> None:
    asked: list[OffsetRange] = []

    def overflows(part: OffsetRange) -> bool:
        asked.append(part)
        return any(part.first <= offset < part.end for offset in bad)

    found = list(overflow_records(OffsetRange(4, 0, 1000), overflows))
    assert found == [OffsetRange(4, offset, offset + 1) for offset in bad]
    assert len(asked) <= 1 + 2 * 10 * len(bad)


def test_only_a_task_s_overflow_is_one() -> None:
    task = "Job aborted due to stage failure: Task 0 in stage 1.0 failed: java.lang.StackOverflowError\n\tat java.base"
    assert is_overflow(RuntimeError(task))
    assert not is_overflow(RuntimeError("java.lang.StackOverflowError\n\tat org.apache.spark.sql.catalyst"))
    assert not is_overflow(RuntimeError("Job aborted due to stage failure: java.lang.ArithmeticException"))
