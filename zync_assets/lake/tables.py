"""Delta tables by their log alone: open, list files, commit. No record is read here.

The protocol (design, section 3): open the table, compare, commit on that same object with the same application ids.
delta-rs then finds every other commit since that names one of the ids, and refuses. A commit that raised may still have
happened, since delta-rs works on after it (checkpoints): so the table is opened again and looked at.

Delta protocol: "Transaction Identifiers", "Add File and Remove File", "Per-file Statistics".
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from zync_assets.errors import CommitConflict, LakeError, SchemaError, TableUnsupported
from zync_assets.lake import log, storage, stores, tampering
from zync_assets.lake.log import EPOCH, TOKEN, DataFile, LakeTable, Order

_READER_FEATURES = frozenset({"timestampNtz"})
_FORBIDDEN = ("delta.constraints.", "delta.appendOnly", "delta.enableChangeDataFeed", "delta.columnMapping.mode")
_FORBIDDEN_OFF = ("false", "none")
"""Table properties that ask a writer for work that zync does not do."""
_versions: dict[str, int] = {}
"""Place → the newest version of its table that this process has seen: a table does not vanish, nor go back."""
_newest: dict[str, tuple[LakeTable, log.Mark]] = {}
"""Place → the table object opened last, and the mark of its version's log entry."""
_handovers: dict[str, tuple[DeltaTable, log.Mark]] = {}
"""Place → delta-rs's object of a version that a commit was based on, and the mark of that version's log entry."""
_WITHOUT = (
    "Nothing was done. Restore the table to a version from before that feature, or rewrite it without it; or use a newer zync"
    " that knows it."
)
UNCOMMITTED_HOURS = 6 * 24
"""How long files may wait for their commit. ``compaction`` takes files that no commit names a day later: clocks differ, and a
commit takes its time."""
YOUNG_HOURS = 24
"""Age of a file up to which its removal leaves no lasting tombstone: ``compaction`` goes by the time when it was written."""
_HOOKS = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
"""delta-rs's work after a commit. Its own clean-up of the log would list all entries at each commit; ``compaction`` cleans
the log instead."""


def open_table(uri: str) -> LakeTable | None:
    """The table at a place; None for an empty place.

    Raises TableUnsupported for a table that this package could misread, or whose progress could get lost. Raises LakeError
    for a table that this process has seen and that has vanished or is at an older version now. Raises LakeError also for a
    folder that this user may not read. Returns the known object if its version is still the newest, without a read of the log.
    """
    try:
        return _open_table(uri)
    except OSError as error:
        raise _unreadable(uri, error) from None


def _open_table(uri: str) -> LakeTable | None:
    latest = _newest.get(uri)
    newest = _versions.get(uri, 0)  # before the look: another thread may see a newer one meanwhile
    if latest is not None and latest[0].version >= newest and log.newest_mark(uri, latest[0].version) == latest[1]:
        return latest[0]
    system, path = storage.filesystem(uri)
    if system.get_file_info(storage.join(path, "_delta_log")).type.name == "NotFound":
        return _check_absence(uri)
    try:
        delta = _advance(uri) or DeltaTable(uri, storage_options=storage.delta_options(uri))
    except TableNotFoundError:
        return _check_absence(uri)
    except (DeltaError, OSError) as error:
        text = str(error)
        if "Unsupported" in text or "olumn mapping" in text:
            raise TableUnsupported(
                f"table {uri} uses a feature of the Delta protocol that is not known here: {stores.first_line(error)}."
                f" {_WITHOUT}"
            ) from None
        raise _unreadable(uri, error) from None
    protocol = delta.protocol()
    features = set(protocol.reader_features or ())
    if protocol.min_reader_version not in (1, 3) or not features <= _READER_FEATURES:
        raise TableUnsupported(
            f"table {uri} asks for reader version {protocol.min_reader_version} with {sorted(features)}; files are read here"
            f" past Delta's own reader, which knows none of these. {_WITHOUT}"
        )
    if "delta.setTransactionRetentionDuration" in delta.metadata().configuration:
        raise TableUnsupported(
            f"table {uri} sets delta.setTransactionRetentionDuration, which would remove the record of what was ingested."
            " Unset that property."
        )
    if delta.version() < newest:
        raise LakeError(
            f"table {uri} went back: it is at version {delta.version()}, and was at {newest} when this process saw it"
            " last. Another program took the newer part of its log. Put that back; what is there is not to be trusted."
        )
    _versions[uri] = max(delta.version(), _versions.get(uri, 0))
    table = LakeTable(uri, delta)
    _remember(table, latest)
    return table


def _advance(uri: str) -> DeltaTable | None:
    """delta-rs's object of an older version, moved to the newest version. The object reads only the later log entries. None if
    there is no object, or if another log has replaced the object's log."""
    delta, mark = _handovers.pop(uri, (None, None))
    if delta is None or log.mark(uri, delta.version()) != mark:
        return None
    try:
        delta.update_incremental()
    except (DeltaError, OSError):
        return None  # the caller reads the whole log, and its error names the problem
    return delta


def _pass_on(table: LakeTable) -> None:
    """Keep the object that a commit was made on, for the next opening of the table."""
    latest = _newest.get(table.uri)
    if latest is not None and latest[0] is table:
        _handovers[table.uri] = table.give_away(), latest[1]


def _drop(table: LakeTable) -> None:
    """Read the log the next time, after a failed commit on an object: a newer version may hide behind a removed entry, and
    the object may hold settings of the store that no longer hold."""
    latest = _newest.get(table.uri)
    if latest is not None and latest[0] is table:
        _newest.pop(table.uri, None)  # another thread's failed commit may have dropped the object meanwhile
    _handovers.pop(table.uri, None)


def _remember(table: LakeTable, before: tuple[LakeTable, log.Mark] | None) -> None:
    mark = log.mark(table.uri, table.version)
    if before is not None and log.mark(table.uri, before[0].version) == before[1]:
        table.carry(before[0])
    if mark is None:
        _newest.pop(table.uri, None)
    else:
        _newest[table.uri] = table, mark


def _check_absence(uri: str) -> None:
    if uri in _versions:
        raise LakeError(
            f"table {uri} existed before, and is missing now: its folder was moved or deleted, or is not mounted. Put the folder"
            " back and run again. If the table was deleted on purpose, restart this program."
        )


def forget(uri: str) -> None:
    """Forget the versions of the tables at a place. The caller deletes the tables on purpose."""
    for place in [place for place in _versions if place == uri or place.startswith(f"{uri}/")]:
        del _versions[place]
        _newest.pop(place, None)
        _handovers.pop(place, None)


def remove_table(uri: str) -> None:
    """Remove a table that nobody needs any more."""
    storage.remove_folder(uri)
    forget(uri)


def forget_versions() -> None:
    """Forget the known versions, at the begin of a Spark task.

    A worker process may have served another command before, and the lake may have been removed and created again since. The
    process that runs the command guards against older versions.
    """
    _versions.clear()


def _check_writable(table: LakeTable) -> None:
    """Raises an error for a table that asks a writer for more than zync does (Delta protocol, "Requirements for Writers")."""
    for name, value in sorted(table.metadata.configuration.items()):
        if name.startswith(_FORBIDDEN) and value.lower() not in _FORBIDDEN_OFF:
            raise TableUnsupported(
                f"table {table.uri} has the property {name} = {value}, and this version of zync can't obey it."
                " Nothing was committed. Unset the property."
            )


def _check_fresh(uri: str, files: Sequence[DataFile]) -> None:
    """Refuse files so old that a clean-up may have removed them, or may be about to remove them.

    The files are old if the process was stopped, or the machine slept, for days before the commit.
    """
    age = (time.time() - min((item.arrival for item in files), default=time.time())) / 3600
    if age > UNCOMMITTED_HOURS:
        raise CommitConflict(
            f"table {uri}: files that were written {age / 24:.0f} days ago are not committed, because a clean-up may have"
            " removed them since. Nothing was committed. Run the command again: it writes new files"
        )


def _check_presence(uri: str, files: Sequence[DataFile]) -> None:
    """Refuse files that are gone. Another program's VACUUM with a short retention removes files that wait for their commit."""
    if (path := storage.absent_file(uri, [item.path for item in files])) is not None:
        raise CommitConflict(
            f"table {uri}: file {path} was removed before its commit, as by a VACUUM of less than a week. Nothing was"
            " committed. Run the command again: it writes new files"
        )


CONFIGURATION: Mapping[str, str | None] = {"delta.dataSkippingNumIndexedCols": "-1"}
"""delta-rs reads the statistics of the first 32 columns alone unless a table says otherwise. The order of a raw table is its last
column."""


def create_table(
    uri: str,
    schema: pa.Schema,
    description: str,
    files: Sequence[DataFile],
    numbers: Mapping[str, int],
    partition_by: Sequence[str] = (),
) -> None:
    """Create a table whose first commit holds files and numbers together; CommitConflict if the table exists already.

    The commit has no retries: delta-rs would retry a lost creation as a second commit, and both commits would count.
    """
    _check_fresh(uri, files)
    storage.make_folder(uri)
    token = uuid.uuid4().hex
    try:
        create_table_with_add_actions(
            uri,
            Schema.from_arrow(schema),
            [_add(item) for item in files],
            mode="error",
            partition_by=list(partition_by),
            description=description,
            configuration=CONFIGURATION,
            commit_properties=_properties({**numbers, **tampering.first_numbers(files)}, token, retries=0),
            post_commithook_properties=_HOOKS,
            storage_options=storage.delta_options(uri),
        )
    except (DeltaError, OSError) as error:
        table = open_table(uri)
        if table is None:
            raise _lake_error(uri, error, "it could not be created") from None
        if not _has_commit(table, token, -1):
            raise CommitConflict(f"table {uri} was created by another writer at the same moment; run again") from error


def commit(
    table: LakeTable,
    files: Sequence[DataFile],
    numbers: Mapping[str, int],
    *,
    removals: Sequence[DataFile] = (),
    partition_by: Sequence[str] = (),
    rewritten: bool = False,
) -> None:
    """Add and remove files and set numbers, in one atomic commit on the opened object.

    ``rewritten``: the added files hold exactly the records of the removed files. Raises CommitConflict if another writer
    committed one of the numbers since the table was opened, or if files are older than UNCOMMITTED_HOURS. Also raises it if
    the log was cleaned so far that conflicts can't be found. Raises TableDamaged if another program changed the files.
    """
    _check_writable(table)
    _check_fresh(table.uri, files)
    _check_presence(table.uri, files)
    if files or removals:
        tampering.check(table)
    now = int(time.time() * 1000)
    numbers = {**numbers, **tampering.sum_numbers(table, numbers, files, removals)}
    before, token = table.version, uuid.uuid4().hex
    try:
        with table.lock:
            table.load()
            table.delta.create_write_transaction(
                [
                    RemoveAction(item.path, not rewritten, _removal_time(item, now), partition_values=_group(item))
                    for item in removals
                ]
                + [_add(item, not rewritten) for item in files],
                mode="append",
                schema=table.delta_schema,
                partition_by=list(partition_by),
                commit_properties=_properties(numbers, token),
                post_commithook_properties=_HOOKS,
            )
            _versions[table.uri] = max(before + 1, _versions.get(table.uri, 0))
            _pass_on(table)
    except (DeltaError, OSError) as error:
        _drop(table)
        newest = open_table(table.uri)
        if newest is not None and _has_commit(newest, token, before):
            return
        _check_refusal(table, newest, error)
        if isinstance(error, CommitFailedError):
            raise CommitConflict(f"table {table.uri}: another writer committed first; run again") from error
        _check_log(table, newest, error)
        raise _lake_error(table.uri, error, "the commit failed and nothing of it is visible") from None


def widen(table: LakeTable, columns: pa.Schema) -> LakeTable:
    """Give the table some ``columns``, in a separate commit that touches no file. Returns the table as it is after that commit.

    Columns are added, nested ones too, and get wider types; those that ``columns`` lacks stay. CommitConflict if another
    writer changed the schema since the table was opened. ``create_write_transaction`` leaves a table's schema as it was
    even when the files are wider, and ``alter.add_columns`` refuses another type: an overwrite of no rows does it.
    """
    schema = storage.wider_schema(table.schema, columns)
    if Schema.from_arrow(schema).to_json() == table.delta_schema.to_json():
        return table
    before, token = table.version, uuid.uuid4().hex
    try:
        write_deltalake(
            # A fresh object, because write_deltalake moves its object to the new version, and ``LakeTable`` never changes.
            DeltaTable(table.uri, version=before, storage_options=storage.delta_options(table.uri)),
            schema.empty_table(),
            mode="overwrite",
            schema_mode="overwrite",
            predicate="false",
            partition_by=table.metadata.partition_columns or None,
            commit_properties=_properties({}, token),
            post_commithook_properties=_HOOKS,
        )
    except (DeltaError, OSError) as error:
        _drop(table)
        newest = open_table(table.uri)
        if newest is not None and _has_commit(newest, token, before):
            return newest
        _check_refusal(table, newest, error)
        if isinstance(error, CommitFailedError):
            raise CommitConflict(f"table {table.uri}: another writer changed the schema first; run again") from error
        _check_log(table, newest, error)
        raise SchemaError(f"table {table.uri}: its columns can't be changed: {error}") from error
    newest = open_table(table.uri)
    if newest is None:
        raise LakeError(f"table {table.uri} vanished")
    return newest


def _unreadable(uri: str, error: Exception) -> LakeError:
    return _lake_error(uri, error, "the Delta log can't be read", f" {storage.log_cure(uri)}")


def _lake_error(uri: str, error: Exception, problem: str, cure: str = "") -> LakeError:
    return storage.failure(uri, error, f"table {uri}: {problem}: {stores.first_line(error)}.{cure}")


def _check_refusal(table: LakeTable, newest: LakeTable | None, error: Exception) -> None:
    """TableUnsupported if a commit failed and no other commit came first: the table asks for a feature that delta-rs can't
    write."""
    if isinstance(error, CommitFailedError) and newest is not None and newest.version == table.version:
        raise TableUnsupported(
            f"table {table.uri} could not be written, and nothing was committed: {stores.first_line(error)}. {_WITHOUT}"
        ) from None


def _check_log(table: LakeTable, newest: LakeTable | None, error: Exception) -> None:
    """CommitConflict if a commit failed because a clean-up removed log entries. delta-rs looks for conflicts in the entry of
    the version that the commit is based on, and in all later entries."""
    if newest is None or newest.version == table.version:
        return
    if not log.are_whole(table.uri, table.version, newest.version):
        raise CommitConflict(
            f"table {table.uri}: the commit is based on version {table.version}, the table is at version {newest.version},"
            " and log entries between them were cleaned up. Nothing of the commit is visible; run again"
        ) from error


def _has_commit(table: LakeTable, token: str, before: int) -> bool:
    """Whether one of the commits after version ``before`` carries the token. The numbers of the commit don't show it: another
    writer that began at the same state sets the same numbers. A commit need not add a file either."""
    with table.lock:
        commits = table.delta.history(max(1, table.version - before))
    return any(item.get(TOKEN) == token for item in commits)


def _properties(numbers: Mapping[str, int], token: str, retries: int | None = None) -> CommitProperties:
    return CommitProperties(
        max_commit_retries=retries,
        app_transactions=[Transaction(name, value) for name, value in numbers.items()],
        custom_metadata={TOKEN: token},
    )


def _removal_time(item: DataFile, now: int) -> int:
    """The time of a tombstone. At one commit a second a week of tombstones would be in each checkpoint of the log: 0 makes
    the next checkpoint leave out the tombstone of a young file."""
    young = item.commit_time is not None and now - item.commit_time < YOUNG_HOURS * 3_600_000
    return 0 if young else now


def _group(item: DataFile) -> dict[str, str | None]:
    return {} if item.group is None else {"topic": item.group}


def _add(item: DataFile, changes_data: bool = True) -> AddAction:
    low: dict[str, object] = {}
    high: dict[str, object] = {}
    if item.partition is not None:
        low = {"partition": item.partition, "offset": item.first}
        high = {"partition": item.partition, "offset": item.last}
    if item.min_time is not None and item.max_time is not None:
        low["time"], high["time"] = _iso(item.min_time), _iso(item.max_time)
    bounds = (low, item.min_order), (high, item.max_order)
    # The files of a view's state have an order, and no offsets.
    least, most = ({**({"kafka": place} if place else {}), **_order(order)} for place, order in bounds)
    stats = {"numRecords": item.records} | ({"minValues": least, "maxValues": most} if least else {})
    return AddAction(item.path, item.size, _group(item), int(time.time() * 1000), changes_data, json.dumps(stats))


def _order(order: Order | None) -> dict[str, object]:
    return {} if order is None else {"order": {"high": order[0], "low": order[1]}}


def _iso(millis: int) -> str:
    moment = EPOCH + timedelta(milliseconds=millis)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{millis % 1000:03d}Z"
