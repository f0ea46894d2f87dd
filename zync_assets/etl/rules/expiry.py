"""Rules whose records expire: the clock, and the pairs of a denorm rule with ``expire-after``.

A record that waits expires at the first record of the rule's inputs that is later than its own time by more than the duration.
Within a batch, a record that came too late for another does not complete it. At the end of the batch, the clock is the newest
time of the rule's inputs in the batch. The records that wait longer expire, whatever their keys. A batch takes the pending
records of earlier batches that may expire as if they were new (``etl.due``). No other pending record expires.

Without expiry, ranks pair the records of a key. Here a record that expires leaves its place to the next. A fold therefore goes
through the records of a key in the order of outputs, and pairs each with the first that waits on the other side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zync_assets.etl.rules.kind import LATER, NO_ROWS, Emission, Ordering, RuleRecords, key_names, source_sql, union
from zync_assets.etl.rules.parts import emitted
from zync_assets.pipeline import Rule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SIDES = "(one, other) -> CASE WHEN one.side < other.side THEN -1 WHEN one.side > other.side THEN 1 ELSE 0 END"


_SWAPPED = "size(records) = 2 AND element_at(records, 1).ord > element_at(records, 2).ord"
COMPLETING = f"CASE WHEN {_SWAPPED} THEN 0 ELSE size(records) - 1 END"
"""The index of the record that completes a result."""


def clock_of(rule: Rule, inputs: Mapping[str, DataFrame]) -> DataFrame | None:
    """One row with the newest time of some records, in microseconds. None: nothing expires. ``inputs``: side → all records of
    its topic."""
    if rule.expiry is None or not inputs:
        return None
    times = union(frame.selectExpr("unix_micros(time) AS time") for frame in inputs.values())
    return times.selectExpr("max(time) AS clock")


def _with_clock(frame: DataFrame, clock: DataFrame | None) -> DataFrame:
    """The rows with the column ``clock``: null where nothing expires."""
    if clock is None:
        return frame.selectExpr("*", "CAST(NULL AS bigint) AS clock")
    return frame.select("*", clock.scalar().alias("clock"))


def micros(rule: Rule) -> int:
    """How long a record of the rule waits."""
    return rule.expiry.after_ms * 1000 if rule.expiry is not None else 0


def overdue(rule: Rule, time: str, at: str) -> str:
    """Whether a record of a time expired at another time, as SQL; false for a rule without expiry."""
    return f"coalesce({time} + {micros(rule)}L < {at}, false)" if rule.expiry is not None else "false"


def ord_sql(ordering: Ordering, rule: Rule, ord: str) -> str:
    """``ord`` of a result. ``ord``: of its last record.

    An output that an expiry makes comes after all records that come before the expiry. The high part of ``ord`` is the time of
    records where the inputs have no order of their source. Elsewhere such an output has the place of its last record.
    """
    if rule.expiry is None or any(topic in ordering.domains for topic in rule.topics):
        return ord
    high = f"CASE WHEN kind = 'due' THEN element_at(records, 1).time + {micros(rule) + 1}L ELSE {ord}.high END AS high"
    return f"struct({', '.join(high if name == 'high' else f'{ord}.{name} AS {name}' for name in ordering.parts)})"


def kind_sql(rule: Rule) -> str:
    """The kind of a result, of the kind in the fold: ``due`` for records that expire."""
    due = "'out'" if rule.expiry is not None and rule.expiry.action == "emit" else "'expired'"
    return f"CASE WHEN kind = 'due' THEN {due} ELSE kind END"


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
    frames: Sequence[DataFrame], keys: Sequence[str], fold: str, clock: DataFrame | None, *, together: bool
) -> DataFrame:
    """The results of a fold over the records of each key in the order of outputs: ``hash``, ``records``, and ``made``, an
    element of the fold's array. ``frames``: rows with ``record_columns``. ``together``: one task runs the whole batch."""
    from pyspark.sql import functions as F

    records = F.expr(f"array_sort(collect_list(record), {LATER}) AS records")
    # Rows of one task need no shuffle.
    frame = union(frames).coalesce(1) if together else union(frames)
    found = frame.groupBy(*keys, "lone").agg(F.expr("min(hash) AS hash"), records)
    return _with_clock(found, clock).selectExpr("hash", "records", f"explode({fold}) AS made")


def with_outputs(rows: DataFrame, records: RuleRecords, emission: Emission) -> DataFrame:
    """Result rows with their outputs. ``rows``: with ``kind``, ``ord``, ``hash``, the array ``records`` of structs, and the
    columns that the rule's expressions see."""
    held = (*NO_ROWS, "transform(records, record -> record.ord) AS ords")
    about = (
        "kind",
        f"{records.index} AS rule",
        "ord",
        "transform(records, record -> record.source) AS source",
        f"{COMPLETING} AS last",
        "0 AS waited",
        "transform(records, record -> record.old) AS olds",
        "CASE WHEN kind = 'pending' THEN element_at(records, 1).time DIV 1000 END AS since",
        *(held if emission.held else ()),
        "CASE WHEN kind = 'pending' THEN hash END AS hash",
    )
    return emitted(rows, records.rule, about, "kind = 'out'", emission)


def paired(records: RuleRecords, frames: Mapping[str, DataFrame], emission: Emission) -> DataFrame:
    """The pairs of a denorm rule whose records expire. ``frames``: as for ``denorm.paired``."""
    rule, ordering = records.rule, emission.ordering
    topics = {side.name: side.topic for side in rule.sides}
    names = key_names(rule)
    each = [
        frame.selectExpr(
            *names, *record_columns(side, topics[side], emission, f"'{side}' AS side", f"{side} AS whole_{side}")
        )
        for side, frame in frames.items()
    ]
    made = folded(each, names, _fold_sql(rule), records.clock, together=emission.together)
    found = "transform(made.places, at -> element_at(records, at + 1))"
    # The left record comes first, as in a pair of a rule without expiry.
    own = made.selectExpr("hash", "made.kind AS kind", f"array_sort({found}, {_SIDES}) AS records")
    whole = (
        f"try_element_at(filter(records, record -> record.side = '{side}'), 1).whole_{side} AS {side}"
        for side in frames
    )
    ord = "array_max(transform(records, record -> record.ord))"
    rows = own.selectExpr(
        "hash", "records", *whole, f"{kind_sql(rule)} AS kind", f"{ord_sql(ordering, rule, ord)} AS ord"
    )
    return with_outputs(rows, records, emission)


def _fold_sql(rule: Rule) -> str:
    """An array of structs: ``kind`` (out, due or pending) and ``places``: the indexes of the records of a result."""
    part = "struct<kind: string, places: array<int>>"
    begin = f"named_struct('at', 0, 'queue', CAST(array() AS array<int>), 'made', CAST(array() AS array<{part}>))"
    time = "element_at(records, place + 1).time"
    late = f"filter(acc.queue, place -> {overdue(rule, time, 'record.time')})"
    kept = f"filter(acc.queue, place -> NOT {overdue(rule, time, 'record.time')})"
    dues = "transform(late, place -> named_struct('kind', 'due', 'places', array(place)))"
    is_pair = "hash IS NOT NULL AND size(now.kept) > 0 AND element_at(records, element_at(now.kept, 1) + 1).side <> record.side"
    pair = "named_struct('kind', 'out', 'places', array(element_at(now.kept, 1), acc.at))"
    step = (
        f"element_at(transform(transform(array(named_struct('late', {late}, 'kept', {kept})), it ->"
        f" named_struct('kept', it.kept, 'made', concat(acc.made, {dues.replace('late', 'it.late', 1)}))), now ->"
        f" CASE WHEN {is_pair} THEN named_struct('at', acc.at + 1, 'queue', slice(now.kept, 2, size(now.kept)),"
        f" 'made', concat(now.made, array({pair})))"
        " ELSE named_struct('at', acc.at + 1, 'queue', concat(now.kept, array(acc.at)), 'made', now.made) END), 1)"
    )
    rest = (
        "transform(filter(acc.queue, place ->"
        f" {overdue(rule, time, 'clock')} OR NOT element_at(records, place + 1).old), place ->"
        f" named_struct('kind', IF({overdue(rule, time, 'clock')}, 'due', 'pending'), 'places', array(place)))"
    )
    return f"aggregate(records, {begin}, (acc, record) -> {step}, acc -> concat(acc.made, {rest}))"
