"""Ways to damage a lake for real: through the Delta log, or in the files behind its back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.lake import tables
from zync_assets.lake.log import DataFile, LakeTable
from zync_assets.lake.staging import StagingState

Rows = list[dict[str, Any]]


def overwrite(opened: LakeTable, item: DataFile, change: Callable[[Rows], Rows]) -> None:
    """Change a file's rows where it lies; the log knows nothing of it."""
    path = Path(opened.uri) / item.path
    table = pq.ParquetFile(path).read()
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), path)


def exchange(opened: LakeTable, item: DataFile, change: Callable[[Rows], Rows]) -> DataFile:
    """Replace a file by one with changed rows, by a commit with the right statistics."""
    path = Path(opened.uri) / item.path
    table = pq.ParquetFile(path).read()
    rows = change(table.to_pylist())
    made = add_rows(opened, item, rows, table.schema)
    tables.commit(opened, [made], {}, removals=[item], partition_by=groups(item))
    return made


def add_rows(opened: LakeTable, like: DataFile, rows: Rows, schema: pa.Schema) -> DataFile:
    """A file beside another one, in no commit yet."""
    path = like.path.removesuffix(".parquet") + "-b.parquet"
    full = Path(opened.uri) / path
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), full)
    offsets = [row["kafka"]["offset"] for row in rows] if "kafka" in schema.names else [None]
    return replace(like, path=path, size=full.stat().st_size, records=len(rows), first=offsets[0], last=offsets[-1])


def append_again(opened: LakeTable, item: DataFile) -> None:
    """Commit a copy of a file that is in the table already."""
    path = Path(opened.uri) / item.path
    copy = path.with_name("again-" + path.name)
    copy.write_bytes(path.read_bytes())
    again = replace(item, path=str(copy.relative_to(opened.uri)))
    tables.commit(opened, [again], {}, partition_by=groups(item))


def take_out(opened: LakeTable, *items: DataFile) -> None:
    """Remove files from the table by a commit."""
    tables.commit(opened, [], {}, removals=items, partition_by=groups(items[0]))


def groups(item: DataFile) -> list[str]:
    return [] if item.group is None else ["topic"]


def change_account(state: StagingState, change: Callable[[Rows], Rows], *, head: bool = False) -> None:
    """Change the account's rows (without their wrapping) in every ledger file, or in the head."""

    def wrapped(rows: Rows) -> Rows:
        return [{"account": row} for row in change([row["account"] for row in rows])]

    heads = [item for item in state.files if "/head-" in item.path]
    for item in heads if head else state.ledger_files:
        overwrite(state.table, item, wrapped)


def edit(change: Callable[[dict[str, Any]], dict[str, Any] | None], **where: object) -> Callable[[Rows], Rows]:
    """Apply ``change`` to the rows that have these values; None removes a row."""

    def run(rows: Rows) -> Rows:
        made = [change(row) if where.items() <= row.items() else row for row in rows]
        return [row for row in made if row is not None]

    return run
