"""The staging table: all output topics of a pool and the whole account, since a Delta commit is atomic for one table only.

Files lie in these groups (the table's partition column is ``topic``):

    topic=<output topic>                 output records, sorted by offset
    topic=#state:…, #replaced:…, #index:…  the state of tables of views and look-ups (``etl.views``)
    topic=%23account, ``head-`` files    one small file, replaced by each commit: positions, counters, output schemas
    topic=%23account, other files        the ledger: what became of the inputs, appended by each batch

Every batch's commit sets ``zync:batch`` to the next batch number; two writers of one batch conflict. A commit that releases
raw records (``released``) sets the present batch number again, and conflicts with a batch that may read the records.

The account column:

    kind         topic, partition   first, end                    rule, hash, count, text
    seen         input              where the account begins,     count: records seen, text: the raw table's id
                                    the next offset to look at
    counted      input                                            rule: the class, count: records in it now
    waiting      input                                            rule, count: records pending for the rule
    output       output             base, next offset             text: the topic's id when numbering began, count: partitions
    schema       output                                           rule: the fingerprint, text: the output schema
    join                                                          rule, text: how the rule's waiting records were hashed
    view                                                          rule, text: the definition of the view whose result is staged
    table        input                                            rule: the table's name, text: the table's definition
    partitioned  output                                           text: what the partitions of its records follow from,
                                                                  count: the id of the key's schema
    since                           a time, in milliseconds       rule: a rule whose records may wait for a row since then
    rebuilt      input or output    the offset after the last      which the last rebuild of event rules reached
    replayed     input, none                                      count: replays of the raw table that were looked at
    reached                         high, low                     text: the domain whose records ETL took up to this order
    late         input              the first of the last batch   count: records that came below such an order
    whole                           high, low                     text: the domain whose transactions ETL took up to this end,
                                                                  count: those that were not whole, rule: the last of these
    closed                          the next offset               text: a domain whose transactions have ids without ends:
                                                                  END records below this offset were taken
    done, unmatched, dropped, quarantined, expired
                 input              offsets of the class          count: records, where it is known; of one that ETL
                                                                  failed on, quarantined or dropped from there, rule
                                                                  and text: why
    pending      input              one offset                    rule, hash of the join key (null: a null key, or none),
                                                                  row: hash of the source row, for a held output,
                                                                  text: change, if it changes its row (null: makes it);
                                                                  for a look-up, the time since which the record waits
    completed    input              one offset that was pending   text: dropped, if it is that since (null: done, ended: done
                                                                  without an output)
    ended        input              offsets that are done without an output, since their source row ended

The kinds after ``whole`` are in the ledger. A ``pending`` entry with a ``completed`` entry for its offset waits no more.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zync_assets.codecs.arrays import pc
from zync_assets.crashes import crash_point
from zync_assets.errors import CommitConflict, LakeError, TableDamaged
from zync_assets.lake import storage, tables, tampering
from zync_assets.lake.head import Head, head_rows, parse_head
from zync_assets.lake.log import DataFile, LakeTable
from zync_assets.offsets import OffsetRange, place_text

ACCOUNT = "#account"
STATE = "#state:"
"""The prefix of the groups with the rows of views' tables. The table's name follows."""
REPLACED = "#replaced:"
"""The prefix of the groups with the rows that later rows of their key replaced."""
INDEX = "#index:"
"""The prefix of the groups with the indexes of views' tables. The table's name, a colon, and a column follow."""
ACCOUNT_FOLDER = "topic=%23account"
_UNREADABLE = "is in the Delta log and can't be read"
_HEAD = f"{ACCOUNT_FOLDER}/head-"

ACCOUNT_TYPE = pa.struct(
    [
        ("kind", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("first", pa.int64()),
        ("end", pa.int64()),
        ("rule", pa.string()),
        ("hash", pa.int64()),
        ("count", pa.int64()),
        ("text", pa.string()),
        ("row", pa.int64()),
    ]
)
SOURCE_TYPE = pa.list_(pa.struct([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())]))
BASE_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("kafka", pa.struct([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])),
        ("rule", pa.string()),
        ("source", SOURCE_TYPE),
        ("schema", pa.string()),
        ("left_out", pa.list_(pa.string())),
        ("account", ACCOUNT_TYPE),
    ]
)

HEADERS_COLUMN = "headers"
"""The table's column for headers (``raw_files.HEADERS_TYPE``), added when the first rule sets headers."""


def is_own_group(group: str) -> bool:
    """Whether files of a group hold the account or state, rather than the records of an output topic."""
    return group.startswith("#")


_LATER = b"zync.later"


def later_fields(schema: pa.Schema, column: str) -> dict[str, str | None]:
    """The fields of a column of values that came after some records, with the defaults that these records have there
    (``codecs.fields.Default``; None: null)."""
    text = (schema.field(column).metadata or {}).get(_LATER) if column in schema.names else None
    return {} if text is None else json.loads(text)


def with_later_fields(column: pa.Field, fields: Mapping[str, str | None]) -> pa.Field:
    """A column of values that notes the fields which came later."""
    if not fields:
        return column
    return column.with_metadata({**(column.metadata or {}), _LATER: json.dumps(fields, sort_keys=True).encode()})


def key_column(topic: str) -> str:
    """The staging column that holds the keys of an output topic."""
    return f"key:{topic}"


def value_column(topic: str) -> str:
    """The staging column that holds the values of an output topic."""
    return f"value:{topic}"


@dataclass(frozen=True)
class StagingState:
    """One version of a staging table."""

    table: LakeTable = field(repr=False)
    head: Head
    files: tuple[DataFile, ...] = field(repr=False)

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    @property
    def table_id(self) -> str:
        """The Delta table id. A new table at the same place has another id."""
        return str(self.table.metadata.id)

    def output_files(self, topic: str, ranges: Collection[OffsetRange] | None = None) -> list[DataFile]:
        """Files of an output topic with an offset of ``ranges`` (None: all files), sorted by partition and offset, as numbers."""
        files = [item for item in self.files if item.group == topic and (ranges is None or item.meets(ranges))]
        return sorted(files, key=lambda item: (item.partition or 0, item.first or 0))

    @property
    def ledger_files(self) -> list[DataFile]:
        return [item for item in self.files if item.group == ACCOUNT and not item.path.startswith(_HEAD)]

    def released(self, topic: str, partition: int) -> int:
        """Below this offset raw records, but for those of replays, may be removed: no batch looks at them again."""
        return self.table.number(f"zync:released:{topic}:{partition}") or 0

    def uri(self, item: DataFile) -> str:
        return storage.join(self.table.uri, item.path)


def open_staging(lake: str, pool: str) -> StagingState | None:
    """The state of a staging table; None where there is none yet."""
    return staging_state(tables.open_table(storage.staging_uri(lake, pool)))


def staging_state(opened: LakeTable | None) -> StagingState | None:
    """The state of a staging table in one version; None where there is none yet. Raises TableDamaged."""
    if opened is None or not has_begun(opened):
        return None
    files = opened.files
    batch = opened.number("zync:batch")
    heads = [item for item in files if item.group == ACCOUNT and item.path.startswith(_HEAD)]
    if batch is None or len(heads) != 1:
        raise tampering.damage(opened, f"its account has {len(heads)} head files and batch {batch}")
    number = int(heads[0].path.removeprefix(_HEAD)[:12])
    if number != batch:
        raise tampering.damage(opened, f"its account is that of batch {number}, and batch {batch} was committed")
    return StagingState(opened, _head(opened, heads[0], batch), files)


def has_begun(opened: LakeTable | None) -> bool:
    """Whether a table is a staging table, whatever state it is in."""
    return opened is not None and "account" in opened.schema.names


def _head(opened: LakeTable, item: DataFile, batch: int) -> Head:
    """The head in its file, read again where another program changed the file."""
    system, path = storage.filesystem(storage.join(opened.uri, item.path))
    info = system.get_file_info(path)
    return _head_of(opened, item.path, batch, (info.size, info.mtime_ns))


@lru_cache(16)
def _head_of(opened: LakeTable, path: str, batch: int, _mark: tuple[int | None, int | None]) -> Head:
    return parse_head(batch, _read_head(opened, path))


def _read_head(opened: LakeTable, path: str) -> list[dict[str, Any]]:
    uri = storage.join(opened.uri, path)
    with storage.access_errors(uri, _UNREADABLE):
        try:
            return _entries(uri).to_pylist()
        except (FileNotFoundError, pa.ArrowInvalid):
            raise TableDamaged(
                f"table {opened.uri}: the file {path}, which says how far the account is, is in the Delta log and not, or"
                " not whole, in the lake: another program removed or changed it. Nothing was done. Restore it from a copy."
            ) from None


def check_whole(state: StagingState) -> None:
    """TableDamaged if another program changed the files of the table, by the log alone: those of an output don't hold as many
    records as were numbered, or the sum of all is another one."""
    record_counts = Counter[tuple[str | None, int | None]]()
    for item in state.files:
        record_counts[item.group, item.partition] += item.records
    for (topic, partition), position in sorted(state.head.outputs.items()):
        count, numbered_count = record_counts[topic, partition], position.next - position.base
        if count != numbered_count:
            place = topic if position.partitions in (None, 1) else f"{topic}, partition {partition}"
            raise tampering.damage(
                state.table, f"it holds {count} outputs of {place}, and {numbered_count} were numbered"
            )
    tampering.check(state.table)


def read_ledger(state: StagingState, kinds: Iterable[str] | None = None) -> pa.Table:
    """Ledger entries as a table with the fields of the account column; of some kinds only if named. No JVM."""
    table = read_entries(state, state.ledger_files)
    if kinds is None:
        return table
    return table.filter(pc.is_in(table["kind"], pa.array(list(kinds), pa.string())))


def read_entries(state: StagingState, files: Sequence[DataFile]) -> pa.Table:
    """The entries of some ledger files, a column for each field of the account column."""
    empty = pa.table({item.name: pa.array([], item.type) for item in ACCOUNT_TYPE})
    return pa.concat_tables([empty, *(_read(state.uri(item)) for item in files)])


def entry_paths(names: Iterable[str]) -> list[str]:
    """The columns of a ledger file with these fields of the entries."""
    return [f"account.{name}" for name in names]


def entry_columns(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Rows of a ledger file (``entry_paths``) as a column for each field. The entries of older versions have no source rows."""
    columns = rows.flatten()
    columns = columns.rename_columns([name.removeprefix("account.") for name in columns.column_names])
    if "row" in names and "row" not in columns.column_names:
        columns = columns.append_column("row", pa.nulls(columns.num_rows, pa.int64()))
    return columns.select(list(names))


def commit_batch(
    lake: str,
    pool: str,
    before: StagingState | None,
    head: Head,
    schema: pa.Schema,
    files: Sequence[DataFile],
    removed: Sequence[DataFile] = (),
) -> None:
    """Commit one batch: outputs, ledger entries and the new head, atomically.

    ``schema``: the table's columns, widened for this batch. Raises CommitConflict if another batch came first.
    """
    for place in {(item.group, item.partition or 0) for item in files if item.group and not is_own_group(item.group)}:
        place_files = [item for item in files if (item.group, item.partition or 0) == place]
        _check_numbering((str(place[0]), place[1]), place_files, before, head)
    uri = storage.staging_uri(lake, pool)
    all_files = [*files, _write_head(uri, head)]
    crash_point("etl:head-written")
    numbers = {"zync:batch": head.batch}
    if before is None:
        tables.create_table(uri, schema, f"Staging pool {pool}", all_files, numbers, partition_by=["topic"])
        crash_point("etl:table-created")
        return
    old_heads = [item for item in before.files if item.group == ACCOUNT and item.path.startswith(_HEAD)]
    planned_numbers = _planned_numbers(before.head, before.table)
    opened = tables.widen(before.table, schema)
    if opened is not before.table:
        crash_point("etl:columns-added")
    if opened is not before.table and _planned_numbers(before.head, opened) != planned_numbers:
        raise CommitConflict(f"table {uri}: another writer committed first; run again")
    tables.commit(opened, all_files, numbers, removals=[*removed, *old_heads], partition_by=["topic"])
    crash_point("etl:committed")


def _planned_numbers(head: Head, opened: LakeTable) -> list[int | None]:
    """The numbers that must not change during a batch. A release of raw records keeps the batch number, so that the released
    offsets are compared too."""
    names = ["zync:batch", *(f"zync:released:{topic}:{partition}" for topic, partition in head.inputs)]
    return [opened.number(name) for name in names]


def release(state: StagingState, topic: str, until: Mapping[int, int]) -> None:
    """Release a topic's raw records for removal. ``until``: partition → the offset below which records are released.

    Raises CommitConflict if a batch was committed since ``state`` was opened, because that batch may need the records.
    """
    later = {p: offset for p, offset in until.items() if offset > state.released(topic, p)}
    if later:
        numbers = {f"zync:released:{topic}:{p}": offset for p, offset in later.items()}
        tables.commit(state.table, [], {**numbers, "zync:batch": state.head.batch}, partition_by=["topic"])


def ledger_file(uri: str, path: str) -> DataFile:
    """The log entry of a ledger file that Spark wrote."""
    system, full = storage.filesystem(storage.join(uri, path))
    rows = pq.read_metadata(full, filesystem=system).num_rows
    return DataFile(path, storage.file_size(storage.join(uri, path)), rows, group=ACCOUNT)


def write_ledger(uri: str, path: str, rows: Sequence[Mapping[str, object]]) -> DataFile:
    """Write a few ledger rows (dicts with the account's fields) as a file of the table; not yet committed."""
    return _write_account(uri, path, pa.array(rows, ACCOUNT_TYPE))


def write_entries(uri: str, path: str, rows: pa.Table) -> DataFile:
    """Write ledger rows (a column for each field of the account) as a file of the table; not yet committed."""
    columns = [rows[name].combine_chunks() for name in ACCOUNT_TYPE.names]
    return _write_account(uri, path, pa.StructArray.from_arrays(columns, fields=list(ACCOUNT_TYPE)))


def _write_account(uri: str, path: str, rows: pa.Array) -> DataFile:
    storage.make_folder(storage.join(uri, path.rsplit("/", 1)[0]))
    system, full = storage.filesystem(storage.join(uri, path))
    with storage.access_errors(storage.join(uri, path), "can't be written"):
        pq.write_table(pa.table({"account": rows}), full, filesystem=system)
    return DataFile(path, storage.file_size(storage.join(uri, path)), len(rows), group=ACCOUNT)


def _check_numbering(
    place: tuple[str, int], files: Sequence[DataFile], before: StagingState | None, head: Head
) -> None:
    """Refuse a batch whose files don't number base..m without a gap. A committed gap could not be repaired."""
    sorted_files = sorted(files, key=lambda item: item.first or 0)
    old_position = before.head.outputs.get(place) if before is not None else None
    start = old_position.next if old_position is not None else head.outputs[place].base
    edges = [start - 1, *[edge for item in sorted_files for edge in (item.first or 0, item.last or 0)]]
    is_whole = all((item.last or 0) - (item.first or 0) + 1 == item.records for item in sorted_files)
    is_joined = all(b == a + 1 for a, b in list(pairwise(edges))[::2])
    if not is_whole or not is_joined or edges[-1] + 1 != head.outputs[place].next:
        raise LakeError(f"{place_text(*place)}: this batch would number its outputs with a gap; nothing was committed")


def _read(uri: str) -> pa.Table:
    with storage.access_errors(uri, _UNREADABLE):
        return _entries(uri)


def _entries(uri: str) -> pa.Table:
    system, path = storage.filesystem(uri)
    with pq.ParquetFile(path, filesystem=system) as file:
        table = file.read(columns=["account"])
    return pa.table(dict(zip(ACCOUNT_TYPE.names, _flatten(table), strict=True)))


def _flatten(table: pa.Table) -> list[pa.Array]:
    column = table["account"].combine_chunks()
    array = column.chunk(0) if isinstance(column, pa.ChunkedArray) and column.num_chunks else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.array([], ACCOUNT_TYPE)
    return array.cast(ACCOUNT_TYPE).flatten()


def _write_head(uri: str, head: Head) -> DataFile:
    return write_ledger(uri, f"{_HEAD}{head.batch:012d}-{uuid.uuid4().hex}.parquet", head_rows(head))
