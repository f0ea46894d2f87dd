"""The kinds of arguments that commands share, held to Kafka's own bounds before anything is asked or opened."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from zync_assets.pipeline import is_topic_name

MAX_PARTITION = (1 << 31) - 1
MAX_OFFSET = (1 << 63) - 2
"""The last offset whose next one is a number of 64 bits too (Kafka protocol: INT64)."""

_LONGEST = 80


def harmless(text: str) -> str:
    """The text with nothing in it that a terminal obeys, but for new lines and tabs: records and files may hold anything."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def shown(text: str) -> str:
    """A user's text, shortened and made harmless for a message."""
    plain = harmless(text[: _LONGEST + 1])
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 1]}…"


def check_text(arguments: Sequence[str]) -> None:
    """UsageError for an argument with bytes that are not UTF-8, or with a NUL. No file, topic or query contains these."""
    for given in arguments:
        try:
            if "\0" not in given and given.encode():
                continue
        except UnicodeEncodeError:
            pass
        if given:
            raise click.UsageError(f"{shown(given)!r} is no UTF-8 text; give it as text, without NUL")


class Whole(click.ParamType):
    """A whole number from ``low`` to ``high``, both included, in ASCII digits."""

    name = "integer"

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = value if isinstance(value, int) else whole(str(value), self.high)
        if number is None or number < self.low:
            self.fail(f"{shown(str(value))!r} is no whole number from {self.low} to {self.high}", param, ctx)
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
                f"{shown(str(value))!r} is no legal topic name: 1 to 249 of letters, digits, `.`, `_` and `-`, and not"
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
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|m|h)?", text.strip())
        if found is None:
            self.fail(f"{shown(text)!r} is no time such as 60s, 5m or 1h, of nine digits at the most", param, ctx)
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[found[2]]


DURATION = Duration()
PARTITION = Whole(0, MAX_PARTITION)
OFFSET = Whole(0, MAX_OFFSET)
COUNT = Whole(0, MAX_OFFSET)
TOPIC = TopicName()
