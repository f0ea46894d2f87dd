"""Parts of a batch, decoded apart by their writers' schemas, put together again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zync_assets.codecs.merge import conform
from zync_assets.codecs.nested import isolate, validity_buffer

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """The good records of one writer schema: their indices in the batch and, as many, their values."""

    rows: Ints
    values: pa.Array


def assemble(type: pa.DataType, groups: list[Group], count: int, errors: dict[int, str]) -> pa.Array:
    """The groups' values at their places, as the column's type; those that don't fit it are null and in ``errors``."""
    parts: list[pa.Array] = []
    place = np.full(count, -1, dtype=np.int64)
    done = 0
    for group in groups:
        if pa.types.is_null(type):
            continue
        values, unfit = isolate(group.values, lambda part: conform(part, type), ValueError)
        for index, error in unfit.items():
            errors[int(group.rows[index])] = f"does not fit the lake's column: {error}"
        place[group.rows] = np.arange(done, done + len(values))
        place[[int(group.rows[index]) for index in unfit]] = -1
        parts.append(values)
        done += len(values)
    if not parts:
        return pa.nulls(count, type)
    if len(parts) == 1 and done == count and bool((place == np.arange(count)).all()):
        return parts[0]
    indices = pa.Array.from_buffers(pa.int64(), count, [validity_buffer(place >= 0), pa.py_buffer(place)])
    return pa.concat_arrays(parts).take(indices)
