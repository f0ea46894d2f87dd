"""Schema evolution: the type of a column that holds the values of all its writers' schemas.

``merge_types`` merges a column's lake type with the types of new writer schemas, and refuses types that don't fit. Each record
is decoded by its own writer's schema.

- The column keeps its fields, their names and their order. New fields, nested fields too, come at the end, under the lake's
  names (``zync_assets.codecs.spark_types``).
- Fields are matched by their name in the topic, then by alias (``fields``). A renamed field stays in its column.
- If types differ, the column gets the narrowest type that holds both without loss: int → long → double, float → double, int and
  decimal → decimal. Two decimals become a decimal with enough digits on each side of the point. Old files stay as they are, and
  readers widen their values. (Only Avro's own promotion of a long past 2^53 to a double rounds.)
- string and bytes fit into a column of either type; bytes that are not UTF-8 don't fit into a string.
- A field that a writer's schema lacks is null. The schema's default is a note of the field (``with_lacking``).
- The column keeps the properties of Connect's notes that every writer's schema has (``fields``).

``written_form`` is for output schemas of Kafka Connect that write a column in another form than the lake's:

| the lake's | written as | |
| --- | --- | --- |
| timestamp | string | ``io.debezium.time.ZonedTimestamp``: ISO 8601, in UTC, with microseconds |
| timestamp | int64 | ``io.debezium.time.Timestamp`` (milliseconds) and ``MicroTimestamp`` |
| date32 | int32 | ``io.debezium.time.Date`` |
| string | struct | ``io.debezium.data.VariableScaleDecimal`` |

Source: Avro specification 1.12, "Schema Resolution"; Delta protocol, "Supported Type Changes".
"""

from __future__ import annotations

import decimal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from zync_assets.codecs.arrays import is_valid, list_of, list_parts, map_entries, pc, struct_of
from zync_assets.codecs.fields import (
    PLAIN,
    Default,
    Note,
    default_of,
    fields_of,
    in_lake,
    lacked_by,
    lacking,
    lake_type_of,
    maybe_missing,
    merge_notes,
    original,
    places,
    unit_factor,
    unit_of,
    with_default,
    without_connect,
)
from zync_assets.codecs.spark_types import spark_ddl
from zync_assets.errors import SchemaError

# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false


_FIRST, _END = -62_135_596_800_000_000, 253_402_300_800_000_000
"""Microseconds since the epoch at the begin of the years 1 and 10000."""


def has_written_form(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether a column of the first type has a written form of the second."""
    kinds = pa.types
    if kinds.is_timestamp(source):
        return kinds.is_string(target) or kinds.is_int64(target)
    if kinds.is_date32(source):
        return kinds.is_int32(target)
    return kinds.is_string(source) and is_variable_decimal(target)


def written_form(array: pa.Array, target: pa.DataType, unit: str = "") -> pa.Array:
    """The written form of a column; ``unit``: of numbers, ``timestamp-millis`` or microseconds. ValueError if a value has
    none."""
    kinds = pa.types
    if kinds.is_date32(array.type):
        return array.cast(pa.int32())
    if kinds.is_string(array.type):
        return pa.array([variable_decimal(text) for text in array.to_pylist()], target)
    micros = array.cast(pa.int64())
    if kinds.is_int64(target):
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
    # Python makes no integer of a text with more than 4300 digits. PostgreSQL's numeric has up to 147,455.
    number = int(decimal.Decimal((sign, digits, 0)))
    size = (number + (number < 0)).bit_length() // 8 + 1
    return {"scale": -exponent, "value": number.to_bytes(size, "big", signed=True)}


def bits_number(value: bool | bytes) -> int:
    """The number of a bit, or of Debezium's Bits, which have the last byte first."""
    return int.from_bytes(value, "little") if isinstance(value, bytes) else int(value)


def number_bits(number: int) -> bytes:
    """A number as Debezium's Bits, without zeros before its first bit."""
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


# pyarrow.compute makes its functions when it is imported: no checker sees them.
# pyright: reportAttributeAccessIssue=false


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


KEPT_TYPE = (
    "A raw column keeps its type: let the connector write the table to a new topic, and read that topic (demo/edits.md, A column"
    " of another type)"
)
"""The cure where a writer's type does not fit into a raw column."""


def misfit(error: SchemaError) -> str:
    """The error of a record whose schema ``merge_types`` refuses, with the cure."""
    return f"{error}. {KEPT_TYPE}"


def wider_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds the values of both; of string and bytes the first; None if there is none."""
    kinds = pa.types
    if first == second or (_is_text(first) and _is_text(second)):
        return first
    if first in _INTEGERS and second in _INTEGERS:
        return max(first, second, key=_INTEGERS.index)
    numbers = [
        kind for kind in (first, second) if kind in _INTEGERS or kinds.is_float32(kind) or kinds.is_float64(kind)
    ]
    if len(numbers) == 2:
        return pa.float64()
    parts = [(kind.precision - kind.scale, kind.scale) for kind in (first, second) if kinds.is_decimal(kind)]
    parts += [(_DIGITS[kind], 0) for kind in (first, second) if kind in _INTEGERS]
    if len(parts) < 2:
        return None
    whole, scale = (max(part[index] for part in parts) for index in (0, 1))
    return pa.decimal128(whole + scale, scale) if whole + scale <= _MAX_DIGITS else None


def _merge_structs(target: Any, writer: Any, path: str) -> pa.DataType:
    fields = [maybe_missing(field) for field in fields_of(target)]
    target_fields = fields_of(target)
    for at, new in zip(places(target, writer), fields_of(writer), strict=True):
        below = f"{path}.{original(new)}"
        if at is not None:
            old = target_fields[at]
            if unit_factor(old, new) is None:
                raise SchemaError(f"{below}: {unit_of(new)} can't be held in the lake's {unit_of(old)}")
            fields[at] = merge_notes(old, new, merge_types(old.type, new.type, below))
        else:
            fields.append(in_lake(maybe_missing(new), [field.name for field in fields]))
    return pa.struct(fields)


@dataclass(frozen=True)
class Writer:
    """A part of a writer's schema. ``defaults``: path below the part → the default of the field, as in ``fields.Default``."""

    type: pa.DataType
    defaults: Mapping[tuple[str, ...], str]

    def below(self, index: int) -> Writer:
        """The part in a field of the struct. The field's own default has the path ()."""
        item = fields_of(self.type)[index]
        return Writer(
            item.type, {path[1:]: text for path, text in self.defaults.items() if path[:1] == (original(item),)}
        )


def with_lacking(type: pa.DataType, writers: Mapping[int, Writer]) -> pa.DataType:
    """A column's type where each field of a struct notes the writers' schemas that lack the field, and its default.
    ``writers``: registry id → schema, in the order in which the schemas were made. Notes about other schemas stay.
    """
    if not pa.types.is_struct(type):
        return type
    indices_by_writer = {
        number: places(type, writer.type) for number, writer in writers.items() if pa.types.is_struct(writer.type)
    }
    fields: list[pa.Field] = []
    for index, item in enumerate(fields_of(type)):
        parts = {
            number: writers[number].below(indices.index(index))
            for number, indices in indices_by_writer.items()
            if index in indices
        }
        lacking_ids = (indices_by_writer.keys() - parts.keys()) | ({*lacking(item)} - writers.keys())
        new_field = lacked_by(item.with_type(with_lacking(item.type, parts)), lacking_ids)
        first = next(iter(parts), None)
        text = parts[first].defaults.get(()) if first is not None else None
        if first is not None and text is not None and default_of(item) is None and _is_value(text, item.type):
            ids = list(indices_by_writer)
            new_field = with_default(new_field, Default(text, tuple(ids[: ids.index(first)])))
        fields.append(new_field)
    return pa.struct(fields)


def _is_value(text: str, type: pa.DataType) -> bool:
    try:
        return pa.scalar(text).cast(type).is_valid
    except pa.ArrowException:
        return False


def holds(table: pa.DataType | None, file: pa.DataType) -> bool:
    """Whether a file of the second type can be read by the column's type: it may lack fields and have narrower types, and
    has no other fields, nor fields by another name."""
    if table is None or pa.types.is_null(file) or table.equals(file, check_metadata=True):
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
    if has_written_form(array.type, type):
        return written_form(array, type)
    return array.cast(type)


def _conform_fields(array: pa.Array, type: pa.DataType) -> list[pa.Array]:
    columns = dict(zip(places(type, array.type), zip(fields_of(array.type), array.flatten(), strict=True), strict=True))
    children: list[pa.Array] = []
    for index, field in enumerate(fields_of(type)):
        if index not in columns:
            children.append(pa.nulls(len(array), field.type))
            continue
        source, values = columns[index]
        if has_written_form(source.type, field.type):
            children.append(written_form(values, field.type, unit_of(field)))
            continue
        factor = unit_factor(field, source)
        child = conform(values, field.type)
        children.append(child if factor in (1, None) else pc.multiply_checked(child, pa.scalar(factor, field.type)))
    return children


def _is_list(type: pa.DataType) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type)


def project(type: pa.DataType, source: pa.DataType) -> pa.DataType:
    """``type`` with only those struct fields, at any depth of structs, that ``source`` has too."""
    if not (pa.types.is_struct(type) and pa.types.is_struct(source)):
        return type
    source_types = {source.field(index).name: source.field(index).type for index in range(source.num_fields)}
    fields = [type.field(index) for index in range(type.num_fields)]
    return pa.struct(
        [(item.name, project(item.type, source_types[item.name])) for item in fields if item.name in source_types]
    )


def check_writable(source: pa.DataType, target: pa.DataType, path: str = "value") -> None:
    """SchemaError unless values of ``source`` can be written as ``target`` (single ones may be out of range)."""
    kinds = pa.types
    if source == target or kinds.is_null(source) or has_written_form(source, target):
        return
    if kinds.is_struct(source) and kinds.is_struct(target):
        source_types = {source.field(index).name: source.field(index).type for index in range(source.num_fields)}
        for field in (target.field(index) for index in range(target.num_fields)):
            if field.name in source_types:
                check_writable(source_types[field.name], field.type, f"{path}.{field.name}")
        return
    if _is_list(source) and _is_list(target):
        check_writable(source.value_type, target.value_type, f"{path}[]")
        return
    if kinds.is_map(source) and kinds.is_map(target):
        check_writable(source.key_type, target.key_type, f"{path} (key)")
        check_writable(source.item_type, target.item_type, f"{path}{{}}")
        return
    if any(check(source) and check(target) for check in _KINDS):
        return
    if kinds.is_integer(source) and (kinds.is_floating(target) or kinds.is_decimal(target)):
        return
    raise SchemaError(f"{path}: a column of type {source} can't be written as {target}")


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


@dataclass(frozen=True)
class Arrival:
    """A writer schema that is new to a decoder.

    ``index``: the first record with the schema. ``schema_id``: None for a format without schema ids; ``type`` is then the
    column's type with the schema's fields added. ``before``: the types of the known schemas, the latest last.
    ``note``: the schema's note of the whole value for Kafka Connect. ``digest``: of the schema, where it has an id.
    """

    index: int
    schema_id: int | None
    type: pa.DataType
    before: tuple[pa.DataType, ...]
    note: Note = PLAIN
    digest: int | None = None

    @property
    def is_new(self) -> bool:
        """Whether the table may not know the schema. Schemas without ids are known by their columns."""
        return self.schema_id is not None or not self.before or self.changes

    @property
    def changes(self) -> bool:
        """Whether no known schema has the same columns. Some writers' schemas differ only in names and notes."""
        return is_change(self.before, self.type)


def is_change(before: tuple[pa.DataType, ...], type: pa.DataType) -> bool:
    form = without_connect(type)
    return bool(before) and not any(without_connect(old_type).equals(form, check_metadata=True) for old_type in before)


def type_differences(before: pa.DataType, after: pa.DataType, path: str) -> Iterator[str]:
    """The changes of a writer's schema, one line per field: added, removed, renamed, widened, narrowed or changed."""
    kinds = pa.types
    if before.equals(after, check_metadata=True):
        return
    if kinds.is_struct(before) and kinds.is_struct(after):
        yield from _fields(before, after, path)
    elif kinds.is_list(before) and kinds.is_list(after):
        yield from type_differences(before.value_type, after.value_type, f"{path}[]")
    elif kinds.is_map(before) and kinds.is_map(after):
        yield from type_differences(before.item_type, after.item_type, f"{path}{{}}")
    elif before != after:
        common_type = wider_type(before, after)
        word = "widened" if common_type == after else "narrowed" if common_type == before else "changed"
        yield f"{word} {path} from {_name(before)} to {_name(after)}"


def _fields(before: pa.DataType, after: pa.DataType, path: str) -> Iterator[str]:
    old, new = fields_of(before), fields_of(after)
    at = places(before, after)
    for index, field in enumerate(old):
        if index not in at:
            yield f"removed {path}.{original(field)}"
    for index, field in zip(at, new, strict=True):
        below = f"{path}.{original(field)}"
        if index is None:
            yield f"added {below} ({_name(field.type)})"
            continue
        if original(old[index]) != original(field):
            yield f"renamed {path}.{original(old[index])} to {original(field)}"
        if unit_of(old[index]) != unit_of(field):
            yield f"changed {below} from {unit_of(old[index]) or 'no unit'} to {unit_of(field) or 'no unit'}"
        yield from type_differences(old[index].type, field.type, below)


def _name(type: pa.DataType) -> str:
    return "struct" if pa.types.is_struct(type) else spark_ddl(type)
