"""Single columns and single rows of a table's Parquet files, read without Spark.

Columns come as Arrow batches or numpy arrays, a bounded number of rows at a time. Rows are found by their offsets: only
the files and row groups that can hold a row are read. ``RecentCache`` keeps what was read, up to a bounded size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.arrays import pc, python_rows
from zync_assets.errors import LakeError
from zync_assets.lake import storage, stores
from zync_assets.lake.log import DataFile
from zync_assets.offsets import OffsetRange

ROWS = 131_072
"""Rows in memory at once."""


RESTORE = "Restore it from a copy."
"""The last words of a DamagedFile."""
MISSING = "is in the log and not in the lake"
"""The words of a DamagedFile about a missing file."""


class DamagedFile(Exception):
    """A file that the log names is not there or is no Parquet: a finding, not an outage."""


def read_columns(uri: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The leaf columns (dotted paths) of a Parquet file, batch by batch. Raises DamagedFile, or LakeError where the
    store refuses."""
    system, path = storage.filesystem(uri)
    try:
        with pq.ParquetFile(path, filesystem=system) as file:
            for batch in file.iter_batches(ROWS, columns=list(columns)):
                plain = pa.schema([item.with_type(_plain_type(item.type)) for item in batch.schema])
                yield batch if plain.equals(batch.schema) else batch.cast(plain)
    except FileNotFoundError:
        raise DamagedFile(f"file {uri} {MISSING}. {RESTORE}") from None
    except pa.ArrowInvalid as error:
        raise DamagedFile(f"file {uri} can't be read: {stores.first_line(error)}. {RESTORE}") from None
    except OSError as error:
        # Arrow raises a bare OSError for bytes that make no sense; the operating system's own carry a number.
        if error.errno is None:
            raise DamagedFile(f"file {uri} can't be read: {stores.first_line(error)}. {RESTORE}") from None
        raise storage.failure(uri, error, f"file {uri} can't be read: {error}") from error


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type with text and bytes as we write them: other programs write them large, or as views."""
    kinds = pa.types
    if kinds.is_string_view(kind) or kinds.is_large_string(kind):
        return pa.string()
    if kinds.is_binary_view(kind) or kinds.is_large_binary(kind):
        return pa.binary()
    if kinds.is_struct(kind):
        return pa.struct([item.with_type(_plain_type(item.type)) for item in kind])
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    return kind


def positions(uri: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``kafka.partition`` and ``kafka.offset`` of a file's rows, as int64, batch by batch. A null counts as -1."""
    for batch in read_columns(uri, ["kafka.partition", "kafka.offset"]):
        kafka = pa.Table.from_batches([batch]).flatten()
        yield integers(kafka["kafka.partition"]), integers(kafka["kafka.offset"])


def integers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """An integer column as int64, nulls as -1 (no Kafka number is negative)."""
    return np.asarray(column.fill_null(-1).to_numpy(), dtype=np.int64)


def distinct(numbers: np.ndarray) -> np.ndarray:
    """The numbers without doubles, sorted. numpy's own ``unique`` hashes, which takes almost a second for a million numbers
    in a row; these are mostly sorted already."""
    sorted_numbers = np.sort(numbers, kind="stable")
    keep = np.ones(len(sorted_numbers), dtype=bool)
    keep[1:] = sorted_numbers[1:] != sorted_numbers[:-1]
    return sorted_numbers[keep]


def difference(numbers: np.ndarray, exclusions: np.ndarray) -> np.ndarray:
    """The numbers that are not among ``exclusions``, sorted and without doubles."""
    return np.setdiff1d(distinct(numbers), distinct(exclusions), assume_unique=True)


class FileOffsets:
    """The offsets of one partition's files, for spans in ascending order. A file is read when a span first touches it. The file
    leaves the memory when the spans are past it."""

    def __init__(self, table_uri: str, files: Sequence[DataFile]) -> None:
        self._uri = table_uri
        self._files = list(files)
        self._offsets: dict[str, np.ndarray] = {}

    def between(self, first: int, end: int) -> np.ndarray:
        """Offsets with ``first <= offset < end``, in no particular order, each as often as it occurs."""
        self._files = [item for item in self._files if (item.last or 0) >= first]
        paths = {item.path for item in self._files if (item.first or 0) < end}
        self._offsets = {path: self._offsets[path] if path in self._offsets else self._load(path) for path in paths}
        parts = [offsets[(offsets >= first) & (offsets < end)] for offsets in self._offsets.values()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _load(self, path: str) -> np.ndarray:
        parts = [offsets for _, offsets in positions(storage.join(self._uri, path))]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def rows_at(
    table_uri: str, files: Iterable[DataFile], partition: int, offsets: Sequence[int], columns: Sequence[str]
) -> dict[int, dict[str, Any]]:
    """Offset → the row, as plain Python values; an offset that is not there is left out.

    ``columns`` are read besides ``kafka``; one that a file lacks is left out. Maps become dicts.
    Raises LakeError for a file that can't be read.
    """
    rows: dict[int, dict[str, Any]] = {}
    for item in files:
        candidates = [offset for offset in offsets if (item.first or 0) <= offset <= (item.last or 0)]
        if item.partition == partition and candidates:
            uri = storage.join(table_uri, item.path)
            try:
                rows |= _read(uri, candidates, columns)
            except (OSError, pa.ArrowInvalid) as error:
                raise LakeError(
                    f"file {uri} can't be read: {stores.first_line(error)}. Restore it from a copy."
                ) from error
    return rows


def rows_within(
    table_uri: str, files: Iterable[DataFile], ranges: Sequence[OffsetRange], fields: Sequence[tuple[str, ...]]
) -> Iterator[pa.RecordBatch]:
    """The rows of files in some offset ranges, batch by batch, in the files' order.

    ``fields``: columns, or fields of them as paths, with ``kafka.offset`` among them. A field that a file lacks is left out. Of
    a column without any of its fields, the whole column comes. Raises LakeError for a file that can't be read.
    """
    for item in files:
        uri = storage.join(table_uri, item.path)
        parts = [part for part in ranges if part.partition == item.partition]
        low, high = min(part.first for part in parts), max(part.end for part in parts) - 1
        is_whole = item.lies_in(parts)
        system, path = storage.filesystem(uri)
        with storage.access_errors(uri, "can't be read"), pq.ParquetFile(path, filesystem=system) as file:
            groups = None if is_whole else _groups(file.metadata, low, high)
            for batch in storage.read_batches(file, ROWS, _column_paths(file.metadata, fields), groups):
                rows = batch if is_whole else batch.filter(_inside(batch, parts))
                if rows.num_rows:
                    yield rows


def field_of(batch: pa.RecordBatch, path: Sequence[str], kind: pa.DataType) -> pa.Array:
    """A field of a batch's records with a type that holds its values; nulls, if the batch lacks the field."""
    column_name, *field_names = path
    if column_name not in batch.schema.names:
        return pa.nulls(batch.num_rows, kind)
    values = batch.column(column_name)
    for name in field_names:
        at = values.type.get_field_index(name)
        if at < 0:
            return pa.nulls(batch.num_rows, kind)
        values = pc.struct_field(values, [at])
    # An integer may be in a column of a file from before the column became a double: such a double is the nearest one.
    return values if values.type == kind else values.cast(kind, safe=not pa.types.is_floating(kind))


def _column_paths(footer: pq.FileMetaData, fields: Sequence[tuple[str, ...]]) -> list[str]:
    """The columns to read from a file. Any field of a struct tells whether the struct is null."""
    leaves = [footer.schema.column(number).path for number in range(footer.num_columns)]
    paths = {field: ".".join(field) for field in fields}
    file_fields = [
        field for field, path in paths.items() if any(leaf == path or leaf.startswith(f"{path}.") for leaf in leaves)
    ]
    columns = dict.fromkeys(first for first, *_ in fields)
    fieldless_columns = columns.keys() - {first for first, *_ in file_fields}
    whole_columns = [
        name for name in columns if name in fieldless_columns and any(leaf.startswith(f"{name}.") for leaf in leaves)
    ]
    return [*(paths[field] for field in file_fields), *whole_columns]


def _inside(batch: pa.RecordBatch, parts: Sequence[OffsetRange]) -> pa.Array:
    """By row: whether its offset lies in a range."""
    offsets = pc.struct_field(batch.column("kafka"), "offset")
    spans = [pc.and_(pc.greater_equal(offsets, part.first), pc.less(offsets, part.end)) for part in parts]
    return reduce(pc.or_, spans)


def _read(uri: str, offsets: Sequence[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    system, path = storage.filesystem(uri)
    with pq.ParquetFile(path, filesystem=system) as file:
        groups = _groups(file.metadata, min(offsets), max(offsets))
        names = [name for name in ("kafka", *columns) if name in file.schema_arrow.names]
        wanted_offsets = pa.array(offsets, pa.int64())
        rows: dict[int, dict[str, Any]] = {}
        for batch in storage.read_batches(file, 20_000, names, groups):
            batch_offsets = pc.struct_field(batch.column("kafka"), "offset")
            for row in python_rows(batch.filter(pc.is_in(batch_offsets, wanted_offsets))):
                rows[row["kafka"]["offset"]] = row
        return rows


def _groups(footer: pq.FileMetaData, low: int, high: int) -> list[int]:
    """The row groups whose statistics don't rule out an offset between ``low`` and ``high``."""
    names = [footer.schema.column(i).path for i in range(footer.num_columns)]
    column = names.index("kafka.offset")
    groups: list[int] = []
    for group in range(footer.num_row_groups):
        span = footer.row_group(group).column(column).statistics
        if span is None or not span.has_min_max or (span.min <= high and low <= span.max):
            groups.append(group)
    return groups


K = TypeVar("K")
V = TypeVar("V")


class RecentCache(Generic[K, V]):
    """A cache of a bounded size, for processes that live for months. It keeps the most recently used values. The weights of its
    values add up to at most ``most``, unless it holds a single value."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        with self._lock:
            self._remove(key)
            self._values[key] = value, weight
            self._weight += weight
            while self._weight > self._most and len(self._values) > 1:
                self._remove(next(iter(self._values)))

    def load(self, key: K, make: Callable[[], V], weight: Callable[[V], int]) -> V:
        """The value of a key; ``make`` makes a missing value. Two threads may make the same value."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value, weight(value))
        return value

    def remove(self, key: K) -> None:
        with self._lock:
            self._remove(key)

    def _remove(self, key: K) -> None:
        if key in self._values:
            self._weight -= self._values.pop(key)[1]
