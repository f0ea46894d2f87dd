"""A Kafka cluster of one's own on loopback: three brokers and a controller, each a process that may be stopped or killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from confluent_kafka.admin import (
    AdminClient,  # pyright: ignore[reportPrivateImportUsage]
    NewTopic,  # pyright: ignore[reportPrivateImportUsage]
)

from zync_assets.local import java as local_java
from zync_assets.local import processes, startup
from zync_assets.local.java import find_java

BROKERS = (1, 2, 3)
CONTROLLER = 9
ID = "zync-tests-cluster-aaa"
FAILOVER = {
    # A broker that is silent for so long is taken for dead, a follower that lags for so long leaves the replicas in sync.
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "500",
    "replica.lag.time.max.ms": "4000",
    "replica.fetch.wait.max.ms": "100",
    "unclean.leader.election.enable": "false",
}


@dataclass
class Cluster:
    """``ports``: node → port. The controller is a separate node, so that the end of a broker needs no controller election."""

    folder: Path
    ports: Mapping[int, int]
    running: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def servers(self) -> str:
        return ",".join(f"127.0.0.1:{self.ports[node]}" for node in BROKERS)

    def start(self, node: int) -> None:
        """Start a node, without waiting for it. Its previous process has ended."""
        java, found = find_java(), local_java.resolve(find_java())
        home = self.folder / str(node)
        log = home / startup.BROKER_LOG
        log.unlink(missing_ok=True)
        command = startup.broker_command(java, found.kafka, f"cluster-{node}-{os.getpid()}")
        self.running[node] = psutil.Process(processes.spawn(command, cwd=home, log=log))

    def await_ready(self, *nodes: int) -> None:
        give_up = time.monotonic() + 120
        for node in nodes:
            while not self._ready(node):
                assert self.running[node].is_running() and time.monotonic() < give_up, self.log(node)
                time.sleep(0.1)

    def _ready(self, node: int) -> bool:
        if node == CONTROLLER:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.ports[node])) == 0
        return startup.broker_ready(self.folder / str(node), self.ports[node])

    def log(self, node: int) -> str:
        return (self.folder / str(node) / startup.BROKER_LOG).read_text(errors="replace")[-3000:]

    def signal(self, sign: int, *nodes: int) -> None:
        """SIGSTOP, SIGCONT or SIGKILL; returns when those that were killed have ended."""
        for node in nodes:
            self.running[node].send_signal(sign)
        if sign == signal.SIGKILL:
            assert processes.wait([self.running[node] for node in nodes], 20) == []

    def restart(self, *nodes: int) -> None:
        for node in nodes:
            self.start(node)
        self.await_ready(*nodes)

    def create(self, topic: str, assignment: Sequence[Sequence[int]]) -> None:
        """A topic whose partitions have these replicas: the first that is in sync leads."""
        replicas, config = [list(each) for each in assignment], {"min.insync.replicas": "2"}
        client = AdminClient({"bootstrap.servers": self.servers})
        new = NewTopic(topic, num_partitions=len(replicas), replica_assignment=replicas, config=config)
        for future in client.create_topics([new]).values():
            future.result(30)
        self.await_state(topic, assignment[0][0], len(assignment[0]))

    def await_state(self, topic: str, leader: int | None, in_sync: int) -> None:
        """Wait until partition 0 has that leader (None: any) and as many replicas in sync.

        Every broker that runs must say so: a broker that stood still knows only the state before.
        """
        give_up = time.monotonic() + 60
        while True:
            found = [self._state(topic, node) for node in BROKERS if self._answers(node)]
            if all(leader in (None, first) and len(replicas) == in_sync for first, replicas in found):
                return
            assert time.monotonic() < give_up, f"{topic}: {found}, not {(leader, in_sync)}"
            time.sleep(0.1)

    def _answers(self, node: int) -> bool:
        process = self.running[node]
        return process.is_running() and process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)

    def _state(self, topic: str, node: int) -> tuple[int, Sequence[int]]:
        """The leader of partition 0 and its replicas in sync, as a broker knows them; -1 for a topic that it does not know."""
        client = AdminClient({"bootstrap.servers": f"127.0.0.1:{self.ports[node]}", "log_level": 0})
        found = client.list_topics(topic, timeout=20).topics[topic].partitions.get(0)
        return (-1, []) if found is None else (found.leader, found.isrs)

    def close(self) -> None:
        for process in self.running.values():
            if process.is_running():
                process.kill()
        processes.wait(list(self.running.values()), 20)
        shutil.rmtree(self.folder, ignore_errors=True)


def start_cluster(folder: Path) -> Cluster:
    """Three brokers and their controller, ready."""
    java = find_java()
    found = local_java.resolve(java)
    nodes = (*BROKERS, CONTROLLER)
    cluster = Cluster(folder, dict(zip(nodes, processes.free_ports(len(nodes)), strict=True)))
    try:
        for node in (CONTROLLER, *BROKERS):
            home = folder / str(node)
            home.mkdir(parents=True)
            settings = {**startup.SETTINGS, **FAILOVER, **_addresses(cluster, node)}
            (home / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
            tool = [str(java), "-XX:TieredStopAtLevel=1", "-cp", f"{found.kafka}/*", "kafka.tools.StorageTool"]
            subprocess.run(
                [*tool, "format", "-t", ID, "-c", "server.properties"], cwd=home, check=True, capture_output=True
            )
        for node in (CONTROLLER, *BROKERS):
            cluster.start(node)
        cluster.await_ready(CONTROLLER, *BROKERS)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _addresses(cluster: Cluster, node: int) -> dict[str, str]:
    own = f"127.0.0.1:{cluster.ports[node]}"
    common = {
        "node.id": str(node),
        "controller.quorum.voters": f"{CONTROLLER}@127.0.0.1:{cluster.ports[CONTROLLER]}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }
    if node == CONTROLLER:
        return {**common, "process.roles": "controller", "listeners": f"CONTROLLER://{own}"}
    listening = {"listeners": f"PLAINTEXT://{own}", "advertised.listeners": f"PLAINTEXT://{own}"}
    return {**common, **listening, "process.roles": "broker", "inter.broker.listener.name": "PLAINTEXT"}
