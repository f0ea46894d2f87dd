"""The lake's type of a column through changes of its writers' schemas: what a new schema adds, and what can't go in.

Fields are matched by name. What the column has, stays: order, types. New fields come at the end, nested ones too.
A value goes into a wider type (Avro specification, "Schema Resolution"): int → long, float, double; long → float,
double; float → double; string ↔ bytes; a decimal into one with at least its digits on both sides of the point.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from zync_assets.codecs.nested import is_valid, list_of, list_parts, map_entries, struct_of
from zync_assets.compute import pc
from zync_assets.errors import SchemaError

_WIDER: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int16(): (pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int32(): (pa.int64(), pa.float32(), pa.float64()),
    pa.int64(): (pa.float32(), pa.float64()),
    pa.float32(): (pa.float64(),),
    pa.string(): (pa.large_string(), pa.binary(), pa.large_binary()),
    pa.binary(): (pa.large_binary(), pa.string(), pa.large_string()),
}


def merge_types(target: pa.DataType | None, writer: pa.DataType, path: str = "value") -> pa.DataType:
    """``target`` with what ``writer`` adds; SchemaError names the field that can't go in, and both types."""
    if target is None or pa.types.is_null(target):
        return writer
    if target == writer or pa.types.is_null(writer):
        return target
    kinds = pa.types
    if kinds.is_struct(target) and kinds.is_struct(writer):
        return _merge_structs(target, writer, path)
    if _is_list(target) and _is_list(writer):
        inner = merge_types(target.value_type, writer.value_type, f"{path}[]")
        return pa.large_list(inner) if kinds.is_large_list(target) else pa.list_(inner)
    if kinds.is_map(target) and kinds.is_map(writer):
        key = merge_types(target.key_type, writer.key_type, f"{path} (key)")
        return pa.map_(key, merge_types(target.item_type, writer.item_type, f"{path}{{}}"))
    if writer in _WIDER and target in _WIDER[writer]:
        return target
    if kinds.is_decimal(target) and kinds.is_decimal(writer):
        whole = target.precision - target.scale - writer.precision + writer.scale
        if target.scale >= writer.scale and whole >= 0:
            return target
    raise SchemaError(f"{path}: {writer} does not fit into the lake's {target}")


def _merge_structs(target: Any, writer: Any, path: str) -> pa.DataType:
    fields = [target.field(index) for index in range(target.num_fields)]
    names = {field.name: index for index, field in enumerate(fields)}
    lowered = {name.lower(): name for name in names}
    for new in (writer.field(index) for index in range(writer.num_fields)):
        at = names.get(new.name)
        if at is not None:
            merged = merge_types(fields[at].type, new.type, f"{path}.{new.name}")
            fields[at] = pa.field(new.name, merged)
        elif new.name.lower() in lowered:
            other = lowered[new.name.lower()]
            raise SchemaError(
                f"{path}: the fields {other!r} and {new.name!r} would be one column in the lake; rename one"
            )
        else:
            fields.append(pa.field(new.name, new.type))
    return pa.struct([pa.field(field.name, field.type) for field in fields])


def conform(array: pa.Array, type: pa.DataType) -> pa.Array:
    """``array`` as one of ``type``: struct fields by name, missing ones null, those that ``type`` lacks left out.

    ValueError (pyarrow's) if a value does not fit, e.g. bytes that are no UTF-8 into a string.
    """
    if array.type == type:
        return array
    kinds = pa.types
    if kinds.is_null(array.type):
        return pa.nulls(len(array), type)
    if kinds.is_struct(type) and kinds.is_struct(array.type):
        given = {array.type.field(index).name: part for index, part in enumerate(array.flatten())}
        wanted = [type.field(index) for index in range(type.num_fields)]
        children = [
            conform(given[field.name], field.type) if field.name in given else pa.nulls(len(array), field.type)
            for field in wanted
        ]
        return struct_of(type, children, len(array), is_valid(array))
    if kinds.is_list(type) and kinds.is_list(array.type):
        offsets, values = list_parts(array)
        return list_of(type, offsets, conform(values, type.value_type), is_valid(array))
    if kinds.is_map(type) and kinds.is_map(array.type):
        offsets, values = list_parts(array)
        keys, items = values.flatten()
        entries = map_entries(type, conform(keys, type.key_type), conform(items, type.item_type))
        return list_of(type, offsets, entries, is_valid(array))
    if kinds.is_floating(type) and kinds.is_integer(array.type):
        # A long that a double can't hold to the last digit is rounded, as Avro's promotion does.
        return pc.cast(array, type, safe=False)
    return array.cast(type)


def _is_list(type: pa.DataType) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type)


def project(type: pa.DataType, given: pa.DataType) -> pa.DataType:
    """``type`` with only those struct fields, at any depth of structs, that ``given`` has too."""
    if not (pa.types.is_struct(type) and pa.types.is_struct(given)):
        return type
    theirs = {given.field(index).name: given.field(index).type for index in range(given.num_fields)}
    ours = [type.field(index) for index in range(type.num_fields)]
    return pa.struct([(item.name, project(item.type, theirs[item.name])) for item in ours if item.name in theirs])


def check_writable(given: pa.DataType, wanted: pa.DataType, path: str = "value") -> None:
    """SchemaError unless values of ``given`` can be written as ``wanted`` (single ones may be out of range)."""
    kinds = pa.types
    if given == wanted or kinds.is_null(given):
        return
    if kinds.is_struct(given) and kinds.is_struct(wanted):
        theirs = {given.field(index).name: given.field(index).type for index in range(given.num_fields)}
        for field in (wanted.field(index) for index in range(wanted.num_fields)):
            if field.name in theirs:
                check_writable(theirs[field.name], field.type, f"{path}.{field.name}")
        return
    if _is_list(given) and _is_list(wanted):
        check_writable(given.value_type, wanted.value_type, f"{path}[]")
        return
    if kinds.is_map(given) and kinds.is_map(wanted):
        check_writable(given.key_type, wanted.key_type, f"{path} (key)")
        check_writable(given.item_type, wanted.item_type, f"{path}{{}}")
        return
    if any(check(given) and check(wanted) for check in _KINDS):
        return
    if kinds.is_integer(given) and (kinds.is_floating(wanted) or kinds.is_decimal(wanted)):
        return
    raise SchemaError(f"{path}: a column of type {given} can't be written as {wanted}")


def _is_text(type: pa.DataType) -> bool:
    kinds = pa.types
    return any(
        check(type) for check in (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary)
    )


_KINDS = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_timestamp,
    pa.types.is_date,
    _is_text,
)
