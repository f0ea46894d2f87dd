"""The outputs of one match: one, or several of a rule with several outputs or ``explode``.

A rule with several outputs is several rules of the model. The first takes the records, and the others are ``part_of`` it. A match
then has an array of parts, one for each output, and becomes a row for each part. The first row counts its sources, and the others
are ``extra``. A match without a part is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from zync_assets.errors import EtlError
from zync_assets.etl.rules.assignment import KEPT
from zync_assets.etl.rules.kind import Emission, OutputColumns
from zync_assets.etl.rules.shapes import ITEM, expression_type, type_sql
from zync_assets.pipeline import Rule
from zync_assets.spark.sql import name_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType


def output_rows(frame: DataFrame, rule: Rule, about: Sequence[str], condition: str, emission: Emission) -> DataFrame:
    """Result rows with their outputs. ``about``: the other columns, with ``kind`` and ``rule``; ``condition``: whether a row
    makes outputs, as SQL over ``frame``."""
    assert emission.target is not None
    if not emission.parts:
        outputs = emission.columns(rule, emission.target)
        return frame.selectExpr(
            *about, *(f"CASE WHEN {condition} THEN {sql} END AS {name_sql(name)}" for name, sql in outputs)
        )
    types = _types(emission)
    parts = [(at, part, dict(emission.columns(part, target))) for at, part, target in emission.parts]
    searching = not types.keys() >= {name for _, _, columns in parts for name in columns} - {KEPT}
    names = list(dict.fromkeys(name for _, _, columns in parts for name in columns if name != KEPT))
    arrays = [_array(at, part, columns, names, types, searching) for at, part, columns in parts]
    rows = frame.selectExpr(*about, f"CASE WHEN {condition} THEN concat({', '.join(arrays)}) END AS parts")
    rows = rows.selectExpr("*", "posexplode_outer(parts) AS (number, part)")
    return rows.selectExpr(
        "* EXCEPT (kind, rule, parts, number, part)",
        "CASE WHEN kind = 'out' AND part IS NULL THEN 'dropped' ELSE kind END AS kind",
        "coalesce(part.rule, rule) AS rule",
        "coalesce(number, 0) > 0 AS extra",
        "number",
        *(f"part.{name_sql(name)} AS {name_sql(name)}" for name in names),
    )


def _types(emission: Emission) -> dict[str, str]:
    """Column of an output → its type."""
    sides = [side for _, _, target in emission.parts for side in (target.key, target.value) if side is not None]
    return {
        **{column: type_sql(kind) for column, _, kind in sides},
        "headers": "array<struct<key: string, value: binary>>",
        "lacking": "array<string>",
    }


def _array(
    at: int, part: Rule, columns: Mapping[str, str], names: Sequence[str], types: Mapping[str, str], searching: bool
) -> str:
    """The parts of one output, as an array in SQL. ``searching``: the columns say whether the output fails."""

    def column(name: str) -> str:
        none = "CAST(NULL AS STRING)" if searching else f"CAST(NULL AS {types[name]})"
        sql = columns.get(name, none)
        return f"{sql} AS {name_sql(name)}" if searching else f"CAST({sql} AS {types[name]}) AS {name_sql(name)}"

    output = f"struct({', '.join([f'{at} AS rule', *map(column, names)])})"
    if searching:
        return f"array({output})"
    if part.explode is None:
        keep = part.keep or "true"
        return f"filter(array(CASE WHEN {keep} THEN {output} END), part -> part IS NOT NULL)"
    items = f"coalesce({part.explode}, array())"
    if part.keep is not None:
        items = f"filter({items}, {ITEM} -> {part.keep})"
    return f"transform({items}, {ITEM} -> {output})"


def item_type(sides: Mapping[str, DataFrame], rule: Rule) -> DataType:
    """The type of the elements that a rule makes outputs of. EtlError for what is no array."""
    from pyspark.sql.types import ArrayType

    assert rule.explode is not None
    kind = expression_type(sides, f"({rule.explode})", rule.name, "explode")
    if not isinstance(kind, ArrayType):
        raise EtlError(
            f"rule {rule.name}, explode: {rule.explode} is {kind.simpleString()}; write an array. map_entries(…) makes one of a"
            " map."
        )
    return kind.elementType


def item_frame(sides: Mapping[str, DataFrame], rule: Rule) -> DataFrame:
    """A frame with the column ``item``, for the types of the rule's expressions."""
    from pyspark.sql.types import StructField, StructType

    spark = next(iter(sides.values())).sparkSession
    return spark.createDataFrame([], StructType([StructField(ITEM, item_type(sides, rule))]))


def several(rules: Sequence[Rule]) -> frozenset[str]:
    """The rules that may make several outputs of a match."""
    return frozenset(
        rule.part_of or rule.name for rule in rules if rule.part_of is not None or rule.explode is not None
    )


def several_topics(rules: Sequence[Rule]) -> frozenset[str]:
    """The inputs of these rules."""
    names = several(rules)
    return frozenset(topic for rule in rules if rule.name in names for topic in rule.topics)


class OutputTypes(Protocol):
    """The type of an output topic (``etl.output_types``)."""

    @property
    def targets(self) -> Mapping[str, OutputColumns]: ...

    @property
    def untyped(self) -> Mapping[str, str]: ...


def parts_of(
    rules: Sequence[Rule], types: Mapping[str, OutputTypes], rule: Rule
) -> list[tuple[int, Rule, OutputColumns]]:
    """The outputs of a rule with several: each as a rule with its index. EtlError for one whose types are not known."""
    parts = [(at, part) for at, part in enumerate(rules) if rule.name in (part.name, part.part_of)]
    for _, part in parts:
        if part.name in types[part.out].untyped:
            raise EtlError(types[part.out].untyped[part.name])
    return [(at, part, types[part.out].targets[part.name]) for at, part in parts]


def optional_columns(rules: Sequence[Rule], names: Collection[str], *, merges: bool, held: bool) -> list[str]:
    """The columns of result rows that only some rules make. ``names``: the rules with several outputs of a match; ``merges``:
    outputs are merged; ``held``: an output is held."""
    columns = ["takers", *(["rows"] if held else [])] if merges else []
    columns += ["olds"] if merges or any(rule.group is not None or rule.expiry is not None for rule in rules) else []
    columns += ["extra", "number"] if any(rule.name in names for rule in rules) else []
    return [*columns, "since"] if any(rule.expiry is not None for rule in rules) else columns
