"""Storage: where the tables lie, the file system below the lake, and files from before a column was widened.

    <lake>/<Pool>/<topic>               a raw table
    <lake>/<Pool>                       a staging table
    <lake>/~quarantine/<Pool>/<topic>   the side table of a raw table: records that could not be decoded
    <lake>/~decoded/<Pool>/<topic>      the types of a topic whose records are shaped on the way in; no record
    <lake>/~published/<Pool>            how far a staging pool has been published
    <lake>/~checked/<Pool>              the results of a pool's blocking checks
    <lake>/~readings/<Pool>.json        the last ends of the topics of a raw pool

A tilde is legal neither in a pool's name nor in a topic's, so side tables can't collide with tables. Topic names are
legal folder names as they are: Kafka allows ``[a-zA-Z0-9._-]`` and refuses ``.`` and ``..``.

When a column gets a wider type, older files stay as they are, and a reader widens their values. delta-rs, DuckDB and Spark's
Parquet reader widen the changes that the Delta protocol lists under "Supported Type Changes". The tables do without the
protocol's feature ``typeWidening``, because delta-rs 1.6 refuses tables with this feature and no reader needs the feature.

Spark's reader refuses one change that Avro allows: a long that became a double. The schema marks such a column, and its
files are read by their own types and cast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs

from zync_assets.codecs.evolution import holds
from zync_assets.errors import LakeError, SchemaError
from zync_assets.lake import stores
from zync_assets.pipeline import NO_SETTINGS, LakeUri

BATCH_BYTES = 64 << 20
"""The most bytes of a Parquet file's rows, before compression, that are read at once."""
_FOOTERS = 16
"""Footers of files that are read side by side."""


def join(base: str, *parts: str) -> str:
    """A path or URI below another, opened by the same settings."""
    path = "/".join([base.rstrip("/"), *parts])
    return LakeUri(path, base.settings) if isinstance(base, LakeUri) else path


def raw_uri(lake: str, pool: str, topic: str) -> str:
    return join(lake, pool, topic)


def staging_uri(lake: str, pool: str) -> str:
    return join(lake, pool)


def quarantine_uri(lake: str, pool: str, topic: str) -> str:
    return join(lake, "~quarantine", pool, topic)


def decoded_uri(lake: str, pool: str, topic: str) -> str:
    return join(lake, "~decoded", pool, topic)


def publish_uri(lake: str, pool: str) -> str:
    return join(lake, "~published", pool)


def check_uri(lake: str, pool: str) -> str:
    return join(lake, "~checked", pool)


def log_cure(uri: str) -> str:
    """What to do about a table whose Delta log can't be read."""
    place = uri.split("/")[-2:-1]
    if place == ["~published"]:
        return "Remove the folder of this table: publishing then compares the topics with staging again, and goes on."
    if place == ["~checked"]:
        return "Remove the folder of this table, which holds results of checks alone. Then run the checks again."
    return "Restore its files from a copy."


def readings_uri(lake: str, pool: str) -> str:
    return join(lake, "~readings", f"{pool}.json")


def is_store(uri: str) -> bool:
    """Whether a lake is in an object store, not in a folder."""
    return "://" in uri


def is_s3(uri: str) -> bool:
    return stores.scheme(uri) in ("s3", "s3a")


def filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """The Arrow file system of a path or URI, and the path in it. delta-rs opens an object store, so that files and log are
    opened by the same settings.

    The methods of a store's file system raise LakeError if the store is unreachable or refuses a request. They raise
    FileNotFoundError only if a file is missing.
    """
    if not is_store(uri):
        return fs.LocalFileSystem(), str(Path(uri).absolute())
    root, _, path = uri.partition("://")[2].partition("/")
    return _store(f"{uri.partition('://')[0]}://{root}", tuple(sorted(settings(uri).items()))), path


@lru_cache(64)
def _store(root: str, items: tuple[tuple[str, str], ...]) -> fs.FileSystem:
    place = LakeUri(root, dict(items))
    with _store_errors(place):
        return fs.PyFileSystem(_Bucket(place))


class _Bucket(DeltaStorageHandler):
    """delta-rs's file system of a bucket, with errors of our own."""

    def __init__(self, root: str) -> None:
        super().__init__(root, delta_options(root))
        self._root = root

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        with _store_errors(self._root):
            return super().get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        with _store_errors(self._root):
            return super().get_file_info_selector(selector)

    def open_input_file(self, path: str) -> pa.PythonFile:
        with _store_errors(self._root):
            return super().open_input_file(path)

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> pa.PythonFile:
        with _store_errors(self._root):
            return super().open_output_stream(path, metadata)

    def delete_file(self, path: str) -> None:
        with _store_errors(self._root):
            super().delete_file(path)


@contextmanager
def _store_errors(root: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if (refusal := stores.refusal(root, settings(root), error)) is not None:
            raise refusal from None
        raise
    except (OSError, ValueError, DeltaError) as error:
        raise failure(root, error, f"lake {root}: {stores.first_line(error)}") from None


def failure(uri: str, error: Exception, otherwise: str) -> LakeError:
    """zync's error for an error of a library. ``otherwise``: the message if the store did not refuse anything."""
    refusal = (
        stores.refusal(uri, settings(uri), error) if is_store(uri) else stores.disk_refusal(f"lake {uri}", str(error))
    )
    return refusal or LakeError(otherwise)


@contextmanager
def access_errors(uri: str, doing: str) -> Generator[None]:
    """Raises LakeError for an error of the system while a file is read or written. ``doing``: the failed action, such as
    ``can't be read``."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise failure(
            uri,
            error,
            f"file {uri} {doing}: {stores.first_line(error)}. Restore it from a copy, or give this user the right to it.",
        ) from None


def settings(uri: str) -> Mapping[str, str]:
    """The settings that open a place in the lake."""
    return uri.settings if isinstance(uri, LakeUri) else NO_SETTINGS


def delta_options(uri: str) -> dict[str, str] | None:
    """delta-rs's storage options for a place in the lake; None for a folder."""
    return stores.delta_options(uri, settings(uri)) if is_store(uri) else None


def spark_options(uri: str) -> dict[str, str]:
    """The options with which Spark reads and writes Parquet files in the lake. They belong to one reader or writer. No process
    argument, page or configuration of a session shows them."""
    return stores.hadoop_options(uri, settings(uri)) if is_store(uri) else {}


def spark_path(uri: str) -> str:
    """The place as Hadoop's file systems call it."""
    return "s3a" + uri[2:] if uri.startswith("s3://") else str(uri)


def spark_pattern(uri: str) -> str:
    """The place as Spark reads it. Spark takes a path for a pattern, in which a backslash makes a character mean itself."""
    return re.sub(r"([][{}*?\\])", r"\\\1", spark_path(uri))


def make_folder(uri: str) -> None:
    """Create a folder and those above it; a store without folders needs none."""
    if is_store(uri):
        return
    system, path = filesystem(uri)
    try:
        system.create_dir(path, recursive=True)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise failure(uri, error, f"lake {uri}: can't create the folder: {reason}") from None


def file_size(uri: str) -> int:
    """The size of a file in bytes; LakeError for a missing file."""
    system, path = filesystem(uri)
    info = system.get_file_info(path)
    if info.type != fs.FileType.File:
        raise LakeError(f"file {uri} is not there: another program removed it. Restore it from a copy.")
    return int(info.size or 0)


@lru_cache(10_000)
def column_bounds(uri: str, *columns: str) -> list[tuple[int | None, int | None]]:
    """As ``footer_bounds``, of a Parquet file. LakeError if the file can't be read."""
    system, path = filesystem(uri)
    with access_errors(uri, "can't be read"):
        return footer_bounds(pq.read_metadata(path, filesystem=system), *columns)


def footer_bounds(footer: pq.FileMetaData, *columns: str) -> list[tuple[int | None, int | None]]:
    """The least and the greatest value of some leaf columns (dotted paths), by the footer of a Parquet file. The least is None
    if some rows have no value. Both are None if no row has a value."""
    groups = [footer.row_group(place) for place in range(footer.num_row_groups)]
    chunks = [group.column(place) for group in groups for place in range(group.num_columns)]
    bounds: list[tuple[int | None, int | None]] = []
    for name in columns:
        parts = [chunk.statistics for chunk in chunks if chunk.path_in_schema == name]
        lows, highs = ([getattr(part, side) for part in parts if part and part.has_min_max] for side in ("min", "max"))
        is_whole = bool(parts) and len(lows) == len(parts) and not any(part.null_count for part in parts)
        bounds.append((min(lows) if is_whole else None, max(highs, default=None)))
    return bounds


def read_file(uri: str, columns: Sequence[str] | None = None) -> pa.Table:
    """A Parquet file, or some leaf columns (dotted paths) of it. A column that the file lacks is left out.

    LakeError if the file can't be read.
    """
    system, path = filesystem(uri)
    with access_errors(uri, "can't be read"), pq.ParquetFile(path, filesystem=system) as file:
        return file.read(columns=None if columns is None else list(columns))


def read_parts(uri: str, most: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """As ``read_file``, in batches of ``most`` rows at the most."""
    system, path = filesystem(uri)
    with access_errors(uri, "can't be read"), pq.ParquetFile(path, filesystem=system) as file:
        yield from read_batches(file, most, columns)


def read_batches(
    file: pq.ParquetFile, most: int, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, or of some row groups, in batches of ``most`` rows at the most, fewer where they are large:
    a batch has some 64 MiB."""
    footer = file.metadata
    places = range(footer.num_row_groups) if groups is None else groups
    sizes = [(footer.row_group(place).total_byte_size, footer.row_group(place).num_rows) for place in places]
    mean = max((size / rows for size, rows in sizes if rows), default=1.0)
    count = max(1, min(most, int(BATCH_BYTES / max(1.0, mean))))
    yield from file.iter_batches(count, row_groups=None if groups is None else list(groups), columns=columns)


def abandon(writer: pq.ParquetWriter) -> None:
    """Close the file of a writer after an error. The file may not be whole, and no commit is to name it."""
    with suppress(OSError, pa.ArrowException):
        writer.close()
    if writer.file_handle is not None:
        with suppress(OSError, pa.ArrowException):
            writer.file_handle.close()


def require_files(uri: str, paths: Sequence[str]) -> None:
    """LakeError for a Parquet file of a table that is missing, cut off or no Parquet. Reads the footers of the files alone."""

    def require(path: str) -> None:
        place = join(uri, path)
        system, name = filesystem(place)
        with access_errors(place, "can't be read"):
            pq.read_metadata(name, filesystem=system)

    with ThreadPoolExecutor(_FOOTERS) as threads:
        for _ in threads.map(require, paths):
            pass


def absent_file(uri: str, paths: Sequence[str]) -> str | None:
    """The first of some files below a folder that is not there; None if all are there. LakeError if the store refuses."""
    system, base = filesystem(uri)

    def is_there(path: str) -> bool:
        with access_errors(join(uri, path), "can't be found"):
            return system.get_file_info(join(base, path)).is_file

    if not is_store(uri):
        # A thread costs more than a look into a folder.
        return next((path for path in paths if not is_there(path)), None)
    with ThreadPoolExecutor(_FOOTERS) as threads:
        return next((path for path, there in zip(paths, threads.map(is_there, paths), strict=True) if not there), None)


def remove_files(uri: str, prefix: str = "") -> None:
    """Remove the Parquet files below a folder that no commit names. If the store refuses to remove a file, a later clean-up
    removes it. ``prefix``: of the files' paths below the folder."""
    system, path = filesystem(uri)
    with suppress(LakeError, OSError):
        for name in list_files(uri, ".parquet"):
            if name.startswith(prefix):
                system.delete_file(join(path, name))


@contextmanager
def uncommitted(*uris: str, prefix: str = "") -> Generator[None]:
    """A step that writes files below some folders, before their commit. If the step fails, the files are removed: a failed step
    is repeated as long as its cause lasts, and each repetition writes others. ``prefix``: as in ``remove_files``."""
    try:
        yield
    except BaseException:
        for uri in uris:
            remove_files(uri, prefix)
        raise


def remove_folder(uri: str) -> None:
    """Remove a folder and its contents. The log of a table is removed first: a folder without a log is no table."""
    system, path = filesystem(uri)
    with access_errors(uri, "can't be removed"):
        for place in (join(path, "_delta_log"), path):
            if system.get_file_info(place).type != fs.FileType.NotFound:
                system.delete_dir(place)


def remove_file(uri: str) -> None:
    """Remove a file that no commit names. If the store refuses to remove it, a later clean-up does."""
    system, path = filesystem(uri)
    with suppress(LakeError, OSError):
        system.delete_file(path)


def list_files(uri: str, suffix: str) -> list[str]:
    """Paths below a folder, relative to it, that end in ``suffix``; sorted. An absent folder is empty.

    Without what Hadoop hides (names that begin with ``_`` or a dot): a Spark task that is no longer waited for, as a
    speculative one, may still write below ``_temporary``.
    """
    return sorted(path for path, _ in files_with_times(uri, suffix))


def files_with_times(uri: str, suffix: str) -> list[tuple[str, float]]:
    """The same paths in no order, each with the time when the file was written, in seconds since the epoch."""
    system, path = filesystem(uri)
    selector = fs.FileSelector(path, allow_not_found=True, recursive=True)
    base = path.rstrip("/") + "/"
    files = [
        (info.path.removeprefix(base), (info.mtime_ns or 0) / 1e9)
        for info in system.get_file_info(selector)
        if info.type == fs.FileType.File and info.path.endswith(suffix)
    ]
    return [file for file in files if not any(part.startswith(("_", ".")) for part in file[0].split("/"))]


_LONGS = b"zync.longs"
"""On a column: some files hold a long where the table has a double."""


def wider_schema(old: pa.Schema, new: pa.Schema) -> pa.Schema:
    """The columns of ``old``, with those of ``new`` in their places or after them.

    SchemaError names a column whose values the new type has no room for.
    """
    fields = {field.name: field for field in old}
    for field in new:
        if field.name in fields and not holds(field.type, fields[field.name].type):
            raise SchemaError(
                f"column {field.name}: {field.type} does not hold what is there, {fields[field.name].type}"
            )
        notes = dict(fields[field.name].metadata or {}) if field.name in fields else {}
        notes |= field.metadata or {}
        if field.name in fields and has_longs(fields[field.name].type, field.type):
            notes[_LONGS] = b"true"
        fields[field.name] = pa.field(field.name, field.type, metadata=notes or None)
    return pa.schema(list(fields.values()))


def has_longs(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether a long of the first type is a double in the second."""
    kinds = pa.types
    if kinds.is_struct(old) and kinds.is_struct(new):
        types = {item.name: item.type for item in new}
        return any(item.name in types and has_longs(item.type, types[item.name]) for item in old)
    if kinds.is_list(old) and kinds.is_list(new):
        return has_longs(old.value_type, new.value_type)
    if kinds.is_map(old) and kinds.is_map(new):
        return has_longs(old.key_type, new.key_type) or has_longs(old.item_type, new.item_type)
    return kinds.is_int64(old) and kinds.is_float64(new)


def by_own_types(uri: str, paths: Sequence[str], schema: pa.Schema) -> list[tuple[pa.Schema, list[str]]]:
    """The files in groups, each with the schema that Spark can read them with: the table's, but for longs that the table
    has as doubles. Only tables with such a column look into their files (the footers)."""
    if not any(_LONGS in (field.metadata or {}) for field in schema):
        return [(schema, list(paths))]
    groups: dict[pa.Schema, list[str]] = {}
    for path in paths:
        system, place = filesystem(join(uri, path))
        file_types = {field.name: field.type for field in pq.read_schema(place, filesystem=system)}
        reader_schema = pa.schema(
            [
                pa.field(item.name, _with_longs(item.type, file_types[item.name])) if item.name in file_types else item
                for item in schema
            ]
        )
        groups.setdefault(reader_schema, []).append(path)
    return list(groups.items())


def _with_longs(table: pa.DataType, file: pa.DataType) -> pa.DataType:
    """The table's type, with the file's longs where the table has doubles."""
    kinds = pa.types
    if kinds.is_struct(table) and kinds.is_struct(file):
        types = {item.name: item.type for item in file}
        return pa.struct(
            [(item.name, _with_longs(item.type, types.get(item.name, item.type))) for item in table],
        )
    if kinds.is_list(table) and kinds.is_list(file):
        return pa.list_(_with_longs(table.value_type, file.value_type))
    if kinds.is_map(table) and kinds.is_map(file):
        key, item = _with_longs(table.key_type, file.key_type), _with_longs(table.item_type, file.item_type)
        return pa.map_(key, item)
    return file if kinds.is_float64(table) and kinds.is_int64(file) else table
