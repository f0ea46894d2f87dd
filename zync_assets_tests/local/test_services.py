"""The local services as a user has them: real processes that live in a folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from zync_assets.errors import SetupError
from zync_assets.kafka.topics import high_watermark
from zync_assets.local import processes, services, startup
from zync_assets.local.services import Services, down, status, up

# A broker that was killed can register again when its old session is over, after 9 s by default.
FORGETFUL = {"broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "300"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder for services; whatever a test starts there is removed at its end."""
    folder = tmp_path / "a home"
    yield folder
    down(folder, clean=True)


def create_topic(services: Services, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": services.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(20)


def topics(services: Services) -> set[str]:
    return set(AdminClient({"bootstrap.servers": services.bootstrap_servers}).list_topics(timeout=20).topics)


def register(services: Services, name: str) -> int:
    """The id of a new schema."""
    schema = json.dumps({"type": "record", "name": name, "fields": []})
    answer = httpx.post(f"{services.registry_url}/subjects/{name}-value/versions", json={"schema": schema})
    return answer.raise_for_status().json()["id"]


def name_of(services: Services, schema_id: int) -> str:
    answer = httpx.get(f"{services.registry_url}/schemas/ids/{schema_id}").raise_for_status()
    return json.loads(answer.json()["schema"])["name"]


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    if psutil.pid_exists(pid):
        assert not processes.wait([psutil.Process(pid)], seconds=20)


def addresses(services: Services) -> tuple[str, str]:
    return services.bootstrap_servers, services.registry_url


@pytest.mark.slow
def test_topics_and_schema_ids_outlive_a_restart_a_kill_and_the_loss_of_the_ports(home: Path) -> None:
    first = up(home, broker_properties=FORGETFUL)
    create_topic(first, "before.down")
    before_down = register(first, "BeforeDown")
    broker = {"bootstrap.servers": first.bootstrap_servers}
    assert high_watermark(broker, "before.down", 0) == 0
    assert down(home)
    assert not down(home)

    second = up(home, broker_properties=FORGETFUL)
    assert addresses(second) == addresses(first)
    # librdkafka's client that knew the broker before goes on with the leader's old epoch, which is refused.
    assert high_watermark(broker, "before.down", 0) == 0
    create_topic(second, "before.kill")
    before_kill = {f"BeforeKill{number}": register(second, f"BeforeKill{number}") for number in range(20)}
    # At once: an id that the registry gave out is on disk.
    kill(second.registry_pid)
    kill(second.kafka_pid)
    stopped = status(home)
    assert stopped is not None
    assert not stopped.running
    assert addresses(stopped) == addresses(first)

    # Somebody took the ports meanwhile: others are found.
    recorded = startup.load(home)
    assert recorded is not None
    assert recorded.kafka is not None
    assert recorded.registry is not None
    assert recorded.controller_port is not None
    taken = [recorded.kafka.port, recorded.registry.port, recorded.controller_port]
    with ExitStack() as stack:
        for port in taken:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        third = up(home, broker_properties=FORGETFUL)
    assert third.running
    assert not any(f":{port}" in address for port in taken for address in addresses(third))
    assert {"before.down", "before.kill"} <= topics(third)
    assert name_of(third, before_down) == "BeforeDown"
    for name, schema_id in before_kill.items():
        assert name_of(third, schema_id) == name


@pytest.mark.slow
def test_up_starts_only_what_does_not_run_and_clean_removes_only_what_is_ours(home: Path, tmp_path: Path) -> None:
    lake = tmp_path / "somewhere" / "lake"
    first = up(home, lake=lake)
    assert up(home, lake=lake) == first == status(home)

    for pid in (first.kafka_pid, first.registry_pid):
        listening = psutil.Process(pid).net_connections("tcp")
        assert {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN} <= {
            "127.0.0.1",
            "::ffff:127.0.0.1",
        }

    kill(first.registry_pid)
    second = up(home)
    assert second.kafka_pid == first.kafka_pid
    assert second.running
    assert addresses(second) == addresses(first)

    with pytest.raises(SetupError, match=r"runs already, on port"):
        up(home, kafka_port=processes.free_port())
    with pytest.raises(SetupError, match="belong to the lake"):
        up(home, lake=tmp_path / "another")

    ours = [psutil.Process(second.kafka_pid), psutil.Process(second.registry_pid)]
    (lake / "Raw").mkdir(parents=True)
    (home / "notes.txt").write_text("mine")
    assert down(home, clean=True)
    assert [path.name for path in home.iterdir()] == ["notes.txt"]
    assert not lake.exists()
    assert lake.parent.exists()
    assert not processes.wait(ours, seconds=0)
    assert status(home) is None


@pytest.mark.parametrize("name", ["kafka", "registry"])
def test_a_chosen_port_that_is_occupied_is_named(home: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SetupError, match=rf"Port {port} .*occupied.*--{name}-port"):
            up(home, kafka_port=port if name == "kafka" else None, registry_port=port if name == "registry" else None)
    assert status(home) is None


@pytest.mark.slow
def test_a_service_that_does_not_start_shows_its_last_words_and_leaves_nothing_running(home: Path) -> None:
    with pytest.raises(SetupError, match=r"Kafka ended while starting(.|\n)*broker\.log(.|\n)*no\.such\.Reporter"):
        up(home, broker_properties={"metric.reporters": "no.such.Reporter"})
    services = status(home)
    assert services is not None
    assert services.kafka_pid is None
    assert services.registry_pid is None


def test_a_pid_that_another_process_has_now_is_left_alone(home: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        home.mkdir()
        entry = startup.ServiceEntry(port=1, token="0123456789abcdef", pid=other.pid)
        startup.save(home, startup.State(str(home / "lake"), kafka=entry, registry=entry))

        assert not down(home)
        assert down(home, clean=True)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_is_found_though_its_starter_died_before_it_noted_the_pid(home: Path, tmp_path: Path) -> None:
    token = "fedcba9876543210"
    home.mkdir()
    startup.save(home, startup.State(str(home / "lake"), registry=startup.ServiceEntry(port=1, token=token)))
    command = ["/bin/sh", "-c", "sleep 60; true", processes.token_option(token)]
    pid = processes.spawn(command, cwd=tmp_path, log=tmp_path / "log")
    found = psutil.Process(pid)
    sleepers = found.children()

    services = status(home)
    assert services is not None
    assert services.registry_pid == pid
    assert down(home)
    assert not processes.wait([found], seconds=0)
    processes.stop(sleepers)


@pytest.mark.parametrize("folder", ["kafka", "registry", "lake"])
def test_a_folder_with_somebody_elses_files_is_refused_and_kept(home: Path, folder: str) -> None:
    precious = home / folder / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")

    with pytest.raises(SetupError, match="did not make"):
        up(home)
    assert not down(home, clean=True)
    assert precious.read_text() == "years of work"


def test_a_damaged_state_file_is_named(home: Path) -> None:
    home.mkdir()
    (home / startup.FILE).write_text('{"kind": "something else"}')

    with pytest.raises(SetupError, match=startup.FILE):
        status(home)
    (home / startup.FILE).unlink()


def test_cleaning_twice_at_once_does_no_harm(home: Path) -> None:
    (home / "kafka").mkdir(parents=True)
    for number in range(500):
        (home / "kafka" / str(number)).touch()
    startup.save(home, startup.State(str(home / "lake")))

    with ThreadPoolExecutor(4) as pool:
        did_it = list(pool.map(lambda _: down(home, clean=True), range(4)))

    assert sorted(did_it) == [False, False, False, True]
    assert not home.exists()


def test_a_folder_that_vanishes_while_it_is_made_is_made_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, calls = Path.mkdir, list[Path]()

    def vanishing(path: Path, *args: Any, **options: Any) -> None:
        if path != home or calls:
            return mkdir(path, *args, **options)
        calls.append(path)
        shutil.rmtree(home)
        raise FileExistsError(path)

    home.mkdir()
    startup.save(home, startup.State(str(home / "lake")))
    monkeypatch.setattr(Path, "mkdir", vanishing)
    assert not down(home, clean=True)
    assert calls and not home.exists()


def test_the_addresses_have_their_own_target_again_and_none_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell that ran the line of a demo has the target. The next demo shows it again, for another shell."""
    found, own = (
        Services("broker:1", "http://registry", tmp_path, tmp_path / "lake", None, None),
        str(tmp_path / "lake/warehouse.db"),
    )
    for given, shown in (("", own), (own, own), ("postgresql://me:secret@host/shop", None)):
        monkeypatch.setenv(services.TARGET_URL, given)
        assert services.addresses(found).get(services.TARGET_URL) == shown
