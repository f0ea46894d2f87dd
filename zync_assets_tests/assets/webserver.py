"""Dagster's real webserver, started in the repository's folder with a home of its own, and spoken to over GraphQL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from zync_assets.local.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
# Runs start at once, without the daemon that empties the queue.
INSTANCE = """
telemetry: {enabled: false}
run_coordinator: {module: dagster.core.run_coordinator, class: DefaultRunCoordinator}
"""
REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": "zync_assets"}

LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}"""
ADD_KEY = """
mutation Add($repository: RepositorySelector!, $definition: String!, $key: String!) {
  addDynamicPartition(repositorySelector: $repository, partitionsDefName: $definition, partitionKey: $key) {
    __typename
    ... on PythonError { message }
    ... on UnauthorizedError { message }
  }
}"""
RUN = """
query Run($id: ID!) {
  runOrError(runId: $id) {
    ... on Run {
      status
      eventConnection(limit: 1000) {
        events {
          __typename
          ... on MessageEvent { stepKey message }
          ... on LoadedInputEvent { inputName managerKey }
          ... on HandledOutputEvent { outputName managerKey }
          ... on MaterializationEvent {
            partition assetKey { path }
            metadataEntries {
              __typename label
              ... on IntMetadataEntry { intValue }
              ... on BoolMetadataEntry { boolValue }
              ... on TableSchemaMetadataEntry { schema { columns { name type } } }
            }
          }
          ... on AssetCheckEvaluationEvent {
            evaluation {
              checkName success severity assetKey { path }
              metadataEntries { label ... on IntMetadataEntry { intValue } ... on TextMetadataEntry { text } }
            }
          }
          ... on ExecutionStepFailureEvent { error { message errorChain { error { message } } } }
        }
      }
    }
  }
}"""


@dataclass(frozen=True)
class Webserver:
    """A running webserver."""

    url: str
    pid: int

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/graphql", json={"query": query, "variables": variables}, timeout=60).json()
        assert "errors" not in answer, answer["errors"]
        return answer["data"]

    def add_key(self, definition: str, key: str) -> None:
        done = self.ask(ADD_KEY, repository=REPOSITORY, definition=definition, key=key)["addDynamicPartition"]
        assert done["__typename"] == "AddDynamicPartitionSuccess", done

    def launch(self, job: str, tags: Mapping[str, str]) -> dict[str, Any]:
        """Start a run of a job, wait for its end, and give what is known of it."""
        params = {
            "selector": {**REPOSITORY, "jobName": job},
            "mode": "default",
            "runConfigData": "{}",
            "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
        }
        launched = self.ask(LAUNCH, params=params)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            run = self.ask(RUN, id=launched["run"]["runId"])["runOrError"]
            if run["status"] in ("SUCCESS", "FAILURE", "CANCELED"):
                return run
            time.sleep(0.5)
        raise AssertionError(f"job {job} does not end")


def events(run: Mapping[str, Any], kind: str) -> Sequence[dict[str, Any]]:
    return [event for event in run["eventConnection"]["events"] if event["__typename"] == kind]


@contextmanager
def webserver(home: Path, pipeline: Path) -> Iterator[Webserver]:
    """The webserver on the repository's ``workspace.yaml``, on whatever address it listens on by itself."""
    home.mkdir()
    (home / "dagster.yaml").write_text(INSTANCE)
    port = free_port()
    log = home / "webserver.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster_webserver", "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "DAGSTER_HOME": str(home), "ZYNC_PIPELINE": str(pipeline)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _await(url, process, log)
        yield Webserver(url, process.pid)
    finally:
        stop(process)


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            httpx.get(f"{url}/server_info", timeout=5)
            return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise AssertionError(log.read_text())


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started: code servers, and runs if a test gave up on them."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in family:
        if child.is_running():
            child.kill()
