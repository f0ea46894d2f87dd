"""The results of converting a batch: a column, and the records that could not be converted."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from zync_assets.codecs.schema_diff import Arrival


@dataclass(frozen=True)
class BadRecord:
    """A record that could not be converted. ``index`` is its place in the array that was given."""

    index: int
    error: str


@dataclass(frozen=True)
class Decoded:
    """A decoded batch of payloads.

    ``values``: as long as the input, of the decoder's type; null for a null or bad payload.
    ``schema_ids``: int32; null for a null payload, and for a payload without a schema id.
    ``bad``: ascending by index, at most one entry per index. ``arrivals``: new writer schemas.
    """

    values: pa.Array
    schema_ids: pa.Array
    bad: tuple[BadRecord, ...]
    arrivals: tuple[Arrival, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A batch as payloads.

    ``payloads``: binary, as long as the input; null where the value is null (a tombstone) or bad.
    ``bad``: ascending by index, at most one an index.
    """

    payloads: pa.Array
    bad: tuple[BadRecord, ...]


def bad_records(errors: dict[int, str]) -> tuple[BadRecord, ...]:
    """The errors by index, in order."""
    return tuple(BadRecord(index, errors[index]) for index in sorted(errors))
