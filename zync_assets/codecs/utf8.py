"""Text whose bytes are not UTF-8.

Spark casts binary to a string without a look at the bytes, and Arrow and Parquet carry the bytes on. Readers of the lake and
of Kafka stop at such text.
"""

from __future__ import annotations

import pyarrow as pa

from zync_assets.codecs.nested import isolate


def text_errors(array: pa.Array) -> dict[int, str]:
    """Index → what is wrong, of the values that hold text which is not UTF-8, at any depth."""
    _, errors = isolate(array, _validated, pa.ArrowInvalid)
    return {index: "text that is not UTF-8" if "UTF8" in error else error for index, error in errors.items()}


def _validated(array: pa.Array) -> pa.Array:
    array.validate(full=True)
    return array
