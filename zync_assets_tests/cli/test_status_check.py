"""Every check from the command line, and the exit code that a script goes by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.lake import staging
from zync_assets_tests.checks.chain import Chain
from zync_assets_tests.checks.damage import take_out


def test_a_sound_pipeline_has_warnings_at_most(sound_chain: Chain) -> None:
    found = CliRunner().invoke(main, ["check", str(sound_chain.pipeline.path), "--format", "json"])
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [row["check"] for row in rows] == [
        *(["monotonic_offsets", "no_unexplained_loss", "reachable", "schema_change", "quarantine_size"] * 2),
        "exactly_once_done_coverage",
        "contiguous_output_offsets",
        "pending_age",
        "source_order",
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
    take_out(state.table, state.output_files(chain.new)[-1])
    found = CliRunner().invoke(main, ["check", str(chain.pipeline.path)])
    assert found.exit_code == 1
    assert "partition 0: outputs 4 to 6 are not there" in found.stdout


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_pool_without_its_head_fails_its_checks_and_the_others_go_on(chain: Chain, how: str) -> None:
    state = staging.open_staging(chain.pipeline.lake, "Staging")
    assert state is not None
    (head,) = (Path(state.uri(item)) for item in state.files if "/head-" in item.path)
    head.unlink() if how == "gone" else head.write_bytes(head.read_bytes()[:50])
    found = CliRunner().invoke(main, ["check", str(chain.pipeline.path), "--format", "json"])
    assert (found.exit_code, found.stderr) == (1, "")
    rows = {row["check"]: row for row in map(json.loads, found.stdout.splitlines())}
    damaged = {name for name, row in rows.items() if "Restore it from a copy" in row["summary"]}
    assert damaged == {
        "quarantine_size",
        "exactly_once_done_coverage",
        "contiguous_output_offsets",
        "pending_age",
        "source_order",
        "staging_equals_topic",
    }
    assert {rows[name]["result"] for name in ("monotonic_offsets", "no_unexplained_loss")} == {"passed"}
    told = CliRunner().invoke(main, ["status", str(chain.pipeline.path)])
    assert (told.exit_code, told.stderr.count("\n")) == (1, 1)
    assert head.name in told.stderr


def test_it_starts_no_jvm_and_says_when_the_broker_is_away(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\n"
        "from zync_assets.cli.main import main\n"
        f"main(['check', {str(chain.pipeline.path)!r}], standalone_mode=False)\n"
        "print([name for name in ('pyspark', 'dagster') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
    text = chain.pipeline.path.read_text()
    chain.pipeline.path.write_text(text.replace(chain.pipeline.kafka["bootstrap.servers"], "127.0.0.1:9"))
    monkeypatch.setattr("zync_assets.kafka.topics.WAIT", 1.0)
    away = CliRunner().invoke(main, ["check", str(chain.pipeline.path)])
    assert away.exit_code == 1
    assert away.stderr.startswith("error: no Kafka broker answered at 127.0.0.1:9")
    # The results before are shown.
    assert "monotonic_offsets" in away.stdout
