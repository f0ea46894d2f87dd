"""The partition of an output by the bytes that publish would send as its key."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.etl.partitions import PARTITION, Partitions
from zync_assets.kafka.partitioner import key_partitions
from zync_assets.publish.encoding import SideSchema, encode_values, row_schema

KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": ["null", "long"]}]}
TYPE = pa.struct([("id", pa.int64())])


def side(form: str, id: int | None = None) -> SideSchema:
    text = json.dumps({"key": {"format": form, "schema": KEY}, "value": {"format": "json", "schema": None}})
    return replace(row_schema("t", text).key, schema_id=id, subject="")


@given(
    st.lists(st.tuples(st.none() | st.integers(-(2**63), 2**63 - 1), st.integers(0, 2)), max_size=30),
    st.sampled_from([2, 3, 12]),
)
def test_the_key_of_each_rule_is_hashed_as_it_is_sent(rows: list[tuple[int | None, int]], count: int) -> None:
    sides = [side("avro", 7), None, side("json")]
    keys = pa.array([None if rule == 1 else {"id": number} for number, rule in rows], TYPE)
    rules = pa.array([rule for _, rule in rows], pa.int32())
    found = Partitions("t", count, sides, TYPE).of_keys(keys, rules)
    for place, rule in enumerate(rules.to_pylist()):
        sent = None if sides[rule] is None else encode_values(sides[rule], keys.slice(place, 1)).payloads
        assert found[place] == (0 if sent is None else key_partitions(sent, count)[0])
        if rule == 0 and sent is not None:
            assert sent[0].as_py()[:5] == b"\0\0\0\0\7", "the bytes that Kafka's own partitioner would see"


def test_outputs_have_partition_0_alone_or_by_an_expression() -> None:
    outputs = pa.record_batch({"rule": pa.array([0, 0], pa.int32()), PARTITION: pa.array([2, None], pa.int32())})
    assert Partitions("t").of(outputs).tolist() == [0, 0]
    assert Partitions("t", 3, by="key").of(outputs).tolist() == [2, 0]
    assert Partitions("t", 3, [side("json")]).of(outputs).dtype == np.int32, "the topic has no keys"
