"""That the benchmark measures what it says; its numbers are not looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zync_assets_tests.bench import codecs
from zync_assets_tests.bench.__main__ import bench


def test_every_family_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "LEAST", 0)
    done = CliRunner().invoke(bench, ["codecs", "--records", "200", "--json", str(tmp_path / "rows")])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "rows").read_text())
    assert [row["family"] for row in rows] == list(codecs.FAMILIES)
    assert all(
        row[f"{what} {way}"] > 0 for row in rows for what in ("decode", "encode") for way in ("native", "fastavro")
    )


def test_a_family_that_is_none_is_an_error() -> None:
    done = CliRunner().invoke(bench, ["codecs", "--family", "colours"])
    assert done.exit_code == 2 and "there are integers" in done.output
