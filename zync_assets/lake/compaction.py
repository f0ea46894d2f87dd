"""Rewrites small neighbouring files of a table as one file, in offset order.

Each batch adds a file, so a pipeline that runs every second leaves thousands of files. delta-rs's own ``optimize.compact``
mixes the rows of files. Here a partition's records stay sorted, so that readers can still skip files by their offsets.
The records stay the same, and the commit says so (Delta protocol, "Add File and Remove File": ``dataChange`` false).
The old files stay on disk for present readers, until ``cleaning`` removes the files.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.merge import conform
from zync_assets.compute import pc
from zync_assets.errors import LakeError
from zync_assets.lake import raw, storage, tables, times
from zync_assets.lake.staging import ACCOUNT
from zync_assets.lake.tables import DataFile, Opened
from zync_assets.lake.writer import MAX_RECORDS

SMALL = 200_000
"""Records of a file up to which it is small."""
FILES = 32
"""Small files in a row before they become one."""
_NUMBER = "zync:compacted"
_BATCH = 50_000
_RESTORE = "Restore the table to a version before that was so."


def due(files: Iterable[DataFile], span: int | None = None) -> list[list[DataFile]]:
    """Runs of neighbours that are worth a file of their own. The account and replays stay as they are.

    ``span``: milliseconds between the times of a run's records at the most, where old ones are to go, file by file.
    """
    found: list[list[DataFile]] = []
    own = [item for item in files if item.partition is not None and item.group != ACCOUNT and not raw.is_replay(item)]
    own.sort(key=lambda item: (item.group or "", item.partition or 0, item.first or 0))
    for _, neighbours in groupby(own, key=lambda item: (item.group, item.partition, item.records <= SMALL)):
        found += [run for cut in _cut(list(neighbours), span) if len(run := _balanced(cut)) >= FILES]
    return found


def _cut(neighbours: Sequence[DataFile], span: int | None) -> Iterator[list[DataFile]]:
    run: list[DataFile] = []
    for item in neighbours:
        apart = span is not None and bool(run) and (item.max_time or 0) - (run[0].min_time or 0) > span
        if run and (apart or sum(each.records for each in run) + item.records > MAX_RECORDS):
            yield run
            run = []
        run.append(item)
    yield run


def _balanced(run: Sequence[DataFile]) -> list[DataFile]:
    """A run without its first files that hold more records than all later files together.

    With every rewrite of a record, the size of the record's file therefore at least doubles, however small the batches are.
    """
    rest = sum(item.records for item in run)
    for place, item in enumerate(run):
        rest -= item.records
        if item.records <= rest:
            return list(run[place:])
    return []


def alike(uri: str, run: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    """Cuts a run of files wherever a numeric column has another type from one file to the next. Omits parts of one file.

    The table's column may be wider, but publish encodes a staged record by the record's own output schema. A long past
    2^53 changes its value as a double, and the encoder of a long refuses a double. A float has other digits in JSON as a
    double.
    """
    part: list[DataFile] = []
    types: pa.DataType = pa.null()
    for item in run:
        own = _columns(uri, item)
        both = _joined(types, own)
        if both is None:
            if len(part) > 1:
                yield part
            part, both = [], own
        part.append(item)
        types = both
    if len(part) > 1:
        yield part


def _columns(uri: str, item: DataFile) -> pa.DataType:
    return pa.struct(list(_open(uri, item).schema_arrow))


def _joined(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type with the fields of both, and the wider of two integers; None where numbers are of two kinds."""
    kinds = pa.types
    if kinds.is_null(one) or kinds.is_null(other):
        return other if kinds.is_null(one) else one
    if kinds.is_struct(one) and kinds.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            both = _joined(fields.get(field.name, pa.null()), field.type)
            if both is None:
                return None
            fields[field.name] = both
        return pa.struct(list(fields.items()))
    if kinds.is_list(one) and kinds.is_list(other):
        inner = _joined(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    if kinds.is_map(one) and kinds.is_map(other):
        key, inner = _joined(one.key_type, other.key_type), _joined(one.item_type, other.item_type)
        return None if key is None or inner is None else pa.map_(key, inner)
    if kinds.is_integer(one) and kinds.is_integer(other):
        return max(one, other, key=lambda kind: kind.bit_width)
    return None if (_is_number(one) or _is_number(other)) and one != other else one


def _narrowed(table: pa.DataType, own: pa.DataType) -> pa.DataType:
    """The table's type, with numbers as the files have them."""
    kinds = pa.types
    if kinds.is_struct(table) and kinds.is_struct(own):
        types = {field.name: field.type for field in own}
        return pa.struct([item.with_type(_narrowed(item.type, types.get(item.name, item.type))) for item in table])
    if kinds.is_list(table) and kinds.is_list(own):
        return pa.list_(table.value_field.with_type(_narrowed(table.value_type, own.value_type)))
    if kinds.is_map(table) and kinds.is_map(own):
        return pa.map_(_narrowed(table.key_type, own.key_type), _narrowed(table.item_type, own.item_type))
    return own if _is_number(own) else table


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def rewrite(uri: str, run: Sequence[DataFile], schema: pa.Schema) -> DataFile:
    """Write the records of some files, which are ``alike``, as one; not yet committed. ``schema``: the table's, which all
    columns get, but for numbers: these keep the types that the files have.

    Raises LakeError if the files overlap or hold other than the log says.
    """
    own: pa.DataType | None = pa.null()
    for item in run:
        own = None if own is None else _joined(own, _columns(uri, item))
    if own is None:
        raise LakeError(f"table {uri}: files {run[0].path} to {run[-1].path} have numbers of different types")
    name = f"compact-{uuid.uuid4().hex}"
    group = run[0].group
    path = f"{name}.parquet" if group is None else f"{name}/topic={group}/part-0.parquet"
    storage.make_folder(storage.join(uri, *path.split("/")[:-1]))
    types = {field.name: field.type for field in own}
    kept = pa.schema([item.with_type(_narrowed(item.type, types[item.name])) for item in schema if item.name in types])
    system, full = storage.filesystem(storage.join(uri, path))
    records, last, reached = 0, -1, None
    with pq.ParquetWriter(full, kept, filesystem=system, compression="snappy") as writer:
        for item in run:
            for batch in storage.read_batches(_open(uri, item), _BATCH):
                made = _conformed(batch, kept, reached)
                offsets = pc.struct_field(made.column("kafka"), "offset").to_numpy()
                if offsets[0] <= last or (offsets[1:] <= offsets[:-1]).any():
                    raise LakeError(f"table {uri}, file {item.path}: its offsets are not in order. {_RESTORE}")
                records, last = records + len(offsets), int(offsets[-1])
                reached = times.last_time(made.column("kafka"))
                writer.write_batch(made)
    if records != sum(item.records for item in run):
        raise LakeError(f"table {uri}: files hold {records} records where the log says otherwise. {_RESTORE}")
    low = [item.min_time for item in run if item.min_time is not None]
    high = [item.max_time for item in run if item.max_time is not None]
    return DataFile(
        path,
        storage.file_size(storage.join(uri, path)),
        records,
        run[0].partition,
        run[0].first,
        run[-1].last,
        low[0] if low else None,
        max(high) if high else None,
        group,
    )


def _open(uri: str, item: DataFile) -> pq.ParquetFile:
    system, path = storage.filesystem(storage.join(uri, item.path))
    try:
        return pq.ParquetFile(path, filesystem=system)
    except (OSError, pa.ArrowInvalid) as error:
        raise LakeError(f"table {uri}, file {item.path} can't be read: {error}. Restore it from a copy.") from error


def _conformed(batch: pa.RecordBatch, schema: pa.Schema, reached: int | None) -> pa.RecordBatch:
    columns = [
        conform(batch.column(field.name), field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    place = schema.get_field_index("kafka")
    columns[place] = times.carried(columns[place], reached)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def commit(opened: Opened, made: Sequence[DataFile], runs: Sequence[Sequence[DataFile]]) -> None:
    """Put the written files in place of the runs. CommitConflict if another compaction came first."""
    tables.commit(
        opened,
        made,
        {_NUMBER: (opened.number(_NUMBER) or 0) + 1},
        removed=[item for run in runs for item in run],
        partition_by=opened.metadata.partition_columns,
        rewritten=True,
    )
