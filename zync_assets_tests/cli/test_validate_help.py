"""``zync help`` prints the whole grammar, and finds a key that is misspelt."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.pipeline_file.grammar import KEYS


def shown(*arguments: str) -> str:
    found = CliRunner().invoke(main, ["help", *arguments])
    assert found.exit_code == 0, found.stderr
    return found.stdout


def refused(key: str) -> str:
    found = CliRunner().invoke(main, ["help", key])
    assert found.exit_code == 2
    return found.stderr


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_overview_has_a_line_for_every_key_of_the_grammar() -> None:
    overview = shown()
    assert [line.split()[0] for line in overview.splitlines()[2:] if not line.startswith(" ")] == list(KEYS)
    for key in KEYS.values():
        assert words(key.summary) in words(overview)


def test_every_key_has_a_page_with_type_default_values_and_example() -> None:
    for path, key in KEYS.items():
        page = shown(path)
        assert page.splitlines()[0] == path
        assert words(key.text) in words(page)
        assert f"type {words(key.type)}" in words(page)
        assert words(key.example) in words(page)
        assert ("the key is required" in page) == key.required
        assert not key.default or f"default {words(key.default)}" in words(page)
        assert not key.allowed or f"allowed {', '.join(key.allowed)}" in words(page)
        assert all(f"{path}.{below.name} " in page for below in key.keys)
        assert max(map(len, page.splitlines())) <= 105


def test_a_section_lists_the_keys_below_it() -> None:
    assert "inputs.retention         The age at which raw records are removed.\n" in shown("inputs")


def test_a_path_of_an_error_message_and_a_property_of_a_library_are_found() -> None:
    assert shown("inputs[0].retention") == shown("inputs.retention")
    assert shown("kafka.ssl.ca.location") == shown("kafka")
    assert shown("lake.aws_region") == shown("lake")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("inputs.retension", "`inputs.retention`"),
        ("retention", "`inputs.retention`"),
        ("transform", "`transforms`"),
        ("outputs.start_at", "`outputs.start-at`"),
        ("format", "`inputs.format`, `outputs.format`"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_near_keys(wrong: str, right: str) -> None:
    message = refused(wrong)
    assert f"`{wrong}` is no key of the pipeline file; near keys: " in message
    assert right in message
    assert "`zync help` lists every key" in message


def test_a_word_like_no_key_and_a_command_are_errors_with_a_cure() -> None:
    assert refused("xyzzy").endswith("`xyzzy` is no key of the pipeline file; `zync help` lists every key\n")
    assert "`run` is a command, not a key of the pipeline file; run `zync run --help`" in refused("run")
    assert "\x1b" not in refused("\x1b[31m")


def test_json_has_a_line_for_each_key() -> None:
    rows = [json.loads(line) for line in shown("--format", "json").splitlines()]
    assert [row["key"] for row in rows] == list(KEYS)
    [row] = [json.loads(line) for line in shown("inputs.unmatched", "--format", "json").splitlines()]
    assert (row["default"], row["allowed"], row["required"]) == ("keep", ["keep", "drop", "fail"], False)


def test_the_reference_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from zync_assets.cli.main import main\n"
        "main(['help', 'inputs.retention'], standalone_mode=False)\n"
        "print([name for name in ('pyspark', 'dagster', 'pyarrow', 'confluent_kafka') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
