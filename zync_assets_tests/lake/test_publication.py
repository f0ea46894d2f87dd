"""The table with the progress of a pool's publish."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from zync_assets.errors import CommitConflict, LakeError
from zync_assets.lake import publication, tables
from zync_assets.lake.publication import PublishState, commit_publish_state, open_publish_state
from zync_assets.lake.storage import publish_uri


def test_the_first_commits_of_many_topics_are_no_conflict(tmp_path: Path) -> None:
    lake, topics = str(tmp_path), [f"topic{number}" for number in range(8)]
    before = {topic: open_publish_state(lake, "Staging", topic) for topic in topics}
    start = Barrier(len(topics))

    def commit(topic: str) -> None:
        start.wait()
        commit_publish_state(lake, "Staging", before[topic], window=3, verified_end=0, topic_id=f"id of {topic}")

    with ThreadPoolExecutor(len(topics)) as threads:
        list(threads.map(commit, topics))
    for topic in topics:
        state = open_publish_state(lake, "Staging", topic)
        assert (state.window, state.verified_end, state.belongs_to(f"id of {topic}")) == (3, 0, True)
    with pytest.raises(CommitConflict, match="topic0"):
        commit_publish_state(lake, "Staging", before["topic0"], window=4, verified_end=0, topic_id="id of topic0")


def test_another_process_may_make_the_table_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = tables.create_table
    numbers = {f"zync:{name}": number for name, number in {"window:o:0": 7, "topic:o:T": 0, "named:o": 1}.items()}

    def create_second(uri: str, *rest: Any) -> None:
        create(uri, *rest[:-1], numbers)  # pyright: ignore[reportCallIssue]
        create(uri, *rest)

    monkeypatch.setattr(tables, "create_table", create_second)
    lake, first_states = str(tmp_path), [open_publish_state(str(tmp_path), "P", topic) for topic in "ot"]
    assert commit_publish_state(lake, "P", first_states[1], window=1, verified_end=0, topic_id="T").window == 1
    assert open_publish_state(lake, "P", "o").window == 7
    with pytest.raises(CommitConflict, match="another publisher of topic o was first"):
        commit_publish_state(lake, "P", first_states[0], window=1, verified_end=0, topic_id="T")


def test_topics_share_commits_though_another_process_commits_meanwhile(tmp_path: Path) -> None:
    """Eight topics wait while a commit of another process changes the table that they opened."""
    lake, topics = str(tmp_path), [f"topic{number}" for number in range(8)]
    for topic in topics:
        announce(lake, open_publish_state(lake, "Staging", topic), 1)
    before = {topic: open_publish_state(lake, "Staging", topic) for topic in topics}
    commit_in_another_process(lake)
    start = Barrier(len(topics))
    errors: list[str] = []

    def commit(topic: str) -> None:
        start.wait()
        try:
            announce(lake, before[topic], 3)
        except CommitConflict:
            errors.append(topic)

    with ThreadPoolExecutor(len(topics)) as threads:
        list(threads.map(commit, topics))
    windows = {topic: open_publish_state(lake, "Staging", topic).window for topic in topics}
    assert windows == dict.fromkeys(topics, 3) | {"topic0": 2}
    assert errors == ["topic0"], "the other process changed this topic"
    version = tables.open_table(publish_uri(lake, "Staging"))
    assert version is not None
    # Eight commits at first, one of the other process, and fewer than one for each of the seven topics.
    assert version.version - 8 < 7


@pytest.mark.parametrize(
    ("fault", "is_known"),
    [(LakeError("the bucket is away"), True), (ValueError("a torn entry"), True), (MemoryError("no memory"), False)],
)
def test_a_log_that_cannot_be_read_never_looks_like_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, is_known: bool
) -> None:
    """Four topics wait while another commit changes the table. The process can't read this commit.

    After an error of the lake, the process commits each topic alone. After another error, each topic has a commit or an error.
    """
    lake, topics = str(tmp_path), [f"topic{number}" for number in range(5)]
    for topic in topics:
        announce(lake, open_publish_state(lake, "Staging", topic), 1)
    before = {topic: open_publish_state(lake, "Staging", topic) for topic in topics}
    commit_in_another_process(lake)

    def torn(*_: object) -> None:
        raise fault

    monkeypatch.setattr(publication, "log", SimpleNamespace(entries=torn))
    start = Barrier(len(topics) - 1)
    failed: list[str] = []

    def commit(topic: str) -> None:
        start.wait()
        try:
            announce(lake, before[topic], 3)
        except (MemoryError, LakeError):
            failed.append(topic)

    with ThreadPoolExecutor(len(topics) - 1) as threads:
        list(threads.map(commit, topics[1:]))
    windows = {topic: open_publish_state(lake, "Staging", topic).window for topic in topics[1:]}
    assert windows == {topic: 1 if topic in failed else 3 for topic in topics[1:]}
    assert not (failed and is_known)


def commit_in_another_process(lake: str) -> None:
    """Announce the records of topic0 up to offset 2."""
    program = "from zync_assets.lake.publication import *; import sys; lake = sys.argv[1]"
    program += "; before = open_publish_state(lake, 'Staging', 'topic0')"
    program += "; commit_publish_state(lake, 'Staging', before, window=2, verified_end=0, topic_id='id')"
    subprocess.run([sys.executable, "-c", program, lake], check=True)


def announce(lake: str, before: PublishState, window: int) -> None:
    commit_publish_state(lake, "Staging", before, window=window, verified_end=0, topic_id="id")
