"""TPC-H as streams of changes: views of the join parts of queries 3, 5, 10 and 18 equal DuckDB's answer after every batch.

The rows come in random order, then updates and deletes. Prices are in cents, discounts in percent, and dates are texts.
DuckDB's ``dbgen`` makes the tables where DuckDB can load its extension ``tpch``. Elsewhere, this module makes tables of the
same shape: the same row counts, foreign keys and ranges of values.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from zync_assets.local.services import Services
from zync_assets_tests.view_world import Change, Source, make_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = dict[str, Any]

TABLES = {
    "region": Source({"r_regionkey": "bigint", "r_name": "string"}, ("r_regionkey",)),
    "nation": Source({"n_nationkey": "bigint", "n_name": "string", "n_regionkey": "bigint"}, ("n_nationkey",)),
    "supplier": Source({"s_suppkey": "bigint", "s_nationkey": "bigint"}, ("s_suppkey",)),
    "customer": Source(
        {"c_custkey": "bigint", "c_name": "string", "c_nationkey": "bigint", "c_mktsegment": "string", "c_acctbal": "bigint"},
        ("c_custkey",),
    ),
    "orders": Source(
        {
            "o_orderkey": "bigint",
            "o_custkey": "bigint",
            "o_orderdate": "string",
            "o_shippriority": "bigint",
            "o_totalprice": "bigint",
        },
        ("o_orderkey",),
    ),
    "lineitem": Source(
        {
            "l_orderkey": "bigint",
            "l_linenumber": "bigint",
            "l_suppkey": "bigint",
            "l_quantity": "bigint",
            "l_extendedprice": "bigint",
            "l_discount": "bigint",
            "l_returnflag": "string",
            "l_shipdate": "string",
        },
        ("l_orderkey", "l_linenumber"),
    ),
}  # fmt: skip

VIEWS = """
  - name: q3
    type: view
    tables: {c: $customer, o: $orders, l: $lineitem}
    from: c JOIN o ON c.c_custkey = o.o_custkey JOIN l ON l.l_orderkey = o.o_orderkey
    where: c.c_mktsegment = 'BUILDING' AND o.o_orderdate < '1995-03-15' AND l.l_shipdate > '1995-03-15'
    key: {orderkey: o.o_orderkey}
    value: {orderdate: o.o_orderdate, priority: o.o_shippriority, revenue: sum(l.l_extendedprice * (100 - l.l_discount))}
  - name: q5
    type: view
    tables: {c: $customer, o: $orders, l: $lineitem, s: $supplier, n: $nation, r: $region}
    from: >
      c JOIN o ON c.c_custkey = o.o_custkey JOIN l ON l.l_orderkey = o.o_orderkey JOIN s ON l.l_suppkey = s.s_suppkey
      JOIN n ON s.s_nationkey = n.n_nationkey JOIN r ON n.n_regionkey = r.r_regionkey
    where: >
      c.c_nationkey = s.s_nationkey AND r.r_name = 'ASIA' AND o.o_orderdate >= '1994-01-01' AND o.o_orderdate < '1995-01-01'
    key: {orderkey: l.l_orderkey, line: l.l_linenumber}
    value: {nation: n.n_name, revenue: l.l_extendedprice * (100 - l.l_discount)}
  - name: q10
    type: view
    tables: {c: $customer, o: $orders, l: $lineitem, n: $nation}
    from: c JOIN o ON c.c_custkey = o.o_custkey JOIN l ON l.l_orderkey = o.o_orderkey JOIN n ON c.c_nationkey = n.n_nationkey
    where: o.o_orderdate >= '1993-10-01' AND o.o_orderdate < '1994-01-01' AND l.l_returnflag = 'R'
    key: {custkey: c.c_custkey}
    value: {name: c.c_name, nation: n.n_name, balance: c.c_acctbal, revenue: sum(l.l_extendedprice * (100 - l.l_discount))}
  - name: q18
    type: view
    tables: {c: $customer, o: $orders, l: $lineitem}
    from: c JOIN o ON c.c_custkey = o.o_custkey JOIN l ON l.l_orderkey = o.o_orderkey
    key: {orderkey: o.o_orderkey}
    value: {name: c.c_name, price: o.o_totalprice, date: o.o_orderdate, quantity: sum(l.l_quantity)}
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scale", [0.01, 0.1])
@pytest.mark.parametrize("query", ["q3", "q5", "q10", "q18"])
def test_a_join_of_tpch_equals_duckdb_after_every_batch(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, scale: float, query: str
) -> None:
    world = make_world(services, spark, tmp_path, unique, TABLES, VIEWS, [query])
    used = [table for table in TABLES if world.topic(table) in world.it.pipeline.rules[0].topics]
    for changes in batches({name: rows for name, rows in tables(scale).items() if name in used}, random.Random(7)):
        world.send(changes)
        world.ingest()
        world.etl()
        world.check()
    assert world.records(world.outputs[0])


def test_the_tables_that_are_made_here_give_each_query_an_answer() -> None:
    made = generated(0.01)
    assert {name: len(rows) for name, rows in made.items()} | {"lineitem": 0} == {
        **{"region": 5, "nation": 25, "supplier": 100, "customer": 1_500, "orders": 15_000, "lineitem": 0},
    }
    assert 55_000 < len(made["lineitem"]) < 65_000
    assert made == generated(0.01)
    assert {name: list(rows[0]) for name, rows in made.items()} == {
        name: list(source.columns) for name, source in TABLES.items()
    }


def batches(rows: Mapping[str, Sequence[Row]], choice: random.Random) -> Iterator[list[Change]]:
    """Three batches of inserts in random order, and three of updates and deletes."""
    inserts = [_change(table, row) for table, found in rows.items() for row in found]
    choice.shuffle(inserts)
    size = len(inserts) // 3 + 1
    for first in range(0, len(inserts), size):
        yield inserts[first : first + size]
    for _ in range(3):
        changes: list[Change] = []
        for table, found in rows.items():
            for row in choice.sample(found, min(len(found), 5 + len(found) // 200)):
                other = choice.choice(found)
                # Another row's values: foreign keys, dates and names change too.
                key = {name: row[name] for name in TABLES[table].key}
                deleted = table in ("orders", "lineitem", "customer") and choice.random() < 0.4
                changes.append(Change(table, key, None) if deleted else _change(table, other | key))
        choice.shuffle(changes)
        yield changes


def _change(table: str, row: Row) -> Change:
    key = TABLES[table].key
    return Change(
        table,
        {name: row[name] for name in key},
        {name: part for name, part in row.items() if name not in key},
    )


def tables(scale: float) -> dict[str, list[Row]]:
    """The rows of each table."""
    connection = duckdb.connect()
    try:
        connection.execute("LOAD tpch")
    except duckdb.Error:
        return generated(scale)
    connection.execute(f"CALL dbgen(sf = {scale})")
    found: dict[str, list[Row]] = {}
    for table, source in TABLES.items():
        columns = ", ".join(_column(name, kind) for name, kind in source.columns.items())
        rows = connection.execute(f"SELECT {columns} FROM {table}").fetchall()
        found[table] = [dict(zip(source.columns, row, strict=True)) for row in rows]
    return found


def _column(name: str, kind: str) -> str:
    in_hundredths = name in ("c_acctbal", "o_totalprice", "l_extendedprice", "l_discount")
    made = f"{name} * 100" if in_hundredths else name
    return f"CAST({made} AS {'BIGINT' if kind == 'bigint' else 'VARCHAR'}) AS {name}"


NATIONS = (
    *(("ALGERIA", 0), ("ARGENTINA", 1), ("BRAZIL", 1), ("CANADA", 1), ("EGYPT", 4), ("ETHIOPIA", 0), ("FRANCE", 3)),
    *(("GERMANY", 3), ("INDIA", 2), ("INDONESIA", 2), ("IRAN", 4), ("IRAQ", 4), ("JAPAN", 2), ("JORDAN", 4)),
    *(("KENYA", 0), ("MOROCCO", 0), ("MOZAMBIQUE", 0), ("PERU", 1), ("CHINA", 2), ("ROMANIA", 3), ("SAUDI ARABIA", 4)),
    *(("VIETNAM", 2), ("RUSSIA", 3), ("UNITED KINGDOM", 3), ("UNITED STATES", 1)),
)
REGIONS = ("AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST")
SEGMENTS = ("AUTOMOBILE", "BUILDING", "FURNITURE", "MACHINERY", "HOUSEHOLD")
FIRST, DAYS = date(1992, 1, 1), 2_406


def generated(scale: float) -> dict[str, list[Row]]:
    """Tables of TPC-H's shape. A third of the customers has no order, and an order has one to seven lines."""
    choice = random.Random(18)
    customers, orders, suppliers = int(150_000 * scale), int(1_500_000 * scale), int(10_000 * scale)
    found: dict[str, list[Row]] = {
        "region": [{"r_regionkey": at, "r_name": name} for at, name in enumerate(REGIONS)],
        "nation": [
            {"n_nationkey": at, "n_name": name, "n_regionkey": region} for at, (name, region) in enumerate(NATIONS)
        ],
        "supplier": [{"s_suppkey": at, "s_nationkey": choice.randrange(25)} for at in range(1, suppliers + 1)],
        "customer": [
            {
                "c_custkey": at,
                "c_name": f"Customer#{at:09}",
                "c_nationkey": choice.randrange(25),
                "c_mktsegment": choice.choice(SEGMENTS),
                "c_acctbal": choice.randint(-99_999, 999_999),
            }
            for at in range(1, customers + 1)
        ],
        "orders": [],
        "lineitem": [],
    }
    for at in range(orders):
        # Keys have gaps, as in TPC-H: eight of each 32 numbers.
        key, day = at // 8 * 32 + at % 8 + 1, choice.randrange(DAYS - 151)
        lines: list[Row] = []
        for number in range(1, choice.randint(1, 7) + 1):
            quantity = choice.randint(1, 50)
            lines.append(
                {
                    "l_orderkey": key,
                    "l_linenumber": number,
                    "l_suppkey": choice.randint(1, suppliers),
                    "l_quantity": quantity,
                    "l_extendedprice": quantity * choice.randint(90_000, 200_000),
                    "l_discount": choice.randint(0, 10),
                    "l_returnflag": choice.choice("RAN"),
                    "l_shipdate": str(FIRST + timedelta(days=day + choice.randint(1, 121))),
                }
            )
        found["orders"].append(
            {
                "o_orderkey": key,
                "o_custkey": choice.choice([number for number in _three(choice, customers) if number % 3]),
                "o_orderdate": str(FIRST + timedelta(days=day)),
                "o_shippriority": 0,
                "o_totalprice": sum(line["l_extendedprice"] * (100 - line["l_discount"]) // 100 for line in lines),
            }
        )
        found["lineitem"] += lines
    return found


def _three(choice: random.Random, most: int) -> range:
    """Three neighbours, two of which are no multiples of three."""
    first = choice.randint(1, most - 2)
    return range(first, first + 3)
