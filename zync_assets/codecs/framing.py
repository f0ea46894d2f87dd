"""Confluent's wire format: a 0, the schema's id in four bytes (big-endian), then Avro's bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.nested import Mask

HEADER = 5
PADDING = 32
"""Zeros after a batch's last byte, so that whole words can be read at any place in it."""


@dataclass(frozen=True)
class Framed:
    """A batch of payloads taken apart: all their bytes (and padding), and where in them each datum starts and ends.

    ``ids`` are schema ids. ``there``: the payload is not null and has a header; ``error``: what is wrong, by index.
    """

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    there: Mask
    errors: dict[int, str]


def unframe(payloads: pa.Array) -> Framed:
    """The header of each payload, checked. ``payloads``: binary or large binary, nulls and slices allowed."""
    count = len(payloads)
    wide = pa.types.is_large_binary(payloads.type)
    _, offset_buffer, data_buffer = payloads.buffers()
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.zeros(0, np.uint8)
    kind = np.dtype(np.int64 if wide else np.int32)
    offsets = np.frombuffer(offset_buffer, kind, count + 1, payloads.offset * kind.itemsize).astype(np.int64)
    base, last = int(offsets[0]), int(offsets[-1])
    offsets -= base
    starts, ends = offsets[:-1], offsets[1:]
    given = payloads.is_valid().to_numpy(zero_copy_only=False)
    long_enough = ends - starts >= HEADER
    padded = np.zeros(last - base + PADDING, np.uint8)
    padded[: last - base] = data[base:last]
    magic = padded[starts] == 0
    words = np.ndarray((len(padded) - 3,), dtype=">i4", buffer=padded.data, strides=(1,))
    ids = words[starts + 1].astype(np.int32)
    there = given & long_enough & magic
    errors = {
        int(index): _error(bool(long_enough[index]), int(ends[index] - starts[index]), int(padded[starts[index]]))
        for index in np.flatnonzero(given & ~there)
    }
    return Framed(padded, starts + HEADER, ends, ids, there, errors)


def _error(long_enough: bool, length: int, first: int) -> str:
    if not long_enough:
        return f"{length} bytes are too short for Avro with a schema id (5 bytes and the datum)"
    return f"no Avro with a schema id: the first byte is {first}, not 0"


def header(schema_id: int) -> bytes:
    """The five bytes before a datum."""
    return b"\0" + schema_id.to_bytes(4, "big")
