"""The kind ``denorm``: the k-th left record of a join key with the k-th right record makes one output.

A record is pending until its counterpart comes. Spark's ``=`` decides which records pair. The hash of the join key finds the
pending records that may be equal. Two keys that are equal for ``=`` must therefore have the same hash, in whichever batches
they come. A column may get a wider type while records are pending, and the other side's type may be unknown when a record
becomes pending. The hash therefore ignores the width of a number, and the differences between letters that a collation
ignores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zync_assets.errors import EtlError
from zync_assets.etl.rules import expiry
from zync_assets.etl.rules.kind import (
    BLAMED,
    LOOKED,
    TURN,
    Emission,
    Kind,
    Ordering,
    RuleRecords,
    key_names,
    records_sql,
    source_sql,
    union,
)
from zync_assets.etl.rules.results import output_rows
from zync_assets.etl.rules.shapes import expression_type, type_sql, wider
from zync_assets.pipeline import Rule, Side
from zync_assets.spark.sql import name_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_WITHOUT_EQUALITY = ("map", "variant", "interval", "geometry", "geography")
"""Spark's names of the types whose values it does not compare; ``interval`` is that of months, days and microseconds."""


class Denorm(Kind):
    """The results are pairs, and the records that wait for their counterpart."""

    name, join = "denorm", "join-on"
    summary = "the k-th left record of a join key with the k-th right one; the others wait"

    def records(
        self, rule: Rule, index: int, inputs: Mapping[str, DataFrame], frames: Mapping[str, DataFrame]
    ) -> RuleRecords:
        kinds = key_types(rule, inputs)
        return RuleRecords(
            rule,
            index,
            {side: keyed(rule, side, frame, kinds) for side, frame in frames.items()},
            kinds,
            join_text(rule, kinds) if kinds else None,
            is_hashed_as_ever(kinds) and not rule.held and rule.expiry is None,
            inputs=inputs,
        )

    def results(self, records: RuleRecords, pending: Mapping[str, DataFrame], emission: Emission) -> list[DataFrame]:
        rule, kinds = records.rule, records.key_types
        if len(records.frames) < 2 or emission.target is None:
            return [one_sided(records, side.name, emission) for side in rule.sides if side.name in records.frames]
        whole = {
            side: union([frame, keyed(rule, side, pending[side], kinds)]) if side in pending else frame
            for side, frame in records.frames.items()
        }
        if emission.together:
            whole = {side: frame.coalesce(1) for side, frame in whole.items()}
        pairs = paired if rule.expiry is None else expiry.paired
        return [pairs(records, whole, emission)]

    def key_sql(self, rule: Rule, topic: str, inputs: Mapping[str, DataFrame]) -> str | None:
        parts = zip(key_types(rule, inputs), rule.side(topic).keys, strict=True)
        return ", ".join(f"CAST(({sql}) AS {type_sql(kind)})" for kind, sql in parts)

    def from_sql(self, rule: Rule) -> str:
        def ranked(side: Side) -> str:
            return (
                f"(SELECT *, row_number() OVER (PARTITION BY {', '.join(side.keys)}"
                f" ORDER BY {side.name}.kafka.partition, {side.name}.kafka.offset) AS k\n"
                f"      FROM {records_sql(rule, side)})"
            )

        left, right = rule.sides
        equal = " AND ".join(f"({left_key}) = ({right_key})" for left_key, right_key in _equalities(rule))
        return f"{ranked(left)} AS l\nJOIN {ranked(right)} AS r\nON {equal} AND l.k = r.k"

    def reason(self, rule: Rule, topic: str, before: int) -> str:
        other = next(side.topic for side in rule.sides if side.topic != topic)
        if before:
            return f"surplus: {before} with this key wait before it, and none came in {other} yet"
        return f"no counterpart in {other} yet"


def key_types(rule: Rule, frames: Mapping[str, DataFrame]) -> list[DataType]:
    """The type of each part of the join key: of two numbers the wider, since a source alters one of two columns first.

    ``frames``: side → record frame, of those sides that have a schema by now. EtlError if an expression of ``join-on``
    can't be resolved, if the two of an equality have different types, or if Spark has no ``=`` for the type.
    """
    sides = [side for side in rule.sides if side.name in frames]
    return [
        part_type(rule, dict(zip((side.name for side in sides), parts, strict=True)), frames)
        for parts in zip(*(side.keys for side in sides), strict=True)
    ]


def part_type(rule: Rule, parts: Mapping[str, str], frames: Mapping[str, DataFrame], key: str = "join-on") -> DataType:
    """The common type of one part of the join key. ``parts``: side → its expression; ``key``: where the parts stand."""
    kinds = [expression_type({side: frames[side]}, f"({sql})", rule.name, key) for side, sql in parts.items()]
    for sql, kind in zip(parts.values(), kinds, strict=True):
        if not _has_equality(kind):
            raise EtlError(
                f"rule {rule.name}, {key}: {sql} is {kind.simpleString()}, and Spark has no `=` for such values."
                " Join on a field of it, or on its text: to_json(…)."
            )
    common = _common_type(kinds[0], kinds[-1])
    if common is None:
        left, right = (f"{sql} is {kind.simpleString()}" for sql, kind in zip(parts.values(), kinds, strict=True))
        cure = "COLLATE both alike" if any(_is_collated(kind) for kind in kinds) else "CAST one of them"
        raise EtlError(f"rule {rule.name}, {key}: {left} and {right}. {cure}.")
    return common


def _common_type(one: DataType, other: DataType) -> DataType | None:
    """The type of a part of a join key; a side that is always null pairs with nothing, whatever its type."""
    from pyspark.sql.types import NullType, StringType

    if isinstance(one, NullType):
        return StringType() if isinstance(other, NullType) else other
    return one if isinstance(other, NullType) else wider(one, other)


def hash_sql(names: Sequence[str], kinds: Sequence[DataType]) -> str:
    """The hash of a join key in the columns ``names`` of the types ``kinds``; null where a part of the key is null."""
    is_complete = " AND ".join(f"{name} IS NOT NULL" for name in names)
    arguments = ", ".join(hash_operand(name, kind) for name, kind in zip(names, kinds, strict=True))
    return f"CASE WHEN {is_complete} THEN xxhash64({arguments}) END"


def join_text(rule: Rule, kinds: Sequence[DataType]) -> str:
    """The definition of a rule's join hashes, as JSON: the rule's topics, its ``join-on``, and the hashed types.

    The account keeps the text beside the pending records. Pending records of another text have other hashes.
    """
    types = [kind.simpleString() if _is_collated(kind) else _hashed_type(kind).simpleString() for kind in kinds]
    topics = {side.name: side.topic for side in rule.sides}
    # Pending records of a rule without a held output lack the hashes of source rows. Pending records of a rule without expiry
    # lack their times.
    held_entry = {"held": True} if rule.held else {}
    expiry_entry = {"expires": True} if rule.expiry is not None else {}
    return json.dumps({**topics, "on": _equalities(rule), "hashed": types, **held_entry, **expiry_entry})


def _equalities(rule: Rule) -> list[tuple[str, str]]:
    left, right = rule.sides
    return list(zip(left.keys, right.keys, strict=True))


def is_hashed_as_ever(kinds: Sequence[DataType]) -> bool:
    """Whether the hashes of these keys are the same as in the versions that kept no ``join_text``."""
    return not any(_is_collated(kind) or _has_number_in_array(kind) for kind in kinds)


def hash_operand(sql: str, kind: DataType, depth: int = 0) -> str:
    """The SQL expression that is hashed for a value. Values of any types that are equal for ``=`` give equal results."""
    from pyspark.sql.types import ArrayType, StringType, StructType

    if not _is_collated(kind):
        return f"CAST({sql} AS {type_sql(_hashed_type(kind))})"
    if isinstance(kind, ArrayType):
        item = f"item{depth}"
        return f"transform({sql}, {item} -> {hash_operand(item, kind.elementType, depth + 1)})"
    if isinstance(kind, StructType):
        return f"struct({', '.join(hash_operand(f'{sql}.{name_sql(field.name)}', field.dataType, depth) for field in kind)})"
    assert isinstance(kind, StringType)
    text, name = f"CAST({sql} AS STRING)", str(kind.collation)
    if name.endswith("_RTRIM"):
        text, name = f"rtrim({text})", name.removesuffix("_RTRIM")
    # UTF8_LCASE compares the lower case of each letter by itself. lower() makes another sigma at the end of a word.
    text_by_collation = {"UTF8_BINARY": text, "UTF8_LCASE": f"translate(lower({text}), '\u03c2', '\u03c3')"}
    # Spark has no public function for ICU's sort keys. Every text then has the same hash, and `=` finds the equal texts.
    return text_by_collation.get(name, "CAST(NULL AS STRING)")


def _hashed_type(kind: DataType) -> DataType:
    """A type as it is hashed: every number is a double, since Spark rounds an integer and a decimal of one value alike. Two
    numbers that become one double share a hash."""
    from pyspark.sql.types import ArrayType, DoubleType, NumericType, StructField, StructType

    if isinstance(kind, StructType):
        return StructType([StructField(item.name, _hashed_type(item.dataType)) for item in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(_hashed_type(kind.elementType))
    return DoubleType() if isinstance(kind, NumericType) else kind


def _is_collated(kind: DataType) -> bool:
    """Whether a text in the type has a collation of its own."""
    from pyspark.sql.types import StringType

    return any(isinstance(part, StringType) and part.collation != "UTF8_BINARY" for part in _parts(kind))


def _has_number_in_array(kind: DataType) -> bool:
    """Whether an array in the type holds numbers that are not doubles."""
    from pyspark.sql.types import ArrayType, DoubleType, NumericType

    return any(
        isinstance(part, NumericType) and not isinstance(part, DoubleType)
        for array in _parts(kind)
        if isinstance(array, ArrayType)
        for part in _parts(array)
    )


def _has_equality(kind: DataType) -> bool:
    return not any(part.typeName() in _WITHOUT_EQUALITY for part in _parts(kind))


def _parts(kind: DataType) -> list[DataType]:
    """The type, and all types in its arrays and structs."""
    from pyspark.sql.types import ArrayType, StructType

    inner = [item.dataType for item in kind] if isinstance(kind, StructType) else []
    inner += [kind.elementType] if isinstance(kind, ArrayType) else []
    return [kind, *(part for item in inner for part in _parts(item))]


def keyed(rule: Rule, side: str, frame: DataFrame, kinds: Sequence[DataType]) -> DataFrame:
    """One side of a denorm rule with its join key (``k0``, ``k1`` …, of the types ``kinds``) and the key's hash.

    A null key matches nothing. The column ``lone`` gives every record with a null key a value of its own. Without ``lone``,
    Spark would send every record with a null key to the same task.

    ``frame`` is from ``in_frame``.
    """
    names = key_names(rule)
    (side_keys,) = (item.keys for item in rule.sides if item.name == side)
    keys = [f"CAST(({sql}) AS {type_sql(kind)})" for kind, sql in zip(kinds, side_keys, strict=True)]
    # Repeats the keys' expressions. For a name that is used twice, Spark would make a column first, and carry the whole record
    # beside the column.
    has_null = " OR ".join(f"{key} IS NULL" for key in keys)
    lone = f"CASE WHEN {has_null} THEN {side}.kafka.offset ELSE -1 END AS lone"
    key_columns = (f"{key} AS {name}" for key, name in zip(keys, names, strict=True))
    return frame.selectExpr("*", *key_columns, lone).selectExpr("*", f"{hash_sql(names, kinds)} AS hash")


def paired(records: RuleRecords, frames: Mapping[str, DataFrame], emission: Emission) -> DataFrame:
    """Pair the k-th left record of a join key with the k-th right one, by the order of their source, partition and offset.

    ``frames``: side → new and pending records together, from ``keyed``. New records without a counterpart, and those with a
    null key, are pending. Pending records without a counterpart stay as they are and give no row.
    """
    rule, ordering = records.rule, emission.ordering
    from pyspark.sql import functions as F

    names = key_names(rule)
    topics = {side.name: side.topic for side in rule.sides}
    sides = {side: _ranked(rule, frame, side, topics[side], ordering) for side, frame in frames.items()}
    equal = " AND ".join(f"left_{name} = right_{name}" for name in (*names, "lone", "rank"))
    # No expression uses a side's record as a whole; the columns beside the record answer such questions. Spark then reads and
    # joins only the used fields of the records. For the same reason no name is used twice. The join is not by names either:
    # it would merge the keys of both sides into a column with a new name.
    is_pair = "left_old IS NOT NULL AND right_old IS NOT NULL"
    place = {side: (f"{side}_partition", f"{side}_offset") for side in topics}
    source = {side: source_sql(ordering.places[topic], *place[side]) for side, topic in topics.items()}
    ords = {side: ordering.sql(topic, *place[side], f"{side}_") for side, topic in topics.items()}
    hashes = {side: hash_sql([f"{side}_{name}" for name in names], records.key_types) for side in sides}
    later = f"{is_pair} AND {ordering.is_later(topics['right'], topics['left'], 'right_', 'left_')}"
    pair_hash = f"CASE WHEN left_old IS NOT NULL THEN {hashes['left']} ELSE {hashes['right']} END"
    pairs = sides["left"].join(sides["right"], F.expr(equal), "full_outer")
    pairs = pairs.where(f"({is_pair}) OR NOT coalesce(left_old, right_old)")
    pair_kind, makes_outputs, last_index = "'out'", is_pair, f"CASE WHEN {later} THEN 1 ELSE 0 END"
    if emission.rows is not None and rule.lookups:
        pairs = emission.rows(records, pairs)
        pair_kind, makes_outputs = LOOKED, f"{is_pair} AND {LOOKED} = 'out'"
        last_index = f"CASE WHEN {is_pair} AND {LOOKED} <> 'out' THEN {BLAMED} WHEN {later} THEN 1 ELSE 0 END"
    about = (
        f"CASE WHEN {is_pair} THEN {pair_kind} ELSE 'pending' END AS kind",
        f"{records.index} AS rule",
        f"CASE WHEN left_old IS NULL OR ({later}) THEN {ords['right']} ELSE {ords['left']} END AS ord",
        f"CASE WHEN {is_pair} THEN array({source['left']}, {source['right']})"
        f" WHEN left_old IS NOT NULL THEN array({source['left']}) ELSE array({source['right']}) END AS source",
        f"{last_index} AS last",
        f"CASE WHEN {is_pair} THEN CAST(left_old AS int) + 2 * CAST(right_old AS int) ELSE 0 END AS waited",
        f"CASE WHEN NOT ({is_pair}) THEN {pair_hash} END AS hash",
        *((f"{pair_hash} AS joined", *_row_columns(names, ords, is_pair)) if emission.held else ()),
    )
    return output_rows(pairs, rule, about, makes_outputs, emission)


def _row_columns(names: Sequence[str], ords: Mapping[str, str], is_pair: str) -> list[str]:
    """The columns about source rows of a pair, or of a record without a counterpart."""
    keys = {side: ", ".join(f"{side}_{name}" for name in names) for side in ords}
    left, right = (f"CAST({side}_changes AS int)" for side in ("left", "right"))
    return [
        "CASE WHEN left_old IS NOT NULL THEN left_row ELSE right_row END AS row",
        f"CASE WHEN {is_pair} THEN right_row END AS other_row",
        f"CASE WHEN {is_pair} THEN {left} + 2 * {right} WHEN left_old IS NOT NULL THEN {left} ELSE {right} END AS changes",
        f"CASE WHEN {is_pair} THEN array({ords['left']}, {ords['right']})"
        f" WHEN left_old IS NOT NULL THEN array({ords['left']}) ELSE array({ords['right']}) END AS ords",
        f"CASE WHEN left_old IS NOT NULL THEN xxhash64({keys['left']}) ELSE xxhash64({keys['right']}) END AS exact",
    ]


def _ranked(rule: Rule, frame: DataFrame, side: str, topic: str, ordering: Ordering) -> DataFrame:
    """One side with its rank within the join key, its columns under names of their own."""
    keys = [*key_names(rule), "lone"]
    sequence = ", ".join(ordering.sequence(topic, f"{side}_"))
    window = f"PARTITION BY {', '.join(f'{side}_{key}' for key in keys)} ORDER BY {sequence}"
    return frame.selectExpr(
        name_sql(side),
        *(f"{name} AS {side}_{name}" for name in (*keys, "old", *ordering.columns)),
        *(f"{side}.kafka.{name} AS {side}_{name}" for name in ("partition", "offset")),
    ).selectExpr("*", f"row_number() OVER ({window}) AS {side}_rank")


def one_sided(records: RuleRecords, side: str, emission: Emission) -> DataFrame:
    """New records of a rule whose other side has no records at all, and so no schema yet: all of them are pending."""
    topic = next(item.topic for item in records.rule.sides if item.name == side)
    partition, offset = f"{side}.kafka.partition", f"{side}.kafka.offset"
    order = emission.ordering.sql(topic, partition, offset)
    names = ", ".join(key_names(records.rule))
    rows = (
        "row",
        "CAST(NULL AS bigint) AS other_row",
        "CAST(changes AS int) AS changes",
        "hash AS joined",
        f"array({order}) AS ords",
        f"xxhash64({names}) AS exact",
    )
    return (
        records.frames[side]
        .where("NOT old")
        .selectExpr(
            "'pending' AS kind",
            f"{records.index} AS rule",
            f"{order} AS ord",
            f"array({source_sql(emission.places[topic], partition, offset)}) AS source",
            "0 AS last",
            "0 AS waited",
            "hash",
            "CAST(NULL AS array<boolean>) AS olds",
            "unix_millis(time) AS since",
            "false AS extra",
            "0 AS number",
            *([f"IF(false, {order}, NULL) AS {TURN}"] if expiry.has_causes(records.rule, emission.ordering) else []),
            *(rows if emission.held else ()),
        )
    )
