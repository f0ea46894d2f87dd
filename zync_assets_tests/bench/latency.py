"""How long a change takes from the source topic to the output topic while ``zync run`` works."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import click
import psutil
from confluent_kafka import Consumer, Producer, TopicPartition

from zync_assets.kafka.topics import create_topic, topic_states
from zync_assets.local import processes
from zync_assets_tests.bench.rounds import say
from zync_assets_tests.bench.table import time_row
from zync_assets_tests.bench.world import ZYNC, World

RATE = 1000
SECONDS = 60
WARM = 20
"""Seconds at the beginning that do not count: Spark's start is not latency."""
LIMIT = 300
"""Seconds after which what has not arrived is taken for lost."""
TAIL_LINES = 10

TOPICS, PARTITIONS = 12, 3
"""Topics of step ``topics`` at scale 1, and the partitions of each. The goal is for 200 topics."""


def copies(topics: Sequence[str], partitions: int = 1) -> str:
    """Inputs, outputs and transforms of a pipeline that copies topics."""
    form = "key-format: string, value-format: json"
    create = f"create: {{replication-factor: 1, partitions: {partitions}}}"
    lines = ["inputs:"]
    lines += [f'  - {{topic: {topic}, pool: Raw, {form}, schema: "id bigint, sent bigint"}}' for topic in topics]
    lines += ["outputs:", *(f"  - {{topic: {topic}-out, pool: Staging, {form}, {create}}}" for topic in topics)]
    lines += ["transforms:"]
    for number, topic in enumerate(topics):
        out = f"in: {topic}, out: {topic}-out, key: in.key, value: in.value"
        lines.append(f"  - {{name: copy{number}, type: stateless, {out}}}")
    return "\n".join([*lines, ""])


def measure_latency(world: World) -> Iterator[dict[str, object]]:
    """A thousand changes a second for a minute."""
    topic = f"bench-latency-{int(time.time())}"
    pipeline = world.pipeline("latency", copies([topic]))
    world.empty(pipeline)
    create_topic(pipeline.kafka, topic, 1, 1, {})
    say("latency: starting zync run")
    receive = partial(_received, world.services.bootstrap_servers, [f"{topic}-out"])
    found = under_load(world, "latency", [topic], receive)
    middle, late = middle_and_late(found)
    yield time_row("latency", f"{RATE:,}/s, median", [middle], None, "≤ 1.5 s")
    yield time_row("latency", f"{RATE:,}/s, 99th percentile", [late], None, "≤ 4 s")


def measure_topics(world: World) -> Iterator[dict[str, object]]:
    """A thousand changes a second, spread over many topics, beside as many in one topic."""
    found: dict[int, tuple[float, float]] = {}
    many = max(2, round(TOPICS * world.scale))
    for count in (1, many):
        topics = [f"bench-topics-{count}-{int(time.time())}-{number}" for number in range(count)]
        pipeline = world.pipeline("topics", copies(topics, PARTITIONS))
        world.empty(pipeline)
        for topic in topics:
            create_topic(pipeline.kafka, topic, PARTITIONS, 1, {})
        say(f"topics: starting zync run with {count}")
        receive = partial(_received, world.services.bootstrap_servers, [f"{topic}-out" for topic in topics])
        found[count] = middle_and_late(under_load(world, "topics", topics, receive, PARTITIONS))
    for at, what in enumerate(("median", "99th percentile")):
        work = f"{many} topics of {PARTITIONS} partitions, {RATE:,}/s, {what}"
        yield time_row("topics", work, [found[many][at]], [found[1][at]], "≤ 2")


def under_load(
    world: World,
    name: str,
    topics: Sequence[str],
    arrivals: Callable[[int, Callable[[], None]], list[float]],
    partitions: int = 1,
) -> list[float]:
    """What ``arrivals(count, check)`` returns while ``zync run`` works on a pipeline and records are sent to topics."""
    command = [*ZYNC, "run", str(world.folder / f"{name}.yaml")]
    servers, log = world.services.bootstrap_servers, world.folder / f"{name}.log"
    with (
        log.open("w") as written,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=written) as process,
    ):
        itself = psutil.Process(process.pid)
        sender = Thread(target=send, args=(servers, topics, process, partitions))
        sender.start()
        try:
            return arrivals(RATE * (WARM + SECONDS), watch(process, log))
        finally:
            processes.stop([itself])
            sender.join()


def middle_and_late(found: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile of the seconds, about in the order of sending, after the beginning."""
    counted = sorted(found[RATE * WARM :])
    return statistics.median(counted), counted[len(counted) * 99 // 100]


def watch(process: subprocess.Popen[bytes], log: Path) -> Callable[[], None]:
    """A function that raises an error if ``process`` has ended, or the time limit is over. Waiting loops call it."""
    deadline = time.monotonic() + LIMIT

    def check() -> None:
        if process.poll() is not None:
            told = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise click.ClickException(
                f"latency: zync run ended with exit code {process.returncode} before all had arrived. From {log}:\n{told}"
            )
        if time.monotonic() > deadline:
            raise click.ClickException(
                f"latency: not all has arrived within {LIMIT} s: see {log} for what holds it up."
            )

    return check


def send(servers: str, topics: Sequence[str], process: subprocess.Popen[bytes], partitions: int = 1) -> None:
    """Send records to each topic in turn as long as ``process`` lives. After its end, nobody waits for records."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
    started = time.time()
    for number in range(RATE * (WARM + SECONDS)):
        if process.poll() is not None:
            return
        if (ahead := started + number / RATE - time.time()) > 0:
            time.sleep(ahead)
        value, partition = {"id": number, "sent": time.time_ns()}, number // len(topics) % partitions
        producer.produce(topics[number % len(topics)], json.dumps(value), f"k{number}", partition=partition)
        producer.poll(0)
    producer.flush()


def _received(servers: str, topics: Sequence[str], count: int, check: Callable[[], None]) -> list[float]:
    """Seconds from sending to receiving, in the order of receiving. ``check`` is called again and again meanwhile."""
    found: list[float] = []
    while len(states := topic_states({"bootstrap.servers": servers}, topics)) < len(topics):
        check()
        time.sleep(0.5)
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench"})
    consumer.assign([TopicPartition(topic, part.partition, 0) for topic in states for part in states[topic].partitions])
    while len(found) < count:
        check()
        for message in consumer.consume(1000, 0.02):
            assert message.error() is None
            found.append((time.time_ns() - json.loads(message.value() or b"")["sent"]) / 1e9)
    consumer.close()
    return found
