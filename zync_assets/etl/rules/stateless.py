"""The kind ``stateless``: each record makes one output.

One pass over a topic makes the outputs of all such rules, but for rules with look-ups or several outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zync_assets.etl.rules.kind import (
    BLAMED,
    LOOK_HASH,
    LOOKED,
    NO_ROWS,
    Columns,
    Emission,
    Kind,
    OutputColumns,
    RuleRecords,
    records_sql,
    source_sql,
)
from zync_assets.etl.rules.results import ENDED, FAILED, Assignment, output_rows
from zync_assets.pipeline import Rule
from zync_assets.spark.sql import name_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def singles(
    assignment: Assignment,
    rules: Sequence[Rule],
    targets: Mapping[int, OutputColumns],
    others: Sequence[int],
    untyped: Sequence[int],
    columns_of: Columns,
    *,
    held: bool = False,
) -> DataFrame:
    """The results of a topic's new records in one pass, without the records of ``others``.

    ``targets``: the pool's rules of a ``single`` kind, by index; ``others``: the indexes of the rules of other kinds;
    ``untyped``: rules with unresolved types, which must take no record (kind ``untyped``). ``columns_of``: see ``Columns``.
    ``held``: as in ``Emission``.

    A record without a rule is unmatched, or dropped if the pipeline file says so. A tombstone without a rule is dropped,
    since Debezium writes a tombstone after each delete.
    """
    fate = "dropped" if assignment.item.unmatched == "drop" else "unmatched"
    kinds = dict.fromkeys(targets, "out") | dict.fromkeys(untyped, "untyped") | {FAILED: "quarantined", ENDED: "ended"}
    fates = assignment.choice(
        {index: text_sql(name) for index, name in kinds.items()},
        none=f"CASE WHEN in.value IS NULL THEN 'dropped' ELSE '{fate}' END",
    )
    ordering, topic = assignment.ordering, assignment.item.topic
    order = ordering.sql(topic, "kafka.partition", "kafka.offset")
    none = (f"CAST(NULL AS bigint) AS {name}" for name in ("other_row", "joined", "exact"))
    rows = ("row", "CAST(changes AS int) AS changes", *none, f"array({order}) AS ords")
    follows = "CAST(NULL AS int)"
    if assignment.decided:
        fates = f"CASE WHEN {fates} = 'out' AND fate = 'waiting' THEN 'pending' ELSE {fates} END"
        # A pending record of an earlier batch may have a later time than both sides of a pair that came late.
        order, follows = f"greatest(at, {order})", "follows"
    deletes = assignment.choice(dict.fromkeys(targets, assignment.deletes), "false", assignment.deletes)
    rows += (f"{follows} AS follows", f"{deletes} AS deletes")
    index_choice = assignment.choice({index: str(index) for index in (*targets, *untyped)})
    sides: dict[str, dict[int, str]] = {}
    for index, target in targets.items():
        for name, sql in columns_of(rules[index], target):
            sides.setdefault(name, {})[index] = sql
    frame = assignment.frame
    if others:
        frame = frame.where(assignment.choice(dict.fromkeys(others, "false"), "true", "true"))
    extra_columns = (*ordering.columns, "old", *(("fate", "at", "follows") if assignment.decided else ()))
    return frame.selectExpr("kafka", "key", "value", "struct(kafka, key, value) AS in", *extra_columns).selectExpr(
        f"{fates} AS kind",
        f"CAST({index_choice} AS int) AS rule",
        f"{order} AS ord",
        f"array({source_sql(ordering.places[topic], 'kafka.partition', 'kafka.offset')}) AS source",
        "0 AS last",
        "CAST(old AS int) AS waited",
        "CAST(NULL AS bigint) AS hash",
        *(rows if held else ()),
        *(f"{assignment.choice(choice)} AS {name_sql(name)}" for name, choice in sides.items()),
    )


class Stateless(Kind):
    """``singles`` makes the results of a rule with one output and without look-ups."""

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
