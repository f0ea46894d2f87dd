"""Arrow rows as Python's values. Python has no time before the year 1 or after the year 9999: such a time becomes text."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from zync_assets.compute import pc


def python_rows(rows: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """The rows by column names; maps become dicts, of equal keys the last."""
    try:
        return rows.to_pylist(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        counted = pa.schema([field.with_type(_counted(field.type)) for field in rows.schema])
        found = rows.cast(counted).to_pylist(maps_as_pydicts="lossy")
        return [{field.name: _timed(row[field.name], field.type) for field in rows.schema} for row in found]


def _counted(kind: pa.DataType) -> pa.DataType:
    """The type with a number in place of each time and date."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_counted(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_counted(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_counted(kind.key_type), _counted(kind.item_type))
    return kind


def _timed(value: Any, kind: pa.DataType) -> Any:
    """A value of the type ``_counted(kind)`` as one of ``kind``."""
    if value is None:
        return None
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return _moment(value, kind)
    if pa.types.is_struct(kind):
        return {field.name: _timed(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_timed(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        return {_timed(key, kind.key_type): _timed(item, kind.item_type) for key, item in value.items()}
    return value


def _moment(number: int, kind: pa.DataType) -> Any:
    try:
        return pa.scalar(number, kind).as_py()
    except (OverflowError, ValueError):
        is_date = pa.types.is_date32(kind)
        text = pc.strftime(pa.array([number], kind), format="%Y-%m-%d" if is_date else "%Y-%m-%dT%H:%M:%S")[0].as_py()
        zone = "" if is_date or kind.tz is None else "+00:00"
        return re.sub(r"\.0+$", "", text) + zone
