"""The interface of a target database. A new target is one class with five methods.

The protocol (``sinks.commit``) uses a target so:

    progress   how far a source was written
    prepare    the table is made, or changed, so that it holds the source's columns
    load       Spark tasks write the rows of a batch into load tables, in parallel
    merge      one short transaction: compare the positions, apply the load tables, move the positions
    rows       the rows of the table, for the check `rows_match`

The order of a batch is therefore: data into load tables that nobody reads, then everything at once. A run that is killed
leaves load tables behind, and the next run removes them (``run``).
"""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from importlib import import_module
from typing import Literal, TypeAlias

import psutil
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.fields import DEBEZIUM_TIMESTAMP, MICRO_TIMESTAMP, TIME, TIMESTAMP, Note, unit_of
from zync_assets.errors import SinkError, TargetRefused
from zync_assets.pipeline import Evolve, Sink, SinkMode
from zync_assets.sinks.fold import DELETE, OP, REPLACE, SET

Trait: TypeAlias = Literal["padded", "number"]
LOAD_PREFIX = "zync_load_"
_REMOVALS = (DELETE, REPLACE)
OUTAGE_CURE = "Check the url, and that the target is up."
LOCAL_HOSTS = ("", "localhost", "127.0.0.1", "::1")  # of URLs that need no TLS

_TLS_FAULTS: Mapping[str, str] = {
    "(?i)certificate.*(mismatch|not valid for)": "Write the host's name as the server's certificate has it in the url.",
    "(?i)certificate verify failed|invalid peer certificate": "Name the file of its CA in the url, ?{ca}=FILE.",
    "(?i)wrong.version.number|InvalidContentType|SSL is required but": "Turn TLS on at the server. In a network that you trust,"
    " write ?{off} in the url.",
}
"""Words of the libraries on a TLS connection that no waiting cures → the cure."""

_DAY = 86_400_000_000  # in microseconds
_DAYS = tuple(day.toordinal() - date(1970, 1, 1).toordinal() for day in (date.min, date.max))
_INSTANTS = (_DAYS[0] * _DAY, (_DAYS[1] + 1) * _DAY - 1)
"""The years 1 to 9999, in days and in microseconds since 1970."""

_UNITS: Mapping[str, tuple[pa.DataType, int]] = {
    "time-millis": (pa.time64("us"), 1000),
    "time-micros": (pa.time64("us"), 1),
    **{f"{zone}timestamp-millis": (pa.timestamp("us"), 1000) for zone in ("", "local-")},
    **{f"{zone}timestamp-micros": (pa.timestamp("us"), 1) for zone in ("", "local-")},
}
"""Unit of a number that is a time → the time's type, and the microseconds in the unit. Nanoseconds stay numbers."""
_UNIT_NAMES: Mapping[str, str] = {
    TIME: "time-millis",
    "io.debezium.time.Time": "time-millis",
    "io.debezium.time.MicroTime": "time-micros",
    DEBEZIUM_TIMESTAMP: "timestamp-millis",
    MICRO_TIMESTAMP: "timestamp-micros",
}
"""Note of a number that is a time → its unit, where the field has none."""
_WITHOUT_ZONE = {TIMESTAMP, DEBEZIUM_TIMESTAMP, MICRO_TIMESTAMP}
"""Notes of times that have no zone in the source database, which the lake holds as if they were in UTC."""

OTHER_HOST_SECONDS = 86_400
"""After this many seconds, the load tables of a run on another host count as those of a killed run."""


@dataclass(frozen=True)
class Place:
    """A source of a sink. The target keeps a position for each place."""

    pipeline: str
    sink: str
    source: str

    def __str__(self) -> str:
        return f"sink {self.sink}, {self.source}"

    @property
    def load_prefix(self) -> str:
        """The prefix of the names of the place's load tables."""
        digest = hashlib.blake2b("\0".join((self.pipeline, self.sink, self.source)).encode(), digest_size=6).hexdigest()
        return f"{LOAD_PREFIX}{digest}_"


@dataclass(frozen=True)
class Column:
    """A column of a table. ``field``: the source's field, for comments. ``as_json``: its values come as JSON texts. ``note``:
    Kafka Connect's name of the field's type. ``default``: the value that rows get which are older than the column."""

    name: str
    type: pa.DataType
    field: str = ""
    as_json: bool = False
    note: str = ""
    default: pa.Scalar | None = None


@dataclass(frozen=True)
class TableSpec:
    """The definition of a table for its source. ``name``: as the pipeline file has it, ``schema.table`` or ``table``; ``key``:
    the names of the key columns, which come first; ``mode``: as in the pipeline file; ``is_timed``: whether versions of rows are
    ``fold.timed_versions``, not offsets."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    mode: SinkMode
    comment: str = ""
    is_timed: bool = False

    @property
    def others(self) -> tuple[Column, ...]:
        """The columns outside the key."""
        return tuple(item for item in self.columns if item.name not in self.key)


@dataclass(frozen=True, order=True)
class BadRecord:
    """A record that the target refused. ``key``: its key as text; ``error``: the target's message."""

    partition: int
    offset: int
    key: str
    error: str


@dataclass(frozen=True)
class Progress:
    """How far a source was written. ``next``: partition → next offset; ``origin``: the id of the lake's table that the offsets
    belong to, None before the first batch; ``bad``: the sink's quarantine; ``replays``: how many the raw table had."""

    next: Mapping[int, int] = field(default_factory=dict)
    origin: str | None = None
    bad: tuple[BadRecord, ...] = ()
    replays: int | None = None


@dataclass(frozen=True)
class LoadTable:
    """A load table with its number of rows. ``removes``: whether a row may remove a row of the table, which the changes DELETE
    and REPLACE do. ``partial``: whether a row may leave columns as they are."""

    name: str
    rows: int
    removes: bool = True
    partial: bool = True

    def plus(self, batch: pa.RecordBatch) -> LoadTable:
        """The load table with further rows."""
        removes = self.removes or pc.any(pc.is_in(batch.column(OP), pa.array(_REMOVALS))).as_py() is True
        partial = self.partial or batch.column(SET).null_count < batch.num_rows
        return LoadTable(self.name, self.rows + batch.num_rows, removes, partial)


@dataclass(frozen=True)
class Merge:
    """What one transaction does.

    ``expected`` and ``upcoming``: partition → next offset before and after; before the first batch, ``expected`` is None.
    ``origin``: as in Progress. ``clear``: empties the table and forgets the place first, and the places ``sharers``, which are of
    other sinks of the table. ``cured``: (partition, offset) of the records that leave quarantine.
    """

    place: Place
    spec: TableSpec
    origin: str
    expected: Mapping[int, int | None]
    upcoming: Mapping[int, int]
    loads: tuple[LoadTable, ...] = ()
    bad: tuple[BadRecord, ...] = ()
    clear: bool = False
    cured: tuple[tuple[int, int], ...] = ()
    sharers: tuple[Place, ...] = ()

    @property
    def cleared(self) -> tuple[Place, ...]:
        """The places that are forgotten."""
        return (self.place, *self.sharers) if self.clear else ()


class Target(ABC):
    """A target database. ``url`` comes from the pipeline file and is a secret: no message repeats it.

    An object is made in the driver and again in each Spark task. Methods raise TargetUnavailable for an outage,
    TargetRefused for a record that the target does not take, and TableUnfit for a table that can't hold the source.
    """

    tasks = 64
    """The most Spark tasks, and so load tables, of a batch. SQLite attaches no more than ten files."""

    days = (date.min, date.max)
    """The first and the last day that the target holds. It refuses records with dates outside."""

    infinities = True
    """Whether the target holds infinities. A target without infinities refuses a record that has one."""

    name_limit: tuple[int, str] | None = None
    """The length of the longest name of a table or column, and whether it counts ``bytes`` or ``characters``; None: no limit."""

    odd_names: re.Pattern[str] | None = None
    odd_instants: re.Pattern[str] | None = None
    """Find a character that no name of a table or column may have; and match a text of Debezium's ZonedTimestamp that a new
    column of it does not take. None: any may be there."""

    ignores_case = False
    """Whether two names of columns that differ in case alone are one name."""

    has_versions = False
    """Whether a table keeps a version of each row, and the row with the highest one counts, whichever comes last."""

    whole_records = False
    """Whether the target takes records as the source has them: the columns ``kafka``, ``key`` and ``value``, in the order of
    (partition, offset), in one task. Such a target appends, and has no key."""

    def __init__(self, url: str) -> None:
        self.url = url

    def is_native(self, kind: pa.DataType) -> bool:
        """Whether the target stores a type as it is. Values of other types come as JSON texts."""
        return not pa.types.is_nested(kind)

    @contextmanager
    def session(self) -> Generator[None]:
        """The calls within share a connection, if the target is a database. To open a connection takes long on some targets."""
        yield

    @contextmanager
    def run(self, place: Place) -> Generator[str]:
        """The time of one batch: removes the load tables of killed runs, and yields a prefix for the names of load tables. A
        failed batch loses its load tables. The names tell the process of their run. A target that can hold a lock for the time of
        a run does so instead."""
        if dead := self.dead_loads(place):
            self.drop(dead)
        run = run_name(place)
        try:
            yield run
        except Exception:
            # The process lives on, so that no later run would take them for a killed run's.
            self.drop_loads(run)
            raise

    def drop_loads(self, run: str) -> None:
        """Remove the load tables of a run, if the target can be reached."""
        with suppress(SinkError):
            if names := [name for name in self.tables() if name.startswith(run)]:
                self.drop(names)

    def apply(self, merge: Merge, name: str, rows: Iterator[pa.RecordBatch]) -> int:
        """Load and merge rows in one task; returns their number. Raises as ``load`` and ``merge``. Refused rows leave nothing."""
        try:
            load = self.load(merge.spec, name, rows)
            self.merge(replace(merge, loads=(load,)))
        except TargetRefused:
            self.drop_loads(name)
            raise
        return load.rows

    def dead_loads(self, place: Place) -> list[str]:
        """The load tables of killed runs."""
        names = load_names(self.tables(), place)
        return [name for name in names if not is_alive(name.removeprefix(place.load_prefix))]

    def tables(self) -> Sequence[str]:
        """The names of the target's tables, load tables among them."""
        return ()

    def drop(self, names: Sequence[str]) -> None:
        """Remove load tables. ``names``: some of the names in ``tables``."""
        raise NotImplementedError

    def has_table(self, spec: TableSpec) -> bool:
        """Whether the table is there. A target that can't tell says yes."""
        return True

    def columns_of(self, spec: TableSpec, trait: Trait) -> frozenset[str]:
        """The table's columns that are ``padded``, and ignore spaces at the ends of texts; or that have a ``number``."""
        return frozenset()

    def past_places(self, place: Place, spec: TableSpec, origin: str, writers: Mapping[Place, bool]) -> Sequence[Place]:
        """The places that wrote the source to this target before, if the table has records of it. A sink, or its pipeline, may
        have been renamed. ``origin``: as in Progress. ``writers``: the places of the pipeline file, whose sinks do not count, and
        whether each writes the table. A place without a sink: no writer of the table has a position of its records' topic."""
        return ()

    @abstractmethod
    def progress(self, place: Place) -> Progress:
        """How far the source was written. Creates nothing."""

    @abstractmethod
    def prepare(self, spec: TableSpec, *, create: bool, evolve: Evolve) -> None:
        """Make the table fit, as ``pipeline.Evolve`` says. Raises TableUnfit with the DDL that the sink may not run."""

    @abstractmethod
    def load(self, spec: TableSpec, name: str, rows: Iterator[pa.RecordBatch]) -> LoadTable:
        """Write rows into a new load table, in a Spark task. ``rows``: the table's columns, and the marks of ``fold``."""

    def appends(self, spec: TableSpec, *, whole: bool) -> bool:
        """Whether ``append`` takes the place of ``load`` and ``merge``. ``whole``: whether no record leaves a column out."""
        return False

    def append(self, merge: Merge, rows: Iterator[pa.RecordBatch]) -> int:
        """Append rows, one for each record in any order, and move the positions, in a Spark task; returns the number of rows.
        Raises as ``merge``."""
        raise NotImplementedError

    @abstractmethod
    def merge(self, merge: Merge) -> None:
        """Apply a batch in a single transaction. Raises CommitConflict if the positions are not the expected ones."""

    @abstractmethod
    def rows(self, spec: TableSpec) -> Iterator[pa.RecordBatch]:
        """The rows of the table, with values as ``load`` gets them."""


def tls_fault(error: SinkError, ca: str, off: str) -> SinkError:
    """The error, or an error with the cure if TLS failed. ``ca``: the option of the URL for a CA's file; ``off``: the option
    that turns TLS off.

    >>> str(tls_fault(SinkError("certificate verify failed"), "ca_cert", "secure=false"))
    'certificate verify failed. Name the file of its CA in the url, ?ca_cert=FILE.'
    """
    text = str(error)
    cure = next((cure for words, cure in _TLS_FAULTS.items() if re.search(words, text)), None)
    if cure is None or isinstance(error, TargetRefused):
        return error
    return SinkError(f"{text.rstrip('.')}. {cure.format(ca=ca, off=off)}")


def gathered(rows: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """Batches of some ``size`` bytes."""
    batches: list[pa.RecordBatch] = []
    count = 0
    for batch in rows:
        batches.append(batch)
        count += batch.nbytes
        if count >= size:
            yield pa.concat_batches(batches)
            batches, count = [], 0
    if batches:
        yield pa.concat_batches(batches)


def time_of(item: pa.Field, note: Note) -> tuple[pa.DataType, int]:
    """The type of a field in a target, and the microseconds in its unit if it is a number that is a time; 0 for none."""
    kind = item.type
    if pa.types.is_integer(kind):
        return _UNITS.get(unit_of(item) or _UNIT_NAMES.get(note.name, ""), (kind, 0))
    if pa.types.is_list(kind) and pa.types.is_timestamp(kind.value_type) and note.of_items.name in _WITHOUT_ZONE:
        return pa.list_(pa.timestamp("us")), 0
    return (pa.timestamp("us") if note.name in _WITHOUT_ZONE and pa.types.is_timestamp(kind) else kind), 0


def in_units(values: pa.Array, units: int, column: Column) -> pa.Array:
    """Numbers in a unit as microseconds. TargetRefused for a number that is too large."""
    try:
        return pc.multiply_checked(values.cast(pa.int64()), units)
    except pa.ArrowInvalid:
        raise TargetRefused(f"the column {column.name} has a time that is too far away") from None


def checked_times(values: pa.Array, column: Column) -> pa.Array:
    """The values. TargetRefused for a time outside a day, and for a day outside the years 1 to 9999: Python has neither."""
    kinds, kind = pa.types, values.type
    if not kinds.is_temporal(kind) or values.null_count == len(values):
        return values
    first, last = (0, _DAY - 1) if kinds.is_time(kind) else _DAYS if kinds.is_date(kind) else _INSTANTS
    ends = pc.min_max(values.cast(pa.int32() if kinds.is_date32(kind) else pa.int64()).cast(pa.int64()))
    low, high = ends["min"].as_py(), ends["max"].as_py()
    if first <= low and high <= last:
        return values
    expectation = "a time of day from 0 to 24 hours" if kinds.is_time(kind) else "a time in the years 1 to 9999"
    number = f"{low if low < first else high} {'days' if kinds.is_date(kind) else 'microseconds'}"
    raise TargetRefused(f"the column {column.name} is {number}, which is not {expectation}")


def named(spec: TableSpec) -> tuple[str, str | None]:
    """Name and schema of a table."""
    schema, _, name = spec.name.rpartition(".")
    return name, schema or None


def load_names(names: Sequence[str], place: Place) -> list[str]:
    """The load tables of a place among the names of tables."""
    return [name for name in names if name.startswith(place.load_prefix)]


def run_name(place: Place) -> str:
    """A prefix for the names of a run's load tables."""
    return f"{place.load_prefix}{process_mark()}_"


def counted(rows: Iterator[pa.RecordBatch], counts: list[int]) -> Iterator[pa.RecordBatch]:
    """The batches. Their numbers of rows go into ``counts``."""
    for batch in rows:
        counts.append(batch.num_rows)
        yield batch


def process_mark() -> str:
    """A text for the names of load tables: the host, the process, its start, the present time, and a random number."""
    process = psutil.Process()
    parts = (process.pid, int(process.create_time()), int(time.time()))
    return "_".join([_host(), *(f"{part:x}" for part in parts), secrets.token_hex(4)])


def is_alive(mark: str) -> bool:
    """Whether the run that made a mark is still running. A run on another host counts as alive for a day."""
    host, pid, began_at, made_at, *_ = (*mark.split("_"), "", "", "", "")
    try:
        if host != _host():
            return time.time() - int(made_at, 16) < OTHER_HOST_SECONDS
        return int(psutil.Process(int(pid, 16)).create_time()) == int(began_at, 16)
    except (psutil.NoSuchProcess, ValueError):
        return False
    except psutil.AccessDenied:
        return True


def _host() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


CLASSES: Mapping[str, str] = {
    kind: f"zync_assets.sinks.{kind}:{kind.title()}Target"
    for kind in ("sqlite", "postgres", "clickhouse", "files", "mysql", "databend")
}
"""Type of a sink → its class."""


def open_target(sink: Sink) -> Target:
    """The target of a sink. Opens no connection yet. SinkError if the class can't be imported."""
    module, _, name = CLASSES.get(sink.kind, sink.kind).partition(":")
    try:
        return getattr(import_module(module), name)(sink.url)
    except (ImportError, AttributeError) as error:
        extra = f" Install it: pip install 'zync-assets[{sink.kind}]'." if sink.kind in CLASSES else ""
        raise SinkError(f"sink {sink.name}, type {sink.kind}: {error}.{extra}") from None
