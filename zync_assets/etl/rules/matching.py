"""From records to results: which rule takes a record, which records pair, and what becomes of the rest.

A record frame has the columns ``kafka``, ``key``, ``value``, ``time`` (never runs back within a partition) and ``old``
(false: new in this batch; true: it was pending). A result frame has one row an output, and one row a new record that
makes none, with the columns

    kind     out, pending, unmatched, dropped, quarantined (an expression fails on it), or untyped (no such batch is committed)
    rule     index of the rule that took the record, if one did
    ord      struct(time, place, partition, offset) of the completing input: outputs are ordered by it
    source   array of struct(place, partition, offset) of the raw records; place: the input's, see ``etl.account``
    last     index in source of the completing input
    waited   a bit for each of source, the lowest for its first: whether it was pending
    hash     hash of the join key of a pending record, null for a null key
    key:<topic>, value:<topic>
    headers  where a rule gives its records some

The module builds Spark SQL text rather than column objects. A column object costs a call or more into the JVM, and a small
batch would spend more time on its plan than on its run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from zync_assets.errors import EtlError
from zync_assets.etl.rules.join_keys import hash_sql
from zync_assets.etl.rules.shapes import COLUMN as HEADERS
from zync_assets.etl.rules.shapes import Question, expression_type, headers_sql, made_sql, schema_of, type_sql
from zync_assets.pipeline import Denorm, Input, Rule, Stateless
from zync_assets.spark.sql import name_sql, shape_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_NO_HASH = "CAST(NULL AS bigint) AS hash"

KEPT = "kept"
"""The column that says whether an output is wanted, where its topic has a condition; null where there is none."""
LACKING = "lacking"
"""The column with the fields that an output leaves out since its input's own schema lacks them; where a rule can have some."""
FAILED = -1
"""In place of a rule's index: an expression fails on the record."""


@dataclass(frozen=True)
class Target:
    """How the outputs of one rule go into its topic's columns. A None column: neither rule nor topic has that side."""

    fingerprint: str
    key: tuple[str, DataType, DataType] | None
    """(column, the rule's type, the column's type)."""
    value: tuple[str, DataType, DataType] | None
    headers: bool = False
    """Whether one of the topic's rules gives its records headers."""
    lacking: Sequence[str] = ()
    """Expressions for the paths of fields that a record leaves out, null where it has them."""


Made: TypeAlias = Callable[[Rule, Target], list[tuple[str, str]]]
"""A function that returns the columns of a rule's results as (name, SQL): ``columns``, or ``etl.failures.failing_sides``."""


@dataclass(frozen=True)
class Taken:
    """A topic's new records, and the conditions that choose a record's rule. The first true condition decides.

    ``conditions``: (index of the rule, SQL).
    """

    item: Input
    place: int
    frame: DataFrame
    conditions: Sequence[tuple[int, str]]

    def choice(self, made: Mapping[int, str], other: str = "NULL", none: str = "NULL") -> str:
        """An SQL expression for a record. ``made``: index of the record's rule → SQL; ``other``: the SQL for a rule that is
        not in ``made``; ``none``: the SQL if no rule takes the record.

        Each choice repeats the conditions. Spark evaluates a repeated condition once anyway. With a shared column of the
        rule's index, Spark would not see which fields of a record are used, and would read every field.
        """
        cases = " ".join(f"WHEN {condition} THEN {made.get(index, other)}" for index, condition in self.conditions)
        return f"CASE {cases} ELSE {none} END" if cases else none

    def by(self, index: int) -> DataFrame:
        """The records of the rule ``index``."""
        return self.frame.where(self.choice({index: "true"}, "false", "false"))


def assign(item: Input, place: int, frame: DataFrame, rules: Sequence[Rule], failed: str | None = None) -> Taken:
    """Give each record to the first of a staging pool's ``rules`` that names its topic and whose ``where`` holds.

    ``failed``: a condition for the records with a known failure. Such a record goes to no rule (FAILED), and no rule's
    condition is evaluated for the record.
    """
    known = [] if failed is None else [(FAILED, failed)]
    return Taken(item, place, frame, [*known, *conditions(item, frame, rules)])


def conditions(item: Input, frame: DataFrame, rules: Sequence[Rule]) -> list[tuple[int, str]]:
    """The rules that name a topic, by index, each with its condition, in the order in which they are asked."""
    return [
        (index, f"coalesce({_condition(frame, rule, where)}, false)")
        for index, rule in enumerate(rules)
        for where in wheres(rule, item.topic)
    ]


def wheres(rule: Rule, topic: str) -> list[str | None]:
    """The conditions of a rule for a topic: none, or one, which may be absent."""
    if isinstance(rule, Stateless):
        return [rule.where] if rule.input == topic else []
    sides = ((rule.left, rule.where_left), (rule.right, rule.where_right))
    return [where for name, where in sides if name == topic]


def _condition(frame: DataFrame, rule: Rule, where: str | None) -> str:
    if where is None:
        return "value IS NOT NULL"
    try:
        kind = expression_type({"": frame}, f"({where})", rule.name, "where")
    except EtlError:
        if has_schema(frame):
            raise
        return "false"  # it asks for a field of a value, and all that came are tombstones
    if kind.simpleString() not in ("boolean", "void"):
        raise EtlError(f"rule {rule.name}, where: {where} is {kind.simpleString()}; it must be a condition")
    return f"({where})"


def questions(rules: Iterable[Rule], frames: Mapping[str, DataFrame]) -> list[Question]:
    """The expressions of rules whose types a batch needs (see ``shapes.learn_types``), of those rules whose topics have a
    schema by now. ``frames``: input topic → records."""
    found: list[Question] = []
    for rule in rules:
        if not all(topic in frames and has_schema(frames[topic]) for topic in rule.topics):
            continue
        sides = {"in": frames[rule.input]} if isinstance(rule, Stateless) else {}
        if isinstance(rule, Denorm):
            sides = {"left": frames[rule.left], "right": frames[rule.right]}
            for pair in rule.join_on:
                found += [({side: sides[side]}, f"({sql})") for side, sql in zip(sides, pair, strict=True)]
        for topic in rule.topics:
            found += [({"": frames[topic]}, f"({where})") for where in wheres(rule, topic) if where is not None]
        found += [(sides, shape_sql(rule.key)), (sides, shape_sql(rule.value))]
    return found


def has_schema(frame: DataFrame) -> bool:
    """Whether a topic's values have a type yet: it has none before the first value that is not null."""
    return schema_of(frame)["value"].dataType.simpleString() != "void"


def singles(
    taken: Taken,
    rules: Sequence[Rule],
    targets: Mapping[int, Target],
    joined: Sequence[int],
    untyped: Sequence[int],
    made_by: Made,
) -> DataFrame:
    """The results of a topic's new records in one pass, without the records of denorm rules.

    ``targets``: the pool's stateless rules, by index; ``joined``: the indexes of its denorm rules; ``untyped``: rules with
    unresolved types, which must take no record (kind ``untyped``). A record without a rule is unmatched, or dropped if the
    pipeline file says so. A tombstone without a rule is dropped, since Debezium writes a tombstone after each delete.
    ``made_by``: see ``Made``.
    """
    fate = "dropped" if taken.item.unmatched == "drop" else "unmatched"
    kinds = dict.fromkeys(targets, "out") | dict.fromkeys(untyped, "untyped") | {FAILED: "quarantined"}
    fates = taken.choice(
        {index: text_sql(name) for index, name in kinds.items()},
        none=f"CASE WHEN in.value IS NULL THEN 'dropped' ELSE '{fate}' END",
    )
    known = taken.choice({index: str(index) for index in (*targets, *untyped)})
    sides: dict[str, dict[int, str]] = {}
    for index, target in targets.items():
        for name, made in made_by(rules[index], target):
            sides.setdefault(name, {})[index] = made
    frame = taken.frame
    if joined:
        frame = frame.where(taken.choice(dict.fromkeys(joined, "false"), "true", "true"))
    return frame.selectExpr("kafka", "key", "value", "struct(kafka, key, value) AS in", "time").selectExpr(
        f"{fates} AS kind",
        f"CAST({known} AS int) AS rule",
        f"{_order('time', taken.place, 'kafka.partition', 'kafka.offset')} AS ord",
        f"array({_source(taken.place, 'kafka.partition', 'kafka.offset')}) AS source",
        "0 AS last",
        "0 AS waited",
        _NO_HASH,
        *(f"{taken.choice(choice)} AS {name_sql(name)}" for name, choice in sides.items()),
    )


def in_frame(frame: DataFrame, name: str) -> DataFrame:
    """The record under one name, as expressions of a rule see it."""
    return frame.selectExpr(f"struct(kafka, key, value) AS {name_sql(name)}", "time", "old")


def keyed(rule: Denorm, side: str, frame: DataFrame, kinds: Sequence[DataType]) -> DataFrame:
    """One side of a denorm rule with its join key (``k0``, ``k1`` …, of the types ``kinds``) and the key's hash.

    A null key matches nothing. The column ``lone`` gives every record with a null key a value of its own. Without ``lone``,
    Spark would send every record with a null key to the same task.

    ``frame`` is from ``in_frame``.
    """
    index = 0 if side == "left" else 1
    names = key_names(rule)
    keys = [f"CAST(({pair[index]}) AS {type_sql(kind)})" for kind, pair in zip(kinds, rule.join_on, strict=True)]
    # Repeats the keys' expressions. For a name that is used twice, Spark would make a column first, and carry the whole record
    # beside the column.
    missing = " OR ".join(f"{key} IS NULL" for key in keys)
    lone = f"CASE WHEN {missing} THEN {side}.kafka.offset ELSE -1 END AS lone"
    named = (f"{key} AS {name}" for key, name in zip(keys, names, strict=True))
    return frame.selectExpr("*", *named, lone).selectExpr("*", f"{hash_sql(names, kinds)} AS hash")


def key_names(rule: Denorm) -> list[str]:
    return [f"k{number}" for number in range(len(rule.join_on))]


def paired(
    rule: Denorm,
    index: int,
    left: DataFrame,
    right: DataFrame,
    kinds: Sequence[DataType],
    places: Mapping[str, int],
    target: Target,
    made_by: Made,
) -> DataFrame:
    """Pair the k-th left record of a join key with the k-th right one, by partition and offset.

    ``left`` and ``right`` are from ``keyed``, new and old records together. New records without a counterpart, and those
    with a null key, are pending; old ones without one stay as they are and give no row. ``made_by``: as in ``columns``.
    """
    from pyspark.sql import functions as F

    names = key_names(rule)
    sides = {side: _ranked(rule, frame, side) for side, frame in (("left", left), ("right", right))}
    equal = " AND ".join(f"left_{name} = right_{name}" for name in (*names, "lone", "rank"))
    # No expression uses a side's record as a whole; the columns beside the record answer such questions. Spark then reads and
    # joins only the used fields of the records. For the same reason no name is used twice. The join is not by names either:
    # it would merge the keys of both sides into a column with a new name.
    both = "left_old IS NOT NULL AND right_old IS NOT NULL"
    at = {"left": places[rule.left], "right": places[rule.right]}
    source = {side: _source(place, f"{side}_partition", f"{side}_offset") for side, place in at.items()}
    ords = {side: _order(f"{side}_time", place, f"{side}_partition", f"{side}_offset") for side, place in at.items()}
    hashes = {side: hash_sql([f"{side}_{name}" for name in names], kinds) for side in sides}
    later = f"{both} AND {_is_later(rule, places)}"
    return (
        sides["left"]
        .join(sides["right"], F.expr(equal), "full_outer")
        .where(f"({both}) OR NOT coalesce(left_old, right_old)")
        .selectExpr(
            f"CASE WHEN {both} THEN 'out' ELSE 'pending' END AS kind",
            f"{index} AS rule",
            f"CASE WHEN left_old IS NULL OR ({later}) THEN {ords['right']} ELSE {ords['left']} END AS ord",
            f"CASE WHEN {both} THEN array({source['left']}, {source['right']})"
            f" WHEN left_old IS NOT NULL THEN array({source['left']}) ELSE array({source['right']}) END AS source",
            f"CASE WHEN {later} THEN 1 ELSE 0 END AS last",
            f"CASE WHEN {both} THEN CAST(left_old AS int) + 2 * CAST(right_old AS int) ELSE 0 END AS waited",
            f"CASE WHEN {both} THEN NULL WHEN left_old IS NOT NULL THEN {hashes['left']} ELSE {hashes['right']} END AS hash",
            *(f"CASE WHEN {both} THEN {made} END AS {name_sql(name)}" for name, made in made_by(rule, target)),
        )
    )


def _is_later(rule: Denorm, places: Mapping[str, int]) -> str:
    """Whether the right record comes after the left one, as ``ord`` has it."""
    if places[rule.right] != places[rule.left]:
        return f"right_time {'>=' if places[rule.right] > places[rule.left] else '>'} left_time"
    return "struct(right_time, right_partition, right_offset) > struct(left_time, left_partition, left_offset)"


def _ranked(rule: Denorm, frame: DataFrame, side: str) -> DataFrame:
    """One side with its rank within the join key, its columns under names of their own."""
    keys = [*key_names(rule), "lone"]
    place = [f"{side}_partition", f"{side}_offset"]
    window = f"PARTITION BY {', '.join(f'{side}_{key}' for key in keys)} ORDER BY {', '.join(place)}"
    return frame.selectExpr(
        name_sql(side),
        *(f"{name} AS {side}_{name}" for name in (*keys, "old", "time")),
        *(f"{side}.kafka.{name} AS {side}_{name}" for name in ("partition", "offset")),
    ).selectExpr("*", f"row_number() OVER ({window}) AS {side}_rank")


def one_sided(index: int, frame: DataFrame, side: str, place: int) -> DataFrame:
    """New records of a rule whose other side has no records at all, and so no schema yet: all of them wait."""
    partition, offset = f"{side}.kafka.partition", f"{side}.kafka.offset"
    return frame.where("NOT old").selectExpr(
        "'pending' AS kind",
        f"{index} AS rule",
        f"{_order('time', place, partition, offset)} AS ord",
        f"array({_source(place, partition, offset)}) AS source",
        "0 AS last",
        "0 AS waited",
        "hash",
    )


def without_dropped(results: DataFrame, rules: Iterable[Rule]) -> DataFrame:
    """The results, where an output is dropped if its own condition is false."""
    # Without conditions, skips ``results.columns``, which takes Spark as long as the analysis of the whole batch.
    if all(rule.keep is None for rule in rules) or KEPT not in results.columns:
        return results
    names = [name_sql(name) for name in results.columns if name not in ("kind", KEPT)]
    return results.selectExpr(f"CASE WHEN kind = 'out' AND NOT {KEPT} THEN 'dropped' ELSE kind END AS kind", *names)


def union(frames: Iterable[DataFrame]) -> DataFrame:
    """The rows of several result frames. A column that a frame lacks is null in the frame's rows."""
    first, *others = frames
    for frame in others:
        first = first.unionByName(frame, allowMissingColumns=True)
    return first


def _order(time: str, place: int, partition: str, offset: str) -> str:
    return f"struct({time} AS time, {place} AS place, {partition} AS partition, {offset} AS offset)"


def _source(place: int, partition: str, offset: str) -> str:
    return f"struct({place} AS place, {partition} AS partition, {offset} AS offset)"


def columns(rule: Rule, target: Target) -> list[tuple[str, str]]:
    """The columns that a rule's key, value and headers go to, each with what the rule makes for it."""
    made = [
        (side[0], wanted(rule, made_sql(shape, side[1], side[2])))
        for shape, side in ((rule.key, target.key), (rule.value, target.value))
        if side is not None
    ]
    if target.headers:
        own = "NULL" if rule.headers is None else headers_sql(rule.headers)
        made.append(("headers", wanted(rule, f"CAST({own} AS {HEADERS})")))
    if target.lacking:
        made.append((LACKING, f"array_compact(array({', '.join(target.lacking)}))"))
    if rule.keep is not None:
        made.append((KEPT, f"coalesce({rule.keep}, false)"))
    return made


def wanted(rule: Rule, sql: str) -> str:
    """A rule's expression, evaluated only if the output's own condition is true. A dropped output can't fail."""
    return sql if rule.keep is None else f"CASE WHEN {rule.keep} THEN {sql} END"
