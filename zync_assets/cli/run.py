"""``zync from-kafka``, ``etl``, ``to-kafka``, ``sink`` and ``run``: the steps without Dagster."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click

from zync_assets import runner
from zync_assets.cli.terminal import DURATION, TOPIC, Format, excerpt, format_option, harmless, print_json, print_rows
from zync_assets.conflicts import PASSING, notes_of, raise_first
from zync_assets.errors import LeaderMissing, SparkLost, TopicMissing, ZyncError
from zync_assets.etl.plan import EtlCommit
from zync_assets.etl.retries import Retry
from zync_assets.ingest.commit import RawCommit
from zync_assets.ingest.plan import LEADER_SECONDS
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load
from zync_assets.pipeline_file.keys import joining_kinds
from zync_assets.publish.commit import PublishCommit
from zync_assets.runner import etl_all, etl_backlog, ingest_all, publish_all, rebuild_all
from zync_assets.sinks.commit import SinkCommit
from zync_assets.sinks.steps import Turn, reset_sink, sink_all, sink_awake
from zync_assets.sinks.target import Place
from zync_assets.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.progress import TaskID

COLUMNS = ("step", "target", "offsets", "records", "pending", "quarantined", "seconds")
INGEST_COLUMNS = (*COLUMNS, "left_out", "repeats", "lost_offsets", "schema_changes")
LARGE_BACKLOG = 3_000_000
"""New offsets from which on the command of ETL starts a long session. Both kinds take 2.5 million records in the same time.
A long session takes 4.5 million in 0.87 of the time of a short one."""
POLL_SECONDS = 0.5
MAX_BACK_OFF = 30.0
MOST_LOSSES = 5
"""The number of lost Spark sessions in a row after which the command stops. The step itself may be the cause of the losses."""

Commit: TypeAlias = RawCommit | EtlCommit | PublishCommit | SinkCommit

_pipeline = click.argument("pipeline", type=click.Path(path_type=Path))


@click.command()
@_pipeline
@click.option("--topic", "topics", type=TOPIC, multiple=True, help="Only this input topic; may be given again.")
@format_option
def from_kafka(pipeline: Path, topics: tuple[str, ...], fmt: Format) -> None:
    """Read the input topics of PIPELINE into the raw pools, up to their present ends."""
    model = load(pipeline)
    selection = _select(topics, [item.topic for item in model.inputs], "input")
    with _progress() as progress:
        _report(ingest_all(model, _session(model), selection, progress), fmt, INGEST_COLUMNS)


@click.command()
@_pipeline
@click.option("--explain", is_flag=True, help="Print the Spark SQL of every rule and run nothing.")
@click.option(
    "--retry-unmatched",
    is_flag=True,
    help="Match the unmatched records again, and the records that wait for a rule that was removed.",
)
@click.option(
    "--retry-pending",
    "waiting",
    metavar="RULE",
    multiple=True,
    help="Match the records again that wait for this rule, after a change of its join-on. May be repeated.",
)
@click.option("--retry-expired", is_flag=True, help="Match the expired records again, after a change of expire-after.")
@format_option
def etl(
    pipeline: Path,
    explain: bool,
    retry_unmatched: bool,
    waiting: tuple[str, ...],
    retry_expired: bool,
    fmt: Format,
) -> None:
    """Transform new raw records of PIPELINE into the staging pools, until nothing new is found."""
    model = load(pipeline)
    if explain:
        _print_statements(model, fmt)
        return
    joins = [rule.name for rule in model.rules if rule.lookups or any(side.keys for side in rule.sides)]
    for name in waiting:
        if name not in joins:
            raise ZyncError(
                f"--retry-pending {excerpt(name)}: no {joining_kinds()} rule of this pipeline is called so; there are"
                f" {', '.join(joins) or 'none'}."
                " To match the records of a removed rule again: " + model.command("etl", "--retry-unmatched")
            )
    retry = Retry(unmatched=retry_unmatched, waiting=waiting, expired=retry_expired)
    _report(etl_all(model, _etl_session(model), retry), fmt)


@click.command("explain")
@_pipeline
@format_option
def explain_(pipeline: Path, fmt: Format) -> None:
    """Print the Spark SQL of every rule of PIPELINE, and the maintenance plan of every view; run nothing.

    The plan says for each table which keys of the view a change touches, and how the keys are found.
    """
    _print_statements(load(pipeline), fmt)


def _print_statements(model: Pipeline, fmt: Format) -> None:
    from zync_assets.etl.rules import explain_rules

    statements = explain_rules(model)
    if fmt == "json":
        print_rows([asdict(statement) for statement in statements], ("kind", "name", "pool", "sql"), fmt)
    else:
        click.echo("\n\n".join(statement.sql for statement in statements))


@click.command()
@_pipeline
@click.option("--state", is_flag=True, help="Make the state of the views' tables from the raw pools again, too.")
@click.option("--topic", "topics", type=TOPIC, multiple=True, help="Only this output topic; may be given again.")
@format_option
def rebuild(pipeline: Path, state: bool, topics: tuple[str, ...], fmt: Format) -> None:
    """Compute the outputs of PIPELINE again, from the raw pools by the rules as they are now. Stage and publish what differs
    from the staged row of each key.

    A topic without staged outputs gets all of them: rename an output to publish it anew.
    """
    model = load(pipeline)
    selection = _select(topics, [item.topic for item in model.outputs], "output")
    session = _session(model)

    def steps() -> Iterator[Commit]:
        yield from rebuild_all(model, session, "state" if state else "views", topics)
        yield from publish_all(model, session, selection)

    _report(steps(), fmt)


@click.command()
@_pipeline
@click.option("--topic", "topics", type=TOPIC, multiple=True, help="Only this output topic; may be given again.")
@click.option(
    "--recreate",
    metavar="TOPIC",
    type=TOPIC,
    help="Delete this output topic, create it again, and publish all of staging to it. Adds to the topics of --topic.",
)
@format_option
def to_kafka(pipeline: Path, topics: tuple[str, ...], recreate: str | None, fmt: Format) -> None:
    """Publish the staging pools of PIPELINE to the output topics, creating them where the file says so."""
    model = load(pipeline)
    names = [item.topic for item in model.outputs]
    if recreate is not None:
        from zync_assets.publish.commit import recreate_topic

        # Of a topic that is asked for beside, nothing is deleted.
        topics = (*topics, *_select((recreate,), names, "output"))
        _select(topics, names, "output")
        recreate_topic(model, recreate)
    selection = _select(topics, names, "output")
    with _progress() as progress:
        _report(publish_all(model, _session(model), selection, progress), fmt)


@click.command()
@_pipeline
@click.option("--sink", "names", metavar="SINK", multiple=True, help="Only this sink; may be given again.")
@click.option(
    "--reset", metavar="TABLE", help="Empty this table first, and load it again. Add --sink if several sinks have it."
)
@click.option("--verify", is_flag=True, help="Write nothing: compare every row of the tables with its records.")
@format_option
def sink(pipeline: Path, names: tuple[str, ...], reset: str | None, verify: bool, fmt: Format) -> None:
    """Write the sources of the sinks of PIPELINE to their tables, up to the present ends of the sources.

    With --verify, the exit code is 1 if a row differs.
    """
    if verify and reset is not None:
        raise click.UsageError("--verify writes nothing, and --reset empties a table; give one of the two")
    model = load(pipeline)
    sink_names = [item.name for item in model.sinks]
    for name in names:
        if name not in sink_names:
            raise ZyncError(
                f"--sink {excerpt(name)}: the sinks of this pipeline are {', '.join(sink_names) or 'none'}."
            )
    if reset is not None:
        owners = [item.name for item in model.sinks for table in item.tables if table.name == reset]
        choices = [name for name in owners if not names or name in names]
        if len(choices) != 1:
            tables = ", ".join(f"{item.name}: {table.name}" for item in model.sinks for table in item.tables)
            cure = "name its sink with --sink" if choices else f"there are {tables or 'no tables'}"
            raise ZyncError(f"--reset {excerpt(reset)}: {cure}.")
        for place in reset_sink(model, _session(model), choices[0], reset):
            click.echo(f"{place}: writes this table too, and begins at the start again", err=True)
    if verify:
        _verify(model, names, fmt)
        return
    _report(sink_all(model, _session(model), names), fmt)


def _verify(model: Pipeline, names: tuple[str, ...], fmt: Format) -> None:
    """Print whether the rows of the sinks' tables are what their records make them; exit code 1 if not."""
    from zync_assets.checks.state_checks import rows_match

    tables = [(item, table) for item in model.sinks if not names or item.name in names for table in item.tables]
    results = [rows_match(model, _session(model), item, table) for item, table in tables]
    rows = [{"of": result.subject, "passed": result.passed, "summary": result.summary} for result in results]
    print_rows(rows, ("of", "passed", "summary"), fmt)
    if not all(result.passed for result in results):
        raise SystemExit(1)


@click.command()
@_pipeline
@click.option("--until-idle", is_flag=True, help="Stop when nothing is left to do, or at the first error.")
@click.option("--exit-after", type=DURATION, metavar="TIME", help="Stop after this time, such as 60s, 5m or 1h.")
@format_option
def run(pipeline: Path, until_idle: bool, exit_after: float | None, fmt: Format) -> None:
    """All steps of PIPELINE in one process with one Spark session, again and again: the three steps, and its sinks.

    The steps take turns. A turn handles one batch of each topic, pool and table. Ctrl-C and SIGTERM end the command after the
    commit that is under way. With --until-idle, the exit code is 130 then.
    """
    model = load(pipeline)
    deadline = None if exit_after is None else time.monotonic() + exit_after
    is_stopped = _stop_on_signals()
    session = _session(model, long=not until_idle)
    inputs = [item.topic for item in model.inputs]
    outputs = [item.topic for item in model.outputs]
    patience = None if until_idle else LEADER_SECONDS
    back_off, last_warning, losses = POLL_SECONDS, -MAX_BACK_OFF, 0
    turns: dict[Place, Turn] = {}
    while not is_stopped() and (deadline is None or time.monotonic() < deadline):
        busy = False
        troubles: list[ZyncError] = []
        for step in (
            lambda: ingest_all(model, session, inputs, patience=patience, whole=until_idle),
            lambda: etl_all(model, session, whole=until_idle),
            # A row of a target waits for no topic, and a topic for no target that is away.
            lambda: sink_all(model, session) if until_idle else sink_awake(model, session, turns),
            lambda: publish_all(model, session, outputs, patience=patience),
        ):
            try:
                for commit in step():
                    busy, losses = True, 0
                    _report_commit(commit, fmt)
                    if is_stopped():
                        break
            except ZyncError as error:
                troubles.append(error)
            if is_stopped():
                break
        losses += sum(isinstance(error, SparkLost) for error in troubles)
        if until_idle or losses >= MOST_LOSSES or not all(isinstance(error, PASSING) for error in troubles):
            # The steps after a failed one have had their turn by now.
            raise_first(troubles)
        if all(isinstance(error, (LeaderMissing, TopicMissing)) for error in troubles):
            # Other topics, and partitions with a leader, continue at their usual pace.
            back_off = POLL_SECONDS
            if troubles and time.monotonic() - last_warning >= MAX_BACK_OFF:
                for error in troubles:
                    _warn(error, "Trying again.")
                last_warning = time.monotonic()
        else:
            _warn(troubles[0], f"Trying again in {back_off:g} s.")
            busy, back_off = False, min(back_off * 2, MAX_BACK_OFF)
        if not busy:
            if until_idle:
                return
            _sleep(back_off, is_stopped, deadline)
    if until_idle and is_stopped():
        # The work is not done, and a script must not go on as if it was.
        raise KeyboardInterrupt
    _raise_resting(turns)


def _warn(error: ZyncError, outlook: str) -> None:
    for text in (str(error), *notes_of(error)):
        click.echo(harmless(f"warning: {text} {outlook}"), err=True)


def _raise_resting(turns: Mapping[Place, Turn]) -> None:
    """Raise the error of a table that rests, unless the error may pass: not all work was done."""
    rests = [turn.rest for turn in turns.values() if turn.rest is not None]
    raise_first([rest.error for rest in rests if not isinstance(rest.error, PASSING)])


def _sleep(seconds: float, is_stopped: Callable[[], bool], deadline: float | None) -> None:
    """Wait, but not past the deadline, nor long after a signal."""
    end = time.monotonic() + seconds
    while not is_stopped() and time.monotonic() < min(end, deadline or end):
        time.sleep(min(seconds, POLL_SECONDS))


def _session(pipeline: Pipeline, *, long: bool = False) -> Callable[[], SparkSession]:
    return partial(spark_session, pipeline.spark, pipeline.lake, long=long)


def _etl_session(pipeline: Pipeline) -> Callable[[], SparkSession]:
    """A session for the records that ETL finds. A large backlog repays Java's optimising compiler."""

    @cache
    def long() -> bool:
        return etl_backlog(pipeline) >= LARGE_BACKLOG

    return lambda: spark_session(pipeline.spark, pipeline.lake, long=long())


def _select(choice: tuple[str, ...], names: list[str], kind: str) -> list[str]:
    for name in choice:
        if name not in names:
            raise ZyncError(f"topic {name} is no {kind} of this pipeline; its {kind}s are {', '.join(names)}.")
    return [name for name in names if name in choice] if choice else names


def _row(commit: Commit) -> dict[str, object]:
    if isinstance(commit, RawCommit):
        return {
            "step": "ingest",
            "target": commit.topic,
            "offsets": " ".join(str(part) for part in commit.ranges),
            "records": commit.records,
            "quarantined": commit.quarantined,
            "schema_changes": [str(change) for change in commit.schema_changes],
            **({"left_out": commit.left_out} if commit.left_out else {}),
            **({"repeats": commit.repeats} if commit.repeats else {}),
            **({"lost_offsets": commit.lost_offsets} if commit.lost_offsets else {}),
            "seconds": round(commit.seconds, 2),
        }
    if isinstance(commit, EtlCommit):
        return {
            "step": "etl",
            "target": commit.pool,
            "offsets": " ".join(f"{topic} {part}" for topic, parts in commit.outputs.items() for part in parts),
            "records": commit.counts.get("outputs", 0),
            "pending": commit.counts.get("pending", 0),
            "quarantined": commit.counts.get("quarantined", 0),
            "seconds": round(commit.seconds, 2),
        }
    if isinstance(commit, SinkCommit):
        return {
            "step": "sink",
            "target": f"{commit.sink}/{commit.table}",
            "offsets": " ".join(str(part) for part in commit.ranges),
            "records": commit.records,
            "quarantined": commit.quarantined,
            "seconds": round(commit.seconds, 2),
        }
    return {
        "step": "publish",
        "target": commit.topic,
        "offsets": " ".join(str(part) for part in commit.ranges if not part.empty),
        "records": commit.records,
        "seconds": round(commit.seconds, 2),
    }


def _report(commits: Iterable[Commit], fmt: Format, columns: Sequence[str] = COLUMNS) -> None:
    """Print each commit at once."""
    idle = True
    for commit in commits:
        idle = False
        if fmt == "json":
            print_rows([_row(commit)], columns, fmt)
        else:
            _report_commit(commit, fmt)
    if idle and fmt != "json":
        click.echo("nothing to do")


def _changes(row: Mapping[str, object]) -> Sequence[object]:
    changes = row.get("schema_changes")
    return changes if isinstance(changes, list) else []


def _report_commit(commit: Commit, fmt: Format) -> None:
    row = {name: value for name, value in _row(commit).items() if value not in ("", [])}
    if fmt == "json":
        print_json(row)
        return
    fields = {name: value for name, value in row.items() if name != "schema_changes"}
    click.echo(
        "  ".join(
            str(value) if name in ("step", "target", "offsets") else f"{name} {value}" for name, value in fields.items()
        )
    )
    for change in _changes(row):
        click.echo(harmless(f"schema change in {row['target']}: {change}"))
    sys.stdout.flush()


@contextmanager
def _progress() -> Generator[runner.Progress]:
    """A line on stderr with records, rate and time left, where a person watches; else nothing."""
    if not sys.stderr.isatty():
        yield runner.quiet
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    # If stdout is a terminal too, its lines appear above the bar.
    is_terminal = sys.stdout.isatty()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, redirect_stdout=is_terminal) as bar:
        tasks: dict[str, TaskID] = {}
        start = time.monotonic()

        def show(label: str, count: int, total: int) -> None:
            rate = f"{count / max(0.001, time.monotonic() - start):,.0f}/s"
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total, rate=rate)
            bar.update(tasks[label], completed=count, total=total, rate=rate)

        yield show


def _stop_on_signals() -> Callable[[], bool]:
    signals: list[int] = []

    def stop(number: int, frame: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return lambda: bool(signals)
