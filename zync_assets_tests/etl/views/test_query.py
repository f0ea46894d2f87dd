"""The types of a view's query, and the definitions that its result is staged by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.errors import EtlError, FieldMissing
from zync_assets.local.services import Services
from zync_assets_tests.mini import Mini, make_pipeline, mini_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """
inputs:
  - {{topic: {prefix}.t, pool: Raw, format: json, key-schema: id bigint,
     value-schema: "id bigint, of bigint, tags map<string, string>"}}
outputs:
  - {{topic: {prefix}.one, pool: Staging, format: json, create: {{}}}}
  - {{topic: {prefix}.two, pool: Staging, format: json, create: {{}}}}
transforms:
  - {{type: view, tables: {{t: {prefix}.t}}, from: t, key: {{of: t.of}}, value: {{n: count(*), tags: {tags}}}, out: {prefix}.one}}
  - {{type: view, tables: {{t: {prefix}.t}}, from: t, key: {{id: t.id}}, value: {{tags: t.tags}}, out: {prefix}.two}}
"""


def made(services: Services, spark: SparkSession, folder: Path, prefix: str, tags: str) -> Mini:
    text = TEXT.format(prefix=prefix, tags=tags)
    it = mini_of(make_pipeline(services, folder, text, partitions=1), spark)
    it.send(f"{prefix}.t", *((f'{{"id": {id}}}', {"id": id, "of": 7, "tags": {"a": "b"}}) for id in (1, 2)))
    it.ingest()
    return it


NO_MAP = r"Spark compares no maps .* Write map_entries\(\.\.\.\) of the map"
NO_FIELD = (
    r"rule 1-view: table t has no column `tag`; it has id, of, tags; did you mean `tags`.* Correct the name, or wait"
)


@pytest.mark.parametrize(
    ("tags", "kind", "text"),
    [
        ("t.tags", EtlError, NO_MAP),
        ("collect_list(t.tags)", EtlError, NO_MAP),
        ("max(t.tags)", EtlError, NO_MAP),
        ("collect_set(t.tags)", EtlError, NO_MAP),
        ("t.tag", FieldMissing, NO_FIELD),
        ("t.id.no", EtlError, r"rule 1-view: t\.id is (big)?int, and has no fields"),
    ],
)
def test_a_map_to_compare_and_a_missing_field_are_errors_with_a_cure(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, tags: str, kind: type[Exception], text: str
) -> None:
    it = made(services, spark, tmp_path, unique, tags)
    with pytest.raises(kind, match=text):
        it.etl()


@pytest.mark.slow
def test_a_join_that_takes_two_texts_for_one_does_so_on_both_sides(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    text = f"""
inputs:
  - {{topic: {unique}.t, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, s string"}}
outputs:
  - {{topic: {unique}.out, pool: Staging, format: json, create: {{}}}}
transforms:
  - {{name: pairs, type: view, tables: {{t: {unique}.t, u: {unique}.t}}, from: t JOIN u ON t.s COLLATE UTF8_LCASE = u.s,
     where: t.id < u.id, key: {{t: t.id, u: u.id}}, value: {{s: u.s}}, out: {unique}.out}}
"""
    it = mini_of(make_pipeline(services, tmp_path, text, partitions=1), spark)
    it.send(it.left, *((f'{{"id": {id}}}', {"id": id, "s": s}) for id, s in ((1, "a"), (2, "A"))))
    it.ingest()
    with pytest.raises(EtlError, match=r"pairs, from: t\.s .* UTF8_LCASE and u\.s is string\. COLLATE both alike"):
        it.etl()
    it = it.changed("= u.s,", "= u.s COLLATE UTF8_LCASE,")
    it.etl()
    it.send(it.left, ('{"id": 0}', {"id": 0, "s": "A"}))
    it.step()
    pairs = [(row["key"]["t"], row["key"]["u"], row["value"]["s"]) for row in it.staged()]
    assert sorted(pairs) == [(0, 1, "a"), (0, 2, "A"), (1, 2, "A")]


@pytest.mark.slow
def test_the_cure_for_a_map_works_and_every_edited_view_is_named(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = made(services, spark, tmp_path, unique, "map_entries(t.tags)")
    it.etl()
    assert [row["value"] for row in it.staged(f"{unique}.one")] == [{"n": 2, "tags": [{"key": "a", "value": "b"}]}]
    assert [row["value"]["tags"] for row in it.staged(f"{unique}.two")] == [[("a", "b")], [("a", "b")]]
    path = it.pipeline.path
    path.write_text(path.read_text().replace("count(*)", "count(t.id)").replace("value: {tags: t", "value: {all: t"))
    with pytest.raises(EtlError, match=r"the definitions of the views 1-view, 2-view changed .* zync rebuild"):
        it.loaded().etl()
