"""A pipeline with many small topics: a step works on them side by side, and each topic keeps its errors and its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import pytest

from zync_assets import runner
from zync_assets.checks.output_checks import run_all
from zync_assets.errors import SparkLost, TopicMissing, ZyncError
from zync_assets.kafka.topics import create_topic
from zync_assets.lake.raw import open_raw
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load
from zync_assets.spark import tasks
from zync_assets_tests.mini import die, ingest, make_pipeline, publish, published, run, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 12
PARTITIONS = 2


def many(services: Services, folder: Path, prefix: str, count: int = COUNT) -> tuple[Pipeline, list[str]]:
    """A pipeline that copies ``count`` topics; none of the topics is there yet."""
    topics = [f"{prefix}.{number}" for number in range(count)]
    form = "key-format: string, value-format: json"
    create = f"create: {{replication-factor: 1, partitions: {PARTITIONS}}}"
    inputs = [f'  - {{topic: {topic}, pool: Raw, {form}, schema: "id bigint"}}' for topic in topics]
    outputs = [f"  - {{topic: {topic}.out, pool: Staging, {form}, {create}}}" for topic in topics]
    rules = [
        f"  - {{name: r{at}, type: stateless, in: {topic}, out: {topic}.out, key: in.key, value: in.value}}"
        for at, topic in enumerate(topics)
    ]
    text = "\n".join(["inputs:", *inputs, "outputs:", *outputs, "transforms:", *rules, ""])
    return make_pipeline(services, folder, text), topics


def produce(pipeline: Pipeline, topics: Sequence[str], first: int, end: int) -> None:
    for at, topic in enumerate(topics):
        for partition in range(PARTITIONS):
            send(pipeline, topic, [{"id": 1000 * at + number} for number in range(first, end)], partition)


def outputs(pipeline: Pipeline, topic: str) -> list[bytes]:
    """All records of an output topic, in no order."""
    found = published(pipeline, topic)
    assert len(found) == PARTITIONS
    return sorted(value or b"" for pairs in found.values() for _, value in pairs)


def expected(at: int, end: int) -> list[bytes]:
    return sorted(b'{"id":%d}' % (1000 * at + number) for number in range(end) for _ in range(PARTITIONS))


def steps(pipeline: Pipeline, spark: SparkSession) -> tuple[list[str], list[str]]:
    """One round of the three steps; the topics of the commits of ingest and publish."""
    ingested = [
        made.topic for made in runner.ingest_all(pipeline, lambda: spark, [item.topic for item in pipeline.inputs])
    ]
    list(runner.etl_all(pipeline, lambda: spark))
    topics = [item.topic for item in pipeline.outputs]
    return ingested, [made.topic for made in runner.publish_all(pipeline, lambda: spark, topics)]


@pytest.mark.slow
def test_small_topics_go_together(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, topics = many(services, tmp_path, unique)
    for topic in topics:
        create_topic(pipeline.kafka, topic, PARTITIONS, 1, {})
    jobs: list[int] = []
    run = tasks.frame_results
    monkeypatch.setattr(tasks, "frame_results", lambda *args: jobs.append(1) or run(*args))
    for end in (3, 5):
        produce(pipeline, topics, 0 if end == 3 else 3, end)
        jobs.clear()
        assert steps(pipeline, spark) == (topics, [f"{topic}.out" for topic in topics])
        assert len(jobs) < COUNT
    assert [outputs(pipeline, f"{topic}.out") for topic in topics] == [expected(at, 5) for at in range(COUNT)]
    assert [str(found) for found in run_all(pipeline) if not found.passed] == []
    assert steps(pipeline, spark) == ([], [])


def test_a_topic_with_an_error_stops_no_other(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    pipeline, topics = many(services, tmp_path, unique, 6)
    for topic in topics[1:]:
        create_topic(pipeline.kafka, topic, PARTITIONS, 1, {})
    produce(pipeline, topics[1:], 0, 2)
    made: list[str] = []
    with pytest.raises(TopicMissing, match=f"topic {topics[0]} is not there"):
        made += [commit.topic for commit in runner.ingest_all(pipeline, lambda: spark, topics)]
    assert [topic for topic in topics if open_raw(pipeline.lake, "Raw", topic)] == topics[1:]
    list(runner.etl_all(pipeline, lambda: spark))
    # Another program writes to one output.
    create_topic(pipeline.kafka, f"{topics[2]}.out", PARTITIONS, 1, {})
    send(pipeline, f"{topics[2]}.out", [{"id": -1}] * 9)
    names = [f"{topic}.out" for topic in topics[1:]]
    with pytest.raises(ZyncError, match="another program writes to this"):
        list(runner.publish_all(pipeline, lambda: spark, names))
    others = [at for at in range(1, 6) if at != 2]
    assert [outputs(pipeline, f"{topics[at]}.out") for at in others] == [expected(at - 1, 2) for at in others]


@pytest.mark.slow
def test_a_lost_job_is_done_again_topic_by_topic(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, topics = many(services, tmp_path, unique, 5)
    for topic in topics:
        create_topic(pipeline.kafka, topic, PARTITIONS, 1, {})
    produce(pipeline, topics, 0, 1)
    run, lost = tasks.frame_results, [SparkLost("the worker ended")]

    def break_once(*args: object) -> object:
        if lost:
            raise lost.pop()
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tasks, "frame_results", break_once)
    assert sorted(steps(pipeline, spark)[0]) == topics
    assert [outputs(pipeline, f"{topic}.out") for topic in topics] == [expected(at, 1) for at in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["ingest:files-written@3", "publish:window-announced@2", "publish:produced@4", "publish:window-closed"]
)
def test_a_kill_among_many_topics_loses_and_doubles_nothing(
    services: Services, tmp_path: Path, unique: str, point: str
) -> None:
    pipeline, topics = many(services, tmp_path, unique, 6)
    for topic in topics:
        create_topic(pipeline.kafka, topic, PARTITIONS, 1, {})
    produce(pipeline, topics, 0, 3)
    die(pipeline, point, "run", "--until-idle")
    run(pipeline, "run", "--until-idle")
    assert [outputs(pipeline, f"{topic}.out") for topic in topics] == [expected(at, 3) for at in range(6)]
    assert [str(found) for found in run_all(pipeline) if not found.passed] == []


ODD = """
  - {name: bad, type: stateless, in: $bad, out: $bad.out, key: in.key, value: {id: "bigint(100 / (in.value.id - 1))"}}
  - {name: also, type: stateless, in: $one, out: $shared.out, key: in.key, value: in.value, where: value.id % 2 = 0}
  - name: pairs
    type: denorm
    left: $left
    right: $right
    join-on: left.value.id = right.value.id + 1000
    out: $left.out
    key: left.key
    value: {id: left.value.id}
"""


@pytest.mark.slow
def test_rules_of_all_kinds_among_many_inputs(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """A rule that fails on a record, two inputs of one output, and a join, beside inputs that have nothing in common."""
    plain, topics = many(services, tmp_path, unique)
    bad, one, shared, left, right = topics[0], topics[1], topics[2], topics[10], topics[9]
    changed = {"bad": bad, "one": one, "shared": shared, "left": left, "right": right}
    lines = plain.path.read_text().splitlines()
    gone = tuple(f"  - {{name: r{at}, " for at in (0, 1, 9, 10))
    text = "\n".join(line for line in lines if not line.startswith(gone)) + Template(ODD).substitute(changed)
    plain.path.write_text(text)
    pipeline = load(plain.path)
    for topic in topics:
        create_topic(pipeline.kafka, topic, PARTITIONS, 1, {})
    send(pipeline, bad, [{"id": number} for number in range(3)])
    send(pipeline, one, [{"id": number} for number in range(4)])
    send(pipeline, right, [{"id": 1}, {"id": 2}])
    send(pipeline, left, [{"id": 1001}, {"id": 1003}])
    others = [topic for topic in topics if topic not in (bad, one, left, right)]
    for topic in others:
        send(pipeline, topic, [{"id": 7}])
    ingest(pipeline)
    [made] = runner.etl_all(pipeline, lambda: spark)
    assert {kind: made.counts[kind] for kind in ("outputs", "pending", "quarantined", "unmatched")} == {
        "outputs": 2 + 2 + 1 + len(others),
        "pending": 2,
        "quarantined": 1,
        "unmatched": 2,
    }
    publish(pipeline)
    assert outputs(pipeline, f"{bad}.out") == [b'{"id":-100}', b'{"id":100}']
    assert outputs(pipeline, f"{shared}.out") == [b'{"id":0}', b'{"id":2}', b'{"id":7}']
    assert outputs(pipeline, f"{left}.out") == [b'{"id":1001}']
    assert [outputs(pipeline, f"{topic}.out") for topic in others if topic != shared] == [[b'{"id":7}']] * 7
    assert [str(found) for found in run_all(pipeline) if not found.passed and found.severity == "error"] == []
