"""Avro binary by fastavro, record by record: for the records that ``avro_columns`` leaves over, and for its tests.

fastavro reads a *plain* schema with the same bytes and no logical types. In the plain schema, each branch of a wider union
is a record of one field, whose bytes are the field's. A union's value therefore arrives as ``{branch: value}``, as in the
lake.

A recursive record is a JSON text: an object with the record's fields in order. A union's value is ``{branch: value}``, bytes
are a string of the characters U+0000 to U+00FF, NaN and infinities have JavaScript's spelling, and logical types are plain
values. The text converts back to the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import fastavro

from zync_assets.codecs.avro_schema import Node, branch_names, is_recursive, visible_fields, walk
from zync_assets.private import private

fastavro_py: Any = private("fastavro", "fastavro", "_read_py")

_SAFE_DEPTH = 900
"""fastavro's compiled reader does not count its depth and ends the process; so many bytes can't be too deep."""


class TrailingBytes(ValueError):
    """A record is longer than its schema says."""


def row_reader(node: Node) -> Callable[[bytes], Any]:
    """A function from one record's bytes to its value of the plain type; it raises whatever is wrong."""
    schema = fastavro_schema(node)
    recursive = is_recursive(node)
    shape = _shaper(node, _definitions(node))

    def read(payload: bytes) -> Any:
        stream = io.BytesIO(payload)
        reader = fastavro_py if recursive and len(payload) > _SAFE_DEPTH else fastavro
        value = reader.schemaless_reader(stream, schema, None)
        if stream.tell() != len(payload):
            raise TrailingBytes(f"{len(payload) - stream.tell()} bytes too many")
        return value if shape is None else shape(value)

    return read


def row_writer(node: Node) -> Callable[[Any], bytes]:
    """The way back: a value of the plain type, as pyarrow gives it to Python, to Avro's bytes.

    ValueError names the field that the schema has no room for.
    """
    schema = fastavro_schema(node)
    definitions = _definitions(node)

    def write(value: Any) -> bytes:
        stream = io.BytesIO()
        try:
            fastavro.schemaless_writer(stream, schema, _for_writer(node, value, "value", definitions, False))
        except ValueError:
            raise
        # The JSON of a record inside itself can hold anything, and the writer stumbles over it in any way.
        except Exception as error:
            raise ValueError(f"not a value of the schema: {type(error).__name__}: {error}") from None
        return stream.getvalue()

    return write


@lru_cache(maxsize=512)
def fastavro_schema(node: Node) -> Any:
    """fastavro's parsed schema with the same bytes as ``node`` (see above)."""
    return fastavro.parse_schema(_plain(node, set()))


def _plain(node: Node, defined: set[str]) -> Any:
    if node.kind == "option":
        child = _plain(node.child, defined)
        return ["null", child] if node.null_index == 0 else [child, "null"]
    if node.kind == "union":
        named = zip(branch_names(node), node.branches, strict=True)
        return [_wrapped(node, name, branch, defined) if name else "null" for name, branch in named]
    if node.kind in ("array", "map"):
        key = "items" if node.kind == "array" else "values"
        return {"type": node.kind, key: _plain(node.child, defined)}
    if not node.name:
        return node.kind
    name = _own(node.name)
    if name in defined:
        return name
    defined.add(name)
    if node.kind == "fixed":
        return {"type": "fixed", "name": name, "size": node.size}
    if node.kind == "enum":
        return {"type": "enum", "name": name, "symbols": list(node.symbols)}
    fields = [{"name": field, "type": _plain(child, defined)} for field, child in node.fields]
    return {"type": "record", "name": name, "fields": fields}


def _own(name: str) -> str:
    """A name that no namespace around it can change."""
    return f"named.{name}"


def _fastavro_name(node: Node) -> str:
    return _own(node.name) if node.name else node.kind


def _wrapped(union: Node, name: str, branch: Node, defined: set[str]) -> Any:
    wrapper = _wrapper(union, name)
    if wrapper in defined:
        return wrapper
    defined.add(wrapper)
    return {"type": "record", "name": wrapper, "fields": [{"name": name, "type": _plain(branch, defined)}]}


@lru_cache(maxsize=512)
def _wrapper(union: Node, name: str) -> str:
    """The name of the record around a branch: one for one union, wherever in a schema it is."""
    return f"branch.{name}_{hashlib.sha256(repr(union).encode()).hexdigest()[:16]}"


def _definitions(node: Node) -> dict[str, Node]:
    return {item.name: item for item in walk(node) if item.kind == "record"}


def _shaper(node: Node, definitions: Mapping[str, Node]) -> Callable[[Any], Any] | None:
    """A function that converts fastavro's value to a value that pyarrow accepts for the plain type; None: no conversion."""
    if node.kind == "ref":
        return lambda value: json.dumps(_jsonable(value), ensure_ascii=False, separators=(",", ":"))
    if node.kind == "record" and not visible_fields(node):
        return lambda value: True
    if node.kind in ("record", "union"):
        named = node.fields if node.kind == "record" else zip(branch_names(node), node.branches, strict=True)
        inner = [(name, shape) for name, child in named if (shape := _shaper(child, definitions)) is not None]
        return _field_shaper(inner) if inner else None
    if node.items is None:
        return None
    shape = _shaper(node.items, definitions)
    if node.kind == "map":
        return _map_shaper(shape)
    if shape is None:
        return None
    inside = shape
    if node.kind == "array":
        return lambda value: [inside(item) for item in value]
    return lambda value: None if value is None else inside(value)


def _map_shaper(shape: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    if shape is None:
        return lambda value: list(value.items())
    return lambda value: [(key, shape(item)) for key, item in value.items()]


def _field_shaper(inner: list[tuple[str, Callable[[Any], Any]]]) -> Callable[[Any], Any]:
    def shape(value: Any) -> Any:
        if value is not None:
            for name, child in inner:
                if name in value:
                    value[name] = child(value[name])
        return value

    return shape


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    return value


def _for_writer(node: Node, value: Any, path: str, definitions: Mapping[str, Node], in_json: bool) -> Any:
    """The value as fastavro's writer accepts it. Checks the value, because fastavro writes some wrong values without an
    error."""
    kind = node.kind
    if kind == "option":
        if value is None:
            return None
        # With the branch's name fastavro does not guess; its guess fails over a named branch further in.
        return (_fastavro_name(node.child), _for_writer(node.child, value, path, definitions, in_json))
    if kind == "ref":
        return _for_writer(definitions[node.name], value if in_json else json.loads(value), path, definitions, True)
    if kind == "null":
        return None
    if kind == "union":
        return _branch_for_writer(node, value, path, definitions, in_json)
    if value is None:
        raise ValueError(f"{path} is null, and its schema has no null")
    if kind == "record":
        items = value if isinstance(value, dict) else {}
        return {
            name: _for_writer(child, items.get(name), f"{path}.{name}", definitions, in_json)
            for name, child in node.fields
        }
    if kind == "array":
        return [_for_writer(node.child, item, f"{path}[]", definitions, in_json) for item in value]
    if kind == "map":
        pairs = value.items() if isinstance(value, dict) else value
        return {key: _for_writer(node.child, item, f"{path}[{key!r}]", definitions, in_json) for key, item in pairs}
    if kind in ("bytes", "fixed") and in_json:
        value = value.encode("latin-1")
    _check_scalar(node, value, path)
    return value


def _branch_for_writer(node: Node, value: Any, path: str, definitions: Mapping[str, Node], in_json: bool) -> Any:
    given = [name for name, item in value.items() if item is not None] if value else []
    if len(given) > 1:
        raise ValueError(f"{path} has values in {', '.join(given)}; a union holds one")
    if not given:
        if any(branch.kind == "null" for branch in node.branches):
            return None
        raise ValueError(f"{path} is null, and its schema has no null")
    position = branch_names(node).index(given[0])
    inner = _for_writer(node.branches[position], value[given[0]], f"{path}.{given[0]}", definitions, in_json)
    return (_wrapper(node, given[0]), {given[0]: inner})


_RANGES = {"int": 1 << 31, "long": 1 << 63}


def _check_scalar(node: Node, value: Any, path: str) -> None:
    if node.kind in _RANGES:
        limit = _RANGES[node.kind]
        if not -limit <= value < limit:
            raise ValueError(f"{path}: {value} is out of the range of {node.kind}")
    elif node.kind == "enum" and value not in node.symbols:
        raise ValueError(f"{path}: {value!r} is none of the symbols of {node.name}")
    elif node.kind == "fixed" and len(value) != node.size:
        raise ValueError(f"{path}: {len(value)} bytes, and {node.name} has {node.size}")
