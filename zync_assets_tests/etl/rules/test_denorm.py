"""Join keys that Spark's ``=`` calls equal have one hash, whatever batch and type each of them came in."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.types import DataType

from zync_assets.errors import EtlError
from zync_assets.etl.rules import denorm
from zync_assets.pipeline import Rule, Side

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LETTERS = [
    "a",
    "A",
    "ß",
    "\u1e9e",
    "SS",
    "ss",
    "\u0130",
    "i",
    "i\u0307",
    "I",
    "\u0131",
    "Σ",
    "\u03c3",
    "\u03c2",
    "\u212a",
    "k",
    "K",
]
LETTERS += [
    "\u00c5",
    "\u212b",
    "\u00e5",
    "\u01c5",
    "\u01c6",
    "\u00e9",
    "e\u0301",
    "\ufb01",
    "fi",
    "\u03f4",
    "\u03b8",
    " ",
    "",
]
"""Letters of one lower case, of one upper case, and composed in two ways."""

ALIKE = [
    (
        "CAST(7 AS INT)",
        "CAST(7 AS BIGINT)",
        "CAST(7 AS DOUBLE)",
        "CAST(7 AS DECIMAL(5, 2))",
        "CAST(7 AS DECIMAL(38, 10))",
    ),
    ("CAST('12345678901234567.8' AS DECIMAL(18, 1))", "CAST('12345678901234567.8' AS DECIMAL(30, 9))"),
    ("CAST(9007199254740993 AS BIGINT)", "CAST(9007199254740993 AS DECIMAL(20, 0))"),
    ("CAST(0.5 AS FLOAT)", "CAST(0.5 AS DOUBLE)"),
    ("CAST('-0.0' AS DOUBLE)", "CAST('0.0' AS DOUBLE)", "CAST('-0.0' AS FLOAT)", "0"),
    ("CAST('NaN' AS DOUBLE)", "CAST('NaN' AS FLOAT)"),
    ("array(CAST(1 AS INT), NULL)", "array(CAST(1 AS BIGINT), NULL)", "array(CAST(1 AS DOUBLE), NULL)"),
    ("array(CAST('-0.0' AS DOUBLE))", "array(CAST('0.0' AS FLOAT))"),
    ("array(named_struct('a', 1))", "array(named_struct('a', 1L))"),
    ("named_struct('a', array(1), 'b', 'x')", "named_struct('a', array(1L), 'b', 'x')"),
    ("CAST('x' AS CHAR(3))", "CAST('x' AS VARCHAR(5))", "'x'"),
    ("collate('Abc', 'UTF8_LCASE')", "collate('aBC', 'UTF8_LCASE')"),
    ("array(collate('Abc', 'UTF8_LCASE'))", "array(collate('aBC', 'UTF8_LCASE'))"),
    (
        "named_struct('a', collate('\u00c9', 'UNICODE_CI_AI'), 'b', array(1))",
        "named_struct('a', collate('e', 'UNICODE_CI_AI'), 'b', array(1L))",
    ),
    ("collate('x ', 'UTF8_BINARY_RTRIM')", "collate('x', 'UTF8_BINARY_RTRIM')"),
    ("DATE '2020-02-02'", "CAST('2020-02-02' AS DATE)"),
]
"""Expressions that are equal, of types that a column may have one after the other."""


def join(left: str, right: str) -> Rule:
    sides = (Side("left", "t", keys=(left,)), Side("right", "u", keys=(right,)))
    return Rule("denorm", "d", sides, "out", "1", "1")


def types(spark: SparkSession, expressions: tuple[str, ...]) -> list[DataType]:
    return [item.dataType for item in frame(spark).selectExpr(*expressions).schema]


def frame(spark: SparkSession) -> DataFrame:
    return spark.range(1).selectExpr("'k' AS key", "'v' AS value", "struct(0 AS offset) AS kafka")


def test_a_key_s_hash_does_not_depend_on_the_type_that_the_key_came_in(spark: SparkSession) -> None:
    """A record that waits was hashed before the other side's type, or a wider one, was known."""
    hashes: list[str] = []
    for group in ALIKE:
        for sql, kind in zip(group, types(spark, group), strict=True):
            hashes.append(denorm.hash_sql([f"({sql})"], [kind]))
    found = list(frame(spark).selectExpr(*(f"{sql} AS h{at}" for at, sql in enumerate(hashes))).collect()[0])
    for group in ALIKE:
        mine, found = found[: len(group)], found[len(group) :]
        assert len(set(mine)) == 1, group
        assert mine[0] is not None


@pytest.mark.parametrize("collation", ["UTF8_LCASE", "UTF8_LCASE_RTRIM", "UTF8_BINARY_RTRIM", "UNICODE_CI"])
def test_texts_that_a_collation_calls_equal_have_one_hash(spark: SparkSession, collation: str) -> None:
    texts = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
    (kind,) = types(spark, (f"collate('x', '{collation}')",))
    made = spark.createDataFrame([(text,) for text in dict.fromkeys(texts)], "text string")
    each = made.selectExpr(f"collate(text, '{collation}') AS k").selectExpr(
        "k", f"{denorm.hash_sql(['k'], [kind])} AS h"
    )
    wrong = each.groupBy("k").agg({"h": "min", "k": "count"}).withColumnRenamed("min(h)", "low")
    wrong = wrong.join(each, "k").where("h <> low").selectExpr("CAST(k AS STRING) AS k")
    assert [row.k for row in wrong.limit(5).collect()] == []
    assert each.groupBy("k").count().where("count > 1").limit(1).collect()


@pytest.mark.parametrize("sql", ["map('a', 1)", "array(map('a', 1))", "parse_json('1')", "make_interval(1)"])
def test_keys_that_spark_can_t_compare_are_an_error(spark: SparkSession, sql: str) -> None:
    rule = join(sql, sql)
    with pytest.raises(EtlError, match=r"rule d, join-on: .* is .*, and Spark has no `=` for such values"):
        denorm.key_types(rule, {"left": frame(spark)})


@pytest.mark.parametrize(
    ("left", "right", "cure"),
    [
        ("collate('a', 'UTF8_LCASE')", "'a'", "COLLATE both alike"),
        ("DATE '2020-01-01'", "TIMESTAMP '2020-01-01'", "CAST one of them"),
    ],
)
def test_keys_of_two_types_are_an_error(spark: SparkSession, left: str, right: str, cure: str) -> None:
    rule = join(left, right)
    with pytest.raises(EtlError, match=cure):
        denorm.key_types(rule, {"left": frame(spark), "right": frame(spark)})


def test_which_keys_are_hashed_as_they_ever_were(spark: SparkSession) -> None:
    same = ("1", "'a'", "named_struct('a', 1L)", "array('a')", "array(1D)", "DATE '2020-01-01'")
    other = ("array(1)", "named_struct('a', array(1.5))", "array(named_struct('a', 1L))", "collate('a', 'UTF8_LCASE')")
    assert all(denorm.is_hashed_as_ever([kind]) for kind in types(spark, same))
    assert not any(denorm.is_hashed_as_ever([kind]) for kind in types(spark, other))
    # The hashes of older versions: numbers as doubles, also inside structs.
    old = ["xxhash64(1D)", "xxhash64('a')", "xxhash64(named_struct('a', 1D))", "xxhash64(array('a'))"]
    new = [denorm.hash_sql([f"({sql})"], [kind]) for sql, kind in zip(same, types(spark, same), strict=True)]
    row = list(frame(spark).selectExpr(*old, *new[:4]).collect()[0])
    assert row[:4] == row[4:]
