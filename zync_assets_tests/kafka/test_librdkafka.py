"""The client that librdkafka's public functions make: it is used, with every version of confluent-kafka that we allow."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from packaging.requirements import Requirement

from zync_assets.codecs import arrays
from zync_assets.errors import KafkaError
from zync_assets.kafka import zero_copy, zero_copy_loops, zero_copy_plain
from zync_assets.kafka.client import Connection
from zync_assets.kafka.librdkafka import Client, library
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.topics import create_topic
from zync_assets.kafka.writer import InOrder
from zync_assets.kafka.zero_copy import HEADERS
from zync_assets_tests.network.secured import Secured

ROOT = Path(__file__).parents[2]


def counted(calls: list[str], name: str, function: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        calls.append(name)
        return function(*arguments)

    return call


def write(kafka: dict[str, str], topic: str, count: int) -> None:
    values = pa.array([b"%d" % number for number in range(count)])
    with InOrder(kafka, topic, 0, 0, "zync to-kafka") as writer:
        writer.write(pa.record_batch({"key": pa.nulls(count, pa.binary()), "value": values}))


def test_records_pass_by_the_thousand_and_many_by_compiled_code(
    kafka: dict[str, str], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI fails here where records would go one by one."""
    calls: list[str] = []
    for name in ("rd_kafka_produce_batch", "rd_kafka_consume_batch_queue"):
        monkeypatch.setattr(library(), name, counted(calls, name, getattr(library(), name)))
    monkeypatch.setattr(zero_copy_loops, "look", counted(calls, "compiled", zero_copy_loops.look))
    monkeypatch.setattr(zero_copy_plain, "look", counted(calls, "plain", zero_copy_plain.look))
    write(kafka, topic, 20_000)
    assert calls == ["rd_kafka_produce_batch"] * 3  # the first record by itself
    monkeypatch.setattr(arrays, "ENOUGH", 0)
    assert sum(map(len, read_range(kafka, topic, 0, 0, 20_000))) == 20_000
    assert "compiled" in calls and "plain" not in calls
    assert calls.count("rd_kafka_consume_batch_queue") < 2_000


def test_a_producer_asks_for_its_id_before_the_first_record(kafka: dict[str, str], topic: str) -> None:
    """librdkafka by itself would ask half a second later."""
    lines: list[str] = []
    properties = {**Connection(kafka, {}).properties, "enable.idempotence": True, "debug": "eos"}
    properties["logger"] = logging.Logger("eos")
    properties["logger"].addFilter(lambda record: lines.append(record.getMessage()) is not None)
    producer = zero_copy.Handover(properties, topic)
    producer.poll(0)
    producer.close()
    assert any("Acquiring ProducerId" in line for line in lines), lines


def test_bytes_near_and_far_and_in_any_order_are_gathered_alike() -> None:
    memory, far = np.arange(200_000, dtype=np.uint32).view(np.uint8), np.arange(50, dtype=np.uint8)
    draw = np.random.default_rng(1)
    starts = np.cumsum(draw.choice([0, 1, 900, 1100, 5000], 200) + 60)
    near = np.stack([memory.ctypes.data + starts, draw.integers(0, 60, 200)], axis=1)
    parts = draw.permutation(np.vstack([near, [[far.ctypes.data, 50], [0, 0], [0, 7]]])).astype(np.int64)
    whole = [b"" if not address else ctypes.string_at(address, size) for address, size in parts.tolist()]
    for some in (0, 1, len(parts)):
        for loops in (zero_copy_loops, zero_copy_plain):
            data, ends = np.zeros(len(b"".join(whole[:some])), np.uint8), np.zeros(some + 1, np.int32)
            loops.gather(parts[:some], ends, data)
            assert [data[a:b].tobytes() for a, b in itertools.pairwise(ends)] == whole[:some]


def test_a_read_of_few_records_loads_neither_pandas_nor_numba(kafka: dict[str, str], topic: str) -> None:
    """Each takes as long to load as 100,000 records take to read."""
    with InOrder(kafka, topic, 0, 0, "zync to-kafka") as writer:
        columns = {"key": pa.array([b"k"]), "value": pa.array([b"v"]), "headers": pa.array([[("h", b"x")]], HEADERS)}
        writer.write(pa.record_batch(columns))
    code = (
        "import sys; from zync_assets.kafka.reader import read_range;"
        f" (batch,) = read_range({kafka!r}, {topic!r}, 0, 0, 1); print(batch['headers'][0].is_valid);"
        " print({'pandas', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["True", "set()", ""], done.stderr


def test_a_property_that_librdkafka_does_not_know_is_named(kafka: dict[str, str], topic: str) -> None:
    with pytest.raises(KafkaError, match=r"setting up a consumer.*no\.such\.property"):
        list(read_range({**kafka, "no.such.property": "1"}, topic, 0, 0, 1))
    with pytest.raises(KafkaError, match=r"setting up a producer.*no\.such\.property"):
        handover_of({**kafka, "no.such.property": "1"}, topic)


def handover_of(kafka: dict[str, str], topic: str) -> None:
    connection = Connection({name: value for name, value in kafka.items() if name != "no.such.property"}, {})
    try:
        zero_copy.Handover({**connection.properties, **kafka}, topic)
    except Exception as error:
        raise connection.error(error, "setting up a producer") from None


tokens: list[str] = []


def made() -> str:
    """A test sets another function in its place."""
    raise AssertionError


def short(config: str) -> tuple[str, float]:
    """A token for two seconds."""
    assert config == "a=b"
    tokens.append(made())
    return tokens[-1], time.time() + 2


def test_tokens_of_a_function_open_the_way_and_are_renewed_unasked(
    secured: Secured, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = secured.ways["OAUTHBEARER"]
    kept = ("bootstrap.servers", "security.protocol", "sasl.mechanism", "ssl.ca.location")
    mine = {name: way[name] for name in kept}
    mine |= {"oauth_cb": f"{__name__}:short", "sasl.oauthbearer.config": "a=b"}
    monkeypatch.setattr(sys.modules[__name__], "made", secured.tokens.token)
    create_topic(way, unique, 1, 1, {})
    write(mine, unique, 10)
    assert sum(map(len, read_range(mine, unique, 0, 0, 10))) == 10
    client = Client("producer", Connection(mine, {}).properties)
    before, give_up = len(tokens), time.monotonic() + 30
    while len(tokens) < before + 2 and time.monotonic() < give_up:
        time.sleep(0.05)
    client.close()
    assert len(tokens) >= before + 2


@pytest.mark.slow
@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_ingest_and_publish_with_the_oldest_and_the_newest_confluent_kafka(tmp_path: Path, end: str) -> None:
    (ours,) = (found for found in map(Requirement, requires("zync-assets") or ()) if found.name == "confluent-kafka")
    (oldest,) = (each.version for each in ours.specifier if each.operator == ">=")
    wanted = f"confluent-kafka=={oldest}" if end == "oldest" else f"confluent-kafka{ours.specifier}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), wanted]
    subprocess.run(pip, check=True)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    said = [sys.executable, "-c", "from importlib.metadata import version; print(version('confluent-kafka'))"]
    used = subprocess.run(said, env=environment, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    assert used == f"{oldest}.0" if end == "oldest" else used >= version("confluent-kafka")
    tests = ["kafka/test_librdkafka.py", "kafka/test_reader.py", "kafka/test_writer.py", "publish/test_commit.py"]
    run = [sys.executable, "-m", "pytest", "-n", "0", "-q", *(f"zync_assets_tests/{each}" for each in tests)]
    assert subprocess.run(run, env=environment, cwd=ROOT, timeout=1500).returncode == 0
