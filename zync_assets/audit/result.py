"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from zync_assets.lake.checked import Look

Severity: TypeAlias = Literal["error", "warn"]
Number: TypeAlias = "int | float | str"


@dataclass(frozen=True)
class CheckResult:
    """One check of one asset.

    ``subject``: the asset's path (``Raw/Invoices``). ``numbers``: what was looked at and what was found.
    ``look``: what a blocking check looked at; None where there was nothing to look at, or nobody waits for the check.
    """

    name: str
    subject: str
    passed: bool
    severity: Severity
    summary: str
    numbers: Mapping[str, Number]
    look: Look | None = field(default=None, repr=False)


def conclude(
    name: str,
    subject: str,
    severity: Severity,
    problems: Sequence[str],
    good: str,
    numbers: Mapping[str, Number],
    look: Look | None = None,
) -> CheckResult:
    """Passed where there are no problems; else the summary is the first of them, and how many more there are."""
    if not problems:
        return CheckResult(name, subject, True, severity, good, dict(numbers), look)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return CheckResult(name, subject, False, severity, problems[0] + more, {**numbers, "problems": len(problems)}, look)
