"""Output schemas of single rows: without the fields that a row leaves out, and with null for those that it has none for."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import pyarrow as pa

from zync_assets.codecs.nested import Mask
from zync_assets.compute import pc
from zync_assets.etl.output_notes import FieldPath
from zync_assets.names import original_name
from zync_assets.sql_text import dotted

_NULLABLE = "?"


def schema_groups(prints: pa.Array, left_out: pa.Array) -> pa.Array:
    """One text per row that identifies the row's schema: the fingerprint, then each left-out path on a line."""
    if left_out.null_count == len(left_out):
        return prints
    # Spark writes lists whose items can't be null, and pyarrow joins only those whose items can.
    paths = pc.fill_null(pc.binary_join(left_out.cast(pa.list_(pa.string())), "\n"), "")
    return pc.if_else(pc.equal(paths, ""), prints, pc.binary_join_element_wise(prints, paths, "\n"))


def null_masks(values: pa.Array, required: Collection[FieldPath]) -> dict[FieldPath, Mask]:
    """For each of some fields of a struct that are null in a row where the struct that they are in is not, in which.

    ``values`` have the lake's names, and paths the topic's.
    """
    found: dict[FieldPath, Mask] = {}
    for path in required:
        column, there = values, values.is_valid()
        for name in path:
            index = _place(column.type, name) if pa.types.is_struct(column.type) else -1
            if index < 0:
                break
            there = column.is_valid()
            column = column.flatten()[index]
        else:
            if column.null_count and (mask := pc.and_(there, column.is_null())).true_count:
                found[path] = mask.to_numpy(zero_copy_only=False)
    return found


def _place(type: pa.DataType, name: str) -> int:
    """The index of a struct's field by its name in the topic; -1: there is none."""
    names = [type.field(at).name for at in range(type.num_fields)]
    originals = [original_name(each) for each in names]
    # Tables from before fields were renamed may have a name that looks encoded.
    return originals.index(name) if name in originals else names.index(name) if name in names else -1


def nullable_groups(
    groups: pa.Array, group: str, values: pa.Array, required: Collection[FieldPath], side: str
) -> pa.Array:
    """The groups, where ``group`` stands with the fields that the row has as null though its schema has no null for them:
    behind a question mark."""
    inside = pc.equal(groups, group)
    for path, mask in null_masks(values, required).items():
        marked = pc.binary_join_element_wise(groups, f"{_NULLABLE}{dotted((side, *path))}", "\n")
        groups = pc.if_else(pc.and_(inside, pa.array(mask)), marked, groups)
    return groups


def parse_group(group: str) -> tuple[str, tuple[str, ...]]:
    """Fingerprint and paths."""
    name, *paths = group.split("\n")
    return name, tuple(paths)


def without(schema: str, side: str, paths: Collection[str], *, renamed: bool = False) -> str:
    """An output schema (Avro JSON) without the fields at ``paths`` (``value.address.street``); ``side``: key or value. Those
    behind a question mark stay, and may be null. ``renamed``: the others have the lake's names, which differ from the schema's.

    A record inside it that would have no field left is left out itself; the whole one stays, even without fields.
    """
    document = json.loads(schema)
    if renamed:
        paths = {path if path.startswith(_NULLABLE) else original_name(path) for path in paths}
    return json.dumps(_without(document, (side,), frozenset(paths)))


def _without(schema: Any, path: tuple[str, ...], paths: frozenset[str]) -> Any:
    if isinstance(schema, list):
        return [_without(branch, path, paths) for branch in schema]
    if not isinstance(schema, dict) or schema.get("type") != "record":
        return schema
    kept: list[Any] = []
    for field in schema["fields"]:
        inner = (*path, field["name"])
        if dotted(inner) in paths:
            continue
        made = _without(field["type"], inner, paths)
        if _NULLABLE + dotted(inner) in paths and not isinstance(made, list):
            kept.append({**field, "type": ["null", made], "default": None})
            continue
        if made == field["type"] or not _is_empty(made):
            kept.append({**field, "type": made})
    return {**schema, "fields": kept}


def _is_empty(schema: Any) -> bool:
    branches = schema if isinstance(schema, list) else [schema]
    return any(isinstance(one, dict) and one.get("type") == "record" and not one["fields"] for one in branches)


@lru_cache(maxsize=256)
def is_empty(schema: str) -> bool:
    """Whether no field is left."""
    return _is_empty(json.loads(schema))
