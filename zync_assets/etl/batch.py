"""One ETL batch on its way into the staging table."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING

from zync_assets.crashes import crash_point
from zync_assets.errors import EtlError
from zync_assets.etl import account, failures, positions
from zync_assets.etl.account import labels_of
from zync_assets.etl.encodability import Unfit, size_limits, suspect_sql
from zync_assets.etl.failures import NONE, Failure, Failures, Place, quarantined, undecoded_rows
from zync_assets.etl.output_files import BATCH_BYTES, BucketWriter, Results, StagedTopic, row_sql
from zync_assets.etl.output_types import OutputType, output_types
from zync_assets.etl.pending import New, Waiting, fold_ledger
from zync_assets.etl.plan import EtlBatch, EtlCommit
from zync_assets.etl.positions import new_counts, next_head, output_positions, table_schema
from zync_assets.etl.retries import carve
from zync_assets.etl.rules import matching
from zync_assets.etl.rules.join_keys import is_hashed_as_ever, join_text, key_types
from zync_assets.etl.rules.shapes import learn_types, note_schema
from zync_assets.lake import raw, staging, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import OutputPosition
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Denorm, Pipeline, Rule
from zync_assets.spark import frames
from zync_assets.upkeep import keep_short, keep_up

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

MEASURED = 1_000
"""Bytes that a record takes in its file, on the average, from which on rows are measured on their way to Python."""


class JoinsChanged(Exception):
    """Records wait for rules by hashes that the rules' joins no longer make. Nothing was done."""

    def __init__(self, rules: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(rules)))
        self.rules = rules


class EtlRun:
    """The commit of one batch. An object, because its steps share many values."""

    def __init__(self, pipeline: Pipeline, batch: EtlBatch, waiting: Waiting, failures: Failures = NONE) -> None:
        """``waiting``: the batch's pending records; ``failures``: the records with a known failure, for quarantine."""
        self.pipeline, self.batch, self.waiting, self.failures = pipeline, batch, waiting, failures
        self.plan, self.spark = batch.plan, batch.spark
        self.lacks = any(state is not None and state.with_ids for state in self.plan.raw.values())
        self.rules = pipeline.rules_of(self.plan.pool)
        self.places = {item.topic: place for place, item in enumerate(pipeline.inputs)}
        self.labels = labels_of(pipeline, self.plan.pool)
        self.uri = storage.staging_uri(pipeline.lake, self.plan.pool)
        states = ((topic, state) for topic, state in self.plan.raw.items() if state is not None)
        self.files = {topic: raw.raw_files(state, self.plan.reads(topic)) for topic, state in states}
        """The files that the batch's new records are in."""
        read = [item for files in self.files.values() for item in files]
        spans = [positions.TimeSpan(item.min_time or 0, item.max_time or 0, item.records) for item in read]
        self.bounds = positions.time_bounds(spans)
        records = sum(item.records for item in read)
        self.small = records <= positions.SMALL
        """Whether one Spark task runs the whole batch. The driver then fetches the task's account entries."""
        self.joins: dict[str, str] = {}
        """Denorm rule → the definition of its join hashes, as in ``Head``. Filled with the results."""
        self.folder = f"batch-{self.plan.head.batch + 1:012d}-{uuid.uuid4().hex[:12]}"

    def commit(self, started: float) -> EtlCommit:
        head, plan = self.plan.head, self.plan
        outputs = output_positions(self.pipeline, plan.pool, head)
        frames = self.frames()
        learn_types(matching.questions(self.rules, frames))
        types = output_types(self.pipeline, plan.pool, self.plan.state, frames, self.tables(), lacks=self.lacks)
        present: set[str] = set()

        def made_by(rule: Rule, target: matching.Target) -> list[tuple[str, str]]:
            # Notes the columns here, because ``results.columns`` takes as long as the analysis of the whole batch.
            made = matching.columns(rule, target)
            present.update(name for name, _ in made)
            return made

        results = self.results(frames, types, made_by)
        limits = size_limits(self.pipeline, types)
        suspect = suspect_sql(self.pipeline, self.labels, types, present, limits)
        topics = [
            self._staged(types[topic], position, limits.get(topic))
            for (topic, _), position in outputs.items()
            # An output that the file has no more keeps its place in the account.
            if topic in types and present.issuperset(types[topic].columns)
        ]
        wanted = row_sql(
            topics, self.labels, suspect, self.pipeline.unavailable_value, lacking=matching.LACKING in present
        )
        outs = [self.labels.of_topic(staged.topic) for staged in topics]
        rows = positions.arranged(results, self.bounds, wanted, outs, together=self.small)
        written: Results | None = None
        committing = False
        try:
            writer = BucketWriter(self.uri, topics, self.labels)
            written = Results(self.spark, rows, writer, small=self.small, measured=self._has_large())
            found, files = written.facts, list(written.files)
            self._check(written, types)
            ends = self._ends(written, outputs)
            crash_point("etl:outputs-written")
            bad = undecoded_rows(self.spark, self.pipeline, plan)
            files += self._write_ledger(written, bad)
            files += self._write_settled()
            crash_point("etl:ledger-written")
            done = next_head(
                plan,
                found,
                outputs,
                ends,
                types,
                quarantined(bad),
                self.failures.waited(plan),
                self.joins,
                written.nullable,
            )
            schema = table_schema(plan.state, types)
            folded, removed = self._tidied()
            if folded:
                crash_point("etl:ledger-folded")
            committing = True
            staging.commit_batch(self.pipeline.lake, plan.pool, plan.state, done, schema, [*files, *folded], removed)
        finally:
            if written is not None:
                written.release()
            if not committing:
                # A batch that fails is tried again, for as long as its cause is there.
                storage.remove_files(storage.join(self.uri, self.folder))
        keep_up(self.spark, plan.state.opened if plan.state else None)
        for topic, known in plan.raw.items():
            keep_short(self.pipeline, self.pipeline.input(topic), known)
        made = {
            topic: (OffsetRange(0, outputs[topic, 0].next, end),)
            for topic, end in ends.items()
            if end > outputs[topic, 0].next
        }
        return EtlCommit(plan.pool, done.batch, made, plan.ranges, new_counts(found), time.monotonic() - started)

    def _has_large(self) -> bool:
        """Whether records may be large.

        Records may be large if the mean record size of a new or pending input's file is, or if the pipeline file limits the
        bytes of an Arrow batch.
        """
        waits = {topic for (_, topic), count in self.plan.head.waiting.items() if count}
        old = (raw.raw_files(state) for topic, state in self.plan.raw.items() if state is not None and topic in waits)
        files = [item for found in (*self.files.values(), *old) for item in found]
        return BATCH_BYTES in self.pipeline.spark or any(item.size > MEASURED * item.records for item in files)

    def _tidied(self) -> tuple[list[DataFile], list[DataFile]]:
        """Ledger files to add and to remove, in addition to the batch's own files.

        If records leave their class, the files with their entries are written again. Otherwise many files are folded.
        """
        state, taken = self.plan.state, [*self.plan.reopening.taken, *self.failures.waited(self.plan)]
        if state is None:
            return [], []
        return carve(state, taken) if taken else fold_ledger(state)

    def frames(self) -> dict[str, DataFrame]:
        found: dict[str, DataFrame] = {}
        for topic, part in self.batch.slices.items():
            frame, state = part.dataframe(), self.plan.raw[topic]
            if frame is not None and state is not None:
                found[topic] = note_schema(frame.selectExpr("*", "false AS old"), frames.record_types(state))
        return found

    def tables(self) -> dict[str, pa.Schema]:
        """Input topic → the columns of its raw table."""
        return {topic: state.schema for topic, state in self.plan.raw.items() if state is not None}

    def results(
        self, frames: Mapping[str, DataFrame], types: Mapping[str, OutputType], made_by: matching.Made
    ) -> DataFrame:
        """The result rows of the batch (see ``matching``). ``made_by`` returns the columns of outputs."""
        taken = {
            topic: matching.assign(
                self.pipeline.input(topic), self.places[topic], frame, self.rules, self.failures.condition(topic)
            )
            for topic, frame in frames.items()
            if self.plan.reads(topic) or self.plan.reads_nothing
        }
        own = list(enumerate(self.rules))
        untyped = [index for index, rule in own if rule.name in types[rule.out].untyped]
        joins = {i: rule for i, rule in own if isinstance(rule, Denorm) and i not in untyped}
        single = {i: rule for i, rule in own if i not in joins and rule.name in types[rule.out].targets}
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
        self.joins = {new.rule.name: join_text(new.rule, new.kinds) for new in found if new.kinds}
        if changed := frozenset(new.rule.name for new in found if self._is_changed(new)):
            raise JoinsChanged(changed)
        self.waiting.look_up(found, small=self.small)
        for new in found:
            parts += self._denorm(new, types, made_by)
        return matching.without_dropped(matching.union(parts), self.rules)

    def _is_changed(self, new: New) -> bool:
        """Whether records wait for a rule by hashes that its join no longer makes."""
        name, head, again = new.rule.name, self.plan.head, self.plan.reopening
        waits = any(
            head.waiting.get((name, topic), 0) and (name, topic) not in again.sides for topic in new.rule.topics
        )
        if not waits or not new.kinds or name in again.joins:
            return False
        known = head.joins.get(name)
        return known != self.joins[name] if known is not None else not is_hashed_as_ever(new.kinds)

    def _new(
        self, rule: Denorm, index: int, frames: Mapping[str, DataFrame], taken: Mapping[str, matching.Taken]
    ) -> New:
        sides = {"left": rule.left, "right": rule.right}
        known = {side: topic for side, topic in sides.items() if topic in frames and matching.has_schema(frames[topic])}
        kinds = key_types(rule, {side: frames[topic] for side, topic in known.items()})
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

    def _staged(self, kind: OutputType, position: OutputPosition, limit: int | None) -> StagedTopic:
        rules = self.labels.rules
        return StagedTopic(
            kind.topic,
            f"{self.folder}/topic={kind.topic}",
            position.next,
            kind.columns,
            [kind.targets[name].fingerprint if name in kind.targets else "" for name in rules],
            {kind.targets[name].fingerprint: text for name, text in kind.texts.items()},
            limit,
            tuple(kind.required),
        )

    def _check(self, written: Results, types: Mapping[str, OutputType]) -> None:
        """Raise the first error of the results.

        Every new record must be in exactly one class. No record may be unmatched if the pipeline file forbids unmatched
        records. No rule with an unresolved NULL column may take a record. Publish must be able to encode every output.
        """
        from pyspark.sql import functions as F

        found = written.facts
        for row in found:
            if row.kind == "untyped":
                rule = row.rule or ""
                raise EtlError(next(kind.untyped[rule] for kind in types.values() if rule in kind.untyped))
        if written.unfitting:
            unfit = dict(self._unfit(written))
            if len(unfit) > failures.MOST_FAILURES:
                first = unfit[min(unfit)]
                raise EtlError(
                    f"pool {self.plan.pool}: rule {first.rule}, {first.text}. {len(unfit)} records or more fail in this way, the"
                    f" first at topic {first.topic}, partition {first.partition}, offset {first.offset}. Nothing was"
                    " committed. Correct the rule, or the output."
                )
            raise Unfit(unfit)
        for item in self.pipeline.inputs:
            if item.unmatched == "fail" and any(r.kind == "unmatched" and r.topic == item.topic for r in found):
                mine = written.entries().where((F.col("kind") == "unmatched") & (F.col("topic") == item.topic))
                at = mine.agg(F.min(F.struct("partition", F.col("first").alias("offset"))).alias("at")).collect()[0][
                    "at"
                ]
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
            inside = all(frames.is_inside(item, ranges) for item in files)
            expected = sum(item.records for item in files) if inside else self.batch.slices[topic].dataframe().count()  # type: ignore[union-attr]
            if counted[topic] != expected:
                raise EtlError(
                    f"pool {self.plan.pool}: {expected} new records of {topic} were read and {counted[topic]} accounted for;"
                    " nothing was committed. This is a defect of zync_assets: please report it with the pipeline file."
                )

    def _unfit(self, written: Results) -> Iterator[tuple[Place, Failure]]:
        for one in written.unfitting:
            place = (self.labels.topics[one.place], one.partition, one.offset)
            yield place, Failure(*place, str(self.labels.rule(one.rule)), f"output to {one.topic}: {one.text}")

    def _ends(self, written: Results, outputs: Mapping[tuple[str, int], OutputPosition]) -> dict[str, int]:
        """Topic → the first output offset of the next batch. EtlError if the files' offsets have gaps or overlap."""
        ends: dict[str, int] = {}
        for (topic, _), position in outputs.items():
            end = position.next
            for file in (item for item in written.files if item.group == topic):
                if file.first != end:
                    raise EtlError(
                        f"pool {self.plan.pool}, topic {topic}: offset {file.first} follows {end - 1}: Spark made the rows"
                        " twice, and not the same. Nothing was committed. Do the rules use the time of day? Without such a"
                        " rule, run it again."
                    )
                end += file.records
            if end - position.next != sum(row.rows for row in written.facts if row.kind == "out" and row.out == topic):
                raise EtlError(
                    f"pool {self.plan.pool}, topic {topic}: not all outputs were written; nothing was committed. This is a"
                    " defect of zync_assets: please report it with the pipeline file."
                )
            ends[topic] = end
        return ends

    def _write_ledger(self, written: Results, bad: DataFrame | None) -> list[DataFile]:
        folder = f"{self.folder}/{staging.ACCOUNT_FOLDER}"
        path = f"{folder}/part-0.parquet"
        covered = {topic: self.plan.reads(topic) for topic in self.plan.ranges}
        waited = any(row.old for row in written.facts)
        if bad is None and not waited and all(row.kind == "out" for row in written.facts):
            return [staging.write_ledger(self.uri, path, account.whole_ranges(covered))]
        failed = self.failures.of(self.plan, old=False)
        if bad is None and sum(row.entries for row in written.facts if row.kind != "out" or row.old) <= account.FEW:
            each = written.few_entries()
            new = [entry for entry in each if entry["kind"] != "completed"]
            made = account.few_rows(covered, [*new, *(failure.entry() for failure in failed)])
            made += [entry for entry in each if entry["kind"] == "completed"]
            return [staging.write_ledger(self.uri, path, made)]
        entries = written.entries()
        others = entries.where("kind <> 'completed'")
        if bad is not None:
            others = others.unionByName(bad, allowMissingColumns=True)
        if failed:
            others = others.unionByName(account.failed(self.spark, map(astuple, failed)), allowMissingColumns=True)
        frame = account.ledger_rows(self.spark, covered, others)
        if waited:
            frame = frame.unionByName(account.as_rows(entries.where("kind = 'completed'")))
        _write(frame.selectExpr("struct(*) AS account"), storage.join(self.uri, folder))
        paths = storage.list_files(storage.join(self.uri, folder), ".parquet")
        files = [staging.ledger_file(self.uri, f"{folder}/{name}") for name in paths]
        return [item for item in files if item.records]

    def _write_settled(self) -> list[DataFile]:
        """Write the entries of reopened records that the raw table no longer holds, and of pending records that a rule failed
        on."""
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
