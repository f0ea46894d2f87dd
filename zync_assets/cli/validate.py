"""``zync validate``: every error of a pipeline file, or that there are none."""

from __future__ import annotations

from pathlib import Path

import click

from zync_assets.cli.output import Format, format_option, print_json
from zync_assets.errors import PipelineFileError
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@format_option
def validate(pipeline: Path, fmt: Format) -> None:
    """Report every error of the file PIPELINE, with line, key and cure; exit code 1 when there is one.

    Starts no JVM and asks no broker.
    """
    try:
        _report_good(load(pipeline), pipeline, fmt)
    except PipelineFileError as error:
        _report_bad(error, fmt)
        raise SystemExit(1) from None


def _report_good(loaded: Pipeline, file: Path, fmt: Format) -> None:
    counts = {"inputs": len(loaded.inputs), "rules": len(loaded.rules), "outputs": len(loaded.outputs)}
    if fmt == "json":
        print_json({"file": str(file), "ok": True, "name": loaded.name, **counts})
    else:
        said = ", ".join(f"{count} {name if count != 1 else name[:-1]}" for name, count in counts.items())
        click.echo(f"OK: {file} ({loaded.name}): {said}")


def _report_bad(error: PipelineFileError, fmt: Format) -> None:
    for problem in error.problems:
        if fmt == "json":
            print_json({"file": error.path, "line": problem.line, "key": problem.key, "message": problem.message})
        else:
            key = f"{problem.key}: " if problem.key else ""
            click.echo(f"{error.path}:{problem.line}: {key}{problem.message}")
