"""The state of a table in files: written by Spark, and read with as few files and columns as a look-up allows.

Files are sorted by the place of their keys (``tables.place_sql``). The Delta log has the least and the greatest place of each
file, so that a look-up of few keys opens few files. A look-up lists the wanted values: Spark hands a list of up to
``spark.sql.parquet.pushdown.inFilterThreshold`` values to Parquet, which skips pages. Spark compiles the same code for any list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from zync_assets.etl.views.tables import VERSION, Table, TableType, place_sql
from zync_assets.lake import storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import ORDER
from zync_assets.lake.staging import StagingState
from zync_assets.spark import frames
from zync_assets.spark.sql import listed_sql, long_sql, name_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROW_GROUP = 32 << 20
"""Bytes of a row group, before compression."""
PAGE_RECORDS = 1_000
"""Records of a page. Parquet has the least and the greatest value of each page, so that a look-up reads the pages that may hold
a wanted value."""

Range = tuple[int, int]
"""The least and the greatest value."""


@dataclass(frozen=True)
class Places:
    """The places of wanted keys. ``highs``: sorted, the first part of each place; ``hashes``: of the whole keys, if their
    places are not distinct enough."""

    highs: Sequence[int]
    hashes: Sequence[int] = ()

    def may_be_in(self, item: DataFile) -> bool:
        """Whether a file may have one of the keys."""
        if item.min_order is None or item.max_order is None:
            return True
        at = bisect_left(self.highs, item.min_order[0])
        return at < len(self.highs) and self.highs[at] <= item.max_order[0]

    def condition(self, high: str, key: str) -> str:
        """The condition of these keys, as SQL. Other keys may have it too."""
        hashed = f" AND xxhash64({key}) IN ({', '.join(map(long_sql, self.hashes))})" if self.hashes else ""
        return f"{listed_sql(high, [long_sql(value) for value in self.highs])}{hashed}"


@dataclass(frozen=True)
class StateFiles:
    """The files of a table's state. ``versions``: of rows; ``replaced``: the versions that are no longer live."""

    versions: Sequence[DataFile] = ()
    replaced: Sequence[DataFile] = ()

    def __add__(self, other: StateFiles) -> StateFiles:
        return StateFiles((*self.versions, *other.versions), (*self.replaced, *other.replaced))

    @property
    def all(self) -> tuple[DataFile, ...]:
        return (*self.versions, *self.replaced)

    @property
    def records(self) -> int:
        """The number of live versions."""
        return sum(item.records for item in self.versions) - sum(item.records for item in self.replaced)


def state_files(state: StagingState | None, table: Table) -> StateFiles:
    """The files of a table in a version of the staging table."""
    files = () if state is None else state.files
    versions, replaced = ([item for item in files if item.group == name] for name in (table.versions, table.replaced))
    return StateFiles(versions, replaced)


@dataclass(frozen=True)
class Reader:
    """Reads the state of tables. ``uri``: the staging table."""

    spark: SparkSession = field(repr=False)
    uri: str
    _frames: dict[tuple[str, ...], DataFrame] = field(default_factory=dict, repr=False, compare=False)
    """Of some files: Spark lists the files of each new frame."""

    def rows(self, kind: TableType, files: Sequence[DataFile], places: Places | None = None) -> DataFrame:
        """The rows of some files: ``key``, ``row``, ``version``. ``places``: of the wanted keys; a few others may be there."""
        table = kind.table
        wanted = files if places is None else [item for item in files if places.may_be_in(item)]
        place = (table.name, *(item.path for item in wanted))
        frame = self._frames.get(place)
        if frame is None:
            frame = self._frames[place] = frames.parquet_frame(self.spark, self.uri, wanted, kind.schema, _READING)
        if places is not None:
            frame = frame.where(places.condition(f"{name_sql(ORDER)}.high", name_sql(table.key_column)))
        return frame.selectExpr(f"{name_sql(table.key_column)} AS key", f"{name_sql(table.row_column)} AS row", VERSION)

    def live(self, kind: TableType, files: StateFiles) -> DataFrame:
        """The live versions of rows, deleted ones (null) too: ``key``, ``row``, ``version``."""
        found = self.rows(kind, files.versions)
        return without_versions(found, self.rows(kind, files.replaced)) if files.replaced else found


def without_versions(frame: DataFrame, replaced: DataFrame) -> DataFrame:
    """The versions that are not among the replaced ones."""
    from pyspark.sql import functions as F

    gone = replaced.selectExpr("version.partition AS gone_partition", "version.offset AS gone_offset")
    same = F.expr("version.partition = gone_partition AND version.offset = gone_offset")
    return frame.join(gone, same, "left_anti")


_READING = {
    # Parquet would decode a dictionary once for each of the listed values.
    "parquet.filter.dictionary.enabled": "false",
    "parquet.filter.bloom.enabled": "false",
}
_WRITING = {
    # A marker file that nothing here reads.
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # The numbers of a version are in order, and take little room: two thirds of what snappy makes of a file.
    "compression": "zstd",
    "parquet.block.size": str(ROW_GROUP),
    "parquet.page.row.count.limit": str(PAGE_RECORDS),
}


def write_state(frame: DataFrame, kind: TableType, uri: str, folder: str, *, small: bool) -> StateFiles:
    """Write versions of rows as files of the staging table, which no commit names yet.

    ``frame``: ``key``, ``row``, ``version``, and ``gone`` (1: a replaced version, else 0). ``folder``: below the table.
    """
    table = kind.table
    rows = frame.selectExpr(
        "gone",
        f"{place_sql('key', kind.state_key)} AS {name_sql(ORDER)}",
        VERSION,
        f"key AS {name_sql(table.key_column)}",
        f"row AS {name_sql(table.row_column)}",
    )
    rows = rows.coalesce(1) if small else rows
    order = name_sql(ORDER)
    rows = rows.selectExpr("*", f"{order}.high AS high", f"{order}.low AS low")
    rows = rows.sortWithinPartitions("gone", "high", "low").drop("high", "low")
    place = storage.join(uri, folder)
    rows.write.partitionBy("gone").options(**_WRITING, **storage.spark_options(uri)).parquet(storage.spark_path(place))
    found: list[list[DataFile]] = []
    for gone, group in ((0, table.versions), (1, table.replaced)):
        below = f"{folder}/gone={gone}"
        paths = storage.list_files(storage.join(uri, below), ".parquet")
        found.append([item for name in paths if (item := _state_file(uri, f"{below}/{name}", group)).records])
    return StateFiles(*found)


def _state_file(uri: str, path: str, group: str) -> DataFile:
    """The log entry of a file that Spark wrote."""
    place = storage.join(uri, path)
    system, full = storage.filesystem(place)
    with storage.access_errors(place, "can't be read"):
        about = pq.read_metadata(full, filesystem=system)
    bounds = [_bounds(about, name) for name in (f"{ORDER}.high", f"{ORDER}.low")]
    low, high = ((bounds[0][at], bounds[1][at]) for at in (0, 1))
    size = storage.file_size(place)
    return DataFile(path, size, about.num_rows, group=group, min_order=low, max_order=high)


def _bounds(about: pq.FileMetaData, name: str) -> Range:
    """The least and the greatest value of a column of numbers without nulls."""
    found: list[Range] = []
    for at in range(about.num_row_groups):
        group = about.row_group(at)
        column = next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == name)
        found.append((column.statistics.min, column.statistics.max))
    return min((low for low, _ in found), default=0), max((high for _, high in found), default=0)
