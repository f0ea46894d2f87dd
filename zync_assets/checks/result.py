"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warn"]
Number: TypeAlias = "int | float | str"


@dataclass(frozen=True)
class CheckResult:
    """One check of one asset.

    ``subject``: the asset's path (``Raw/Invoices``). ``numbers``: what was looked at and what was found.
    """

    name: str
    subject: str
    passed: bool
    severity: Severity
    summary: str
    numbers: Mapping[str, Number]


def conclude(
    name: str,
    subject: str,
    severity: Severity,
    problems: Sequence[str],
    good: str,
    numbers: Mapping[str, Number],
) -> CheckResult:
    """Passed where there are no problems; else the summary is the first of them, and how many more there are."""
    if not problems:
        return CheckResult(name, subject, True, severity, good, dict(numbers))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return CheckResult(name, subject, False, severity, problems[0] + more, {**numbers, "problems": len(problems)})
