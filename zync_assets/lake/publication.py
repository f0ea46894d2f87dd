"""The progress of publish for a staging pool, in a table without rows. Delta ``txn`` actions hold the values.

    zync:window:<topic>:<partition>      the end of the last window that a publisher announced
    zync:verified:<topic>:<partition>    below this offset Kafka's records equal staging's
    zync:topic:<topic>:<topic id>        the topic that is published to (its version says nothing)
    zync:named:<topic>                   1 once such an id is known
    zync:schema:<topic>:<side>:<id>:<digest>  records were announced whose keys or values have this schema under this id of
                                         the registry (its version says nothing)

A publisher announces a window before it sends the window's first record. If the window's end is past the verified offset, a
publisher stopped uncleanly, and its records may still surface in the topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from threading import Lock

import pyarrow as pa

from zync_assets.errors import CommitConflict, LakeError
from zync_assets.lake import log, storage, tables
from zync_assets.lake.log import LakeTable

_SCHEMA = pa.schema([("topic", pa.string())])


@dataclass(frozen=True)
class WrittenSchema:
    """A schema of the keys or the values (``side``) of an output, and the id that the registry had for it. A registry that
    was created again may have another id for the schema, and another schema under the id."""

    side: str
    id: int
    schema: str


@dataclass(frozen=True)
class PublishState:
    """How far one output partition has been published."""

    table: LakeTable | None = field(repr=False)
    topic: str
    partition: int
    window: int | None
    verified_end: int | None

    def has_topic(self) -> bool:
        return self.table is not None and self.table.number(f"zync:named:{self.topic}") is not None

    def belongs_to(self, topic_id: str) -> bool:
        return self.table is not None and self.table.number(f"zync:topic:{self.topic}:{topic_id}") == 0

    def has_schema(self, schema: WrittenSchema) -> bool:
        """Whether records were announced that have this schema under this id."""
        return self.table is not None and self.table.number(_schema_number(self.topic, schema)) is not None


def open_publish_state(lake: str, pool: str, topic: str, partition: int = 0) -> PublishState:
    """How far an output partition has been published. All fields are None if nothing was published."""
    return publish_state(open_published(lake, pool), topic, partition)


def open_published(lake: str, pool: str) -> LakeTable | None:
    """The table with the progress of a pool's publish; None where nothing was published.

    Many threads ask for the table at the same time. A lock lets one thread after the other ask. Without the lock, each thread
    would read the whole log.
    """
    uri = storage.publish_uri(lake, pool)
    with _opening_locks.setdefault(uri, Lock()):
        return tables.open_table(uri)


def publish_state(table: LakeTable | None, topic: str, partition: int = 0) -> PublishState:
    """How far an output partition has been published, by the table of its pool."""
    if table is None:
        return PublishState(None, topic, partition, None, None)
    place = f"{topic}:{partition}"
    return PublishState(
        table, topic, partition, table.number(f"zync:window:{place}"), table.number(f"zync:verified:{place}")
    )


def verified_ends(lake: str, pool: str, topics: Iterable[str]) -> dict[tuple[str, int], int]:
    """(published output topic, partition) → its verified offset. Below this offset, Kafka's records equal staging's."""
    table = tables.open_table(storage.publish_uri(lake, pool))
    return {(topic, p): offset for topic in topics for p, offset in _verified_ends(table, topic)}


def verified_parts(table: LakeTable | None, topic: str) -> dict[int, int]:
    """Partition → its verified offset, of a published output topic, by the table of its pool."""
    return dict(_verified_ends(table, topic))


def _verified_ends(table: LakeTable | None, topic: str) -> Iterator[tuple[int, int]]:
    if table is None:
        return
    # The first commit of a topic sets the numbers of all its partitions.
    for partition in count():
        offset = table.number(f"zync:verified:{topic}:{partition}")
        if offset is None:
            return
        yield partition, offset


def rollback_error(
    pool: str, topic: str, verified_offsets: Mapping[int, int], ends: Mapping[int, int], recreate: str
) -> LakeError | None:
    """The error for a staging table that lacks published records; None if no published record is missing.

    ``verified_offsets``: partition → the offset below which Kafka's records equal staging's; ``ends``: partition → the offset
    after the last staged record; ``recreate``: the command that publishes all of staging again.
    """
    short_partitions = sorted(p for p, offset in verified_offsets.items() if offset and ends.get(p, -1) < offset)
    if not short_partitions:
        return None
    partition = short_partitions[0]
    verified_end, end = verified_offsets[partition], ends.get(partition)
    staging_state = "is not there" if end is None else f"ends at offset {end}"
    place = topic if len(verified_offsets) == 1 else f"{topic}, partition {partition},"
    otherwise = (
        "to begin anew, give its inputs another pool, and the output another staging pool and another topic."
        if end is None
        else f"to go on from what staging holds, publish all of it anew: {recreate}"
    )
    return LakeError(
        f"pool {pool}: {place} was published up to offset {verified_end}, and the staging table {staging_state}: it went"
        f" back to an older version, or is gone. Nothing was done. Put the newer table back; or, {otherwise}"
    )


def commit_publish_state(
    lake: str,
    pool: str,
    before: PublishState,
    *,
    window: int,
    verified_end: int,
    topic_id: str,
) -> PublishState:
    """``commit_publish_states`` for one partition, without schemas."""
    marks = {before.partition: (window, verified_end)}
    return commit_publish_states(lake, pool, [before], marks, topic_id)[before.partition]


def commit_publish_states(
    lake: str,
    pool: str,
    before: Sequence[PublishState],
    marks: Mapping[int, tuple[int, int]],
    topic_id: str,
    *,
    replacement: bool = False,
    schemas: Iterable[WrittenSchema] = (),
) -> dict[int, PublishState]:
    """Set the windows and verified offsets of some partitions of an output, and the topic that they are for. Returns the new
    states by partition.

    ``before``: the states of the partitions in one version of the table; ``marks``: partition → its window and verified
    offset; ``replacement``: the topic was created again on purpose; ``schemas``: those of the records up to the windows.
    Raises CommitConflict if another publisher of one of the partitions committed since ``before`` was opened.
    """
    topic, table, numbers = before[0].topic, before[0].table, dict[str, int]()
    for partition, (window, verified_end) in marks.items():
        place = f"{topic}:{partition}"
        numbers |= {f"zync:window:{place}": window, f"zync:verified:{place}": verified_end}
    if replacement or not before[0].belongs_to(topic_id):
        numbers |= {f"zync:topic:{topic}:{topic_id}": 0, f"zync:named:{topic}": 1}
    numbers |= {_schema_number(topic, schema): 0 for schema in schemas if not before[0].has_schema(schema)}
    if table is None:
        uri = storage.publish_uri(lake, pool)
        # The threads of many topics come at once. The first of them creates the table.
        with _creation_locks.setdefault(uri, Lock()):
            table = open_published(lake, pool)
            if table is None:
                try:
                    tables.create_table(uri, _SCHEMA, f"What is published of {pool}", [], numbers)
                except CommitConflict:
                    # Another process published another topic of the pool first. A topic of two publishers is found below.
                    if (table := open_published(lake, pool)) is None:
                        raise
                else:
                    opened = open_published(lake, pool)
                    return {item.partition: publish_state(opened, topic, item.partition) for item in before}
        if publish_state(table, topic).has_topic():
            raise CommitConflict(f"table {uri}: another publisher of topic {topic} was first; run again")
    opened = _commit_together(table, numbers)
    return {item.partition: publish_state(opened, topic, item.partition) for item in before}


@dataclass
class _Entry:
    """Numbers to commit, on the table as a publisher opened it. ``after``: the table after the commit; ``error``: why there
    was no commit."""

    table: LakeTable
    numbers: Mapping[str, int]
    is_done: bool = False
    after: LakeTable | None = None
    error: Exception | None = None


class _Commits:
    """The commits of this process's threads on one table. Entries that arrive during a commit go into the next commit."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._queue_lock = Lock()
        self._queue: list[_Entry] = []
        self._numbers: dict[int, frozenset[str]] = {}
        """Version of the table → the names of the numbers in its commit."""

    def add(self, entry: _Entry) -> None:
        with self._queue_lock:
            self._queue.append(entry)

    def commit_queue(self) -> None:
        """Commit all entries of the queue. The caller holds ``lock``. An entry without a commit has an error afterwards."""
        with self._queue_lock:
            entries, self._queue = self._queue, []
        try:
            self._commit_entries(entries)
        except BaseException as error:
            # Threads wait for their entries, and would take an entry without an error for a commit.
            for entry in entries:
                if not entry.is_done:
                    interruption = LakeError(f"table {entry.table.uri}: its commit was interrupted; run again")
                    entry.is_done, entry.error = True, error if isinstance(error, Exception) else interruption
            raise

    def _commit_entries(self, entries: Sequence[_Entry]) -> None:
        newest: LakeTable | None = None
        # If the table can't be opened, the commit of each entry gives the reason.
        with suppress(LakeError):
            newest = tables.open_table(entries[0].table.uri) if len(entries) > 1 else None
        together: list[_Entry] = []
        numbers: dict[str, int] = {}
        for entry in entries:
            if newest is not None and self._is_untouched(entry, newest) and numbers.keys().isdisjoint(entry.numbers):
                together.append(entry)
                numbers |= entry.numbers
        if newest is not None and len(together) > 1:
            self._commit(newest, numbers, together)
        for entry in entries:
            if not entry.is_done:
                self._commit(entry.table, entry.numbers, [entry])

    def _is_untouched(self, entry: _Entry, newest: LakeTable) -> bool:
        """Whether all commits since the entry's table was opened are known to set other numbers than the entry. The entry can
        then be committed on the newest table, and meets no other conflicts than on its own table."""
        if entry.table.metadata.id != newest.metadata.id or entry.table.version > newest.version:
            return False
        later = range(entry.table.version + 1, newest.version + 1)
        if len(later) > _VERSIONS:
            return False
        self._read(newest.uri, [version for version in later if version not in self._numbers])
        number_names = [self._numbers.get(version) for version in later]
        return all(names is not None and names.isdisjoint(entry.numbers) for names in number_names)

    def _read(self, uri: str, versions: Sequence[int]) -> None:
        """Read the commits of other processes. The log may lack the entries of old versions, which stay unknown.

        The entries of a log that can't be read stay unknown too: an entry of the queue is then committed alone.
        """
        if versions:
            span = range(versions[0], versions[-1] + 1)
            with suppress(FileNotFoundError, LakeError, ValueError):
                for version, entry in zip(span, log.entries(uri, span[0], span[-1]), strict=True):
                    self._note(version, entry.numbers)

    def _note(self, version: int, numbers: Iterable[str]) -> None:
        self._numbers[version] = frozenset(numbers)
        self._numbers.pop(version - _VERSIONS, None)

    def _commit(self, table: LakeTable, numbers: Mapping[str, int], entries: Sequence[_Entry]) -> None:
        """One commit. Where several entries have a conflict, each is left to be committed alone."""
        try:
            tables.commit(table, [], numbers)
            newest = tables.open_table(table.uri)
        except CommitConflict as error:
            if len(entries) == 1:
                entries[0].is_done, entries[0].error = True, error
            return
        except Exception as error:
            for entry in entries:
                entry.is_done, entry.error = True, error
            return
        for entry in entries:
            entry.is_done, entry.after = True, newest
        if newest is not None and newest.version == table.version + 1:
            self._note(newest.version, numbers)


_VERSIONS = 1000
"""The most versions of a table whose numbers a process keeps."""
_commits: dict[tuple[str, str], _Commits] = {}
"""(place, id) of a table → its commits."""
_opening_locks: dict[str, Lock] = {}
"""Place of a table → held while it is opened."""
_creation_locks: dict[str, Lock] = {}
"""Place of a table → held while it is created."""


def _commit_together(table: LakeTable, numbers: Mapping[str, int]) -> LakeTable | None:
    """``tables.commit`` of numbers; the table after that. Threads that come while a commit is under way share the next one."""
    commits, entry = _commits.setdefault((table.uri, str(table.metadata.id)), _Commits()), _Entry(table, numbers)
    commits.add(entry)
    with commits.lock:
        if not entry.is_done:
            commits.commit_queue()
    if entry.error is not None:
        raise entry.error
    if not entry.is_done:
        raise LakeError(f"table {table.uri}: the thread that commits for others left an entry out; run again")
    return entry.after


def _schema_number(topic: str, schema: WrittenSchema) -> str:
    digest = blake2b(schema.schema.encode(), digest_size=8).hexdigest()
    return f"zync:schema:{topic}:{schema.side}:{schema.id}:{digest}"
