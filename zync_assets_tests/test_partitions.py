"""Outputs with several partitions, end to end: the partition of a key is Kafka's own choice, and stays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient, NewPartitions

from zync_assets.checks.output_checks import run_all
from zync_assets.checks.remote_checks import staging_equals_topic
from zync_assets.cli.main import main
from zync_assets.errors import EtlError, PartitionsChanged
from zync_assets.kafka.partitioner import key_partitions
from zync_assets.kafka.topics import create_topic
from zync_assets.local.services import Services
from zync_assets.publish import commit as step
from zync_assets.publish.commit import recreate_topic
from zync_assets.publish.plan import plan_publish
from zync_assets_tests.mini import BOTH, Mini, make_pipeline, mini, mini_of, published, row, run_steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COPY = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: {id: in.value.id}, value: {id: in.value.id, v: in.value.v}}
"""
Make = Callable[..., Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make("key-format: avro", COPY)``: a pipeline whose output has three partitions and these properties."""

    def made(output: str, rules: str = COPY) -> Mini:
        text = BOTH.replace("key-format: string, value-format: json, create: {", f"{output}, create: {{partitions: 3, ")
        return mini(services, spark, tmp_path, unique, text + rules)

    return made


def records(it: Mini) -> dict[int, list[tuple[bytes | None, Any]]]:
    """Partition → (key, value) of the records in the output topic, in order."""
    found = published(it.pipeline, it.out)
    return {part: [(key, value and json.loads(value)) for key, value in pairs] for part, pairs in found.items()}


def assert_sound(it: Mini, count: int) -> dict[int, list[tuple[bytes | None, Any]]]:
    """Kafka's own partitioner would put each record where it is; the topic is staging; every check passes."""
    found = records(it)
    assert sum(map(len, found.values())) == count
    for partition, pairs in found.items():
        keys = pa.array([key for key, _ in pairs], pa.binary())
        assert set(key_partitions(keys, 3).tolist()) <= {partition}
        staged = [row["value"] for row in it.staged() if row["kafka"]["partition"] == partition]
        assert [value for _, value in pairs] == staged
    assert [result.summary for result in run_all(it.pipeline) if not result.passed] == []
    return found


@pytest.mark.parametrize("key_format", ["avro", pytest.param("json", marks=pytest.mark.slow)])
def test_each_key_is_in_the_partition_that_kafka_would_choose(
    make: Make, monkeypatch: pytest.MonkeyPatch, key_format: str
) -> None:
    monkeypatch.setattr(step, "WINDOW_RECORDS", 6)
    monkeypatch.setattr(step, "TASK_RECORDS", 9)
    it = make(f"key-format: {key_format}, value-format: json")
    it.send(it.left, *[row(number, "first") for number in range(20)])
    made = it.step()
    assert made is not None
    assert sum(part.end for part in made.outputs[it.out]) == 20
    assert it.publish().records == 20
    before = assert_sound(it, 20)
    it.send(it.left, *[row(number, "second") for number in range(20)])
    it.step()
    assert (it.publish().records, plan_publish(it.pipeline, it.out).nothing_to_do) == (20, True)
    for partition, pairs in assert_sound(it, 40).items():
        first = before[partition]
        assert len(first) >= 1
        assert pairs == [*first, *((key, {**value, "v": "second"}) for key, value in first)], "no key has moved"
    command = CliRunner()
    status = command.invoke(main, ["status", str(it.pipeline.path), "--format", "json"])
    rows = [json.loads(line) for line in status.stdout.splitlines()]
    ends = {item["partition"]: (item["next"], item["lag"]) for item in rows if item.get("topic") == it.out}
    assert ends == {partition: (len(pairs), 0) for partition, pairs in records(it).items()}
    place = ["--partition", "2", "--format", "json"]
    trace = command.invoke(main, ["trace", str(it.pipeline.path), it.out, "0", *place])
    output, source = (json.loads(line) for line in trace.stdout.splitlines())
    assert (output["partition"], output["value"]) == (2, records(it)[2][0][1])
    assert source["offset"] == output["value"]["id"]


def test_the_example_of_the_page_has_its_partitions(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    page = Path(__file__).parents[1] / "demo" / "topics.md"
    _, _, text = page.read_text().partition("```yaml\n")
    text = re.sub(r"(clean-)?(orders|payments)\b", lambda name: f"{unique}.{name[0]}", text.partition("```")[0])
    it = replace(mini_of(make_pipeline(services, tmp_path, text, partitions=1), spark), out=f"{unique}.clean-payments")
    it.send(it.left, *({"id": number, "item": "tea"} for number in range(9)))
    it.send(it.right, *({"id": number, "customer": 7 - number % 3} for number in range(9)))
    run_steps(it.pipeline)
    found = {partition: {value["customer"] for _, value in pairs} for partition, pairs in records(it).items()}
    assert found == {0: {6}, 1: {7}, 2: {5}}
    assert_sound(replace(it, out=f"{unique}.clean-orders"), 9)


def test_a_topic_that_gets_more_partitions_is_an_error_with_a_way_back(make: Make) -> None:
    it = make("key-format: avro, value-format: json")
    it.send(it.left, *map(row, range(9)))
    it.step()
    it.publish()
    admin = AdminClient(dict(it.pipeline.kafka))
    for future in admin.create_partitions([NewPartitions(it.out, 5)]).values():
        future.result()
    with pytest.raises(
        PartitionsChanged, match=f"topic {it.out} has 5 partitions, and its outputs are numbered for 3"
    ) as error:
        plan_publish(it.pipeline, it.out)
    # The command is the last word, so that no full stop is pasted with it.
    assert str(error.value).endswith(it.pipeline.command("to-kafka", "--recreate", it.out))
    assert "5 partitions" in staging_equals_topic(it.pipeline, it.out).summary
    recreate_topic(it.pipeline, it.out)
    assert it.publish().records == 9
    assert_sound(it, 9)


BY = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, value: {id: in.value.id},
     key: "CASE WHEN in.value.id < 6 THEN named_struct('id', in.value.id) END"}
"""


def test_an_expression_gives_the_partition(make: Make) -> None:
    it = make("format: json, partition-by: 'coalesce(key.id + 1, value.id)'", BY)
    it.send(it.left, *[row(number) for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, None)])
    it.step()
    it.publish()
    found = {partition: [value["id"] for _, value in pairs] for partition, pairs in records(it).items()}
    assert found == {0: [2, 5, 6, None], 1: [0, 3, 7], 2: [1, 4, 8]}
    it.send(it.left, row(1))
    with pytest.raises(EtlError, match=r"partition-by: key.id: keys would move to other partitions"):
        it.changed("coalesce(key.id + 1, value.id)", "key.id").step()


@pytest.mark.slow
def test_a_record_whose_partition_fails_costs_itself(make: Make) -> None:
    it = make("format: json, partition-by: value.nix")
    it.send(it.left, row(1, "1"), row(2, "no number"), row(3, "-4"), row(4, "2"))
    with pytest.raises(EtlError, match=r"partition-by: value.nix: .* Write a whole number"):
        it.step()
    it = it.changed("value.nix", "CAST(value.v AS INT)")
    it.step()
    it.publish()
    found = {partition: [value["id"] for _, value in pairs] for partition, pairs in records(it).items()}
    assert found == {0: [], 1: [1], 2: [3, 4]}
    [entry] = it.ledger("quarantined")
    assert entry["first"] == 1
    assert entry["text"].startswith("partition-by: CAST(value.v AS INT): [CAST_INVALID_INPUT] The value 'no number'")
    assert [result.summary for result in run_all(it.pipeline) if result.severity == "error" and not result.passed] == []


def test_null_keys_go_to_partition_0(make: Make) -> None:
    it = make("key-format: avro, value-format: json", BY)
    it.send(it.left, *map(row, range(12)))
    it.step()
    it.publish()
    found = records(it)
    assert [value["id"] for key, value in found[0] if key is None] == [6, 7, 8, 9, 10, 11]
    assert all(key is not None for partition in (1, 2) for key, _ in found[partition])


def test_keys_do_not_move_when_their_schema_changes(make: Make) -> None:
    it = make("key-format: avro, value-format: json")
    it.send(it.left, row(1))
    it.step()
    it.send(it.left, row(2))
    with pytest.raises(EtlError, match="rule copy: keys would move to other partitions"):
        it.changed("key: {id: in.value.id}", "key: {id: in.value.id, v: in.value.v}").step()


def test_an_existing_topic_has_its_own_partitions(make: Make) -> None:
    """The file says three for a new topic. Numbers begin at the end of each partition with ``start-at: end``."""
    it = make("key-format: avro, value-format: json, start-at: end")
    create_topic(it.pipeline.kafka, it.out, 2, 1, {})
    it.send(it.out, row(1), row(2), partition=1)
    it.send(it.left, *map(row, range(8)))
    made = it.step()
    assert made is not None
    assert {part.partition: part.first for part in made.outputs[it.out]} == {0: 0, 1: 2}
    assert it.publish().records == 8
    assert staging_equals_topic(it.pipeline, it.out).numbers["compared"] == 8
