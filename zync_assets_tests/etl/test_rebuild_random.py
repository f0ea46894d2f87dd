"""Random edits: after a rebuild, a pool is as one that had the new rules from the first record on, and stays so."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets import pipeline_file
from zync_assets.lake.staging import open_staging, read_ledger
from zync_assets.local.services import Services
from zync_assets_tests.etl.test_rebuild import rebuilt, rows, sound
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EPOCH = 1_700_000_000_000
CREATES = JOIN.replace("type: denorm", "type: denorm\n    where: value.op = 'c'")
LEFT = """
  - {name: left, type: stateless, where: value.op = 'u', in: $left, out: $out, key: in.key, value: {l: in.value.v}}
"""
RIGHT = """
  - {name: right, type: stateless, where: value.op <> 'd', in: $right, out: $out, key: in.key, value: {r: in.value.v}}
"""
DELETE = """
  - {name: delete, type: stateless, where: value.op = 'd', in: $left, out: $out, key: in.key, value: null}
"""
GATHER = """
  - name: gather
    type: group
    where: value.op = 'c'
    records: {a: $left, b: $right}
    group-by: value.id
    complete-when: count(*) = 3
    out: $out
    key: concat('k', coalesce(first(a).value.id, first(b).value.id))
    value: {n: count(*), l: first(a).value.v}
"""
READ = """
  - {name: reads-left, type: stateless, where: value.id > 100, in: $left, out: $out, key: in.key, value: null}
  - {name: reads-right, type: stateless, where: value.id > 100, in: $right, out: $out, key: in.key, value: null}
"""
"""Rules that take no record. Every file therefore reads both topics."""
HEAD = "\ntransforms:\n"
RULES = (
    CREATES + LEFT + DELETE,
    CREATES + DELETE,
    CREATES.replace("out: $out", "out: $out\n    expire-after: 20m\n    on-expire: emit").replace(
        "key: left.key", "key: coalesce(left.key, right.key)"
    )
    + LEFT,
    CREATES.replace("out: $out", "out: $out\n    expire-after: 15m\n    on-expire: drop") + DELETE,
    HEAD + GATHER + LEFT + DELETE,
    HEAD + RIGHT + DELETE,
    HEAD + LEFT + RIGHT,
    CREATES.replace("l: left.value.v", "l: upper(left.value.v)")
    + LEFT.replace("value.op = 'u'", "value.op <> 'd'")
    + DELETE,
)


def send(it: Mini, choice: random.Random, begin: int, count: int) -> int:
    """Random records of both topics, a minute apart."""
    for time in range(begin, begin + count):
        topic, id = choice.choice([it.left, it.right]), choice.randrange(6)
        op = choice.choices("cud", [6, 3, 1])[0]
        it.send(topic, (f"k{id}", row(id, f"{op}{time}", op)), times=[EPOCH + time * 60_000])
    return begin + count


def waiting(it: Mini) -> list[tuple[Any, ...]]:
    state = open_staging(it.lake, "Staging")
    assert state is not None
    place, columns = ("topic", "partition", "first"), ("topic", "first", "rule", "hash")
    entries = read_ledger(state, ["pending", "completed"]).to_pylist()
    done = {tuple(item[name] for name in place) for item in entries if item["kind"] == "completed"}
    pending = [
        item for item in entries if item["kind"] == "pending" and tuple(item[name] for name in place) not in done
    ]
    return sorted(tuple(item[name] for name in columns) for item in pending)


def fresh(it: Mini, folder: Path) -> Mini:
    """The same topics and file with an empty lake and another output topic."""
    folder.mkdir()
    out = f"{it.out}.{folder.name}"
    text = it.pipeline.path.read_text().replace(it.lake, str(folder / "lake")).replace(it.out, out)
    (folder / "pipeline.yaml").write_text(text)
    return replace(it, pipeline=pipeline_file.load(folder / "pipeline.yaml"), out=out)


@pytest.mark.slow
@pytest.mark.timeout(460)
@pytest.mark.parametrize("seed", range(4))
def test_a_rebuilt_pool_is_as_a_new_one(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, seed: int
) -> None:
    choice = random.Random(seed)
    it = mini(services, spark, tmp_path, unique, BOTH + choice.choice(RULES) + READ)
    time = send(it, choice, 0, 30)
    it.step()
    time = send(it, choice, time, 20)
    it.step()
    for number in range(3):
        it = it.edited(BOTH + choice.choice(RULES) + READ)
        if choice.random() < 0.5:
            time = send(it, choice, time, 8)
            it.step()
        rebuilt(it)
        sound(it)
        if choice.random() < 0.7:
            time = send(it, choice, time, 12)
            it.step()
            sound(it)
        other = fresh(it, tmp_path / f"fresh{number}")
        other.step()
        assert rows(it) == rows(other)
        topics = [item.topic for item in it.pipeline.inputs_of("Staging")]
        assert [it.classes(topic) for topic in topics] == [other.classes(topic) for topic in topics]
        assert [item for item in waiting(it) if item[0] in topics] == waiting(other)
