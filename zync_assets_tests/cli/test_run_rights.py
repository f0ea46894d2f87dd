"""Least rights: each command runs with exactly the ACLs in the README, and fails if one ACL is missing.

The tests read the ACLs from the README's table, so that the table can't differ from the tests.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import KafkaError
from confluent_kafka.admin import (
    AclBinding,  # pyright: ignore[reportPrivateImportUsage]
    AclBindingFilter,  # pyright: ignore[reportPrivateImportUsage]
    AclOperation,  # pyright: ignore[reportPrivateImportUsage]
    AclPermissionType,  # pyright: ignore[reportPrivateImportUsage]
    AdminClient,  # pyright: ignore[reportPrivateImportUsage]
    ResourcePatternType,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)
from dagster import DagsterInstance

from zync_assets.assets import sensor
from zync_assets.assets.facts import TickFailure
from zync_assets.assets.names import Names
from zync_assets.assets.runs import LASTS_SECONDS
from zync_assets.cli.main import main
from zync_assets.kafka.client import Connection
from zync_assets.kafka.topics import create_topic, high_watermark, topic_states
from zync_assets.pipeline_file import load
from zync_assets_tests.mini import BOTH
from zync_assets_tests.network.secured import Secured

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = Path(__file__).parents[2] / "README.md"
RULES = """
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id, v: in.value.v}}
"""
OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
    "Create": AclOperation.CREATE,
    "Delete": AclOperation.DELETE,
}
Right = tuple[str, str]
"""Side (inputs, outputs), operation."""


def listed() -> dict[str, tuple[Right, ...]]:
    """Step → rights, as the README's table has them."""
    table = re.search(r"^\| rights of .*\n\|[ -|]*\n((?:\|.*\n)+)", README.read_text(), re.MULTILINE)
    assert table is not None
    found: dict[str, tuple[Right, ...]] = {}
    for line in table[1].splitlines():
        step, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        sides = zip(("inputs", "outputs"), cells, strict=True)
        found[step.split("`")[1]] = tuple(
            (side, word) for side, cell in sides for word in re.findall(r"[A-Z]\w+", cell)
        )
    return found


RIGHTS = listed()
USERS = {
    "from-kafka": "reader",
    "etl": "rules",
    "to-kafka": "publisher",
    "create:": "publisher",
    "--recreate": "owner",
    "status": "watcher",
    "check": "auditor",
    "produce": "source",
}


def acl_filter(binding: AclBinding) -> AclBindingFilter:
    """Return the filter that matches ``binding`` alone."""
    return AclBindingFilter(
        binding.restype,
        binding.name,
        binding.resource_pattern_type,
        binding.principal,
        binding.host,
        binding.operation,
        binding.permission_type,
    )


@dataclass
class Shielded:
    """A pipeline on a broker where a topic's ACLs are all that a user may do with it. ``given``: what to take back."""

    secured: Secured
    folder: Path
    prefix: str
    admin: AdminClient
    given: list[AclBinding]

    @property
    def topics(self) -> dict[str, tuple[str, ...]]:
        return {
            "inputs": (f"{self.prefix}.left.rows", f"{self.prefix}.right.rows"),
            "outputs": (f"{self.prefix}.out.rows",),
        }

    @property
    def out(self) -> str:
        return self.topics["outputs"][0]

    @property
    def super(self) -> dict[str, str]:
        return {"bootstrap.servers": self.secured.services.bootstrap_servers}

    def binding(self, user: str, topic: str, operation: str) -> AclBinding:
        names = (ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, f"User:{user}", "*")
        return AclBinding(*names, OPERATIONS[operation], AclPermissionType.ALLOW)

    def allow(self, user: str, *rights: Right) -> None:
        made = [self.binding(user, topic, operation) for side, operation in rights for topic in self.topics[side]]
        self.add(made)

    def add(self, made: list[AclBinding]) -> None:
        if made:
            for future in self.admin.create_acls(made).values():
                future.result(10)
            self.given += made
        # The controller answers before the broker has read the new ACLs from the controller's log.
        give_up = time.monotonic() + 30
        for binding in made:
            while not self.admin.describe_acls(acl_filter(binding)).result(10):
                assert time.monotonic() < give_up, binding

    def file(self, user: str, rest: str = BOTH + RULES) -> Path:
        way = {
            "bootstrap.servers": self.secured.ways["SASL PLAIN, no TLS"]["bootstrap.servers"],
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": self.secured.secret,
        }
        left, right = self.topics["inputs"]
        text = rest.replace("$left", left).replace("$right", right).replace("$out", self.out)
        head = f"name: mini\nkafka: {json.dumps(way)}\nlake: {self.folder / 'lake'}\nsettle: 1\n"
        path = self.folder / f"{user}.yaml"
        path.write_text(head + 'spark: {master: "local[2]", spark.sql.shuffle.partitions: "2"}\n' + text)
        return path

    def run(self, step: str) -> Result:
        """Run the command of ``step`` with the step's Kafka user."""
        path = str(self.file(USERS[step]))
        if step == "produce":
            line = json.dumps({"key": "k", "value": {"op": "c", "id": 1, "v": "v"}})
            for topic in self.topics["inputs"]:
                command = ["produce", topic, "--pipeline", path, "--format", "json", "--key-format", "string"]
                made = CliRunner().invoke(main, command, input=line + "\n")
                if made.exit_code:
                    break
            return made
        command = {"create:": ["to-kafka", path], "--recreate": ["to-kafka", path, "--recreate", self.out]}
        return CliRunner().invoke(main, command.get(step, [step, path]))

    def succeed(self, *steps: str) -> None:
        for step in steps:
            self.allow(USERS[step], *RIGHTS[step])
            done = self.run(step)
            assert done.exit_code == 0, (step, done.stderr, done.exception)


@pytest.fixture
def make(secured: Secured, spark: SparkSession, tmp_path: Path) -> Iterator[Callable[[], Shielded]]:
    """``make()``: a pipeline with input topics of its own."""
    made: list[Shielded] = []

    def shielded() -> Shielded:
        prefix = "t" + secrets.token_hex(4)
        folder = tmp_path / prefix
        folder.mkdir()
        admin = AdminClient({"bootstrap.servers": secured.services.bootstrap_servers})
        found = Shielded(secured, folder, prefix, admin, [])
        for topic in found.topics["inputs"]:
            create_topic(found.super, topic, 1, 1, {})
        made.append(found)
        return found

    yield shielded
    for found in made:
        found.admin.delete_acls([acl_filter(binding) for binding in found.given])


CHAIN = ("produce", "from-kafka", "etl", "to-kafka", "status", "check")


def test_the_chain_runs_with_what_the_readme_lists_and_no_more(make: Callable[[], Shielded]) -> None:
    it = make()
    create_topic(it.super, it.out, 1, 1, {})
    it.succeed(*CHAIN)
    assert high_watermark(it.super, it.out, 0) == 1


def test_an_output_is_created_and_created_again_with_what_the_readme_lists(make: Callable[[], Shielded]) -> None:
    it = make()
    it.succeed("produce", "from-kafka", "etl")
    it.allow("publisher", *RIGHTS["to-kafka"])
    it.succeed("create:")
    first = topic_states(it.super, [it.out])[it.out].topic_id
    it.allow("owner", *RIGHTS["to-kafka"], *RIGHTS["create:"])
    it.succeed("--recreate")
    again = topic_states(it.super, [it.out])[it.out]
    assert again.topic_id != first and again.partitions[0].end == 1


BEFORE = {step: CHAIN[: CHAIN.index(step)] for step in CHAIN} | {
    "create:": ("produce", "from-kafka", "etl"),
    "--recreate": ("produce", "from-kafka", "etl", "to-kafka"),
}


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=pytest.mark.slow if step in ("create:", "--recreate") else ()) for step in RIGHTS],
)
def test_each_right_that_is_missing_is_named_with_the_cure(make: Callable[[], Shielded], step: str) -> None:
    it = make()
    if step != "create:":
        create_topic(it.super, it.out, 1, 1, {})
    it.succeed(*BEFORE[step])
    if step in ("create:", "--recreate"):
        it.allow(USERS[step], *RIGHTS["to-kafka"])
    if step == "--recreate":
        it.allow(USERS[step], *RIGHTS["create:"])
    # One right after the other: each time the one that is missing next is named, until none is.
    missing = list(RIGHTS[step])
    while missing:
        failed = it.run(step)
        assert failed.exit_code == 1, (step, missing, failed.stdout)
        words = r"User:(\w+) may not (\w+) topic (\S+); remove an ACL that denies it, or allow it: kafka-acls\.sh (.*)"
        said = re.search(words, failed.stderr)
        assert said is not None, failed.stderr
        user, operation, topic, cure = said.groups()
        assert user == USERS[step]
        assert cure.endswith(
            f" --command-config admin.properties --add --allow-principal User:{user} --operation {operation} --topic {topic}"
        )
        side = next(side for side, topics in it.topics.items() if topic in topics)
        # Who may read or write may describe: where nothing is allowed, that much is asked for first.
        found = (side, operation) if (side, operation) in missing else next(r for r in missing if r[0] == side)
        assert (side, operation) in missing or operation == "Describe", said[0]
        missing.remove(found)
        it.allow(USERS[step], found)
    done = it.run(step)
    assert done.exit_code == 0, (step, done.stderr, done.exception)


def test_the_command_that_grants_a_right_can_be_pasted_whatever_the_user_is_called() -> None:
    for way, login in ({}, []), ({"security.protocol": "SASL_SSL"}, ["--command-config", "admin.properties"]):
        connection = Connection({"bootstrap.servers": "a:1", "sasl.username": "O'Neill & Sons", **way}, {})
        said = str(connection.error(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), "reading t", "t", "Read"))
        command = ["kafka-acls.sh", "--bootstrap-server", "a:1", *login, "--add", "--allow-principal"]
        assert shlex.split(said.partition("allow it: ")[2]) == [
            *command,
            "User:O'Neill & Sons",
            "--operation",
            "Read",
            "--topic",
            "t",
        ]


def test_the_warning_of_a_consumer_group_names_the_right_to_it(
    make: Callable[[], Shielded], caplog: pytest.LogCaptureFixture
) -> None:
    it = make()
    it.succeed("produce")
    it.allow("reader", *RIGHTS["from-kafka"])
    path = it.file("reader")
    path.write_text(f"{path.read_text()}consumer-group: {it.prefix}\n")
    done = CliRunner().invoke(main, ["from-kafka", str(path)])
    assert done.exit_code == 0, done.stderr
    said = f"User:reader may not Read group {it.prefix}; remove an ACL that denies it, or allow it: kafka-acls.sh"
    assert said in caplog.text and f"--operation Read --group {it.prefix}" in caplog.text


@pytest.mark.slow
def test_a_rebuild_and_a_comparison_need_no_right_to_topics_of_their_own(make: Callable[[], Shielded]) -> None:
    """Their scratch pools have outputs under names that no ACL can know."""
    it = make()
    create_topic(it.super, it.out, 1, 1, {})
    it.succeed(*CHAIN[:4])
    old = it.file("reader")
    new = it.file("owner", BOTH + RULES.replace("v: in.value.v", "v: upper(in.value.v)"))
    compared = CliRunner().invoke(main, ["diff", str(old), str(new), "--format", "json"])
    assert (compared.exit_code, compared.stderr) == (0, ""), compared.exception
    assert json.loads(compared.stdout)["new"] == {"id": 1, "v": "V"}
    it.allow("owner", *RIGHTS["etl"], *RIGHTS["to-kafka"])
    rebuilt = CliRunner().invoke(main, ["rebuild", str(new)])
    assert rebuilt.exit_code == 0, rebuilt.stderr
    assert high_watermark(it.super, it.out, 0) == 2


TWO_POOLS = (
    BOTH
    + """  - {topic: $out.b, pool: Other, key-format: string, value-format: json, create: {replication-factor: 1}}
transforms:
  - {name: copy, type: stateless, in: $left, out: $out, key: in.key, value: {id: in.value.id}}
  - {name: also, type: stateless, in: $right, out: $out, key: in.key, value: {id: in.value.id}}
  - {name: other, type: stateless, in: $left, out: $out.b, key: in.key, value: {id: in.value.id}}
"""
)


@pytest.mark.slow
def test_topics_that_may_not_be_described_stop_neither_a_run_nor_a_tick(make: Callable[[], Shielded]) -> None:
    it = make()
    left, right = it.topics["inputs"]
    denied = f"{it.out}.b"
    for topic in (it.out, denied):
        create_topic(it.super, topic, 1, 1, {})
    it.allow(USERS["produce"], *RIGHTS["produce"])
    assert it.run("produce").exit_code == 0
    inputs, outputs = (
        [operation for side, operation in RIGHTS["from-kafka"] + RIGHTS["to-kafka"] if side == asked]
        for asked in ("inputs", "outputs")
    )

    def allow(rights: dict[str, list[str]]) -> None:
        it.add([it.binding("owner", topic, operation) for topic, all_of in rights.items() for operation in all_of])

    allow({left: inputs, it.out: outputs})
    path = it.file("owner", TWO_POOLS)

    def steps() -> list[tuple[str, str, int]]:
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        return [(found["step"], found["target"], found["records"]) for found in rows]

    done = CliRunner().invoke(main, ["run", str(path), "--until-idle", "--format", "json"])
    assert steps() == [("ingest", left, 1), ("etl", "Staging", 1), ("publish", it.out, 1)]
    assert done.exit_code == 1
    assert (
        f"User:owner may not Describe topic {right}; remove an ACL that denies it, or allow it: kafka-acls.sh"
        in done.stderr
    )
    assert "Traceback" not in done.stderr

    assert it.run("produce").exit_code == 0
    names = Names(load(path))
    with DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(names.raw_partitions(left), ["0:0-999999"])
        result = sensor.evaluate(names, instance, None, 0.0)
        assert names.ingest_job(left) in {request.job_name for request in result.run_requests or ()}
        with pytest.raises(TickFailure) as red:
            sensor.evaluate(names, instance, result.cursor, LASTS_SECONDS)
    for topic in (right, denied):
        assert (
            f"User:owner may not Describe topic {topic}; remove an ACL that denies it, or allow it: kafka-acls.sh"
            in str(red.value)
        )

    allow({right: inputs, denied: outputs})
    done = CliRunner().invoke(main, ["run", str(path), "--until-idle", "--format", "json"])
    assert done.exit_code == 0, done.stderr
    assert steps() == [
        ("ingest", left, 1),
        ("ingest", right, 2),
        ("etl", "Staging", 3),
        ("etl", "Other", 2),
        ("publish", it.out, 3),
        ("publish", denied, 2),
    ]
