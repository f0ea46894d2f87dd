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
from zync_assets.etl.views.key_filter import plain_field
from zync_assets.etl.views.maintenance import Maintenance
from zync_assets.etl.views.query import KEY, ORD, Query, V
from zync_assets.etl.views.tables import TableType, table_of
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule
from zync_assets.pipeline_file.view_expressions import aggregated, grouped, has_aggregates, ordered
from zync_assets.spark.failures import MOST, TEXT, cause_line, fails, is_overflow, overflow_records
from zync_assets.spark.sql import leaves, name_sql, shape_sql, text_sql
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
    found: dict[Place, Failure] = {}
    with search_settings(spark):
        for name, (kind, records) in parts.items():
            row = f"CASE WHEN NOT {kind.deleted_sql} THEN {made_sql(kind.row_sql, kind.row, kind.state_row)} END"
            key = made_sql(kind.table.key, kind.key, kind.state_key)
            own = [
                _Expression(side, side, fails(sql), sql)
                for side, sql in (("key", key), ("deleted", kind.deleted_sql), ("row", row))
            ]
            reasons = [(f"table {name}", f"{each.path}: {_WORDS}") for each in own]
            for check in checks.get(name, ()):
                own.append(check.expression(check.over(row)))
                reasons.append((check.rule, own[-1].text()))
            place = f"kafka.partition AS partition, kafka.offset AS offset, {text_sql(kind.table.topic)} AS topic"
            rows = records.selectExpr("*", f"struct({place}) AS z_at")
            try:
                failed = rows.selectExpr(f"{_number(own)} AS failed", "z_at").where("failed IS NOT NULL")
                for each in failed.selectExpr("failed", "z_at.*").limit(MOST_FAILURES + 1).collect():
                    at = each["topic"], each["partition"], each["offset"]
                    found[at] = Failure(*at, *reasons[each["failed"]])
            except _spark_errors() as error:
                if not is_overflow(error):
                    raise
                found |= _overflowing(rows, "z_at", f"table {name}", own)
    return found


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

    def expression(self, made: str) -> _Expression:
        """The expression with its condition. ``made``: the expression over a row, as Spark computes it."""
        return _Expression(self.path, self.sql, fails(made), made)


def row_checks(spark: SparkSession, rules: Sequence[Rule], kinds: Mapping[str, TableType]) -> dict[str, list[RowCheck]]:
    """Name of a table → the expressions in joins and keys of views that may fail on its rows alone.

    A batch computes these expressions for each new row. A join computes them only if the other side has rows. A row on which an
    expression fails would get into the state, and stop a later batch. ``kinds``: the types of tables, by name.
    """
    found = defaultdict[str, list[RowCheck]](list)
    for rule in rules:
        names = {item.alias: table_of(item).name for item in rule.tables} if rule.view is not None else {}
        if names and kinds.keys() >= {*names.values()}:
            own = {alias: kinds[name] for alias, name in names.items()}
            for check in _view_checks(spark, Query(rule), own):
                found[names[check.alias]].append(check)
    return found


def _view_checks(spark: SparkSession, query: Query, kinds: Mapping[str, TableType]) -> Iterator[RowCheck]:
    """The expressions of joins and of the key over one alias that may fail. ``kinds``: by alias."""
    rule = query.rule.name
    for path, sql in leaves(query.rule.key, "key"):
        owners = query.owners(sql)
        alias = next(iter(owners), "")
        if len(owners) == 1 and plain_field(kinds[alias].state_row, sql, alias) is None:
            yield RowCheck(rule, alias, path, sql, f"({sql})")
    for join in query.view.joins:
        for near, far in join.on:
            sides = ((near, join.near), (far, join.alias))
            fields = [plain_field(kinds[alias].state_row, sql, alias) for sql, alias in sides]
            if all(fields) and len({item.dataType for item in fields if item is not None}) == 1:
                continue
            kind = _common_type(spark, kinds, near, far)
            for sql, alias in sides:
                yield RowCheck(rule, alias, "from", f"{near} = {far}", f"CAST(({sql}) AS {kind})")


def _common_type(spark: SparkSession, kinds: Mapping[str, TableType], one: str, other: str) -> str:
    """The type, as SQL, by which a join compares two expressions over rows. ``kinds``: by alias."""
    rows = [f"CAST(NULL AS {type_sql(kind.state_row)}) AS {name_sql(alias)}" for alias, kind in kinds.items()]
    place = one, other, *rows
    found = _COMMON_TYPES.get(place)
    if found is None:
        frame = spark.range(1).selectExpr(*rows).selectExpr(f"coalesce({one}, {other}) AS it")
        found = type_sql(frame.schema["it"].dataType)
        _COMMON_TYPES.put(place, found)
    return found


_COMMON_TYPES: RecentCache[tuple[str, ...], str] = RecentCache(1_000)
"""The known answers of ``_common_type``. Each batch has the same questions."""


def view_failures(maintenance: Maintenance) -> dict[Place, Failure]:
    """The records that complete the rows on which an expression of a view fails."""
    with search_settings(maintenance.reader.spark):
        try:
            # Conditions of joins first: the joined rows can't be made without them.
            found = _row_failures(maintenance)
            if found:
                return found
            joined = maintenance.joined(where=False)
            return {} if joined is None else _joined_failures(maintenance, joined)
        except _spark_errors() as error:
            if not is_overflow(error):
                raise
            return _overflow_failures(maintenance)


def _overflow_failures(it: Maintenance) -> dict[Place, Failure]:
    """The records that complete the rows on which an expression overflows Java's stack. No expression of Spark catches this."""
    query, found = it.query, dict[Place, Failure]()
    name, topics = query.rule.name, {place: topic for topic, place in it.ordering.places.items()}
    cases = " ".join(f"WHEN {place} THEN {text_sql(topic)}" for place, topic in topics.items())

    def at(order: str) -> str:
        place = f"CASE {order}.place {cases} END AS topic"
        return f"struct({order}.partition AS partition, {order}.offset AS offset, {place}) AS z_at"

    checks = _alias_expressions(it)
    for alias in it.changes:
        if own := checks[alias]:
            rows = it.delta(alias).where(f"{V} = 1 AND z_changed").selectExpr("*", at(ORD))
            found |= _overflowing(rows, "z_at", name, own)
    joined = None if found else it.joined(where=False)
    if joined is None:
        return found
    where = query.view.where
    own = [] if where is None else [_Expression("where", where, "", where)]
    guard = "true" if where is None else f"({where})"
    own += [
        _Expression(each.path, each.sql, "", f"CASE WHEN {guard} THEN {each.made} END") for each in _expressions(it)
    ]
    rows = joined.selectExpr("*", f"{query.order_sql} AS z_last").selectExpr("*", at("z_last"))
    found = _overflowing(rows.where(f"{V} = 1 AND z_last IS NOT NULL"), "z_at", name, own)
    if found or not query.groups:
        return found
    rows = (joined if where is None else joined.where(f"({where})")).selectExpr(
        "*", f"{shape_sql(query.rule.key)} AS {KEY}"
    )
    lasts = rows.groupBy(KEY).agg(_column(f"max({query.order_sql}) AS z_last"))
    lasts = lasts.where("z_last IS NOT NULL").selectExpr(f"{KEY} AS z_of", at("z_last"))
    rows = rows.where(f"{V} = 1").join(lasts, _column(f"z_of <=> {KEY}"))
    return _overflowing(rows, "z_at", name, _aggregating(it), [KEY, "z_at", *_grouped(it)])


def _overflowing(
    rows: DataFrame, at: str, rule: str, expressions: Sequence[_Expression], groups: Sequence[str] = ()
) -> dict[Place, Failure]:
    """The failures of the records ``at`` (struct of partition, offset and topic) on whose rows an expression overflows.
    ``groups``: what the rows are grouped by, for expressions over aggregates. The rows of a group have the same ``at``."""
    found: dict[Place, Failure] = {}
    bounds = (_column(f"{name}({at}.offset) AS {name}") for name in ("min", "max"))
    for span in rows.groupBy(f"{at}.topic", f"{at}.partition").agg(*bounds).collect():
        topic = span["topic"]
        mine = rows.where(f"{at}.topic = {text_sql(topic)} AND {at}.partition = {span['partition']}")

        def overflows(part: OffsetRange, own: Sequence[_Expression] = expressions, mine: DataFrame = mine) -> bool:
            inside = mine.where(f"{at}.offset >= {part.first} AND {at}.offset < {part.end}")
            try:
                made = [f"xxhash64({each.made}) AS h{number}" for number, each in enumerate(own)]
                results = (
                    inside.groupBy(*map(_column, groups)).agg(*map(_column, made))
                    if groups
                    else inside.selectExpr(*made)
                )
                results.agg(*(_column(f"max(h{number})") for number, _ in enumerate(own))).collect()
            except _spark_errors() as error:
                if is_overflow(error):
                    return True
                raise
            return False

        whole = OffsetRange(span["partition"], span["min"], span["max"] + 1)
        for part in islice(overflow_records(whole, overflows), MOST + 1):
            each = next((each for each in expressions if overflows(part, [each])), expressions[0])
            place = topic, part.partition, part.first
            found[place] = Failure(*place, rule, f"{each.text().removesuffix(_WORDS)}{TEXT}")
    return found


def _spark_errors() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError


def with_reason(found: Mapping[Place, Failure], error: Exception) -> dict[Place, Failure]:
    """The failures, a single one with Spark's words."""
    if len(found) != 1:
        return dict(found)
    [(place, failure)] = found.items()
    text = f"{failure.text.removesuffix(_WORDS)}{cause_line(error)}"
    return {place: Failure(*place, failure.rule, text)}


def check_places(pool: str, found: Mapping[Place, Failure], ranges: Mapping[str, Sequence[OffsetRange]]) -> None:
    """EtlError for a failing record that is not among the batch's: a view can't take back a record that is done. ``ranges``:
    topic → the offsets of the batch."""
    for (topic, partition, offset), failure in sorted(found.items()):
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
        sql = self.sql if len(self.sql) <= 200 else f"{self.sql[:200]}…"
        return f"{self.path}: {sql}: {_WORDS}"


def _row_failures(it: Maintenance) -> dict[Place, Failure]:
    """The rows that fail in a join, or in a part of the key: those that the batch changes, else one of earlier records."""
    found: dict[Place, Failure] = {}
    own = _alias_expressions(it)
    for alias in it.changes:
        if own[alias]:
            rows = it.delta(alias).where(f"{V} = 1 AND z_changed")
            found |= _failures(it, own[alias], rows.selectExpr(f"{_number(own[alias])} AS failed", f"{ORD} AS blamed"))
    for alias, expressions in own.items():
        if expressions and not found:
            found |= _earlier_failures(it, alias, expressions)
    return found


def _earlier_failures(it: Maintenance, alias: str, own: Sequence[_Expression]) -> dict[Place, Failure]:
    """A row of the state that fails. Its table has it from a time before the view, or before the other tables' types."""
    kind = it.kinds[alias]
    rows = it.reader.live(kind, it.before[alias]).where("row IS NOT NULL")
    rows = rows.selectExpr(f"row AS {name_sql(alias)}", "version AS z_version")
    failed = rows.selectExpr(f"{_number(own)} AS failed", "z_version").where("failed IS NOT NULL").limit(1).collect()
    at = [(kind.table.topic, row["z_version"]["partition"], row["z_version"]["offset"]) for row in failed]
    name = it.query.rule.name
    return {place: Failure(*place, name, own[row["failed"]].text()) for place, row in zip(at, failed, strict=True)}


def _alias_expressions(it: Maintenance) -> Mapping[str, Sequence[_Expression]]:
    """Alias → the expressions of joins and of the key over the alias alone."""
    found: dict[str, list[_Expression]] = {alias: [] for alias in it.query.aliases}
    for check in _view_checks(it.reader.spark, it.query, it.kinds):
        found[check.alias].append(check.expression(check.made))
    return found


def _joined_failures(it: Maintenance, joined: DataFrame) -> dict[Place, Failure]:
    query, where = it.query, it.query.view.where
    own = list(_expressions(it))
    guards = [] if where is None else [_Expression("where", where, fails(f"({where})"))]
    blamed = " ".join(f"WHEN {at} THEN {_blamed(it, each.sql)}" for at, each in enumerate([*guards, *own]))
    number = _number([*guards, *own], guard=where)
    rows = joined.selectExpr("*", f"{number} AS failed").selectExpr("*", f"CASE failed {blamed} END AS blamed")
    found = _failures(it, [*guards, *own], rows.where(f"{V} = 1").select("failed", "blamed"))
    if found:
        return found
    # A row that left the result is the cause: the last record of the key, before or after the batch.
    keys = rows if where is None else rows.where(f"failed IS NOT NULL OR ({where})")
    each = keys.groupBy(_column(f"{shape_sql(query.rule.key)} AS {KEY}"))
    last = f"max({query.order_sql}) AS blamed"
    found = _failures(
        it, [*guards, *own], each.agg(_column(f"min(failed) FILTER (WHERE {V} = 1) AS failed"), _column(last))
    )
    if found or not query.groups:
        return found
    return _group_failures(it, joined if where is None else joined.where(f"({where})"), last)


def _group_failures(it: Maintenance, joined: DataFrame, last: str) -> dict[Place, Failure]:
    """The records because of which an aggregate overflows, or an expression over aggregates fails."""
    each = joined.groupBy(_column(f"{shape_sql(it.query.rule.key)} AS {KEY}"))
    values = _aggregating(it)
    after = f"FILTER (WHERE {V} = 1)"
    overflows: list[_Expression] = []
    for value in values:
        for name, inner in aggregated(value.sql):
            if name in ("sum", "avg"):
                failed = f"(try_{name}({inner}) {after} IS NULL AND count({inner}) {after} > 0)"
                overflows.append(_Expression(value.path, value.sql, failed))
    if overflows:
        rows = each.agg(_column(f"{_number(overflows)} AS failed"), _column(last))
        found = _failures(it, overflows, rows)
        if found:
            return found
    own = [_Expression(path, sql, fails(made)) for path, sql, _, made in values]
    rows = joined.groupBy(_column(f"{shape_sql(it.query.rule.key)} AS {KEY}"), *map(_column, [V, *_grouped(it)]))
    found = rows.agg(_column(f"{_number(own)} AS failed"), _column(last))
    # The row that is the cause may have left the group.
    lasts = each.agg(_column(last)).withColumnRenamed(KEY, "z_of").withColumnRenamed("blamed", "z_last")
    both = found.where(f"{V} = 1 AND failed IS NOT NULL").join(lasts, _column(f"z_of <=> {KEY}"))
    return _failures(it, own, both.selectExpr("failed", "coalesce(blamed, z_last) AS blamed"))


def _aggregating(it: Maintenance) -> list[_Expression]:
    """The expressions over aggregates."""
    sides = [*leaves(it.query.rule.value, "value"), *(("headers", sql) for sql in it.query.header_leaves)]
    return [_Expression(path, sql, "", f"({ordered(sql)})") for path, sql in sides if has_aggregates(sql)]


def _grouped(it: Maintenance) -> list[str]:
    texts = [*it.query.value_leaves, *it.query.header_leaves]
    return list(dict.fromkeys(name for sql in texts for name in grouped(sql)))


def _expressions(it: Maintenance) -> Iterator[_Expression]:
    """The expressions that Spark computes for each joined row."""
    rule, view = it.query.rule, it.query.view
    sides = [*leaves(rule.key, "key"), *leaves(rule.value, "value")]
    sides += [("headers", sql) for sql in it.query.header_leaves]
    sides += [] if view.on_duplicate_key is None else [("on-duplicate-key", view.on_duplicate_key)]
    for path, sql in sides:
        if not has_aggregates(sql):
            yield _Expression(path, sql, fails(f"({sql})"), f"({sql})")
            continue
        for _, inner in aggregated(sql):
            yield _Expression(path, sql, fails(f"({inner})"), f"({inner})")


def _blamed(it: Maintenance, sql: str) -> str:
    """ORD of the record because of which an expression fails on a joined row."""
    owners = it.query.owners(sql)
    if len(owners) != 1:
        return it.query.order_sql
    return f"coalesce({ORD}_{it.query.aliases.index(next(iter(owners)))}, {it.query.order_sql})"


def _number(expressions: Sequence[_Expression], guard: str | None = None) -> str:
    """The number of the first expression that fails; null if none does. ``guard``: the condition of the others, after the
    first expression, which is the condition itself."""
    cases = [f"WHEN {each.failed} THEN {at}" for at, each in enumerate(expressions)]
    if guard is not None:
        cases.insert(1, f"WHEN NOT coalesce(({guard}), false) THEN NULL")
    return f"CAST(CASE {' '.join(cases)} END AS INT)" if cases else "CAST(NULL AS INT)"


def _failures(it: Maintenance, expressions: Sequence[_Expression], rows: DataFrame) -> dict[Place, Failure]:
    """The failures of rows with the columns ``failed`` (the number of an expression) and ``blamed`` (ORD)."""
    wanted = rows.where("failed IS NOT NULL AND blamed IS NOT NULL")
    places = wanted.selectExpr("failed", *(f"blamed.{name} AS {name}" for name in ("place", "partition", "offset")))
    found: dict[Place, Failure] = {}
    for row in places.distinct().limit(MOST_FAILURES + 1).collect():
        at = _topic(it.ordering, row["place"]), row["partition"], row["offset"]
        found[at] = Failure(*at, it.query.rule.name, expressions[row["failed"]].text())
    return found


def _topic(ordering: Ordering, place: int) -> str:
    return next(topic for topic, number in ordering.places.items() if number == place)


def _column(sql: str) -> Column:
    from pyspark.sql import functions as F

    return F.expr(sql)
