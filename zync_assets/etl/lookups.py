"""Look-ups of rules: the rows that records look up, what becomes of a record without its row, and the hash by which the record
waits.

A rule sees the row as it is after the batch that processes the record. A record without its row is pending, or goes into
quarantine, or sees nulls. A pending record has the hash of the values that its row must have. If a batch has a row with such
values, the record goes through the rules again (``etl.due``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from zync_assets.codecs.spark_types import arrow_frame
from zync_assets.errors import EtlError
from zync_assets.etl.rules.denorm import hash_sql, part_type
from zync_assets.etl.rules.kind import BLAMED, LOOK_HASH, LOOKED, MISSING, SEVERAL, RuleRecords
from zync_assets.etl.rules.shapes import has_schema, note_schema, type_sql
from zync_assets.etl.views.query import pruned_sql, used_columns
from zync_assets.etl.views.state import MOST_VALUES, StateFiles, StateReader
from zync_assets.etl.views.state_index import KeyFilter, looked_up_places, plain_field, with_list
from zync_assets.etl.views.tables import ROW_VERSION, TableType, table_of, table_type, without_versions
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Rule
from zync_assets.queries import Lookup
from zync_assets.spark.failures import fails
from zync_assets.spark.sql import name_sql, text_sql
from zync_assets.spark.tasks import search_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

KeyTypes = Sequence[Sequence["DataType"]]
"""The types of the compared values of each look-up of a rule."""


def key_types(rule: Rule, frames: Mapping[str, DataFrame]) -> KeyTypes:
    """The types of the compared values. ``frames``: side → records, and alias → rows. EtlError for two types."""
    return [
        [
            part_type(rule, {item.side: record, item.alias: row}, frames, f"lookup.{item.alias}.on")
            for record, row in item.on
        ]
        for item in rule.lookups
    ]


def with_lookups(records: RuleRecords, frames: Mapping[str, DataFrame], rows: Mapping[str, DataFrame]) -> RuleRecords:
    """A rule's records with the types of its look-ups, and with a definition of what its pending records wait for.

    ``frames``: side → records of its topic; ``rows``: alias → rows, empty while a table has no schema.
    """
    rule = records.rule
    sides = {side.name for side in rule.sides}
    kinds = key_types(rule, {**frames, **rows}) if rows and sides <= frames.keys() else None
    type_names = (
        None
        if kinds is None
        else [[kind.simpleString() for kind in lookup_definitions] for lookup_definitions in kinds]
    )
    # Another wait changes no hash.
    lookup_definitions = [asdict(replace(item, wait_ms=0)) for item in rule.lookups]
    definition = json.dumps({"lookups": lookup_definitions, "types": type_names, "pairs": records.join})
    return replace(records, lookups=kinds, join=definition, original=False)


def _record_keys(item: Lookup, kinds: Sequence[DataType]) -> list[str]:
    """The values of a record that its row must have."""
    return [f"CAST(({record}) AS {type_sql(kind)})" for (record, _), kind in zip(item.on, kinds, strict=True)]


def row_keys(item: Lookup, kinds: Sequence[DataType]) -> list[str]:
    """The values that a row has."""
    return [f"CAST(({row}) AS {type_sql(kind)})" for (_, row), kind in zip(item.on, kinds, strict=True)]


def waiting_hash(item: Lookup, keys: Sequence[str], kinds: Sequence[DataType]) -> str:
    """The hash by which a record waits for a row with the values ``keys``; null for a null value."""
    hashed = hash_sql(keys, kinds)
    return f"CASE WHEN {hashed} IS NOT NULL THEN xxhash64({text_sql(item.alias)}, {hashed}) END"


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
    return f"{pruned_sql(used_columns(rule, item.alias), kind, 'row')} AS {name_sql(item.alias)}"


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
            keys = _record_keys(item, types)
            names = [f"{count}_k{at}" for at in range(len(keys))]
            rows = self._rows(rule, item, types, frame).selectExpr(
                name_sql(item.alias),
                *(f"{key_sql} AS {name}" for key_sql, name in zip(row_keys(item, types), names, strict=True)),
            )
            rows = rows.groupBy(*names).agg(
                F.expr(f"count(*) AS {count}"), F.expr(f"any_value({name_sql(item.alias)}) AS {name_sql(item.alias)}")
            )
            equal = " AND ".join(f"{key} = {name}" for key, name in zip(keys, names, strict=True))
            frame = frame.join(rows, F.expr(equal), "left").drop(*names)
        return frame.selectExpr(
            "*",
            f"{_status_sql(rule, counts)} AS {LOOKED}",
            f"{_blamed_sql(rule, counts)} AS {BLAMED}",
            f"{_hashes_sql(rule, kinds, counts)} AS {LOOK_HASH}",
        )

    def refuse_rows(self, rules: Sequence[Rule]) -> None:
        """EtlError for a row on which the ``on`` of a look-up fails. A batch lets no such row into its table: the row is older
        than the look-up."""
        items = [(rule, item, sql) for rule in rules for item in rule.lookups for _, sql in item.on]
        for rule, item, sql in items:
            kind = self.kinds.get(table_of(item.table).name)
            if kind is None or plain_field(kind.state_row, sql, item.alias) is not None:
                continue
            rows = self.reader.rows(kind, self.files[kind.table.name].versions).where("row IS NOT NULL")
            condition = fails(f"transform(array(row), {name_sql(item.alias)} -> ({sql}))")
            with search_settings(self.reader.spark):
                for row in rows.where(condition).selectExpr("to_json(struct(key)) AS key").limit(1).collect():
                    raise EtlError(
                        f"rule {rule.name}, lookup.{item.alias}.on: {sql}: this fails on a row of {item.table.topic} that was"
                        f" there before the look-up: {row['key']}. Nothing was committed. Write an expression that fails on no"
                        " row, as with try_cast."
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

        keys = _record_keys(item, types)
        values = frame.selectExpr(*(f"{key} AS z_k{at}" for at, key in enumerate(keys))).distinct()
        key_filter = KeyFilter(values, row_keys(item, types))
        table = values.limit(MOST_VALUES + 1).toArrow() if self.small else None
        if table is None or table.num_rows > MOST_VALUES:
            return key_filter
        list_filter = with_list(key_filter, plain_field(kind.state_row, item.on[0][1], item.alias), table)
        # Arrow knows no collation.
        typed = (f"CAST(z_k{at} AS {type_sql(value_type)}) AS z_k{at}" for at, value_type in enumerate(types))
        fetched_values = arrow_frame(self.reader.spark, table).selectExpr(*typed)
        return list_filter or KeyFilter(F.broadcast(fetched_values), key_filter.own)


def _status_sql(rule: Rule, counts: Sequence[str]) -> str:
    """The kind of a record's result: ``out``, ``pending``, MISSING or SEVERAL. ``counts``: the number of rows of each
    look-up."""
    cases = [f"WHEN {count} > 1 THEN '{SEVERAL}'" for count in counts]
    for word, kind in (("quarantine", MISSING), ("wait", "pending")):
        absent = [f"{count} IS NULL" for item, count in zip(rule.lookups, counts, strict=True) if item.missing == word]
        cases += [f"WHEN {' OR '.join(absent)} THEN '{kind}'"] if absent else []
    return f"CASE {' '.join(cases)} ELSE 'out' END"


def _blamed_sql(rule: Rule, counts: Sequence[str]) -> str:
    """The index of the side whose record has no row, or several."""
    sides = [side.name for side in rule.sides]
    pairs = list(zip(rule.lookups, counts, strict=True))
    cases = [f"WHEN {count} > 1 THEN {sides.index(item.side)}" for item, count in pairs]
    cases += [
        f"WHEN {count} IS NULL THEN {sides.index(item.side)}" for item, count in pairs if item.missing == "quarantine"
    ]
    return f"CASE {' '.join(cases)} ELSE 0 END"


def _hashes_sql(rule: Rule, kinds: KeyTypes, counts: Sequence[str]) -> str:
    """The hash by which a record waits for the first row that it lacks."""
    cases = [
        f"WHEN {count} IS NULL THEN {waiting_hash(item, _record_keys(item, types), types)}"
        for item, types, count in zip(rule.lookups, kinds, counts, strict=True)
        if item.missing == "wait"
    ]
    return f"CASE {' '.join(cases)} END" if cases else "CAST(NULL AS bigint)"


def reason(rule: Rule, kind: str) -> str:
    """Why a record of the kind MISSING or SEVERAL goes into quarantine."""
    lookups = [item for item in rule.lookups if kind == SEVERAL or item.missing == "quarantine"]
    rows = "several rows have" if kind == SEVERAL else "no row has"
    return " or ".join(f"lookup {item.alias}: {rows} {item.condition} in {item.table.topic}" for item in lookups)


def waiting_reason(rule: Rule, since: str | None, *, null: bool) -> str:
    """Why a record of a stateless rule is pending. ``since``: the time since which it waits; ``null``: it has no hash."""
    lookups = [item for item in rule.lookups if item.missing == "wait"]
    rows = " or ".join(f"no row with {item.condition} in {item.table.topic} yet" for item in lookups)
    if since is not None and not lookups:
        return "the rule waited for a row when it took the record; the next batch with new records matches it again"
    if since is None or not lookups:
        return f"no record gave a type to {' or '.join(dict.fromkeys(table.topic for table in rule.tables))} yet"
    start, wait = datetime.fromisoformat(since), timedelta(milliseconds=max(item.wait_ms for item in lookups))
    why = "a null matches no row, or a table has no type yet: " if null else ""
    return f"{why}{rows}; it goes into quarantine after {(start + wait).isoformat(timespec='seconds')}"


def overdue_reason(rule: Rule) -> str:
    """The reason for the quarantine of a record whose wait is over."""
    lookups = [item for item in rule.lookups if item.missing == "wait"]
    return " or ".join(
        f"lookup {item.alias}: no row with {item.condition} came in {item.table.topic} within {item.wait_ms // 1000} s"
        for item in lookups
    )
