"""Archived records come back into a topic as they were, once, wherever the restore is killed."""

from __future__ import annotations

import json
import shutil
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from zync_assets.cli.main import main
from zync_assets.errors import ForeignRecord, KafkaError, LakeError, SchemaError
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, delete_topic, high_watermark, topic_states
from zync_assets.lake import raw_files
from zync_assets.lake.raw import RawAdvance, commit_advance
from zync_assets.lake.storage import raw_uri
from zync_assets.local.services import Services
from zync_assets.publish import restore as restorer
from zync_assets.publish.restore import restore
from zync_assets.sinks.steps import sink_all
from zync_assets_tests.lake import rows
from zync_assets_tests.mini import Mini, die, framed, make_pipeline, mini, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = """
inputs:
  - {topic: $left, pool: Raw, format: bytes}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v string"}
sinks:
  - {name: keep, type: files, url: archive, from: [Raw.*]}
  - {name: lines, type: files, url: "lines?format=jsonl", from: [Raw.*]}
"""
TIME = 1_790_000_000_000
archived = restorer._records  # pyright: ignore[reportPrivateUsage]
POINTS = ("restore:announced", "restore:sent")
"""The crash points of a restore."""


def records(it: Mini, topic: str, partition: int) -> list[tuple[Any, ...]]:
    """Timestamp, headers, key and value of each record."""
    end = high_watermark(it.pipeline.kafka, topic, partition)
    names = ("timestamp", "headers", "key", "value")
    return [
        tuple(row[name] or (None if name == "headers" else row[name]) for name in names)
        for batch in read_range(it.pipeline.kafka, topic, partition, 0, end)
        for row in batch.to_pylist()
    ]


def filled(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Mini:
    it = mini(services, spark, tmp_path, unique, PIPELINE, partitions=2)
    rows = [(None, None), (b"", b""), *((b"k%d" % (at % 7), b"\x00\xff%d" % at) for at in range(200))]
    times = [TIME + at * 1000 for at in range(len(rows))]
    it.send(it.left, *rows[:100], times=times[:100], headers=[("h", b"\xfe"), ("n", None)])
    it.send(it.left, *rows[100:], times=times[100:])
    it.send(it.left, (b"p", b"q"), partition=1, times=[TIME + 5000])
    it.send(it.right, {"id": 1, "v": "ö"}, None, {"id": 2, "v": None}, times=[TIME] * 3)
    it.ingest()
    return it


@pytest.mark.slow
def test_records_come_back_as_they_were(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = filled(services, spark, tmp_path, unique)
    copy = f"{unique}.copy"
    done = list(restore(it.pipeline, f"Raw.{it.left}", copy))
    assert [(item.partition, item.verified, item.sent) for item in done] == [(0, 0, 202), (1, 0, 1)]
    for partition in (0, 1):
        assert records(it, copy, partition) == records(it, it.left, partition)
    # A second run sends nothing; a further one goes on with what has come since.
    assert [item.sent for item in restore(it.pipeline, f"Raw.{it.left}", copy)] == [0, 0]
    it.send(it.left, (b"more", b"m"), times=[TIME + 900_000])
    it.ingest()
    assert [item.sent for item in restore(it.pipeline, f"Raw.{it.left}", copy)] == [1, 0]
    assert records(it, copy, 0) == records(it, it.left, 0)

    # Retention, or a replay, changed the number of records before the rest.
    it.send(it.left, (b"last", b"l"), times=[TIME + 901_000])
    it.ingest()
    with monkeypatch.context() as patch:
        patch.setattr(restorer, "_records", lambda *given: islice(archived(*given), 1, None))
        with pytest.raises(ForeignRecord, match=f"{copy}/0 holds another record at offset 202.*the archive changed"):
            list(restore(it.pipeline, f"Raw.{it.left}", copy))
    assert [item.sent for item in restore(it.pipeline, f"Raw.{it.left}", copy)] == [1, 0]

    # Objects, and a part of the time. Typed values are JSON again.
    list(sink_all(it.pipeline, lambda: spark))
    archive = f"files:{tmp_path}/archive/{it.left}"
    part = list(restore(it.pipeline, archive, f"{unique}.part", (TIME + 10_000) * 1000, (TIME + 20_000) * 1000))
    assert [item.sent for item in part] == [10, 0]
    assert records(it, f"{unique}.part", 0) == records(it, it.left, 0)[10:20]
    list(restore(it.pipeline, f"files:{tmp_path}/archive/{it.right}", f"{unique}.json"))
    again, before = records(it, f"{unique}.json", 0), records(it, it.right, 0)
    assert [row[:3] for row in again] == [row[:3] for row in before]
    assert [row[3] and json.loads(row[3]) for row in again] == [row[3] and json.loads(row[3]) for row in before]

    # JSON lines keep bytes and texts.
    lines = f"files:{tmp_path}/lines"
    list(restore(it.pipeline, f"{lines}/{it.left}", f"{unique}.lines"))
    assert [records(it, f"{unique}.lines", number) for number in (0, 1)] == [
        records(it, it.left, number) for number in (0, 1)
    ]
    with pytest.raises(SchemaError, match="JSON lines do not keep the types of columns"):
        list(restore(it.pipeline, f"{lines}/{it.right}", f"{unique}.typed"))

    # Another program's records are found, and nothing follows them.
    with pytest.raises(KafkaError, match="that this restore did not send"):
        list(restore(it.pipeline, archive, copy))
    with pytest.raises(LakeError, match="there is no such raw table"):
        list(restore(it.pipeline, "Raw.nothing", copy))
    it.send(copy, (b"foreign", b"x"), times=[TIME])
    with pytest.raises(ForeignRecord, match=f"{copy}/0 holds another record at offset 204"):
        list(restore(it.pipeline, f"Raw.{it.left}", copy))


def test_a_topic_that_was_deleted_gets_all_partitions_again(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PIPELINE, partitions=2)
    for partition in (0, 1):
        it.send(it.left, *((b"k", b"%d" % number) for number in range(5)), partition=partition, times=[TIME] * 5)
    it.ingest(it.left)
    copy = f"{unique}.copy"
    for _ in range(2):
        done = list(restore(it.pipeline, f"Raw.{it.left}", copy))
        assert [(item.partition, item.verified, item.sent) for item in done] == [(0, 0, 5), (1, 0, 5)]
        delete_topic(it.pipeline.kafka, copy)
    # Another program's records in one partition: nothing is sent to the others.
    create_topic(it.pipeline.kafka, copy, 2, 1, {})
    it.send(copy, (b"foreign", b"x"), partition=1, times=[TIME])
    with pytest.raises(KafkaError, match=f"{copy}/1 holds records up to offset 0 that this restore did not send"):
        list(restore(it.pipeline, f"Raw.{it.left}", copy))
    assert high_watermark(it.pipeline.kafka, copy, 0) == 0


AVRO = """
inputs: [{topic: $left, pool: Raw, format: avro}, {topic: $right, pool: Raw, key-format: bytes, value-format: connect-json}]
sinks: [{name: lines, type: files, url: "lines?format=jsonl", from: [Raw.$left]}]
"""


def test_avro_is_encoded_again_with_the_schemas_of_its_writers(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, AVRO)
    assert it.pipeline.registry is not None
    registry, rows = Registry(it.pipeline.registry), list[tuple[bytes | None, bytes | None]]()
    narrow = [{"name": "id", "type": "long"}, {"name": "v", "type": ["null", "string"], "default": None}]
    wide = [*narrow, {"name": "more", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}}]
    key = {"type": "record", "name": "k", "fields": narrow[:1]}
    for fields in (narrow, wide, narrow):
        schema = {"type": "record", "name": "r", "fields": fields}
        for number in range(3):
            row = {"id": number, "v": chr(97 + number) if number else None, "more": Decimal(number).scaleb(-2)}
            sides = [(key, f"{it.left}-key"), (schema, f"{it.left}-value")]
            rows.append(
                tuple(framed(registry.register(subject, json.dumps(kind)), kind, row) for kind, subject in sides)
            )  # pyright: ignore
    it.send(it.left, *rows, (rows[0][0], None), times=[TIME] * 10)
    document = {"schema": {"type": "struct", "fields": [{"field": "a", "type": "int32"}]}, "payload": {"a": 1}}
    it.send(it.right, (b"k", document), times=[TIME])
    it.ingest()
    assert [item.sent for item in restore(it.pipeline, f"Raw.{it.left}", f"{unique}.copy")] == [10]
    assert records(it, f"{unique}.copy", 0) == records(it, it.left, 0)
    list(sink_all(it.pipeline, lambda: spark))
    assert [item.sent for item in restore(it.pipeline, f"files:{tmp_path}/lines/{it.left}", f"{unique}.lines")] == [10]
    assert records(it, f"{unique}.lines", 0) == records(it, it.left, 0)
    with pytest.raises(SchemaError, match="connect-json is not restored"):
        list(restore(it.pipeline, f"Raw.{it.right}", f"{unique}.connect"))


WIDER = """
inputs: [{topic: $left, pool: Raw, key-format: bytes, value-format: avro}, {topic: $right, pool: Raw, format: bytes}]
sinks:
  - {name: keep, type: files, url: archive, from: [Raw.$left]}
  - {name: lines, type: files, url: "lines?format=jsonl", from: [Raw.$left]}
"""


@pytest.mark.parametrize("source", ["Raw.{}", "files:{folder}/archive/{}", "files:{folder}/lines/{}"])
def test_values_of_a_wider_column_are_those_of_their_writers(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str, source: str
) -> None:
    """Columns have the types and units of the first schema, which has room for the values of the second."""
    it = mini(services, spark, tmp_path, unique, WIDER)
    assert it.pipeline.registry is not None
    registry = Registry(it.pipeline.registry)
    time = {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp", "connect.version": 1}
    coarse_time = {**time, "connect.name": "io.debezium.time.Timestamp"}
    number = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
    rows: list[tuple[bytes, bytes]] = []
    for place, (moment, real, exact, value) in enumerate(
        ((time, "double", number, Decimal("1.25")), (coarse_time, "long", "int", 7))
    ):
        inner = {"type": "record", "name": "i", "fields": [{"name": "at", "type": ["null", moment]}]}
        kinds = {"at": moment, "d": ["null", real], "n": exact, "l": {"type": "array", "items": inner}}
        fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
        # JSON lines have the names of the columns alone.
        name = "new" if place and "lines" not in source else "old"
        fields.append({"name": name, "type": "string", "aliases": ["old"] * place})
        schema = {"type": "record", "name": "r", "fields": fields}
        row = {"at": 5_001, "d": None, "n": value, "l": [{"at": None}, {"at": -5_001}]}
        row[name] = "text"
        schema_id = registry.register(f"{it.left}-{place}", json.dumps(schema))
        for real_value in (None, 7):
            rows.append((b"k", framed(schema_id, schema, {**row, "d": real_value})))
    it.send(it.left, *rows, times=[TIME] * 4)
    it.ingest(it.left)
    list(sink_all(it.pipeline, lambda: spark))
    list(restore(it.pipeline, source.format(it.left, folder=tmp_path), f"{unique}.copy"))
    assert records(it, f"{unique}.copy", 0) == records(it, it.left, 0)


TEXTS = """
inputs:
  - {topic: $left, pool: Raw, key-format: json, key-schema: string, value-format: json, schema: binary}
  - {topic: $right, pool: Raw, format: connect-json}
sinks:
  - {name: keep, type: files, url: archive, from: [Raw.*]}
  - {name: lines, type: files, url: "lines?format=jsonl", from: [Raw.*]}
"""


def test_texts_of_json_and_connect_are_not_taken_for_payloads(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, TEXTS, partitions=2)
    it.send(it.left, (b'"k\xc3\xb6"', b'"AAEC"'), (None, None), (b'"1"', None), times=[TIME] * 3)
    it.send(it.left, (b'"other"', b'"AA=="'), partition=1, times=[TIME])
    text = b'{"schema": {"type": "string"}, "payload": "t"}'
    it.send(it.right, (text, text), times=[TIME])
    it.ingest()
    list(sink_all(it.pipeline, lambda: spark))
    for number, source in enumerate(("Raw.{}", f"files:{tmp_path}/archive/{{}}", f"files:{tmp_path}/lines/{{}}")):
        copy = f"{unique}.copy{number}"
        list(restore(it.pipeline, source.format(it.left), copy))
        assert [records(it, copy, at) for at in (0, 1)] == [records(it, it.left, at) for at in (0, 1)]
        with pytest.raises(SchemaError, match="connect-json is not restored"):
            list(restore(it.pipeline, source.format(it.right), f"{unique}.connect{number}"))
    # A topic that would lose the timestamps gets no record.
    stamped = create_topic(it.pipeline.kafka, f"{unique}.stamped", 2, 1, {"message.timestamp.type": "LogAppendTime"})
    with pytest.raises(KafkaError, match=r"stamped has message.timestamp.type=LogAppendTime: .* Set CreateTime"):
        list(restore(it.pipeline, f"Raw.{it.left}", stamped.topic))
    assert [part.end for part in topic_states(it.pipeline.kafka, [stamped.topic])[stamped.topic].partitions] == [0, 0]
    # An archive whose format was changed has objects of both.
    for folder, kept in (("archive", "0"), ("lines", "1")):
        for item in (tmp_path / folder / it.left).glob(f"*/{kept}/*"):
            place = tmp_path / "both" / item.relative_to(tmp_path / folder)
            place.parent.mkdir(parents=True)
            place.write_bytes(item.read_bytes())
    list(restore(it.pipeline, f"files:{tmp_path}/both/{it.left}", f"{unique}.both"))
    assert [records(it, f"{unique}.both", at) for at in (0, 1)] == [records(it, it.left, at) for at in (0, 1)]


def test_an_archive_that_lost_an_object_is_refused_before_a_topic_is_made(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = mini(services, spark, tmp_path, unique, PIPELINE.replace("Raw.*", "Raw.$left"))
    for hour in range(3):
        it.send(it.left, (b"k", b"%d" % hour), times=[TIME + hour * 3_600_000])
    it.ingest()
    list(sink_all(it.pipeline, lambda: spark))
    first, lost, last = sorted((tmp_path / "archive" / it.left).glob("*/0/*"))
    lost.unlink()

    def zync(folder: str) -> Result:
        words = (
            "restore",
            str(it.pipeline.path),
            "--from",
            f"files:{tmp_path}/{folder}/{it.left}",
            "--to",
            f"{unique}.copy",
        )
        return CliRunner().invoke(main, words)

    result = zync("archive")
    assert result.exit_code == 1
    assert f"a sink made {lost.relative_to(tmp_path / 'archive')}, which is gone." in result.stderr
    assert topic_states(it.pipeline.kafka, [f"{unique}.copy"]) == {}
    # Without `_zync/`, nobody can tell.
    shutil.copytree(tmp_path / "archive" / it.left, tmp_path / "copy" / it.left)
    result = zync("copy")
    assert result.exit_code == 0
    names = [str(item.relative_to(tmp_path / "archive")) for item in (first, last)]
    assert f"offsets are missing between {' and '.join(names)}. Kafka may never" in result.stderr
    assert [row[3] for row in records(it, f"{unique}.copy", 0)] == [b"0", b"2"]


def test_the_first_millisecond_of_1970_is_not_taken_for_the_present() -> None:
    micros = pa.array([None, 0, 999, 1000, 2_000_000], pa.timestamp("us", "UTC"))
    columns = [micros, micros.fill_null(0), pa.nulls(5, raw_files.HEADERS_TYPE)]
    kafka = pa.StructArray.from_arrays(columns, ["timestamp", "time", "headers"])
    batch = pa.RecordBatch.from_arrays([kafka], ["kafka"])
    made = archived(batch, None, None, lambda side, values, schema_id: values)
    # librdkafka takes 0 for the present.
    assert [record.timestamp for record in made] == [None, 1, 1, 1, 2000]


def test_an_archive_of_objects_has_one_name_and_each_record_once(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline(services, tmp_path, "inputs: [{topic: t, pool: Raw, format: bytes}]")
    folder = tmp_path / "archive" / "t" / "2026-11-23T03-00" / "0"
    folder.mkdir(parents=True)
    for name in ("0-9", "10-19", "10-29"):
        (folder / f"{name}.parquet").touch()
    monkeypatch.chdir(tmp_path)
    found = restorer.open_archive(pipeline, "files:archive/t?format=parquet")
    assert found.name == f"files:{tmp_path}/archive/t"
    assert found.name == restorer.open_archive(pipeline, f"files:{tmp_path}/archive/t").name
    for source in ("files:t", "files:archive?format=parquet/t", "files:archive/"):
        with pytest.raises(
            LakeError, match=r"write files:URL/topic. Put a query such as \?format=jsonl after the topic"
        ):
            restorer.open_archive(pipeline, source)
    (folder / "25-39.parquet").touch()
    with pytest.raises(LakeError, match=r"0/10-29.parquet and .*0/25-39.parquet both hold offset 25"):
        restorer.open_archive(pipeline, "files:archive/t")


def test_a_file_of_a_raw_table_that_is_damaged_is_named(services: Services, tmp_path: Path) -> None:
    pipeline = make_pipeline(services, tmp_path, "inputs: [{topic: t, pool: Raw, format: bytes}]")
    uri = raw_uri(pipeline.lake, "Raw", "t")
    part = rows.file(uri, rows.records([0]))
    commit_advance(uri, None, RawAdvance("t", "id", rows.SCHEMA, [part], {0: 0}, {0: 1}))
    Path(uri, part.path).write_bytes(b"PAR1")
    with pytest.raises(LakeError, match=f"{part.path} can't be read: "):
        list(restorer.open_archive(pipeline, "Raw.t").open(0))


@pytest.mark.slow
def test_a_killed_restore_goes_on_where_it_stopped(
    services: Services, spark: SparkSession, tmp_path: Path, unique: str
) -> None:
    it = filled(services, spark, tmp_path, unique)
    copy = f"{unique}.copy"
    small = "from zync_assets.publish import restore; restore.WINDOW_RECORDS = 30"
    words = "restore", "--from", f"Raw.{it.left}", "--to", copy
    for number, point in enumerate([*POINTS, *POINTS]):
        die(it.pipeline, f"{point}@{number // 2 + 1}", *words, first=small)
    run(it.pipeline, *words, first=small)
    for partition in (0, 1):
        assert records(it, copy, partition) == records(it, it.left, partition)
