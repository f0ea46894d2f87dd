"""Raw tables: sound they pass; each kind of damage is found and named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from deltalake import write_deltalake

from zync_assets.checks.raw_checks import monotonic_offsets, no_unexplained_loss, quarantine_size, schema_change
from zync_assets.kafka.topics import create_topic, delete_topic, topic_state
from zync_assets.lake import quarantine_table, raw, storage
from zync_assets.lake.log import DataFile
from zync_assets.lake.raw import RawAdvance, RawState
from zync_assets.lake.raw_files import BAD_SCHEMA, RangeWriter, raw_schema
from zync_assets.lake.tables import open_table
from zync_assets.local.services import Services
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Input, Pipeline, SideFormat
from zync_assets_tests.checks.chain import Chain
from zync_assets_tests.checks.damage import append_again, exchange, overwrite, take_out
from zync_assets_tests.mini import send


def table_of(chain: Chain) -> tuple[RawState, list[DataFile]]:
    state = raw.open_raw(chain.pipeline.lake, "Raw", chain.invoices)
    assert state is not None
    return state, raw.raw_files(state)


class TestMonotonicOffsets:
    def test_a_sound_table_passes(self, sound_chain: Chain) -> None:
        found = monotonic_offsets(sound_chain.pipeline, sound_chain.invoices)
        assert (found.passed, found.severity, found.subject) == (True, "error", f"Raw/{sound_chain.invoices}")
        assert found.numbers == {"files": 4, "records": 13}

    def test_a_file_that_was_appended_twice(self, chain: Chain) -> None:
        state, files = table_of(chain)
        append_again(state.table, files[2])
        found = monotonic_offsets(chain.pipeline, chain.invoices)
        assert not found.passed
        assert "of partition 1 overlap at offset 0" in found.summary

    def test_rows_out_of_order(self, chain: Chain) -> None:
        state, files = table_of(chain)
        overwrite(state.table, files[0], lambda rows: [rows[0], rows[2], rows[1], *rows[3:]])
        found = monotonic_offsets(chain.pipeline, chain.invoices)
        assert "offset 1 follows 2 in row 2" in found.summary

    def test_a_row_that_the_log_does_not_know(self, chain: Chain) -> None:
        state, files = table_of(chain)
        overwrite(state.table, files[1], lambda rows: rows[:0])
        found = monotonic_offsets(chain.pipeline, chain.invoices)
        assert "holds 0 records" in found.summary
        assert "the log says 1 from 5 to 5" in found.summary

    def test_a_record_of_another_partition(self, chain: Chain) -> None:
        state, files = table_of(chain)
        overwrite(
            state.table, files[0], lambda rows: [{**row, "kafka": {**row["kafka"], "partition": 7}} for row in rows]
        )
        assert "holds a record of partition 7" in monotonic_offsets(chain.pipeline, chain.invoices).summary

    def test_a_file_that_is_gone(self, chain: Chain) -> None:
        state, files = table_of(chain)
        (Path(state.table.uri) / files[3].path).unlink()
        assert (
            "is in the log and not in the lake. Restore it from a copy."
            in monotonic_offsets(chain.pipeline, chain.invoices).summary
        )

    def test_a_file_that_is_no_parquet(self, chain: Chain) -> None:
        state, files = table_of(chain)
        (Path(state.table.uri) / files[3].path).write_bytes(b"PAR1 and nothing else PAR1")
        assert "can't be read" in monotonic_offsets(chain.pipeline, chain.invoices).summary

    def test_records_that_were_never_ingested(self, chain: Chain) -> None:
        state, files = table_of(chain)
        exchange(state.table, files[1], lambda rows: [{**row, "kafka": {**row["kafka"], "offset": 6}} for row in rows])
        found = monotonic_offsets(chain.pipeline, chain.invoices)
        assert "holds offsets 6 to 6 of partition 0, of which 0 to 5 were ingested" in found.summary

    def test_a_file_of_another_program(self, chain: Chain) -> None:
        state, _ = table_of(chain)
        rows = pa.table({"key": ["x"]}, schema=pa.schema([state.schema.field("key")]))
        write_deltalake(state.table.uri, rows, mode="append", schema_mode="merge")
        assert "carries no offsets in the log" in monotonic_offsets(chain.pipeline, chain.invoices).summary

    def test_rows_outside_of_the_ranges_are_not_read(self, chain: Chain) -> None:
        state, files = table_of(chain)
        overwrite(state.table, files[0], lambda rows: rows[::-1])
        ranges = [OffsetRange(0, 5, 6), OffsetRange(1, 0, 8)]
        found = monotonic_offsets(chain.pipeline, chain.invoices, ranges)
        assert found.passed
        assert found.numbers["files"] == 3
        assert not monotonic_offsets(chain.pipeline, chain.invoices, [OffsetRange(0, 2, 3)]).passed


class TestNoUnexplainedLoss:
    def test_a_sound_table_passes(self, sound_chain: Chain) -> None:
        found = no_unexplained_loss(sound_chain.pipeline, sound_chain.invoices)
        assert found.passed
        assert found.numbers == {
            "compared": 14,
            "missing": 0,
            "doubled": 0,
            "gone_from_kafka": 0,
            "quarantined": 1,
        }

    def test_a_lost_record_is_named(self, chain: Chain) -> None:
        state, files = table_of(chain)
        exchange(state.table, files[0], lambda rows: [row for row in rows if row["kafka"]["offset"] != 3])
        found = no_unexplained_loss(chain.pipeline, chain.invoices)
        assert not found.passed
        assert found.summary == (
            f"the record at offset 3 in partition 0 of topic {chain.invoices} is in Kafka and not in the lake"
        )
        assert found.numbers["missing"] == 1

    def test_a_lost_file(self, chain: Chain) -> None:
        state, files = table_of(chain)
        take_out(state.table, files[2])
        found = no_unexplained_loss(chain.pipeline, chain.invoices)
        assert "offset 0 in partition 1" in found.summary
        assert found.numbers["missing"] == 4

    def test_a_file_that_was_appended_twice(self, chain: Chain) -> None:
        state, files = table_of(chain)
        append_again(state.table, files[2])
        found = no_unexplained_loss(chain.pipeline, chain.invoices)
        assert "is in the lake twice" in found.summary
        assert found.numbers["doubled"] == 4

    def test_a_lost_quarantine(self, chain: Chain) -> None:
        opened = open_table(storage.quarantine_uri(chain.pipeline.lake, "Raw", chain.invoices))
        assert opened is not None
        state, _ = table_of(chain)
        [item] = quarantine_table.quarantine_files(state, opened)
        take_out(opened, item)
        found = no_unexplained_loss(chain.pipeline, chain.invoices)
        assert "partition 1: 1 quarantined entries were counted and 0 are there" in found.summary
        assert (found.numbers["missing"], found.numbers["problems"]) == (1, 2)

    def test_only_the_ranges_are_compared(self, chain: Chain) -> None:
        state, files = table_of(chain)
        take_out(state.table, files[2])
        assert no_unexplained_loss(chain.pipeline, chain.invoices, [OffsetRange(0, 0, 1_000_000)]).passed
        found = no_unexplained_loss(chain.pipeline, chain.invoices, [OffsetRange(1, 1, 2)])
        assert (found.passed, found.numbers["compared"]) == (False, 1)


@pytest.fixture
def plain(services: Services, unique: str, tmp_path: Path) -> Pipeline:
    """A topic of ten records of its own, and no table yet."""
    kafka = {"bootstrap.servers": services.bootstrap_servers}
    text = SideFormat("string")
    pipeline = Pipeline(
        "plain", tmp_path, kafka, None, str(tmp_path / "lake"), {}, (Input(unique, "Raw", text, text),), (), ()
    )
    create_topic(kafka, unique, 1, 1, {})
    send(pipeline, unique, [(None, b"v%d" % number) for number in range(10)])
    return pipeline


def ingest_by_hand(pipeline: Pipeline, offsets: list[int], lost: OffsetRange | None = None) -> str:
    """A raw table with these offsets of the topic, and an accepted loss."""
    [item] = pipeline.inputs
    topic, lake = item.topic, pipeline.lake
    place = {"topic": topic, "partition": 0, "time": 0}
    rows = [{"kafka": {**place, "offset": offset}} for offset in offsets]
    with RangeWriter(storage.raw_uri(lake, "Raw", topic), 0) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, schema=raw_schema(pa.string(), pa.string())))
    if lost is not None:
        entry = {"kafka": {**place, "offset": lost.first}, "stage": "lost", "end": lost.end}
        with RangeWriter(storage.quarantine_uri(lake, "Raw", topic), 0, quarantine_table.file_name(7)) as side:
            side.write(pa.RecordBatch.from_pylist([entry], schema=BAD_SCHEMA))
        quarantine_table.add(lake, "Raw", topic, None, [found for found, _ in side.files], lambda: None)
    schema = raw_schema(pa.string(), pa.string())
    topic_id = topic_state(pipeline.kafka, topic).topic_id
    bad = {0: 1 if lost else 0}
    files = [found for found, _ in writer.files]
    advance = RawAdvance(topic, topic_id, schema, files, {0: 0}, {0: 10}, bad=bad, attempts={0: 7})
    raw.commit_advance(storage.raw_uri(lake, "Raw", topic), None, advance)
    return topic


class TestNoUnexplainedLossOfOneTopic:
    def test_what_retention_took_later_is_not_compared(self, plain: Pipeline) -> None:
        topic = ingest_by_hand(plain, list(range(10)))
        admin = AdminClient(dict(plain.kafka))
        for future in admin.delete_records([TopicPartition(topic, 0, 4)]).values():
            future.result()
        found = no_unexplained_loss(plain, topic)
        assert (found.passed, found.numbers["compared"]) == (True, 6)

    def test_an_accepted_loss_is_explained(self, plain: Pipeline) -> None:
        topic = ingest_by_hand(plain, [0, 1, 2, 5, 6, 7, 8, 9], OffsetRange(0, 3, 5))
        assert no_unexplained_loss(plain, topic).passed
        found = quarantine_size(plain, topic)
        assert not found.passed
        assert found.summary == "retention removed 0:3-4 before they were ingested"
        assert found.numbers["lost_offsets"] == 2

    def test_a_loss_beyond_the_accepted_one_is_not(self, plain: Pipeline) -> None:
        topic = ingest_by_hand(plain, [0, 1, 2, 6, 7, 8, 9], OffsetRange(0, 3, 5))
        assert "offset 5 in partition 0" in no_unexplained_loss(plain, topic).summary

    def test_a_topic_that_was_created_again(self, plain: Pipeline) -> None:
        topic = ingest_by_hand(plain, list(range(10)))
        delete_topic(plain.kafka, topic)
        create_topic(plain.kafka, topic, 1, 1, {})
        found = no_unexplained_loss(plain, topic)
        assert not found.passed
        assert "was deleted and created again" in found.summary

    def test_before_the_first_ingest_there_is_nothing_to_say(self, plain: Pipeline) -> None:
        topic = plain.inputs[0].topic
        for check in (monotonic_offsets, no_unexplained_loss, schema_change, quarantine_size):
            found = check(plain, topic)
            assert (found.passed, found.summary) == (True, "nothing ingested yet")


class TestWarnings:
    def test_a_second_writer_schema(self, sound_chain: Chain) -> None:
        found = schema_change(sound_chain.pipeline, sound_chain.status)
        assert (found.passed, found.severity) == (False, "warn")
        assert found.summary.startswith("values came with 2 writer schemas: ids ")
        ids = {name: number for name, number in found.numbers.items() if name.startswith("value_schema_")}
        assert sorted(ids.values()) == [2, 4]
        assert schema_change(sound_chain.pipeline, sound_chain.invoices).passed

    def test_a_schema_change_outside_of_the_ranges(self, sound_chain: Chain) -> None:
        assert schema_change(sound_chain.pipeline, sound_chain.status, [OffsetRange(0, 0, 3)]).passed

    def test_what_is_in_quarantine(self, sound_chain: Chain) -> None:
        found = quarantine_size(sound_chain.pipeline, sound_chain.invoices)
        assert (found.passed, found.severity, found.numbers["quarantined"]) == (False, "warn", 1)
        assert found.summary.startswith("1 record could not be decoded, the first at 1:2: ")
        assert found.summary.endswith(f"Correct the cause, then: {sound_chain.pipeline.command('quarantine replay')}")
        assert quarantine_size(sound_chain.pipeline, sound_chain.invoices, [OffsetRange(0, 0, 6)]).passed
        assert quarantine_size(sound_chain.pipeline, sound_chain.status).passed
