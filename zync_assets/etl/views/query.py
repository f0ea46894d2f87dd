"""The query of a view as Spark SQL: the columns that it needs of each table, its joins, and its result rows.

A row of a table is a struct column under the alias of the table, so that ``o.customer_id`` is a field of the column ``o``.
Frames of rows have the column V: 0 for the rows before a batch, 1 for the rows after it. Joins compare V too, so that one query
gives both results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError

from zync_assets.errors import EtlError, FieldMissing
from zync_assets.etl.rules.matching import has_schema
from zync_assets.etl.rules.shapes import headers_sql, nullable, type_sql
from zync_assets.etl.views.tables import definition_of, table_of, table_type
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Rule, Shape, View
from zync_assets.pipeline_file.view_expressions import grouped, has_aggregates, ordered
from zync_assets.queries import Step
from zync_assets.spark.sql import leaves, name_sql, shape_sql, text_sql
from zync_assets.spark.tasks import short

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_TYPES: RecentCache[tuple[object, ...], tuple[DataType, DataType, DataType | None]] = RecentCache(1_000)
"""(key, value, headers) of a view, by its definition and the types of its rows."""

KEY, VALUE, HEADERS, CHOICE = "z_key", "z_value", "z_headers", "z_choice"
"""The columns of result rows."""
V, ORD, CAUSE = "z_v", "z_ord", "z_cause"
"""Columns of rows: 0 (before the batch) or 1 (after the batch); ``ord`` of the record that changed the row, and the sources
(``matching``) of all records that did. The last two are null for a row that the batch does not change."""


@dataclass(frozen=True)
class Reference:
    """A column of an alias. ``column``: None for the whole row."""

    alias: str
    column: str | None


def references(sql: str, aliases: Sequence[str]) -> set[Reference]:
    """The columns that an expression names. All columns of all aliases for an expression that sqlglot can't parse."""
    named = {alias.lower(): alias for alias in aliases}
    try:
        tree = Spark().parser().parse(Spark().tokenize(sql), sql)[0]
    except (SqlglotError, LookupError):
        tree = None
    if tree is None:
        return {Reference(alias, None) for alias in aliases}
    found: set[Reference] = set()
    for column in tree.find_all(exp.Column):
        first, *rest = (part.name for part in column.parts)
        if first.lower() in named:
            # A whole row may be the begin of a longer path, whose parts sqlglot keeps elsewhere.
            found.add(Reference(named[first.lower()], rest[0] if rest and rest[0] != "*" else None))
    return found


@dataclass(frozen=True)
class Query:
    """The query of a view's rule."""

    rule: Rule

    @property
    def view(self) -> View:
        assert self.rule.view is not None
        return self.rule.view

    @cached_property
    def aliases(self) -> list[str]:
        """In the order of the joins."""
        return [self.view.root, *(join.alias for join in self.view.joins)]

    @cached_property
    def value_leaves(self) -> list[str]:
        return [sql for _, sql in leaves(self.rule.value, "value")]

    @cached_property
    def key_leaves(self) -> list[str]:
        return [sql for _, sql in leaves(self.rule.key, "key")]

    @cached_property
    def header_leaves(self) -> list[str]:
        headers = self.rule.headers
        return [] if headers is None else [headers] if isinstance(headers, str) else list(headers.values())

    @cached_property
    def groups(self) -> bool:
        """Whether rows are grouped by the key."""
        return any(map(has_aggregates, [*self.value_leaves, *self.header_leaves]))

    @cached_property
    def used(self) -> dict[str, list[str] | None]:
        """Alias → the columns that the query needs, in no particular order; None: all."""
        view = self.view
        texts = [*self.value_leaves, *self.key_leaves, *self.header_leaves]
        texts += [sql for sql in (view.where, view.on_duplicate_key) if sql is not None]
        texts += [sql for join in view.joins for pair in join.on for sql in pair]
        found = {each for sql in texts for each in references(sql, self.aliases)}
        return {alias: _columns(found, alias) for alias in self.aliases}

    def owners(self, sql: str) -> set[str]:
        """The aliases of an expression."""
        return {each.alias for each in references(sql, self.aliases)}

    def row_sql(self, alias: str, kind: DataType, row: str = "row") -> str:
        """The row under its alias, with the columns that the query needs; null for a null row."""
        return pruned_sql(self.used[alias], kind, row)

    def outwards(self, start: str) -> list[Step]:
        """The joins from an alias outwards, in the order of the way."""
        return self.view.outwards(start)

    def path(self, start: str) -> list[Step]:
        """The joins that lead from an alias to all aliases of the view's key."""
        return self.view.path(start, {owner for sql in self.key_leaves for owner in self.owners(sql)})

    def joined(self, rows: Mapping[str, DataFrame], *, where: bool = True) -> DataFrame:
        """The joined rows, if wanted after ``where``. ``rows``: alias → rows with the column of that name, V, ORD and CAUSE.

        The frame has the columns of all aliases, V, and an ORD and a CAUSE for each alias, by the alias's number.
        """
        from pyspark.sql import functions as F

        frame = _marked(rows[self.view.root], 0)
        for at, join in enumerate(self.view.joins, 1):
            other = _marked(rows[join.alias], at).withColumnRenamed(V, "z_other")
            equal = " AND ".join(f"({near}) = ({own})" for near, own in join.on)
            frame = frame.join(other, F.expr(f"{V} = z_other AND {equal}"), join.kind).drop("z_other")
        return frame.where(f"({self.view.where})") if where and self.view.where is not None else frame

    @property
    def order_sql(self) -> str:
        """ORD of the last changed row among joined ones; null if none is changed."""
        ords = [f"{ORD}_{at}" for at, _ in enumerate(self.aliases)]
        return ords[0] if len(ords) == 1 else f"greatest({', '.join(ords)})"

    def results(self, joined: DataFrame) -> DataFrame:
        """The result rows: KEY, VALUE, HEADERS, CHOICE (what picks one of several rows with one key), V, ORD, CAUSE."""
        from pyspark.sql import functions as F

        order = self.order_sql
        cause = f"flatten(array_compact(array({', '.join(f'{CAUSE}_{at}' for at, _ in enumerate(self.aliases))})))"
        null = "CAST(NULL AS STRING)"
        headers = null if self.rule.headers is None else headers_sql(self.rule.headers)
        choice = null if self.view.on_duplicate_key is None else f"({self.view.on_duplicate_key})"
        key = shape_sql(self.rule.key)
        if not self.groups:
            made = {KEY: key, VALUE: shape_sql(self.rule.value), HEADERS: headers, CHOICE: choice}
            made |= {V: V, ORD: order, CAUSE: cause}
            return joined.selectExpr(*(f"{sql} AS {name}" for name, sql in made.items()))
        grouping = _Grouping()
        parts: dict[str, Shape] = {VALUE: self.rule.value, HEADERS: headers, CHOICE: choice}
        columns = [f"{shape_sql(grouping.shape(part))} AS {name}" for name, part in parts.items()]
        rows = joined.groupBy(F.expr(key).alias(KEY), F.col(V), *map(F.expr, grouping.groups)).agg(
            F.expr(f"max({order}) AS {ORD}"),
            F.expr(f"array_distinct(flatten(collect_list({cause}))) AS {CAUSE}"),
            *map(F.expr, grouping.aggregates),
        )
        return rows.selectExpr(KEY, *columns, V, ORD, CAUSE)


def pruned_sql(wanted: Sequence[str] | None, kind: DataType, row: str) -> str:
    """A row with the ``wanted`` columns (None: all); null for a null row."""
    from pyspark.sql.types import StructType

    if wanted is None or not isinstance(kind, StructType):
        return row
    lower = {name.lower() for name in wanted}
    fields = [item.name for item in kind if item.name.lower() in lower]
    if not fields:
        return f"CASE WHEN {row} IS NOT NULL THEN named_struct('it', true) END"
    made = ", ".join(f"{text_sql(name)}, {row}.{name_sql(name)}" for name in fields)
    return f"CASE WHEN {row} IS NOT NULL THEN named_struct({made}) END"


def used_columns(texts: Sequence[str], alias: str) -> list[str] | None:
    """The columns of an alias that expressions name; None: all."""
    return _columns({each for sql in texts for each in references(sql, [alias])}, alias)


def _marked(frame: DataFrame, number: int) -> DataFrame:
    """The rows of an alias, with the number of the alias in the names of ORD and CAUSE."""
    return frame.withColumnRenamed(ORD, f"{ORD}_{number}").withColumnRenamed(CAUSE, f"{CAUSE}_{number}")


@dataclass
class _Grouping:
    """The columns of a GROUP BY: the leaves of shapes with and without an aggregate."""

    groups: list[str] = field(default_factory=list[str])
    aggregates: list[str] = field(default_factory=list[str])

    def shape(self, shape: Shape) -> Shape:
        """The shape over the columns of the grouped rows."""
        if shape is None:
            return None
        if isinstance(shape, str):
            return self._leaf(shape)
        return {name: self.shape(part) for name, part in shape.items()}

    def _leaf(self, sql: str) -> str:
        if not has_aggregates(sql):
            self.groups.append(f"({sql}) AS z_group_{len(self.groups)}")
            return f"z_group_{len(self.groups) - 1}"
        for column in grouped(sql):
            self.groups.append(f"{column} AS z_group_{len(self.groups)}")
        self.aggregates.append(f"{ordered(sql)} AS z_made_{len(self.aggregates)}")
        return f"z_made_{len(self.aggregates) - 1}"


def _columns(found: set[Reference], alias: str) -> list[str] | None:
    own = [each.column for each in found if each.alias == alias]
    return None if None in own else sorted(name for name in own if name is not None)


Types: TypeAlias = "tuple[DataType, DataType, DataType | None]"
"""The types of a view's key, value and headers."""


def rule_types(rule: Rule, frames: Mapping[str, DataFrame], state: StagingState | None) -> Types | None:
    """The types of a view's key, value and headers; None while a table of the view has no schema.

    ``frames``: input topic → records. Raises EtlError with Spark's text, and FieldMissing for a missing field.
    """
    from pyspark.errors import AnalysisException, ParseException

    query = Query(rule)
    topics = {item.alias: item.topic for item in query.view.tables}
    if not all(topic in frames and has_schema(frames[topic]) for topic in topics.values()):
        return None
    kinds = {item.alias: table_type(table_of(item), frames[item.topic], state).state_row for item in query.view.tables}
    place = (definition_of(rule), *(kinds[alias].json() for alias in query.aliases))
    found = _TYPES.get(place)
    if found is None:
        rows = {
            alias: frames[topics[alias]]
            .selectExpr(f"CAST(NULL AS {type_sql(kinds[alias])}) AS row")
            .selectExpr(
                f"{query.row_sql(alias, kinds[alias])} AS {name_sql(alias)}",
                f"1 AS {V}",
                f"CAST(NULL AS INT) AS {ORD}",
                f"CAST(NULL AS ARRAY<INT>) AS {CAUSE}",
            )
            for alias in query.aliases
        }
        try:
            schema = query.results(query.joined(rows)).schema
        except (AnalysisException, ParseException) as error:
            kind = FieldMissing if (error.getCondition() or "").startswith(_MISSING) else EtlError
            raise kind(f"rule {rule.name}: {short(error)}") from error
        headers = None if rule.headers is None else schema[HEADERS].dataType
        found = nullable(schema[KEY].dataType), nullable(schema[VALUE].dataType), headers
        _TYPES.put(place, found)
    return found


_MISSING = ("FIELD_NOT_FOUND", "UNRESOLVED_COLUMN")


def same_sql(one: str, other: str, kind: DataType) -> str:
    """Whether two values are equal; two nulls are."""
    return f"({_comparable(one, kind)} <=> {_comparable(other, kind)})"


def _comparable(sql: str, kind: DataType) -> str:
    # Spark compares no maps.
    text = kind.simpleString()
    return f"to_json(named_struct('it', {sql}))" if "map<" in text or "variant" in text else sql
