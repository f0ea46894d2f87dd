"""Spark's Python daemon, with the tasks' modules imported. The forked workers share the modules' memory.

``python -m pyspark.daemon`` forks workers that each spend half a second on the same imports. New workers start after a
failed task and after a minute without a task. Spark runs this module instead (``spark.python.daemon.module``). This module
imports ``MODULES`` and then runs PySpark's daemon.

A fork copies only one thread. No import here, and no module of ``MODULES``, may start a thread.
"""

from __future__ import annotations

import importlib
import os
import signal

QUIET = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "_RJEM_MALLOC_CONF": "background_thread:false",
}
"""Variables that stop numpy's BLAS and the allocators of pyarrow and deltalake from starting threads at import. A forked
worker would lack the threads, and no task needs linear algebra."""

MODULES = (
    "zync_assets.ingest.task",
    "zync_assets.publish.commit",
    "zync_assets.etl.output_files",
)
"""The modules of the tasks of ingest, ETL and publish. A replay is rare, and its tasks import their module themselves. Numba is
not imported here, because small tasks run without it: see ``codecs.arrays``."""


def load() -> None:
    """Import the tasks' modules."""
    os.environ.update(QUIET)
    for name in MODULES:
        importlib.import_module(name)
    import pyarrow as pa

    from zync_assets.spark.tasks import tune_worker

    # pyarrow imports pandas, if installed, at its first conversion of a list.
    pa.array([0])
    # The present objects are no garbage. A worker's garbage collector would touch them, and so copy their memory pages.
    tune_worker()


if __name__ == "__main__":
    load()
    from pyspark.daemon import manager

    # systemd signals all processes of a unit. Spark ends the daemon by closing its input, and a worker by SIGKILL.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    manager()
