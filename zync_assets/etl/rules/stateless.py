"""The kind ``stateless``: each record makes one output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zync_assets.etl.rules.kind import (
    BLAMED,
    LOOK_HASH,
    LOOKED,
    NO_ROWS,
    Emission,
    Kind,
    RuleRecords,
    records_sql,
    source_sql,
)
from zync_assets.etl.rules.parts import output_rows
from zync_assets.pipeline import Rule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Stateless(Kind):
    """``assignment.singles`` makes the results of a rule with one output and without look-ups."""

    name = "stateless"
    summary = "one output for each record that it takes"
    single = True

    def results(self, records: RuleRecords, pending: Mapping[str, DataFrame], emission: Emission) -> list[DataFrame]:
        """The results of a rule with look-ups or several outputs: outputs, and the records that wait for their row. All wait for
        the schema of a table."""
        rule, target, ordering = records.rule, emission.target, emission.ordering
        [side] = rule.sides
        frame = records.frames.get(side.name)
        if frame is None:
            return []
        looked, blamed, hashed = "'pending'", "0", "CAST(NULL AS bigint)"
        if target is not None and not rule.lookups:
            looked = "'out'"
        elif target is not None and emission.rows is not None:
            frame = emission.rows(records, frame)
            looked, blamed, hashed = LOOKED, BLAMED, f"CASE WHEN {LOOKED} = 'pending' THEN {LOOK_HASH} END"
        partition, offset = f"{side.name}.kafka.partition", f"{side.name}.kafka.offset"
        order = ordering.sql(side.topic, partition, offset)
        row = (*NO_ROWS, f"array({order}) AS ords")
        about = (
            f"{looked} AS kind",
            f"{records.index} AS rule",
            f"{order} AS ord",
            f"array({source_sql(ordering.places[side.topic], partition, offset)}) AS source",
            f"{blamed} AS last",
            "CAST(old AS int) AS waited",
            f"{hashed} AS hash",
            *(row if emission.held else ()),
        )
        if target is None:
            return [frame.selectExpr(*about, "false AS extra", "0 AS number")]
        return [output_rows(frame, rule, about, f"{looked} = 'out'", emission)]

    def from_sql(self, rule: Rule) -> str:
        return records_sql(rule, rule.sides[0])
