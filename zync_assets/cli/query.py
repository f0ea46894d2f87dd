"""``zync query``: Spark SQL over the pools.

Spark's temporary views have no namespaces and its databases allow no dots in names, so each ``Pool.Topic`` in the text
is replaced by the name of a view of its own. Only those spans of the text change: Spark parses the rest as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from zync_assets.cli.terminal import Format, excerpt, format_option, print_rows
from zync_assets.codecs.arrays import python_rows
from zync_assets.errors import LakeError, ZyncError
from zync_assets.lake import raw, staging
from zync_assets.pipeline import Pipeline, table_name
from zync_assets.pipeline_file import load
from zync_assets.spark import frames
from zync_assets.spark.failures import short
from zync_assets.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_LENGTH = 1_000_000
"""Characters of a query."""


@dataclass(frozen=True)
class ViewQuery:
    """SQL with view names for tables. ``views``: view name → (pool, topic)."""

    sql: str
    views: Mapping[str, tuple[str, str]]


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.argument("sql")
@format_option
def query(pipeline: Path, sql: str, fmt: Format) -> None:
    """Run one Spark SQL query over the tables of the pools, called Pool.Topic.

    \b
    zync query invoices.yaml 'select value.* from Staging.NewInvoices order by kafka.offset'

    A topic with dots goes in back quotes. A raw table has the columns kafka, key, value, key_schema_id, value_schema_id;
    a staging table kafka, key, value, rule, source, and headers where a rule gives some. Pool.Topic@latest has the last
    record of each key of an output, without deleted keys.
    """
    model = load(pipeline)
    view_query = rewrite(sql, tables_of(model))
    columns, rows = run_query(model, view_query)
    print_rows(rows, columns, fmt)


LATEST = "@latest"
"""After an output topic in a query: the last record of each key, without the keys whose last record is a tombstone."""

_NO_NAME = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`[^`]*`|--[^\n]*|/\*.*?\*/"""
"""What has no name of a table in it: texts, other names in back quotes, and comments."""


def tables_of(pipeline: Pipeline) -> list[tuple[str, str]]:
    """(pool, topic) of every table that a query can name."""
    tables = [(item.pool, item.topic) for item in (*pipeline.inputs, *pipeline.outputs)]
    return [*tables, *((item.pool, item.topic + LATEST) for item in pipeline.outputs)]


def rewrite(sql: str, tables: Sequence[tuple[str, str]]) -> ViewQuery:
    """The query with ``Pool.Topic`` replaced; names are compared exactly, else without case.

    Raises ZyncError for SQL that does not parse, for a statement that is no query, and for an unknown table.
    """
    if len(sql) > MAX_LENGTH:
        raise ZyncError(f"the query is longer than {MAX_LENGTH} characters; make it shorter")
    pools = "|".join(sorted({re.escape(pool) for pool, _ in tables}))
    # A name with a sign stands in back quotes.
    names = rf"`([^`]+){LATEST}`|`([^`]+)`{LATEST}\b|([\w.-]+?){LATEST}\b"
    sql = re.sub(
        rf"(?is){_NO_NAME}|\b({pools})\.(?:{names})",
        lambda match: f"{match[1]}.`{match[match.lastindex]}{LATEST}`" if match.lastindex else match[0],
        sql,
    )
    try:
        statements = [item for item in sqlglot.parse(sql, read="spark") if item is not None]
    except SqlglotError as error:
        raise ZyncError(f"the query does not parse: {_first_line(error)} In a query, {_there_are(tables)}") from None
    except RecursionError:
        raise ZyncError("the query does not parse: nested too deep") from None
    except (ValueError, TypeError, AttributeError, LookupError):
        # Some malformed texts get past the parser's own checks.
        raise ZyncError("the query does not parse") from None
    if len(statements) != 1 or not isinstance(statements[0], exp.Query):
        raise ZyncError("zync query takes one query, such as: select * from Pool.Topic")
    edits: list[tuple[int, int, str]] = []
    views: dict[str, tuple[str, str]] = {}
    own_names = {item.alias.lower() for item in statements[0].find_all(exp.CTE)}
    for table in statements[0].find_all(exp.Table):
        if not table.db:
            if isinstance(table.this, exp.Identifier) and table.name.lower() not in own_names:
                raise ZyncError(f"there is no table {excerpt(_quote(table.name))}; {_there_are(tables)}")
            continue
        place = _find(table.db, table.name, tables)
        view = f"zync_{tables.index(place)}"
        views[view] = place
        # Spark has an alias after a sample or a pivot only, where the view's own name then stays in sight.
        plain = not (table.alias or table.args.get("sample") or table.args.get("pivots"))
        alias = f" AS `{place[1]}`" if plain else ""
        edits.append((_start(table.args["db"]), _end(table.this), view + alias))
    for column in statements[0].find_all(exp.Column):
        parts = column.parts
        if len(parts) > 2 and (parts[0].name, parts[1].name) in views.values():
            edits.append((_start(parts[0]), _end(parts[1]), f"`{parts[1].name}`"))
    for start, end, text in sorted(edits, reverse=True):
        sql = sql[:start] + text + sql[end:]
    return ViewQuery(sql, views)


def run_query(pipeline: Pipeline, view_query: ViewQuery) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The names of the columns, a number added where two are alike, and the rows as Spark makes them, a partition at a
    time. Raises ZyncError for what Spark refuses, rows included."""
    from pyspark.errors import PySparkException

    spark = spark_session(pipeline.spark, pipeline.lake)
    for view, (pool, topic) in view_query.views.items():
        table_frame(spark, pipeline, pool, topic).createOrReplaceTempView(view)
    try:
        frame = spark.sql(view_query.sql)
        columns = unique_names(frame.columns)
    except PySparkException as error:
        raise ZyncError(f"query: {short(error)}") from None
    # Plain names on the way: PySpark takes a dot in a name for the field of a struct.
    return columns, _rows(frame.toDF(*(f"c{number}" for number, _ in enumerate(columns))), columns)


def unique_names(columns: Sequence[str]) -> list[str]:
    """The names, those that came before with a number after them: a join has many an ``ID``."""
    names: list[str] = []
    for column in columns:
        name, number = column, 2
        while name in names:
            name, number = f"{column}_{number}", number + 1
        names.append(name)
    return names


def table_frame(spark: SparkSession, pipeline: Pipeline, pool: str, topic: str) -> DataFrame:
    """A table of a pool as a query sees it. LakeError where nothing is there yet, EtlError where a key has no last record."""
    if topic in {item.topic for item in pipeline.inputs}:
        table = raw.open_raw(pipeline.lake, pool, topic)
        if table is None:
            raise LakeError(f"{table_name(pool, topic)}: nothing is ingested yet; run {pipeline.command('from-kafka')}")
        return frames.raw_frame(spark, table, raw.raw_files(table))
    state = staging.open_staging(pipeline.lake, pool)
    if state is None:
        raise LakeError(f"{table_name(pool, topic)}: nothing is transformed yet; run {pipeline.command('etl')}")
    is_latest, name = topic.endswith(LATEST), topic.removesuffix(LATEST)
    frame = frames.output_frame(spark, state, name).drop("schema", "left_out")
    if not is_latest:
        return frame
    if pipeline.output(name).partition_by is not None:
        frames.refuse_scattered_keys(frame.selectExpr("key", "kafka.partition"), name, "read")
    return frames.latest_records(frame)


def _rows(frame: DataFrame, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    from pyspark.errors import PySparkException

    try:
        # As Arrow: Python rows of Spark's own have times without a zone, and maps and structs alike.
        for row in frame.mapInArrow(_pack, "batch binary").toLocalIterator():
            with pa.ipc.open_stream(bytes(row["batch"])) as stream:
                for batch in stream:
                    yield from python_rows(batch.rename_columns(list(columns)))
    except PySparkException as error:
        raise ZyncError(f"query: {short(error)}") from None


def _pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["batch"])


def _find(pool: str, topic: str, tables: Sequence[tuple[str, str]]) -> tuple[str, str]:
    if (pool, topic) in tables:
        return pool, topic
    alike = [item for item in tables if (item[0].lower(), item[1].lower()) == (pool.lower(), topic.lower())]
    if len(alike) == 1:
        return alike[0]
    raise ZyncError(f"there is no table {excerpt(f'{pool}.{_quote(topic)}')}; {_there_are(tables)}")


def _there_are(tables: Sequence[tuple[str, str]]) -> str:
    return "there are " + ", ".join(f"{pool}.{_quote(topic)}" for pool, topic in tables)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _quote(topic: str) -> str:
    return topic if re.fullmatch(r"\w+", topic) else f"`{topic}`"


def _start(name: exp.Expr) -> int:
    return int(name.meta["start"])


def _end(name: exp.Expr) -> int:
    return int(name.meta["end"]) + 1
