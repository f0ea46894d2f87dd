"""JSON texts → values of a given type.

Fields that the type lacks are left out, missing ones are null. A number goes where it fits exactly; a string is no
number. Timestamps and dates are ISO 8601 strings (without a zone: UTC), binary is base64, a decimal a number or a
string. A double is rounded, and never infinite. A timestamp is not cut.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

Read = Callable[[Any, str], Any]

_FINER = re.compile(r"[.,][0-9]{6}[0-9]*[1-9]")
"""A fraction of a second with more than microseconds. ``datetime`` would cut it."""


def json_reader(type: pa.DataType) -> Callable[[pa.Array], tuple[pa.Array, dict[int, str]]]:
    """A function from binary payloads to an array of ``type``, null where bad, and the errors by index."""
    read = _reader(type)

    def convert(payloads: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        values: list[Any] = []
        errors: dict[int, str] = {}
        for index, payload in enumerate(payloads.to_pylist()):
            value = None
            if payload is not None:
                try:
                    value = read(_parse(payload.decode()), "value")
                except UnicodeDecodeError:
                    errors[index] = "not UTF-8"
                except RecursionError:
                    errors[index] = "nested too deep"
                except ValueError as error:
                    errors[index] = f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
            values.append(value)
        return _array(values, type, errors), errors

    return convert


def _parse(text: str) -> Any:
    return json.loads(text, parse_float=fraction, parse_constant=_no_constant)


def fraction(text: str) -> decimal.Decimal:
    """A JSON number with a fraction or an exponent, exactly. ValueError if it is out of range."""
    try:
        return decimal.Decimal(text)
    except decimal.DecimalException:
        raise ValueError(f"{text[:40]} is out of range") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"no JSON: {name}")


def _array(values: list[Any], type: pa.DataType, errors: dict[int, str]) -> pa.Array:
    try:
        return pa.array(values, type)
    except (ValueError, OverflowError):
        pass
    parts: list[pa.Array] = []
    for index, value in enumerate(values):
        try:
            parts.append(pa.array([value], type))
        except (ValueError, OverflowError) as error:
            parts.append(pa.nulls(1, type))
            errors[index] = f"does not fit {type}: {error}"
    return pa.concat_arrays(parts)


def _reader(type: pa.DataType) -> Read:
    inner = _value_reader(type)

    def read(value: Any, path: str) -> Any:
        return None if value is None else inner(value, path)

    return read


def _value_reader(type: pa.DataType) -> Read:
    kinds = pa.types
    if kinds.is_struct(type):
        return _struct_reader(type)
    if kinds.is_list(type):
        item = _reader(type.value_type)
        return lambda value, path: [item(element, f"{path}[]") for element in expect(value, list, "an array", path)]
    if kinds.is_map(type):
        return _map_reader(type)
    if kinds.is_integer(type):
        return integer_reader(type)
    if kinds.is_decimal(type):
        return _decimal_reader(type)
    return scalar_reader(type)


def scalar_reader(type: pa.DataType) -> Read:
    """A function that reads a JSON value of a type without parts. The value is not null; ValueError names the defect."""
    for check, reader in _SCALARS:
        if check(type):
            return reader
    raise ValueError(f"JSON has no form for {type}")


def expect(value: Any, kind: type | tuple[type, ...], label: str, path: str) -> Any:
    """The value itself. ValueError if its type is another; true and false are no numbers. ``label``: the type, for a person."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        text = json.dumps(value, default=str)
        raise ValueError(f"{path}: {text if len(text) <= 40 else text[:40] + '…'} is not {label}")
    return value


def _struct_reader(type: Any) -> Read:
    fields = [(type.field(at).name, _reader(type.field(at).type)) for at in range(type.num_fields)]

    def read(value: Any, path: str) -> Any:
        entries = expect(value, dict, "an object", path)
        return {name: inner(entries.get(name), f"{path}.{name}") for name, inner in fields}

    return read


def _map_reader(type: Any) -> Read:
    key, item = _reader(type.key_type), _reader(type.item_type)
    text_keys = pa.types.is_string(type.key_type)

    def read(value: Any, path: str) -> Any:
        pairs = expect(value, dict, "an object", path).items()
        return [
            (
                raw_key if text_keys else key(json.loads(raw_key), f"{path} (key)"),
                item(raw_item, f"{path}[{raw_key!r}]"),
            )
            for raw_key, raw_item in pairs
        ]

    return read


def integer_reader(type: Any) -> Read:
    """A function that reads a whole number of an integer type. ValueError if the value is none or does not fit."""
    limit = 1 << (type.bit_width - 1)

    def read(value: Any, path: str) -> int:
        number = expect(value, int, f"a whole number ({type})", path)
        if not -limit <= number < limit:
            raise ValueError(f"{path}: {str(number)[:40]} is out of the range of {type}")
        return number

    return read


def _decimal_reader(type: Any) -> Read:
    context = decimal.Context(prec=type.precision, traps=[decimal.Inexact, decimal.InvalidOperation])
    unit = decimal.Decimal(1).scaleb(-type.scale)

    def read(value: Any, path: str) -> decimal.Decimal:
        literal = expect(value, (int, decimal.Decimal, str), "a decimal", path)
        try:
            number = decimal.Decimal(literal).quantize(unit, context=context)
        except decimal.DecimalException:
            number = None
        if number is None or not number.is_finite():
            raise ValueError(f"{path}: {literal} does not fit into decimal({type.precision},{type.scale})")
        return number

    return read


def _float(value: Any, path: str) -> float:
    literal = expect(value, (int, decimal.Decimal), "a number", path)
    try:
        return _finite(float(literal), literal, "double", path)
    except OverflowError:
        raise ValueError(f"{path}: a number of {len(str(literal))} digits is out of the range of double") from None


def _float32(value: Any, path: str) -> float:
    with np.errstate(over="ignore"):
        return _finite(float(np.float32(_float(value, path))), value, "float", path)


def _finite(number: float, literal: Any, kind: str, path: str) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{path}: {str(literal)[:40]} is out of the range of {kind}")
    return number


def _date(value: Any, path: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(expect(value, str, "a date", path))
    except ValueError:
        raise ValueError(f"{path}: {value!r} is not a date such as 2026-01-31") from None


def _timestamp(value: Any, path: str) -> datetime.datetime:
    try:
        moment = datetime.datetime.fromisoformat(expect(value, str, "a timestamp", path))
    except ValueError:
        raise ValueError(f"{path}: {value!r} is not a timestamp such as 2026-01-31T12:00:00Z") from None
    if _FINER.search(value):
        raise ValueError(f"{path}: {value!r} is finer than a microsecond; give the field the type string")
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def _binary(value: Any, path: str) -> bytes:
    try:
        return base64.b64decode(expect(value, str, "base64", path), validate=True)
    except ValueError:
        raise ValueError(f"{path}: {value!r} is not base64") from None


def _string(value: Any, path: str) -> str:
    text = expect(value, str, "a string", path)
    if not text.isascii():
        # A lone surrogate ("\\ud800") is JSON, but no text.
        text.encode()
    return text


_SCALARS: tuple[tuple[Callable[[pa.DataType], bool], Read], ...] = (
    (pa.types.is_boolean, lambda value, path: expect(value, bool, "true or false", path)),
    (pa.types.is_float32, _float32),
    (pa.types.is_floating, _float),
    (pa.types.is_string, _string),
    (pa.types.is_binary, _binary),
    (pa.types.is_date32, _date),
    (pa.types.is_timestamp, _timestamp),
)
