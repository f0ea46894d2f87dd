"""The rows that contribute to an output of a view now, for ``zync trace``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zync_assets.etl.rules.kind import Ordering
from zync_assets.etl.views.maintenance import Maintenance
from zync_assets.etl.views.query import CAUSE, KEY, Query, V
from zync_assets.etl.views.state import StateReader, state_files
from zync_assets.etl.views.tables import TableType, has_result, stored_type, table_of
from zync_assets.lake.staging import StagingState
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Rule
from zync_assets.spark import frames
from zync_assets.spark.frames import union
from zync_assets.spark.sql import text_sql
from zync_assets.spark.tasks import guarded_elements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, order=True)
class Contribution:
    """A row of a table, with the record that holds the row."""

    alias: str
    topic: str
    partition: int
    offset: int


def contributions(
    spark: SparkSession, state: StagingState, rules: Sequence[Rule], rule: Rule, offset: int, partition: int = 0
) -> list[Contribution] | None:
    """The rows from which the key of an output has its value now, by alias and record; empty if the key has none.

    None if the pool has no result of the view as the rule is now. ``rules``: of the pool, with the lake's names.
    """
    assert rule.view is not None
    tables = {item.alias: table_of(item) for item in rule.view.tables}
    kinds: dict[str, TableType] = {}
    for alias, table in tables.items():
        if (kind := stored_type(table, state)) is not None:
            kinds[alias] = kind
    if not has_result(state.head.views, rule, rules) or len(kinds) < len(tables):
        return None
    staged = frames.output_frame(spark, state, rule.out, [OffsetRange(partition, offset, offset + 1)])
    key = staged.selectExpr(f"key AS {KEY}")
    query, reader = Query(rule), StateReader(spark, state.table.uri)
    files = {alias: state_files(state, table) for alias, table in tables.items()}
    types = key.schema[KEY].dataType, key.schema[KEY].dataType, None
    maintenance = _OneKey(query, 0, reader, Ordering({}), kinds, files, {}, types, fresh=False, small=True, key=key)
    joined_rows = None if maintenance.all_new else maintenance.joined()
    if joined_rows is None:
        return []
    causes = union(
        joined_rows.where(f"{V} = 1").selectExpr(f"{text_sql(alias)} AS alias", f"inline({CAUSE}_{at})")
        for at, alias in enumerate(query.aliases)
    )
    with guarded_elements(spark, repr(rule)):
        rows = causes.select("alias", "partition", "offset").distinct().collect()
    places = [Contribution(row["alias"], tables[row["alias"]].topic, row["partition"], row["offset"]) for row in rows]
    return sorted(places, key=lambda item: (query.aliases.index(item.alias), item.partition, item.offset))


@dataclass(frozen=True)
class _OneKey(Maintenance):
    """The joined rows of one key, each row with the place of its record as its cause. ``key``: the column KEY."""

    key: DataFrame | None = None

    def touched(self) -> DataFrame | None:
        return self.key

    def _no_cause(self) -> tuple[str, str]:
        order, _ = super()._no_cause()
        place = "named_struct('partition', version.partition, 'offset', version.offset)"
        return order, f"array({place}) AS {CAUSE}"
