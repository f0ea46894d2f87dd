"""The lake is full, gone, or changed by another program: found, named with the way back, nothing made worse; and once the
cause is cured, everything goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable, write_deltalake

from zync_assets.audit import guard
from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.checks.output_checks import run_all
from zync_assets.checks.remote_checks import staging_equals_topic
from zync_assets.errors import LakeUnavailable, ZyncError
from zync_assets.lake import tables
from zync_assets.local.services import Services
from zync_assets.publish.commit import recreate_topic
from zync_assets_tests.checks.damage import overwrite
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A file system of its own; skips the test where this user may not mount one."""
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def more(it: Mini, number: int) -> None:
    it.send(it.left, row(number, "x" * 300))
    it.send(it.right, row(number))


def begun(services: Services, spark: SparkSession, folder: Path, prefix: str) -> Mini:
    """Two batches that are published."""
    it = mini(services, spark, folder, prefix, BOTH + JOIN)
    for number in range(2):
        more(it, number)
        it.step()
        it.publish()
    return it


def goes_on(it: Mini, ids: list[int]) -> None:
    it.step()
    it.publish()
    assert [value["id"] for value in it.values()] == ids
    bad = [result for result in run_all(it.pipeline) if not result.passed]
    assert not bad


def refused(doing: Callable[[], object]) -> str:
    with pytest.raises(ZyncError) as caught:
        doing()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def newer_log(uri: str, keep: int) -> list[Path]:
    return sorted(Path(uri, "_delta_log").glob("*.json"))[keep:]


@pytest.mark.slow
def test_a_full_disk(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        it = begun(services, spark, folder, unique)
        for number in range(100, 200):
            it.send(it.left, row(number, os.urandom(500).hex()), times=[1_700_000_000_000])
            it.send(it.right, row(number), times=[1_700_000_000_000])
        filler = folder / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as out:
            while True:
                if out.write(bytes(4096)) < 4096:
                    raise OSError("No space left")
        with pytest.raises(LakeUnavailable, match="disk is full"):
            it.ingest()
        os.truncate(filler, filler.stat().st_size - 300_000)
        it.ingest()
        with filler.open("ab", buffering=0) as out:
            while out.write(bytes(512)) == 512 and shutil.disk_usage(folder).free > 4096:
                pass
        with pytest.raises(LakeUnavailable, match="disk is full"):
            it.etl()
        filler.unlink()
        goes_on(it, [0, 1, *range(100, 200)])


@pytest.mark.slow
def test_a_read_only_folder_and_one_that_is_gone(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = begun(services, spark, tmp_path, unique)
    more(it, 2)
    with mounted(Path(it.lake), "--bind", it.lake):
        subprocess.run(["mount", "-o", "remount,ro,bind", it.lake], check=True)
        assert "it is read-only" in refused(it.ingest)
    away = Path(it.lake).rename(tmp_path / "away")
    assert "existed before, and is missing now" in refused(it.ingest)
    assert "existed before, and is missing now" in refused(it.etl)
    assert "existed before, and is missing now" in refused(it.publish)
    assert not Path(it.lake).exists()
    away.rename(it.lake)
    goes_on(it, [0, 1, 2])


@pytest.mark.slow
def test_what_another_program_does_to_a_raw_table(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = begun(services, spark, tmp_path, unique)
    uri = f"{it.lake}/Raw/{it.left}"
    more(it, 2)
    it.ingest()
    ours = DeltaTable(uri).version()
    changes: dict[str, Callable[[DeltaTable], object]] = {
        "DELETE": lambda table: table.delete("kafka.offset = 2"),
        "RESTORE": lambda table: table.restore(ours - 1),
        "WRITE": lambda table: write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append"),
    }
    for name, change in changes.items():
        change(DeltaTable(uri))
        told = refused(it.etl)
        assert (
            f"changed by another program: it holds {4 if name == 'WRITE' else 2} records of partition 0, and 3 were"
            in told
        )
        assert f"({name})" in told
        assert f"Restore version {ours}." in told
        DeltaTable(uri).restore(ours)
    file = Path(uri, next(item.path for item in opened(uri).files if item.first == 2))
    file.rename(tmp_path / "file")
    assert str(file) in refused(it.etl)
    (tmp_path / "file").rename(file)
    goes_on(it, [0, 1, 2])
    DeltaTable(uri).optimize.compact()
    more(it, 3)
    assert (
        "its files differ from the files that zync committed. Nothing was done. Another program committed version"
        in (refused(it.ingest))
    )
    failed = [result for result in run_all(it.pipeline) if not result.passed]
    assert [result.name for result in failed] == ["monotonic_offsets"]
    DeltaTable(uri).restore(ours)
    # A look over everything passes, and lifts the block.
    assert [result.name for result in run_all(it.pipeline) if not result.passed] == []
    goes_on(it, [0, 1, 2, 3])


@pytest.mark.slow
def test_etl_looks_at_the_offsets_of_new_raw_files_that_no_check_has_passed(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = begun(services, spark, tmp_path, unique)
    for number in (2, 3):
        it.send(it.left, row(number))
        it.send(it.right, row(number))
    it.ingest()
    table = opened(f"{it.lake}/Raw/{it.left}")
    [file] = [item for item in table.files if item.first == 2]
    shutil.copy(Path(table.uri, file.path), tmp_path / "sound")
    overwrite(table, file, lambda rows: [rows[0], rows[0]])
    assert (
        f"pool Staging: table {table.uri}: file {file.path}: offset 2 follows 2 in row 1. Nothing was transformed. Restore"
    ) in refused(it.etl)
    shutil.copy(tmp_path / "sound", Path(table.uri, file.path))

    looks: list[str] = []
    real = guard.file_problems
    monkeypatch.setattr(guard, "file_problems", lambda *given: looks.append(given[1].path) or real(*given))
    assert all(result.passed for result in run_all(it.pipeline))
    goes_on(it, [0, 1, 2, 3])
    assert looks == []
    more(it, 4)
    goes_on(it, [0, 1, 2, 3, 4])
    assert len(looks) == 2
    assert it.etl() is None
    assert len(looks) == 2


def opened(uri: str) -> tables.LakeTable:
    found = tables.open_table(uri)
    assert found is not None
    return found


@pytest.mark.slow
def test_what_another_program_does_to_a_staging_table(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = begun(services, spark, tmp_path, unique)
    uri = f"{it.lake}/Staging"
    more(it, 2)
    it.step()
    ours = DeltaTable(uri).version()
    more(it, 3)
    it.ingest()
    DeltaTable(uri).restore(ours - 1)
    assert "its account is that of batch 2, and batch 3 was committed" in refused(it.etl)
    assert f"version {ours + 1} (RESTORE) to it. Restore version {ours}." in refused(it.publish)
    DeltaTable(uri).restore(ours)
    DeltaTable(uri).optimize.compact()
    assert f"({'OPTIMIZE'}) to it. Restore version {ours}." in refused(it.etl)
    DeltaTable(uri).restore(ours)
    DeltaTable(uri).delete("kafka.offset = 2")
    assert f"it holds 2 outputs of {it.out}, and 3 were numbered" in refused(it.publish)
    DeltaTable(uri).restore(ours)
    DeltaTable(uri).update({"rule": "'other'"}, predicate="kafka.offset = 2")
    found = exactly_once_done_coverage(it.pipeline, "Staging")
    assert not found.passed
    assert "was written by another program" in found.summary
    DeltaTable(uri).restore(ours)
    goes_on(it, [0, 1, 2, 3])


@pytest.mark.slow
def test_tables_that_went_back_to_a_copy(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    """As after a backup was put back: the newer commits are not in the log any more."""
    it = begun(services, spark, tmp_path, unique)
    raw, staging = f"{it.lake}/Raw/{it.left}", f"{it.lake}/Staging"
    kept = newer_log(raw, 1)[0].rename(tmp_path / "commit")
    assert "went back: it is at version 0, and was at 1" in refused(it.ingest)
    tables.forget(it.lake)  # as a new process
    more(it, 2)
    assert "was transformed up to offset 2, and its next offset is 1" in refused(it.ingest)
    assert "was transformed up to offset 2, and its next offset is 1" in refused(it.etl)
    kept.rename(Path(raw, "_delta_log", "00000000000000000001.json"))
    for item in newer_log(staging, 1):
        item.unlink()
    tables.forget(it.lake)
    for doing in (it.etl, it.publish):
        told = refused(doing)
        assert f"{it.out} was published up to offset 2, and the staging table ends at offset 1" in told
    assert not staging_equals_topic(it.pipeline, it.out).passed
    recreate_topic(it.pipeline, it.out)
    goes_on(it, [0, 1, 2])
    away = Path(staging).rename(tmp_path / "staging")
    tables.forget(it.lake)
    assert "the staging table is not there" in refused(it.publish)
    assert "the staging table is not there" in refused(it.etl)
    away.rename(staging)
    goes_on(it, [0, 1, 2])


def test_a_lake_that_vanished_is_no_new_lake(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Its outputs were published: the records of the topic came from somewhere."""
    it = begun(services, spark, tmp_path, unique)
    away = Path(it.lake).rename(tmp_path / "away")
    for doing in (it.ingest, it.etl, it.publish):
        tables.forget(it.lake)  # as a new process
        told = refused(doing)
        assert f"topic {it.out} holds records already (its ends: partition 0: 2)" in told
        assert "is not mounted, put it back" in told
    assert not Path(it.lake).exists()
    away.rename(it.lake)
    more(it, 2)
    goes_on(it, [0, 1, 2])


@pytest.mark.slow
def test_etl_stops_at_whatever_another_program_changed_of_its_inputs(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = begun(services, spark, tmp_path, unique)
    left, right = f"{it.lake}/Raw/{it.left}", f"{it.lake}/Raw/{it.right}"
    it.send(it.left, row(2), b"{ no json")
    it.ingest()
    bad = f"{it.lake}/~quarantine/Raw/{it.left}"
    changes: list[tuple[str, Callable[[DeltaTable], object]]] = [
        (left, without_statistics),
        (left, lambda table: table.update({"key": "'other'"}, predicate="kafka.offset = 2")),
        # Nothing new is in this table, but records of it may wait.
        (right, lambda table: table.update({"key": "'other'"}, predicate="kafka.offset = 1")),
        (bad, lambda table: table.delete()),
    ]
    for uri, change in changes:
        ours = DeltaTable(uri).version()
        properties = DeltaTable(uri).metadata().configuration
        change(DeltaTable(uri))
        told = refused(it.etl)
        assert f"table {uri} was changed by another program" in told
        assert "Restore version" in told
        DeltaTable(uri).restore(ours)
        assert DeltaTable(uri).metadata().configuration == properties
    it.send(it.right, row(2))
    it.step()
    it.publish()
    assert [value["id"] for value in it.values()] == [0, 1, 2]
    assert it.classes(it.left) == {"done": 3, "quarantined": 1}


def without_statistics(table: DeltaTable) -> None:
    table.alter.set_table_properties({"delta.dataSkippingNumIndexedCols": "0"})
    DeltaTable(table.table_uri).optimize.compact()
