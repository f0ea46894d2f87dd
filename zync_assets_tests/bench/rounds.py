"""Rounds of measurement: each way once a round, in turn, after one that does not count; the median stands for a way.

Each round writes its measurements to a file, so that a stopped run can continue.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Way = Callable[[], float]
"""Does the work once and returns what was measured: mostly seconds."""


@dataclass(frozen=True)
class Rounds:
    """The file of the measurements, and the number of rounds per way."""

    file: Path
    count: int

    def measure(self, name: str, ways: Mapping[str, Way]) -> dict[str, list[float]]:
        """Way → its measurements, one per round. Measures the rounds that the file lacks."""
        done = self.kept().get(name, {})
        found = {way: list(done.get(way, [])) for way in ways}
        if all(len(numbers) >= self.count for numbers in found.values()):
            return found
        for number in range(-1, self.count - min(map(len, found.values()))):
            for way, work in ways.items():
                say(f"{name}: {'warming up' if number < 0 else f'round {number + 1} of {self.count}'}, {way}")
                took = work()
                if number >= 0:
                    found[way].append(took)
            self._keep(name, found)
        return found

    def kept(self) -> dict[str, dict[str, list[float]]]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def drop(self, beginnings: tuple[str, ...]) -> None:
        """Remove the measurements whose names start with one of ``beginnings``."""
        if self.file.exists():
            self._write({name: found for name, found in self.kept().items() if not name.startswith(beginnings)})

    def _keep(self, name: str, found: Mapping[str, list[float]]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._write({**self.kept(), name: dict(found)})

    def _write(self, content: Mapping[str, Mapping[str, list[float]]]) -> None:
        half = self.file.with_suffix(".part")
        half.write_text(json.dumps(content, indent=1))
        half.replace(self.file)


def median(numbers: list[float]) -> float:
    return statistics.median(numbers)


def spread(numbers: list[float]) -> str:
    """The least and the most of the rounds, over the median."""
    middle = median(numbers)
    return f"{min(numbers) / middle:.2f}–{max(numbers) / middle:.2f}"


def say(text: str) -> None:
    """Show the present work on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
