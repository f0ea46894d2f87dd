"""When loops that numba compiles take the place of numpy's and of the Kafka client's.

To load numba and what it has compiled takes a process half a second, which is what is saved by a million records. So a
process begins without, and one that handles few records ends without.
"""

from __future__ import annotations

from functools import cache

ENOUGH = 500_000
"""Records of a process from which on it pays."""

_handled = 0


def pays(records: int) -> bool:
    """Whether compiled code pays for ``records`` more records, in addition to the records that this process has handled."""
    global _handled
    _handled += records
    return ready()


def ready() -> bool:
    """Whether compiled code pays now."""
    return _handled >= ENOUGH and _possible()


@cache
def _possible() -> bool:
    """numba keeps what it compiled beside the code or in the user's cache, and refuses where it can write to neither."""
    import numba

    try:
        numba.njit(cache=True)(_nothing)
    except RuntimeError:
        return False
    return True


def _nothing() -> None: ...
