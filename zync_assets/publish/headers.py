"""The headers of a record as Kafka is to hold them: those that the rule made, then the places of the raw records."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import list_of, pc
from zync_assets.lake.raw_files import HEADERS_TYPE
from zync_assets.pipeline import SOURCE_HEADER

MOST_SOURCES = 1000
"""The most raw records that the headers of a record name. A broker takes no record above ``max.message.bytes``, 1 MB."""

_ENTRY = HEADERS_TYPE.value_type


def sent_headers(headers: pa.Array | None, source: pa.Array | None, count: int) -> pa.Array:
    """One array of HEADERS_TYPE, null where a row has no header.

    ``headers``: the staging table's column; ``source``: the raw records (structs of topic, partition, offset) where each is
    to be a header: JSON, ``{"topic":"shop.orders","partition":0,"offset":7}``. A row of more raw records than MOST_SOURCES has
    the last of them, and before them a header with the number of the others, ``{"more":9000}``.
    """
    parts: list[tuple[np.ndarray, pa.Array]] = []
    if headers is not None and headers.null_count < count:
        parts.append((_lengths(headers), headers.flatten().cast(_ENTRY)))
    if source is not None:
        parts.append(_source_entries(source))
    if not parts:
        return pa.nulls(count, HEADERS_TYPE)
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


def _source_entries(source: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """The number of headers of each row, and the headers of all rows."""
    lengths, places = _lengths(source), source.flatten()
    # A topic's name has no character that JSON would escape.
    topic, partition, offset = (
        pc.struct_field(places, name).cast(pa.string()) for name in ("topic", "partition", "offset")
    )
    texts = pc.binary_join_element_wise('{"topic":"', topic, '","partition":', partition, ',"offset":', offset, "}", "")
    if (lengths > MOST_SOURCES).any():
        over = np.maximum(lengths - MOST_SOURCES, 0)
        at = np.arange(len(places)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # The last of the raw records that are left out gives its place to their number.
        is_last, is_kept = at == np.repeat(over, lengths) - 1, at >= np.repeat(over, lengths) - 1
        counts = pc.binary_join_element_wise('{"more":', pa.array(np.repeat(over, lengths)).cast(pa.string()), "}", "")
        texts = pc.if_else(pa.array(is_last), counts, texts).filter(pa.array(is_kept))
        lengths = lengths - np.maximum(over - 1, 0)
    name = pa.repeat(pa.scalar(SOURCE_HEADER), len(texts))
    return lengths, pa.StructArray.from_arrays([name, texts.cast(pa.binary())], fields=list(_ENTRY))


def most_source_bytes(topics: Iterable[str]) -> int:
    """The most bytes that the header of one raw record takes. ``topics``: the possible topics of the record."""
    longest = max((len(topic) for topic in topics), default=0)
    # Two numbers, of 10 and of 19 digits, and the lengths of the header's name and value.
    return len(SOURCE_HEADER) + len('{"topic":"","partition":,"offset":}') + longest + 10 + 19 + 10
