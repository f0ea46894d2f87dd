"""The commands that look into Kafka and the registry, as a user types them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer

from zync_assets.cli.main import main
from zync_assets.kafka.topics import create_topic, topic_states
from zync_assets.local.services import Services


class Zync(Protocol):
    def __call__(self, *arguments: str, stdin: str | None = None) -> Result: ...


@pytest.fixture
def zync(services: Services) -> Zync:
    """Runs ``zync`` with the test's broker and registry in the environment; stdout apart from stderr."""
    environment = {
        "KAFKA_BOOTSTRAP_SERVERS": services.bootstrap_servers,
        "SCHEMA_REGISTRY_URL": services.registry_url,
    }

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner(env=environment).invoke(main, arguments, input=stdin)

    return run


@pytest.fixture
def kafka(services: Services) -> dict[str, str]:
    return {"bootstrap.servers": services.bootstrap_servers}


@pytest.fixture
def topic(kafka: dict[str, str], unique: str) -> str:
    create_topic(kafka, f"{unique}.public.orders", 1, 1, {})
    return f"{unique}.public.orders"


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def consumed(zync: Zync, topic: str, *options: str) -> list[tuple[Any, Any]]:
    return [(row["key"], row["value"]) for row in rows(zync("consume", topic, "--until-end", *options))]


def test_what_was_produced_is_consumed(zync: Zync, topic: str) -> None:
    lines = '{"key": {"id": 1}, "value": {"id": 1, "item": "tea", "net": 2.5}}\n{"key": {"id": 1}, "value": null}\n'
    result = zync("produce", topic, "-", stdin=lines)
    assert result.exit_code == 0, result.output
    assert "2 records produced" in result.stderr

    first, second = rows(zync("consume", topic, "--until-end"))
    assert {**first["kafka"], "timestamp": 0} == {"topic": topic, "partition": 0, "offset": 0, "timestamp": 0}
    assert first["kafka"]["timestamp"] > 1_600_000_000_000
    assert (first["key"], first["value"]) == ({"id": 1}, {"id": 1, "item": "tea", "net": 2.5})
    assert (second["key"], second["value"]) == ({"id": 1}, None)


def test_a_plain_json_value_is_a_value_with_a_null_key(zync: Zync, topic: str) -> None:
    zync("produce", topic, stdin='{"s": "hello"}\n\n{"s": null, "more": [1, 2]}\n')
    assert consumed(zync, topic) == [(None, {"s": "hello", "more": None}), (None, {"s": None, "more": [1, 2]})]


def test_what_consume_prints_can_be_produced(zync: Zync, kafka: dict[str, str], topic: str, tmp_path: Path) -> None:
    lines = '{"key": "k", "value": {"a": 1}, "headers": {"h": "x"}, "timestamp": 5}\n{"value": {"a": 2}, "key": null}\n'
    zync("produce", topic, stdin=lines)
    printed = zync("consume", topic, "--until-end").stdout
    copy = tmp_path / "copy.jsonl"
    copy.write_text(printed)
    assert zync("produce", f"{topic}.copy", str(copy), "--create", "--partitions", "2").exit_code == 0
    assert len(topic_states(kafka, [f"{topic}.copy"])[f"{topic}.copy"].partitions) == 2
    again = rows(zync("consume", f"{topic}.copy", "--until-end"))
    assert sorted((row["value"]["a"], row["key"], str(row.get("headers"))) for row in again) == [
        (1, "k", "[{'key': 'h', 'value': 'x'}]"),
        (2, None, "None"),
    ]


def test_a_given_schema_is_kept_to(zync: Zync, topic: str, tmp_path: Path) -> None:
    schema = tmp_path / "order.avsc"
    types = {
        "id": "int",
        "price": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "day": ["null", {"type": "int", "logicalType": "date"}],
        "raw": "bytes",
        "tags": {"type": "map", "values": ["null", "string", "long"]},
    }
    fields = [{"name": name, "type": type} for name, type in types.items()]
    schema.write_text(json.dumps({"type": "record", "name": "Order", "fields": fields}))
    order = {
        "id": 1,
        "price": "12.50",
        "at": "2024-05-01T10:00:00+00:00",
        "day": "2024-05-01",
        "raw": base64.b64encode(b"\xff\x00").decode(),
        "tags": {"a": "x", "b": 7, "c": None},
    }
    result = zync("produce", topic, "--schema", str(schema), stdin=json.dumps({"value": order}))
    assert result.exit_code == 0, result.output
    assert consumed(zync, topic) == [(None, order)]

    for wrong, named in (({**order, "colour": "red"}, "colour"), ({**order, "id": "one"}, "id"), ({"id": 1}, "price")):
        result = zync("produce", topic, "--schema", str(schema), stdin=json.dumps(wrong))
        assert result.exit_code == 1
        assert named in result.stderr
        assert "Traceback" not in result.stderr


def test_other_formats_than_avro(zync: Zync, topic: str) -> None:
    assert zync("produce", topic, "--format", "string", stdin='{"key": "k", "value": "häh"}').exit_code == 0
    assert zync("produce", topic, "--format", "json", stdin='{"a": [1]}').exit_code == 0
    mixed = ("--format", "json", "--key-format", "string")
    assert zync("produce", topic, *mixed, stdin='{"key": "k", "value": {}}').exit_code == 0
    assert consumed(zync, topic) == [("k", "häh"), (None, '{"a": [1]}'), ("k", "{}")]
    assert consumed(zync, topic, "--from", "1", "--value-format", "json") == [(None, {"a": [1]}), ("k", {})]
    assert consumed(zync, topic, "--count", "1", "--key-format", "bytes") == [({"base64": "aw=="}, "häh")]
    refused = zync("consume", topic, "--until-end", "--value-format", "avro")
    assert refused.exit_code == 1
    assert f"{topic}/0 offset 0" in refused.stderr


@pytest.mark.parametrize("option", ["--schema", "--key-schema"])
def test_a_schema_that_no_format_takes_is_refused(zync: Zync, topic: str, tmp_path: Path, option: str) -> None:
    schema = tmp_path / "order.avsc"
    schema.write_text('"int"')
    refused = zync(
        "produce", topic, "--format", "json", option, str(schema), stdin='{"key": "k", "value": {"a": "no int"}}'
    )
    assert refused.exit_code == 2
    assert f"{option} goes with avro and connect-json, and the format is json; remove it" in refused.stderr
    assert consumed(zync, topic) == []


def test_connect_json_goes_both_ways(zync: Zync, topic: str, tmp_path: Path) -> None:
    """With a schema of the user's, whose types JSON lacks, and with a schema inferred from the lines."""
    types: dict[str, dict[str, Any]] = {
        "id": {"type": "int32"},
        "day": {"type": "int32", "name": "org.apache.kafka.connect.data.Date"},
        "at": {"type": "int64", "name": "org.apache.kafka.connect.data.Timestamp"},
        "raw": {"type": "bytes"},
        "price": {
            "type": "bytes",
            "name": "org.apache.kafka.connect.data.Decimal",
            "parameters": {"scale": "2", "connect.decimal.precision": "9"},
        },
        "note": {"type": "string", "optional": True},
    }
    schema = tmp_path / "order.json"
    fields = [{"field": name, **{"optional": False, **kind}} for name, kind in types.items()]
    schema.write_text(json.dumps({"type": "struct", "optional": False, "fields": fields}))
    raw = base64.b64encode(b"\xff\x00").decode()
    order = {
        "id": 1,
        "day": "2024-05-01",
        "at": "2024-05-01T10:00:00+00:00",
        "raw": raw,
        "price": "12.50",
        "note": None,
    }
    connect = ("--format", "connect-json", "--schema", str(schema))
    assert zync("produce", topic, *connect, stdin=json.dumps({"key": "k", "value": order})).exit_code == 0
    assert zync("produce", topic, "--format", "connect-json", stdin='{"a": [1]}\n{"a": null}').exit_code == 0

    sent = [json.loads(value) for _, value in consumed(zync, topic)]
    assert [set(record) for record in sent] == [{"schema", "payload"}] * 3
    assert sent[0]["payload"]["day"] == 19844
    found = consumed(zync, topic, "--value-format", "connect-json", "--key-format", "connect-json")
    assert found == [("k", order), (None, {"a": [1]}), (None, {"a": None})]

    for wrong, named in (({**order, "colour": "red"}, "colour"), ({**order, "id": "one"}, "id"), ({"id": 1}, "day")):
        result = zync("produce", topic, *connect, "--key-format", "string", stdin=json.dumps(wrong))
        assert (result.exit_code, named in result.stderr) == (1, True), result.stderr
    assert zync("produce", topic, "--format", "string", stdin='"no json"').exit_code == 0
    refused = zync("consume", topic, "--from", "3", "--until-end", "--value-format", "connect-json")
    assert refused.exit_code == 1
    assert f"{topic}/0 offset 3" in refused.stderr


def test_consume_ends_when_no_record_comes_for_the_given_time(zync: Zync, topic: str) -> None:
    zync("produce", topic, stdin='{"a": 1}\n{"a": 2}')
    assert [row["value"]["a"] for row in rows(zync("consume", topic, "--timeout", "2s"))] == [1, 2]
    assert zync("consume", topic, "--timeout", "soon").exit_code == 2


def test_bytes_that_are_nothing_known_are_shown_as_base64(zync: Zync, kafka: dict[str, str], topic: str) -> None:
    producer = Producer({**kafka, "log_level": 0})
    # The second begins like Avro with a schema id, which no registry knows.
    odd = [b"\xff\xfe", b"\x00\x7f\xff\xff\xfe?", b""]
    for value in odd:
        producer.produce(topic, value)
    producer.flush(10)
    shown = [{"base64": base64.b64encode(value).decode()} for value in odd[:2]]
    assert [value for _, value in consumed(zync, topic)] == [*shown, ""]


def test_partitions_and_starts(zync: Zync, kafka: dict[str, str], unique: str) -> None:
    create_topic(kafka, unique, 3, 1, {})
    lines = "".join(json.dumps({"value": str(n), "key": None, "partition": n % 3}) + "\n" for n in range(9))
    assert zync("produce", unique, "--format", "string", stdin=lines).exit_code == 0

    assert sorted(value for _, value in consumed(zync, unique)) == [str(n) for n in range(9)]
    assert [value for _, value in consumed(zync, unique, "--partition", "1")] == ["1", "4", "7"]
    assert sorted(value for _, value in consumed(zync, unique, "--from", "2")) == ["6", "7", "8"]
    assert consumed(zync, unique, "--from", "latest") == []
    assert "has no partition 3" in zync("consume", unique, "--partition", "3").stderr
    assert zync("consume", unique, "--from", "yesterday").exit_code == 2
    assert rows(zync("info", unique, "--format", "json"))[2]["end"] == 3
    assert "partition" in zync("info", unique).stdout


def test_the_registrys_subjects(zync: Zync, topic: str) -> None:
    zync("produce", topic, stdin='{"a": 1}')
    zync("produce", topic, stdin='{"a": 1, "b": 2}')
    found = {row["subject"]: row for row in rows(zync("ls", "--format", "json"))}
    assert found[f"{topic}-value"]["version"] == 2
    assert found[f"{topic}-value"]["id"] > 0
    assert f"{topic}-value" in zync("ls").stdout

    shown = {row["subject"]: row for row in rows(zync("ls", "--schemas", "--format", "json"))}[f"{topic}-value"]
    assert shown["type"] == "AVRO"
    assert [field["name"] for field in json.loads(shown["schema"])["fields"]] == ["a", "b"]


@pytest.mark.parametrize("command", [("info",), ("consume", "--until-end"), ("produce",)])
def test_a_missing_topic_is_one_line_on_stderr(zync: Zync, unique: str, command: tuple[str, ...]) -> None:
    result = zync(command[0], unique, *command[1:], stdin='{"a": 1}')
    assert result.exit_code == 1
    assert f"topic {unique} does not exist" in result.stderr
    assert ("create it with --create" in result.stderr) == (command[0] == "produce")
    assert "Traceback" not in result.stderr
    assert f"{unique}-value" not in zync("ls").stdout


def test_a_restore_of_no_time_makes_nothing(zync: Zync, unique: str, tmp_path: Path) -> None:
    times = "--since", "2026-11-24T03:00Z", "--until", "2026-11-24T03:00Z"
    result = zync("restore", str(tmp_path / "shop.yaml"), "--from", "Raw.orders", "--to", unique, *times)
    assert result.exit_code == 2
    assert "--until 2026-11-24T03:00Z is not after --since 2026-11-24T03:00Z. Write a later time" in result.stderr


def test_bad_lines_are_named(zync: Zync, topic: str) -> None:
    for text, named in (
        ('{"a": 1}\n{"a":', "line 2"),
        ('{"value": 1, "partition": "one"}', "partition"),
        ('{"value": 1, "headers": {"h": 5}}', "headers"),
        ('{"a": 1}\n{"a": "x"}', ".a:"),
    ):
        result = zync("produce", topic, stdin=text)
        assert result.exit_code == 1, text
        assert named in result.stderr
    assert consumed(zync, topic) == []


def test_options_and_pipelines_say_where(services: Services, topic: str, tmp_path: Path) -> None:
    elsewhere = CliRunner(env={"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", "SCHEMA_REGISTRY_URL": "http://127.0.0.1:1"})
    given = ["--bootstrap-servers", services.bootstrap_servers, "--registry", services.registry_url]
    assert elsewhere.invoke(main, ["produce", topic, *given], input='{"a": 1}').exit_code == 0

    file = tmp_path / "orders.yaml"
    file.write_text(
        f"""
kafka: {{bootstrap.servers: "{services.bootstrap_servers}"}}
registry: {{url: "{services.registry_url}"}}
lake: ./lake
inputs: [{{topic: {topic}, pool: Raw, format: avro}}]
outputs: [{{topic: {topic}.out, pool: Staging, format: avro}}]
transforms: [{{type: stateless, in: {topic}, out: {topic}.out, key: in.key, value: in.value}}]
"""
    )
    result = elsewhere.invoke(main, ["consume", topic, "--until-end", "--pipeline", str(file)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["value"] == {"a": 1}


def test_these_commands_load_neither_spark_nor_dagster_nor_a_lake() -> None:
    heavy = ("pyspark", "dagster", "pandas", "deltalake")
    code = f"import sys, zync_assets.cli.topics; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_registry_of_the_environment_that_is_no_url_is_named() -> None:
    done = CliRunner(env={"SCHEMA_REGISTRY_URL": "registry:8081"}).invoke(main, ["ls"])
    assert done.exit_code == 1
    assert "the environment variable SCHEMA_REGISTRY_URL must begin with http:// or https://" in done.stderr
