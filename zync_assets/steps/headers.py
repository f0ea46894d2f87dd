"""The headers of staged rows, as they are sent: those that the rule made, then where the record came from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from zync_assets.codecs.nested import list_of
from zync_assets.compute import pc
from zync_assets.pipeline import SOURCE_HEADER
from zync_assets.records import HEADERS_TYPE

_ENTRY = HEADERS_TYPE.value_type


def no_headers(count: int) -> pa.Array:
    return pa.nulls(count, HEADERS_TYPE)


def most_source_bytes(topics: Iterable[str]) -> int:
    """The most bytes that the header of one raw record takes. ``topics``: the possible topics of the record."""
    longest = max((len(topic) for topic in topics), default=0)
    # Two numbers, of 10 and of 19 digits, and the lengths of the header's name and value.
    return len(SOURCE_HEADER) + len('{"topic":"","partition":,"offset":}') + longest + 10 + 19 + 10


def sent_headers(own: pa.Array | None, source: pa.Array | None, count: int) -> pa.Array:
    """One array of HEADERS_TYPE, null where a row has no header.

    ``own``: the staging table's column; ``source``: the raw records (structs of topic, partition, offset) where each is
    to be a header: JSON, ``{"topic":"shop.orders","partition":0,"offset":7}``.
    """
    parts: list[tuple[np.ndarray, pa.Array]] = []
    if own is not None and own.null_count < count:
        parts.append((_lengths(own), own.flatten().cast(_ENTRY)))
    if source is not None:
        parts.append((_lengths(source), _entries(source.flatten())))
    if not parts:
        return no_headers(count)
    lengths = np.sum([part for part, _ in parts], axis=0)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    entries = pa.concat_arrays([part for _, part in parts])
    if len(parts) > 1:
        rows = np.concatenate([np.repeat(np.arange(count), part) for part, _ in parts])
        entries = entries.take(pa.array(np.argsort(rows, kind="stable")))
    return list_of(HEADERS_TYPE, offsets, entries, lengths > 0)


def _lengths(lists: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _entries(places: pa.StructArray) -> pa.Array:
    # A topic's name has no character that JSON would escape.
    topic, partition, offset = (
        pc.struct_field(places, name).cast(pa.string()) for name in ("topic", "partition", "offset")
    )
    texts = pc.binary_join_element_wise('{"topic":"', topic, '","partition":', partition, ',"offset":', offset, "}", "")
    return pa.StructArray.from_arrays(
        [pa.repeat(pa.scalar(SOURCE_HEADER), len(places)), texts.cast(pa.binary())], fields=list(_ENTRY)
    )


def differing(mine: pa.Array | pa.ChunkedArray, other: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A mask of the rows in which two columns of headers differ. No headers equal an empty list."""
    if mine.null_count == len(mine) and other.null_count == len(other):
        return np.zeros(len(mine), bool)
    pairs = zip(mine.to_pylist(), other.to_pylist(), strict=True)
    return np.fromiter(((one or None) != (two or None) for one, two in pairs), bool, len(mine))
