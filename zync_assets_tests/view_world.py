"""A shop of four tables with views over them, on a real broker, beside the oracle of the views.

``orders`` and ``customers`` come in Debezium's envelope. ``regions`` and ``lines`` are flat records with tombstones. All topics
have two partitions, and a key stays in one partition.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.kafka.topics import create_topic
from zync_assets.local.services import Services
from zync_assets_tests.mini import Mini, make_pipeline
from zync_assets_tests.view_oracle import Oracle, Table, folded, idle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2


@dataclass(frozen=True)
class Source:
    """A source table as a topic. ``columns``: name → Spark type (bigint or string). ``key``: the columns of its key."""

    columns: Mapping[str, str]
    key: Sequence[str] = ("id",)
    envelope: bool = False

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
        return f"  - {{topic: {topic}, pool: Raw, format: json, key-schema: '{key}', value-schema: '{value}'}}\n"


SHOP = {
    "orders": Source({"id": "bigint", "customer": "bigint", "status": "string", "fee": "bigint"}, envelope=True),
    "customers": Source({"id": "bigint", "name": "string", "region": "bigint", "note": "string"}, envelope=True),
    "regions": Source({"id": "bigint", "label": "string"}),
    "lines": Source({"id": "bigint", "order_id": "bigint", "sku": "string", "qty": "bigint"}),
}

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

    def records(self, source: Source) -> list[Mapping[str, Any] | None]:
        """The values of the change's records."""
        if not source.envelope:
            return [None if self.row is None else {**self.key, **self.row}]
        if self.row is None:
            return [{"op": "d", "before": dict.fromkeys(source.columns) | dict(self.key), "after": None}, None]
        return [{"op": "u", "before": None, "after": {**self.key, **self.row}}]


@dataclass
class World:
    """The pipeline, what was sent, and the latest rows below what ETL has seen."""

    it: Mini
    prefix: str
    sources: Mapping[str, Source]
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    sent: list[tuple[str, Any, Any]] = field(default_factory=list[tuple[str, Any, Any]])
    """(table, key, value) of the records that no ingest has taken."""
    count: Counter[str] = field(default_factory=Counter[str])
    """Table → the records that ETL has taken."""

    def __post_init__(self) -> None:
        self.tables = {name: Table(source.envelope) for name, source in self.sources.items()}

    @property
    def outputs(self) -> list[str]:
        return [item.topic for item in self.it.pipeline.outputs]

    def topic(self, table: str) -> str:
        return f"{self.prefix}.{table}"

    def send(self, changes: Iterable[Change]) -> None:
        """Produce the records of some changes. A key stays in one partition."""
        batches: dict[tuple[str, int], list[tuple[str, Any]]] = {}
        for change in changes:
            text = json.dumps(change.key)
            for value in change.records(self.sources[change.table]):
                self.sent.append((change.table, change.key, value))
                place = change.table, zlib.crc32(text.encode()) % PARTITIONS
                batches.setdefault(place, []).append((text, value))
        for (table, partition), records in batches.items():
            self.it.send(self.topic(table), *records, partition=partition)

    def ingest(self, tables: Iterable[str] | None = None) -> None:
        """Ingest some topics. The model has their records from now on, since ETL takes them all."""
        new = {table for table, _, _ in self.sent}
        taken = [table for table in (self.sources if tables is None else tables) if table in new]
        if taken:
            self.it.ingest(*map(self.topic, taken))
        for table, key, value in self.sent:
            if table in taken:
                self.tables[table].apply(key, value)
                self.count[table] += 1
        self.sent = [each for each in self.sent if each[0] not in taken]

    def etl(self) -> None:
        """Batches until there is nothing to do: a long history has several."""
        while self.it.etl() is not None:
            pass

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
        used = {topic for rule in self.it.pipeline.rules for topic in rule.topics}
        for table, count in self.count.items():
            if self.topic(table) in used:
                assert self.it.classes(self.topic(table)) == {"done": count}, table

    def expected(self, output: str) -> dict[str, Any]:
        """Key → value. The file declares the columns of each table: a table without a record has no rows."""
        rule = next(rule for rule in self.it.pipeline.rules if rule.out == output)
        assert rule.view is not None
        names = {table.alias: table.topic.rpartition(".")[2] for table in rule.view.tables}
        schemas = {alias: self.sources[name].schema for alias, name in names.items()}
        return Oracle(rule, schemas).result(
            {alias: list(self.tables[name].rows.values()) for alias, name in names.items()}
        )


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
    text = f"inputs:\n{inputs}outputs:\n{outputs}transforms:\n{Template(rules).substitute(topics)}"
    pipeline = make_pipeline(services, folder, text)
    for topic in topics.values():
        create_topic(pipeline.kafka, topic, PARTITIONS, 1, {})
    first = next(iter(topics.values()))
    return World(Mini(pipeline, spark, first, first, pipeline.outputs[0].topic), prefix, sources)
