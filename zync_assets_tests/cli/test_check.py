"""Every check from the command line, and the exit code that a script goes by."""

from __future__ import annotations

import json

from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.lake import staging
from zync_assets_tests.checks.chain import Chain
from zync_assets_tests.checks.damage import take_out


def test_a_sound_pipeline_has_warnings_at_most(sound_chain: Chain) -> None:
    found = CliRunner().invoke(main, ["check", str(sound_chain.pipeline.path), "--format", "json"])
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [row["check"] for row in rows] == [
        *(["monotonic_offsets", "no_unexplained_loss", "schema_change", "quarantine_size"] * 2),
        "exactly_once_done_coverage",
        "contiguous_output_offsets",
        "pending_age",
        "staging_equals_topic",
    ]
    assert {row["check"] for row in rows if row["result"] == "warning"} == {
        "quarantine_size",
        "schema_change",
        "pending_age",
    }
    assert found.exit_code == 0


def test_a_failed_check_is_exit_code_1(chain: Chain) -> None:
    state = staging.open_staging(chain.pipeline.lake, "Staging")
    assert state is not None
    take_out(state.opened, state.output_files(chain.new)[-1])
    found = CliRunner().invoke(main, ["check", str(chain.pipeline.path)])
    assert found.exit_code == 1
    assert "partition 0: outputs 4 to 6 are not there" in found.stdout
