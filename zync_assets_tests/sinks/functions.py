"""A function of a user, as ``before: {function: ...}`` names it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def upper(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with a column for the names in capitals."""
    if "v" not in rows.schema.names:
        return rows
    return rows.append_column("upper", pc.utf8_upper(rows.column("v")))
