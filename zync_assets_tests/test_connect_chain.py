"""Connect JSON through the whole chain: a Debezium topic in, a reshaped one out, each record with its schema."""

from __future__ import annotations

import decimal
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.codecs.dispatch import make_decoder
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import topic_states
from zync_assets.local.services import Services
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.connect_generated import enveloped
from zync_assets_tests.codecs.debezium import MYSQL, MYSQL_ROW, MYSQL_SOURCE, envelope, field, struct
from zync_assets_tests.mini import mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = """
inputs:
  - {topic: $left, pool: Raw, format: connect-json}
  - {topic: $right, pool: Raw, format: connect-json, schema: "id BIGINT"}
outputs:
  - {topic: $out, pool: Staging, format: connect-json, create: {replication-factor: 1}}
transforms:
  - name: row
    type: stateless
    in: $left
    where: value.op IN ('c', 'r')
    out: $out
    key: {id: in.value.after.id}
    value:
      id: in.value.after.id
      price: in.value.after.price
      seen_at: CAST(in.value.after.seen_at AS TIMESTAMP)
  - name: price
    type: stateless
    in: $left
    where: value.op = 'u'
    out: $out
    key: {id: in.value.after.id}
    value: {id: in.value.after.id, price: in.value.after.price}
  - name: gone
    type: stateless
    in: $left
    where: value.op = 'd'
    out: $out
    key: in.key
    value: null
  - name: other
    type: stateless
    in: $right
    out: $out
    key: {id: in.value.id}
    value: null
"""


def test_from_debezium_to_connect(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    chain = mini(services, spark, tmp_path, unique, PIPELINE)
    schema = envelope(MYSQL_SOURCE, *MYSQL_ROW)
    key = enveloped(struct(field("id", "int64", optional=False)), {"id": 7})
    updated: dict[str, Any] = {**MYSQL, "op": "u", "before": MYSQL["after"]}
    chain.send(
        chain.left,
        (key, enveloped(schema, MYSQL)),
        (key, enveloped(schema, {**MYSQL, "ts_ms": "soon"})),
        (key, enveloped(schema, updated)),
        (key, enveloped(schema, {**MYSQL, "op": "d", "before": MYSQL["after"], "after": None})),
        (key, None),
    )
    chain.send(chain.right, (None, b'{"id": 8}'))
    assert chain.ingest()[chain.left].quarantined == 1
    chain.etl()
    chain.publish()

    end = topic_states(chain.pipeline.kafka, [chain.out])[chain.out].partitions[0].end
    records = [row for batch in read_range(chain.pipeline.kafka, chain.out, 0, 0, end) for row in batch.to_pylist()]
    values = [None if row["value"] is None else json.loads(row["value"]) for row in records]
    assert sorted(json.loads(row["key"])["payload"]["id"] for row in records) == [7, 7, 7, 8]
    assert [value and [item["field"] for item in value["schema"]["fields"]] for value in values if value] == [
        ["id", "price", "seen_at"],
        ["id", "price"],
    ]
    payloads = pa.array([row["value"] for row in records if row["value"]], pa.binary())
    decoded = make_decoder(SideFormat("connect-json"), str, None).decode(payloads)
    price = decimal.Decimal("-12.30")
    assert decoded.values.to_pylist() == [
        {"id": 7, "price": price, "seen_at": "2024-02-29T10:00:00.000000Z"},
        {"id": 7, "price": price, "seen_at": None},
    ]
