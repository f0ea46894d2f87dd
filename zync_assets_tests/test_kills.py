"""Each step killed with SIGKILL in the middle, JVM and workers included, and run again: the same result as without.

The commands run as real processes. ``test_crashes`` kills them just after an effect; here a kill comes at a moment that is
seen from outside: a file that appears, a log entry, a high watermark that moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from zync_assets.lake.publication import verified_ends
from zync_assets.lake.raw import open_raw
from zync_assets.lake.staging import open_staging
from zync_assets.local.services import Services
from zync_assets_tests.mini import kill, log_of, run, start
from zync_assets_tests.shop import Shop, changes, make_shop
from zync_assets_tests.test_chain import assert_equals_model

Moment = Callable[[Shop], bool]


def any_file(shop: Shop, pattern: str) -> bool:
    return next(Path(shop.pipeline.lake).glob(pattern), None) is not None


def records_in(shop: Shop, topic: str) -> int:
    """The high watermark; 0 while there is no topic."""
    consumer = Consumer({"bootstrap.servers": shop.servers, "group.id": "tests", "log_level": 0})
    try:
        return consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1]
    except KafkaException:
        return 0
    finally:
        consumer.close()


# Not the moment between an ETL batch's last file and its commit: it is too short to be met from outside. test_crashes.py has it.
MOMENTS: dict[str, list[tuple[str, Moment]]] = {
    "from-kafka": [
        ("the first data file is open", lambda shop: any_file(shop, f"Raw/{shop.orders}/*.parquet")),
        ("a quarantine file is open", lambda shop: any_file(shop, f"~quarantine/Raw/{shop.orders}/*.parquet")),
        ("quarantine is committed", lambda shop: any_file(shop, f"~quarantine/Raw/{shop.orders}/_delta_log/*0.json")),
        ("one of two topics is committed", lambda shop: any_file(shop, f"Raw/{shop.orders}/_delta_log/*0.json")),
    ],
    "etl": [
        ("the first output file is open", lambda shop: any_file(shop, "Staging/batch-*/topic=*")),
        ("one output topic is written", lambda shop: any_file(shop, f"Staging/batch-*/topic={shop.new}/*.parquet")),
        ("the ledger is written", lambda shop: any_file(shop, "Staging/batch-*/topic=%23account/*.parquet")),
    ],
    "to-kafka": [
        ("a window is announced", lambda shop: any_file(shop, "~published/Staging/_delta_log/*0.json")),
        ("records are in the topic", lambda shop: records_in(shop, shop.new) > 0),
        ("one of two topics is published", lambda shop: records_in(shop, shop.audit) > 0),
    ],
}
IN_SHORT = {"from-kafka": (2,), "etl": (1,), "to-kafka": (1,)}


def killed_when(shop: Shop, step: str, moment: Moment) -> None:
    """Start a step, and kill the step and its descendants as soon as ``moment`` is true. The step must not end earlier."""
    process = start(shop.pipeline, step)
    give_up = time.monotonic() + 240
    while process.poll() is None and not moment(shop):
        assert time.monotonic() < give_up
        time.sleep(0.001)
    kill(process, log_of(shop.pipeline))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(IN_SHORT, id="once each", marks=pytest.mark.slow),
        pytest.param(
            {step: tuple(range(len(found))) for step, found in MOMENTS.items()}, id="often", marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_step_run_again_ends_as_if_nothing_had_been(
    services: Services, tmp_path: Path, unique: str, chosen: dict[str, tuple[int, ...]]
) -> None:
    shop = make_shop(services, tmp_path, unique, settle="1")
    model = shop.model()
    model.batch(shop.produce(changes(shop, range(20_000), seed=3)))
    for step, places in chosen.items():
        for place in places:
            name, moment = MOMENTS[step][place]
            if moment(shop):
                continue  # what an earlier kill left is there already, and so no sign of the moment
            killed_when(shop, step, moment)
            assert_unfinished(shop, step, name)
        run(shop.pipeline, step)
        assert "nothing to do" in run(shop.pipeline, step)
    assert_equals_model(shop, model)


def assert_unfinished(shop: Shop, step: str, name: str) -> None:
    """The kill was in the middle: what the step is for is not all there."""
    raw, staging = open_raw(shop.pipeline.lake, "Raw", shop.status), open_staging(shop.pipeline.lake, "Staging")
    if step == "from-kafka":
        assert raw is None, name
    elif step == "etl":
        assert staging is None, name
    else:
        assert staging is not None
        ends = {place: position.next for place, position in staging.head.outputs.items()}
        verified = verified_ends(shop.pipeline.lake, "Staging", {topic for topic, _ in ends})
        assert any(verified.get(place, 0) < end for place, end in ends.items()), name
