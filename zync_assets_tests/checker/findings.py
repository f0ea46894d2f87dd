"""The result of a check: its findings, and the amount of checked evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

SHOWN = 5
"""Findings of one kind that are kept; the rest is counted."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``kind``: raw, account, sources, numbering, content, order, topic, rest, or sinks."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Report:
    """All findings, none if everything is exactly once, and counts of what was looked at."""

    findings: list[Finding] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, texts: Iterator[str]) -> None:
        """Keep the first few of ``texts``."""
        shown = [Finding(kind, text) for text in islice(texts, SHOWN)]
        more = sum(1 for _ in texts)
        self.findings += shown
        if more:
            self.findings.append(Finding(kind, f"and {more} more"))

    @property
    def sound(self) -> bool:
        return not self.findings

    @property
    def kinds(self) -> set[str]:
        return {item.kind for item in self.findings}

    def __str__(self) -> str:
        counted = ", ".join(f"{name} {count}" for name, count in self.numbers.items())
        return "\n".join([*map(str, self.findings), "exactly once" if self.sound else "NOT exactly once", counted])
