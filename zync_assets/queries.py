"""The queries of views and the look-ups of rules: tables, joins, and the way along the joins."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

Shape: TypeAlias = "str | Mapping[str, Shape] | None"
"""One Spark SQL expression, a mapping of field names to shapes (any depth), or None: a null (a tombstone)."""


def field_names(shape: Shape) -> Iterator[str]:
    """The names of the fields of a shape, at any depth."""
    for name, inner in shape.items() if isinstance(shape, Mapping) else ():
        yield name
        yield from field_names(inner)


Path: TypeAlias = tuple[str, ...]
"""The names of a field from its record on: ``("in", "value", "after", "ID")``."""

Missing: TypeAlias = Literal["wait", "null", "quarantine"]
"""The fate of a record whose look-up finds no row: the record waits, gets nulls, or goes into quarantine."""


@dataclass(frozen=True)
class ViewTable:
    """One table of a view: the latest rows of an input's records, by key.

    ``key``, ``row`` and ``deleted``: over the record's columns ``kafka``, ``key`` and ``value``. None as ``row``: ``value.after``
    of a Debezium envelope, else ``value``. None as ``deleted``: the deletes of ``codecs.fields.deletes_sql``.
    ``by_time``: a key may come in several partitions, and its last record is the one with the latest time.
    """

    alias: str
    topic: str
    key: Shape = "key"
    row: str | None = None
    deleted: str | None = None
    by_time: bool = False


@dataclass(frozen=True)
class ViewJoin:
    """A join of a view. The join adds the table ``alias`` to the tables before it.

    ``on``: pairs of an expression over an alias that was joined before, and of an expression over ``alias``. An alias
    qualifies each column: ``("o.customer_id", "c.id")``. ``near``: the alias that was joined before.
    """

    kind: Literal["inner", "left"]
    alias: str
    on: tuple[tuple[str, str], ...]
    near: str


class JoinStep(NamedTuple):
    """A join on the way along the joins. ``pairs``: an expression over the nearer alias, and that over the farther alias
    that equals it. ``outer``: a LEFT JOIN may find no farther row."""

    near: str
    far: str
    pairs: list[tuple[str, str]]
    outer: bool


@dataclass(frozen=True)
class View:
    """The query of a view. ``key``, ``value``, ``headers`` and ``out`` are those of its rule.

    ``root``: the first alias of ``from:``. ``on_duplicate_key``: the expression that is greatest for the result row to keep
    among those of one key. None: result rows with one key are an error.
    """

    tables: tuple[ViewTable, ...]
    root: str
    joins: tuple[ViewJoin, ...] = ()
    where: str | None = None
    on_duplicate_key: str | None = None
    definition: str | None = None
    """The definition by the topic's first names of renamed fields, where the expressions have the lake's names
    (``view_definition``)."""
    file_definition: str = ""
    """The definition by the names of the pipeline file. Pools of older versions have it."""

    def table(self, alias: str) -> ViewTable:
        """The table of an alias; KeyError if there is none."""
        return {table.alias: table for table in self.tables}[alias]

    def outwards(self, start: str) -> list[JoinStep]:
        """The joins from an alias outwards, in the order of the way."""
        steps, aliases = list[JoinStep](), [start]
        for near in aliases:
            for join in self.joins:
                far = join.alias if join.near == near else join.near if join.alias == near else None
                if far is not None and far not in aliases:
                    aliases.append(far)
                    outwards = far == join.alias
                    pairs = list(join.on) if outwards else [(alias_sql, near_sql) for near_sql, alias_sql in join.on]
                    steps.append(JoinStep(near, far, pairs, outwards and join.kind == "left"))
        return steps

    def path(self, start: str, ends: Iterable[str]) -> list[JoinStep]:
        """The joins that lead from an alias to some aliases."""
        steps = self.outwards(start)
        above = {step.far: step.near for step in steps}
        needed_aliases: set[str] = set()
        for alias in ends:
            while alias in above and alias not in needed_aliases:
                needed_aliases.add(alias)
                alias = above[alias]
        return [step for step in steps if step.far in needed_aliases]

    @property
    def optional(self) -> frozenset[str]:
        """The aliases whose row a LEFT JOIN may lack."""
        return frozenset(join.alias for join in self.joins if join.kind == "left")

    def origin(self, alias: str, ends: Collection[str]) -> JoinStep | None:
        """The step back over the LEFT JOIN of an alias, if some aliases stand at the join or behind it; else None.

        A row that comes to such a join, or leaves it, changes nulls of these aliases. The way to them begins at the near alias.
        """
        join = next((join for join in self.joins if join.alias == alias and join.kind == "left"), None)
        behind = {alias}
        for view_join in self.joins:
            behind |= {view_join.alias} if view_join.near in behind else set()
        if join is None or behind.isdisjoint(ends):
            return None
        return JoinStep(alias, join.near, [(alias_sql, near_sql) for near_sql, alias_sql in join.on], outer=False)


def view_definition(view: View, *rest: object) -> str:
    """The definition of a view as JSON: all that its result depends on. ``rest``: key, value, headers and output of its rule."""
    definition = asdict(view)
    del definition["definition"], definition["file_definition"]
    for item in definition["tables"]:
        # As pools of older versions have it.
        if not item["by_time"]:
            del item["by_time"]
    for join in definition["joins"]:
        # The expressions say it.
        del join["near"]
    return json.dumps([definition, *rest], sort_keys=True)


@dataclass(frozen=True)
class Lookup:
    """A row that a rule looks up for its output, under the alias of ``table``.

    ``side``: the name of the side whose record the row is looked up for. ``on``: pairs of an expression over this record, and of
    an expression over the alias. ``missing``: what happens without a row. ``wait_ms``: how long a record waits for its row.
    """

    table: ViewTable
    side: str
    on: tuple[tuple[str, str], ...]
    missing: Missing
    wait_ms: int = 0

    @property
    def alias(self) -> str:
        return self.table.alias

    @property
    def condition(self) -> str:
        """The look-up as a condition, as the pipeline file may have it."""
        return " AND ".join(f"{row} = {record}" for record, row in self.on)


@dataclass(frozen=True)
class Demand:
    """What a rule's Zed demands of a field's type, because Spark SQL would give another result for another type.

    ``kinds``: the kinds that the type may be of; empty: the kind of the field ``other``. ``role``: what the field is in the
    text, such as "is compared with a text". ``place``: line and column in the pipeline file.
    """

    path: Path
    kinds: tuple[str, ...]
    role: str
    place: tuple[int, int]
    other: Path = ()


@dataclass(frozen=True)
class FieldStep:
    """One step to the fields of a record: ``keep`` all fields of ``path``, ``put`` one, ``drop`` one, or ``rename`` ``old``."""

    kind: Literal["keep", "put", "drop", "rename"]
    name: str = ""
    path: Path = ()
    shape: Shape | FieldSteps = None
    old: str = ""


@dataclass(frozen=True)
class FieldSteps:
    """A record with fields that only its topic's schema names. ``place``: the names down to it, from ``key`` or ``value`` on."""

    steps: tuple[FieldStep, ...]
    place: Path = ()


@dataclass(frozen=True)
class ZedTypes:
    """What a rule's Zed leaves to the types of its topics: the demands, and the records with the fields of their topics."""

    demands: tuple[Demand, ...] = ()
    records: tuple[FieldSteps, ...] = ()


OnExpire: TypeAlias = Literal["quarantine", "drop", "emit"]


@dataclass(frozen=True)
class Expiry:
    """How long a record of a rule waits. ``text``: the duration as the pipeline file spells it."""

    after_ms: int
    action: OnExpire
    text: str

    @property
    def reason(self) -> str:
        """Why a record expired."""
        return f"nothing completed the record within {self.text}; raise expire-after before a replay"


@dataclass(frozen=True)
class Aggregate:
    """An aggregate over the records of a group. ``name``: the call as the pipeline file spells it, and the name of its column.

    ``arguments``: side → the argument for a record of the side. The records of other sides do not count.
    """

    name: str
    function: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class GroupDefinition:
    """What makes a group complete. ``complete``: a condition over the columns of ``aggregates``. The expressions of the rule are
    over these columns too."""

    aggregates: tuple[Aggregate, ...]
    complete: str

    @property
    def expressions(self) -> list[str]:
        """The arguments of the aggregates, and the condition."""
        return [*(sql for item in self.aggregates for sql in item.arguments.values()), self.complete]

    def named(self, *functions: str) -> tuple[Aggregate, ...]:
        """The aggregates of some functions."""
        return tuple(item for item in self.aggregates if item.function in functions)

    def edited(self, edit: Callable[[str], str]) -> GroupDefinition:
        """The group with edited expressions."""
        argument_edits = ((item, {side: edit(sql) for side, sql in item.arguments.items()}) for item in self.aggregates)
        return GroupDefinition(
            tuple(replace(item, arguments=arguments) for item, arguments in argument_edits), edit(self.complete)
        )
