"""The progress of publish for a staging pool, in a table without rows. Delta ``txn`` actions hold the values.

    zync:window:<topic>:<partition>      the end of the last window that a publisher announced
    zync:verified:<topic>:<partition>    below this offset Kafka's records equal staging's
    zync:topic:<topic>:<topic id>        the topic that is published to (its version says nothing)
    zync:named:<topic>                   1 once such an id is known
    zync:schema:<topic>:<side>:<id>:<digest>  records were announced whose keys or values have this schema under this id of
                                         the registry (its version says nothing)

A publisher announces a window before it sends the window's first record. If the window's end is past the verified offset, a
publisher stopped uncleanly, and its records may still surface in the topic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import pyarrow as pa

from zync_assets.errors import LakeError
from zync_assets.lake import storage, tables
from zync_assets.lake.log import LakeTable

_SCHEMA = pa.schema([("topic", pa.string())])


@dataclass(frozen=True)
class WrittenSchema:
    """A schema of the keys or the values (``side``) of an output, and the id that the registry had for it. A registry that
    was created anew may have another id for the schema, and another schema under the id."""

    side: str
    id: int
    schema: str


@dataclass(frozen=True)
class PublishState:
    """How far one output partition has been published."""

    table: LakeTable | None = field(repr=False)
    topic: str
    partition: int
    window: int | None
    verified_end: int | None

    def has_topic(self) -> bool:
        return self.table is not None and self.table.number(f"zync:named:{self.topic}") is not None

    def belongs_to(self, topic_id: str) -> bool:
        return self.table is not None and self.table.number(f"zync:topic:{self.topic}:{topic_id}") == 0

    def has_schema(self, schema: WrittenSchema) -> bool:
        """Whether records were announced that have this schema under this id."""
        return self.table is not None and self.table.number(_schema_number(self.topic, schema)) is not None


def open_publish_state(lake: str, pool: str, topic: str, partition: int = 0) -> PublishState:
    """How far an output partition has been published; all None where nothing was."""
    return publish_state(tables.open_table(storage.publish_uri(lake, pool)), topic, partition)


def publish_state(table: LakeTable | None, topic: str, partition: int = 0) -> PublishState:
    """How far an output partition has been published, by the table of its pool."""
    if table is None:
        return PublishState(None, topic, partition, None, None)
    place = f"{topic}:{partition}"
    return PublishState(
        table, topic, partition, table.number(f"zync:window:{place}"), table.number(f"zync:verified:{place}")
    )


def verified_ends(lake: str, pool: str, topics: Iterable[str]) -> dict[str, int]:
    """Published output topic → its verified offset. Below this offset, Kafka's records equal staging's."""
    table = tables.open_table(storage.publish_uri(lake, pool))
    offsets = {topic: table.number(f"zync:verified:{topic}:0") for topic in topics} if table else {}
    return {topic: offset for topic, offset in offsets.items() if offset is not None}


def rollback_error(pool: str, topic: str, verified_end: int | None, end: int | None, recreate: str) -> LakeError | None:
    """The error for a staging table that lacks published records; None if no published record is missing.

    ``verified_end``: the offset below which Kafka's records equal staging's; ``end``: the offset after the last staged record,
    None if staging has no such output; ``recreate``: the command that publishes all of staging again.
    """
    if not verified_end or (end is not None and end >= verified_end):
        return None
    has = "is not there" if end is None else f"ends at offset {end}"
    otherwise = (
        "to begin anew, give its inputs another pool, and the output another staging pool and another topic."
        if end is None
        else f"to go on from what staging holds, publish all of it anew: {recreate}"
    )
    return LakeError(
        f"pool {pool}: {topic} was published up to offset {verified_end}, and the staging table {has}: it went back to an older"
        f" version, or is gone. Nothing was done. Put the newer table back; or, {otherwise}"
    )


def commit_publish_state(
    lake: str,
    pool: str,
    before: PublishState,
    *,
    window: int,
    verified_end: int,
    topic_id: str,
    replacement: bool = False,
    schemas: Iterable[WrittenSchema] = (),
) -> PublishState:
    """Set an output's window and verified offset, and the topic that they are for; returns the new state.

    ``replacement``: the topic was created anew on purpose; ``schemas``: those of the records up to ``window``.
    Raises CommitConflict if another publisher of the topic committed since ``before`` was opened.
    """
    place = f"{before.topic}:{before.partition}"
    numbers = {f"zync:window:{place}": window, f"zync:verified:{place}": verified_end}
    if replacement or not before.belongs_to(topic_id):
        numbers |= {f"zync:topic:{before.topic}:{topic_id}": 0, f"zync:named:{before.topic}": 1}
    numbers |= {_schema_number(before.topic, schema): 0 for schema in schemas if not before.has_schema(schema)}
    if before.table is None:
        tables.create_table(storage.publish_uri(lake, pool), _SCHEMA, f"What is published of {pool}", [], numbers)
    else:
        tables.commit(before.table, [], numbers)
    return open_publish_state(lake, pool, before.topic, before.partition)


def _schema_number(topic: str, schema: WrittenSchema) -> str:
    digest = blake2b(schema.schema.encode(), digest_size=8).hexdigest()
    return f"zync:schema:{topic}:{schema.side}:{schema.id}:{digest}"
