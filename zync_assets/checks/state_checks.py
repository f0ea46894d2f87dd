"""The checks that run in Spark, and only where someone asks for them: the state of views, and the rows of target tables.

``rows_match``: Spark folds the source of a target table by key, reads the table in one task, and joins both by key. Each task
compares a range of the joined rows and returns a count and its first differences. A column that no record of a row has set is
not compared: the table's own default is in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time
from decimal import Decimal
from functools import partial
from heapq import nsmallest
from typing import Any

import pyarrow as pa

from zync_assets.checks.remote_checks import sink_subject
from zync_assets.codecs.fields import BITS, ZONED_TIMESTAMP
from zync_assets.codecs.spark_types import rows_frame
from zync_assets.errors import LakeError, SinkError, TableUnfit, TargetRefused
from zync_assets.etl.views.query import removed_records
from zync_assets.etl.views.rebuild import state_counts
from zync_assets.etl.views.tables import stored_tables
from zync_assets.lake.archive_objects import list_text
from zync_assets.lake.check_results import CheckResult, Number, conclude, count_text
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.stores import first_line, is_state_file
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline, Sink, SinkTable
from zync_assets.sinks.columns import OFFSET, PARTITION, TIME, Layout
from zync_assets.sinks.commit import loaded
from zync_assets.sinks.files import FilesTarget
from zync_assets.sinks.fold import DELETE, OP, SET, UPDATE
from zync_assets.sinks.plan import SinkPlan, layout, plan_sink, progress_of, reset_command, source_frame
from zync_assets.sinks.target import Column, TableSpec, Target, open_target
from zync_assets.spark.failures import spark_failures
from zync_assets.spark.session import Session, lazy_session
from zync_assets.spark.tasks import frame_results, search_settings, task_frame

STATE, ROWS_MATCH = "state_equals_raw", "rows_match"

MOST = 10
"""Differences that are named."""
LOOKS = 3
"""How often a table is compared, where rows differ and a sink has written meanwhile."""

_PLACES = pa.schema([("refused_in", pa.int32()), ("refused_at", pa.int64())])

_MISFITS = (pa.ArrowException, ArithmeticError, AttributeError, TypeError, ValueError)
"""Errors of a target's driver, of pyarrow and of the comparison for a value that is not of the column's type."""

_UUID = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NUMBER = r"(-?\d+(?:\.\d+)?)"
_INTERVAL = re.compile(
    rf"P(?:{_NUMBER}Y)?(?:{_NUMBER}M)?(?:{_NUMBER}D)?(?:T(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?"
)


def state_equals_raw(pipeline: Pipeline, pool: str, session: Session) -> CheckResult:
    """The state of each table of views is the latest row of each key in the raw pool, below *seen*.

    A table is not compared if retention removed raw records that its state was made from.
    """
    snapshot = Snapshot(pipeline)
    state = snapshot.staging(pool)
    problems: list[str] = []
    other_tables: list[str] = []
    rows = 0
    inputs = {item.topic for item in pipeline.inputs}
    for table in stored_tables(state.head) if state is not None else ():
        raw = snapshot.raw(table.topic) if table.topic in inputs else None
        if state is None or raw is None:
            continue
        if removed_records(state, raw, table.topic):
            other_tables.append(table.name)
            continue
        try:
            with spark_failures(partial(_state_failure, table.name)):
                counts = state_counts(session(), state, raw, table, pipeline.unavailable_value)
        except LakeError as error:
            if not is_state_file(str(error)):
                raise
            problems.append(f"table {table.name}: {error} Run: {pipeline.command('rebuild', '--state')}")
            continue
        rows += counts.rows
        if counts.differing:
            problems.append(
                f"table {table.name}: the raw pool has another row for {count_text(counts.differing, 'key')}. Make the"
                f" state again: {pipeline.command('rebuild', '--state')}"
            )
        if counts.unindexed:
            problems.append(
                f"table {table.name}: its index lacks {count_text(counts.unindexed, 'row')}, so that joins may miss some. Make"
                f" the state again: {pipeline.command('rebuild', '--state')}"
            )
    summary = f"{count_text(rows, 'row')} of state {'equals' if rows == 1 else 'equal'} the raw pool"
    if other_tables:
        summary += f"; not compared, because retention removed raw records: {', '.join(other_tables)}"
    return conclude(STATE, pool, "error", problems, summary, {"rows": rows})


def _state_failure(table: str, text: str) -> LakeError:
    return LakeError(f"table {table}: its state can't be compared: {text}")


def rows_match(pipeline: Pipeline, session: Session, sink: Sink, table: SinkTable) -> CheckResult:
    """The rows of a target table equal the fold of all records that were written. Names the keys of rows that differ.

    Reads the whole source and the whole table, in Spark. Fails if a sink writes the table again and again meanwhile, and if the
    table can't be read.
    """
    subject = sink_subject(sink, table)
    if isinstance(target := open_target(sink), FilesTarget):
        return _objects_are_plain(pipeline, sink, table, target)
    if sink.mode == "insert" and (sink.key or target.whole_records):
        return conclude(ROWS_MATCH, subject, "error", [], "not compared: appended rows have no unique key", {})
    for _ in range(LOOKS):
        try:
            plan = plan_sink(pipeline, sink, table)
            if not plan.progress.next:
                return conclude(ROWS_MATCH, subject, "error", [], "nothing was written yet", {"rows": 0})
            differences = compare_rows(plan, session)
        except SinkError as error:
            return conclude(ROWS_MATCH, subject, "error", [str(error)], "", {})
        if not differences.differing or progress_of(pipeline, sink, table) == plan.progress:
            numbers: dict[str, Number] = {"rows": differences.rows, "differing": differences.differing}
            problems = [f"{differences}. Load the table again: {reset_command(plan)}"] if differences.differing else []
            return conclude(ROWS_MATCH, subject, "error", problems, "every row is what its records make it", numbers)
    problem = "a sink wrote the table while its rows were compared. Stop the sink, and check again."
    return conclude(ROWS_MATCH, subject, "error", [problem], "", {})


def _objects_are_plain(pipeline: Pipeline, sink: Sink, table: SinkTable, target: FilesTarget) -> CheckResult:
    """Each object of the sink is there, or a longer object in its place, and can be read."""
    subject = sink_subject(sink, table)
    try:
        plan = plan_sink(pipeline, sink, table, check=False)
        count, faults, unmade = target.object_faults(plan.place, table.name)
    except SinkError as error:
        return conclude(ROWS_MATCH, subject, "error", [str(error)], "", {})
    cure = f"Bring the files back from a copy; or, if the lake has all records, write them again: {reset_command(plan)}"
    problems = [f"{'; '.join(faults)}. {cure}"] if faults else []
    if unmade:
        command = pipeline.command("sink", "--sink", sink.name)
        text = f"{count_text(len(unmade), 'object')} yet: {list_text(unmade)}"
        problems.append(f"a sink has not made {text}. Run the sink again: {command}")
    summary = f"{count_text(count, 'object')} {'is' if count == 1 else 'are'} there and readable; rows are not compared"
    return conclude(ROWS_MATCH, subject, "error", problems, summary, {"objects": count})


@dataclass(frozen=True)
class Differences:
    """The rows that differ. ``rows``: keys that were compared; ``first``: key and what differs, of at most MOST keys; ``low``
    and ``high``: the least and the greatest key that differs, as text."""

    rows: int = 0
    differing: int = 0
    first: tuple[tuple[str, str], ...] = ()
    low: str = ""
    high: str = ""

    def __str__(self) -> str:
        texts = "; ".join(f"{name}: {text}" for name, text in self.first)
        if self.differing == 1:
            return f"1 row differs. {texts}"
        more = "; ..." if self.differing > len(self.first) else ""
        return f"{self.differing} rows differ, with keys from {self.low} to {self.high}. {texts}{more}"

    def __add__(self, other: Differences) -> Differences:
        first = tuple(nsmallest(MOST, (*self.first, *other.first)))
        edges = [item for item in (self.low, self.high, other.low, other.high) if item]
        rows, differing = self.rows + other.rows, self.differing + other.differing
        return Differences(rows, differing, first, min(edges, default=""), max(edges, default=""))


def compare_rows(plan: SinkPlan, session: Session) -> Differences:
    """The table of a plan compared with the fold of its source up to the table's position."""
    session = lazy_session(session)
    with search_settings(session()):
        return _compare_rows(plan, session)


def _compare_rows(plan: SinkPlan, session: Session) -> Differences:
    from pyspark.sql import functions as F

    table_layout, spark = layout(plan, session), session()
    ranges = tuple(
        OffsetRange(partition, min(plan.starts.get(partition, 0), next_offset), next_offset)
        for partition, next_offset in sorted(plan.progress.next.items())
    )
    frame = source_frame(spark, plan, table_layout, ranges, guarded=True)
    if not plan.target().has_table(table_layout.spec):
        raise TableUnfit(f"table {table_layout.spec.name} is not there. Load it from the start: {reset_command(plan)}")
    if plan.progress.bad:
        refused_frame = rows_frame(spark, _PLACES, [(item.partition, item.offset) for item in plan.progress.bad])
        # The columns keep their order, by which they are read.
        frame = frame.join(
            F.broadcast(refused_frame), F.expr(f"{PARTITION} = refused_in AND {OFFSET} = refused_at"), "left_anti"
        )
    keys = table_layout.key_names if table_layout.spec.mode == "upsert" else [PARTITION, OFFSET]
    frame = frame.repartition(*keys).sortWithinPartitions(*keys, TIME, PARTITION, OFFSET)

    def failure(text: str) -> SinkError:
        return SinkError(f"sink {plan.sink.name}, table {plan.table.name}: its rows can't be compared: {text}")

    with spark_failures(failure):
        source_rows = frame.mapInArrow(partial(_source_rows, table_layout), "name string, wanted string, marks string")
        table_rows = task_frame(spark, 1).mapInArrow(
            partial(_table_rows, plan.target(), table_layout.spec), "name string, found string"
        )
        # A table of the user's own may lack the primary key that keeps a row from being there twice.
        table_rows = table_rows.groupBy("name").agg(F.expr("min(found) AS found"), F.expr("count(*) AS times"))
        pairs = source_rows.join(table_rows, "name", "full_outer")
        # Rows of the table may come from records that retention removed.
        is_whole = not getattr(plan.state, "retention_start", None)
        padded = plan.target().columns_of(table_layout.spec, "padded")
        filled = _filled(plan.target(), table_layout.spec) if is_whole else frozenset[str]()
        parts = frame_results(pairs, partial(_compare_batches, table_layout.spec, is_whole, padded, filled), failure)
    return sum(parts, Differences())


def _filled(target: Target, spec: TableSpec) -> frozenset[str]:
    """The columns that have their defaults in earlier rows. A table gets a column with the next batch."""
    names = frozenset(column.name for column in spec.columns if column.default is not None)
    if names:
        try:
            target.prepare(spec, create=False, evolve="none")
        except TableUnfit as error:
            return names.difference(error.missing)
    return names


def _source_rows(table_layout: Layout, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows that the source makes: key, values (null: deleted), and which columns were set."""
    other_names = [column.name for column in table_layout.spec.others]
    parts = (part for batch in batches if batch.num_rows for part in _acceptable(table_layout, batch))
    for batch in loaded(table_layout, parts):
        rows = batch.to_pylist()
        yield _batch(
            name=[_key(table_layout.spec, row) for row in rows],
            wanted=[None if row[OP] in (DELETE, UPDATE) else _values(table_layout.spec, row) for row in rows],
            # Updates alone tell nothing of a row that records before them made.
            marks=[None if row[OP] == UPDATE else row[SET] or "1" * len(other_names) for row in rows],
        )


def _acceptable(table_layout: Layout, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The records of a batch without those that no load takes. Quarantine does not have them after they were dropped."""
    try:
        for _ in loaded(table_layout, [batch]):
            pass
    except TargetRefused:
        middle = batch.num_rows // 2
        for half in (batch.slice(0, middle), batch.slice(middle)) if middle else ():
            yield from _acceptable(table_layout, half)
    else:
        yield batch


def _table_rows(target: Target, spec: TableSpec, _: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of the table. SinkError names a column whose values have another type."""
    try:
        for batch in target.rows(spec):
            rows = batch.to_pylist()
            yield _batch(name=[_key(spec, row) for row in rows], found=[_values(spec, row) for row in rows])
    except _MISFITS as error:
        column = next((column for column in spec.columns if not _is_readable(target, spec, column)), None)
        if column is None:
            raise SinkError(first_line(error)) from None
        kind = "JSON" if column.as_json else column.type
        raise SinkError(
            f"the column {column.name} has values that are no {kind}, because another program changed its type. Change the"
            f" column back to a type for {kind}."
        ) from None


def _is_readable(target: Target, spec: TableSpec, column: Column) -> bool:
    try:
        for batch in target.rows(replace(spec, columns=(column,), key=())):
            for row in batch.to_pylist():
                _text(row[column.name], column)
    except _MISFITS:
        return False
    return True


def _compare_batches(
    spec: TableSpec, is_whole: bool, padded: frozenset[str], filled: frozenset[str], batches: Iterable[pa.RecordBatch]
) -> Differences:
    """The differences of the joined rows of a task. ``is_whole``: whether the source has every record that was ever written.
    ``padded``: as ``Target.padded``; ``filled``: the columns whose defaults are compared."""
    total = Differences()
    for batch in batches:
        texts = {
            row["name"]: text for row in batch.to_pylist() if (text := _difference(spec, row, is_whole, padded, filled))
        }
        first = tuple(nsmallest(MOST, texts.items()))
        total += Differences(batch.num_rows, len(texts), first, min(texts, default=""), max(texts, default=""))
    return total


def _difference(
    spec: TableSpec, row: dict[str, Any], is_whole: bool, padded: frozenset[str], filled: frozenset[str]
) -> str | None:
    if (row["times"] or 0) > 1:
        return f"the table has the row {row['times']} times"
    if row["wanted"] is None:
        is_known = row["marks"] is not None
        return "the source has no such row" if row["found"] is not None and (is_whole or is_known) else None
    if row["found"] is None:
        return "the table lacks the row"
    pairs = zip(spec.others, json.loads(row["wanted"]), json.loads(row["found"]), row["marks"], strict=True)
    names = [
        column.name
        for column, source_value, table_value, mark in pairs
        if (mark == "1" or (mark == "3" and column.name in filled))
        and not _is_same(source_value, table_value, is_padded=column.name in padded)
    ]
    return f"another value in {', '.join(names)}" if names else None


def _key(spec: TableSpec, row: dict[str, Any]) -> str:
    """The key as text, equal where the keys are."""
    key_columns = (column for column in spec.columns if column.name in spec.key)
    return ", ".join(f"{column.name}={_key_text(row[column.name], column)}" for column in key_columns)


def _key_text(value: Any, column: Column) -> str:
    # A column of JSON keeps neither spaces nor the order of names. A database may keep no sign of a zero.
    if column.as_json:
        return json.dumps(json.loads(value), sort_keys=True)
    if column.note == ZONED_TIMESTAMP:
        # A column of instants keeps no form of a text.
        with suppress(ValueError, OverflowError):
            return repr(datetime.fromisoformat(value).astimezone(UTC).isoformat())
    return repr(value or 0.0 if isinstance(value, float) else value)


def _values(spec: TableSpec, row: dict[str, Any]) -> str:
    """The values outside the key, as texts that are equal where the values are."""
    return json.dumps([_text(row[column.name], column) for column in spec.others])


def _text(value: Any, column: Column) -> Any:
    if column.as_json and value is not None:
        return _plain(json.loads(value), column.type)
    if isinstance(value, float):
        # A database may keep no sign of a zero.
        return [repr(value or 0.0)]
    if isinstance(value, bytes) and column.note == BITS:
        # The last bits come first. A database may keep no zeros before the first one.
        value = value.rstrip(b"\0")
    return value if value is None or isinstance(value, str) else [repr(value)]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A value out of JSON, in a form that equal values share. ``kind``: its type in the source.

    A row that was written before a field came lacks the field, which equals a null. A time may have more zeros in its fraction.
    """
    if pa.types.is_struct(kind) and isinstance(value, dict):
        types = {item.name: item.type for item in kind}
        return {name: _plain(item, types.get(name, pa.null())) for name, item in value.items() if item is not None}
    if pa.types.is_map(kind) and isinstance(value, dict):
        return {name: _plain(item, kind.item_type) for name, item in value.items()}
    if pa.types.is_list(kind) and isinstance(value, list):
        return [_plain(item, kind.value_type) for item in value]
    if pa.types.is_timestamp(kind) and isinstance(value, str):
        with suppress(ValueError):
            return datetime.fromisoformat(value).isoformat()
    return value


def _is_same(source_value: Any, table_value: Any, *, is_padded: bool = False) -> bool:
    """Whether two values are equal. A text may lie in a column of JSON, of times, of intervals or of UUIDs, which keeps the value
    and not its form."""
    if source_value == table_value or not (isinstance(source_value, str) and isinstance(table_value, str)):
        return source_value == table_value
    if is_padded:
        return source_value.rstrip(" ") == table_value.rstrip(" ")
    try:
        if source_value[:1] in ("{", "["):
            return json.loads(source_value) == json.loads(table_value)
        if _UUID.fullmatch(source_value):
            return source_value.lower() == table_value
        if source_value[:1] == "P":
            return _interval(source_value) == _interval(table_value)
        kind = time if source_value[2:3] == ":" else datetime
        times = [kind.fromisoformat(text) for text in (source_value, table_value)]
        return all(each.tzinfo for each in times) and times[0] == times[1]
    except ValueError:
        return False


def _interval(text: str) -> tuple[int, int, Decimal]:
    """The months, days and seconds of an interval in ISO 8601. ValueError for another text."""
    match = _INTERVAL.fullmatch(text)
    if match is None:
        raise ValueError(text)
    years, months, days, hours, minutes, seconds = (Decimal(part or 0) for part in match.groups())
    return int(12 * years + months), int(days), 3600 * hours + 60 * minutes + seconds


def _batch(**columns: list[Any]) -> pa.RecordBatch:
    arrays = [pa.array(values, pa.string()) for values in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
