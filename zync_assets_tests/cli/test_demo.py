"""The demo does what its files say, and only once."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from zync_assets.cli.demo import OUTPUT, play
from zync_assets.cli.main import main
from zync_assets.local.services import Services, demo_folder
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load


@pytest.fixture(scope="module")
def pipeline(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return load(
        demo_folder() / "invoices.yaml",
        {
            "KAFKA_BOOTSTRAP_SERVERS": services.bootstrap_servers,
            "SCHEMA_REGISTRY_URL": services.registry_url,
            "ZYNC_LAKE": str(tmp_path_factory.mktemp("demo")),
            "ZYNC_TARGET_URL": str(tmp_path_factory.mktemp("target") / "warehouse.db"),
        },
    )


def test_each_batch_ends_as_the_file_beside_the_data_says(pipeline: Pipeline) -> None:
    """Dan's invoice waits after the second batch and comes out in the third; then there is nothing to do."""
    expected = json.loads((Path(demo_folder()) / "expected.json").read_text())
    assert expected["topic"] == OUTPUT
    scenes = list(play(pipeline, demo_folder()))
    assert [f"batch-{scene.batch}.jsonl" for scene in scenes] == [after["batch"] for after in expected["after"]]
    for scene, after in zip(scenes, expected["after"], strict=True):
        assert scene.output == after["output"]
        seen = [{name: row[name] for name in ("topic", "partition", "offset", "rule", "key")} for row in scene.pending]
        assert seen == after["pending"]
        assert scene.table == folded(scene.output)
    assert list(play(pipeline, demo_folder())) == []


def folded(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that the records of the output topic make."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        key = record["key"]
        if record["value"] is None:
            rows.pop(str(key), None)
        else:
            rows.setdefault(str(key), dict.fromkeys(("ID", "customer", "item", "invoice_status"))).update(
                record["value"]
            )
    return [rows[key] for key in sorted(rows)]


@pytest.mark.slow
def test_the_commands_that_the_demo_prints_work_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZYNC_DEMO_DIR", str(tmp_path / "demo"))
    monkeypatch.chdir(demo_folder().parent)

    def zync(words: str) -> str:
        done = CliRunner().invoke(main, shlex.split(words))
        assert done.exit_code == 0, done.output
        return done.output

    try:
        said = zync("demo")
        [exports] = re.findall(r"export (.+)", said)
        for pair in shlex.split(exports):
            monkeypatch.setenv(*pair.split("=", 1))
        status, stop, clean = re.findall(r"zync (status \S+|demo --\w+)", said)
        assert OUTPUT in zync(status)
        assert zync(stop) == "the demo is stopped\n"
        assert zync(clean) == "the demo is stopped and removed\n"
        assert not (tmp_path / "demo").exists()
    finally:
        zync("demo --clean")
