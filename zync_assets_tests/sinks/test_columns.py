"""The user's function over a batch: what it may return, and the errors that name it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from zync_assets.errors import SinkError
from zync_assets.pipeline import Sink, SinkMode, SinkTable
from zync_assets.sinks.columns import IS_DELETE, Layout, make_layout
from zync_assets.sinks.fold import OFFSET
from zync_assets.sinks.sqlite import SqliteTarget

HERE = "zync_assets_tests.sinks.functions"


def made(function: str) -> Layout:
    return layout_of(Sink("shop", "sqlite", "shop.db", before=f"{HERE}:{function}"))


def layout_of(sink: Sink) -> Layout:
    sides = {"key": pa.struct([("id", pa.int64())]), "value": pa.struct([("v", pa.string())])}
    return make_layout(sink, SinkTable("Raw", "t", "rows", staged=False), SqliteTarget(""), sides, "", {}, None, {})


def test_two_columns_of_one_name_are_an_error() -> None:
    sink = Sink("shop", "sqlite", "shop.db", rename={"v": "id"})
    sides = {"key": pa.struct([("id", pa.int64())]), "value": pa.struct([("v", pa.string())])}
    with pytest.raises(SinkError, match=r"sink shop, Raw\.t: two columns would be called id"):
        make_layout(sink, SinkTable("Raw", "t", "rows", staged=False), SqliteTarget(""), sides, "", {}, None, {})


def rows(layout: Layout) -> pa.RecordBatch:
    return layout.records(
        pa.RecordBatch.from_pydict({"c0": [1, 2], "c1": ["a", "b"], IS_DELETE: [False, False], OFFSET: [0, 1]})
    ).rows


def test_a_function_may_add_a_column() -> None:
    assert rows(made("upper")).to_pydict() == {"id": [1, 2], "v": ["a", "b"], "upper": ["A", "B"]}


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("failing", f"before: function {HERE}:failing failed: ValueError: no such country. Correct it, and run again."),
        ("absent", f"before: function {HERE}:absent failed: AttributeError: "),
        ("missing", f"before: function {HERE}:missing: AttributeError: "),
        ("shifting", "returns column size as int64, and of an empty batch as int32"),
        ("lossy", "returns column v as nothing, and of an empty batch as string"),
        (
            "rekeying",
            "changes the key column id. Let it keep the key columns, and change the key with before: {set: ...}",
        ),
        ("untyped", "must give column size a type, for an empty batch too"),
    ],
)
def test_the_error_of_a_function_names_it(function: str, text: str) -> None:
    with pytest.raises(SinkError) as error:
        rows(made(function))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("where", "mode", "delete", "conditions"),
    [
        ("value.v = 'a' OR true", "upsert", True, ("coalesce(value IS NULL, false) OR (value.v = 'a' OR true)",)),
        ("KEY.id < 3", "upsert", True, ("KEY.id < 3",)),
        ("value.v = 'a'", "upsert", False, ("value.v = 'a'", "NOT coalesce(value IS NULL, false)")),
        ("value.v = 'a'", "insert", True, ("value.v = 'a'",)),
    ],
)
def test_a_delete_passes_a_condition_on_the_value(
    where: str, mode: SinkMode, delete: bool, conditions: tuple[str, ...]
) -> None:
    sink = Sink("shop", "sqlite", "shop.db", mode=mode, where=where, delete=delete)
    assert layout_of(sink).where == conditions
