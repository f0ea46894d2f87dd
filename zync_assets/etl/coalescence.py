"""``coalesce`` of an output: several changes of one key in a batch become one.

The changes of a key are merged one after another, in the order of outputs. A tombstone replaces the changes before it. Of two
values, one must have all fields of the other: the merged value has the fields of both, each as the later of the two has it. A
field that a change leaves out keeps its earlier value. Two changes that can't be merged so are two outputs. The ``source`` of a
merged output lists the raw records of all merged changes. Each done record is therefore the source of an output.

A change that may be impossible to encode, or whose ``partition-by`` fails, stays an output of its own. Other
changes then do not fail with this change. Two changes that together may be too large are two outputs as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zync_assets.etl.account import Labels
from zync_assets.etl.encodability import RowChecks, left_out, row_checks
from zync_assets.etl.output_types import OutputType
from zync_assets.etl.partitions import by_in_lake_names, partition_fails, side_columns
from zync_assets.etl.rules.kind import LACKING, LATER, LATER_IN_TURN, TURN, OutputColumns
from zync_assets.etl.rules.results import without_dropped
from zync_assets.etl.rules.shapes import key_fields
from zync_assets.kafka.topics import RecordLimits
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.spark.sql import name_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_OLDS = "transform(sequence(0, size({0}.source) - 1), at -> shiftright({0}.waited, at) % 2 = 1)"
_ROWS = (
    "transform({0}.source, (record, at) -> struct(CASE at WHEN 0 THEN {0}.row WHEN 1 THEN {0}.other_row END AS row,"
    " shiftright({0}.changes, least(at, 31)) % 2 = 1 AS changes))"
)


_ALONE, _SIZE = "alone", "size"
"""The columns of changes: whether the change is not merged, and the most bytes of its output."""


def with_merged_outputs(
    results: DataFrame,
    rules: Sequence[Rule],
    topic: str,
    targets: Mapping[str, OutputColumns],
    placeholder: str | None,
    check: RowChecks | None = None,
) -> DataFrame:
    """The result rows, with the outputs of a topic merged by key. ``targets``: rule → the columns of its outputs.
    ``placeholder``: Debezium's text for a value that it did not send. ``check``: the checks of the topic's outputs."""
    from pyspark.sql import functions as F

    indexes = [at for at, rule in enumerate(rules) if rule.out == topic and rule.name in targets]
    key = next((target.key[0] for target in targets.values() if target.key is not None), None)
    if not indexes or key is None or key not in results.columns:
        # Two outputs without a key are never changes of one key.
        return results
    is_keyed_output = f"kind = 'out' AND rule IN ({', '.join(map(str, indexes))}) AND {name_sql(key)} IS NOT NULL"
    columns = results.columns
    number = "coalesce(number, 0)" if "number" in columns else "0"
    lone = f"CASE WHEN {is_keyed_output} THEN NULL ELSE struct(element_at(source, 1) AS first, {number} AS number) END AS lone"
    kinds = {at: target.key[1] for at in indexes if (target := targets[rules[at].name]).key is not None}
    fields = " ".join(f"WHEN {at} THEN {text_sql(key_fields(kind))}" for at, kind in kinds.items())
    # Without a key in these rules, all keys are null.
    shape = f"CASE rule {fields} END" if fields else "''"
    key_struct = f"CASE WHEN {is_keyed_output} THEN struct({name_sql(key)} AS key, {shape} AS fields) END AS of"
    if check is not None:
        about = (
            f"{is_keyed_output} AND ({check.suspect}) AS {_ALONE}",
            f"CASE WHEN {is_keyed_output} THEN {check.size()} END AS {_SIZE}",
        )
        results = results.selectExpr("*", *about)
    keyed = results.selectExpr(key_struct, lone, "struct(*) AS change")
    later = LATER_IN_TURN if TURN in columns else LATER
    changes = keyed.groupBy("of", "lone").agg(F.expr(f"array_sort(collect_list(change), {later}) AS changes"))
    merge = _Merge(columns, {at: targets[rules[at].name] for at in indexes}, placeholder, check)
    instead, beside = "concat(slice(made, 1, size(made) - 1), array({}))", "concat(made, array(b))"
    merged_changes = instead.format(merge.row)
    if check is not None:
        fits = f"merged.{_SIZE} <= {check.limit} OR {check.size('merged')} <= {check.limit}"
        checked_changes = f"CASE WHEN {fits} THEN {instead.format('merged')} ELSE {beside} END"
        merged_changes = f"element_at(transform(array({merge.row}), merged -> {checked_changes}), 1)"
    step = f"CASE WHEN {merge.condition} THEN {merged_changes} ELSE {beside} END"
    # The last of the changes so far, under a name.
    step = f"element_at(transform(array(element_at(made, -1)), a -> {step}), 1)"
    later_changes = "slice(changes, 2, size(changes))"
    merged_list = f"aggregate({later_changes}, slice(changes, 1, 1), (made, b) -> {step})"
    return changes.selectExpr(f"explode({merged_list}) AS change").selectExpr(
        *(f"change.{name_sql(name)}" for name in columns)
    )


def final_rows(
    results: DataFrame,
    pipeline: Pipeline,
    rules: Sequence[Rule],
    outputs: Collection[str],
    types: Mapping[str, OutputType],
    labels: Labels,
    limits: Callable[[], Mapping[str, RecordLimits]],
    *,
    together: bool,
    held: bool,
) -> DataFrame:
    """The result rows of a batch, without dropped outputs, and with merged ones.

    ``outputs``: the topics of the rows. ``limits``: returns the records that each takes (``encodability.output_limits``).
    ``together``: one task runs the whole batch. ``held``: an output is held.
    """
    from pyspark.errors import AnalysisException

    results = without_dropped(results, [rule for rule in rules if rule.out in outputs])
    merging = [topic for topic in dict.fromkeys(rule.out for rule in rules) if topic in outputs]
    merging = [topic for topic in merging if pipeline.output(topic).coalesce]
    if merging:
        null_columns = [] if "olds" in results.columns else ["CAST(NULL AS array<boolean>) AS olds"]
        null_columns += ["CAST(NULL AS array<struct<row: bigint, changes: boolean>>) AS rows"] if held else []
        results = results.selectExpr("*", *null_columns, "CAST(NULL AS array<int>) AS takers")
        # Rows of one task need no shuffle.
        results = results.coalesce(1) if together else results
    for topic in merging:
        check = row_checks(pipeline, labels, types[topic], results.columns, limits(), texts=True)
        by, merge = pipeline.output(topic).partition_by, partial(with_merged_outputs, results, rules, topic)
        about = types[topic].targets, pipeline.unavailable_value
        try:
            results = merge(*about, check if check is None or by is None else _with_partition(check, types[topic], by))
        except AnalysisException:
            # The column of the partition tells why the expression does not suit the outputs.
            results = merge(*about, check)
    return results


def _with_partition(check: RowChecks, kind: OutputType, by: str) -> RowChecks:
    """The checks, with one of ``partition-by``."""
    key, value = side_columns(kind.topic, [name for name, _ in check.sides])
    condition = partition_fails(by_in_lake_names(by, kind), f"array(struct({key} AS key, {value} AS value))")
    return replace(check, odd=f"{check.odd} OR {condition}")


class _Merge:
    """Two changes ``a`` and ``b`` as one, as SQL."""

    def __init__(
        self,
        columns: Sequence[str],
        targets: Mapping[int, OutputColumns],
        placeholder: str | None,
        check: RowChecks | None,
    ) -> None:
        from pyspark.sql.types import StructType

        sides = {at: target.value for at, target in targets.items() if target.value is not None}
        self.value = next((side[0] for side in sides.values()), None)
        whole = next((side[2] for side in sides.values()), None)
        self.fields = list(whole.names) if isinstance(whole, StructType) else []
        fields_by_rule = {at: set(side[1].names) for at, side in sides.items() if isinstance(side[1], StructType)}
        # A value that is no struct has no fields that another one lacks.
        self.has = {at: fields_by_rule.get(at, set(self.fields)) for at in targets}
        column = name_sql(self.value or "")
        clearing = None if whole is None else left_out(f"b.{column}", whole, "value", placeholder)
        self.omits = (
            "CAST(array() AS array<string>)"
            if clearing is None
            else f"coalesce({clearing[1]}, CAST(array() AS array<string>))"
        )
        self.checked = check is not None
        self.columns = [*columns, *((_ALONE, _SIZE) if self.checked else ())]

    @property
    def condition(self) -> str:
        """Whether the changes can be merged."""
        return f"NOT a.{_ALONE} AND NOT b.{_ALONE} AND {self._fits}" if self.checked else self._fits

    @property
    def _fits(self) -> str:
        """Whether one of the changes has all fields of the other."""
        if self.value is None:
            return "true"
        a_is_null, b_is_null = (f"{side}.{name_sql(self.value)} IS NULL" for side in "ab")
        full = [str(at) for at, names in self.has.items() if names >= set(self.fields)]
        nested = f"exists({self.omits}, path -> path LIKE 'value.%.%')"
        whole = f"b.rule IN ({', '.join(full)}) AND size({self.omits}) = 0" if full else "false"
        lacks = " OR ".join(f"size({side}.{LACKING}) > 0" for side in "ab") if LACKING in self.columns else "false"
        lacks = f"coalesce({lacks}, false)"
        either = f"({self._covers('b', 'a')} OR {self._covers('a', 'b')})"
        return f"({b_is_null} OR NOT {lacks} AND CASE WHEN {a_is_null} THEN {whole} ELSE {either} AND NOT {nested} END)"

    def _covers(self, one: str, other: str) -> str:
        """Whether the rule of one change has all fields of the other's."""
        pairs = [
            (at, to) for at, names in self.has.items() for to, other_names in self.has.items() if names >= other_names
        ]
        covering_pairs = ", ".join(f"struct({at}, {to})" for at, to in pairs)
        return f"struct({one}.rule, {other}.rule) IN ({covering_pairs})"

    @property
    def row(self) -> str:
        """The merged change."""
        is_deletion = (
            "true" if self.value is None else f"b.{name_sql(self.value)} IS NULL OR a.{name_sql(self.value)} IS NULL"
        )
        olds = {side: f"coalesce({side}.olds, {_OLDS.format(side)})" for side in "ab"}
        takers = {side: f"coalesce({side}.takers, array_repeat({side}.rule, size({side}.source)))" for side in "ab"}
        rows = {side: f"coalesce({side}.rows, {_ROWS.format(side)})" for side in "ab"}
        expressions = {
            "rule": f"CASE WHEN {is_deletion} OR {self._covers('b', 'a')} THEN b.rule ELSE a.rule END",
            "source": "concat(a.source, b.source)",
            "last": "size(a.source) + b.last",
            "waited": "0",
            "olds": f"concat({olds['a']}, {olds['b']})",
            "takers": f"concat({takers['a']}, {takers['b']})",
            "rows": f"concat({rows['a']}, {rows['b']})",
            "ords": "concat(a.ords, b.ords)",
            _SIZE: f"a.{_SIZE} + b.{_SIZE}",
        }
        if self.value is not None and self.fields:
            expressions[self.value] = f"CASE WHEN {is_deletion} THEN b.{name_sql(self.value)} ELSE {self._value()} END"
        fields = (f"{text_sql(name)}, {expressions.get(name, f'b.{name_sql(name)}')}" for name in self.columns)
        return f"named_struct({', '.join(fields)})"

    def _value(self) -> str:
        column = name_sql(self.value or "")
        parts: list[str] = []
        for name in self.fields:
            having = ", ".join(str(at) for at, names in self.has.items() if name in names) or "NULL"
            is_sent = f"b.rule IN ({having}) AND NOT array_contains({self.omits}, {text_sql(f'value.{name}')})"
            is_old = f"a.rule IN ({having})"
            field = name_sql(name)
            parts.append(
                f"{text_sql(name)}, CASE WHEN {is_sent} OR NOT {is_old} THEN b.{column}.{field} ELSE a.{column}.{field} END"
            )
        return f"named_struct({', '.join(parts)})"
