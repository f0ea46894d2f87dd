"""The head of a staging pool's account: positions, counters and schemas after one batch.

``lake.staging`` keeps the head as entries of the account, in a file that each commit replaces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Position:
    """Where an input partition stands: the account covers ``first <= offset < seen``; ``records`` exist there.

    ``table``: the id of the raw table that they were read from; offsets of another table are other records.
    """

    first: int
    seen: int
    records: int = 0
    table: str | None = None


@dataclass(frozen=True)
class OutputPosition:
    """Where an output partition stands: offsets ``base`` to before ``next`` are numbered.

    ``topic_id`` and ``partitions`` describe the topic at the start of numbering; None if the topic did not exist then.
    """

    base: int
    next: int
    topic_id: str | None
    partitions: int | None


@dataclass(frozen=True)
class Late:
    """Records of an input partition that came after records that are later in the source's order.

    ``records``: their number; ``offset``: the first of them in the last batch that had some.
    """

    records: int
    offset: int


@dataclass(frozen=True)
class TransactionPosition:
    """The transactions of a domain that ETL has taken: those that end at ``end`` or before.

    ``incomplete``: the number of transactions that were taken without all their changes, ever; ``last``: the last of them.
    """

    end: tuple[int, int]
    incomplete: int = 0
    last: str | None = None


@dataclass(frozen=True)
class TableEntry:
    """The state of a view's table: its input topic and its definition."""

    topic: str
    definition: str


@dataclass(frozen=True)
class Head:
    """The account's positions, counters and schemas after one batch."""

    batch: int = 0
    inputs: Mapping[tuple[str, int], Position] = field(default_factory=dict)
    """(input topic, partition) → position."""
    outputs: Mapping[tuple[str, int], OutputPosition] = field(default_factory=dict)
    """(output topic, partition) → position."""
    counts: Mapping[tuple[str, int, str], int] = field(default_factory=dict)
    """(input topic, partition, class) → records that are in the class now."""
    waiting: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(rule, input topic) → records that are pending for the rule."""
    schemas: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Fingerprint → (output topic, output schema as JSON)."""
    replayed: Mapping[str, int] = field(default_factory=dict)
    """Input topic → the number of the raw table's replays that ETL has taken up. Their records are no longer quarantined."""
    nullable: Mapping[str, frozenset[tuple[str, ...]]] = field(default_factory=dict)
    """Output topic → fields of its values that some records have as null, or leave out, though their schemas have no null for
    them: later schemas must have one."""
    joins: Mapping[str, str] = field(default_factory=dict)
    """Rule → the definition of the hashes of its pending records (``etl.rules.denorm.join_text``). Tables of older versions
    lack the definition."""
    reached: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Domain → the highest order of the records that ETL has taken."""
    late: Mapping[tuple[str, int], Late] = field(default_factory=dict)
    """(input topic, partition) → its records that came too late for their place in the order."""
    transactions: Mapping[str, TransactionPosition] = field(default_factory=dict)
    """Domain → the transactions that ETL has taken, where the pipeline file names a transaction topic."""

    views: Mapping[str, str] = field(default_factory=dict)
    """Rule → the definition of the view whose result is staged."""
    tables: Mapping[str, TableEntry] = field(default_factory=dict)
    """Name of a table of views and look-ups → the state that the pool has of the table."""
    waits: Mapping[str, int] = field(default_factory=dict)
    """Rule → the time, in milliseconds since the epoch, since which a record may wait for a row that it looks up."""

    @property
    def table_topics(self) -> frozenset[str]:
        """The inputs that are tables of views. A record of such an input may make any number of outputs, or none."""
        return frozenset(item.topic for item in self.tables.values())

    def seen(self, topic: str) -> dict[int, int]:
        return {partition: item.seen for (name, partition), item in sorted(self.inputs.items()) if name == topic}


def head_rows(head: Head) -> list[dict[str, object]]:
    """The account's entries for a head, as dicts with fields of the account column."""
    rows: list[dict[str, object]] = []
    for (topic, partition), item in sorted(head.inputs.items()):
        place = {"topic": topic, "partition": partition}
        span = {"first": item.first, "end": item.seen, "count": item.records}
        rows.append({"kind": "seen", **place, **span, "text": item.table})
    for (topic, partition, name), count in sorted(head.counts.items()):
        rows.append({"kind": "counted", "topic": topic, "partition": partition, "rule": name, "count": count})
    for (rule, topic), count in sorted(head.waiting.items()):
        rows.append({"kind": "waiting", "topic": topic, "rule": rule, "count": count})
    for (topic, partition), out in sorted(head.outputs.items()):
        place = {"topic": topic, "partition": partition, "first": out.base, "end": out.next}
        rows.append({"kind": "output", **place, "text": out.topic_id, "count": out.partitions})
    for topic, count in sorted(head.replayed.items()):
        rows.append({"kind": "replayed", "topic": topic, "count": count})
    for topic, paths in sorted(head.nullable.items()):
        for path in sorted(paths):
            rows.append({"kind": "nullable", "topic": topic, "text": json.dumps(path)})
    for rule, text in sorted(head.joins.items()):
        rows.append({"kind": "join", "rule": rule, "text": text})
    for domain, (high, low) in sorted(head.reached.items()):
        rows.append({"kind": "reached", "first": high, "end": low, "text": domain})
    for (topic, partition), item in sorted(head.late.items()):
        place = {"topic": topic, "partition": partition, "first": item.offset}
        rows.append({"kind": "late", **place, "count": item.records})
    for domain, found in sorted(head.transactions.items()):
        numbers = {"first": found.end[0], "end": found.end[1], "count": found.incomplete}
        rows.append({"kind": "whole", **numbers, "rule": found.last, "text": domain})
    for rule, text in sorted(head.views.items()):
        rows.append({"kind": "view", "rule": rule, "text": text})
    for name, table in sorted(head.tables.items()):
        rows.append({"kind": "table", "topic": table.topic, "rule": name, "text": table.definition})
    for rule, since in sorted(head.waits.items()):
        rows.append({"kind": "since", "rule": rule, "first": since})
    for name, (topic, text) in sorted(head.schemas.items()):
        rows.append({"kind": "schema", "topic": topic, "rule": name, "text": text})
    return rows


def parse_head(batch: int, rows: Sequence[Mapping[str, Any]]) -> Head:
    """The head of a batch from its entries (``head_rows``)."""

    def of(kind: str) -> list[Mapping[str, Any]]:
        return [row for row in rows if row["kind"] == kind]

    return Head(
        batch,
        {(r["topic"], r["partition"]): Position(r["first"], r["end"], r["count"], r["text"]) for r in of("seen")},
        {
            (r["topic"], r["partition"]): OutputPosition(r["first"], r["end"], r["text"], r["count"])
            for r in of("output")
        },
        {(r["topic"], r["partition"], r["rule"]): r["count"] for r in of("counted")},
        {(r["rule"], r["topic"]): r["count"] for r in of("waiting")},
        {r["rule"]: (r["topic"], r["text"]) for r in of("schema")},
        {r["topic"]: r["count"] for r in of("replayed")},
        {
            topic: frozenset(tuple(json.loads(r["text"])) for r in of("nullable") if r["topic"] == topic)
            for topic in {r["topic"] for r in of("nullable")}
        },
        {r["rule"]: r["text"] for r in of("join")},
        {r["text"]: (r["first"], r["end"]) for r in of("reached")},
        {(r["topic"], r["partition"]): Late(r["count"], r["first"]) for r in of("late")},
        {r["text"]: TransactionPosition((r["first"], r["end"]), r["count"], r["rule"]) for r in of("whole")},
        {r["rule"]: r["text"] for r in of("view")},
        {r["rule"]: TableEntry(r["topic"], r["text"]) for r in of("table")},
        {r["rule"]: r["first"] for r in of("since")},
    )
