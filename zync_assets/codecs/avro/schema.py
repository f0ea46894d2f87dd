"""Avro schemas as a tree: names resolved, logical types checked, recursion found.

Source: Avro specification 1.12, "Schema Declaration".

``parse`` is the only reader of Avro's JSON here. Its tree resolves every reference, except ``ref`` nodes: a record's name
inside the record itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from zync_assets.codecs.fields import PLAIN, Note, connect_note
from zync_assets.errors import SchemaError
from zync_assets.pipeline import SubjectNameStrategy

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


@dataclass(frozen=True)
class Node:
    """One type.

    ``kind``: a primitive's name, ``fixed``, ``enum``, ``array``, ``map``, ``record``, ``option``
    (null and one other type, that one in ``items``), ``union`` (any other union) or ``ref`` (a record inside itself, by
    ``name``).
    """

    kind: str
    name: str = ""
    logical: str = ""
    precision: int = 0
    scale: int = 0
    size: int = 0
    symbols: tuple[str, ...] = ()
    fields: tuple[tuple[str, Node], ...] = ()
    items: Node | None = None
    branches: tuple[Node, ...] = ()
    null_index: int = 0
    aliases: tuple[str, ...] = ()
    """Other full names of a named type."""
    field_aliases: tuple[tuple[str, ...], ...] = ()
    """Other names of each of ``fields``."""
    field_defaults: tuple[str, ...] = ()
    """The default of each of ``fields`` as JSON; empty for null, and without one."""
    unit: str = ""
    """The unit of a time that is a number in the lake, such as ``time-micros``; empty if the lake's type says the unit."""
    note: Note = PLAIN
    """The note in Connect's properties of the type itself. ``note_of`` returns the note of a field."""

    @property
    def child(self) -> Node:
        """The type inside an array, a map or an option."""
        assert self.items is not None
        return self.items

    @property
    def children(self) -> tuple[Node, ...]:
        if self.items is not None:
            return (self.items,)
        return self.branches or tuple(child for _, child in self.fields)


def walk(node: Node) -> Iterator[Node]:
    """The node and its descendants."""
    yield node
    for child in node.children:
        yield from walk(child)


def is_recursive(node: Node) -> bool:
    return any(item.kind == "ref" for item in walk(node))


def note_of(node: Node) -> Note:
    """The note of a field with this type: Connect's properties, and whether the field is required."""
    if node.kind == "option":
        return replace(note_of(node.child), required=False)
    if is_hollow(node) or node.kind in ("union", "ref"):
        return PLAIN
    item = note_of(node.child) if node.kind in ("array", "map") else PLAIN
    return replace(node.note, required=True, item=item or None)


def is_hollow(node: Node) -> bool:
    """Whether the type's only value is null: it has no column."""
    return node.kind == "null" or (node.kind == "union" and all(branch.kind == "null" for branch in node.branches))


def visible_fields(node: Node) -> tuple[tuple[str, Node], ...]:
    """A record's fields that have a column."""
    return tuple((name, child) for name, child in node.fields if not is_hollow(child))


def branch_names(node: Node) -> tuple[str, ...]:
    """Column names of a union's branches, "" for null: the type's name, or where two are alike the full one."""
    short = [branch.name.rpartition(".")[2] or branch.kind for branch in node.branches]
    lowercase = [name.lower() for name in short]
    return tuple(
        ""
        if branch.kind == "null"
        else (branch.name.replace(".", "_") if branch.name and lowercase.count(name.lower()) > 1 else name)
        for branch, name in zip(node.branches, short, strict=True)
    )


_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_DEPTH = 100
MAX_DIGITS = 10_000
"""Of a decimal. One of a thousand million digits after the point would be that long whatever its bytes say."""
MAX_NODES = 50_000


@lru_cache(maxsize=512)
def parse(schema_json: str) -> Node:
    """The tree of an Avro schema; SchemaError names what is wrong and where. A JSON list is a union, as in Avro.

    A schema may be MAX_DEPTH deep and have MAX_NODES types. A named type counts at each of its uses: thirty records, each
    with two fields of the record before, would make a column of a thousand million fields.
    """
    try:
        document = json.loads(schema_json)
        # A lone surrogate ("\\ud800") is JSON, but no text, and names are columns.
        json.dumps(document, ensure_ascii=False).encode()
        return _Parser().node(document, "", "schema", ())
    except UnicodeEncodeError:
        raise SchemaError("the Avro schema holds half a surrogate pair, which is no text") from None
    except ValueError as error:
        raise SchemaError(f"the Avro schema is not JSON: {error}") from None
    except RecursionError:
        raise SchemaError(f"the Avro schema is nested deeper than {MAX_DEPTH} levels") from None


_ATTRIBUTES = ("size", "symbols", "logicalType", "precision", "scale", "connect.name")


@lru_cache(maxsize=512)
def digest(schema_json: str) -> int:
    """A number of 56 bits that differs where bytes mean other values, or values of other fields. SchemaError as in ``parse``.

    The digest is of Avro's Parsing Canonical Form (specification, "Transforming into Parsing Canonical Form"), to which the
    logical types and Kafka Connect's names of types are added. Notes, defaults and aliases do not count. The lake keeps the
    digest: it must not depend on the types that this version knows.

    >>> texts = '{"type": "int", "doc": "a count"}', '{"type": "int", "logicalType": "date"}', '"long"'
    >>> [digest(text) == digest('"int"') for text in texts]
    [True, False, False]
    """
    parse(schema_json)
    text = json.dumps(_canonical(json.loads(schema_json), ""))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _canonical(schema: Any, namespace: str) -> Any:
    """A schema with the parts that count. ``namespace``: of the names in it."""
    if isinstance(schema, str):
        return schema if schema in PRIMITIVES or "." in schema or not namespace else f"{namespace}.{schema}"
    if isinstance(schema, list):
        return [_canonical(branch, namespace) for branch in schema]
    kind = schema["type"]
    if not isinstance(kind, str):
        form = [_canonical(kind, namespace)]
    elif kind == "array":
        form = [kind, _canonical(schema["items"], namespace)]
    elif kind == "map":
        form = [kind, _canonical(schema["values"], namespace)]
    elif kind in ("record", "error", "enum", "fixed"):
        name = full_name(schema, namespace)
        fields = schema["fields"] if kind in ("record", "error") else ()
        form = [kind, name, *([item["name"], _canonical(item["type"], name.rpartition(".")[0])] for item in fields)]
    else:
        form = [_canonical(kind, namespace)]
    form += [[key, schema[key]] for key in _ATTRIBUTES if key in schema]
    return form[0] if len(form) == 1 else form


def with_digests(schema_of: Callable[[int, bool], str], digests: Mapping[int, int]) -> Callable[[int], str]:
    """``schema_of`` with a SchemaError for an id whose schema has another digest than in ``digests`` (id → digest).

    ``schema_of``: gets the id, and whether to ask the registry anew: where ``digests`` lacks the id. A registry that lost its
    data may have given the id of one topic to another topic.
    """

    def same_schema(schema_id: int) -> str:
        text = schema_of(schema_id, schema_id not in digests)
        if schema_id in digests and digest(text) != digests[schema_id]:
            raise SchemaError(
                "the registry has another schema by this id than when the first record with the id came. Correct registry.url, or"
                " give the registry its former schemas back"
            )
        return text

    return same_schema


def full_name(schema: Mapping[str, Any], namespace: str) -> str:
    """The full name that a definition declares inside ``namespace`` (specification, "Names")."""
    name = str(schema["name"])
    if "." in name:
        return name
    own_namespace = schema.get("namespace")
    space = namespace if own_namespace is None else str(own_namespace)
    return f"{space}.{name}" if space else name


class _Parser:
    def __init__(self) -> None:
        self.nodes_by_name: dict[str, Node] = {}
        self.extents: dict[int, tuple[Node, int, int]] = {}
        """Identity of a node → the node, its depth and its number of types. A node's hash would visit the whole subtree."""

    def node(self, schema: Any, namespace: str, path: str, open_records: tuple[str, ...]) -> Node:
        node = self._node(schema, namespace, path, open_records)
        if id(node) not in self.extents:
            inner = [*node.branches, *(child for _, child in node.fields), *([node.items] if node.items else [])]
            extents = [self.extents.get(id(child), (child, 1, 1)) for child in inner]
            depth = 1 + max((extent[1] for extent in extents), default=0)
            count = 1 + sum(extent[2] for extent in extents)
            if depth > MAX_DEPTH:
                raise SchemaError(f"{path[:100]}: the schema is nested deeper than {MAX_DEPTH} levels")
            if count > MAX_NODES:
                raise SchemaError(f"{path[:100]}: the schema has more than {MAX_NODES} types")
            self.extents[id(node)] = (node, depth, count)
        return node

    def _node(self, schema: Any, namespace: str, path: str, open_records: tuple[str, ...]) -> Node:
        if isinstance(schema, str):
            return self._by_name(schema, namespace, path, open_records)
        if isinstance(schema, list):
            return self._union(schema, namespace, path, open_records)
        if not isinstance(schema, dict):
            raise SchemaError(f"{path}: {schema!r} is no Avro type")
        kind = schema.get("type")
        if isinstance(kind, (dict, list)):
            return self.node(kind, namespace, path, open_records)
        if kind in PRIMITIVES:
            return _with_logical(Node(kind), schema)
        if kind in ("array", "map"):
            key = "items" if kind == "array" else "values"
            if key not in schema:
                raise SchemaError(f"{path}: the {kind} has no {key!r}")
            items = self.node(schema[key], namespace, f"{path}[]", open_records)
            if kind == "array" and _is_empty_on_the_wire(items):
                # A count of 2**60 such items takes no bytes at all: nothing could tell damage from data.
                raise SchemaError(f"{path}: an array of items that take no bytes ({items.kind}) is not supported")
            return _with_note(Node(kind, items=items), schema)
        if kind in ("record", "error", "fixed", "enum"):
            return self._define(schema, namespace, path, open_records)
        if isinstance(kind, str):
            return self._by_name(kind, namespace, path, open_records)
        raise SchemaError(f"{path}: a type without 'type'")

    def _by_name(self, name: str, namespace: str, path: str, open_records: tuple[str, ...]) -> Node:
        if name in PRIMITIVES:
            return Node(name)
        candidates = [name] if "." in name or not namespace else [f"{namespace}.{name}", name]
        for candidate in candidates:
            if candidate in open_records:
                return Node("ref", name=candidate)
            if candidate in self.nodes_by_name:
                return self.nodes_by_name[candidate]
        raise SchemaError(f"{path}: the type {name!r} is neither Avro's nor defined before")

    def _union(self, branches: list[Any], namespace: str, path: str, open_records: tuple[str, ...]) -> Node:
        if not branches:
            raise SchemaError(f"{path}: a union without branches")
        nodes = tuple(self.node(branch, namespace, path, open_records) for branch in branches)
        kinds = [node.name or node.kind for node in nodes]
        if len(set(kinds)) < len(kinds) or any(node.kind in ("union", "option") for node in nodes):
            raise SchemaError(f"{path}: a union holds one type twice, or another union")
        if len(nodes) == 2 and kinds.count("null") == 1:
            index = kinds.index("null")
            return Node("option", items=nodes[1 - index], null_index=index)
        node = Node("union", branches=nodes)
        _check_names([name for name in branch_names(node) if name], path)
        return node

    def _define(self, schema: dict[str, Any], namespace: str, path: str, open_records: tuple[str, ...]) -> Node:
        if not isinstance(schema.get("name"), str):
            raise SchemaError(f"{path}: a {schema['type']} without a name")
        name = full_name(schema, namespace)
        aliases = _aliases(schema, name.rpartition(".")[0])
        if schema["type"] == "fixed":
            size = schema.get("size")
            if not isinstance(size, int) or size < 0:
                raise SchemaError(f"{path}: the size of fixed {name} is {size!r}, not a number of bytes")
            node = _with_logical(Node("fixed", name=name, size=size, aliases=aliases), schema)
        elif schema["type"] == "enum":
            symbols = schema.get("symbols")
            if not isinstance(symbols, list) or not symbols or not all(_is_symbol(symbol) for symbol in symbols):
                raise SchemaError(
                    f"{path}: enum {name} needs symbols of letters, digits and _, not starting with a digit"
                )
            if len(set(symbols)) < len(symbols):
                raise SchemaError(f"{path}: enum {name} needs symbols that differ")
            node = Node("enum", name=name, symbols=tuple(symbols), aliases=aliases)
        else:
            node = self._record(schema, name, path, open_records)
        self.nodes_by_name[name] = node
        return node

    def _record(self, schema: dict[str, Any], name: str, path: str, open_records: tuple[str, ...]) -> Node:
        fields = schema.get("fields")
        if not isinstance(fields, list):
            raise SchemaError(f"{path}: record {name} has no fields")
        space = name.rpartition(".")[0]
        nodes: list[tuple[str, Node]] = []
        for field in fields:
            if not isinstance(field, dict) or not isinstance(field.get("name"), str) or "type" not in field:
                raise SchemaError(f"{path}: a field of record {name} lacks its name or its type")
            below = f"{path}.{field['name']}"
            nodes.append((field["name"], self.node(field["type"], space, below, (*open_records, name))))
        _check_names([field_name for field_name, _ in nodes], path)
        return Node(
            "record",
            name=name,
            fields=tuple(nodes),
            aliases=_aliases(schema, space),
            field_aliases=tuple(_aliases(field, "") for field in fields),
            field_defaults=tuple(map(_default, fields)),
            note=_note(schema, ""),
        )


def _is_symbol(symbol: object) -> bool:
    """Whether an enum may have it (specification, "Enums"); fastavro takes no other."""
    return isinstance(symbol, str) and _SYMBOL.fullmatch(symbol) is not None


def _aliases(schema: Mapping[str, Any], namespace: str) -> tuple[str, ...]:
    """The other names of a type (full ones) or of a field; anything else that stands there is ignored."""
    aliases = schema.get("aliases")
    names = [name for name in aliases if isinstance(name, str)] if isinstance(aliases, list) else []
    return tuple(f"{namespace}.{name}" if namespace and "." not in name else name for name in names)


def _default(field: Mapping[str, Any]) -> str:
    """The default of a field as JSON; empty for null, and without one."""
    value = field.get("default")
    return "" if value is None else json.dumps(value)


def _check_names(names: Sequence[str], path: str) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise SchemaError(f"{path}: two fields are called {twice[0]!r}")


def _is_empty_on_the_wire(node: Node) -> bool:
    if node.kind == "record":
        return all(_is_empty_on_the_wire(child) for _, child in node.fields)
    return node.kind == "null" or (node.kind == "fixed" and node.size == 0)


_LOGICAL: dict[str, tuple[str, ...]] = {
    "decimal": ("bytes", "fixed"),
    "uuid": ("string", "fixed"),
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
    "duration": ("fixed",),
}


_UNITS = {
    name: name
    for name in (
        *("time-millis", "time-micros", "timestamp-nanos"),
        *("local-timestamp-millis", "local-timestamp-micros", "local-timestamp-nanos"),
    )
} | {
    # Debezium's "Temporal types": numbers in a unit that only the name of their type shows.
    "io.debezium.time.Time": "time-millis",
    "io.debezium.time.MicroTime": "time-micros",
    "io.debezium.time.NanoTime": "time-nanos",
    "io.debezium.time.Timestamp": "timestamp-millis",
    "io.debezium.time.MicroTimestamp": "timestamp-micros",
    "io.debezium.time.NanoTimestamp": "timestamp-nanos",
}


def _note(schema: Mapping[str, Any], logical: str) -> Note:
    name, version, parameters, doc = (
        schema.get(f"connect.{part}") for part in ("name", "version", "parameters", "doc")
    )
    return connect_note(name, version, parameters, doc, logical, decimal=logical == "decimal")


def _with_note(node: Node, schema: Mapping[str, Any]) -> Node:
    note = _note(schema, node.logical)
    return replace(node, note=note) if note else node


def _with_logical(node: Node, schema: Mapping[str, Any]) -> Node:
    return _with_note(_logical(node, schema), schema)


_CONNECT_INTEGERS = ("int8", "int16")
"""Connect's types that Avro has as an int, with the property ``connect.type``; here they are logical types of it."""


def _logical(node: Node, schema: Mapping[str, Any]) -> Node:
    """The node with its logical type; one that is unknown or does not fit is ignored, as the specification says."""
    logical = schema.get("logicalType")
    if node.kind == "int" and logical is None and schema.get("connect.type") in _CONNECT_INTEGERS:
        return replace(node, logical=str(schema["connect.type"]))
    if not isinstance(logical, str) or node.kind not in _LOGICAL.get(logical, ()):
        unit = _UNITS.get(str(schema.get("connect.name")), "") if node.kind in ("int", "long") else ""
        return replace(node, unit=unit) if unit else node
    if (logical == "uuid" and node.kind == "fixed" and node.size != 16) or (logical == "duration" and node.size != 12):
        return node
    if logical != "decimal":
        return replace(node, logical=logical, unit=_UNITS.get(logical, ""))
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision or precision == 0:
        return node
    if precision > MAX_DIGITS:
        raise SchemaError(
            f"a decimal of precision {str(precision)[:20]}: more than {MAX_DIGITS} digits are not supported"
        )
    return replace(node, logical=logical, precision=precision, scale=scale)


def subject_name(strategy: SubjectNameStrategy, topic: str, side: str, schema: str) -> str:
    """The subject that a schema is registered under, as Confluent's serializers have it: ``<topic>-<key or value>``, the
    record's full name, or ``<topic>-<full name>``. SchemaError for a schema without a name, where one is needed."""
    if strategy == "topic":
        return f"{topic}-{side}"
    document = json.loads(schema)
    if not isinstance(document, dict) or document.get("type") != "record":
        raise SchemaError(
            f"topic {topic}: its {side}s have no record's name for subject-name-strategy {strategy}. Make them records (a"
            f" mapping of names to expressions), or set {side}-subject-name-strategy: topic."
        )
    full = full_name(document, "")
    return full if strategy == "record" else f"{topic}-{full}"
