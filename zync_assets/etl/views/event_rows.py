"""The rows that events look up: the latest rows of tables after a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zync_assets.codecs.spark_types import arrow_frame
from zync_assets.etl.rules import lookups
from zync_assets.etl.rules.assignment import has_schema
from zync_assets.etl.rules.kind import BLAMED, LOOK_HASH, LOOKED, RuleRecords
from zync_assets.etl.rules.shapes import note_schema, type_sql
from zync_assets.etl.views.key_filter import KeyFilter, plain_field, with_list
from zync_assets.etl.views.query import pruned_sql, used_columns
from zync_assets.etl.views.state import StateFiles, StateReader
from zync_assets.etl.views.state_index import looked_up_places
from zync_assets.etl.views.tables import ROW_VERSION, TableType, table_of, table_type, without_versions
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Rule
from zync_assets.queries import Lookup
from zync_assets.spark.sql import leaves, name_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

MOST_VALUES = 20_000
"""The most values whose ranges are fetched. With the ranges, Spark skips parts of files."""


def row_frames(rule: Rule, frames: Mapping[str, DataFrame], state: StagingState | None) -> dict[str, DataFrame]:
    """Alias → a frame without rows that has the type of the alias. Empty while a table has no schema. ``frames``: input topic →
    records."""
    from pyspark.sql.types import StructField, StructType

    alias_frames: dict[str, DataFrame] = {}
    for item in rule.lookups:
        topic = item.table.topic
        if topic not in frames or not has_schema(frames[topic]):
            return {}
        kind = table_type(table_of(item.table), frames[topic], state).state_row
        row = frames[topic].where("false").selectExpr(f"CAST(NULL AS {type_sql(kind)}) AS {name_sql(item.alias)}")
        alias_frames[item.alias] = note_schema(row, StructType([StructField(item.alias, kind)]))
    return alias_frames


def row_sql(rule: Rule, item: Lookup, kind: DataType) -> str:
    """The row under its alias, with the columns that the rule needs."""
    headers = rule.headers
    texts = [sql for shape in (rule.key, rule.value) for _, sql in leaves(shape, "")]
    texts += [] if headers is None else [headers] if isinstance(headers, str) else list(headers.values())
    texts += [*(row_key for _, row_key in item.on), *([] if rule.keep is None else [rule.keep])]
    return f"{pruned_sql(used_columns(texts, item.alias), kind, 'row')} AS {name_sql(item.alias)}"


@dataclass(frozen=True)
class EventRows:
    """The latest rows of tables after a batch. ``kinds``, ``files``: by the name of the table. ``small``: see ``Stage``."""

    reader: StateReader
    kinds: Mapping[str, TableType]
    files: Mapping[str, StateFiles] = field(repr=False)
    small: bool

    def joined(self, records: RuleRecords, frame: DataFrame) -> DataFrame:
        """The records with the rows that they look up, and LOOKED, BLAMED and LOOK_HASH. ``frame``: sides as columns."""
        from pyspark.sql import functions as F

        rule, kinds = records.rule, records.lookups
        assert kinds is not None
        counts = [f"z_rows{at}" for at in range(len(rule.lookups))]
        for item, types, count in zip(rule.lookups, kinds, counts, strict=True):
            keys = lookups.record_keys(item, types)
            names = [f"{count}_k{at}" for at in range(len(keys))]
            rows = self._rows(rule, item, types, frame).selectExpr(
                name_sql(item.alias),
                *(f"{key_sql} AS {name}" for key_sql, name in zip(lookups.row_keys(item, types), names, strict=True)),
            )
            rows = rows.groupBy(*names).agg(
                F.expr(f"count(*) AS {count}"), F.expr(f"any_value({name_sql(item.alias)}) AS {name_sql(item.alias)}")
            )
            equal = " AND ".join(f"{key} = {name}" for key, name in zip(keys, names, strict=True))
            frame = frame.join(rows, F.expr(equal), "left").drop(*names)
        return frame.selectExpr(
            "*",
            f"{lookups.status_sql(rule, counts)} AS {LOOKED}",
            f"{lookups.blamed_sql(rule, counts)} AS {BLAMED}",
            f"{lookups.hashes_sql(rule, kinds, counts)} AS {LOOK_HASH}",
        )

    def _rows(self, rule: Rule, item: Lookup, types: Sequence[DataType], frame: DataFrame) -> DataFrame:
        """The rows under their alias that a record may look up."""
        table = table_of(item.table)
        kind, files = self.kinds[table.name], self.files[table.name]
        values = self._values(item, types, frame, kind)

        places = looked_up_places(self.reader, kind, files, values)

        def versions(version_files: Sequence[DataFile]) -> DataFrame:
            rows = self.reader.rows(kind, version_files, places).where("row IS NOT NULL")
            rows = values.within(rows).selectExpr(row_sql(rule, item, kind.state_row), f"version AS {ROW_VERSION}")
            return values.keep(rows, item.alias)

        rows = versions(files.versions)
        if not files.replaced:
            return rows
        return without_versions(rows, versions(files.replaced), version=ROW_VERSION)

    def _values(self, item: Lookup, types: Sequence[DataType], frame: DataFrame, kind: TableType) -> KeyFilter:
        """The values that records look up."""
        from pyspark.sql import functions as F

        keys = lookups.record_keys(item, types)
        values = frame.selectExpr(*(f"{key} AS z_k{at}" for at, key in enumerate(keys))).distinct()
        key_filter = KeyFilter(values, lookups.row_keys(item, types))
        table = values.limit(MOST_VALUES + 1).toArrow() if self.small else None
        if table is None or table.num_rows > MOST_VALUES:
            return key_filter
        list_filter = with_list(key_filter, plain_field(kind.state_row, item.on[0][1], item.alias), table)
        return list_filter or KeyFilter(F.broadcast(arrow_frame(self.reader.spark, table)), key_filter.own)
