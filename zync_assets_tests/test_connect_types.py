"""The notes of Kafka Connect's schemas travel with a column from a source topic to an output topic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from zync_assets.cli.records import trace_rows
from zync_assets.kafka.registry import Registry
from zync_assets.lake.raw import open_raw
from zync_assets.local.services import Services
from zync_assets.pipeline import RegistryConfig
from zync_assets_tests.codecs.connect_generated import enveloped
from zync_assets_tests.codecs.debezium import CONNECT, DATA, TIME, field, struct
from zync_assets_tests.mini import Mini, decoded, framed, mini, published

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LENGTH = {"__debezium.source.column.length": "20"}
DIGITS = {"scale": "2", "connect.decimal.precision": "10"}
# Name, Connect's type, its name, more of its schema, and a value in JSON.
COLUMNS: list[tuple[str, str, str | None, dict[str, Any], Any]] = [
    ("id", "int64", None, {"optional": False}, 7),
    ("token", "string", f"{DATA}.Uuid", {}, "0f8fad5b-d9cb-469f-a165-70867728950e"),
    ("notes", "string", f"{DATA}.Json", {}, "{}"),
    ("code", "string", None, {"optional": False, "parameters": LENGTH, "doc": "the code"}, "x"),
    ("made_on", "int32", f"{TIME}.Date", {}, 19_782),
    ("at", "int64", f"{TIME}.MicroTimestamp", {}, 1_709_200_800_123_456),
    ("sold", "int64", f"{TIME}.Timestamp", {}, 1_709_200_800_123),
    ("moment", "int64", f"{CONNECT}.Timestamp", {}, 1_709_200_800_123),
    ("opens", "int64", f"{TIME}.MicroTime", {}, 36_000_000_000),
    ("zoned", "string", f"{TIME}.ZonedTimestamp", {"optional": False}, "2024-02-29T10:00:00.123456Z"),
    ("small", "int16", None, {"optional": False}, 3),
    ("tiny", "int8", None, {}, -4),
    ("price", "bytes", f"{CONNECT}.Decimal", {"parameters": DIGITS}, "+zI="),
]  # fmt: skip
ROW = struct(*(field(name, type, logical, **more) for name, type, logical, more, _ in COLUMNS), optional=True)
ROW |= {"name": "shop.Value"}
ENVELOPE = struct(field("after", ROW), field("op", "string", optional=False), name="shop.Envelope")
KEY = struct(field("id", "int64", optional=False), name="shop.Key")
VALUES = {name: value for name, *_, value in COLUMNS}

PIPELINE = """
inputs:
  - {topic: $left, pool: Raw, format: avro}
  - {topic: $right, pool: Raw, format: connect-json}
outputs:
  - {topic: $out-aa, pool: Staging, format: avro, create: {replication-factor: 1}}
  - {topic: $out-aj, pool: Staging, format: connect-json, create: {replication-factor: 1}}
  - {topic: $out-ja, pool: Staging, format: avro, create: {replication-factor: 1}}
  - {topic: $out-jj, pool: Staging, format: connect-json, create: {replication-factor: 1}}
transforms:
  - {type: stateless, in: $left, out: $out-aa, where: value.op = 'avro', key: in.key, value: in.value.after}
  - {type: stateless, in: $left, out: $out-aj, where: value.op = 'json', key: in.key, value: in.value.after}
  - {type: stateless, in: $right, out: $out-ja, where: value.op = 'avro', key: in.key, value: in.value.after}
  - {type: stateless, in: $right, out: $out-jj, where: value.op = 'json', key: in.key, value: in.value.after}
"""


def avro_of(schema: dict[str, Any], name: str = "Envelope") -> Any:
    """The Avro schema that Confluent's and Apicurio's converters make of a Connect schema."""
    kinds = {"int8": "int", "int16": "int", "int32": "int", "int64": "long"}
    made: dict[str, Any] = {"type": kinds.get(schema["type"], schema["type"])}
    if schema["type"] == "struct":
        made = {"type": "record", "name": name}
        made["fields"] = [{"name": one["field"], "type": avro_of(one, one["field"])} for one in schema["fields"]]
    if schema["type"] in ("int8", "int16"):
        made["connect.type"] = schema["type"]
    made |= {f"connect.{part}": schema[part] for part in ("name", "version", "parameters", "doc") if part in schema}
    if schema.get("name") == f"{CONNECT}.Decimal":
        made |= {"logicalType": "decimal", "precision": 10, "scale": 2}
    if schema.get("name") == f"{CONNECT}.Timestamp":
        made |= {"logicalType": "timestamp-millis"}
    return ["null", made] if schema.get("optional") else made


def encoded(registry: Registry, subject: str, schema: Any, value: Any) -> bytes:
    # Without logical types, as the converters write plain numbers.
    plain = json.loads(json.dumps(schema).replace('"logicalType"', '"was"'))
    return framed(registry.register(subject, json.dumps(schema)), plain, value)


def sent(it: Mini, registry: Registry) -> None:
    key, value = avro_of(KEY, "Key"), avro_of(ENVELOPE)
    row = {**VALUES, "price": b"\xfb\x32"}
    for op in ("avro", "json"):
        it.send(
            it.left,
            (
                encoded(registry, f"{it.left}-key", key, {"id": 7}),
                encoded(registry, f"{it.left}-value", value, {"after": row, "op": op}),
            ),
        )
        it.send(it.right, (enveloped(KEY, {"id": 7}), enveloped(ENVELOPE, {"after": VALUES, "op": op})))


def without_own_names(schema: Any) -> Any:
    """Without the names of Avro's records, which are those of the output."""
    if isinstance(schema, list):
        return [without_own_names(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: part for name, part in schema.items() if name not in ("namespace", "default")}
    if made.get("logicalType") == "decimal":
        # The converters make the rest of it.
        return {name: part for name, part in made.items() if not name.startswith("connect.")}
    if made["type"] == "record":
        del made["name"]
        made["fields"] = [{"name": part["name"], "type": without_own_names(part["type"])} for part in schema["fields"]]
    return made


def plain(schema: Any) -> Any:
    """``{"type": "string"}`` as Avro may write it too."""
    if isinstance(schema, list):
        return [plain(branch) for branch in schema]
    if isinstance(schema, dict):
        made = {name: plain(part) for name, part in schema.items()}
        return made["type"] if set(made) == {"type"} else made
    return schema


@pytest.mark.slow
def test_bare_columns_keep_names_parameters_and_not_null(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PIPELINE)
    registry = Registry(RegistryConfig(services.registry_url))
    sent(it, registry)
    it.step()
    for way in ("aa", "aj", "ja", "jj"):
        topic = f"{it.out}-{way}"
        it.publish(topic)
        ((key, value),) = published(it.pipeline, topic)[0]
        assert key is not None and value is not None
        if way in ("aj", "jj"):
            document = json.loads(value)
            assert document["schema"]["fields"] == ROW["fields"]
            assert (document["schema"]["name"], document["schema"]["optional"]) == ("shop.Value", False)
            assert document["payload"] == VALUES
            key_schema = json.loads(key)["schema"]
            assert (key_schema["fields"], key_schema["name"]) == (KEY["fields"], "shop.Key")
        else:
            schema = json.loads(registry.schema(int.from_bytes(value[1:5], "big")))
            expected = without_own_names(avro_of({**ROW, "optional": False}, "x"))
            assert plain(without_own_names(schema)) == plain(expected)
            assert decoded(registry, value)["zoned"] == VALUES["zoned"]
            key_schema = json.loads(registry.schema(int.from_bytes(key[1:5], "big")))
            assert plain(key_schema["fields"]) == [{"name": "id", "type": "long"}]
            assert key_schema["connect.name"] == "shop.Key"
    raw = open_raw(it.lake, "Raw", it.left)
    assert raw is not None
    after = raw.schema.field("value").type.field("after").type
    assert (after.field("small").type, after.field("tiny").type) == (pa.int16(), pa.int8())


WHOLE = """
inputs:
  - {topic: $left, pool: Raw, format: avro, shape: {where: value.op = 'avro'}}
  - {topic: $right, pool: Raw, format: connect-json, shape: {value: value.after}}
outputs:
  - {topic: $out-a, pool: Staging, format: avro, create: {replication-factor: 1}}
  - {topic: $out-j, pool: Staging, format: connect-json, create: {replication-factor: 1}}
transforms:
  - {type: stateless, in: $left, out: $out-a, key: in.key, value: in.value}
  - {type: stateless, in: $right, out: $out-j, key: in.key, value: in.value}
"""


@pytest.mark.slow
def test_a_shape_passes_on_the_schemas_of_bare_columns_and_a_whole_record_keeps_its_name(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """By its name Debezium's sink knows an envelope."""
    it = mini(services, spark, tmp_path, unique, WHOLE)
    registry = Registry(RegistryConfig(services.registry_url))
    sent(it, registry)
    it.step()
    it.publish(f"{it.out}-a")
    it.publish(f"{it.out}-j")
    ((key, value),) = published(it.pipeline, f"{it.out}-a")[0]
    assert key is not None and value is not None
    schema = json.loads(registry.schema(int.from_bytes(value[1:5], "big")))
    assert plain(without_own_names(schema)) == plain(without_own_names(avro_of(ENVELOPE)))
    assert schema["connect.name"] == "shop.Envelope"
    schemas = [json.loads(value or b"")["schema"] for _, value in published(it.pipeline, f"{it.out}-j")[0]]
    assert schemas == [{**ROW, "optional": False}] * 2

    # The schemas of these records have other names. A name that not all have is said of no later record.
    other = {**ENVELOPE, "fields": [{**ENVELOPE["fields"][0], "name": "other.Value"}, ENVELOPE["fields"][1]]}
    it.send(it.right, (enveloped(KEY, {"id": 8}), enveloped(other, {"after": VALUES, "op": "c"})))
    it.step()
    it.publish(f"{it.out}-j")
    last = json.loads(published(it.pipeline, f"{it.out}-j")[0][-1][1] or b"")["schema"]
    assert last["name"] == f"{unique}.out.rows_j.Value"


COMPUTED = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "id bigint, at timestamp, v string"}
  - {topic: $right, pool: Raw, format: connect-json}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: avro, create: {replication-factor: 1}}
  - {topic: $out-j, pool: Staging, key-format: string, value-format: connect-json, create: {replication-factor: 1}}
transforms:
  - {type: stateless, in: $left, out: $out, where: value.id < 10, key: in.key, value: MADE}
  - {type: stateless, in: $left, out: $out-j, key: in.key, value: MADE}
""".replace(
    "MADE",
    "{at: in.value.at, day: CAST(in.value.at AS DATE), wall: CAST('2024-02-29T10:00:00.123456' AS TIMESTAMP_NTZ),"
    " small: CAST(in.value.id AS SMALLINT), tiny: CAST(in.value.id AS TINYINT), whole: CAST(in.value.id AS INT)}",
)


def test_computed_times_and_short_integers_have_schemas_that_connect_reads_as_such(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, COMPUTED)
    row = {"at": "2024-02-29T10:00:00.123456Z", "v": ""}
    it.send(it.left, {"id": 1, **row}, {"id": 11, **row})
    it.step()
    it.publish(it.out)
    it.publish(f"{it.out}-j")
    registry = Registry(RegistryConfig(services.registry_url))
    ((_, value),) = published(it.pipeline, it.out)[0]
    assert value is not None
    zoned = {"connect.version": 1, "connect.name": f"{TIME}.ZonedTimestamp"}
    assert {
        part["name"]: part["type"][1]
        for part in json.loads(registry.schema(int.from_bytes(value[1:5], "big")))["fields"]
    } == {
        "at": {"type": "string", **zoned},
        "day": {"type": "int", "logicalType": "date"},
        "wall": {"type": "long", "connect.version": 1, "connect.name": f"{TIME}.MicroTimestamp"},
        "small": {"type": "int", "connect.type": "int16"},
        "tiny": {"type": "int", "connect.type": "int8"},
        "whole": "int",
    }
    assert decoded(registry, value)["at"] == row["at"]
    ((_, value),) = published(it.pipeline, f"{it.out}-j")[0]
    document = json.loads(value or b"")
    assert document["payload"] == {
        "at": row["at"],
        "day": 19_782,
        "wall": 1_709_200_800_123_456,
        "small": 11,
        "tiny": 11,
        "whole": 11,
    }
    assert {part["field"]: (part["type"], part.get("name")) for part in document["schema"]["fields"]} == {
        "at": ("string", f"{TIME}.ZonedTimestamp"),
        "day": ("int32", f"{CONNECT}.Date"),
        "wall": ("int64", f"{TIME}.MicroTimestamp"),
        "small": ("int16", None),
        "tiny": ("int8", None),
        "whole": ("int32", None),
    }


@pytest.mark.slow
def test_an_edit_of_a_rule_keeps_the_form_that_the_registry_has(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The registry's default takes neither a long after a string nor a string after a long."""
    bare = PARTIAL.replace("code: in.value.after.code", "moment: in.value.after.moment, sold: in.value.after.sold")
    cast = bare.replace("moment: in.value.after.moment", "moment: CAST(in.value.after.moment AS TIMESTAMP)")
    other = bare.replace("sold: in.value.after.sold", "sold: CAST(in.value.after.sold AS TIMESTAMP)")
    it = mini(services, spark, tmp_path, unique, cast)
    registry = Registry(RegistryConfig(services.registry_url))
    record = enveloped(KEY, {"id": 7}), enveloped(ENVELOPE, {"after": VALUES, "op": "c"})
    for text in (cast, bare, other):
        it = it.edited(text)
        it.send(it.left, record)
        it.step()
        it.publish()
    found = [decoded(registry, value) for _, value in published(it.pipeline, it.out)[0]]
    assert [(isinstance(row["moment"], str), isinstance(row["sold"], str)) for row in found] == [(True, False)] * 3
    assert {row["moment"] for row in found} == {"2024-02-29T10:00:00.123000Z"}


PARTIAL = """
inputs:
  - {topic: $left, pool: Raw, format: connect-json}
  - {topic: $right, pool: Raw, format: connect-json}
outputs:
  - {topic: $out, pool: Staging, format: avro, create: {replication-factor: 1}}
transforms:
  - {type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.after.id, code: in.value.after.code}}
"""


@pytest.mark.slow
def test_a_required_field_that_is_null_or_left_out_is_published_and_later_schemas_allow_it(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The registry's default takes no schema that requires what records before lack."""
    it = mini(services, spark, tmp_path, unique, PARTIAL)
    registry = Registry(RegistryConfig(services.registry_url))
    key = enveloped(KEY, {"id": 7})

    def value(**more: Any) -> bytes:
        return enveloped(ENVELOPE, {"after": {**VALUES, **more}, "op": "c"})

    def required(payload: bytes | None) -> list[str]:
        assert payload is not None
        schema = json.loads(registry.schema(int.from_bytes(payload[1:5], "big")))
        return [part["name"] for part in schema["fields"] if not isinstance(part["type"], list)]

    it.send(it.left, (key, value()))
    it.step()
    it.publish()
    it.send(it.left, (key, value()), (key, value(code="__debezium_unavailable_value")))
    it.send(it.left, (key, enveloped(ENVELOPE, {"after": None, "op": "d"})))
    it.step()
    it.publish()
    more = PARTIAL.replace("code: in.value.after.code}", "code: in.value.after.code, token: in.value.after.token}")
    it = it.edited(more)
    it.send(it.left, (key, value()))
    it.step()
    it.publish()
    found = [payload for _, payload in published(it.pipeline, it.out)[0]]
    assert [decoded(registry, payload) for payload in found] == [
        {"id": 7, "code": "x"},
        {"id": 7, "code": "x"},
        {"id": 7},
        {"id": None, "code": None},
        {"id": 7, "code": "x", "token": VALUES["token"]},
    ]
    assert [required(payload) for payload in found] == [["id", "code"], ["id", "code"], ["id"], [], []]


@pytest.mark.slow
def test_what_not_all_writers_or_rules_say_is_said_of_no_record(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A writer drops a column, and one calls a text a uuid that another does not; a partial update lacks a column."""
    text = PARTIAL.replace("code: in.value.after.code}", "code: in.value.after.code, token: in.value.after.token}")
    text = text.replace("in: $left,", "in: $left, where: value.op = 'c',").replace(
        "format: avro", "format: connect-json"
    )
    text += "  - {type: stateless, in: $left, where: value.op = 'u', out: $out, key: in.key,"
    text += " value: {code: in.value.after.code}}\n"
    it = mini(services, spark, tmp_path, unique, text)
    plain_token = [{**part, "name": None} if part["field"] == "token" else part for part in ROW["fields"]]
    other = {**ENVELOPE, "fields": [{**ENVELOPE["fields"][0], "fields": plain_token}, ENVELOPE["fields"][1]]}
    key = enveloped(KEY, {"id": 7})
    it.send(it.left, (key, enveloped(ENVELOPE, {"after": VALUES, "op": "c"})))
    it.step()
    it.publish()
    it.send(it.left, (key, enveloped(other, {"after": VALUES, "op": "c"})))
    it.step()
    it.publish()
    schemas = [json.loads(value or b"")["schema"] for _, value in published(it.pipeline, it.out)[0]]
    said = [[(part["field"], part.get("name"), part["optional"]) for part in each["fields"]] for each in schemas]
    assert said == [
        [("id", None, True), ("code", None, False), ("token", f"{DATA}.Uuid", True)],
        [("id", None, True), ("code", None, False), ("token", None, True)],
    ]


PASSED_ON = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - {name: all, type: stateless, where: value.op = 'a', in: $left, out: $out, key: in.key, value: in.value.after}
  - {name: one, type: stateless, where: value.op = 'o', in: $left, out: $out, key: in.key,
     value: {id: in.value.after.id, more: {b: in.value.after.b}, c: "coalesce(in.value.after.b, 'none')"}}
  - {name: pair, type: denorm, left: $left, right: $right, join-on: left.value.after.id = right.value.id, out: $out,
     key: left.key, value: {id: right.value.id, b: left.value.after.b}}
"""


@pytest.mark.slow
def test_a_field_that_the_record_s_own_schema_lacks_is_left_out_and_its_null_is_kept(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PASSED_ON)
    registry = Registry(RegistryConfig(services.registry_url))
    subject = f"{it.left}-value"

    def schema(*names: str) -> dict[str, Any]:
        fields = [{"name": name, "type": ["null", "string"], "default": None} for name in names]
        row = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}, *fields]}
        after = {"name": "after", "type": ["null", row]}
        return {"type": "record", "name": "Envelope", "fields": [after, {"name": "op", "type": "string"}]}

    def sent(*names: str, op: str, id: int, **more: Any) -> None:
        value = {"after": {"id": id, **dict.fromkeys(names), **more}, "op": op}
        it.send(it.left, encoded(registry, subject, schema(*names), value))

    for op, id in (("a", 1), ("o", 2), ("p", 3)):
        sent("a", op=op, id=id, a="x")
    it.step()
    for op, id in (("a", 4), ("o", 5), ("p", 6)):
        sent("a", "b", op=op, id=id)
    sent("b", op="a", id=7, b="y")
    sent("a", op="a", id=8)
    it.send(it.right, {"id": 3}, {"id": 6})
    it.step()
    it.publish()
    found = {row["id"]: row for _, value in published(it.pipeline, it.out)[0] if (row := json.loads(value or b""))}
    assert found == {
        1: {"id": 1, "a": "x"},
        2: {"id": 2, "c": "none"},
        3: {"id": 3},
        4: {"id": 4, "a": None, "b": None},
        5: {"id": 5, "more": {"b": None}, "c": "none"},
        6: {"id": 6, "b": None},
        7: {"id": 7, "b": "y"},
        8: {"id": 8, "a": None},
    }
    traced: list[Any] = [trace_rows(it.pipeline, it.out, 0, offset)[0]["value"] for offset in range(8)]
    assert {row["id"]: row for row in traced} == found
