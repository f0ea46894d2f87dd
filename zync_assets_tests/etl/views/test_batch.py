"""The views of a batch: what counts as the definition of a result, and which views need no new record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.errors import EtlError
from zync_assets.local.services import Services
from zync_assets.runner import rebuild_all
from zync_assets_tests.mini import Mini, make_pipeline, mini_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """
inputs:
  - {{topic: {topic}, pool: Raw, format: json, key-schema: id int,
     value-schema: "id int, n int, d double, at timestamp, tags map<string, int>, `first name` string"}}
outputs:
  - {{topic: {topic}.a, pool: Staging, format: json, create: {{}}}}
  - {{topic: {topic}.b, pool: Staging, format: json, create: {{}}}}
transforms:
  - {{name: old, type: view, tables: {{o: {topic}}}, from: o, key: {{id: o.id}}, value: {{{value}}}, out: {topic}.a}}
"""


class Pool:
    """A pool with one view ``old`` over one topic, and its output topics ``a`` and ``b``."""

    def __init__(self, services: Services, spark: SparkSession, folder: Path, topic: str, value: str) -> None:
        self.it: Mini = mini_of(
            make_pipeline(services, folder, TEXT.format(topic=topic, value=value), partitions=1), spark
        )
        self.topic = topic

    def step(self, *rows: dict[str, Any]) -> None:
        """A batch of rows, and a look at the idle pool after it."""
        self.it.send(self.topic, *((json.dumps({"id": row["id"]}), row) for row in rows))
        self.it.step()
        assert self.it.etl() is None

    def edit(self, old: str, new: str) -> None:
        self.it = self.it.changed(old, new)

    def folded(self, out: str) -> dict[int, Any]:
        found = {row["key"]["id"]: row["value"] for row in self.it.staged(f"{self.topic}.{out}")}
        return {key: value for key, value in found.items() if value is not None}


@pytest.mark.slow
def test_a_change_of_a_microsecond_beside_a_map_is_a_change(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Spark compares no maps, so that values with maps are compared as JSON."""
    pool = Pool(services, spark, tmp_path, unique, "at: o.at, tags: o.tags")
    for microsecond in (1, 2):
        pool.step({"id": 1, "at": f"2026-01-01T00:00:00.00000{microsecond}Z", "tags": {"a": 1}})
    assert [value["at"].microsecond for value in pool.it.values(f"{unique}.a")] == [1, 2]
    pool.step({"id": 1, "at": "2026-01-01T00:00:00.000002Z", "tags": {"a": None}})
    assert len(pool.it.staged(f"{unique}.a")) == 3


@pytest.mark.slow
def test_a_view_whose_names_the_lake_spells_otherwise_stays_as_it_is(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    pool = Pool(services, spark, tmp_path, unique, "Full name: o.`first name`, v: o.n, V: o.n")
    pool.step({"id": 1, "first name": "Ann"})
    pool.step({"id": 1, "first name": "Anna"})
    assert len(pool.it.staged(f"{unique}.a")) == 2


@pytest.mark.slow
def test_an_output_keeps_its_result_under_another_name_and_refuses_another_definition(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    pool = Pool(services, spark, tmp_path, unique, "n: o.n")
    pool.step({"id": 1, "n": 1}, {"id": 2, "n": 2})
    pool.edit("name: old", "name: new")
    pool.step({"id": 3, "n": 3})
    # No key is emitted again.
    assert [row["key"]["id"] for row in pool.it.staged(f"{unique}.a")] == [1, 2, 3]
    pool.edit("name: new", "name: newer, where: o.n > 1")
    with pytest.raises(EtlError, match=r"the definition of view newer changed .* zync rebuild"):
        pool.it.etl()
    # The pool remembers the output topic of a removed view.
    pool.edit(f"out: {unique}.a}}", f"out: {unique}.b}}")
    pool.step()
    assert pool.folded("b") == {2: {"n": 2}, 3: {"n": 3}}
    pool.edit("name: newer, where: o.n > 1", "name: newest")
    pool.edit(f"out: {unique}.b}}", f"out: {unique}.a}}")
    pool.edit("value: {n: o.n}", "value: {m: o.n}")
    with pytest.raises(EtlError, match=r"the definition of view newest changed"):
        pool.it.etl()
    pool.edit("name: newest", "name: newest, where: o.n > 2")
    list(rebuild_all(pool.it.pipeline, lambda: spark, "views"))
    assert {key: value["m"] for key, value in pool.folded("a").items()} == {3: 3}
    assert pool.it.etl() is None


@pytest.mark.slow
@pytest.mark.parametrize("row", ["value", "struct(value.id, value.n, value.`first name` AS name)"])
def test_a_new_view_over_known_tables_needs_no_new_record(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, row: str
) -> None:
    """Also if the lake spells a name of the table otherwise."""
    pool = Pool(services, spark, tmp_path, unique, "n: o.n")
    table = f"{{topic: {unique}, row: '{row}'}}"
    pool.edit(f"tables: {{o: {unique}}}", f"tables: {{o: {table}}}")
    pool.step({"id": 1, "n": 1}, {"id": 2, "n": 2})
    path = pool.it.pipeline.path
    view = f"  - {{name: more, type: view, tables: {{p: {table}}}, from: p, key: p.id, value: {{m: p.n}}, out: {unique}.b}}\n"
    path.write_text(path.read_text() + view)
    pool.it = pool.it.loaded()
    assert pool.it.etl() is not None
    assert pool.it.etl() is None
    assert sorted(value["m"] for value in pool.it.values(f"{unique}.b")) == [1, 2]
    assert pool.it.classes(unique) == {"done": 2}


@pytest.mark.slow
def test_minus_zero_is_another_value_than_zero_and_the_same_key(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Spark takes the two for equal, and groups them. Expressions tell them apart."""
    pool = Pool(services, spark, tmp_path, unique, "t: CAST(o.d AS string), n: o.n")
    view = "  - {{name: more, type: view, tables: {{p: {0}}}, from: p, key: {{{1}}}, value: {{n: p.n}}, out: {0}.b}}\n"
    path = pool.it.pipeline.path
    path.write_text(path.read_text() + view.format(unique, "d: p.d"))
    pool.it = pool.it.loaded()
    for row in ({"d": -0.0, "n": 1}, {"d": 0.0, "n": 1}, {"d": 0.0, "n": 2}):
        pool.step({"id": 1, **row})
    assert [value["t"] for value in pool.it.values(f"{unique}.a")] == ["-0.0", "0.0", "0.0"]
    keys = [json.dumps(row["key"]) for row in pool.it.staged(f"{unique}.b")]
    assert set(keys) == {'{"d": 0.0}'}
    pool.it.send(unique, (json.dumps({"id": 1}), None))
    pool.it.step()
    assert pool.it.staged(f"{unique}.b")[-1]["value"] is None


@pytest.mark.slow
def test_a_collation_of_a_value_stays_out_of_the_lake(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    pool = Pool(services, spark, tmp_path, unique, "t: o.`first name` COLLATE UTF8_LCASE")
    pool.step({"id": 1, "first name": "Ann"})
    pool.step({"id": 1, "first name": "ann"}, {"id": 2})
    assert [value["t"] for value in pool.it.values(f"{unique}.a")] == ["Ann", "ann", None]


@pytest.mark.parametrize(
    ("key", "more", "error"),
    [
        ("{m: o.tags}", "", r"rule old, key: it is struct<m:map<.*>>, and Spark compares no such keys. Write to_json"),
        ("{t: o.`first name` COLLATE UTF8_LCASE}", "", r"rule old, key: .* takes two texts for one key. Write lower"),
        ("{id: o.id}", "on-duplicate-key: o.tags, ", r"rule old: Spark compares no maps .* Write map_entries"),
    ],
)
def test_a_key_and_a_choice_that_spark_does_not_compare_are_refused_before_the_first_batch(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, key: str, more: str, error: str
) -> None:
    pool = Pool(services, spark, tmp_path, unique, "n: o.n")
    pool.edit("key: {id: o.id}", f"{more}key: {key}")
    pool.it.send(unique, (json.dumps({"id": 1}), {"id": 1, "tags": {"a": 1}}))
    pool.it.ingest()
    with pytest.raises(EtlError, match=error):
        pool.it.etl()


@pytest.mark.slow
def test_of_equal_rows_with_one_key_the_headers_choose(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The choice does not depend on the order of the rows."""
    pool = Pool(services, spark, tmp_path, unique, "n: 1")
    pool.edit("key: {id: o.id}", "on-duplicate-key: o.d, headers: {h: CAST(o.id AS string)}, key: {n: o.n}")
    for at in (5, 3, 4, 1):
        pool.step({"id": at, "n": 1})
    assert [item["value"] for row in pool.it.staged(f"{unique}.a") for item in row["headers"]] == [b"5"]
