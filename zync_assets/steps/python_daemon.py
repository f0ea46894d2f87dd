"""Spark's Python daemon with what our tasks import: the workers that it forks have it from the start, and share its memory.

``python -m pyspark.daemon`` forks workers that import the same half a second each, again after each failed task and after a
minute without one. This is run in its place, as ``spark.python.daemon.module``, and then does what it does.

A fork takes one thread along, so that nothing here may start another: imports alone, and those of ``MODULES``.
"""

from __future__ import annotations

import importlib
import os

QUIET = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "_RJEM_MALLOC_CONF": "background_thread:false",
}
"""What keeps numpy's BLAS and the allocators of pyarrow and deltalake from a thread of their own as soon as they are loaded.
A forked worker would be without it in any case, and we ask for no linear algebra."""

MODULES = (
    "zync_assets.steps.ingest_files",
    "zync_assets.steps.publish",
    "zync_assets.steps.replay_task",
    "zync_assets.steps.shaping_task",
    "zync_assets.steps.staged_outputs",
)
"""Those that tasks run in, with all that they import. Not numba, which small work does without: see ``compiled``."""


def load() -> None:
    """Import what tasks need."""
    os.environ.update(QUIET)
    for name in MODULES:
        importlib.import_module(name)
    import pyarrow as pa

    from zync_assets.steps.tasks import settle

    # pyarrow looks for pandas, and loads it, when it is first given a list.
    pa.array([0])
    # What is there by now is no garbage: a worker that looked at it would have a copy of its own.
    settle()


if __name__ == "__main__":
    load()
    from pyspark.daemon import manager

    manager()
