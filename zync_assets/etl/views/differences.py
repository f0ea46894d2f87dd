"""The differences of a view's result: before and after a batch, key by key, as result rows of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.failures import MOST_FAILURES, Failure, Place
from zync_assets.etl.rules.kind import Columns, Ordering, OutputColumns
from zync_assets.etl.rules.shapes import type_sql
from zync_assets.etl.views.query import (
    CAUSE,
    CHOICE,
    COPIES,
    HEADERS,
    KEY,
    ORD,
    TEXTS,
    VALUE,
    Query,
    V,
    same_sql,
)
from zync_assets.etl.views.tables import null_sql
from zync_assets.spark.sql import json_sql, name_sql, shape_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

DUPLICATE = "[duplicate key] "
"""Marks the text of a task's error."""


def differences(query: Query, results: DataFrame, key_type: DataType, *, all_new: bool) -> DataFrame:
    """The keys whose result differs: KEY, VALUE and HEADERS (null: the result has no such key any more), ORD,
    CAUSE. The frame fails for several result rows with one key. ``all_new``: there was no result before."""
    from pyspark.sql import functions as F

    has_choice = query.view.on_duplicate_key is not None
    keys = query.key_columns
    # A value that is null is a tombstone: the result has no such row.
    results = results.where(f"{VALUE} IS NOT NULL OR {COPIES} > 1")
    if all_new and query.groups and not has_choice:
        # Each key has one row.
        return results.selectExpr(f"{_checked(query, key_type, COPIES, TEXTS)} AS {KEY}", VALUE, HEADERS, ORD, CAUSE)
    row = f"struct({VALUE}, {HEADERS})"

    def picked(v: int) -> str:
        best = f"struct({CHOICE}, {json_sql(row)})"
        pick = f"max_by({row}, {best})" if has_choice else f"any_value({row})"
        return f"{pick} FILTER (WHERE {V} = {v})"

    columns = [
        f"any_value({KEY}) AS {KEY}",
        f"max({ORD}) AS {ORD}",
        f"array_distinct(flatten(collect_list({CAUSE}))) AS {CAUSE}",
        f"{picked(1)} AS after",
    ]
    columns.append(
        "CAST(0 AS BIGINT) AS copies" if has_choice else f"coalesce(sum({COPIES}) FILTER (WHERE {V} = 1), 0) AS copies"
    )
    if not has_choice:
        columns += [f"max({TEXTS}) AS texts"]
        columns += [
            f"{name}(struct({VALUE} AS value)) FILTER (WHERE {V} = 1) AS z_{name}" for name in ("first", "last")
        ]
    if not all_new:
        columns.append(f"{picked(0)} AS before")
    groups = results.groupBy(*keys).agg(*map(F.expr, columns))
    if not all_new:
        kind = groups.schema["after"].dataType
        groups = groups.where(f"copies > 1 OR NOT {same_sql('before', 'after', kind)}")
    json_texts = ", ".join(f"to_json({name})" for name in ("z_first", "z_last"))
    texts = f"coalesce(texts, concat(least({json_texts}), ' and ', greatest({json_texts})))"
    key = _plain_zeros(KEY, key_type) if has_choice else _checked(query, key_type, "copies", texts)
    sides = (f"after.{name} AS {name}" for name in (VALUE, HEADERS))
    return groups.selectExpr(f"{key} AS {KEY}", *sides, ORD, CAUSE)


def with_causes(differing_rows: DataFrame, touched: DataFrame, *, few: bool) -> DataFrame:
    """Differences with the ORD and the CAUSE of their touched key. Joined rows may lack both: a LEFT JOIN makes a row without any
    record of the batch, once its joined row is deleted. ``few``: whether each task may have the touched keys."""
    from pyspark.sql import functions as F

    causes = touched.withColumnRenamed(KEY, "z_touched")
    causes = F.broadcast(causes) if few else causes
    return differing_rows.drop(ORD, CAUSE).join(causes, F.expr(f"{KEY} <=> z_touched"), "left").drop("z_touched")


def _checked(query: Query, key_type: DataType, copies: str, texts: str) -> str:
    """A key as SQL. It fails for several result rows with the key."""
    begin = text_sql(f"{DUPLICATE}view {query.rule.name}: two result rows have the key ")
    text = f"concat({begin}, to_json(struct({KEY} AS key)), ': ', {texts})"
    several = f"{copies} > 1 AND NOT ({null_sql(KEY, key_type)})"
    return f"CASE WHEN {several} THEN raise_error({text}) ELSE {_plain_zeros(KEY, key_type)} END"


def _plain_zeros(sql: str, kind: DataType) -> str:
    """A key with 0.0 in place of -0.0: Spark groups the two as one key, and consumers fold keys by their bytes."""
    from pyspark.sql import types as spark

    if not any(name in kind.simpleString() for name in ("float", "double")):
        return sql
    if isinstance(kind, spark.StructType):
        fields = (
            f"{text_sql(item.name)}, {_plain_zeros(f'{sql}.{name_sql(item.name)}', item.dataType)}" for item in kind
        )
        return f"named_struct({', '.join(fields)})"
    if isinstance(kind, spark.ArrayType):
        return f"transform({sql}, it -> {_plain_zeros('it', kind.elementType)})"
    return f"({sql} + CAST(0 AS {type_sql(kind)}))"


def outputs(query: Query, index: int, differing_rows: DataFrame, target: OutputColumns, columns: Columns) -> DataFrame:
    """The differences as result rows. ``index``: the rule's."""
    # The columns hold the values of the rule: the columns' names are the rule's shapes.
    rule = replace(query.rule, key=KEY, value=VALUE, headers=HEADERS if target.headers else None, keep=None)
    if query.rule.headers is None:
        rule = replace(rule, headers=None)
    at = f"named_struct('place', {ORD}.place, 'partition', {ORD}.partition, 'offset', {ORD}.offset)"
    return differing_rows.selectExpr(
        "'out' AS kind",
        f"{index} AS rule",
        f"{ORD} AS ord",
        f"sort_array({CAUSE}) AS source",
        f"CAST(array_position(sort_array({CAUSE}), {at}) - 1 AS INT) AS last",
        "0 AS waited",
        "CAST(NULL AS BIGINT) AS hash",
        *(f"{sql} AS {name_sql(name)}" for name, sql in columns(rule, target)),
    )


def blamed_order(query: Query, sql: str) -> str:
    """ORD of the record because of which an expression fails on a joined row: of the row that the expression names alone, if the
    batch changes that row; else of the last record."""
    owners = query.owners(sql)
    if len(owners) != 1:
        return query.order_sql
    return f"coalesce({ORD}_{query.aliases.index(next(iter(owners)))}, {query.order_sql})"


def keyless_failures(
    query: Query, joined_rows: DataFrame, rows: DataFrame, kind: DataType, ordering: Ordering
) -> dict[Place, Failure]:
    """The records that complete result rows with a null key. ``joined_rows``: as in ``Query.joined``; ``rows``: the differing
    rows, which count if no record of the batch is among the joined ones. ``kind``: the type of the key.

    Raises EtlError if there is none.
    """
    topics = {place: topic for topic, place in ordering.places.items()}
    blamed = " ".join(f"WHEN ({sql}) IS NULL THEN {blamed_order(query, sql)}" for sql in query.key_leaves)
    # A row whose value is null is not in the result.
    has_value = "true" if query.groups else f"({shape_sql(query.rule.value)}) IS NOT NULL"
    joined_rows = joined_rows.where(f"{V} = 1 AND {has_value}").selectExpr(
        f"{shape_sql(query.rule.key)} AS {KEY}", f"CASE {blamed} ELSE {query.order_sql} END AS {ORD}"
    )
    for frame in (joined_rows, rows):
        keyless_rows = frame.where(f"({null_sql(KEY, kind)}) AND {ORD} IS NOT NULL")
        columns = (f"{ORD}.{name}" for name in ("place", "partition", "offset"))
        places = keyless_rows.selectExpr(*columns).distinct().limit(MOST_FAILURES + 1).collect()
        record_places = [(topics[row["place"]], row["partition"], row["offset"]) for row in places]
        if record_places:
            reason = "key: the key of the view, or a part of it, is null"
            return {at: Failure(*at, query.rule.name, reason) for at in record_places}
    raise EtlError(
        f"rule {query.rule.name}: a result row has a null key, and no record of the batch makes it. Nothing was"
        " committed. Correct the view's key or where."
    )
