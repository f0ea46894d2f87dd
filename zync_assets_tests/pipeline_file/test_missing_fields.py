"""A rule may name a field that no record has had yet: it is there before the source's migration."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from zync_assets.errors import FieldMissing, RegistryUnavailable
from zync_assets.kafka.registry import Registry
from zync_assets.lake.quarantine_table import EVERYTHING
from zync_assets.local.services import Services
from zync_assets.pipeline import RegistryConfig
from zync_assets.pipeline_file.conditions import TYPED_ARGUMENTS
from zync_assets.pipeline_file.missing_fields import (
    _names,  # pyright: ignore[reportPrivateUsage]
    newest_type,  # pyright: ignore[reportPrivateUsage]
)
from zync_assets.quarantine.replay import ReplayCommit
from zync_assets.runner import replay_all
from zync_assets_tests.mini import framed, mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = """
missing-field: null
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint, part struct<a: int>, `of it` string,
     items array<struct<a: int>>"}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - name: pair
    type: denorm
    where: {left: "value.op = 'c' AND value.after.flag IS NOT TRUE", right: value.part.b IS NULL AND value.`no b` IS NULL}
    left: $left
    right: $right
    join-on: left.value.after.id = right.value.id
    out: $out
    key: left.key
    value: {id: left.value.after.id, coupon: left.value.after.coupon, b: right.value.part.b, c: "coalesce(right.value.c, 5)",
     of it: right.value.`OF it`,
     tag: "coalesce(element_at(left.value.after.tags, 'a'), right.value.items[0].none, 'no')",
     odd: "size(map_keys(right.value.m)) IS NULL AND exists(right.value.items, one -> one.none > 1) IS NULL"}
  - {name: other, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.after.id}}
"""


def envelope(*more: tuple[str, Any]) -> dict[str, Any]:
    fields = [{"name": name, "type": type, "default": None} for name, type in more]
    row = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}, *fields]}
    return {
        "type": "record",
        "name": "Envelope",
        "fields": [{"name": "after", "type": ["null", row]}, {"name": "op", "type": "string"}],
    }


def test_names_are_whole_at_any_depth() -> None:
    sql = (
        "coalesce(in.value.a.b.c.d, `in`.`value`.`x y`) + transform(in.value.items, v -> v.f)[0] + in.value.m['k']"
        " + (element_at(in.value.list, 1).a)[0].b + exists(in.value.l, x -> forall(x.l, y -> y.z > x.y))"
        " + in.value.o['p'].q"
    )
    found = sorted(_names(sql), key=lambda name: name.start)
    assert [(name.names, sql[name.start : name.end]) for name in found] == [
        (("in", "value", "a", "b", "c", "d"), "in.value.a.b.c.d"),
        (("in", "value", "x y"), "`in`.`value`.`x y`"),
        (("in", "value", "items"), "in.value.items"),
        (("in", "value", "m"), "in.value.m"),
        (("in", "value", "list", "a", "b"), "in.value.list, 1).a)[0].b"),
        (("in", "value", "l"), "in.value.l"),
        (("in", "value", "l", "l"), "x.l"),
        (("in", "value", "l", "l", "z"), "y.z"),
        (("in", "value", "l", "y"), "x.y"),
        (("in", "value", "o", "p", "q"), "in.value.o['p'].q"),
    ]


@pytest.mark.slow
def test_a_schema_that_the_registry_no_longer_has_stops_no_rule(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PIPELINE)
    item = it.pipeline.input(it.left)
    assert newest_type(it.pipeline, item, "value", [987654321]) is None
    Registry(RegistryConfig(services.registry_url)).register(f"{it.left}-value", '"string"')
    assert newest_type(it.pipeline, item, "value", [987654321]) == pa.string()
    away = replace(it.pipeline, registry=RegistryConfig("http://127.0.0.1:9", {"max.retries": "0"}))
    with pytest.raises(RegistryUnavailable):
        newest_type(away, item, "value", [987654321])


def payload(registry: Registry, subject: str, schema: dict[str, Any], value: dict[str, Any]) -> bytes:
    """A record of a schema, which becomes a version of the subject."""
    return framed(registry.register(subject, json.dumps(schema)), schema, value)


@pytest.mark.slow
def test_a_rule_may_be_there_before_the_field(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    it = mini(services, spark, tmp_path, unique, PIPELINE)
    registry = Registry(RegistryConfig(services.registry_url))
    subject = f"{it.left}-value"
    it.send(it.left, payload(registry, subject, envelope(), {"after": {"id": 1}, "op": "c"}))
    it.send(it.right, *({"id": id, "part": {"a": 1}, "of it": "x", "items": [{"a": 1}]} for id in (1, 2)))
    with caplog.at_level(logging.WARNING):
        it.step()
    # No schema knows these: they are null, and left out of the records that they would be a field of.
    # An element, a field and a function of such a field are null too.
    more = {"tag": "no", "odd": True}
    assert it.values() == [{"id": 1, "c": 5, "of%20it": "x", **more}]
    said = sorted(record.getMessage() for record in caplog.records if "no record of topic" in record.getMessage())
    assert [text.split("the field ")[1].split(" ")[0] for text in said] == [
        "value.after.coupon",
        "value.after.flag",
        "value.after.tags",
        "value.c",
        "value.items.none",
        "value.m",
        "value.no",
        "value.part.b",
    ]
    # The registry knows the type of one of them before a record has it.
    registry.register(subject, json.dumps(envelope(("coupon", ["null", "int"]))))
    it.send(it.left, payload(registry, subject, envelope(), {"after": {"id": 2}, "op": "c"}))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        it.step()
    assert it.values() == [{"id": id, "c": 5, "of%20it": "x", "coupon": None, **more} for id in (1, 2)]
    assert not [record for record in caplog.records if "no record of topic" in record.getMessage()]
    newest = envelope(("coupon", ["null", "int"]), ("flag", ["null", "boolean"]))
    it.send(it.left, payload(registry, subject, newest, {"after": {"id": 3, "coupon": 9, "flag": False}, "op": "c"}))
    it.send(it.right, {"id": 3, "part": {"a": 1}})
    it.step()
    assert it.values()[2:] == [{"id": 3, "c": 5, "of%20it": None, "coupon": 9, **more}]

    failing = it.edited(PIPELINE.replace("missing-field: null", "missing-field: fail"))
    failing.send(it.right, {"id": 4, "part": {"a": 1}})
    failing.ingest()
    with pytest.raises(
        FieldMissing, match=r"rule pair: no record of topic .*left.rows has had the field value.after.tags"
    ):
        failing.etl()
    empty = it.edited(PIPELINE.replace("value: {id: in.value.after.id}", "value: in.value.after.none"))
    with pytest.raises(FieldMissing, match="is nothing but fields that no record has had"):
        empty.etl()


SHAPED = """
missing-field: null
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: avro, on-schema-change: quarantine, shape: {
     where: value.after.flag IS NOT TRUE,
     value: {id: value.after.id, coupon: value.after.coupon,
      c: "coalesce(value.after.c[0].d, element_at(value.after.c, 1).d, 5)"}}}
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - {type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id}}
"""


@pytest.mark.slow
def test_a_shape_may_be_there_before_the_field(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    it = mini(services, spark, tmp_path, unique, SHAPED)
    registry = Registry(RegistryConfig(services.registry_url))
    subject = f"{it.left}-value"

    def warnings() -> list[str]:
        said = [record.getMessage() for record in caplog.records if "no record of topic" in record.getMessage()]
        caplog.clear()
        return sorted(text.split("the field ")[1].split(" ")[0] for text in said)

    old = [payload(registry, subject, envelope(), {"after": {"id": id}, "op": "c"}) for id in (1, 2, 5)]
    with caplog.at_level(logging.WARNING):
        it.send(it.left, old[0])
        it.ingest()
        assert [row["value"] for row in it.raw(it.left)] == [{"id": 1, "c": 5}]
        assert warnings() == ["value.after.c", "value.after.coupon", "value.after.flag"]
        # The registry knows the type of one of them before a record has it.
        registry.register(subject, json.dumps(envelope(("coupon", ["null", "int"]))))
        it.send(it.left, old[1])
        it.ingest()
        assert [row["value"] for row in it.raw(it.left)] == [{"id": id, "c": 5, "coupon": None} for id in (1, 2)]
        assert warnings() == []
    newest = envelope(("coupon", ["null", "int"]), ("flag", ["null", "boolean"]))
    rows = [{"id": 3, "coupon": 9, "flag": False}, {"id": 4, "coupon": 9, "flag": True}]
    it.send(it.left, *(payload(registry, subject, newest, {"after": row, "op": "c"}) for row in rows))
    assert it.ingest()[it.left].quarantined == 2

    text = SHAPED.replace(", on-schema-change: quarantine", "")
    failing = it.edited(text.replace("missing-field: null", "missing-field: fail"))
    failing.send(it.left, old[2])
    said = r"input .*left.rows, shape: no record of topic .*left.rows has had the field value.after.c so far"
    with pytest.raises(FieldMissing, match=said):
        failing.ingest()
    with pytest.raises(FieldMissing, match=said):
        list(replay_all(failing.pipeline, lambda: spark, EVERYTHING))
    assert it.next(it.left) == {0: 4}
    it = it.edited(text)
    [replay] = [done for done in replay_all(it.pipeline, lambda: spark, EVERYTHING) if isinstance(done, ReplayCommit)]
    assert (replay.records, list(replay.reasons)) == (1, [(0, 3)])
    it.ingest()
    assert [row["value"] for row in it.raw(it.left)][2:] == [
        {"id": 3, "c": 5, "coupon": 9},
        {"id": 5, "c": 5, "coupon": None},
    ]
    fields = SHAPED[SHAPED.index("value: {id") : SHAPED.index("}}\noutputs")]
    empty = it.edited(text.replace(fields, "value: {none: value.after.none}"))
    empty.send(it.left, old[0])
    with pytest.raises(FieldMissing, match="is nothing but fields that no record has had"):
        empty.ingest()


CALLS = """
    aggregate(l, 0, (a, x) -> a + x); array_append(l, 1); array_compact(l); array_contains(l, n); array_distinct(l)
    array_except(l, l); array_insert(l, 1, 1); array_intersect(l, l); array_join(t, ','); array_max(l); array_min(l)
    array_position(l, n); array_prepend(l, 1); array_remove(l, n); array_size(l); array_sort(l); array_union(l, l)
    arrays_overlap(l, l); arrays_zip(l, l); cardinality(l); element_at(l, n); exists(l, x -> x > 0)
    filter(l, x -> x > 0); flatten(ll); forall(l, x -> x > 0); get(l, 0); map_concat(m, m); map_contains_key(m, s)
    map_entries(m); map_filter(m, (k, v) -> v > 0); map_from_arrays(t, l); map_from_entries(e); map_keys(m)
    map_values(m); map_zip_with(m, m, (k, a, b) -> a); reduce(l, 0, (a, x) -> a + x); sequence(n, n); size(l)
    slice(l, 1, 1); sort_array(l); to_csv(r); to_json(r); to_xml(r); transform(l, x -> x)
    transform_keys(m, (k, v) -> k); transform_values(m, (k, v) -> v); try_element_at(l, n); zip_with(l, l, (a, b) -> a)
    """
VALUES = {
    "l": "array(1)",
    "ll": "array(array(1))",
    "t": "array('a')",
    "m": "map('a', 1)",
    "e": "array(struct('a', 1))",
    "r": "struct(1 AS a)",
    "n": "1",
    "s": "'a'",
}


BESIDE_A_VIEW = """
inputs:
  - {topic: $left, pool: Raw, format: json, key-schema: id bigint, value-schema: "value struct<group: string>"}
  - {topic: $right, pool: Raw, format: json, value-schema: "id bigint"}
outputs:
  - {topic: $out, pool: Staging, format: json, create: {replication-factor: 1}}
  - {topic: $out-events, pool: Staging, format: json, create: {replication-factor: 1}}
transforms:
  - {type: view, tables: {t: $left}, from: t, key: {group: t.value.group}, value: {rows: count(*)}, out: $out}
  - {type: stateless, in: $right, out: $out-events, key: null, value: {id: in.value.id, part: in.value.part}}
"""


@pytest.mark.slow
def test_a_missing_field_of_a_rule_changes_no_view_of_the_pool(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The view counts rows by ``count(*)``, and its table has a column that is called ``value``, as the side of a record."""
    it = mini(services, spark, tmp_path, unique, BESIDE_A_VIEW)
    it.send(it.left, *((json.dumps({"id": id}), {"value": {"group": "a"}}) for id in range(3)))
    it.send(it.right, (None, {"id": 7}))
    it.step()
    assert [(row["key"], row["value"]) for row in it.staged(it.out)] == [({"group": "a"}, {"rows": 3})]
    assert [row["value"] for row in it.staged(f"{it.out}-events")] == [{"id": 7}]


def test_functions_that_refuse_a_null_without_a_type_are_null_for_a_typed_one(spark: SparkSession) -> None:
    """So NULL may replace the whole call."""
    given = spark.sql(f"SELECT {', '.join(f'{sql} AS {name}' for name, sql in VALUES.items())}")
    types = {item.name: item.dataType.simpleString() for item in given.schema}
    made: dict[tuple[str, int], str] = {}
    for call in CALLS.replace("\n", ";").split(";"):
        if not call.strip():
            continue
        function, _, rest = call.strip().partition("(")
        arguments = rest[:-1].split(", ", 2)
        for place, name in enumerate(arguments[:2]):
            if (function, place) in TYPED_ARGUMENTS:
                null = [*arguments[:place], f"CAST(NULL AS {types[name]})", *arguments[place + 1 :]]
                made[function, place] = f"{function}({', '.join(null)})"
    assert made.keys() == TYPED_ARGUMENTS
    [row] = given.selectExpr(*(f"{sql} AS `{name} {place}`" for (name, place), sql in made.items())).collect()
    assert [name for name, value in row.asDict().items() if value is not None] == []
