"""A kind of rule without the rest of ETL: frames of records go in, results come out, batch by batch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from zync_assets.etl.rules import KINDS
from zync_assets.etl.rules.expiry import has_causes
from zync_assets.etl.rules.group import aggregate_types
from zync_assets.etl.rules.kind import TURN, Emission, Ordering, OutputColumns, in_frame
from zync_assets.etl.rules.results import output_columns
from zync_assets.etl.rules.shapes import shape_type
from zync_assets.pipeline import Rule
from zync_assets_tests.model import Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VALUE = "id bigint, n int, v string"


def world(seed: int, count: int, keys: int | None = None, step: int = 1) -> list[Record]:
    """Records of two topics and several partitions, in the order of their time."""
    chance, offsets, records = random.Random(seed), dict[tuple[str, int], int](), list[Record]()
    for time in range(count):
        place = chance.choice("OL"), chance.randrange(2)
        offsets[place] = offsets.get(place, -1) + 1
        value = {
            "id": chance.choice([None, *range(keys or count // 6)]),
            "n": chance.choice([None, 1, 2, 3, 4, 5]),
            "v": chance.choice([None, f"v{time}"]),
        }
        records.append(Record(*place, offsets[place], time // 2 * step, f"k{time}", value))
    return sorted(records, key=lambda record: (record.timestamp, "OL".index(record.topic), *record.place[1:]))


def frame(spark: SparkSession, records: Sequence[Record], *, old: bool) -> DataFrame:
    rows = [
        (
            *((item.topic, item.partition, item.offset), item.key, tuple(item.value.values()), moment(item), old),
            *(source_order(item), 0),
        )
        for item in records
    ]
    kafka = "struct<topic: string, partition: int, offset: bigint>"
    about = "time timestamp, old boolean, order_high bigint, order_low bigint"
    return spark.createDataFrame(rows, f"kafka {kafka}, key string, value struct<{VALUE}>, {about}")


def source_order(record: Record) -> int:
    """The place of a record of ``world`` in the order of the source. Two records may have one place."""
    return int(record.key[1:]) // 2


def moment(record: Record) -> datetime:
    return datetime.fromtimestamp(record.timestamp / 1000, UTC)


class Engine:
    """The kind of a rule alone, over frames of records. ``pending``: the records that wait; ``expired``: those that expired.

    As a batch does, it looks again at every record that may expire. ``ordered``: the records have an order of their source.
    """

    def __init__(self, spark: SparkSession, rule: Rule, *, ordered: bool = False) -> None:
        places = {"O": 0, "L": 1}
        self.ordering = Ordering(places, dict.fromkeys(places, "source") if ordered else {})
        self.spark, self.rule, self.pending, self.expired = spark, rule, list[Record](), set[tuple[str, int, int]]()
        self.reached: dict[tuple[str, int], int] = {}
        self.outputs: list[tuple[Any, dict[str, Any], tuple[tuple[str, int, int], ...]]] = []

    def batch(self, new: Sequence[Record]) -> None:
        ordering, kind = self.ordering, KINDS[self.rule.kind]
        if self.rule.expiry is not None:
            clock = max(record.timestamp for record in new) - self.rule.expiry.after_ms
            late = {
                record.value["id"] if self.rule.group else record.place
                for record in self.pending
                if record.timestamp < clock
            }
            again = [item for item in self.pending if (item.value["id"] if self.rule.group else item.place) in late]
            new, self.pending = [*new, *again], [item for item in self.pending if item not in again]
        inputs = self._inputs(new, old=False)
        frames = self._frames(inputs)
        found = kind.records(self.rule, 0, inputs, frames)
        columns = frames if self.rule.group is None else {"": aggregate_types(self.rule, frames)}
        types = [
            shape_type(columns, shape, "event", side)
            for side, shape in (("key", self.rule.key), ("value", self.rule.value))
        ]
        emission = Emission(_target(types), output_columns, ordering, together=True)
        pending = self._frames(self._inputs(self.pending, old=True))
        [results] = kind.results(found, pending, emission)
        records = {record.place: record for record in (*self.pending, *new)}
        waiting = {record.place for record in self.pending}
        for each in results.sort(
            "ord", *([F.asc_nulls_last(TURN)] if has_causes(self.rule, ordering) else [])
        ).collect():
            source = tuple(("OL"[item["place"]], item["partition"], item["offset"]) for item in each["source"])
            assert each["olds"] == [place in {item.place for item in self.pending} for place in source]
            if each["kind"] == "out":
                self.outputs.append((each["key:out"], each["value:out"].asDict(), source))
                waiting -= set(source)
            elif each["kind"] == "expired":
                assert not set(source) & waiting
                self.expired |= set(source)
            else:
                assert (each["kind"], len(source)) == ("pending", 1)
                assert self.rule.expiry is None or each["since"] == records[source[0]].timestamp
                assert source[0] not in waiting
                assert (each["hash"] is None) == (records[source[0]].value["id"] is None)
                waiting |= set(source)
        self.pending = [records[place] for place in sorted(waiting)]

    def _inputs(self, records: Sequence[Record], *, old: bool) -> dict[str, DataFrame]:
        sides = {side.name: [item for item in records if item.topic == side.topic] for side in self.rule.sides}
        return {side: frame(self.spark, own, old=old) for side, own in sides.items()}

    def _frames(self, inputs: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
        return {side: in_frame(each, side, self.ordering) for side, each in inputs.items()}


def _target(types: Sequence[DataType]) -> OutputColumns:
    key, value = types
    return OutputColumns("", ("key:out", key, key), ("value:out", value, value))
