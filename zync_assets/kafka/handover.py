"""Records handed to librdkafka straight from Arrow's memory, by librdkafka's own ``rd_kafka_produce_batch``.

confluent-kafka's ``produce_batch`` takes a dict a record, and its reports take Python's lock a record: together that costs
more than librdkafka's own work. Here a record costs Python nothing, and none is reported but through the producer's fatal
error: who wants reports sends some of the records by ``Producer.produce``, which keeps the order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, Producer

from zync_assets.kafka.librdkafka import LIBRARY, MESSAGE, MESSAGE_SIZE, handle_of

_COPY = 0x2
"""RD_KAFKA_MSG_F_COPY: librdkafka copies the value; it always copies the key."""

_MESSAGE = np.dtype(
    {
        "names": list(MESSAGE),
        "formats": [kind for kind, _ in MESSAGE.values()],
        "offsets": [place for _, place in MESSAGE.values()],
        "itemsize": MESSAGE_SIZE,
    }
)
"""A message in librdkafka's memory layout. Fields that are not named here stay zero."""


class Handover:
    """Hands the records of one partition over to a producer. The producer must outlive this object."""

    def __init__(self, producer: Producer, topic: str, partition: int) -> None:
        self._handle = handle_of(producer)
        self._topic = topic.encode()
        self._partition = partition

    @property
    def possible(self) -> bool:
        """Whether librdkafka's functions are at hand. Otherwise the caller sends each record with ``Producer.produce``."""
        return self._handle is not None

    def hand_over(self, records: pa.RecordBatch) -> KafkaError | None:
        """Queue the records (columns ``key`` and ``value``, binary) in order. Returns the error of the first refused record."""
        assert LIBRARY is not None
        messages = np.zeros(len(records), _MESSAGE)
        messages["partition"] = self._partition
        # The columns must live until librdkafka has copied their bytes.
        columns = {name: records[name].cast(pa.binary()) for name in ("key", "value")}
        for name, column in columns.items():
            messages[name], messages[f"{name}_size"] = _places(column)
        topic = LIBRARY.rd_kafka_topic_new(self._handle, self._topic, None)
        try:
            LIBRARY.rd_kafka_produce_batch(topic, self._partition, _COPY, messages.ctypes.data, len(messages))
        finally:
            LIBRARY.rd_kafka_topic_destroy(topic)
        refused = np.flatnonzero(messages["err"])
        return KafkaError(int(messages["err"][refused[0]])) if len(refused) else None


def _places(column: pa.Array) -> tuple[Any, Any]:
    """Addresses and sizes of the values of a binary column; the address of a null is 0, that of an empty value is not."""
    _, starts, data = column.buffers()
    ends = np.frombuffer(starts, np.int32, len(column) + 1, column.offset * 4).astype(np.uint64)
    base = starts.address if data is None or not data.address else data.address
    addresses, sizes = ends[:-1] + np.uint64(base), np.diff(ends)
    if column.null_count:
        there = column.is_valid().to_numpy(zero_copy_only=False)
        addresses, sizes = addresses * there, sizes * there
    return addresses, sizes
