"""Fields whose names the lake can't hold, from the source's topic to the output's."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from zync_assets.checks.output_checks import run_all
from zync_assets.cli.main import main
from zync_assets.errors import EtlError, SchemaError
from zync_assets.local.services import Services
from zync_assets_tests.mini import Mini, mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[[str], Mini]

NAMES = ["first name", "a,;{}()=\t\nb", "Name", "name", "NAME", "a.b", "ü", "5%20off", "plain"]
INNER = {
    "type": "struct",
    "field": "inner",
    "fields": [{"type": "string", "field": "x y"}, {"type": "string", "field": "X Y"}],
}
FIELDS = [*({"type": "string", "field": name} for name in NAMES), {**INNER, "optional": True}]
EVERYTHING = """
inputs:
  - {topic: $left, pool: Raw, key-format: connect-json, value-format: connect-json}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "`the id` string, ID string, id string"}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
  - {topic: $out.c, pool: Staging, key-format: string, value-format: connect-json, create: {replication-factor: 1}}
  - {topic: $out.a, pool: Staging, key-format: string, value-format: avro, create: {replication-factor: 1}}
transforms:
  - name: join
    type: denorm
    left: $left
    right: $right
    where: {left: "value.name = 'join'"}
    join-on: left.value.`first name` = right.value.`the id`
    out: $out
    key: left.value.`first name`
    value: {the whole: left.value, "ID": right.value.id, "id": right.value.ID, "a.b": {"ü;": left.value.inner.`X Y`}}
  - {name: connect, type: stateless, in: $left, where: "value.`first name` = 'c'", out: $out.c, key: in.value.NAME,
     value: in.value}
  - {name: avro, type: stateless, in: $left, out: $out.a, key: in.value.NAME,
     value: {Name: in.value.Name, name: in.value.name}}
"""


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    return lambda text: mini(services, spark, tmp_path, unique, text)


def record(**more: Any) -> dict[str, Any]:
    values = {name: f"<{name}>" for name in NAMES} | {"inner": {"x y": "small", "X Y": "large"}} | more
    return {"schema": {"type": "struct", "fields": list(FIELDS)}, "payload": values}


@pytest.mark.slow
def test_any_name_works_from_topic_to_lake_to_expressions_to_output(make: Make) -> None:
    it = make(EVERYTHING)
    records = [record(**{"name": "join"}), record(**{"first name": "c"}), record()]
    it.send(it.left, *[(None, one) for one in records])
    it.send(it.right, {"the id": "<first name>", "ID": "A", "id": "a"})
    it.step()
    payloads = [one["payload"] for one in records]
    (joined,) = (json.loads(text) for text in it.published(it.out))
    assert joined == {"the whole": payloads[0], "ID": "a", "id": "A", "a.b": {"ü;": "large"}}
    (connect,) = (json.loads(text) for text in it.published(f"{it.out}.c"))
    assert connect["payload"] == payloads[1]
    assert [item["field"] for item in connect["schema"]["fields"]] == [*NAMES, "inner"]
    assert [item["optional"] for item in connect["schema"]["fields"]] == [*(False for _ in NAMES), True]
    (avro,) = it.published(f"{it.out}.a")
    schema = {
        "type": "record",
        "name": "V",
        "fields": [{"name": name, "type": "string"} for name in ("Name", "name")],
    }
    assert fastavro.schemaless_reader(io.BytesIO(avro[5:]), schema, None) == {"Name": "<Name>", "name": "<name>"}
    columns = next(item for item in DeltaTable(f"{it.lake}/Raw/{it.left}").schema().fields if item.name == "value").type
    assert [item.name for item in columns.fields] == [  # type: ignore[union-attr]
        "first%20name", "a%2C%3B%7B%7D%28%29%3D%09%0Ab", "Name", "%6Eame", "%4EAME", "a.b", "ü", "5%2520off", "plain", "inner",
    ]  # fmt: skip
    # Later batches, with fields that are new, go into the same columns.
    FIELDS.append({"type": "string", "field": "nAME", "optional": True})
    try:
        more = record(**{"first name": "c", "nAME": "new"})
    finally:
        FIELDS.pop()
    it.send(it.left, (None, more))
    it.step()
    assert json.loads(it.published(f"{it.out}.c")[-1])["payload"] == more["payload"]
    for result in run_all(it.pipeline):
        assert result.passed or result.severity == "warn", f"{result.name}: {result.summary}"
    # Every key was null until now.
    sql = f"select key, value.`%6Eame` as name from Raw.`{it.left}` where kafka.offset = 1"
    shown = CliRunner().invoke(main, ["query", str(it.pipeline.path), sql, "--format", "json"])
    assert [json.loads(line) for line in shown.stdout.splitlines()] == [{"key": None, "name": "<name>"}]


REFUSED = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "Name string, name string"}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: FORM, create: {replication-factor: 1}}
transforms:
  - {name: odd, type: stateless, in: $left, out: $out, key: in.key, value: VALUE}
"""


def test_a_name_that_can_t_be_meant_or_held_is_told_with_its_rule(make: Make) -> None:
    it = make(REFUSED.replace("FORM", "json").replace("VALUE", "{n: in.value.NAME}"))
    it.send(it.left, {"Name": "N", "name": "n"})
    it.ingest()
    with pytest.raises(EtlError, match=r"rule odd: in.value.NAME: `NAME` may be `Name` and `name`"):
        it.etl()
    for form, value, message in (
        ("json", "\"named_struct('a b', 1)\"", r"rule odd, value: an expression makes a field called `a b`"),
        (
            "avro",
            "\"named_struct('a-b', 1)\"",
            r"value.*: Value\.a-b: Avro names are letters.* give the output another format",
        ),
    ):
        with pytest.raises((EtlError, SchemaError), match=message):
            it.edited(REFUSED.replace("FORM", form).replace("VALUE", value)).etl()


SHAPED = """
inputs:
  - topic: $left
    pool: Raw
    key-format: string
    value-format: json
    schema: "`the id` int, Name string, name string, list array<struct<`a b`: int>>"
    shape: {where: value.`the id` > 1, value: {the id: value.`the id`, "N n": value.name, ab: "value.list[0].`a b`"}}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}, 
     shape: {value: {"o o": value.`n n`, "O o": value.ab}}}
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {n n: in.value.`N n`, ab: in.value.ab}}
"""


@pytest.mark.slow
def test_shapes_of_inputs_and_outputs_name_fields_as_the_topics_do(make: Make) -> None:
    it = make(SHAPED)
    for name in ("one", "two"):
        it.send(it.left, *[{"the id": id, "Name": "", "name": name, "list": [{"a b": id}]} for id in (1, 2)])
        it.step()
    assert [json.loads(text) for text in it.published(it.out)] == [
        {"o o": "one", "O o": 2},
        {"o o": "two", "O o": 2},
    ]
