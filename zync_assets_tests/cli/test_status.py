"""How far everything is, with a broker and without, and before anything was done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.cli.status import _way_text  # pyright: ignore[reportPrivateUsage]
from zync_assets.kafka.librdkafka import way
from zync_assets.local.services import Services
from zync_assets_tests.checks.chain import Chain
from zync_assets_tests.mini import BOTH, mini, row
from zync_assets_tests.odd_topics import open_transaction, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rows_of(path: Path) -> tuple[list[dict[str, Any]], str]:
    found = CliRunner().invoke(main, ["status", str(path), "--format", "json"])
    assert found.exit_code == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()], found.stderr


def test_inputs_and_outputs_are_at_their_ends(sound_chain: Chain) -> None:
    rows, notes = rows_of(sound_chain.pipeline.path)
    assert notes == ""
    inputs = {(row["topic"], row["partition"]): row for row in rows if row["kind"] == "input"}
    assert list(inputs) == [(sound_chain.invoices, 0), (sound_chain.invoices, 1), (sound_chain.status, 0)]
    assert inputs[sound_chain.invoices, 1] == {
        "kind": "input",
        "topic": sound_chain.invoices,
        "partition": 1,
        "pool": "Raw",
        "low": 0,
        "end": 8,
        "kept": 0,
        "next": 8,
        "lag": 0,
        "staging": "Staging",
        "seen": 8,
        "new": 0,
        "cursor": 1,
        "done": 3,
        "pending": 3,
        "unmatched": 0,
        "dropped": 1,
        "expired": 0,
        "quarantined": 1,
        "left_out": 0,
        "way": "native",
        "client": way(),
    }
    assert (inputs[sound_chain.invoices, 0]["cursor"], inputs[sound_chain.status, 0]["cursor"]) == (4, 6)
    [output] = [row for row in rows if row["kind"] == "output"]
    assert {name: output[name] for name in ("topic", "base", "next", "end", "published", "lag")} == {
        "topic": sound_chain.new,
        "base": 0,
        "next": 7,
        "end": 7,
        "published": 7,
        "lag": 0,
    }


def test_without_a_broker_the_lake_is_shown(chain: Chain) -> None:
    text = chain.pipeline.path.read_text()
    chain.pipeline.path.write_text(text.replace(chain.pipeline.kafka["bootstrap.servers"], "127.0.0.1:9"))
    rows, notes = rows_of(chain.pipeline.path)
    assert notes.startswith("note: no Kafka broker answered at 127.0.0.1:9")
    assert [(row["end"], row["lag"]) for row in rows] == [(None, None)] * 4
    assert [row["next"] for row in rows] == [6, 8, 6, 7]


def test_the_table_of_a_target_that_does_not_answer_has_a_row(chain: Chain) -> None:
    path = chain.pipeline.path
    with path.open("a") as file:
        file.write(
            "sinks:\n  - {name: away, type: postgres, url: 'postgresql://u:secret@127.0.0.1:1/db',"
            f" from: [Raw.{chain.status}], table: rows, key: [kafka.offset]}}\n"
        )
    rows, notes = rows_of(path)
    [sink] = [row for row in rows if row["kind"] == "sink"]
    assert (sink["sink"], sink["table"], sink["source"], sink["next"]) == ("away", "rows", f"Raw.{chain.status}", None)
    assert "note: sink away: " in notes and "secret" not in notes


def test_before_anything_was_ingested_the_lag_is_the_topic(chain: Chain) -> None:
    chain.lake.rename(chain.lake.with_name("elsewhere"))
    rows, _ = rows_of(chain.pipeline.path)
    assert [(row["next"], row["lag"]) for row in rows] == [(None, 6), (None, 8), (None, 6), (None, None)]


def test_an_open_transaction_is_named_with_the_way_on(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Without the note, nothing shows why records do not come: the lag counts to the transaction's begin."""
    rule = "{name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id}}"
    it = mini(services, spark, tmp_path, unique, f"{BOTH}transforms: [{rule}]\n")
    it.send(it.left, row(0))
    producer = open_transaction(it.pipeline.kafka, it.left, unique, b"{}")
    notes = rows_of(it.pipeline.path)[1]
    assert notes.count("note: ") == 1 and f"topic {it.left}, partition 0: a transaction is open" in notes
    assert notes.rstrip().endswith(f"abort --topic {it.left} --partition 0 --start-offset 1")
    producer.abort_transaction(20)
    until("it is over", lambda: "transaction" not in rows_of(it.pipeline.path)[1])


def test_a_table_has_both_parts(sound_chain: Chain) -> None:
    found = CliRunner().invoke(main, ["status", str(sound_chain.pipeline.path)])
    assert found.stdout.index("Inputs") < found.stdout.index("Outputs")
    assert sound_chain.new in found.stdout


def test_neither_spark_nor_dagster_is_imported(sound_chain: Chain) -> None:
    code = (
        "import sys\n"
        "from zync_assets.cli.main import main\n"
        f"main(['status', {str(sound_chain.pipeline.path)!r}], standalone_mode=False)\n"
        "import zync_assets.cli.status\n"
        "print([name for name in ('pyspark', 'dagster') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_it_says_which_way_keys_and_values_take(sound_chain: Chain) -> None:
    rows, _ = rows_of(sound_chain.pipeline.path)
    assert {row["way"] for row in rows} == {"native"}
    assert _way_text(["native"], ["fastavro", "native"]) == "key native, value fastavro and native"
    assert _way_text([], ["fastavro"]) == "fastavro"
    assert _way_text([], []) is None
