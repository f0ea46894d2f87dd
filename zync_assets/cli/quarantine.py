"""``zync quarantine``: bad records, and what to do with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from zync_assets.cli.terminal import (
    MAX_OFFSET,
    MAX_PARTITION,
    OFFSET,
    PARTITION,
    TOPIC,
    Format,
    excerpt,
    format_option,
    harmless,
    print_json,
    print_rows,
    whole,
)
from zync_assets.codecs.arrays import python_rows
from zync_assets.conflicts import raise_first
from zync_assets.errors import ZyncError
from zync_assets.lake import raw, staging
from zync_assets.lake.check_results import count_text
from zync_assets.lake.parquet_rows import rows_at
from zync_assets.lake.quarantine_table import QuarantinedRecord, Selection, entries, quarantined_records
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import key_column, value_column
from zync_assets.offsets import OffsetRange, place_text
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load
from zync_assets.quarantine.replay import ReplayCommit
from zync_assets.runner import drop_all, replay_all
from zync_assets.sinks.replay import RefusedRecord, drop_refused, refused_records
from zync_assets.sinks.steps import replay_sinks
from zync_assets.spark.session import spark_session

COLUMNS = ("pool", "topic", "partition", "offset", "time", "stage", "rule", "error")

REASONS = 100
"""Records for which a replay says why they stay."""

_RANGE = re.compile(r"([0-9]+):([0-9]+)(?:-([0-9]+))?")

_pipeline = click.argument("pipeline", type=click.Path(path_type=Path))
_topics = click.option(
    "--topic",
    "topics",
    type=TOPIC,
    multiple=True,
    help="Only this input topic, or source of a sink; may be given again.",
)
_ranges = click.option(
    "--offsets",
    "ranges",
    multiple=True,
    metavar="P:FIRST[-LAST]",
    help="Only these offsets of partition P, such as 0:17 or 0:17-99; may be given again.",
)
_sinks = click.option(
    "--sink",
    "sinks",
    metavar="SINK",
    multiple=True,
    help="Only records that this sink's target refused; may be given again.",
)


@click.group()
def quarantine() -> None:
    """Records that could not be decoded or transformed, and what to do with them.

    Such a record costs only itself: it is kept whole, and the records around it go their way.
    """


@quarantine.command("list")
@_pipeline
@_topics
@_ranges
@_sinks
@format_option
def list_records(
    pipeline: Path, topics: tuple[str, ...], ranges: tuple[str, ...], sinks: tuple[str, ...], fmt: Format
) -> None:
    """Show the records that lie in quarantine, a row each, and why.

    stage: key or value (it could not be decoded), etl (a rule fails on it), or sink (a target database refused it). Starts
    no JVM.
    """
    model = load(pipeline)
    choice = selection(model, topics, ranges, sinks)
    rows: list[dict[str, object]] = [
        {name: getattr(record, name) for name in COLUMNS} for record in _of_rules(model, choice)
    ]
    rows += [_refusal(record) for record in refused_records(model, choice)]
    print_rows(rows, COLUMNS, fmt)


@quarantine.command()
@_pipeline
@click.argument("topic", type=TOPIC)
@click.argument("offset", type=OFFSET)
@click.option("--partition", type=PARTITION, default=0, show_default=True)
@format_option
def show(pipeline: Path, topic: str, offset: int, partition: int, fmt: Format) -> None:
    """Show one record of quarantine, whole: key, value, headers, and what is wrong with it.

    Bytes that could not be decoded are shown as hex (in JSON: base64) and, where they are text, as text. A record that a target
    refused is shown as the sink reads it, raw or staged. Starts no JVM.
    """
    model = load(pipeline)
    choice = selection(model, (topic,), (f"{partition}:{offset}",))
    records = [_record_details(model, record, fmt) for record in quarantined_records(model, choice)]
    records += [_refusal_details(model, record, fmt) for record in refused_records(model, choice)]
    if not records:
        raise ZyncError(
            f"{place_text(topic, partition, offset)} is not in quarantine. What is: {model.command('quarantine list')}"
        )
    for record in records:
        if fmt == "json":
            print_json(record)
        else:
            print_rows([{"field": name, "is": value} for name, value in record.items()], ("field", "is"), fmt)


@quarantine.command()
@_pipeline
@_topics
@_ranges
@_sinks
@format_option
def replay(
    pipeline: Path, topics: tuple[str, ...], ranges: tuple[str, ...], sinks: tuple[str, ...], fmt: Format
) -> None:
    """Process quarantined records again, after the cause was fixed. The options select records; default: every record.

    A record that can be decoded now goes to its place in the raw pool. A record that a rule failed on goes through the rules
    again. A record that a target refused is written, unless a later record of its key has been written: then nothing changes.
    A record that still fails stays in quarantine: stderr has the reason, and the exit code is 1. A note names the partitions
    of which ETL took later records before: `zync rebuild` makes their rows right.
    """
    model = load(pipeline)
    choice = selection(model, topics, ranges, sinks)
    session = partial(spark_session, model.spark, model.lake)
    places = {record.place for record in _of_rules(model, choice)}
    seen_offsets = _seen_offsets(model)
    reasons: dict[tuple[str, int, int], str] = {}
    raw_topics: list[str] = []
    for commit in () if sinks else replay_all(model, session, choice):
        if isinstance(commit, ReplayCommit):
            raw_topics.append(commit.topic)
            reasons |= {(commit.topic, *place): reason for place, reason in commit.reasons.items()}
    # A record that a rule fails on has the reason of this attempt: ETL committed it just now.
    reason_by_place = {record.place: reasons.get(record.place, record.error) for record in _of_rules(model, choice)}
    targets = replay_sinks(model, session, raw_topics, choice)
    left = targets.reasons | {place_text(*place): reason for place, reason in reason_by_place.items()}
    for place, reason in list(left.items())[:REASONS]:
        click.echo(harmless(f"{place} stays: {reason}"), err=True)
    if len(left) > REASONS:
        command = model.command("quarantine list")
        others = count_text(len(left) - REASONS, "more record")
        click.echo(f"{others} in quarantine. This shows them all: {command}", err=True)
    replayed_places = places - reason_by_place.keys()
    _say({"replayed": len(replayed_places) + targets.count, "left": len(left)}, fmt)
    if late := sorted(
        {
            (topic, partition)
            for topic, partition, offset in replayed_places
            if offset + 1 < seen_offsets[topic, partition]
        }
    ):
        click.echo(
            f"note: ETL took later records before the replayed ones, of {_places(late)}. Where both change one row, an older"
            f" value is now the last. This makes the rows right: {model.command('rebuild')}",
            err=True,
        )
    raise_first(targets.troubles)
    if left:
        raise click.exceptions.Exit(1)


@quarantine.command()
@_pipeline
@_topics
@_ranges
@_sinks
@click.option("--all", "everything", is_flag=True, help="Every record of quarantine.")
@format_option
def drop(
    pipeline: Path,
    topics: tuple[str, ...],
    ranges: tuple[str, ...],
    sinks: tuple[str, ...],
    everything: bool,
    fmt: Format,
) -> None:
    """Give up the records of quarantine that the options name: the account has them as dropped.

    Starts no JVM.
    """
    if not (topics or ranges or sinks or everything):
        raise ZyncError("say which records are to be dropped: --topic, --offsets, --sink or --all.")
    model = load(pipeline)
    choice = selection(model, topics, ranges, sinks)
    count = (0 if sinks else drop_all(model, choice)) + drop_refused(model, choice)
    if not count and not everything:
        raise ZyncError(f"the options name no record of quarantine. What is: {model.command('quarantine list')}")
    _say({"dropped": count}, fmt)


def _of_rules(pipeline: Pipeline, choice: Selection) -> Iterable[QuarantinedRecord]:
    """The selected records that no target refused: none if sinks are named."""
    return () if choice.sinks else quarantined_records(pipeline, choice)


def _seen_offsets(pipeline: Pipeline) -> Counter[tuple[str, int]]:
    """(topic, partition) → the next offset that ETL looks at, in the staging pool that is the furthest. The pools in which the
    topic is a table do not count: a record that comes after later records of its row changes nothing there."""
    offsets = Counter[tuple[str, int]]()
    for pool in pipeline.staging_pools:
        tables = {table.topic for rule in pipeline.rules_of(pool) for table in rule.tables}
        if (state := staging.open_staging(pipeline.lake, pool)) is not None:
            positions = state.head.inputs.items()
            offsets |= Counter({place: position.seen for place, position in positions if place[0] not in tables})
    return offsets


def _places(places: Sequence[tuple[str, int]]) -> str:
    names = ", ".join(place_text(topic, partition) for topic, partition in places[:3])
    return names + (", …" if len(places) > 3 else "")


def _say(numbers: Mapping[str, int], fmt: Format) -> None:
    if fmt == "json":
        print_json(dict(numbers))
    else:
        click.echo(", ".join(f"{count} {name}" for name, count in numbers.items()))


def selection(
    pipeline: Pipeline, topics: tuple[str, ...], ranges: tuple[str, ...], sinks: tuple[str, ...] = ()
) -> Selection:
    """The options as a selection; ZyncError for a topic that is no input, a sink that is none, or for text that is no range."""
    names = [item.topic for item in pipeline.inputs]
    staged_topics = {table.topic for sink in pipeline.sinks for table in sink.tables if table.staged}
    for topic in topics:
        if topic not in names and topic not in staged_topics:
            raise ZyncError(f"topic {topic} is no input of this pipeline; its inputs are {', '.join(names)}.")
    sink_names = [sink.name for sink in pipeline.sinks]
    for name in sinks:
        if name not in sink_names:
            raise ZyncError(
                f"--sink {excerpt(name)}: the sinks of this pipeline are {', '.join(sink_names) or 'none'}."
            )
    return Selection(topics, tuple(_range(text) for text in ranges), sinks)


def _range(text: str) -> OffsetRange:
    match = _RANGE.fullmatch(text)
    if match is not None:
        partition, first = whole(match[1], MAX_PARTITION), whole(match[2], MAX_OFFSET)
        last = whole(match[3] or match[2], MAX_OFFSET)
        if partition is not None and first is not None and last is not None and first <= last:
            return OffsetRange(partition, first, last + 1)
    raise ZyncError(
        f"--offsets {excerpt(text)}: write partition:offset or partition:first-last, such as 0:17 or 0:17-99; partitions end at"
        f" {MAX_PARTITION}, offsets at {MAX_OFFSET}."
    )


def _record_details(pipeline: Pipeline, record: QuarantinedRecord, fmt: Format) -> dict[str, Any]:
    snapshot = Snapshot(pipeline)
    state = snapshot.raw(record.topic)
    if state is None:
        raise ZyncError(f"topic {record.topic}: its raw table is missing")
    details: dict[str, Any] = {name: getattr(record, name) for name in ("pool", *COLUMNS[1:])}
    if record.stage == "etl":
        span = OffsetRange(record.partition, record.offset, record.offset + 1)
        ids = ["key_schema_id", "value_schema_id"]
        columns = ["key", "value", *ids]
        row = rows_at(state.table.uri, raw.raw_files(state, [span]), record.partition, [record.offset], columns)
        fields: Mapping[str, Any] = row.get(record.offset, {})
        sides = {name: fields.get(name) for name in columns}
    else:
        rows = python_rows(entries(state, snapshot.quarantine(record.topic), ["key", "value"]))
        fields = next((row for row in rows if (row["partition"], row["offset"]) == record.place[1:]), {})
        sides = {}
        for name in ("key", "value"):
            sides |= _bytes(name, fields.get(name), fmt)
    return details | sides | {"headers": _headers(fields.get("kafka") or {}, fmt)}


def _headers(kafka: Mapping[str, Any], fmt: Format) -> list[dict[str, Any]] | None:
    headers = kafka.get("headers")
    return None if headers is None else [_header(header, fmt) for header in headers]


def _refusal(record: RefusedRecord) -> dict[str, object]:
    """The row of a refused record in a list."""
    place = {"pool": record.table.pool, "topic": record.table.topic, "partition": record.bad.partition}
    why = {"stage": "sink", "rule": f"{record.sink.name}/{record.table.name}", "error": record.bad.error}
    return {**place, "offset": record.bad.offset, "time": None, **why}


def _refusal_details(pipeline: Pipeline, record: RefusedRecord, fmt: Format) -> dict[str, Any]:
    """A refused record, as the sink reads it."""
    table, bad_record, snapshot = record.table, record.bad, Snapshot(pipeline)
    row: Mapping[str, Any] = {}
    names = {"key": "key", "value": "value"}
    if table.staged:
        state = snapshot.staging(table.pool)
        names = {"key": key_column(table.topic), "value": value_column(table.topic), "source": "source"}
        files = state.output_files(table.topic) if state is not None else []
    else:
        state = snapshot.raw(table.topic)
        files = (
            raw.raw_files(state, [OffsetRange(bad_record.partition, bad_record.offset, bad_record.offset + 1)])
            if state
            else []
        )
    if state is not None:
        row = rows_at(state.table.uri, files, bad_record.partition, [bad_record.offset], list(names.values())).get(
            bad_record.offset, {}
        )
    kafka = row.get("kafka") or {}
    details = {**_refusal(record), "time": kafka.get("time"), "table_key": bad_record.key}
    details |= {name: row.get(column) for name, column in names.items()}
    return details | ({} if table.staged else {"headers": _headers(kafka, fmt)})


def _bytes(name: str, data: bytes | None, fmt: Format) -> dict[str, Any]:
    """The bytes, for a terminal as hex, and as text where they are that."""
    if data is None:
        return {name: None}
    values = {name: data if fmt == "json" else data.hex(" ")}
    try:
        return values | {f"{name}_text": data.decode()}
    except UnicodeDecodeError:
        return values


def _header(header: Mapping[str, Any], fmt: Format) -> dict[str, Any]:
    return {"key": header["key"], **_bytes("value", header["value"], fmt)}
