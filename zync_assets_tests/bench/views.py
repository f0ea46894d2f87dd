"""Views: a first build against a DuckDB script with the same result, and small batches over a large state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from zync_assets.etl.views.state import state_files
from zync_assets.etl.views.tables import stored_tables
from zync_assets.lake import raw, staging, storage
from zync_assets.pipeline import Pipeline
from zync_assets.runner import etl_all
from zync_assets_tests.bench.data import EPOCH, append_raw, texts
from zync_assets_tests.bench.memory import peak_memory
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import TASKS, World

REST = """
inputs:
  - {topic: customers, pool: Raw, format: avro}
  - {topic: orders, pool: Raw, format: avro}
  - {topic: lines, pool: Raw, format: avro}
outputs:
  - {topic: documents, pool: Staging, format: avro, create: {replication-factor: 1}}
transforms:
  - type: view
    tables: {o: orders, c: customers, l: lines}
    from: o JOIN c ON o.customer = c.id LEFT JOIN l ON l.order_id = o.id
    key: {id: o.id}
    value:
      id: o.id
      customer: c.name
      status: o.status
      lines: collect_list(struct(l.position, l.item, l.quantity))
      total: sum(l.quantity * l.price)
    out: documents
"""
PER_CUSTOMER, PER_ORDER = 10, 3
NEW, CUSTOMERS, BATCHES = 2_000, 20, 100
LARGE = 100_000
"""The orders of one customer."""


def measure_views(world: World) -> Iterator[dict[str, object]]:
    """The first build, changes over two states, a customer with many orders, the size of the state, and memory."""
    yield _first_build(world)
    yield from _changes(world)
    yield from _large_customer(world)
    yield _size(world)
    yield _memory(world)


def _first_build(world: World) -> dict[str, object]:
    shop = _Shop(world, "build", world.sized(3_000_000))
    shop.begin()
    found = world.rounds.measure(
        f"views, first build of {shop.orders}", {"ours": shop.build, "reference": shop.reference}
    )
    world.empty(shop.pipeline)
    return time_row("views", f"first build, {shop.orders:,} orders", found["ours"], found["reference"], "≤ 6")


def _changes(world: World) -> Iterator[dict[str, object]]:
    """In turn over both states: orders, lines and customers from anywhere, then orders and lines of the newest 1 %."""
    small, large = (_Shop(world, f"state-{size}", world.sized(size)) for size in (1_000_000, 10_000_000))
    ways = {
        f"{name} {shop.orders}": (lambda shop=shop, newest=name == "newest": shop.change(newest=newest))
        for name in ("any", "newest")
        for shop in (small, large)
    }
    found = world.rounds.measure(f"views, changes, {world.scale}", ways)
    for name, about, goal in (("any", "", "≤ 1.5, ≤ 3 s"), ("newest", " of the newest 1 %", "≤ 1.2")):
        ours, least = (found[f"{name} {shop.orders}"] for shop in (large, small))
        yield time_row("views", f"{NEW:,} changes{about} over {large.orders:,} orders", ours, least, goal)


def _large_customer(world: World) -> Iterator[dict[str, object]]:
    orders = world.sized(1_000_000)
    shop = _Shop(world, "large-customer", orders, large=world.sized(LARGE))
    found = world.rounds.measure(f"views, large customer, {world.scale}", {"ours": shop.rename})
    yield time_row("views", f"a customer of {shop.large:,} orders renamed", found["ours"], None, "≤ 10 s")


def _size(world: World) -> dict[str, object]:
    shop = _Shop(world, "size", world.sized(1_000_000))
    once = replace(world.rounds, count=1)
    found = once.measure(f"views, size, {world.scale}", {"ours": shop.state_size, "reference": shop.row_size})
    work = f"the state of {shop.orders:,} orders after {BATCHES} batches"
    return time_row("views", work, found["ours"], found["reference"], "≤ 3", "MiB")


def _memory(world: World) -> dict[str, object]:
    whole, tenth = (_Shop(world, f"memory-{orders}", world.sized(orders)) for orders in (3_000_000, 300_000))
    once = replace(world.rounds, count=1)
    found = once.measure(f"views, memory, {world.scale}", {"all": whole.peak, "tenth": tenth.peak})
    for shop in (whole, tenth):
        world.empty(shop.pipeline)
    work = f"memory of the first build of {whole.orders:,} orders, beside a tenth"
    return time_row("views", work, found["all"], found["tenth"], "≤ 1.1, ≤ 3 GiB", "GiB")


class _Shop:
    """Customers, their orders and the lines of these. The orders of a customer are far from each other.

    ``large``: the orders of one further customer. They are the first ones, and have the lowest numbers.
    """

    def __init__(self, world: World, name: str, orders: int, large: int = 0) -> None:
        self.world, self.orders, self.large = world, orders, large
        self.customers = max(CUSTOMERS, orders // PER_CUSTOMER)
        self.pipeline = world.pipeline(f"views-{name}-{world.scale}", REST)

    def begin(self) -> None:
        """Raw records of all tables, in place of what the lake has."""
        self.world.empty(self.pipeline)
        customers = np.arange(self.customers + (self.large > 0))
        self._append("customers", self._customer_rows(customers, 0), customers * 0)
        orders = np.arange(-self.large, self.orders)
        self._append("orders", self._order_rows(orders, 0), orders + self.large)
        lines = np.repeat(orders, PER_ORDER)
        numbers = np.arange(-self.large * PER_ORDER, self.orders * PER_ORDER)
        self._append("lines", self._line_rows(numbers, lines, 0), lines + self.large)

    def build(self) -> float:
        """Seconds of the first build."""
        self.world.empty(self.pipeline, "Staging")
        return self._etl(self.orders + self.large)

    def reference(self) -> float:
        """Seconds of the script, in a database that is in memory."""
        target = self.world.folder / "documents.parquet"
        paths = {topic: _paths(self.pipeline, topic) for topic in ("customers", "orders", "lines")}
        with duckdb.connect(config={"threads": TASKS}) as database:
            started = time.monotonic()
            made = database.execute(SCRIPT.format(target=target, **paths)).fetchall()
            took = time.monotonic() - started
        assert made == [(self.orders,)]
        target.unlink()
        return took

    def change(self, *, newest: bool) -> float:
        """Seconds of a batch of NEW records."""
        self._make()
        batch = self._batch()
        choice = np.random.default_rng(batch)
        first = self.orders - max(NEW, self.orders // 100) if newest else 0
        among, count = np.arange(max(0, first), self.orders), min((NEW - CUSTOMERS) // 2, self.orders)
        if not newest:
            customers = choice.choice(np.arange(self.customers), CUSTOMERS, replace=False)
            self._append("customers", self._customer_rows(customers, batch), self._times(customers, batch))
        orders, lines = (choice.choice(among, count, replace=False) for _ in range(2))
        self._append("orders", self._order_rows(orders, batch), self._times(orders, batch))
        self._append("lines", self._line_rows(lines * PER_ORDER, lines, batch), self._times(lines, batch))
        return self._etl(len(orders))

    def rename(self) -> float:
        """Seconds of a batch that renames the customer with many orders."""
        self._make()
        customer, batch = np.array([self.customers]), self._batch()
        self._append("customers", self._customer_rows(customer, batch), self._times(customer, batch))
        return self._etl(self.large)

    def state_size(self) -> float:
        """MiB of the state after BATCHES batches."""
        self._make()
        while self._batch() < BATCHES:
            self.change(newest=False)
        state = staging.open_staging(self.pipeline.lake, "Staging")
        assert state is not None
        return sum(item.size for table in stored_tables(state.head) for item in state_files(state, table).all) / 2**20

    def row_size(self) -> float:
        """MiB of the latest rows as Parquet."""
        target = self.world.folder / "rows.parquet"
        size = 0
        with duckdb.connect(config={"threads": TASKS}) as database:
            for topic in ("customers", "orders", "lines"):
                latest = (
                    "SELECT unnest(row) FROM (SELECT key, max_by(value, kafka.offset) AS row FROM"
                    f" read_parquet({_paths(self.pipeline, topic)}) GROUP BY key ORDER BY key)"
                )
                database.execute(f"COPY ({latest}) TO '{target}' (FORMAT parquet, COMPRESSION snappy)")
                size += target.stat().st_size
        target.unlink()
        return size / 2**20

    def peak(self) -> float:
        """GiB of all processes of ``zync etl`` at the most, for the first build."""
        if raw.open_raw(self.pipeline.lake, "Raw", "orders") is None:
            self.begin()
        self.world.empty(self.pipeline, "Staging")
        return peak_memory("etl", self.world.folder / f"{self.pipeline.name}.yaml") / 2**30

    def _make(self) -> None:
        """The state of all tables, if the lake has none."""
        if not self._batch():
            self.begin()
            self._etl(self.orders)

    def _batch(self) -> int:
        state = staging.open_staging(self.pipeline.lake, "Staging")
        return 0 if state is None else state.head.batch

    def _etl(self, least: int) -> float:
        """Seconds of ETL, which stages at least so many documents."""
        spark = self.world.spark(self.pipeline)
        started = time.monotonic()
        commits = list(etl_all(self.pipeline, lambda: spark))
        took = time.monotonic() - started
        assert (
            sum(part.end - part.first for each in commits for parts in each.outputs.values() for part in parts) >= least
        )
        return took

    def _append(self, topic: str, rows: pa.StructArray, times: np.ndarray[Any, Any]) -> None:
        """Records of rows. ``times``: in milliseconds after EPOCH."""
        state = raw.open_raw(self.pipeline.lake, "Raw", topic)
        first = state.next[0] if state else 0
        keys = pa.StructArray.from_arrays([rows.field("id")], ["id"])
        offsets = np.arange(first, first + len(rows))
        append_raw(self.pipeline.lake, "Raw", topic, offsets, keys, rows, pa.array(EPOCH + times))

    def _times(self, rows: np.ndarray[Any, Any], batch: int) -> np.ndarray[Any, Any]:
        """Times after those of the first records."""
        return np.full(len(rows), self.large + self.orders + batch)

    def _customer_rows(self, numbers: np.ndarray[Any, Any], batch: int) -> pa.StructArray:
        return _rows(id=pa.array(numbers), name=texts(f"customer of batch {batch} ", numbers))

    def _order_rows(self, numbers: np.ndarray[Any, Any], batch: int) -> pa.StructArray:
        customers = np.where(numbers < 0, self.customers, numbers % self.customers)
        return _rows(
            id=pa.array(numbers),
            customer=pa.array(customers),
            status=pa.repeat(pa.scalar(f"status {batch}"), len(numbers)),
            placed=pa.array(EPOCH + numbers),
            comment=texts("as the customer said on the telephone, at ", numbers % 10_007),
        )

    def _line_rows(self, numbers: np.ndarray[Any, Any], orders: np.ndarray[Any, Any], batch: int) -> pa.StructArray:
        return _rows(
            id=pa.array(numbers),
            order_id=pa.array(orders),
            position=pa.array(numbers % PER_ORDER),
            item=texts("item ", numbers % 10_007),
            quantity=pa.array(1 + (numbers + batch) % 7),
            price=pa.array(100 + numbers % 9_001),
        )


def _rows(**columns: pa.Array) -> pa.StructArray:
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def _paths(pipeline: Pipeline, topic: str) -> list[str]:
    state = raw.open_raw(pipeline.lake, "Raw", topic)
    assert state is not None
    return [str(Path(storage.join(state.table.uri, item.path))) for item in raw.raw_files(state)]


SCRIPT = """
COPY (
    WITH c AS (SELECT unnest(max_by(value, kafka.offset)) FROM read_parquet({customers}) GROUP BY key),
    o AS (
        SELECT unnest(max_by(value, kafka.offset)), max(kafka.offset) AS "offset" FROM read_parquet({orders}) GROUP BY key
    ),
    l AS (SELECT unnest(max_by(value, kafka.offset)) FROM read_parquet({lines}) GROUP BY key)
    SELECT
        row_number() OVER (ORDER BY o.offset) - 1 AS number, {{'id': o.id}} AS key,
        {{'id': o.id, 'customer': c.name, 'status': o.status, 'lines': lines, 'total': total}} AS value
    FROM o JOIN c ON o.customer = c.id LEFT JOIN (
        SELECT
            order_id, sum(quantity * price) AS total,
            list({{'position': position, 'item': item, 'quantity': quantity}} ORDER BY position, item, quantity) AS lines
        FROM l GROUP BY order_id
    ) l ON l.order_id = o.id
    ORDER BY number
) TO '{target}' (FORMAT parquet, COMPRESSION snappy)
"""
