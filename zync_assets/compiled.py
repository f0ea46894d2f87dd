"""When loops that numba compiles take the place of numpy's and of the Kafka client's.

To load numba and what it has compiled takes a process half a second, which is what is saved by a million records. So a
process begins without, and one that handles few records ends without.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

ENOUGH = 500_000
"""Records of a process from which on it pays."""

_CURE = "set NUMBA_CACHE_DIR to a folder that can be written to"

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
    if (problem := obstacle()) is None:
        import numba

        try:
            numba.njit(cache=True)(_nothing)
        except RuntimeError as error:
            problem = f"{error}; {_CURE}"
    if problem is not None:
        log.warning("records are read without compiled loops, more slowly: %s", problem)
    return problem is None


def obstacle() -> str | None:
    """Why numba can keep no compiled code, and the cure; None if it can. Loads nothing."""
    own = os.environ.get("NUMBA_CACHE_DIR")
    folders = [Path(own)] if own else [Path(__file__).parent, Path.home() / ".cache"]
    if any(_existing(folder).is_dir() and os.access(_existing(folder), os.W_OK) for folder in folders):
        return None
    return f"numba can write its compiled code to none of {', '.join(map(str, folders))}; {_CURE}"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def _nothing() -> None: ...
