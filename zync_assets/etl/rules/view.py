"""The kind ``view``: a topic that always equals a query over the latest rows of tables. The query as SQL, and how it is kept.

``etl.views`` keeps the result. A view takes no single records, so that the kind makes no results itself. Spark's workers load
this module, and need no SQL parser: the functions that show a view load the parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import pyarrow as pa

from zync_assets.codecs.fields import deletes_sql, is_envelope
from zync_assets.codecs.spark_types import parse_ddl
from zync_assets.errors import LakeError
from zync_assets.etl.rules.kind import Kind
from zync_assets.etl.rules.shapes import headers_sql
from zync_assets.pipeline import Pipeline, Rule, Shape, View, ViewTable
from zync_assets.spark.sql import edited, leaves, name_sql, shape_sql

_ENVELOPE_DELETES = "value IS NULL OR coalesce(value.op = 'd', false)"
"""Whether a record deletes its row, of an envelope whose type is not known yet."""


class ViewKind(Kind):
    """A view in lists of rules."""

    name = "view"
    summary = "the result of the query over the latest rows of the tables"

    def from_sql(self, rule: Rule) -> str:
        view = _view(rule)
        lines = [view.root]
        for join in view.joins:
            equal = " AND ".join(f"({earlier_sql}) = ({own_sql})" for earlier_sql, own_sql in join.on)
            lines.append(f"{'LEFT ' if join.kind == 'left' else ''}JOIN {join.alias} ON {equal}")
        return "\n".join(lines)


def query_sql(rule: Rule, kind: ViewKind, pipeline: Pipeline) -> str:
    """A view's query as one SQL statement over the raw tables.

    The row of a default table is ``value.after``, also while its values have no type. For records that are no envelopes of
    Debezium, it is ``value``.
    """
    from zync_assets.pipeline_file.view_expressions import grouped, has_aggregates, ordered

    view = _view(rule)
    tables = ",\n".join(f"{item.alias} AS ({latest_sql(item, pipeline)})" for item in view.tables)
    value = edited(rule.value, ordered)  # Spark collects in no order
    headers = "" if rule.headers is None else f", {ordered(headers_sql(rule.headers))} AS headers"
    lines = [
        f"-- {rule.name}: {kind.summary}",
        f"WITH {tables}",
        f"SELECT {shape_sql(rule.key)} AS key, {shape_sql(value)} AS value{headers}",
        f"FROM {kind.from_sql(rule)}",
        *([] if view.where is None else [f"WHERE {view.where}"]),
    ]
    if any(has_aggregates(sql) for _, sql in leaves(rule.value, "value")):
        groups = [sql for _, sql in leaves(rule.key, "key")]
        groups += [name for _, sql in leaves(rule.value, "value") for name in grouped(sql)]
        lines.append(f"GROUP BY {', '.join(dict.fromkeys(groups))}")
    if view.on_duplicate_key is not None:
        lines.append(f"-- of several rows with one key, the row with the greatest {view.on_duplicate_key}")
    return "\n".join(lines)


def plan_text(rule: Rule) -> str:
    """The maintenance plan of a view: for each table, the keys that a change of the table touches, and how they are found."""
    view = _view(rule)
    anchors = {alias for _, sql in leaves(rule.key, "key") for alias in _aliases(view, sql)}
    lines = [f"-- {rule.name}: how a batch keeps the view"]
    for item in view.tables:
        origin = view.origin(item.alias, anchors)
        steps = view.path(item.alias if origin is None else origin.far, anchors)
        lines.append(f"-- a change of {item.alias} ({item.topic}) touches the keys {_shape_text(rule.key)} of")
        lines.append(f"--   the changed rows {item.alias}, as they were before the batch and as they are after it")
        lines += [
            f"--   with the rows {step.far} that have {_equal(step.pairs)}{', or nulls' if step.outer else ''}:"
            f" a {'left' if step.outer else 'semi'} join of {step.near} with the state of {step.far}"
            for step in ([] if origin is None else [origin]) + steps
        ]
    required_aliases = {
        alias for _, sql in leaves(rule.key, "key") if len(names := _aliases(view, sql)) == 1 for alias in names
    }
    if not required_aliases - view.optional:
        lines.append(
            f"-- No field of the key is of one table whose row is always there: a batch reads all rows {view.root}."
        )
    lines.append(
        "-- The query then runs over the rows of these keys, before and after. The differences are the outputs."
    )
    return "\n".join(lines)


def _equal(pairs: list[tuple[str, str]]) -> str:
    return " and ".join(f"{far_sql} = {near_sql}" for near_sql, far_sql in pairs)


def _shape_text(shape: Shape) -> str:
    if isinstance(shape, Mapping):
        return f"{{{', '.join(f'{name}: {_shape_text(part)}' for name, part in shape.items())}}}"
    return shape or "NULL"


def latest_sql(item: ViewTable, pipeline: Pipeline) -> str:
    """The latest rows of a table, each under the table's alias."""
    value = _value_type(pipeline, item.topic)
    envelope = value is None or is_envelope(value)
    row = item.row or ("value.after" if envelope else "value")
    deleted = item.deleted or (_ENVELOPE_DELETES if value is None else deletes_sql(value))
    name = f"{pipeline.input(item.topic).pool}.{name_sql(item.topic)}"
    order = "struct(kafka.time, kafka.partition, kafka.offset)" if item.by_time else "kafka.offset"
    latest = f"max_by(CASE WHEN NOT coalesce({deleted}, false) THEN struct({row} AS row) END, {order}) AS latest"
    inner = f"SELECT {latest} FROM {name} GROUP BY {shape_sql(item.key)}"
    return f"SELECT latest.row AS {item.alias} FROM ({inner}) WHERE latest IS NOT NULL"


def _value_type(pipeline: Pipeline, topic: str) -> pa.DataType | None:
    """The type of a topic's values in its raw table, else as the pipeline file declares it; None if it is not known."""
    from zync_assets.lake.raw import open_raw

    item = pipeline.input(topic)
    state = None
    # The query of a file can be shown where its lake can't be read.
    with suppress(LakeError):
        state = open_raw(pipeline.lake, item.pool, topic)
    if state is not None and "value" in state.table.schema.names:
        return state.table.schema.field("value").type
    if item.value.ddl is None or item.shape is not None:
        return None
    return parse_ddl(item.value.ddl)


def _aliases(view: View, sql: str) -> list[str]:
    """The aliases of an expression, in the order of the view's tables."""
    from zync_assets.pipeline_file.view_expressions import aliases_of

    names = aliases_of(sql)
    return [item.alias for item in view.tables if item.alias.lower() in names]


def _view(rule: Rule) -> View:
    assert rule.view is not None
    return rule.view
