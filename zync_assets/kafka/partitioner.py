"""The partition of a record by its key, as the default partitioner of Kafka's Java client chooses it.

The hash is ``org.apache.kafka.common.utils.Utils.murmur2``. The partition is the hash without its sign bit, modulo the number
of partitions (``BuiltInPartitioner.partitionForKey``). The Java client gives a record without a key any partition. Here such
a record goes to partition 0.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_SEED, _M = 0x9747B28C, np.uint32(0x5BD1E995)
_FEW = 16
"""Keys that are so few are hashed one by one, because a step over arrays has a price of its own."""


def key_partitions(keys: pa.Array, count: int) -> np.ndarray:
    """The partition of each key (binary), of ``count`` partitions."""
    if count == 1:
        return np.zeros(len(keys), np.int32)
    partitions = (murmur2(keys) & np.uint32(0x7FFFFFFF)) % np.uint32(count)
    if keys.null_count:
        partitions[keys.is_null().to_numpy(zero_copy_only=False)] = 0
    return partitions.astype(np.int32)


def murmur2(keys: pa.Array) -> np.ndarray:
    """The hash of each key (binary) as an unsigned number. A null has the hash of an empty key."""
    keys = keys.fill_null(b"")
    offsets = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1, keys.offset * 4).astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    data = keys.buffers()[2]
    # Three more bytes, so that a word begins at every byte.
    content = np.zeros((0 if data is None else data.size) + 3, np.uint8)
    if data is not None:
        content[:-3] = np.frombuffer(data, np.uint8)
    words = np.ndarray((len(content) - 3,), "<u4", content, 0, (1,))
    # The longest keys first: those with words left are always the first ones.
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    hashes = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    blocks = lengths // 4
    place, active = 0, len(keys)
    with np.errstate(over="ignore"):
        while active := int(np.searchsorted(-blocks[:active], -place, side="left")):
            if active <= _FEW:
                for at in range(active):
                    hashes[at] = _hash_words(
                        int(hashes[at]), words[starts[at] + 4 * place : starts[at] + 4 * blocks[at] : 4]
                    )
                break
            hashes[:active] = _mix_words(hashes[:active], words[starts[:active] + 4 * place])
            place += 1
        tail_sizes = lengths % 4
        tails = np.flatnonzero(tail_sizes)
        last = words[starts[tails] + 4 * blocks[tails]]
        # The bytes after the key are not of the key.
        hashes[tails] = (
            hashes[tails] ^ (last & ((np.uint32(1) << (8 * tail_sizes[tails]).astype(np.uint32)) - 1))
        ) * _M
        hashes = (hashes ^ (hashes >> np.uint32(13))) * _M
        hashes ^= hashes >> np.uint32(15)
    result = np.empty_like(hashes)
    result[order] = hashes
    return result


def _mix_words(hashes: np.ndarray, words: np.ndarray) -> np.ndarray:
    words = words * _M
    return (hashes * _M) ^ ((words ^ (words >> np.uint32(24))) * _M)


def _hash_words(key_hash: int, words: np.ndarray) -> int:
    """The hash of one key after the rest of its words."""
    products = words * _M
    for word in ((products ^ (products >> np.uint32(24))) * _M).tolist():
        key_hash = (key_hash * 0x5BD1E995 & 0xFFFFFFFF) ^ word
    return key_hash
