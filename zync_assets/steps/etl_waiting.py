"""The pending records whose join key equals the key of a new record on the other side.

One Spark job finds the pending records of every rule. A batch runs the job once, however often the batch is tried. Most
batches of a close sequence find no pending record, and go on without pending records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import listed_frame
from zync_assets.etl import matching
from zync_assets.lake import pending, reading
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Denorm
from zync_assets.sql_text import text_sql
from zync_assets.steps.etl_plan import EtlBatch
from zync_assets.steps.failures import released

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

MOST_MET = 20_000
"""Places that are handed to Spark from here."""

_PLACES = pa.schema([("rule", pa.string()), ("topic", pa.string()), ("partition", pa.int32()), ("first", pa.int64())])

Side = tuple[str, str]
"""A denorm rule's name and the topic of one of its sides."""


@dataclass(frozen=True)
class New:
    """A batch's new records for a rule, by side (``left``, ``right``; none where the topic has no schema yet), from
    ``matching.keyed``; ``index``: the rule's; ``kinds``: the types of the join key's parts."""

    rule: Denorm
    index: int
    kinds: Sequence[DataType]
    frames: Mapping[str, DataFrame]


class Waiting:
    """Looked up when first asked for; ``release`` when the batch is done."""

    def __init__(self, batch: EtlBatch) -> None:
        self.batch = batch
        self._places: DataFrame | None = None
        """rule, topic, partition, first"""
        self._spans: dict[Side, list[OffsetRange]] | None = None
        self._few = False
        """Whether the places were found here, and need no release."""

    def look_up(self, each: Iterable[New], *, small: bool) -> None:
        """Find the pending records that match the batch's new records, for every rule.

        ``small``: the driver fetches the hashes of the new records.
        """
        plan = self.batch.plan
        if self._spans is not None:
            return
        hashes: list[DataFrame] = []
        for new in each:
            rule = new.rule
            for topic, side, other in ((rule.left, "right", rule.right), (rule.right, "left", rule.left)):
                counted = plan.head.waiting.get((rule.name, topic), 0)
                # A reopened record is new for this batch, and is no longer pending.
                again = (rule.name, topic) in plan.reopening.sides
                if counted and side in new.frames and plan.reads(other) and not again:
                    names = f"{text_sql(rule.name)} AS rule", f"{text_sql(topic)} AS topic"
                    hashes.append(new.frames[side].selectExpr(*names, "hash"))
        if not hashes or plan.state is None:
            self._spans = {}
            return
        if small and self._look_up_here(plan.state, matching.union(hashes)):
            return
        entries = reading.ledger_frame(self.batch.spark, plan.state)
        met = (
            entries.where("kind = 'pending' AND hash IS NOT NULL")
            .select("rule", "topic", "partition", "first", "hash")
            .join(matching.union(hashes), ["rule", "topic", "hash"], "left_semi")
            .join(
                entries.where("kind = 'completed'").select("topic", "partition", "first"),
                ["topic", "partition", "first"],
                "left_anti",
            )
            .select("rule", "topic", "partition", "first")
        )
        self.release()  # of an attempt whose join keys failed
        self._places = met.persist()
        found: dict[Side, list[OffsetRange]] = defaultdict(list)
        for row, span in reading.spans(self._places, "rule", "topic"):
            found[row["rule"], row["topic"]].append(span)
        self._spans = dict(found)

    def _look_up_here(self, state: StagingState, hashes: DataFrame) -> bool:
        """In the ledger's files, without Spark; False where that does not do."""
        wanted = hashes.where("hash IS NOT NULL").toArrow()
        met = pending.look_up(state, wanted.cast(pending.WANTED))
        if met is None or met.num_rows > MOST_MET:
            return False
        found: dict[Side, list[OffsetRange]] = defaultdict(list)
        rows = [tuple(row.values()) for row in met.to_pylist()]
        for rule, topic, partition, span in sorted({(*row[:3], row[3] // reading.SPAN) for row in rows}):
            found[rule, topic].append(OffsetRange(partition, span * reading.SPAN, (span + 1) * reading.SPAN))
        if rows:
            self._places = listed_frame(self.batch.spark, _PLACES, rows)
        self._spans, self._few = dict(found), True
        return True

    def records(self, rule: Denorm, topic: str) -> DataFrame | None:
        """The pending records of one side; None if the side has none."""
        state = self.batch.plan.raw[topic]
        spans = (self._spans or {}).get((rule.name, topic))
        if not spans or self._places is None or state is None:
            return None
        mine = self._places.where(f"rule = {text_sql(rule.name)} AND topic = {text_sql(topic)}")
        found = reading.records_at(self.batch.spark, state, mine, spans, few=self._few)
        return found.selectExpr("*", "true AS old")

    def release(self) -> None:
        if self._places is not None and not self._few:
            with released():
                self._places.unpersist()
