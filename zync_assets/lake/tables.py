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
from zync_assets.lake.log import EPOCH, TOKEN, DataFile, Opened, Order

_READER_FEATURES = frozenset({"timestampNtz"})
_FORBIDDEN = ("delta.constraints.", "delta.appendOnly", "delta.enableChangeDataFeed", "delta.columnMapping.mode")
_FORBIDDEN_OFF = ("false", "none")
"""Properties that ask a writer for what is not done here."""
_known: dict[str, int] = {}
"""Place → the newest version of its table that this process has seen: a table does not vanish, nor go back."""
_newest: dict[str, tuple[Opened, log.Mark]] = {}
"""Place → the table object opened last, and the mark of its version's log entry."""
_passed_on: dict[str, tuple[DeltaTable, log.Mark]] = {}
"""Place → delta-rs's object of a version that a commit was based on, and what tells that version."""
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


def open_table(uri: str, version: int | None = None) -> Opened | None:
    """The table at a place; None for an empty place.

    Raises TableUnsupported for a table that this package could misread, or whose progress could get lost. Raises LakeError
    for a table that this process has seen and that has vanished or is at an older version now. Returns the known object if
    its version is still the newest, without a read of the log.
    """
    known = _newest.get(uri) if version is None else None
    newest = _known.get(uri, 0)  # before the look: another thread may see a newer one meanwhile
    if known is not None and known[0].version >= newest and log.newest_mark(uri, known[0].version) == known[1]:
        return known[0]
    system, path = storage.filesystem(uri)
    if system.get_file_info(storage.join(path, "_delta_log")).type.name == "NotFound":
        return _absent(uri)
    try:
        table = _advanced(uri) if version is None else None
        table = table or DeltaTable(uri, version=version, storage_options=storage.delta_options(uri))
    except TableNotFoundError:
        return _absent(uri)
    except (DeltaError, OSError) as error:
        text = str(error)
        if "Unsupported" in text or "olumn mapping" in text:
            raise TableUnsupported(
                f"table {uri} uses a feature of the Delta protocol that is not known here: {stores.first_line(error)}."
                f" {_WITHOUT}"
            ) from None
        raise _failed(uri, error, "the Delta log can't be read", " Restore its files from a copy.") from None
    protocol = table.protocol()
    features = set(protocol.reader_features or ())
    if protocol.min_reader_version not in (1, 3) or not features <= _READER_FEATURES:
        raise TableUnsupported(
            f"table {uri} asks for reader version {protocol.min_reader_version} with {sorted(features)}; files are read here"
            f" past Delta's own reader, which knows none of these. {_WITHOUT}"
        )
    if "delta.setTransactionRetentionDuration" in table.metadata().configuration:
        raise TableUnsupported(
            f"table {uri} sets delta.setTransactionRetentionDuration, which would remove the record of what was ingested."
            " Unset that property."
        )
    if version is None:
        if table.version() < newest:
            raise LakeError(
                f"table {uri} went back: it is at version {table.version()}, and was at {newest} when this process saw it"
                " last. Another program took the newer part of its log. Put that back; what is there is not to be trusted."
            )
        _known[uri] = max(table.version(), _known.get(uri, 0))
    opened = Opened(uri, table)
    if version is None:
        _remember(opened, known)
    return opened


def _advanced(uri: str) -> DeltaTable | None:
    """delta-rs's object of an older version, at the newest one now: it reads the log entries since alone. None where there
    is none, or the log is another one by now."""
    table, known = _passed_on.pop(uri, (None, None))
    if table is None or log.mark(uri, table.version()) != known:
        return None
    try:
        table.update_incremental()
    except (DeltaError, OSError):
        return None  # whoever reads the whole log says what is wrong with it
    return table


def _pass_on(opened: Opened) -> None:
    """Let the next opening of a table have the object that a commit was made on."""
    known = _newest.get(opened.uri)
    if known is not None and known[0] is opened:
        _passed_on[opened.uri] = opened.give_away(), known[1]


def _drop(opened: Opened) -> None:
    """Read the log the next time, after a failed commit on an object: a newer version may hide behind a removed entry, and
    the object may hold settings of the store that no longer hold."""
    known = _newest.get(opened.uri)
    if known is not None and known[0] is opened:
        _newest.pop(opened.uri, None)  # another thread's failed commit may have dropped the object meanwhile
    _passed_on.pop(opened.uri, None)


def _remember(opened: Opened, before: tuple[Opened, log.Mark] | None) -> None:
    found = log.mark(opened.uri, opened.version)
    if before is not None and log.mark(opened.uri, before[0].version) == before[1]:
        opened.carry(before[0])
    if found is None:
        _newest.pop(opened.uri, None)
    else:
        _newest[opened.uri] = opened, found


def _absent(uri: str) -> None:
    if uri in _known:
        raise LakeError(
            f"table {uri} was there and is gone: its folder was moved or deleted, or is not mounted. Put it back and run again."
            " If it is meant to be gone, start this program anew."
        )


def forget(uri: str) -> None:
    """A place whose tables are deleted on purpose."""
    for known in [known for known in _known if known == uri or known.startswith(f"{uri}/")]:
        del _known[known]
        _newest.pop(known, None)
        _passed_on.pop(known, None)


def expect_nothing() -> None:
    """Forget the known versions, at the begin of a Spark task.

    A worker process may have served another command before, and the lake may have been removed and created again since. The
    process that runs the command guards against older versions.
    """
    _known.clear()


def _check_writable(opened: Opened) -> None:
    """Refuse to write where the table asks for more than is done here (Delta protocol, "Requirements for Writers")."""
    for name, value in sorted(opened.metadata.configuration.items()):
        if name.startswith(_FORBIDDEN) and value.lower() not in _FORBIDDEN_OFF:
            raise TableUnsupported(
                f"table {opened.uri} has the property {name} = {value}, and this version of zync can't obey it."
                " Nothing was committed. Unset the property."
            )


def _check_fresh(uri: str, files: Sequence[DataFile]) -> None:
    """Refuse files so old that a clean-up may have removed them, or may be about to remove them.

    The files are old if the process was stopped, or the machine slept, for days before the commit.
    """
    age = (time.time() - min((item.made for item in files), default=time.time())) / 3600
    if age > UNCOMMITTED_HOURS:
        raise CommitConflict(
            f"table {uri}: files that were written {age / 24:.0f} days ago are not committed, because a clean-up may have"
            " removed them since. Nothing was committed. Run the command again: it writes new files"
        )


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
            commit_properties=_properties({**numbers, **tampering.begun(files)}, token, retries=0),
            post_commithook_properties=_HOOKS,
            storage_options=storage.delta_options(uri),
        )
    except (DeltaError, OSError) as error:
        found = open_table(uri)
        if found is None:
            raise _failed(uri, error, "it could not be created") from None
        if not _committed(found, token, -1):
            raise CommitConflict(f"table {uri} was created by another writer at the same moment; run again") from error


def commit(
    opened: Opened,
    files: Sequence[DataFile],
    numbers: Mapping[str, int],
    *,
    removed: Sequence[DataFile] = (),
    partition_by: Sequence[str] = (),
    rewritten: bool = False,
) -> None:
    """Add and remove files and set numbers, in one atomic commit on the opened object.

    ``rewritten``: the added files hold exactly the records of the removed files. Raises CommitConflict if another writer
    committed one of the numbers since the table was opened, or if files are older than UNCOMMITTED_HOURS. Also raises it if
    the log was cleaned so far that conflicts can't be found. Raises TableDamaged if another program changed the files.
    """
    _check_writable(opened)
    _check_fresh(opened.uri, files)
    if files or removed:
        tampering.check(opened)
    now = int(time.time() * 1000)
    numbers = {**numbers, **tampering.carried(opened, numbers, files, removed)}
    before, token = opened.version, uuid.uuid4().hex
    try:
        with opened.lock:
            opened.settle()
            opened.table.create_write_transaction(
                [
                    RemoveAction(item.path, not rewritten, _removed_at(item, now), partition_values=_group(item))
                    for item in removed
                ]
                + [_add(item, not rewritten) for item in files],
                mode="append",
                schema=opened.delta_schema,
                partition_by=list(partition_by),
                commit_properties=_properties(numbers, token),
                post_commithook_properties=_HOOKS,
            )
            _known[opened.uri] = max(before + 1, _known.get(opened.uri, 0))
            _pass_on(opened)
    except (DeltaError, OSError) as error:
        _drop(opened)
        found = open_table(opened.uri)
        if found is not None and _committed(found, token, before):
            return
        _check_refused(opened, found, error)
        if isinstance(error, CommitFailedError):
            raise CommitConflict(f"table {opened.uri}: another writer committed first; run again") from error
        _check_log(opened, found, error)
        raise _failed(opened.uri, error, "the commit failed and nothing of it is visible") from None


def widen(opened: Opened, wanted: pa.Schema) -> Opened:
    """Give the table the columns of ``wanted``, in a commit of its own that touches no file; the table opened anew.

    Columns are added, nested ones too, and get wider types; those that ``wanted`` lacks stay. CommitConflict if another
    writer changed the schema since the table was opened. ``create_write_transaction`` leaves a table's schema as it was
    even when the files are wider, and ``alter.add_columns`` refuses another type: an overwrite of no rows does it.
    """
    schema = storage.widened(opened.schema, wanted)
    if Schema.from_arrow(schema).to_json() == opened.delta_schema.to_json():
        return opened
    before, token = opened.version, uuid.uuid4().hex
    try:
        write_deltalake(
            # A fresh object, because write_deltalake moves its object to the new version, and ``Opened`` never changes.
            DeltaTable(opened.uri, version=before, storage_options=storage.delta_options(opened.uri)),
            schema.empty_table(),
            mode="overwrite",
            schema_mode="overwrite",
            predicate="false",
            partition_by=opened.metadata.partition_columns or None,
            commit_properties=_properties({}, token),
            post_commithook_properties=_HOOKS,
        )
    except (DeltaError, OSError) as error:
        _drop(opened)
        found = open_table(opened.uri)
        if found is not None and _committed(found, token, before):
            return found
        _check_refused(opened, found, error)
        if isinstance(error, CommitFailedError):
            raise CommitConflict(f"table {opened.uri}: another writer changed the schema first; run again") from error
        _check_log(opened, found, error)
        raise SchemaError(f"table {opened.uri}: its columns can't be changed: {error}") from error
    found = open_table(opened.uri)
    if found is None:
        raise LakeError(f"table {opened.uri} vanished")
    return found


def _failed(uri: str, error: Exception, what: str, cure: str = "") -> LakeError:
    return storage.failure(uri, error, f"table {uri}: {what}: {stores.first_line(error)}.{cure}")


def _check_refused(opened: Opened, found: Opened | None, error: Exception) -> None:
    """TableUnsupported where a commit failed and nobody was first: the table asks for a feature that delta-rs can't write."""
    if isinstance(error, CommitFailedError) and found is not None and found.version == opened.version:
        raise TableUnsupported(
            f"table {opened.uri} could not be written, and nothing was committed: {stores.first_line(error)}. {_WITHOUT}"
        ) from None


def _check_log(opened: Opened, found: Opened | None, error: Exception) -> None:
    """CommitConflict where a commit failed since a clean-up removed log entries that delta-rs looks for conflicts in: the
    entry of the version that the commit is based on, and all later ones."""
    if found is None or found.version == opened.version:
        return
    if not log.are_whole(opened.uri, opened.version, found.version):
        raise CommitConflict(
            f"table {opened.uri}: the commit is based on version {opened.version}, the table is at version {found.version},"
            " and log entries between them were cleaned up. Nothing of the commit is visible; run again"
        ) from error


def _committed(found: Opened, token: str, before: int) -> bool:
    """Whether one of the commits after version ``before`` carries the token. The numbers can't tell: another writer from
    the same state sets the same ones, and a commit need not add a file."""
    with found.lock:
        commits = found.table.history(max(1, found.version - before))
    return any(item.get(TOKEN) == token for item in commits)


def _properties(numbers: Mapping[str, int], token: str, retries: int | None = None) -> CommitProperties:
    return CommitProperties(
        max_commit_retries=retries,
        app_transactions=[Transaction(name, value) for name, value in numbers.items()],
        custom_metadata={TOKEN: token},
    )


def _removed_at(item: DataFile, now: int) -> int:
    """The time of a tombstone. At one commit a second a week of tombstones would be in each checkpoint of the log: 0 makes
    the next checkpoint leave out the tombstone of a young file."""
    young = item.added is not None and now - item.added < YOUNG_HOURS * 3_600_000
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
    least, most = ({} if not place else {"kafka": place, **_order(order)} for place, order in bounds)
    stats = {"numRecords": item.records} | ({"minValues": least, "maxValues": most} if low else {})
    return AddAction(item.path, item.size, _group(item), int(time.time() * 1000), changes_data, json.dumps(stats))


def _order(order: Order | None) -> dict[str, object]:
    return {} if order is None else {"order": {"high": order[0], "low": order[1]}}


def _iso(millis: int) -> str:
    moment = EPOCH + timedelta(milliseconds=millis)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{millis % 1000:03d}Z"
