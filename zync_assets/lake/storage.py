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

from pathlib import Path

from pyarrow import fs

from zync_assets.errors import LakeError


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
