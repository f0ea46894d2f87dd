"""The maintenance of a view: from the changes of its tables to the differences of its result.

1. ``touched``: the keys of the view that the changes touch. From each changed row, before and after, joins lead along the join
   tree to the tables of the view's key.
2. ``rows``: the rows that contribute to these keys, table by table from the key outwards, before and after the batch.
3. ``differences``: the results for these keys before and after, compared.

A view without an earlier result takes all rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import arrow_frame
from zync_assets.etl.failures import MOST_FAILURES, Failure, Place
from zync_assets.etl.rules.matching import Columns, Ordering, Target
from zync_assets.etl.views.changes import Change, RowFailures
from zync_assets.etl.views.key_filter import (
    KeyFilter,
    cast_sql,
    checkpoint,
    key_paths,
    listed_values,
    plain_column,
    substituted,
)
from zync_assets.etl.views.query import CAUSE, CHOICE, HEADERS, KEY, ORD, VALUE, Query, Step, V, same_sql
from zync_assets.etl.views.state import Reader, StateFiles, without_versions
from zync_assets.etl.views.tables import TableType, null_sql
from zync_assets.lake.log import DataFile
from zync_assets.spark.frames import union
from zync_assets.spark.sql import name_sql, shape_sql, text_sql
from zync_assets.spark.tasks import planned_once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

FEW = 200_000
"""Touched keys up to which the rows of each table are looked up by values. More are found by plain joins."""
MOST_VALUES = 20_000
"""Values that are fetched and listed, so that Spark skips parts of files."""

DUPLICATE = "[duplicate key] "
"""Marks the text of a task's error."""


@dataclass(frozen=True)
class Maintenance:
    """The maintenance of one view in a batch.

    ``index``: the rule's. ``kinds``, ``before``, ``changes``: alias → the type of its table, the table's files before the batch,
    and its changes, if there are some. ``fresh``: the pool has no result of the view yet.
    """

    query: Query
    index: int
    reader: Reader
    ordering: Ordering
    kinds: Mapping[str, TableType]
    before: Mapping[str, StateFiles]
    changes: Mapping[str, Change]
    types: tuple[DataType, DataType, DataType | None]
    fresh: bool
    small: bool

    @property
    def all_new(self) -> bool:
        """Whether all result rows are new ones."""
        return self.fresh or not any(self.before[alias].versions for alias in self.query.aliases)

    def results(self, target: Target, columns: Columns) -> DataFrame | None:
        """The differences of the result as result rows (``matching``); None if no key of the view is touched.

        Raises RowFailures for result rows with a null key.
        """
        with self._planning():
            sized, touched, few = self._begun()
        return sized.results_of(touched, target, columns, few=few)

    def results_of(self, touched: DataFrame | None, target: Target, columns: Columns, *, few: bool) -> DataFrame | None:
        """As ``results``, for these touched keys. ``few``: whether they are looked up by values."""
        with self._planning():
            joined = self.joined_rows(touched, few=few)
            if joined is None:
                return None
            found = checkpoint(self._differences(self.query.results(joined)), eager=not self.small)
            keyless = null_sql(KEY, self.types[0])
            [row] = found.selectExpr("count(*) AS count", f"count_if({keyless}) AS keyless").collect()
            if row["keyless"]:
                raise RowFailures(self._keyless(joined))
        return self._outputs(found, target, columns) if row["count"] or self.fresh else None

    def joined(self, *, where: bool = True) -> DataFrame | None:
        """The joined rows of the touched keys, before and after the batch. ``where``: see ``Query.joined``."""
        sized, touched, few = self._begun()
        return sized.joined_rows(touched, few=few, where=where)

    def _planning(self) -> AbstractContextManager[None]:
        return planned_once(self.reader.spark) if self.small else nullcontext()

    def _begun(self) -> tuple[Maintenance, DataFrame | None, bool]:
        """The maintenance, small only if few rows are read; the touched keys (None: there are none, or all are new); whether they
        are few."""
        if self.all_new:
            large = any(files.versions for files in self.before.values())
            return (replace(self, small=False) if large else self), None, True
        touched = self.touched()
        if touched is None:
            return self, None, True
        table = self._fetched(touched)
        if table is not None:
            return self, arrow_frame(self.reader.spark, table) if table.num_rows else None, True
        touched = checkpoint(touched)
        count = touched.count()
        return replace(self, small=False), touched if count else None, count <= FEW

    def joined_rows(self, touched: DataFrame | None, *, few: bool, where: bool = True) -> DataFrame | None:
        """As ``joined``, for these touched keys."""
        query = self.query
        if self.all_new:
            return query.joined({alias: self.rows(alias) for alias in query.aliases}, where=where)
        if touched is None:
            return None
        start, own = self._start()
        paths = [(sql, path) for sql, path in key_paths(query.rule.key, KEY) if query.owners(sql) == {start}]
        values = touched.selectExpr(*(f"{path} AS k{at}" for at, (_, path) in enumerate(paths)))
        rows = {
            start: self.rows(start, self._values(start, values, [sql for sql, _ in paths], few=few, null_safe=True))
        }
        steps = query.outwards(start)
        for near in dict.fromkeys(step.near for step in steps):
            outwards = [step for step in steps if step.near == near]
            if few and any(step.pairs for step in outwards):
                rows[near] = checkpoint(rows[near], eager=not self.small)
            for step, found in zip(outwards, self._step_values(rows[near], outwards, few=few), strict=True):
                rows[step.far] = self.rows(step.far, found)
        joined = query.joined(rows, where=where)
        if not own:
            from pyspark.sql import functions as F

            mine = joined.withColumn("z_mine", F.expr(shape_sql(query.rule.key)))
            other = touched.withColumnRenamed(KEY, "z_touched")
            joined = mine.join(other, F.expr("z_mine <=> z_touched"), "left_semi").drop("z_mine")
        return joined

    def _start(self) -> tuple[str, bool]:
        """The alias of the first field of the key that is of one alias; whether all fields are of this alias."""
        owners = [self.query.owners(sql) for sql in self.query.key_leaves]
        first = next((each for each in owners if len(each) == 1), None)
        if first is None:
            return self.query.view.root, False
        return next(iter(first)), all(each == first for each in owners)

    def touched(self) -> DataFrame | None:
        """The keys (column KEY) of the view that the changes touch; None if no row changed."""
        parts = [self._touched_by(alias) for alias in self.query.aliases if alias in self.changes]
        if not parts:
            return None
        return union(parts).coalesce(1).distinct() if self.small else union(parts).distinct()

    def _touched_by(self, alias: str) -> DataFrame:
        """The keys that the changed rows of an alias touch."""
        from pyspark.sql import functions as F

        query = self.query
        frame = self.delta(alias).where("z_changed").select(V, name_sql(alias))
        substitutes: dict[str, str] = {}
        steps = query.path(alias)
        for _, far, pairs in steps:
            of_far = [sql for sql in query.key_leaves if far in query.owners(sql)]
            equal = {other.strip(): one for one, other in pairs}
            last = not any(step.near == far for step in steps)
            if last and all(sql.strip() in equal for sql in of_far):
                # The changed row has the key already.
                substitutes |= {sql: equal[sql.strip()] for sql in of_far}
                continue
            values = None
            if self.small and pairs:
                each = frame.selectExpr(*(f"{one} AS k{at}" for at, (one, _) in enumerate(pairs))).distinct()
                values = self._values(far, each, [other for _, other in pairs], few=True)
            other = self.rows(far, values).selectExpr(f"{V} AS z_other", name_sql(far))
            equality = " AND ".join(f"({one}) = ({two})" for one, two in pairs) or "true"
            frame = frame.join(other, F.expr(f"{V} = z_other AND {equality}")).drop("z_other")
        key = cast_sql(substituted(query.rule.key, substitutes), self.types[0])
        return frame.selectExpr(f"{key} AS {KEY}")

    def _values(
        self, alias: str, frame: DataFrame, own: Sequence[str], *, few: bool, null_safe: bool = False
    ) -> KeyFilter:
        from pyspark.sql import functions as F

        found = KeyFilter(frame, own, null_safe=null_safe)
        if not few:
            return found
        table = self._fetched(frame)
        if table is None:
            return replace(found, frame=F.broadcast(checkpoint(frame)))
        return self._listed(alias, table, found)

    def _listed(self, alias: str, table: pa.Table, found: KeyFilter) -> KeyFilter:
        """Fetched values."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        found = replace(found, frame=F.broadcast(arrow_frame(self.reader.spark, table)))
        kind, name = self.kinds[alias].state_row, plain_column(found.own[0], alias)
        types = {item.name.lower(): item for item in kind} if isinstance(kind, StructType) else {}
        item = types.get((name or "").lower())
        if item is None or len(found.own) > 1 or (found.null_safe and table["k0"].null_count):
            return found
        listed = listed_values(item.dataType, sorted(set(table["k0"].drop_null().to_pylist())))
        return found if listed is None else replace(found, column=item.name, listed=listed)

    def _step_values(self, near: DataFrame, steps: Sequence[Step], *, few: bool) -> list[KeyFilter | None]:
        """For each join from rows, the values that the joined rows must have; None for all rows."""
        each = [[f"{one} AS k{at}" for at, (one, _) in enumerate(step.pairs)] for step in steps]
        if not few:
            return [None for _ in steps]
        wanted = [f"struct({', '.join(names)}) AS s{at}" for at, names in enumerate(each) if names]
        table = self._fetched(near.selectExpr(*wanted)) if wanted else None
        found: list[KeyFilter | None] = []
        for at, (step, names) in enumerate(zip(steps, each, strict=True)):
            own = [other for _, other in step.pairs]
            if not names:
                found.append(None)
            elif table is None:
                found.append(self._values(step.far, near.selectExpr(*names).distinct(), own, few=True))
            else:
                values = pa.Table.from_struct_array(table[f"s{at}"])
                if not any(pa.types.is_nested(kind) for kind in values.schema.types):
                    values = values.group_by(values.column_names).aggregate([])
                found.append(self._listed(step.far, values, KeyFilter(near, own)))
        return found

    def _fetched(self, frame: DataFrame) -> pa.Table | None:
        """The rows of a frame of keys; None if they are many."""
        if not self.small:
            return None
        table = frame.limit(MOST_VALUES + 1).toArrow()
        return table if table.num_rows <= MOST_VALUES else None

    def rows(self, alias: str, values: KeyFilter | None = None) -> DataFrame:
        """The rows of an alias before and after the batch: the row under the alias, V, ORD, CAUSE. ``values``: of the wanted
        rows."""
        frames = [self._unchanged(alias, values)] if self.before[alias].versions else []
        if alias in self.changes:
            delta = self.delta(alias).drop("z_changed")
            frames.append(delta if values is None else values.keep(delta, alias))
        if not frames:
            return (
                self._of_versions(alias, (), None, self._no_cause())
                .where("false")
                .selectExpr("*", f"1 AS {V}")
                .drop("version")
            )
        # In a small batch, one task joins the rows.
        return union(frames).coalesce(1) if self.small else union(frames)

    def _unchanged(self, alias: str, values: KeyFilter | None) -> DataFrame:
        """The rows that the batch does not change."""
        before, change = self.before[alias], self.changes.get(alias)
        cause = self._cause_sql(alias, "array(version.offset)", "version.offset") if self.fresh else self._no_cause()
        found = self._of_versions(alias, before.versions, values, cause)
        pairs = None if change is None else change.pairs
        files = (*before.replaced, *(change.files.replaced if change is not None and pairs is None else ()))
        gone = [self._of_versions(alias, files, values, ()).select("version")] if files else []
        if pairs is not None and change is not None and change.files.replaced:
            gone.append(pairs.where("old_version IS NOT NULL").selectExpr("old_version AS version"))
        if self.small:
            found = found.repartition(1)
        if gone:
            found = without_versions(found, union(gone).repartition(1) if self.small else union(gone))
        versions = "1" if self.all_new else "explode(array(0, 1))"
        return found.selectExpr(name_sql(alias), ORD, CAUSE, f"{versions} AS {V}")

    def _of_versions(
        self, alias: str, files: Sequence[DataFile], values: KeyFilter | None, columns: Sequence[str]
    ) -> DataFrame:
        """The rows of some files under the alias, their ``version``, and further columns."""
        kind = self.kinds[alias]
        rows = self.reader.rows(kind, files).where("row IS NOT NULL")
        rows = rows if values is None else values.within(rows)
        made = self.query.row_sql(alias, kind.state_row)
        found = rows.selectExpr(f"{made} AS {name_sql(alias)}", "version", *columns)
        # The state has been looked up by listed values.
        return found if values is None or values.column is not None else values.keep(found, alias)

    def delta(self, alias: str) -> DataFrame:
        """The rows of the keys that the batch changes: the row under the alias, V, ORD, CAUSE, ``z_changed``. A row is
        changed if a column that the view needs is."""
        from pyspark.sql import functions as F

        kind, change = self.kinds[alias], self.changes[alias]
        if change.pairs is not None:
            pairs = change.pairs.selectExpr("*", "old_row AS z_old")
        else:
            pairs = self.reader.rows(kind, change.files.versions)
            old = self.reader.rows(kind, change.files.replaced).selectExpr("key AS old_key", "row AS z_old")
            pairs = pairs.join(old, F.expr("key = old_key"), "left") if change.files.replaced else pairs
        row = self.query.row_sql(alias, kind.state_row)
        cause = self._cause_sql(alias, "version.offsets", "element_at(version.offsets, -1)")
        if not change.files.replaced:
            return pairs.where("row IS NOT NULL").selectExpr(
                f"{row} AS {name_sql(alias)}", f"1 AS {V}", *cause, "true AS z_changed"
            )
        pairs = pairs.selectExpr(
            f"{row} AS after", f"{self.query.row_sql(alias, kind.state_row, 'z_old')} AS before", *cause
        )
        # A record that changes no column that the view needs is no cause.
        changed = f"NOT {same_sql('before', 'after', pairs.schema['after'].dataType)}"
        each = "explode(array(named_struct('v', 0, 'row', before), named_struct('v', 1, 'row', after))) AS each"
        return (
            pairs.selectExpr(ORD, CAUSE, f"{changed} AS z_changed", each)
            .where("each.row IS NOT NULL" + (" AND each.v = 1" if self.all_new else ""))
            .selectExpr(
                f"each.row AS {name_sql(alias)}",
                f"each.v AS {V}",
                *(
                    f"CASE WHEN z_changed{' OR true' if self.fresh else ''} THEN {name} END AS {name}"
                    for name in (ORD, CAUSE)
                ),
                "z_changed",
            )
        )

    def _cause_sql(self, alias: str, offsets: str, last: str) -> tuple[str, str]:
        """ORD and CAUSE of a version that some records of the table's topic made."""
        ordering, topic = self.ordering, self.kinds[alias].table.topic
        place = ordering.places[topic]
        values = {
            "rank": str(list(ordering.groups).index(ordering.domains.get(topic))),
            "high": "version.high",
            "low": "version.low",
            "place": str(place),
            "partition": "version.partition",
            "offset": last,
        }
        order = ", ".join(f"{values[name]} AS {name}" for name in ordering.parts)
        each = f"named_struct('place', {place}, 'partition', version.partition, 'offset', it)"
        return f"struct({order}) AS {ORD}", f"transform({offsets}, it -> {each}) AS {CAUSE}"

    def _no_cause(self) -> tuple[str, str]:
        """ORD and CAUSE of a row that the batch does not change."""
        kinds = {"rank": "INT", "place": "INT", "partition": "INT"}
        order = ", ".join(f"{name}: {kinds.get(name, 'BIGINT')}" for name in self.ordering.parts)
        cause = "ARRAY<STRUCT<place: INT, partition: INT, offset: BIGINT>>"
        return f"CAST(NULL AS STRUCT<{order}>) AS {ORD}", f"CAST(NULL AS {cause}) AS {CAUSE}"

    def _differences(self, results: DataFrame) -> DataFrame:
        """The keys whose result differs: KEY, VALUE and HEADERS (null: the result has no such key any more), ORD,
        CAUSE. The frame fails for several result rows with one key."""
        from pyspark.sql import functions as F

        row = f"struct({VALUE}, {HEADERS})"
        chosen = self.query.view.on_duplicate_key is not None

        def picked(v: int) -> str:
            best = f"struct({CHOICE}, to_json(struct({VALUE})))"
            made = f"max_by({row}, {best})" if chosen else f"any_value({row})"
            return f"{made} FILTER (WHERE {V} = {v})"

        columns = [
            f"max({ORD}) AS {ORD}",
            f"array_distinct(flatten(collect_list({CAUSE}))) AS {CAUSE}",
            f"{picked(1)} AS after",
        ]
        columns.append("CAST(0 AS BIGINT) AS copies" if chosen else f"count_if({V} = 1) AS copies")
        if not chosen:
            columns.append(f"concat_ws(' and ', min(to_json(struct({VALUE}))), max(to_json(struct({VALUE})))) AS texts")
        if not self.all_new:
            columns.append(f"{picked(0)} AS before")
        found = results.groupBy(KEY).agg(*map(F.expr, columns))
        if not self.all_new:
            kind = found.schema["after"].dataType
            found = found.where(f"copies > 1 OR NOT {same_sql('before', 'after', kind)}")
        key = KEY
        if not chosen:
            begin = text_sql(f"{DUPLICATE}view {self.query.rule.name}: two result rows have the key ")
            text = f"concat({begin}, to_json(struct({KEY} AS key)), ': ', texts)"
            key = (
                f"CASE WHEN copies > 1 AND NOT ({null_sql(KEY, self.types[0])}) THEN raise_error({text}) ELSE {KEY} END"
            )
        sides = (f"after.{name} AS {name}" for name in (VALUE, HEADERS))
        return found.selectExpr(f"{key} AS {KEY}", *sides, ORD, CAUSE)

    def _outputs(self, found: DataFrame, target: Target, columns: Columns) -> DataFrame:
        """The differences as result rows."""
        # The columns hold what the rule makes: the rule's shapes are their names.
        rule = replace(self.query.rule, key=KEY, value=VALUE, headers=HEADERS if target.headers else None, keep=None)
        if self.query.rule.headers is None:
            rule = replace(rule, headers=None)
        at = f"named_struct('place', {ORD}.place, 'partition', {ORD}.partition, 'offset', {ORD}.offset)"
        return found.selectExpr(
            "'out' AS kind",
            f"{self.index} AS rule",
            f"{ORD} AS ord",
            f"sort_array({CAUSE}) AS source",
            f"CAST(array_position(sort_array({CAUSE}), {at}) - 1 AS INT) AS last",
            "0 AS waited",
            "CAST(NULL AS BIGINT) AS hash",
            *(f"{sql} AS {name_sql(name)}" for name, sql in columns(rule, target)),
        )

    def _keyless(self, joined: DataFrame) -> dict[Place, Failure]:
        """The records that complete result rows with a null key."""
        keyless = null_sql(KEY, self.types[0])
        rows = self.query.results(joined).where(f"{V} = 1 AND ({keyless}) AND {ORD} IS NOT NULL")
        topics = {place: topic for topic, place in self.ordering.places.items()}
        found: dict[Place, Failure] = {}
        for row in (
            rows.selectExpr(f"{ORD}.place", f"{ORD}.partition", f"{ORD}.offset")
            .distinct()
            .limit(MOST_FAILURES + 1)
            .collect()
        ):
            at = topics[row["place"]], row["partition"], row["offset"]
            found[at] = Failure(*at, self.query.rule.name, "key: the key of the view, or a part of it, is null")
        return found
