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
from zync_assets.etl.views.differences import differences, keyless_failures, outputs, with_causes
from zync_assets.etl.views.query import CAUSE, KEY, ORD, Query, V, same_sql
from zync_assets.etl.views.state import MOST_VALUES, Places, Range, StateFiles, StateReader, is_few
from zync_assets.etl.views.state_index import (
    KeyFilter,
    absent_joins,
    gives_key,
    integral_column,
    key_spans,
    looked_up_places,
    missing_row,
    plain_field,
    with_list,
)
from zync_assets.etl.views.tables import (
    ROW_VERSION,
    TableType,
    cast_sql,
    key_columns,
    key_paths,
    null_sql,
    substituted,
    without_versions,
)
from zync_assets.lake.log import DataFile
from zync_assets.queries import JoinStep
from zync_assets.spark.frames import checkpoint, union
from zync_assets.spark.sql import name_sql, shape_sql
from zync_assets.spark.tasks import planned_once, sorted_groups

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

FEW = 200_000
"""The most touched keys for which the rows of each table are looked up by values. Plain joins find the rows of more keys."""
_CAUSES = (f"max({ORD}) AS {ORD}", f"array_distinct(flatten(collect_list({CAUSE}))) AS {CAUSE}")


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
        """Whether the view had no result rows before the batch."""
        return self.fresh or not any(self.before[alias].versions for alias in self.query.aliases)

    def results(self, target: OutputColumns, columns: Columns) -> DataFrame | None:
        """The differences of the result as result rows (``etl.rules.kind``); None if no key of the view is touched.

        Raises RowFailures for result rows with a null key.
        """
        with self._planning():
            sized, keys, few = self._with_touched_keys()
        return sized.results_of(keys, target, columns, few=few)

    def results_of(
        self, keys: DataFrame | pa.Table | None, target: OutputColumns, columns: Columns, *, few: bool
    ) -> DataFrame | None:
        """As ``results``, for these touched keys. ``few``: whether they are looked up by values."""
        query = self.query
        with self._planning():
            joined_rows = self.joined_rows(keys, few=few)
            if joined_rows is None:
                return None
            changes = differences(query, query.results(joined_rows), self.types[0], all_new=self.all_new)
            if keys is not None:
                changes = with_causes(changes, self._frame_of(keys), few=isinstance(keys, pa.Table))
            rows = checkpoint(changes, eager=not self.small)
            keyless = null_sql(KEY, self.types[0])
            [row] = rows.selectExpr("count(*) AS count", f"count_if({keyless}) AS keyless").collect()
            if row["keyless"]:
                raise RowFailures(keyless_failures(query, joined_rows, rows, self.types[0], self.ordering))
        return outputs(query, self.index, rows, target, columns) if row["count"] or self.fresh else None

    def joined(self, *, where: bool = True) -> DataFrame | None:
        """The joined rows of the touched keys, before and after the batch. ``where``: see ``Query.joined``."""
        sized, keys, few = self._with_touched_keys()
        return sized.joined_rows(keys, few=few, where=where)

    def _planning(self) -> AbstractContextManager[None]:
        return planned_once(self.reader.spark) if self.small else sorted_groups(self.reader.spark)

    def _with_touched_keys(self) -> tuple[Maintenance, DataFrame | pa.Table | None, bool]:
        """The maintenance, small only if few rows are read; the touched keys (None: there are none, or all are new), fetched if
        they can be; whether they are few."""
        if self.all_new:
            large = any(files.versions for files in self.before.values())
            return (replace(self, small=False) if large else self), None, True
        keys = self.touched()
        if keys is None:
            return self, None, True
        table = self._fetched(keys)
        if table is not None:
            return self, table if table.num_rows else None, True
        keys = checkpoint(keys)
        count, spans = key_spans(keys, self._key_fields(), self.kinds)
        return replace(self, small=False, spans=spans), keys if count else None, count <= FEW

    def _key_fields(self) -> list[tuple[str, str, str]]:
        """(expression, its place below KEY, alias) of the key's fields of one alias."""
        owned_fields = [(sql, path, self.query.owners(sql)) for sql, path in key_paths(self.query.rule.key, KEY)]
        return [(sql, path, next(iter(owners))) for sql, path, owners in owned_fields if len(owners) == 1]

    def joined_rows(self, keys: DataFrame | pa.Table | None, *, few: bool, where: bool = True) -> DataFrame | None:
        """As ``joined``, for these touched keys."""
        query = self.query
        joining = partial(query.joined, where=where, few=self._few(), steady=self.steady)
        if self.all_new:
            return joining({alias: self.rows(alias) for alias in query.aliases})
        if keys is None:
            return None
        start, is_of_start = self._start()
        rows = {start: self.rows(start, self._start_values(start, keys, few=few))}
        steps = query.outwards(start)
        for near_alias in dict.fromkeys(step.near for step in steps):
            outwards = [step for step in steps if step.near == near_alias]
            if few and any(step.pairs for step in outwards):
                rows[near_alias] = checkpoint(rows[near_alias], eager=not self.small)
            near_rows = rows[near_alias]
            if few and any(self._is_default(near_alias, step.far) for step in outwards):
                missing = missing_row(self.reader.spark, query, near_alias, self.kinds)
                near_rows = near_rows.select(name_sql(near_alias)).union(missing)
            for step, values in zip(outwards, self._step_values(near_rows, outwards, few=few), strict=True):
                rows[step.far] = self.rows(step.far, values)
        joined_rows = joining(rows)
        if not is_of_start:
            from pyspark.sql import functions as F

            keyed_rows = joined_rows.withColumn("z_mine", F.expr(shape_sql(query.rule.key)))
            key_rows = self._frame_of(keys).selectExpr(f"{KEY} AS z_touched")
            joined_rows = keyed_rows.join(key_rows, F.expr("z_mine <=> z_touched"), "left_semi").drop("z_mine")
        return joined_rows

    def _frame_of(self, keys: DataFrame | pa.Table) -> DataFrame:
        return arrow_frame(self.reader.spark, keys) if isinstance(keys, pa.Table) else keys

    @property
    def steady(self) -> set[str]:
        """The joined aliases without a change: their rows are the same before and after the batch."""
        return set(self.query.aliases) - {self.query.view.root, *self.changes}

    def _few(self) -> set[str]:
        """The aliases whose rows each task of a large batch may have."""
        files = {alias: [*self.before[alias].versions] for alias in self.query.aliases}
        for alias, change in self.changes.items():
            files[alias] += change.files.rows
        return set() if self.small else {alias for alias, alias_files in files.items() if is_few(alias_files)}

    def _start(self) -> tuple[str, bool]:
        """The alias of the first field of the key that is of one alias, whose row is always there; whether all fields are of
        this alias."""
        owners = [self.query.owners(sql) for sql in self.query.key_leaves]
        owner = next((names for names in owners if len(names) == 1 and not names & self.query.view.optional), None)
        # From elsewhere, no way leads to the rows of which a LEFT JOIN lacks the row that a default stands for.
        if owner is None or any(
            self._is_default(step.far, step.near) for step in self.query.outwards(next(iter(owner)))
        ):
            return self.query.view.root, False
        return next(iter(owner)), all(names == owner for names in owners)

    def _is_default(self, near: str, far: str) -> bool:
        """Whether the join of ``far`` finds rows for a missing row of ``near``: ON r.id = coalesce(c.region, 0)."""
        return (near, far) in absent_joins(self.reader.spark, self.query.view, self.kinds)

    def touched(self) -> DataFrame | None:
        """The keys of the view that the changes touch, each once: KEY, ORD and CAUSE of the changes. None if no row changed."""
        from pyspark.sql import functions as F

        parts = [self._touched_by(alias) for alias in self.query.aliases if alias in self.changes]
        if not parts:
            return None
        changes = union(parts).coalesce(1) if self.small else union(parts)
        return changes.groupBy(KEY).agg(*map(F.expr, _CAUSES))

    def _touched_by(self, alias: str) -> DataFrame:
        """The keys that the changed rows of an alias touch, and ORD and CAUSE of the changed row."""
        view, ends = self.query.view, self.query.key_aliases
        frame = self.delta(alias).where("z_changed").select(V, ORD, CAUSE, name_sql(alias))
        origin = view.origin(alias, ends)
        if origin is None:
            return union(self._keys_from(frame, alias))
        # A new row on the right of a LEFT JOIN replaces nulls in result rows: the keys with the nulls are touched too.
        frames = self._keys_without(frame, origin) if self._is_default(origin.far, alias) else []
        return union([*self._keys_from(self._before_and_after(frame, origin), origin.far), *frames])

    def _keys_from(self, frame: DataFrame, start: str) -> list[DataFrame]:
        """KEY, ORD and CAUSE of the keys that rows of ``start`` lead to."""
        view, ends = self.query.view, self.query.key_aliases
        substitutes: dict[str, str] = {}
        steps = view.path(start, ends)
        frames: list[DataFrame] = []
        for step in steps:
            leaves = [sql for sql in self.query.key_leaves if step.far in self.query.owners(sql)]
            equal = {other.strip(): near for near, other in step.pairs}
            is_last = not step.outer and not any(other.near == step.far for other in steps)
            if self._is_default(step.far, step.near):
                frames += self._keys_without(frame, step)
            elif is_last and all(
                sql in equal and gives_key(frame, equal[sql], self.kinds[step.far].state_row, sql, step.far)
                for sql in map(str.strip, leaves)
            ):
                # The changed row has the key already.
                substitutes |= {sql: equal[sql.strip()] for sql in leaves}
                continue
            versions = "true" if step.far in self.steady else f"{V} = z_other"
            frame = self._with_far(frame, step, versions).drop("z_other")
        key = cast_sql(substituted(self.query.rule.key, substitutes), self.types[0])
        return [frame.selectExpr(f"{key} AS {KEY}", ORD, CAUSE), *frames]

    def _keys_without(self, frame: DataFrame, step: JoinStep) -> list[DataFrame]:
        """As ``_keys_from``, where the far row of a step is missing. Any row that the far row is joined to may lack it."""
        from pyspark.sql import functions as F

        near = next(join.near for join in self.query.view.joins if join.alias == step.far)
        missing = missing_row(self.reader.spark, self.query, step.far, self.kinds)
        equality = F.expr(" AND ".join(f"({one}) = ({two})" for one, two in step.pairs))
        rows = frame.join(missing, equality).agg(*map(F.expr, _CAUSES)).where(f"{ORD} IS NOT NULL")
        return self._keys_from(self._before_and_after(rows, JoinStep(step.far, near, [], outer=False)), near)

    def _with_far(self, frame: DataFrame, step: JoinStep, versions: str) -> DataFrame:
        """A frame of rows with the rows that a step leads to, and ``z_other``, their V. ``versions``: which V belong together."""
        from pyspark.sql import functions as F

        values = None
        if self.small and step.pairs:
            keys = frame.selectExpr(*(f"{near} AS z_k{at}" for at, (near, _) in enumerate(step.pairs))).distinct()
            values = self._values(step.far, keys, [other for _, other in step.pairs], few=True)
        other = self.rows(step.far, values).selectExpr(f"{V} AS z_other", name_sql(step.far))
        equality = " AND ".join([*(f"({near}) = ({two})" for near, two in step.pairs), versions])
        return frame.join(other, F.expr(equality), "left" if step.outer else "inner")

    def _before_and_after(self, frame: DataFrame, origin: JoinStep) -> DataFrame:
        """The rows of the near alias of a LEFT JOIN that changed rows are joined to, as before the batch and as after it."""
        rows = self._with_far(frame, origin, "true")
        versions = "explode(array(0, 1))" if origin.far in self.steady else "z_other"
        return rows.selectExpr(name_sql(origin.far), ORD, CAUSE, f"{versions} AS {V}")

    def _start_values(self, start: str, keys: DataFrame | pa.Table, *, few: bool) -> KeyFilter | None:
        """The fields of the touched keys that are of the alias; None if there are none."""
        fields = [(sql, path) for sql, path, alias in self._key_fields() if alias == start]
        expressions = [sql for sql, _ in fields]
        if not fields:
            return None
        if isinstance(keys, pa.Table):
            columns = {path: column for (_, path), column in key_columns(self.query.rule.key, KEY, keys[KEY])}
            values = pa.table({f"z_k{at}": columns[path] for at, (_, path) in enumerate(fields)})
            return self._with_values(start, values, KeyFilter(None, expressions, null_safe=True))
        frame = keys.selectExpr(*(f"{path} AS z_k{at}" for at, (_, path) in enumerate(fields)))
        return self._values(start, frame, expressions, few=few, null_safe=True)

    def _values(
        self, alias: str, frame: DataFrame, sqls: Sequence[str], *, few: bool, null_safe: bool = False
    ) -> KeyFilter:
        from pyspark.sql import functions as F

        key_filter = KeyFilter(frame, sqls, null_safe=null_safe)
        if not few:
            spans = [(name, self.spans[sql.strip()]) for sql in sqls if (name := self._spanned(sql, alias)) is not None]
            return replace(key_filter, column=spans[0][0], span=spans[0][1]) if spans else key_filter
        table = self._fetched(frame)
        if table is None:
            return replace(key_filter, frame=F.broadcast(checkpoint(frame)))
        return self._with_values(alias, table, key_filter)

    def _with_values(self, alias: str, table: pa.Table, key_filter: KeyFilter) -> KeyFilter:
        """Fetched values: in a list if they are of a plain column, else as a frame."""
        from pyspark.sql import functions as F

        list_filter = with_list(key_filter, plain_field(self.kinds[alias].state_row, key_filter.own[0], alias), table)
        return list_filter or replace(key_filter, frame=F.broadcast(arrow_frame(self.reader.spark, table)))

    def _step_values(self, near_rows: DataFrame, steps: Sequence[JoinStep], *, few: bool) -> list[KeyFilter | None]:
        """For each join from rows, the values that the joined rows must have; None for all rows."""
        value_columns = [[f"{near} AS z_k{at}" for at, (near, _) in enumerate(step.pairs)] for step in steps]
        if not few:
            return [self._step_span(step) for step in steps]
        structs = [f"struct({', '.join(names)}) AS s{at}" for at, names in enumerate(value_columns) if names]
        table = self._fetched(near_rows.selectExpr(*structs)) if structs else None
        key_filters: list[KeyFilter | None] = []
        for at, (step, names) in enumerate(zip(steps, value_columns, strict=True)):
            sqls = [far for _, far in step.pairs]
            if not names:
                key_filters.append(None)
            elif table is None:
                key_filters.append(self._values(step.far, near_rows.selectExpr(*names).distinct(), sqls, few=True))
            else:
                values = pa.Table.from_struct_array(table[f"s{at}"])
                if not any(pa.types.is_nested(kind) for kind in values.schema.types):
                    values = values.group_by(values.column_names).aggregate([])
                key_filters.append(self._with_values(step.far, values, KeyFilter(near_rows, sqls)))
        return key_filters

    def _spanned(self, sql: str, alias: str) -> str | None:
        """The column of integers that an expression is, if its span is known."""
        return integral_column(self.kinds[alias].state_row, sql, alias) if sql.strip() in self.spans else None

    def _step_span(self, step: JoinStep) -> KeyFilter | None:
        """The span of a column of the joined rows, where the other side of the join has one."""
        span: KeyFilter | None = None
        for near, far in step.pairs:
            if near.strip() in self.spans:
                self.spans.setdefault(far.strip(), self.spans[near.strip()])
                name = self._spanned(far, step.far)
                span = span or (KeyFilter(None, [far], name, span=self.spans[near.strip()]) if name else None)
        return span

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
        old_files, change = self.before[alias], self.changes.get(alias)
        cause = self._cause_sql(alias, None, "version.offset") if self.fresh else self._no_cause()
        places = None if values is None else looked_up_places(self.reader, self.kinds[alias], old_files, values)
        rows = self._of_versions(alias, old_files.versions, values, cause, places)
        pairs = None if change is None else change.pairs
        files = (*old_files.replaced, *(change.files.replaced if change is not None and pairs is None else ()))
        replaced_frames = [self._of_versions(alias, files, values, (), places).select(ROW_VERSION)] if files else []
        if pairs is not None and change is not None and change.files.replaced:
            replaced_frames.append(pairs.where("old_version IS NOT NULL").selectExpr(f"old_version AS {ROW_VERSION}"))
        if self.small:
            rows = rows.repartition(1)
        if replaced_frames:
            replaced = [*files, *(change.files.replaced if change is not None else ())]
            few = not self.small and is_few(replaced)
            replaced_versions = union(replaced_frames).repartition(1) if self.small else union(replaced_frames)
            rows = without_versions(rows, replaced_versions, few=few, version=ROW_VERSION)
        versions = "1" if self.all_new or alias in self.steady else "explode(array(0, 1))"
        return rows.selectExpr(name_sql(alias), ORD, CAUSE, f"{versions} AS {V}")

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
        row_sql = self.query.row_sql(alias, kind.state_row)
        alias_rows = rows.selectExpr(f"{row_sql} AS {name_sql(alias)}", f"version AS {ROW_VERSION}", *columns)
        # The state has been looked up by listed values.
        return alias_rows if values is None or values.is_exact else values.keep(alias_rows, alias)

    def delta(self, alias: str) -> DataFrame:
        """The rows of the keys that the batch changes: the row under the alias, V, ORD, CAUSE, ``z_changed``. A row is
        changed if a column that the view needs is."""
        from pyspark.sql import functions as F

        kind, change = self.kinds[alias], self.changes[alias]
        if change.pairs is not None:
            pairs = change.pairs.selectExpr("*", "old_row AS z_old")
        else:
            pairs = self.reader.rows(kind, change.files.versions)
            old_rows = self.reader.rows(kind, change.files.replaced).selectExpr("key AS old_key", "row AS z_old")
            pairs = pairs.join(old_rows, F.expr("key = old_key"), "left") if change.files.replaced else pairs
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
        is_changed = f"NOT {same_sql('before', 'after', pairs.schema['after'].dataType)}"
        versions = "explode(array(named_struct('v', 0, 'row', before), named_struct('v', 1, 'row', after))) AS each"
        return (
            pairs.selectExpr(ORD, CAUSE, f"{is_changed} AS z_changed", versions)
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
