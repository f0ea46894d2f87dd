"""``zync pending`` and ``trace``: single records, and where they come from."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from zync_assets.audit.account import read_quarantine, read_waiting
from zync_assets.cli.terminal import (
    OFFSET,
    PARTITION,
    TOPIC,
    Format,
    format_option,
    print_rows,
)
from zync_assets.codecs.spark_types import original_name
from zync_assets.errors import LakeError
from zync_assets.etl.hold import possible_outputs
from zync_assets.etl.rules import kind_of
from zync_assets.etl.rules.output_schemas import side_fields
from zync_assets.lake import raw, staging
from zync_assets.lake.parquet_rows import DamagedFile, rows_at
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange, place_text
from zync_assets.pipeline import Pipeline, Rule, table_name
from zync_assets.pipeline_file import load
from zync_assets.pipeline_file.keys import joining_kinds
from zync_assets.spark.sql import path_sql

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
    """Show the raw records that wait for their counterpart or for a row, a row each, and why.

    The join key is shown where it is made of plain columns; age_seconds counts from the record's own time. Starts no JVM.
    """
    model = load(pipeline)
    print_rows((row for pool in model.staging_pools for row in pending_rows(model, pool)), PENDING_COLUMNS, fmt)


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.argument("topic", type=TOPIC)
@click.argument("offset", type=OFFSET)
@click.option("--partition", type=PARTITION, default=0, show_default=True, help="Of the output topic.")
@format_option
def trace(pipeline: Path, topic: str, offset: int, partition: int, fmt: Format) -> None:
    """Show which raw records made the output at OFFSET of the output topic TOPIC.

    The first row is the output itself. Of a raw record that retention removed, only its place is known. For a pending record
    of an input topic, the rows show the record that it waits behind, or the records that wait behind it.

    For an output of a view, Spark also finds the rows that contribute to its key now. The role of such a row is the alias of its
    table. For other outputs, trace starts no JVM.
    """
    model = load(pipeline)
    rows = trace_rows(model, topic, partition, offset)
    rows += _contributions(model, topic, partition, offset)
    for row in rows[1:]:
        if row["time"] is None:
            click.echo(
                f"note: {_absence_reason(model, str(row['topic']), int(str(row['partition'])), int(str(row['offset'])))}",
                err=True,
            )
    print_rows(rows, TRACE_COLUMNS, fmt)


def pending_rows(pipeline: Pipeline, pool: str) -> Iterator[Row]:
    """The records of a staging pool that wait, by topic, partition and offset."""
    all_items = _pending_items(pipeline, pool)
    joins, names = pipeline.joins_of(pool), {rule.name for rule in pipeline.rules_of(pool)}
    counts: Counter[tuple[str, str, int]] = Counter()
    fronts = _fronts(pipeline, pool, all_items)
    now = time.time()
    for (topic, partition), group in groupby(all_items, key=lambda item: (item["topic"], item["partition"])):
        items = list(group)
        rows = raw_rows(pipeline, topic, partition, [item["offset"] for item in items])
        for item in items:
            row, rule = rows.get(item["offset"], {}), joins.get((item["rule"], topic))
            record_time = row["kafka"]["time"] if row else None
            yield {
                "pool": pool,
                **{name: item[name] for name in ("topic", "partition", "offset", "rule")},
                "key": row.get("key"),
                "join_key": _join_key(rule, topic, row) if rule and row else None,
                "time": record_time,
                "age_seconds": None if record_time is None else round(max(0.0, now - record_time.timestamp())),
                "why": _why(item, rule, counts, fronts.get((topic, partition, item["offset"])), names),
            }


def _pending_items(pipeline: Pipeline, pool: str) -> list[dict[str, Any]]:
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
        names = ", ".join(item.topic for item in pipeline.outputs)
        raise LakeError(f"topic {topic} is no output of {pipeline.path}; its outputs: {names}")
    pool = pipeline.output(topic).pool
    state = staging.open_staging(pipeline.lake, pool)
    output = _output(state, topic, partition, offset) if state else None
    if output is None:
        position = state.head.outputs.get((topic, partition)) if state else None
        partitions = (
            [part for (of, part), place in state.head.outputs.items() if of == topic and place.next > place.base]
            if state
            else []
        )
        if position and partition in partitions:
            contents = f"offsets {position.base} to {position.next - 1}"
        elif partitions:
            contents = f"none of this partition. Choose one with --partition: {', '.join(map(str, sorted(partitions)))}"
        else:
            contents = "no outputs of this topic yet"
        raise LakeError(f"{place_text(topic, partition)}: offset {offset} is not staged; {pool} holds {contents}")
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


def _contributions(pipeline: Pipeline, topic: str, partition: int, offset: int) -> list[Row]:
    """The records that have the rows that contribute to the key of a view's output now."""
    rule = next((rule for rule in pipeline.rules if rule.out == topic and rule.view is not None), None)
    state = None if rule is None else staging.open_staging(pipeline.lake, pipeline.output(topic).pool)
    if rule is None or state is None:
        return []
    from zync_assets.etl.views.contributions import contributions
    from zync_assets.etl.views.rebuild import with_known_names
    from zync_assets.spark.failures import spark_failures
    from zync_assets.spark.session import spark_session

    snapshot, pool = Snapshot(pipeline), pipeline.output(topic).pool
    raw_states = {item.topic: snapshot.raw(item.topic) for item in pipeline.inputs_of(pool)}
    rules = with_known_names(pipeline, pool, raw_states, state).rules_of(pool)
    view_rule = next(item for item in rules if item.name == rule.name)
    with spark_failures(lambda text: LakeError(f"view {rule.name}: its rows can't be shown: {text}")):
        rows = contributions(spark_session(pipeline.spark, pipeline.lake), state, rules, view_rule, offset, partition)
    if rows is None:
        click.echo(
            f"note: view {rule.name} is not as it was when its result was staged, so that its rows are not shown. Compute the"
            f" result again: {pipeline.command('rebuild')}",
            err=True,
        )
    return [{**_source(pipeline, rule.name, asdict(place)), "role": f"row {place.alias}"} for place in rows or ()]


def _pending_trace(pipeline: Pipeline, place: tuple[str, int, int]) -> list[Row]:
    """A pending record, the record that it waits behind, and the records that wait behind it. LakeError if the record is not
    pending."""
    for pool in pipeline.staging_pools:
        items = {(item["topic"], item["partition"], item["offset"]): item for item in _pending_items(pipeline, pool)}
        if place in items:
            fronts = _fronts(pipeline, pool, list(items.values()))
            roles = [("pending", items[place])]
            roles += [("before", fronts[place])] if place in fronts else []
            roles += [("behind", items[at]) for at, front in fronts.items() if front is items[place]]
            return [
                {**_source(pipeline, item["rule"], item), "role": role, "rule": item["rule"]} for role, item in roles
            ]
    topic, partition, offset = place
    state = _record_state(pipeline, topic, partition, offset)
    raise LakeError(f"topic {topic}, partition {partition}: offset {offset} is not pending: {state}")


def _record_state(pipeline: Pipeline, topic: str, partition: int, offset: int) -> str:
    """The state of an input's record that is not pending, as the end of a sentence."""
    snapshot = Snapshot(pipeline)
    state = snapshot.raw(topic)
    end = state.next.get(partition) if state is not None else None
    if state is None or end is None or offset >= end:
        return f"it is not ingested yet; ingest ends before offset {end or 0}"
    if offset < state.retention_start.get(partition, 0):
        return f"retention removed it; the raw table begins at offset {state.retention_start[partition]} now"
    span = OffsetRange(partition, offset, offset + 1)
    quarantine = read_quarantine(snapshot, topic, [span])
    if len(quarantine.records):
        return f"it is in quarantine. List the records in quarantine: {pipeline.command('quarantine list')}"
    if quarantine.lost:
        return "it was lost before ingest read it, and the loss was accepted"
    if quarantine.leaves_out(partition, offset):
        return "ingest left it out: it repeats an earlier change, or the input's shape has no place for it"
    if not raw_rows(pipeline, topic, partition, [offset]):
        return "the topic has no record there, such as a place that compaction or a transaction left"
    return "a batch processed it. Trace an output instead: the sources of an output are the records that made it"


def raw_rows(pipeline: Pipeline, topic: str, partition: int, offsets: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Raw records by offset: kafka, key, value. Empty for a topic that is no input any more."""
    pools = {item.topic: item.pool for item in pipeline.inputs}
    table = raw.open_raw(pipeline.lake, pools[topic], topic) if topic in pools else None
    if table is None or not offsets:
        return {}
    span = OffsetRange(partition, min(offsets), max(offsets) + 1)
    return rows_at(table.table.uri, raw.raw_files(table, [span]), partition, offsets, ["key", "value"])


def _output(state: StagingState, topic: str, partition: int, offset: int) -> dict[str, Any] | None:
    """An output, without the fields that the published record lacks."""
    columns = ["rule", "source", "schema", "left_out", staging.key_column(topic), staging.value_column(topic)]
    row = rows_at(state.table.uri, state.output_files(topic), partition, [offset], columns).get(offset)
    value = (row or {}).get(staging.value_column(topic))
    if row is None or not isinstance(value, dict):
        return row
    _, schema = state.head.schemas.get(row.get("schema") or "", ("", ""))
    fields = side_fields(schema, "value") if schema else None
    sent = {name: item for name, item in value.items() if fields is None or original_name(name) in fields}
    return {**row, staging.value_column(topic): _without(sent, ("value",), row.get("left_out") or ())}


def _without(value: Any, path: tuple[str, ...], left_out: Collection[str]) -> Any:
    """A value without the fields at the paths ``left_out``."""
    if not isinstance(value, dict):
        return value
    items = [(name, (*path, name), item) for name, item in value.items()]
    return {name: _without(item, at, left_out) for name, at, item in items if path_sql(at) not in left_out}


def _source(pipeline: Pipeline, rule: str, place: Mapping[str, Any]) -> Row:
    row = raw_rows(pipeline, place["topic"], place["partition"], [place["offset"]]).get(place["offset"], {})
    return {
        "role": _role(pipeline, rule, place["topic"]),
        **{name: place[name] for name in ("topic", "partition", "offset")},
        "time": row["kafka"]["time"] if row else None,
        "key": row.get("key"),
        "value": row.get("value"),
    }


def _absence_reason(pipeline: Pipeline, topic: str, partition: int, offset: int) -> str:
    """Why a raw record that made an output is not there."""
    record = f"the record at offset {offset} of {topic}, partition {partition},"
    pools = {item.topic: item.pool for item in pipeline.inputs}
    if topic not in pools:
        return f"{record} can't be shown: {topic} is no input of {pipeline.path} any more"
    table = raw.open_raw(pipeline.lake, pools[topic], topic)
    start = table.retention_start.get(partition, 0) if table else 0
    if offset < start:
        return f"{record} is removed: by retention, {table_name(pools[topic], topic)} begins at offset {start} now"
    return f"{record} is not in {table_name(pools[topic], topic)}. Every check: {pipeline.command('check')}"


def _role(pipeline: Pipeline, name: str, topic: str) -> str:
    """Left, right or in, by the present pipeline file; ``source`` if the file no longer has the rule or the topic."""
    for rule in pipeline.rules:
        if rule.name == name and topic in rule.topics:
            return rule.side(topic).name
    return "source"


def _fronts(pipeline: Pipeline, pool: str, items: Sequence[Item]) -> dict[tuple[str, int, int], Item]:
    """Place of a pending record without a join key → the pending record of its source row that it waits behind."""
    rules = {rule.name: rule for rule in pipeline.rules_of(pool)}
    rows: list[tuple[tuple[str, int], Item, bool]] = []
    for item in items:
        if item["row"] is None:
            continue
        if (rule := rules.get(item["rule"])) is not None:
            rows.append(((rule.out, item["row"]), item, bool(rule.sides[0].keys)))
            continue
        # The file lacks the rule of the record, and so the output. The record holds its row in each output of the topic.
        rows += [((out, item["row"]), item, True) for out in possible_outputs(rules.values(), item["topic"])]
    first_items: dict[tuple[str, int], Item] = {}
    for row, item, joins in rows:
        if joins:
            first_items.setdefault(row, item)
    return {
        (item["topic"], item["partition"], item["offset"]): first_items[row]
        for row, item, joins in rows
        if not joins and row in first_items and _may_precede(first_items[row], item)
    }


def _may_precede(first: Item, second: Item) -> bool:
    """Whether a record may come before another of its source row. The offsets of two partitions do not tell."""
    return first["partition"] != second["partition"] or first["offset"] < second["offset"]


def _why(
    item: Item, rule: Rule | None, counts: Counter[tuple[str, str, int]], front: Item | None, names: Collection[str]
) -> str:
    """Why a record waits. ``names``: of the pool's rules."""
    if front is not None:
        place = f"partition {front['partition']}, offset {front['offset']}"
        return f"waits behind {place} of its source row, which is pending for {front['rule']}"
    if rule is not None and rule.lookups and not any(side.keys for side in rule.sides):
        from zync_assets.etl.lookups import waiting_reason

        return waiting_reason(rule, item["text"], null=item["hash"] is None)
    if rule is None and item["rule"] in names:
        return f"the next batch gives it to rule {item['rule']}"
    if rule is None:
        return f"the pipeline file has no {joining_kinds()} rule {item['rule']} of this topic and pool any more"
    if item["hash"] is None:
        return "null join key: nothing matches it"
    place = (item["topic"], item["rule"], item["hash"])
    counts[place] += 1
    return kind_of(rule).reason(rule, item["topic"], counts[place] - 1)


def _join_key(rule: Rule, topic: str, row: Mapping[str, Any]) -> object:
    """The record's join key where its expressions are plain columns; a list where there are several."""
    keys = rule.side(topic).keys or [record for item in rule.lookups if item.missing == "wait" for record, _ in item.on]
    values = [_column(expression, row) for expression in keys]
    return (values[0] if len(values) == 1 else values) if values else None


def _column(expression: str, row: Mapping[str, Any]) -> object:
    path = _PATH.fullmatch(expression.strip())
    content: Any = row
    for name in re.findall(r"\w+|`[^`]+`", path[1]) if path else [""]:
        fields = {original_name(key): value for key, value in content.items()} if isinstance(content, Mapping) else {}
        # As it is written, else without regard to case.
        aliases = {key.lower(): value for key, value in fields.items()} | fields
        name = name.strip("`")
        content = aliases.get(name, aliases.get(name.lower()))
    return content
