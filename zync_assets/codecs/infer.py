"""An Avro schema for JSON values that come without one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zync_assets.codecs.avro_types import is_avro_name
from zync_assets.errors import SchemaError


@dataclass
class _Seen:
    """The values found at one path. ``kinds``: a subset of boolean, long, double, string, record, array."""

    kinds: set[str] = field(default_factory=set)
    null: bool = False
    records: int = 0
    fields: dict[str, _Seen] = field(default_factory=dict)
    times: int = 0
    items: _Seen | None = None


def infer_schema(values: Iterable[object], name: str) -> str:
    """The Avro schema (JSON) of JSON values, as ``json.loads`` gives them.

    Whole numbers are long; other numbers, and mixtures of both, are double. Objects are records: the outermost record is
    ``name``, and an inner record is ``name_field``. A field that is null or missing in a value is ``["null", T]`` with
    default null. A field that is null in every value is null or a string. SchemaError names a path with different types, or
    a name that breaks Avro's rules.
    """
    seen = _Seen()
    for value in values:
        _look(seen, value, name)
    if not seen.kinds and not seen.null:
        raise SchemaError(f"{name}: no value to infer a schema from")
    return json.dumps(_schema(seen, name, seen.null))


def _look(seen: _Seen, value: Any, path: str) -> None:
    seen.times += 1
    if value is None:
        seen.null = True
        return
    kind = _kind(value, path)
    if kind == "long" and not -(1 << 63) <= value < 1 << 63:
        raise SchemaError(f"{path}: {value} is out of the range of Avro's long")
    others = seen.kinds - {kind}
    if others and not {kind, *others} <= {"long", "double"}:
        raise SchemaError(f"{path}: {kind} here, {others.pop()} in another value; make them one type, or give a schema")
    seen.kinds.add(kind)
    if kind == "record":
        seen.records += 1
        for key, item in value.items():
            if not key or not is_avro_name(key):
                raise SchemaError(f"{path}.{key}: Avro names are letters, digits and _, not starting with a digit")
            _look(seen.fields.setdefault(key, _Seen()), item, f"{path}.{key}")
    elif kind == "array":
        seen.items = seen.items or _Seen()
        for item in value:
            _look(seen.items, item, f"{path}[]")


def _kind(value: Any, path: str) -> str:
    # bool before int: True is an int in Python.
    for kind, type in _KINDS:
        if isinstance(value, type):
            return kind
    raise SchemaError(f"{path}: {value!r} is no JSON value")


_KINDS: tuple[tuple[str, type], ...] = (
    ("boolean", bool),
    ("long", int),
    ("double", float),
    ("string", str),
    ("record", dict),
    ("array", list),
)


def _schema(seen: _Seen, name: str, nullable: bool) -> Any:
    made = _type(seen, name)
    return ["null", made] if nullable else made


def _type(seen: _Seen, name: str) -> Any:
    if seen.kinds == {"long", "double"}:
        return "double"
    if not seen.kinds:
        return "string"
    kind = next(iter(seen.kinds))
    if kind == "array":
        items = seen.items or _Seen()
        return {"type": "array", "items": _schema(items, f"{name}_item", items.null or not items.kinds)}
    if kind != "record":
        return kind
    fields: list[dict[str, Any]] = []
    for key, inner in seen.fields.items():
        if inner.null or inner.times < seen.records:
            fields.append({"name": key, "type": _schema(inner, f"{name}_{key}", True), "default": None})
        else:
            fields.append({"name": key, "type": _schema(inner, f"{name}_{key}", False)})
    return {"type": "record", "name": name, "fields": fields}
