"""The target `files`: Parquet or JSON lines in a folder or a bucket (``lake.archive`` has the names and the state).

The records are whole: ``kafka`` with topic, partition, offset, timestamp, headers and the ids of the writers' schemas, then
``key`` and ``value`` as the lake has them. A task writes them, sorted, into files of a load, a file for each partition and
interval of time. The merge commits the next offsets together with the names that the records are to have, and then gives
the records these names.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import chain, groupby, pairwise
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.arrays import pc
from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, LakeError, LakeUnavailable, SinkError, TargetRefused, TargetUnavailable
from zync_assets.lake import archive, archive_objects, storage
from zync_assets.lake.archive import ArchiveObject, ArchiveState, Promise
from zync_assets.lake.check_results import count_text
from zync_assets.pipeline import Evolve
from zync_assets.sinks.target import (
    BadRecord,
    LoadTable,
    Merge,
    Place,
    Progress,
    TableSpec,
    Target,
    run_name,
)

_READERS = 8
"""Objects that are read at the same time: each is a round trip to a store."""

MANIFEST = "load.json"
"""The file of a load that lists its chunks."""


@dataclass(frozen=True)
class Chunk:
    """A file of a load: the records of one partition and one interval of time. ``first`` and ``last``: offsets."""

    file: str
    time: str
    partition: int
    first: int
    last: int


class FilesTarget(Target):
    """A folder, or a folder of a bucket: ``s3://bucket/folder?format=jsonl&interval=1d``."""

    tasks = 1
    whole_records = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        place = archive.parse_url(url)
        self.root, self.format, self.interval = place.root, place.format, place.interval

    def is_native(self, kind: pa.DataType) -> bool:
        return True

    def progress(self, place: Place) -> Progress:
        with _lake_errors():
            state = archive.open_state(self.root, _name(place))
        return Progress(state.next, state.origin, tuple(BadRecord(*item) for item in state.bad))

    def prepare(self, spec: TableSpec, *, create: bool, evolve: Evolve) -> None:
        with _lake_errors():
            storage.make_folder(self.root)

    def past_places(self, place: Place, spec: TableSpec, origin: str, writers: Mapping[Place, bool]) -> Sequence[Place]:
        # The state of a place does not tell the sink's name. A killed reset leaves objects behind, which are removed first.
        with _lake_errors():
            complete(self.root, _name(place), archive.open_state(self.root, _name(place)))
            objects = archive.list_objects(self.root, spec.name)
        return [replace(place, sink="of an unknown name")] if objects else []

    @contextmanager
    def run(self, place: Place) -> Generator[str]:
        # A dead run makes no further promises. The objects that it promised consist of its loads, and are made before the loads
        # are removed.
        dead = self.dead_loads(place)
        with _lake_errors():
            complete(self.root, _name(place), archive.open_state(self.root, _name(place)))
        self.drop(dead)
        run = run_name(place)
        try:
            yield run
        except Exception:
            # The process lives on, so that no later run would take the loads for a killed run's.
            with suppress(SinkError, CommitConflict):
                self.drop(self._unnamed_loads(place, run))
            raise

    def _unnamed_loads(self, place: Place, run: str) -> list[str]:
        """The loads of a run that no promise needs: the state of the place does not name them."""
        with _lake_errors():
            named = archive.open_state(self.root, _name(place)).loads
        return [name for name in self.tables() if name.startswith(run) and name not in named]

    def tables(self) -> Sequence[str]:
        with _lake_errors():
            return archive.list_loads(self.root)

    def drop(self, names: Sequence[str]) -> None:
        with _lake_errors():
            for name in names:
                archive.remove_load(self.root, name)

    # ---- a load

    def load(self, spec: TableSpec, name: str, rows: Iterator[pa.RecordBatch]) -> LoadTable:
        names = [column.name for column in spec.columns]
        count, chunks = 0, list[Chunk]()
        with _lake_errors():
            parts = (part for batch in rows for part in _parts(batch.select(names), self.interval))
            for (partition, time), group in groupby(parts, lambda part: part[0]):
                file = f"{len(chunks)}.parquet"
                offsets = self._write_chunk(archive.load_path(name, file), (batch for _, batch in group))
                chunks.append(Chunk(file, time, partition, int(offsets[0]), int(offsets[1])))
                count += int(offsets[2])
            text = json.dumps([asdict(chunk) for chunk in chunks]).encode()
            archive.write_whole(self.root, archive.load_path(name, MANIFEST), lambda file: file.write(text))
        crash_point("sink:loaded")
        return LoadTable(name, count)

    def _write_chunk(self, path: str, batches: Iterator[pa.RecordBatch]) -> tuple[int, int, int]:
        """Write a file of a load: its first and last offset, and its number of records."""
        bounds: list[int] = []
        count = 0

        def write(file: BinaryIO) -> None:
            nonlocal count
            first_batch = next(batches)
            with pq.ParquetWriter(file, first_batch.schema, compression="zstd") as writer:
                for batch in chain([first_batch], batches):
                    writer.write_batch(batch)
                    offsets = pc.struct_field(batch.column("kafka"), "offset")
                    bounds.extend((offsets[0].as_py(), offsets[-1].as_py()))
                    count += batch.num_rows

        archive.write_whole(self.root, path, write)
        return bounds[0], bounds[-1], count

    # ---- the merge

    def apply(self, merge: Merge, name: str, rows: Iterator[pa.RecordBatch]) -> int:
        # Records of a replay mostly lie within an object. They are refused before anything is written.
        if merge.cured:
            with _lake_errors():
                paths = archive.object_paths(self.root, archive.open_state(self.root, _name(merge.place)))
            _refuse_within(merge, paths)
        return super().apply(merge, name, rows)

    def merge(self, merge: Merge) -> None:
        place = _name(merge.place)
        with _lake_errors():
            # 1. Nobody else has written since the batch was planned. What was promised before is kept.
            old_state = archive.open_state(self.root, place)
            complete(self.root, place, old_state)
            _claim(old_state, merge)
            # 2. The next offsets and the objects, as a promise, in one commit.
            new_state = self._cleared_state(old_state, merge) if merge.clear else self._merged_state(old_state, merge)
            crash_point("sink:merging")
            state = archive.commit_state(self.root, place, old_state, new_state)
            crash_point("sink:merged")
            # 3. The objects.
            complete(self.root, place, state)

    def _merged_state(self, old_state: ArchiveState, merge: Merge) -> ArchiveState:
        tails, promises = dict(old_state.tails), dict[str, Promise]()
        # A state of an earlier version has no list. The list begins with the present objects.
        objects = old_state.objects
        if objects is None:
            present_objects = archive.list_objects(self.root, merge.spec.name)
            objects = (*(item.path for item in present_objects), *old_state.tails.values())
        present_paths = cache(partial(archive.object_paths, self.root, replace(old_state, objects=objects)))
        for load in merge.loads:
            chunks = self._chunks(load.name)
            if not all(archive.exist(self.root, [archive.load_path(load.name, chunk.file) for chunk in chunks])):
                raise CommitConflict(f"files of the load {load.name} are gone; run again")
            for chunk in chunks:
                path = archive.load_path(load.name, chunk.file)
                item = ArchiveObject(
                    merge.spec.name,
                    chunk.time,
                    chunk.partition,
                    chunk.first,
                    chunk.last,
                    archive.SUFFIXES[self.format],
                )
                tail_path = tails.get(chunk.partition)
                tail = archive.parse_object(tail_path) if tail_path is not None else None
                promise = Promise(item.path, (path,))
                if tail is not None and item.first <= tail.last:
                    # A replay. Readers take an object within the range of another object for its shorter form.
                    _refuse_overlap(item, present_paths())
                    promises[promise.path] = promise
                    continue
                if tail is not None and tail.chunk == item.chunk:
                    longer = replace(item, first=tail.first).path
                    if tail.path in promises:
                        old_promise = promises.pop(tail.path)
                        promise = Promise(longer, (*old_promise.parts, path), old_promise.replaces)
                    elif archive_objects.may_grow(self.root, tail, path):
                        promise = Promise(longer, (tail.path, path), tail.path)
                promises[promise.path] = promise
                tails[chunk.partition] = promise.path
        replaced_paths = {promise.replaces for promise in promises.values()}
        cured_spots = set(merge.cured)
        if not cured_spots <= {(item[0], item[1]) for item in old_state.bad}:
            raise CommitConflict(f"{merge.place}: another run took a record out of quarantine first; run again")
        bad_records = [item for item in old_state.bad if (item[0], item[1]) not in cured_spots]
        bad_records += [(item.partition, item.offset, item.key, item.error) for item in merge.bad]
        return ArchiveState(
            old_state.table,
            old_state.number,
            {**old_state.next, **merge.upcoming},
            merge.origin,
            tails,
            tuple(promises.values()),
            tuple(load.name for load in merge.loads),
            bad=tuple(bad_records),
            objects=tuple(dict.fromkeys((*(path for path in objects if path not in replaced_paths), *promises))),
            lists=old_state.lists,
            begin=_version(old_state) if old_state.number is None else old_state.begin,
        )

    def _chunks(self, name: str) -> list[Chunk]:
        return [Chunk(**item) for item in json.loads(archive.read_file(self.root, archive.load_path(name, MANIFEST)))]

    def _cleared_state(self, old_state: ArchiveState, merge: Merge) -> ArchiveState:
        objects = archive.list_objects(self.root, merge.spec.name)
        removals = archive.write_times(self.root, [item.path for item in objects])
        return ArchiveState(old_state.table, old_state.number, removals=removals, begin=_version(old_state))

    def object_faults(self, place: Place, name: str) -> tuple[int, list[str], list[str]]:
        """The number of a topic's objects, what is wrong with them (lost, or not readable), and those that no run has made yet.

        Raises SinkError.
        """
        with _lake_errors():
            losses = archive_objects.settled_losses(
                lambda: archive.place_losses(self.root, name, archive.open_state(self.root, _name(place)))
            )
            objects = archive.list_objects(self.root, name)
            with ThreadPoolExecutor(_READERS) as pool:
                faults = [fault for fault in pool.map(self._object_fault, objects) if fault is not None]
        missing = [] if losses is None else [item for item in losses.lost if item not in losses.unmade]
        unmade = [] if losses is None else [item.path for item in losses.lost if item in losses.unmade]
        paths = archive_objects.list_text([item.path for item in missing])
        texts = [f"the archive {self.root} lacks {count_text(len(missing), 'object')}: {paths}"] if missing else []
        if faults:
            texts.append(f"{count_text(len(faults), 'object')} can't be read: {faults[0].rstrip('.')}")
        return len(objects), texts, unmade

    def _object_fault(self, item: ArchiveObject) -> str | None:
        try:
            archive_objects.check_object(self.root, item)
        except LakeUnavailable:
            raise
        except LakeError as error:
            return str(error)
        return None

    def rows(self, spec: TableSpec) -> Iterator[pa.RecordBatch]:
        if self.format != archive.PARQUET:
            raise SinkError("objects of JSON lines are not read back, because JSON does not keep every type")
        fields = [pa.field(column.name, column.type) for column in spec.columns]
        with _lake_errors():
            for item in archive.list_objects(self.root, spec.name):
                for batch in archive_objects.read_object(self.root, item):
                    yield archive_objects.widened(batch, pa.schema(fields))


def complete(root: str, place: str, state: ArchiveState) -> None:
    """Make the promised objects, as far as they are missing, and remove what they replace. May be repeated.

    ``place``: the name of the state. Raises LakeError if an object can't be made.
    """
    for path, write_time in state.removals.items():
        if write_time is None or archive.write_times(root, [path])[path] == write_time:
            storage.remove_file(storage.join(root, path))
    for item in state.promises:
        is_there, *parts = archive.exist(root, [item.path, *item.parts])
        if not is_there and all(parts):
            try:
                archive_objects.write_object(root, item.path, item.parts)
            except (FileNotFoundError, LakeError):
                # Another run that makes the same objects removes the loads at its end.
                if all(archive.exist(root, item.parts)):
                    raise
        if not is_there and not archive.exist(root, [item.path])[0]:
            _refuse_loss(root, place, state, item)
            continue
        if item.replaces is not None:
            storage.remove_file(storage.join(root, item.replaces))
    for name in state.loads:
        archive.remove_load(root, name)


def _refuse_loss(root: str, place: str, state: ArchiveState, item: Promise) -> None:
    """LakeError unless an object that is not there was made: a later one has replaced it, or somebody has removed it."""
    # Loads go when all objects are made. A later run replaces an object only after it has set another state.
    was_made = not set(state.loads) & set(archive.list_loads(root))
    if not was_made and archive.open_state(root, place).number == state.number:
        raise LakeError(
            f"archive {root}: the object {item.path} can't be made, because a file is gone: one of {', '.join(item.parts)}."
            " Bring the file back; or load the topic again with --reset."
        )


def _parts(batch: pa.RecordBatch, interval: int) -> Iterator[tuple[tuple[int, str], pa.RecordBatch]]:
    """The records of a batch, which is sorted, by partition and by the time in the names of objects."""
    kafka = batch.column("kafka")
    partitions = pc.struct_field(kafka, "partition").to_numpy()
    times = np.zeros(len(partitions), np.int64)
    has_time = kafka.type.get_field_index("time") >= 0
    if has_time:
        micros = pc.struct_field(kafka, "time").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        times = micros.to_numpy() // (interval * 1_000_000)
    changes = (partitions[1:] != partitions[:-1]) | (times[1:] != times[:-1])
    edges = [0, *(int(at) + 1 for at in np.flatnonzero(changes)), len(partitions)]
    for first, end in pairwise(edges):
        if first < end:
            micros = int(times[first]) * interval * 1_000_000 if has_time else None
            yield (int(partitions[first]), archive.time_name(micros, interval)), batch.slice(first, end - first)


def _claim(state: ArchiveState, merge: Merge) -> None:
    """CommitConflict unless the position is the expected one."""
    if merge.clear:
        return
    is_other = state.origin is not None and state.origin != merge.origin
    if is_other or any(state.next.get(partition) != expected for partition, expected in merge.expected.items()):
        raise CommitConflict(f"{merge.place}: another run wrote first; run again")


def _refuse_overlap(item: ArchiveObject, paths: Sequence[str]) -> None:
    """TargetRefused if an offset of a new object lies in the range of another object of the topic."""
    others = (other for path in paths if (other := archive.parse_object(path)) is not None)
    for other in others:
        if (other.topic, other.partition) == (item.topic, item.partition) and (
            other.first <= item.last and item.first <= other.last
        ):
            raise _overlap(other)


def _refuse_within(merge: Merge, paths: Sequence[str]) -> None:
    """TargetRefused if a record that leaves quarantine lies in the range of an object of the topic."""
    others = [item for path in paths if (item := archive.parse_object(path)) is not None]
    objects = sorted(
        (item for item in others if item.topic == merge.spec.name), key=lambda item: (item.partition, item.first)
    )
    for partition, offset in merge.cured:
        at = bisect_right(objects, (partition, offset), key=lambda item: (item.partition, item.first)) - 1
        if at >= 0 and objects[at].partition == partition and offset <= objects[at].last:
            raise _overlap(objects[at])


def _overlap(item: ArchiveObject) -> TargetRefused:
    return TargetRefused(
        f"the object {item.path} has the offsets around the record. To have the record in the archive, load the table again with"
        " --reset"
    )


def _version(state: ArchiveState) -> int:
    return -1 if state.table is None else state.table.version


def _name(place: Place) -> str:
    """The name of a place's state."""
    return place.load_prefix.strip("_")


@contextmanager
def _lake_errors() -> Generator[None]:
    try:
        yield
    except LakeUnavailable as error:
        raise TargetUnavailable(_own_text(str(error))) from None
    except CommitConflict:
        raise
    except (LakeError, OSError) as error:
        raise SinkError(_own_text(str(error))) from None


def _own_text(text: str) -> str:
    """A text of the lake's storage, for the folder of a sink.

    >>> _own_text("lake s3://a/b: there is no bucket a. Create it, or correct lake: in the pipeline file.")
    "the sink's folder s3://a/b: there is no bucket a. Create it, or correct the sink's url in the pipeline file."
    """
    if not text.startswith("lake "):
        return text
    sink_text = f"the sink's folder {text.removeprefix('lake ')}".replace(
        "or correct lake: in", "or correct the sink's url in"
    )
    return (
        f"{sink_text}. Correct the sink's url, or make the folder for this user."
        if "create the folder" in sink_text
        else sink_text
    )
