"""Files as a target: the same records once, wherever the sink is killed, and the same bytes for the same range."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from zync_assets import load_pipeline
from zync_assets.checks.state_checks import rows_match
from zync_assets.errors import (
    CommitConflict,
    LakeError,
    LakeUnavailable,
    PipelineFileError,
    SinkError,
    TargetUnavailable,
)
from zync_assets.lake import archive, archive_objects, storage, stores
from zync_assets.lake.raw_files import KAFKA_TYPE
from zync_assets.local.services import Services
from zync_assets.pipeline import LakeUri
from zync_assets.publish.restore import open_archive
from zync_assets.sinks.files import FilesTarget, complete
from zync_assets.sinks.steps import reset_sink, sink_all, sink_table
from zync_assets.sinks.target import BadRecord, Column, LoadTable, Merge, TableSpec, process_mark
from zync_assets_tests.mini import die, mini
from zync_assets_tests.s3 import S3
from zync_assets_tests.sinks.conformance import ORIGIN, PLACE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VALUE = pa.struct([("id", pa.int64()), ("price", pa.decimal128(9, 2)), ("blob", pa.binary())])
TYPES = {"kafka": KAFKA_TYPE, "key": pa.binary(), "value": VALUE}
SPEC = TableSpec("shop.orders", tuple(Column(name, kind, name) for name, kind in TYPES.items()), (), "insert")
START = datetime(2026, 11, 23, 3, 0, tzinfo=UTC)
BATCH = 40
POINTS = ("sink:loaded", "sink:merging", "sink:merged")

Row = dict[str, Any]


def rows(seed: int, count: int) -> list[Row]:
    """Records of two partitions, with gaps between offsets and all kinds of nulls."""
    chance = random.Random(seed)
    made: list[Row] = []
    for partition in (0, 1):
        offset, time = 0, START
        for _ in range(count):
            offset += chance.choice([1, 1, 1, 3])
            time += timedelta(seconds=chance.randrange(400))
            value = {"id": offset, "price": Decimal(offset).scaleb(-2), "blob": chance.choice([None, b"", b"\x00\xff"])}
            made.append(
                {
                    "kafka": {
                        "topic": "shop.orders",
                        "partition": partition,
                        "offset": offset,
                        "timestamp": chance.choice([None, time - timedelta(seconds=5)]),
                        "time": time,
                        "headers": chance.choice(
                            [None, [], [{"key": "h", "value": b"\xfe"}, {"key": "", "value": None}]]
                        ),
                    },
                    "key": chance.choice([None, b"", b"k\x00"]),
                    "value": chance.choice([None, value]),
                }
            )
    return made


def batches(seed: int, count: int) -> Iterator[tuple[dict[int, int | None], dict[int, int], list[Row]]]:
    """Expected and upcoming offsets, and the records between them."""
    whole = rows(seed, count)
    expected: dict[int, int | None] = {0: None, 1: None}
    for end in range(BATCH, 3 * count + BATCH, BATCH):
        upcoming = {0: end, 1: end}
        own = [row for row in whole if (expected[row["kafka"]["partition"]] or 0) <= row["kafka"]["offset"] < end]
        yield expected, upcoming, own
        expected = dict(upcoming)


def load(target: FilesTarget, name: str, own: Sequence[Row], step: int = 7) -> tuple[LoadTable, ...]:
    marks = {"zync_op": pa.string(), "zync_set": pa.string(), "zync_offset": pa.int64()}
    schema = pa.schema([*TYPES.items(), *marks.items()])
    parts = [own[at : at + step] for at in range(0, len(own), step)]
    return (target.load(SPEC, name, iter([pa.RecordBatch.from_pylist(list(part), schema) for part in parts])),)


def apply(target: FilesTarget, seed: int, count: int) -> None:
    """Write batches from the target's position on."""
    for expected, upcoming, own in batches(seed, count):
        if target.progress(PLACE).next.get(0, 0) >= upcoming[0]:
            continue
        target.prepare(SPEC, create=True, evolve="none")
        with target.run(PLACE) as name:
            loads = load(target, name, own) if own else ()
            target.merge(Merge(PLACE, SPEC, ORIGIN, expected, upcoming, loads))
    # A run without a batch keeps what a killed one has promised.
    with target.run(PLACE):
        pass


def kept(target: FilesTarget) -> list[Row]:
    return [row for batch in target.rows(SPEC) for row in batch.to_pylist()]


def objects(folder: Path) -> list[Path]:
    """The objects of a sink, and files that a server is writing."""
    return sorted(item for item in folder.rglob("*") if item.is_file() and "_zync" not in item.parts)


def digests(folder: Path) -> dict[str, str]:
    """Object → a digest of its bytes."""
    return {str(item.relative_to(folder)): blake2b(item.read_bytes()).hexdigest() for item in objects(folder)}


def test_records_are_kept_whole_in_objects_of_their_time(tmp_path: Path) -> None:
    target = FilesTarget(f"{tmp_path}?interval=30m")
    apply(target, 1, 60)
    assert kept(target) == rows(1, 60)
    for item in archive.list_objects(str(tmp_path), "shop.orders"):
        own = [row for batch in archive_objects.read_object(str(tmp_path), item) for row in batch.to_pylist()]
        assert {row["kafka"]["partition"] for row in own} == {item.partition}
        assert (own[0]["kafka"]["offset"], own[-1]["kafka"]["offset"]) == (item.first, item.last)
        starts = {row["kafka"]["time"].timestamp() // 1800 * 1800 for row in own}
        assert starts == {datetime.strptime(item.time, "%Y-%m-%dT%H-%M").replace(tzinfo=UTC).timestamp()}
    # Each small object was merged with the next one of its time: one object for each partition and half an hour.
    names = [item.chunk for item in archive.list_objects(str(tmp_path), "shop.orders")]
    assert len(names) == len(set(names)) == len(digests(tmp_path))


def test_a_run_that_dies_after_its_commit_keeps_its_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run is killed after its commit, while this run looks which runs are alive."""
    target = FilesTarget(str(tmp_path))
    loads = load(target, f"{PLACE.load_prefix}{process_mark()}_0", rows(1, 20))

    class Killed(BaseException):
        pass

    def killed(point: str) -> None:
        if point == "sink:merged":
            raise Killed

    def dies(mark: str) -> bool:
        with suppress(Killed):
            target.merge(Merge(PLACE, SPEC, ORIGIN, {0: None, 1: None}, {0: 100, 1: 100}, loads))
        return False

    monkeypatch.setattr("zync_assets.sinks.files.crash_point", killed)
    monkeypatch.setattr("zync_assets.sinks.target.is_alive", dies)
    with target.run(PLACE):
        assert target.progress(PLACE).next == {0: 100, 1: 100}
    assert kept(target) == rows(1, 20)
    assert target.tables() == []


def test_a_batch_that_fails_leaves_only_the_loads_that_its_commit_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = FilesTarget(str(tmp_path))
    batch, other = rows(1, 20), f"{PLACE.load_prefix}{process_mark()[:-1]}x_0"
    load(target, other, batch)
    for point, loads_left in (("sink:merging", 0), ("sink:merged", 1)):

        def failing(name: str, point: str = point) -> None:
            if name == point:
                raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr("zync_assets.sinks.files.crash_point", failing)
            with pytest.raises(SinkError, match="the disk is full"), target.run(PLACE) as name:
                loads = load(target, f"{name}0", batch)
                target.merge(Merge(PLACE, SPEC, ORIGIN, {0: None, 1: None}, {0: 100, 1: 100}, loads))
            # The load of another run stays.
            assert target.tables() == sorted([*[f"{name}0"] * loads_left, other])
    with target.run(PLACE):
        assert kept(target) == batch
    assert target.tables() == [other]


def test_a_batch_whose_files_are_gone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FilesTarget(str(tmp_path))
    first, second = rows(1, 40)[:10], rows(1, 40)[10:20]
    positions = [first[-1]["kafka"]["offset"] + 1, second[-1]["kafka"]["offset"] + 1]
    with target.run(PLACE) as name:
        loads = load(target, name, first)
        target.merge(Merge(PLACE, SPEC, ORIGIN, {0: None}, {0: positions[0]}, loads))
    # Before the commit, nothing is promised yet.
    with target.run(PLACE) as name:
        loads = load(target, name, second)
        part = tmp_path / archive.load_path(loads[0].name, "0.parquet")
        part.rename(tmp_path / "away")
        merge = Merge(PLACE, SPEC, ORIGIN, {0: positions[0]}, {0: positions[1]}, loads)
        with pytest.raises(CommitConflict, match=r"files of the load .* are gone; run again"):
            target.merge(merge)
        (tmp_path / "away").rename(part)

        # Behind it, the batch can't be given up.
        def lost(point: str) -> None:
            if point == "sink:merged":
                part.rename(tmp_path / "away")

        with monkeypatch.context() as patch:
            patch.setattr("zync_assets.sinks.files.crash_point", lost)
            with pytest.raises(SinkError, match=r"can't be made, because a file is gone: one of .* with --reset\."):
                target.merge(merge)
    with pytest.raises(SinkError, match="because a file is gone"), target.run(PLACE):
        pass
    (tmp_path / "away").rename(part)
    with target.run(PLACE):
        assert kept(target) == first + second
    # An object that somebody removes later is no loss of a batch.
    for path in digests(tmp_path):
        (tmp_path / path).unlink()
    with target.run(PLACE):
        assert kept(target) == []


def test_a_run_that_completes_a_reset_late_removes_no_new_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = FilesTarget(str(tmp_path))
    apply(target, 1, 20)

    class Killed(BaseException):
        pass

    def killed(point: str) -> None:
        raise Killed

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(
            "zync_assets.sinks.files.crash_point", lambda point: killed(point) if point == "sink:merged" else None
        )
        target.merge(Merge(PLACE, SPEC, ORIGIN, {}, {}, clear=True))
    late = archive.open_state(str(tmp_path), PLACE.load_prefix.strip("_"))
    assert late.removals and kept(target) == rows(1, 20)
    # Another run completes the reset, and writes the objects again.
    with target.run(PLACE):
        assert kept(target) == []
    apply(target, 1, 20)
    complete(str(tmp_path), PLACE.load_prefix.strip("_"), late)
    assert kept(target) == rows(1, 20)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_two_runs_may_make_the_objects_of_a_batch_at_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "beside"
    apply(FilesTarget(f"{alone}?format={form}"), 1, 20)
    read, states = archive_objects._batches, list[archive.ArchiveState]()

    def read_late(root: str, parts: Sequence[str]) -> Iterator[pa.RecordBatch]:
        # The other run makes the objects, and removes the loads, when this one has found that the loads are there.
        if not states:
            states.append(archive.open_state(root, PLACE.load_prefix.strip("_")))
            complete(root, PLACE.load_prefix.strip("_"), states[0])
        return read(root, parts)

    monkeypatch.setattr(archive_objects, "_batches", read_late)
    apply(FilesTarget(f"{folder}?format={form}"), 1, 20)
    assert states[0].promises
    assert digests(folder) == digests(alone)


TOPIC = SPEC.name


def places(folder: Path) -> list[str]:
    return [item.path for item in archive.list_objects(str(folder), TOPIC)]


@pytest.mark.parametrize("most", [2, archive.MOST_OBJECTS])
def test_a_lost_object_is_told_from_a_gap_of_kafka(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(archive, "MOST_OBJECTS", most)
    root, target = str(tmp_path), FilesTarget(f"{tmp_path}?interval=30m")
    for count in (20, 60):
        apply(target, 1, count)
        assert archive_objects.refuse_losses(root, TOPIC, None, None)
    losses = archive.find_losses(root, TOPIC)
    assert losses is not None and [item.path for item in losses.objects] == places(tmp_path)
    assert bool(list(tmp_path.glob("_zync/lists/*"))) == (most == 2)

    lost = losses.objects[1]
    data = (tmp_path / lost.path).read_bytes()
    (tmp_path / lost.path).unlink()
    with pytest.raises(LakeError) as error:
        archive_objects.refuse_losses(root, TOPIC, None, None)
    assert str(error.value) == (
        f"archive {root}: a sink made {lost.path}, which is gone. Bring the files back from a copy. If the lake still has the"
        " records, write --from Pool.Topic. Or leave out the time by --since or --until."
    )
    assert target.object_faults(PLACE, TOPIC) == (
        len(losses.objects) - 1,
        [f"the archive {root} lacks 1 object: {lost.path}"],
        [],
    )
    # Other times need no lost object.
    start, end = (archive.time_start(item.time) for item in losses.objects[1:3])
    assert start is not None and end is not None
    assert archive_objects.refuse_losses(root, TOPIC, end, None)
    assert archive_objects.refuse_losses(root, TOPIC, None, start)
    with pytest.raises(LakeError, match="which is gone"):
        archive_objects.refuse_losses(root, TOPIC, end - 1, None)
    # A longer object has the records too.
    longer = tmp_path / archive.ArchiveObject(TOPIC, lost.time, 0, lost.first, lost.last + 1, lost.suffix).path
    longer.write_bytes(data)
    assert archive_objects.refuse_losses(root, TOPIC, None, None)
    # A later batch forgets nothing.
    longer.unlink()
    apply(target, 1, 90)
    with pytest.raises(LakeError, match=f"a sink made {lost.path}, which is gone"):
        archive_objects.refuse_losses(root, TOPIC, None, None)
    # After a reset by another sink, only the objects of that sink count.
    other = replace(PLACE, sink="other")
    with target.run(other):
        target.merge(Merge(other, SPEC, ORIGIN, {}, {}, clear=True))
    own = rows(1, 5)
    with target.run(other) as name:
        target.merge(Merge(other, SPEC, ORIGIN, {0: None}, {0: 100}, load(target, name, own)))
    assert archive_objects.refuse_losses(root, TOPIC, None, None)


def test_an_archive_that_can_t_tell_names_the_gaps(tmp_path: Path) -> None:
    root, target = str(tmp_path), FilesTarget(f"{tmp_path}?interval=30m")
    apply(target, 1, 40)
    (state,) = tmp_path.glob("_zync/states/*")
    kept = state.read_text()
    # A state of an earlier version knows the last objects. The next batch makes a list.
    state.write_text(json.dumps({key: value for key, value in json.loads(kept).items() if key != "objects"}))
    first, second, *_, last = archive.list_objects(root, TOPIC)
    assert not archive_objects.refuse_losses(root, TOPIC, None, None)
    last_data = (tmp_path / last.path).read_bytes()
    (tmp_path / last.path).unlink()
    with pytest.raises(LakeError, match=f"a sink made {last.path}, which is gone"):
        archive_objects.refuse_losses(root, TOPIC, None, None)
    (tmp_path / last.path).write_bytes(last_data)
    apply(target, 1, 60)
    assert archive_objects.refuse_losses(root, TOPIC, None, None)
    for path in tmp_path.glob("_zync/states/*"):
        path.unlink()
    assert not archive_objects.refuse_losses(root, TOPIC, None, None)
    assert archive_objects.gap_note(root, [first, replace(second, first=first.last + 1)]) == ""
    note = archive_objects.gap_note(root, [first, replace(second, first=first.last + 2)] * 12)
    assert note.startswith(f"note: archive {root}: offsets are missing between {first.path} and {second.topic}/")
    assert ", and 2 others. Kafka may never have had them." in note


def test_an_object_that_a_killed_sink_has_not_made_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_objects, "LOOKS", 0)

    def killed(point: str) -> None:
        if point == "sink:merged":
            raise KeyboardInterrupt

    target = FilesTarget(str(tmp_path))
    loads = load(target, f"{PLACE.load_prefix}{process_mark()}_0", rows(1, 5))
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("zync_assets.sinks.files.crash_point", killed)
        target.merge(Merge(PLACE, SPEC, ORIGIN, {0: None, 1: None}, {0: 100, 1: 100}, loads))
    with pytest.raises(LakeError, match=r"a sink has not made shop.orders/.* yet. Run the sink again, or wait"):
        archive_objects.refuse_losses(str(tmp_path), TOPIC, None, None)
    with target.run(PLACE):
        pass
    assert archive_objects.refuse_losses(str(tmp_path), TOPIC, None, None)


@pytest.mark.parametrize("form", archive.SUFFIXES)
def test_an_object_that_can_t_be_read_is_a_fault(tmp_path: Path, form: str) -> None:
    target = FilesTarget(f"{tmp_path}?format={form}")
    apply(target, 1, 40)
    paths = places(tmp_path)
    assert target.object_faults(PLACE, TOPIC) == (len(paths), [], [])
    for path in paths[1:3]:
        (tmp_path / path).write_bytes((tmp_path / path).read_bytes()[:-9])
    count, (fault,), _ = target.object_faults(PLACE, TOPIC)
    assert count == len(paths)
    assert fault.startswith("2 objects can't be read: ") and paths[1] in fault


@pytest.mark.parametrize("form", archive.SUFFIXES)
@pytest.mark.parametrize("cure", ["a copy", "reset"])
def test_an_object_that_can_t_be_read_gets_no_further_records_until_it_is_cured(
    tmp_path: Path, form: str, cure: str
) -> None:
    target = FilesTarget(f"{tmp_path}?format={form}&interval=1d")
    apply(target, 1, 10)
    progress = target.progress(PLACE)
    wholes = {item: item.read_bytes() for item in objects(tmp_path)}
    for item, whole in wholes.items():
        item.write_bytes(whole[:-9])
    with pytest.raises(SinkError, match=r"shop\.orders/.* can't be read: .* Restore it from a copy"):
        apply(target, 1, 60)
    assert target.progress(PLACE) == progress
    if cure == "reset":
        target.merge(Merge(PLACE, SPEC, ORIGIN, {}, {}, clear=True))
    else:
        for item, whole in wholes.items():
            item.write_bytes(whole)
    apply(target, 1, 60)
    assert target.progress(PLACE).next[0] > progress.next[0]
    assert target.object_faults(PLACE, TOPIC)[1] == []


def test_the_same_range_makes_the_same_object_however_it_was_cut(tmp_path: Path) -> None:
    whole = [row for row in rows(1, 60) if row["kafka"]["partition"] == 0]
    for folder, cuts in (("a", [0, 60]), ("b", [0, 13, 14, 40, 60])):
        target = FilesTarget(f"{tmp_path / folder}?interval=1d")
        at: int | None = None
        for number, (first, end) in enumerate(pairwise(cuts)):
            upcoming = whole[end - 1]["kafka"]["offset"] + 1
            target.prepare(SPEC, create=True, evolve="none")
            with target.run(PLACE) as name:
                loads = load(target, name, whole[first:end], 5 + number)
                target.merge(Merge(PLACE, SPEC, ORIGIN, {0: at}, {0: upcoming}, loads))
            at = upcoming
    first, second = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert first == second and len(first) == 1


def test_a_large_object_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_objects, "SMALL_BYTES", 0)
    target = FilesTarget(f"{tmp_path}?interval=1d")
    apply(target, 1, 40)
    assert kept(target) == rows(1, 40)
    objects = archive.list_objects(str(tmp_path), "shop.orders")
    assert len(objects) == 2 * len([own for *_, own in batches(1, 40) if own])


def test_json_lines_keep_bytes_nulls_and_digits(tmp_path: Path) -> None:
    apply(FilesTarget(f"{tmp_path}?format=jsonl&interval=1d"), 2, 30)
    lines = [
        json.loads(line)
        for item in archive.list_objects(str(tmp_path), "shop.orders")
        for line in gzip.decompress((tmp_path / item.path).read_bytes()).splitlines()
    ]
    assert lines == [json.loads(archive_objects.json_line(row)) for row in rows(2, 30)]
    name = next(iter(digests(tmp_path)))
    assert name.endswith(".jsonl.gz")
    assert json.loads(gzip.decompress((tmp_path / name).read_bytes()).splitlines()[0]) == lines[0]
    with_blob = next(line for line in lines if line["value"] and line["value"]["blob"])
    assert with_blob["value"]["blob"] in ({"base64": "AP8="}, {"base64": ""})
    assert isinstance(with_blob["value"]["price"], str)


def test_a_number_that_json_lacks_is_a_text_in_json_lines() -> None:
    row = {"value": {"n": [math.nan, 1.5], "m": [("a", math.inf)], "x": -math.inf}}
    line = archive_objects.json_line(row)
    assert line == b'{"value":{"n":["NaN",1.5],"m":[["a","Infinity"]],"x":"-Infinity"}}\n'
    kind = pa.struct({"n": pa.list_(pa.float64()), "m": pa.map_(pa.string(), pa.float64()), "x": pa.float32()})
    assert str(archive_objects.typed_value(json.loads(line)["value"], kind)) == str(row["value"])


@pytest.mark.parametrize(("name", "reason"), [("file", "File exists"), ("file/folder", "Not a directory")])
def test_a_folder_that_can_t_be_made_is_the_sink_s(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkError) as error:
        FilesTarget(f"{tmp_path}/{name}").prepare(SPEC, create=True, evolve="none")
    assert str(error.value) == (
        f"the sink's folder {tmp_path}/{name}: can't create the folder: {reason}. Correct the sink's url, or make the folder"
        " for this user."
    )


BROKEN = {
    "no gzip": b"hi",
    "no footer": b"text" * 9,
    "a part": gzip.compress(b'{"kafka": {}}\n' * 9)[:-12],
    "no JSON": gzip.compress(b"hi"),
    "no record": gzip.compress(b'{"key": 1}'),
    "gone": None,
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("form", archive.SUFFIXES)
def test_the_error_of_a_broken_object_names_it(tmp_path: Path, form: str, data: bytes | None) -> None:
    apply(FilesTarget(f"{tmp_path}?format={form}&interval=1d"), 2, 30)
    item = archive.list_objects(str(tmp_path), "shop.orders")[0]
    (tmp_path / item.path).unlink()
    if data is not None:
        (tmp_path / item.path).write_bytes(data)
    with pytest.raises(LakeError) as error:
        list(
            (archive_objects.read_object if form == archive.PARQUET else archive_objects.read_lines)(
                str(tmp_path), item
            )
        )
    assert item.path in str(error.value)
    assert ".. " not in str(error.value)
    assert "Restore it from a copy" in str(error.value) or "run it again" in str(error.value)


def test_a_loser_changes_nothing_and_an_emptied_archive_begins_again(tmp_path: Path) -> None:
    target = FilesTarget(str(tmp_path))
    apply(target, 3, 30)
    before = digests(tmp_path)
    position = target.progress(PLACE).next
    for origin, expected in ((ORIGIN, 7), (ORIGIN, None), ("another", position[0])):
        with target.run(PLACE) as name:
            loads = load(target, name, rows(4, 5))
            with pytest.raises(CommitConflict):
                target.merge(Merge(PLACE, SPEC, origin, {0: expected}, {0: 10_000}, loads))
    bad = BadRecord(0, position[0], "", "no")
    target.merge(Merge(PLACE, SPEC, ORIGIN, {0: position[0]}, {0: position[0] + 1}, bad=(bad,)))
    assert target.progress(PLACE).bad == (bad,)
    target.merge(Merge(PLACE, SPEC, ORIGIN, {0: position[0] + 1}, {}, cured=((0, position[0]),)))
    assert target.progress(PLACE).bad == ()
    assert digests(tmp_path) == before
    target.merge(Merge(PLACE, SPEC, ORIGIN, {}, {}, clear=True))
    assert (digests(tmp_path), target.progress(PLACE).next) == ({}, {})
    apply(target, 3, 30)
    assert digests(tmp_path) == before


FILE = """
lake: ./lake
inputs: [{topic: shop.orders, pool: Raw, format: bytes}]
sinks:
  - {name: keep, type: files, url: %s}
"""


def test_the_url_of_a_folder_is_relative_to_the_file_and_that_of_a_bucket_has_the_keys_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    path = tmp_path / "shop.yaml"
    path.write_text(FILE % '"archive?interval=1d", from: [Raw.*]')
    (sink,) = load_pipeline(path).sinks
    assert (sink.url, sink.mode) == (f"{tmp_path}/archive?interval=1d", "insert")
    assert [table.name for table in sink.tables] == ["shop.orders"]
    path.write_text(FILE % '"s3://bucket/folder?format=jsonl", from: [Raw.*]')
    (sink,) = load_pipeline(path).sinks
    target = FilesTarget(sink.url)
    assert (target.root, target.format) == ("s3://bucket/folder", "jsonl")
    assert storage.settings(target.root)["secret-access-key"] == "hidden"
    assert "hidden" not in repr(sink) + repr(target.root)


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        ('"a?format=csv", from: [Raw.*]', "takes ?format=parquet or jsonl, and interval=15m, 1h, 1d"),
        ("a, from: [Raw.*], mode: upsert", "must be insert: objects are never changed"),
        ("a, from: [Raw.*], key: [id]", "has no effect, because type: files keeps whole records"),
        ("a, from: [Raw.*], before: {set: {b: '1'}}", "has no effect, because type: files keeps whole records"),
        ('a, from: [Raw.*], table: "a/{topic}"', "must be the name of one folder, without /"),
        ('"ftp://a/b", from: [Raw.*]', "is in no kind of store that is known here"),
    ],
)
def test_what_has_no_meaning_for_objects_is_an_error_of_the_file(tmp_path: Path, sink: str, words: str) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text(FILE % sink)
    with pytest.raises(PipelineFileError) as error:
        load_pipeline(path)
    assert words in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_killed_sink_changes_nothing_when_it_is_repeated(tmp_path: Path, form: str) -> None:
    def run(folder: str, point: str | None = None) -> int:
        command = [sys.executable, "-m", "zync_assets_tests.sinks.test_files", f"{tmp_path / folder}?format={form}"]
        env = {**os.environ, **({"ZYNC_CRASH": point} if point else {})}
        return subprocess.run(command, env=env, check=False, capture_output=point is not None).returncode

    assert run("whole") == 0
    for number, point in enumerate(POINTS):
        assert run("killed", f"{point}@{number + 1}") == -9
    assert run("killed") == 0
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    assert archive.list_loads(str(tmp_path / "killed")) == []
    assert list((tmp_path / "killed" / "_zync" / "drafts").iterdir()) == []


@pytest.mark.slow
def test_a_killed_sink_of_a_bucket_changes_nothing_when_it_is_repeated(tmp_path: Path, s3: S3, unique: str) -> None:
    """At each crash point, and at random moments. The objects are those of a folder that no kill has met."""
    names = zip(("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), s3.settings.values(), strict=True)
    own = {**os.environ, **{f"AWS_{name}": value for name, value in names}}
    url, chance = f"s3://lakes/{unique}", random.Random(20)

    def start(**environment: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-c",
            f"from zync_assets_tests.sinks.test_files import of_bucket; of_bucket({url!r})",
        ]
        return subprocess.Popen(command, env={**own, **environment}, stderr=subprocess.DEVNULL)

    apply(FilesTarget(str(tmp_path)), 5, 80)
    for number, point in enumerate(POINTS):
        assert start(ZYNC_CRASH=f"{point}@{number + 1}").wait(60) == -9
    bucket = FilesTarget(LakeUri(url, s3.settings))
    for _ in range(6):
        process, before = start(), len(objects(s3.bucket("lakes") / unique))
        while process.poll() is None and len(objects(s3.bucket("lakes") / unique)) == before:
            time.sleep(0.01)
        with suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, 0.5))
        process.kill()
        process.wait()
    assert start().wait(60) == 0
    assert digests(s3.bucket("lakes") / unique) == digests(tmp_path)
    assert kept(bucket) == rows(5, 80)
    assert archive.list_loads(bucket.root) == []


def of_bucket(url: str) -> None:
    """Write the batches to a bucket whose keys are in the environment."""
    apply(FilesTarget(LakeUri(url, stores.with_environment(url, {}, os.environ))), 5, 80)


@pytest.mark.slow
def test_a_bucket_has_the_same_objects_as_a_folder(
    tmp_path: Path, s3: S3, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(FilesTarget(str(tmp_path)), 6, 60)
    bucket = FilesTarget(LakeUri(f"s3://lakes/{unique}", s3.settings))
    apply(bucket, 6, 60)
    assert digests(s3.bucket("lakes") / unique) == digests(tmp_path)
    assert kept(bucket) == rows(6, 60)
    assert archive.list_loads(bucket.root) == []
    # `zync restore` finds them with the keys of the environment.
    for name, value in zip(("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), s3.settings.values(), strict=True):
        monkeypatch.setenv(f"AWS_{name}", value)
    path = tmp_path / "shop.yaml"
    path.write_text(FILE % "a, from: [Raw.*]")
    found = open_archive(load_pipeline(path), f"files:s3://lakes/{unique}/shop.orders")
    batches_of = [batch for partition in found.partitions for batch, _ in found.open(partition)]
    assert [row for batch in batches_of for row in batch.to_pylist()] == rows(6, 60)


PIPELINE = """
inputs:
  - {topic: $left, pool: Raw, format: bytes}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v string"}
sinks:
  - {name: keep, type: files, url: archive, from: [Raw.*], before: {where: kafka.offset <> 1}}
"""


@pytest.mark.slow
def test_a_sink_of_a_pipeline_archives_its_raw_tables(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PIPELINE, partitions=2)
    time = 1_790_000_000_000
    it.send(
        it.left,
        (b"k\xff", b"\x00"),
        (b"a", b"b"),
        (None, None),
        times=[time] * 3,
        headers=[("h", b"\xfe"), ("n", None)],
    )
    it.send(it.left, (b"p", b"q"), partition=1, times=[time + 3_600_000])
    it.send(it.right, {"id": 1, "v": None}, times=[time])
    it.ingest()
    assert sum(made.records for made in sink_all(it.pipeline, lambda: spark)) == 4
    assert list(sink_all(it.pipeline, lambda: spark)) == []
    objects = archive.list_objects(str(tmp_path / "archive"), it.left)
    assert [item.path.removeprefix(f"{it.left}/") for item in objects] == [
        "2026-09-21T14-00/0/0-2.parquet",
        "2026-09-21T15-00/1/0-0.parquet",
    ]
    batches_of = (archive_objects.read_object(str(tmp_path / "archive"), item) for item in objects)
    (first, last), _ = ([row for batch in batches for row in batch.to_pylist()] for batches in batches_of)
    assert (first["key"], first["value"], last["key"], last["value"]) == (b"k\xff", b"\x00", None, None)
    assert first["kafka"]["headers"] == [{"key": "h", "value": b"\xfe"}, {"key": "n", "value": None}]
    assert first["kafka"]["timestamp"].timestamp() * 1000 == time
    found = rows_match(it.pipeline, lambda: spark, it.pipeline.sinks[0], it.pipeline.sinks[0].tables[0])
    assert found.passed and found.summary == "2 objects are there and readable; rows are not compared"
    (tmp_path / "archive" / objects[0].path).unlink()
    found = rows_match(it.pipeline, lambda: spark, it.pipeline.sinks[0], it.pipeline.sinks[0].tables[0])
    assert not found.passed and f"lacks 1 object: {objects[0].path}. Bring the files back" in found.summary
    reset_sink(it.pipeline, lambda: spark, "keep", it.left)
    assert archive.list_objects(str(tmp_path / "archive"), it.left) == []
    before = digests(tmp_path / "archive")
    it.send(it.right, {"id": 2, "v": "b"}, None, times=[time + 1000, time + 2000])
    it.ingest()
    assert sum(made.records for made in sink_all(it.pipeline, lambda: spark)) == 4
    assert len(digests(tmp_path / "archive")) == len(before) + 2


@pytest.mark.slow
@pytest.mark.parametrize("by_another_run", [True, False])
def test_objects_that_a_batch_did_not_make_are_made_without_a_further_batch(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, by_another_run: bool
) -> None:
    """The run that was killed is another process, or the folder did not answer after the commit of this process."""
    it = mini(services, spark, tmp_path, unique, PIPELINE, partitions=2)
    it.send(it.left, b"a", times=[1])
    it.ingest()
    assert len(list(sink_all(it.pipeline, lambda: spark))) == 1
    assert list(sink_all(it.pipeline, lambda: spark)) == []
    it.send(it.right, {"id": 1, "v": "b"}, times=[1])
    it.ingest()
    if by_another_run:
        die(it.pipeline, "sink:merged", "sink")
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(archive_objects, "write_object", away)
            with pytest.raises(TargetUnavailable):
                list(sink_table(it.pipeline, lambda: spark, "keep", it.right, patience=()))
    assert archive.list_objects(str(tmp_path / "archive"), it.right) == []
    (sink,) = it.pipeline.sinks
    found = rows_match(it.pipeline, lambda: spark, sink, sink.table(it.right))
    assert f"a sink has not made 1 object yet: {it.right}/" in found.summary
    assert f"Run the sink again: zync sink {it.pipeline.path} --sink keep" in found.summary
    assert list(sink_all(it.pipeline, lambda: spark)) == []
    assert len(archive.list_objects(str(tmp_path / "archive"), it.right)) == 1
    assert rows_match(it.pipeline, lambda: spark, sink, sink.table(it.right)).passed


@pytest.mark.slow
def test_a_reset_that_was_killed_after_its_commit_is_finished_by_the_next_run(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PIPELINE)
    it.send(it.left, b"a", b"b", b"c", times=[1, 2, 3])
    it.ingest()
    assert len(list(sink_all(it.pipeline, lambda: spark))) == 1
    before = digests(tmp_path / "archive")
    die(it.pipeline, "sink:merged", "sink", "--reset", it.left)
    assert digests(tmp_path / "archive") == before
    (made,) = sink_all(it.pipeline, lambda: spark)
    assert made.records == 2
    assert digests(tmp_path / "archive") == before


def away(*_: object) -> None:
    raise LakeUnavailable("the bucket does not answer")


if __name__ == "__main__":
    apply(FilesTarget(sys.argv[1]), 5, 80)
