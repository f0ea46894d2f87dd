"""Benchmarks, a step each: ``python -m zync_assets_tests.bench STEP``.

CPU time counts, not the clock's: other work on the machine spoils a number less.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from zync_assets.cli.output import print_rows
from zync_assets_tests.bench.codecs import COLUMNS as CODEC_COLUMNS
from zync_assets_tests.bench.codecs import measure_codecs


@click.group()
def bench() -> None:
    """How fast the steps are, on this machine."""


@bench.command()
@click.option("--records", default=20_000, show_default=True, help="Records of each family.")
@click.option("--family", "families", multiple=True, help="Only this family of types; may be given again.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows to this file too.")
def codecs(records: int, families: tuple[str, ...], path: Path | None) -> None:
    """Avro to columns and back, per family of types: column by column, and by fastavro record by record."""
    rows = list(measure_codecs(records, families))
    print_rows(rows, CODEC_COLUMNS, "table")
    if path is not None:
        path.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    bench()
