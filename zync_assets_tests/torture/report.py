"""The report of torture runs: actions and findings, added up over runs in a JSON file beside the lake."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "torture.json"


@dataclass
class Tally:
    """Counts by name, from all threads of a run, and findings. ``orders``: how many orders were ever produced."""

    kills: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)
    ticks: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    passed: dict[str, int] = field(default_factory=dict)
    """How much of each schedule was done."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, what: str, name: str, by: int = 1) -> None:
        with self._lock:
            getattr(self, what)[name] += by

    def find(self, text: str) -> None:
        with self._lock:
            self.findings.append(text)

    def plain(self) -> dict[str, Any]:
        names = ("kills", "ends", "faults", "traffic", "ticks", "errors", "checked", "findings", "seconds", "passed")
        return {name: getattr(self, name) for name in names}


@dataclass
class History:
    """All runs in a folder."""

    path: Path
    prefix: str
    orders: int = 0
    runs: list[dict[str, Any]] = field(default_factory=list)

    def save(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"prefix": self.prefix, "orders": self.orders, "runs": self.runs}, indent=1))
        new.replace(self.path)

    def total(self) -> Tally:
        whole = Tally()
        for run in self.runs:
            for name in ("kills", "ends", "faults", "traffic", "ticks", "errors"):
                getattr(whole, name).update(run.get(name, {}))
            whole.findings += run["findings"]
            whole.seconds += run["seconds"]
        whole.checked = Counter(self.runs[-1]["checked"]) if self.runs else Counter()
        return whole


def read_history(folder: Path, prefix: str) -> History:
    """The history of a folder; a new one where nothing ran yet."""
    path = folder / FILE
    if not path.exists():
        return History(path, prefix)
    found = json.loads(path.read_text())
    return History(path, found["prefix"], found["orders"], found["runs"])


def text(tally: Tally, runs: int) -> str:
    """The report, for people."""
    lines = [f"{runs} runs, {tally.seconds / 60:.1f} minutes, {tally.kills.total()} kills"]
    for name in ("kills", "ends", "faults", "traffic", "ticks", "errors", "checked"):
        found: Counter[str] = getattr(tally, name)
        lines.append(f"{name}: {found.total()}" if name != "checked" else "at the end:")
        lines += [f"  {count:7}  {what}" for what, count in sorted(found.items())]
    lines += [f"FINDING: {item}" for item in tally.findings]
    lines.append("nothing lost, nothing doubled" if not tally.findings else f"{len(tally.findings)} findings")
    return "\n".join(lines)
