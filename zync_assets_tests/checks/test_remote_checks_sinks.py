"""The checks of target tables, beside targets that do not answer."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from zync_assets.checks.remote_checks import sink_results
from zync_assets.pipeline_file.loader import load_pipeline
from zync_assets.sinks.plan import place_of
from zync_assets.sinks.sqlite import SqliteTarget
from zync_assets.sinks.target import BadRecord, Column, Merge, TableSpec

TEXT = """
name: checks
lake: lake
kafka: {bootstrap.servers: "127.0.0.1:1"}
inputs:
  - {topic: a, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}
  - {topic: b, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}
sinks:
  - {name: away, type: mysql, url: "mysql://root@127.0.0.1:1/shop", from: [Raw.a, Raw.b]}
  - {name: near, type: sqlite, url: near.db, from: [Raw.a], mode: insert}
"""


def test_a_target_that_does_not_answer_fails_its_own_checks_alone(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(TEXT)
    found = {(result.subject, result.name): result for result in sink_results(load_pipeline(path))}
    for subject in ("away/a", "away/b"):
        position = found[subject, "sink_position"]
        assert (position.passed, position.severity) == (False, "error")
        assert position.summary.startswith("sink away: Can't connect to MySQL server on '127.0.0.1'")
        assert position.summary.endswith("Check the url, and that the target is up.")
        assert not found[subject, "sink_quarantine"].passed
    assert found["near/a", "sink_position"].passed
    assert found["near/a", "sink_quarantine"].passed


def test_the_check_of_quarantine_names_the_command_and_counts_records_alone(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(TEXT[: TEXT.index("  - {name: away")] + TEXT[TEXT.index("  - {name: near") :])
    pipeline = load_pipeline(path)
    sink, target = pipeline.sinks[0], SqliteTarget(pipeline.sinks[0].url)
    spec = TableSpec("a", (Column("id", pa.int64()),), (), "insert")
    target.prepare(spec, create=True, evolve="none")
    command = f"Correct the cause, and write the records again: zync quarantine replay {path}"
    for offset, words in ((3, "1 record is in quarantine; the last"), (4, "2 records are in quarantine; the last")):
        bad = (BadRecord(0, offset, f"id={offset}", "no."),)
        before = {0: None} if offset == 3 else {0: offset}
        target.merge(Merge(place_of(pipeline, sink, sink.tables[0]), spec, "o", before, {0: offset + 1}, bad=bad))
        found = next(item for item in sink_results(pipeline) if item.name == "sink_quarantine")
        assert (found.passed, found.severity, found.numbers) == (False, "warn", {"records": offset - 2})
        assert found.summary == f"{words} is Raw.a, partition 0, offset {offset} (id={offset}): no. {command}"
