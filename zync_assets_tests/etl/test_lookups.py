"""Why a record is pending for a rule that looks up rows, and texts that a look-up takes for one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.etl.lookups import waiting_reason
from zync_assets.local.services import Services
from zync_assets.pipeline import Rule, Side, ViewTable
from zync_assets.queries import Lookup, Missing
from zync_assets_tests.mini import BOTH, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINCE = "2026-05-01T12:00:00.000+00:00"
ROW = "no row with c.id = in.key in customers yet"


@pytest.mark.parametrize(
    ("missing", "since", "null", "text"),
    [
        ("wait", SINCE, False, f"{ROW}; it goes into quarantine after 2026-05-01T12:10:00+00:00"),
        (
            "wait",
            SINCE,
            True,
            f"a null matches no row, or a table has no type yet: {ROW}; it goes into quarantine after",
        ),
        ("null", None, True, "no record gave a type to customers yet"),
        # The rule waited before an edit of the pipeline file.
        (
            "quarantine",
            SINCE,
            False,
            "the rule waited for a row when it took the record; the next batch with new records",
        ),
    ],
)
def test_pending_says_what_a_record_waits_for(missing: Missing, since: str | None, null: bool, text: str) -> None:
    lookup = Lookup(ViewTable("c", "customers"), "in", (("in.key", "c.id"),), missing, 600_000)
    rule = Rule("stateless", "r", (Side("in", "payments"),), "out", "in.key", "in.value", lookups=(lookup,))
    assert waiting_reason(rule, since, null=null).startswith(text)


@pytest.mark.slow
def test_a_look_up_by_a_collation_finds_the_row(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    rules = """
transforms:
  - type: stateless
    in: $left
    lookup: {c: {table: $right, on: c.v COLLATE UTF8_LCASE = in.value.v COLLATE UTF8_LCASE, missing: "null"}}
    out: $out
    key: in.key
    value: {id: in.value.id, c: c.id}
"""
    it = mini(services, spark, tmp_path, unique, BOTH + rules)
    it.send(it.right, row(7, "Ann"), row(8, "Bob"))
    it.send(it.left, row(1, "ANN"), row(2, "Eve"))
    it.step()
    assert it.values() == [{"id": 1, "c": 7}, {"id": 2, "c": None}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("table: $right, on: CAST(c.v AS INT) = in.value.id", "lookup.c.on: CAST(c.v AS INT): ["),
        ('table: $right, row: "struct(value.id AS id, CAST(value.v AS INT) AS v)", on: c.v = in.value.id', "row: ["),
    ],
    ids=["on", "row"],
)
@pytest.mark.parametrize("missing", ["wait", "quarantine"])
def test_a_record_that_makes_no_row_stops_no_event(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, missing: Missing, table: str, reason: str
) -> None:
    """An event waits when the record comes, which is then in quarantine. Later events and rows come through."""
    rules = f"""
transforms:
  - type: stateless
    in: $left
    lookup: {{c: {{{table}, missing: {missing}}}}}
    out: $out
    key: in.key
    value: {{id: in.value.id, c: c.id}}
"""
    it = mini(services, spark, tmp_path, unique, BOTH + rules)
    it.send(it.right, row(7, "1"))
    it.send(it.left, row(1), row(2))
    it.step()
    it.send(it.right, ("k1", row(8, "two")), ("k2", row(9, "3")))
    it.step()
    assert it.classes(it.right) == {"done": 2, "quarantined": 1}
    assert [entry["text"].startswith(reason) for entry in it.ledger("quarantined")].count(True) == 1
    it.send(it.left, row(3))
    it.send(it.right, ("k1", row(8, "2")))
    it.step()
    found = [(1, 7), (2, 8), (3, 9)] if missing == "wait" else [(1, 7), (3, 9)]
    assert sorted((value["id"], value["c"]) for value in it.values()) == found
