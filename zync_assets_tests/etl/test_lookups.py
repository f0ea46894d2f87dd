"""Why a record is pending for a rule that looks up rows."""

from __future__ import annotations

import pytest

from zync_assets.etl.lookups import waiting_reason
from zync_assets.pipeline import Rule, Side, ViewTable
from zync_assets.queries import Lookup, Missing

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
