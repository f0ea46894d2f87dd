"""The oracle of views against results that are written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from zync_assets.pipeline_file import load
from zync_assets_tests.view_oracle import DuplicateKey, Oracle, Result, Table, folded, idle

SCHEMAS = {
    "o": pa.schema([("id", pa.int64()), ("customer", pa.int64()), ("status", pa.string())]),
    "c": pa.schema([("id", pa.int64()), ("name", pa.string())]),
    "l": pa.schema([("id", pa.int64()), ("order", pa.int64()), ("sku", pa.string()), ("qty", pa.int64())]),
}
ORDERS = [
    {"id": 1, "customer": 7, "status": "new"},
    {"id": 2, "customer": None, "status": "paid"},
    {"id": 3, "customer": 9, "status": "new"},
    {"id": 4, "customer": 7, "status": "draft"},
]
CUSTOMERS = [{"id": 7, "name": "Ann"}, {"id": 8, "name": "Bob"}]
LINES = [
    {"id": 1, "order": 1, "sku": "tea", "qty": 2},
    {"id": 2, "order": 1, "sku": "cup", "qty": None},
    {"id": 3, "order": None, "sku": "pot", "qty": 5},
    {"id": 4, "order": 1, "sku": "cup", "qty": 1},
]
INPUTS = [{"topic": alias, "pool": "Raw"} for alias in SCHEMAS]


def result(folder: Path, **view: Any) -> Result:
    """The oracle's result for a view; its tables are the aliases of ``from``."""
    aliases = [word for word in view["from_"].split() if word in SCHEMAS]
    rule = {"type": "view", "tables": dict.fromkeys(aliases, ""), "out": "out"}
    rule |= {name.rstrip("_").replace("_", "-"): part for name, part in view.items()} | {
        "tables": {a: a for a in aliases}
    }
    file = {"inputs": INPUTS, "outputs": [{"topic": "out", "pool": "Staging"}], "transforms": [rule]}
    (folder / "shop.yaml").write_text(json.dumps(file))
    [found] = load(folder / "shop.yaml", {}).rules
    rows = {"o": ORDERS, "c": CUSTOMERS, "l": LINES}
    return Oracle(found, {alias: SCHEMAS[alias] for alias in aliases}).result(rows)


ALL = "o LEFT JOIN c ON o.customer = c.id LEFT JOIN l ON l.order = o.id"
EMPTY = {"sku": None, "qty": None}


def test_an_outer_join_gives_nulls_and_a_collection_of_nulls(tmp_path: Path) -> None:
    value = {"name": "c.name", "lines": "collect_list(struct(l.sku, l.qty))", "n": "count(l.id)", "total": "sum(l.qty)"}
    lines = [{"sku": "cup", "qty": None}, {"sku": "cup", "qty": 1}, {"sku": "tea", "qty": 2}]
    assert result(tmp_path, from_=ALL, where="o.status <> 'draft'", key={"id": "o.id"}, value=value) == {
        '{"id": 1}': {"name": "Ann", "lines": lines, "n": 3, "total": 3},
        '{"id": 2}': {"name": None, "lines": [EMPTY], "n": 0, "total": None},
        '{"id": 3}': {"name": None, "lines": [EMPTY], "n": 0, "total": None},
    }


def test_aggregates_leave_nulls_out_and_a_filter_leaves_rows_out(tmp_path: Path) -> None:
    value = {
        "skus": "collect_set(l.sku)",
        "big": "array_agg(struct(l.id AS n)) FILTER (WHERE l.qty > 1)",
        "any": "bool_or(l.qty > 1)",
        "all": "bool_and(l.qty > 1)",
        "top": "max(struct(coalesce(l.qty, 0), l.sku)).sku",
        "mean": "avg(l.qty)",
        "n": "count(*) + o.id",
    }
    nothing = {"skus": [], "big": [], "any": None, "all": None, "mean": None}
    assert result(tmp_path, from_=ALL, where="o.id < 3", key="o.id", value=value) == {
        "1": {"skus": ["cup", "tea"], "big": [{"n": 1}], "any": True, "all": False, "top": "tea", "mean": 1.5, "n": 4},
        "2": nothing | {"top": None, "n": 3},
    }


def test_an_inner_join_leaves_out_null_and_dangling_keys(tmp_path: Path) -> None:
    joined = "l JOIN o ON l.order = o.id JOIN c ON o.customer = c.id"
    value = {"name": "upper(c.name)", "size": {"qty": "coalesce(l.qty, 0) * 2"}}
    assert result(tmp_path, from_=joined, key="l.id", value=value) == {
        "1": {"name": "ANN", "size": {"qty": 4}},
        "2": {"name": "ANN", "size": {"qty": 0}},
        "4": {"name": "ANN", "size": {"qty": 2}},
    }


def test_two_rows_of_one_key_are_an_error_or_a_choice(tmp_path: Path) -> None:
    view = {"from_": "o JOIN l ON l.order = o.id", "key": "o.id", "value": "l.sku"}
    with pytest.raises(DuplicateKey):
        result(tmp_path, **view)
    assert result(tmp_path, **view, on_duplicate_key="l.qty") == {"1": "tea"}
    assert result(tmp_path, **view, on_duplicate_key="l.id") == {"1": "cup"}


def test_the_latest_row_of_a_key_stays_and_both_kinds_of_deletes_remove_it() -> None:
    flat, envelope = Table(False), Table(True)
    flat.apply({"id": 1}, {"v": 1})
    flat.apply({"id": 1}, {"v": 2})
    flat.apply({"id": 2}, {"v": 3})
    flat.apply({"id": 2}, None)
    assert flat.rows == {'{"id": 1}': {"v": 2}}
    envelope.apply(1, {"op": "c", "after": {"v": 1}})
    envelope.apply(2, {"op": "u", "after": {"v": 2}})
    envelope.apply(1, {"op": "d", "after": None})
    envelope.apply(1, None)
    assert envelope.rows == {"2": {"v": 2}}


def test_a_fold_keeps_the_last_record_and_an_idle_record_is_found() -> None:
    records = [("a", 1), ("b", 2), ("a", None), ("b", 3)]
    assert folded(records) == {'"b"': 3}
    assert idle(records) == []
    assert idle([*records, ("b", 3), ("a", None)]) == ['"b"', '"a"']
