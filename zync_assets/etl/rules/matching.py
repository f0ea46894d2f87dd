"""From records to results: which rule takes a record, and what every kind of rule makes of its records.

A record frame has the columns ``kafka``, ``key``, ``value``, ``time`` (never runs back within a partition), ``old`` (false:
new in this batch; true: it was pending) and, where an output is held, ``row`` (see ``source_rows``). A result frame has one
row an output, and one row a new record that makes none, with the columns

    kind     out, pending, unmatched, dropped, quarantined (an expression fails on it), ended (with its source row, without an
             output), or untyped (no such batch is committed)
    rule     index of the rule that took the record, if one did
    ord      struct of the completing input, by which outputs are ordered: see ``Ordering``
    source   array of struct(place, partition, offset) of the raw records; place: the input's, see ``etl.account``
    last     index in source of the completing input
    waited   a bit for each of source, the lowest for its first: whether it was pending
    hash     hash of the join key of a pending record, null for a null key
    rows     where an output is held: array of struct(hash, creates) of the raw records (see ``source_rows``)
    ords     where an output is held: array of ``ord`` of the raw records
    exact    where an output is held: hash of the join key with its own types
    follows  where an output is held: the number of an output among those that follow the output of ``ord``, or null
    deletes  where an output is held: whether a record without a rule deletes its source row
    key:<topic>, value:<topic>
    headers  where a rule gives its records some

``Kind`` is the interface between the engine and a kind of rule. The engine assigns every record to a rule, finds the pending
records, and accounts for the result rows. A kind makes result rows of a rule's records.

The module builds Spark SQL text rather than column objects. A column object costs a call or more into the JVM, and a small
batch would spend more time on its plan than on its run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from zync_assets.errors import EtlError
from zync_assets.etl.rules.shapes import COLUMN as HEADERS
from zync_assets.etl.rules.shapes import Question, expression_type, headers_sql, made_sql, schema_of
from zync_assets.pipeline import Input, Rule, Side
from zync_assets.spark.sql import name_sql, shape_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

KEPT = "kept"
"""The column that says whether an output is wanted, where its topic has a condition; null where there is none."""
LACKING = "lacking"
"""The column with the fields that an output leaves out since its input's own schema lacks them; where a rule can have some."""
MISSING, SEVERAL = "missing", "several"
"""The kinds of records whose row is missing, or whose rows are several. No such batch is committed."""
LOOKED, BLAMED, LOOK_HASH = "looked", "blamed_side", "look_hash"
"""Columns of records with the rows that they look up: the kind of the result, the index of the side without its row, and the
hash by which the record waits."""
FAILED, ENDED = -1, -2
"""In place of a rule's index: an expression fails on the record, or its source row ended (``etl.hold``)."""


@dataclass(frozen=True)
class Ordering:
    """The order of a batch's result rows, as SQL.

    Records of one domain follow the order of their source, and other records the order of time. Records of two domains can't be
    compared by their source, so that the outputs of one domain follow those of another. Outputs in the order of time come last.
    In a pair that can't be compared by the source, the record with the later time completes the pair. Input, partition and
    offset break ties, so that two records of one partition never change places.

    ``places``: topic → its number in result rows, for the inputs of the pool; ``domains``: topic → its domain, for inputs with a
    source order; ``held``: whether an output is held, so that records have the column ``row``.
    """

    places: Mapping[str, int]
    domains: Mapping[str, str] = field(default_factory=dict[str, str])
    held: bool = False

    @property
    def groups(self) -> dict[str | None, list[str]]:
        """Domain → its topics, in the order of their outputs; None: the topics in the order of time."""
        found: dict[str | None, list[str]] = {}
        for topic in sorted(self.places, key=lambda topic: (topic not in self.domains, self.places[topic])):
            found.setdefault(self.domains.get(topic), []).append(topic)
        return found

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts of ``ord``."""
        rank, low = ("rank",) if len(self.groups) > 1 else (), ("low",) if self.domains else ()
        return (*rank, "high", *low, "place", "partition", "offset")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a record carries for its order."""
        order, row = ("order_high", "order_low") if self.domains else (), ("row",) if self.held else ()
        return ("time", *order, *row)

    def carried(self, frame: DataFrame, topic: str) -> DataFrame:
        """The records of a topic with these columns."""
        if not self.domains or topic in self.domains:
            return frame
        return frame.selectExpr("*", "unix_micros(time) AS order_high", "0L AS order_low")

    def sql(self, topic: str, partition: str, offset: str, prefix: str = "") -> str:
        """``ord`` of a topic's record, whose columns have a ``prefix``."""
        values = {
            "rank": str(list(self.groups).index(self.domains.get(topic))),
            "high": f"{prefix}order_high" if self.domains else f"unix_micros({prefix}time)",
            "low": f"{prefix}order_low",
            "place": str(self.places[topic]),
            "partition": partition,
            "offset": offset,
        }
        return f"struct({', '.join(f'{values[name]} AS {name}' for name in self.parts)})"

    def of_parts(self, prefix: str) -> str:
        """``ord`` of its parts, which are in columns named by ``prefix`` and a number; null if the first is null."""
        kinds = {"high": "bigint", "low": "bigint", "offset": "bigint"}
        parts = (f"CAST({prefix}{at} AS {kinds.get(name, 'int')}) AS {name}" for at, name in enumerate(self.parts))
        return f"CASE WHEN {prefix}0 IS NOT NULL THEN struct({', '.join(parts)}) END"

    def is_later(self, topic: str, other: str, prefix: str, other_prefix: str) -> str:
        """Whether a topic's record comes after the record of another topic."""
        sign = ">=" if self.places[topic] > self.places[other] else ">"
        if self.domains.get(topic) is None or self.domains.get(topic) != self.domains.get(other):
            return f"{prefix}time {sign} {other_prefix}time"
        high, low = ([f"{side}order_{part}" for side in (prefix, other_prefix)] for part in ("high", "low"))
        return f"({high[0]} > {high[1]} OR ({high[0]} = {high[1]} AND {low[0]} {sign} {low[1]}))"

    def sequence(self, topic: str, prefix: str) -> list[str]:
        """The columns that sort the records of one topic."""
        order = ["order_high", "order_low"] if topic in self.domains else []
        return [f"{prefix}{name}" for name in (*order, "partition", "offset")]


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


Columns: TypeAlias = Callable[[Rule, Target], list[tuple[str, str]]]
"""A function that returns the columns of a rule's outputs as (name, SQL): ``columns``, or ``etl.failures.failing_sides``."""


@dataclass(frozen=True)
class RuleRecords:
    """The new records of a rule in one batch.

    ``index``: the rule's. ``frames``: side → the records under the side's name (``in_frame``), with the columns that the
    rule's kind adds. A side whose topic has no schema yet has no frame. ``key_types``: the types of the join key's parts.
    ``join``: the definition of the hashes of pending records, None if it is not known yet. ``original``: the hashes are those of
    the versions that kept no definition.
    """

    rule: Rule
    index: int
    frames: Mapping[str, DataFrame]
    key_types: Sequence[DataType] = ()
    join: str | None = None
    original: bool = True
    lookups: Sequence[Sequence[DataType]] | None = None
    """The types of the compared values of each look-up; None while a table has no schema."""


@dataclass(frozen=True)
class Emission:
    """The outputs of a rule in one batch. ``target``: their columns, None while an input has no schema. ``columns``: as in
    ``singles``. ``together``: one Spark task runs the whole batch.
    """

    target: Target | None
    columns: Columns
    ordering: Ordering
    together: bool
    held: bool = False
    """Whether the results have the columns ``rows``, ``ords`` and ``exact``."""
    rows: Callable[[RuleRecords, DataFrame], DataFrame] | None = None
    """Adds the rows that the records look up, each under its alias, and LOOKED, BLAMED and LOOK_HASH."""

    @property
    def places(self) -> Mapping[str, int]:
        """Input topic → its number in result rows."""
        return self.ordering.places


class Kind:
    """A kind of rule. Each kind is a module of ``etl.rules``. ``etl.rules.KINDS`` lists the kinds.

    A rule's sides say which records the rule takes, and by which names its expressions see them. A record of a side with a
    join key may be pending. The engine finds the pending records that have the hash of a new record on another side. If
    the rule has a single side, the engine compares with the new records of the same side.
    """

    name: ClassVar[str]
    """The ``type`` of the rules in a pipeline file."""
    join: ClassVar[str] = ""
    """The key of the join key in a pipeline file, where the kind has one."""
    summary: ClassVar[str] = ""
    """The kind in a few words, for ``--explain``."""
    single: ClassVar[bool] = False
    """Whether each record makes one output by itself. The engine then makes the outputs in one pass over the topic, for all
    rules of such kinds (``singles``), and does not call ``records`` and ``results``."""

    def records(
        self, rule: Rule, index: int, inputs: Mapping[str, DataFrame], frames: Mapping[str, DataFrame]
    ) -> RuleRecords:
        """The rule's new records, with the join key's hash (column ``hash``) if the rule has a join key.

        ``inputs``: side → all records of its topic, for the types. ``frames``: side → the rule's new records, from
        ``in_frame``. Both lack a side whose topic has no schema. EtlError for a join key that can't be compared.
        """
        return RuleRecords(rule, index, frames)

    def results(self, records: RuleRecords, pending: Mapping[str, DataFrame], emission: Emission) -> list[DataFrame]:
        """Result frames for every new record, and for each pending record that the batch completes.

        ``records``: from ``records``. ``pending``: side → the pending records that may match, from ``in_frame``.
        """
        raise NotImplementedError

    def key_sql(self, rule: Rule, topic: str, inputs: Mapping[str, DataFrame]) -> str | None:
        """The expressions of the join key that may fail on a topic's record; None if the rule has none. ``inputs``: as in
        ``records``."""
        return None

    def from_sql(self, rule: Rule) -> str:
        """The records that ``zync etl --explain`` selects the outputs from, as the FROM clause of one SQL statement."""
        raise NotImplementedError

    def title(self, rule: Rule) -> str:
        """The rule and its topics, for the asset graph."""
        return f"{rule.name} ({' with '.join(rule.topics)})"

    def reason(self, rule: Rule, topic: str, before: int) -> str:
        """Why a record with a join key is pending, for ``zync pending``. ``before``: the pending records of the same topic and
        key before it."""
        return "its counterpart did not come yet"


@dataclass(frozen=True)
class Assignment:
    """A topic's new records, and the conditions that choose a record's rule. The first true condition decides.

    ``conditions``: (index of the rule, SQL). ``deletes``: whether a record deletes its source row, as SQL. ``decided``: the
    frame has the columns ``fate`` (``ended``, ``waiting`` or null), ``at`` (``ord`` of the output that the record follows, or
    null) and ``follows``.
    """

    item: Input
    ordering: Ordering
    frame: DataFrame
    conditions: Sequence[tuple[int, str]]
    deletes: str = "false"
    decided: bool = False

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


def assign(
    item: Input,
    ordering: Ordering,
    frame: DataFrame,
    rules: Sequence[Rule],
    failed: str | None = None,
    *,
    deletes: str = "false",
    decided: bool = False,
) -> Assignment:
    """Give each record to the first of a staging pool's ``rules`` that names its topic and whose ``where`` holds.

    ``failed``: a condition for the records with a known failure. Such a record goes to no rule (FAILED), and no rule's
    condition is evaluated for the record. ``deletes``, ``decided``: as in ``Assignment``.
    """
    known = [] if failed is None else [(FAILED, failed)]
    known += [(ENDED, "coalesce(fate = 'ended', false)")] if decided else []
    return Assignment(item, ordering, frame, [*known, *conditions(item, frame, rules)], deletes, decided)


def conditions(item: Input, frame: DataFrame, rules: Sequence[Rule]) -> list[tuple[int, str]]:
    """The rules that name a topic, by index, each with its condition, in the order in which they are asked."""
    return [
        (index, f"coalesce({_condition(frame, rule, rule.side(item.topic).where)}, false)")
        for index, rule in enumerate(rules)
        if item.topic in rule.topics
    ]


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
        # Expressions of rules with tables name rows.
        if rule.tables or not all(topic in frames and has_schema(frames[topic]) for topic in rule.topics):
            continue
        sides = {side.name: frames[side.topic] for side in rule.sides}
        for side in rule.sides:
            found += [({side.name: sides[side.name]}, f"({sql})") for sql in side.keys]
            found += [({"": sides[side.name]}, f"({side.where})")] if side.where is not None else []
        found += [(sides, shape_sql(rule.key)), (sides, shape_sql(rule.value))]
    return found


def has_schema(frame: DataFrame) -> bool:
    """Whether a topic's values have a type yet: it has none before the first value that is not null."""
    return schema_of(frame)["value"].dataType.simpleString() != "void"


def singles(
    assignment: Assignment,
    rules: Sequence[Rule],
    targets: Mapping[int, Target],
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
    rows = ("array(row) AS rows", f"array({order}) AS ords", "CAST(NULL AS bigint) AS exact")
    follows = "CAST(NULL AS int)"
    if assignment.decided:
        fates = f"CASE WHEN {fates} = 'out' AND fate = 'waiting' THEN 'pending' ELSE {fates} END"
        # A pending record of an earlier batch may have a later time than both sides of a pair that came late.
        order, follows = f"greatest(at, {order})", "follows"
    deletes = assignment.choice({}, "false", assignment.deletes)
    rows += (f"{follows} AS follows", f"{deletes} AS deletes")
    known = assignment.choice({index: str(index) for index in (*targets, *untyped)})
    sides: dict[str, dict[int, str]] = {}
    for index, target in targets.items():
        for name, made in columns_of(rules[index], target):
            sides.setdefault(name, {})[index] = made
    frame = assignment.frame
    if others:
        frame = frame.where(assignment.choice(dict.fromkeys(others, "false"), "true", "true"))
    own = (*ordering.columns, "old", *(("fate", "at", "follows") if assignment.decided else ()))
    return frame.selectExpr("kafka", "key", "value", "struct(kafka, key, value) AS in", *own).selectExpr(
        f"{fates} AS kind",
        f"CAST({known} AS int) AS rule",
        f"{order} AS ord",
        f"array({source_sql(ordering.places[topic], 'kafka.partition', 'kafka.offset')}) AS source",
        "0 AS last",
        "CAST(old AS int) AS waited",
        "CAST(NULL AS bigint) AS hash",
        *(rows if held else ()),
        *(f"{assignment.choice(choice)} AS {name_sql(name)}" for name, choice in sides.items()),
    )


def in_frame(frame: DataFrame, name: str, ordering: Ordering) -> DataFrame:
    """The record under one name, as expressions of a rule see it."""
    return frame.selectExpr(f"struct(kafka, key, value) AS {name_sql(name)}", *ordering.columns, "old")


def records_sql(rule: Rule, side: Side) -> str:
    """The records of one side, to read: a table of ``zync etl --explain``, in which each record has its rule."""
    return f"(SELECT struct(kafka, key, value) AS {side.name} FROM {name_sql(side.topic)} WHERE rule = '{rule.name}')"


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


def source_sql(place: int, partition: str, offset: str) -> str:
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
