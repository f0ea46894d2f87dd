"""The commands that run the steps: what is asked for wrongly."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from zync_assets.cli.main import main
from zync_assets.kafka import topics
from zync_assets.local.services import Services
from zync_assets_tests.shop import read_topic
from zync_assets_tests.steps.mini import BOTH, JOIN, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEMO = str(Path(__file__).parents[2] / "demo" / "invoices.yaml")


def test_a_rule_that_is_none_is_said_with_those_that_are() -> None:
    result = CliRunner().invoke(main, ["etl", "--retry-pending", "status-update", DEMO])
    assert result.exit_code == 1
    assert "--retry-pending status-update: no denorm rule of this pipeline is called so; there are new-invoice." in (
        result.stderr
    )


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
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A file of inputs alone, a file with rules and a file of outputs alone share one lake."""
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
    assert [done["records"] for done in zync("etl")] == [1]

    publishes = whole.edited("outputs:" + outputs)
    assert [(done["step"], done["records"]) for done in zync("run", "--until-idle")] == [("publish", 1)]
    zync("check")
    assert [found["topic"] for found in zync("status")] == [whole.out]
    assert len(read_topic(services.bootstrap_servers, whole.out)) == 1
    assert publishes.pipeline.inputs == ()


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
