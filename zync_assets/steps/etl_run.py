"""One ETL batch on its way into the staging table."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

from zync_assets.codecs.spark_types import spark_type
from zync_assets.crashes import crash_point
from zync_assets.errors import EtlError
from zync_assets.etl import ledger, matching, numbering, small, unavailable
from zync_assets.etl.labels import labels_of
from zync_assets.etl.numbering import Fact
from zync_assets.etl.shapes import learn_types, note_schema, type_sql
from zync_assets.lake import raw, reading, staging, storage
from zync_assets.lake.fold import fold_ledger
from zync_assets.lake.reopen import carve
from zync_assets.lake.staging import OutputPosition
from zync_assets.lake.tables import DataFile
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Denorm, Pipeline, Rule
from zync_assets.sql_text import name_sql
from zync_assets.steps.etl_failures import NONE, Failures
from zync_assets.steps.etl_plan import EtlBatch, EtlCommit
from zync_assets.steps.etl_positions import new_counts, next_head, output_positions, table_schema
from zync_assets.steps.etl_undecoded import quarantined, undecoded_rows
from zync_assets.steps.etl_unfit import check_outputs, size_limits, suspect_sql
from zync_assets.steps.etl_waiting import New, Waiting
from zync_assets.steps.outputs import OutputType, output_types
from zync_assets.steps.retention import keep_short
from zync_assets.steps.staged_outputs import BucketWriter, write_outputs
from zync_assets.steps.upkeep import keep_up

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row


class EtlRun:
    """One batch on its way into the table; the steps share much, so it is an object."""

    def __init__(self, pipeline: Pipeline, batch: EtlBatch, waiting: Waiting, failures: Failures = NONE) -> None:
        """``waiting``: the batch's; ``failures``: records that a rule is known to fail on, and that go into quarantine."""
        self.pipeline, self.batch, self.waiting, self.failures = pipeline, batch, waiting, failures
        self.plan, self.spark = batch.plan, batch.spark
        self.rules = pipeline.rules
        self.ours = [rule in pipeline.rules_of(self.plan.pool) for rule in self.rules]
        self.places = {item.topic: place for place, item in enumerate(pipeline.inputs)}
        self.labels = labels_of(pipeline)
        self.uri = storage.staging_uri(pipeline.lake, self.plan.pool)
        states = ((topic, state) for topic, state in self.plan.raw.items() if state is not None)
        self.files = {topic: raw.raw_files(state, self.plan.reads(topic)) for topic, state in states}
        """The files that the batch's new records are in."""
        read = [item for files in self.files.values() for item in files]
        spans = [numbering.TimeSpan(item.min_time or 0, item.max_time or 0, item.records) for item in read]
        self.bounds = numbering.time_bounds(spans)
        records = sum(item.records for item in read)
        self.record_size = sum(item.size for item in read) / max(1, records)
        self.small = records <= small.RECORDS
        """Whether all of it is one task, whose account is fetched."""
        self.folder = f"batch-{self.plan.head.batch + 1:012d}-{uuid.uuid4().hex[:12]}"

    def commit(self, started: float) -> EtlCommit:
        from pyspark import StorageLevel

        head, plan = self.plan.head, self.plan
        outputs = output_positions(self.pipeline, plan.pool, head)
        frames = self.frames()
        learn_types(matching.questions(self.rules, frames))
        types = output_types(self.pipeline, plan.pool, self.plan.state, frames)
        present: set[str] = set()

        def made_by(rule: Rule, target: matching.Target) -> list[tuple[str, str]]:
            # To ask Spark for the columns takes as long as to analyse the whole batch.
            made = matching.columns(rule, target)
            present.update(name for name, _ in made)
            return made

        results = self.results(frames, types, made_by)
        limits = size_limits(self.pipeline, types)
        suspect = suspect_sql(self.pipeline, self.labels, types, present, limits)
        rows = numbering.arranged(results, self.bounds, suspect, together=self.small)
        # What does not fit in memory for sure would take the place of what is sorted, and the collector's time.
        rows = rows.persist() if self.small else rows.persist(StorageLevel.DISK_ONLY)
        try:
            account = small.account(rows) if self.small else None
            found = numbering.facts(rows, self.labels) if account is None else small.facts(account, self.labels)
            self._check(found, rows, types)
            if any(row.kind == "out" and row.suspects for row in found):
                check_outputs(self.pipeline, self.labels, types, rows, limits)
            files, ends = self._write_outputs(rows, found, outputs, types)
            crash_point("etl:outputs-written")
            bad = undecoded_rows(self.spark, self.pipeline, plan)
            files += self._write_ledger(rows, account, found, bad)
            files += self._write_settled()
            crash_point("etl:ledger-written")
            done = next_head(plan, found, outputs, ends, types, quarantined(bad), self.failures.waited(plan))
            schema = table_schema(plan.state, types)
            folded, removed = self._tidied()
            if folded:
                crash_point("etl:ledger-folded")
            staging.commit_batch(self.pipeline.lake, plan.pool, plan.state, done, schema, [*files, *folded], removed)
        finally:
            rows.unpersist()
        keep_up(self.spark, plan.state.opened if plan.state else None)
        for topic, known in plan.raw.items():
            keep_short(self.pipeline, self.pipeline.input(topic), known)
        made = {
            topic: (OffsetRange(0, outputs[topic, 0].next, end),)
            for topic, end in ends.items()
            if end > outputs[topic, 0].next
        }
        return EtlCommit(plan.pool, done.batch, made, plan.ranges, new_counts(found), time.monotonic() - started)

    def _tidied(self) -> tuple[list[DataFile], list[DataFile]]:
        """Ledger files to add and to remove besides the batch's own: what leaves its class is taken out of them, else they
        are folded when they are many."""
        state, taken = self.plan.state, [*self.plan.reopening.taken, *self.failures.waited(self.plan)]
        if state is None:
            return [], []
        return carve(state, taken) if taken else fold_ledger(state)

    def frames(self) -> dict[str, DataFrame]:
        found: dict[str, DataFrame] = {}
        for topic, part in self.batch.slices.items():
            frame, state = part.dataframe(), self.plan.raw[topic]
            if frame is not None and state is not None:
                found[topic] = note_schema(frame.selectExpr("*", "false AS old"), reading.record_types(state))
        return found

    def results(
        self, frames: Mapping[str, DataFrame], types: Mapping[str, OutputType], made_by: matching.Made
    ) -> DataFrame:
        """What becomes of the batch's records (see ``matching``); ``made_by`` gives the columns of outputs."""
        taken = {
            topic: matching.assign(
                self.pipeline.input(topic), self.places[topic], frame, self.rules, self.failures.condition(topic)
            )
            for topic, frame in frames.items()
            if self.plan.reads(topic) or self.plan.reads_nothing
        }
        own = {index: rule for index, rule in enumerate(self.rules) if self.ours[index]}
        untyped = [index for index, rule in own.items() if rule.name in types[rule.out].untyped]
        joins = {i: rule for i, rule in own.items() if isinstance(rule, Denorm) and i not in untyped}
        single = {i: rule for i, rule in own.items() if i not in joins and rule.name in types[rule.out].targets}
        targets = {index: types[rule.out].target(rule.name) for index, rule in single.items()}
        parts = [
            matching.singles(
                item,
                self.rules,
                {index: target for index, target in targets.items() if topic in self.rules[index].topics},
                [index for index, rule in joins.items() if topic in rule.topics],
                [index for index in untyped if topic in self.rules[index].topics],
                made_by,
            )
            for topic, item in taken.items()
        ]
        found = [self._new(rule, index, frames, taken) for index, rule in joins.items()]
        self.waiting.look_up(found, small=self.small)
        for new in found:
            parts += self._denorm(new, types, made_by)
        return matching.without_dropped(matching.union(parts), self.rules)

    def _new(
        self, rule: Denorm, index: int, frames: Mapping[str, DataFrame], taken: Mapping[str, matching.Taken]
    ) -> New:
        sides = {"left": rule.left, "right": rule.right}
        known = {side: topic for side, topic in sides.items() if topic in frames and matching.has_schema(frames[topic])}
        kinds = matching.key_types(rule, {side: frames[topic] for side, topic in known.items()})
        made: dict[str, DataFrame] = {}
        for side, topic in known.items():
            frame = taken[topic].by(index) if topic in taken else frames[topic]
            made[side] = matching.keyed(rule, side, matching.in_frame(frame, side), kinds)
        return New(rule, index, kinds, made)

    def _denorm(self, new: New, types: Mapping[str, OutputType], made_by: matching.Made) -> list[DataFrame]:
        rule, frames = new.rule, new.frames
        sides = {"left": rule.left, "right": rule.right}
        if len(frames) < 2:
            return [
                matching.one_sided(new.index, frame, side, self.places[sides[side]]) for side, frame in frames.items()
            ]
        whole = {side: matching.union([frame, *self._met(new, side)]) for side, frame in frames.items()}
        if self.small:
            whole = {side: frame.coalesce(1) for side, frame in whole.items()}
        target = types[rule.out].target(rule.name)
        left, right = whole["left"], whole["right"]
        return [matching.paired(rule, new.index, left, right, new.kinds, self.places, target, made_by)]

    def _met(self, new: New, side: str) -> list[DataFrame]:
        """The pending records of one side whose join key a new record of the other side has."""
        topic = new.rule.left if side == "left" else new.rule.right
        found = self.waiting.records(new.rule, topic)
        if found is None:
            return []
        failed = self.failures.condition(topic)
        found = found if failed is None else found.where(f"NOT ({failed})")
        return [matching.keyed(new.rule, side, matching.in_frame(found, side), new.kinds)]

    def _check(self, found: Sequence[Fact], rows: DataFrame, types: Mapping[str, OutputType]) -> None:
        """Every new record that was read is in exactly one class; none is unmatched where the file forbids it, and none
        was taken by a rule that can't say its types."""
        from pyspark.sql import functions as F

        for row in found:
            if row.kind == "untyped":
                rule = row.rule or ""
                raise EtlError(next(kind.untyped[rule] for kind in types.values() if rule in kind.untyped))
        for item in self.pipeline.inputs:
            if item.unmatched == "fail" and any(r.kind == "unmatched" and r.topic == item.topic for r in found):
                of = F.col("source").getItem(0)
                first = rows.filter((F.col("kind") == "unmatched") & (of.place == self.places[item.topic])).agg(
                    F.min(F.struct(of.partition.alias("partition"), of.offset.alias("offset"))).alias("at")
                )
                at = first.collect()[0]["at"]
                raise EtlError(
                    f"topic {item.topic}, partition {at.partition}, offset {at.offset}: no rule takes this record. Add a rule,"
                    " or set unmatched: keep or drop."
                )
        counted = Counter[str]()
        for row in found:
            if not row.old:
                counted[row.topic] += row.entries
        for topic, files in self.files.items():
            ranges = self.plan.reads(topic)
            inside = all(reading.is_inside(item, ranges) for item in files)
            expected = sum(item.records for item in files) if inside else self.batch.slices[topic].dataframe().count()  # type: ignore[union-attr]
            if counted[topic] != expected:
                raise EtlError(
                    f"pool {self.plan.pool}: {expected} new records of {topic} were read and {counted[topic]} accounted for;"
                    " nothing was committed. This is a defect of zync_assets: please report it with the pipeline file."
                )

    def _write_outputs(
        self,
        rows: DataFrame,
        found: Sequence[Fact],
        outputs: Mapping[tuple[str, int], OutputPosition],
        types: Mapping[str, OutputType],
    ) -> tuple[list[DataFile], dict[str, int]]:
        files: list[DataFile] = []
        ends: dict[str, int] = {}
        buckets = 1 + max((row.bucket for row in found), default=0)
        for (topic, _), position in outputs.items():
            sizes = Counter[int]()
            for row in found:
                if row.kind == "out" and row.out == topic:
                    sizes[row.bucket] += row.rows
            firsts = [position.next + sum(sizes[b] for b in range(bucket)) for bucket in range(buckets)]
            ends[topic] = position.next + sizes.total()
            if not sizes:
                continue
            target = types[topic]
            kinds = {name: spark_type(kind) for name, kind in target.columns.items()}
            values, paths = {name: name_sql(name) for name in kinds}, "CAST(NULL AS array<string>)"
            value = staging.value_column(topic)
            if value in kinds:
                made = unavailable.left_out(values[value], kinds[value], "value", self.pipeline.unavailable_value)
                values[value], paths = made or (values[value], paths)
            # The topic's own under names without dots, which mapInArrow would take for paths.
            sides = (
                f"CAST({values[name]} AS {type_sql(kind)}) AS side{at}" for at, (name, kind) in enumerate(kinds.items())
            )
            outputs_of = rows.where(f"kind = 'out' AND rule IN ({self.labels.of_topic(topic)})")
            schemas = [target.targets[name].fingerprint if name in target.targets else "" for name in self.labels.rules]
            folder = f"{self.folder}/topic={topic}"
            writer = BucketWriter(self.uri, folder, topic, firsts, self.labels, schemas, target.columns)
            columns = outputs_of.selectExpr("bucket", "rule", "source", f"{paths} AS left_out", *sides)
            files += write_outputs(self.spark, columns, writer, self.record_size)
        return files, ends

    def _write_ledger(
        self, rows: DataFrame, account: Sequence[Row] | None, found: Sequence[Fact], bad: DataFrame | None
    ) -> list[DataFile]:
        folder = f"{self.folder}/{staging.ACCOUNT_FOLDER}"
        covered = {topic: self.plan.reads(topic) for topic in self.plan.ranges}
        plain = bad is None and all(row.kind == "out" for row in found)
        waited = any(row.old for row in found)
        if plain and not waited:
            entries = ledger.whole_ranges(covered)
            return [staging.write_ledger(self.uri, f"{folder}/part-0.parquet", entries)]
        if bad is None and account is not None:
            failed = [item.entry() for item in self.failures.of(self.plan, old=False)]
            entries = ledger.few_rows(covered, [*small.exceptions(account, self.labels), *failed])
            entries += small.completed(account, self.labels)
            return [staging.write_ledger(self.uri, f"{folder}/part-0.parquet", entries)]
        others = ledger.exceptions(rows, self.labels)
        if bad is not None:
            others = others.unionByName(bad, allowMissingColumns=True)
        failed = self.failures.of(self.plan, old=False)
        if failed:
            others = others.unionByName(ledger.failed(self.spark, map(astuple, failed)), allowMissingColumns=True)
        if bad is None and sum(row.entries for row in found if row.kind != "out" or row.old) <= ledger.FEW:
            fetched = (
                others.unionByName(ledger.completed(rows, self.labels), allowMissingColumns=True) if waited else others
            )
            each = fetched.collect()
            entries = ledger.few_rows(covered, [row for row in each if row["kind"] != "completed"])
            entries += [row.asDict() for row in each if row["kind"] == "completed"]
            return [staging.write_ledger(self.uri, f"{folder}/part-0.parquet", entries)]
        entries_frame = ledger.ledger_rows(self.spark, covered, others)
        if waited:
            entries_frame = entries_frame.unionByName(ledger.completed(rows, self.labels))
        _write(entries_frame.selectExpr("struct(*) AS account"), storage.join(self.uri, folder))
        paths = storage.list_files(storage.join(self.uri, folder), ".parquet")
        made = [staging.ledger_file(self.uri, f"{folder}/{path}") for path in paths]
        return [item for item in made if item.records]

    def _write_settled(self) -> list[DataFile]:
        """What was to be looked at again and is in the raw table no more, and what waited and made an expression fail."""
        path = f"{self.folder}/{staging.ACCOUNT_FOLDER}/settled.parquet"
        entries = [item.entry("expired") for item in self.plan.reopening.gone]
        entries += [failure.entry() for failure in self.failures.of(self.plan, old=True)]
        return [staging.write_ledger(self.uri, path, entries)] if entries else []


_WRITING = {
    # A marker file that nothing here reads.
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "compression": "snappy",
}


def _write(frame: DataFrame, uri: str) -> None:
    """Ledger rows, too many to be fetched, by Spark's own Parquet writer."""
    frame.write.options(**_WRITING, **storage.spark_options(uri)).parquet(storage.spark_path(uri))
