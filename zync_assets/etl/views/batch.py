"""The views of an ETL batch: the state of their tables and their results, written and not yet committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.crashes import crash_point
from zync_assets.errors import EtlError
from zync_assets.etl.account import Fact
from zync_assets.etl.failures import Failure, Failures, Place
from zync_assets.etl.lookups import EventRows
from zync_assets.etl.output_types import OutputType
from zync_assets.etl.plan import Rebuild
from zync_assets.etl.rules.kind import Columns, Ordering
from zync_assets.etl.rules.shapes import has_schema, note_schema, schema_of
from zync_assets.etl.views.changes import (
    Change,
    RowFailures,
    failed_facts,
    is_split,
    record_rows,
    split_error,
    table_records,
    untyped_facts,
    write_changes,
)
from zync_assets.etl.views.differences import DUPLICATE
from zync_assets.etl.views.failures import check_places, row_checks, table_failures, view_failures, with_reason
from zync_assets.etl.views.maintenance import Maintenance
from zync_assets.etl.views.query import Query, removed_records, rule_types, unfilled_tables
from zync_assets.etl.views.rebuild import as_records, check_definitions, filled_rows, raw_rows, staged_differences
from zync_assets.etl.views.state import StateFiles, StateReader, state_files
from zync_assets.etl.views.state_index import indexed_columns, join_columns, write_index
from zync_assets.etl.views.tables import (
    Table,
    TableType,
    column_defaults,
    declared_frame,
    definition_of,
    has_result,
    removed_views,
    stored_table,
    table_of,
    table_type,
    tables_of,
)
from zync_assets.lake.head import Head, TableEntry
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawState, raw_files
from zync_assets.lake.staging import INDEX, REPLACED, STATE, StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.spark import frames
from zync_assets.spark.failures import is_of_data, is_overflow, raised_text, spark_errors
from zync_assets.spark.frames import checkpoint
from zync_assets.spark.tasks import BATCH_BYTES, MEASURED, planned_once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ViewBatch:
    """The views of a batch. ``rows``: their results (``kind``). ``facts``: about the records of their tables. ``files``: new
    files of the state; ``removed``: files of tables that no view uses any more. ``columns``: of the state."""

    rows: Sequence[DataFrame]
    facts: Sequence[Fact]
    files: Sequence[DataFile]
    removed: Sequence[DataFile]
    columns: Sequence[pa.Field]
    views: Mapping[str, str]
    tables: Mapping[str, TableEntry]
    events: EventRows
    """The rows that events of the batch look up."""

    def head(self, head: Head) -> Head:
        """The account's head with the views' definitions."""
        return replace(head.with_tables(self.tables), views=self.views)

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """The staging table's columns with those of the state."""
        fields_by_name = {item.name: item for item in schema} | {item.name: item for item in self.columns}
        return pa.schema(list(fields_by_name.values()))


@dataclass(frozen=True)
class Stage:
    """The data for the views of a batch.

    ``frames``: input topic → the records of the batch, for all inputs with a raw table; ``ranges``: input topic → the offsets
    of these records; ``types``: output topic → its type; ``known``: the records that are known to fail; ``small``: see
    ``Transform``. ``raw``: input topic → its raw table. ``rebuild``: see ``EtlPlan``.
    """

    pipeline: Pipeline
    pool: str
    spark: SparkSession
    state: StagingState | None
    rules: Sequence[Rule]
    ordering: Ordering
    frames: Mapping[str, DataFrame]
    ranges: Mapping[str, Sequence[OffsetRange]]
    types: Mapping[str, OutputType]
    known: Failures
    small: bool
    raw: Mapping[str, RawState | None]
    rebuild: Rebuild | None = None

    @property
    def head(self) -> Head:
        return self.state.head if self.state else Head()

    @property
    def measured(self) -> bool:
        """Whether rows may be large."""
        table_states = {topic: state for topic, state in self.raw.items() if state is not None and topic in self.frames}
        files = (item for topic, state in table_states.items() for item in raw_files(state, self.ranges[topic]))
        large = any(item.size > MEASURED * item.records for item in files)
        return large or self.rebuild is not None or BATCH_BYTES in self.pipeline.spark

    def records(self, topic: str) -> DataFrame:
        """The records of a topic without those that fail."""
        frame, condition = self.frames[topic], self.known.condition(topic)
        return frame if condition is None else note_schema(frame.where(f"NOT ({condition})"), schema_of(frame))


def view_batch(stage: Stage, uri: str, folder: str, columns: Columns) -> ViewBatch | None:
    """The views of a batch; None for a pool without views. ``uri``: the staging table; ``folder``: of new files, below it.

    Raises EtlError for a changed definition, for a key in two partitions, and for two result rows with one key. Raises
    RowFailures for records that can't become rows, and for results without a key.
    """
    tables, head = tables_of(stage.rules), stage.head
    if stage.rebuild is None:
        check_definitions(stage.pipeline, stage.pool, head)
    rebuilt_tables = _rebuilt_tables(stage, tables)
    for name, table in tables.items():
        # The rows of a state are alike. Those of a new state have the defaults of all columns.
        is_stored = name in head.tables and name not in rebuilt_tables
        defaults = stored_table(name, head.tables[name]).defaults if is_stored else ()
        defaults = defaults if is_stored else tuple(column_defaults(table, stage.raw.get(table.topic)))
        tables[name] = replace(table, defaults=defaults)
    lasting_tables = [table for name, table in tables.items() if name not in rebuilt_tables]
    joins = join_columns(stage.rules)
    removed_files = [
        item for item in (stage.state.files if stage.state else ()) if _is_unused(item, lasting_tables, joins)
    ]
    if not tables and not head.tables and not head.views:
        return None
    reader = StateReader(stage.spark, uri)
    with _errors(stage.pool):
        with planned_once(stage.spark) if stage.small else nullcontext():
            changes, kinds, facts = _changes(stage, tables, rebuilt_tables, reader, folder)
        crash_point("etl:state-written")
        rows, views = _results(stage, kinds, changes, rebuilt_tables, reader, columns)
        files = {
            name: StateFiles() if name in rebuilt_tables else state_files(stage.state, tables[name]) for name in kinds
        }
        files |= {name: files[name] + change.files for name, change in changes.items()}
        events = EventRows(reader, kinds, files, stage.small)
    topics = {table.topic for table in tables.values()}
    failed_records = [failure for failure in stage.known.found.values() if failure.topic in topics]
    return ViewBatch(
        rows,
        [*facts, *failed_facts(failed_records)],
        [item for change in changes.values() for item in change.files.all],
        removed_files,
        [item for kind in kinds.values() for item in kind.schema],
        {**views, **removed_views(head.views, views, stage.rules)},
        {name: TableEntry(table.topic, table.definition) for name, table in tables.items()},
        events,
    )


def _rebuilt_tables(stage: Stage, tables: Collection[str]) -> set[str]:
    """The tables whose state a rebuild makes from all raw records."""
    if stage.rebuild is None:
        return set()
    if stage.rebuild == "state":
        return set(tables)
    unfilled = set() if stage.state is None else unfilled_tables(stage.rules, stage.state, stage.raw)
    for name in sorted(unfilled):
        _log.warning(
            "pool %s: table %s: rows from before a column get its default; the state is made again", stage.pool, name
        )
    return unfilled | {name for name in tables if name not in stage.head.tables}


def _is_unused(item: DataFile, tables: Iterable[Table], joins: Mapping[str, Sequence[str]]) -> bool:
    """Whether a file holds state of a table that no view uses, or an index that no join uses. ``joins``: see ``join_columns``."""
    if item.group is None or not item.group.startswith((STATE, REPLACED, INDEX)):
        return False
    groups = {group for table in tables for group in (table.versions, table.replaced)}
    groups |= {table.index(column) for table in tables for column in joins.get(table.name, ())}
    return item.group not in groups


def _changes(
    stage: Stage, tables: Mapping[str, Table], rebuilt_tables: Collection[str], reader: StateReader, folder: str
) -> tuple[dict[str, Change], dict[str, TableType], list[Fact]]:
    """Name of a table → its changes, of the tables that have some; the types of all tables with a schema; and the facts.

    ``rebuilt_tables``: the tables whose state is made from all raw records.
    """
    kinds: dict[str, TableType] = {}
    sources: dict[str, tuple[TableType, DataFrame]] = {}
    filled: dict[str, tuple[TableType, DataFrame]] = {}
    untyped: dict[str, DataFrame] = {}
    for name, table in tables.items():
        topic = table.topic
        if topic not in stage.frames:
            continue
        if not has_schema(stage.frames[topic]):
            untyped |= {topic: stage.records(topic)} if stage.ranges[topic] else {}
            continue
        raw = stage.raw.get(topic)
        kinds[name] = table_type(table, stage.frames[topic], stage.state, raw)
        if name in rebuilt_tables and stage.state is not None and raw is not None:
            if stage.rebuild == "views" and name in stage.head.tables and removed_records(stage.state, raw, topic):
                filled[name] = kinds[name], filled_rows(reader, stage.state, raw, kinds[name])
                continue
            raw_frame = declared_frame(
                stage.pipeline, stage.spark, topic, raw_rows(stage.spark, stage.state, raw, table)
            )
            if raw_frame is not None:
                sources[name] = kinds[name], stage.ordering.carried(raw_frame, topic)
        elif stage.ranges[topic]:
            sources[name] = kinds[name], stage.records(topic)
    parts = {name: (kind, record_rows(kind, frame, stage.ordering)) for name, (kind, frame) in sources.items()}
    parts |= filled
    placeholder, joins = stage.pipeline.unavailable_value, join_columns(stage.rules)
    changes: dict[str, Change] = {}
    checks = row_checks(stage.spark, stage.rules, kinds)

    def search() -> dict[Place, Failure]:
        stored = {name: as_records(*part) for name, part in filled.items()}
        return table_failures(stage.spark, sources | stored, checks)

    with _failures(stage, search):
        texts = {name: [check.over("row") for check in table_checks] for name, table_checks in checks.items()}
        records, facts = table_records(parts, placeholder, small=stage.small, measured=stage.measured, checks=texts)

        def write_table(at: int) -> Change:
            table = records[at].kind.table
            old_files = StateFiles() if table.name in rebuilt_tables else state_files(stage.state, table)
            change = write_changes(reader, records[at], old_files, f"{folder}/state-{at}", placeholder)
            kind, versions = records[at].kind, change.files.versions
            columns = indexed_columns(kind, joins.get(table.name, ()))
            indexes = write_index(reader, kind, versions, columns, small=stage.small)
            return replace(change, files=replace(change.files, indexes=indexes))

        # A small batch is planned longer than it runs, and its tables side by side.
        with ThreadPoolExecutor(max(1, len(records)) if stage.small else 1) as pool:
            table_changes = list(pool.map(write_table, range(len(records))))
        changes = {item.kind.table.name: change for item, change in zip(records, table_changes, strict=True)}
    # A rebuild takes no new records.
    facts = [*facts, *untyped_facts(untyped)] if stage.rebuild is None else []
    return changes, kinds, facts


def _results(
    stage: Stage,
    kinds: Mapping[str, TableType],
    changes: Mapping[str, Change],
    rebuilt_tables: Collection[str],
    reader: StateReader,
    columns: Columns,
) -> tuple[list[DataFrame], dict[str, str]]:
    """The results of the views, and the definitions of those that have been computed."""
    rows: list[DataFrame] = []
    views: dict[str, str] = {}
    for index, rule in enumerate(stage.rules):
        if rule.view is None:
            continue
        target = stage.types[rule.out].targets.get(rule.name)
        types = rule_types(rule, stage.frames, stage.state)
        if target is None or types is None:
            continue  # a table has no schema yet
        fresh = not has_result(stage.head.views, rule, stage.rules)
        views[rule.name] = definition_of(rule)
        names = {item.alias: table_of(item) for item in rule.view.tables}
        whole = fresh or any(table.name in rebuilt_tables for table in names.values())
        if stage.rebuild is not None and not whole:
            continue
        maintenance = Maintenance(
            Query(rule),
            index,
            reader,
            stage.ordering,
            {alias: kinds[table.name] for alias, table in names.items()},
            {
                alias: StateFiles() if table.name in rebuilt_tables else state_files(stage.state, table)
                for alias, table in names.items()
            },
            {alias: changes[table.name] for alias, table in names.items() if table.name in changes},
            types,
            fresh=whole,
            small=stage.small,
        )
        with _failures(stage, partial(view_failures, maintenance)):
            results = maintenance.results(target, columns)
        if stage.rebuild is not None and stage.state is not None and results is not None:
            staged_rows = frames.output_frame(stage.spark, stage.state, rule.out)
            changed_rows = staged_differences(
                results, staged_rows, rule.out, index, stage.ordering, stage.state.head, types[0]
            )
            results = checkpoint(changed_rows)
        rows += [] if results is None else [results]
    return rows, views


@contextmanager
def _failures(stage: Stage, search: Callable[[], Mapping[Place, Failure]]) -> Generator[None]:
    """RowFailures in place of the error of an expression. ``search``: finds the records that fail."""
    from pyspark.errors import AnalysisException

    try:
        try:
            yield
        except AnalysisException:
            raise
        except spark_errors() as error:
            failure_by_place = (
                {}
                if is_split(error)
                or raised_text(error, DUPLICATE) is not None
                or not (is_of_data(error) or is_overflow(error))
                else search()
            )
            if not failure_by_place:
                raise
            raise RowFailures(
                failure_by_place if is_overflow(error) else with_reason(failure_by_place, error)
            ) from error
    except RowFailures as error:
        check_places(stage.pool, error.failures, stage.ranges)
        raise


@contextmanager
def _errors(pool: str) -> Generator[None]:
    """EtlError in place of the errors that expressions of views raise."""
    try:
        yield
    except spark_errors() as error:
        split = split_error(pool, error)
        if split is not None:
            raise split from error
        duplicate = raised_text(error, DUPLICATE)
        if duplicate is not None:
            raise EtlError(
                f"pool {pool}, {duplicate}. Nothing was committed. Give the view a key: that is unique,"
                " or say with on-duplicate-key: which row to use."
            ) from error
        raise
