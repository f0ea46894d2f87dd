"""JSON values as Avro: a text keeps all its digits, or is refused."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from zync_assets.errors import SchemaError
from zync_assets.kafka.json_records import datum, value_of

DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}


@pytest.mark.parametrize("text", ["0", "0.05", "-999.99", "1e2", "0e9"])
def test_a_decimal_of_the_schemas_digits_is_taken(text: str) -> None:
    schema = json.dumps(DECIMAL)
    assert value_of(schema, datum(schema, text)) == Decimal(text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        *((DECIMAL, text) for text in ("1e3", "1e999999", "NaN", "-Infinity", "1.005")),
        ({"type": "int", "logicalType": "time-millis"}, "10:00:00.0015"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "2026-01-01T00:00:00.000999"),
        ({"type": "long", "logicalType": "timestamp-micros"}, "2026-01-01T00:00:00.1234567Z"),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, "2026-01-01T00:00:00+02:00"),
    ],
)
def test_a_text_that_would_lose_digits_or_its_zone_is_refused(schema: dict[str, Any], text: str) -> None:
    for form in (schema, ["null", schema]):
        with pytest.raises(SchemaError):
            datum(json.dumps(form), text)
