"""Three brokers, each record on all of them: leaders die, followers lag, and what a killed publisher sent comes late.

Whatever happens on the way, at the end the output topics are what staging says, and the checker finds everything exactly once.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets import pipeline_file
from zync_assets.errors import ForeignRecord
from zync_assets.kafka.topics import high_watermark, survey
from zync_assets.lake.publication import open_publish_state
from zync_assets.local.services import Services
from zync_assets.publish.commit import recreate_topic
from zync_assets_tests.checker import statement as statements
from zync_assets_tests.checker.evidence import gather
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import Schemas
from zync_assets_tests.cluster import BROKERS, Cluster, start_cluster
from zync_assets_tests.mini import ingest, log_of, publish, start, transform
from zync_assets_tests.odd_topics import until
from zync_assets_tests.shop import Shop, changes, make_shop
from zync_assets_tests.shop_rules import shop_topics
from zync_assets_tests.torture.children import kill_family

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LEADER, NEXT, LAST = BROKERS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = start_cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield found
    finally:
        found.close()


@dataclass
class Rig:
    """A shop on the cluster with outputs staged and nothing published."""

    cluster: Cluster
    shop: Shop
    spark: SparkSession
    prefix: str
    registry_url: str

    def settle(self, seconds: float) -> None:
        path = self.shop.pipeline.path
        path.write_text(re.sub(r"^settle: .*$", f"settle: {seconds}", path.read_text(), flags=re.MULTILINE))
        self.shop.pipeline = pipeline_file.load(path)

    def start(self) -> subprocess.Popen[bytes]:
        """A publisher as a process of its own."""
        return start(self.shop.pipeline, "to-kafka")

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        assert process.wait(300) == 0, log_of(self.shop.pipeline).read_text()[-3000:]

    def until(self, holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        """Wait for a moment in a publisher's life."""
        give_up = time.monotonic() + 120
        while not holds():
            assert process.poll() is None and time.monotonic() < give_up, log_of(self.shop.pipeline).read_text()[-3000:]
            time.sleep(0.005)

    @property
    def high(self) -> int:
        return high_watermark(self.shop.pipeline.kafka, self.shop.new, 0)

    def assert_exactly_once(self) -> None:
        statement = statements.shop(self.prefix)
        report = judge(
            statement,
            gather(self.cluster.servers, Path(self.shop.pipeline.lake), statement),
            Schemas(self.registry_url),
            drained=True,
        )
        assert report.sound, str(report)
        assert report.numbers["published"] == report.numbers["outputs"] > 1000


@pytest.fixture
def rig(cluster: Cluster, services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Iterator[Rig]:
    for topic in shop_topics(unique):
        cluster.create(topic, [BROKERS] * 3)
    shop = make_shop(
        replace(services, bootstrap_servers=cluster.servers), tmp_path, unique, partitions=(3, 3), there=True
    )
    shop.produce(changes(shop, range(1000), seed=9))
    # A record a request, so that there is a middle of a publish.
    path = shop.pipeline.path
    path.write_text(
        path.read_text().replace("kafka: {", "kafka: {batch.num.messages: 1, ").replace("settle: 1", "settle: 30")
    )
    shop.pipeline = pipeline_file.load(path)
    ingest(shop.pipeline)
    transform(shop.pipeline)
    try:
        yield Rig(cluster, shop, spark, unique, services.registry_url)
    finally:
        ended = [node for node in BROKERS if not cluster.running[node].is_running()]
        cluster.signal(signal.SIGCONT, *(node for node in BROKERS if node not in ended))
        cluster.restart(*ended)


def test_the_leader_is_killed_while_a_publisher_sends(rig: Rig) -> None:
    publisher = rig.start()
    rig.until(lambda: rig.high > 50, publisher)
    rig.cluster.signal(signal.SIGKILL, LEADER)
    rig.finish(publisher)
    rig.assert_exactly_once()


def test_leader_and_publisher_are_killed_at_once(rig: Rig) -> None:
    publisher = rig.start()
    rig.until(lambda: rig.high > 50, publisher)
    rig.cluster.signal(signal.SIGKILL, LEADER)
    kill_family(publisher.pid)
    rig.settle(8)
    rig.finish(rig.start())
    rig.assert_exactly_once()


def test_a_follower_that_lagged_becomes_the_leader(rig: Rig) -> None:
    """It leaves the replicas in sync while it stands still, and is no leader before it has caught up."""
    rig.cluster.signal(signal.SIGSTOP, NEXT)
    publisher = rig.start()
    rig.until(lambda: rig.high > 50, publisher)
    rig.cluster.signal(signal.SIGCONT, NEXT)
    rig.cluster.await_state(rig.shop.new, LEADER, 3)
    rig.cluster.signal(signal.SIGKILL, LEADER)
    rig.cluster.await_state(rig.shop.new, NEXT, 2)
    rig.finish(publisher)
    rig.assert_exactly_once()


def sent_and_unseen(rig: Rig) -> int:
    """A publisher is killed when some of what it sent is in the leader's log alone: no reader sees it. The end that is seen."""
    publisher = rig.start()
    rig.until(lambda: rig.high > 50, publisher)
    rig.cluster.signal(signal.SIGSTOP, NEXT, LAST)
    time.sleep(1)
    kill_family(publisher.pid)
    assert publisher.wait(30) == -signal.SIGKILL
    return rig.high


def test_what_a_killed_publisher_sent_surfaces_while_the_next_one_waits(rig: Rig) -> None:
    seen = sent_and_unseen(rig)
    publisher = rig.start()
    time.sleep(12)
    assert publisher.poll() is None and rig.high == seen
    rig.cluster.signal(signal.SIGCONT, NEXT, LAST)
    rig.finish(publisher)
    rig.assert_exactly_once()


def test_a_publisher_is_killed_while_it_waits(rig: Rig) -> None:
    """An unclean start within the settle time: the one after it waits again."""
    sent_and_unseen(rig)
    waiting = rig.start()
    time.sleep(12)
    assert waiting.poll() is None
    kill_family(waiting.pid)
    waiting.wait(30)
    publisher = rig.start()
    time.sleep(3)
    rig.cluster.signal(signal.SIGCONT, NEXT, LAST)
    rig.finish(publisher)
    rig.assert_exactly_once()


def test_what_surfaces_later_than_the_settle_time_is_found_and_the_way_back_works(rig: Rig) -> None:
    seen = sent_and_unseen(rig)
    rig.settle(0.1)
    publisher = rig.start()
    rig.until(
        lambda: open_publish_state(rig.shop.pipeline.lake, "Staging", rig.shop.new).verified_end == seen, publisher
    )
    time.sleep(3)
    rig.cluster.signal(signal.SIGCONT, NEXT, LAST)
    assert publisher.wait(300) == 1
    said = log_of(rig.shop.pipeline).read_text()
    assert re.search(rf"error: .*{rig.shop.new}.*offset.*settle.*zync to-kafka .* --recreate {rig.shop.new}", said), (
        said
    )
    # Until then nothing is published, whoever tries.
    with pytest.raises(ForeignRecord):
        publish(rig.shop.pipeline)
    recreate_topic(rig.shop.pipeline, rig.shop.new)
    publish(rig.shop.pipeline)
    rig.assert_exactly_once()


def test_a_partition_whose_only_broker_died_hides_nothing_else(cluster: Cluster, unique: str) -> None:
    """Clients first take the dead broker for the partition's leader, then find no leader. The leader returns with the
    broker."""
    topic, other = f"{unique}.two", f"{unique}.other"
    cluster.create(topic, [[LEADER], [NEXT]])
    cluster.create(other, [[LAST]])
    kafka = {"bootstrap.servers": cluster.servers}

    def known() -> tuple[list[int], list[int]]:
        found = survey(kafka, [topic, other], patience=0.0)
        assert [part.partition for part in found.states[other].partitions] == [0]
        return [part.partition for part in found.states[topic].partitions], list(found.states[topic].away)

    assert known() == ([0, 1], [])
    cluster.signal(signal.SIGKILL, NEXT)
    try:
        assert known() == ([0], [1])
        until(f"{topic} has no leader", lambda: "has no leader" in str(survey(kafka, [topic]).errors[topic]))
        assert known() == ([0], [1])
    finally:
        cluster.restart(NEXT)
    until(f"{topic} is whole", lambda: known() == ([0, 1], []))
