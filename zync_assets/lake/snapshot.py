"""A snapshot: the tables of a pipeline's lake, each opened once for one step.

A step passes its snapshot from plan to commit to report. A table is opened at its first use, and every later use gets the
same version. After a conflict, a step begins again with a new snapshot. After a commit, a step goes on with the state that
the commit returns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from zync_assets.lake import publication, raw, staging, storage, tables
from zync_assets.lake.check_results import CheckResult, CheckState, keep_result, open_check_state
from zync_assets.lake.log import LakeTable
from zync_assets.lake.publication import PublishState
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Pipeline

T = TypeVar("T")


class Snapshot:
    """The tables of one pipeline's lake, as one step sees them.

    Tables change while they are opened one by one. Open a table before the table that it is made from, so that another
    process's commit can't look like damage: published before staging, staging before raw.
    """

    def __init__(self, pipeline: Pipeline, raw_states: Mapping[str, RawState | None] | None = None) -> None:
        """``raw_states``: input topic → its raw table, of the tables that the step has opened already."""
        self.pipeline = pipeline
        self.passed: set[tuple[str, str]] = set()
        """(kind of check, staging pool) of the checks that these tables have passed. These checks need not run again."""
        self._states: dict[Hashable, Any] = {("raw", topic): state for topic, state in (raw_states or {}).items()}

    def raw(self, topic: str) -> RawState | None:
        """The raw table of an input topic; None before the first ingest."""
        return self._open_once(("raw", topic), lambda: raw.open_raw(self.pipeline.lake, self._raw_pool(topic), topic))

    def quarantine(self, topic: str) -> LakeTable | None:
        """The side table of an input's raw table, never older than the raw table; None before the first entry."""
        self.raw(topic)
        return self._table(storage.quarantine_uri(self.pipeline.lake, self._raw_pool(topic), topic))

    def staging(self, pool: str) -> StagingState | None:
        """A staging table; None before the first batch. Raises TableDamaged."""
        return self._open_once(("staging", pool), lambda: staging.staging_state(self._staging_table(pool)))

    def has_staging(self, pool: str) -> bool:
        """Whether there is a staging table, whatever state it is in."""
        return staging.has_begun(self._staging_table(pool))

    def publish_state(self, pool: str, topic: str, partition: int = 0) -> PublishState:
        """How far a partition of an output topic of a staging pool has been published."""
        return publication.publish_state(self._table(storage.publish_uri(self.pipeline.lake, pool)), topic, partition)

    def verified_parts(self, pool: str, topic: str) -> dict[int, int]:
        """Partition → its verified offset, of a published output topic of a staging pool."""
        return publication.verified_parts(self._table(storage.publish_uri(self.pipeline.lake, pool)), topic)

    def check_state(self, pool: str) -> CheckState:
        """The results of a pool's blocking checks."""
        return self._open_once(("checked", pool), lambda: open_check_state(self.pipeline.lake, pool))

    def run_check(self, pool: str, check: Callable[[], CheckResult], *, soon: bool = False) -> CheckResult:
        """Run a blocking check of a pool and keep its result in the lake (``check_results.keep_result``).

        The snapshot then has the pool's check results as they are after the commit.
        """
        # Before the check: the check lifts no block that comes while the check runs.
        before = self.check_state(pool)
        result, self._states["checked", pool] = keep_result(self.pipeline, before, check(), soon=soon)
        return result

    def _staging_table(self, pool: str) -> LakeTable | None:
        return self._table(storage.staging_uri(self.pipeline.lake, pool))

    def _raw_pool(self, topic: str) -> str:
        return self.pipeline.input(topic).pool

    def _table(self, uri: str) -> LakeTable | None:
        return self._open_once(("table", uri), lambda: tables.open_table(uri))

    def _open_once(self, key: Hashable, open_state: Callable[[], T]) -> T:
        if key not in self._states:
            self._states[key] = open_state()
        return self._states[key]
