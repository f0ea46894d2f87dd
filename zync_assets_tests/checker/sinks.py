"""Tables of sinks: the positions stand within the source, and the rows are the fold of the source's records below them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from zync_assets_tests.checker.database import Database
from zync_assets_tests.checker.evidence import Evidence
from zync_assets_tests.checker.outputs import staged_sides
from zync_assets_tests.checker.statement import SinkTable, Statement

Row = dict[str, Any]
Found = tuple[int, int, Any, Any]
"""Partition, offset, key and value of a record."""


def problems(statement: Statement, evidence: Evidence, numbers: Counter[str], *, drained: bool) -> Iterator[str]:
    """What is wrong in the tables of the sinks. ``drained``: whether every record must be in them."""
    database = evidence.database
    if database is None:
        if drained and statement.sinks:
            yield "no sink has written its database"
        return
    known = {(item.sink, item.source): item for item in statement.sinks}
    for row in database.tables.get("zync_positions", []):
        if (row["sink"], row["source"]) not in known:
            yield f"zync_positions has a row of a source that is none here: {row}"
    for item in statement.sinks:
        yield from _table_problems(item, evidence, database, numbers, drained=drained)
    for row in database.tables.get("zync_quarantine", []):
        yield f"the target refused a record: {row}"
    if drained and database.left:
        yield f"load tables of killed runs are left: {', '.join(database.left)}"


def _table_problems(
    item: SinkTable, evidence: Evidence, database: Database, numbers: Counter[str], *, drained: bool
) -> Iterator[str]:
    # Below 0 lie marks: the number of replays whose records the sink has.
    rows = [row for row in database.tables.get("zync_positions", []) if _is_of(item, row) and row["partition"] >= 0]
    positions = {row["partition"]: row["next"] for row in rows}
    if len(positions) < len(rows):
        yield f"{item.name}: a partition has two positions: {rows}"
    lake_id, ends = _source(item, evidence)
    for row in rows:
        if row["origin"] != lake_id:
            yield f"{item.name}: the position of partition {row['partition']} is of the table {row['origin']}, not {lake_id}"
    for partition in sorted({*positions, *ends}):
        at, end = positions.get(partition), ends.get(partition, 0)
        if (at or 0) > end:
            yield f"{item.name}: the position of partition {partition} is {at}, and the source ends at {end}"
        elif drained and (at or 0) < end:
            yield f"{item.name}: the position of partition {partition} is {at}, and records up to {end} are there"
    records = [found for found in _records(item, evidence) if found[1] < positions.get(found[0], 0)]
    expected = _folded(records) if item.mode == "upsert" else [_appended(item, found) for found in records]
    actual = database.tables.get(item.name, [])
    numbers["rows of tables"] += len(actual)
    columns = {name for row in actual for name in row}
    wanted, there = (Counter(_text(row, columns) for row in side) for side in (expected, actual))
    for text, count in ((wanted - there) + (there - wanted)).items():
        yield f"{item.name}: {wanted[text]} rows wanted, {there[text]} there: {text} ({count})"


def _is_of(item: SinkTable, row: Row) -> bool:
    return (row["sink"], row["source"]) == (item.sink, item.source)


def _source(item: SinkTable, evidence: Evidence) -> tuple[str, dict[int, int]]:
    """The id of the source's table in the lake, and partition → its next offset."""
    staging, raw = evidence.staging, evidence.raw.get(item.topic)
    if raw is not None:
        return raw.id, {partition: end for partition, end in raw.next.items() if raw.first.get(partition, 0) < end}
    if staging is None:
        return "", {}
    ends: dict[int, int] = {}
    for row, _, _ in staged_sides(staging, item.topic):
        partition = row["kafka"]["partition"]
        ends[partition] = max(ends.get(partition, 0), row["kafka"]["offset"] + 1)
    return staging.id, ends


def _records(item: SinkTable, evidence: Evidence) -> Iterator[Found]:
    """The records of the source in the order of (partition, offset). A field that a record leaves out is not in its value."""
    staging, raw = evidence.staging, evidence.raw.get(item.topic)
    if raw is not None:
        found = [
            (row["kafka"]["partition"], row["kafka"]["offset"], row.get("key"), row.get("value"))
            for file in raw.files
            for row in file.rows
        ]
        yield from sorted(found, key=lambda record: record[:2])
    elif staging is not None:
        for row, key, value in staged_sides(staging, item.topic):
            yield row["kafka"]["partition"], row["kafka"]["offset"], key, value


def _folded(records: list[Found]) -> list[Row]:
    rows: dict[str, Row] = {}
    for _, _, key, value in records:
        name = json.dumps(key, sort_keys=True)
        if value is None:
            rows.pop(name, None)
        else:
            rows.setdefault(name, dict(_fields("key", key))).update(value)
    return list(rows.values())


def _appended(item: SinkTable, record: Found) -> Row:
    partition, offset, key, value = record
    place = {"kafka_topic": item.topic, "kafka_partition": partition, "kafka_offset": offset}
    return place | dict(_fields("key", key)) | dict(_fields("value", value))


def _fields(side: str, value: Any) -> Mapping[str, Any]:
    """The columns of a side. A tombstone has none."""
    return value if isinstance(value, dict) else {} if value is None else {side: value}


def _text(row: Row, columns: set[str]) -> str:
    """A row that can be counted. A column that it lacks is null."""
    return json.dumps({name: _plain(row.get(name)) for name in columns | row.keys()}, sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    """A value, and JSON of it, in one form. A null field of a struct counts as absent: a later file may have more fields."""
    if isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
    if isinstance(value, dict):
        return {name: item for name, inner in value.items() if (item := _plain(inner)) is not None}
    return value
