"""Random pipelines: rules and views with any mix of their features, over random records.

A pipeline runs in a lake batch by batch, and in another lake in one batch. Both lakes have the same outputs, whole accounts and
numberings without gaps. A pipeline may be refused, or stop with an error of the one exception tree, and never with another one.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.checks.state_checks import state_equals_raw
from zync_assets.errors import PipelineFileError, ZyncError
from zync_assets.etl import positions
from zync_assets.lake.staging import open_staging
from zync_assets.local.services import Services
from zync_assets_tests.mini import Mini, make_pipeline, mini_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TYPE = (
    "op string, id bigint, g bigint, v string, n int, items array<struct<sku: string, q: int>>, o struct<a: int, b: string>,"
    " m map<string, int>"
)
EXPRESSIONS = """
row.v
row.n
row.id
row.g
row.o
row.o.a
row.items
row.m
row.op
upper(row.v)
row.n + 1
CAST(row.v AS INT)
10 / row.n
size(row.items)
transform(row.items, x -> x.q)
coalesce(row.none, row.v)
element_at(row.m, 'a')
struct(row.id, row.v)
try_cast(row.v AS INT)
row.items[0].q
'x'
CASE WHEN row.n > 1 THEN row.v END
CASE WHEN row.n > 1 THEN row.items[0].q END
""".strip().splitlines()
"""The row stands for ``in.value``, an alias of a view and so on. Some expressions fail, and some name no field."""
CONDITIONS = """
row.op = 'c'
row.op <> 'd'
row.n > 0
row.n IS NULL OR row.n < 3
row.id % 2 = 0
true
row.v IS NOT NULL
CAST(row.v AS INT) > 0
row.o.a = 1
exists(row.items, x -> x.q > 1)
""".strip().splitlines()
AGGREGATES = ["count(*)", "sum(row.n)", "max(row.v)", "count_if(row.op = 'c')", "bool_and(row.n > 0)", "min(row.id)"]
OF_GROUPS = [*AGGREGATES, "first(p).row.v", "transform(list(q), x -> x.row.v)", "first(q).row.none"]
OF_VIEWS = [*AGGREGATES, "collect_list(struct(row.id, row.v))", "avg(row.n)", "count(DISTINCT row.v)"]


@dataclass
class Mix:
    """A random pipeline's inputs A, B and C, outputs and rules. ``topics``: by their short names."""

    chance: random.Random
    prefix: str

    def topic(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def one(self, texts: Sequence[str], row: str) -> str:
        return re.sub(r"\brow\.", f"{row}.", self.chance.choice(texts))

    def value(self, rows: Sequence[str], name: str, texts: Sequence[str] = EXPRESSIONS) -> dict[str, str]:
        """Fields that no other rule has, since a field of a topic has one type in all rules."""
        count = self.chance.randint(1, 4)
        return {f"{name}{at}": self.one(texts, self.chance.choice(rows)) for at in range(count)}

    def rule(self, number: int, outs: Sequence[str]) -> dict[str, Any]:
        kind = self.chance.choice(["stateless", "stateless", "denorm", "group"])
        name = f"r{number}"
        rule: dict[str, Any] = {"name": name, "type": kind, "out": self.chance.choice(outs)}
        if self.chance.random() < 0.6:
            rule["where"] = self.one(CONDITIONS, "value")
        topics = self.chance.sample([self.topic(letter) for letter in "ABC"], 2)
        if kind == "group":
            rule |= {
                "records": {"p": topics[0], "q": topics[1]},
                "group-by": self.chance.choice(["value.g", "value.id"]),
            }
            rule["complete-when"] = self.chance.choice(
                ["count(*) = 3", "bool_or(value.op = 'd')", "count(*) >= 2 AND max(value.n) > 1", "sum(value.n) > 4"]
            )
            return {**rule, "key": {"id": "min(value.id)"}, "value": self.value(["value"], name, OF_GROUPS)}
        if kind == "denorm":
            rule |= {"left": topics[0], "right": topics[1]}
            rule["join-on"] = (
                f"left.value.{self.chance.choice(['id', 'g'])} = right.value.{self.chance.choice(['id', 'g'])}"
            )
        else:
            rule["in"] = topics[0]
        rows = ["left.value", "right.value"] if kind == "denorm" else ["in.value"]
        key, values = {"id": f"{rows[0]}.id"}, self.value(rows, name)
        if self.chance.random() < 0.25:
            more = {"topic": self.chance.choice(outs), "key": key, "where": self.one(CONDITIONS, rows[0])}
            more |= {"explode": f"{rows[0]}.items", "value": {f"{name}s": "item.sku"}}
            return {**rule, "out": [{"topic": rule["out"], "key": key, "value": values}, more]}
        if self.chance.random() < 0.2:
            rule["headers"] = {"h": f"CAST({rows[0]}.v AS STRING)"}
        return {**rule, "key": key, "value": None if self.chance.random() < 0.1 else values}

    def view(self, out: str) -> dict[str, Any]:
        aliases = ["p", "q", "s"][: self.chance.randint(1, 3)]
        text = "p"
        for alias in aliases[1:]:
            ends = self.chance.choice(["id = p.g", "g = p.id", "id = p.id", "v = p.v"])
            text += f"{self.chance.choice([' JOIN', ' LEFT JOIN'])} {alias} ON {alias}.{ends}"
        view: dict[str, Any] = {"type": "view", "out": out, "from": text}
        view["tables"] = {alias: self.topic(self.chance.choice("ABC")) for alias in aliases}
        if self.chance.random() < 0.4:
            view["where"] = self.one(CONDITIONS, "p")
        if self.chance.random() < 0.5:
            return {**view, "key": {"k": "p.g"}, "value": self.value(aliases, "a", OF_VIEWS)}
        view["on-duplicate-key"] = f"struct({aliases[-1]}.n, {aliases[-1]}.id)"
        texts = [sql for sql in EXPRESSIONS if ".none" not in sql]
        return {**view, "key": {"p": "p.id"}, "value": self.value(aliases, "a", texts)}

    def text(self) -> tuple[str, list[str], list[str]]:
        """The pipeline file, the outputs of rules and the outputs of views."""
        inputs = [
            {
                "topic": self.topic(letter),
                "pool": "Raw",
                "format": "json",
                "key-schema": "id bigint",
                "value-schema": TYPE,
            }
            for letter in "ABC"
        ]
        outs = [self.topic(f"out{at}") for at in range(self.chance.randint(1, 3))]
        views = [self.topic(f"view{at}") for at in range(self.chance.randint(0, 2))]
        outputs: list[dict[str, Any]] = []
        for name in [*outs, *views]:
            item: dict[str, Any] = {"topic": name, "pool": "Views" if name in views else "Staging", "format": "json"}
            item["create"] = {"partitions": 1 if name in views else self.chance.choice([1, 3])}
            if name in outs:
                item |= self.chance.choice([{}, {}, {"hold": False}, {"provenance": True}, {"partition-by": "key.id"}])
            outputs.append(item)
        rules = [self.rule(at, outs) for at in range(self.chance.randint(1, 5))] + [self.view(out) for out in views]
        file = {"inputs": inputs, "outputs": outputs, "transforms": rules}
        return "".join(f"{name}: {json.dumps(part)}\n" for name, part in file.items()), outs, views

    def record(self) -> tuple[str | None, Any]:
        choose = self.chance.choice
        id = self.chance.randint(1, 6)
        key = json.dumps({"id": id})
        if self.chance.random() < 0.08:
            return key, choose([None, b"{garbage"])
        items = choose([None, [], [{"sku": "a", "q": 1}], [{"sku": "b", "q": 2}, {"sku": "c", "q": None}]])
        value = {
            "op": choose("ccudr"),
            "id": id,
            "g": choose([1, 2, 3, None, 9]),
            "v": choose(["1", "2", "x", None, ""]),
        }
        value |= {"n": choose([0, 1, 2, 3, None]), "items": items, "o": choose([None, {"a": 1, "b": "z"}, {"a": None}])}
        return key if self.chance.random() > 0.03 else None, value | {"m": choose([None, {}, {"a": 1}, {"a": None}])}


def outputs(it: Mini, topic: str, pool: str) -> dict[str, list[str]]:
    """Key → the outputs of the key in their order; outputs without a key in any order."""
    found: dict[str, list[str]] = defaultdict(list)
    if open_staging(it.lake, pool) is None:
        return found
    rows = DeltaTable(f"{it.lake}/{pool}").to_pyarrow_table(filters=[("topic", "=", topic)]).to_pylist()
    for row in sorted(rows, key=lambda row: (row["kafka"]["partition"], row["kafka"]["offset"])):
        place = row["kafka"]["partition"], row["rule"], row["source"]
        found[str(row.get(f"key:{topic}"))].append(str((place if pool == "Staging" else "", row.get(f"value:{topic}"))))
    return {key: sorted(texts) if key == "None" else texts for key, texts in found.items()}


def transform(it: Mini, pools: Sequence[str]) -> list[str]:
    """The errors of ETL."""
    errors: list[str] = []
    for pool in pools:
        try:
            while it.etl(pool) is not None:
                pass
        except ZyncError as error:
            errors.append(str(error))
    return errors


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(8))
def test_a_pipeline_makes_the_same_outputs_however_batches_are_cut(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    whole = 0
    for number in range(4):
        mix = Mix(random.Random(f"{seed}/{number}"), f"{unique}.{number}")
        monkeypatch.setattr(positions, "SMALL", mix.chance.choice([0, positions.SMALL]))
        text, outs, views = mix.text()
        lakes = [tmp_path / f"{number}-{name}" for name in ("cut", "whole")]
        try:
            for lake in lakes:
                lake.mkdir()
            cut = mini_of(make_pipeline(services, lakes[0], text, partitions=1), spark)
        except PipelineFileError as error:
            assert "never matches" in str(error), text
            continue
        one = mini_of(make_pipeline(services, lakes[1], text), spark)
        pools = [pool for pool, topics in (("Staging", outs), ("Views", views)) if topics]
        errors: list[str] = []
        time = 1_700_000_000_000
        for _ in range(mix.chance.randint(2, 4)):
            for letter in "ABC":
                records = [mix.record() for _ in range(mix.chance.randint(0, 8))]
                cut.send(mix.topic(letter), *records, times=range(time, time + len(records)))
                time += len(records)
            cut.ingest()
            errors += transform(cut, pools)
        one.ingest()
        errors += transform(one, pools)
        if errors:
            assert all("Write CAST(NULL" in error or "has one type" in error for error in errors), (errors, text)
            continue
        whole += 1
        for it in (cut, one):
            results = [exactly_once_done_coverage(it.pipeline, pool) for pool in pools]
            results += [contiguous_output_offsets(it.pipeline, topic) for topic in [*outs, *views]]
            results += [state_equals_raw(it.pipeline, "Views", lambda: spark)] if views else []
            assert [result.summary for result in results if not result.passed] == [], text
        for topic in outs:
            assert outputs(cut, topic, "Staging") == outputs(one, topic, "Staging"), (topic, text)
        for topic in views:
            # Versions of a row depend on the cuts, and the last version does not.
            last = [{key: rows[-1] for key, rows in outputs(it, topic, "Views").items()} for it in (cut, one)]
            gone = {key for key in last[0].keys() - last[1].keys() if "None" in last[0][key]}
            assert {key: row for key, row in last[0].items() if key not in gone} == last[1], (topic, text)
    assert whole
