"""From records to results: which rule takes a record, which records pair, and what becomes of the rest.

A record frame has the columns ``kafka``, ``key``, ``value``, ``time`` (never runs back within a partition) and ``old``
(false: new in this batch; true: it was pending). A result frame has one row an output, and one row a new record that
makes none, with the columns

    kind     out, pending, unmatched, dropped, or untyped (no such batch is committed)
    out      output topic, null where there is none
    rule     the rule that took the record, if one did
    schema   fingerprint of the output schema
    ord      struct(time, place in inputs, partition, offset) of the completing input: outputs are ordered by it
    source   array of struct(topic, partition, offset, old) of the raw records
    hash     hash of the join key of a pending record, null for a null key
    key:<topic>, value:<topic>
    headers  where a rule gives its records some
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.headers import COLUMN as HEADERS
from zync_assets.etl.headers import headers_sql
from zync_assets.etl.shapes import analysed, project, shape_sql, wider
from zync_assets.pipeline import Denorm, Input, Rule, Stateless

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

SIDES = ("kafka", "key", "value")


@dataclass(frozen=True)
class Target:
    """How the outputs of one rule go into its topic's columns. A None column: neither rule nor topic has that side."""

    fingerprint: str
    key: tuple[str, DataType, DataType] | None
    """(column, the rule's type, the column's type)."""
    value: tuple[str, DataType, DataType] | None
    headers: bool = False
    """Whether one of the topic's rules gives its records headers."""


@dataclass(frozen=True)
class Taken:
    """A topic's new records, each with the index of the rule that takes it (``taken``; null: none)."""

    item: Input
    place: int
    frame: DataFrame


def assign(item: Input, place: int, frame: DataFrame, rules: Sequence[Rule]) -> Taken:
    """Give each record to the first rule that names its topic and whose ``where`` holds."""
    from pyspark.sql import functions as F

    chosen: Column | None = None
    for index, rule in enumerate(rules):
        for where in _wheres(rule, item.topic):
            condition = F.coalesce(_condition(frame, rule, where), F.lit(False))
            chosen = F.when(condition, index) if chosen is None else chosen.when(condition, index)
    taken = F.lit(None).cast("int") if chosen is None else chosen.otherwise(F.lit(None).cast("int"))
    return Taken(item, place, frame.withColumn("taken", taken))


def _wheres(rule: Rule, topic: str) -> list[str | None]:
    if isinstance(rule, Stateless):
        return [rule.where] if rule.input == topic else []
    sides = ((rule.left, rule.where_left), (rule.right, rule.where_right))
    return [where for name, where in sides if name == topic]


def _condition(frame: DataFrame, rule: Rule, where: str | None) -> Column:
    from pyspark.sql import functions as F

    if where is None:
        return F.col("value").isNotNull()
    if not has_schema(frame):
        return F.lit(False)
    kind = analysed(frame, f"({where})", rule.name, "where")
    if kind.simpleString() != "boolean":
        raise EtlError(f"rule {rule.name}, where: {where} is {kind.simpleString()}; it must be a condition")
    return F.expr(f"({where})")


def has_schema(frame: DataFrame) -> bool:
    """Whether a topic's values have a type yet: it has none before the first value that is not null."""
    return frame.schema["value"].dataType.simpleString() != "void"


def singles(
    taken: Taken, rules: Sequence[Rule], targets: Mapping[int, Target], joined: Sequence[int], untyped: Sequence[int]
) -> DataFrame:
    """What becomes of a topic's new records, but for those that a denorm rule takes; all in one pass over them.

    ``targets``: the pool's stateless rules, by index; ``joined``: its denorm rules, whose records are not in the result;
    ``untyped``: rules whose types can't be told yet, so that they must take no record (kind ``untyped``). Records of other
    pools' rules are dropped here. What no rule takes is unmatched, or dropped where the file says so; so is a tombstone
    that no rule takes, since Debezium writes one after each delete.
    """
    from pyspark.sql import functions as F

    index = F.col("taken")
    frame = taken.frame.filter(index.isNull() | ~index.isin(list(joined))) if joined else taken.frame
    frame = frame.select(F.struct(*SIDES).alias("in"), "time", "taken")
    fate = F.lit("dropped" if taken.item.unmatched == "drop" else "unmatched")
    lost = index.isNotNull() | F.col("in.value").isNull()
    kind = F.when(index.isin(list(targets)), "out") if targets else F.when(F.lit(False), "out")
    kind = kind.when(index.isin(list(untyped)), "untyped") if untyped else kind
    texts = {
        "out": {place: rules[place].out for place in targets},
        "rule": {place: rules[place].name for place in [*targets, *untyped]},
        "schema": {place: target.fingerprint for place, target in targets.items()},
    }
    columns: dict[str, Column] = {}
    for place, target in targets.items():
        for made, name in _columns(rules[place], target):
            chosen = columns.get(name)
            columns[name] = F.when(index == place, made) if chosen is None else chosen.when(index == place, made)
    return frame.select(
        kind.when(lost, "dropped").otherwise(fate).alias("kind"),
        *(_chosen(choice).alias(name) for name, choice in texts.items()),
        _order(F.col("time"), taken.place, F.col("in.kafka")).alias("ord"),
        _single(F.col("in.kafka"), False),
        F.lit(None).cast("long").alias("hash"),
        *(column.alias(name) for name, column in columns.items()),
    )


def _chosen(choice: Mapping[int, str]) -> Column:
    """The text of the rule that takes the record; null for other rules."""
    from pyspark.sql import functions as F

    column = F.lit(None).cast("string")
    for place, text in choice.items():
        column = F.when(F.col("taken") == place, text).otherwise(column)
    return column


def in_frame(frame: DataFrame, name: str) -> DataFrame:
    """The record under one name, as expressions of a rule see it."""
    from pyspark.sql import functions as F

    return frame.select(F.struct(*SIDES).alias(name), "time", "old")


def keyed(rule: Denorm, side: str, frame: DataFrame) -> DataFrame:
    """One side of a denorm rule with its join key (``k0``, ``k1`` …) and the key's hash; ``frame`` from ``in_frame``."""
    from pyspark.sql import functions as F

    index = 0 if side == "left" else 1
    for number, pair in enumerate(rule.join_on):
        analysed(frame, f"({pair[index]})", rule.name, "join-on")
        frame = frame.withColumn(f"k{number}", F.expr(f"({pair[index]})"))
    keys = key_names(rule)
    known = F.lit(True)
    for name in keys:
        known = known & F.col(name).isNotNull()
    # A column may get a wider type while records wait: their hashes must stay what they were.
    hashed = [F.col(name).cast(_hashed(frame.schema[name].dataType)) for name in keys]
    return frame.withColumn("hash", F.when(known, F.xxhash64(*hashed)))


def _hashed(kind: DataType) -> DataType:
    """A key's type as it is hashed: every number is a double. Two that become one double share a hash, which is looked
    up by only; they are compared as they are."""
    from pyspark.sql.types import DoubleType, NumericType, StructField, StructType

    if isinstance(kind, StructType):
        return StructType([StructField(item.name, _hashed(item.dataType)) for item in kind])
    return DoubleType() if isinstance(kind, NumericType) else kind


def key_names(rule: Denorm) -> list[str]:
    return [f"k{number}" for number in range(len(rule.join_on))]


def like_keys(rule: Denorm, left: DataFrame, right: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Both sides with join keys of one type: of two numbers the wider, since a source alters one of two columns first.

    EtlError if the two sides of an equality have different types.
    """
    from pyspark.sql import functions as F

    for name, (left_sql, right_sql) in zip(key_names(rule), rule.join_on, strict=True):
        kinds = [frame.schema[name].dataType for frame in (left, right)]
        if kinds[0].simpleString() == kinds[1].simpleString():
            continue
        one = wider(*kinds)
        if one is None:
            raise EtlError(
                f"rule {rule.name}, join-on: {left_sql} is {kinds[0].simpleString()} and {right_sql} is"
                f" {kinds[1].simpleString()}. CAST one of them."
            )
        left, right = (frame.withColumn(name, F.col(name).cast(one)) for frame in (left, right))
    return left, right


def paired(rule: Denorm, left: DataFrame, right: DataFrame, places: Mapping[str, int], target: Target) -> DataFrame:
    """Pair the k-th left record of a join key with the k-th right one, by partition and offset.

    ``left`` and ``right`` are from ``keyed``, new and old records together. New records without a counterpart, and those
    with a null key, are pending; old ones without one stay as they are and give no row.
    """
    from pyspark.sql import functions as F

    keys = key_names(rule)
    sides = {"left": left, "right": right}
    ranked = {
        side: _ranked(frame.filter(F.col("hash").isNotNull()), side, keys, places[getattr(rule, side)])
        for side, frame in sides.items()
    }
    joined = ranked["left"].join(ranked["right"], [*keys, "rank"], "full_outer")
    has = {side: F.col(side).isNotNull() for side in sides}
    both = has["left"] & has["right"]
    own = {side: _source(F.col(f"{side}.kafka"), F.col(f"{side}_old")) for side in sides}
    last = F.when(F.col("left_ord") > F.col("right_ord"), F.col("left_ord")).otherwise(F.col("right_ord"))
    results = joined.filter(both | ~F.coalesce("left_old", "right_old")).select(
        F.when(both, "out").otherwise("pending").alias("kind"),
        F.when(both, rule.out).alias("out"),
        F.lit(rule.name).alias("rule"),
        F.when(both, target.fingerprint).alias("schema"),
        F.when(both, last).otherwise(F.coalesce("left_ord", "right_ord")).alias("ord"),
        F.when(both, F.array(own["left"], own["right"]))
        .otherwise(F.array(F.when(has["left"], own["left"]).otherwise(own["right"])))
        .alias("source"),
        F.when(~both, F.coalesce("left_hash", "right_hash")).alias("hash"),
        *(F.when(both, made).alias(name) for made, name in _columns(rule, target)),
    )
    nulls = [null_keys(rule, frame, side, places[getattr(rule, side)]) for side, frame in sides.items()]
    return union([results, *nulls])


def null_keys(rule: Denorm, frame: DataFrame, side: str, place: int) -> DataFrame:
    """New records whose join key is null: they match nothing and stay pending."""
    from pyspark.sql import functions as F

    order = _order(F.col("time"), place, F.col(f"{side}.kafka"))
    found = frame.filter(F.col("hash").isNull() & ~F.col("old"))
    return found.select(*_pending(rule, order, F.col(f"{side}.kafka"), F.col("hash")))


def one_sided(rule: Denorm, frame: DataFrame, side: str, place: int) -> DataFrame:
    """New records of a rule whose other side has no records at all, and so no schema yet: all of them wait."""
    from pyspark.sql import functions as F

    order = _order(F.col("time"), place, F.col(f"{side}.kafka"))
    return frame.filter(~F.col("old")).select(*_pending(rule, order, F.col(f"{side}.kafka"), F.col("hash")))


def union(frames: Sequence[DataFrame]) -> DataFrame:
    """All rows of result frames; a column that one lacks is null there."""
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame, allowMissingColumns=True)
    return whole


def _ranked(frame: DataFrame, side: str, keys: Sequence[str], place: int) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    kafka = f"{side}.kafka"
    window = Window.partitionBy(*keys).orderBy(F.col(f"{kafka}.partition"), F.col(f"{kafka}.offset"))
    return frame.select(
        *keys,
        F.row_number().over(window).alias("rank"),
        F.col(side),
        F.col("old").alias(f"{side}_old"),
        F.col("hash").alias(f"{side}_hash"),
        _order(F.col("time"), place, F.col(kafka)).alias(f"{side}_ord"),
    )


def _order(time: Column, place: int, kafka: Column) -> Column:
    from pyspark.sql import functions as F

    return F.struct(
        time.alias("time"),
        F.lit(place).alias("place"),
        kafka.getField("partition").alias("partition"),
        kafka.getField("offset").alias("offset"),
    )


def _source(kafka: Column, old: Column) -> Column:
    from pyspark.sql import functions as F

    return F.struct(*(kafka.getField(name).alias(name) for name in ("topic", "partition", "offset")), old.alias("old"))


def _single(kafka: Column, old: bool) -> Column:
    from pyspark.sql import functions as F

    return F.array(_source(kafka, F.lit(old))).alias("source")


def _pending(rule: Denorm, order: Column, kafka: Column, key_hash: Column) -> list[Column]:
    from pyspark.sql import functions as F

    return [
        F.lit("pending").alias("kind"),
        F.lit(rule.name).alias("rule"),
        order.alias("ord"),
        _single(kafka, False),
        key_hash.alias("hash"),
    ]


def _columns(rule: Rule, target: Target) -> list[tuple[Column, str]]:
    """The rule's key, value and headers as the topic's columns, each with its name."""
    from pyspark.sql import functions as F

    made = [
        (project(F.expr(shape_sql(shape)), side[1], side[2]), side[0])
        for shape, side in ((rule.key, target.key), (rule.value, target.value))
        if side is not None
    ]
    if target.headers:
        own = F.lit(None) if rule.headers is None else F.expr(headers_sql(rule.headers))
        made.append((own.cast(HEADERS), "headers"))
    return made
