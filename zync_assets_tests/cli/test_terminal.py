"""Rows as a table and as JSON lines."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from zync_assets.cli.terminal import Format, format_option, print_rows

ROWS = [
    {"topic": "shop.public.orders", "lag": 3, "value": {"ID": 1, "name": "Zoë"}, "left": "out"},
    {"topic": "[bold]T", "lag": 12},
]


def test_json_is_an_object_a_line_with_the_columns_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS, ["topic", "lag", "value"], "json")

    assert capsys.readouterr().out.splitlines() == [
        '{"topic": "shop.public.orders", "lag": 3, "value": {"ID": 1, "name": "Zoë"}}',
        '{"topic": "[bold]T", "lag": 12, "value": null}',
    ]


def test_a_table_shows_every_cell_whole_and_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    print_rows([*ROWS, {"topic": long, "lag": 0}], ["topic", "lag", "value"], "table")

    shown = capsys.readouterr().out
    assert long in shown
    assert "[bold]T" in shown
    assert '{"ID": 1, "name": "Zoë"}' in shown
    assert "out" not in shown


def test_a_terminal_obeys_nothing_that_is_in_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\x1b[2J\x9b1m\x7f\u202eb\u3000Zoë"
    print_rows([{"text": text, "value": {"text": text}}], ["text", "value"], "table")
    shown = capsys.readouterr().out
    assert "a\ufffd[2J\ufffd1m\ufffd\ufffdb\u3000Zoë" in shown
    print_rows([{"text": text}], ["text"], "json")
    lines = capsys.readouterr().out
    assert json.loads(lines) == {"text": text}
    assert "b\u3000Zoë" in lines
    assert set("\x1b\x9b\x7f\u202e").isdisjoint(shown + lines)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"\x00\xff", "AP8="),
        (Decimal("1E+3"), "1000"),
        (datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC), "2024-02-29T12:00:00+00:00"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (float("nan"), None),
        (Path("a/b"), "a/b"),
        ([1, (2.5, None), {True: b""}], [1, [2.5, None], {"True": ""}]),
    ],
)
def test_any_value_becomes_json(value: object, shown: object, capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([{"value": value}], ["value"], "json")

    assert json.loads(capsys.readouterr().out) == {"value": shown}


def test_the_option_knows_two_formats() -> None:
    @click.command()
    @format_option
    def command(fmt: Format) -> None:
        print_rows([{"a": 1}], ["a"], fmt)

    runner = CliRunner()
    assert runner.invoke(command, ["--format", "json"]).stdout == '{"a": 1}\n'
    assert "─" in runner.invoke(command).stdout
    assert runner.invoke(command, ["--format", "xml"]).exit_code == 2
