"""The partitions of output topics: the choice of Kafka's default partitioner for the bytes of a record's key, or the value of
the output's ``partition-by``.

A key must keep its partition for as long as its topic exists, and the bytes of a key depend on its schema: Avro has the
schema's id of the registry in front of the key, and ``connect-json`` has the schema itself. The account therefore keeps the
schema and the id that the first outputs had (``lake.head.Partitioning``). A batch whose keys have another schema fails. A
registry that was created anew may give the schema another id. The partition then still follows the id that the account has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from zync_assets.codecs.arrays import pc
from zync_assets.errors import EtlError
from zync_assets.etl.account import Labels
from zync_assets.etl.output_types import OutputType
from zync_assets.etl.rules.kind import OutputColumns
from zync_assets.etl.rules.results import output_columns
from zync_assets.etl.rules.shapes import ITEM
from zync_assets.kafka.partitioner import key_partitions
from zync_assets.kafka.registry import Registry
from zync_assets.lake.head import PARTITION_BY, Head, OutputPosition, Partitioning
from zync_assets.lake.staging import key_column, value_column
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.publish.encoding import SideSchema, encode_values, registered, row_schema
from zync_assets.spark.failures import fails, short
from zync_assets.spark.sql import excerpt, name_sql

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PARTITION = "partition"
"""The column of outputs that has the value of ``partition-by``, as a partition."""


@dataclass(frozen=True)
class Partitions:
    """How the outputs of a topic are shared among its ``count`` partitions.

    ``keys``: how the keys of each rule are encoded, by the rule's index; None: the rule's keys are null. ``key_type``: the
    type of the staged keys; None: all keys are null. ``by``: ``partition-by`` in the lake's names; the column PARTITION then has
    the partition.
    """

    topic: str
    count: int = 1
    keys: Sequence[SideSchema | None] = ()
    key_type: pa.DataType | None = None
    by: str | None = None

    def of(self, outputs: pa.RecordBatch) -> np.ndarray:
        """The partition of each output: rows with ``rule``, and the key's column or PARTITION."""
        if self.count == 1:
            return np.zeros(len(outputs), np.int32)
        if self.by:
            return outputs[PARTITION].fill_null(0).to_numpy()
        name = key_column(self.topic)
        keys = outputs[name] if name in outputs.schema.names else pa.nulls(len(outputs))
        return self.of_keys(keys, outputs["rule"])

    def of_keys(self, keys: pa.Array, rules: pa.Array) -> np.ndarray:
        """The partition of each key. ``rules``: the index of each key's rule. A key that can't be encoded is for partition 0."""
        partitions = np.zeros(len(keys), np.int32)
        if self.key_type is None:
            return partitions
        if keys.type != self.key_type:
            keys = keys.cast(self.key_type)
        for side in {side for side in self.keys if side is not None}:
            rule_indexes = pa.array([index for index, key_side in enumerate(self.keys) if key_side == side], rules.type)
            places = np.flatnonzero(pc.is_in(rules, rule_indexes).to_numpy(zero_copy_only=False))
            if len(places):
                side_keys = keys if len(places) == len(keys) else keys.take(pa.array(places))
                partitions[places] = key_partitions(encode_values(side, side_keys).payloads, self.count)
        return partitions

    def column(self) -> Column | None:
        """The partition of a result row of the topic as a column of Spark; None for a topic with one partition."""
        from pyspark.sql import functions as F

        if self.count == 1:
            return None
        if self.by:
            return F.coalesce(F.col(name_sql(_by_column(self.topic))), F.lit(0))
        if self.key_type is None:
            return F.lit(0)
        of_keys = self.of_keys

        def partitions(keys: pa.Array, rules: pa.Array) -> pa.Array:
            return pa.array(of_keys(keys, rules), pa.int32())

        partition_udf: Callable[..., Column] = F.arrow_udf(partitions, "int")  # type: ignore[assignment]
        return partition_udf(F.col(name_sql(key_column(self.topic))), F.col("rule"))

    @property
    def sql(self) -> str | None:
        """The result rows' column with the value of ``partition-by``."""
        return name_sql(_by_column(self.topic)) if self.by else None


ONE = Partitions("")
"""All outputs are in partition 0."""


def _by_column(topic: str) -> str:
    return f"partition:{topic}"


def counts_of(outputs: Mapping[tuple[str, int], OutputPosition]) -> dict[str, int]:
    """Output topic → the partitions that its records are numbered in."""
    counts: dict[str, int] = {}
    for topic, _ in outputs:
        counts[topic] = counts.get(topic, 0) + 1
    return counts


def topic_partitions(
    pipeline: Pipeline, head: Head, types: Mapping[str, OutputType], labels: Labels, counts: Mapping[str, int]
) -> tuple[dict[str, Partitions], dict[str, Partitioning]]:
    """Returns, for each topic, how its outputs are shared among its partitions. Also returns the partitioning that the account
    keeps for each topic with several partitions.

    Registers the Avro schema of the first keys. EtlError if keys would change their partitions. Raises RegistryError.
    """
    partitions: dict[str, Partitions] = {}
    partitionings: dict[str, Partitioning] = {}
    for topic, kind in types.items():
        count = counts.get(topic, 1)
        partitions[topic] = Partitions(topic, count)
        if count == 1:
            continue
        item, previous = pipeline.output(topic), head.partitionings.get(topic)
        if item.partition_by is not None:
            partitionings[topic] = Partitioning(PARTITION_BY + " ".join(item.partition_by.split()), None)
            partitions[topic] = replace(partitions[topic], by=by_in_lake_names(item.partition_by, kind))
            _check(topic, previous, partitionings[topic].text, f"partition-by: {item.partition_by}")
            continue
        sides = {rule: side for rule, text in kind.texts.items() if (side := row_schema(topic, text).key).schema}
        for rule, side in sides.items():
            text = _text(side)
            _check(topic, previous or partitionings.get(topic), text, f"rule {rule}")
            if topic not in partitionings:
                partitionings[topic] = previous or Partitioning(text, _schema_id(pipeline, topic, side))
        schema_id = partitionings[topic].id if topic in partitionings else None
        keys = [sides.get(rule) for rule in labels.rules]
        keys = [None if side is None else replace(side, schema_id=schema_id, subject="") for side in keys]
        partitions[topic] = replace(partitions[topic], keys=keys, key_type=kind.columns.get(key_column(topic)))
    return partitions, partitionings


def _text(side: SideSchema) -> str:
    """The format of keys. If the bytes of keys hold the schema or its id, also the schema."""
    return f"{side.format} {side.schema}" if side.format in ("avro", "connect-json") else side.format


def _schema_id(pipeline: Pipeline, topic: str, side: SideSchema) -> int | None:
    client = Registry(pipeline.registry) if pipeline.registry else None
    return registered(client, topic, side).schema_id


def _check(topic: str, before: Partitioning | None, text: str, place: str) -> None:
    if before is None or before.text == text:
        return
    raise EtlError(
        f"topic {topic}, {place}: keys would move to other partitions of the topic. So far, the partition of a key"
        f" depended on `{excerpt(before.text)}`. Now it would depend on `{excerpt(text)}`. Nothing was committed. Undo the"
        " change; or give the output another topic and another staging pool. Only an output that has"
        " `partition-by` from its first record on may change the schema of its keys."
    )


def by_in_lake_names(by: str, kind: OutputType) -> str:
    """``partition-by`` with the lake's names for fields, and NULL for a side that no rule has made so far. EtlError for a name
    that may be two fields."""
    # Spark's workers import this module. The parser of SQL would cost each of them memory.
    from zync_assets.pipeline_file.conditions import without_root
    from zync_assets.pipeline_file.expressions import SqlProblem
    from zync_assets.pipeline_file.references import in_lake_names, with_notes

    columns = {"key": key_column(kind.topic), "value": value_column(kind.topic)}
    roots = {side: with_notes(kind.columns[name]) for side, name in columns.items() if name in kind.columns}
    try:
        sql = by
        for side in columns.keys() - roots.keys():
            sql = without_root(sql, side)
        return in_lake_names(sql, roots)
    except SqlProblem as problem:
        raise EtlError(f"topic {kind.topic}, partition-by: {by}: {problem}. Nothing was committed.") from None


def with_partition_columns(
    frame: DataFrame, pipeline: Pipeline, topics: Mapping[str, Partitions], labels: Labels, present: Collection[str]
) -> DataFrame:
    """Result rows with a column for each ``partition-by``. ``present``: the columns of the rows. EtlError for an
    expression that does not suit the outputs."""
    from pyspark.errors import AnalysisException

    for topic, partitions in topics.items():
        if partitions.by is None:
            continue
        sides, number_sql = _sides(topic, present), by_sql(partitions.by, partitions.count)
        case = (
            f"CASE WHEN kind = 'out' AND rule IN ({labels.of_topic(topic)}) THEN {number_sql} END AS {partitions.sql}"
        )
        try:
            frame = frame.selectExpr("*", *sides).selectExpr("* EXCEPT (key, value)", case)
        except AnalysisException as error:
            by = pipeline.output(topic).partition_by
            raise EtlError(
                f"topic {topic}, partition-by: {by}: {short(error)} Write a whole number, of `key` and `value` of the output."
                " Nothing was committed."
            ) from error
    return frame


def _sides(topic: str, present: Collection[str]) -> list[str]:
    """The columns that ``partition-by`` sees."""
    key, value = side_columns(topic, present)
    return [f"{key} AS key", f"{value} AS value"]


def side_columns(topic: str, present: Collection[str]) -> list[str]:
    """The key and the value of a result row of a topic, as SQL."""
    return [name_sql(name) if name in present else "NULL" for name in (key_column(topic), value_column(topic))]


def by_sql(by: str, count: int) -> str:
    """The partition by an expression over ``key`` and ``value``; null for a null."""
    return f"CAST(pmod(CAST(({by}) AS BIGINT), {count}L) AS INT)"


def partition_fails(by: str, outputs: str) -> str:
    """An SQL condition: whether ``partition-by`` fails for one of some outputs. ``by``: in the lake's names; ``outputs``: an
    array of structs with ``key`` and ``value``, as SQL."""
    sides = f"transform(array(made.key), key -> transform(array(made.value), value -> CAST(({by}) AS BIGINT)))"
    return fails(f"transform({outputs}, made -> {sides})")


def without_partition(by: str, rule: Rule, target: OutputColumns) -> str:
    """An SQL condition: whether ``partition-by`` fails for an output that a rule makes of a match. ``by``: as for
    ``partition_fails``."""
    columns = dict(output_columns(replace(rule, keep=None), target))
    key, value = ("NULL" if side is None else columns[side[0]] for side in (target.key, target.value))
    made = f"struct({key} AS key, {value} AS value)"
    if rule.explode is None:
        return partition_fails(
            by, f"array({made})" if rule.keep is None else f"CASE WHEN {rule.keep} THEN array({made}) END"
        )
    items = rule.explode if rule.keep is None else f"filter({rule.explode}, {ITEM} -> {rule.keep})"
    return partition_fails(by, f"transform({items}, {ITEM} -> {made})")


def failing_partitions(frame: DataFrame, topics: Mapping[str, Partitions], labels: Labels) -> list[DataFrame]:
    """The result rows whose ``partition-by`` fails. With the settings of a search."""
    failing_rows: list[DataFrame] = []
    for topic, partitions in topics.items():
        if partitions.by is not None:
            topic_rows = frame.where(f"kind = 'out' AND rule IN ({labels.of_topic(topic)})")
            side_rows = topic_rows.selectExpr("*", *_sides(topic, frame.columns))
            failing_rows.append(side_rows.where(fails(by_sql(partitions.by, partitions.count))))
    return failing_rows


def partition_numbers(frame: DataFrame, partitions: Partitions) -> DataFrame:
    """The value of a topic's ``partition-by`` for result rows of the topic. The frame fails where the expression does."""
    number_sql = by_sql(partitions.by or "0", partitions.count)
    return frame.selectExpr(*_sides(partitions.topic, frame.columns)).selectExpr(number_sql)
