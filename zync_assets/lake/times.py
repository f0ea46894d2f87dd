"""The carried time of raw records: ``kafka.time`` never decreases within a partition, across files and batches.

Ingest writes the carried time. A batch begins with the partition's highest time so far (``highest_times``). The tasks of a
batch do not know each other's times, and ``lift`` corrects their files before the commit. Tables of older versions have a
running maximum within each file only. Readers take the maximum of that time and of ``carried_times``, from the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.nested import is_valid, struct_of
from zync_assets.compute import pc
from zync_assets.lake import storage
from zync_assets.lake.raw import RawState, is_replay
from zync_assets.lake.tables import DataFile
from zync_assets.lake.writer import RangeWriter

_ROWS = 50_000


def highest_times(state: RawState | None) -> dict[int, int]:
    """Partition → the highest time of all records before its next offset, in milliseconds since the epoch.

    Quarantined and left-out records count, and records that retention removed. A table of an older version knows the times
    of the records that it holds or held.
    """
    if state is None:
        return {}
    found = dict(state.reached)
    for known in (state.times, _of_files(state.files)):
        for partition, time in known.items():
            found[partition] = max(found.get(partition, 0), time)
    return found


def _of_files(files: Sequence[DataFile]) -> dict[int, int]:
    found: dict[int, int] = {}
    for item in files:
        if item.max_time is not None and item.partition is not None and not is_replay(item):
            found[item.partition] = max(found.get(item.partition, 0), item.max_time)
    return found


def carried_times(files: Sequence[DataFile], reached: Mapping[int, int] | None = None) -> dict[str, int]:
    """File path → the highest record time of its partition before it, only where that is above the file's lowest.

    ``files`` are all files of the table, sorted by partition and offset; ``reached``: partition → the highest time of
    the records that retention removed. A replay's records have their final time.
    """
    carried: dict[str, int] = {}
    partition, highest = None, None
    for item in files:
        if is_replay(item):
            continue
        if item.partition != partition:
            partition, highest = item.partition, (reached or {}).get(item.partition or 0)
        if highest is not None and item.min_time is not None and item.min_time < highest:
            carried[item.path] = highest
        if item.max_time is not None:
            highest = item.max_time if highest is None else max(highest, item.max_time)
    return carried


def carried(kafka: pa.StructArray, reached: int | None) -> pa.StructArray:
    """Places of one partition in the order of their offsets, with times that begin at ``reached`` (microseconds since the
    epoch; None: at their own) and never run back."""
    at = kafka.type.get_field_index("time")
    if at < 0:
        return kafka
    parts = kafka.flatten()
    times = pc.max_element_wise(parts[at].cast(pa.int64()), pa.scalar(reached, pa.int64()))
    parts[at] = pc.cumulative_max(times).cast(parts[at].type)
    return struct_of(kafka.type, parts, len(kafka), is_valid(kafka))


def last_time(kafka: pa.StructArray) -> int | None:
    """The carried time that some places end with, in microseconds since the epoch."""
    return None if kafka.type.get_field_index("time") < 0 else pc.struct_field(kafka, "time")[-1].value


def lift(table_uri: str, item: DataFile, reached: int, name: str) -> list[DataFile]:
    """Write the records of a file that no commit names yet into another one, with times that begin at ``reached``
    (milliseconds). The file itself stays: Spark may run the task again.

    ``name``: the beginning of the new file's name. LakeError if a file can't be read or written.
    """
    uri = storage.join(table_uri, item.path)
    system, path = storage.filesystem(uri)
    writer = RangeWriter(table_uri, item.partition or 0, name)
    with storage.accessed(uri, "can't be read"), writer, pq.ParquetFile(path, filesystem=system) as file:
        for batch in storage.read_batches(file, _ROWS):
            place = batch.schema.get_field_index("kafka")
            kafka = carried(batch.column(place), reached * 1000)
            writer.write(batch.set_column(place, batch.schema.field(place), kafka))
    return [made for made, _ in writer.files]
