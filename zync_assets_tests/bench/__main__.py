"""Benchmarks: ``python -m zync_assets_tests.bench [STEP …]``. Each step is held against a reference of the same run."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from zync_assets.cli.terminal import print_rows
from zync_assets_tests.bench import codecs
from zync_assets_tests.bench.bucket import measure_bucket
from zync_assets_tests.bench.etl import measure_etl
from zync_assets_tests.bench.history import measure_history
from zync_assets_tests.bench.idle import measure_idle
from zync_assets_tests.bench.increments import measure_commits, measure_events, measure_increment
from zync_assets_tests.bench.ingest import measure_ingest
from zync_assets_tests.bench.latency import measure_latency, measure_topics
from zync_assets_tests.bench.memory import measure_memory
from zync_assets_tests.bench.publish import measure_publish
from zync_assets_tests.bench.rounds import Rounds, say
from zync_assets_tests.bench.sensor import measure_sensor
from zync_assets_tests.bench.shell import measure_shell
from zync_assets_tests.bench.sink_latency import measure_sink_latency
from zync_assets_tests.bench.sinks import measure_sink_memory, measure_sinks
from zync_assets_tests.bench.table import COLUMNS
from zync_assets_tests.bench.views import measure_views
from zync_assets_tests.bench.warm import measure_warm
from zync_assets_tests.bench.world import World, world

STEPS: dict[str, Callable[[World], Iterator[dict[str, object]]]] = {
    "ingest": measure_ingest,
    "etl": measure_etl,
    "publish": measure_publish,
    "increment": measure_increment,
    "events": measure_events,
    "bucket": measure_bucket,
    "idle": measure_idle,
    "latency": measure_latency,
    "topics": measure_topics,
    "sensor": measure_sensor,
    "commits": measure_commits,
    "memory": measure_memory,
    "warm": measure_warm,
    "shell": measure_shell,
    "history": measure_history,
    "views": measure_views,
    "sinks": measure_sinks,
    "sink-latency": measure_sink_latency,
    "sink-memory": measure_sink_memory,
}
BEGINNINGS = {name: name for name in STEPS} | {"commits": "many commits"}
"""Step → how the names of its measurements begin."""


def _made(context: click.Context, parameter: click.Parameter, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{folder} can't be made ({error.strerror}): choose another folder.") from None
    return folder


def _opened(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Open the result file before the measurements, which take hours."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise click.BadParameter(f"{path} can't be written ({error.strerror}): choose another file.") from None
    return path


@click.command()
@click.argument("steps", nargs=-1, type=click.Choice([*STEPS, "codecs"]))
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    callback=_made,
    default=Path(tempfile.gettempdir(), "zync-bench"),
    show_default=True,
    help="Holds topics, tables and what was measured; a run that was stopped goes on from there.",
)
@click.option("--rounds", default=5, show_default=True, help="Rounds that count, after one that does not.")
@click.option("--scale", default=1.0, show_default=True, help="Times as many records.")
@click.option("--again", is_flag=True, help="Measure these steps anew, if they were measured already.")
@click.option(
    "--json", "path", type=click.Path(path_type=Path), callback=_opened, help="Write the rows to this file too."
)
def bench(steps: tuple[str, ...], folder: Path, rounds: int, scale: float, again: bool, path: Path | None) -> None:
    """How fast the steps are on this machine, beside references that are measured in the same run; all steps if none is
    named."""
    made: list[dict[str, object]] = []
    chosen = steps or (*STEPS, "codecs")
    kept = Rounds(folder / "measured.json", rounds)
    measured = [name for name in STEPS if name in chosen]
    if again:
        kept.drop(tuple(BEGINNINGS[name] for name in measured))
    if measured:
        with world(folder, kept, scale) as at:
            for name in measured:
                made += list(STEPS[name](at))
    say("")
    if made:
        print_rows(made, COLUMNS, "table")
    if "codecs" in chosen:
        rows = list(codecs.measure_codecs(max(200, int(20_000 * scale))))
        print_rows(rows, codecs.COLUMNS, "table")
        made += rows
    if path is not None:
        path.write_text(json.dumps(made, indent=2) + "\n")


def main() -> None:
    # As Ctrl-C does: the broker and the registry are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bench()


if __name__ == "__main__":
    main()
