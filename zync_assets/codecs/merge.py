"""Merges a column's lake type with the types of new writer schemas. Refuses types that don't fit.

Each record is decoded by its own writer's schema. The column holds the values of every writer's schema:

- The column keeps its fields, their names and their order. New fields, nested fields too, come at the end, under the lake's
  names (``zync_assets.names``).
- Fields are matched by their name in the topic, then by alias (``field_notes``). A renamed field stays in its column.
- If types differ, the column gets the narrowest type that holds both without loss: int → long → double, float → double,
  int and decimal → decimal. Two decimals become a decimal with enough digits on each side of the point. Old files stay as
  they are, and readers widen their values. (Only Avro's own promotion of a long past 2^53 to a double rounds.)
- string and bytes fit into a column of either type; bytes that are not UTF-8 don't fit into a string.
- A field that a writer's schema lacks is null. A default is not filled in, because it would look like a source's value.
- The column keeps the properties of Connect's notes that every writer's schema has (``connect_notes``).

Source: Avro specification 1.12, "Schema Resolution"; Delta protocol, "Supported Type Changes".
"""

# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pyarrow as pa

from zync_assets.codecs.field_notes import (
    fields_of,
    in_lake,
    lake_type_of,
    maybe_missing,
    merged_notes,
    original,
    places,
    unit_factor,
    unit_of,
)
from zync_assets.codecs.nested import is_valid, list_of, list_parts, map_entries, struct_of
from zync_assets.codecs.written import is_written_as, written
from zync_assets.compute import pc
from zync_assets.errors import SchemaError

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_DIGITS = {pa.int8(): 10, pa.int16(): 10, pa.int32(): 10, pa.int64(): 20}
"""Digits before the point that a decimal needs to hold an integer, as the Delta protocol has them."""
_MAX_DIGITS = 38


def merge_types(target: pa.DataType | None, writer: pa.DataType, path: str = "value") -> pa.DataType:
    """``target`` with what ``writer`` adds; SchemaError names the field that can't go in, and both types."""
    if target is None or pa.types.is_null(target):
        return lake_type_of(writer)
    if pa.types.is_null(writer) or target.equals(writer, check_metadata=True):
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
    wide = wider_type(target, writer)
    if wide is None:
        raise SchemaError(f"{path}: {writer} does not fit into the lake's {target}")
    return wide


def wider_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds the values of both; of string and bytes the first; None if there is none."""
    kinds = pa.types
    if one == other or (_is_text(one) and _is_text(other)):
        return one
    if one in _INTEGERS and other in _INTEGERS:
        return max(one, other, key=_INTEGERS.index)
    numbers = [kind for kind in (one, other) if kind in _INTEGERS or kinds.is_float32(kind) or kinds.is_float64(kind)]
    if len(numbers) == 2:
        return pa.float64()
    parts = [(kind.precision - kind.scale, kind.scale) for kind in (one, other) if kinds.is_decimal(kind)]
    parts += [(_DIGITS[kind], 0) for kind in (one, other) if kind in _INTEGERS]
    if len(parts) < 2:
        return None
    whole, scale = (max(part[index] for part in parts) for index in (0, 1))
    return pa.decimal128(whole + scale, scale) if whole + scale <= _MAX_DIGITS else None


def _merge_structs(target: Any, writer: Any, path: str) -> pa.DataType:
    fields = [maybe_missing(field) for field in fields_of(target)]
    met = fields_of(target)
    for at, new in zip(places(target, writer), fields_of(writer), strict=True):
        below = f"{path}.{original(new)}"
        if at is not None:
            old = met[at]
            if unit_factor(old, new) is None:
                raise SchemaError(f"{below}: {unit_of(new)} can't be held in the lake's {unit_of(old)}")
            fields[at] = merged_notes(old, new, merge_types(old.type, new.type, below))
        else:
            fields.append(in_lake(maybe_missing(new), [field.name for field in fields]))
    return pa.struct(fields)


def holds(table: pa.DataType | None, file: pa.DataType) -> bool:
    """Whether a file of the second type can be read by the column's type: it may lack fields and have narrower types, and
    has no other fields, nor fields by another name."""
    if table is None or pa.types.is_null(file):
        return True
    kinds = pa.types
    if kinds.is_struct(table) and kinds.is_struct(file):
        types = {field.name: field for field in fields_of(table)}
        return all(
            field.name in types
            and unit_of(field) in ("", unit_of(types[field.name]))
            and holds(types[field.name].type, field.type)
            for field in fields_of(file)
        )
    if _is_list(table) and _is_list(file):
        return holds(table.value_type, file.value_type)
    if kinds.is_map(table) and kinds.is_map(file):
        return holds(table.key_type, file.key_type) and holds(table.item_type, file.item_type)
    return wider_type(table, file) == table


def conform(array: pa.Array, type: pa.DataType) -> pa.Array:
    """``array`` as one of ``type``: struct fields by name or alias, missing ones null, those that ``type`` lacks left out,
    times in ``type``'s unit.

    ValueError (pyarrow's) if a value does not fit, e.g. bytes that are no UTF-8 into a string.
    """
    if array.type.equals(type, check_metadata=True):
        return array
    kinds = pa.types
    if kinds.is_null(array.type):
        return pa.nulls(len(array), type)
    if kinds.is_struct(type) and kinds.is_struct(array.type):
        return struct_of(type, _conform_fields(array, type), len(array), is_valid(array))
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
    if is_written_as(array.type, type):
        return written(array, type)
    return array.cast(type)


def _conform_fields(array: pa.Array, type: pa.DataType) -> list[pa.Array]:
    given = dict(zip(places(type, array.type), zip(fields_of(array.type), array.flatten(), strict=True), strict=True))
    children: list[pa.Array] = []
    for index, field in enumerate(fields_of(type)):
        if index not in given:
            children.append(pa.nulls(len(array), field.type))
            continue
        theirs, values = given[index]
        if is_written_as(theirs.type, field.type):
            children.append(written(values, field.type, unit_of(field)))
            continue
        factor = unit_factor(field, theirs)
        made = conform(values, field.type)
        children.append(made if factor in (1, None) else pc.multiply_checked(made, pa.scalar(factor, field.type)))
    return children


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
    if given == wanted or kinds.is_null(given) or is_written_as(given, wanted):
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
