"""The maintenance of a view: from the changes of its tables to the differences of its result.

1. ``touched``: the keys of the view that the changes touch, and which records do. From each changed row, before and after,
   joins lead along the join tree to the tables of the view's key.
2. ``rows``: the rows that contribute to these keys, table by table from the key outwards, before and after the batch.
3. ``differences``: the results for these keys before and after, compared.

A view without an earlier result takes all rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from zync_assets.codecs.spark_types import arrow_frame
from zync_assets.etl.rules.kind import Columns, Ordering, OutputColumns
from zync_assets.etl.views.changes import Change, RowFailures, cause_sql, no_cause_sql
from zync_assets.etl.views.differences import differences, keyless_failures, outputs
from zync_assets.etl.views.key_filter import (
    KeyFilter,
    cast_sql,
    checkpoint,
    integral_column,
    is_kept,
    key_columns,
    key_paths,
    plain_field,
    substituted,
    with_list,
)
from zync_assets.etl.views.query import (
    CAUSE,
    KEY,
    ORD,
    Query,
    V,
    same_sql,
)
from zync_assets.etl.views.state import Places, Range, StateFiles, StateReader, is_few
from zync_assets.etl.views.state_index import looked_up_places
from zync_assets.etl.views.tables import ROW_VERSION, TableType, null_sql, without_versions
from zync_assets.lake.log import DataFile
from zync_assets.queries import JoinStep
from zync_assets.spark.frames import union
from zync_assets.spark.sql import name_sql, shape_sql
from zync_assets.spark.tasks import planned_once, sorted_groups

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

FEW = 200_000
"""Touched keys up to which the rows of each table are looked up by values. More are found by plain joins."""
MOST_VALUES = 20_000
"""Values that are fetched and listed, so that Spark skips parts of files."""


@dataclass(frozen=True)
class Maintenance:
    """The maintenance of one view in a batch.

    ``index``: the rule's. ``kinds``, ``before``, ``changes``: alias → the type of its table, the table's files before the batch,
    and its changes, if there are some. ``fresh``: the pool has no result of the view yet.
    """

    query: Query
    index: int
    reader: StateReader
    ordering: Ordering
    kinds: Mapping[str, TableType]
    before: Mapping[str, StateFiles]
    changes: Mapping[str, Change]
    types: tuple[DataType, DataType, DataType | None]
    fresh: bool
    small: bool
    spans: dict[str, Range] = field(default_factory=dict[str, "Range"])
    """The least and the greatest value of expressions, where the touched keys are many."""

    @property
    def all_new(self) -> bool:
        """Whether all result rows are new ones."""
        return self.fresh or not any(self.before[alias].versions for alias in self.query.aliases)

    def results(self, target: OutputColumns, columns: Columns) -> DataFrame | None:
        """The differences of the result as result rows (``etl.rules.kind``); None if no key of the view is touched.

        Raises RowFailures for result rows with a null key.
        """
        with self._planning():
            sized, touched, few = self._begun()
        return sized.results_of(touched, target, columns, few=few)

    def results_of(
        self, touched: DataFrame | pa.Table | None, target: OutputColumns, columns: Columns, *, few: bool
    ) -> DataFrame | None:
        """As ``results``, for these touched keys. ``few``: whether they are looked up by values."""
        query = self.query
        with self._planning():
            joined = self.joined_rows(touched, few=few)
            if joined is None:
                return None
            made = differences(query, query.results(joined), self.types[0], all_new=self.all_new)
            found = checkpoint(made if touched is None else self._caused(made, touched), eager=not self.small)
            keyless = null_sql(KEY, self.types[0])
            [row] = found.selectExpr("count(*) AS count", f"count_if({keyless}) AS keyless").collect()
            if row["keyless"]:
                results = query.results(joined).where(f"{V} = 1")
                raise RowFailures(keyless_failures(query, (results, found), self.types[0], self.ordering))
        return outputs(query, self.index, found, target, columns) if row["count"] or self.fresh else None

    def joined(self, *, where: bool = True) -> DataFrame | None:
        """The joined rows of the touched keys, before and after the batch. ``where``: see ``Query.joined``."""
        sized, touched, few = self._begun()
        return sized.joined_rows(touched, few=few, where=where)

    def _planning(self) -> AbstractContextManager[None]:
        return planned_once(self.reader.spark) if self.small else sorted_groups(self.reader.spark)

    def _begun(self) -> tuple[Maintenance, DataFrame | pa.Table | None, bool]:
        """The maintenance, small only if few rows are read; the touched keys (None: there are none, or all are new), fetched if
        they can be; whether they are few."""
        if self.all_new:
            large = any(files.versions for files in self.before.values())
            return (replace(self, small=False) if large else self), None, True
        touched = self.touched()
        if touched is None:
            return self, None, True
        table = self._fetched(touched)
        if table is not None:
            return self, table if table.num_rows else None, True
        touched = checkpoint(touched)
        count, spans = self._counted(touched)
        return replace(self, small=False, spans=spans), touched if count else None, count <= FEW

    def _counted(self, touched: DataFrame) -> tuple[int, dict[str, Range]]:
        """The number of touched keys, and the spans of their fields that are columns of integers."""
        fields = self._key_fields()
        paths = {
            sql.strip(): path for sql, path, alias in fields if integral_column(self.kinds[alias].state_row, sql, alias)
        }
        sums = (f"struct(min({path}), max({path}), count({path})) AS f{at}" for at, path in enumerate(paths.values()))
        [row] = touched.selectExpr("count(*) AS count", *sums).collect()
        found = {sql: tuple(row[f"f{at}"]) for at, sql in enumerate(paths)}
        # A null has no place in a span.
        return row["count"], {sql: each[:2] for sql, each in found.items() if row["count"] and each[2] == row["count"]}

    def _key_fields(self) -> list[tuple[str, str, str]]:
        """(expression, its place below KEY, alias) of the key's fields of one alias."""
        each = [(sql, path, self.query.owners(sql)) for sql, path in key_paths(self.query.rule.key, KEY)]
        return [(sql, path, next(iter(owners))) for sql, path, owners in each if len(owners) == 1]

    def joined_rows(self, touched: DataFrame | pa.Table | None, *, few: bool, where: bool = True) -> DataFrame | None:
        """As ``joined``, for these touched keys."""
        query = self.query
        joining = partial(query.joined, where=where, few=self._few(), steady=self.steady)
        if self.all_new:
            return joining({alias: self.rows(alias) for alias in query.aliases})
        if touched is None:
            return None
        start, own = self._start()
        rows = {start: self.rows(start, self._start_values(start, touched, few=few))}
        steps = query.outwards(start)
        for near in dict.fromkeys(step.near for step in steps):
            outwards = [step for step in steps if step.near == near]
            if few and any(step.pairs for step in outwards):
                rows[near] = checkpoint(rows[near], eager=not self.small)
            for step, found in zip(outwards, self._step_values(rows[near], outwards, few=few), strict=True):
                rows[step.far] = self.rows(step.far, found)
        joined = joining(rows)
        if not own:
            from pyspark.sql import functions as F

            mine = joined.withColumn("z_mine", F.expr(shape_sql(query.rule.key)))
            other = self._framed(touched).selectExpr(f"{KEY} AS z_touched")
            joined = mine.join(other, F.expr("z_mine <=> z_touched"), "left_semi").drop("z_mine")
        return joined

    def _framed(self, touched: DataFrame | pa.Table) -> DataFrame:
        return arrow_frame(self.reader.spark, touched) if isinstance(touched, pa.Table) else touched

    def _caused(self, found: DataFrame, touched: DataFrame | pa.Table) -> DataFrame:
        """Differences with the ORD and the CAUSE of their touched key. Joined rows may lack both: a LEFT JOIN makes a row without
        any record of the batch, once its joined row is deleted."""
        from pyspark.sql import functions as F

        causes = self._framed(touched).withColumnRenamed(KEY, "z_touched")
        causes = F.broadcast(causes) if isinstance(touched, pa.Table) else causes
        return found.drop(ORD, CAUSE).join(causes, F.expr(f"{KEY} <=> z_touched"), "left").drop("z_touched")

    @property
    def steady(self) -> set[str]:
        """The joined aliases without a change: their rows are the same before and after the batch."""
        return set(self.query.aliases) - {self.query.view.root, *self.changes}

    def _few(self) -> set[str]:
        """The aliases whose rows each task of a large batch may have."""
        files = {alias: [*self.before[alias].versions] for alias in self.query.aliases}
        for alias, change in self.changes.items():
            files[alias] += change.files.rows
        return set() if self.small else {alias for alias, each in files.items() if is_few(each)}

    def _start(self) -> tuple[str, bool]:
        """The alias of the first field of the key that is of one alias, whose row is always there; whether all fields are of
        this alias."""
        owners = [self.query.owners(sql) for sql in self.query.key_leaves]
        first = next((each for each in owners if len(each) == 1 and not each & self.query.view.optional), None)
        if first is None:
            return self.query.view.root, False
        return next(iter(first)), all(each == first for each in owners)

    def touched(self) -> DataFrame | None:
        """The keys of the view that the changes touch, each once: KEY, ORD and CAUSE of the changes. None if no row changed."""
        from pyspark.sql import functions as F

        parts = [self._touched_by(alias) for alias in self.query.aliases if alias in self.changes]
        if not parts:
            return None
        changes = union(parts).coalesce(1) if self.small else union(parts)
        cause = f"array_distinct(flatten(collect_list({CAUSE}))) AS {CAUSE}"
        return changes.groupBy(KEY).agg(F.expr(f"max({ORD}) AS {ORD}"), F.expr(cause))

    def _touched_by(self, alias: str) -> DataFrame:
        """The keys that the changed rows of an alias touch, and ORD and CAUSE of the changed row."""
        view, ends = self.query.view, self.query.key_aliases
        frame = self.delta(alias).where("z_changed").select(V, ORD, CAUSE, name_sql(alias))
        origin = view.origin(alias, ends)
        if origin is not None:
            # A row of the LEFT JOIN puts its own columns in the place of nulls: the keys with both count.
            frame = self._before_and_after(frame, origin)
        substitutes: dict[str, str] = {}
        steps = view.path(alias if origin is None else origin.far, ends)
        for step in steps:
            of_far = [sql for sql in self.query.key_leaves if step.far in self.query.owners(sql)]
            equal = {other.strip(): one for one, other in step.pairs}
            last = not step.outer and not any(other.near == step.far for other in steps)
            if last and all(
                sql in equal and self._is_key(frame, equal[sql], sql, step.far) for sql in map(str.strip, of_far)
            ):
                # The changed row has the key already.
                substitutes |= {sql: equal[sql.strip()] for sql in of_far}
                continue
            versions = "true" if step.far in self.steady else f"{V} = z_other"
            frame = self._with_far(frame, step, versions).drop("z_other")
        key = cast_sql(substituted(self.query.rule.key, substitutes), self.types[0])
        return frame.selectExpr(f"{key} AS {KEY}", ORD, CAUSE)

    def _with_far(self, frame: DataFrame, step: JoinStep, versions: str) -> DataFrame:
        """A frame of rows with the rows that a step leads to, and ``z_other``, their V. ``versions``: which V belong together."""
        from pyspark.sql import functions as F

        values = None
        if self.small and step.pairs:
            each = frame.selectExpr(*(f"{one} AS z_k{at}" for at, (one, _) in enumerate(step.pairs))).distinct()
            values = self._values(step.far, each, [other for _, other in step.pairs], few=True)
        other = self.rows(step.far, values).selectExpr(f"{V} AS z_other", name_sql(step.far))
        equality = " AND ".join([*(f"({one}) = ({two})" for one, two in step.pairs), versions])
        return frame.join(other, F.expr(equality), "left" if step.outer else "inner")

    def _before_and_after(self, frame: DataFrame, origin: JoinStep) -> DataFrame:
        """The rows of the near alias of a LEFT JOIN that changed rows are joined to, as before the batch and as after it."""
        found = self._with_far(frame, origin, "true")
        versions = "explode(array(0, 1))" if origin.far in self.steady else "z_other"
        return found.selectExpr(name_sql(origin.far), ORD, CAUSE, f"{versions} AS {V}")

    def _is_key(self, frame: DataFrame, one: str, other: str, far: str) -> bool:
        """Whether an expression of a frame gives the key what an equal expression of ``far`` gives it. Values of two types can be
        equal, and differ as parts of a key: 1 and '01'."""
        item = plain_field(self.kinds[far].state_row, other, far)
        return item is not None and is_kept(frame.selectExpr(f"({one}) AS it").schema[0].dataType, item.dataType)

    def _start_values(self, start: str, touched: DataFrame | pa.Table, *, few: bool) -> KeyFilter | None:
        """The fields of the touched keys that are of the alias; None if there are none."""
        fields = [(sql, path) for sql, path, alias in self._key_fields() if alias == start]
        own = [sql for sql, _ in fields]
        if not fields:
            return None
        if isinstance(touched, pa.Table):
            columns = {path: column for (_, path), column in key_columns(self.query.rule.key, KEY, touched[KEY])}
            values = pa.table({f"z_k{at}": columns[path] for at, (_, path) in enumerate(fields)})
            return self._listed(start, values, KeyFilter(None, own, null_safe=True))
        frame = touched.selectExpr(*(f"{path} AS z_k{at}" for at, (_, path) in enumerate(fields)))
        return self._values(start, frame, own, few=few, null_safe=True)

    def _values(
        self, alias: str, frame: DataFrame, own: Sequence[str], *, few: bool, null_safe: bool = False
    ) -> KeyFilter:
        from pyspark.sql import functions as F

        found = KeyFilter(frame, own, null_safe=null_safe)
        if not few:
            known = [(name, self.spans[sql.strip()]) for sql in own if (name := self._spanned(sql, alias)) is not None]
            return replace(found, column=known[0][0], span=known[0][1]) if known else found
        table = self._fetched(frame)
        if table is None:
            return replace(found, frame=F.broadcast(checkpoint(frame)))
        return self._listed(alias, table, found)

    def _listed(self, alias: str, table: pa.Table, found: KeyFilter) -> KeyFilter:
        """Fetched values: in a list if they are of a plain column, else as a frame."""
        from pyspark.sql import functions as F

        listed = with_list(found, plain_field(self.kinds[alias].state_row, found.own[0], alias), table)
        return listed or replace(found, frame=F.broadcast(arrow_frame(self.reader.spark, table)))

    def _step_values(self, near: DataFrame, steps: Sequence[JoinStep], *, few: bool) -> list[KeyFilter | None]:
        """For each join from rows, the values that the joined rows must have; None for all rows."""
        each = [[f"{one} AS z_k{at}" for at, (one, _) in enumerate(step.pairs)] for step in steps]
        if not few:
            return [self._step_span(step) for step in steps]
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

    def _spanned(self, sql: str, alias: str) -> str | None:
        """The column of integers that an expression is, if its span is known."""
        return integral_column(self.kinds[alias].state_row, sql, alias) if sql.strip() in self.spans else None

    def _step_span(self, step: JoinStep) -> KeyFilter | None:
        """The span of a column of the joined rows, where the other side of the join has one."""
        found: KeyFilter | None = None
        for one, other in step.pairs:
            if one.strip() in self.spans:
                self.spans.setdefault(other.strip(), self.spans[one.strip()])
                name = self._spanned(other, step.far)
                found = found or (KeyFilter(None, [other], name, span=self.spans[one.strip()]) if name else None)
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
            none = self._of_versions(alias, (), None, self._no_cause()).where("false")
            return none.selectExpr("*", f"1 AS {V}").drop(ROW_VERSION)
        # In a small batch, one task joins the rows.
        return union(frames).coalesce(1) if self.small else union(frames)

    def _unchanged(self, alias: str, values: KeyFilter | None) -> DataFrame:
        """The rows that the batch does not change."""
        before, change = self.before[alias], self.changes.get(alias)
        cause = self._cause_sql(alias, None, "version.offset") if self.fresh else self._no_cause()
        places = None if values is None else looked_up_places(self.reader, self.kinds[alias], before, values)
        found = self._of_versions(alias, before.versions, values, cause, places)
        pairs = None if change is None else change.pairs
        files = (*before.replaced, *(change.files.replaced if change is not None and pairs is None else ()))
        gone = [self._of_versions(alias, files, values, (), places).select(ROW_VERSION)] if files else []
        if pairs is not None and change is not None and change.files.replaced:
            gone.append(pairs.where("old_version IS NOT NULL").selectExpr(f"old_version AS {ROW_VERSION}"))
        if self.small:
            found = found.repartition(1)
        if gone:
            replaced = [*files, *(change.files.replaced if change is not None else ())]
            few = not self.small and is_few(replaced)
            replaced_versions = union(gone).repartition(1) if self.small else union(gone)
            found = without_versions(found, replaced_versions, few=few, version=ROW_VERSION)
        versions = "1" if self.all_new or alias in self.steady else "explode(array(0, 1))"
        return found.selectExpr(name_sql(alias), ORD, CAUSE, f"{versions} AS {V}")

    def _of_versions(
        self,
        alias: str,
        files: Sequence[DataFile],
        values: KeyFilter | None,
        columns: Sequence[str],
        places: Places | None = None,
    ) -> DataFrame:
        """The rows of some files under the alias, their ROW_VERSION, and further columns."""
        kind = self.kinds[alias]
        rows = self.reader.rows(kind, files, places).where("row IS NOT NULL")
        rows = rows if values is None else values.within(rows)
        made = self.query.row_sql(alias, kind.state_row)
        found = rows.selectExpr(f"{made} AS {name_sql(alias)}", f"version AS {ROW_VERSION}", *columns)
        # The state has been looked up by listed values.
        return found if values is None or values.is_exact else values.keep(found, alias)

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

    def _cause_sql(self, alias: str, offsets: str | None, last: str) -> tuple[str, str]:
        return cause_sql(self.ordering, self.kinds[alias].table.topic, offsets, last)

    def _no_cause(self) -> tuple[str, str]:
        """ORD and CAUSE of a row that the batch does not change."""
        return no_cause_sql(self.ordering)
