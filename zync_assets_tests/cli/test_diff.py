"""``zync diff``: the keys that an edit changes, from a lake that stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake

from zync_assets.cli import diff
from zync_assets.cli.main import main
from zync_assets.errors import ZyncError
from zync_assets.kafka.registry import Registry
from zync_assets.lake import storage
from zync_assets.lake.stores import with_environment
from zync_assets.local.services import Services
from zync_assets.pipeline import LakeUri
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row
from zync_assets_tests.s3 import S3
from zync_assets_tests.test_s3 import zync

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UPDATE = """
  - {name: update, type: stateless, where: value.op = 'u', in: $right, out: $out, key: in.key, value: {r: in.value.v}}
  - {name: delete, type: stateless, where: value.op = 'd', in: $left, out: $out, key: in.key, value: null}
"""
RULES = BOTH + JOIN.replace("type: denorm", "type: denorm\n    where: value.op = 'c'") + UPDATE


def files(folder: Path) -> dict[str, tuple[int, int]]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def compared(old: Path, new: Path) -> list[dict[str, Any]]:
    done = CliRunner().invoke(main, ["diff", str(old), str(new), "--format", "json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_keys_that_end_up_different_and_nothing_else_of_the_lake(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Partial updates are folded, and a deleted row is null. Nothing was transformed in the real lake."""
    it: Mini = mini(services, spark, tmp_path, unique, RULES)
    for topic, sign in ((it.left, "l"), (it.right, "r")):
        it.send(topic, *((f"k{number}", row(number, f"{sign}{number}")) for number in range(4)))
    it.send(it.right, ("k1", row(1, "R1", "u")))
    it.send(it.left, ("k2", row(2, "", "d")))
    it.ingest()
    before = files(tmp_path / "lake")
    path = it.pipeline.path
    other = path.with_name("new.yaml")
    text = path.read_text()

    other.write_text(text.replace("in.key, value: null", "in.key, value: {r: \"'gone'\"}"))
    expected = {"id": 2, "l": "l2", "r": "gone"}
    assert compared(path, other) == [{"topic": it.out, "key": "k2", "old": None, "new": expected}]

    other.write_text(
        text.replace("value.op = 'u'", "value.op = 'x'").replace("l: left.value.v", "l: upper(left.value.v)")
    )
    assert compared(path, other) == [
        {
            "topic": it.out,
            "key": key,
            "old": {"id": number, "l": f"l{number}", "r": old},
            "new": {"id": number, "l": f"L{number}", "r": f"r{number}"},
        }
        for key, number, old in (("k0", 0, "r0"), ("k1", 1, "R1"), ("k3", 3, "r3"))
    ]
    assert files(tmp_path / "lake") == before
    assert not (tmp_path / "lake" / "Staging").exists()


PARTITIONED = (
    BOTH.replace("key-format: string, value-format: json, create: {", "value-format: json, create: {partitions: 3, ")
    + """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: {id: in.value.id}, value: {v: in.value.v}}
"""
)


@pytest.mark.slow
def test_an_output_with_several_partitions_is_folded_in_order_and_the_registry_gets_nothing(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PARTITIONED)
    it.send(it.left, *(row(number % 7, f"v{number}") for number in range(40)))
    it.ingest()
    path, other = it.pipeline.path, it.pipeline.path.with_name("new.yaml")
    subjects = sorted(Registry(it.pipeline.registry).subjects()) if it.pipeline.registry else None
    other.write_text(path.read_text().replace("v: in.value.v", "v: \"if(in.value.id = 3, 'x', in.value.v)\""))
    assert compared(path, other) == [{"topic": it.out, "key": {"id": 3}, "old": {"v": "v38"}, "new": {"v": "x"}}]
    other.write_text(path.read_text().replace("{partitions: 3, ", "{partitions: 2, "))
    assert compared(path, other) == []
    assert sorted(Registry(it.pipeline.registry).subjects()) == subjects


@pytest.mark.slow
def test_records_without_a_key_are_not_compared(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    copy = "  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {v: in.value.v}}\n"
    it = mini(services, spark, tmp_path, unique, f"{BOTH}transforms:\n{copy}")
    it.send(it.left, (None, row(1, "a")), (None, row(2, "b")), ("k", row(3, "c")))
    it.ingest()
    path, other = it.pipeline.path, it.pipeline.path.with_name("new.yaml")
    other.write_text(path.read_text().replace("v: in.value.v", "v: upper(in.value.v)"))
    assert compared(path, other) == [{"topic": it.out, "key": "k", "old": {"v": "c"}, "new": {"v": "C"}}]


@pytest.mark.slow
def test_a_view_is_compared_too(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    view = """
transforms:
  - {name: both, type: view, tables: {l: {topic: $left, row: value}, r: {topic: $right, row: value}}, out: $out,
     from: l JOIN r ON l.id = r.id, key: {id: l.id}, value: {id: l.id, l: l.v, r: r.v}}
"""
    it = mini(
        services,
        spark,
        tmp_path,
        unique,
        BOTH.replace("key-format: string, value-format: json, create", "value-format: json, create") + view,
    )
    it.send(it.left, *((f"k{number}", row(number, f"l{number}")) for number in range(3)))
    it.send(it.right, *((f"k{number}", row(number, f"r{number}")) for number in range(4)))
    it.ingest()
    path, other = it.pipeline.path, it.pipeline.path.with_name("new.yaml")
    other.write_text(
        path.read_text().replace("from: l JOIN r ON l.id = r.id", "from: l JOIN r ON l.id = r.id, where: l.id <> 1")
    )
    assert compared(path, other) == [
        {"topic": it.out, "key": {"id": 1}, "old": {"id": 1, "l": "l1", "r": "r1"}, "new": None}
    ]


@pytest.mark.slow
def test_records_that_retention_removed_are_named(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, RULES.replace("pool: Raw,", "pool: Raw, retention: 30d,"))
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.send(it.right, row(1), row(2))
    it.step()
    done = CliRunner().invoke(main, ["diff", str(it.pipeline.path), str(it.pipeline.path)])
    assert done.exit_code == 1
    assert f"topic {it.left}, partition 0, offsets 0 to 1" in done.output
    assert f"topic {it.right}, partition 0, offsets 0 to 1" in done.output
    assert "Nothing was compared" in done.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lake_in_a_bucket(services: Services, s3: S3, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    it = mini(services, spark, tmp_path, unique, RULES)
    for topic, sign in ((it.left, "l"), (it.right, "r")):
        it.send(topic, *((f"k{number}", row(number, f"{sign}{number}")) for number in range(3)))
    path, other = it.pipeline.path, it.pipeline.path.with_name("new.yaml")
    path.write_text(path.read_text().replace(f"lake: {it.lake}", f"lake: {s3.lake(f'lakes/{unique}')}"))
    zync("from-kafka", path)
    before = sorted(files(s3.folder / "lakes" / unique))
    assert before
    other.write_text(path.read_text().replace("l: left.value.v", "l: upper(left.value.v)"))
    lines = [line for line in zync("diff", path, other, "--format", "json").splitlines() if line.startswith("{")]
    assert [json.loads(line)["new"]["l"] for line in lines] == ["L0", "L1", "L2"]
    assert sorted(files(s3.folder / "lakes" / unique)) == before


def commit(uri: str, number: int, options: Mapping[str, str] | None = None) -> None:
    write_deltalake(uri, pa.table({"n": [number]}), mode="append", storage_options=dict(options or {}))


def numbers(folder: Path) -> list[int]:
    return sorted(DeltaTable(folder).to_pyarrow_table()["n"].to_pylist())


def test_a_commit_while_a_table_is_copied_tears_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder that is copied after the log comes after a further commit."""
    source, target = str(tmp_path / "table"), tmp_path / "copy"
    commit(source, 0)
    copytree, calls = shutil.copytree, list[object]()

    def copytree_after_commit(*arguments: Any, **keywords: Any) -> Any:
        if calls:
            commit(source, len(calls))
        calls.append(arguments)
        return copytree(*arguments, **keywords)

    monkeypatch.setattr(shutil, "copytree", copytree_after_commit)
    diff._copy(source, str(target))  # pyright: ignore[reportPrivateUsage]
    assert len(calls) > 1
    assert numbers(target) == [0]
    assert numbers(Path(source)) == list(range(len(calls)))


@pytest.mark.slow
def test_a_commit_while_a_table_in_a_bucket_is_copied_tears_nothing(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unique: str
) -> None:
    source = LakeUri(f"s3://lakes/{unique}/table", with_environment("s3://lakes", s3.settings, {}))
    options = storage.delta_options(source)
    commit(source, 0, options)
    download, calls = diff._download, list[object]()  # pyright: ignore[reportPrivateUsage]

    def download_after_commit(*arguments: Any) -> None:
        calls.append(arguments)
        commit(source, len(calls), options)
        download(*arguments)

    monkeypatch.setattr(diff, "_download", download_after_commit)
    diff._copy(source, str(tmp_path / "copy"))  # pyright: ignore[reportPrivateUsage]
    assert len(calls) > 1
    assert numbers(tmp_path / "copy") == [0, 1]


def test_a_file_that_is_removed_while_a_table_is_copied_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "table"
    commit(str(source), 0)
    link = diff._link  # pyright: ignore[reportPrivateUsage]

    def link_after_removal(path: str, target: str) -> None:
        if path.endswith(".parquet"):
            Path(path).unlink()
        link(path, target)

    monkeypatch.setattr(diff, "_link", link_after_removal)
    with pytest.raises(ZyncError, match=r"table can't be copied whole: .*\.parquet.*Run the command again"):
        diff._copy(str(source), str(tmp_path / "copy"))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("arguments", [[], ["shop.yaml"]])
def test_it_takes_two_files(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["diff", *arguments]).exit_code == 2
