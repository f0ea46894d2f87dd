"""The kind ``group``: the records that share a key make an output when the group's condition holds.

A fold goes through the records of a key in the order of their source. It computes the aggregates of the rule record by record.
The group is complete at the first record with which ``complete-when`` holds, and the next record begins another group. The cut
of the batches therefore does not matter: the records of an incomplete group are pending, and the batch with another record of
the key reads them again, and folds them in the same order.

One shuffle brings the records of a key together. Outputs are made of the aggregates, which are columns of the folded rows. Whole
records are carried only for the sides that ``first`` or ``list`` name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.rules.denorm import hash_sql, keyed, one_sided, part_type
from zync_assets.etl.rules.expiry import folded, kind_sql, order_columns, overdue, record_columns, with_outputs
from zync_assets.etl.rules.kind import NO_ROWS, Emission, Kind, RuleRecords, records_sql
from zync_assets.etl.rules.shapes import expression_type, note_schema, type_sql, wider
from zync_assets.pipeline import Rule
from zync_assets.queries import Aggregate
from zync_assets.spark.failures import fails
from zync_assets.spark.sql import name_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_COUNTS = ("count", "count_if")
COMPLETE, AGGREGATE = "complete-when", "aggregate"
"""The parts of a rule that fail with a record of a group."""


class GroupKind(Kind):
    """The results are complete groups, and the records of incomplete groups."""

    name, join = "group", "group-by"
    summary = "the records of a key, up to the first with which the condition holds; the others wait"

    def records(
        self, rule: Rule, index: int, inputs: Mapping[str, DataFrame], frames: Mapping[str, DataFrame]
    ) -> RuleRecords:
        kinds = key_types(rule, inputs)
        keyed_frames = {side: keyed(rule, side, frame, kinds) for side, frame in frames.items()}
        # Pending records of a topic without a schema must be looked at again when it has one.
        whole = len(inputs) == len(rule.sides)
        join = join_text(rule, kinds) if whole else None
        # The frames of the inputs have known schemas, so that Spark is not asked.
        types = argument_types(rule, inputs) if whole else {}
        return RuleRecords(rule, index, keyed_frames, kinds, join, original=False, inputs=inputs, arguments=types)

    def results(self, records: RuleRecords, pending: Mapping[str, DataFrame], emission: Emission) -> list[DataFrame]:
        rule, kinds = records.rule, records.key_types
        if emission.target is None or len(records.frames) < len(rule.sides):
            return [one_sided(records, side.name, emission) for side in rule.sides if side.name in records.frames]
        types = records.arguments
        side_frames = [
            *records.frames.items(),
            *((side, keyed(rule, side, frame, kinds)) for side, frame in pending.items()),
        ]
        frames = [_wide(records, side, frame, types, emission) for side, frame in side_frames]
        search = _search_of(records, emission)
        folded_rows = folded(frames, ["k0"], _fold_sql(rule, types, search), records, emission)
        members = "slice(records, made.first + 1, made.size)"
        if search is not None:
            members = f"filter({members}, (record, at) -> NOT array_contains(made.without, made.first + at))"
        groups = folded_rows.selectExpr(
            "hash", "made.kind AS kind", f"{members} AS records", *_columns(rule, "made.state", members)
        )
        order = order_columns(rule, emission.ordering, "element_at(records, -1).ord")
        rows = groups.selectExpr("* EXCEPT (kind)", f"{kind_sql(rule)} AS kind", *order)
        if search is None:
            return [with_outputs(rows, records, emission)]
        # The fold has looked at the groups that end with a record in question.
        rows = rows.selectExpr("*", f"{_NO_ENDING} AS {ENDING}")
        is_failure = f"kind LIKE '{_FAILED}%'"
        return [
            with_outputs(rows.where(f"NOT {is_failure}"), records, emission),
            rows.where(is_failure).selectExpr(*_failure_columns(emission)),
        ]

    def key_sql(self, rule: Rule, topic: str, inputs: Mapping[str, DataFrame]) -> str:
        """The key, and the arguments of the aggregates: a record on which one of them fails joins no group."""
        side, kinds = rule.side(topic), key_types(rule, inputs)
        keys = [f"CAST(({sql}) AS {type_sql(kind)})" for kind, sql in zip(kinds, side.keys, strict=True)]
        return ", ".join([*keys, *_arguments(rule, side.name)])

    def from_sql(self, rule: Rule) -> str:
        group = rule.group
        assert group is not None
        side_rows = "\n      UNION ALL ".join(
            f"SELECT {', '.join(item.name if item is side else f'NULL AS {item.name}' for item in rule.sides)},"
            f" ({side.keys[0]}) AS `group-by` FROM {records_sql(rule, side)}"
            for side in rule.sides
        )
        columns = ",\n    ".join(_explained(item) for item in group.aggregates)
        return (
            f"(SELECT {columns}\n   FROM ({side_rows})\n   GROUP BY `group-by`)"
            f"\n-- a group ends at the first record with which this holds: {group.complete}"
        )

    def reason(self, rule: Rule, topic: str, before: int) -> str:
        waiting_text = f", and {before} of its records in {topic} wait before it" if before else ""
        return f"its group is not complete{waiting_text}"


def _explained(item: Aggregate) -> str:
    """An aggregate as Spark writes it."""
    function = {"first": "first", "list": "collect_list"}.get(item.function, item.function)
    values = ", ".join(item.arguments.values())
    inside = values if len(item.arguments) == 1 else f"coalesce({values})"
    return f"{function}({inside}) AS {name_sql(item.name)}"


def key_types(rule: Rule, frames: Mapping[str, DataFrame]) -> list[DataType]:
    """The type of the key: of two numbers the wider. EtlError for types without a common one."""
    parts = {side.name: side.keys[0] for side in rule.sides if side.name in frames}
    first, *others = parts
    key_type = part_type(rule, {first: parts[first]}, frames, "group-by")
    for side in others:
        # Names the two that differ.
        part_type(rule, {first: parts[first], side: parts[side]}, frames, "group-by")
        side_type = part_type(rule, {side: parts[side]}, frames, "group-by")
        key_type = side_type if key_type.simpleString() == "void" else wider(key_type, side_type) or key_type
    return [key_type]


def join_text(rule: Rule, kinds: Sequence[DataType]) -> str:
    """The definition of a rule's groups, as JSON. Pending records of another definition are matched again."""
    group = rule.group
    assert group is not None
    arguments = {item.name: dict(item.arguments) for item in group.aggregates}
    sides = {side.name: [side.topic, *side.keys] for side in rule.sides}
    hashed = hash_sql(["key"], kinds)
    # Entries of a rule without expiry lack the times of their records.
    expires = {"expires": True} if rule.expiry is not None else {}
    return json.dumps(
        {"records": sides, "hashed": hashed, "aggregates": arguments, "complete": group.complete, **expires}
    )


def argument_types(rule: Rule, frames: Mapping[str, DataFrame]) -> dict[str, DataType]:
    """Aggregate → the type of its argument. ``frames``: side → records under the side's name. EtlError for an argument that
    the aggregate can't take."""
    from pyspark.sql.types import BooleanType, NumericType

    assert rule.group is not None
    types: dict[str, DataType] = {}
    for item in rule.group.aggregates:
        place = f"{item.name}"
        kinds = [
            expression_type({side: frames[side]}, f"({sql})", rule.name, place) for side, sql in item.arguments.items()
        ]
        kind = kinds[0]
        for second_kind in kinds[1:]:
            common = second_kind if kind.simpleString() == "void" else wider(kind, second_kind)
            if common is None and second_kind.simpleString() != "void":
                raise EtlError(
                    f"rule {rule.name}: {item.name} is over {kind.simpleString()} and {second_kind.simpleString()}."
                    " CAST one of them, or name an alias."
                )
            kind = common or kind
        required_types = {"sum": NumericType, "bool_or": BooleanType, "bool_and": BooleanType, "count_if": BooleanType}
        if (
            item.function in required_types
            and kind.simpleString() != "void"
            and not isinstance(kind, required_types[item.function])
        ):
            raise EtlError(
                f"rule {rule.name}: {item.name} is over {kind.simpleString()}, and {item.function} takes"
                f" {'a number' if item.function == 'sum' else 'a condition'}. CAST it."
            )
        types[item.name] = BooleanType() if item.function in _COUNTS or kind.simpleString() == "void" else kind
    return types


def aggregate_types(rule: Rule, frames: Mapping[str, DataFrame]) -> DataFrame:
    """A frame with the columns that the rule's expressions see, for their types. ``frames``: as for ``argument_types``."""
    from pyspark.sql.types import StructField, StructType

    types = argument_types(rule, frames)
    assert rule.group is not None
    fields = [StructField(item.name, result_type(item, types[item.name])) for item in rule.group.aggregates]
    spark = next(iter(frames.values())).sparkSession
    aggregates = note_schema(spark.createDataFrame([], StructType(fields)), StructType(fields))
    complete = rule.group.complete
    kind = expression_type({"": aggregates}, f"({complete})", rule.name, COMPLETE).simpleString()
    if kind not in ("boolean", "void"):
        raise EtlError(f"rule {rule.name}, {COMPLETE}: {complete} is {kind}; it must be a condition")
    return aggregates


def result_type(item: Aggregate, argument: DataType) -> DataType:
    """The type of an aggregate. ``argument``: of its argument."""
    from pyspark.sql.types import ArrayType, DecimalType, DoubleType, FractionalType, LongType

    if item.function in _COUNTS:
        return LongType()
    if item.function == "list":
        return ArrayType(argument)
    if item.function != "sum":
        return argument
    if isinstance(argument, DecimalType):
        return DecimalType(min(38, argument.precision + 10), argument.scale)
    return DoubleType() if isinstance(argument, FractionalType) else LongType()


def _arguments(rule: Rule, side: str) -> list[str]:
    assert rule.group is not None
    arguments = [item.arguments[side] for item in rule.group.aggregates if side in item.arguments]
    return [f"({sql})" for sql in arguments if sql != side]


def _wide(
    records: RuleRecords, side: str, frame: DataFrame, types: Mapping[str, DataType], emission: Emission
) -> DataFrame:
    """The records of one side: the key, and a struct ``record`` that is the same for all sides."""
    rule = records.rule
    topic = next(item.topic for item in rule.sides if item.name == side)
    assert rule.group is not None
    whole = {name: item for item in rule.group.named("first", "list") for name in item.arguments}
    fields: list[str] = []
    for name, item in whole.items():
        kind = type_sql(types[item.name])
        fields.append(f"CAST({name if name == side else 'NULL'} AS {kind}) AS {name_sql(name)}")
    for at, item in enumerate(rule.group.aggregates):
        if item.function not in ("first", "list"):
            fields.append(f"{_argument(item, side, types[item.name])} AS a{at}")
    return frame.selectExpr("k0", *record_columns(side, topic, emission, *fields))


def _argument(item: Aggregate, side: str, kind: DataType) -> str:
    if side not in item.arguments:
        return f"CAST(NULL AS {type_sql(kind)})"
    if item.function == "count":
        return f"CASE WHEN ({item.arguments[side]}) IS NOT NULL THEN true END"
    return f"CAST(({item.arguments[side]}) AS {type_sql(kind)})"


def _fold_sql(rule: Rule, types: Mapping[str, DataType], search: Failing | None = None) -> str:
    """An array of structs: ``kind`` (out, due or pending), ``first`` and ``size`` of a part of ``records``, and ``state``: the
    aggregates of the part, null for a record that becomes pending.

    ``search``: the search for failures. A record with which an expression fails is then a part of its own, and has the kind
    _FAILED and what fails. It is in no group: ``without`` has the indexes of such records in a part.
    """
    group = rule.group
    assert group is not None
    folded_aggregates = [(at, item) for at, item in enumerate(group.aggregates) if item.function != "list"]
    results = {at: type_sql(result_type(item, types[item.name])) for at, item in folded_aggregates}
    none = ", ".join(f"'a{at}', CAST({_zero(item)} AS {results[at]})" for at, item in folded_aggregates)
    zeros = f"named_struct({none})"
    state = f"struct<{', '.join(f'a{at}: {kind}' for at, kind in results.items())}>"
    updated = ", ".join(f"'a{at}', CAST({_updated(item, at)} AS {results[at]})" for at, item in folded_aggregates)
    part = f"struct<kind: string, first: int, size: int, state: {state}{'' if search is None else ', without: array<int>'}>"

    def fold(at: str, first: str, state: str, parts: str, bad: str = "acc.bad") -> str:
        return f"named_struct('at', {at}, 'first', {first}, 'state', {state}, 'made', {parts}, 'bad', {bad})"

    def piece(kind: str, first: str, size: str, state: str, bad: str = "CAST(array() AS array<int>)") -> str:
        without = "" if search is None else f", 'without', {bad}"
        return f"named_struct('kind', {kind}, 'first', {first}, 'size', {size}, 'state', {state}{without})"

    def group_end(kind: str, end: str, state: str) -> str:
        return f"array({piece(kind, 'acc.first', f'{end} - acc.first', state, 'acc.bad')})"

    def failing_record(at: str, kind: str) -> str:
        return piece(kind, at, "1", zeros)

    complete = over_group(rule, group.complete, "now", "acc.at + 1")
    completed_group = fold(
        "acc.at + 1", "acc.at + 1", zeros, f"concat(acc.made, {group_end(text_sql('out'), 'acc.at + 1', 'now')})"
    )
    waits = fold("acc.at + 1", "acc.first", "now", "acc.made")
    due_group = group_end(text_sql("due"), "acc.at", "acc.state")
    if search is None:
        now = f"array(named_struct({updated}))"
        step = f"CASE WHEN hash IS NOT NULL AND ({complete}) THEN {completed_group} ELSE {waits} END"
    else:
        # The state is null where an aggregate fails.
        wrong = f"CASE WHEN {fails(f'named_struct({updated})')} THEN '{_FAILED}{AGGREGATE}:{search.index}' END"
        now = f"array(CASE WHEN {wrong} IS NULL THEN named_struct({updated}) END)"
        unmixed = "(CASE WHEN size(acc.bad) = 0 THEN {} END)"
        failure = over_group(rule, search.outputs, "now", "acc.at + 1", unmixed.format("record.source"))
        incomplete = f"hash IS NULL OR NOT coalesce({complete}, false)"
        wrong = (
            f"CASE WHEN now IS NULL THEN '{_FAILED}{AGGREGATE}:{search.index}'"
            f" WHEN hash IS NOT NULL AND {fails(complete)} THEN '{_FAILED}{COMPLETE}:{search.index}'"
            f" WHEN {incomplete} THEN NULL ELSE {failure} END"
        )
        bad = fold(
            "acc.at + 1",
            # A group begins with a record that stays in it.
            "acc.first + CASE WHEN acc.first = acc.at THEN 1 ELSE 0 END",
            "acc.state",
            f"concat(acc.made, array({failing_record('acc.at', 'wrong')}))",
            "concat(acc.bad, array(acc.at))",
        )
        step = f"CASE WHEN wrong IS NOT NULL THEN {bad} WHEN {incomplete} THEN {waits} ELSE {completed_group} END"
        step = f"element_at(transform(array({wrong}), wrong -> {step}), 1)"
        if rule.expiry is not None and rule.expiry.action == "emit":
            last_source = unmixed.format("element_at(records, acc.at).source")
            failure = over_group(rule, search.outputs, "acc.state", "acc.at", last_source)
            members = f"transform({_members('acc.first', 'acc.at')}, at -> {failing_record('at', 'wrong')})"
            due_group = (
                f"element_at(transform(array({failure}), wrong ->"
                f" CASE WHEN wrong IS NULL THEN {due_group} ELSE {members} END), 1)"
            )
    step = f"element_at(transform({now}, now -> {step}), 1)"
    if rule.expiry is not None:
        # The group before the record expired by the time of the record, which begins another.
        expired_group = fold("acc.at", "acc.at", zeros, f"concat(acc.made, {due_group})")
        group_start = f"CASE WHEN {_is_due(rule, 'record.time')} THEN {expired_group} ELSE acc END"
        step = f"element_at(transform(array({group_start}), acc -> {step}), 1)"
    new_members = f"filter({_members('acc.first', 'acc.at')}, at -> NOT element_at(records, at + 1).old)"
    single = piece("'pending'", "at", "1", f"CAST(NULL AS {state})")
    remaining_groups = f"transform({new_members}, at -> {single})"
    if rule.expiry is not None:
        remaining_groups = f"CASE WHEN {_is_due(rule, 'clock')} THEN {due_group} ELSE {remaining_groups} END"
    begin = fold("0", "0", zeros, f"CAST(array() AS array<{part}>)", "CAST(array() AS array<int>)")
    return f"aggregate(records, {begin}, (acc, record) -> {step}, acc -> concat(acc.made, {remaining_groups}))"


def _members(first: str, end: str) -> str:
    """The indexes of the records of the group under way, without the failing ones."""
    return f"filter(sequence({first}, {end}), at -> at < {end} AND NOT array_contains(acc.bad, at))"


def over_group(rule: Rule, sql: str, state: str, end: str, ending: str = "NULL") -> str:
    """An expression over aggregates as one over the group under way. ``state``: its aggregates; ``end``: the index after its last
    record; ``ending``: in place of ENDING."""
    assert rule.group is not None
    sql_by_name = {ENDING: ending}
    for at, item in enumerate(rule.group.aggregates):
        records = f"transform({_members('acc.first', end)}, at -> element_at(records, at + 1))"
        sql_by_name[name_sql(item.name)] = _list(item, records) if item.function == "list" else f"{state}.a{at}"
    used_names = {name: aggregate_sql for name, aggregate_sql in sql_by_name.items() if name in sql}
    if "->" not in sql:
        for name, aggregate_sql in used_names.items():
            sql = sql.replace(name, aggregate_sql)
        return sql
    # The expression has names of its own, and must hide none that the fold uses.
    group = "group_"
    while group in sql.lower():
        group = f"{group}_"
    for at, name in enumerate(used_names):
        sql = sql.replace(name, f"{group}.f{at}")
    fields = ", ".join(f"'f{at}', {aggregate_sql}" for at, aggregate_sql in enumerate(used_names.values()))
    return f"element_at(transform(array(named_struct({fields})), {group} -> {sql}), 1)" if used_names else sql


@dataclass(frozen=True)
class Failing:
    """What a search for failures asks of a complete group. ``index``: the rule's; ``outputs``: an expression over aggregates for
    the kind of a record with which an output fails, null where none fails."""

    index: int
    outputs: str


_FAILED = "failed:"
ENDING = "`(ending)`"
"""The source of the last record of a group, in expressions of a search. Null if a record before it left the groups of its key."""
_NO_ENDING = "CAST(NULL AS struct<place: int, partition: int, offset: bigint>)"


def _search_of(records: RuleRecords, emission: Emission) -> Failing | None:
    """The search, if the result rows are those of one."""
    assert emission.target is not None
    parts = emission.parts or [(records.index, records.rule, emission.target)]
    failure_columns = [(at, dict(emission.columns(part, target)).get("failed")) for at, part, target in parts]
    failures = [f"'{_FAILED}' || ({sql}) || ':{at}'" for at, sql in failure_columns if sql is not None]
    return Failing(records.index, f"coalesce({', '.join(failures)})") if failures else None


def _failure_columns(emission: Emission) -> list[str]:
    """The result row of a record that fails in the fold."""
    row_columns = (*NO_ROWS, "array(element_at(records, 1).ord) AS ords")
    return [
        "'out' AS kind",
        "CAST(split_part(kind, ':', 3) AS INT) AS rule",
        "ord",
        "array(element_at(records, 1).source) AS source",
        "0 AS last",
        "0 AS waited",
        "CAST(NULL AS bigint) AS hash",
        "split_part(kind, ':', 2) AS failed",
        "CAST(NULL AS STRING) AS blamed",
        *(row_columns if emission.held else ()),
    ]


def _is_due(rule: Rule, at: str) -> str:
    """Whether the group under way expired at a time."""
    return f"acc.first < acc.at AND {overdue(rule, 'element_at(records, acc.first + 1).time', at)}"


def _zero(item: Aggregate) -> str:
    return "0" if item.function in _COUNTS else "NULL"


def _updated(item: Aggregate, at: int) -> str:
    """The aggregate with one more record."""
    old, new = f"acc.state.a{at}", f"record.a{at}"
    if item.function == "first":
        return f"coalesce({old}, record.{name_sql(next(iter(item.arguments)))})"
    if item.function in _COUNTS:
        return f"{old} + CASE WHEN {new} THEN 1 ELSE 0 END"
    if item.function == "sum":
        return f"CASE WHEN {new} IS NULL THEN {old} ELSE coalesce({old}, 0) + {new} END"
    if item.function in ("min", "max"):
        return f"{'least' if item.function == 'min' else 'greatest'}({old}, {new})"
    # A null condition counts neither as true nor as false.
    word, none = ("OR", "false") if item.function == "bool_or" else ("AND", "true")
    return f"CASE WHEN {new} IS NULL THEN {old} ELSE coalesce({old}, {none}) {word} {new} END"


def _columns(rule: Rule, state: str, records: str) -> list[str]:
    """The aggregates of a complete group, each under its name."""
    assert rule.group is not None
    columns: list[str] = []
    for at, item in enumerate(rule.group.aggregates):
        sql = f"{state}.a{at}"
        if item.function == "list":
            sql = _list(item, records)
        columns.append(f"{sql} AS {name_sql(item.name)}")
    return columns


def _list(item: Aggregate, records: str) -> str:
    """The aggregate ``list`` of some records."""
    name = name_sql(next(iter(item.arguments)))
    return f"transform(filter({records}, record -> record.{name} IS NOT NULL), record -> record.{name})"
