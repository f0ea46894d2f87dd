"""The pending records of earlier batches that the new records of a batch match.

A batch looks up the pending records of all rules once, however often the batch is tried. Most batches of a close sequence find
no pending record, and go on without pending records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import rows_frame
from zync_assets.etl.hold import NO_HOLD
from zync_assets.etl.ledger import PLACE, WANTED, look_up
from zync_assets.etl.plan import EtlBatch
from zync_assets.etl.retries import is_in, spans_of
from zync_assets.etl.rules.kind import RuleRecords, union
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule
from zync_assets.spark import frames
from zync_assets.spark.failures import ignore_release_errors
from zync_assets.spark.sql import text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_MATCHES = 20_000
"""The most places that the driver hands to Spark."""

_RETRY_PLACES = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("first", pa.int64())])
_PLACES = pa.schema([("rule", pa.string()), ("topic", pa.string()), ("partition", pa.int32()), ("first", pa.int64())])

Side = tuple[str, str]
"""A rule's name and the topic of one of its sides."""


class PendingRecords:
    """The pending records that match a batch's new records. ``look_up`` finds them. The caller calls ``release`` after the
    batch."""

    def __init__(self, batch: EtlBatch) -> None:
        self.batch = batch
        self.hold = NO_HOLD
        """The decision on the batch's source rows."""
        self._places: DataFrame | None = None
        """rule, topic, partition, first"""
        self._spans: dict[Side, list[OffsetRange]] | None = None
        self._few = False
        """Whether the driver holds the places. Spark then has nothing to release."""

    def look_up(self, rule_records: Iterable[RuleRecords], *, small: bool) -> None:
        """Find the pending records that match the batch's new records, for every rule.

        ``small``: the driver fetches the hashes of the new records.
        """
        plan = self.batch.plan
        if self._spans is not None:
            return
        hashes: list[DataFrame] = []
        for records in rule_records:
            rule = records.rule
            for side in (side for side in rule.sides if side.keys):
                waiting_count = plan.head.waiting.get((rule.name, side.topic), 0)
                # A retried record is new for this batch, and is no longer pending.
                if not waiting_count or (rule.name, side.topic) in plan.retries.sides:
                    continue
                names = f"{text_sql(rule.name)} AS rule", f"{text_sql(side.topic)} AS topic"
                for counterpart in rule.counterparts(side):
                    if counterpart.name in records.frames and plan.reads(counterpart.topic):
                        hashes.append(records.frames[counterpart.name].selectExpr(*names, "hash"))
        if not hashes or plan.state is None:
            self._spans = {}
            return
        if small and self._look_up_in_files(plan.state, union(hashes)):
            return
        entries = frames.ledger_frame(self.batch.spark, plan.state)
        matches = (
            entries.where("kind = 'pending' AND hash IS NOT NULL")
            .select("rule", "topic", "partition", "first", "hash")
            .join(union(hashes), ["rule", "topic", "hash"], "left_semi")
            .join(
                entries.where("kind = 'completed'").select("topic", "partition", "first"),
                ["topic", "partition", "first"],
                "left_anti",
            )
            .select("rule", "topic", "partition", "first")
        )
        retry_places = [
            (item.topic, *at) for item in plan.retries.parts if item.kind == "pending" for at in item.places
        ]
        if retry_places:
            # A retried record is new for this batch.
            matches = matches.join(rows_frame(self.batch.spark, _RETRY_PLACES, retry_places), PLACE, "left_anti")
        self.release()  # of an attempt whose join keys failed
        self._places = matches.persist()
        spans: dict[Side, list[OffsetRange]] = defaultdict(list)
        for row, span in frames.spans(self._places, "rule", "topic"):
            spans[row["rule"], row["topic"]].append(span)
        self._spans = dict(spans)

    def _look_up_in_files(self, state: StagingState, hashes: DataFrame) -> bool:
        """Finds the matches in the ledger's files, without Spark. Returns False if the ledger is too long or the matches are
        too many."""
        lookup_keys = hashes.where("hash IS NOT NULL").toArrow()
        matches = look_up(state, lookup_keys.cast(WANTED))
        if matches is None or matches.num_rows > MOST_MATCHES:
            return False
        spans: dict[Side, list[OffsetRange]] = defaultdict(list)
        retry_spans = spans_of(self.batch.plan.retries.parts)
        rows = [tuple(row.values()) for row in matches.to_pylist()]
        # A retried record is new for this batch.
        rows = [row for row in rows if not is_in(retry_spans, (row[1], row[2], row[3]), "pending")]
        for rule, topic, partition, span in sorted({(*row[:3], row[3] // frames.SPAN) for row in rows}):
            spans[rule, topic].append(OffsetRange(partition, span * frames.SPAN, (span + 1) * frames.SPAN))
        if rows:
            self._places = rows_frame(self.batch.spark, _PLACES, rows)
        self._spans, self._few = dict(spans), True
        return True

    def records(self, rule: Rule, topic: str) -> DataFrame | None:
        """The pending records of one side; None if the side has none."""
        state = self.batch.plan.raw[topic]
        spans = (self._spans or {}).get((rule.name, topic))
        if not spans or self._places is None or state is None:
            return None
        side_places = self._places.where(f"rule = {text_sql(rule.name)} AND topic = {text_sql(topic)}")
        records = frames.records_at(self.batch.spark, state, side_places, spans, few=self._few)
        return records.selectExpr("*", "true AS old")

    def release(self) -> None:
        """Free Spark's cache."""
        if self._places is not None and not self._few:
            with ignore_release_errors():
                self._places.unpersist()
