"""The whole chain against a model in plain Python: what is in the output topics is what the model says, no more, no less."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from zync_assets.checks.output_checks import run_all
from zync_assets.kafka.topics import topic_states
from zync_assets.lake.staging import open_staging
from zync_assets.local.services import Services
from zync_assets_tests.mini import decoded, ingest, publish, published, transform
from zync_assets_tests.model import Model, Record, without_zeros
from zync_assets_tests.shop import Shop, changes, make_shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def decoded_records(shop: Shop, topic: str) -> dict[int, list[tuple[Any, Any]]]:
    """Partition → keys and values in Kafka, decoded without the package's codecs."""

    def key_of(key: bytes | None) -> Any:
        return key.decode() if topic == shop.audit and key else decoded(shop.registry, key)

    found = published(shop.pipeline, topic)
    return {
        partition: [(key_of(key), decoded(shop.registry, value)) for key, value in pairs]
        for partition, pairs in found.items()
    }


def staged(shop: Shop, topic: str, partition: int = 0) -> list[tuple[str, tuple[tuple[str, int, int], ...]]]:
    """Rule and source of each output of a partition as delta-rs reads them, by offset."""
    table = DeltaTable(shop.files / "Staging").to_pyarrow_table(
        columns=["kafka", "rule", "source"], filters=[("topic", "=", topic)]
    )
    rows = [row for row in table.to_pylist() if row["kafka"]["partition"] == partition]
    rows.sort(key=lambda row: row["kafka"]["offset"])
    return [(row["rule"], tuple((s["topic"], s["partition"], s["offset"]) for s in row["source"])) for row in rows]


def assert_equals_model(shop: Shop, model: Model) -> None:
    """Outputs in Kafka and in staging, the account's counts and all checks."""
    for topic in (shop.new, shop.audit):
        there = topic_states(shop.pipeline.kafka, [topic])
        found = decoded_records(shop, topic) if there else {}
        places = {json.dumps(key): partition for partition, pairs in found.items() for key, _ in pairs}
        assert places.keys() == {json.dumps(out.key) for out in model.outputs[topic]}
        for partition, pairs in found.items():
            # A key that is in another partition too would be missing here.
            wanted = [out for out in model.outputs[topic] if places[json.dumps(out.key)] == partition]
            assert pairs == [(out.key, out.value) for out in wanted]
            assert staged(shop, topic, partition) == [(out.rule, out.source) for out in wanted]
    state = open_staging(shop.pipeline.lake, "Staging")
    assert state is not None
    assert without_zeros(state.head.counts) == model.totals()
    assert {place: item.seen for place, item in state.head.inputs.items()} == {
        place: len(log) for place, log in shop.sent.items() if log or place in state.head.inputs
    }
    failed = [result for result in run_all(shop.pipeline) if result.severity == "error" and not result.passed]
    assert not failed


@pytest.mark.parametrize(
    ("orders", "native", "sticky"),
    [
        pytest.param(250, True, True, id="900 records"),
        pytest.param(700, True, True, id="2,500 records", marks=pytest.mark.slow),
        pytest.param(1_500, True, True, id="5,000 records", marks=pytest.mark.slow),
        pytest.param(5_800, True, True, id="20,000 records", marks=pytest.mark.slow),
        pytest.param(28_500, True, False, id="100,000 records", marks=pytest.mark.slow),
        pytest.param(1_500, False, True, id="fastavro alone", marks=pytest.mark.slow),
    ],
)
def test_the_output_topics_hold_what_the_model_says(
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    orders: int,
    native: bool,
    sticky: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native:
        monkeypatch.setenv("ZYNC_NATIVE", "off")
        monkeypatch.setitem(spark.sparkContext.environment, "ZYNC_NATIVE", "off")
    # Creations of a key in several partitions pair in the order of partitions, and not of their row.
    shop = make_shop(services, tmp_path, unique, held=sticky)
    model = shop.model()
    whole = list(changes(shop, range(orders), seed=1, sticky=sticky))
    assert len(whole) >= 3.5 * orders

    # Uneven batches: a lot, one record, one topic alone, the rest.
    cuts = [0, len(whole) * 2 // 5, len(whole) * 2 // 5 + 1, len(whole) * 3 // 5, len(whole)]
    unseen: list[Record] = []
    for step, (first, end) in enumerate(itertools.pairwise(cuts)):
        unseen += shop.produce(whole[first:end])
        alone = step == 2
        ingest(shop.pipeline, *([shop.orders] if alone else [shop.orders, shop.status]))
        model.batch(record for record in unseen if not alone or record.topic == shop.orders)
        unseen = [record for record in unseen if alone and record.topic != shop.orders]
        assert transform(shop.pipeline) == 1
        if step != 1:
            publish(shop.pipeline)
    assert_equals_model(shop, model)
    seen = Counter(name for (_, _, name), count in model.totals().items() if count)
    assert set(seen) == {"done", "pending", "unmatched", "dropped", "quarantined"}


def test_a_partial_update_has_no_other_fields(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """``{id, status}`` updates two columns; ``{id, item: null}`` erases one: a field that is absent is not a null."""
    shop = make_shop(services, tmp_path, unique, partitions=(1, 1))
    row = {"id": 1, "customer": "Ann", "item": "book"}
    shop.produce(
        [
            (shop.status, 0, 1, "1", {"before": None, "after": {"order_id": 1, "status": "paid"}, "op": "u"}),
            (shop.orders, 0, 2, "1", {"before": row, "after": {**row, "item": None}, "op": "u"}),
        ]
    )
    ingest(shop.pipeline)
    transform(shop.pipeline)
    publish(shop.pipeline)
    assert [value for _, value in decoded_records(shop, shop.new)[0]] == [
        {"id": 1, "status": "paid"},
        {"id": 1, "item": None},
    ]


@pytest.mark.slow
@settings(
    max_examples=1,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],
    derandomize=True,
)
@given(data=st.data())
def test_where_batches_are_cut_changes_no_output(
    services: Services, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One partition a topic, so that the k-th record of a key is the same whatever the cut."""
    folder = tmp_path_factory.mktemp("cuts")
    shop = make_shop(services, folder, folder.name, partitions=(1, 1))
    whole = list(changes(shop, range(40), seed=5))
    inside = data.draw(st.sets(st.integers(1, len(whole) - 1), min_size=1, max_size=3))
    model, at_once = shop.model(), shop.model()
    done: list[Record] = []
    cuts = [0, *sorted(inside), len(whole)]
    for first, end in itertools.pairwise(cuts):
        new = shop.produce(whole[first:end])
        model.batch(new)
        done += new
        ingest(shop.pipeline, *data.draw(st.permutations([shop.orders, shop.status])))
        transform(shop.pipeline)
    publish(shop.pipeline)
    assert_equals_model(shop, model)

    at_once.batch(done)
    for topic in (shop.new, shop.audit):
        assert sorted(map(repr, at_once.outputs[topic])) == sorted(map(repr, model.outputs[topic]))
