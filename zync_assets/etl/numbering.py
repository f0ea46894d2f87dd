"""Order and number outputs without putting them all on one task.

Results are cut into buckets by time, a Spark partition each, and sorted within. The number of a row is then the bucket's
first number (known once each bucket's rows are counted) plus its place in the bucket. Bounds of buckets come from the
statistics of the raw files: sampling the rows, as ``repartitionByRange`` does, would run the joins twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from zync_assets.etl.labels import Labels
from zync_assets.etl.matching import SOURCES, WAITED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BUCKET_RECORDS = 250_000
"""New raw records for each bucket, about."""


@dataclass(frozen=True)
class TimeSpan:
    """Some raw records and the times that they lie between, in milliseconds."""

    low: int
    high: int
    records: int


def time_bounds(spans: Sequence[TimeSpan]) -> list[int]:
    """Ascending times which cut the records into buckets of about BUCKET_RECORDS, taking each span as spread evenly.

    Fewer bounds where many records share one time: a bound separates times, never records of one time.
    """
    total = sum(span.records for span in spans)
    count = total // BUCKET_RECORDS
    if count < 2:
        return []
    points = sorted({span.low for span in spans} | {span.high for span in spans})
    below = [sum(_below(span, point) for span in spans) for point in points]
    bounds: set[int] = set()
    for number in range(1, count):
        wanted = total * number / count
        place = next(i for i, found in enumerate(below) if found >= wanted) if below[-1] >= wanted else len(below) - 1
        if place == 0:
            continue
        low, high = points[place - 1], points[place]
        weight = (wanted - below[place - 1]) / max(1.0, below[place] - below[place - 1])
        bounds.add(int(low + (high - low) * weight))
    return sorted(bounds)


def _below(span: TimeSpan, point: int) -> float:
    if point >= span.high:
        return float(span.records)
    if point <= span.low:
        return 0.0
    return span.records * (point - span.low) / (span.high - span.low)


def arranged(results: DataFrame, bounds: Sequence[int], suspect: str = "false", *, together: bool = False) -> DataFrame:
    """Result rows in buckets, sorted within each by ``ord``, which is no more then. ``suspect``: a condition for them, kept as
    a column of that name, so that ``facts`` has to read neither keys nor values. ``together``: there is one bucket, and what
    comes before is made in the same task."""
    found = results.selectExpr("*", f"{_bucket_sql(bounds)} AS bucket")
    return (
        (found.coalesce(1) if together else found.repartitionById(len(bounds) + 1, "bucket"))
        # Each for itself: a number that comes first is what Spark sorts by, without a look at the row.
        .sortWithinPartitions("ord.time", "ord.place", "ord.partition", "ord.offset")
        .selectExpr("* EXCEPT (ord)", f"coalesce({suspect}, false) AS suspect")
    )


def _bucket_sql(bounds: Sequence[int]) -> str:
    """How many bounds a row has reached, by halving.

    The index is one that Spark can't fold: bounds that become literals are in the generated code, which each batch would
    then have to compile anew. A lambda over the array would not be compiled at all.
    """
    array = f"array({', '.join(f'{bound}L' for bound in bounds)})"

    def reached(low: int, high: int) -> str:
        if low == high:
            return str(low)
        middle = (low + high) // 2
        bound = f"element_at({array}, ord.place * 0 + {middle + 1})"
        return f"IF({bound} <= unix_millis(ord.time), {reached(middle + 1, high)}, {reached(low, middle)})"

    return reached(0, len(bounds))


class Fact(NamedTuple):
    """How many of a batch's result rows are of a kind, output topic, rule and bucket, and made of one input partition's
    records, new ones or ``old``: ``entries`` (sources), ``rows`` (rows, counted at their first source), and ``suspects``:
    whether any is suspect."""

    kind: str
    out: str | None
    rule: str | None
    bucket: int
    topic: str
    partition: int
    old: bool
    entries: int
    rows: int
    suspects: bool


def facts(rows: DataFrame, labels: Labels) -> list[Fact]:
    """Counts of what is in arranged rows, few whatever their number."""
    return [fact(labels, *row) for row in counted(rows, ["kind", "rule", "bucket"]).collect()]


def counted(rows: DataFrame, by: Sequence[str], more: Mapping[str, str] | None = None) -> DataFrame:
    """The sources of arranged rows, counted ``by`` columns, place, partition and old, and by ``more``: names with expressions
    over a row and one source of it (``of``). Columns: those, ``entries``, ``rows`` and ``suspects``."""
    from pyspark.sql import functions as F

    own = {
        "place": "of.place",
        "partition": "of.partition",
        "old": WAITED,
        **(more or {}),
        "row": "CAST(at = 0 AS bigint)",
    }
    each = rows.selectExpr(*by, "suspect", "waited", SOURCES).selectExpr(
        *by, "suspect", *(f"{sql} AS {name}" for name, sql in own.items())
    )
    grouped = each.groupBy(*by, *(name for name in own if name != "row"))
    sums = ("count(*) AS entries", "sum(row) AS rows", "max(suspect) AS suspects")
    return grouped.agg(*(F.expr(text) for text in sums))


def fact(labels: Labels, kind: str, rule: int | None, bucket: int, place: int, *rest: Any) -> Fact:
    """``rest``: the fields of a Fact after ``topic``."""
    out = labels.outs[rule] if kind == "out" and rule is not None else None
    return Fact(kind, out, labels.rule(rule), bucket, labels.topics[place], *rest)
