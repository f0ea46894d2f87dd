"""The demo does what its files say, and only once."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from zync_assets.cli.demo import INVOICES, MENU, ORDERS, Demo, play, what_next
from zync_assets.cli.main import main
from zync_assets.local.services import Services, demo_folder
from zync_assets.pipeline_file import load
from zync_assets_tests.checker import statement as statements
from zync_assets_tests.checker.evidence import Evidence, gather
from zync_assets_tests.checker.statement import Statement
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import Schemas


@pytest.mark.parametrize(
    "demo", [INVOICES, MENU, pytest.param(ORDERS, marks=pytest.mark.slow)], ids=lambda demo: demo.name
)
def test_each_batch_ends_as_the_file_beside_the_data_says(services: Services, tmp_path: Path, demo: Demo) -> None:
    """A pending record waits after one batch and comes out in another. In the end there is nothing to do."""
    env = {
        "KAFKA_BOOTSTRAP_SERVERS": services.bootstrap_servers,
        "SCHEMA_REGISTRY_URL": services.registry_url,
        "ZYNC_LAKE": str(tmp_path / "lake"),
        "ZYNC_TARGET_URL": str(tmp_path / "warehouse.db"),
    }
    pipeline, folder = load(demo_folder() / demo.file, env), demo_folder()
    expected = json.loads((folder / demo.folder / "expected.json").read_text())
    assert expected["topic"] == demo.output
    scenes = list(play(pipeline, folder, demo))
    assert [f"batch-{scene.batch}.jsonl" for scene in scenes] == [after["batch"] for after in expected["after"]]
    for scene, after in zip(scenes, expected["after"], strict=True):
        assert scene.output == after["output"]
        seen = [{name: row[name] for name in ("topic", "partition", "offset", "rule", "key")} for row in scene.pending]
        assert seen == after["pending"]
        assert scene.table == (folded(scene.output) if demo is INVOICES else [])
    assert list(play(pipeline, folder, demo)) == []
    if demo is ORDERS:
        statement = statements.orders("")
        evidence = gather(services.bootstrap_servers, tmp_path / "lake", statement)
        report = judge(statement, evidence, Schemas(services.registry_url), drained=True)
        assert report.sound, str(report)
        assert report.numbers["done"] == 17
        assert_damage_is_found(statement, evidence, Schemas(services.registry_url))


def assert_damage_is_found(statement: Statement, evidence: Evidence, schemas: Schemas) -> None:
    """A document with another customer, and one that is there twice, are findings."""
    [view] = statement.views
    assert evidence.staging is not None
    last = evidence.staging.outputs[view.out][-1].rows[-2]
    last["value:OrderDocuments"]["customer"]["name"] = "Mallory"
    report = judge(statement, evidence, schemas)
    assert not report.sound
    assert any("the view's result is" in finding.text and "Mallory" in finding.text for finding in report.findings)


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
        assert INVOICES.output in zync(status)
        assert zync(stop) == "the demo is stopped\n"
        assert zync(clean) == "the demo is stopped and removed\n"
        assert not (tmp_path / "demo").exists()
    finally:
        zync("demo --clean")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_commands_at_the_end_name_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    monkeypatch.chdir(tmp_path if elsewhere else demo_folder().parent)
    running = Services("127.0.0.1:1", "http://127.0.0.1:2", tmp_path, tmp_path / "lake", None, None)
    text = what_next(running, MENU, demo_folder())
    workspace, file = re.findall(r"dagster dev -w (\S+)|zync status (\S+)", text)
    assert Path(workspace[0]).is_file() and Path(file[1]).is_file()
    assert Path(file[1]).is_absolute() == elsewhere
    assert f"ZYNC_PIPELINE={file[1]} dagster dev" in text
    assert "ZYNC_PIPELINE" not in what_next(running, INVOICES, demo_folder())
