"""A kind of rule is a section of the grammar and a ``Kind``. The engine and the commands know no kind by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.assets.graph import kind_of
from zync_assets.audit.guard import exactly_once_done_coverage
from zync_assets.cli.records import pending_rows, trace_rows
from zync_assets.errors import PipelineFileError
from zync_assets.etl import positions
from zync_assets.etl.rules import KINDS, explain_rules
from zync_assets.etl.rules.kind import Emission, Kind, RuleRecords, records_sql, source_sql, union
from zync_assets.local.services import Services
from zync_assets.pipeline import Rule
from zync_assets.pipeline_file.key import Key
from zync_assets.pipeline_file.keys import SECTIONS, STATELESS, Section
from zync_assets_tests.mini import BOTH, mini, row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SECTION = Section(
    "couple",
    "`couple` makes an output of two successive records of a key.",
    sides=("in",),
    keys=(*STATELESS.keys, Key("by", "an expression", "The key of the records that make a couple.", "by: in.key")),
    join="by",
    read_join=lambda fields: {"in": (fields.text("by", "write an expression") or "NULL",)},
)


class Couple(Kind):
    """Two successive records of a key, in one topic, make one output."""

    name, join = "couple", "by"
    summary = "one output for every second record of a key"

    def records(
        self, rule: Rule, index: int, inputs: Mapping[str, DataFrame], frames: Mapping[str, DataFrame]
    ) -> RuleRecords:
        keyed = {side: _hashed(rule, frame) for side, frame in frames.items()}
        return RuleRecords(rule, index, keyed, join=json.dumps(rule.sides[0].keys))

    def results(self, records: RuleRecords, pending: Mapping[str, DataFrame], emission: Emission) -> list[DataFrame]:
        rule, topic = records.rule, records.rule.topics[0]
        place = emission.places[topic]
        frames = [*records.frames.values(), *(_hashed(rule, frame) for frame in pending.values())]
        if not frames or emission.target is None:
            return []
        window = "OVER (PARTITION BY hash ORDER BY in.kafka.partition, in.kafka.offset)"
        rows = union(frames).selectExpr(
            "*",
            f"row_number() {window} % 2 = 0 AS second",
            f"lead(hash) {window} IS NULL AS alone",
            f"lag(old) {window} AS first_old",
            f"lag({source_sql(place, 'in.kafka.partition', 'in.kafka.offset')}) {window} AS first",
        )
        own = source_sql(place, "in.kafka.partition", "in.kafka.offset")
        outputs = emission.columns(rule, emission.target)
        return [
            rows.where("second OR (alone AND NOT old)").selectExpr(
                "IF(second, 'out', 'pending') AS kind",
                f"{records.index} AS rule",
                f"{emission.ordering.sql(topic, 'in.kafka.partition', 'in.kafka.offset')} AS ord",
                f"IF(second, array(first, {own}), array({own})) AS source",
                "IF(second, 1, 0) AS last",
                "IF(second, CAST(first_old AS int) + 2 * CAST(old AS int), 0) AS waited",
                "IF(second, NULL, hash) AS hash",
                *(f"IF(second, {sql}, NULL) AS `{name}`" for name, sql in outputs),
            )
        ]

    def key_sql(self, rule: Rule, topic: str, inputs: Mapping[str, DataFrame]) -> str:
        return rule.sides[0].keys[0]

    def from_sql(self, rule: Rule) -> str:
        return records_sql(rule, rule.sides[0])

    def reason(self, rule: Rule, topic: str, before: int) -> str:
        return "the first of its couple"


def _hashed(rule: Rule, frame: DataFrame) -> DataFrame:
    return frame.selectExpr("*", f"xxhash64({rule.sides[0].keys[0]}) AS hash")


def test_every_kind_has_its_section_in_the_grammar() -> None:
    assert {name: kind.join for name, kind in KINDS.items()} == {
        section.kind: section.join for section in SECTIONS.values()
    }


@pytest.fixture
def couple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "couple", SECTION)
    monkeypatch.setitem(KINDS, "couple", Couple())


RULES = """
transforms:
  - {name: twins, type: couple, in: $left, where: value.op = 'c', by: in.key, out: $out, key: in.key,
     value: {id: in.value.id, v: "CAST(in.value.v AS INT)"}}
  - {name: rest, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id}}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("couple")
@pytest.mark.parametrize("small", [True, False])
def test_a_third_kind_of_rule_needs_no_change_of_the_engine(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    monkeypatch.setattr(positions, "SMALL", positions.SMALL if small else 0)
    it = mini(services, spark, tmp_path, unique, BOTH + RULES)
    it.send(
        it.left, ("a", row(1, "1")), ("b", row(2, "2")), ("c", row(3, "3")), ("a", row(4, "4")), ("z", row(5, "", "u"))
    )
    assert it.step() is not None
    assert it.values() == [{"id": 4, "v": 4}, {"id": 5, "v": None}]
    assert it.classes(it.left) == {"done": 3, "pending": 2}
    # An output that fails puts the record that completes it into quarantine.
    it.send(it.left, ("b", row(6, "x")), ("c", row(7, "7")), ("a", row(8, "8")))
    assert it.step() is not None
    assert it.values()[2:] == [{"id": 7, "v": 7}]
    assert it.classes(it.left) == {"done": 5, "pending": 2, "quarantined": 1}
    (error,) = [entry["text"] for entry in it.ledger("quarantined")]
    assert "value.v" in error
    assert exactly_once_done_coverage(it.pipeline, "Staging").passed

    waiting = [(each["offset"], each["join_key"], each["why"]) for each in pending_rows(it.pipeline, "Staging")]
    assert waiting == [(1, "b", "the first of its couple"), (7, "a", "the first of its couple")]
    trace = trace_rows(it.pipeline, it.out, 0, 2)
    assert [(each["role"], each["offset"]) for each in trace] == [("output", 2), ("in", 2), ("in", 6)]
    sql = next(each.sql for each in explain_rules(it.pipeline) if each.name == "twins")
    assert sql.startswith("-- twins: one output for every second record of a key\nSELECT (in.key) AS key")
    assert kind_of(it.pipeline.rules[0]).title(it.pipeline.rules[0]) == f"twins ({it.left})"
    spark.sql(
        f"EXPLAIN WITH `{it.left}` AS (SELECT 'twins' AS rule, 1 AS kafka, 'k' AS key,"
        " named_struct('id', 1, 'v', '1') AS value) " + sql
    )
    with pytest.raises(PipelineFileError, match="belongs to a rule of type couple; a stateless rule has `in`"):
        it.edited(BOTH + RULES.replace("type: stateless,", "type: stateless, by: in.key,"))
