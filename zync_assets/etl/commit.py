"""ETL: raw tables → staging table.

    plan_etl         the new offsets since the account's seen positions (no JVM)
    read_raw         the lazy slice of one input
    transform        the lazy batch over all slices
    commit_staging   outputs, account and positions, in one commit

The commit is atomic: after a kill, the next plan begins at the positions of the last commit.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.audit.guard import refuse_blocks, refuse_disorder
from zync_assets.codecs.spark_types import arrow_frame
from zync_assets.crashes import crash_point
from zync_assets.errors import EtlError, FieldMissing
from zync_assets.etl import account
from zync_assets.etl.batch import JoinsChanged, Transform, result_rows, transform_of
from zync_assets.etl.due import due_records, start_times
from zync_assets.etl.encodability import EncodingFailures
from zync_assets.etl.failure_search import MOST_TURNS, find_failures
from zync_assets.etl.failures import Failure, Failures, Place, quarantined, undecoded_rows
from zync_assets.etl.hold import NO_HOLD
from zync_assets.etl.ledger import compact_ledger, time_of
from zync_assets.etl.numbering import Numbering
from zync_assets.etl.output_files import Results
from zync_assets.etl.pending import PendingRecords
from zync_assets.etl.plan import EtlBatch, EtlCommit, EtlPlan, looking_again, with_parts, with_raw
from zync_assets.etl.positions import Outcome, new_counts, next_head, output_positions, table_schema
from zync_assets.etl.rebuild import is_rebuilt, rebuild_account, rebuild_rows, refuse_failures
from zync_assets.etl.result_checks import (
    Attempt,
    Positions,
    RowsWait,
    check_classes,
    check_rows,
    first_unsent,
    output_ends,
    overdue_failures,
    refuse_many,
    with_groups,
    without_rows,
)
from zync_assets.etl.retries import carve
from zync_assets.etl.rule_changes import fingerprints
from zync_assets.etl.rules.kind import MISSING, SEVERAL, union
from zync_assets.etl.rules.results import several_topics
from zync_assets.etl.views.batch import ViewBatch, view_batch
from zync_assets.etl.views.changes import APPLIED, RowFailures
from zync_assets.etl.views.state_fold import fold_state
from zync_assets.lake import staging, storage
from zync_assets.lake.head import Partitioning
from zync_assets.lake.log import DataFile
from zync_assets.lake.quarantine_table import QuarantinedRecord, admit
from zync_assets.lake.snapshot import Snapshot
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file.missing_fields import with_missing_fields
from zync_assets.pipeline_file.references import with_lake_names
from zync_assets.pipeline_file.zed.types import with_topic_types
from zync_assets.spark.failures import spark_errors, spark_failures
from zync_assets.spark.tasks import guarded_elements
from zync_assets.upkeep import apply_retention, keep_up

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROUNDS = 20
"""How often a batch is tried without a further failing record. An attempt leaves out the failing records of earlier attempts."""


def commit_staging(pipeline: Pipeline, batch: EtlBatch) -> EtlCommit:
    """The commit half of an ETL batch.

    A record goes into quarantine if a rule fails on it, or if its output can't be encoded. The commit holds the rest of the
    batch. A rule may name a field that no record has had yet: the field is null, with the type in the registry's newest
    schema.

    Nothing of the batch is visible after an error. Raises CheckFailed if a blocking check of a raw table failed and has not
    passed since, or if a raw file of new records is missing or holds other offsets than the Delta log says. Raises
    CommitConflict if another batch was committed since the plan. Raises BadRecords if the pipeline file does not accept the
    bad records. Raises EtlError for every other failure.
    """
    snapshot = Snapshot(pipeline, batch.plan.raw)
    reader, outcome = f"pool {batch.plan.pool}", "Nothing was transformed."
    refuse_blocks(snapshot, reader, batch.plan.ranges, outcome)
    refuse_disorder(snapshot, reader, batch.plan.ranges, outcome)
    place = f"pool {batch.plan.pool}, batch {batch.plan.head.batch + 1}"
    pool_rules = pipeline.rules_of(batch.plan.pool)
    with (
        guarded_elements(batch.spark, repr(pool_rules)),
        spark_failures(
            lambda text: EtlError(
                f"{place}: {text} Nothing was committed; correct the rule or the data (try_cast gives NULL where cast fails)."
            )
        ),
    ):
        rules = fingerprints(pool_rules)
        pipeline = with_topic_types(pipeline, batch.plan.raw)
        try:
            return _commit(pipeline, batch, rules)
        except FieldMissing as error:
            completion = with_missing_fields(pipeline, batch.plan.pool, batch.plan.raw)
            if completion is None:
                raise error
            filled, tables = completion
            return _commit(filled, with_raw(pipeline, batch, tables), rules)


def _commit(pipeline: Pipeline, batch: EtlBatch, rules: Mapping[str, str]) -> EtlCommit:
    """One batch in the steps of the protocol. Until step 6 no commit names a file of the batch, and a kill leaves nothing.

    ``rules``: the fingerprints of the pool's rules.
    """
    start_time = time.monotonic()

    # 1. Positions before the batch. The end of a new output's topic in Kafka fixes the output's base.
    outputs = output_positions(pipeline, batch.plan.pool, batch.plan.head)

    # 2. Run the rules. Spark queries number the outputs, write them into files, and count every record. Records that
    #    fail are removed, and the batch is tried again.
    staged = _staged(with_lake_names(pipeline, batch.plan.raw, batch.plan.state), batch, outputs)
    plan, state, labels = staged.plan, staged.plan.state, staged.transform.labels
    committing = False
    try:
        if plan.recomputed is not None and not staged.results.facts and is_rebuilt(batch.spark, pipeline, plan):
            return EtlCommit(plan.pool, plan.head.batch, {}, {}, {}, time.monotonic() - start_time)
        crash_point("etl:outputs-written")

        # 3. Write the account: the class of every new record, and of every older record that the batch looks at again.
        undecoded = undecoded_rows(batch.spark, pipeline, plan)
        ledger = [*_ledger_files(staged, undecoded), *_settled_files(staged)] if plan.recomputed is None else []
        crash_point("etl:ledger-written")

        # 4. Positions after the batch: seen, next output offsets, and counts.
        facts = [*staged.results.facts, *staged.pending.hold.ended_facts()]
        outcome = Outcome(
            facts,
            staged.ends,
            staged.transform.types,
            quarantined(undecoded),
            staged.failures.waited(plan, staged.transform.rules),
            staged.joins,
            staged.results.nullable,
            start_times(staged.transform)
            | {name: time_of(labels.since) for name in map(labels.rule, labels.waits) if name is not None},
            staged.partitionings,
            several_topics(staged.transform.rules),
        )
        head = replace(next_head(plan, outputs, outcome), rules=rules)

        # 5. Write the ledger files again from which records leave their class. Compact many ledger files into one.
        added_files, removed_files = _tidied_ledger(staged)
        if added_files:
            crash_point("etl:ledger-compacted")
        if plan.recomputed is not None:
            head, added_files, removed_files = rebuild_account(pipeline, plan, head, staged.folder)

        # 6. Commit outputs, account and positions: one Delta commit on the table as the plan saw it. A table that another
        #    process changed is a conflict.
        committing = True
        files = [*staged.results.files, *ledger, *added_files]
        columns = table_schema(state, outcome.types)
        if (views := staged.views) is not None:
            head, columns = views.head(head), views.schema(columns)
            files, removed_files = [*files, *views.files], [*removed_files, *views.removed]
        staging.commit_batch(pipeline.lake, plan.pool, state, head, columns, files, removed_files)
    finally:
        staged.release()
        if not committing:
            staged.remove()

    # 7. Compact staging, and let retention remove raw records that every reader has seen.
    keep_up(batch.spark, state.table if state else None)
    fold_state(batch.spark, state)
    for topic, table in plan.raw.items():
        apply_retention(pipeline, pipeline.input(topic), table)
    new_outputs: dict[str, tuple[OffsetRange, ...]] = {}
    for (topic, partition), end in sorted(staged.ends.items()):
        part = OffsetRange(partition, outputs[topic, partition].next, end)
        if not part.empty:
            new_outputs[topic] = (*new_outputs.get(topic, ()), part)
    return EtlCommit(plan.pool, head.batch, new_outputs, plan.ranges, new_counts(facts), time.monotonic() - start_time)


@dataclass(frozen=True)
class Staged:
    """The written outputs of a batch, which no commit names yet.

    ``uri``: the staging table. ``folder``: the files of this attempt, below the table. ``failures``: the records for
    quarantine. ``joins``: rule → the definition of its join hashes. ``ends``: (output topic, partition) → the first output
    offset of the next batch. ``partitionings``: as in ``Head``.
    """

    transform: Transform
    uri: str
    folder: str
    failures: Failures
    pending: PendingRecords = field(repr=False)
    joins: Mapping[str, str]
    results: Results = field(repr=False)
    ends: Mapping[tuple[str, int], int]
    partitionings: Mapping[str, Partitioning]
    views: ViewBatch | None = None
    """The state of the views' tables, which no commit names yet."""

    @property
    def plan(self) -> EtlPlan:
        return self.transform.plan

    def release(self) -> None:
        """Free Spark's cache."""
        self.results.release()
        self.pending.release()

    def remove(self) -> None:
        """Remove the files. A batch that fails is tried again, for as long as its cause is there."""
        storage.remove_files(storage.join(self.uri, self.folder))


def _staged(pipeline: Pipeline, batch: EtlBatch, outputs: Positions) -> Staged:
    """Write the outputs of a batch. Each attempt leaves out the records that the attempt before failed on.

    A rule with a changed join has its pending records matched again in the same batch.
    """
    place = f"pool {batch.plan.pool}, batch {batch.plan.head.batch + 1}"
    transform = transform_of(pipeline, batch)
    due_parts = due_records(transform)
    batch = with_parts(batch, due_parts.parts, due_parts.oldest)
    transform = transform_of(pipeline, batch) if due_parts.parts else replace(transform, batch=batch)
    pending = PendingRecords(batch)
    failures = Failures({failure.place: failure for failure in overdue_failures(transform)})
    try:
        if failures.found:
            _admit(pipeline, batch.plan, failures, place)
        rounds, turns, all_failures = 0, 0, dict[Place, Failure]()
        while rounds < ROUNDS:
            rounds += 1
            try:
                return _attempt(transform, pending, failures, outputs, turns)
            except JoinsChanged as changed:
                batch = looking_again(pipeline, batch, changed.rules)
                transform, pending = transform_of(pipeline, batch), PendingRecords(batch)
                continue
            except RowsWait as error:
                pending.hold = error.hold
                continue
            except (EncodingFailures, RowFailures) as error:
                new_failures, turns = error.failures, turns + isinstance(error, EncodingFailures)
            refuse_failures(batch.plan, new_failures)
            rounds = 0 if new_failures.keys() - all_failures.keys() else rounds
            all_failures |= new_failures
            refuse_many(batch.plan, all_failures)
            failures = Failures({**failures.found, **new_failures})
            # A record that waits behind a failing record goes its way.
            pending.hold = NO_HOLD
            _admit(pipeline, batch.plan, failures, place)
        raise EtlError(
            f"{place}: {ROUNDS} attempts did not end, and found no further record that fails. Nothing was committed. This is a"
            " defect of zync_assets: please report it with the pipeline file."
        )
    except BaseException:
        pending.release()
        raise


def _attempt(
    transform: Transform, pending: PendingRecords, failures: Failures, outputs: Positions, turns: int
) -> Staged:
    """Run the result rows and check what came of them. ``failures``: the records with a known failure. ``turns``: how many
    attempts before found outputs that can't be encoded.

    Raises JoinsChanged, EncodingFailures for outputs that can't be encoded, and Spark's error for a record that a rule fails on.
    """
    from pyspark.errors import AnalysisException

    plan = transform.plan
    folder = f"batch-{plan.head.batch + 1:012d}-{uuid.uuid4().hex[:12]}"
    uri = storage.staging_uri(transform.pipeline.lake, plan.pool)
    results: Results | None = None
    views: ViewBatch | None = None
    numbering = Numbering(transform, uri, folder, outputs)
    is_staged = False
    try:
        if plan.recomputed is None:
            views = view_batch(transform.stage(failures), uri, folder, numbering.columns)
            rows = result_rows(transform, pending, failures, numbering.columns, views)
        else:
            # Views wait for the next batch: the result rows of this one are those of event rules alone.
            rows = rebuild_rows(transform)
        results = numbering.results(rows, pending.hold)
        results.facts += views.facts if views is not None else ()
        if any(fact.kind in (MISSING, SEVERAL) for fact in results.facts):
            raise RowFailures(without_rows(transform, rows.frame))
        about = transform, results.times, results.held_records, pending.hold, failures
        if results.encoding_failures:
            # An output of records that end with their source row is none.
            check_rows(*about, settled=False)
        check_classes(transform, results)
        check_rows(*about, settled=results.settled)
        ends = output_ends(plan, results, outputs)
        staged = Staged(transform, uri, folder, failures, pending, rows.joins, results, ends, numbering.kept, views)
        is_staged = True
        return staged
    except EncodingFailures as error:
        attempt = Attempt(transform, pending, failures, views)
        unsent = first_unsent(attempt, error.failures) if turns < MOST_TURNS else error.failures
        raise EncodingFailures(with_groups(attempt, unsent)) from None
    except AnalysisException:
        raise
    except spark_errors() as error:
        # Before the state of tables is removed, which the rules read.
        if views is not None:
            views.events.refuse_rows(transform.rules)
        hold = pending.hold
        row_failures = find_failures(Attempt(transform, pending, failures, views), numbering.partitions)
        if row_failures:
            raise RowFailures(row_failures) from error
        if pending.hold != hold:
            # A record of the pair that failed ends with its source row.
            raise RowsWait(pending.hold) from error
        raise error
    finally:
        if not is_staged:
            if results is not None:
                results.release()
            storage.remove_files(storage.join(uri, folder))


def _admit(pipeline: Pipeline, plan: EtlPlan, failures: Failures, place: str) -> None:
    """BadRecords where an input does not let its failing records pass."""
    for item in pipeline.inputs:
        topic_failures = [failure for at, failure in sorted(failures.found.items()) if at[0] == item.topic]
        # Records that this batch takes out of quarantine are among the quarantined records already.
        retry_count = sum(
            part.records for part in plan.retries.parts if (part.topic, part.kind) == (item.topic, "quarantined")
        )
        if topic_failures:
            first = QuarantinedRecord(
                plan.pool, *topic_failures[0].place, "etl", topic_failures[0].rule, topic_failures[0].reason, None, True
            )
            admit(pipeline, item, plan.raw[item.topic], len(topic_failures) - retry_count, first, place)


def _ledger_files(staged: Staged, undecoded: DataFrame | None) -> list[DataFile]:
    """The account of the batch's new records, and the pending records that the batch completes."""
    spark, plan, results = staged.transform.spark, staged.plan, staged.results
    folder = f"{staged.folder}/{staging.ACCOUNT_FOLDER}"
    path = f"{folder}/part-0.parquet"
    ranges = {topic: plan.reads(topic) for topic in plan.ranges}
    failed_entries = account.failed_entries(
        (*failure.place, failure.rule, failure.text) for failure in staged.failures.of(plan, old=False)
    )
    count = sum(row.entries for row in results.facts if row.kind not in ("out", APPLIED) or row.old)
    if undecoded is None and count <= account.FEW:
        entries = [results.few_entries(), failed_entries] if count else [failed_entries]
        rows = account.ledger_table(ranges, pa.concat_tables(entries))
        return [staging.write_entries(staged.uri, path, rows)]
    parts = [results.entries(), *([] if undecoded is None else [undecoded])]
    if failed_entries.num_rows:
        parts.append(arrow_frame(spark, failed_entries))
    frame = account.ledger_frame(spark, ranges, union(parts))
    _write(frame.selectExpr("struct(*) AS account"), storage.join(staged.uri, folder))
    paths = storage.list_files(storage.join(staged.uri, folder), ".parquet")
    files = [staging.ledger_file(staged.uri, f"{folder}/{name}") for name in paths]
    return [item for item in files if item.records]


def _settled_files(staged: Staged) -> list[DataFile]:
    """The entries of retried records that the raw table no longer holds, of pending records that a rule failed on, and of
    pending records whose source row ended."""
    path = f"{staged.folder}/{staging.ACCOUNT_FOLDER}/settled.parquet"
    entries = [item.entry("expired") for item in staged.plan.retries.expired]
    entries += [failure.entry() for failure in staged.failures.of(staged.plan, old=True)]
    entries += staged.pending.hold.ended_entries()
    return [staging.write_ledger(staged.uri, path, entries)] if entries else []


def _tidied_ledger(staged: Staged) -> tuple[list[DataFile], list[DataFile]]:
    """Ledger files to add and to remove, in addition to the batch's own files."""
    plan = staged.plan
    leaving_ranges = [*plan.retries.parts, *staged.failures.waited(plan, staged.transform.rules)]
    if plan.state is None or plan.recomputed is not None:
        return [], []
    added_files, removed_files = carve(plan.state, leaving_ranges) if leaving_ranges else ([], [])
    # Every batch may bring rows for pending records. The ledger gets short all the same.
    compacted, small = compact_ledger(plan.state, removed_files)
    return [*added_files, *compacted], [*removed_files, *small]


_WRITING = {
    # A marker file that nothing here reads.
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "compression": "snappy",
}


def _write(frame: DataFrame, uri: str) -> None:
    """Ledger rows, too many to be fetched, by Spark's own Parquet writer."""
    frame.write.options(**_WRITING, **storage.spark_options(uri)).parquet(storage.spark_path(uri))
