"""Arguments and output that commands share.

The kinds of arguments have Kafka's own bounds. A command checks them before it opens anything. Rows are printed as a table for
a reader, or as one JSON object per line for a pipe.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias, TypeVar

import click

from zync_assets.pipeline import is_topic_name

MAX_PARTITION = (1 << 31) - 1
MAX_OFFSET = (1 << 63) - 2
"""The last offset whose next one is a number of 64 bits too (Kafka protocol: INT64)."""

_LONGEST = 80


_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for new lines and tabs, changes of the direction of text, and halves of characters."""


def harmless(text: str) -> str:
    """The text with nothing in it that a terminal obeys, but for new lines and tabs: records and files may hold anything."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


def excerpt(text: str) -> str:
    """A user's text, shortened and made harmless for a message."""
    plain = harmless(text[: _LONGEST + 1])
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 1]}…"


def check_text(arguments: Sequence[str]) -> None:
    """UsageError for an argument with bytes that are not UTF-8, or with a NUL. No file, topic or query contains these."""
    for argument in arguments:
        try:
            if "\0" not in argument and argument.encode():
                continue
        except UnicodeEncodeError:
            pass
        if argument:
            raise click.UsageError(f"{excerpt(argument)!r} is no UTF-8 text; give it as text, without NUL")


class Whole(click.ParamType):
    """A whole number from ``low`` to ``high``, both included, in ASCII digits."""

    name = "integer"

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = value if isinstance(value, int) else whole(str(value), self.high)
        if number is None or number < self.low:
            self.fail(f"{excerpt(str(value))!r} is no whole number from {self.low} to {self.high}", param, ctx)
        return number


def whole(text: str, high: int) -> int | None:
    """The number that the digits are; None for other text and for numbers above ``high``.

    Without ``int`` for text of any length, which refuses thousands of digits by a ValueError of its own.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(high)):
        return None
    return int(text) if int(text) <= high else None


class TopicName(click.ParamType):
    """A name that Kafka lets a topic have."""

    name = "topic"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not is_topic_name(str(value)):
            self.fail(
                f"{excerpt(str(value))!r} is no legal topic name: 1 to 249 of letters, digits, `.`, `_` and `-`, and not"
                " `.` or `..`",
                param,
                ctx,
            )
        return str(value)


class Duration(click.ParamType):
    """A time such as ``60s``, ``5m`` or ``1h``, as seconds."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|m|h)?", text.strip())
        if match is None:
            self.fail(f"{excerpt(text)!r} is no time such as 60s, 5m or 1h, of nine digits at the most", param, ctx)
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]


DURATION = Duration()
PARTITION = Whole(0, MAX_PARTITION)
OFFSET = Whole(0, MAX_OFFSET)
COUNT = Whole(0, MAX_OFFSET)
TOPIC = TopicName()


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
    """Print a value as JSON on a line of its own. Control characters are escaped."""
    is_utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(plain(value), ensure_ascii=not is_utf8, allow_nan=False)
    click.echo(_OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


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
    cell = plain(value)
    if cell is None:
        return ""
    return harmless(cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False))
