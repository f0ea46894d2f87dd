"""Look-ups against a model: which events make outputs, which wait for their row, and which go into quarantine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.cli.records import pending_rows
from zync_assets.errors import EtlError
from zync_assets.etl import ledger, positions
from zync_assets.lake.quarantine_table import Selection, quarantined_records
from zync_assets.local.services import Services
from zync_assets.runner import rebuild_all
from zync_assets_tests.etl.test_rebuild import LOOKS
from zync_assets_tests.mini import BOTH, Mini, failing_commit, make_pipeline, mini, mini_of, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = """
inputs:
  - {{topic: {name}.orders, pool: Raw, format: json, key-schema: id bigint,
     value-schema: "id bigint, how string, customer int, region string"}}
  - {{topic: {name}.customers, pool: Raw, format: json, key-schema: id bigint,
     value-schema: "op string, after struct<id bigint, name string, note string>"}}
  - {{topic: {name}.regions, pool: Raw, format: json, key-schema: code string, value-schema: "code string, label string"}}
outputs:
  - {{topic: {name}.out, pool: Staging, format: json, create: {{}}}}
transforms:
  - name: wait
    type: stateless
    where: value.how = 'wait'
    in: {name}.orders
    lookup:
      c: {{table: {name}.customers, on: c.id = in.value.customer, missing: wait, wait: 10m}}
      r: {{table: {name}.regions, on: in.value.region = r.code, missing: {second}}}
    key: in.key
    value: {{name: c.name, label: r.label}}
    out: {name}.out
  - name: quarantine
    type: stateless
    where: value.how = 'quarantine'
    in: {name}.orders
    lookup: {{c: {{table: {name}.customers, on: c.id = in.value.customer, missing: quarantine}}}}
    key: in.key
    value: {{name: upper(c.name)}}
    out: {name}.out
  - name: nulls
    type: stateless
    where: value.how = 'null'
    in: {name}.orders
    lookup: {{c: {{table: {name}.customers, on: c.id = in.value.customer, missing: null}}}}
    key: in.key
    value: {{name: c.name}}
    out: {name}.out
"""


@dataclass
class Model:
    """Which outputs the events make. ``second``: what happens without a row of the second table."""

    second: str
    rows: dict[str, dict[Any, Any]] = field(default_factory=lambda: {"customers": {}, "regions": {}})
    waiting: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    outputs: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    refused: set[int] = field(default_factory=set[int])

    def batch(self, events: Mapping[int, Mapping[str, Any]]) -> None:
        """A batch with these events, by offset. The rows are those after the batch."""
        each, self.waiting = {**self.waiting, **events}, {}
        for offset, event in each.items():
            customer = self.rows["customers"].get(event["customer"])
            region = self.rows["regions"].get(event["region"]) if event["how"] == "wait" else None
            if event["how"] == "wait" and (customer is None or (self.second == "wait" and region is None)):
                self.waiting[offset] = event
            elif event["how"] == "quarantine":
                if customer is None:
                    self.refused.add(offset)
                else:
                    self.outputs[offset] = {"name": customer.upper(), "label": None}
            else:
                self.outputs[offset] = {"name": customer, "label": region}


@dataclass
class World:
    it: Mini
    name: str
    model: Model
    sent: int = 0
    events: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])

    def order(self, how: str, customer: int | None, region: str | None = None) -> None:
        value = {"id": self.sent, "how": how, "customer": customer, "region": region}
        self.it.send(f"{self.name}.orders", (json.dumps({"id": self.sent}), value))
        self.events[self.sent] = value
        self.sent += 1

    def customer(self, id: int, name: str | None) -> None:
        value = {"op": "d", "after": None} if name is None else {"op": "u", "after": {"id": id, "name": name}}
        self.it.send(f"{self.name}.customers", (json.dumps({"id": id}), value))
        self.model.rows["customers"][id] = name

    def region(self, code: str, label: str | None) -> None:
        value = None if label is None else {"code": code, "label": label}
        self.it.send(f"{self.name}.regions", (json.dumps({"code": code}), value))
        self.model.rows["regions"][code] = label

    def batch(self) -> None:
        self.it.ingest()
        while self.it.etl() is not None:
            pass
        self.model.batch(self.events)
        self.events = {}

    def check(self) -> None:
        model, orders = self.model, f"{self.name}.orders"
        staged = self.it.staged()
        found = {row["source"][0]["offset"]: row["value"] for row in staged}
        assert found == model.outputs
        assert len(staged) == len(found)
        waiting = list(pending_rows(self.it.pipeline, "Staging"))
        assert {row["offset"] for row in waiting} == model.waiting.keys()
        refused = {one.offset for one in quarantined_records(self.it.pipeline, Selection())}
        assert refused == model.refused
        counts = {"done": len(model.outputs), "pending": len(model.waiting), "quarantined": len(model.refused)}
        assert self.it.classes(orders) == {name: count for name, count in counts.items() if count}
        covered = exactly_once_done_coverage(self.it.pipeline, "Staging")
        assert covered.passed, covered
        numbered = contiguous_output_offsets(self.it.pipeline, self.it.out)
        assert numbered.passed, numbered


def make(services: Services, spark: SparkSession, folder: Path, name: str, second: str = "wait") -> World:
    pipeline = make_pipeline(services, folder, TEXT.format(name=name, second=second), partitions=1)
    return World(mini_of(pipeline, spark), name, Model(second))


@pytest.mark.slow
def test_events_make_outputs_wait_or_go_into_quarantine(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    world = make(services, spark, tmp_path, unique)
    world.customer(1, "Ann")
    world.region("n", "north")
    for how in ("wait", "quarantine", "null"):
        for customer in (1, 2):
            world.order(how, customer, "n")
    world.batch()
    world.check()
    world.customer(2, "Bob")
    world.customer(1, "Anna")
    world.batch()
    world.check()
    assert not world.model.waiting


@pytest.mark.slow
def test_an_event_waits_for_each_row_and_for_no_longer_than_the_file_says(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(services, spark, tmp_path, unique)
    clock = ledger.present()
    monkeypatch.setattr(ledger, "present", lambda: clock)
    world.customer(1, "Ann")
    world.region("n", "north")
    for how in ("wait", "quarantine", "null"):
        for customer in (1, 2, None):
            world.order(how, customer, "n")
    world.batch()
    world.check()
    why = {row["offset"]: str(row["why"]) for row in pending_rows(world.it.pipeline, "Staging")}
    assert why[1].startswith(f"no row with c.id = in.value.customer in {unique}.customers yet or no row with")
    assert why[2].startswith("a null matches no row, or a table has no type yet: ")
    # The first row comes, and the event waits for the second one. A later change of a row emits nothing.
    world.order("wait", 3, "s")
    world.customer(1, "Anna")
    world.batch()
    world.check()
    clock += 300_000
    world.customer(3, "Bob")
    world.customer(2, "Cid")
    world.batch()
    world.check()
    # The event with a null waits 10 minutes, the event that waits for a second row 10 minutes from its first row on.
    clock += 300_000
    world.model.refused |= {2}
    del world.model.waiting[2]
    world.batch()
    world.check()
    [reason] = [one.error for one in quarantined_records(world.it.pipeline, Selection()) if one.offset == 2]
    assert f"no row with c.id = in.value.customer came in {unique}.customers within 600 s" in reason
    assert world.it.etl() is None
    # The row comes in the batch in which the wait is over.
    clock += 600_000
    world.region("s", "south")
    world.batch()
    world.check()
    assert not world.model.waiting
    assert world.it.head.waits == {}


@pytest.mark.slow
def test_the_rebuild_of_a_view_prolongs_no_wait(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH[: BOTH.index("outputs:")] + LOOKS)
    clock = ledger.present()
    monkeypatch.setattr(ledger, "present", lambda: clock)
    it.send(it.right, ("k1", row(1, "A")))
    it.send(it.left, ("k2", row(2, "y")))
    it.step()
    clock += 600_000
    list(rebuild_all(it.pipeline, lambda: it.spark, topics=[f"{it.out}.view"]))
    assert it.classes(it.left) == {"pending": 1}
    it.etl()
    assert it.classes(it.left) == {"quarantined": 1}


EVENTS = st.tuples(
    st.just("order"),
    st.sampled_from(["wait", "quarantine", "null"]),
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from(["n", "s", None]),
)
CHANGES = st.one_of(
    st.tuples(st.just("customer"), st.integers(1, 4), st.sampled_from(["Ann", "Bob", None])),
    st.tuples(st.just("region"), st.sampled_from(["n", "s"]), st.sampled_from(["north", "south", None])),
)
BATCHES = st.lists(
    st.tuples(
        st.lists(st.one_of(EVENTS, CHANGES), min_size=1, max_size=8),
        st.sampled_from(["once", "once", "broken", "broken after"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["wait", "null"])
def test_random_batches_end_as_the_model_says(
    services: Services, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, unique: str, second: str
) -> None:
    numbers = iter(range(10_000))

    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
        phases=[Phase.explicit, Phase.generate],
    )
    @given(BATCHES)
    def run(batches: Sequence[tuple[Sequence[Any], str, bool]]) -> None:
        number = next(numbers)
        world = make(services, spark, tmp_path_factory.mktemp("lake"), f"{unique}-{number}", second)
        for steps, how, small in batches:
            for kind, *values in steps:
                getattr(world, kind)(*values)
            with pytest.MonkeyPatch.context() as patch:
                # As large batches are made, for a batch that is not small.
                patch.setattr(positions, "SMALL", positions.SMALL if small else 0)
                if how != "once":
                    world.it.ingest()
                    with failing_commit(after=how == "broken after"):
                        world.it.etl()
                world.batch()
            world.check()

    run()


OTHERS = """
inputs:
  - {{topic: {name}.orders, pool: Raw, key-format: string, value-format: json, value-schema: "id bigint, customer string"}}
  - {{topic: {name}.payments, pool: Raw, key-format: string, value-format: json, value-schema: "id bigint, paid bigint"}}
  - {{topic: {name}.customers, pool: Raw, key-format: string, value-format: connect-json}}
outputs:
  - {{topic: {name}.out, pool: Staging, key-format: string, value-format: json, create: {{}}}}
transforms:
  - name: pair
    type: denorm
    where: {{left: value.customer <> 'single', right: value.paid > 0}}
    left: {name}.orders
    right: {name}.payments
    join-on: left.value.id = right.value.id
    lookup:
      c: {{table: {name}.customers, on: c.name = left.value.customer, missing: quarantine}}
      d: {{table: {name}.customers, on: d.id = right.value.paid, missing: null}}
    key: left.key
    value: {{paid: right.value.paid, customer: c.id, other: d.name}}
    out: {name}.out
  - name: single
    type: stateless
    in: {name}.payments
    lookup: {{c: {{table: {name}.customers, on: c.id = 100 DIV value_of.value.paid, missing: null}}}}
    key: value_of.key
    value: {{customer: c.id}}
    out: {name}.out
""".replace("value_of", "in")


@pytest.mark.slow
def test_pairs_look_up_rows_when_the_table_has_a_type(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    orders, payments, customers = (f"{unique}.{name}" for name in ("orders", "payments", "customers"))
    pipeline = make_pipeline(services, tmp_path, OTHERS.format(name=unique), partitions=1)
    it = mini_of(pipeline, spark)
    names = ("Ann", "Bob", "Bob", "Cid")
    schema = {
        "type": "struct",
        "fields": [{"field": "id", "type": "int64"}, {"field": "name", "type": "string"}],
    }
    it.send(orders, *((str(id), {"id": id, "customer": name}) for id, name in enumerate(("Ann", "Bob", "Dan"))))
    it.send(payments, *((str(id), {"id": id, "paid": paid}) for id, paid in enumerate((3, 1, 2))))
    it.step()
    # No record gave the table a type.
    assert it.classes(orders) == {"pending": 3}
    assert it.classes(payments) == {"pending": 3}
    [why] = {str(row["why"]) for row in pending_rows(pipeline, "Staging") if row["topic"] == orders}
    assert why
    rows = [{"schema": schema, "payload": {"id": id, "name": name}} for id, name in enumerate(names)]
    it.send(customers, *((str(id), row) for id, row in enumerate(rows)))
    # An expression of a look-up fails on a record.
    it.send(payments, ("9", {"id": 9, "paid": 0}), ("8", {"id": 8, "paid": -50}))
    it.step()
    assert [(row["key"], row["value"]) for row in it.staged()] == [
        ("0", {"paid": 3, "customer": 0, "other": "Cid"}),
        ("8", {"paid": None, "customer": None, "other": None}),
    ]
    errors = {(one.topic, one.offset): one.error for one in quarantined_records(pipeline, Selection())}
    assert errors.keys() == {(orders, 1), (orders, 2), (payments, 3)}
    assert f"lookup c: several rows have c.name = left.value.customer in {customers}" in errors[orders, 1]
    assert f"lookup c: no row has c.name = left.value.customer in {customers}" in errors[orders, 2]
    assert "lookup: (100 DIV in.value.paid)" in errors[payments, 3]
    assert "Division by zero" in errors[payments, 3]
    # The payments wait for other orders.
    assert it.classes(payments) == {"done": 2, "pending": 2, "quarantined": 1}
    covered = exactly_once_done_coverage(pipeline, "Staging")
    assert covered.passed, covered


CAST = """
  - name: number
    type: stateless
    in: {name}.orders
    where: value.how = 'number'
    lookup: {{c: {{table: {name}.customers, on: CAST(c.name AS INT) = in.value.customer, missing: null}}}}
    key: in.key
    value: {{name: c.name}}
    out: {name}.out
"""


@pytest.mark.slow
def test_a_new_look_up_that_fails_on_an_old_row_names_the_row(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    world = make(services, spark, tmp_path, unique)
    for id, name in ((1, "11"), (2, "no number"), (3, "13")):
        world.customer(id, name)
    world.order("null", 2)
    world.batch()
    path = world.it.pipeline.path
    path.write_text(path.read_text() + CAST.format(name=unique))
    world.it = world.it.loaded()
    world.order("number", 13)
    world.it.ingest()
    place = (
        rf'rule number, lookup\.c\.on: .*: this fails on a row of {unique}\.customers .*"id":2.* Nothing was committed'
    )
    with pytest.raises(EtlError, match=place):
        world.it.etl()
    world.it = world.it.changed("CAST(c.name", "try_cast(c.name")
    world.it.etl()
    assert [row["value"]["name"] for row in world.it.staged()] == ["no number", "13"]
