"""The query of a view as Spark SQL: the columns that it needs of each table, its joins, and its result rows.

A row of a table is a struct column under the alias of the table, so that ``o.customer_id`` is a field of the column ``o``.
Frames of rows have the column V: 0 for the rows before a batch, 1 for the rows after it. Joins compare V too, so that one query
gives both results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError

from zync_assets.errors import EtlError, FieldMissing
from zync_assets.etl.rules.assignment import has_schema
from zync_assets.etl.rules.kind import Columns, OutputColumns
from zync_assets.etl.rules.shapes import headers_sql, nullable, type_sql
from zync_assets.etl.views.key_filter import substituted
from zync_assets.etl.views.tables import lake_definition, null_sql, table_of, table_type
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Rule, Shape, View
from zync_assets.pipeline_file.view_expressions import grouped, has_aggregates, ordered, with_greatest
from zync_assets.queries import JoinStep
from zync_assets.spark.failures import short
from zync_assets.spark.sql import json_sql, leaves, name_sql, shape_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_TYPES: RecentCache[tuple[object, ...], tuple[DataType, DataType, DataType | None]] = RecentCache(1_000)
"""(key, value, headers) of a view, by its definition and the types of its rows."""

KEY, VALUE, HEADERS, CHOICE, COPIES, TEXTS = "z_key", "z_value", "z_headers", "z_choice", "z_copies", "z_texts"
"""The columns of result rows."""
V, ORD, CAUSE = "z_v", "z_ord", "z_cause"
"""Columns of rows: 0 (before the batch) or 1 (after the batch); ``ord`` of the record that changed the row, and the sources
(``etl.rules.kind``) of all records that did. The last two are null for a row that the batch does not change."""


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

    def outwards(self, start: str) -> list[JoinStep]:
        """The joins from an alias outwards, in the order of the way."""
        return self.view.outwards(start)

    def path(self, start: str) -> list[JoinStep]:
        """The joins that lead from an alias to all aliases of the view's key."""
        return self.view.path(start, {owner for sql in self.key_leaves for owner in self.owners(sql)})

    def joined(
        self,
        rows: Mapping[str, DataFrame],
        *,
        where: bool = True,
        few: Collection[str] = (),
        steady: Collection[str] = (),
    ) -> DataFrame:
        """The joined rows, if wanted after ``where``. ``rows``: alias → rows with the column of that name, V, ORD and CAUSE.
        ``few``: aliases whose rows each task gets; ``steady``: aliases whose rows V does not tell apart.

        The frame has the columns of all aliases, V, and an ORD and a CAUSE for each alias, by the alias's number.
        """
        from pyspark.sql import functions as F

        frame = _marked(rows[self.view.root], 0)
        for at, join in enumerate(self.view.joins, 1):
            other = _marked(rows[join.alias], at).withColumnRenamed(V, "z_other")
            other = F.broadcast(other) if join.alias in few else other
            equal = " AND ".join(f"({near}) = ({own})" for near, own in join.on)
            # V last, as the rows are grouped.
            equal += "" if join.alias in steady else f" AND {V} = z_other"
            frame = frame.join(other, F.expr(equal), join.kind).drop("z_other")
        return frame.where(f"({self.view.where})") if where and self.view.where is not None else frame

    @property
    def order_sql(self) -> str:
        """ORD of the last changed row among joined ones; null if none is changed."""
        ords = [f"{ORD}_{at}" for at, _ in enumerate(self.aliases)]
        return ords[0] if len(ords) == 1 else f"greatest({', '.join(ords)})"

    def results(self, joined: DataFrame, *, all_new: bool = False) -> DataFrame:
        """The result rows: KEY, VALUE, HEADERS, CHOICE (what picks one of several rows with one key), V, ORD, CAUSE, the fields
        of the key (``key_columns``), COPIES (of the row), and TEXTS (of two rows with the key, if there are some).

        ``all_new``: V is 1 in all rows. Spark would group by it, and sort the rows again.
        """
        from pyspark.sql import functions as F

        order, null = self.order_sql, "CAST(NULL AS STRING)"
        none = f"CAST(array() AS {CAUSES})"
        cause = f"concat({', '.join(f'coalesce({CAUSE}_{at}, {none})' for at, _ in enumerate(self.aliases))})"
        headers = null if self.rule.headers is None else headers_sql(self.rule.headers)
        choice = null if self.view.on_duplicate_key is None else f"({self.view.on_duplicate_key})"
        keys = [f"({sql}) AS {name}" for sql, name in zip(self.key_leaves, self.key_columns, strict=True)]
        if not self.groups:
            made = {KEY: shape_sql(self.rule.key), VALUE: shape_sql(self.rule.value), HEADERS: headers, CHOICE: choice}
            made |= {V: V, ORD: order, CAUSE: cause, COPIES: "1", TEXTS: null}
            return joined.selectExpr(*(f"{sql} AS {name}" for name, sql in made.items()), *keys)
        names = dict(zip(self.key_leaves, self.key_columns, strict=True))
        grouping = _Grouping(names, apart=self.view.on_duplicate_key is not None)
        parts: dict[str, Shape] = {VALUE: self.rule.value, HEADERS: headers, CHOICE: choice}
        columns = {name: shape_sql(grouping.shape(part)) for name, part in parts.items()}
        # By fields: the rows of a join lie and are sorted by them, and Spark does not know what a struct holds.
        version = [] if all_new else [V]
        rows = joined.groupBy(*map(F.expr, [*keys, *version, *grouping.group_by])).agg(
            F.expr(f"max({order}) AS {ORD}"),
            F.expr(f"array_distinct(flatten(collect_list({cause}))) AS {CAUSE}"),
            *map(F.expr, grouping.aggregates),
        )
        columns = {KEY: shape_sql(substituted(self.rule.key, names)), **columns, **grouping.copies}
        made = [f"1 AS {V}"] if all_new else [V]
        return rows.selectExpr(
            *(f"{sql} AS {name}" for name, sql in columns.items()), *made, ORD, CAUSE, *self.key_columns
        )

    @property
    def key_columns(self) -> list[str]:
        """The columns of result rows with the fields of the key."""
        return [f"{KEY}_{at}" for at, _ in enumerate(self.key_leaves)]


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
    """The columns of a GROUP BY: the leaves of shapes with and without an aggregate. ``keys``: fields of the key by their SQL.

    What does not aggregate has one value in the rows of a key, or the key has several result rows. These are an error, or rows to
    choose from: then they are grouped ``apart``.
    """

    keys: Mapping[str, str]
    apart: bool
    groups: list[str] = field(default_factory=list[str])
    made: list[str] = field(default_factory=list[str])

    def shape(self, shape: Shape) -> Shape:
        """The shape over the columns of the grouped rows."""
        if shape is None:
            return None
        if isinstance(shape, str):
            return self._leaf(shape)
        return {name: self.shape(part) for name, part in shape.items()}

    def _leaf(self, sql: str) -> str:
        if sql in self.keys:
            return self.keys[sql]
        if not has_aggregates(sql):
            if not grouped(sql):
                return sql
            self.groups.append(sql)
            name = f"z_group_{len(self.groups) - 1}"
            return name if self.apart else f"z_most.{name}"
        self.groups += [column for column in grouped(sql) if column not in self.keys]
        self.made.append(ordered(with_greatest(sql)))
        return f"z_made_{len(self.made) - 1}"

    @property
    def _columns(self) -> list[str]:
        return [f"({sql}) AS z_group_{at}" for at, sql in enumerate(self.groups)]

    @property
    def group_by(self) -> list[str]:
        """Beside the key and V."""
        return self._columns if self.apart else []

    @property
    def aggregates(self) -> list[str]:
        found = [f"{sql} AS z_made_{at}" for at, sql in enumerate(self.made)]
        if self.apart or not self.groups:
            return found
        row = f"struct({', '.join(self._columns)})"
        return [*found, f"min({row}) AS z_least", f"max({row}) AS z_most"]

    @property
    def copies(self) -> dict[str, str]:
        """COPIES and TEXTS of a grouped row."""
        if self.apart or not self.groups:
            return {COPIES: "1", TEXTS: "CAST(NULL AS STRING)"}

        def text(row: str) -> str:
            each = (f"{text_sql(sql)}, {row}.z_group_{at}" for at, sql in enumerate(self.groups))
            return f"to_json(named_struct({', '.join(each)}))"

        several = "NOT (z_least <=> z_most)"
        texts = f"CASE WHEN {several} THEN concat({text('z_least')}, ' and ', {text('z_most')}) END"
        return {COPIES: f"CASE WHEN {several} THEN 2 ELSE 1 END", TEXTS: texts}


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
    place = (lake_definition(rule), *(kinds[alias].json() for alias in query.aliases))
    found = _TYPES.get(place)
    if found is None:
        rows = {
            alias: frames[topics[alias]]
            .selectExpr(f"CAST(NULL AS {type_sql(kinds[alias])}) AS row")
            .selectExpr(
                f"{query.row_sql(alias, kinds[alias])} AS {name_sql(alias)}",
                f"1 AS {V}",
                f"CAST(NULL AS INT) AS {ORD}",
                f"CAST(NULL AS {CAUSES}) AS {CAUSE}",
            )
            for alias in query.aliases
        }
        try:
            schema = query.results(query.joined(rows)).schema
        except (AnalysisException, ParseException) as error:
            condition = error.getCondition() or ""
            if any(part in condition for part in _UNORDERED) and "MAP" in str(error):
                raise EtlError(f"rule {rule.name}: {_NO_MAP} Spark says: {short(error)}") from error
            if condition.startswith(_MISSING):
                raise FieldMissing(f"rule {rule.name}: {short(error)} {_NO_FIELD}") from error
            raise EtlError(f"rule {rule.name}: {short(error)}") from error
        headers = None if rule.headers is None else schema[HEADERS].dataType
        found = nullable(schema[KEY].dataType), nullable(schema[VALUE].dataType), headers
        _TYPES.put(place, found)
    return found


_MISSING = ("FIELD_NOT_FOUND", "UNRESOLVED_COLUMN")
_NO_FIELD = (
    "A view names fields that its tables have. Nothing was done. Correct the name, or wait for a record with the field."
)
_UNORDERED = ("INVALID_ORDERING_TYPE", "NOT_ORDERABLE", "MAP_TYPE")
_NO_MAP = (
    "Spark compares no maps beside an aggregate or in a collection. Write map_entries(...) of the map, or to_json(...)."
)


CAUSES = "ARRAY<STRUCT<place: INT, partition: INT, offset: BIGINT>>"


def same_sql(one: str, other: str, kind: DataType) -> str:
    """Whether two values are equal; two nulls are."""
    return f"({_comparable(one, kind)} <=> {_comparable(other, kind)})"


def _comparable(sql: str, kind: DataType) -> str:
    # Spark compares no maps.
    text = kind.simpleString()
    return json_sql(sql) if "map<" in text or "variant" in text else sql


DUPLICATE = "[duplicate key] "
"""Marks the text of a task's error."""


def differences(query: Query, results: DataFrame, key_type: DataType, *, all_new: bool) -> DataFrame:
    """The keys whose result differs: KEY, VALUE and HEADERS (null: the result has no such key any more), ORD,
    CAUSE. The frame fails for several result rows with one key. ``all_new``: there was no result before."""
    from pyspark.sql import functions as F

    chosen = query.view.on_duplicate_key is not None
    keys = query.key_columns
    # A value that is null is a tombstone: the result has no such row.
    results = results.where(f"{VALUE} IS NOT NULL OR {COPIES} > 1")
    if all_new and query.groups and not chosen:
        # A row for each key.
        return results.selectExpr(f"{_checked(query, key_type, COPIES, TEXTS)} AS {KEY}", VALUE, HEADERS, ORD, CAUSE)
    row = f"struct({VALUE}, {HEADERS})"

    def picked(v: int) -> str:
        best = f"struct({CHOICE}, {json_sql(VALUE)})"
        made = f"max_by({row}, {best})" if chosen else f"any_value({row})"
        return f"{made} FILTER (WHERE {V} = {v})"

    columns = [
        f"any_value({KEY}) AS {KEY}",
        f"max({ORD}) AS {ORD}",
        f"array_distinct(flatten(collect_list({CAUSE}))) AS {CAUSE}",
        f"{picked(1)} AS after",
    ]
    columns.append(
        "CAST(0 AS BIGINT) AS copies" if chosen else f"coalesce(sum({COPIES}) FILTER (WHERE {V} = 1), 0) AS copies"
    )
    if not chosen:
        columns += [f"max({TEXTS}) AS texts"]
        columns += [
            f"{name}(struct({VALUE} AS value)) FILTER (WHERE {V} = 1) AS z_{name}" for name in ("first", "last")
        ]
    if not all_new:
        columns.append(f"{picked(0)} AS before")
    found = results.groupBy(*keys).agg(*map(F.expr, columns))
    if not all_new:
        kind = found.schema["after"].dataType
        found = found.where(f"copies > 1 OR NOT {same_sql('before', 'after', kind)}")
    both = ", ".join(f"to_json({name})" for name in ("z_first", "z_last"))
    texts = f"coalesce(texts, concat(least({both}), ' and ', greatest({both})))"
    key = KEY if chosen else _checked(query, key_type, "copies", texts)
    sides = (f"after.{name} AS {name}" for name in (VALUE, HEADERS))
    return found.selectExpr(f"{key} AS {KEY}", *sides, ORD, CAUSE)


def _checked(query: Query, key_type: DataType, copies: str, texts: str) -> str:
    """A key as SQL. It fails for several result rows with the key."""
    begin = text_sql(f"{DUPLICATE}view {query.rule.name}: two result rows have the key ")
    text = f"concat({begin}, to_json(struct({KEY} AS key)), ': ', {texts})"
    several = f"{copies} > 1 AND NOT ({null_sql(KEY, key_type)})"
    return f"CASE WHEN {several} THEN raise_error({text}) ELSE {KEY} END"


def outputs(query: Query, index: int, found: DataFrame, target: OutputColumns, columns: Columns) -> DataFrame:
    """The differences as result rows. ``index``: the rule's."""
    # The columns hold what the rule makes: the rule's shapes are their names.
    rule = replace(query.rule, key=KEY, value=VALUE, headers=HEADERS if target.headers else None, keep=None)
    if query.rule.headers is None:
        rule = replace(rule, headers=None)
    at = f"named_struct('place', {ORD}.place, 'partition', {ORD}.partition, 'offset', {ORD}.offset)"
    return found.selectExpr(
        "'out' AS kind",
        f"{index} AS rule",
        f"{ORD} AS ord",
        f"sort_array({CAUSE}) AS source",
        f"CAST(array_position(sort_array({CAUSE}), {at}) - 1 AS INT) AS last",
        "0 AS waited",
        "CAST(NULL AS BIGINT) AS hash",
        *(f"{sql} AS {name_sql(name)}" for name, sql in columns(rule, target)),
    )
