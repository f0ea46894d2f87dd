"""zync's own files: their rules as Spark SQL, each problem with its line and column, and the demo's invoices."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from zync_assets.cli.demo import INVOICES, Demo, play
from zync_assets.errors import PipelineFileError
from zync_assets.etl.rules import explain_rules
from zync_assets.kafka.topics import create_topic
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load

DEMO = Path(__file__).resolve().parents[3] / "demo"
PAGE = DEMO / "zed.md"
HEAD = """\
inputs:
- topic: TableA
  pool: Raw
- topic: TableB
  pool: Raw

output:
- topic: TableC
  pool: Staging

transforms:
"""
JOIN = """\
- type: denorm
  where: value.op in ["c", "r"]
  left: TableA
  right: TableB
  join-on: left.value.after.ID=right.value.after.InvoiceID
  out: TableC
  zed: |
    // What the target wants.
    out:={key: left.key, value: {ID: left.value.after.ID, status: right.value.after.status}}
- type: stateless
  where: value.op=="u"
  in: TableA
  out: TableC
  zed: |
    | out:={key: in.key, value: in.value.after}
"""


def read(folder: Path, text: str) -> Pipeline:
    file = folder / "shop.yaml"
    file.write_text(HEAD + text)
    return load(file, {})


def found_problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(PipelineFileError) as caught:
        read(folder, text)
    return [str(problem) for problem in caught.value.problems]


def test_the_file_of_zync_s_documents_loads_as_it_is(tmp_path: Path) -> None:
    pipeline = read(tmp_path, JOIN)
    join, update = pipeline.rules
    assert [(side.name, side.topic, side.where, side.keys) for side in join.sides] == [
        ("left", "TableA", "value.op IN ('c', 'r')", ("left.value.after.ID",)),
        ("right", "TableB", "value.op IN ('c', 'r')", ("right.value.after.InvoiceID",)),
    ]
    assert (join.key, join.value) == ("left.key", {"ID": "left.value.after.ID", "status": "right.value.after.status"})
    assert (update.key, update.value, update.sides[0].where) == ("in.key", "in.value.after", "value.op = 'u'")
    assert [(item.topic, item.pool) for item in (*pipeline.inputs, *pipeline.outputs)] == [
        ("TableA", "Raw"),
        ("TableB", "Raw"),
        ("TableC", "Staging"),
    ]
    assert {statement.kind for statement in explain_rules(pipeline)} == {"assignment", "rule"}


def test_keys_of_the_two_sides_stand_for_a_join(tmp_path: Path) -> None:
    keys = "left-key: left.value.after.ID\n  right-key: (right.value.after.InvoiceID + 0)"
    join = read(tmp_path, re.sub("join-on: .*", keys, JOIN)).rules[0]
    assert [side.keys for side in join.sides] == [
        ("left.value.after.ID",),
        ("coalesce(right.value.after.InvoiceID, 0Y) + 0L",),
    ]
    sql = "  key: left.key\n  value: left.value\n"
    text = re.sub("  zed: .*", sql, re.sub("join-on: .*", keys, JOIN.split("- type: stateless")[0]), flags=re.DOTALL)
    join = read(tmp_path, text.replace('in ["c", "r"]', "= 'c'")).rules[0]
    assert [side.keys for side in join.sides] == [("(left.value.after.ID)",), ("((right.value.after.InvoiceID + 0))",)]


def test_each_side_of_a_join_may_have_its_own_condition(tmp_path: Path) -> None:
    text = JOIN.replace('where: value.op in ["c", "r"]', 'where: {left: value.op == "c", right: true}')
    join = read(tmp_path, text).rules[0]
    assert [side.where for side in join.sides] == ["value.op = 'c'", "true"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("left.key, ", "left.key[1:2], ", "line 20: transforms[0].zed: column 16: slices are not supported"),
        ("{ID: ", "{ID: now() + ", "line 20: transforms[0].zed: column 38: the function `now` is not supported"),
        ("value.after}", "value.before", "line 26: transforms[1].zed: column 48: something is missing at the end"),
        ('value.op=="u"', 'value.op="u"', "line 22: transforms[1].where: column 18: `=` can't stand there"),
        (
            "=right",
            "=left",
            "line 16: transforms[0].join-on: `left.value.after.ID = left.value.after.InvoiceID` compares",
        ),
        ("ID=right", "ID==right", "line 16: transforms[0].join-on: column 31: `==` can't stand there"),
        (
            "  zed: |\n    | out",
            "  key: in.key\n  zed: |\n    | out",
            "line 25: transforms[1].key: stands in `zed:` already",
        ),
        ("  in: TableA", "  in: TableD", "line 23: transforms[1].in: `TableD` is no input of this file"),
        (
            "  in: TableA",
            "  in: TableA\n  left-key: in.key",
            "line 24: transforms[1].left-key: belongs to a rule of type denorm",
        ),
        ("  join-on", "  left-key: left.key\n  join-on", "line 16: transforms[0].left-key: says what join-on says"),
        ("type: stateless", "type: view", "line 25: transforms[1].zed: belongs to a rule of type stateless or denorm"),
        (
            "{key: in.key, value: in.value.after}",
            "{key: " + "(" * 3 + "in.key" + ")" * 3 + ", value: {a: " + "[" * 25 + "1" + "]" * 25 + "}} // deep",
            "",
        ),
    ],
)
def test_a_problem_names_line_column_and_cure(tmp_path: Path, old: str, new: str, problem: str) -> None:
    if not problem:
        assert read(tmp_path, JOIN.replace(old, new)).rules
        return
    assert problem in "\n".join(found_problems(tmp_path, JOIN.replace(old, new)))


@pytest.mark.parametrize(
    ("condition", "cure"),
    [
        ('value.op=="u" && value.a==1', "column 24: `&` is not supported; write `and`"),
        ('value.op=="u" || value.a==1', "column 24: `|` can't stand there; write `or` between conditions"),
        ("value.name LIKE 'A%'", "`LIKE` is not supported; in Spark SQL: value.name LIKE 'pattern%'"),
        ("value.name ~ 'A'", "`~` is not supported; in Spark SQL: value.name RLIKE 'pattern'"),
        ("grep(/A/, value.name)", "`/` can't stand there; a pattern is text in Spark SQL: value.name RLIKE 'pattern'"),
        ("value.a is null", "`is` can't stand there; write `is(value, <type>)`, or `== null`"),
        ("value.op not in ['u']", "`not` can't stand there; write `!(a in b)`"),
        ("value.a between 1 and 2", "`between` is not supported; write `a >= b and a <= c`"),
    ],
)
def test_an_operator_of_another_language_names_the_one_to_write(tmp_path: Path, condition: str, cure: str) -> None:
    (problem,) = found_problems(tmp_path, JOIN.replace('value.op=="u"', condition))
    assert problem.startswith("line 22: transforms[1].where: column ")
    assert cure in problem


def test_places_in_texts_of_other_forms(tmp_path: Path) -> None:
    rule = "- {type: stateless, in: TableA, out: TableC, zed: 'out:={key: in.key, value: now()}'}\n"
    (problem,) = found_problems(tmp_path, rule)
    assert problem.startswith(f"line 12: transforms[0].zed: column {rule.index('now') + 1}: ")
    folded = "- type: stateless\n  in: TableA\n  out: TableC\n  zed: >\n    out:={key: in.key,\n    value: now()}\n"
    (problem,) = found_problems(tmp_path, folded)
    assert problem.startswith("line 15: transforms[0].zed: column ")


def test_an_output_with_a_shape_or_one_text_says_what_zed_must_make(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    body = "transforms: [{type: stateless, in: A, out: B, zed: 'out:={key: {a: 1}, value: {...in.value}}'}]\n"
    output = "output: {topic: B, pool: S, key-format: string, shape: {where: value.a > 1}}\n"
    file.write_text("inputs: [{topic: A, pool: R}]\n" + output + body)
    with pytest.raises(PipelineFileError) as caught:
        load(file, {})
    assert "`B` has a shape, which needs the names of all fields" in str(caught.value)
    assert "must make one value as key: the output's key format is string" in str(caught.value)


def test_the_page_s_files_load_and_its_table_says_what_the_compiler_makes(tmp_path: Path) -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        (tmp_path / "shop.yaml").write_text(block)
        assert load(tmp_path / "shop.yaml", {}).rules
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", text.replace(r"\|", "¦"), re.MULTILINE)
    assert len(rows) > 10
    for zed, sql in rows:
        rule = {"type": "stateless", "in": "TableA", "out": "TableC"}
        rule["zed"] = f"out:={{key: null, value: {{v: {zed.replace('¦', '|')}}}}}"
        (made,) = read(tmp_path, f"- {json.dumps(rule, ensure_ascii=False)}\n").rules
        assert made.value == {"v": sql.replace("¦", "|")}, zed


@pytest.mark.slow
def test_the_demo_s_invoices_run_from_zync_s_own_file(services: Services, tmp_path: Path, unique: str) -> None:
    """The four batches give what they give with the demo's own file. Only the topics have names of their own."""
    folder, names = tmp_path / "demo", ("InvoiceStatus", "NewInvoices", "Invoices")
    shutil.copytree(DEMO / "schemas", folder / "schemas")
    for name in ("Invoices", "InvoiceStatus"):
        for side in ("key", "value"):
            shutil.move(folder / f"schemas/{name}-{side}.avsc", folder / f"schemas/{unique}.{name}-{side}.avsc")

    def own(text: str) -> str:
        return re.sub(rf"\b({'|'.join(names)})\b", rf"{unique}.\1", text)

    for source in [*DEMO.glob("batch-*.jsonl"), DEMO / "zync-invoices.yaml", DEMO / "expected.json"]:
        (folder / source.name).write_text(own(source.read_text()))
    env = {"KAFKA_BOOTSTRAP_SERVERS": services.bootstrap_servers, "SCHEMA_REGISTRY_URL": services.registry_url}
    pipeline = load(folder / "zync-invoices.yaml", env)
    create_topic(pipeline.kafka, f"{unique}.NewInvoices", 1, 1, {})
    expected = json.loads((folder / "expected.json").read_text())["after"]
    scenes = list(play(pipeline, folder, Demo("invoices", f"{unique}.NewInvoices", INVOICES.story)))
    assert [scene.output for scene in scenes] == [after["output"] for after in expected]
    waits = [[(row["topic"], row["offset"], row["key"]) for row in scene.pending] for scene in scenes]
    assert waits == [[(row["topic"], row["offset"], row["key"]) for row in after["pending"]] for after in expected]
