"""An archive: the records of topics as objects in a folder or a bucket, and the position up to which they are there.

    <archive>/<topic>/<time>/<partition>/<first>-<last>.parquet      or .jsonl.gz; first and last are offsets
    <archive>/_zync/positions            a Delta table without rows, whose numbers name the present state of each place
    <archive>/_zync/states/<place>-<number>.json      a state: next offsets, the objects of the last batch, and a list of objects
    <archive>/_zync/lists/<place>-<number>.json       a further part of the list, which stays as it is
    <archive>/_zync/loads/<load>/        what a batch loaded: Parquet files, and a list of them

An object's name and its records say each other: whoever writes an object again writes the same. A batch is committed by a
new state, before its objects have their names. They are made from the loads afterwards, by the same run or by the next one
(``sinks.files``). A run that is killed therefore leaves a promise and the means to keep it.

Small objects are merged: a further batch of the same time writes the old object's records and its own into one object, and
removes the old one. For a moment both are there. A reader takes the object with the longer range (``list_objects``).

Offsets may have gaps, so the names of the objects do not show that one is lost. The list of a state does (``find_losses``).
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import parse_qsl

import pyarrow as pa
from pyarrow import fs

from zync_assets.errors import CommitConflict, LakeError, LakeUnavailable
from zync_assets.lake import storage, tables
from zync_assets.lake.log import LakeTable
from zync_assets.pipeline import LakeUri

PARQUET, JSON_LINES = "parquet", "jsonl"
SUFFIXES: Mapping[str, str] = {PARQUET: ".parquet", JSON_LINES: ".jsonl.gz"}
"""Format of an archive → the suffix of its objects."""

UNTIMED = "untimed"
"""The time in the names of objects whose records have no time, as records of a staging pool."""

_OWN = "_zync"
_NUMBER = "zync:state:"
_NAME = re.compile(r"(.+)/([^/]+)/(\d+)/(\d+)-(\d+)(\.parquet|\.jsonl\.gz)")
MOST_OBJECTS = 500
"""The most objects in the list of a state. More objects go into a list file, because each batch writes a state."""

_POSITIONS = pa.schema([("place", pa.string())])


@dataclass(frozen=True)
class ArchiveObject:
    """An object. ``time``: the begin of its interval, as in its name; ``first`` and ``last``: offsets, both inside."""

    topic: str
    time: str
    partition: int
    first: int
    last: int
    suffix: str

    @property
    def path(self) -> str:
        """The path below the archive."""
        return f"{self.topic}/{self.time}/{self.partition}/{self.first}-{self.last}{self.suffix}"

    @property
    def chunk(self) -> tuple[str, str, int, str]:
        """Two objects may be merged only if they are equal in these fields."""
        return self.topic, self.time, self.partition, self.suffix


@dataclass(frozen=True)
class Promise:
    """An object that a state promises. ``parts``: the files that it is made of, in order, below the archive; ``replaces``: the
    object that it takes the place of."""

    path: str
    parts: tuple[str, ...]
    replaces: str | None = None


@dataclass(frozen=True)
class ArchiveState:
    """How far a place was written. ``next``: partition → next offset; ``tails``: partition → its last object;
    ``bad``: as in ``sinks.target.Progress``; ``removals``: objects that go → when they were written. An object that was written
    again since then, by a run after the reset, stays. ``objects``: all objects, but for those of the files ``lists``; None for a
    state of an earlier version. ``begin``: the version of the table of positions before the place's first batch."""

    table: LakeTable | None = field(repr=False)
    number: int | None = None
    next: Mapping[int, int] = field(default_factory=dict[int, int])
    origin: str | None = None
    tails: Mapping[int, str] = field(default_factory=dict[int, str])
    promises: tuple[Promise, ...] = ()
    loads: tuple[str, ...] = ()
    removals: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    bad: tuple[tuple[int, int, str, str], ...] = ()
    objects: tuple[str, ...] | None = ()
    lists: tuple[str, ...] = ()
    begin: int = -1


@dataclass(frozen=True)
class ArchiveUrl:
    """An archive's URL. ``interval``: the seconds that share a time in the names of objects."""

    root: str
    format: str = PARQUET
    interval: int = 3600


def parse_url(url: str) -> ArchiveUrl:
    """The parts of the URL of an archive. Raises ValueError with the reason if the URL is wrong.

    >>> parse_url("s3://shop/archive?format=jsonl&interval=1d")
    ArchiveUrl(root='s3://shop/archive', format='jsonl', interval=86400)
    """
    base, _, query = url.partition("?")
    root = LakeUri(base.rstrip("/"), storage.settings(url)) if storage.is_store(base) else base
    archive_url = ArchiveUrl(root)
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "format" and value in SUFFIXES:
            archive_url = replace(archive_url, format=value)
        elif name == "interval" and (match := re.fullmatch(r"([1-9]\d*)([mhd])", value)):
            archive_url = replace(archive_url, interval=int(match[1]) * {"m": 60, "h": 3600, "d": 86400}[match[2]])
        else:
            raise ValueError("takes ?format=parquet or jsonl, and interval=15m, 1h, 1d or the like, after the folder")
    return archive_url


def parse_object(path: str) -> ArchiveObject | None:
    """The object of a path below an archive; None for another file.

    >>> parse_object("orders/2026-11-23T03-00/0/100-149.parquet").last
    149
    """
    match = _NAME.fullmatch(path)
    if match is None:
        return None
    topic, at, partition, first, last, suffix = match.groups()
    return ArchiveObject(topic, at, int(partition), int(first), int(last), suffix)


def list_objects(archive: str, topic: str) -> list[ArchiveObject]:
    """The objects of a topic, by partition and offset, without those whose records are in a longer object too."""
    all_objects: list[ArchiveObject] = []
    for suffix in SUFFIXES.values():
        for name in storage.list_files(storage.join(archive, topic), suffix):
            item = parse_object(f"{topic}/{name}")
            if item is not None and item.topic == topic:
                all_objects.append(item)
    objects: list[ArchiveObject] = []
    for item in sorted(all_objects, key=lambda item: (item.partition, item.first, -item.last)):
        if not objects or objects[-1].partition != item.partition or item.last > objects[-1].last:
            objects.append(item)
    return objects


def list_topics(archive: str) -> list[str]:
    """The topics of an archive."""
    names = {name for suffix in SUFFIXES.values() for name in storage.list_files(archive, suffix)}
    return sorted({item.topic for item in map(parse_object, names) if item is not None})


# ---- the state of a place


def open_state(archive: str, place: str) -> ArchiveState:
    """The present state of a place. ``place``: a name of letters, digits and _."""
    table, number, text = None, None, None
    while text is None:
        table, last = tables.open_table(_positions(archive)), number
        number = table.number(_number_name(place)) if table is not None else None
        if number is None:
            return ArchiveState(table)
        try:
            text = read_file(archive, _state_path(place, number))
        except FileNotFoundError as error:
            # A run that commits removes the state before its own.
            if number == last:
                raise LakeError(f"archive {archive}: the file {error} is gone. Restore it from a copy.") from None
    row = json.loads(text)
    return ArchiveState(
        table,
        number,
        {int(partition): upcoming for partition, upcoming in row["next"].items()},
        row["origin"],
        {int(partition): path for partition, path in row["tails"].items()},
        tuple(Promise(item["path"], tuple(item["parts"]), item["replaces"]) for item in row["promises"]),
        tuple(row["loads"]),
        # A list that an earlier version wrote has no times.
        row["removals"] if isinstance(row["removals"], dict) else dict.fromkeys(row["removals"]),
        tuple((item[0], item[1], item[2], item[3]) for item in row["bad"]),
        tuple(row["objects"]) if "objects" in row else None,
        tuple(row.get("lists", ())),
        row.get("begin", -1),
    )


def commit_state(archive: str, place: str, before: ArchiveState, after: ArchiveState) -> ArchiveState:
    """Set the state of a place. Raises CommitConflict if another run set it since ``before`` was opened."""
    number = secrets.randbits(62)
    after = _with_short_list(archive, place, number, after)
    row = {name: value for name, value in asdict(replace(after, table=None)).items() if name not in ("table", "number")}
    path = _state_path(place, number)
    write_whole(archive, path, lambda file: file.write(json.dumps(row).encode()))
    numbers = {_number_name(place): number}
    try:
        if before.table is None:
            tables.create_table(_positions(archive), _POSITIONS, "How far an archive was written", [], numbers)
        else:
            tables.commit(before.table, [], numbers)
    except CommitConflict:
        for name in (path, *(set(after.lists) - set(before.lists))):
            storage.remove_file(storage.join(archive, name))
        raise
    if before.number is not None:
        for name in (_state_path(place, before.number), *(set(before.lists) - set(after.lists))):
            storage.remove_file(storage.join(archive, name))
    return open_state(archive, place)


def _with_short_list(archive: str, place: str, number: int, state: ArchiveState) -> ArchiveState:
    """The state, with the objects that will not change in a file of their own if they are many."""
    if state.objects is None or len(state.objects) <= MOST_OBJECTS + len(state.tails):
        return state
    tails = set(state.tails.values())
    path = f"{_OWN}/lists/{place}-{number}.json"
    text = json.dumps([item for item in state.objects if item not in tails]).encode()
    write_whole(archive, path, lambda file: file.write(text))
    tail_objects = tuple(item for item in state.objects if item in tails)
    return replace(state, objects=tail_objects, lists=(*state.lists, path))


# ---- losses


@dataclass(frozen=True)
class Losses:
    """The objects of a topic by a state, compared with the archive.

    ``objects``: the state's objects, by partition and offset. ``lost``: the objects whose records are in no file. ``unmade``: the
    lost objects that a run makes of its loads. ``is_whole``: whether the state lists all objects. A state of an earlier version
    lists the last objects alone.
    """

    objects: tuple[ArchiveObject, ...]
    lost: tuple[ArchiveObject, ...]
    unmade: frozenset[ArchiveObject]
    is_whole: bool


def find_losses(archive: str, topic: str) -> Losses | None:
    """The lost objects of a topic. None without a whole ``_zync/``, which lists the objects."""
    try:
        table = tables.open_table(_positions(archive))
        names = [name.removeprefix(_NUMBER) for name in (table.numbers if table else ()) if name.startswith(_NUMBER)]
        states = [open_state(archive, name) for name in names]
        topic_states = [state for state in states if any(item.topic == topic for item in _parse_paths(_traces(state)))]
        # A reset by a sink with another name has removed the objects of the earlier sink.
        last = max(topic_states, key=lambda state: state.begin, default=None)
        if last is None or (last.objects is None and len(topic_states) > 1):
            return None
        return place_losses(archive, topic, last)
    except LakeUnavailable:
        raise
    except LakeError:
        return None


def place_losses(archive: str, topic: str, state: ArchiveState) -> Losses:
    """The lost objects of a topic, by a state. LakeError if a file of the state's list is missing."""
    # Somebody may have renamed the folder of a topic.
    present_objects = {replace(item, topic=topic) for item in _parse_paths(object_paths(archive, state))}
    objects = sorted(present_objects, key=lambda item: (item.partition, item.first))
    # The state was read first: a run that goes on in the meantime only makes longer objects.
    existing_objects = list_objects(archive, topic)
    lost_objects = tuple(item for item in objects if not _is_covered(item, existing_objects))
    promised_paths = (
        {item.path for item in state.promises} if set(state.loads) & set(list_loads(archive)) else set[str]()
    )
    promised_objects = frozenset(item for item in lost_objects if item.path in promised_paths)
    return Losses(tuple(objects), lost_objects, promised_objects, state.objects is not None)


def object_paths(archive: str, state: ArchiveState) -> list[str]:
    """The paths of all objects of a state; of a state of an earlier version, of the last objects. LakeError if a file of the
    list is missing."""
    paths = list(state.tails.values() if state.objects is None else state.objects)
    for name in state.lists:
        try:
            paths += json.loads(read_file(archive, name))
        except FileNotFoundError as error:
            raise LakeError(f"archive {archive}: the file {error} is gone. Restore it from a copy.") from None
    return paths


def _traces(state: ArchiveState) -> list[str]:
    """The paths of a state's newest objects, and of the objects to remove. A path begins with the topic."""
    return [*state.tails.values(), *state.removals]


def _parse_paths(paths: Iterable[str]) -> list[ArchiveObject]:
    return [item for item in map(parse_object, paths) if item is not None]


def _is_covered(item: ArchiveObject, objects: Sequence[ArchiveObject]) -> bool:
    """Whether an object, or a longer one, is there. ``objects``: by partition and offset, without overlaps."""
    at = bisect_right(objects, (item.partition, item.first), key=lambda entry: (entry.partition, entry.first)) - 1
    return at >= 0 and objects[at].partition == item.partition and item.last <= objects[at].last


def write_times(archive: str, paths: Sequence[str]) -> dict[str, int | None]:
    """Path → when the file was written, in nanoseconds since the epoch; None for a file that is not there."""
    system, _ = storage.filesystem(archive)
    places = [storage.filesystem(storage.join(archive, path))[1] for path in paths]
    return {path: info.mtime_ns for path, info in zip(paths, system.get_file_info(places), strict=True)}


def exist(archive: str, paths: Sequence[str]) -> list[bool]:
    """Whether each of some files below the archive is there."""
    system, _ = storage.filesystem(archive)
    places = [storage.filesystem(storage.join(archive, path))[1] for path in paths]
    return [info.type == fs.FileType.File for info in system.get_file_info(places)]


# ---- loads


def load_path(name: str, file: str) -> str:
    """The path of a file of a load below the archive."""
    return f"{_OWN}/loads/{name}/{file}"


def list_loads(archive: str) -> list[str]:
    """The names of the loads in an archive."""
    system, path = storage.filesystem(storage.join(archive, _OWN, "loads"))
    base = path.rstrip("/") + "/"
    infos = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    return sorted({info.path.removeprefix(base).partition("/")[0] for info in infos})


def remove_load(archive: str, name: str) -> None:
    """Remove the files of a load, as far as they exist."""
    system, path = storage.filesystem(storage.join(archive, _OWN, "loads", name))
    with suppress(LakeError, OSError):
        for info in system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True)):
            if info.type == fs.FileType.File:
                storage.remove_file(storage.join(archive, load_path(name, info.base_name)))
        if not storage.is_store(archive):
            system.delete_dir(path)


def write_whole(archive: str, path: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that readers see the whole file or no file."""
    uri = storage.join(archive, path)
    system, place = storage.filesystem(uri)
    with storage.access_errors(uri, "can't be written"), _draft(archive, uri) as draft:
        with draft.open("wb") as file:
            write(file)
        if storage.is_store(archive):
            with pa.BufferedOutputStream(system.open_output_stream(place), 8 << 20) as stream, draft.open("rb") as file:
                while data := file.read(8 << 20):
                    stream.write(data)
        else:
            draft.replace(place)


@contextmanager
def _draft(archive: str, uri: str) -> Generator[Path]:
    """A local file: beside the archive's objects if they are local, so that it can get an object's name."""
    if not storage.is_store(archive):
        folder = Path(archive) / _OWN / "drafts"
        folder.mkdir(parents=True, exist_ok=True)
        Path(uri).parent.mkdir(parents=True, exist_ok=True)
    else:
        folder = Path(tempfile.gettempdir())
    draft = folder / f"zync-{secrets.token_hex(8)}"
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def time_name(micros: int | None, interval: int) -> str:
    """The time in an object's name. ``micros``: of a record, since the epoch; ``interval``: seconds.

    >>> time_name(1_000_000_000_000_000, 3600)
    '2001-09-09T01-00'
    """
    if micros is None:
        return UNTIMED
    seconds = micros // 1_000_000 // interval * interval
    form = "%Y-%m-%dT%H-%M" if interval % 60 == 0 else "%Y-%m-%dT%H-%M-%S"
    return datetime.fromtimestamp(seconds, UTC).strftime(form)


def time_start(name: str) -> int | None:
    """The first microsecond of a time in an object's name; None for records without a time.

    >>> time_start("2001-09-09T01-00")
    999997200000000
    """
    for form in ("%Y-%m-%dT%H-%M", "%Y-%m-%dT%H-%M-%S"):
        with suppress(ValueError):
            return int(datetime.strptime(name, form).replace(tzinfo=UTC).timestamp()) * 1_000_000
    return None


def read_file(archive: str, path: str) -> bytes:
    """The bytes of a file below an archive. FileNotFoundError for a missing file."""
    uri = storage.join(archive, path)
    system, place = storage.filesystem(uri)
    if system.get_file_info(place).type != fs.FileType.File:
        raise FileNotFoundError(uri)
    with storage.access_errors(uri, "can't be read"), system.open_input_file(place) as file:
        return cast(bytes, file.read())


def _positions(archive: str) -> str:
    return storage.join(archive, _OWN, "positions")


def _state_path(place: str, number: int) -> str:
    return f"{_OWN}/states/{place}-{number}.json"


def _number_name(place: str) -> str:
    return _NUMBER + place
