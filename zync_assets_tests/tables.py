"""Tables at the end of a test run: what tests found out that is worth more than "passed".

A test calls ``record_property("table: <title>", "<cells, separated by |>")``; the rows of one title are printed together,
whichever worker ran the test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

PREFIX = "table: "


def print_tables(terminal: pytest.TerminalReporter) -> None:
    """The rows of all finished tests, a table for each title."""
    tables: dict[str, list[list[str]]] = defaultdict(list)
    for outcome in ("passed", "failed"):
        for report in terminal.stats.get(outcome, []):
            for name, text in report.user_properties:
                if name.startswith(PREFIX):
                    tables[name.removeprefix(PREFIX)].append([cell.strip() for cell in str(text).split("|")])
    for title, rows in sorted(tables.items()):
        terminal.write_sep("-", title)
        for line in aligned(rows):
            terminal.write_line(line)


def aligned(rows: Iterable[list[str]]) -> list[str]:
    """Rows as lines with their columns below each other."""
    listed = sorted(rows)
    widths = [max(len(row[place]) for row in listed if place < len(row)) for place in range(max(map(len, listed)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in listed]
