"""A field of an array's element, behind a condition and without it, in a rule and in a view that join two topics.

Spark would compute ``items[0].q`` below the join, where the condition does not guard it and a search does not catch it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.local.services import Services
from zync_assets_tests.mini import make_pipeline, mini_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """
inputs:
  - {{topic: {prefix}.l, pool: Raw, format: json, key-schema: id bigint,
     value-schema: "id bigint, full boolean, items array<struct<q: int>>"}}
  - {{topic: {prefix}.r, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint"}}
outputs:
  - {{topic: {prefix}.out, pool: Staging, format: json, create: {{}}}}
transforms:
"""
VIEW = """
  - type: view
    tables: {{p: {prefix}.l, q: {prefix}.r}}
    from: p JOIN q ON p.id = q.id
    key: {{id: p.id}}
    value: {{q: "{sql}"}}
    out: {prefix}.out
"""
RULE = """
  - type: denorm
    left: {prefix}.l
    right: {prefix}.r
    join-on: left.value.id = right.value.id
    key: {{id: left.value.id}}
    value: {{q: "{sql}"}}
    out: {prefix}.out
"""
GUARDED, PLAIN = "CASE WHEN {row}.full THEN {row}.items[0].q END", "{row}.items[0].q"


@pytest.mark.parametrize(
    ("rule", "row"), [pytest.param(VIEW, "p", marks=pytest.mark.slow), (RULE, "left.value")], ids=["view", "denorm"]
)
@pytest.mark.parametrize("sql", [pytest.param(GUARDED, marks=pytest.mark.slow), PLAIN], ids=["guarded", "plain"])
def test_an_element_is_computed_where_its_condition_holds(
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    of_each_size: None,
    rule: str,
    row: str,
    sql: str,
) -> None:
    text = (TEXT + rule).format(prefix=unique, sql=sql.format(row=row))
    it = mini_of(make_pipeline(services, tmp_path, text, partitions=1), spark)

    def record(id: int, **rest: Any) -> tuple[str, dict[str, Any]]:
        return json.dumps({"id": id}), {"id": id, **rest}

    it.send(it.left, record(1, full=True, items=[{"q": 7}]), record(2, full=False, items=[]))
    it.send(it.right, record(1), record(2))
    it.step()
    found = {output["key"]["id"]: output["value"]["q"] for output in it.staged()}
    assert found == ({1: 7, 2: None} if sql == GUARDED else {1: 7})
    assert it.classes(it.left) == ({"done": 2} if sql == GUARDED else {"done": 1, "quarantined": 1})
