"""``zync check``: every check over everything."""

from __future__ import annotations

from pathlib import Path

import click

from zync_assets.checks.all_checks import run_all
from zync_assets.cli.output import Format, format_option, print_json, print_rows
from zync_assets.pipeline_file import load

COLUMNS = ("check", "of", "result", "severity", "summary", "numbers")


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@format_option
def check(pipeline: Path, fmt: Format) -> None:
    """Verify the pools and the output topics of the file PIPELINE, a row a check.

    Reads everything that was ingested again, from the lake and from Kafka. Exit code 1 when a check fails whose severity
    is error; one whose severity is warn tells of something to look at and changes no exit code.

    Starts no JVM.
    """
    failed = False
    rows: list[dict[str, object]] = []
    for found in run_all(load(pipeline)):
        failed = failed or (not found.passed and found.severity == "error")
        row: dict[str, object] = {
            "check": found.name,
            "of": found.subject,
            "result": "passed" if found.passed else "failed" if found.severity == "error" else "warning",
            "severity": found.severity,
            "summary": found.summary,
            "numbers": dict(found.numbers),
        }
        if fmt == "json":
            print_json(row)
        else:
            rows.append(row)
    if fmt == "table":
        print_rows(rows, [name for name in COLUMNS if name not in ("severity", "numbers")], fmt)
    if failed:
        raise SystemExit(1)
