"""Rules whose records expire: the clock, and the pairs of a denorm rule with ``expire-after``.

A record that waits expires at the first record of the rule's inputs that is later than its own time by more than the duration.
Within a batch, a record that came too late for another does not complete it. At the end of the batch, the clock is the newest
time of the rule's inputs in the batch. The records that wait longer expire, whatever their keys. A batch takes the pending
records of earlier batches that may expire as if they were new (``etl.due``). No other pending record expires.

Without expiry, ranks pair the records of a key. Here a record that expires leaves its place to the next. A fold therefore goes
through the records of a key in the order of outputs, and pairs each with the first that waits on the other side.

The place of an output that an expiry makes does not depend on where batches are cut. In the order of time, the output comes after
all records that come before the expiry. In the order of a source, times may run against the order. The output then comes just
before the outputs of its *cause*: the first record of the rule's inputs that is too late for the record that expires. All records
before the cause are in the same batch or in earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zync_assets.etl.rules.kind import (
    LATER,
    NO_ROWS,
    TURN,
    Emission,
    Ordering,
    RuleRecords,
    key_names,
    source_sql,
    union,
)
from zync_assets.etl.rules.results import output_rows
from zync_assets.pipeline import Rule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SIDES = "(one, other) -> CASE WHEN one.side < other.side THEN -1 WHEN one.side > other.side THEN 1 ELSE 0 END"


_SWAPPED = "size(records) = 2 AND element_at(records, 1).ord > element_at(records, 2).ord"
COMPLETING = f"CASE WHEN {_SWAPPED} THEN 0 ELSE size(records) - 1 END"
"""The index of the record that completes a result."""


def _with_clock(frame: DataFrame, records: RuleRecords) -> DataFrame:
    """The rows with the column ``clock``, the newest time of the rule's inputs in microseconds: null where nothing expires."""
    if records.rule.expiry is None or not records.inputs:
        return frame.selectExpr("*", "CAST(NULL AS bigint) AS clock")
    times = union(frame.selectExpr("unix_micros(time) AS time") for frame in records.inputs.values())
    return frame.select("*", times.selectExpr("max(time) AS clock").scalar().alias("clock"))


def has_causes(rule: Rule, ordering: Ordering) -> bool:
    """Whether an expiry of the rule has the place of its cause."""
    return rule.expiry is not None and rule.expiry.action == "emit" and ordering.is_shared(rule.topics)


def with_causes(frame: DataFrame, records: RuleRecords, emission: Emission) -> DataFrame:
    """Rows with ``record`` and its ``z_cause``: ``ord`` of the first record of the inputs that is too late for it; null where
    the batch has none.

    One window goes from the latest time to the earliest. Its rows are the times of the inputs, each with its first record, and
    the times from which on a record is late. A batch has fewer times than records, and one task sorts them.
    """
    from pyspark.sql import functions as F

    rule, ordering = records.rule, emission.ordering
    end = f"record.time + {micros(rule)}L"
    first_records = [
        records.inputs[side.name].selectExpr(
            "unix_micros(time) AS at", f"{ordering.sql(side.topic, 'kafka.partition', 'kafka.offset')} AS ord"
        )
        for side in rule.sides
        if side.name in records.inputs
    ]
    # Rows of one task need no shuffle.
    firsts, ends = union(first_records), frame.selectExpr(f"{end} AS at")
    if emission.together:
        firsts, ends = firsts.coalesce(1), ends.coalesce(1)
    points = union([firsts.groupBy("at").agg(F.expr("min(ord) AS ord")), ends.distinct()])
    points = points.coalesce(1) if emission.together else points
    later = "min(ord) OVER (ORDER BY at DESC RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS z_cause"
    causes = points.selectExpr("at", later).groupBy("at").agg(F.expr("min(z_cause) AS z_cause"))
    # Spark does not know the size of rows that come from no file, and would shuffle them.
    causes = causes.hint("broadcast") if emission.together else causes
    rows = frame.join(causes, F.expr(f"{end} = at"), "left")
    return rows.selectExpr("* EXCEPT (record, at, z_cause)", "struct(record.*, z_cause) AS record")


def micros(rule: Rule) -> int:
    """The time in microseconds that a record of the rule waits."""
    return rule.expiry.after_ms * 1000 if rule.expiry is not None else 0


def overdue(rule: Rule, time: str, at: str) -> str:
    """Whether a record of a time expired at another time, as SQL; false for a rule without expiry."""
    return f"coalesce({time} + {micros(rule)}L < {at}, false)" if rule.expiry is not None else "false"


def order_columns(rule: Rule, ordering: Ordering, ord: str) -> list[str]:
    """``ord`` of a result, and ``turn`` where an expiry has the place of its cause. ``ord``: of the result's last record.

    Where the cause comes before the result's last record, the result has the place of that record. So has each result of a rule
    whose inputs have no order in common.
    """
    first = "element_at(records, 1)"
    if has_causes(rule, ordering):
        # The greatest of two ignores a null.
        placed = f"CASE WHEN kind = 'due' THEN greatest({ord}, {first}.z_cause) ELSE {ord} END AS ord"
        return [placed, f"CASE WHEN kind = 'due' THEN {first}.ord END AS {TURN}"]
    if rule.expiry is None or any(topic in ordering.domains for topic in rule.topics):
        return [f"{ord} AS ord"]
    # The high part of ``ord`` is the time of records.
    high = f"CASE WHEN kind = 'due' THEN {first}.time + {micros(rule) + 1}L ELSE {ord}.high END AS high"
    parts = (high if name == "high" else f"{ord}.{name} AS {name}" for name in ordering.parts)
    return [f"struct({', '.join(parts)}) AS ord"]


def kind_sql(rule: Rule) -> str:
    """The kind of a result, of the kind in the fold: ``due`` for records that expire."""
    expired_kind = "'out'" if rule.expiry is not None and rule.expiry.action == "emit" else "'expired'"
    return f"CASE WHEN kind = 'due' THEN {expired_kind} ELSE kind END"


def record_columns(side: str, topic: str, emission: Emission, *fields: str) -> tuple[str, ...]:
    """The columns of a side's records that a fold needs: ``lone``, ``hash``, and the struct ``record``. ``fields``: further
    fields of the struct."""
    partition, offset = f"{side}.kafka.partition", f"{side}.kafka.offset"
    source = source_sql(emission.places[topic], partition, offset)
    about = (
        f"{emission.ordering.sql(topic, partition, offset)} AS ord",
        f"{source} AS source",
        "old",
        "unix_micros(time) AS time",
    )
    lone = f"CASE WHEN hash IS NULL THEN {source} END AS lone"
    return lone, "hash", f"struct({', '.join([*about, *fields])}) AS record"


def folded(
    frames: Sequence[DataFrame], keys: Sequence[str], fold: str, records: RuleRecords, emission: Emission
) -> DataFrame:
    """The results of a fold over the records of each key in the order of outputs: ``hash``, ``records``, and ``made``, an
    element of the fold's array. ``frames``: rows with ``record_columns``, of the new records ``records`` and the pending ones."""
    from pyspark.sql import functions as F

    # Rows of one task need no shuffle.
    frame = union(frames).coalesce(1) if emission.together else union(frames)
    if has_causes(records.rule, emission.ordering):
        frame = with_causes(frame, records, emission)
    sorted_records = F.expr(f"array_sort(collect_list(record), {LATER}) AS records")
    groups = frame.groupBy(*keys, "lone").agg(F.expr("min(hash) AS hash"), sorted_records)
    return _with_clock(groups, records).selectExpr("hash", "records", f"explode({fold}) AS made")


def with_outputs(rows: DataFrame, records: RuleRecords, emission: Emission) -> DataFrame:
    """Result rows with their outputs. ``rows``: with ``kind``, ``ord``, ``hash``, the array ``records`` of structs, and the
    columns that the rule's expressions see."""
    row_columns = (*NO_ROWS, "transform(records, record -> record.ord) AS ords")
    about = (
        "kind",
        f"{records.index} AS rule",
        "ord",
        "transform(records, record -> record.source) AS source",
        f"{COMPLETING} AS last",
        "0 AS waited",
        "transform(records, record -> record.old) AS olds",
        "CASE WHEN kind = 'pending' THEN element_at(records, 1).time DIV 1000 END AS since",
        *([TURN] if has_causes(records.rule, emission.ordering) else ()),
        *(row_columns if emission.held else ()),
        "CASE WHEN kind = 'pending' THEN hash END AS hash",
    )
    return output_rows(rows, records.rule, about, "kind = 'out'", emission)


def paired(records: RuleRecords, frames: Mapping[str, DataFrame], emission: Emission) -> DataFrame:
    """The pairs of a denorm rule whose records expire. ``frames``: as for ``denorm.paired``."""
    rule, ordering = records.rule, emission.ordering
    topics = {side.name: side.topic for side in rule.sides}
    names = key_names(rule)
    side_records = [
        frame.selectExpr(
            *names, *record_columns(side, topics[side], emission, f"'{side}' AS side", f"{side} AS whole_{side}")
        )
        for side, frame in frames.items()
    ]
    results = folded(side_records, names, _fold_sql(rule), records, emission)
    members = "transform(made.places, at -> element_at(records, at + 1))"
    # The left record comes first, as in a pair of a rule without expiry.
    pairs = results.selectExpr("hash", "made.kind AS kind", f"array_sort({members}, {_SIDES}) AS records")
    whole = (
        f"try_element_at(filter(records, record -> record.side = '{side}'), 1).whole_{side} AS {side}"
        for side in frames
    )
    ord = "array_max(transform(records, record -> record.ord))"
    rows = pairs.selectExpr("hash", "records", *whole, f"{kind_sql(rule)} AS kind", *order_columns(rule, ordering, ord))
    return with_outputs(rows, records, emission)


def _fold_sql(rule: Rule) -> str:
    """An array of structs: ``kind`` (out, due or pending) and ``places``: the indexes of the records of a result."""
    part = "struct<kind: string, places: array<int>>"
    begin = f"named_struct('at', 0, 'queue', CAST(array() AS array<int>), 'made', CAST(array() AS array<{part}>))"
    time = "element_at(records, place + 1).time"
    late_places = f"filter(acc.queue, place -> {overdue(rule, time, 'record.time')})"
    kept_places = f"filter(acc.queue, place -> NOT {overdue(rule, time, 'record.time')})"
    dues = "transform(late, place -> named_struct('kind', 'due', 'places', array(place)))"
    is_pair = "hash IS NOT NULL AND size(now.kept) > 0 AND element_at(records, element_at(now.kept, 1) + 1).side <> record.side"
    pair = "named_struct('kind', 'out', 'places', array(element_at(now.kept, 1), acc.at))"
    step = (
        f"element_at(transform(transform(array(named_struct('late', {late_places}, 'kept', {kept_places})), it ->"
        f" named_struct('kept', it.kept, 'made', concat(acc.made, {dues.replace('late', 'it.late', 1)}))), now ->"
        f" CASE WHEN {is_pair} THEN named_struct('at', acc.at + 1, 'queue', slice(now.kept, 2, size(now.kept)),"
        f" 'made', concat(now.made, array({pair})))"
        " ELSE named_struct('at', acc.at + 1, 'queue', concat(now.kept, array(acc.at)), 'made', now.made) END), 1)"
    )
    remainder = (
        "transform(filter(acc.queue, place ->"
        f" {overdue(rule, time, 'clock')} OR NOT element_at(records, place + 1).old), place ->"
        f" named_struct('kind', IF({overdue(rule, time, 'clock')}, 'due', 'pending'), 'places', array(place)))"
    )
    return f"aggregate(records, {begin}, (acc, record) -> {step}, acc -> concat(acc.made, {remainder}))"
