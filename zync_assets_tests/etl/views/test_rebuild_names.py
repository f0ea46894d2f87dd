"""Views and look-ups that name a field which no record has had, or a renamed field by any of its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from zync_assets.cli.main import main
from zync_assets.errors import EtlError, FieldMissing
from zync_assets.local.services import Services
from zync_assets.runner import etl_all, rebuild_all
from zync_assets_tests.etl.views.test_tables import AVRO, LINE, ORDER, Topics, schema
from zync_assets_tests.mini import Mini, make_pipeline, mini_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

Row = dict[str, Any]


@pytest.fixture
def topics(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Topics:
    return Topics(services, spark, tmp_path, unique)


def renamed(name: str, *aliases: str) -> dict[str, Any]:
    """The schema of an order whose field ``status`` has another name."""
    made = schema(("id", "long"), (name, "string"))
    made["fields"][1]["aliases"] = list(aliases)
    return made


def register(topics: Topics, topic: str, kind: dict[str, Any]) -> None:
    topics.registry.register(f"{topic}-value", json.dumps(kind))


def statuses(it: Mini) -> list[tuple[int, str]]:
    return [(row["key"]["id"], row["value"]["status"]) for row in it.staged()]


def check_unchanged(it: Mini) -> None:
    """An idle run accepts the definitions of the views, and a rebuild finds no difference."""
    count = len(it.staged())
    assert list(etl_all(it.pipeline, lambda: it.spark)) == []
    list(rebuild_all(it.pipeline, lambda: it.spark))
    assert len(it.staged()) == count


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_view_names_a_renamed_field_before_a_record_with_the_name(topics: Topics, is_begun: bool) -> None:
    it = topics.it
    topics.send(it.left, ORDER, {"id": 1, "status": "new"})
    topics.send(it.right, LINE, {"id": 7, "order_id": 1})
    if is_begun:
        it.step()
    it = it.changed("o.status", "o.state")
    register(topics, it.left, renamed("state", "status"))
    it.step()
    check_unchanged(it)
    topics.send(it.left, ORDER, {"id": 2, "status": "paid"})
    it.step()
    topics.send(it.left, renamed("state", "status"), {"id": 1, "state": "sent"})
    it.step()
    assert statuses(it) == [(1, "new"), (2, "paid"), (1, "sent")]
    check_unchanged(it)


def test_another_name_of_a_field_makes_no_other_view(topics: Topics) -> None:
    it = topics.it
    topics.send(it.left, ORDER, {"id": 1, "status": "new"})
    topics.send(it.left, renamed("state", "status"), {"id": 2, "state": "paid"})
    topics.send(it.left, renamed("phase", "status", "state"), {"id": 3, "phase": "sent"})
    topics.send(it.right, LINE, {"id": 7, "order_id": 1})
    for old, new in (("o.status", "o.phase"), ("o.phase", "o.state"), ("o.state", "o.status")):
        it = it.changed(old, new)
        it.step()
        assert sorted(statuses(it)) == [(1, "new"), (2, "paid"), (3, "sent")]
        check_unchanged(it)
    with pytest.raises(EtlError, match="the definition of view"):
        it.changed("o.status", "o.id").step()


def test_a_view_names_a_new_field_that_the_registry_has(topics: Topics) -> None:
    """The field is null until a record has it."""
    it = topics.it.changed("status: o.status", "status: o.status, fee: o.fee")
    topics.send(it.left, ORDER, {"id": 1, "status": "new"})
    topics.send(it.right, LINE, {"id": 7, "order_id": 1})
    with pytest.raises(FieldMissing, match="table o has no column `fee`"):
        it.step()
    wider = schema(("id", "long"), ("status", "string"), ("fee", ["null", "long"]))
    register(topics, it.left, wider)
    it.step()
    check_unchanged(it)
    topics.send(it.left, wider, {"id": 2, "status": "paid", "fee": 3})
    it.step()
    assert [(row["key"]["id"], row["value"]["fee"]) for row in it.staged()] == [(1, None), (2, 3)]
    check_unchanged(it)


def test_a_trace_finds_the_rows_of_a_view_by_a_name_that_no_record_has_had(topics: Topics) -> None:
    it = topics.it
    topics.send(it.left, ORDER, {"id": 1, "status": "new"})
    topics.send(it.right, LINE, {"id": 7, "order_id": 1})
    it.step()
    it = it.changed("o.status", "o.state")
    register(topics, it.left, renamed("state", "status"))

    said = CliRunner().invoke(main, ["trace", str(it.pipeline.path), it.out, "0", "--format", "json"]).stdout
    assert [json.loads(line)["role"] for line in said.splitlines()][-2:] == ["row o", "row l"], said


LOOKUP = (
    AVRO.partition("transforms:")[0]
    + """
transforms:
  - type: stateless
    in: {right}
    lookup: {{c: {{table: {left}, on: c.state = CAST(in.value.order_id AS STRING), missing: wait}}}}
    key: in.key
    value: {{id: in.value.id, state: c.state}}
    out: {out}
"""
)


def test_a_look_up_names_a_renamed_field_before_a_record_with_the_name(
    topics: Topics, services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = topics.it
    text = LOOKUP.format(left=it.left, right=it.right, out=it.out)
    it = mini_of(make_pipeline(services, tmp_path, text, name="lookup"), spark)
    topics.send(it.left, ORDER, {"id": 1, "status": "5"})
    topics.send(it.right, LINE, {"id": 7, "order_id": 5}, {"id": 8, "order_id": 6})
    register(topics, it.left, renamed("state", "status"))
    it.step()
    assert it.values() == [{"id": 7, "state": "5"}]
    topics.send(it.left, ORDER, {"id": 2, "status": "6"})
    it.step()
    topics.send(it.left, renamed("state", "status"), {"id": 3, "state": "9"})
    topics.send(it.right, LINE, {"id": 9, "order_id": 9})
    it.step()
    assert it.values() == [{"id": 7, "state": "5"}, {"id": 8, "state": "6"}, {"id": 9, "state": "9"}]
