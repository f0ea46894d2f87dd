"""``zync validate`` says which outputs are not held, though the file does not say so, and which fields are null."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main

FILE = """
kafka: {bootstrap.servers: "localhost:9092"}
inputs:
  - {topic: A, pool: Raw, format: json, schema: "id bigint, v string"}
  - {topic: B, pool: Raw, format: json, schema: "id bigint"}
outputs:
  - {topic: Out, pool: Staging, format: json OPTIONS}
  - {topic: More, pool: Staging, format: json}
transforms:
  - name: pair
    type: denorm
    where: {left: value.id < 5, right: value.id < 5}
    left: A
    right: B
    join-on: left.value.id = right.value.id
    RULE
"""
GROUP = """
  - name: all
    type: group
    records: {a: A}
    group-by: value.id
    complete-when: count(*) = 2
    key: first(a).key
    value: {n: count(*)}
    out: More
"""
OUT = "key: left.key, value: {v: left.value.v}"
CHANGE = """
  - {name: change, type: stateless, in: A, key: in.key, value: {v: in.value.v}, out: Out}
  - {name: gone, type: stateless, in: A, where: value IS NULL, key: in.key, value: null, out: Out}
"""
EMITS = "output Out has records of rule pair that expire, on-expire"


@pytest.mark.parametrize(
    ("rule", "options", "more", "notes"),
    [
        ("out: Out", "", "", []),
        ("out: Out", ", hold: false", "", []),
        ("out: Out", ", coalesce: true", "", ["output Out is not held, since coalesce is true"]),
        ("out: Out; expire-after: 1h", "", "", ["output Out is not held, since records of rule pair expire"]),
        (
            f"out: [{{topic: Out, {OUT}}}, {{topic: More, {OUT}}}]",
            "",
            "",
            [f"output {topic} is not held, since a rule has several outputs of a match" for topic in ("Out", "More")],
        ),
        (
            "out: Out; expire-after: 1h; on-expire: emit",
            "",
            CHANGE,
            ["output Out is not held, since records of rule pair expire", EMITS],
        ),
        ("out: Out", "", GROUP, ["output More is not held, since rule all gathers records"]),
    ],
)
def test_an_output_that_is_not_held(tmp_path: Path, rule: str, options: str, more: str, notes: list[str]) -> None:
    path = tmp_path / "shop.yaml"
    lines = [*rule.split("; "), *([] if "[" in rule else OUT.split(", ", 1))]
    path.write_text(FILE.replace("RULE", "\n    ".join(lines)).replace(" OPTIONS", options) + more)
    done = CliRunner().invoke(main, ["validate", str(path), "--format", "json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout).get("notes", [])
    assert [note.partition(":")[0] for note in found] == notes
    told = CliRunner().invoke(main, ["validate", str(path)]).stdout.splitlines()[1:]
    assert told == [f"note: {note}" for note in found]


def test_cuts_of_batches_may_show_in_an_expiry(tmp_path: Path) -> None:
    text = """
inputs:
  - {topic: L, pool: Raw, format: json ORDER}
  - {topic: R, pool: Raw, format: json}
outputs: [{topic: Out, pool: Staging, format: json}]
transforms:
  - {name: pair, type: denorm, left: L, right: R, join-on: left.key = right.key, expire-after: 1m,
     out: Out, key: left.key, value: right.value}
"""
    path = tmp_path / "pipeline.yaml"
    notes = []
    for order in ("", ", order: time", ", order: {by: kafka.offset, domain: d}"):
        path.write_text(text.replace(" ORDER", order))
        done = CliRunner().invoke(main, ["validate", str(path)])
        assert done.exit_code == 0, done.output
        notes.append("note: rule pair, expire-after: the inputs have an order of their source." in done.stdout)
    assert notes == [False, False, True]


def test_a_field_that_the_schema_lacks_is_a_note_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    lines = ["out: Out", "key: left.key", "value: {v: left.value.w}"]
    path.write_text(FILE.replace("RULE", "\n    ".join(lines)).replace(" OPTIONS", ""))
    done = CliRunner().invoke(main, ["validate", str(path)])
    lack = "rule pair: left.value.w: the input's schema has no such field; there are id, v."
    assert (done.exit_code, done.stdout.splitlines()[1:]) == (
        0,
        [f"note: {lack} The field is null, by missing-field: null"],
    )
    path.write_text("missing-field: fail" + path.read_text())
    done = CliRunner().invoke(main, ["validate", str(path)])
    assert (done.exit_code, done.stdout) == (1, f"{path}: {lack}\n")
