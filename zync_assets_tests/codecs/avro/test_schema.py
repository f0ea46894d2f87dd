"""The digest of an Avro schema: equal for two spellings of a schema, and another for every schema with other values."""

from __future__ import annotations

import json
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings

from zync_assets.codecs.avro.schema import digest
from zync_assets.errors import SchemaError
from zync_assets_tests.codecs.generated import Kind, kinds


def record(*fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "shop.Order", "fields": [*fields], **more}


def field(name: str, type: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type, **more}


PRICE = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
ORDER = record(field("id", "long"), field("price", PRICE), field("next", ["null", "shop.Order"]))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({**ORDER, "name": "Order", "namespace": "shop"}, True),
        ({**ORDER, "doc": "An order", "aliases": ["Sale"]}, True),
        (
            record(field("id", {"type": "long"}, default=0), field("price", PRICE), field("next", ["null", "Order"])),
            True,
        ),
        ({**record(*ORDER["fields"][:2], field("next", "null")), "name": "other.Order"}, False),
        (record(field("id", "int"), *ORDER["fields"][1:]), False),
        (record(field("number", "long"), *ORDER["fields"][1:]), False),
        (record(field("id", "long"), field("price", {**PRICE, "scale": 4}), ORDER["fields"][2]), False),
        (record(field("id", {"type": "long", "connect.name": "io.debezium.time.Date"}), *ORDER["fields"][1:]), False),
        (record(*ORDER["fields"][:2], field("next", ["shop.Order", "null"])), False),
    ],
)
def test_schemas_of_other_values_have_other_digests(other: dict[str, Any], same: bool) -> None:
    assert (digest(json.dumps(other)) == digest(json.dumps(ORDER))) is same


def test_the_lake_keeps_digests_so_that_no_version_may_change_them() -> None:
    assert digest(json.dumps(ORDER)) == 8670992073508257
    assert digest('"string"') == 65836290052257319


@settings(max_examples=100)
@given(kinds())
def test_names_may_be_written_in_full_as_fastavro_does(kind: Kind) -> None:
    full: Any = fastavro.parse_schema(kind.schema)
    text = json.dumps(full, default=str)
    assert digest(text) == digest(json.dumps(kind.schema))


def test_a_text_that_is_no_schema_has_no_digest() -> None:
    with pytest.raises(SchemaError, match="not JSON"):
        digest("{")
