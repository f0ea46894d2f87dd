"""``zync demo``: source tables become one, batch by batch, on a broker, a registry and a lake of the demo's own."""

from __future__ import annotations

import json
import shlex
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


@dataclass(frozen=True)
class Demo:
    """A demo: its pipeline's file, and the story of its batches. ``folder``: of its data, within the folder ``demo``."""

    name: str
    output: str
    story: tuple[str, ...]
    folder: str = "."

    @property
    def file(self) -> str:
        return f"{self.name}.yaml"


INVOICES = Demo(
    "invoices",
    "NewInvoices",
    (
        "two invoices with their statuses",
        "Charlie and Dan order, but only Charlie's status comes",
        "Dan's status comes, and Alice pays",
        "the others pay",
    ),
)
ORDERS = Demo(
    "orders",
    "OrderDocuments",
    (
        "Alice has an order with two lines, and Bob's order is a draft",
        "Bob's order gets a line and is open, and a line comes before its order",
        "the order of that line comes, and Alice changes her name",
        "a line of Alice's order is deleted, and so is Bob's order",
    ),
    folder="orders",
)
MENU = Demo(
    "menu",
    "NewOrders",
    (
        "Jane's order is complete, and Bob's waits for the price of a burrito",
        "the price comes",
    ),
    folder="menu",
)
DEMOS = {demo.name: demo for demo in (INVOICES, ORDERS, MENU)}


@click.command()
@click.argument("name", type=click.Choice(list(DEMOS)), default=INVOICES.name)
@click.option("--stop", is_flag=True, help="Stop the demo's services; what they hold is kept.")
@click.option("--clean", is_flag=True, help="Stop them and remove all that the demo made.")
def demo(name: str, stop: bool, clean: bool) -> None:
    """Play the demo NAME: batches of changes from Kafka to the lake, and back. Goes on where it stopped.

    `invoices` joins pairs of records, `orders` keeps a view, `menu` gathers the records of a transaction.
    """
    home = demo_services_folder()
    if stop or clean:
        click.echo(
            "the demo is stopped" + (" and removed" if clean else "")
            if services.down(home, clean=clean)
            else "nothing to stop"
        )
        return
    folder, scenario = demo_folder(), DEMOS[name]
    click.echo("starting a Kafka broker and a schema registry (the first time their jars are downloaded) …", err=True)
    running = services.up(home)
    pipeline = load(folder / scenario.file, demo_environment(running))
    has_scene = False
    for scene in play(pipeline, folder, scenario):
        has_scene = True
        click.echo(f"\nBatch {scene.batch}: {scenario.story[scene.batch - 1]}\n")
        _show_scene(scene, scenario)
    if not has_scene:
        click.echo(f"Nothing to do: all {len(scenario.story)} batches are through.\n")
        _show_scene(_scene(pipeline, scenario, len(scenario.story)), scenario)
    click.echo(what_next(running, scenario, folder))


@dataclass(frozen=True)
class Scene:
    """The pipeline after a batch: the rows of the output topic and of the target table, and the pending raw records."""

    batch: int
    output: list[dict[str, object]]
    pending: list[dict[str, object]]
    table: list[dict[str, object]]


def play(pipeline: Pipeline, folder: Path, demo: Demo = INVOICES) -> Iterator[Scene]:
    """Produce the missing batches, run the pipeline after each batch, and yield the scene after each run.

    Continues an interrupted demo. Yields nothing after the last batch.
    """
    last = len(demo.story)
    for number in range(1, last + 1):
        if not _produce(pipeline, folder / demo.folder, number) and number < last:
            continue
        if _run(pipeline):
            yield _scene(pipeline, demo, number)


def _produce(pipeline: Pipeline, folder: Path, number: int) -> int:
    """Produce the records of the batches up to ``number`` that the topics lack; returns the number of produced records."""
    assert pipeline.registry is not None
    registry = Registry(pipeline.registry)
    topics = [item.topic for item in pipeline.inputs]
    states = topic_states(pipeline.kafka, topics)
    count = 0
    for topic in topics:
        state = states.get(topic) or create_topic(pipeline.kafka, topic, 1, 1, {})
        lines = [line for batch in range(1, number + 1) for line in _lines(folder, batch, topic)]
        missing_lines = lines[state.partitions[0].end :]
        if missing_lines:
            schemas = [(folder / "schemas" / f"{topic}-{side}.avsc").read_text() for side in ("key", "value")]
            count += produce_json(pipeline.kafka, registry, topic, missing_lines, schemas[0], schemas[1])
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
        *ingest_all(pipeline, session, [item.topic for item in pipeline.inputs]),
        *etl_all(pipeline, session),
        *publish_all(pipeline, session, [item.topic for item in pipeline.outputs]),
        *sink_all(pipeline, session),
    ]
    return bool(commits)


def _scene(pipeline: Pipeline, demo: Demo, number: int) -> Scene:
    pending_records = [dict(row) for pool in pipeline.staging_pools for row in pending_rows(pipeline, pool)]
    return Scene(number, output_rows(pipeline, demo.output), pending_records, table_rows(pipeline, demo.output))


def _show_scene(scene: Scene, demo: Demo) -> None:
    flat = [{"offset": row["offset"], "key": row["key"], **_fields(row["value"])} for row in scene.output]
    click.echo(f"topic {demo.output}:")
    print_rows(flat, list(dict.fromkeys(name for row in flat for name in row)), "table")
    if scene.table:
        click.echo(f"table {demo.output} of the target database:")
        print_rows(scene.table, list(dict.fromkeys(name for row in scene.table for name in row)), "table")
    if scene.pending:
        click.echo("pending:")
        print_rows(scene.pending, ["topic", "partition", "offset", "rule", "key", "why"], "table")
    else:
        click.echo("nothing is pending")


def _fields(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def output_rows(pipeline: Pipeline, output: str) -> list[dict[str, object]]:
    """The records of an output topic, read from Kafka: offset, key and value. An absent field is absent."""
    assert pipeline.registry is not None
    registry = Registry(pipeline.registry)
    state = topic_states(pipeline.kafka, [output]).get(output)
    if state is None:
        return []
    ends = {part.partition: part.end for part in state.partitions}
    rows: list[dict[str, object]] = []
    for record in follow(pipeline.kafka, output, dict.fromkeys(ends, 0), ends):
        fields = render(record, registry)
        rows.append({"offset": record.offset, "key": fields["key"], "value": fields["value"]})
    return rows


def table_rows(pipeline: Pipeline, output: str) -> list[dict[str, object]]:
    """The rows of the target table, by key; none without a sink."""
    if not pipeline.sinks:
        return []
    (sink,) = pipeline.sinks
    plan = plan_sink(pipeline, sink, sink.table(output))
    spec = layout(plan, partial(spark_session, pipeline.spark, pipeline.lake)).spec
    rows = [row for batch in plan.target().rows(spec) for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: str([row[name] for name in spec.key]))


def what_next(running: Services, demo: Demo, folder: Path) -> str:
    """Commands to go on with. ``folder``: with the pipeline files; the commands name files from the current folder."""
    current_folder, checkout = Path.cwd(), folder.resolve().parent
    file = folder.resolve() / demo.file
    file, workspace = (
        path.relative_to(current_folder) if current_folder == checkout else path
        for path in (file, checkout / "workspace.yaml")
    )
    names = " ".join(f"{name}={value}" for name, value in addresses(running).items())
    setting = "" if demo is INVOICES else f"ZYNC_PIPELINE={shlex.quote(str(file))} "
    return (
        "\nThe broker, the registry and the lake are still there."
        f"\n  the asset graph:  {setting}dagster dev -w {shlex.quote(str(workspace))}    (then open http://127.0.0.1:3000)"
        f"\n  go on by hand:    export {names}"
        f"\n                    zync status {shlex.quote(str(file))}"
        "\n  stop, or remove:  zync demo --stop       zync demo --clean"
        f"\n  everything is in {running.state_dir}"
    )
