"""The query of a view as Spark SQL: the columns that it needs of each table, its joins, and its result rows.

A row of a table is a struct column under the alias of the table, so that ``o.customer_id`` is a field of the column ``o``.
Frames of rows have the column V: 0 for the rows before a batch, 1 for the rows after it. Joins compare V too, so that one query
gives both results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError

from zync_assets.codecs.spark_types import original_name
from zync_assets.errors import EtlError, FieldMissing
from zync_assets.etl.rules.shapes import field_error, has_schema, headers_sql, nullable, type_sql
from zync_assets.etl.views.tables import (
    column_defaults,
    lake_definition,
    stored_table,
    substituted,
    table_of,
    table_type,
)
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule, Shape, View
from zync_assets.pipeline_file.fields import suggestion, word_list
from zync_assets.pipeline_file.view_expressions import grouped, has_aggregates, ordered, with_greatest
from zync_assets.queries import JoinStep
from zync_assets.spark.failures import short
from zync_assets.spark.sql import edited, json_sql, leaves, name_sql, shape_sql, text_sql

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
    alias_by_name = {alias.lower(): alias for alias in aliases}
    try:
        tree = Spark().parser().parse(Spark().tokenize(sql), sql)[0]
    except (SqlglotError, LookupError):
        tree = None
    if tree is None:
        return {Reference(alias, None) for alias in aliases}
    columns: set[Reference] = set()
    for column in tree.find_all(exp.Column):
        first, *rest = (part.name for part in column.parts)
        if first.lower() in alias_by_name:
            # A whole row may be the begin of a longer path, whose parts sqlglot keeps elsewhere.
            columns.add(Reference(alias_by_name[first.lower()], rest[0] if rest and rest[0] != "*" else None))
    return columns


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
        return [sql for _, sql in leaves(self.rule.headers, "headers")]

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
        columns = {reference for sql in texts for reference in references(sql, self.aliases)}
        return {alias: _columns(columns, alias) for alias in self.aliases}

    def owners(self, sql: str) -> set[str]:
        """The aliases of an expression."""
        return {reference.alias for reference in references(sql, self.aliases)}

    def row_sql(self, alias: str, kind: DataType, row: str = "row") -> str:
        """The row under its alias, with the columns that the query needs; null for a null row."""
        return pruned_sql(self.used[alias], kind, row)

    def outwards(self, start: str) -> list[JoinStep]:
        """The joins from an alias outwards, in the order of the way."""
        return self.view.outwards(start)

    @cached_property
    def key_aliases(self) -> set[str]:
        """The aliases of the view's key."""
        return {owner for sql in self.key_leaves for owner in self.owners(sql)}

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
            joined_rows = _marked(rows[join.alias], at).withColumnRenamed(V, "z_other")
            joined_rows = F.broadcast(joined_rows) if join.alias in few else joined_rows
            equal = " AND ".join(f"({near_sql}) = ({own_sql})" for near_sql, own_sql in join.on)
            # V last, as the rows are grouped.
            equal += "" if join.alias in steady else f" AND {V} = z_other"
            frame = frame.join(joined_rows, F.expr(equal), join.kind).drop("z_other")
        return frame.where(f"({self.view.where})") if where and self.view.where is not None else frame

    @property
    def order_sql(self) -> str:
        """ORD of the last changed row among joined ones; null if none is changed."""
        ords = [f"{ORD}_{at}" for at, _ in enumerate(self.aliases)]
        return ords[0] if len(ords) == 1 else f"greatest({', '.join(ords)})"

    def results(self, joined: DataFrame) -> DataFrame:
        """The result rows: KEY, VALUE, HEADERS, CHOICE (what picks one of several rows with one key), V, ORD, CAUSE, the fields
        of the key (``key_columns``), COPIES (of the row), and TEXTS (of two rows with the key, if there are some)."""
        from pyspark.sql import functions as F

        order, null = self.order_sql, "CAST(NULL AS STRING)"
        none = f"CAST(array() AS {CAUSES})"
        cause = f"concat({', '.join(f'coalesce({CAUSE}_{at}, {none})' for at, _ in enumerate(self.aliases))})"
        headers = null if self.rule.headers is None else headers_sql(self.rule.headers)
        choice = null if self.view.on_duplicate_key is None else f"({self.view.on_duplicate_key})"
        keys = [f"({sql}) AS {name}" for sql, name in zip(self.key_leaves, self.key_columns, strict=True)]
        if not self.groups:
            plain_columns = {
                KEY: shape_sql(self.rule.key),
                VALUE: shape_sql(self.rule.value),
                HEADERS: headers,
                CHOICE: choice,
            }
            plain_columns |= {V: V, ORD: order, CAUSE: cause, COPIES: "1", TEXTS: null}
            return joined.selectExpr(*(f"{sql} AS {name}" for name, sql in plain_columns.items()), *keys)
        names = dict(zip(self.key_leaves, self.key_columns, strict=True))
        grouping = _Grouping(names, apart=self.view.on_duplicate_key is not None)
        parts: dict[str, Shape] = {VALUE: self.rule.value, HEADERS: headers, CHOICE: choice}
        columns = {name: shape_sql(grouping.shape(part)) for name, part in parts.items()}
        # By fields: the rows of a join lie and are sorted by them, and Spark does not know what a struct holds.
        rows = joined.groupBy(*map(F.expr, [*keys, V, *grouping.group_by])).agg(
            F.expr(f"max({order}) AS {ORD}"),
            F.expr(f"array_distinct(flatten(collect_list({cause}))) AS {CAUSE}"),
            *map(F.expr, grouping.aggregates),
        )
        columns = {KEY: shape_sql(substituted(self.rule.key, names)), **columns, **grouping.copies}
        return rows.selectExpr(*(f"{sql} AS {name}" for name, sql in columns.items()), V, ORD, CAUSE, *self.key_columns)

    @property
    def key_columns(self) -> list[str]:
        """The columns of result rows with the fields of the key."""
        return [f"{KEY}_{at}" for at, _ in enumerate(self.key_leaves)]


def pruned_sql(columns: Sequence[str] | None, kind: DataType, row: str) -> str:
    """A row with some ``columns`` (None: all); null for a null row."""
    from pyspark.sql.types import StructType

    if columns is None or not isinstance(kind, StructType):
        return row
    lower = {name.lower() for name in columns}
    fields = [item.name for item in kind if item.name.lower() in lower]
    if not fields:
        return f"CASE WHEN {row} IS NOT NULL THEN named_struct('it', true) END"
    pairs = ", ".join(f"{text_sql(name)}, {row}.{name_sql(name)}" for name in fields)
    return f"CASE WHEN {row} IS NOT NULL THEN named_struct({pairs}) END"


def used_columns(rule: Rule, alias: str) -> list[str] | None:
    """The columns that a rule needs of the row under an alias; None: all."""
    if rule.view is not None:
        return Query(rule).used[alias]
    texts = [sql for shape in (rule.key, rule.value, rule.headers, rule.keep) for _, sql in leaves(shape, "")]
    texts += [row_key for item in rule.lookups if item.alias == alias for _, row_key in item.on]
    return _columns({reference for sql in texts for reference in references(sql, [alias])}, alias)


def _marked(frame: DataFrame, number: int) -> DataFrame:
    """The rows of an alias, with the number of the alias in the names of ORD and CAUSE."""
    return frame.withColumnRenamed(ORD, f"{ORD}_{number}").withColumnRenamed(CAUSE, f"{CAUSE}_{number}")


@dataclass
class _Grouping:
    """The columns of a GROUP BY: the leaves of shapes with and without an aggregate. ``keys``: SQL of a leaf → field of the
    key.

    A leaf without an aggregate should have one value in all rows of a key. With several values, the key has several result
    rows. With ``apart``, the query also groups by these leaves, and a later step chooses a row. Without ``apart``, several rows
    are an error.
    """

    keys: Mapping[str, str]
    apart: bool
    groups: list[str] = field(default_factory=list[str])
    made: list[str] = field(default_factory=list[str])

    def shape(self, shape: Shape) -> Shape:
        """The shape over the columns of the grouped rows."""
        return edited(shape, self._leaf)

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
        columns = [f"{sql} AS z_made_{at}" for at, sql in enumerate(self.made)]
        if self.apart or not self.groups:
            return columns
        row = f"struct({', '.join(self._columns)})"
        return [*columns, f"min({row}) AS z_least", f"max({row}) AS z_most"]

    @property
    def copies(self) -> dict[str, str]:
        """COPIES and TEXTS of a grouped row."""
        if self.apart or not self.groups:
            return {COPIES: "1", TEXTS: "CAST(NULL AS STRING)"}

        def text(row: str) -> str:
            fields = (f"{text_sql(sql)}, {row}.z_group_{at}" for at, sql in enumerate(self.groups))
            return f"to_json(named_struct({', '.join(fields)}))"

        several = "NOT (z_least <=> z_most)"
        texts = f"CASE WHEN {several} THEN concat({text('z_least')}, ' and ', {text('z_most')}) END"
        return {COPIES: f"CASE WHEN {several} THEN 2 ELSE 1 END", TEXTS: texts}


def _columns(found: set[Reference], alias: str) -> list[str] | None:
    own = [each.column for each in found if each.alias == alias]
    return None if None in own else sorted(name for name in own if name is not None)


def unfilled_tables(rules: Iterable[Rule], state: StagingState, raw: Mapping[str, RawState | None]) -> set[str]:
    """The tables whose stored rows lack the default of a column that a view or a look-up uses. The state is made again then.
    ``raw``: input topic → its raw table."""
    tables: set[str] = set()
    for rule in rules:
        for item in rule.tables:
            table, raw_state = table_of(item), raw.get(item.topic)
            entry = state.head.tables.get(table.name)
            if raw_state is None or entry is None:
                continue
            names = column_defaults(table, raw_state).keys() - set(stored_table(table.name, entry).defaults)
            used = used_columns(rule, item.alias) if names else []
            is_used = used is None or bool({name.lower() for name in names} & {name.lower() for name in used})
            if is_used:
                tables.add(table.name)
    return tables


def removed_records(state: StagingState, raw: RawState, topic: str) -> list[OffsetRange]:
    """The offsets of a topic that the pool has taken and that retention removed from the raw table."""
    positions = sorted((part, item) for (name, part), item in state.head.inputs.items() if name == topic)
    ranges = (
        OffsetRange(part, item.first, max(item.first, raw.retention_start.get(part, 0))) for part, item in positions
    )
    return [part for part in ranges if not part.empty]


Types: TypeAlias = "tuple[DataType, DataType, DataType | None]"
"""The types of a view's key, value and headers."""


def rule_types(rule: Rule, frames: Mapping[str, DataFrame], state: StagingState | None) -> Types | None:
    """The types of a view's key, value and headers; None while a table of the view has no schema.

    ``frames``: input topic → records. Raises EtlError with Spark's text, and FieldMissing for a missing field.
    """
    from pyspark.errors import AnalysisException

    query = Query(rule)
    topics = {item.alias: item.topic for item in query.view.tables}
    if not all(topic in frames and has_schema(frames[topic]) for topic in topics.values()):
        return None
    kinds = {item.alias: table_type(table_of(item), frames[item.topic], state).state_row for item in query.view.tables}
    place = (lake_definition(rule), *(kinds[alias].json() for alias in query.aliases))
    types = _TYPES.get(place)
    if types is None:
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
            joined_rows = query.joined(rows)
            _check_joins(query, joined_rows)
            results = query.results(joined_rows)
            choice = (
                [] if query.view.on_duplicate_key is None else [f"CASE WHEN {CHOICE} < {CHOICE} THEN 1 END AS choice"]
            )
            schema = results.selectExpr("*", *choice).schema
            _check_key(rule, schema[KEY].dataType)
        except AnalysisException as error:
            condition = error.getCondition() or ""
            if any(part in condition for part in _UNORDERED) and "MAP" in str(error):
                raise EtlError(f"rule {rule.name}: {_NO_MAP} Spark says: {short(error)}") from error
            if condition.startswith(_MISSING):
                raise FieldMissing(
                    f"rule {rule.name}: {_missing_column(query, kinds) or short(error)} {_NO_FIELD}"
                ) from error
            raise EtlError(f"rule {rule.name}: {field_error(error) or short(error)}") from error
        headers = None if rule.headers is None else schema[HEADERS].dataType
        types = nullable(schema[KEY].dataType), nullable(schema[VALUE].dataType), headers
        _TYPES.put(place, types)
    return types


def _missing_column(query: Query, kinds: Mapping[str, DataType]) -> str | None:
    """The first column that a view names and its table lacks, and the columns of the table."""
    from pyspark.sql.types import StructType

    for alias, kind in kinds.items():
        names = [original_name(name) for name in kind.names] if isinstance(kind, StructType) else []
        known_names = {name.lower() for name in (*names, *getattr(kind, "names", ()))}
        for column in query.used[alias] or ():
            if column.lower() not in known_names:
                cure = suggestion(column, names)
                return f"table {alias} has no column `{column}`; it has {word_list(names)}{cure}."
    return None


def _check_joins(query: Query, joined_rows: DataFrame) -> None:
    """EtlError for a join of a text with a collation and one without. Rows are looked up by the values of one side alone."""
    for near_sql, own_sql in (pair for join in query.view.joins for pair in join.on):
        fields = joined_rows.selectExpr(f"({near_sql}) AS near", f"({own_sql}) AS own").schema
        near, own = (item.dataType.simpleString() for item in fields)
        if near != own and " collate " in f"{near} {own}":
            raise EtlError(
                f"rule {query.rule.name}, from: {near_sql} is {near} and {own_sql} is {own}. COLLATE both alike."
            )


def _check_key(rule: Rule, kind: DataType) -> None:
    """EtlError for a key that Spark does not compare, or by which it takes two texts for one."""
    text = kind.simpleString()
    if "map<" in text or "variant" in text:
        raise EtlError(
            f"rule {rule.name}, key: it is {text}, and Spark compares no such keys. Write to_json(...) of it."
        )
    if " collate " in text:
        cure = "Write lower(...) of the text, or CAST it AS STRING COLLATE UTF8_BINARY."
        raise EtlError(f"rule {rule.name}, key: it is {text}, and takes two texts for one key. {cure}")


_MISSING = ("FIELD_NOT_FOUND", "UNRESOLVED_COLUMN")
_NO_FIELD = (
    "A view names fields that its tables have. Nothing was done. Correct the name, or wait for a record with the field."
)
_UNORDERED = ("INVALID_ORDERING_TYPE", "NOT_ORDERABLE", "MAP_TYPE", "UNSUPPORTED_INPUT_TYPE")
_NO_MAP = (
    "Spark compares no maps beside an aggregate or in a collection. Write map_entries(...) of the map, or to_json(...)."
)


CAUSES = "ARRAY<STRUCT<place: INT, partition: INT, offset: BIGINT>>"


def same_sql(one: str, other: str, kind: DataType) -> str:
    """Whether two values are the same; two nulls are."""
    text = kind.simpleString()
    is_equal, texts = f"({one} <=> {other})", f"({json_sql(one)} <=> {json_sql(other)})"
    # Spark compares no maps, and collated texts not letter by letter.
    if any(name in text for name in ("map<", "variant", " collate ")):
        return texts
    # For Spark, -0.0 equals 0.0, but expressions tell them apart.
    return f"CASE WHEN {is_equal} THEN {texts} ELSE false END" if "double" in text or "float" in text else is_equal
