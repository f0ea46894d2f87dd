"""Restore: archived records, from a raw table or from objects, back into a topic.

Partition p of the archive becomes partition p of the topic, in the archive's order. The protocol is that of publishing:

    1. A run announces each window in the lake before it sends the window's first record.
    2. After an unclean stop, it waits until the topic holds the window, or has stood still for ``settle``.
    3. It compares what is in the topic with the archive, record by record, and goes on where the topic ends.

Timestamps, headers and keys stay as they were. Bytes and texts are the originals. Columns of Avro are encoded again with the
schemas of their writers, and other columns as JSON. JSON lines keep bytes, texts and Avro; of other columns they do not keep
the types.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from zync_assets.codecs.arrays import pc, with_type
from zync_assets.codecs.avro.schema import parse, with_digests
from zync_assets.codecs.avro.types import lake_type
from zync_assets.codecs.dispatch import has_fields, make_encoder, narrowed
from zync_assets.codecs.fields import topic_type_of
from zync_assets.crashes import crash_point
from zync_assets.errors import DataLoss, ForeignRecord, KafkaError, LakeError, SchemaError
from zync_assets.kafka.reader import read_range
from zync_assets.kafka.registry import Registry
from zync_assets.kafka.topics import create_topic, high_watermark, refuse_broker_times, topic_states
from zync_assets.kafka.writers import TimedRecord, TimedWriter
from zync_assets.lake import archive, raw, storage, stores
from zync_assets.lake import archive_objects as objects
from zync_assets.lake.publication import (
    PublishState,
    commit_publish_state,
    commit_publish_states,
    open_publish_state,
    open_published,
    publish_state,
)
from zync_assets.pipeline import LakeUri, Pipeline
from zync_assets.publish.plan import settling_highs

WINDOW_RECORDS = 50_000
WINDOW_BYTES = 32 << 20
CONFIG = {"retention.ms": "-1", "message.timestamp.type": "CreateTime"}
"""The configuration of a topic that a restore makes: Kafka would delete records with old timestamps soon."""

Encode = Callable[[str, pa.Array, int | None], pa.Array]
"""A side, its values and the id of their writer's schema → the bytes."""


@dataclass(frozen=True)
class Restored:
    """The result for one partition. ``verified``: the number of records that an earlier run sent; ``sent``: by this run."""

    topic: str
    partition: int
    verified: int
    sent: int


@dataclass(frozen=True)
class Archive:
    """The source of archived records. ``name``: an archive has the same name in every restore. ``open``: partition → batches in
    order, with ``kafka``, ``key`` and ``value``. Each batch has a flag: its keys and values are JSON texts, of an object of
    JSON lines. ``note``: why the archive may lack objects; empty if it is complete."""

    name: str
    topic: str
    partitions: tuple[int, ...]
    open: Callable[[int], Iterator[tuple[pa.RecordBatch, bool]]]
    note: str = ""
    digests: Mapping[int, int] = field(default_factory=dict[int, int])
    """Registry id → the digest of its schema when a record with the id was archived, where it is known."""


def open_archive(pipeline: Pipeline, source: str, since: int | None = None, until: int | None = None) -> Archive:
    """The archive of ``Raw.Topic`` or ``files:URL/topic``. LakeError if there is none, or if an object of the times is lost."""
    if source.startswith("files:"):
        return _open_objects(source, since, until)
    pool, _, topic = source.partition(".")
    state = raw.open_raw(pipeline.lake, pool, topic)
    if state is None:
        raise LakeError(
            f"--from {source}: there is no such raw table. Write Pool.Topic of an input, or files:URL/topic."
        )
    parts = tuple(sorted(state.next))
    return Archive(
        source,
        topic,
        parts,
        lambda partition: ((batch, False) for batch in _raw_batches(state, partition)),
        digests=state.digests,
    )


def _open_objects(source: str, since: int | None, until: int | None) -> Archive:
    url, _, query = source.removeprefix("files:").partition("?")
    root, _, topic = url.rpartition("/")
    if not root or not topic or "/" in query:
        raise LakeError(f"--from {source}: write files:URL/topic. Put a query such as ?format=jsonl after the topic.")
    # The same folder is the same archive, wherever a restore is run.
    in_store = storage.is_store(root)
    root = LakeUri(root, stores.with_environment(root, {}, os.environ)) if in_store else str(Path(root).absolute())
    is_whole = objects.refuse_losses(root, topic, since, until)
    items = archive.list_objects(root, topic)
    if not items:
        raise LakeError(f"--from {source}: there is no object of {topic} in {root}. Correct the URL.")
    if any(item.time == archive.UNTIMED for item in items):
        raise LakeError(f"--from {source}: only objects of raw tables are restored, and these are of a staging pool.")
    for before, item in pairwise(items):
        if item.partition == before.partition and item.first <= before.last:
            raise LakeError(
                f"archive {root}: {before.path} and {item.path} both hold offset {item.first}. Wait for a sink that is at work,"
                " or remove one of the two."
            )
    return Archive(
        f"files:{root}/{topic}",
        topic,
        tuple(sorted({item.partition for item in items})),
        lambda partition: chain.from_iterable(
            _object_batches(root, item) for item in items if item.partition == partition
        ),
        "" if is_whole else objects.gap_note(root, objects.within(items, since, until)),
    )


def _object_batches(root: str, item: archive.ArchiveObject) -> Iterator[tuple[pa.RecordBatch, bool]]:
    as_json = item.suffix == archive.SUFFIXES[archive.JSON_LINES]
    read = objects.line_batches(objects.read_lines(root, item)) if as_json else objects.read_object(root, item)
    yield from ((batch, as_json) for batch in read)


def _raw_batches(state: raw.RawState, partition: int) -> Iterator[pa.RecordBatch]:
    """The records of a raw table's partition by offset. What replays brought lies between the others."""
    files = [item for item in raw.raw_files(state) if item.partition == partition]
    plain = chain.from_iterable(_file_batches(state, item.path) for item in files if not raw.is_replay(item))
    replays = [_file_batches(state, item.path) for item in files if raw.is_replay(item)]
    if not replays:
        yield from plain
        return
    rows = [_single_rows(batches) for batches in (plain, *replays)]
    for _, _, row in heapq.merge(*rows, key=lambda item: item[:2]):
        yield row


def _single_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    for batch in batches:
        for at, offset in enumerate(pc.struct_field(batch.column("kafka"), "offset").to_pylist()):
            yield offset, at, batch.slice(at, 1)


def _file_batches(state: raw.RawState, path: str) -> Iterator[pa.RecordBatch]:
    return storage.read_parts(storage.join(state.table.uri, path), 10_000)


def restore(
    pipeline: Pipeline,
    source: str,
    topic: str,
    since: int | None = None,
    until: int | None = None,
    say: Callable[[str], None] = lambda note: None,
) -> Iterator[Restored]:
    """Publish the records of an archive with ``since <= time < until`` (microseconds since the epoch) to a topic.

    Makes the topic if it is missing. ``say`` gets a note if the archive may lack objects.

    LakeError: the archive lost an object. KafkaError: the topic has other records. ForeignRecord, DataLoss: the topic changed in
    the meantime. SchemaError: a record can't be encoded.
    """
    source_archive = open_archive(pipeline, source, since, until)
    if source_archive.note:
        say(source_archive.note)
    states = topic_states(pipeline.kafka, [topic])
    count = max(source_archive.partitions, default=0) + 1
    state = states.get(topic) or create_topic(pipeline.kafka, topic, count, -1, CONFIG)
    refuse_broker_times(pipeline.kafka, topic)
    if len(state.partitions) < count:
        raise KafkaError(
            f"topic {topic} has {len(state.partitions)} partitions, and {source} has {count}. Add partitions."
        )
    digest = blake2b("\0".join((source_archive.name, str(since), str(until))).encode(), digest_size=6).hexdigest()
    encode, encode_lines = _encoders(pipeline, source_archive)
    pool = f"~restore-{digest}"
    places = {number: _Place(pipeline, pool, topic, state.topic_id, number) for number in source_archive.partitions}
    if not open_publish_state(pipeline.lake, pool, topic).belongs_to(state.topic_id):
        # Nothing was sent to this topic yet. An earlier run may have sent all to an earlier topic of the name.
        for place in places.values():
            place.refuse_records()
        opened = open_published(pipeline.lake, pool)
        before = [publish_state(opened, topic, partition) for partition in places]
        commit_publish_states(pipeline.lake, pool, before, dict.fromkeys(places, (0, 0)), state.topic_id)
    for partition, place in places.items():
        yield place.restore(
            lambda partition=partition: chain.from_iterable(
                _records(batch, since, until, encode_lines if as_json else encode)
                for batch, as_json in source_archive.open(partition)
            )
        )


@dataclass(frozen=True)
class _Place:
    """A partition that records are restored to. ``pool``: the name of the restore in the lake."""

    pipeline: Pipeline
    pool: str
    topic: str
    topic_id: str
    partition: int

    def restore(self, records: Callable[[], Iterator[TimedRecord]]) -> Restored:
        # 1. Nothing else is in the topic, or what an earlier run sent.
        state = open_publish_state(self.pipeline.lake, self.pool, self.topic, self.partition)
        if state.window is None:
            self.refuse_records()
            state = self._commit(state, 0, 0)
        high = self._high()
        # 2. After an unclean stop, a crashed producer's records can still surface. Compare what there is.
        verified_end = state.verified_end or 0
        if state.window != verified_end:
            windows, highs = {self.partition: state.window or 0}, {self.partition: high}
            *_, highs = settling_highs(self.pipeline, self.topic, windows, highs)
            high = highs[self.partition]
        if high < verified_end:
            raise DataLoss(
                f"{self} ends at offset {high}, and held {verified_end}: it lost records. Restore into a new topic."
            )
        if high > verified_end or state.window != verified_end:
            self._compare(islice(records(), verified_end, None), verified_end, high)
            state = self._commit(state, high, high)
        # 3. Send the rest window by window. The last record that was sent shows whether the archive still has as many records
        #    before the rest: a replay adds records, and retention removes some.
        sent_count, record_iterator = 0, records()
        if high:
            last = list(islice(record_iterator, high - 1, high))
            self._compare(iter(last), max(high - 1, min(self._low(), high)), high)
        with TimedWriter(self.pipeline.kafka, self.topic, self.partition, high) as writer:
            for window in _windows(record_iterator):
                writer.check_records(window)
                state = self._commit(state, writer.sent + len(window), writer.confirmed)
                crash_point("restore:announced")
                writer.write(window)
                crash_point("restore:sent")
                sent_count += len(window)
            if sent_count:
                self._commit(state, writer.confirmed, writer.confirmed)
        return Restored(self.topic, self.partition, high, sent_count)

    def refuse_records(self) -> None:
        """KafkaError if the partition holds records, none of which this restore has sent."""
        if high := self._high():
            raise KafkaError(
                f"{self} holds records up to offset {high - 1} that this restore did not send. Restore into a new topic."
            )

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"

    def _high(self) -> int:
        return high_watermark(self.pipeline.kafka, self.topic, self.partition)

    def _low(self) -> int:
        """The first offset that the topic still has."""
        parts = topic_states(self.pipeline.kafka, [self.topic])[self.topic].partitions
        return next((part.low for part in parts if part.partition == self.partition), 0)

    def _commit(self, state: PublishState, window: int, verified_end: int) -> PublishState:
        return commit_publish_state(
            self.pipeline.lake, self.pool, state, window=window, verified_end=verified_end, topic_id=self.topic_id
        )

    def _compare(self, archive_records: Iterator[TimedRecord], first: int, end: int) -> None:
        next_offset = first
        for batch in read_range(self.pipeline.kafka, self.topic, self.partition, first, end, uncommitted=True):
            for row in batch.to_pylist():
                record = next(archive_records, None)
                if record is None or row["offset"] != next_offset or not _is_same(record, row):
                    raise ForeignRecord(
                        f"{self} holds another record at offset {next_offset} than the archive. Another producer wrote to"
                        f" {self.topic}, or the archive changed. Restore into a new topic."
                    )
                next_offset += 1
        if next_offset != end:
            raise ForeignRecord(f"{self} lacks a record at offset {next_offset}. Restore into a new topic.")


def _is_same(record: TimedRecord, row: Mapping[str, Any]) -> bool:
    headers = tuple((item["key"], item["value"]) for item in row["headers"] or ())
    times = (None, row["timestamp"])
    content = row["key"], row["value"], headers
    return (record.key, record.value, record.headers) == content and record.timestamp in times


def _records(batch: pa.RecordBatch, since: int | None, until: int | None, encode: Encode) -> Iterator[TimedRecord]:
    times = pc.struct_field(batch.column("kafka"), "time").cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    first = 0 if since is None else int(times.searchsorted(since))
    end = len(times) if until is None else int(times.searchsorted(until))
    if first >= end:
        return
    part = batch.slice(first, end - first)
    kafka = part.column("kafka")
    stamps = pc.struct_field(kafka, "timestamp").cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    headers = pc.struct_field(kafka, "headers").to_pylist()
    sides = [_payloads(part, side, encode) for side in ("key", "value")]
    for stamp, pairs, key, value in zip(stamps, headers, *sides, strict=True):
        yield TimedRecord(
            # librdkafka takes 0 for the present.
            None if stamp is None else max(stamp // 1000, 1),
            tuple((item["key"], item["value"]) for item in pairs or ()),
            key,
            value,
        )


def _payloads(part: pa.RecordBatch, side: str, encode: Encode) -> list[bytes | None]:
    """The bytes of one side, group by group of its writers' schemas."""
    if side not in part.schema.names:
        return [None] * part.num_rows
    values, ids = part.column(side), _schema_ids(part, side)
    payloads: list[bytes | None] = [None] * part.num_rows
    for schema_id in pc.unique(ids).to_pylist():
        mask = pc.is_null(ids) if schema_id is None else pc.equal(ids, schema_id)
        places = pc.indices_nonzero(pc.fill_null(mask, False))
        group_values = encode(side, values.take(places), schema_id).to_pylist()
        for place, payload in zip(places.to_pylist(), group_values, strict=True):
            payloads[place] = payload
    return payloads


def _schema_ids(part: pa.RecordBatch, side: str) -> pa.Array:
    name, kafka = f"{side}_schema_id", part.column("kafka")
    if name in part.schema.names:
        return part.column(name)
    return pc.struct_field(kafka, name) if kafka.type.get_field_index(name) >= 0 else pa.nulls(len(kafka), pa.int32())


def _encoders(pipeline: Pipeline, source_archive: Archive) -> tuple[Encode, Encode]:
    """How the columns of a side become bytes, and how its JSON texts do."""
    topic = source_archive.topic
    registry = Registry(pipeline.registry) if pipeline.registry else None
    item = next((item for item in pipeline.inputs if item.topic == topic), None)
    state = None if item is None else raw.open_raw(pipeline.lake, item.pool, topic)
    columns = {} if state is None else {column.name: column.type for column in state.schema}

    @cache
    def schema_of(schema_id: int) -> str:
        if registry is None:
            raise SchemaError(f"topic {topic} has Avro, and the pipeline has no registry. Add registry: url.")
        try:
            return with_digests(registry.schema, source_archive.digests)(schema_id)
        except SchemaError as error:
            raise SchemaError(f"topic {topic}, schema id {schema_id}: {error}. Nothing more was sent.") from None

    def encode(side: str, values: pa.Array, schema_id: int | None) -> pa.Array:
        if values.null_count == len(values):
            return pa.nulls(len(values), pa.binary())
        form = getattr(item, side, None)
        if schema_id is None and form is not None and form.format == "connect-json":
            raise SchemaError(
                f"topic {topic}: connect-json is not restored, as its schemas are not kept. Restore an archive of bytes."
            )
        # A text or bytes that a schema gave to JSON are the content of a payload, and not the payload.
        is_content = form is not None and form.format == "json" and form.ddl is not None
        if schema_id is None and not is_content and _is_payload(values.type):
            return values.cast(pa.binary())
        if schema_id is None:
            encoder, values = make_encoder("json", None, None), with_type(values, topic_type_of(values.type))
        else:
            encoder = make_encoder("avro", schema_of(schema_id), schema_id)
            kind, label = lake_type(parse(schema_of(schema_id))), f"topic {topic}, {side}"
            try:
                values = _with_fields(narrowed(values, kind, columns.get(side, values.type)), kind, label)
            except pa.ArrowInvalid as error:
                raise SchemaError(
                    f"{label}: a value is none of the writer's schema id {schema_id}: {error}. Nothing more was sent."
                ) from None
        result = encoder.encode(values)
        if result.bad:
            raise SchemaError(f"topic {topic}, {side}: {result.bad[0].error}. Nothing more was sent.")
        return result.payloads

    def encode_lines(side: str, texts: pa.Array, schema_id: int | None) -> pa.Array:
        values = [None if text is None else json.loads(text) for text in texts.to_pylist()]
        if schema_id is not None:
            kind = lake_type(parse(schema_of(schema_id)))
            try:
                return encode(side, pa.array([objects.typed_value(value, kind) for value in values], kind), schema_id)
            except KeyError as error:
                raise SchemaError(_MISSING.format(where=f"topic {topic}, {side}", field=f"the field {error}")) from None
        if any(not isinstance(value, str | None) and not _is_bytes(value) for value in values):
            raise SchemaError(
                f"topic {topic}, {side}: JSON lines do not keep the types of columns. Restore an archive in Parquet."
            )
        kind = pa.string() if any(isinstance(value, str) for value in values) else pa.binary()
        return encode(side, pa.array([objects.typed_value(value, kind) for value in values], kind), None)

    return encode, encode_lines


_MISSING = (
    "{where}: the archive lacks {field} of the writer's schema, so that the record would lose it. Restore an archive of format"
    " bytes."
)


def _is_payload(kind: pa.DataType) -> bool:
    kinds = pa.types
    return kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_string(kind)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"base64"}


def _with_fields(values: pa.Array, target: pa.DataType, label: str) -> pa.Array:
    """The values, under the names of the lake or of the topic: those that a schema has. SchemaError if a field is missing: an
    encoder would write a null."""
    for kind in (values.type, topic_type_of(values.type)):
        if has_fields(kind, target):
            return with_type(values, kind)
    raise SchemaError(_MISSING.format(where=label, field="a field"))


def _windows(records: Iterator[TimedRecord]) -> Generator[list[TimedRecord]]:
    window: list[TimedRecord] = []
    size = 0
    for record in records:
        window.append(record)
        size += record.most
        if len(window) >= WINDOW_RECORDS or size >= WINDOW_BYTES:
            yield window
            window, size = [], 0
    if window:
        yield window
