"""Columns that an output schema writes in another form than the lake holds them in: times and decimals of Kafka Connect.

| the lake's | written as | |
| --- | --- | --- |
| timestamp | string | ``io.debezium.time.ZonedTimestamp``: ISO 8601, in UTC, with microseconds |
| timestamp | int64 | ``io.debezium.time.Timestamp`` (milliseconds) and ``MicroTimestamp`` |
| date32 | int32 | ``io.debezium.time.Date`` |
| string | struct | ``io.debezium.data.VariableScaleDecimal`` |
"""

# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import decimal

import pyarrow as pa

from zync_assets.compute import pc

_FIRST, _END = -62_135_596_800_000_000, 253_402_300_800_000_000
"""Microseconds since the epoch at the begin of the years 1 and 10000."""


def is_written_as(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of the first type has a written form of the second."""
    kinds = pa.types
    if kinds.is_timestamp(given):
        return kinds.is_string(wanted) or kinds.is_int64(wanted)
    if kinds.is_date32(given):
        return kinds.is_int32(wanted)
    return kinds.is_string(given) and is_variable_decimal(wanted)


def written(array: pa.Array, wanted: pa.DataType, unit: str = "") -> pa.Array:
    """The written form of a column; ``unit``: of numbers, ``timestamp-millis`` or microseconds. ValueError if a value has
    none."""
    kinds = pa.types
    if kinds.is_date32(array.type):
        return array.cast(pa.int32())
    if kinds.is_string(array.type):
        return pa.array([variable_decimal(text) for text in array.to_pylist()], wanted)
    micros = array.cast(pa.int64())
    if kinds.is_int64(wanted):
        # Towards the past, before 1970 too.
        whole = pc.floor_temporal(array, unit="millisecond").cast(pa.int64())
        return pc.divide(whole, 1000) if unit == "timestamp-millis" else micros
    ends = pc.min_max(micros)
    if ends["min"].is_valid and not (ends["min"].as_py() >= _FIRST and ends["max"].as_py() < _END):
        raise ValueError("a time before the year 1 or past the year 9999 has no text")
    return pc.strftime(array.cast(pa.timestamp("us", tz="UTC")), "%Y-%m-%dT%H:%M:%SZ")


def is_variable_decimal(type: pa.DataType) -> bool:
    return pa.types.is_struct(type) and {item.name: item.type for item in type} == {
        "scale": pa.int32(),
        "value": pa.binary(),
    }


def variable_decimal(text: str | None) -> dict[str, int | bytes] | None:
    """Digits as Debezium's struct of a scale and an unscaled number; ValueError if they are no decimal."""
    if text is None:
        return None
    try:
        sign, digits, exponent = decimal.Decimal(text).as_tuple()
    except decimal.DecimalException:
        exponent = "n"
        sign, digits = 0, ()
    if not isinstance(exponent, int):
        raise ValueError(f"{text} is no decimal")
    number = int("".join(map(str, digits)) or "0") * (-1 if sign else 1)
    size = (number + (number < 0)).bit_length() // 8 + 1
    return {"scale": -exponent, "value": number.to_bytes(size, "big", signed=True)}
