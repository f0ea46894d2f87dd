"""Records on which a view fails: they go into quarantine, and the view goes on without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.checks.state_checks import state_equals_raw
from zync_assets.errors import EtlError
from zync_assets.lake.quarantine_table import EVERYTHING
from zync_assets.local.services import Services
from zync_assets.runner import drop_all, rebuild_all
from zync_assets_tests.mini import Mini, make_pipeline, mini_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """
inputs:
  - {{topic: {left}, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, size string, of bigint"}}
  - {{topic: {right}, pool: Raw, format: json, key-schema: id bigint, value-schema: "id bigint, name string"}}
outputs:
  - {{topic: {out}, pool: Staging, format: json, create: {{}}}}
transforms:
  - type: view
    tables: {{t: {left}, u: {right}}}
    from: {join}
    where: {where}
    key: {{id: {key}}}
    value: {value}
    out: {out}
"""


def made(
    services: Services,
    spark: SparkSession,
    folder: Path,
    prefix: str,
    value: str,
    key: str = "t.id",
    where: str = "true",
) -> Mini:
    left, right, out = f"{prefix}.t", f"{prefix}.u", f"{prefix}.out"
    join = "u LEFT JOIN t ON t.of = u.id" if key == "u.id" else "t LEFT JOIN u ON t.of = u.id"
    text = TEXT.format(left=left, right=right, out=out, value=value, key=key, where=where, join=join)
    return mini_of(make_pipeline(services, folder, text, partitions=1), spark)


def row(id: int, size: str, of: int | None = None) -> tuple[str, dict[str, Any]]:
    return json.dumps({"id": id}), {"id": id, "size": size, "of": of}


def name(id: int, text: str) -> tuple[str, dict[str, Any]]:
    return json.dumps({"id": id}), {"id": id, "name": text}


def reasons(it: Mini) -> list[tuple[str, int, str]]:
    return sorted((entry["topic"], entry["first"], entry["text"]) for entry in it.ledger("quarantined"))


@pytest.mark.slow
def test_a_row_that_fails_stops_no_other_row(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A cast fails on rows that ``where`` keeps, and a division on a row of the other table."""
    it = made(
        services,
        spark,
        tmp_path,
        unique,
        '{size: "CAST(t.size AS INT)", share: "100 / length(u.name)"}',
        where="t.size <> 'none'",
    )
    it.send(it.right, name(1, "Ann"), name(2, "Bob"))
    it.send(it.left, row(1, "3", 1), row(2, "two", 1), row(3, "none", 1), row(4, "5", 2), row(5, "six"))
    it.step()
    assert it.values() == [{"size": 3, "share": 100 / 3}, {"size": 5, "share": 100 / 3}]
    assert it.classes(it.left) == {"done": 3, "quarantined": 2}
    failed = "value.size: CAST(t.size AS INT): an expression fails on this record."
    assert reasons(it) == [(it.left, 1, failed), (it.left, 4, failed)]
    # A key keeps its earlier row. The record of another table completes a joined row that fails.
    it.send(it.left, row(1, "x", 1), row(2, "7", 2))
    it.send(it.right, name(1, ""))
    it.step()
    assert it.values()[2:] == [{"size": 7, "share": 100 / 3}]
    assert it.classes(it.right) == {"done": 2, "quarantined": 1}
    assert [at[:2] for at in reasons(it)] == [(it.left, 1), (it.left, 4), (it.left, 5), (it.right, 2)]


@pytest.mark.slow
def test_a_record_that_was_dropped_from_quarantine_has_no_row_in_a_state_that_is_made_again(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = made(services, spark, tmp_path, unique, '{size: "CAST(t.size AS INT)"}')
    it.send(it.left, row(1, "3"), row(2, "4"))
    it.step()
    it.send(it.left, row(1, "x"), row(2, "5"), row(3, "y"))
    it.step()
    assert drop_all(it.pipeline, EVERYTHING) == 2
    whole = state_equals_raw(it.pipeline, "Staging", lambda: it.spark)
    assert whole.passed, whole.summary
    list(rebuild_all(it.pipeline, lambda: it.spark, "state"))
    assert it.values() == [{"size": 3}, {"size": 4}, {"size": 5}]
    it.send(it.right, name(7, "Ann"))
    it.send(it.left, row(1, "6"))
    it.step()
    assert it.values()[3:] == [{"size": 6}]
    assert it.classes(it.left) == {"done": 4, "dropped": 2}


@pytest.mark.slow
def test_an_aggregate_that_fails_keeps_the_earlier_row_of_its_key(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    value = '{total: "sum(CAST(t.size AS BIGINT))", mean: "60 / sum(CAST(t.size AS BIGINT))"}'
    it = made(services, spark, tmp_path, unique, value, key="u.id")
    it.send(it.right, name(1, "Ann"), name(2, "Bob"))
    it.send(it.left, row(1, "3", 1), row(2, str(2**63 - 1), 2), row(3, "2", 1))
    it.step()
    before = {1: {"total": 5, "mean": 12.0}, 2: {"total": 2**63 - 1, "mean": 60 / (2**63 - 1)}}
    assert {row["key"]["id"]: row["value"] for row in it.staged()} == before
    # One sum overflows, and one becomes nothing. A row has no number.
    it.send(it.left, row(4, "1", 2), row(5, "-5", 1), row(6, "?", 1))
    it.step()
    assert len(it.staged()) == 2
    assert it.classes(it.left) == {"done": 3, "quarantined": 3}
    it.send(it.left, row(7, "-3", 1))
    it.step()
    assert it.values()[2:] == [{"total": 2, "mean": 30.0}]
    # A row that leaves the group makes the sum nothing: its record is the cause.
    it.send(it.left, row(3, "2", None), row(8, "9", 7))
    it.step()
    assert len(it.staged()) == 3
    assert it.classes(it.left) == {"done": 5, "quarantined": 4}
    it.send(it.left, row(8, "4", 1))
    it.step()
    assert it.values()[3:] == [{"total": 6, "mean": 10.0}]


@pytest.mark.slow
def test_an_earlier_record_that_a_new_view_fails_on_is_an_error(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = made(services, spark, tmp_path, unique, "{size: t.size}")
    it.send(it.right, name(1, "Ann"))
    it.send(it.left, row(1, "3", 1), row(2, "two", 1))
    it.step()
    text = it.pipeline.path.read_text()
    more = text.partition("transforms:")[2].replace("{size: t.size}", '{size: "CAST(t.size AS INT)"}')
    topic = f"{unique}.more"
    outputs = f"  - {{topic: {topic}, pool: Staging, format: json, create: {{}}}}\ntransforms:"
    it.pipeline.path.write_text(text.replace("transforms:", outputs) + more.replace(it.out, topic))
    edited = it.loaded()
    edited.send(it.left, row(3, "4", 1))
    edited.ingest()
    with pytest.raises(
        EtlError, match=r"CAST\(t.size AS INT\).*an earlier record: topic .*\.t, partition 0, offset 1\."
    ):
        edited.etl()


@pytest.mark.slow
def test_a_row_that_overflows_java_s_stack_stops_no_other_row(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = made(services, spark, tmp_path, unique, "{plain: \"t.size rlike '^(a|b)*$'\"}")
    it.send(it.left, row(1, "ab"), row(2, "ab" * 300_000), row(3, "c"))
    it.step()
    assert it.values() == [{"plain": True}, {"plain": False}]
    [(topic, offset, text)] = reasons(it)
    assert (topic, offset) == (it.left, 1)
    assert "more stack than Java has" in text


@pytest.mark.slow
def test_an_aggregate_that_overflows_java_s_stack_keeps_the_earlier_row_of_its_key(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    value = """{name: u.name, plain: "concat_ws('', collect_list(t.size)) rlike '^(a|b)*$'"}"""
    it = made(services, spark, tmp_path, unique, value, key="u.id")
    it.send(it.right, name(1, "Ann"), name(2, "Bob"))
    it.send(it.left, row(1, "ab", 1), row(2, "c", 2))
    it.step()
    it.send(it.left, row(3, "b", 2), row(4, "ab" * 300_000, 1), row(2, "a", 2))
    it.step()
    before = {1: {"name": "Ann", "plain": True}, 2: {"name": "Bob", "plain": True}}
    assert {row["key"]["id"]: row["value"] for row in it.staged()} == before
    [(topic, offset, text)] = reasons(it)
    assert (topic, offset) == (it.left, 3)
    assert text.startswith("value.plain: ") and "more stack than Java has" in text
    # A short row takes the place of the long one.
    it.send(it.left, row(4, "c", 1))
    it.step()
    assert it.values()[-1] == {"name": "Ann", "plain": False}


@pytest.mark.slow
def test_a_join_of_two_types_costs_the_record_that_has_no_value_of_both(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A text is compared with a number as a number. The other table may have no row yet, and nothing is compared then."""
    it = made(services, spark, tmp_path, unique, "{size: t.size}")
    it = it.changed("t.of = u.id", "t.size = u.id")
    it.send(it.left, row(1, "1"), row(2, "n/a"), row(3, "03"))
    it.step()
    assert it.classes(it.left) == {"done": 2, "quarantined": 1}
    [(_, offset, reason)] = reasons(it)
    assert (offset, reason.partition(": [")[0]) == (1, "from: t.size = u.id")
    it.send(it.right, name(1, "Ann"), name(3, "Bob"))
    it.send(it.left, row(4, ""))
    it.step()
    assert {row["key"]["id"] for row in it.staged()} == {1, 3}
    assert it.classes(it.left) == {"done": 2, "quarantined": 2}


@pytest.mark.slow
def test_a_row_of_before_the_view_that_a_join_fails_on_is_named(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = made(services, spark, tmp_path, unique, "{size: t.size}")
    it.send(it.left, row(1, "1", 1), row(2, "n/a", 1))
    it.send(it.right, name(1, "Ann"))
    it.step()
    it = it.changed("t.of = u.id", "t.size = u.id").changed(f"out: {it.out}\n", f"out: {it.out}\n    name: other\n")
    with pytest.raises(EtlError, match=r"the definition of view other changed"):
        it.etl()
    with pytest.raises(EtlError, match=rf"The row is of an earlier record: topic {it.left}, partition 0, offset 1"):
        list(rebuild_all(it.pipeline, lambda: spark, "views"))


@pytest.mark.slow
def test_a_null_in_the_key_costs_the_record_that_has_it_and_no_record_beside_it(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The last record of a joined row has no part in the key. A row without a value is in no result, whatever its key."""
    it = made(services, spark, tmp_path, unique, "CASE WHEN t.id < 9 THEN struct(u.name AS name) END", key="t.size")
    it.send(it.left, row(1, "a", 1), ('{"id": 2}', {"id": 2, "of": 1}), ('{"id": 9}', {"id": 9, "of": 2}))
    it.send(it.right, name(1, "Ann"), name(2, "Bob"), times=[1_750_000_000_000] * 2)
    it.step()
    assert {row["key"]["id"]: row["value"] for row in it.staged()} == {"a": {"name": "Ann"}}
    assert [at[:2] for at in reasons(it)] == [(it.left, 1)]
