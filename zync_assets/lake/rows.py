"""Single rows of a table by their offsets, without Spark: only the files and row groups that can hold one are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.python_rows import python_rows
from zync_assets.compute import pc
from zync_assets.errors import LakeError
from zync_assets.lake import storage
from zync_assets.lake.tables import DataFile


def rows_at(
    table_uri: str, files: Iterable[DataFile], partition: int, offsets: Sequence[int], columns: Sequence[str]
) -> dict[int, dict[str, Any]]:
    """Offset → the row, as plain Python values; an offset that is not there is left out.

    ``columns`` are read besides ``kafka``; one that a file lacks is left out. Maps become dicts.
    Raises LakeError for a file that can't be read.
    """
    found: dict[int, dict[str, Any]] = {}
    for item in files:
        wanted = [offset for offset in offsets if (item.first or 0) <= offset <= (item.last or 0)]
        if item.partition == partition and wanted:
            uri = storage.join(table_uri, item.path)
            try:
                found |= _read(uri, wanted, columns)
            except (OSError, pa.ArrowInvalid) as error:
                raise LakeError(f"file {uri} can't be read: {error}. Restore it from a copy.") from error
    return found


def _read(uri: str, wanted: Sequence[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    system, path = storage.filesystem(uri)
    with pq.ParquetFile(path, filesystem=system) as file:
        groups = _groups(file.metadata, min(wanted), max(wanted))
        present = [name for name in ("kafka", *columns) if name in file.schema_arrow.names]
        places = pa.array(wanted, pa.int64())
        found: dict[int, dict[str, Any]] = {}
        for batch in storage.read_batches(file, 20_000, present, groups):
            offsets = pc.struct_field(batch.column("kafka"), "offset")
            for row in python_rows(batch.filter(pc.is_in(offsets, places))):
                found[row["kafka"]["offset"]] = row
        return found


def _groups(footer: pq.FileMetaData, low: int, high: int) -> list[int]:
    """The row groups whose statistics don't rule out an offset between ``low`` and ``high``."""
    names = [footer.schema.column(i).path for i in range(footer.num_columns)]
    column = names.index("kafka.offset")
    found: list[int] = []
    for group in range(footer.num_row_groups):
        span = footer.row_group(group).column(column).statistics
        if span is None or not span.has_min_max or (span.min <= high and low <= span.max):
            found.append(group)
    return found
