"""The head of a staging pool's account: positions, counters and schemas after one batch.

``lake.staging`` keeps the head as entries of the account, in a file that each commit replaces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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

    ``topic_id`` describes the topic at the start of numbering; None if the topic did not exist then. ``partitions``: the
    partitions that the topic has, or will have. A table of an older version may lack the number, and has no positions but
    that of partition 0: all outputs of such a topic go there.
    """

    base: int
    next: int
    topic_id: str | None
    partitions: int | None


PARTITION_BY = "partition-by: "
"""The beginning of ``Partitioning.text`` for an expression."""


@dataclass(frozen=True)
class Partitioning:
    """The things on which the partitions of an output topic's records depend.

    ``text``: the format and the schema of the keys, or the expression of ``partition-by``; ``id``: the id that the registry had
    for an Avro schema.
    """

    text: str
    id: int | None

    @property
    def is_chosen(self) -> bool:
        """Whether ``partition-by`` gives the partitions."""
        return self.text.startswith(PARTITION_BY)


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
    ``next``: the offset after the last END record of these transactions, where the ids of transactions hold no end.
    """

    end: tuple[int, int]
    incomplete: int = 0
    last: str | None = None
    next: int | None = None


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
    partitionings: Mapping[str, Partitioning] = field(default_factory=dict)
    """Output topic with several partitions → its partitioning."""
    waits: Mapping[str, int] = field(default_factory=dict)
    """Rule → the time, in milliseconds since the epoch, since which a record may wait for a row that it looks up."""

    rules: Mapping[str, str] = field(default_factory=dict)
    """Rule → its fingerprint at the last commit (``etl.rule_changes``). Tables of older versions lack fingerprints."""
    several: frozenset[str] = frozenset()
    """The inputs whose records have made several outputs of one match."""
    rebuilt: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """(topic, partition) of an input or an output → the offset that it had reached at the last rebuild of event rules. The
    account of earlier input records is by the rules of that time, and not by the rules that made the earlier outputs."""
    former_tables: frozenset[str] = frozenset()
    """The inputs that were tables, and that an edit of the rules has left without a table."""

    @property
    def table_topics(self) -> frozenset[str]:
        """The inputs that are or were tables of views. A record of such an input may have made any number of outputs, or none."""
        return self.former_tables.union(item.topic for item in self.tables.values())

    def with_tables(self, tables: Mapping[str, TableEntry]) -> Head:
        """The head with the present tables."""
        return replace(self, tables=tables, former_tables=self.table_topics - {item.topic for item in tables.values()})

    def positions(self, topic: str) -> dict[int, OutputPosition]:
        """Partition → position, of an output topic."""
        return {partition: item for (name, partition), item in sorted(self.outputs.items()) if name == topic}

    def output_ends(self, topic: str) -> dict[int, int]:
        """Partition → the offset after the last staged record, of an output topic."""
        return {partition: item.next for partition, item in self.positions(topic).items()}

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
    for domain, position in sorted(head.transactions.items()):
        numbers = {"first": position.end[0], "end": position.end[1], "count": position.incomplete}
        rows.append({"kind": "whole", **numbers, "rule": position.last, "text": domain})
        if position.next is not None:
            rows.append({"kind": "closed", "first": position.next, "text": domain})
    for rule, text in sorted(head.views.items()):
        rows.append({"kind": "view", "rule": rule, "text": text})
    for name, table in sorted(head.tables.items()):
        rows.append({"kind": "table", "topic": table.topic, "rule": name, "text": table.definition})
    for topic, partitioning in sorted(head.partitionings.items()):
        rows.append({"kind": "partitioned", "topic": topic, "count": partitioning.id, "text": partitioning.text})
    for rule, since in sorted(head.waits.items()):
        rows.append({"kind": "since", "rule": rule, "first": since})
    for rule, text in sorted(head.rules.items()):
        rows.append({"kind": "rule", "rule": rule, "text": text})
    for (topic, partition), offset in sorted(head.rebuilt.items()):
        rows.append({"kind": "rebuilt", "topic": topic, "partition": partition, "end": offset})
    for topic in sorted(head.several):
        rows.append({"kind": "several", "topic": topic})
    for topic in sorted(head.former_tables):
        rows.append({"kind": "former-table", "topic": topic})
    for name, (topic, text) in sorted(head.schemas.items()):
        rows.append({"kind": "schema", "topic": topic, "rule": name, "text": text})
    return rows


def parse_head(batch: int, rows: Sequence[Mapping[str, Any]]) -> Head:
    """The head of a batch from its entries (``head_rows``)."""

    def of(kind: str) -> list[Mapping[str, Any]]:
        return [row for row in rows if row["kind"] == kind]

    next_numbers = {row["text"]: row["first"] for row in of("closed")}
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
        {
            r["text"]: TransactionPosition((r["first"], r["end"]), r["count"], r["rule"], next_numbers.get(r["text"]))
            for r in of("whole")
        },
        {r["rule"]: r["text"] for r in of("view")},
        {r["rule"]: TableEntry(r["topic"], r["text"]) for r in of("table")},
        {r["topic"]: Partitioning(r["text"], r["count"]) for r in of("partitioned")},
        {r["rule"]: r["first"] for r in of("since")},
        {r["rule"]: r["text"] for r in of("rule")},
        frozenset(r["topic"] for r in of("several")),
        {(r["topic"], r["partition"]): r["end"] for r in of("rebuilt")},
        frozenset(r["topic"] for r in of("former-table")),
    )
