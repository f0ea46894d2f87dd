"""Names in Dagster: different topics never share one, whatever characters they have.

Partition keys are ranges of offsets. Dagster keeps keys in the order of their creation; zync sorts keys as numbers.
"""

import re
from pathlib import Path

import pytest
from dagster import DagsterInstance, Definitions
from hypothesis import given
from hypothesis import strategies as st

from zync_assets import pipeline_file
from zync_assets.assets import names
from zync_assets.assets.build import build_definitions
from zync_assets.errors import RangeUnknown
from zync_assets.offsets import OffsetRange, format_key, parse_key
from zync_assets.pipeline import Pipeline

TOPICS = st.text("ab._-", min_size=1, max_size=12)

MILLION = 1_000_000

PIPELINE = Pipeline("p", Path("p.yaml"), {}, None, "lake", {}, (), (), ())

LOOKALIKES = """
lake: ./lake
inputs:
  - {topic: a.b, pool: Raw, format: string}
  - {topic: a_b, pool: Raw, format: string}
  - {topic: a-b, pool: Raw, format: string}
  - {topic: context, pool: Raw, format: string}
outputs:
  - {topic: c.d, pool: Staging, format: string}
  - {topic: c_d, pool: Staging, format: string}
transforms:
  - {name: one, type: stateless, in: a.b, out: c.d, key: in.key, value: in.value}
  - {name: two, type: stateless, in: a_b, out: c_d, key: in.key, value: in.value}
  - {name: three, type: stateless, in: a-b, out: c_d, key: in.key, value: in.value}
  - {name: four, type: stateless, in: context, out: c_d, key: in.key, value: in.value}
"""


@given(TOPICS, TOPICS)
def test_different_topics_have_different_identifiers(one: str, other: str) -> None:
    assert (names.identifier(one) == names.identifier(other)) == (one == other)
    assert re.fullmatch("[A-Za-z0-9_]+", names.identifier(one))


def test_topics_that_look_alike_are_assets_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "lookalikes.yaml"
    path.write_text(LOOKALIKES)
    definitions = build_definitions(pipeline_file.load(path))
    Definitions.validate_loadable(definitions)
    keys = {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}
    assert {"Raw/a.b", "Raw/a_b", "Raw/a-b", "kafka/a.b", "kafka/a_b", "Staging/c.d", "Staging/c_d"} <= keys
    checks = definitions.resolve_asset_graph().asset_check_keys
    assert len(checks) == 4 * 1 + 4 * 4 + 2 * 4 + 2 * 1


SINKS = """
sinks:
  - {name: one, type: sqlite, url: shop.db, from: [Raw.a.b], key: [id], table: order items}
  - {name: one2, type: sqlite, url: shop.db, from: [Raw.a.b], key: [id], table: 'shop."größe" / `{topic}`'}
"""


def test_a_table_may_have_a_name_that_dagster_does_not_take(tmp_path: Path) -> None:
    path = tmp_path / "lookalikes.yaml"
    path.write_text(LOOKALIKES + SINKS)
    definitions = build_definitions(pipeline_file.load(path))
    Definitions.validate_loadable(definitions)
    keys = {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}
    assert {key for key in keys if key.startswith("one")} == {
        "one/order_x20_items",
        "one2/shop._x22_gr_xf6__xdf_e_x22__x20__x2f__x20__x60_b_x60_",
    }


PLACES = """
sinks:
  - {name: one, type: sqlite, url: shop.db, from: [Raw.a.b], key: [id], table: orders}
  - {name: two, type: postgres, url: 'postgresql://zync:hidden@host:5432/shop?sslmode=require', from: [Raw.a.b], key: [id],
     table: orders}
  - {name: three, type: files, url: out, from: [Raw.a.b]}
"""


def test_the_name_of_a_table_says_where_it_lies_and_tells_no_secret(tmp_path: Path) -> None:
    """Dagster links the assets of all code locations that have one table name."""
    places: dict[str, str] = {}
    for lake in ("lake", "lake2"):
        path = tmp_path / f"{lake}.yaml"
        path.write_text(LOOKALIKES.replace("./lake", f"./{lake}") + PLACES)
        definitions = build_definitions(pipeline_file.load(path), key_prefix=lake)
        for spec in definitions.resolve_all_asset_specs():
            if name := spec.metadata.get("dagster/table_name"):
                places[spec.key.to_user_string()] = name
    assert "hidden" not in str(places)
    assert places["lake/one/orders"] == f"{tmp_path}/shop.db/orders"
    assert places["lake/two/orders"] == "postgresql://host:5432/shop/orders"
    assert places["lake/three/a.b"] == f"{tmp_path}/out/a.b"
    assert places["lake/Raw/a.b"] == f"{tmp_path}/lake/Raw/a.b"
    assert places["lake2/Staging/c.d"] == f"{tmp_path}/lake2/Staging/c.d"


@pytest.mark.parametrize("topic", ["shop.public.orders", "with_underscore", "with-dash"])
def test_an_asset_key_holds_the_topic_as_it_is(topic: str) -> None:
    own = names.Names(PIPELINE)
    assert own.pool_key("Raw", topic).path == ["Raw", topic]
    assert own.topic_key(topic).path == ["kafka", topic]


def keys(*ranges: OffsetRange) -> list[str]:
    return [format_key(part) for part in ranges]


def test_keys_are_sorted_as_numbers_not_as_text() -> None:
    found = names.on_grid(["10:0-999999", "2:10000000-10999999", "2:2000000-2999999", "june"])
    assert keys(*found) == ["2:2000000-2999999", "2:10000000-10999999", "10:0-999999"]


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("june", "0:0-999999"),
        ("0:0-499999", "0:0-999999"),
        ("3:500000-1499999", "3:0-999999 and 3:1000000-1999999"),
        ("00:0-999999", "0:0-999999"),
        ("0:0-0999999", "0:0-999999"),
        ("\u0660:0-999999", "0:0-999999"),
        ("0:9-3", "0:0-999999"),
        (f"0:0-{'9' * 5000}", "0:0-999999"),
    ],
)
def test_a_key_that_is_not_of_the_grid_is_refused_with_the_right_key(key: str, right: str) -> None:
    assert names.range_of(key) is None
    with pytest.raises(RangeUnknown) as refused:
        names.run_keys(["1:0-999999", key], "Raw/orders")
    assert f"Raw/orders has no range {key!r}. " in str(refused.value)
    assert f"Run {right} instead" in str(refused.value)


@pytest.mark.parametrize(
    ("first", "until", "expected"),
    [
        ({}, {0: 0}, ["0:0-999999"]),
        ({0: 0}, {0: 5}, ["0:0-999999"]),
        ({0: 0}, {0: MILLION}, ["0:0-999999", "0:1000000-1999999"]),
        ({0: MILLION + 5}, {0: MILLION + 9}, ["0:1000000-1999999"]),
        ({1: 0}, {0: 2 * MILLION, 1: 3}, ["0:2000000-2999999", "1:0-999999"]),
    ],
)
def test_the_ranges_that_are_there_and_the_open_one(
    first: dict[int, int], until: dict[int, int], expected: list[str]
) -> None:
    assert list(names.keys_of(names.spans_between(first, until))) == expected


def test_only_new_keys_are_added_ascending() -> None:
    wanted = [parse_key(key) for key in ("10:0-999999", "9:0-999999", "1:0-999999")]
    with DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("Raw/orders", ["1:0-999999"])
        names.add_keys(instance, "Raw/orders", wanted)
        assert instance.get_dynamic_partitions("Raw/orders") == ["1:0-999999", "9:0-999999", "10:0-999999"]


def test_a_run_takes_only_what_lies_together() -> None:
    known = ["0:0-999999", "1:0-999999", "0:1000000-1999999", "0:2000000-2999999"]
    wanted = [parse_key(key) for key in ("0:2000000-2999999", "0:0-999999", "1:0-999999")]
    assert names.clusters(known, wanted) == [["0:0-999999", "1:0-999999"], ["0:2000000-2999999"]]
