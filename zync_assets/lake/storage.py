"""Where things lie in the lake, and the file system below it.

    <lake>/<Pool>/<topic>               a raw table
    <lake>/<Pool>                       a staging table
    <lake>/~quarantine/<Pool>/<topic>   what could not be decoded, beside a raw table
    <lake>/~decoded/<Pool>/<topic>      the types of a topic whose records are shaped on the way in; no record
    <lake>/~published/<Pool>            how far a staging pool has been published

A tilde is legal neither in a pool's name nor in a topic's, so side tables can't collide with tables. Topic names are
legal folder names as they are: Kafka allows ``[a-zA-Z0-9._-]`` and refuses ``.`` and ``..``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from zync_assets.errors import LakeError

BATCH_BYTES = 64 << 20
"""Bytes of a Parquet file's rows, before compression, that are read at once."""


def join(base: str, *parts: str) -> str:
    """A path or URI below another."""
    return "/".join([base.rstrip("/"), *parts])


def raw_uri(lake: str, pool: str, topic: str) -> str:
    return join(lake, pool, topic)


def staging_uri(lake: str, pool: str) -> str:
    return join(lake, pool)


def quarantine_uri(lake: str, pool: str, topic: str) -> str:
    return join(lake, "~quarantine", pool, topic)


def decoded_uri(lake: str, pool: str, topic: str) -> str:
    return join(lake, "~decoded", pool, topic)


def published_uri(lake: str, pool: str) -> str:
    return join(lake, "~published", pool)


def filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """The Arrow file system of a path or URI, and the path in it."""
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).absolute())
    try:
        return fs.FileSystem.from_uri(uri)
    except (ValueError, OSError) as error:
        raise LakeError(f"lake {uri}: {error}. Give a folder or an object store's URI.") from error


def make_folder(uri: str) -> None:
    """Create a folder and those above it; a store without folders needs none."""
    system, path = filesystem(uri)
    try:
        system.create_dir(path, recursive=True)
    except OSError as error:
        raise LakeError(f"lake {uri}: can't create the folder: {error}") from error


def file_size(uri: str) -> int:
    """Bytes of a file; LakeError if it is not there."""
    system, path = filesystem(uri)
    info = system.get_file_info(path)
    if info.type != fs.FileType.File:
        raise LakeError(f"file {uri} is not there")
    return int(info.size or 0)


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


def list_files(uri: str, suffix: str) -> list[str]:
    """Paths below a folder, relative to it, that end in ``suffix``; sorted. An absent folder is empty."""
    system, path = filesystem(uri)
    selector = fs.FileSelector(path, allow_not_found=True, recursive=True)
    base = path.rstrip("/") + "/"
    return sorted(
        info.path.removeprefix(base)
        for info in system.get_file_info(selector)
        if info.type == fs.FileType.File and info.path.endswith(suffix)
    )
