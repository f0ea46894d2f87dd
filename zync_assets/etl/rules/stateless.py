"""The kind ``stateless``: each record makes one output."""

from __future__ import annotations

from zync_assets.etl.rules.matching import Kind, records_sql
from zync_assets.pipeline import Rule


class Stateless(Kind):
    """``matching.singles`` makes the results."""

    name = "stateless"
    summary = "one output for each record that it takes"
    single = True

    def from_sql(self, rule: Rule) -> str:
        return records_sql(rule, rule.sides[0])
