"""The search for the records on which an expression of a view fails.

Spark stops at the first failing row and does not name it. The search is like that of ``etl.failure_search``. A failing record
goes into quarantine, and the table keeps the earlier row of the record's key. An expression over joined rows fails because of
the record that completes the joined row: the last one of the batch among the joined rows. If the expression names one table
alone and the batch changes the row of this table, the record of that row is the failing one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from zync_assets.errors import EtlError
from zync_assets.etl.failures import MOST_FAILURES, Failure, Place
from zync_assets.etl.rules.kind import Ordering
from zync_assets.etl.rules.shapes import made_sql, type_sql
from zync_assets.etl.views.differences import blamed_order
from zync_assets.etl.views.maintenance import Maintenance
from zync_assets.etl.views.query import KEY, ORD, Query, V
from zync_assets.etl.views.state_index import plain_field
from zync_assets.etl.views.tables import TableType, table_of
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule
from zync_assets.pipeline_file.view_expressions import aggregated, grouped, has_aggregates, ordered
from zync_assets.spark.failures import MOST, TEXT, cause_line, fails, is_overflow, overflow_records, spark_errors
from zync_assets.spark.sql import excerpt, leaves, name_sql, shape_sql, text_sql
from zync_assets.spark.tasks import search_settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def table_failures(
    spark: SparkSession,
    parts: Mapping[str, tuple[TableType, DataFrame]],
    checks: Mapping[str, Sequence[RowCheck]],
) -> dict[Place, Failure]:
    """The records that fail in the key, the row or the condition of their table, or in a check of their row.

    ``parts``: name of a table → its type and the records; ``checks``: name of a table → see ``row_checks``.
    """
    failure_by_place: dict[Place, Failure] = {}
    with search_settings(spark):
        for name, (kind, records) in parts.items():
            row = f"CASE WHEN NOT {kind.deleted_sql} THEN {made_sql(kind.row_sql, kind.row, kind.state_row)} END"
            key = made_sql(kind.table.key, kind.key, kind.state_key)
            expressions = [
                _Expression(side, side, fails(sql), sql)
                for side, sql in (("key", key), ("deleted", kind.deleted_sql), ("row", row))
            ]
            reasons = [(f"table {name}", f"{item.path}: {_WORDS}") for item in expressions]
            for check in checks.get(name, ()):
                expressions.append(check.expression(check.over(row)))
                reasons.append((check.rule, expressions[-1].text()))
            place = f"kafka.partition AS partition, kafka.offset AS offset, {text_sql(kind.table.topic)} AS topic"
            rows = records.selectExpr("*", f"struct({place}) AS z_at")
            try:
                failing_rows = rows.selectExpr(f"{_number(expressions)} AS failed", "z_at").where("failed IS NOT NULL")
                for failing_row in failing_rows.selectExpr("failed", "z_at.*").limit(MOST_FAILURES + 1).collect():
                    at = failing_row["topic"], failing_row["partition"], failing_row["offset"]
                    failure_by_place[at] = Failure(*at, *reasons[failing_row["failed"]])
            except spark_errors() as error:
                if not is_overflow(error):
                    raise
                failure_by_place |= _overflows_in_rows(rows, "z_at", f"table {name}", expressions)
    return failure_by_place


class RowCheck(NamedTuple):
    """An expression of a view over the row of one alias. ``sql``: as the view has it; ``made``: as Spark computes it."""

    rule: str
    alias: str
    path: str
    sql: str
    made: str

    def over(self, row: str) -> str:
        """The expression over a row."""
        return f"transform(array({row}), {name_sql(self.alias)} -> {self.made})"

    def expression(self, spark_sql: str) -> _Expression:
        """The expression with its condition. ``spark_sql``: the expression over a row, as Spark computes it."""
        return _Expression(self.path, self.sql, fails(spark_sql), spark_sql)


def row_checks(spark: SparkSession, rules: Sequence[Rule], kinds: Mapping[str, TableType]) -> dict[str, list[RowCheck]]:
    """Name of a table → the expressions in joins and keys of views, and in look-ups, that may fail on its rows alone.

    A batch computes these expressions for each new row. A join computes them only if the other side has rows. A row on which an
    expression fails would get into the state, and stop a later batch. ``kinds``: the types of tables, by name.
    """
    checks = defaultdict[str, list[RowCheck]](list)
    for rule in rules:
        for item in rule.lookups:
            name = table_of(item.table).name
            for _, sql in item.on if name in kinds else ():
                if plain_field(kinds[name].state_row, sql, item.alias) is None:
                    checks[name].append(RowCheck(rule.name, item.alias, f"lookup.{item.alias}.on", sql, f"({sql})"))
        names = {item.alias: table_of(item).name for item in rule.tables} if rule.view is not None else {}
        if names and kinds.keys() >= {*names.values()}:
            kinds_by_alias = {alias: kinds[name] for alias, name in names.items()}
            for check in _view_checks(spark, Query(rule), kinds_by_alias):
                checks[names[check.alias]].append(check)
    return checks


def _view_checks(spark: SparkSession, query: Query, kinds: Mapping[str, TableType]) -> Iterator[RowCheck]:
    """The expressions of joins and of the key over one alias that may fail. ``kinds``: by alias."""
    rule = query.rule.name
    for path, sql in leaves(query.rule.key, "key"):
        owners = query.owners(sql)
        alias = next(iter(owners), "")
        if len(owners) == 1 and plain_field(kinds[alias].state_row, sql, alias) is None:
            yield RowCheck(rule, alias, path, sql, f"({sql})")
    for join in query.view.joins:
        for near_sql, far_sql in join.on:
            sides = ((near_sql, join.near), (far_sql, join.alias))
            fields = [plain_field(kinds[alias].state_row, sql, alias) for sql, alias in sides]
            if all(fields) and len({item.dataType for item in fields if item is not None}) == 1:
                continue
            kind = _common_type(spark, kinds, near_sql, far_sql)
            for sql, alias in sides:
                yield RowCheck(rule, alias, "from", f"{near_sql} = {far_sql}", f"CAST(({sql}) AS {kind})")


def _common_type(spark: SparkSession, kinds: Mapping[str, TableType], one: str, other: str) -> str:
    """The type, as SQL, by which a join compares two expressions over rows. ``kinds``: by alias."""
    rows = [f"CAST(NULL AS {type_sql(kind.state_row)}) AS {name_sql(alias)}" for alias, kind in kinds.items()]
    place = one, other, *rows
    common_type = _COMMON_TYPES.get(place)
    if common_type is None:
        frame = spark.range(1).selectExpr(*rows).selectExpr(f"coalesce({one}, {other}) AS it")
        common_type = type_sql(frame.schema["it"].dataType)
        _COMMON_TYPES.put(place, common_type)
    return common_type


_COMMON_TYPES: RecentCache[tuple[str, ...], str] = RecentCache(1_000)
"""The known answers of ``_common_type``. Each batch has the same questions."""


def view_failures(maintenance: Maintenance) -> dict[Place, Failure]:
    """The records that complete the rows on which an expression of a view fails."""
    with search_settings(maintenance.reader.spark):
        try:
            # Conditions of joins first: the joined rows can't be made without them.
            row_failures = _row_failures(maintenance)
            if row_failures:
                return row_failures
            joined_rows = maintenance.joined(where=False)
            return {} if joined_rows is None else _joined_failures(maintenance, joined_rows)
        except spark_errors() as error:
            if not is_overflow(error):
                raise
            return _overflow_failures(maintenance)


def _overflow_failures(maintenance: Maintenance) -> dict[Place, Failure]:
    """The records that complete the rows on which an expression overflows Java's stack. No expression of Spark catches this."""
    query, failure_by_place = maintenance.query, dict[Place, Failure]()
    name, topics = query.rule.name, {place: topic for topic, place in maintenance.ordering.places.items()}
    cases = " ".join(f"WHEN {place} THEN {text_sql(topic)}" for place, topic in topics.items())

    def at(order: str) -> str:
        place = f"CASE {order}.place {cases} END AS topic"
        return f"struct({order}.partition AS partition, {order}.offset AS offset, {place}) AS z_at"

    checks = _alias_expressions(maintenance)
    for alias in maintenance.changes:
        if expressions := checks[alias]:
            rows = maintenance.delta(alias).where(f"{V} = 1 AND z_changed").selectExpr("*", at(ORD))
            failure_by_place |= _overflows_in_rows(rows, "z_at", name, expressions)
    joined_rows = None if failure_by_place else maintenance.joined(where=False)
    if joined_rows is None:
        return failure_by_place
    where = query.view.where
    expressions = [] if where is None else [_Expression("where", where, "", where)]
    guard = "true" if where is None else f"({where})"
    expressions += [
        _Expression(expression.path, expression.sql, "", f"CASE WHEN {guard} THEN {expression.made} END")
        for expression in _expressions(maintenance)
    ]
    rows = joined_rows.selectExpr("*", f"{query.order_sql} AS z_last").selectExpr("*", at("z_last"))
    failure_by_place = _overflows_in_rows(rows.where(f"{V} = 1 AND z_last IS NOT NULL"), "z_at", name, expressions)
    if failure_by_place or not query.groups:
        return failure_by_place
    rows = (joined_rows if where is None else joined_rows.where(f"({where})")).selectExpr(
        "*", f"{shape_sql(query.rule.key)} AS {KEY}"
    )
    lasts = rows.groupBy(KEY).agg(_column(f"max({query.order_sql}) AS z_last"))
    lasts = lasts.where("z_last IS NOT NULL").selectExpr(f"{KEY} AS z_of", at("z_last"))
    rows = rows.where(f"{V} = 1").join(lasts, _column(f"z_of <=> {KEY}"))
    return _overflows_in_rows(
        rows, "z_at", name, _aggregate_expressions(maintenance), [KEY, "z_at", *_group_columns(maintenance)]
    )


def _overflows_in_rows(
    rows: DataFrame, at: str, rule: str, expressions: Sequence[_Expression], groups: Sequence[str] = ()
) -> dict[Place, Failure]:
    """The failures of the records ``at`` (struct of partition, offset and topic) on whose rows an expression overflows.
    ``groups``: what the rows are grouped by, for expressions over aggregates. The rows of a group have the same ``at``."""
    failure_by_place: dict[Place, Failure] = {}
    bounds = (_column(f"{name}({at}.offset) AS {name}") for name in ("min", "max"))
    for span in rows.groupBy(f"{at}.topic", f"{at}.partition").agg(*bounds).collect():
        topic = span["topic"]
        partition_rows = rows.where(f"{at}.topic = {text_sql(topic)} AND {at}.partition = {span['partition']}")

        def overflows(
            part: OffsetRange,
            part_expressions: Sequence[_Expression] = expressions,
            partition_rows: DataFrame = partition_rows,
        ) -> bool:
            inside = partition_rows.where(f"{at}.offset >= {part.first} AND {at}.offset < {part.end}")
            try:
                hashes = [
                    f"xxhash64({expression.made}) AS h{number}" for number, expression in enumerate(part_expressions)
                ]
                results = (
                    inside.groupBy(*map(_column, groups)).agg(*map(_column, hashes))
                    if groups
                    else inside.selectExpr(*hashes)
                )
                results.agg(*(_column(f"max(h{number})") for number, _ in enumerate(part_expressions))).collect()
            except spark_errors() as error:
                if is_overflow(error):
                    return True
                raise
            return False

        whole = OffsetRange(span["partition"], span["min"], span["max"] + 1)
        for part in islice(overflow_records(whole, overflows), MOST + 1):
            expression = next(
                (expression for expression in expressions if overflows(part, [expression])), expressions[0]
            )
            place = topic, part.partition, part.first
            failure_by_place[place] = Failure(*place, rule, f"{expression.text().removesuffix(_WORDS)}{TEXT}")
    return failure_by_place


def with_reason(failure_by_place: Mapping[Place, Failure], error: Exception) -> dict[Place, Failure]:
    """The failures, a single one with Spark's words."""
    if len(failure_by_place) != 1:
        return dict(failure_by_place)
    [(place, failure)] = failure_by_place.items()
    text = f"{failure.text.removesuffix(_WORDS)}{cause_line(error)}"
    return {place: Failure(*place, failure.rule, text)}


def check_places(
    pool: str, failure_by_place: Mapping[Place, Failure], ranges: Mapping[str, Sequence[OffsetRange]]
) -> None:
    """EtlError for a failing record that is not among the batch's: a view can't take back a record that is done. ``ranges``:
    topic → the offsets of the batch."""
    for (topic, partition, offset), failure in sorted(failure_by_place.items()):
        inside = (part.partition == partition and part.first <= offset < part.end for part in ranges.get(topic, ()))
        if not any(inside):
            raise EtlError(
                f"pool {pool}: {failure.reason} The row is of an earlier record: topic {topic}, partition {partition}, offset"
                f" {offset}. Nothing was committed. Correct the view (try_cast gives NULL where cast fails)."
            )


_WORDS = "an expression fails on this record."


class _Expression(NamedTuple):
    """An expression over joined rows. ``failed``: the condition that marks a failing row. ``made``: what Spark computes."""

    path: str
    sql: str
    failed: str
    made: str = ""

    def text(self) -> str:
        return f"{self.path}: {excerpt(self.sql)}: {_WORDS}"


def _row_failures(maintenance: Maintenance) -> dict[Place, Failure]:
    """The rows that fail in a join, or in a part of the key: those that the batch changes, else one of earlier records."""
    failure_by_place: dict[Place, Failure] = {}
    expressions_by_alias = _alias_expressions(maintenance)
    for alias in maintenance.changes:
        if expressions_by_alias[alias]:
            rows = maintenance.delta(alias).where(f"{V} = 1 AND z_changed")
            failure_by_place |= _failures(
                maintenance,
                expressions_by_alias[alias],
                rows.selectExpr(f"{_number(expressions_by_alias[alias])} AS failed", f"{ORD} AS blamed"),
            )
    for alias, expressions in expressions_by_alias.items():
        if expressions and not failure_by_place:
            failure_by_place |= _earlier_failures(maintenance, alias, expressions)
    return failure_by_place


def _earlier_failures(maintenance: Maintenance, alias: str, expressions: Sequence[_Expression]) -> dict[Place, Failure]:
    """A row of the state that fails. Its table has it from a time before the view, or before the other tables' types."""
    kind = maintenance.kinds[alias]
    rows = maintenance.reader.live(kind, maintenance.before[alias]).where("row IS NOT NULL")
    rows = rows.selectExpr(f"row AS {name_sql(alias)}", "version AS z_version")
    failing_rows = (
        rows.selectExpr(f"{_number(expressions)} AS failed", "z_version").where("failed IS NOT NULL").limit(1).collect()
    )
    at = [(kind.table.topic, row["z_version"]["partition"], row["z_version"]["offset"]) for row in failing_rows]
    name = maintenance.query.rule.name
    return {
        place: Failure(*place, name, expressions[row["failed"]].text())
        for place, row in zip(at, failing_rows, strict=True)
    }


def _alias_expressions(maintenance: Maintenance) -> Mapping[str, Sequence[_Expression]]:
    """Alias → the expressions of joins and of the key over the alias alone."""
    expressions: dict[str, list[_Expression]] = {alias: [] for alias in maintenance.query.aliases}
    for check in _view_checks(maintenance.reader.spark, maintenance.query, maintenance.kinds):
        expressions[check.alias].append(check.expression(check.made))
    return expressions


def _joined_failures(maintenance: Maintenance, joined_rows: DataFrame) -> dict[Place, Failure]:
    query, where = maintenance.query, maintenance.query.view.where
    expressions = list(_expressions(maintenance))
    guards = [] if where is None else [_Expression("where", where, fails(f"({where})"))]
    blamed = " ".join(
        f"WHEN {at} THEN {blamed_order(query, item.sql)}" for at, item in enumerate([*guards, *expressions])
    )
    number = _number([*guards, *expressions], guard=where)
    rows = joined_rows.selectExpr("*", f"{number} AS failed").selectExpr("*", f"CASE failed {blamed} END AS blamed")
    failure_by_place = _failures(
        maintenance, [*guards, *expressions], rows.where(f"{V} = 1").select("failed", "blamed")
    )
    if failure_by_place:
        return failure_by_place
    # A row that left the result is the cause: the last record of the key, before or after the batch.
    keys = rows if where is None else rows.where(f"failed IS NOT NULL OR ({where})")
    key_groups = keys.groupBy(_column(f"{shape_sql(query.rule.key)} AS {KEY}"))
    last = f"max({query.order_sql}) AS blamed"
    failure_by_place = _failures(
        maintenance,
        [*guards, *expressions],
        key_groups.agg(_column(f"min(failed) FILTER (WHERE {V} = 1) AS failed"), _column(last)),
    )
    if failure_by_place or not query.groups:
        return failure_by_place
    return _group_failures(maintenance, joined_rows if where is None else joined_rows.where(f"({where})"), last)


def _group_failures(maintenance: Maintenance, joined_rows: DataFrame, last: str) -> dict[Place, Failure]:
    """The records because of which an aggregate overflows, or an expression over aggregates fails."""
    key_groups = joined_rows.groupBy(_column(f"{shape_sql(maintenance.query.rule.key)} AS {KEY}"))
    values = _aggregate_expressions(maintenance)
    after_filter = f"FILTER (WHERE {V} = 1)"
    overflows: list[_Expression] = []
    for value in values:
        for name, inner in aggregated(value.sql):
            if name in ("sum", "avg"):
                condition = f"(try_{name}({inner}) {after_filter} IS NULL AND count({inner}) {after_filter} > 0)"
                overflows.append(_Expression(value.path, value.sql, condition))
    if overflows:
        rows = key_groups.agg(_column(f"{_number(overflows)} AS failed"), _column(last))
        failure_by_place = _failures(maintenance, overflows, rows)
        if failure_by_place:
            return failure_by_place
    expressions = [_Expression(path, sql, fails(spark_sql)) for path, sql, _, spark_sql in values]
    rows = joined_rows.groupBy(
        _column(f"{shape_sql(maintenance.query.rule.key)} AS {KEY}"), *map(_column, [V, *_group_columns(maintenance)])
    )
    group_rows = rows.agg(_column(f"{_number(expressions)} AS failed"), _column(last))
    # The row that is the cause may have left the group.
    lasts = key_groups.agg(_column(last)).withColumnRenamed(KEY, "z_of").withColumnRenamed("blamed", "z_last")
    failing_groups = group_rows.where(f"{V} = 1 AND failed IS NOT NULL").join(lasts, _column(f"z_of <=> {KEY}"))
    return _failures(
        maintenance, expressions, failing_groups.selectExpr("failed", "coalesce(blamed, z_last) AS blamed")
    )


def _aggregate_expressions(maintenance: Maintenance) -> list[_Expression]:
    """The expressions over aggregates."""
    sides = [
        *leaves(maintenance.query.rule.value, "value"),
        *(("headers", sql) for sql in maintenance.query.header_leaves),
    ]
    return [_Expression(path, sql, "", f"({ordered(sql)})") for path, sql in sides if has_aggregates(sql)]


def _group_columns(maintenance: Maintenance) -> list[str]:
    texts = [*maintenance.query.value_leaves, *maintenance.query.header_leaves]
    return list(dict.fromkeys(name for sql in texts for name in grouped(sql)))


def _expressions(maintenance: Maintenance) -> Iterator[_Expression]:
    """The expressions that Spark computes for each joined row."""
    rule, view = maintenance.query.rule, maintenance.query.view
    sides = [*leaves(rule.key, "key"), *leaves(rule.value, "value")]
    sides += [("headers", sql) for sql in maintenance.query.header_leaves]
    sides += [] if view.on_duplicate_key is None else [("on-duplicate-key", view.on_duplicate_key)]
    for path, sql in sides:
        if not has_aggregates(sql):
            yield _Expression(path, sql, fails(f"({sql})"), f"({sql})")
            continue
        for _, inner in aggregated(sql):
            yield _Expression(path, sql, fails(f"({inner})"), f"({inner})")


def _number(expressions: Sequence[_Expression], guard: str | None = None) -> str:
    """The number of the first expression that fails; null if none does. ``guard``: the condition of the others, after the
    first expression, which is the condition itself."""
    cases = [f"WHEN {expression.failed} THEN {at}" for at, expression in enumerate(expressions)]
    if guard is not None:
        cases.insert(1, f"WHEN NOT coalesce(({guard}), false) THEN NULL")
    return f"CAST(CASE {' '.join(cases)} END AS INT)" if cases else "CAST(NULL AS INT)"


def _failures(maintenance: Maintenance, expressions: Sequence[_Expression], rows: DataFrame) -> dict[Place, Failure]:
    """The failures of rows with the columns ``failed`` (the number of an expression) and ``blamed`` (ORD)."""
    failing_rows = rows.where("failed IS NOT NULL AND blamed IS NOT NULL")
    places = failing_rows.selectExpr(
        "failed", *(f"blamed.{name} AS {name}" for name in ("place", "partition", "offset"))
    )
    failure_by_place: dict[Place, Failure] = {}
    for row in places.distinct().limit(MOST_FAILURES + 1).collect():
        at = _topic(maintenance.ordering, row["place"]), row["partition"], row["offset"]
        failure_by_place[at] = Failure(*at, maintenance.query.rule.name, expressions[row["failed"]].text())
    return failure_by_place


def _topic(ordering: Ordering, place: int) -> str:
    return next(topic for topic, number in ordering.places.items() if number == place)


def _column(sql: str) -> Column:
    from pyspark.sql import functions as F

    return F.expr(sql)
