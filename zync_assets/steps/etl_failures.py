"""Records of an ETL batch that go into quarantine: an expression fails on them, or what is made of them can't be encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zync_assets.lake.reopen import Taken
from zync_assets.offsets import OffsetRange
from zync_assets.steps.etl_plan import EtlPlan

MOST_FAILURES = 10_000
"""Records of one batch that may fail: more are no bad records but a bad rule, or output."""

Place = tuple[str, int, int]
"""Input topic, partition, offset."""


@dataclass(frozen=True)
class Failure:
    """A record, the rule that fails on it, and why."""

    topic: str
    partition: int
    offset: int
    rule: str
    text: str

    @property
    def place(self) -> Place:
        return self.topic, self.partition, self.offset

    @property
    def said(self) -> str:
        """Rule and reason."""
        return f"rule {self.rule}, {self.text}"

    @property
    def part(self) -> OffsetRange:
        return OffsetRange(self.partition, self.offset, self.offset + 1)

    def entry(self) -> dict[str, object]:
        """Its ledger row."""
        taken = Taken(self.topic, "pending", None, self.part)
        return {**taken.entry("quarantined"), "rule": self.rule, "text": self.text}


@dataclass(frozen=True)
class Failures:
    """The known failures of a batch."""

    found: Mapping[Place, Failure] = field(default_factory=dict)

    def condition(self, topic: str) -> str | None:
        """An SQL condition that is true for the failing records of a topic; None if no record of the topic fails."""
        offsets: dict[int, list[int]] = {}
        for name, partition, offset in sorted(self.found):
            if name == topic:
                offsets.setdefault(partition, []).append(offset)
        parts = [
            f"(kafka.partition = {partition} AND kafka.offset IN ({', '.join(map(str, places))}))"
            for partition, places in offsets.items()
        ]
        return " OR ".join(parts) or None

    def of(self, plan: EtlPlan, *, old: bool) -> list[Failure]:
        """The failures of pending records (``old``), or of the batch's new records. Sorted by topic, partition, offset."""
        reads = {topic: plan.reads(topic) for topic in plan.ranges}
        return [
            failure
            for _, failure in sorted(self.found.items())
            if old
            != any(
                part.partition == failure.partition and part.first <= failure.offset < part.end
                for part in reads[failure.topic]
            )
        ]

    def waited(self, plan: EtlPlan) -> list[Taken]:
        """The failing pending records, which leave the class pending."""
        return [Taken(one.topic, "pending", one.rule, one.part) for one in self.of(plan, old=True)]


NONE = Failures()
