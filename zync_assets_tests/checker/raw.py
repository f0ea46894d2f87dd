"""Ingest: raw pool + quarantine + what retention removed = topic, by content, below the next offset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from zync_assets_tests.checker.evidence import ABSENT, Raw, Row
from zync_assets_tests.checker.logs import Log, LogRecord
from zync_assets_tests.checker.statement import Input
from zync_assets_tests.checker.wire import BAD, Schemas

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Decoded:
    """A visible record of an input topic with what its bytes mean; a side may be BAD."""

    record: LogRecord
    key: Any
    value: Any

    @property
    def bad(self) -> bool:
        return self.key is BAD or self.value is BAD


def decode(item: Input, log: Log, schemas: Schemas) -> dict[int, Decoded]:
    """Offset → decoded record, for every visible record."""
    return {
        record.offset: Decoded(record, schemas.decode(item.key, record.key), schemas.decode(item.value, record.value))
        for record in log.records
    }


def problems(
    topic: str, raw: Raw, logs: Mapping[int, Log], decoded: Mapping[int, Mapping[int, Decoded]], numbers: Counter[str]
) -> Iterator[str]:
    for partition, upcoming in sorted(raw.next.items()):
        if partition not in logs:
            yield f"{topic}/{partition} is in the raw pool and not in Kafka"
            continue
        yield from (
            f"{topic}/{partition}: {text}"
            for text in _partition(raw, partition, upcoming, logs[partition], decoded[partition], numbers)
        )
    yield from (f"{topic}: {text}" for text in _files(raw))


def _partition(
    raw: Raw, partition: int, upcoming: int, log: Log, visible: Mapping[int, Decoded], numbers: Counter[str]
) -> Iterator[str]:
    first = raw.first.get(partition)
    if first is None or upcoming > log.end:
        yield f"it is ingested from {first} up to {upcoming}, and the topic ends at {log.end}"
        return
    rows = [row for item in raw.files for row in item.rows if row["kafka"]["partition"] == partition]
    entries = [row for row in raw.quarantine if row["kafka"]["partition"] == partition]
    aside = [row for row in entries if row["stage"] not in ABSENT]
    held = Counter(row["kafka"]["offset"] for row in [*rows, *aside])
    numbers["raw records"] += len(rows)
    numbers["quarantined records"] += len(aside)
    for offset, count in sorted(held.items()):
        if count > 1:
            yield f"offset {offset} is in the raw pool and its quarantine {count} times"
        if not first <= offset < upcoming:
            yield f"offset {offset} is in the raw pool, which goes from {first} to before {upcoming}"
        elif offset >= log.low and offset not in visible:
            yield f"offset {offset} is in the raw pool and is no visible record of the topic"
    kept = raw.kept.get(partition, 0)
    for row in (row for item in raw.files if not item.replayed for row in item.rows):
        if row["kafka"]["partition"] == partition and row["kafka"]["offset"] < kept:
            yield f"offset {row['kafka']['offset']} is in the raw pool, and retention removed all below {kept}"
    if kept > upcoming:
        yield f"retention removed all below {kept}, and the next offset is {upcoming}"
    lost = [range(row["kafka"]["offset"], row["end"]) for row in entries if row["stage"] in ABSENT]
    if log.low <= first < kept:
        gone = sum(first <= offset < kept and offset not in held for offset in visible)
        gone -= sum(any(offset in span for span in lost) for offset in visible if offset < kept)
        if gone != raw.removed.get(partition, 0):
            yield f"retention removed {raw.removed.get(partition, 0)} records, and {gone} are not there"
    for offset in sorted(visible):
        if max(first, kept) <= offset < upcoming and offset not in held and not any(offset in span for span in lost):
            yield f"offset {offset} is in the topic and neither in the raw pool nor in its quarantine"
    for row in rows:
        found = visible.get(row["kafka"]["offset"])
        if found is not None and (wrong := _differs(row, found)):
            yield f"offset {row['kafka']['offset']}: its {wrong} in the raw pool is not the topic's"
    for row in aside:
        found = visible.get(row["kafka"]["offset"])
        if found is None:
            continue
        if not found.bad:
            yield f"offset {row['kafka']['offset']} is in quarantine and can be decoded"
        elif (row["key"], row["value"], _headers(row)) != (found.record.key, found.record.value, found.record.headers):
            yield f"offset {row['kafka']['offset']} is in quarantine, not as the topic has it"
    if raw.bad.get(partition, 0) != raw.entered.get(partition, 0):
        yield f"{raw.bad.get(partition, 0)} quarantine entries were counted, and {raw.entered.get(partition, 0)} are there"


def _differs(row: Row, found: Decoded) -> str | None:
    """The part of a raw row that is not what the topic has."""
    if found.bad:
        return "decoded record"
    if millis(row["kafka"]["timestamp"]) != found.record.timestamp:
        return "timestamp"
    if _headers(row) != found.record.headers:
        return "headers"
    return next(
        (side for side, value in (("key", found.key), ("value", found.value)) if not holds(row.get(side), value)), None
    )


def holds(stored: Any, value: Any) -> bool:
    """Whether a table's value is ``value``: a struct may have more fields, of other writer schemas, all null."""
    if isinstance(value, dict) and isinstance(stored, dict):
        fields = all(name in stored and holds(stored[name], inner) for name, inner in value.items())
        return fields and all(inner is None for name, inner in stored.items() if name not in value)
    return type(stored) is type(value) and stored == value


def _headers(row: Row) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((pair["key"], pair["value"]) for pair in row["kafka"]["headers"] or ())


def millis(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // timedelta(milliseconds=1)


def times(raw: Raw, partition: int, log: Log | None) -> dict[int, int]:
    """Offset → a raw record's time: the highest timestamp of its partition up to it, quarantined and left-out records
    among them. A timestamp from the future counts as the time of ingest, which only the row itself knows."""
    first, upcoming = raw.first.get(partition, 0), raw.next.get(partition, 0)
    stamps = {record.offset: record.timestamp for record in log.records} if log is not None else {}
    stamps = {offset: stamp or 0 for offset, stamp in stamps.items() if first <= offset < upcoming}
    known: dict[int, int] = {}
    latest = max((item.file.modified for item in raw.files), default=0)
    limits: dict[int, int] = {}
    aside = [(row, latest) for row in raw.quarantine if row["stage"] not in ABSENT]
    for row, modified in [*((row, item.file.modified) for item in raw.files for row in item.rows), *aside]:
        place = row["kafka"]
        if place["partition"] == partition:
            stamps[place["offset"]] = millis(place["timestamp"]) or 0
            known[place["offset"]], limits[place["offset"]] = millis(place["time"]) or 0, modified
    # ``reached`` is the highest time of all that retention removed: a record among these has no time of its own any more.
    kept = raw.kept.get(partition, 0)
    found = {offset: time for offset, time in known.items() if offset < kept}
    reached = raw.reached.get(partition, 0)
    for offset, stamp in sorted((offset, stamp) for offset, stamp in stamps.items() if offset >= kept):
        if stamp > limits.get(offset, latest):
            stamp = min(stamp, known.get(offset, reached))
        reached = max(reached, stamp)
        found[offset] = reached
    return found


def _files(raw: Raw) -> Iterator[str]:
    """Files are sorted, and their log entries say what they hold."""
    for item in raw.files:
        offsets = [row["kafka"]["offset"] for row in item.rows]
        if offsets != sorted(set(offsets)):
            yield f"file {item.file.path.name} is not sorted by offset"
        if len({row["kafka"]["partition"] for row in item.rows}) > 1:
            yield f"file {item.file.path.name} holds more than one partition"
        if (item.file.records, item.file.low, item.file.high) != (len(offsets), offsets[0], offsets[-1]):
            yield f"file {item.file.path.name}: its statistics are not what it holds"
