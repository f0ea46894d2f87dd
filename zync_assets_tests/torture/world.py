"""The services, topics and pipeline of a torture run, in one folder that a later run may go on with."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from zync_assets.errors import SetupError
from zync_assets.kafka.topics import topic_states
from zync_assets.local import processes
from zync_assets.local.services import Services, down, status, up
from zync_assets_tests.checker import statement as statements
from zync_assets_tests.checker.statement import Statement
from zync_assets_tests.services import HASTY
from zync_assets_tests.shop import Shop, make_shop

SETTLE = "12"
"""Seconds that a publisher waits after an unclean stop. A live one may pause for as long as the broker takes to come back."""


RETENTION = "1d"
"""Of the raw statuses. The changes say that they are of 2023: each is past its time as soon as nothing waits for it."""


@dataclass
class World:
    folder: Path
    prefix: str
    services: Services
    shop: Shop
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def statement(self) -> Statement:
        return statements.shop(self.prefix)

    @property
    def views(self) -> Statement:
        """The statement of the pipeline's second staging pool."""
        return statements.shop_views(self.prefix)

    @property
    def pipeline(self) -> Path:
        return self.shop.pipeline.path

    def end(self, service: str, sign: int) -> None:
        """Signal one of the services, ``kafka`` or ``registry``, and wait until it has ended."""
        found = status(self.folder / "services")
        assert found is not None
        pid = found.kafka_pid if service == "kafka" else found.registry_pid
        with suppress(psutil.NoSuchProcess):
            if pid is not None:
                process = psutil.Process(pid)
                process.send_signal(sign)
                processes.wait([process], 60)


def make_world(folder: Path, prefix: str, *, there: bool) -> World:
    """Start the services and make the pipeline; with ``there``, its topics and lake are those of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    services = up(folder / "services", broker_properties=HASTY)
    shop = make_shop(
        services, folder, prefix, settle=SETTLE, there=there, retention=RETENTION, sinks=True, views=True, events=True
    )
    for topic, state in topic_states(shop.pipeline.kafka, [shop.orders, shop.status]).items():
        # An earlier run may have added some.
        shop.sent.update({(topic, part.partition): [] for part in state.partitions})
    return World(folder, prefix, services, shop)


def up_again(world: World, attempts: int = 30) -> Services:
    """Start what does not run, on the ports that the pipeline knows."""
    ports = [int(url.rsplit(":", 1)[1].split("/")[0]) for url in (world.shop.servers, world.services.registry_url)]
    for attempt in range(attempts):
        try:
            return up(world.folder / "services", kafka_port=ports[0], registry_port=ports[1], broker_properties=HASTY)
        except SetupError:
            # A server that was killed a moment ago may hold its port a moment longer.
            if attempt == attempts - 1:
                raise
            world.stopping.wait(1.0)
    raise AssertionError


def close(world: World, *, clean: bool) -> None:
    down(world.folder / "services", clean=clean)
