"""Random Connect schemas and random data: bytes → columns → bytes, damaged or not, many at once or one by one."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from zync_assets.codecs.batches import DecodedBatch
from zync_assets.codecs.connect import codec
from zync_assets.codecs.connect.codec import ConnectEncoder
from zync_assets.codecs.connect.schema import lake_type, parse_connect
from zync_assets.codecs.dispatch import make_decoder
from zync_assets.pipeline import SideFormat
from zync_assets_tests.codecs.connect_generated import Kind, kinds
from zync_assets_tests.codecs.generated import QUIET, same


@st.composite
def batches(draw: st.DrawFn) -> tuple[Kind, list[Any]]:
    kind = draw(kinds(depth=3))
    return kind, draw(st.lists(kind.data, min_size=1, max_size=8))


def decode(payloads: list[bytes], target: pa.DataType | None = None) -> DecodedBatch:
    decoded = make_decoder(SideFormat("connect-json"), str, target).decode(pa.array(payloads, pa.binary()))
    decoded.values.validate(full=True)
    return decoded


def pretty(payload: bytes) -> bytes:
    """The same record, written as no JsonConverter does: it is read one by one."""
    document = json.loads(payload)
    return json.dumps({"payload": document["payload"], "schema": document["schema"]}, indent=1).encode()


@QUIET
@given(batches())
def test_values_are_those_that_were_written(batch: tuple[Kind, list[Any]]) -> None:
    kind, values = batch
    payloads = [kind.envelope(value) for value in values]
    together, single = decode(payloads), decode([pretty(payload) for payload in payloads])
    assert together.bad == single.bad == ()
    assert together.values.type == lake_type(parse_connect(json.dumps(kind.schema)))
    assert together.values.to_pylist() == [kind.lake(value) for value in values]
    assert same(together.values, single.values)


@QUIET
@given(batches())
def test_columns_become_the_same_json_again(batch: tuple[Kind, list[Any]]) -> None:
    kind, values = batch
    payloads = [kind.envelope(value) for value in values]
    encoded = ConnectEncoder(json.dumps(kind.schema)).encode(decode(payloads).values)
    assert encoded.bad == ()
    assert [json.loads(made) for made in encoded.payloads.to_pylist()] == [json.loads(payload) for payload in payloads]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Kind, list[bytes], list[bytes]]:
    """A batch, and the same with some records changed, cut, gone on after their end, or with a piece put in."""
    kind, values = draw(batches())
    whole = [kind.envelope(value) for value in values]
    broken: list[bytes] = []
    for payload in whole:
        how = draw(st.sampled_from(["whole", "changed", "cut", "longer", "put in"]))
        # Draws places in the payload more often than a uniform choice would.
        first = draw(st.sampled_from([0, payload.rindex(b'"payload"')]))
        at = draw(st.integers(first, len(payload) - 1))
        if how == "changed":
            payload = payload[:at] + draw(st.binary(min_size=1, max_size=1)) + payload[at + 1 :]
        elif how == "cut":
            payload = payload[:at]
        elif how == "longer":
            payload = payload + draw(st.sampled_from([b"}", b"{}", b' {"payload":1}', b"\n", b"\0", b"x"]))
        elif how == "put in":
            piece = draw(
                st.sampled_from([b"null", b"NaN", b"1e999", b"}{", b'"', b'"x":1,', b"\xff", b"\n", b"=", b"[]"])
            )
            payload = payload[:at] + piece + payload[at:]
        broken.append(payload)
    return kind, whole, broken


@QUIET
@given(damaged())
def test_damage_costs_only_itself_and_is_told_alike_by_both_ways(
    batch: tuple[Kind, list[bytes], list[bytes]],
) -> None:
    kind, whole, broken = batch
    type = lake_type(parse_connect(json.dumps(kind.schema)))
    # A damaged schema may be another valid schema, which widens the column for later records too.
    target = decode(broken, type).values.type
    decoded = decode(broken, target)
    bad = {item.index for item in decoded.bad}
    with patch.object(codec, "has_columns", lambda _: False):
        by_record = decode(broken, target)
    assert decoded.bad == by_record.bad
    assert same(decoded.values, by_record.values)
    undamaged = decode(whole, target)
    for index, (before, after) in enumerate(zip(whole, broken, strict=True)):
        value = decoded.values.slice(index, 1).take([0])
        if before == after:
            assert index not in bad
            assert same(value, undamaged.values.slice(index, 1).take([0]))
