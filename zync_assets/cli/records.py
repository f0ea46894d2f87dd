"""``zync pending``, ``trace`` and ``quarantine``: single records, where they come from, and what to do with bad ones."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from zync_assets.audit.account import read_waiting
from zync_assets.cli.terminal import (
    MAX_OFFSET,
    MAX_PARTITION,
    OFFSET,
    PARTITION,
    TOPIC,
    Format,
    excerpt,
    format_option,
    print_json,
    print_rows,
    whole,
)
from zync_assets.codecs.arrays import python_rows
from zync_assets.codecs.spark_types import original_name
from zync_assets.errors import LakeError, ZyncError
from zync_assets.etl.rules import kind_of
from zync_assets.lake import raw, staging
from zync_assets.lake.quarantine import QuarantinedRecord, Selection, entries, quarantined_records
from zync_assets.lake.rows import DamagedFile, rows_at
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, place_text
from zync_assets.pipeline import Pipeline, Rule, table_name
from zync_assets.pipeline_file import load
from zync_assets.pipeline_file.keys import joining_kinds
from zync_assets.quarantine.replay import ReplayCommit
from zync_assets.runner import drop_all, replay_all
from zync_assets.spark.session import spark_session

PENDING_COLUMNS = ("pool", "topic", "partition", "offset", "rule", "key", "join_key", "time", "age_seconds", "why")
TRACE_COLUMNS = ("role", "topic", "partition", "offset", "rule", "time", "key", "value")

_PATH = re.compile(r"\w+((?:\.(?:\w+|`[^`]+`))+)")

Row = dict[str, object]
Item = Mapping[str, Any]
"""A row of ``read_waiting``."""


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@format_option
def pending(pipeline: Path, fmt: Format) -> None:
    """Show the raw records that wait for their counterpart, a row each, and why.

    The join key is shown where it is made of plain columns; age_seconds counts from the record's own time. Starts no JVM.
    """
    loaded = load(pipeline)
    print_rows((row for pool in loaded.staging_pools for row in pending_rows(loaded, pool)), PENDING_COLUMNS, fmt)


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.argument("topic", type=TOPIC)
@click.argument("offset", type=OFFSET)
@click.option("--partition", type=PARTITION, default=0, show_default=True, help="Of the output topic.")
@format_option
def trace(pipeline: Path, topic: str, offset: int, partition: int, fmt: Format) -> None:
    """Show which raw records made the output at OFFSET of the output topic TOPIC.

    The first row is the output itself. Of a raw record that retention removed, only its place is known. For a pending record
    of an input topic, the rows show the record that it waits behind, or the records that wait behind it. Starts no JVM.
    """
    loaded = load(pipeline)
    rows = trace_rows(loaded, topic, partition, offset)
    for row in rows[1:]:
        if row["time"] is None:
            click.echo(
                f"note: {_why_gone(loaded, str(row['topic']), int(str(row['partition'])), int(str(row['offset'])))}",
                err=True,
            )
    print_rows(rows, TRACE_COLUMNS, fmt)


def pending_rows(pipeline: Pipeline, pool: str) -> Iterator[Row]:
    """The records of a staging pool that wait, by topic, partition and offset."""
    waiting = _waiting(pipeline, pool)
    joins = pipeline.joins_of(pool)
    before: Counter[tuple[str, str, int]] = Counter()
    fronts = _fronts(pipeline, pool, waiting)
    now = time.time()
    for (topic, partition), group in groupby(waiting, key=lambda item: (item["topic"], item["partition"])):
        items = list(group)
        found = raw_rows(pipeline, topic, partition, [item["offset"] for item in items])
        for item in items:
            row, rule = found.get(item["offset"], {}), joins.get((item["rule"], topic))
            when = row["kafka"]["time"] if row else None
            yield {
                "pool": pool,
                **{name: item[name] for name in ("topic", "partition", "offset", "rule")},
                "key": row.get("key"),
                "join_key": _join_key(rule, topic, row) if rule and row else None,
                "time": when,
                "age_seconds": None if when is None else round(max(0.0, now - when.timestamp())),
                "why": _why(item, rule, before, fronts.get((topic, partition, item["offset"]))),
            }


def _waiting(pipeline: Pipeline, pool: str) -> list[dict[str, Any]]:
    """The rows of ``read_waiting``."""
    state = staging.open_staging(pipeline.lake, pool)
    if state is None or not any(state.head.waiting.values()):
        return []
    try:
        return read_waiting(state).to_pylist()
    except DamagedFile as error:
        raise LakeError(f"{error}. Every check: {pipeline.command('check')}") from error


def trace_rows(pipeline: Pipeline, topic: str, partition: int, offset: int) -> list[Row]:
    """The output at an offset, then its raw records. LakeError for an offset that is not staged."""
    if topic in {item.topic for item in pipeline.inputs}:
        return _pending_trace(pipeline, (topic, partition, offset))
    if topic not in {item.topic for item in pipeline.outputs}:
        known = ", ".join(item.topic for item in pipeline.outputs)
        raise LakeError(f"topic {topic} is no output of {pipeline.path}; its outputs: {known}")
    pool = pipeline.output(topic).pool
    state = staging.open_staging(pipeline.lake, pool)
    output = _output(state, topic, partition, offset) if state else None
    if output is None:
        position = state.head.outputs.get((topic, partition)) if state else None
        held = f"offsets {position.base} to {position.next - 1}" if position else "none of this partition"
        raise LakeError(f"{place_text(topic, partition)}: offset {offset} is not staged; {pool} holds {held}")
    rows: list[Row] = [
        {
            "role": "output",
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "rule": output["rule"],
            "key": output.get(staging.key_column(topic)),
            "value": output.get(staging.value_column(topic)),
        }
    ]
    return rows + [_source(pipeline, output["rule"], item) for item in output["source"]]


def _pending_trace(pipeline: Pipeline, place: tuple[str, int, int]) -> list[Row]:
    """A pending record, the record that it waits behind, and the records that wait behind it. LakeError if the record is not
    pending."""
    for pool in pipeline.staging_pools:
        items = {(item["topic"], item["partition"], item["offset"]): item for item in _waiting(pipeline, pool)}
        if place in items:
            fronts = _fronts(pipeline, pool, list(items.values()))
            roles = [("pending", items[place])]
            roles += [("before", fronts[place])] if place in fronts else []
            roles += [("behind", items[at]) for at, front in fronts.items() if front is items[place]]
            return [
                {**_source(pipeline, item["rule"], item), "role": role, "rule": item["rule"]} for role, item in roles
            ]
    topic, partition, offset = place
    raise LakeError(f"topic {topic}, partition {partition}: offset {offset} is not pending; trace an output instead")


def raw_rows(pipeline: Pipeline, topic: str, partition: int, offsets: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Raw records by offset: kafka, key, value. Empty for a topic that is no input any more."""
    pools = {item.topic: item.pool for item in pipeline.inputs}
    table = raw.open_raw(pipeline.lake, pools[topic], topic) if topic in pools else None
    if table is None or not offsets:
        return {}
    span = OffsetRange(partition, min(offsets), max(offsets) + 1)
    return rows_at(table.table.uri, raw.raw_files(table, [span]), partition, offsets, ["key", "value"])


def _output(state: StagingState, topic: str, partition: int, offset: int) -> dict[str, Any] | None:
    columns = ["rule", "source", staging.key_column(topic), staging.value_column(topic)]
    return rows_at(state.table.uri, state.output_files(topic), partition, [offset], columns).get(offset)


def _source(pipeline: Pipeline, rule: str, place: Mapping[str, Any]) -> Row:
    row = raw_rows(pipeline, place["topic"], place["partition"], [place["offset"]]).get(place["offset"], {})
    return {
        "role": _role(pipeline, rule, place["topic"]),
        **{name: place[name] for name in ("topic", "partition", "offset")},
        "time": row["kafka"]["time"] if row else None,
        "key": row.get("key"),
        "value": row.get("value"),
    }


def _why_gone(pipeline: Pipeline, topic: str, partition: int, offset: int) -> str:
    """Why a raw record that made an output is not there."""
    record = f"the record at offset {offset} of {topic}, partition {partition},"
    pools = {item.topic: item.pool for item in pipeline.inputs}
    if topic not in pools:
        return f"{record} can't be shown: {topic} is no input of {pipeline.path} any more"
    table = raw.open_raw(pipeline.lake, pools[topic], topic)
    kept = table.retention_start.get(partition, 0) if table else 0
    if offset < kept:
        return f"{record} is removed: by retention, {table_name(pools[topic], topic)} begins at offset {kept} now"
    return f"{record} is not in {table_name(pools[topic], topic)}. Every check: {pipeline.command('check')}"


def _role(pipeline: Pipeline, name: str, topic: str) -> str:
    """Left, right or in, by the present pipeline file; ``source`` if the file no longer has the rule or the topic."""
    for rule in pipeline.rules:
        if rule.name == name and topic in rule.topics:
            return rule.side(topic).name
    return "source"


def _fronts(pipeline: Pipeline, pool: str, waiting: Sequence[Item]) -> dict[tuple[str, int, int], Item]:
    """Place of a pending record without a join key → the pending record of its source row that it waits behind."""
    rules = {rule.name: rule for rule in pipeline.rules_of(pool)}
    known = [(rules[item["rule"]], item) for item in waiting if item["rule"] in rules and item["row"] is not None]
    rows = [((rule.out, item["row"]), item, bool(rule.sides[0].keys)) for rule, item in known]
    first: dict[tuple[str, int], Item] = {}
    for row, item, joins in rows:
        if joins:
            first.setdefault(row, item)
    return {
        (item["topic"], item["partition"], item["offset"]): first[row]
        for row, item, joins in rows
        if not joins and row in first
    }


def _why(item: Item, rule: Rule | None, before: Counter[tuple[str, str, int]], front: Item | None) -> str:
    if front is not None:
        place = f"partition {front['partition']}, offset {front['offset']}"
        return f"waits behind {place} of its source row, which is pending for {front['rule']}"
    if rule is None:
        return f"the pipeline file has no {joining_kinds()} rule {item['rule']} of this topic and pool any more"
    if item["hash"] is None:
        return "null join key: nothing matches it"
    place = (item["topic"], item["rule"], item["hash"])
    before[place] += 1
    return kind_of(rule).reason(rule, item["topic"], before[place] - 1)


def _join_key(rule: Rule, topic: str, row: Mapping[str, Any]) -> object:
    """The record's join key where its expressions are plain columns; a list where there are several."""
    values = [_column(expression, row) for expression in rule.side(topic).keys]
    return values[0] if len(values) == 1 else values


def _column(expression: str, row: Mapping[str, Any]) -> object:
    path = _PATH.fullmatch(expression.strip())
    found: Any = row
    for name in re.findall(r"\w+|`[^`]+`", path[1]) if path else [""]:
        fields = {original_name(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}
        # As it is written, else without regard to case.
        named = {key.lower(): value for key, value in fields.items()} | fields
        name = name.strip("`")
        found = named.get(name, named.get(name.lower()))
    return found


COLUMNS = ("pool", "topic", "partition", "offset", "time", "stage", "rule", "error")

REASONS = 100
"""Records for which a replay says why they stay."""

_RANGE = re.compile(r"([0-9]+):([0-9]+)(?:-([0-9]+))?")

_pipeline = click.argument("pipeline", type=click.Path(path_type=Path))
_topics = click.option(
    "--topic", "topics", type=TOPIC, multiple=True, help="Only this input topic; may be given again."
)
_ranges = click.option(
    "--offsets",
    "ranges",
    multiple=True,
    metavar="P:FIRST[-LAST]",
    help="Only these offsets of partition P, such as 0:17 or 0:17-99; may be given again.",
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
@format_option
def list_records(pipeline: Path, topics: tuple[str, ...], ranges: tuple[str, ...], fmt: Format) -> None:
    """Show the records that lie in quarantine, a row each, and why.

    stage: key or value (it could not be decoded), or etl (a rule fails on it). Starts no JVM.
    """
    loaded = load(pipeline)
    found = quarantined_records(loaded, selection(loaded, topics, ranges))
    print_rows(({name: getattr(record, name) for name in COLUMNS} for record in found), COLUMNS, fmt)


@quarantine.command()
@_pipeline
@click.argument("topic", type=TOPIC)
@click.argument("offset", type=OFFSET)
@click.option("--partition", type=PARTITION, default=0, show_default=True)
@format_option
def show(pipeline: Path, topic: str, offset: int, partition: int, fmt: Format) -> None:
    """Show one record of quarantine, whole: key, value, headers, and what is wrong with it.

    Bytes that could not be decoded are shown as hex (in JSON: base64) and, where they are text, as text. Starts no JVM.
    """
    loaded = load(pipeline)
    found = quarantined_records(loaded, selection(loaded, (topic,), (f"{partition}:{offset}",)))
    if not found:
        raise ZyncError(
            f"{place_text(topic, partition, offset)} is not in quarantine. What is: {loaded.command('quarantine list')}"
        )
    for record in found:
        whole = _whole(loaded, record, fmt)
        if fmt == "json":
            print_json(whole)
        else:
            print_rows([{"field": name, "is": value} for name, value in whole.items()], ("field", "is"), fmt)


@quarantine.command()
@_pipeline
@_topics
@_ranges
@format_option
def replay(pipeline: Path, topics: tuple[str, ...], ranges: tuple[str, ...], fmt: Format) -> None:
    """Process quarantined records again, after the cause was fixed. The options select records; default: every record.

    A record that can be decoded now goes to its place in the raw pool. A record that a rule failed on goes through the rules
    again. A record that still fails stays in quarantine: stderr has the reason, and the exit code is 1.
    """
    loaded = load(pipeline)
    asked = selection(loaded, topics, ranges)
    session = partial(spark_session, loaded.spark, loaded.lake)
    before = {record.place for record in quarantined_records(loaded, asked)}
    reasons: dict[tuple[str, int, int], str] = {}
    for made in replay_all(loaded, session, asked):
        if isinstance(made, ReplayCommit):
            reasons |= {(made.topic, *place): reason for place, reason in made.reasons.items()}
    # A record that a rule fails on has the reason of this attempt: ETL committed it just now.
    left = {record.place: reasons.get(record.place, record.error) for record in quarantined_records(loaded, asked)}
    for (topic, partition, offset), reason in list(left.items())[:REASONS]:
        click.echo(f"{place_text(topic, partition, offset)} stays: {reason}", err=True)
    if len(left) > REASONS:
        others = loaded.command("quarantine list")
        click.echo(f"{len(left) - REASONS} others stay. This shows them: {others}", err=True)
    _say({"replayed": len(before - left.keys()), "left": len(left)}, fmt)
    if left:
        raise click.exceptions.Exit(1)


@quarantine.command()
@_pipeline
@_topics
@_ranges
@click.option("--all", "everything", is_flag=True, help="Every record of quarantine.")
@format_option
def drop(pipeline: Path, topics: tuple[str, ...], ranges: tuple[str, ...], everything: bool, fmt: Format) -> None:
    """Give up the records of quarantine that the options name: the account has them as dropped.

    Starts no JVM.
    """
    if not (topics or ranges or everything):
        raise ZyncError("say which records are to be dropped: --topic, --offsets or --all.")
    loaded = load(pipeline)
    _say({"dropped": drop_all(loaded, selection(loaded, topics, ranges))}, fmt)


def _say(numbers: Mapping[str, int], fmt: Format) -> None:
    if fmt == "json":
        print_json(dict(numbers))
    else:
        click.echo(", ".join(f"{count} {name}" for name, count in numbers.items()))


def selection(pipeline: Pipeline, topics: tuple[str, ...], ranges: tuple[str, ...]) -> Selection:
    """The options as a selection; ZyncError for a topic that is no input, or for text that is no range."""
    names = [item.topic for item in pipeline.inputs]
    for topic in topics:
        if topic not in names:
            raise ZyncError(f"topic {topic} is no input of this pipeline; its inputs are {', '.join(names)}.")
    return Selection(topics, tuple(_range(text) for text in ranges))


def _range(text: str) -> OffsetRange:
    found = _RANGE.fullmatch(text)
    if found is not None:
        partition, first = whole(found[1], MAX_PARTITION), whole(found[2], MAX_OFFSET)
        last = whole(found[3] or found[2], MAX_OFFSET)
        if partition is not None and first is not None and last is not None and first <= last:
            return OffsetRange(partition, first, last + 1)
    raise ZyncError(
        f"--offsets {excerpt(text)}: write partition:offset or partition:first-last, such as 0:17 or 0:17-99; partitions end at"
        f" {MAX_PARTITION}, offsets at {MAX_OFFSET}."
    )


def _whole(pipeline: Pipeline, record: QuarantinedRecord, fmt: Format) -> dict[str, Any]:
    snapshot = Snapshot(pipeline)
    state = snapshot.raw(record.topic)
    if state is None:
        raise ZyncError(f"topic {record.topic}: its raw table is missing")
    whole: dict[str, Any] = {name: getattr(record, name) for name in ("pool", *COLUMNS[1:])}
    if record.stage == "etl":
        span = OffsetRange(record.partition, record.offset, record.offset + 1)
        ids = ["key_schema_id", "value_schema_id"]
        columns = ["key", "value", *ids]
        row = rows_at(state.table.uri, raw.raw_files(state, [span]), record.partition, [record.offset], columns)
        found: Mapping[str, Any] = row.get(record.offset, {})
        sides = {name: found.get(name) for name in columns}
    else:
        rows = python_rows(entries(state, snapshot.quarantine(record.topic), ["key", "value"]))
        found = next(row for row in rows if (row["partition"], row["offset"]) == record.place[1:])
        sides = {}
        for name in ("key", "value"):
            sides |= _bytes(name, found[name], fmt)
    headers = (found.get("kafka") or {}).get("headers")
    return whole | sides | {"headers": None if headers is None else [_header(each, fmt) for each in headers]}


def _bytes(name: str, data: bytes | None, fmt: Format) -> dict[str, Any]:
    """The bytes, for a terminal as hex, and as text where they are that."""
    if data is None:
        return {name: None}
    shown = {name: data if fmt == "json" else data.hex(" ")}
    try:
        return shown | {f"{name}_text": data.decode()}
    except UnicodeDecodeError:
        return shown


def _header(header: Mapping[str, Any], fmt: Format) -> dict[str, Any]:
    return {"key": header["key"], **_bytes("value", header["value"], fmt)}
