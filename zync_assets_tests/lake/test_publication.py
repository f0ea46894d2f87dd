"""The table with the progress of a pool's publish."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from zync_assets.errors import CommitConflict
from zync_assets.lake.publication import commit_publish_state, open_publish_state


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
