"""A shop of four tables with views over them, on a real broker, beside the oracle of the views.

``orders`` and ``customers`` come in Debezium's envelope. ``regions`` and ``lines`` are flat records with tombstones. All topics
have two partitions, and a key stays in one partition.

``ordered_shop`` has the same tables, whose changes have the order of one source database.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.lake.staging import open_staging
from zync_assets.local.services import Services
from zync_assets_tests.mini import Mini, ingest, make_pipeline, mini_of
from zync_assets_tests.view_oracle import Oracle, Table, folded, idle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2


@dataclass(frozen=True)
class Source:
    """A source table as a topic. ``columns``: name → Spark type (bigint or string). ``key``: the columns of its key.
    ``envelope``: as Debezium sends rows; ``ordered``: with the place of each change in a PostgreSQL database's log too."""

    columns: Mapping[str, str]
    key: Sequence[str] = ("id",)
    envelope: bool = False
    ordered: bool = False

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows."""
        types = {"bigint": pa.int64(), "string": pa.string()}
        return pa.schema([(name, types[kind]) for name, kind in self.columns.items()])

    def input(self, topic: str) -> str:
        """The input of a pipeline file."""
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        key = ", ".join(f"{name} {self.columns[name]}" for name in self.key)
        row = ", ".join(f"{name}: {kind}" for name, kind in self.columns.items())
        value = f"op string, before struct<{row}>, after struct<{row}>" if self.envelope else columns
        value += f", {PLACE}" if self.ordered else ""
        return f"  - {{topic: {topic}, pool: Raw, format: json, key-schema: '{key}', value-schema: '{value}'}}\n"


PLACE = "source struct<connector: string, name: string, snapshot: string, lsn: bigint, sequence: string>"

SHOP = {
    "orders": Source({"id": "bigint", "customer": "bigint", "status": "string", "fee": "bigint"}, envelope=True),
    "customers": Source({"id": "bigint", "name": "string", "region": "bigint", "note": "string"}, envelope=True),
    "regions": Source({"id": "bigint", "label": "string"}),
    "lines": Source({"id": "bigint", "order_id": "bigint", "sku": "string", "qty": "bigint"}),
}


def ordered_shop() -> dict[str, Source]:
    """The tables of SHOP, whose changes say their place in the source."""
    return {name: replace(source, envelope=True, ordered=True) for name, source in SHOP.items()}


VIEWS = """
  - name: documents
    type: view
    tables: {o: $orders, c: $customers, l: $lines}
    from: o JOIN c ON o.customer = c.id LEFT JOIN l ON l.order_id = o.id
    where: o.status <> 'draft'
    key: {id: o.id}
    value:
      customer: {name: c.name, region: c.region}
      lines: collect_list(struct(l.id, l.sku, l.qty)) FILTER (WHERE l.id IS NOT NULL)
      skus: collect_set(l.sku)
      total: sum(l.qty) + coalesce(o.fee, 0)
  - name: lines
    type: view
    tables: {o: $orders, c: {topic: $customers, key: key.id, row: value.after}, l: {topic: $lines}, r: $regions}
    from: l JOIN o ON l.order_id = o.id JOIN c ON o.customer = c.id LEFT JOIN r ON c.region = r.id
    key: l.id
    value: {sku: upper(l.sku), customer: c.name, region: r.label, status: o.status}
  - name: customers
    type: view
    tables: {o: $orders, c: $customers, r: $regions}
    from: c LEFT JOIN r ON c.region = r.id LEFT JOIN o ON o.customer = c.id
    key: {id: c.id}
    value: {name: c.name, region: r.label, orders: count(o.id), statuses: collect_set(o.status), open: bool_or(o.status = 'new'),
            fees: "struct(min(o.fee) AS low, max(o.fee) AS high)"}
  - name: pairs
    type: view
    tables: {a: $orders, b: $orders}
    from: a JOIN b ON a.customer = b.customer AND a.status = b.status
    where: a.id < b.id
    key: {a: a.id, b: b.id}
    value: {fee: a.fee + b.fee}
  - name: newest
    type: view
    tables: {o: $orders, c: $customers}
    from: o JOIN c ON o.customer = c.id
    key: c.id
    value: {id: o.id, status: o.status, name: c.name}
    on-duplicate-key: o.id
"""


@dataclass(frozen=True)
class Change:
    """One change of a source row. ``key``: the columns of its key; ``row``: its other columns, None for a delete."""

    table: str
    key: Mapping[str, Any]
    row: Mapping[str, Any] | None

    def records(self, source: Source, place: int) -> list[Mapping[str, Any] | None]:
        """The values of the change's records. ``place``: of the change among all changes."""
        if not source.envelope:
            return [None if self.row is None else {**self.key, **self.row}]
        more: dict[str, Any] = {}
        if source.ordered:
            sequence = json.dumps([str(place), str(place + 1)])
            at = {
                "connector": "postgresql",
                "name": "shop",
                "snapshot": "false",
                "lsn": place + 1,
                "sequence": sequence,
            }
            more = {"source": at}
        if self.row is None:
            before = dict.fromkeys(source.columns) | dict(self.key)
            return [{"op": "d", "before": before, "after": None, **more}, None]
        return [{"op": "u", "before": None, "after": {**self.key, **self.row}, **more}]


@dataclass(frozen=True)
class Sent:
    """A record that was sent. ``place``: of its change among all changes."""

    table: str
    partition: int
    offset: int
    place: int
    key: Any
    value: Any


@dataclass
class World:
    """The pipeline, and what was sent. The model has the latest rows of the records that ETL has taken."""

    it: Mini
    prefix: str
    sources: Mapping[str, Source]
    sent: list[Sent] = field(default_factory=list[Sent])
    changes: int = 0
    """Changes that were sent."""
    ingested: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """(table, partition) → the records that were ingested."""

    @property
    def outputs(self) -> list[str]:
        return [item.topic for item in self.it.pipeline.outputs]

    def topic(self, table: str) -> str:
        return f"{self.prefix}.{table}"

    def send(self, changes: Iterable[Change]) -> None:
        """Produce the records of some changes. A key stays in one partition."""
        batches: dict[tuple[str, int], list[tuple[str, Any]]] = {}
        next_offsets = Counter((each.table, each.partition) for each in self.sent)
        for change in changes:
            text = json.dumps(change.key)
            place = change.table, zlib.crc32(text.encode()) % PARTITIONS
            for value in change.records(self.sources[change.table], self.changes):
                self.sent.append(Sent(*place, next_offsets[place], self.changes, change.key, value))
                next_offsets[place] += 1
                batches.setdefault(place, []).append((text, value))
            self.changes += 1
        for (table, partition), records in batches.items():
            self.it.send(self.topic(table), *records, partition=partition)

    def ingest(self, tables: Iterable[str] | None = None) -> None:
        """Ingest some topics. The ends of all topics are read first where the topics share the order of their source."""
        taken = list(self.sources if tables is None else tables)
        topics = [self.topic(table) for table in taken]
        if any(source.ordered for source in self.sources.values()):
            ingest(self.it.pipeline, *topics)
        elif topics:
            self.it.ingest(*topics)
        self.ingested |= Counter((each.table, each.partition) for each in self.sent if each.table in taken)

    def etl(self) -> None:
        """Batches until there is nothing to do: a long history has several."""
        while self.it.etl() is not None:
            pass

    def seen(self) -> list[Sent]:
        """The records that ETL has taken."""
        if open_staging(self.it.lake, "Staging") is None:
            return []
        positions = self.it.head.inputs
        ends = {place: position.seen for place, position in positions.items()}
        return [each for each in self.sent if each.offset < ends.get((self.topic(each.table), each.partition), 0)]

    @property
    def used(self) -> set[str]:
        """The tables that a view uses."""
        topics = {topic for rule in self.it.pipeline.rules for topic in rule.topics}
        return {table for table in self.sources if self.topic(table) in topics}

    def records(self, output: str) -> list[tuple[Any, Any]]:
        """The staged records of an output topic."""
        return [(row["key"], row["value"]) for row in self.it.staged(output)]

    def check(self) -> None:
        """Every output equals DuckDB's result, the account has every record once, and no record repeats another."""
        for output in self.outputs:
            records = self.records(output)
            assert folded(records) == self.expected(output), output
            assert idle(records) == [], output
            result = contiguous_output_offsets(self.it.pipeline, output)
            assert result.passed, result
        covered = exactly_once_done_coverage(self.it.pipeline, "Staging")
        assert covered.passed, covered
        seen = self.seen()
        for table, count in Counter(each.table for each in seen).items():
            assert self.it.classes(self.topic(table)) == {"done": count}, table
        if not any(source.ordered for source in self.sources.values()):
            # Nothing holds a record back.
            found = Counter((each.table, each.partition) for each in seen)
            assert found == Counter({place: count for place, count in self.ingested.items() if place[0] in self.used})

    def expected(self, output: str) -> dict[str, Any]:
        """Key → value. The file declares the columns of each table: a table without a record has no rows."""
        rule = next(rule for rule in self.it.pipeline.rules if rule.out == output)
        assert rule.view is not None
        names = {table.alias: table.topic.rpartition(".")[2] for table in rule.view.tables}
        tables = {name: Table(source.envelope) for name, source in self.sources.items()}
        for each in self.seen():
            tables[each.table].apply(each.key, each.value)
        schemas = {alias: self.sources[name].schema for alias, name in names.items()}
        return Oracle(rule, schemas).result({alias: list(tables[name].rows.values()) for alias, name in names.items()})


def make_world(
    services: Services,
    spark: SparkSession,
    folder: Path,
    prefix: str,
    sources: Mapping[str, Source] = SHOP,
    views: str = VIEWS,
    names: Sequence[str] | None = None,
) -> World:
    """A world whose topics are empty. ``views``: the rules of a pipeline file, with ``$table`` for topics of ``sources``.

    ``names``: of the views that the pipeline has; default: all. The output topic of a view is ``prefix.view.name``.
    """
    parts = {part.split("\n")[0]: part for part in views.split("  - name: ")[1:]}
    chosen = list(parts) if names is None else names
    topics = {table: f"{prefix}.{table}" for table in sources}
    inputs = "".join(source.input(topics[table]) for table, source in sources.items())
    rules = "".join(f"  - name: {parts[name]}    out: {prefix}.view.{name}\n" for name in chosen)
    outputs = "".join(
        f"  - {{topic: {prefix}.view.{name}, pool: Staging, format: json, create: {{partitions: 1}}}}\n"
        for name in chosen
    )
    delay = "order-delay: 0.05\n" if any(source.ordered for source in sources.values()) else ""
    text = f"{delay}inputs:\n{inputs}outputs:\n{outputs}transforms:\n{Template(rules).substitute(topics)}"
    pipeline = make_pipeline(services, folder, text, partitions=PARTITIONS)
    return World(mini_of(pipeline, spark), prefix, sources)
