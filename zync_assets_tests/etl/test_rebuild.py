"""``zync rebuild`` of event rules: staging becomes what the edited rules make of the raw history, and the account too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.checks.output_checks import run_all
from zync_assets.cli.query import LATEST, table_frame
from zync_assets.errors import EtlError
from zync_assets.etl import history, positions
from zync_assets.etl.plan import EtlCommit
from zync_assets.lake.quarantine_table import quarantined_records
from zync_assets.local.services import Services
from zync_assets.publish.plan import plan_publish
from zync_assets.runner import rebuild_all
from zync_assets_tests.mini import BOTH, JOIN, Mini, die, mini, row, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UPDATES = """
  - {name: update, type: stateless, where: value.op = 'u', in: $right, out: $out, key: "concat('k', in.value.id)",
     value: {r: in.value.v}}
  - {name: delete, type: stateless, where: value.op = 'd', in: $left, out: $out, key: in.key, value: null}
"""
RULES = BOTH + JOIN.replace("type: denorm", "type: denorm\n    where: value.op = 'c'") + UPDATES
COPY = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {l: in.value.v}}
"""
Make = Callable[[str], Mini]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    return lambda text: mini(services, spark, tmp_path, unique, text)


def rebuilt(it: Mini, *topics: str) -> list[EtlCommit]:
    """The commits of a rebuild but those of the scratch pool."""
    made = rebuild_all(it.pipeline, lambda: it.spark, topics=topics)
    found = [commit for commit in made if commit.pool == "Staging"]
    assert not Path(it.lake, "~rebuild", "Staging").exists()
    return found


def rows(it: Mini, topic: str | None = None) -> dict[str, Any]:
    """The row of each key, as a consumer folds the staged records; partitions one after another."""
    found: dict[str, Any] = {}
    texts = {name: json.loads(text)["value"]["schema"] for name, (_, text) in it.head.schemas.items()}
    for record in it.staged(topic):
        key, schema = json.dumps(record["key"]), texts[record["schema"]]
        if record["value"] is None:
            found.pop(key, None)
            continue
        schema = next((item for item in schema if item != "null"), None) if isinstance(schema, list) else schema
        names = [item["name"] for item in schema["fields"] if f"value.{item['name']}" not in (record["left_out"] or ())]
        found[key] = found.get(key, {}) | {name: record["value"][name] for name in names}
    return {json.loads(key): row for key, row in found.items()}


def sound(it: Mini, *topics: str) -> None:
    """The topics are published, and every blocking check passes."""
    for topic in topics or (it.out,):
        if not plan_publish(it.pipeline, topic).nothing_to_do:
            it.publish(topic)
    results = [result for result in run_all(it.pipeline) if result.severity == "error"]
    assert [result.summary for result in results if not result.passed] == []


def test_a_changed_value_is_staged_again(make: Make) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, ("a", row(1, "one")), ("b", row(2, "TWO")))
    it.step()
    edited = it.edited(BOTH + COPY.replace("in.value.v", "upper(in.value.v)"))
    rebuilt(edited)
    assert [(item["key"], item["value"]["l"]) for item in edited.staged()] == [("a", "one"), ("b", "TWO"), ("a", "ONE")]
    sound(edited)


def test_an_output_of_tombstones_alone_is_rebuilt_too(make: Make) -> None:
    rule = COPY.replace("value: {l: in.value.v}", "where: value.op = 'd', value: null")
    it = make(BOTH + rule)
    it.send(it.left, ("a", row(1, "one", "d")), ("b", row(2, "two")))
    it.step()
    edited = it.edited(BOTH + rule.replace("value.op = 'd'", "value.op <> 'd'"))
    rebuilt(edited)
    assert [(item["key"], item["value"]) for item in edited.staged()] == [("a", None)]
    sound(edited)


@pytest.mark.parametrize("key", ["{number: in.value.id}", "{id: in.value.id, v: in.value.v}"])
def test_an_edit_of_the_fields_of_a_key_needs_another_topic(make: Make, key: str) -> None:
    """No record with a key of the new fields deletes the row of an old key."""
    both = BOTH.replace("$out, pool: Staging, key-format: string", "$out, pool: Staging, key-format: json")
    copy = COPY.replace("in.key", "{id: in.value.id}")
    it = make(both + copy)
    it.send(it.left, ("a", row(1, "one")), ("b", row(2, None)))
    it.step()
    edited = it.edited(both + copy.replace("{id: in.value.id}", key))
    with pytest.raises(
        EtlError, match=r"staged keys have \{id\}, and the keys of the present rules have .*another output"
    ):
        list(rebuild_all(edited.pipeline, lambda: it.spark))
    assert len(edited.staged()) == 2


@pytest.mark.slow
def test_outputs_that_share_the_account_of_an_input_are_rebuilt_together(make: Make) -> None:
    """A record that only the other output gets would count as done without it."""
    both = BOTH + "  - {topic: $out-b, pool: Staging, key-format: string, value-format: json, create: {}}\n"
    rule = '  - {name: %s, type: stateless, where: "%s", in: $left, out: $out%s, key: in.key, value: {l: in.value.v}}\n'
    rules = "transforms:\n" + rule % ("a", "value.op = 'c'", "")
    it = make(both + rules + rule % ("b", "value.op = 'u'", "-b"))
    it.send(it.left, ("1", row(1, "one")), ("2", row(2, "two", "u")), ("3", row(3, "three", "x")))
    it.step()
    wide = both + rules.replace("in.value.v", "upper(in.value.v)") + rule % ("b", "value.op <> 'c'", "-b")
    edited, other = it.edited(wide), f"{it.out}-b"
    assert edited.classes(it.left) == {"done": 2, "unmatched": 1}
    with pytest.raises(EtlError, match=rf"topic {other}: its outputs change, too.*Rebuild all: zync rebuild"):
        list(rebuild_all(edited.pipeline, lambda: it.spark, topics=(it.out,)))
    assert edited.classes(it.left) == {"done": 2, "unmatched": 1}
    rebuilt(edited, it.out, other)
    assert rows(edited) == {"1": {"l": "ONE"}}
    assert rows(edited, other) == {"2": {"l": "two"}, "3": {"l": "three"}}
    assert edited.classes(it.left) == {"done": 3}
    narrow = it.edited(wide.replace("upper(", "lower("))
    rebuilt(narrow, it.out)
    assert rows(narrow) == {"1": {"l": "one"}}


@pytest.mark.slow
def test_what_differs_is_staged_and_nothing_else(make: Make) -> None:
    """Partial updates are folded. A row that is gone gets a tombstone, and a row that lacks a field gets one before."""
    it = make(RULES)
    for topic, sign in ((it.left, "l"), (it.right, "r")):
        it.send(topic, *((f"k{number}", row(number, f"{sign}{number}")) for number in range(5)))
    it.step()
    it.send(it.right, ("k1", row(1, "R1", "u")), ("k3", row(3, "R3", "u")))
    it.send(it.left, ("k2", row(2, "", "d")))
    it.step()
    sound(it)
    before = it.staged()
    assert len(before) == 8
    assert rebuilt(it) == []

    edited = it.edited(
        RULES.replace("l: left.value.v", 'l: "if(left.value.id < 2, upper(left.value.v), left.value.v)"')
    )
    edited.send(it.left, ("k9", row(9, "new")))
    edited.ingest()
    (made,) = rebuilt(edited)
    # Of k1, the later update follows the record that sets the other value.
    assert [(item["key"], item["value"]["l"], item["value"]["r"], item["rule"]) for item in edited.staged()[8:]] == [
        ("k0", "L0", "r0", "join"),
        ("k1", "L1", "r1", "join"),
        ("k1", None, "R1", "update"),
    ]
    assert made.counts["outputs"] == 3
    assert edited.staged()[:8] == before
    sound(edited)
    assert rebuilt(edited) == []

    gone = edited.edited(
        RULES.replace("value.op = 'c'", "value.op = 'c' AND value.id <> 4").replace(", r: right.value.v", "")
    )
    rebuilt(gone)
    assert rows(gone) == {
        "k0": {"id": 0, "l": "l0"},
        "k1": {"id": 1, "l": "l1", "r": "R1"},
        "k3": {"id": 3, "l": "l3", "r": "R3"},
    }
    sound(gone)
    assert rebuilt(gone) == []
    assert gone.classes(it.left) == {"done": 5, "unmatched": 1}
    gone.etl()
    assert gone.classes(it.left) == {"done": 5, "unmatched": 1, "pending": 1}


@pytest.mark.slow
def test_records_wait_by_the_new_rules(make: Make) -> None:
    """A record that an old rule used up finds its counterpart, and a record that waited goes on where it does not wait now."""
    it = make(BOTH + COPY)
    it.send(it.left, *((f"k{number}", row(number, f"l{number}")) for number in range(3)))
    it.send(it.right, ("k1", row(1, "r1")), ("k7", row(7, "r7")))
    it.step()
    joined = it.edited(BOTH + JOIN)
    joined.step()
    rebuilt(joined)
    assert rows(joined) == {"k1": {"id": 1, "l": "l1", "r": "r1"}}
    assert joined.classes(it.left) == {"done": 1, "pending": 2}
    # The rule that was there before reads no right records: the account begins to know them with the next batch.
    sound(joined)
    joined.etl()
    joined.send(it.right, ("k0", row(0, "r0")))
    joined.step()
    assert rows(joined) == {
        number: {"id": int(number[1]), "l": f"l{number[1]}", "r": f"r{number[1]}"} for number in ("k0", "k1")
    }
    sound(joined)
    copied = joined.edited(BOTH + COPY)
    rebuilt(copied)
    assert rows(copied) == {f"k{number}": {"l": f"l{number}"} for number in range(3)}
    assert copied.classes(it.left) == {"done": 3}
    sound(copied)


@pytest.mark.slow
def test_a_renamed_output_gets_all_records(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records without a key can't be compared. A new topic has them all, in their order, whatever tasks number them."""
    monkeypatch.setattr(positions, "BUCKET_RECORDS", 1)
    it = make(BOTH + COPY)
    it.send(it.left, ("a", row(1, "one")), (None, row(2, "two")), ("a", row(3, "three")), (None, row(4, "four")))
    it.step()
    upper = it.edited(BOTH + COPY.replace("in.value.v", "upper(in.value.v)"))
    rebuilt(upper)
    assert "records without a key are not compared" in caplog.text
    assert [item["value"]["l"] for item in upper.staged()[4:]] == ["THREE"]
    sound(upper)
    new = f"{it.out}.new"
    renamed = upper.edited((BOTH + COPY.replace("in.value.v", "upper(in.value.v)")).replace("$out", new))
    rebuilt(renamed)
    assert [(item["key"], item["value"]["l"]) for item in renamed.staged(new)] == [
        ("a", "ONE"),
        (None, "TWO"),
        ("a", "THREE"),
        (None, "FOUR"),
    ]
    assert len(renamed.staged(it.out)) == 5
    sound(renamed, new)
    renamed.send(it.left, ("b", row(5, "five")))
    renamed.step()
    assert [item["value"]["l"] for item in renamed.staged(new)[4:]] == ["FIVE"]
    sound(renamed, new)


SEVERAL = """
outputs:
  - {topic: $out, pool: Staging, value-format: json, create: {partitions: 3}}
  - {topic: $out.items, pool: Staging, key-format: string, value-format: json, create: {}}
transforms:
  - name: both
    type: stateless
    in: $left
    out:
      - {topic: $out, key: {id: in.value.id}, value: {v: in.value.v}}
      - {topic: $out.items, key: in.value.v, value: {id: in.value.id}}
  - name: pair
    type: group
    records: {g: $right}
    group-by: value.id
    complete-when: count(*) = 2
    out: $out.items
    key: concat('g', first(g).value.id)
    value: {id: first(g).value.id}
"""


@pytest.mark.slow
def test_several_outputs_groups_and_partitions(make: Make) -> None:
    text = BOTH[: BOTH.index("outputs:")] + SEVERAL
    it = make(text)
    items = f"{it.out}.items"
    it.send(it.left, *(row(number, f"v{number}") for number in range(12)))
    it.send(it.right, row(1), row(2), row(1), row(3))
    it.step()
    assert len(it.staged(items)) == 13
    sound(it, it.out, items)
    edited = it.edited(text.replace("value: {v: in.value.v}", "value: {v: \"if(in.value.id > 9, 'x', in.value.v)\"}"))
    rebuilt(edited, items)
    assert len(edited.staged()) == 12
    rebuilt(edited)
    assert len(edited.staged()) == 14
    assert len(edited.staged(items)) == 13
    parts = {item["key"]["id"]: item["kafka"]["partition"] for item in edited.staged() if item["value"]["v"] != "x"}
    assert all(parts[item["key"]["id"]] == item["kafka"]["partition"] for item in edited.staged())
    sound(edited, it.out, items)
    grouped = edited.edited(text.replace("count(*) = 2", "count(*) = 1"))
    rebuilt(grouped)
    assert rows(grouped, items).keys() == {*(f"v{number}" for number in range(12)), "g1", "g2", "g3"}
    assert grouped.classes(it.right) == {"done": 4}
    sound(grouped, it.out, items)
    assert rebuilt(grouped) == []


LOOKS = """
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {}}
  - {topic: $out.view, pool: Staging, value-format: json, create: {}}
transforms:
  - name: look
    type: stateless
    in: $left
    out: $out
    lookup: {t: {table: $right, row: value, on: t.id = in.value.id, missing: wait, wait: 10m}}
    key: in.key
    value: {l: in.value.v, t: t.v}
  - name: view
    type: view
    tables: {r: {topic: $right, row: value}}
    from: r
    out: $out.view
    key: {id: r.id}
    value: {v: r.v}
"""


@pytest.mark.slow
def test_look_ups_beside_a_view(make: Make) -> None:
    """The view keeps its result and its state. A record that waits for its row goes on waiting."""
    text = BOTH[: BOTH.index("outputs:")] + LOOKS
    it = make(text)
    view = f"{it.out}.view"
    it.send(it.right, ("k1", row(1, "A")), ("k3", row(3, "C")))
    it.send(it.left, ("k1", row(1, "x")), ("k2", row(2, "y")))
    it.step()
    sound(it, it.out, view)
    edited = it.edited(text.replace("l: in.value.v", "l: upper(in.value.v)"))
    rebuilt(edited)
    assert rows(edited) == {"k1": {"l": "X", "t": "A"}}
    assert len(edited.staged(view)) == 2
    assert edited.classes(it.left) == {"done": 1, "pending": 1}
    sound(edited, it.out, view)
    edited.send(it.right, ("k2", row(2, "B")), ("k1", row(1, "D")))
    edited.step()
    assert rows(edited) == {"k1": {"l": "X", "t": "A"}, "k2": {"l": "Y", "t": "B"}}
    assert len(edited.staged(view)) == 4
    sound(edited, it.out, view)


VIEWS = """
outputs:
  - {topic: $out, pool: Staging, key-format: string, value-format: json, create: {}}
  - {topic: $out.view, pool: Staging, value-format: json, create: {}}
  - {topic: $out.more, pool: Staging, value-format: json, create: {}}
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {l: in.value.v}}
  - {name: view, type: view, tables: {r: {topic: $right, row: value}}, from: r, out: $out.view, key: {id: r.id},
     value: {v: r.v}}
"""


@pytest.mark.slow
def test_a_new_view_has_no_result_after_the_rebuild_of_event_rules(make: Make) -> None:
    """The next batch makes the result."""
    text = BOTH[: BOTH.index("outputs:")] + VIEWS
    it = make(text)
    view, more = f"{it.out}.view", f"{it.out}.more"
    it.send(it.right, ("k1", row(1, "A")))
    it.send(it.left, ("k1", row(1, "x")))
    it.step()
    view_text = text[text.index("  - {name: view") :]
    edited = it.edited(
        text.replace("in.value.v", "upper(in.value.v)")
        + view_text.replace("name: view", "name: more").replace("$out.view", "$out.more")
    )
    rebuilt(edited, it.out)
    assert rows(edited) == {"k1": {"l": "X"}} and edited.staged(more) == []
    edited.etl()
    assert [item["value"]["v"] for topic in (view, more) for item in edited.staged(topic)] == ["A", "A"]
    sound(edited, it.out, view, more)


@pytest.mark.slow
def test_a_look_up_at_a_rebuild_finds_the_rows_of_now_and_the_rebuild_of_a_view_leaves_its_outputs(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    text = BOTH[: BOTH.index("outputs:")] + LOOKS
    it = make(text)
    it.send(it.right, ("k1", row(1, "A")))
    it.send(it.left, ("k1", row(1, "x")))
    it.step()
    it.send(it.right, ("k1", None))
    it.step()
    edited = it.edited(text.replace("v: r.v", "v: upper(r.v)"))
    with pytest.raises(EtlError, match=r"definition of view .* changed") as error:
        edited.etl()
    [topic] = str(error.value).split(" --topic ")[1:]
    rebuilt(edited, topic)
    assert edited.etl() is None
    assert rows(edited) == {"k1": {"l": "x", "t": "A"}} and "rows as they are now" not in caplog.text
    rebuilt(edited)
    assert rows(edited) == {} and "rows as they are now" in caplog.text
    sound(edited, it.out, f"{it.out}.view")


@pytest.mark.slow
def test_what_differs_where_the_partition_follows_from_the_value(make: Make) -> None:
    text = BOTH.replace("create: {", 'partition-by: "length(value.l)", create: {partitions: 3, ') + COPY
    it = make(text)
    it.send(it.left, ("a", row(1, "xx")), ("b", row(2, "x")))
    it.step()
    edited = it.edited(text.replace("in.value.v", "upper(in.value.v)"))
    rebuilt(edited)
    parts = {item["value"]["l"]: item["kafka"]["partition"] for item in edited.staged()}
    assert parts == {"xx": 2, "x": 1, "XX": 2, "X": 1}
    assert len(edited.staged()) == 4
    sound(edited)
    longer = edited.edited(text.replace("in.value.v", "in.value.v || 'y'"))
    with pytest.raises(EtlError, match=r'"key":"[ab]".* would go to partition [20], and .* in partition [12]\.'):
        rebuilt(longer)
    longer.send(it.left, ("a", row(1, "x")))
    edited = longer.edited(text)
    edited.step()
    with pytest.raises(EtlError, match=r'"key":"a".* are in the partitions 1 and 2'):
        rebuilt(edited)
    assert len(edited.staged()) == 5
    with pytest.raises(EtlError, match=r'"key":"a".* are in the partitions 1 and 2, .* Nothing was read\.'):
        table_frame(it.spark, edited.pipeline, "Staging", it.out + LATEST)
    assert table_frame(it.spark, edited.pipeline, "Staging", it.out).count() == 5


@pytest.mark.slow
def test_a_batch_of_another_process_meanwhile(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = make(BOTH + COPY)
    it.send(it.left, *((f"k{number}", row(number, "a")) for number in range(3)))
    it.step()
    edited = it.edited(BOTH + COPY.replace("in.value.v", "upper(in.value.v)"))
    passes: list[str] = []

    def crash_point(name: str) -> None:
        passes.append(name)
        if passes == ["rebuild:recomputed"]:
            edited.send(it.left, ("k1", row(1, "b")), ("k5", row(5, "c")))
            edited.step()

    monkeypatch.setattr(history, "crash_point", crash_point)
    rebuilt(edited)
    assert passes == ["rebuild:recomputed", "rebuild:recomputed", "rebuild:committed"]
    assert rows(edited) == {"k0": {"l": "A"}, "k1": {"l": "B"}, "k2": {"l": "A"}, "k5": {"l": "C"}}
    assert len(edited.staged()) == 7
    sound(edited)


@pytest.mark.slow
def test_quarantined_records_are_looked_at_again(make: Make) -> None:
    text = BOTH + COPY.replace("in.value.v", "CAST(in.value.v AS INT)")
    it = make(text)
    it.send(it.left, ("a", row(1, "1")), ("b", row(2, "x")), ("c", b"no JSON"))
    it.step()
    assert it.classes(it.left) == {"done": 1, "quarantined": 2}
    edited = it.edited(text.replace("CAST(in.value.v AS INT)", "\"CAST(replace(in.value.v, 'x', '7') AS INT)\""))
    rebuilt(edited)
    assert rows(edited) == {"a": {"l": 1}, "b": {"l": 7}}
    assert edited.classes(it.left) == {"done": 2, "quarantined": 1}
    sound(edited)


@pytest.mark.slow
def test_expired_records_go_into_quarantine_by_an_edit(make: Make) -> None:
    """No row differs, and each class has as many records as before."""
    text = BOTH + JOIN.replace("    out:", "    expire-after: 1s\n    on-expire: drop\n    out:")
    it = make(text)
    it.send(it.left, ("a", row(1)), ("b", row(2)), times=[1_700_000_000_000, 1_700_000_009_000])
    it.send(it.right, ("c", row(3)), times=[1_700_000_009_000])
    it.step()
    assert it.classes(it.left) == {"expired": 1, "pending": 1} and quarantined_records(it.pipeline) == []
    edited = it.edited(text.replace("drop", "quarantine"))
    rebuilt(edited)
    assert [record.place for record in quarantined_records(edited.pipeline)] == [(it.left, 0, 0)]
    assert edited.classes(it.left) == {"expired": 1, "pending": 1}
    batch = edited.head.batch
    rebuilt(edited)
    assert edited.head.batch == batch
    sound(edited)


@pytest.mark.slow
def test_records_that_retention_removed_are_named(make: Make) -> None:
    text = (BOTH + JOIN).replace("pool: Raw,", "pool: Raw, retention: 30d,")
    it = make(text)
    it.send(it.left, row(1, "a"), row(2, "b"))
    it.send(it.right, row(1), row(2))
    it.step()
    edited = it.edited(text.replace("left.value.v", "upper(left.value.v)"))
    with pytest.raises(EtlError, match=rf"topic {it.left}, partition 0, offsets 0 to 1; .*Nothing was rebuilt"):
        list(rebuild_all(edited.pipeline, lambda: it.spark))
    assert len(edited.staged()) == 2


@pytest.mark.slow
def test_retention_goes_on_after_a_rebuild(make: Make) -> None:
    """Of records that were done at the rebuild, and made no output of it, the account tells."""
    it = make(BOTH + COPY)
    it.send(it.left, *((f"k{number % 2}", row(number, "a")) for number in range(6)))
    it.step()
    text = BOTH + COPY.replace("in.value.v", "upper(in.value.v)")
    rebuilt(it.edited(text))
    kept = it.edited(text.replace("pool: Raw,", "pool: Raw, retention: 30d,"))
    kept.send(it.left, ("k7", row(7, "b")), times=[int(time.time() * 1000)])
    kept.step()
    assert [found["kafka"]["offset"] for found in kept.raw(it.left)] == [6]
    assert rows(kept) == {"k0": {"l": "A"}, "k1": {"l": "A"}, "k7": {"l": "B"}}
    sound(kept)


OWN_POINTS = ("rebuild:recomputed", "rebuild:committed")
"""The crash points of a rebuild itself."""
POINTS = {
    "before": ("etl:outputs-written", "rebuild:recomputed", "etl:outputs-written@3", "etl:ledger-written@3"),
    "commits": ("etl:committed", "etl:head-written@3", "etl:committed@2", "rebuild:committed"),
}
"""The first commit of the scratch pool makes its table."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_a_rebuild_that_was_killed_goes_on(make: Make, points: Sequence[str]) -> None:
    """Two batches of the scratch pool, then the commit. A new edit is rebuilt after each kill."""
    it = make(BOTH + JOIN)
    for number in range(2):
        it.send(it.left, *((f"k{at}", row(at, "l")) for at in range(number * 3, number * 3 + 3)))
        it.send(it.right, *((f"k{at}", row(at, "r")) for at in range(number * 3, number * 3 + 2)))
        it.step()
    four = "from zync_assets.etl import plan\nplan.plan_etl.__defaults__ = (*plan.plan_etl.__defaults__[:1], 6, None)"
    staged = 4
    for number, point in enumerate(points):
        edited = it.edited(BOTH + JOIN.replace("left.value.v", f"left.value.v || '{number}'"))
        die(edited.pipeline, point, "rebuild", first=four)
        said = run(edited.pipeline, "rebuild", first=four)
        if point.startswith(("rebuild", "etl:outputs-written@3")):
            assert "~rebuild" not in said
        staged += 4
        assert len(edited.staged()) == staged, point
        assert {row["l"] for row in rows(edited).values()} == {f"l{number}"}
        assert edited.classes(it.left) == {"done": 4, "pending": 2}
        sound(edited)
