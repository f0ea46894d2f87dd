"""``zync status`` and ``zync check``: the progress of every topic, and the results of every check.

``zync status`` shows how far every topic and partition is. It only reads, and starts no JVM. It also shows whether keys and
values are decoded and encoded column by column, or record by record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import click

from zync_assets.audit.account import read_account
from zync_assets.checks.output_checks import SOURCE_ORDER, accept_source_order, run_all
from zync_assets.cli.terminal import Format, format_option, print_json, print_rows
from zync_assets.codecs.batches import Way, decode_way, plain_way
from zync_assets.errors import BrokerUnavailable, LakeError, RegistryError, SchemaError, SinkError, TrustError
from zync_assets.etl.streams import cuts, domains_of, unseen
from zync_assets.ingest.plan import LEADER_SECONDS
from zync_assets.kafka.client import servers
from zync_assets.kafka.librdkafka import way
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import PartitionState, TopicState, survey
from zync_assets.lake import quarantine_table, staging
from zync_assets.lake.check_results import CheckResult
from zync_assets.lake.head import Head
from zync_assets.lake.parquet_rows import DamagedFile
from zync_assets.lake.publication import verified_ends
from zync_assets.lake.raw import RawState
from zync_assets.lake.snapshot import Snapshot
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import offset_count
from zync_assets.pipeline import Input, Output, Pipeline, RegistryConfig, table_name
from zync_assets.pipeline_file import load
from zync_assets.sinks.plan import plan_sink

_QUICK = {"max.retries": "0", "timeout": "2"}
"""Who asks for a status waits for it: a registry that does not answer at once is left out."""


def quick_registry(config: RegistryConfig | None) -> Registry | None:
    """The registry, asked once and for two seconds at most."""
    return Registry(replace(config, properties={**config.properties, **_QUICK})) if config else None


def input_way(item: Input, state: RawState | None, registry: Registry | None) -> str | None:
    """The way of all writer schemas that came; before the first record, of those that are registered for the topic. None
    where there are none, or the registry does not answer."""
    ways: dict[str, list[Way]] = {}
    for side, of in (("key", item.key), ("value", item.value)):
        if of.format != "avro":
            column = state.schema.field(side).type if state and side in state.schema.names else None
            ways[side] = [plain_way(of, column)]
            continue
        ids = [
            writer.id for writer in (state.writers if state else ()) if writer.side == side and writer.id is not None
        ]
        try:
            ways[side] = _registered_ways(registry, ids, f"{item.topic}-{side}")
        except (RegistryError, SchemaError):
            ways[side] = []
    return _way_text(ways["key"], ways["value"])


def _registered_ways(registry: Registry | None, ids: Iterable[int], subject: str) -> list[Way]:
    if registry is None:
        return []
    ways: list[Way] = [decode_way(registry.schema(number)) for number in ids]
    latest = None if ways else registry.latest(subject)
    if latest is not None:
        ways.append(decode_way(latest[1]))
    return ways


def output_way(item: Output, state: StagingState | None) -> str | None:
    """The way of all schemas that rules have for the topic; None before the first output."""
    texts = [json.loads(text) for topic, text in (state.head.schemas.values() if state else ()) if topic == item.topic]
    ways: dict[str, list[Way]] = {}
    for side, of in (("key", item.key), ("value", item.value)):
        schemas = [json.dumps(text[side]["schema"]) for text in texts if text[side]["schema"] is not None]
        ways[side] = [decode_way(schema) for schema in schemas] if of.format == "avro" else [plain_way(of, None)]
    return _way_text(ways["key"], ways["value"])


def _way_text(key: Iterable[Way], value: Iterable[Way]) -> str | None:
    """One word where both sides take one way, or one side is not known yet."""
    sides = {"key": " and ".join(sorted(set(key))), "value": " and ".join(sorted(set(value)))}
    known_ways = {name: ways for name, ways in sides.items() if ways}
    if len(set(known_ways.values())) <= 1:
        return next(iter(known_ways.values()), None)
    return ", ".join(f"{name} {ways}" for name, ways in known_ways.items())


TIMEOUT = 5.0
"""Seconds that the broker has to answer; without it the rest is shown."""

CLASSES = ("done", "pending", "unmatched", "dropped", "expired")
INPUT_COLUMNS = (
    *("topic", "partition", "pool", "low", "end", "kept", "next", "lag", "staging", "seen", "new", "cursor"),
    *CLASSES,
    *("quarantined", "left_out", "way"),
)
ORDER_COLUMNS = ("domain", "pool", "waiting", "topic", "partition", "transaction", "late", "incomplete")
SINK_COLUMNS = ("sink", "table", "source", "partition", "next", "end", "lag", "quarantined")
OUTPUT_COLUMNS = ("topic", "partition", "pool", "low", "end", "base", "next", "published", "lag", "way")

Row = dict[str, object]


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@format_option
def status(pipeline: Path, fmt: Format) -> None:
    """Show how far every topic and partition of the file PIPELINE is.

    Inputs: low and end of the topic, the first offset in the raw pool, the next offset to ingest, and the lag from next to
    the end. Each staging pool adds some columns: seen is the next offset for ETL, and new counts the offsets from seen to
    next. The cursor is the lowest pending offset, or seen. Further columns count the records of each class.

    Outputs: base and next number in staging, the number of published offsets, and the lag.

    Order has a row for each domain of inputs with a source order. Waiting counts the offsets that ETL does not take yet.
    Further columns name the topic, partition and transaction that ETL waits for. Late counts the records that came after
    their place in the order. Incomplete counts the transactions that ETL took without all changes.

    Inputs and outputs: the way of keys and values, column by column (native), or record by record (fastavro, python). The way
    of whole records, from Kafka and to it, is the same for all topics: the last line, client in JSON.

    Sinks: the next offset in the target, the end of the source in the lake, the lag, and the number of refused records. The
    table of a target that does not answer has a row without numbers.

    The command only reads, and starts no JVM. Without a broker, the broker's columns are empty.
    """
    model = load(pipeline)
    states = _ask(model)
    pools = {pool: staging.open_staging(model.lake, pool) for pool in model.staging_pools}
    registry = quick_registry(model.registry)
    inputs = [row for item in model.inputs for row in input_rows(model, item, states, pools, registry)]
    ends = {pool: verified_ends(model.lake, pool, [item.topic for item in model.outputs_of(pool)]) for pool in pools}
    outputs = [row for item in model.outputs for row in output_rows(item, states, pools[item.pool], ends[item.pool])]
    orders = [row for pool, state in pools.items() for row in order_rows(model, pool, state)]
    sinks = list(sink_rows(model))
    client = way()
    if fmt == "json":
        kinds = (
            ("input", inputs, INPUT_COLUMNS),
            ("output", outputs, OUTPUT_COLUMNS),
            ("order", orders, ORDER_COLUMNS),
            ("sink", sinks, SINK_COLUMNS),
        )
        for kind, rows, columns in kinds:
            for row in rows:
                print_json({"kind": kind, **{name: row.get(name) for name in columns}, "client": client})
        return
    click.echo("Inputs")
    print_rows(inputs, INPUT_COLUMNS, fmt)
    click.echo("Outputs")
    print_rows(outputs, OUTPUT_COLUMNS, fmt)
    if orders:
        click.echo("Order")
        print_rows(orders, ORDER_COLUMNS, fmt)
    if sinks:
        click.echo("Sinks")
        print_rows(sinks, SINK_COLUMNS, fmt)
    click.echo(f"Client: {client}")


def input_rows(
    pipeline: Pipeline,
    item: Input,
    states: Mapping[str, TopicState],
    pools: Mapping[str, StagingState | None],
    registry: Registry | None,
) -> Iterator[Row]:
    """One row per partition and staging pool of an input, in order. ``states``: topic → state of the topics that answered."""
    snapshot = Snapshot(pipeline)
    table = snapshot.raw(item.topic)
    way = input_way(item, table, registry)
    marks = _marks(states.get(item.topic))
    aside = _aside(snapshot, item.topic)
    if table is not None and item.topic in states and not table.is_from(states[item.topic].topic_id):
        click.echo(
            f"note: topic {item.topic} is another topic than the one that {table_name(item.pool, item.topic)} was made from",
            err=True,
        )
    for pool in pipeline.readers_of(item.topic) or [None]:
        state = pools[pool] if pool else None
        head = state.head if state else Head()
        cursors = _cursors(pipeline, state, item.topic) if state else {}
        for partition in sorted({*marks, *(table.next if table else ()), *head.seen(item.topic)}):
            mark = marks.get(partition)
            position = head.inputs.get((item.topic, partition))
            next_offset = table.next.get(partition) if table else None
            row: Row = {"topic": item.topic, "partition": partition, "pool": item.pool, "staging": pool, "way": way}
            row |= {"low": mark.low, "end": mark.end} if mark else {}
            row["kept"] = _first_kept(table, partition)
            row["next"] = next_offset
            if mark:
                row["lag"] = max(0, mark.end - (mark.low if next_offset is None else next_offset))
            if next_offset is not None and table is not None:
                row["left_out"] = table.left_out.get(partition, 0)
                row["new"] = next_offset - (position.seen if position else table.first.get(partition, next_offset))
                # The account counts quarantined records below seen. Here the side table's records at or past seen are added.
                below = position.seen if position else 0
                row["quarantined"] = head.counts.get((item.topic, partition, "quarantined"), 0) + sum(
                    record_partition == partition and offset >= below for record_partition, offset in aside
                )
            if position:
                row |= {"seen": position.seen, "cursor": cursors.get(partition, position.seen)}
                row |= {name: head.counts.get((item.topic, partition, name), 0) for name in CLASSES}
            yield row


def _first_kept(table: RawState | None, partition: int) -> int | None:
    """The first offset that the raw table keeps."""
    return None if table is None else table.retention_start.get(partition, table.first.get(partition))


def _aside(snapshot: Snapshot, topic: str) -> list[tuple[int, int]]:
    """Partition and offset of the records that could not be decoded."""
    table = snapshot.raw(topic)
    if table is None or not any(table.bad.values()):
        return []
    rows = quarantine_table.entries(table, snapshot.quarantine(topic))
    return list(zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True))


def output_rows(
    item: Output, states: Mapping[str, TopicState], state: StagingState | None, verified: Mapping[tuple[str, int], int]
) -> Iterator[Row]:
    """A row a partition of an output topic, in order. ``verified``: (output topic, partition) → the offset up to which it was
    published."""
    marks = _marks(states.get(item.topic))
    positions = {
        p: head_position
        for (topic, p), head_position in (state.head.outputs if state else {}).items()
        if topic == item.topic
    }
    for partition in sorted({*marks, *positions}) or [0]:
        mark, position = marks.get(partition), positions.get(partition)
        row: Row = {"topic": item.topic, "partition": partition, "pool": item.pool, "way": output_way(item, state)}
        row |= {"low": mark.low, "end": mark.end} if mark else {}
        row |= {"base": position.base, "next": position.next} if position else {}
        if mark and position:
            # By what was verified, not by the topic's end: another program may have written to it.
            upto = max(position.base, verified.get((item.topic, partition), position.base))
            row |= {"published": upto - position.base, "lag": max(0, position.next - upto)}
        yield row


def order_rows(pipeline: Pipeline, pool: str, state: StagingState | None) -> Iterator[Row]:
    """A row a domain of a staging pool."""
    head, items = state.head if state else Head(), pipeline.inputs_of(pool)
    snapshot = Snapshot(pipeline)
    tables = {item.topic: snapshot.raw(item.topic) for item in items}
    domains, ranges = domains_of(items, tables), unseen(tables, head)
    cut_by_domain = cuts(pipeline, domains, tables, head, ranges, dict.fromkeys(domains, sys.maxsize))
    for domain, part in cut_by_domain.items():
        new_count = sum(offset_count(ranges[topic]) for topic in part.ranges)
        waiting_count = new_count - sum(map(offset_count, part.ranges.values()))
        row: Row = {"domain": domain, "pool": pool, "waiting": waiting_count}
        behind = part.frontier.behind
        if waiting_count and behind is not None:
            row |= {"topic": behind.topic, "partition": behind.partition}
        if waiting_count and part.blocker is not None:
            row["transaction"] = part.blocker.name
        late = (item.records for (topic, _), item in head.late.items() if topic in part.ranges)
        transactions = head.transactions.get(domain)
        yield {**row, "late": sum(late), "incomplete": transactions.incomplete if transactions else None}


def sink_rows(pipeline: Pipeline) -> Iterator[Row]:
    """A row a target table and partition. The table of a target that does not answer has a row without numbers, and a note on
    stderr."""
    snapshot = Snapshot(pipeline)
    for sink in pipeline.sinks:
        for table in sink.tables:
            try:
                plan = plan_sink(pipeline, sink, table, snapshot=snapshot, check=False)
            except SinkError as error:
                click.echo(f"note: sink {sink.name}: {error}", err=True)
                yield {"sink": sink.name, "table": table.name, "source": table.source}
                continue
            for partition, end in sorted(plan.ends.items()):
                next_offset = plan.progress.next.get(partition)
                start = plan.starts[partition] if next_offset is None else next_offset
                row: Row = {"sink": sink.name, "table": table.name, "source": table.source, "partition": partition}
                count = sum(item.partition == partition for item in plan.progress.bad)
                yield {**row, "next": next_offset, "end": end, "lag": max(0, end - start), "quarantined": count}


def _ask(pipeline: Pipeline) -> dict[str, TopicState]:
    topics = [item.topic for item in (*pipeline.inputs, *pipeline.outputs)]
    try:
        topic_survey = survey(pipeline.kafka, topics, TIMEOUT, LEADER_SECONDS)
    except (BrokerUnavailable, TrustError) as error:
        click.echo(f"note: {error}", err=True)
        return {}
    for error in topic_survey.problems.values():
        raise error
    for error in topic_survey.errors.values():
        click.echo(f"note: {error}", err=True)
    states = dict(topic_survey.states)
    for item in pipeline.inputs:
        if item.topic not in states:
            click.echo(f"note: topic {item.topic} is not there", err=True)
        elif part := next((part for part in states[item.topic].partitions if part.is_open), None):
            click.echo(f"note: {_open_transaction(pipeline, item.topic, part)}", err=True)
    return states


def _open_transaction(pipeline: Pipeline, topic: str, part: PartitionState) -> str:
    """The records that wait for an open transaction, and the command that ends the transaction."""
    return (
        f"topic {topic}, partition {part.partition}: a transaction is open. The records from offset {part.end} on come when it"
        f" ends. If its producer is gone for good: kafka-transactions.sh --bootstrap-server {servers(pipeline.kafka)} abort"
        f" --topic {topic} --partition {part.partition} --start-offset {part.end}"
    )


def _marks(state: TopicState | None) -> dict[int, PartitionState]:
    return {item.partition: item for item in state.partitions} if state else {}


def _cursors(pipeline: Pipeline, state: StagingState, topic: str) -> dict[int, int]:
    """Partition → the lowest pending offset, where one waits. The ledger is read only then."""
    if not any(count for (name, _, kind), count in state.head.counts.items() if (name, kind) == (topic, "pending")):
        return {}
    try:
        all_entries, *_ = read_account(state, cached=True)
    except DamagedFile as error:
        raise LakeError(f"{error}. Every check: {pipeline.command('check')}") from error
    return {
        p: int(entries.waiting[0])
        for (name, p), entries in all_entries.items()
        if name == topic and len(entries.waiting)
    }


def _state_results(pipeline: Pipeline) -> Iterator[CheckResult]:
    """The check of the state of each pool with views."""
    from zync_assets.checks.state_checks import state_equals_raw
    from zync_assets.spark.session import spark_session

    for pool in pipeline.staging_pools:
        if any(rule.tables for rule in pipeline.rules_of(pool)):
            yield state_equals_raw(pipeline, pool, lambda: spark_session(pipeline.spark, pipeline.lake))


def _row_results(pipeline: Pipeline) -> Iterator[CheckResult]:
    """The check of the rows of each target table."""
    from zync_assets.checks.state_checks import rows_match
    from zync_assets.spark.session import spark_session

    for sink in pipeline.sinks:
        for table in sink.tables:
            yield rows_match(pipeline, lambda: spark_session(pipeline.spark, pipeline.lake), sink, table)


COLUMNS = ("check", "of", "result", "severity", "summary", "numbers")


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option("--state", is_flag=True, help="Compare the state of views with the raw pools too, in Spark.")
@click.option(
    "--rows", "with_rows", is_flag=True, help="Compare every row of target tables with its records too, in Spark."
)
@click.option(
    "--accept",
    type=click.Choice([SOURCE_ORDER]),
    help="Accept what this check has counted so far, after you looked at it. It warns of later cases alone.",
)
@format_option
def check(pipeline: Path, state: bool, with_rows: bool, accept: str | None, fmt: Format) -> None:
    """Verify the pools and the output topics of the file PIPELINE, a row a check.

    Reads everything that was ingested again, from the lake and from Kafka. Exit code 1 when a check fails whose severity
    is error; one whose severity is warn tells of something to look at and changes no exit code.

    Starts no JVM, but for --state and --rows.
    """
    has_failed = False
    rows: list[dict[str, object]] = []
    model = load(pipeline)
    for pool in model.staging_pools if accept else ():
        accept_source_order(model, pool)
    try:
        for result in chain(
            run_all(model), _state_results(model) if state else (), _row_results(model) if with_rows else ()
        ):
            has_failed = has_failed or (not result.passed and result.severity == "error")
            row: dict[str, object] = {
                "check": result.name,
                "of": result.subject,
                "result": "passed" if result.passed else "failed" if result.severity == "error" else "warning",
                "severity": result.severity,
                "summary": result.summary,
                "numbers": dict(result.numbers),
            }
            if fmt == "json":
                print_json(row)
            else:
                rows.append(row)
    finally:
        # Also where a later check can't look.
        if rows:
            print_rows(rows, [name for name in COLUMNS if name not in ("severity", "numbers")], fmt)
    if has_failed:
        raise SystemExit(1)
