"""The commands that run the steps: what they print and when, what is asked for wrongly, and what is waited out."""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from zync_assets.cli import run
from zync_assets.cli.main import main
from zync_assets.conflicts import raise_first
from zync_assets.errors import LakeError, LakeUnavailable, SparkLost, SparkUnavailable, ZyncError
from zync_assets.kafka import topics
from zync_assets.kafka.topics import create_topic
from zync_assets.local.services import Services
from zync_assets_tests.mini import BOTH, JOIN, mini, read_topic, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEMO = str(Path(__file__).parents[2] / "demo" / "invoices.yaml")


def test_a_rule_that_is_none_is_said_with_those_that_are() -> None:
    result = CliRunner().invoke(main, ["etl", "--retry-pending", "status-update", DEMO])
    assert result.exit_code == 1
    assert (
        "--retry-pending status-update: no denorm or group rule of this pipeline is called so; there are new-invoice."
        in (result.stderr)
    )


def test_explain_shows_the_query_of_a_view_and_the_keys_that_each_table_touches() -> None:
    orders = str(Path(DEMO).with_name("orders.yaml"))
    result = CliRunner().invoke(main, ["explain", "--format", "json", orders])
    query, plan = (json.loads(line) for line in result.stdout.splitlines())
    assert [(each["kind"], each["name"], each["pool"]) for each in (query, plan)] == [
        ("rule", "order-document", "Documents"),
        ("plan", "order-document", "Documents"),
    ]
    assert "LEFT JOIN l ON (o.id) = (l.order_id)" in query["sql"]
    assert "FROM Shop.`shop.public.lines` GROUP BY (key)" in query["sql"]
    assert (
        "-- a change of c (shop.public.customers) touches the keys {id: o.id} of\n"
        "--   the changed rows c, as they were before the batch and as they are after it\n"
        "--   with the rows o that have o.customer_id = c.id: a semi join of c with the state of o\n"
    ) in plan["sql"]
    as_text = CliRunner().invoke(main, ["explain", orders]).stdout
    assert as_text == f"{query['sql']}\n\n{plan['sql']}\n"
    assert as_text == CliRunner().invoke(main, ["etl", "--explain", orders]).stdout


def test_explain_begins_before_a_left_join_where_the_key_depends_on_its_row(tmp_path: Path) -> None:
    text = Path(DEMO).with_name("orders.yaml").read_text()
    text = text.replace("o JOIN c", "o LEFT JOIN c").replace("key: {id: o.id}", "key: coalesce(c.city, 'none')")
    orders = tmp_path / "orders.yaml"
    orders.write_text(text)
    assert (
        "--   the changed rows c, as they were before the batch and as they are after it\n"
        "--   with the rows o that have o.customer_id = c.id: a semi join of c with the state of o\n"
        "--   with the rows c that have c.id = o.customer_id, or nulls: a left join of o with the state of c\n"
    ) in (explained := CliRunner().invoke(main, ["explain", str(orders)]).stdout)
    assert "-- No field of the key is of one table whose row is always there: a batch reads all rows o.\n" in explained


def test_explain_gives_an_object_a_statement_to_a_pipe() -> None:
    result = CliRunner().invoke(main, ["etl", "--explain", "--format", "json", DEMO])
    assert result.exit_code == 0, result.output
    statements = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(found["kind"], found["name"]) for found in statements] == [
        ("assignment", "Invoices"),
        ("assignment", "InvoiceStatus"),
        ("rule", "new-invoice"),
        ("rule", "status-update"),
        ("rule", "invoice-delete"),
    ]
    assert all("SELECT" in found["sql"] for found in statements)
    as_text = CliRunner().invoke(main, ["etl", "--explain", DEMO]).stdout
    assert as_text == "\n\n".join(found["sql"] for found in statements) + "\n"


def test_one_file_ingests_another_transforms_and_a_third_publishes(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of inputs alone, a file with rules and a file of outputs alone share one lake."""
    lengths: list[bool] = []

    def session(*arguments: object, long: bool = False) -> SparkSession:
        lengths.append(long)
        return spark

    monkeypatch.setattr(run, "spark_session", session)
    monkeypatch.setattr(run, "LARGE_BACKLOG", 3)
    whole = mini(services, spark, tmp_path, unique, BOTH + JOIN)
    whole.send(whole.left, row(1, "l"), row(2, "waits"))
    whole.send(whole.right, row(1, "r"))

    def zync(*arguments: str) -> list[dict[str, object]]:
        path = str(whole.pipeline.path)
        result = CliRunner().invoke(main, [*arguments[:1], path, *arguments[1:], "--format", "json"])
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    inputs, outputs = BOTH.split("outputs:")
    whole.edited(inputs)
    assert [(done["step"], done["records"]) for done in zync("run", "--until-idle")] == [("ingest", 2), ("ingest", 1)]
    zync("check")
    assert {found["topic"] for found in zync("status")} == {whole.left, whole.right}

    whole.edited(BOTH + JOIN)
    assert lengths and not any(lengths)
    # Three raw records are new: as many as a long session is for.
    lengths.clear()
    assert [done["records"] for done in zync("etl")] == [1]
    assert lengths and all(lengths)
    whole.send(whole.right, row(2, "r"))
    zync("from-kafka")
    lengths.clear()
    assert [done["records"] for done in zync("etl")] == [1]
    assert lengths and not any(lengths)

    publishes = whole.edited("outputs:" + outputs)
    assert [(done["step"], done["records"]) for done in zync("run", "--until-idle")] == [("publish", 2)]
    zync("check")
    assert [found["topic"] for found in zync("status")] == [whole.out]
    assert len(read_topic(whole.pipeline, whole.out)) == 2
    assert publishes.pipeline.inputs == ()


@pytest.mark.slow
def test_a_partition_without_a_leader_stops_neither_other_records_nor_etl_nor_publishing(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH + JOIN, partitions=2)
    it.send(it.left, row(1, "early"))
    it.ingest()
    it.send(it.left, row(2, "l"))
    it.send(it.left, row(3, "unread"), partition=1)
    it.send(it.right, row(2, "r"))
    real = AdminClient.list_offsets

    def unled(client: AdminClient, request: dict[Any, Any], **named: Any) -> dict[Any, Any]:
        lost = {place for place in request if (place.topic, place.partition) == (it.left, 1)}
        answers = dict(real(client, {place: spec for place, spec in request.items() if place not in lost}, **named))
        for place in lost:
            answers[place] = Future()
            answers[place].set_exception(KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE)))
        return answers

    def records() -> list[tuple[str, int]]:
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        return [(found["step"], found["records"]) for found in rows]

    monkeypatch.setattr(AdminClient, "list_offsets", unled)
    monkeypatch.setattr(topics, "WAIT", 0.5)
    result = CliRunner().invoke(main, ["run", str(it.pipeline.path), "--until-idle", "--format", "json"])
    assert records() == [("ingest", 1), ("ingest", 1), ("etl", 1), ("publish", 1)]
    assert result.exit_code == 1
    assert "Leader not available" in result.stderr
    assert dict(it.next(it.left)) == {0: 2, 1: 0}
    assert [value["l"] for value in it.values()] == ["l"]

    monkeypatch.undo()
    result = CliRunner().invoke(main, ["run", str(it.pipeline.path), "--until-idle", "--format", "json"])
    assert result.exit_code == 0
    assert records() == [("ingest", 1), ("etl", 0)]


POOLS = (
    BOTH
    + """
  - {topic: $out.b, pool: Other, key-format: string, value-format: json, create: {replication-factor: 1}}
""".lstrip("\n")
    + JOIN
    + """
  - {name: copy, type: stateless, in: $right, out: $out.b, key: in.key, value: {id: in.value.id}}
""".lstrip("\n")
)


def test_a_missing_raw_file_stops_its_pool_alone_and_is_said_with_table_and_cure(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, POOLS)
    it.send(it.left, row(1, "l"))
    it.send(it.right, row(1, "r"))
    it.ingest()
    table = Path(it.lake, "Raw", it.left)
    [file] = table.glob("*.parquet")
    file.rename(tmp_path / "away")
    it.send(it.left, row(2, "l"))
    it.send(it.right, row(2, "r"))

    def zync() -> list[tuple[str, str, int]]:
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        return [(found["step"], found["target"], found["records"]) for found in rows]

    result = CliRunner().invoke(main, ["run", str(it.pipeline.path), "--until-idle", "--format", "json"])
    ingested = [("ingest", it.left, 1), ("ingest", it.right, 1)]
    assert zync() == [*ingested, ("etl", "Other", 2), ("publish", f"{it.out}.b", 2)]
    assert result.exit_code == 1
    [said] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: pool Staging: table {table}: file {file} is in the log and not in the lake.")
    assert "Restore the file from a copy, or begin anew, with other pools and other output topics." in said
    assert "Traceback" not in result.stderr

    (tmp_path / "away").rename(file)
    result = CliRunner().invoke(main, ["run", str(it.pipeline.path), "--until-idle", "--format", "json"])
    assert result.exit_code == 0
    assert zync() == [("etl", "Staging", 2), ("publish", it.out, 2)]


LATER = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string"}
  - {topic: $out.later, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string"}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - {name: a, type: stateless, in: $left, out: $out, key: in.key, value: {v: in.value.v}}
  - {name: b, type: stateless, in: $out.later, out: $out, key: in.key, value: {v: in.value.v}}
"""


def test_a_run_goes_on_without_a_topic_that_is_not_there_yet(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = mini(services, spark, tmp_path, unique, LATER)
    later = f"{it.out}.later"
    it.send(it.left, row(1, "first"))
    sleeps = 0

    def sleep(*given: object) -> None:
        """The pipeline is idle, but for the missing topic."""
        nonlocal sleeps
        sleeps += 1
        if sleeps == 1:
            it.send(it.left, row(2, "second"))
        elif sleeps == 2:
            create_topic(it.pipeline.kafka, later, 1, 1, {})
            it.send(later, row(3, "third"))

    monkeypatch.setattr(run, "_stop_on_signals", lambda: lambda: sleeps == 3)
    monkeypatch.setattr(run, "_sleep", sleep)
    result = CliRunner().invoke(main, ["run", str(it.pipeline.path)])
    assert (result.exit_code, result.stderr) == (
        0,
        f"warning: topic {later} is not there. Create it, or take it out of inputs. Trying again.\n",
    )
    assert [value["v"] for value in it.values()] == ["first", "second", "third"]


TWO = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string",
     shape: {where: value.id > 1}}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "op string, id bigint, v string",
     on-bad-record: fail}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
  - {topic: $out.b, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - {name: a, type: stateless, in: $left, where: value.id = 2, out: $out, key: in.key, value: {id: in.value.id}}
  - {name: b, type: stateless, in: $left, out: $out.b, key: in.key, value: {id: in.value.id}}
"""


def test_commits_are_printed_when_they_are_made_and_no_later_error_hides_them(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a[b]{c,d}*?"
    folder.mkdir()
    it = mini(services, spark, folder, unique, TWO)
    it.send(it.left, row(1), row(2), row(3))
    it.send(it.right, b"no JSON")

    def zync(command: str, *arguments: str, code: int = 0) -> tuple[list[dict[str, Any]], str]:
        result = CliRunner().invoke(main, [command, str(it.pipeline.path), *arguments, "--format", "json"])
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()], result.stderr

    [made], error = zync("from-kafka", code=1)
    assert (made["target"], made["records"], made["left_out"]) == (it.left, 2, 1)
    assert "on-bad-record is fail" in error
    assert [row["records"] for row in zync("etl")[0]] == [2]

    printed: list[str] = []
    real = run.publish_all

    def watched(*given: Any, **named: Any) -> Any:
        for made in real(*given, **named):
            printed.append(sys.stdout.buffer.getvalue().decode())  # type: ignore[attr-defined]  # CliRunner's
            yield made

    monkeypatch.setattr(run, "publish_all", watched)
    rows, _ = zync("to-kafka")
    assert [row["target"] for row in rows] == [it.out, f"{it.out}.b"]
    assert [text.count("\n") for text in printed] == [0, 1]
    it.send(it.left, row(2))
    zync("from-kafka", "--topic", it.left)
    zync("etl")
    rows, _ = zync("to-kafka", "--topic", it.out, "--recreate", f"{it.out}.b")
    assert [(row["target"], row["records"]) for row in rows] == [(it.out, 1), (f"{it.out}.b", 1)]


@pytest.mark.parametrize(
    ("errors", "attempts"),
    [
        ([LakeUnavailable("away"), SparkUnavailable("away"), LakeError("lasting")], 3),
        ([LakeUnavailable("away")] * 20 + [LakeError("lasting")], 21),
        ([SparkLost("lost")] * 20, run.MOST_LOSSES),
    ],
)
def test_a_run_waits_out_errors_that_may_pass_and_no_others(
    errors: list[ZyncError], attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(errors)

    def ingest(*given: object, **named: object) -> Any:
        raise next(left)
        yield

    monkeypatch.setattr(run, "ingest_all", ingest)
    for name in ("etl_all", "publish_all"):
        monkeypatch.setattr(run, name, lambda *given, **named: iter(()))
    for name in ("POLL_SECONDS", "MAX_BACK_OFF"):
        monkeypatch.setattr(run, name, 0.001)
    result = CliRunner().invoke(main, ["run", DEMO])
    assert (result.exit_code, result.stderr.count("Trying again")) == (1, attempts - 1)
    assert len(list(left)) == len(errors) - attempts


def test_the_errors_of_several_steps_are_printed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*errors: ZyncError) -> Any:
        def step(*given: object, **named: object) -> Any:
            raise_first(errors)
            yield

        return step

    monkeypatch.setattr(run, "ingest_all", failing(LakeUnavailable("away")))
    monkeypatch.setattr(run, "etl_all", failing(LakeError("one pool"), LakeError("another pool")))
    monkeypatch.setattr(run, "publish_all", failing(LakeError("one topic"), LakeError("another topic")))
    done = CliRunner().invoke(main, ["run", DEMO, "--until-idle"])
    assert done.exit_code == 1
    assert sorted(done.stderr.splitlines()) == sorted(
        f"error: {text}" for text in ("one pool", "another pool", "away", "one topic", "another topic")
    )
    assert done.stderr.startswith("error: one pool\n")


STOPPED = """
name: stopped
lake: lake
kafka: {bootstrap.servers: "127.0.0.1:1"}
inputs: [{topic: a, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}]
sinks:
  - {name: one, type: sqlite, url: first, from: [Raw.a]}
  - {name: two, type: sqlite, url: second, from: [Raw.a]}
"""


def test_the_errors_of_several_tables_are_printed_alike(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(STOPPED)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    done = CliRunner().invoke(main, ["sink", str(path)])
    assert done.exit_code == 1
    assert [line.partition(" is a folder")[0] for line in done.stderr.splitlines()] == [
        f"error: sink one, table a: {tmp_path}/first",
        f"error: sink two, table a: {tmp_path}/second",
    ]


def test_a_comparison_that_writes_nothing_empties_no_table(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(STOPPED)
    done = CliRunner().invoke(main, ["sink", str(path), "--sink", "one", "--reset", "a", "--verify"])
    assert done.exit_code == 2
    assert "--verify writes nothing, and --reset empties a table; give one of the two" in done.stderr
