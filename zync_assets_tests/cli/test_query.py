"""SQL over the pools: which tables are found in the text, and what Spark answers on a real lake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.cli.query import rewrite, run_query, unique_names
from zync_assets.errors import ZyncError
from zync_assets.local.services import Services
from zync_assets_tests.checks.chain import Chain
from zync_assets_tests.mini import make_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = [("Raw", "Invoices"), ("Raw", "shop.public.orders"), ("Staging", "New"), ("Staging", "New@latest")]


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("select * from Raw.Invoices", "select * from zync_0 AS `Invoices`"),
        ("select * from raw.invoices i", "select * from zync_0 i"),
        ("select * from Raw.`shop.public.orders`", "select * from zync_1 AS `shop.public.orders`"),
        ("from Raw . Invoices select key", "from zync_0 AS `Invoices` select key"),
        (
            "select Raw.Invoices.value.ID, 'Raw.Invoices' from Raw.Invoices join Staging.New n on true",
            "select `Invoices`.value.ID, 'Raw.Invoices' from zync_0 AS `Invoices` join zync_2 n on true",
        ),
        (
            "with Invoices as (select * from Raw.Invoices) -- Raw.Invoices\nselect * from Invoices",
            "with Invoices as (select * from zync_0 AS `Invoices`) -- Raw.Invoices\nselect * from Invoices",
        ),
        ("select * from Staging.New@latest", "select * from zync_3 AS `New@latest`"),
        ("select 'Staging.New@latest' from Raw.Invoices i", "select 'Staging.New@latest' from zync_0 i"),
        (r"select 'it\'s Staging.New@latest' from Raw.Invoices i", r"select 'it\'s Staging.New@latest' from zync_0 i"),
        ('select "a Staging.New@latest" from Raw.Invoices i', 'select "a Staging.New@latest" from zync_0 i'),
        ("select 1 `Staging.New@latest` from Raw.Invoices i", "select 1 `Staging.New@latest` from zync_0 i"),
        (
            "/* Staging.New@latest */ select 1 -- Staging.New@latest",
            "/* Staging.New@latest */ select 1 -- Staging.New@latest",
        ),
        ("select 'a' from Staging.New@latest n -- it's", "select 'a' from zync_3 n -- it's"),
        ("select * from Staging.`New`@latest n", "select * from zync_3 n"),
        ("select * from staging.`New@latest` n", "select * from zync_3 n"),
        (
            "select 1 where exists (select 1 from Staging.New tablesample (10 rows))",
            "select 1 where exists (select 1 from zync_2 tablesample (10 rows))",
        ),
    ],
)
def test_only_the_names_of_tables_are_replaced(sql: str, wanted: str) -> None:
    assert rewrite(sql, TABLES).sql == wanted


def test_a_table_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ZyncError, match=r"no table Raw.New; there are Raw.Invoices, Raw.`shop.public.orders`"):
        rewrite("select * from Raw.New", TABLES)


@pytest.mark.parametrize(
    "sql", ["select * from Invoices", "select * from `Raw.Invoices`", "select * from Raw.shop-orders", "selec * from x"]
)
def test_a_name_without_a_pool_or_without_quotes_shows_the_names_that_work(sql: str) -> None:
    with pytest.raises(ZyncError, match=r"there are Raw.Invoices, Raw.`shop.public.orders`"):
        rewrite(sql, TABLES)


@pytest.mark.parametrize(
    "sql",
    [
        "with A as (select 1 as x) select * from a",
        "select * from range(5)",
        "select * from values (1), (2) as t(x)",
        "select * from (select 1) x",
    ],
)
def test_what_is_no_table_of_a_pool_needs_no_pool(sql: str) -> None:
    assert rewrite(sql, TABLES).sql == sql


@pytest.mark.parametrize("sql", ["drop table Raw.Invoices", "select 1; select 2", "selec", "", "select 'a"])
def test_what_is_no_query_is_refused(sql: str) -> None:
    with pytest.raises(ZyncError):
        rewrite(sql, TABLES)


def test_columns_that_are_called_alike_get_a_number() -> None:
    assert unique_names(["ID", "ID", "ID_2", "ID"]) == ["ID", "ID_2", "ID_2_2", "ID_3"]


def ask(chain: Chain, sql: str) -> list[dict[str, object]]:
    found = CliRunner().invoke(main, ["query", str(chain.pipeline.path), sql, "--format", "json"])
    assert found.exit_code == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_outputs_join_with_the_raw_records_that_made_them(sound_chain: Chain) -> None:
    rows = ask(
        sound_chain,
        f"""
        with made as (
          select kafka.offset as k, value, explode(source) as s from Staging.`{sound_chain.new}` where value is not null
        )
        select k, made.value.ID, i.value.ID, i.kafka.time
        from made join Raw.`{sound_chain.invoices}` i
          on s.topic = i.kafka.topic and s.partition = i.kafka.partition and s.offset = i.kafka.offset
        order by k
        """,
    )
    assert len(rows) == 6
    assert all(row["ID"] == row["ID_2"] for row in rows)
    assert {row["time"] for row in rows} == {"2023-11-14T22:13:20+00:00"}


def test_a_row_keeps_its_shape(sound_chain: Chain) -> None:
    rows = ask(
        sound_chain,
        f"select kafka.offset, key, value, source from Staging.`{sound_chain.new}` where rule = 'delete'",
    )
    assert [row["value"] for row in rows] == [None]
    assert rows[0]["source"] == [{"topic": sound_chain.invoices, "partition": 1, "offset": 4}]


def test_spark_s_refusal_is_one_line(sound_chain: Chain) -> None:
    for sql in (f"select nothing from Raw.`{sound_chain.status}`", "select cast('x' as int)"):
        found = CliRunner().invoke(main, ["query", str(sound_chain.pipeline.path), sql])
        assert found.exit_code == 1
        assert found.stderr.startswith("error: query: ")
        assert "Traceback" not in found.stderr


def test_a_column_may_have_any_name(services: Services, spark: SparkSession, tmp_path: Path) -> None:
    text = """
inputs: [{topic: a, pool: Raw, format: string}]
"""
    pipeline = make_pipeline(services, tmp_path, text)
    sql = "SELECT 1 AS `a.b`, sum(named_struct('id', 2).id), 3 AS `x ``y`, 4 AS a, 5 AS a"
    columns, rows = run_query(pipeline, rewrite(sql, []))
    assert columns == ["a.b", "sum(named_struct(id, 2).id)", "x `y", "a", "a_2"]
    assert list(rows) == [dict(zip(columns, range(1, 6), strict=True))]
