"""The sinks of a pipeline, planned and committed, batch by batch: the same for the command line and Dagster."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa

from zync_assets import upkeep
from zync_assets.codecs.fields import fields_of, is_envelope, type_at
from zync_assets.codecs.spark_types import original_name
from zync_assets.conflicts import keep_errors, raise_first, retried
from zync_assets.errors import (
    BadRecords,
    DataLoss,
    SinkError,
    TableLocked,
    TargetRefused,
    TargetUnavailable,
    ZyncError,
)
from zync_assets.lake import raw, staging
from zync_assets.lake.quarantine_table import Selection
from zync_assets.offsets import offset_count
from zync_assets.pipeline import Pipeline, Sink, SinkTable
from zync_assets.sinks.commit import SEARCH_OFFSETS, SinkCommit, check_table, commit_sink
from zync_assets.sinks.plan import (
    BATCH_OFFSETS,
    SinkBatch,
    SinkPlan,
    layout,
    place_of,
    plan_sink,
    read_source,
    side_names,
    writers,
)
from zync_assets.sinks.replay import (
    RefusedRecord,
    chosen_records,
    chosen_tables,
    evolving,
    wanted_from,
    write_refused,
    write_replays,
)
from zync_assets.sinks.target import OUTAGE_CURE, Merge, Place, TableSpec, open_target
from zync_assets.spark.session import Session, lazy_session

OUTAGES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before a sink tries again, outage by outage. Then the step ends."""

FIRST_REST, MOST_REST = 0.5, 30.0
"""The first and the longest rest of a table after an error, in seconds."""

TURN_SECONDS, TURN_OFFSETS = 5.0, 50_000
"""How long a turn of a table may take, about, and the offsets that a turn has however slow the target is. Other tables and
other steps wait meanwhile."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


def sink_all(pipeline: Pipeline, session: Session, sinks: Sequence[str] = ()) -> Iterator[SinkCommit]:
    """Write every table of the sinks up to the source's end at the start of the table, a commit a batch.

    ``sinks``: their names; none: all. A table's error holds back no other table: it is raised when the others are done.
    """
    troubles: list[ZyncError] = []
    places = deque((sink, table) for sink in pipeline.sinks if not sinks or sink.name in sinks for table in sink.tables)
    locked: list[tuple[Sink, SinkTable]] = []
    while places:
        sink, table = place = places.popleft()
        with keep_errors(troubles):
            try:
                yield from sink_table(pipeline, session, sink.name, table.name, outlasts_locks=place in locked)
            except TableLocked:
                if place in locked:
                    raise
                # The other tables have their turn before this one waits.
                locked.append(place)
                places.append(place)
    raise_first(troubles)


@dataclass
class Rest:
    """The pause of a table after an error. ``until``: when it is tried again, by the monotonic clock."""

    until: float
    seconds: float
    error: ZyncError


@dataclass
class Turn:
    """The state of a table from one turn to the next. ``limit``: the most offsets of its next batch. ``rest``: None while the
    table works."""

    limit: int = TURN_OFFSETS
    rest: Rest | None = None


def sink_awake(pipeline: Pipeline, session: Session, turns: dict[Place, Turn]) -> Iterator[SinkCommit]:
    """As ``sink_all``, for a caller that comes again and again: a table has one batch a call, of some seconds. An error of a
    table is a warning, and the table rests for a while. Neither another table nor another step waits long for it.

    ``turns``: kept from call to call, empty at first.
    """
    for sink in pipeline.sinks:
        is_away = False
        for table in sink.tables:
            turn = turns.setdefault(place_of(pipeline, sink, table), Turn())
            rest = turn.rest
            if is_away or (rest is not None and time.monotonic() < rest.until):
                continue
            try:
                for commit in sink_table(
                    pipeline, session, sink.name, table.name, patience=(), limit=turn.limit, seconds=0.0
                ):
                    turn.limit = next_limit(commit)
                    yield commit
                turn.rest = None
            except (SinkError, BadRecords, DataLoss) as error:
                seconds = FIRST_REST if rest is None else min(rest.seconds * 2, MOST_REST)
                turn.rest = Rest(time.monotonic() + seconds, seconds, error)
                _log.warning("%s; trying again in %s s", str(error).rstrip("."), seconds)
                # Each further table of the target would wait for an answer, too.
                is_away = isinstance(error, TargetUnavailable) and not isinstance(error, TableLocked)


def sink_table(
    pipeline: Pipeline,
    session: Session,
    sink: str,
    table: str,
    first: SinkBatch | None = None,
    patience: Sequence[float] = OUTAGES,
    *,
    outlasts_locks: bool = True,
    limit: int = BATCH_OFFSETS,
    seconds: float = math.inf,
) -> Iterator[SinkCommit]:
    """Write one table of a sink up to the source's end, a commit a batch. An outage of the target is waited out for a while.

    ``first``: a batch that was read already; ``patience``: seconds to wait, outage by outage.
    ``outlasts_locks``: whether the end of another program's lock is waited for too. ``limit``: the most offsets of the first
    batch. ``seconds``: no batch begins later than that; the first batch always begins.
    """
    commits, until = 0, time.monotonic() + seconds

    def write() -> SinkCommit | None:
        nonlocal first
        batch, first = first, None
        with _names(sink, table):
            return sink_once(partial(read_sink, pipeline, session, sink, table, limit), batch)

    while True:
        try:
            commit = _outlast(write, patience, locks=outlasts_locks)
        except TargetRefused as error:
            if limit == SEARCH_OFFSETS:
                raise SinkError(str(error)) from error
            # Somewhere in the batch is a record that the target refuses. A smaller batch has it, or is written without it.
            limit = max(SEARCH_OFFSETS, limit // 8)
            continue
        if commit is not None:
            limit, commits = min(BATCH_OFFSETS, limit * 8), commits + 1
            yield commit
        if commit is None or not commit.left or time.monotonic() >= until:
            break
    with _names(sink, table):
        _remove_leftovers(pipeline, sink, table)
    if commits:
        _apply_retention(pipeline, pipeline.sink(sink).table(table))


def next_limit(commit: SinkCommit) -> int:
    """The most offsets of the batch after ``commit``, so that it takes about TURN_SECONDS."""
    speed = offset_count(commit.ranges) / max(commit.seconds, 0.001)
    return min(BATCH_OFFSETS, max(TURN_OFFSETS, int(speed * TURN_SECONDS)))


@contextmanager
def _names(sink: str, table: str) -> Generator[None]:
    """Errors of a target name the sink and the table."""
    try:
        yield
    except SinkError as error:
        raise type(error)(_with_place(str(error), sink, table)) from error


@contextmanager
def remedies(sink: str, table: str) -> Generator[None]:
    """As ``_names``, and an outage has its cure: for a caller that does not wait for its end."""
    try:
        with _names(sink, table):
            yield
    except TargetUnavailable as error:
        raise _with_cure(error) from error


def _with_cure(error: TargetUnavailable) -> TargetUnavailable:
    return error if isinstance(error, TableLocked) else TargetUnavailable(f"{str(error).rstrip('.')}. {OUTAGE_CURE}")


def planned(pipeline: Pipeline, sink: Sink, table: SinkTable) -> SinkPlan:
    """The plan of the next batch. Its errors name the sink and the cure of an outage."""
    with remedies(sink.name, table.name):
        return _next_plan(pipeline, sink, table)


def _next_plan(pipeline: Pipeline, sink: Sink, table: SinkTable, limit: int = BATCH_OFFSETS) -> SinkPlan:
    """The plan of the next batch; without records while the sink waits for the first value."""
    plan = plan_sink(pipeline, sink, table, limit)
    return replace(plan, ranges=()) if _waits_for_values(plan) else plan


def _waits_for_values(plan: SinkPlan) -> bool:
    """Whether an expression of ``before:`` reads the value, and no record of the source has a value yet. The first value gives
    the expression its type. The records before it wait: they have no row."""
    name = side_names(plan)["value"]
    if plan.state is None or (
        name in plan.state.schema.names and not pa.types.is_null(plan.state.schema.field(name).type)
    ):
        return False
    # Spark's workers load no parser.
    from zync_assets.pipeline_file.expressions import columns, parse

    expressions = [*plan.sink.added.values(), *([] if plan.sink.where is None else [plan.sink.where])]
    return any(parts[0].lower() == "value" for sql in expressions for parts in columns(parse(sql).tree))


def _with_place(text: str, sink: str, table: str) -> str:
    """An error's text with the names of the sink and the table.

    >>> _with_place("table t: column a is missing", "s", "t")
    'sink s, table t: column a is missing'
    """
    if text.startswith(f"sink {sink}"):
        return text
    return f"sink {sink}, {text}" if text.startswith(f"table {table}") else f"sink {sink}, table {table}: {text}"


_positions: dict[Place, Mapping[int, int]] = {}
_cleaned_places: dict[Place, Mapping[int, int]] = {}
"""Place → the position that this process knows, and the position at which no run had left anything."""


def _remove_leftovers(pipeline: Pipeline, sink: str, table: str) -> None:
    """Remove the load tables of killed runs, and make their objects: a batch does so too, but there may be none to come."""
    sink_definition = pipeline.sink(sink)
    place = place_of(pipeline, sink_definition, sink_definition.table(table))
    if _cleaned_places.get(place) != _positions[place]:
        with open_target(sink_definition).run(place):
            _cleaned_places[place] = _positions[place]


def _apply_retention(pipeline: Pipeline, table: SinkTable) -> None:
    """Remove old records of a raw table that every sink has written."""
    if not table.staged:
        item = pipeline.input(table.topic)
        state = raw.open_raw(pipeline.lake, item.pool, item.topic) if item.retention_ms is not None else None
        upkeep.apply_retention(pipeline, item, state, partial(wanted_from, pipeline, item.topic))


def read_sink(pipeline: Pipeline, session: Session, sink: str, table: str, limit: int = BATCH_OFFSETS) -> SinkBatch:
    """The next batch of a target table. The batch is lazy and starts no session."""
    sink_definition = pipeline.sink(sink)
    return read_source(session, _next_plan(pipeline, sink_definition, sink_definition.table(table), limit))


def sink_once(read: Callable[[], SinkBatch], first: SinkBatch | None) -> SinkCommit | None:
    """Write one batch; None if there is nothing to do. ``first``: a batch that was read already."""

    def commit(batch: SinkBatch) -> SinkCommit | None:
        batch = write_replays(batch)
        plan, place = batch.plan, batch.plan.place
        before = _positions[place] = plan.progress.next
        if not plan.nothing_to_do:
            _warn_of_removed_records(plan)
            _warn_of_changing_key(plan)
            _warn_of_scattered_key(plan)
            made = evolving(batch, lambda evolves: commit_sink(batch, evolves=evolves))
            _positions[place] = {**before, **{part.partition: part.end for part in plan.ranges}}
            if _cleaned_places.get(place) == before:
                _cleaned_places[place] = _positions[place]
            return made
        if place not in _cleaned_places:
            # Without a batch, nothing else finds that the table is missing. A process looks once: a look asks the target.
            check_table(plan)
        return None

    return retried(read, commit, first=first)


@dataclass
class SinkReplay:
    """The outcome of a replay in the targets. ``count``: the refused records that were written. ``reasons``: record → why the
    record stays. ``troubles``: the errors of tables, each of which holds back no other table."""

    count: int = 0
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    troubles: list[ZyncError] = field(default_factory=list[ZyncError])


def replay_sinks(pipeline: Pipeline, session: Session, topics: Collection[str], selection: Selection) -> SinkReplay:
    """Write the raw records of some ``topics`` that replays brought after the sinks had passed them. Then write the selected
    refused records again."""
    replay, session = SinkReplay(), lazy_session(session)

    def write_late(read: Callable[[], SinkBatch]) -> None:
        retried(read, write_replays)

    def write_selected(read: Callable[[], SinkBatch]) -> None:
        first = read()
        if records := chosen_records(first.plan, selection):
            reasons = retried(read, partial(write_refused, selection=selection), first=first)
            replay.count += len(records) - len(reasons)
            refused = [RefusedRecord(first.plan.sink, first.plan.table, item) for item in records]
            replay.reasons |= {str(item): reasons[item.spot] for item in refused if item.spot in reasons}

    late_tables = [(place, write_late) for topic in topics for place in pipeline.raw_sinks(topic)]
    chosen = [(place, write_selected) for place in chosen_tables(pipeline, selection)]
    for (sink, table), write in [*late_tables, *chosen]:
        with keep_errors(replay.troubles), remedies(sink.name, table.name):
            write(partial(read_sink, pipeline, session, sink.name, table.name))
    return replay


def _warn_of_removed_records(plan: SinkPlan) -> None:
    """Warn before the first batch of a table if retention has removed records of its source: the table lacks their rows."""
    if isinstance(plan.state, raw.RawState) and not plan.progress.next:
        starts = plan.state.retention_start.items()
        count = sum(start - plan.state.first.get(partition, 0) for partition, start in starts)
        if count:
            _log.warning(
                "sink %s, table %s: retention removed %s records of %s before the table's first batch. A row of these records"
                " comes with its next record. To have all rows now, take an incremental snapshot of the source",
                *(plan.sink.name, plan.table.name, count, plan.table.source),
            )


def _warn_of_changing_key(plan: SinkPlan) -> None:
    """Warn before the first batch of a table of Debezium's envelopes if its key has a field that the records' keys lack.
    Debezium makes a delete and an insert of an update only where it changes the source's own key."""
    if not isinstance(plan.state, raw.RawState) or plan.progress.next or plan.sink.mode != "upsert":
        return
    key, value = (type_at(pa.struct(plan.state.schema), [side]) for side in ("key", "value"))
    if value is None or not is_envelope(value) or (key is not None and not pa.types.is_struct(key)):
        return
    own_names = {original_name(item.name) for item in fields_of(key)} if key is not None else set[str]()
    row_names = [name.removeprefix("value.") for name in plan.sink.key if not name.startswith(("key.", "kafka."))]
    # An expression of `before: {set: ...}` may be one of the record's own key.
    if others := [name for name in row_names if name not in own_names and name not in plan.sink.added]:
        _log.warning(
            "sink %s, table %s: the keys of %s lack %s. If an update changes such a field, the row of its former value stays. A"
            " delete finds its row by `before`, which PostgreSQL fills with REPLICA IDENTITY FULL alone. A view with this key"
            " keeps the table right",
            *(plan.sink.name, plan.table.name, plan.table.source, ", ".join(others)),
        )


def _warn_of_scattered_key(plan: SinkPlan) -> None:
    """Warn before the first batch of a table if records of one of its keys may lie in several partitions of a staged topic, which
    have no order. ``partition-by``, or an expression of ``before``, may keep them together."""
    state, name = plan.state, staging.key_column(plan.table.topic)
    if not isinstance(state, staging.StagingState) or name not in state.schema.names or len(plan.ends) < 2:
        return
    kind, by = state.schema.field(name).type, state.head.partitionings.get(plan.table.topic)
    if plan.progress.next or plan.sink.mode != "upsert" or not plan.sink.key or (by is not None and by.is_chosen):
        return
    key_names = {name.removeprefix("key.") for name in plan.sink.key if not name.startswith("value.")}
    own_names = [original_name(item.name) for item in fields_of(kind)] if pa.types.is_struct(kind) else []
    others = sorted({*own_names} - key_names) if key_names.isdisjoint({*plan.sink.added, "kafka.partition"}) else []
    if others or not (own_names or key_names):
        _log.warning(
            "sink %s, table %s: the key lacks %s of the keys of %s, and so records of one row may be in several partitions."
            " Which of them is the last is not known, and the row may be that of an earlier one. Give the topic one partition, or"
            " write its rows by the whole key",
            *(plan.sink.name, plan.table.name, ", ".join(others) or "the value", plan.table.source),
        )


def reset_sink(pipeline: Pipeline, session: Session, sink: str, table: str) -> tuple[Place, ...]:
    """Empty a table of a sink and forget its position. Other sinks may write the table too: their positions, which are
    returned, are forgotten as well, since their rows are gone. A pool from an older copy may have no column of the topic."""
    sink_definition = pipeline.sink(sink)
    sharers = tuple(
        place_of(pipeline, other_sink, item)
        for other_sink in pipeline.sinks
        for item in other_sink.tables
        if (other_sink.kind, other_sink.url, item.name) == (sink_definition.kind, sink_definition.url, table)
        and other_sink.name != sink
    )

    def reset(plan: SinkPlan) -> None:
        if plan.ends:
            _reset_table(plan, layout(plan, session).spec, sharers)
        elif plan.state is not None and plan.progress.origin is not None:
            _reset_table(plan, TableSpec(table, (), (), sink_definition.mode), sharers)

    def reset_named() -> None:
        with _names(sink, table):
            retried(lambda: plan_sink(pipeline, sink_definition, sink_definition.table(table), check=False), reset)

    # Another run may be at work on the table.
    _outlast(reset_named)
    return sharers


def _reset_table(plan: SinkPlan, spec: TableSpec, sharers: tuple[Place, ...]) -> None:
    """Empty a table and forget its position, in one transaction: the next batch begins at the start. ``sharers``: as in
    ``Merge``."""
    target = plan.target()
    if spec.columns:
        target.prepare(spec, create=plan.sink.create, evolve=plan.sink.evolve)
    if spec.mode == "insert":
        past = target.past_places(plan.place, spec, plan.origin, writers(plan))
        # Another pipeline that writes the source to a table of its own keeps its position.
        is_new = plan.progress.origin is None
        sharers = (*sharers, *(place for place in past if is_new or place.pipeline == plan.place.pipeline))
    target.merge(Merge(plan.place, spec, plan.origin, {}, {}, clear=True, sharers=sharers))


def _outlast(work: Callable[[], T], patience: Sequence[float] = OUTAGES, *, locks: bool = True) -> T:
    """The result of a work, which is done again after an outage of the target. ``patience``: seconds to wait, outage by outage.

    Raises TargetUnavailable with a cure after the last one. ``locks``: False raises TableLocked at once.
    """
    for seconds in patience:
        try:
            return work()
        except TargetUnavailable as error:
            if isinstance(error, TableLocked) and not locks:
                raise
            _log.warning("%s; trying again in %s s", str(error).rstrip("."), seconds)
            time.sleep(seconds)
    try:
        return work()
    except TargetUnavailable as error:
        raise _with_cure(error) from error
