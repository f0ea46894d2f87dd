"""A function of a user, as ``before: {function: ...}`` names it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def upper(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with a column for the names in capitals."""
    if "v" not in rows.schema.names:
        return rows
    return rows.append_column("upper", pc.utf8_upper(rows.column("v")))


def failing(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Fails on rows."""
    if rows.num_rows:
        raise ValueError("no such\ncountry.")
    return rows


def absent(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Has a defect of its own: an attribute that does not exist."""
    return rows.no_such_attribute


def shifting(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Adds a column whose type depends on the rows."""
    return rows.append_column("size", pa.array([2] * len(rows), pa.int64() if rows.num_rows else pa.int32()))


def lossy(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Loses a column where there are rows."""
    return rows.select(["id"]) if rows.num_rows else rows


def untyped(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Adds a column that has no type if there are no rows."""
    return rows.append_column("size", pa.array([None] * len(rows)))


def rekeying(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Changes the key."""
    return rows.set_column(0, "id", pa.array([0] * len(rows), pa.int64()))


def numbers(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with a column for the numbers in texts. Fails on a text that is none."""
    return rows.append_column("number", rows.column("v").cast(pa.int64()))


def sizes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with the lengths of two columns."""
    for name in ("v", "twice"):
        rows = rows.append_column(f"size_of_{name}", pc.utf8_length(rows.column(name)))
    return rows


def filled(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with a text in place of each null in a column."""
    at = rows.schema.get_field_index("region")
    return rows if at < 0 else rows.set_column(at, "region", pc.fill_null(rows.column(at), "none"))
