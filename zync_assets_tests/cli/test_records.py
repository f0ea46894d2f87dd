"""Single records: what waits and why, and what made an output. Nothing here starts a JVM but the chain itself."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.cli.records import trace_rows
from zync_assets.errors import LakeError
from zync_assets.lake import staging
from zync_assets_tests.checks.chain import Chain
from zync_assets_tests.checks.damage import change_account, edit


def run(*arguments: str) -> list[dict[str, Any]]:
    found = CliRunner().invoke(main, [*arguments, "--format", "json"])
    assert found.exit_code == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_each_waiting_record_says_why(sound_chain: Chain) -> None:
    rows = run("pending", str(sound_chain.pipeline.path))
    assert [(row["partition"], row["offset"], row["key"], row["join_key"]) for row in rows] == [
        (0, 4, "k5", 5),
        (1, 1, "kNone", None),
        (1, 5, "k6", 6),
        (1, 7, "k8", 8),
    ]
    assert {row["topic"] for row in rows} == {sound_chain.invoices}
    assert [row["why"] for row in rows] == [
        f"no counterpart in {sound_chain.status} yet",
        "null join key: nothing matches it",
        f"no counterpart in {sound_chain.status} yet",
        f"no counterpart in {sound_chain.status} yet",
    ]
    assert {row["time"] for row in rows} == {"2023-11-14T22:13:20+00:00"}
    assert all(row["age_seconds"] > 0 for row in rows)


def test_a_second_record_with_one_key_is_a_surplus(chain: Chain) -> None:
    state = staging.open_staging(chain.pipeline.lake, "Staging")
    assert state is not None
    change_account(state, edit(lambda row: {**row, "hash": 1}, kind="pending", partition=1))
    first, *others = run("pending", str(chain.pipeline.path))[1:]
    assert first["why"] == f"no counterpart in {chain.status} yet"
    assert others[0]["why"] == f"surplus: 1 with this key wait before it, and none came in {chain.status} yet"
    assert others[1]["why"].startswith("surplus: 2 ")


def test_an_output_of_a_join_shows_both_sides(sound_chain: Chain) -> None:
    rows = run("trace", str(sound_chain.pipeline.path), sound_chain.new, "4")
    output, *sources = rows
    number = output["value"]["ID"]
    assert output["rule"] == "new-invoice"
    assert {row["role"]: row["value"].get("ID", row["value"].get("InvoiceID")) for row in sources} == {
        "left": number,
        "right": number,
    }
    assert {row["role"]: row["key"] for row in sources} == {"left": f"k{number}", "right": f"s{number}"}


def test_a_tombstone_s_one_source_is_shown(sound_chain: Chain) -> None:
    every = [run("trace", str(sound_chain.pipeline.path), sound_chain.new, str(offset)) for offset in range(7)]
    [(output, source)] = [rows for rows in every if rows[0]["rule"] == "delete"]
    assert (output["key"], output["value"]) == ("k1", None)
    assert (source["role"], source["topic"], source["partition"], source["offset"]) == (
        "in",
        sound_chain.invoices,
        1,
        4,
    )


def test_what_is_not_staged_is_said(sound_chain: Chain) -> None:
    path = str(sound_chain.pipeline.path)
    found = CliRunner().invoke(main, ["trace", path, sound_chain.new, "7"])
    assert (found.exit_code, found.stderr) == (
        1,
        f"error: topic {sound_chain.new}, partition 0: offset 7 is not staged; Staging holds offsets 0 to 6\n",
    )
    found = CliRunner().invoke(main, ["trace", path, sound_chain.new, "0", "--partition", "5"])
    assert found.stderr.endswith("Staging holds none of this partition. Choose one with --partition: 0\n")
    for topic, text in (("elsewhere", "is no output"), (sound_chain.invoices, "offset 0 is not pending")):
        found = CliRunner().invoke(main, ["trace", path, topic, "0"])
        assert found.exit_code == 1
        assert text in found.stderr


def test_a_record_that_does_not_wait_is_explained(sound_chain: Chain) -> None:
    for partition, offset, text in (
        (0, 0, "offset 0 is not pending: a batch processed it. Trace an output instead"),
        (0, 1000, "offset 1000 is not pending: it is not ingested yet; ingest ends before offset 6"),
        (7, 0, "offset 0 is not pending: it is not ingested yet; ingest ends before offset 0"),
        (1, 2, "offset 2 is not pending: it is in quarantine. List the records in quarantine: zync quarantine list"),
    ):
        with pytest.raises(LakeError) as caught:
            trace_rows(sound_chain.pipeline, sound_chain.invoices, partition, offset)
        assert text in str(caught.value)


def test_before_the_first_etl_nothing_waits(chain: Chain) -> None:
    (chain.lake / "Staging").rename(chain.lake / "elsewhere")
    assert run("pending", str(chain.pipeline.path)) == []


def test_neither_spark_nor_dagster_is_imported(sound_chain: Chain) -> None:
    code = (
        "import sys\n"
        "from zync_assets.cli.main import main\n"
        f"main(['pending', {str(sound_chain.pipeline.path)!r}], standalone_mode=False)\n"
        "print([name for name in ('pyspark', 'dagster') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
