"""Puts Avro schemas that refer to others by name together into one document.

A registry keeps shared types under subjects of their own; a schema that uses one has its name only, and a
list of references. Names and namespaces are resolved as the Avro specification says ("Names"): a name without
a dot is in the enclosing namespace, else in none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zync_assets.errors import SchemaError

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED = frozenset({"record", "error", "enum", "fixed"})


def inline(schema: str, referenced: Sequence[str]) -> str:
    """``schema`` with each type from ``referenced`` (JSON documents) defined at its first use.

    Raises SchemaError for a document that is no JSON, or a name that nothing defines.
    """
    try:
        documents = [json.loads(text) for text in referenced]
        main = json.loads(schema)
        known = {name: item for document in documents for name, item in _definitions(document, "")}
        return json.dumps(_Inliner(known).schema(main, ""))
    except ValueError as error:
        raise SchemaError(f"a schema that is no JSON: {error}; register it again") from None
    except RecursionError:
        raise SchemaError("a schema that is nested too deep") from None


def full_name(name: str, namespace: str) -> str:
    """A name with its namespace."""
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _namespace(schema: Mapping[str, Any], enclosing: str) -> str:
    """The namespace of a named type. Names inside the type belong to the same namespace."""
    name = str(schema["name"])
    return name.rpartition(".")[0] if "." in name else str(schema.get("namespace", enclosing))


def _definitions(schema: Any, namespace: str) -> Iterator[tuple[str, tuple[Mapping[str, Any], str]]]:
    """Every named type defined in ``schema`` by its full name, with the namespace that encloses it."""
    if isinstance(schema, list):
        for branch in schema:
            yield from _definitions(branch, namespace)
    elif isinstance(schema, dict):
        inner = namespace
        if schema.get("type") in _NAMED:
            inner = _namespace(schema, namespace)
            yield full_name(str(schema["name"]), inner), (schema, namespace)
        for field in schema.get("fields", ()):
            yield from _definitions(field.get("type"), inner)
        for part in ("items", "values", "type"):
            yield from _definitions(schema.get(part), inner)


class _Inliner:
    """Walks a schema in the order in which a parser meets its names."""

    def __init__(self, known: Mapping[str, tuple[Mapping[str, Any], str]]) -> None:
        self._known = known
        self._defined: set[str] = set()

    def schema(self, schema: Any, namespace: str) -> Any:
        if isinstance(schema, str):
            return self._name(schema, namespace)
        if isinstance(schema, list):
            return [self.schema(branch, namespace) for branch in schema]
        if not isinstance(schema, dict):
            raise SchemaError(f"{json.dumps(schema)} is no Avro schema; correct it in the registry")
        kind = schema.get("type")
        if kind not in _NAMED:
            return {
                **schema,
                **{part: self.schema(schema[part], namespace) for part in ("items", "values") if part in schema},
                "type": kind if kind in ("array", "map") else self.schema(kind, namespace),
            }
        inner = _namespace(schema, namespace)
        name = full_name(str(schema["name"]), inner)
        if name in self._defined:
            return name
        self._defined.add(name)
        # An explicit namespace, even an empty one: the place it moves to must not lend it another.
        whole = {**schema, "name": name.rpartition(".")[2], "namespace": inner}
        if "fields" in schema:
            whole["fields"] = [{**field, "type": self.schema(field["type"], inner)} for field in schema["fields"]]
        return whole

    def _name(self, name: str, namespace: str) -> Any:
        if name in PRIMITIVES:
            return name
        for candidate in dict.fromkeys((full_name(name, namespace), name)):
            if candidate in self._defined:
                return candidate
            if candidate in self._known:
                definition, enclosing = self._known[candidate]
                return self.schema(definition, enclosing)
        raise SchemaError(
            f"type {full_name(name, namespace)} is defined nowhere; register the subject that defines it "
            "and refer to it"
        )
