"""Records that expire: the engine lets the records expire that the model does, however the batches are cut."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.checks.output_checks import run_all
from zync_assets.etl import positions
from zync_assets.etl.retries import Retry
from zync_assets.lake.quarantine_table import Selection, quarantined_records
from zync_assets.local.services import Services
from zync_assets.pipeline import Rule
from zync_assets.pipeline_file import load
from zync_assets.runner import etl_all, ingest_all
from zync_assets_tests.etl.rules.engine import Engine, source_order, world
from zync_assets_tests.etl.rules.test_group import FILE, is_complete, key_of, value_of
from zync_assets_tests.etl.test_streams import batch
from zync_assets_tests.mini import BOTH, JOIN, Mini, mini, row
from zync_assets_tests.model import Expiry, Gather, Model, Pair, Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAIRS = """
    type: denorm
    left: O
    right: L
    join-on: left.value.id = right.value.id
    out: Events
    key: left.value.v
    value: {o: left.value.n, l: right.value.n}
"""
SECONDS = 40


def rule_of(folder: Path, kind: str, action: str) -> Rule:
    head, group = FILE.split("    type: group", 1)
    text = f"{head}    expire-after: {SECONDS}s\n    on-expire: {action}"
    path = folder / "shop.yaml"
    path.write_text(f"{text}\n    type: group{group}" if kind == "group" else f"{text}{PAIRS}")
    return load(path, {}).rules[0]


def field_of(record: Record | None, name: str) -> Any:
    return None if record is None else record.value[name]


def model_of(kind: str, action: str, *, ordered: bool) -> Model:
    expiry = Expiry(SECONDS * 1000, action == "emit")
    if kind == "group":
        topics = ("O", "L")
        rule: Gather | Pair = Gather(
            "event", topics, "Events", lambda _: True, lambda it: it.value["id"], is_complete, key_of, value_of, expiry
        )
    else:
        rule = Pair(
            *("event", "O", "L", "Events"),
            lambda _: True,
            lambda it: it.value["id"],
            lambda left, _: field_of(left, "v"),
            lambda left, right: {"o": field_of(left, "n"), "l": field_of(right, "n")},
            expiry,
        )
    return Model(("O", "L"), [rule], source=source_order if ordered else None)


@pytest.mark.parametrize("kind", [pytest.param("denorm", marks=pytest.mark.slow), "group"])
@pytest.mark.parametrize(
    ("action", "ordered"),
    [
        ("drop", False),
        pytest.param("emit", False, marks=pytest.mark.slow),
        pytest.param("drop", True, marks=pytest.mark.slow),
        pytest.param("emit", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_records_expire_as_in_the_model_wherever_batches_are_cut(
    spark: SparkSession, tmp_path: Path, kind: str, action: str, ordered: bool, seed: int
) -> None:
    records, chance = world(seed, 300, keys=30, step=1000), random.Random(seed)
    model, at_once = (model_of(kind, action, ordered=ordered) for _ in range(2))
    engine = Engine(spark, rule_of(tmp_path, kind, action), ordered=ordered)
    cuts = [0, *sorted(chance.sample(range(1, len(records)), 3)), len(records)]
    for first, end in itertools.pairwise(cuts):
        model.batch(records[first:end])
        engine.batch(records[first:end])
        assert {record.place for record in engine.pending} == places(model, "pending")
        assert engine.expired == places(model, "expired")
    at_once.batch(records)
    wanted = [(out.key, out.value, out.source) for out in model.outputs["Events"]]
    assert wanted == [(out.key, out.value, out.source) for out in at_once.outputs["Events"]]
    assert engine.outputs == wanted
    assert at_once.classes == model.classes
    assert len(wanted) > 30
    assert (len(engine.expired) > 30) == (action == "drop")


def places(model: Model, name: str) -> set[tuple[str, int, int]]:
    return {place for place, other in model.classes.items() if other == name}


EXPIRING = JOIN.replace("    type: denorm", "    type: denorm\n    expire-after: $after\n    on-expire: $action")
GROUPING = """
transforms:
  - name: join
    type: group
    expire-after: $after
    on-expire: $action
    records: {l: $left, r: $right}
    group-by: value.id
    complete-when: count(*) = 2
    out: $out
    key: first(l).key
    value: {id: max(value.id), l: first(l).value.v, r: first(r).value.v}
"""
SENT = 1_700_000_000_000


def with_expiry(text: str, after: str, action: str) -> str:
    return BOTH + text.replace("$after", after).replace("$action", action)


def sent(it: Mini, topic: str, key: str, id: int, seconds: int) -> None:
    it.send(topic, (key, row(id, key)), times=[SENT + 1000 * seconds])


@pytest.mark.slow
def test_expired_records_are_listed_replayed_and_emitted(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, with_expiry(EXPIRING, "1m", "quarantine"))
    sent(it, it.left, "a", 1, 0)
    sent(it, it.left, "b", 2, 0)
    sent(it, it.right, "x", 9, 60)
    assert it.step() is not None
    assert it.classes(it.left) == {"pending": 2}
    # Nothing of the two keys comes any more. The time of another record lets them expire.
    sent(it, it.right, "y", 8, 61)
    assert it.step() is not None
    assert it.classes(it.left) == {"expired": 2}
    assert it.classes(it.right) == {"pending": 2}
    found = quarantined_records(it.pipeline)
    assert [(item.offset, item.stage, item.rule) for item in found] == [(0, "etl", "join"), (1, "etl", "join")]
    assert found[0].error == "rule join: nothing completed the record within 1m; raise expire-after before a replay"
    assert sound(it)

    # With a longer wait, a replay finds the counterpart that came late.
    it = it.edited(with_expiry(EXPIRING, "1h", "drop"))
    sent(it, it.right, "a", 1, 130)
    assert it.step() is not None
    assert it.values() == []
    assert it.etl(retry=Retry(failed=Selection())) is not None
    assert it.values() == [{"id": 1, "l": "a", "r": "a"}]
    assert it.classes(it.left) == {"done": 1, "pending": 1}
    assert quarantined_records(it.pipeline) == []
    # What is dropped is counted alone, and can be matched again.
    sent(it, it.left, "z", 7, 5_000)
    assert it.step() is not None
    assert it.classes(it.left) == {"done": 1, "expired": 1, "pending": 1}
    assert quarantined_records(it.pipeline) == []
    it = it.edited(with_expiry(EXPIRING, "90m", "emit"))
    assert it.etl(retry=Retry(expired=True)) is not None
    assert it.classes(it.left) == {"done": 1, "pending": 2}
    sent(it, it.right, "z", 7, 6_000)
    assert it.step() is not None
    # The expired records come before the pair that is later than their expiry.
    wanted = [{"id": 2, "l": "b", "r": None}, {"id": None, "l": None, "r": "x"}, {"id": None, "l": None, "r": "y"}]
    assert it.values()[1:] == [*wanted, {"id": 7, "l": "z", "r": "z"}]
    assert it.classes(it.left) == {"done": 3}
    assert it.classes(it.right) == {"done": 4}
    assert sound(it)


def sound(it: Mini) -> bool:
    it.publish()
    return all(result.passed for result in run_all(it.pipeline) if result.severity == "error")


CHANGES = """
  - {name: change, type: stateless, in: $left, where: value.op = 'u', out: $out, key: in.key,
     value: {id: in.value.id, l: in.value.v}}
  - {name: gone, type: stateless, in: $left, where: value.op = 'd', out: $out, key: in.key, value: null}
"""
SHARED = "order-delay: 0.05" + BOTH.replace('v string"', 'v string, n bigint", order: {by: value.n, domain: source}')


def history(it: Mini, op: str, limit: int | None) -> list[tuple[str | None, str | None]]:
    """Send records of both topics in the order of their source, and transform them in batches of about ``limit``. Returns key and
    text of each output. A change with ``op`` stands between the records that wait and the first that is too late for them."""
    both = {it.left: "l", it.right: "r"}
    changes = [
        (it.right, "x", 9, "c", 0),
        (it.left, "a", 1, "c", 1),
        (it.left, "b", 2, "c", 2),
        (it.left, "a", 1, op, 3),
        (it.right, "y", 8, "x", 4),
        (it.left, "a", 1, "u", 20),
        (it.left, "c", 3, "u", 20),
        (it.right, "y", 8, "x", 21),
    ]
    for n, (topic, key, id, what, seconds) in enumerate(changes):
        it.send(topic, (key, {**row(id, f"{both[topic]}{n}", what), "n": n}), times=[SENT + 1000 * seconds])
    for _ in range(2):
        list(ingest_all(it.pipeline, lambda: it.spark, [it.left, it.right]))
        time.sleep(0.1)
    while limit is not None and batch(it, limit):
        pass
    list(etl_all(it.pipeline, lambda: it.spark))
    assert it.classes(it.left) == {"done": 5}
    assert it.classes(it.right) == {"done": 1, "unmatched": 2}
    made = ((item["key"], item["value"]) for item in it.staged())
    return [(key, value and (value["l"] or value["r"])) for key, value in made]


@pytest.mark.parametrize(
    ("rule", "op", "limit"),
    [
        pytest.param(
            rule, op, limit, marks=[] if (op, limit) == ("u", None) else pytest.mark.slow, id=f"{name}-{op}-{limit}"
        )
        for name, rule in (("denorm", EXPIRING), ("group", GROUPING))
        for op in "ud"
        for limit in (1, 2, 3, None)
    ],
)
def test_an_expiry_has_one_place_in_the_order_of_a_source(
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    op: str,
    limit: int | None,
) -> None:
    """Just before the outputs of the first record that is too late, also where that record makes outputs itself."""
    if limit == 3:
        # Its batches are made as large ones are.
        monkeypatch.setattr(positions, "SMALL", 0)
    text = rule.replace("    out:", "    where: value.op = 'c'\n    out:") + CHANGES
    text = SHARED + text.replace("$after", "10s").replace("$action", "emit")
    it = mini(services, spark, tmp_path, unique, text)
    changed = ("a", "l3" if op == "u" else None)
    assert history(it, op, limit) == [changed, (None, "r0"), ("a", "l1"), ("b", "l2"), ("a", "l5"), ("c", "l6")]


@pytest.mark.slow
def test_a_merged_output_ends_with_the_change_that_lets_another_expire(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    text = EXPIRING.replace("    out:", "    where: value.op = 'c'\n    out:") + CHANGES
    text = SHARED.replace("factor: 1}", "factor: 1}, coalesce: true") + text
    it = mini(services, spark, tmp_path, unique, text.replace("$after", "10s").replace("$action", "emit"))
    assert history(it, "u", None) == [(None, "r0"), ("b", "l2"), ("a", "l5"), ("c", "l6")]


@pytest.mark.slow
def test_the_time_of_the_oldest_record_follows_the_records_that_wait(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Otherwise each later batch would read the whole ledger for records that may expire."""
    it = mini(services, spark, tmp_path, unique, with_expiry(EXPIRING, "1m", "drop"))
    sent(it, it.left, "a", 1, 0)
    sent(it, it.right, "a", 1, 0)
    sent(it, it.left, "b", 2, 50)
    assert it.step() is not None
    assert dict(it.head.waits) == {"join": SENT}
    sent(it, it.left, "c", 3, 61)
    assert it.step() is not None
    assert it.classes(it.left) == {"done": 1, "pending": 2}
    assert dict(it.head.waits) == {"join": SENT + 50_000}


@pytest.mark.slow
def test_an_edit_lets_waiting_records_expire(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """Also an update, whose entry in the ledger has another text in place of its time."""
    it = mini(services, spark, tmp_path, unique, BOTH + JOIN)
    it.send(it.left, ("a", row(1, "a", "u")), ("b", row(2, "b")), times=[SENT, SENT + 50_000])
    it.send(it.right, ("x", row(9, "x")), times=[SENT])
    assert it.step() is not None
    it = it.edited(with_expiry(EXPIRING, "1m", "drop"))
    sent(it, it.right, "y", 8, 61)
    assert it.step() is not None
    assert it.classes(it.left) == {"expired": 1, "pending": 1}
    assert it.classes(it.right) == {"expired": 1, "pending": 1}
    assert sound(it)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [EXPIRING, GROUPING], ids=["denorm", "group"])
def test_a_record_that_is_late_and_matched_again_counts_once(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, rule: str
) -> None:
    it = mini(services, spark, tmp_path, unique, with_expiry(rule, "1m", "drop"))
    sent(it, it.left, "a", 1, 0)
    sent(it, it.left, "b", 2, 50)
    sent(it, it.right, "x", 9, 50)
    assert it.step() is not None
    sent(it, it.right, "y", 8, 61)
    it.ingest()
    assert it.etl(retry=Retry(waiting=("join",))) is not None
    assert it.classes(it.left) == {"expired": 1, "pending": 1}
    assert it.classes(it.right) == {"pending": 2}
    assert dict(it.head.waiting) == {("join", it.left): 1, ("join", it.right): 2}
    assert sound(it)
