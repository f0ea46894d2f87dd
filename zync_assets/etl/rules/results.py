"""Results of rules: the rules whose results share a query, the rule that takes a record, and the outputs of a match.

The frames of records and results are those of ``etl.rules.kind``.

Each row of a query has the columns of all output topics of the query. The plan of a single query therefore grows with the
square of the number of topics. A batch of one bucket has a query for each few components. A component is rules that share no
topic with the rules of other components.

A match has one output, or several of a rule with several outputs or ``explode``. A rule with several outputs is several rules
of the model. The first takes the records, and the others are ``part_of`` it. A match then has an array of parts, one for each
output, and becomes a row for each part. The first row counts its sources, and the others are ``extra``. A match without a part
is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from zync_assets.errors import EtlError
from zync_assets.etl.rules.kind import LACKING, Emission, Ordering, OutputColumns
from zync_assets.etl.rules.shapes import COLUMN as HEADERS
from zync_assets.etl.rules.shapes import ITEM, expression_type, has_schema, headers_sql, made_sql, type_sql
from zync_assets.pipeline import Input, Rule
from zync_assets.spark.sql import name_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

KEPT = "kept"
"""The column with the output's own condition: whether the output is kept. Null if the output's topic has no condition."""
FAILED, ENDED = -1, -2
"""Values in place of a rule's index. FAILED: an expression fails on the record. ENDED: the record's source row ended
(``etl.hold``)."""

MOST_TOPICS = 16
"""Topics, inputs and outputs, of the components that share a query. A larger component has a query of its own."""

Place: TypeAlias = tuple[Literal["in", "out", "views"], str]
"""A topic as an input or as an output, or all views."""
_VIEWS: Place = "views", ""


@dataclass(frozen=True)
class Component:
    """The topics of some rules. No rule outside of the component reads or writes one of them. ``views``: whether the views of
    the pool are among the rules: they share the state of their tables."""

    inputs: frozenset[str]
    outputs: frozenset[str]
    views: bool = False

    def __or__(self, other: Component) -> Component:
        return Component(self.inputs | other.inputs, self.outputs | other.outputs, self.views or other.views)

    @property
    def topics(self) -> int:
        return len(self.inputs) + len(self.outputs)


def one_component(rules: Iterable[Rule], inputs: Iterable[str]) -> Component:
    """All rules as one component. ``inputs``: the topics that the pool reads."""
    return Component(frozenset(inputs), frozenset(rule.out for rule in rules), views=True)


def components(rules: Sequence[Rule], inputs: Iterable[str]) -> list[Component]:
    """The components of a pool in the order of its inputs. Neighbours with MOST_TOPICS together are one.

    ``inputs``: all input topics of the pool, also topics without a rule. Rules for A → X, B → X, and C → Y:

        [Component({A, B}, {X}), Component({C}, {Y})]
    """
    neighbours: dict[Place, set[Place]] = {}
    for rule in rules:
        places: list[Place] = [("in", topic) for topic in rule.topics] if rule.view is None else [_VIEWS]
        for place in places:
            neighbours.setdefault(place, set()).add(("out", rule.out))
            neighbours.setdefault(("out", rule.out), set()).add(place)
    result: list[Component] = []
    known_places: set[Place] = set()
    topics = dict.fromkeys([*inputs, *(topic for rule in rules for topic in rule.topics)])
    starts: list[Place] = [*(("in", topic) for topic in topics), *([_VIEWS] if _VIEWS in neighbours else [])]
    for start in starts:
        if start in known_places:
            continue
        reached_places, queue = {start}, [start]
        while queue:
            further = neighbours.get(queue.pop(), set()) - reached_places
            reached_places |= further
            queue += further
        known_places |= reached_places
        component = Component(_topics(reached_places, "in"), _topics(reached_places, "out"), _VIEWS in reached_places)
        if result and result[-1].topics + component.topics <= MOST_TOPICS:
            result[-1] |= component
        else:
            result.append(component)
    return result


def _topics(places: Iterable[Place], side: str) -> frozenset[str]:
    return frozenset(place[1] for place in places if place[0] == side)


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

    def choice(self, sql_by_index: Mapping[int, str], otherwise: str = "NULL", none: str = "NULL") -> str:
        """An SQL expression for a record. ``sql_by_index``: index of the record's rule → SQL. ``otherwise``:
        the SQL for a rule that is not in ``sql_by_index``. ``none``: the SQL if no rule takes the record.

        Each choice repeats the conditions. Spark evaluates a repeated condition once anyway. With a shared column of the
        rule's index, Spark would not see which fields of a record are used, and would read every field.
        """
        cases = " ".join(
            f"WHEN {condition} THEN {sql_by_index.get(index, otherwise)}" for index, condition in self.conditions
        )
        return f"CASE {cases} ELSE {none} END" if cases else none

    def by(self, index: int) -> DataFrame:
        """The records of the rule ``index``."""
        return self.frame.where(self.choice({index: "true"}, "false", "false"))


def assign(
    item: Input,
    ordering: Ordering,
    frame: DataFrame,
    rules: Sequence[Rule],
    failure_condition: str | None = None,
    *,
    deletes: str = "false",
    decided: bool = False,
) -> Assignment:
    """Give each record to the first of a staging pool's ``rules`` that names its topic and whose ``where`` holds.

    ``failure_condition``: a condition for the records with a known failure. Such a record goes to no rule (FAILED), and no rule's
    condition is evaluated for the record. ``deletes``, ``decided``: as in ``Assignment``.
    """
    fate_conditions = [] if failure_condition is None else [(FAILED, failure_condition)]
    fate_conditions += [(ENDED, "coalesce(fate = 'ended', false)")] if decided else []
    return Assignment(item, ordering, frame, [*fate_conditions, *rule_conditions(item, frame, rules)], deletes, decided)


def rule_conditions(item: Input, frame: DataFrame, rules: Sequence[Rule]) -> list[tuple[int, str]]:
    """The rules that name a topic, by index, each with its condition, in the order in which they are asked."""
    return [
        (index, f"coalesce({_condition(frame, rule, rule.side(item.topic).where)}, false)")
        for index, rule in enumerate(rules)
        if item.topic in rule.topics and rule.part_of is None
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


def output_columns(rule: Rule, target: OutputColumns) -> list[tuple[str, str]]:
    """The columns for a rule's key, value and headers, each with the SQL of its value."""
    columns = [
        (side[0], if_kept(rule, made_sql(shape, side[1], side[2])))
        for shape, side in ((rule.key, target.key), (rule.value, target.value))
        if side is not None
    ]
    if target.headers:
        headers = "NULL" if rule.headers is None else headers_sql(rule.headers)
        columns.append(("headers", if_kept(rule, f"CAST({headers} AS {HEADERS})")))
    if target.lacking:
        columns.append((LACKING, f"array_compact(array({', '.join(target.lacking)}))"))
    if rule.keep is not None:
        columns.append((KEPT, f"coalesce({rule.keep}, false)"))
    return columns


def if_kept(rule: Rule, sql: str) -> str:
    """A rule's expression, evaluated only if the output's own condition is true. A dropped output can't fail."""
    return sql if rule.keep is None else f"CASE WHEN {rule.keep} THEN {sql} END"


def without_dropped(results: DataFrame, rules: Iterable[Rule]) -> DataFrame:
    """The results, where an output is dropped if its own condition is false."""
    # Without conditions, skips ``results.columns``, which takes Spark as long as the analysis of the whole batch.
    if all(rule.keep is None for rule in rules) or KEPT not in results.columns:
        return results
    names = [name_sql(name) for name in results.columns if name not in ("kind", KEPT)]
    return results.selectExpr(f"CASE WHEN kind = 'out' AND NOT {KEPT} THEN 'dropped' ELSE kind END AS kind", *names)


def output_rows(frame: DataFrame, rule: Rule, about: Sequence[str], condition: str, emission: Emission) -> DataFrame:
    """Result rows with their outputs. ``about``: the other columns, with ``kind`` and ``rule``; ``condition``: whether a row
    makes outputs, as SQL over ``frame``."""
    assert emission.target is not None
    if not emission.parts:
        outputs = emission.columns(rule, emission.target)
        return frame.selectExpr(
            *about, *(f"CASE WHEN {condition} THEN {sql} END AS {name_sql(name)}" for name, sql in outputs)
        )
    types = _types(emission)
    parts = [(at, part, dict(emission.columns(part, target))) for at, part, target in emission.parts]
    searching = not types.keys() >= {name for _, _, columns in parts for name in columns} - {KEPT}
    names = list(dict.fromkeys(name for _, _, columns in parts for name in columns if name != KEPT))
    arrays = [_array(at, part, columns, names, types, searching) for at, part, columns in parts]
    rows = frame.selectExpr(*about, f"CASE WHEN {condition} THEN concat({', '.join(arrays)}) END AS parts")
    rows = rows.selectExpr("*", "posexplode_outer(parts) AS (number, part)")
    return rows.selectExpr(
        "* EXCEPT (kind, rule, parts, number, part)",
        "CASE WHEN kind = 'out' AND part IS NULL THEN 'dropped' ELSE kind END AS kind",
        "coalesce(part.rule, rule) AS rule",
        "coalesce(number, 0) > 0 AS extra",
        "number",
        *(f"part.{name_sql(name)} AS {name_sql(name)}" for name in names),
    )


def _types(emission: Emission) -> dict[str, str]:
    """Column of an output → its type."""
    sides = [side for _, _, target in emission.parts for side in (target.key, target.value) if side is not None]
    return {
        **{column: type_sql(kind) for column, _, kind in sides},
        "headers": "array<struct<key: string, value: binary>>",
        "lacking": "array<string>",
        "pair_key": "bigint",
        "pair_rank": "int",
    }


def _array(
    at: int, part: Rule, columns: Mapping[str, str], names: Sequence[str], types: Mapping[str, str], searching: bool
) -> str:
    """The parts of one output, as an array in SQL. ``searching``: the columns say whether the output fails."""

    def column(name: str) -> str:
        none = "CAST(NULL AS STRING)" if searching else f"CAST(NULL AS {types[name]})"
        sql = columns.get(name, none)
        return f"{sql} AS {name_sql(name)}" if searching else f"CAST({sql} AS {types[name]}) AS {name_sql(name)}"

    output = f"struct({', '.join([f'{at} AS rule', *map(column, names)])})"
    if searching:
        return f"array({output})"
    if part.explode is None:
        keep = part.keep or "true"
        return f"filter(array(CASE WHEN {keep} THEN {output} END), part -> part IS NOT NULL)"
    items = f"coalesce({part.explode}, array())"
    if part.keep is not None:
        items = f"filter({items}, {ITEM} -> {part.keep})"
    return f"transform({items}, {ITEM} -> {output})"


def item_type(sides: Mapping[str, DataFrame], rule: Rule) -> DataType:
    """The type of the elements that a rule makes outputs of. EtlError for what is no array."""
    from pyspark.sql.types import ArrayType

    assert rule.explode is not None
    kind = expression_type(sides, f"({rule.explode})", rule.name, "explode")
    if not isinstance(kind, ArrayType):
        raise EtlError(
            f"rule {rule.name}, explode: {rule.explode} is {kind.simpleString()}; write an array. map_entries(…) makes one of a"
            " map."
        )
    return kind.elementType


def item_frame(sides: Mapping[str, DataFrame], rule: Rule) -> DataFrame:
    """A frame with the column ``item``, for the types of the rule's expressions."""
    from pyspark.sql.types import StructField, StructType

    spark = next(iter(sides.values())).sparkSession
    return spark.createDataFrame([], StructType([StructField(ITEM, item_type(sides, rule))]))


def several(rules: Sequence[Rule]) -> frozenset[str]:
    """The rules that may make several outputs of a match."""
    return frozenset(
        rule.part_of or rule.name for rule in rules if rule.part_of is not None or rule.explode is not None
    )


def several_topics(rules: Sequence[Rule]) -> frozenset[str]:
    """The inputs of these rules."""
    names = several(rules)
    return frozenset(topic for rule in rules if rule.name in names for topic in rule.topics)


class OutputTypes(Protocol):
    """The type of an output topic (``etl.output_types``)."""

    @property
    def targets(self) -> Mapping[str, OutputColumns]: ...

    @property
    def untyped(self) -> Mapping[str, str]: ...


def parts_of(
    rules: Sequence[Rule], types: Mapping[str, OutputTypes], rule: Rule
) -> list[tuple[int, Rule, OutputColumns]]:
    """The outputs of a rule with several: each as a rule with its index. EtlError for one whose types are not known."""
    parts = [(at, part) for at, part in enumerate(rules) if rule.name in (part.name, part.part_of)]
    for _, part in parts:
        if part.name in types[part.out].untyped:
            raise EtlError(types[part.out].untyped[part.name])
    return [(at, part, types[part.out].targets[part.name]) for at, part in parts]


def optional_columns(rules: Sequence[Rule], names: Collection[str], *, merges: bool, held: bool) -> list[str]:
    """The columns of result rows that only some rules make. ``names``: the rules with several outputs of a match; ``merges``:
    outputs are merged; ``held``: an output is held."""
    columns = ["takers", *(["rows"] if held else [])] if merges else []
    columns += ["olds"] if merges or any(rule.group is not None or rule.expiry is not None for rule in rules) else []
    columns += ["extra", "number"] if any(rule.name in names for rule in rules) else []
    return [*columns, "since"] if any(rule.expiry is not None for rule in rules) else columns
