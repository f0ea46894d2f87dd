"""The bytes of an archive's objects: records in Parquet, or as JSON lines that are packed by gzip. The error for lost objects.

The same records in the same order make the same bytes. JSON lines keep bytes, texts and the structure of values; the types of
other values come from a schema (``typed_value``).
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from itertools import islice, pairwise
from time import sleep
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from zync_assets.codecs.connect.payloads import odd_float_text
from zync_assets.errors import LakeError
from zync_assets.lake import storage, stores
from zync_assets.lake.archive import (
    JSON_LINES,
    PARQUET,
    SUFFIXES,
    ArchiveObject,
    Losses,
    find_losses,
    time_start,
    write_whole,
)

SMALL_BYTES = 5 << 20
"""An object below this size is merged with the records that follow it."""

LOOKS = 5
"""Seconds that a sink has to make an object."""

NAMED = 10
"""Objects that a text names."""

_BUFFER_BYTES = 8 << 20
"""The bytes of JSON lines that are read at once: each read from a store is a request."""

GROUP_ROWS = 50_000
"""Rows of a Parquet row group. The number is fixed, so that the same records make the same bytes."""


def write_object(archive: str, path: str, parts: Sequence[str]) -> None:
    """Write an object from its parts: loads in Parquet, and objects of its own format. The same records in the same order give
    the same bytes. FileNotFoundError if a part is missing."""
    if path.endswith(SUFFIXES[PARQUET]):
        schema = pa.unify_schemas([_schema(archive, part) for part in parts])
        write_whole(archive, path, lambda file: _write_parquet(file, schema, _batches(archive, parts)))
        return

    def write(file: BinaryIO) -> None:
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as gzip_file:
            for part in parts:
                if part.endswith(SUFFIXES[JSON_LINES]):
                    gzip_file.writelines(_lines(archive, part))
                    continue
                for batch in _batches(archive, [part]):
                    for row in batch.to_pylist():
                        gzip_file.write(json_line(row))

    write_whole(archive, path, write)


def _batches(archive: str, parts: Iterable[str]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        yield from storage.read_parts(_existing_file(archive, part)[0], GROUP_ROWS)


def _lines(archive: str, path: str) -> Iterator[bytes]:
    """The lines of an object of JSON lines. FileNotFoundError if the object is missing, LakeError if it can't be read."""
    uri, system, place = _existing_file(archive, path)
    with (
        storage.access_errors(uri, "can't be read"),
        system.open_input_stream(place, compression=None, buffer_size=_BUFFER_BYTES) as stream,
        gzip.GzipFile(fileobj=stream) as file,
    ):
        try:
            yield from file
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise _unreadable(archive, path, error) from None


def _existing_file(archive: str, part: str) -> tuple[str, fs.FileSystem, str]:
    """The URI of a part, and its path in a file system. FileNotFoundError if the part is missing."""
    uri = storage.join(archive, part)
    system, path = storage.filesystem(uri)
    if system.get_file_info(path).type != fs.FileType.File:
        raise FileNotFoundError(uri)
    return uri, system, path


def _schema(archive: str, part: str) -> pa.Schema:
    uri, system, path = _existing_file(archive, part)
    with storage.access_errors(uri, "can't be read"):
        return pq.read_schema(path, filesystem=system).remove_metadata()


def _write_parquet(file: BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        buffer = schema.empty_table()
        for batch in batches:
            buffer = pa.concat_tables([buffer, pa.Table.from_batches([widened(batch, schema)])])
            while buffer.num_rows >= GROUP_ROWS:
                writer.write_table(buffer.slice(0, GROUP_ROWS).combine_chunks(), row_group_size=GROUP_ROWS)
                buffer = buffer.slice(GROUP_ROWS)
        if buffer.num_rows:
            writer.write_table(buffer.combine_chunks(), row_group_size=GROUP_ROWS)


def widened(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns of a schema that may have more of them."""
    columns = [
        batch.column(item.name) if item.name in batch.schema.names else pa.nulls(batch.num_rows, item.type)
        for item in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def may_grow(archive: str, item: ArchiveObject, load: str) -> bool:
    """Whether an object is small, and takes the records of a load. LakeError if the object can't be read: nobody could make the
    longer object that a commit would name."""
    system, path = storage.filesystem(storage.join(archive, item.path))
    info = system.get_file_info(path)
    if info.type != fs.FileType.File or int(info.size or 0) >= SMALL_BYTES:
        return False
    if item.suffix != SUFFIXES[PARQUET]:
        check_object(archive, item)
        return True
    return _schema(archive, item.path).equals(_schema(archive, load))


def read_object(archive: str, item: ArchiveObject) -> Iterator[pa.RecordBatch]:
    """The records of a Parquet object: ``kafka``, ``key``, ``value``. LakeError if the object is missing, or can't be read."""
    try:
        yield from _batches(archive, [item.path])
    except FileNotFoundError:
        raise _missing_object_error(archive, item) from None


def read_lines(archive: str, item: ArchiveObject) -> Iterator[dict[str, Any]]:
    """The records of an object of JSON lines. LakeError if the object is missing, or can't be read."""
    try:
        for line in _lines(archive, item.path):
            row = json.loads(line)
            if not isinstance(row, dict) or "kafka" not in row:
                raise ValueError("a line is no record")
            yield row
    except FileNotFoundError:
        raise _missing_object_error(archive, item) from None
    except ValueError as error:
        raise _unreadable(archive, item.path, error) from None


def _unreadable(archive: str, path: str, error: Exception) -> LakeError:
    reason = stores.first_line(error)
    return LakeError(f"archive {archive}: the object {path} can't be read: {reason}. Restore it from a copy.")


def _missing_object_error(archive: str, item: ArchiveObject) -> LakeError:
    return LakeError(
        f"archive {archive}: the object {item.path} is gone. A sink that is at work may have merged it: run it again."
    )


def refuse_losses(archive: str, topic: str, since: int | None, until: int | None) -> bool:
    """LakeError for an object of the times that a sink made, and that is missing. Waits for a sink that makes objects at
    present. Returns whether the archive has a complete list of its objects."""
    losses = settled_losses(partial(find_losses, archive, topic))
    if losses is None:
        return False
    objects_of_times = set(within(losses.objects, since, until))
    lost_objects = [item for item in losses.lost if item in objects_of_times]
    if not lost_objects:
        return losses.is_whole
    deleted_paths = [item.path for item in lost_objects if item not in losses.unmade]
    if not deleted_paths:
        names = list_text([item.path for item in lost_objects])
        raise LakeError(f"archive {archive}: a sink has not made {names} yet. Run the sink again, or wait for its end.")
    raise LakeError(
        f"archive {archive}: a sink made {list_text(deleted_paths)},"
        f" which {'is' if len(deleted_paths) == 1 else 'are'} gone. Bring the files back from a copy."
        " If the lake still has the records, write --from Pool.Topic. Or leave out the time by --since or --until."
    )


def settled_losses(find: Callable[[], Losses | None]) -> Losses | None:
    """The losses of ``find``. A sink that is at work has LOOKS seconds to make its objects."""
    for _ in range(LOOKS):
        losses = find()
        if losses is None or not losses.unmade:
            return losses
        sleep(1)
    return find()


def check_object(archive: str, item: ArchiveObject) -> None:
    """LakeError for an object that can't be read: a Parquet file without a footer, or damaged gzip. A missing object is no error:
    a longer object may have taken its place in the meantime."""
    with suppress(FileNotFoundError):
        if item.suffix == SUFFIXES[PARQUET]:
            _schema(archive, item.path)
        else:
            deque(_lines(archive, item.path), maxlen=0)


def within(items: Sequence[ArchiveObject], since: int | None, until: int | None) -> list[ArchiveObject]:
    """The objects that may have records of the times. ``items``: by partition and offset."""
    selection: list[ArchiveObject] = []
    after: ArchiveObject | None = None
    end: int | None = None
    for item in reversed(items):
        # Time never runs back in a partition: the records of an object are from before the next interval.
        if after is None or after.partition != item.partition:
            end = None
        elif after.time != item.time:
            end = time_start(after.time)
        start, after = time_start(item.time), item
        is_early = since is not None and end is not None and end <= since
        is_late = until is not None and start is not None and start >= until
        if not (is_early or is_late):
            selection.append(item)
    return selection[::-1]


def gap_note(archive: str, items: Sequence[ArchiveObject]) -> str:
    """A note that names the gaps between objects; nothing if there are none."""
    gaps = [
        f"{before.path} and {item.path}"
        for before, item in pairwise(items)
        if item.partition == before.partition and item.first > before.last + 1
    ]
    if not gaps:
        return ""
    return (
        f"note: archive {archive}: offsets are missing between {list_text(gaps)}. Kafka may never have had them. The folder"
        " _zync, which would tell whether an object is lost, is not there, not whole, or of an earlier version."
    )


def list_text(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = f", and {len(names) - NAMED} others" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def json_line(row: Mapping[str, Any]) -> bytes:
    """A record as a JSON line. Bytes are ``{"base64": …}``, decimals are texts with all digits, and times are ISO 8601. NaN and
    infinities are the texts ``NaN``, ``Infinity`` and ``-Infinity``, as Kafka Connect writes them.

    >>> json_line({"kafka": {"offset": 1}, "value": b"a"})
    b'{"kafka":{"offset":1},"value":{"base64":"YQ=="}}\\n'
    """
    write = partial(json.dumps, default=_json, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text = write(row)
    except ValueError:
        text = write(_with_texts(row))
    return text.encode() + b"\n"


def _with_texts(value: Any) -> Any:
    """A value with texts in place of NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return odd_float_text(value)
    if isinstance(value, dict):
        return {name: _with_texts(item) for name, item in value.items()}
    return [_with_texts(item) for item in value] if isinstance(value, (list, tuple)) else value


def _json(value: object) -> object:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no value of a record")


def line_batches(lines: Iterable[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
    """Records of ``read_lines`` as batches. Keys and values are JSON texts."""
    line_iterator = iter(lines)
    while part := list(islice(line_iterator, 10_000)):
        kafka = [
            {name: typed_value(line["kafka"].get(name), kind) for name, kind in _LINE_KAFKA.items()} for line in part
        ]
        sides = [
            pa.array([None if line.get(side) is None else json.dumps(line[side]) for line in part], pa.string())
            for side in ("key", "value")
        ]
        yield pa.RecordBatch.from_arrays(
            [pa.array(kafka, pa.struct(list(_LINE_KAFKA.items()))), *sides], ["kafka", "key", "value"]
        )


_LINE_KAFKA: Mapping[str, pa.DataType] = {
    "time": pa.timestamp("us", "UTC"),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    "key_schema_id": pa.int32(),
    "value_schema_id": pa.int32(),
}


def typed_value(value: Any, kind: pa.DataType) -> Any:
    """A value of a JSON line (``json_line``) as pyarrow takes it. KeyError if a field is missing."""
    kinds = pa.types
    if value is None:
        return None
    if kinds.is_struct(kind):
        return {item.name: typed_value(value[item.name], item.type) for item in kind}
    if kinds.is_list(kind):
        return [typed_value(item, kind.value_type) for item in value]
    if kinds.is_map(kind):
        return [(name, typed_value(item, kind.item_type)) for name, item in value]
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return base64.b64decode(value["base64"])
    if kinds.is_decimal(kind):
        return Decimal(value)
    if kinds.is_timestamp(kind):
        return datetime.fromisoformat(value)
    if kinds.is_date(kind):
        return date.fromisoformat(value)
    if kinds.is_floating(kind):
        return float(value)
    if kinds.is_integer(kind):
        # The column may have a wider type than the writer.
        return value if isinstance(value, int) else int(Decimal(value))
    return time.fromisoformat(value) if kinds.is_time(kind) else value
