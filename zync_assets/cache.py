"""A cache of a bounded size, for processes that live for months."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values that were used last. The weights of all values add up to ``most`` at the most, or there is one value."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        with self._lock:
            self._remove(key)
            self._values[key] = value, weight
            self._weight += weight
            while self._weight > self._most and len(self._values) > 1:
                self._remove(next(iter(self._values)))

    def remove(self, key: K) -> None:
        with self._lock:
            self._remove(key)

    def _remove(self, key: K) -> None:
        if key in self._values:
            self._weight -= self._values.pop(key)[1]
