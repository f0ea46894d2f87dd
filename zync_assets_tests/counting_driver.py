"""The command line, which also counts the rows that pass between the driver and Spark's tasks.

    python -m zync_assets_tests.counting_driver COUNTS SCALE from-kafka FILE + etl FILE + to-kafka FILE

COUNTS gets JSON: for each place in zync_assets that collects rows, or makes a frame of the driver's own, how many there
were in all. Spark's jobs are described by the place too. Buckets of outputs and strides of the ledger are SCALE times
smaller than they are. Commands are parted by +.
"""

from __future__ import annotations

import atexit
import json
import sys
import traceback
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrameWriter, SparkSession
from pyspark.sql.classic.dataframe import DataFrame

from zync_assets.cli.main import main
from zync_assets.codecs.spark_types import rows_frame
from zync_assets.etl import account, positions
from zync_assets.spark.tasks import frame_results, run_tasks

PACKAGE = Path(positions.__file__).parents[1]
HELPERS = {f"{each.__module__}.{each.__name__}" for each in (rows_frame, run_tasks, frame_results)}


def count(counts: Counter[str]) -> None:
    """Have what passes to and from the driver counted from now on."""
    collect, create, write = DataFrame.collect, SparkSession.createDataFrame, DataFrameWriter.parquet

    def collected(frame: DataFrame) -> Any:
        frame.sparkSession.sparkContext.setJobDescription(_place())
        rows = collect(frame)
        counts[f"collected by {_place()}"] += len(rows)
        return rows

    def written(writer: DataFrameWriter, *args: Any, **more: Any) -> None:
        writer._spark.sparkContext.setJobDescription(_place())
        write(writer, *args, **more)

    def created(session: SparkSession, data: Any, *args: Any, **more: Any) -> Any:
        rows = data if isinstance(data, pa.Table) else list(data)
        counts[f"sent by {_place()}"] += len(rows)
        return create(session, rows, *args, **more)

    def refused(frame: DataFrame, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{_place()} takes a whole frame to the driver")

    DataFrame.collect = collected  # type: ignore[method-assign]
    DataFrameWriter.parquet = written  # type: ignore[method-assign]
    SparkSession.createDataFrame = created  # type: ignore[method-assign]
    for name in ("toLocalIterator", "toArrow", "toPandas", "take", "head"):
        setattr(DataFrame, name, refused)


def _place() -> str:
    """The innermost function of the package that is under way and is no helper, for instance ``publish.commit.publish``."""
    frames = [each for each in traceback.extract_stack() if Path(each.filename).is_relative_to(PACKAGE)]
    modules = [".".join(Path(each.filename).with_suffix("").relative_to(PACKAGE.parent).parts) for each in frames]
    named = [f"{module}.{each.name}" for module, each in zip(modules, frames, strict=True)]
    return next((name for name in reversed(named) if name not in HELPERS), "nobody").removeprefix("zync_assets.")


if __name__ == "__main__":
    found = Counter[str]()
    target, scale, *arguments = sys.argv[1:]
    positions.BUCKET_RECORDS //= int(scale)
    account.STRIDE //= int(scale)
    count(found)
    atexit.register(lambda: Path(target).write_text(json.dumps(found)))
    for last, words in groupby(arguments, lambda word: word == "+"):
        if not last:
            main(list(words), standalone_mode=False)
