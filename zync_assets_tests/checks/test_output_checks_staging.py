"""Staging pools: sound they pass; each kind of damage to account, outputs or raw is found and named."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.checks import output_checks, raw_checks
from zync_assets.checks.output_checks import accept_source_order, each_check, pending_age, run_all, source_order
from zync_assets.errors import TopicMissing
from zync_assets.kafka.topics import TopicState
from zync_assets.lake import raw, staging, tables
from zync_assets.lake.check_results import CheckResult
from zync_assets.lake.staging import StagingState
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets_tests.checks.chain import Chain
from zync_assets_tests.checks.damage import Rows, append_again, change_account, edit, exchange, overwrite, take_out
from zync_assets_tests.etl.test_streams import SHOP, etl, ingest, outputs, send
from zync_assets_tests.mini import Mini, mini, openings
from zync_assets_tests.test_readme import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def state_of(chain: Chain) -> StagingState:
    state = staging.open_staging(chain.pipeline.lake, "Staging")
    assert state is not None
    return state


def test_a_check_opens_each_version_of_a_table_once(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = openings(monkeypatch)
    for check in each_check(chain.pipeline):
        result = check()
        assert result.passed or result.severity == "warn"
        assert set(Counter(opened).values()) == {1}, result.name
        opened.clear()


def test_all_checks_run_side_by_side_and_report_in_the_order_of_the_datas_way(chain: Chain) -> None:
    alone = [check() for check in each_check(chain.pipeline)]
    assert [(item.name, item.subject) for item in run_all(chain.pipeline)] == [
        (item.name, item.subject) for item in alone
    ]


def test_a_check_that_cant_look_at_its_topic_holds_up_no_other_check(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [(item.name, item.subject) for item in run_all(chain.pipeline)]
    real = raw_checks.led_state

    def state(kafka: Mapping[str, str], topic: str, patience: float) -> TopicState | None:
        return None if topic == chain.status else real(kafka, topic, patience)

    monkeypatch.setattr(raw_checks, "led_state", state)
    results = run_all(chain.pipeline)
    others = [name for name in alone if name != ("no_unexplained_loss", f"Raw/{chain.status}")]
    assert [(item.name, item.subject) for item in islice(results, len(others))] == others
    with pytest.raises(TopicMissing, match=f"topic {chain.status} is gone"):
        next(results)


def coverage(chain: Chain) -> CheckResult:
    return exactly_once_done_coverage(chain.pipeline, "Staging")


class TestCoverage:
    def test_a_sound_pool_passes(self, sound_chain: Chain) -> None:
        found = coverage(sound_chain)
        assert (found.passed, found.severity, found.subject) == (True, "error", "Staging")
        assert found.numbers == {
            "batches": 2,
            "outputs": 7,
            "sources": 13,
            "done": 13,
            "unmatched": 1,
            "dropped": 1,
            "quarantined": 1,
            "pending": 4,
        }

    def test_a_lost_done_fact(self, chain: Chain) -> None:
        change_account(state_of(chain), edit(lambda row: None, kind="done", topic=chain.status, first=3))
        found = coverage(chain)
        assert not found.passed
        assert (
            found.summary.split(" (")[0]
            == f"{chain.status}, partition 0: offsets 3 to 5 are in no class of the account"
        )

    def test_a_fact_that_is_there_twice(self, chain: Chain) -> None:
        change_account(state_of(chain), edit(lambda row: {**row, "end": 4}, kind="done", topic=chain.status, first=0))
        assert f"{chain.status}, partition 0: offset 3 is in the account twice" in coverage(chain).summary

    def test_an_input_that_made_two_outputs(self, chain: Chain) -> None:
        state = state_of(chain)
        *_, last = state.output_files(chain.new)
        doubled = {}

        def again(rows: Rows) -> Rows:
            doubled.update(rows[0]["source"][0])
            return [*rows, {**rows[0], "kafka": {**rows[0]["kafka"], "offset": 7}}]

        exchange(state.table, last, again)
        found = coverage(chain)
        assert not found.passed
        assert (
            f"{doubled['topic']} {doubled['partition']}:{doubled['offset']} made more than one output" in found.summary
        )

    def test_an_output_of_a_record_that_is_not_done(self, chain: Chain) -> None:
        change_account(
            state_of(chain), edit(lambda row: {**row, "kind": "unmatched"}, kind="done", topic=chain.status, first=0)
        )
        found = coverage(chain)
        assert f"{chain.status}, partition 0: offset 0 made an output and is unmatched" in found.summary

    def test_an_output_whose_input_still_waits(self, chain: Chain) -> None:
        change_account(
            state_of(chain), edit(lambda row: None, kind="completed", topic=chain.invoices, partition=1, first=0)
        )
        found = coverage(chain)
        assert not found.passed
        assert "4 records of" in found.summary
        assert "the ledger has 5" in found.summary

    def test_a_done_record_without_an_output(self, chain: Chain) -> None:
        state = state_of(chain)
        take_out(state.table, state.output_files(chain.new)[0])
        found = coverage(chain)
        assert not found.passed
        assert "offset 0 is done and made no output" in found.summary

    def test_a_waiting_record_that_raw_has_lost(self, chain: Chain) -> None:
        table = raw.open_raw(chain.pipeline.lake, "Raw", chain.invoices)
        assert table is not None
        *_, last = raw.raw_files(table)
        exchange(table.table, last, lambda rows: rows[:-1])
        found = coverage(chain)
        assert f"{chain.invoices}, partition 1: offset 7 is pending and not in the raw pool" in found.summary

    def test_a_done_record_that_raw_has_lost(self, chain: Chain) -> None:
        table = raw.open_raw(chain.pipeline.lake, "Raw", chain.status)
        assert table is not None
        exchange(table.table, raw.raw_files(table)[0], lambda rows: rows[1:])
        assert "offset 0 made an output and is done and not in the raw pool" in coverage(chain).summary

    def test_a_raw_pool_that_was_set_back(self, chain: Chain) -> None:
        shutil.rmtree(chain.lake / "Raw" / chain.status)
        tables.forget(str(chain.lake))
        assert "seen is 6, past the next offset 0 of Raw" in coverage(chain).summary

    @pytest.mark.parametrize(
        ("where", "message"),
        [
            ({"kind": "counted", "rule": "unmatched"}, "2 records were counted as unmatched, and 1 are"),
            ({"kind": "seen", "partition": 1}, "9 records were counted below seen, and 8 are there"),
            ({"kind": "waiting"}, "5 records of"),
        ],
    )
    def test_a_wrong_counter(self, chain: Chain, where: dict[str, object], message: str) -> None:
        change_account(state_of(chain), edit(lambda row: {**row, "count": row["count"] + 1}, **where), head=True)
        found = coverage(chain)
        assert not found.passed
        assert message in found.summary

    def test_a_class_that_was_changed_is_found_without_a_look_at_a_record(self, chain: Chain) -> None:
        """As where a record that made no output is called done: the guard before publishing looks at new offsets alone."""
        change_account(state_of(chain), edit(lambda row: {**row, "kind": "done"}, kind="unmatched"))
        found = exactly_once_done_coverage(chain.pipeline, "Staging", {})
        assert not found.passed
        assert "1 records were counted as unmatched, and the ledger's entries have 0" in found.summary

    def test_a_seen_that_the_ledger_does_not_reach(self, chain: Chain) -> None:
        change_account(state_of(chain), edit(lambda row: {**row, "end": 5}, kind="seen", topic=chain.status), head=True)
        assert f"{chain.status}, partition 0: the account goes to offset 6, past" in coverage(chain).summary

    def test_a_ledger_file_that_is_gone(self, chain: Chain) -> None:
        state = state_of(chain)
        (Path(state.table.uri) / state.ledger_files[0].path).unlink()
        assert "is in the log and not in the lake. Restore it from a copy." in coverage(chain).summary
        # The checks that read the ledger too fail, and no check ends the others.
        failures = {found.name for found in run_all(chain.pipeline) if not found.passed}
        assert {"exactly_once_done_coverage", "quarantine_size"} <= failures

    def test_before_the_first_batch(self, chain: Chain) -> None:
        shutil.rmtree(chain.lake / "Staging")
        tables.forget(str(chain.lake))
        assert coverage(chain).summary == "nothing transformed yet"


class TestCoverageOfOneBatch:
    """The second batch: outputs from offset 4 on, made of these new records and of older ones that had waited."""

    def ranges(self, chain: Chain) -> dict[str, list[OffsetRange]]:
        return {
            chain.new: [OffsetRange(0, 4, 7)],
            chain.invoices: [OffsetRange(0, 5, 6), OffsetRange(1, 5, 8)],
            chain.status: [OffsetRange(0, 3, 6)],
        }

    def test_it_passes_without_the_outputs_of_the_first(self, chain: Chain) -> None:
        state = state_of(chain)
        (Path(state.table.uri) / state.output_files(chain.new)[0].path).unlink()
        found = exactly_once_done_coverage(chain.pipeline, "Staging", self.ranges(chain))
        assert (found.passed, found.numbers["outputs"], found.numbers["sources"]) == (True, 3, 6)

    def test_it_passes_without_the_raw_files_of_other_records(self, chain: Chain) -> None:
        state = raw.open_raw(chain.pipeline.lake, "Raw", chain.status)
        assert state is not None
        early = [item for item in raw.raw_files(state) if (item.last or 0) < 3]
        for item in early:
            (Path(state.table.uri) / item.path).unlink()
        assert early
        assert exactly_once_done_coverage(chain.pipeline, "Staging", self.ranges(chain)).passed
        assert early[0].path in coverage(chain).summary

    def test_its_own_lost_output_is_found(self, chain: Chain) -> None:
        state = state_of(chain)
        exchange(state.table, state.output_files(chain.new)[1], lambda rows: rows[:-1])
        found = exactly_once_done_coverage(chain.pipeline, "Staging", self.ranges(chain))
        assert not found.passed
        assert "is done and made no output" in found.summary


class TestContiguousOutputOffsets:
    def test_a_sound_topic_passes(self, sound_chain: Chain) -> None:
        found = contiguous_output_offsets(sound_chain.pipeline, sound_chain.new)
        assert (found.passed, found.subject) == (True, f"Staging/{sound_chain.new}")
        assert found.numbers == {"files": 2, "records": 7}

    def test_a_lost_file(self, chain: Chain) -> None:
        state = state_of(chain)
        take_out(state.table, state.output_files(chain.new)[0])
        found = contiguous_output_offsets(chain.pipeline, chain.new)
        assert (found.passed, found.summary) == (False, "partition 0: outputs 0 to 3 are not there")

    def test_a_file_that_was_appended_twice(self, chain: Chain) -> None:
        state = state_of(chain)
        append_again(state.table, state.output_files(chain.new)[1])
        found = contiguous_output_offsets(chain.pipeline, chain.new)
        assert "partition 0: outputs 4 to 6 are there more than once" in found.summary

    def test_a_number_that_is_taken_twice(self, chain: Chain) -> None:
        state = state_of(chain)
        overwrite(state.table, state.output_files(chain.new)[0], lambda rows: [rows[0], rows[0], *rows[2:]])
        assert "row 1 has offset 0 in place of 1" in contiguous_output_offsets(chain.pipeline, chain.new).summary

    def test_rows_beyond_the_head(self, chain: Chain) -> None:
        state = state_of(chain)
        last = state.output_files(chain.new)[-1]
        exchange(state.table, last, lambda rows: [*rows, {**rows[-1], "kafka": {**rows[-1]["kafka"], "offset": 7}}])
        found = contiguous_output_offsets(chain.pipeline, chain.new)
        assert found.summary == "partition 0: outputs 7 to 7 are there more than once"

    def test_a_row_of_another_topic(self, chain: Chain) -> None:
        state = state_of(chain)
        overwrite(
            state.table,
            state.output_files(chain.new)[0],
            lambda rows: [{**row, "kafka": {**row["kafka"], "topic": "other"}} for row in rows],
        )
        assert "holds an output of another topic" in contiguous_output_offsets(chain.pipeline, chain.new).summary

    def test_rows_outside_of_the_ranges_are_not_read(self, chain: Chain) -> None:
        state = state_of(chain)
        overwrite(state.table, state.output_files(chain.new)[0], lambda rows: rows[::-1])
        assert contiguous_output_offsets(chain.pipeline, chain.new, [OffsetRange(0, 4, 7)]).passed
        assert not contiguous_output_offsets(chain.pipeline, chain.new, [OffsetRange(0, 0, 7)]).passed


def completed(rows: Rows) -> Rows:
    """The account's rows, and the entry that completes each record with a null key."""
    waiting = [row for row in rows if row["kind"] == "pending" and row["hash"] is None]
    return [*rows, *({**row, "kind": "completed", "rule": None} for row in waiting)]


class TestPendingAge:
    def test_the_oldest_and_the_null_key_are_reported(self, sound_chain: Chain) -> None:
        age = int(time.time()) - 1_700_000_000
        found = pending_age(sound_chain.pipeline, "Staging")
        assert (found.passed, found.severity) == (False, "warn")
        told = re.match(rf"{sound_chain.invoices} 0:4 has waited for (\d+) s, longer than 86400 s", found.summary)
        assert told is not None
        assert age - 1 <= int(told[1]) <= age + 60
        assert (found.numbers["pending"], found.numbers["null_keys"]) == (4, 1)
        assert found.numbers[f"pending_new-invoice_{sound_chain.invoices}"] == 4

    def test_a_young_one_is_no_matter(self, chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(output_checks, "MAX_AGE_SECONDS", time.time())
        change_account(state_of(chain), edit(lambda row: {**row, "hash": 1}, kind="pending", hash=None))
        assert pending_age(chain.pipeline, "Staging").passed

    def test_a_completed_record_and_a_held_one_have_no_null_key(self, chain: Chain) -> None:
        """A rule without a join key holds a record under no hash."""
        change_account(state_of(chain), edit(lambda row: {**row, "rule": "invoice-delete"}, kind="pending", hash=None))
        assert pending_age(chain.pipeline, "Staging").numbers["null_keys"] == 0
        change_account(state_of(chain), edit(lambda row: {**row, "rule": "new-invoice"}, rule="invoice-delete"))
        assert pending_age(chain.pipeline, "Staging").numbers["null_keys"] == 1
        change_account(state_of(chain), completed)
        assert pending_age(chain.pipeline, "Staging").numbers["null_keys"] == 0

    def test_a_null_key_waits_for_ever(self, sound_chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(output_checks, "MAX_AGE_SECONDS", time.time())
        found = pending_age(sound_chain.pipeline, "Staging")
        assert found.summary == "pending records with a null join key, which nothing will ever match: 1"


def test_records_that_wait_for_a_rule_that_is_gone_are_named(chain: Chain) -> None:
    """They are kept under the rule's name, so that another name never finds them."""
    pipeline = chain.pipeline
    renamed = tuple(replace(rule, name=f"{rule.name}-2") for rule in pipeline.rules)
    result = pending_age(replace(pipeline, rules=renamed), "Staging")
    assert not result.passed
    assert "which the pipeline file has no more" in result.summary


def send_late(it: Mini, lsn: int) -> None:
    """Records of both topics. Then more of them with the positions ``lsn``, which some of the records before come after."""
    for text, number in ("first", 1000), ("second", lsn):
        send(it, ("left", "u", 1, f"left {text}"), ("right", "u", 1, f"right {text}"), lsn=number)
        ingest(it)
        etl(it)


ADDS = "order: {by: value.source.lsn + 0, domain: shop}"


@pytest.mark.parametrize(
    ("order", "lsn", "words"),
    [
        ("", 1000, ["Set a longer order-delay in the pipeline file. Then"]),
        pytest.param("", 5, ["The log of the source began anew", "an order.by that adds"], marks=pytest.mark.slow),
        pytest.param(ADDS, 5, ["longer order-delay", "But if the log of the source"], marks=pytest.mark.slow),
    ],
)
def test_late_records_are_told_from_a_log_that_began_anew(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, order: str, lsn: int, words: list[str]
) -> None:
    """An expression does not show which of the two it is."""
    it = mini(services, spark, tmp_path, unique, SHOP.replace('sequence: string>"', f'sequence: string>", {order}'))
    send_late(it, lsn)
    found = source_order(it.pipeline, "Staging")
    assert not found.passed
    assert [word for word in words if word not in found.summary] == []
    assert ("began anew" in found.summary) == (lsn == 5)


@pytest.mark.slow
def test_positions_go_on_after_the_log_began_anew(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    """With the expression of the page, records of different topics are in their order again."""
    it = mini(services, spark, tmp_path, unique, SHOP)
    send_late(it, 5)
    accept_source_order(it.pipeline, "Staging")
    page = (ROOT / "demo" / "order.md").read_text()
    (by,) = [" ".join(found.split()) for found in re.findall(r"by: >-\n(.*?)```", page, re.DOTALL) if "lsn" in found]
    it = it.edited(
        SHOP.replace('sequence: string>"', f'sequence: string>", order: {{by: "{by}"}}').replace("$[", "$$[")
    )
    send(it, *((side, "u", 1, f"{side} {lsn}") for lsn in (10, 11, 12) for side in ("right", "left")), lsn=10)
    ingest(it)
    etl(it)
    made = [value["l"] or value["r"] for _, value in outputs(it)][-6:]
    assert made == [f"{side} {lsn}" for lsn in (10, 11, 12) for side in ("right", "left")]
    assert source_order(it.pipeline, "Staging").passed
