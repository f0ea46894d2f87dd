"""How rows are printed: a table to read, or a JSON object a line for a pipe."""

from __future__ import annotations

import base64
import datetime
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias, TypeVar

import click

Format: TypeAlias = Literal["table", "json"]
_Command = TypeVar("_Command", bound=Callable[..., Any])

WIDE = 10_000
"""The width of a table that goes to a file or a pipe: nothing is wrapped there."""


def format_option(command: _Command) -> _Command:
    """The option ``--format table|json``, as the parameter ``fmt``."""
    option = click.option(
        "--format",
        "fmt",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="A table, or one JSON object a line.",
    )
    return option(command)


def print_rows(rows: Iterable[Mapping[str, object]], columns: Sequence[str], fmt: Format) -> None:
    """Print these columns of the rows to stdout; a column that a row lacks is empty (in JSON: null)."""
    if fmt == "json":
        for row in rows:
            print_json({name: row.get(name) for name in columns})
    else:
        _print_table([[row.get(name) for name in columns] for row in rows], columns)


def print_json(value: object) -> None:
    """Print a value as JSON on a line of its own."""
    click.echo(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """The value in JSON's types: times in ISO 8601, decimals as strings, bytes in base64, NaN and infinities as null."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case bytes():
            return base64.b64encode(value).decode()
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case Decimal():
            return format(value, "f")
        case Mapping():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
        case _:
            return str(value)


def _print_table(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> None:
    # Imported here: rich takes longer than many a command.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        values = [row[place] for row in rows if row[place] is not None]
        numbers = bool(values) and all(_is_number(value) for value in values)
        table.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDE).print(table)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _cell(value: object) -> str:
    shown = plain(value)
    if shown is None:
        return ""
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
