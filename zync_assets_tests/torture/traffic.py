"""Changes for the input topics: inserts, updates, deletes, tombstones, garbage, orphans; plain, in transactions, aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from confluent_kafka import KafkaException, Producer

from zync_assets.errors import ZyncError
from zync_assets_tests.odd_topics import add_partitions
from zync_assets_tests.shop import changes
from zync_assets_tests.torture.plan import TrafficPlan
from zync_assets_tests.torture.report import Tally
from zync_assets_tests.torture.world import World

Change = tuple[str, int, int, Any, Any]

TRANSACTION_SECONDS = 10.0
MOST_PARTITIONS = 6


class Traffic(threading.Thread):
    """Produces until the world stops. ``orders``: the number of the next order."""

    def __init__(self, world: World, tally: Tally, plans: Iterator[TrafficPlan], orders: int) -> None:
        super().__init__(name="traffic", daemon=True)
        self.world, self.tally, self.plans, self.orders = world, tally, plans, orders
        self._plain = Producer(self._settings())
        self._transactional: Producer | None = None

    def run(self) -> None:
        try:
            while True:
                plan = next(self.plans)
                if self.world.stopping.wait(plan.pause):
                    break
                self._one(plan)
        except Exception as error:
            self.tally.find(f"the harness itself: traffic: {error!r}")
            raise

    def close(self) -> None:
        """Send what waits, and end a transaction that hangs: a new producer of the same name does."""
        if self._plain.flush(120):
            self.tally.find("the harness itself: the broker did not take all changes")
        self._new_transactional()

    def _one(self, plan: TrafficPlan) -> None:
        upcoming = range(self.orders, self.orders + plan.orders)
        self.orders = upcoming.stop
        if plan.grows:
            self._grow(getattr(self.world.shop, plan.grows))
        made = list(changes(self.world.shop, upcoming, plan.seed, sticky=True))
        if plan.ahead:
            # A broker refuses what is more than an hour ahead.
            ahead = int(time.time() * 1000) + 3_000_000
            made = [
                (*change[:2], ahead, *change[3:]) if place % 7 == 0 else change for place, change in enumerate(made)
            ]
            self.tally.count("traffic", "changes ahead of their time", len(made[::7]))
        if plan.how == "plain":
            self._send(self._plain, made)
            # Some of it may wait for a broker that is down; what comes next must come after it.
            while self._plain.flush(1) and not self.world.stopping.is_set():
                pass
        elif plan.how == "committed":
            self._transaction(made, abort=False)
        else:
            self._transaction(made[: len(made) // 2 + 1], abort=True)
            self._transaction(made, abort=False)
        self.tally.count("traffic", f"orders, {plan.how}", plan.orders)
        self.tally.count("traffic", "changes", len(made))

    def _grow(self, topic: str) -> None:
        """Add a partition. Later orders use the partition too. The changes of an order stay in a single partition."""
        count = len(self.world.shop.partitions(topic)) + 1
        if count > MOST_PARTITIONS or self._plain.flush(10):
            return
        try:
            add_partitions(self.world.shop.pipeline.kafka, topic, count)
        except (KafkaException, ZyncError, TimeoutError):
            return  # The broker is down just now.
        self.world.shop.sent[topic, count - 1] = []
        # Producers that know the topic as it was would refuse the new partition.
        self._plain, self._transactional = Producer(self._settings()), None
        self.tally.count("traffic", "partitions added")

    def _send(self, producer: Producer, made: list[Change]) -> None:
        shop = self.world.shop
        for topic, partition, timestamp, key, value in made:
            producer.produce(topic, shop.encoded(topic, value), key, partition, timestamp=timestamp)
            producer.poll(0)

    def _transaction(self, made: list[Change], *, abort: bool) -> None:
        """Try until it is done or the world stops. One whose outcome is not known may come twice: the source's own affair."""
        while not self.world.stopping.is_set():
            try:
                producer = self._transactional or self._new_transactional()
                producer.begin_transaction()
                self._send(producer, made)
                if abort:
                    producer.flush(TRANSACTION_SECONDS)
                    producer.abort_transaction(TRANSACTION_SECONDS)
                else:
                    producer.commit_transaction(TRANSACTION_SECONDS)
                return
            except KafkaException:
                self.tally.count("traffic", "transactions that broke and were sent again")
                self._transactional = None

    def _new_transactional(self) -> Producer:
        name = f"{self.world.prefix}-torture"
        limit = str(int(TRANSACTION_SECONDS * 1000))
        made = Producer({**self._settings(), "transactional.id": name, "transaction.timeout.ms": limit})
        while True:
            try:
                made.init_transactions(TRANSACTION_SECONDS)
                break
            except KafkaException as error:
                if not error.args[0].retriable() and error.args[0].fatal():
                    raise
        self._transactional = made
        return made

    def _settings(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.world.shop.servers,
            "linger.ms": 5,
            "enable.idempotence": True,
            "reconnect.backoff.max.ms": 1000,
            "log_level": 0,
        }
