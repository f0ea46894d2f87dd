"""Views against DuckDB: after every batch, each output folded by key equals the query over the latest rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from zync_assets.etl import positions
from zync_assets.etl.views import state_index
from zync_assets.local.services import Services
from zync_assets_tests.etl.test_streams import batch
from zync_assets_tests.mini import failing_commit
from zync_assets_tests.view_world import SHOP, Change, World, make_world, ordered_shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Step:
    """Changes, the tables that are ingested after them, and how the batch of ETL runs."""

    changes: Sequence[Change]
    tables: Sequence[str] = tuple(SHOP)
    how: str = "once"
    small: bool = True


def run(world: World, steps: Sequence[Step]) -> None:
    for step in steps:
        world.send(step.changes)
        world.ingest(step.tables)
        with pytest.MonkeyPatch.context() as patch:
            # As large batches are made, for a batch that is not small.
            patch.setattr(positions, "SMALL", positions.SMALL if step.small else 0)
            # Each look-up by another column than the key asks the index.
            patch.setattr(state_index, "SHARE", 0)
            if step.how != "once":
                with failing_commit(after=step.how == "broken after"):
                    world.etl()
            world.etl()
        world.check()


def order(id: int, customer: int | None, status: str = "new", fee: int | None = None) -> Change:
    return Change("orders", {"id": id}, {"customer": customer, "status": status, "fee": fee})


def customer(id: int, name: str, region: int | None = None) -> Change:
    return Change("customers", {"id": id}, {"name": name, "region": region, "note": name * 2})


def region(id: int, label: str) -> Change:
    return Change("regions", {"id": id}, {"label": label})


def line(id: int, of: int | None, sku: str = "tea", qty: int | None = 1) -> Change:
    return Change("lines", {"id": id}, {"order_id": of, "sku": sku, "qty": qty})


def gone(table: str, id: int) -> Change:
    return Change(table, {"id": id}, None)


def some_changes(choice: random.Random, count: int) -> list[Change]:
    """Changes of all tables; many keys change several times."""
    made: list[Change] = []
    for _ in range(count):
        id, of = choice.randint(1, 40), choice.choice([None, *range(1, 42)])
        made.append(
            choice.choice(
                [
                    order(id, of, choice.choice(["new", "draft", "paid"]), choice.choice([None, 1, 2])),
                    customer(id, choice.choice(["Ann", "Bob"]), of),
                    region(id, choice.choice(["north", "south"])),
                    line(id * 3, of, choice.choice(["tea", "cup"]), choice.randint(1, 3)),
                    gone(choice.choice(["orders", "customers", "regions", "lines"]), id),
                ]
            )
        )
    return made


STORY = (
    # Lines and orders come before the customers and regions that they name.
    Step([order(1, 7), order(2, 7, "draft"), order(3, None), line(1, 1), line(2, 1, "cup", 3), line(3, None)]),
    Step([customer(7, "Ann", 1), customer(8, "Bob"), line(4, 9)], small=False),
    Step([region(1, "north"), order(2, 7, "new", 5), order(4, 8), order(4, 8)]),
    # A customer is renamed, an order changes its customer, a line its order.
    Step([customer(7, "Anna", 1), order(4, 7), line(2, 4, "cup", 3)], how="broken"),
    Step([gone("lines", 1), gone("orders", 2), gone("regions", 1), gone("regions", 5)], how="broken after"),
    # A row goes and comes again in one batch, and another comes and goes.
    Step(
        [gone("customers", 7), customer(7, "Ann", 2), order(6, 8), gone("orders", 6), region(2, "south")], small=False
    ),
    # Only some topics are ingested.
    Step([order(1, 8, "paid"), customer(8, "Rob", 2), line(1, 4, "pot", None)], tables=("lines", "customers")),
    Step([], tables=tuple(SHOP)),
    # Nothing that a view uses changes.
    Step([Change("customers", {"id": 8}, {"name": "Rob", "region": 2, "note": "other"}), line(4, 9)]),
    Step([gone("customers", 8), gone("customers", 7), gone("orders", 1), gone("orders", 3), gone("orders", 4)]),
)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("documents", 4, id="documents, the first batches"),
        *(
            pytest.param(name, len(STORY), id=name, marks=pytest.mark.slow)
            for name in ("documents", "lines", "customers", "pairs", "newest")
        ),
    ],
)
def test_each_batch_of_a_story_ends_as_duckdb_says(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, name: str, steps: int
) -> None:
    world = make_world(services, spark, tmp_path, unique, names=[name])
    run(world, STORY[:steps])
    assert world.records(world.outputs[0])
    if steps == len(STORY):
        # The last batch deletes all customers.
        assert world.expected(world.outputs[0]) == {}


@pytest.mark.slow
def test_five_views_in_one_commit(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> None:
    run(make_world(services, spark, tmp_path, unique), STORY)


IDS = st.integers(1, 6)
OF = st.one_of(st.none(), st.integers(1, 7))
NUMBERS = st.one_of(st.none(), st.integers(0, 3))
CHANGES = st.one_of(
    st.builds(order, IDS, OF, st.sampled_from(["new", "draft", "paid"]), NUMBERS),
    st.builds(customer, IDS, st.sampled_from(["Ann", "Bob"]), OF),
    st.builds(region, IDS, st.sampled_from(["north", "south"])),
    st.builds(line, st.integers(1, 12), OF, st.sampled_from(["tea", "cup"]), NUMBERS),
    st.builds(gone, st.sampled_from(list(SHOP)), IDS),
)
STEPS = st.lists(
    st.builds(
        Step,
        st.lists(CHANGES, max_size=12),
        st.one_of(st.just(tuple(SHOP)), st.lists(st.sampled_from(list(SHOP)), unique=True)),
        st.sampled_from(["once", "once", "broken", "broken after"]),
        st.booleans(),
    ),
    min_size=3,
    max_size=8,
)


@pytest.mark.slow
def test_any_changes_in_any_batches_end_as_duckdb_says(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    numbers = itertools.count()

    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(STEPS)
    def examples(steps: Sequence[Step]) -> None:
        name = f"{unique}-{next(numbers)}"
        folder = tmp_path / name
        folder.mkdir()
        world = make_world(services, spark, folder, name, names=["documents", "customers"])
        run(world, steps)
        # All that is left.
        run(world, [Step([])])

    examples()


@pytest.mark.slow
def test_each_batch_below_the_frontier_shows_a_state_that_the_source_had(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """The tables share the order of their source. They are ingested in any order, some far behind the others."""
    world = make_world(services, spark, tmp_path, unique, ordered_shop(), names=["documents", "customers"])
    choice, held_back = random.Random(5), 0
    for _ in range(6):
        world.send(some_changes(choice, 25))
        world.ingest(choice.sample(list(SHOP), choice.randint(1, 3)))
        while batch(world.it, choice.choice([10, 1_000])):
            check_order(world)
        held_back += len(world.seen()) < sum(world.ingested.values())
    assert held_back
    world.ingest()
    world.etl()
    check_order(world)
    assert len(world.seen()) == len(world.sent)


def check_order(world: World) -> None:
    """No record below what ETL has taken is left out, and the outputs follow the source."""
    world.check()
    seen, places = world.seen(), {}
    for each in world.sent:
        places[world.topic(each.table), each.partition, each.offset] = each.place
    left = set(places) - {(world.topic(each.table), each.partition, each.offset) for each in seen}
    # A tombstone has the place of its delete.
    assert max((each.place for each in seen), default=-1) <= min((places[each] for each in left), default=world.changes)
    for output in world.outputs:
        lasts = [
            max(places[source["topic"], source["partition"], source["offset"]] for source in row["source"])
            for row in world.it.staged(output)
        ]
        assert lasts == sorted(lasts), output
