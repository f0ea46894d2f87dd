"""``zync demo``: two tables become one, in four batches, on a broker, a registry and a lake of the demo's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from zync_assets.cli.records import pending_rows
from zync_assets.cli.terminal import print_rows
from zync_assets.kafka.json_lines import Line, follow, produce_json, render
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, topic_states
from zync_assets.local import services
from zync_assets.local.services import (
    BATCHES,
    TOPICS,
    Services,
    addresses,
    demo_environment,
    demo_folder,
    demo_services_folder,
)
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load
from zync_assets.runner import etl_all, ingest_all, publish_all
from zync_assets.sinks.plan import layout, plan_sink
from zync_assets.sinks.steps import sink_all
from zync_assets.spark.session import spark_session

OUTPUT = "NewInvoices"
STORY = (
    "two invoices with their statuses",
    "Charlie and Dan order, but only Charlie's status comes",
    "Dan's status comes, and Alice pays",
    "the others pay",
)


@click.command()
@click.option("--stop", is_flag=True, help="Stop the demo's services; what they hold is kept.")
@click.option("--clean", is_flag=True, help="Stop them and remove all that the demo made.")
def demo(stop: bool, clean: bool) -> None:
    """Play the demo: four batches of changes from Kafka to the lake, back to Kafka and into a table. Goes on where it stopped."""
    home = demo_services_folder()
    if stop or clean:
        click.echo(
            "the demo is stopped" + (" and removed" if clean else "")
            if services.down(home, clean=clean)
            else "nothing to stop"
        )
        return
    folder = demo_folder()
    click.echo("starting a Kafka broker and a schema registry (the first time their jars are downloaded) …", err=True)
    running = services.up(home)
    pipeline = load(folder / "invoices.yaml", demo_environment(running))
    has_scene = False
    for scene in play(pipeline, folder):
        has_scene = True
        click.echo(f"\nBatch {scene.batch}: {STORY[scene.batch - 1]}\n")
        _show_scene(scene)
    if not has_scene:
        click.echo("Nothing to do: all four batches are through.\n")
        _show_scene(_scene(pipeline, BATCHES))
    click.echo(_what_next(running))


@dataclass(frozen=True)
class Scene:
    """The pipeline after a batch: the rows of the output topic and of the target table, and the pending raw records."""

    batch: int
    output: list[dict[str, object]]
    pending: list[dict[str, object]]
    table: list[dict[str, object]]


def play(pipeline: Pipeline, folder: Path) -> Iterator[Scene]:
    """Produce the missing batches, run the pipeline after each batch, and yield the scene after each run.

    Continues an interrupted demo. Yields nothing after the last batch.
    """
    for number in range(1, BATCHES + 1):
        if not _produce(pipeline, folder, number) and number < BATCHES:
            continue
        if _run(pipeline):
            yield _scene(pipeline, number)


def _produce(pipeline: Pipeline, folder: Path, number: int) -> int:
    """Produce the records of the batches up to ``number`` that the topics lack; returns the number of produced records."""
    assert pipeline.registry is not None
    registry = Registry(pipeline.registry)
    states = topic_states(pipeline.kafka, TOPICS)
    count = 0
    for topic in TOPICS:
        state = states.get(topic) or create_topic(pipeline.kafka, topic, 1, 1, {})
        lines = [line for batch in range(1, number + 1) for line in _lines(folder, batch, topic)]
        missing = lines[state.partitions[0].end :]
        if missing:
            schemas = [(folder / "schemas" / f"{topic}-{side}.avsc").read_text() for side in ("key", "value")]
            count += produce_json(pipeline.kafka, registry, topic, missing, schemas[0], schemas[1])
    return count


def _lines(folder: Path, batch: int, topic: str) -> Iterator[Line]:
    for text in (folder / f"batch-{batch}.jsonl").read_text().splitlines():
        row = json.loads(text)
        if row["topic"] == topic:
            yield Line(key=row["key"], value=row["value"])


def _run(pipeline: Pipeline) -> bool:
    """All steps; whether there was anything to do."""

    session = partial(spark_session, pipeline.spark, pipeline.lake)
    commits = [
        *ingest_all(pipeline, session, TOPICS),
        *etl_all(pipeline, session),
        *publish_all(pipeline, session, [OUTPUT]),
        *sink_all(pipeline, session),
    ]
    return bool(commits)


def _scene(pipeline: Pipeline, number: int) -> Scene:
    waiting = [dict(row) for pool in pipeline.staging_pools for row in pending_rows(pipeline, pool)]
    return Scene(number, output_rows(pipeline), waiting, table_rows(pipeline))


def _show_scene(scene: Scene) -> None:
    flat = [{"offset": row["offset"], "key": row["key"], **_fields(row["value"])} for row in scene.output]
    click.echo(f"topic {OUTPUT}:")
    print_rows(flat, list(dict.fromkeys(name for row in flat for name in row)), "table")
    click.echo(f"table {OUTPUT} of the target database:")
    print_rows(scene.table, list(dict.fromkeys(name for row in scene.table for name in row)), "table")
    if scene.pending:
        click.echo("pending:")
        print_rows(scene.pending, ["topic", "partition", "offset", "rule", "key", "why"], "table")
    else:
        click.echo("nothing is pending")


def _fields(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def output_rows(pipeline: Pipeline) -> list[dict[str, object]]:
    """The records of the output topic, read from Kafka: offset, key and value. An absent field is absent."""
    assert pipeline.registry is not None
    registry = Registry(pipeline.registry)
    state = topic_states(pipeline.kafka, [OUTPUT]).get(OUTPUT)
    if state is None:
        return []
    ends = {part.partition: part.end for part in state.partitions}
    rows: list[dict[str, object]] = []
    for record in follow(pipeline.kafka, OUTPUT, dict.fromkeys(ends, 0), ends):
        fields = render(record, registry)
        rows.append({"offset": record.offset, "key": fields["key"], "value": fields["value"]})
    return rows


def table_rows(pipeline: Pipeline) -> list[dict[str, object]]:
    """The rows of the target table, by key."""
    (sink,) = pipeline.sinks
    plan = plan_sink(pipeline, sink, sink.table(OUTPUT))
    spec = layout(plan, partial(spark_session, pipeline.spark, pipeline.lake)).spec
    rows = [row for batch in plan.target().rows(spec) for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: str([row[name] for name in spec.key]))


def _what_next(running: Services) -> str:
    names = " ".join(f"{name}={value}" for name, value in addresses(running).items())
    return (
        "\nThe broker, the registry and the lake are still there."
        "\n  the asset graph:  dagster dev            (in this folder; then open http://127.0.0.1:3000)"
        f"\n  go on by hand:    export {names}"
        "\n                    zync status demo/invoices.yaml"
        "\n  stop, or remove:  zync demo --stop       zync demo --clean"
        f"\n  everything is in {running.state_dir}"
    )
