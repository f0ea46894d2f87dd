"""``zync diff``: which keys of the output topics an edit of a pipeline file would change.

Both files run over the same raw records in scratch lakes, with output topics that Kafka does not have. The real lake, the topics
and the registry are read alone.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pyarrow as pa
from pyarrow import fs

from zync_assets.cli.terminal import Format, format_option, print_rows
from zync_assets.codecs.fields import fields_of
from zync_assets.errors import ZyncError
from zync_assets.etl.history import removed_records, scratch
from zync_assets.etl.rebuild import has_field
from zync_assets.lake import raw, staging, storage
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load
from zync_assets.runner import etl_all
from zync_assets.spark import frames
from zync_assets.spark.session import spark_session
from zync_assets.spark.sql import WHOLE_JSON, name_sql, path_sql, text_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ("topic", "key", "old", "new")
_LOG = "_delta_log"


@dataclass(frozen=True)
class KeyDifference:
    """A key of an output topic that ends up different. ``old``, ``new``: the row as all records of the key leave it."""

    topic: str
    key: object
    old: object
    new: object


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("new_file", type=click.Path(path_type=Path))
@format_option
def diff(file: Path, new_file: Path, fmt: Format) -> None:
    """Show which keys of the output topics end up different with NEW_FILE in place of FILE.

    Both files run over the raw records of FILE's lake, in a scratch folder. Nothing else is written.
    """
    old, new = load(file), load(new_file)
    with tempfile.TemporaryDirectory(prefix="zync-diff-") as folder:
        changed_keys = list(key_differences(old, new, Path(folder)))
    rows = [{"topic": item.topic, "key": item.key, "old": item.old, "new": item.new} for item in changed_keys]
    if rows or fmt == "json":
        print_rows(rows, COLUMNS, fmt)
    else:
        click.echo("no key ends up different")


def key_differences(old: Pipeline, new: Pipeline, folder: Path) -> Iterator[KeyDifference]:
    """The keys that end up different, by topic and key. ``folder``: for the scratch lakes.

    ZyncError if retention removed raw records that the files need.
    """
    new = replace(new, lake=old.lake)
    _check_history([old, new])
    prefix = f"zync-diff-{uuid.uuid4().hex[:8]}."
    session = partial(spark_session, old.spark, str(folder))
    scratches: list[Pipeline] = []
    for name, pipeline in (("old", old), ("new", new)):
        _copy_raw(pipeline, folder / name)
        scratches.append(scratch(pipeline, prefix, str(folder / name)))
        for _ in etl_all(scratches[-1], session):
            pass
    topics = dict.fromkeys(item.topic for pipeline in (old, new) for item in pipeline.outputs)
    for topic in topics:
        sides = [_rows(session(), pipeline, f"{prefix}{topic}") for pipeline in scratches]
        yield from _compare_rows(topic, sides[0], sides[1])


def _check_history(pipelines: Sequence[Pipeline]) -> None:
    removals: dict[str, None] = {}
    for pipeline in pipelines:
        for item in pipeline.inputs:
            state = raw.open_raw(pipeline.lake, item.pool, item.topic) if pipeline.readers_of(item.topic) else None
            if state is not None:
                removals |= dict.fromkeys(removed_records(item.topic, state, state.first))
    if removals:
        raise ZyncError(
            f"retention removed raw records that both files need: {'; '.join(removals)}. Nothing was compared. Restore the raw"
            " table to a version with these records, or compare files over a lake that has them."
        )


def _copy_raw(pipeline: Pipeline, folder: Path) -> None:
    """Copy the raw tables that the rules read, with what ETL reads beside them. A lake in a folder gives links to its files."""
    lake, scratch = pipeline.lake, str(folder)
    folder.mkdir(parents=True)
    ends = pipeline.transactions.topic if pipeline.transactions is not None else None
    for item in pipeline.inputs:
        # No rule reads the transaction topic, and the frontier follows its records.
        if not pipeline.readers_of(item.topic) and item.topic != ends:
            continue
        for uri in (storage.raw_uri, storage.quarantine_uri, storage.decoded_uri):
            _copy(uri(lake, item.pool, item.topic), uri(scratch, item.pool, item.topic))
    for pool in dict.fromkeys(item.pool for item in pipeline.inputs):
        _copy(storage.readings_uri(lake, pool), storage.readings_uri(scratch, pool))


def _copy(source: str, target: str) -> None:
    """Copy a file or a table. ZyncError if a file is removed meanwhile."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        _copy_log_first(source, target)
    except (FileNotFoundError, shutil.Error) as error:
        reason = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
        raise ZyncError(
            f"{source} can't be copied whole: {reason}. Another command may have removed the file meanwhile. Nothing was"
            " compared. Run the command again."
        ) from None


def _copy_log_first(source: str, target: str) -> None:
    """The log first: a commit that comes meanwhile adds files that the copied log does not name."""
    system, path = storage.filesystem(source)
    [info] = system.get_file_info([path])
    if info.type == fs.FileType.NotFound or Path(target).exists():
        return
    if info.type == fs.FileType.File:
        if storage.is_store(source):
            _download(system, path, target)
        else:
            shutil.copy2(source, target)
        return
    if not storage.is_store(source):
        shutil.copytree(Path(source, _LOG), Path(target, _LOG), copy_function=_link)
        # Without the log: its second copy could name files that this listing lacks.
        without_log = shutil.ignore_patterns(_LOG)
        shutil.copytree(source, target, ignore=without_log, copy_function=_link, dirs_exist_ok=True)
        return
    Path(target, _LOG).mkdir(parents=True)
    _download(system, f"{path}/{_LOG}", str(Path(target, _LOG)))
    for item in system.get_file_info(fs.FileSelector(path)):
        place = Path(target, item.base_name)
        if item.base_name != _LOG:
            (place if item.type == fs.FileType.Directory else place.parent).mkdir(parents=True, exist_ok=True)
            _download(system, item.path, str(place))


def _download(system: fs.FileSystem, path: str, target: str) -> None:
    """Copy a file, or all that a folder holds, from an object store."""
    fs.copy_files(path, target, source_filesystem=system, destination_filesystem=fs.LocalFileSystem())


def _link(source: str, target: str) -> None:
    if Path(target).exists():
        return
    try:
        os.link(source, target)
    except OSError:
        # Another file system.
        shutil.copy2(source, target)


def _rows(spark: SparkSession, pipeline: Pipeline, topic: str) -> DataFrame:
    """Key and row of each key of an output topic, as texts of JSON; the row of a deleted key is null.

    A record sets the fields that its rule and its source record have. A later tombstone deletes the row. A record without a key
    has no row.
    """
    from pyspark.sql import functions as F

    names = [item.topic for item in pipeline.outputs]
    pool = pipeline.output(topic).pool if topic in names else None
    state = staging.open_staging(pipeline.lake, pool) if pool is not None else None
    if state is None or not state.output_files(topic):
        return spark.sql("SELECT '' AS k, '' AS v LIMIT 0")
    frame = frames.output_frame(spark, state, topic).where("key IS NOT NULL")
    schemas = {name: text for name, (of, text) in state.head.schemas.items() if of == topic}
    column = staging.value_column(topic)
    kind = state.schema.field(column).type if column in state.schema.names else pa.null()
    base = frame.selectExpr(
        f"to_json(struct(key), {WHOLE_JSON}) AS k", "kafka.offset AS o", "value", "schema", "left_out"
    )
    deletions = base.groupBy("k").agg(F.expr("max(CASE WHEN value IS NULL THEN o END) AS gone"))
    live = base.join(deletions, "k").where("value IS NOT NULL AND (gone IS NULL OR o > gone)")
    if not pa.types.is_struct(kind):
        return live.groupBy("k").agg(F.expr(f"max_by(to_json(struct(value), {WHOLE_JSON}), o) AS v"))
    texts: list[str] = []
    for item in fields_of(kind):
        schema_names = [name for name, text in schemas.items() if has_field(text, item)]
        left_out = text_sql(path_sql(("value", item.name)))
        condition = f"schema IN ({', '.join(map(text_sql, schema_names)) or 'NULL'})"
        sets = f"{condition} AND NOT coalesce(array_contains(left_out, {left_out}), false)"
        text = f"to_json(struct(value.{name_sql(item.name)}), {WHOLE_JSON})"
        texts.append(f"max_by({text}, o) FILTER (WHERE {sets})")
    return live.groupBy("k").agg(F.expr(f"array_join(array({', '.join(texts)}), '\\n') AS v"))


def _compare_rows(topic: str, old: DataFrame, new: DataFrame) -> Iterator[KeyDifference]:
    old_rows, new_rows = old.withColumnRenamed("v", "old"), new.withColumnRenamed("v", "new")
    pairs = old_rows.join(new_rows, "k", "full_outer").where("NOT (old <=> new)")
    for row in pairs.orderBy("k").toLocalIterator():
        yield KeyDifference(topic, json.loads(row["k"]).get("key"), _parse_lines(row["old"]), _parse_lines(row["new"]))


def _parse_lines(text: str | None) -> object:
    if text is None:
        return None
    fields: dict[str, object] = {}
    for line in text.split("\n"):
        fields |= json.loads(line) if line else {}
    return fields["value"] if list(fields) == ["value"] else fields
