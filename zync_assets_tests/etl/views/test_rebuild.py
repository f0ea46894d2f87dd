"""Views over inputs whose raw records retention removes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.checks.state_checks import state_equals_raw
from zync_assets.errors import EtlError
from zync_assets.lake.raw import open_raw
from zync_assets.local.services import Services
from zync_assets.runner import rebuild_all
from zync_assets_tests.mini import Mini, make_pipeline, mini_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """
inputs:
  - {{topic: {left}, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, of bigint"{more}}}
  - {{topic: {right}, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, name string"{more}}}
outputs:
  - {{topic: {out}, pool: Staging, format: json, create: {{}}}}
transforms:
  - type: view
    tables: {{t: {left}, u: {right}}}
    from: t LEFT JOIN u ON t.of = u.id
    key: {{id: t.id}}
    value: {{id: t.id, name: u.name}}
    out: {out}
"""


def made(services: Services, spark: SparkSession, folder: Path, prefix: str, more: str) -> Mini:
    """``more``: further settings of the inputs."""
    left, right, out = f"{prefix}.t", f"{prefix}.u", f"{prefix}.out"
    text = TEXT.format(left=left, right=right, out=out, more=more)
    return mini_of(make_pipeline(services, folder, text, partitions=1), spark)


def row(id: int, **rest: Any) -> tuple[str, dict[str, Any]]:
    return json.dumps({"id": id}), {"id": id, **rest}


def folded(it: Mini) -> dict[int, str | None]:
    return {row["key"]["id"]: row["value"]["name"] for row in it.staged() if row["value"] is not None}


@pytest.mark.slow
def test_a_view_goes_on_after_retention_and_a_rebuild_of_its_state_names_what_is_gone(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = made(services, spark, tmp_path, unique, ", retention: 1d")
    it.send(it.left, row(1, of=7), row(2, of=8))
    it.send(it.right, row(7, name="Ann"), row(8, name="Bob"))
    it.step()
    # The records are of 2023: a commit after that of their batch removes them.
    it.send(it.left, row(3, of=7))
    it.step()
    it.send(it.left, row(4, of=8))
    it.step()
    left = open_raw(it.lake, "Raw", it.left)
    assert left is not None and left.retention_start[0] >= 2
    it.send(it.right, row(7, name="Anna"))
    it.step()
    assert folded(it) == {1: "Anna", 2: "Bob", 3: "Anna", 4: "Bob"}
    # The result comes from the state; the state would come from the raw records.
    staged = len(it.staged())
    list(rebuild_all(it.pipeline, lambda: spark, "views"))
    assert len(it.staged()) == staged
    with pytest.raises(EtlError, match=r"retention removed the records of topic .*, partition 0, offsets 0 to \d"):
        list(rebuild_all(it.pipeline, lambda: spark, "state"))
    it.send(it.right, row(8, name="Rob"))
    it.step()
    assert folded(it) == {1: "Anna", 2: "Rob", 3: "Anna", 4: "Rob"}


def test_the_records_of_a_table_fit_the_account_when_no_view_uses_the_table_any_more(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A record of a table may have made two outputs, or none."""
    it = made(services, spark, tmp_path, unique, "")
    it.send(it.right, row(7, name="Ann"), row(9, name="Rob"))
    it.send(it.left, row(1, of=7), row(2, of=7))
    it.step()
    view = "    tables: {{t: {}{}}}\n    from: t{}\n    key: {{id: t.id}}\n    value: {{id: t.id, name: {}}}\n"
    joined = view.format(it.left, f", u: {it.right}", " LEFT JOIN u ON t.of = u.id", "u.name")
    alone = view.format(it.left, "", "", "CAST(t.of AS STRING)")
    for id, (old, new, name) in enumerate([(joined, alone, "7"), (alone, joined, "Ann")], 3):
        it = it.changed(old, new)
        list(rebuild_all(it.pipeline, lambda: spark, "views"))
        it.send(it.left, row(id, of=7))
        it.step()
        assert folded(it) == dict.fromkeys(range(1, id + 1), name)
        found = exactly_once_done_coverage(it.pipeline, "Staging")
        assert found.passed, found.summary


@pytest.mark.slow
def test_a_row_that_made_no_output_is_not_missed_after_retention(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """No source of an output tells that the record existed."""
    it = made(services, spark, tmp_path, unique, ", retention: 1d")
    it.send(it.right, row(7, name="Ann"), row(9, name="Rob"))
    it.send(it.left, row(1, of=7))
    it.step()
    # The records are of 2023: the commit after the next batch removes them.
    it.send(it.left, row(2, of=7))
    it.step()
    right = open_raw(it.lake, "Raw", it.right)
    assert right is not None and right.retention_count == {0: 2}
    found = exactly_once_done_coverage(it.pipeline, "Staging")
    assert found.passed, found.summary
    state = state_equals_raw(it.pipeline, "Staging", lambda: spark)
    assert state.passed and state.summary == (
        f"0 rows of state equal the raw pool; not compared, because retention removed raw records: {it.left}, {it.right}"
    )
