"""The commands that run the steps: what is asked for wrongly."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from zync_assets.cli.main import main

DEMO = str(Path(__file__).parents[2] / "demo" / "invoices.yaml")


def test_a_rule_that_is_none_is_said_with_those_that_are() -> None:
    result = CliRunner().invoke(main, ["etl", "--retry-pending", "status-update", DEMO])
    assert result.exit_code == 1
    assert "--retry-pending status-update: no denorm rule of this pipeline is called so; there are new-invoice." in (
        result.stderr
    )
