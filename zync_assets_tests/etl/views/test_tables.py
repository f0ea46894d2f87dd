"""Tables of views: types before the first record, names that the lake encodes, and schemas that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from zync_assets.checks.state_checks import state_equals_raw
from zync_assets.errors import EtlError
from zync_assets.etl.rules.view import latest_sql
from zync_assets.etl.views.tables import table_of, table_type
from zync_assets.kafka.registry import Registry
from zync_assets.lake.raw import open_raw
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import RegistryConfig, ViewTable
from zync_assets.runner import rebuild_all
from zync_assets.spark.frames import record_frame
from zync_assets_tests.bench.data import append_raw
from zync_assets_tests.mini import framed, make_pipeline, mini, mini_of
from zync_assets_tests.pipeline_file.problems import loaded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AVRO = """
inputs:
  - {{topic: {left}, pool: Raw, format: avro}}
  - {{topic: {right}, pool: Raw, format: avro}}
outputs:
  - {{topic: {out}, pool: Staging, format: json, create: {{}}}}
transforms:
  - type: view
    tables: {{o: {left}, l: {right}}}
    from: o LEFT JOIN l ON l.order_id = o.id
    key: {{id: o.id}}
    value: {{status: o.status, lines: count(l.id)}}
    out: {out}
"""


def schema(*fields: tuple[str, Any]) -> dict[str, Any]:
    made = [
        {"name": name, "type": kind, **({"default": None} if isinstance(kind, list) else {})} for name, kind in fields
    ]
    return {"type": "record", "name": "Row", "fields": made}


KEY = schema(("id", "long"))
ORDER_FIELDS = ("id", "long"), ("status", "string")
ORDER = schema(*ORDER_FIELDS)
LINE = schema(("id", "long"), ("order_id", "long"))


class Topics:
    """Avro rows of two topics."""

    def __init__(self, services: Services, spark: SparkSession, folder: Path, prefix: str) -> None:
        left, right, out = f"{prefix}.o", f"{prefix}.l", f"{prefix}.out"
        text = AVRO.format(left=left, right=right, out=out)
        self.it = mini_of(make_pipeline(services, folder, text, partitions=1), spark)
        self.registry = Registry(RegistryConfig(services.registry_url))

    def send(self, topic: str, kind: dict[str, Any], *rows: dict[str, Any]) -> None:
        key, value = (
            self.registry.register(f"{topic}-{side}", json.dumps(of)) for side, of in (("key", KEY), ("value", kind))
        )
        self.it.send(topic, *((framed(key, KEY, {"id": row["id"]}), framed(value, kind, row)) for row in rows))


@pytest.mark.slow
def test_a_left_join_needs_no_record_of_its_table(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    topics = Topics(services, spark, tmp_path, unique)
    it = topics.it
    topics.send(it.left, ORDER, {"id": 1, "status": "new"})
    it.step()
    assert it.values() == []  # nobody knows the columns of the lines
    for side, kind in (("key", KEY), ("value", LINE)):
        topics.registry.register(f"{it.right}-{side}", json.dumps(kind))
    topics.send(it.left, ORDER, {"id": 2, "status": "new"})
    it.step()
    rows = {row["key"]["id"]: row["value"] for row in it.staged()}
    assert rows == {id: {"status": "new", "lines": 0} for id in (1, 2)}
    topics.send(it.right, LINE, {"id": 7, "order_id": 2})
    it.step()
    assert it.values()[2:] == [{"status": "new", "lines": 1}]


@pytest.mark.slow
def test_a_column_that_a_view_does_not_use_changes_nothing(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    topics = Topics(services, spark, tmp_path, unique)
    it = topics.it
    topics.send(it.left, ORDER, {"id": 1, "status": "new"}, {"id": 2, "status": "new"})
    topics.send(it.right, LINE, {"id": 7, "order_id": 1})
    it.step()
    assert len(it.staged()) == 2
    wider = schema(("id", "long"), ("order_id", "long"), ("note", ["null", "string"]))
    topics.send(it.right, wider, {"id": 7, "order_id": 1, "note": "urgent"})
    it.step()
    topics.send(
        it.left,
        schema(("id", "long"), ("fee", ["null", "int"]), ("status", "string")),
        {"id": 1, "fee": 3, "status": "new"},
    )
    it.step()
    assert len(it.staged()) == 2
    assert it.classes(it.left) == {"done": 3} and it.classes(it.right) == {"done": 2}
    # The state has the new columns, and both schemas go on.
    topics.send(it.right, wider, {"id": 8, "order_id": 2, "note": None}, {"id": 7, "order_id": 2, "note": "moved"})
    topics.send(it.left, ORDER, {"id": 2, "status": "paid"})
    it.step()
    found = sorted((row["key"]["id"], row["value"]["status"], row["value"]["lines"]) for row in it.staged()[2:])
    assert found == [(1, "new", 0), (2, "paid", 2)]
    assert state_equals_raw(it.pipeline, "Staging", lambda: spark).passed


MORE = """
  - type: view
    name: regions
    tables: {{o: {left}}}
    from: o
    key: {{id: o.id}}
    value: {{region: o.region}}
    out: {out}.more
  - type: stateless
    in: {left}
    key: in.key
    value: {{kafka: in.kafka}}
    out: {out}.events
"""
MORE_OUTPUTS = """
  - {{topic: {out}.more, pool: Staging, format: json, create: {{}}}}
  - {{topic: {out}.events, pool: Events, format: json, create: {{}}}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [False, True])
def test_rows_from_before_a_column_have_its_default(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, is_new: bool
) -> None:
    """A source makes no records for ADD COLUMN ... DEFAULT. A rebuild follows the edit of a view that names the column. A new
    view needs no command of the user. An event rule of another pool may pass on all of ``kafka``."""
    topics = Topics(services, spark, tmp_path, unique)
    it, wider = topics.it, schema(*ORDER_FIELDS, ("region", ["string", "null"]))
    wider["fields"][-1]["default"] = "eu"
    for side, kind in (("key", KEY), ("value", LINE)):
        topics.registry.register(f"{it.right}-{side}", json.dumps(kind))
    topics.send(it.left, ORDER, {"id": 1, "status": "new"}, {"id": 2, "status": "new"})
    it.step()
    topics.send(it.left, wider, {"id": 2, "status": "paid", "region": "us"}, {"id": 4, "status": "new", "region": None})
    topics.send(it.left, ORDER, {"id": 3, "status": "new"})
    it.step()
    # No view needs the default yet.
    assert state_equals_raw(it.pipeline, "Staging", lambda: spark).passed
    text = AVRO if is_new else AVRO.replace("status: o.status", "region: o.region")
    if is_new:
        text = text.replace("\ntransforms:", f"{MORE_OUTPUTS}transforms:")
    text = (text + MORE if is_new else text).format(left=it.left, right=it.right, out=it.out)
    it = mini_of(make_pipeline(services, tmp_path, text), spark)
    out = f"{it.out}.more" if is_new else it.out

    def regions() -> dict[int, str | None]:
        """The latest region of each key."""
        return {row["key"]["id"]: row["value"]["region"] for row in it.staged(out)}

    assert is_new or list(rebuild_all(it.pipeline, lambda: spark, "views"))
    it.step()
    assert regions() == {1: "eu", 2: "us", 3: "eu", 4: None}
    topics.send(it.left, ORDER, {"id": 5, "status": "new"}, {"id": 2, "status": "new"})
    it.step()
    assert regions() == {1: "eu", 2: "eu", 3: "eu", 4: None, 5: "eu"}
    staged = len(it.staged(out))
    assert state_equals_raw(it.pipeline, "Staging", lambda: spark).passed
    list(rebuild_all(it.pipeline, lambda: spark, "state"))
    assert len(it.staged(out)) == staged


@pytest.mark.slow
@pytest.mark.parametrize("left_records", ["early first", "late alone", "mixed"])
def test_rows_of_removed_raw_records_have_the_default_of_a_later_column(
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    caplog: pytest.LogCaptureFixture,
    left_records: str,
) -> None:
    """A raw record from before the column shows that all earlier records of its partition are from before it, unless records of
    two writers are mixed there."""
    topics = Topics(services, spark, tmp_path, unique)
    it, wider = topics.it, schema(*ORDER_FIELDS, ("region", ["string", "null"]))
    wider["fields"][-1]["default"] = "eu"
    for side, kind in (("key", KEY), ("value", LINE)):
        topics.registry.register(f"{it.right}-{side}", json.dumps(kind))
    text = AVRO.replace("topic: {left}, pool: Raw,", "topic: {left}, pool: Raw, retention: 1d,")
    topics.it = it = mini_of(
        make_pipeline(services, tmp_path, text.format(left=it.left, right=it.right, out=it.out)), spark
    )
    # The records are of 2023: the commit after the next batch removes them.
    topics.send(it.left, ORDER, {"id": 1, "status": "new"}, {"id": 2, "status": "new"}, {"id": 6, "status": "new"})
    it.step()
    topics.send(it.left, ORDER, {"id": 6, "status": "paid"})
    it.step()
    is_known, early = left_records == "early first", {3: "eu"} if left_records != "late alone" else {}
    if is_known:
        topics.send(it.left, ORDER, {"id": 3, "status": "new"})
    topics.send(it.left, wider, {"id": 2, "status": "paid", "region": "us"}, {"id": 4, "status": "new", "region": None})
    if left_records == "mixed":
        topics.send(it.left, ORDER, {"id": 3, "status": "new"})
    it.ingest()
    left = open_raw(it.lake, "Raw", it.left)
    assert left is not None and left.retention_start[0] >= 3
    text = text.replace("status: o.status", "region: o.region").format(left=it.left, right=it.right, out=it.out)
    it = mini_of(make_pipeline(services, tmp_path, text), spark)
    assert list(rebuild_all(it.pipeline, lambda: spark, "views"))

    def regions() -> dict[int, str | None]:
        """The latest region of each key."""
        return {row["key"]["id"]: row["value"]["region"] for row in it.staged() if row["value"]}

    removed = "eu" if is_known else None
    assert regions() == {1: removed, 2: removed, 6: removed}
    warnings = [
        record.getMessage() for record in caplog.records if "rows are null in column region" in record.getMessage()
    ]
    assert [text.split(",")[0].partition(": ")[2] for text in warnings] == (
        [] if is_known else ["3 rows are null in column region"]
    )
    it.step()
    assert regions() == {1: removed, 2: "us", 4: None, 6: removed} | early
    topics.send(it.left, ORDER, {"id": 1, "status": "paid"})
    topics.send(it.left, wider, {"id": 6, "status": "paid", "region": None})
    it.step()
    assert regions() == {1: "eu", 2: "us", 4: None, 6: None} | early


@pytest.mark.slow
def test_the_default_of_a_removed_raw_record_that_a_join_fails_on_is_named(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    topics = Topics(services, spark, tmp_path, unique)
    it, wider = topics.it, schema(*ORDER_FIELDS, ("region", ["string", "null"]))
    wider["fields"][-1]["default"] = "eu"
    for side, kind in (("key", KEY), ("value", LINE)):
        topics.registry.register(f"{it.right}-{side}", json.dumps(kind))
    text = AVRO.replace("topic: {left}, pool: Raw,", "topic: {left}, pool: Raw, retention: 1d,")
    text = text.format(left=it.left, right=it.right, out=it.out)
    topics.it = it = mini_of(make_pipeline(services, tmp_path, text), spark)
    topics.send(it.left, ORDER, {"id": 1, "status": "new"})
    it.step()
    topics.send(it.left, ORDER, {"id": 2, "status": "new"})
    topics.send(it.left, wider, {"id": 2, "status": "paid", "region": "1"})
    it.ingest()
    left = open_raw(it.lake, "Raw", it.left)
    assert left is not None and left.retention_start == {0: 1}
    text = text.replace("l.order_id = o.id", "l.order_id = CAST(o.region AS INT)")
    it = mini_of(make_pipeline(services, tmp_path, text), spark)
    with pytest.raises(
        EtlError, match=r"CAST\(o.region AS INT\) = .*earlier record: topic .*, partition 0, offset 0\."
    ):
        list(rebuild_all(it.pipeline, lambda: spark, "views"))


LOOK = (
    AVRO[: AVRO.index("transforms:")]
    + """
transforms:
  - type: stateless
    in: {right}
    lookup: {{o: {{table: {left}, row: value, on: o.id = in.value.order_id, missing: wait}}}}
    key: in.key
    value: {{status: o.status}}
    out: {out}
"""
)


@pytest.mark.slow
def test_a_look_up_sees_the_default_of_rows_from_before_a_column(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    topics = Topics(services, spark, tmp_path, unique)
    names = {"left": topics.it.left, "right": topics.it.right, "out": topics.it.out}
    topics.it = it = mini_of(make_pipeline(services, tmp_path, LOOK.format(**names)), spark)
    wider = schema(*ORDER_FIELDS, ("region", ["string", "null"]))
    wider["fields"][-1]["default"] = "eu"
    topics.send(it.left, ORDER, {"id": 1, "status": "new"})
    topics.send(it.right, LINE, {"id": 7, "order_id": 1})
    it.step()
    topics.send(it.left, wider, {"id": 2, "status": "new", "region": "us"})
    topics.send(it.right, LINE, {"id": 8, "order_id": 2}, {"id": 9, "order_id": 1})
    it.ingest()
    it = mini_of(
        make_pipeline(
            services, tmp_path, LOOK.replace("status:", "region:").replace("o.status", "o.region").format(**names)
        ),
        spark,
    )
    for _ in range(2):
        assert it.etl() is not None
    assert it.etl() is None
    assert {row["key"]["id"]: row["value"] for row in it.staged()[1:]} == {
        8: {"status": None, "region": "us"},
        9: {"status": None, "region": "eu"},
    }
    assert state_equals_raw(it.pipeline, "Staging", lambda: spark).passed


NAMES = """
inputs:
  - {{topic: {left}, pool: Raw, format: connect-json}}
  - {{topic: {right}, pool: Raw, format: connect-json}}
outputs:
  - {{topic: {out}, pool: Staging, format: json, create: {{}}}}
transforms:
  - type: view
    tables: {{o: {left}, c: {{topic: {right}, key: key.`the id`, row: value.after, deleted: value.`is gone`}}}}
    from: o JOIN c ON o.`customer=id` = c.`the id`
    where: o.`the id` > 0
    key: {{"of it": o.`the id`}}
    value: {{name: c.`full name`, size: "sum(o.`a,b`)"}}
    out: {out}
"""


def connect(**fields: tuple[str, Any]) -> dict[str, Any]:
    """A record of Kafka Connect. ``fields``: name → (type, value), with ``__`` for a blank."""
    names = {name.replace("__", " "): part for name, part in fields.items()}
    inner = [
        {**kind, "field": name} if isinstance(kind, dict) else {"type": kind, "field": name, "optional": True}
        for name, (kind, _) in names.items()
    ]
    return {
        "schema": {"type": "struct", "fields": inner},
        "payload": {name: value for name, (_, value) in names.items()},
    }


@pytest.mark.slow
def test_fields_have_the_names_of_their_topics(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    left, right, out = f"{unique}.o", f"{unique}.c", f"{unique}.out"
    text = NAMES.format(left=left, right=right, out=out)
    it = mini_of(make_pipeline(services, tmp_path, text, partitions=1), spark)

    def order(id: int, customer: int, size: int) -> tuple[str, dict[str, Any]]:
        row = {"the__id": ("int64", id), "customer=id": ("int64", customer), "a,b": ("int64", size)}
        return json.dumps(connect(the__id=("int64", id))), connect(**row)

    def customer(id: int, name: str, *, gone: bool = False) -> tuple[str, dict[str, Any]]:
        after = connect(the__id=("int64", id), full__name=("string", name))
        return json.dumps(connect(the__id=("int64", id))), connect(
            after=(after["schema"], after["payload"]), is__gone=("boolean", gone)
        )

    it.send(left, order(1, 7, 3), order(2, 8, 4))
    it.send(right, customer(7, "Ann"), customer(8, "Bob"))
    it.step()
    it.send(right, customer(7, "Anna"), customer(8, "Bob", gone=True))
    it.step()
    found = [(*row["key"].values(), row["value"]) for row in it.staged()]
    assert sorted(found[:2]) == [(1, {"name": "Ann", "size": 3}), (2, {"name": "Bob", "size": 4})]
    assert sorted(found[2:]) == [(1, {"name": "Anna", "size": 3}), (2, None)]


PLAIN = """\
kafka: {bootstrap.servers: localhost}
lake: ./lake
inputs: [{topic: rows, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}]
"""
SOURCE = ("source", pa.struct([("collection", pa.string())]))
CHANGE = {"op": "u", "after": "{}", "source": {"collection": "c"}}


@pytest.mark.parametrize(
    ("fields", "change", "delete", "is_deleted"),
    [
        # MongoDB's row is a text, and ExtractNewRecordState marks the row itself.
        ([("op", pa.string()), ("after", pa.string()), SOURCE], CHANGE, {"op": "d"}, True),
        (
            [("v", pa.string()), ("__deleted", pa.string())],
            {"v": "a", "__deleted": "false"},
            {"__deleted": "true"},
            True,
        ),
        ([("v", pa.string()), ("__deleted", pa.bool_())], {"v": "a", "__deleted": False}, {"__deleted": True}, True),
        # Another record may have a field `op`, too.
        ([("op", pa.string()), ("after", pa.string())], {"op": "c", "after": "x"}, {"op": "d"}, False),
        ([("v", pa.string()), ("__deleted", pa.int64())], {"v": "a", "__deleted": 0}, {"__deleted": 1}, False),
    ],
)
def test_a_delete_is_known_by_debezium_s_marks_whatever_form_the_row_has(
    spark: SparkSession,
    tmp_path: Path,
    fields: list[tuple[str, pa.DataType]],
    change: Any,
    delete: Any,
    is_deleted: bool,
) -> None:
    keys, values = ["a", "b", "a", "c"], [change, change, delete, None]
    kind, offsets = pa.struct(fields), np.arange(len(keys))
    append_raw(f"{tmp_path}/lake", "Raw", "rows", offsets, pa.array(keys), pa.array(values, kind), pa.array(offsets))
    pipeline, item = loaded(tmp_path, PLAIN), ViewTable("o", "rows")
    state = open_raw(pipeline.lake, "Raw", "rows")
    assert state is not None
    frame = record_frame(spark, state, (OffsetRange(0, 0, len(keys)),))
    # The definition is the earlier one, so that pools with the table go on.
    table = table_of(item)
    assert (table.name, table.deleted) == ("rows", None)
    deleted = frame.orderBy("kafka.offset").selectExpr(table_type(table, frame, None).deleted_sql).collect()
    assert [row[0] for row in deleted] == [False, False, is_deleted, True]
    frame.createOrReplaceTempView("shown_rows")
    shown = spark.sql(latest_sql(item, pipeline).replace("Raw.`rows`", "shown_rows")).collect()
    assert len(shown) == (1 if is_deleted else 2)


EMPTY = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "`first name` string, Name string, name string"}
outputs:
  - {topic: $out, pool: Staging, format: json, create: {}}
transforms:
  - type: view
    tables: {o: $left, c: $right}
    from: o LEFT JOIN c ON c.name = CAST(o.id AS STRING)
    key: {id: o.id}
    value: {name: c.`first name`}
    out: $out
"""


@pytest.mark.slow
def test_an_empty_table_has_any_names(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    it = mini(services, spark, tmp_path, unique, EMPTY)
    it.send(it.left, {"id": 1})
    it.step()
    it.send(it.right, {"first name": "Ann", "Name": "2", "name": "1"})
    it.step()
    assert it.values() == [{"name": None}, {"name": "Ann"}]
