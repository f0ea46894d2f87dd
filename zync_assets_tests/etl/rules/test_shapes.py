"""Shapes as SQL, and one type for an output topic over all its rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
)

from zync_assets.errors import EtlError
from zync_assets.etl.rules import shapes
from zync_assets.etl.rules.shapes import Question, expression_type, learn_types, made_sql, own_type, unify, void_fields
from zync_assets.lake.parquet_rows import RecentCache
from zync_assets.spark.sql import shape_sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def struct(**fields: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


LONG, TEXT, VOID, INT, DECIMAL = LongType(), StringType(), NullType(), IntegerType(), DecimalType(9, 2)


def test_a_shape_is_one_expression() -> None:
    assert shape_sql(None) == "NULL"
    assert shape_sql("in.value.id") == "(in.value.id)"
    assert shape_sql({"a": "x", "b": {"c": None}}) == "named_struct('a', (x), 'b', named_struct('c', NULL))"


def test_a_field_s_name_may_hold_quotes() -> None:
    assert shape_sql({"it's \\": "1"}) == "named_struct('it\\'s \\\\', (1))"


def test_a_topic_s_type_has_the_fields_of_all_rules_in_the_order_in_which_they_come() -> None:
    one, two = struct(id=LONG, deep=struct(a=TEXT)), struct(v=TEXT, deep=struct(b=LONG, a=VOID), id=LONG)
    whole = unify([("rule one", one), ("rule two", two)], "t", "value")
    assert whole == struct(id=LONG, deep=struct(a=TEXT, b=LONG), v=TEXT)


def test_null_says_nothing_about_a_type() -> None:
    assert unify([("a", VOID), ("b", TEXT), ("c", VOID)], "t", "key") == TEXT
    assert unify([], "t", "key") == VOID


@pytest.mark.parametrize("other", [TEXT, struct(x=LONG)])
def test_two_types_for_one_field_name_the_topic_the_field_and_both_rules(other: DataType) -> None:
    with pytest.raises(EtlError) as error:
        unify(
            [("rule one", struct(deep=struct(a=LONG))), ("rule two", struct(deep=struct(a=other)))], "out.rows", "value"
        )
    for word in ("out.rows", "value.deep.a", "bigint", other.simpleString(), "rule one", "rule two", "CAST"):
        assert word in str(error.value)


def test_the_error_names_the_rule_that_gave_the_field_its_type() -> None:
    """Not merely the first rule of the topic, which may lack the field."""
    parts = [("rule one", struct(id=LONG)), ("rule two", struct(v=LONG)), ("rule three", struct(v=TEXT))]
    with pytest.raises(EtlError, match="string in rule three and bigint in rule two"):
        unify(parts, "t", "value")


def test_the_pool_s_type_and_the_rules_may_be_wider_than_each_other() -> None:
    table = struct(id=INT, amount=DECIMAL, tags=ArrayType(LONG), gone=TEXT)
    rules = [("rule one", struct(amount=LONG, id=LONG, tags=ArrayType(INT), more=TEXT)), ("rule two", struct(id=LONG))]
    whole = unify(rules, "t", "value", table)
    assert whole == struct(id=LONG, amount=DecimalType(22, 2), tags=ArrayType(LONG), gone=TEXT, more=TEXT)
    with pytest.raises(
        EtlError,
        match=r"value\.id is string in rule x and int in the staging pool.*: CAST the rule's, or name another output",
    ):
        unify([("rule x", struct(id=TEXT))], "t", "value", table)


def test_structs_in_arrays_and_maps_get_the_fields_of_the_pool_and_of_the_rules(spark: SparkSession) -> None:
    table = struct(lines=ArrayType(struct(id=INT, gone=TEXT)), deep=MapType(INT, ArrayType(struct(a=TEXT))))
    rule = struct(lines=ArrayType(struct(id=LONG, more=TEXT)), deep=MapType(INT, ArrayType(struct(b=LONG, a=TEXT))))
    whole = unify([("rule one", rule)], "t", "value", table)
    assert whole == struct(
        lines=ArrayType(struct(id=LONG, gone=TEXT, more=TEXT)), deep=MapType(INT, ArrayType(struct(a=TEXT, b=LONG)))
    )
    rows = [((([(1, "x"), None], {7: [(2, "y")], 8: None})),), ((None, None),), (None,)]
    frame = spark.createDataFrame(rows, struct(value=rule))
    [first, second, third] = frame.selectExpr(f"{made_sql('value', rule, whole)} AS value").collect()
    assert first["value"].asDict(recursive=True) == {
        "lines": [{"id": 1, "gone": None, "more": "x"}, None],
        "deep": {7: [{"a": "y", "b": 2}], 8: None},
    }
    assert second["value"].asDict() == {"lines": None, "deep": None}
    assert third["value"] is None
    long_keys = struct(deep=MapType(LONG, ArrayType(struct(a=TEXT, b=LONG))))
    assert unify([("rule one", rule)], "t", "value", long_keys)["deep"] == long_keys["deep"]
    [row, *_] = frame.selectExpr(f"{made_sql('value', rule, long_keys)} AS value").collect()
    assert row["value"].asDict(recursive=True) == {"deep": {7: [{"a": "y", "b": 2}], 8: None}}
    with pytest.raises(EtlError, match=r"value\.lines\[\]\.id is string in rule x and int in the staging pool"):
        unify([("rule x", struct(lines=ArrayType(struct(id=TEXT))))], "t", "value", table)


def test_a_rule_keeps_its_own_fields_and_takes_the_type_of_a_null_from_the_topic() -> None:
    whole = struct(id=LONG, v=TEXT, deep=struct(a=TEXT, b=LONG))
    assert own_type(struct(deep=struct(b=VOID), id=LONG), whole) == struct(deep=struct(b=LONG), id=LONG)
    assert own_type(VOID, whole) == whole


def test_fields_without_a_type_are_named_by_their_paths() -> None:
    assert void_fields(struct(a=VOID, deep=struct(b=LONG, c=VOID)), "value") == ["value.a", "value.deep.c"]
    assert void_fields(struct(a=LONG), "value") == []


def test_types_that_are_asked_for_together_are_those_that_each_has_alone(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = "named_struct('partition', 0) AS kafka"
    one = spark.sql(f"SELECT {row}, 'k' AS key, named_struct('id', 1L, 'op', 'c') AS value")
    two = spark.sql(f"SELECT {row}, 1 AS key, named_struct('id', 1L, 'deep', named_struct('a', 'x')) AS value")
    asked: list[Question] = [
        ({"": one}, "(value.op = 'c')"),
        ({"in": one}, "named_struct('id', (in.value.id), 'n', NULL)"),
        ({"left": one}, "(left.value.id)"),
        ({"right": two}, "(right.value.id)"),
        ({"left": one, "right": two}, "named_struct('a', (left.key), 'b', (right.value.deep))"),
        ({"left": two, "right": one}, "left.value"),
    ]

    def alone() -> list[DataType]:
        return [expression_type(sides, sql, "rule", "value") for sides, sql in asked]

    def known_after(work: Callable[[], object]) -> list[DataType | None]:
        """The types that are known after some work, by a cache that was empty before."""
        cache: RecentCache[tuple[object, ...], DataType] = RecentCache(100)
        monkeypatch.setattr(shapes, "_TYPES", cache)
        work()
        return [cache.get(shapes._place(*each)) for each in asked]

    together = known_after(lambda: learn_types(asked))
    assert None not in together
    assert together == known_after(alone)

    with_a_fault: list[Question] = [*asked, ({"": one}, "(value.nothing)")]
    assert known_after(lambda: learn_types(with_a_fault)) == [None] * len(asked)
    with pytest.raises(EtlError, match=r"rule r, where: value\.nothing"):
        expression_type({"": one}, "value.nothing", "r", "where")
    assert len(alone()) == len(asked)
