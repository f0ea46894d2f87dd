"""The interface between the engine and a kind of rule: frames of records, frames of results, and the order of results.

A record frame has the columns ``kafka``, ``key``, ``value``, ``time`` (never runs back within a partition), ``old`` (false:
new in this batch; true: it was pending) and, where an output is held, ``row`` and
``changes`` (see ``source_rows``). A result frame has one
row an output, and one row a new record that makes none, with the columns

    kind     out, pending, unmatched, dropped, quarantined (an expression fails on it), ended (with its source row, without an
             output), expired, or untyped (none is committed)
    rule     index of the rule that took the record, if one did
    ord      struct of the completing input, by which outputs are ordered: see ``Ordering``
    source   array of struct(place, partition, offset) of the raw records; place: the input's, see ``etl.account``
    last     index in source of the completing input
    waited   a bit for each of source, the lowest for its first: whether it was pending
    olds     where a rule gathers any number of records: array of what ``waited`` has a bit for, null for other rules
    hash     hash of the join key of a pending record, null for a null key
    takers   where outputs are merged: array of the indexes of the rules that took the raw records, null for ``rule``
    since    where a record may expire: the time of a pending record in ms
    turn     where an expiry has the place of its cause (``expiry``): ``ord`` of the record that expired. Such a result comes
             before the others of equal ``ord``. Null for other results
    extra, number  where a rule makes several outputs of a match (``parts``): whether the row is not the first, and its number
    row, other_row  where an output is held: the source rows of the first two of source (see ``source_rows``), or null
    changes  where an output is held: a bit for each of source, the lowest for its first: whether it changes its source row
    rows     where an output is held and outputs are merged: array of struct(row, changes) of the raw records, else null
    ords     where an output is held: array of ``ord`` of the raw records
    joined   where an output is held: hash of the join key, of a complete pair too
    exact    where an output is held: hash of the join key with its own types
    follows  where an output is held: the number of an output among those that follow the output of ``ord``, or null
    deletes  where an output is held: whether a record without a counterpart deletes its source row
    key:<topic>, value:<topic>, and headers where a rule gives its records some

``Kind`` is the interface between the engine and a kind of rule. The engine assigns every record to a rule, finds the pending
records, and accounts for the result rows. A kind makes result rows of a rule's records.

The module builds Spark SQL text rather than column objects. A column object costs a call or more into the JVM, and a small
batch would spend more time on its plan than on its run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from zync_assets.pipeline import Rule, Side
from zync_assets.spark.sql import name_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

LACKING = "lacking"
"""The column with the fields that an output leaves out because its input's own schema lacks them. Only some rules have such
fields."""
NO_ROWS = (
    *(f"CAST(NULL AS bigint) AS {name}" for name in ("row", "other_row", "joined", "exact")),
    "0 AS changes",
)
"""The columns of results in which no record waits behind another record of its source row."""


def later_sql(key: str) -> str:
    """A comparison of two structs, for ``array_sort``. ``key``: the sort key, with braces for the struct."""
    one, other = key.format("one"), key.format("other")
    return f"(one, other) -> CASE WHEN {one} < {other} THEN -1 WHEN {one} > {other} THEN 1 ELSE 0 END"


LATER = later_sql("{}.ord")
TURN = "turn"
LATER_IN_TURN = later_sql(f"struct({{0}}.ord, {{0}}.{TURN} IS NULL, {{0}}.{TURN})")
"""A comparison of two results. One of them may be an expiry with the place of its cause."""
MISSING, SEVERAL = "missing", "several"
"""The kinds of records whose row is missing, or whose rows are several. No such batch is committed."""
LOOKED, BLAMED, LOOK_HASH = "looked", "blamed_side", "look_hash"
"""Columns of records with the rows that they look up: the kind of the result, the index of the side without its row, and the
hash by which the record waits."""


@dataclass(frozen=True)
class Ordering:
    """The order of a batch's result rows, as SQL.

    Records of one domain follow the order of their source, and other records the order of time. Records of two domains can't be
    compared by their source, so that the outputs of one domain follow those of another. Outputs in the order of time come last.
    In a pair that can't be compared by the source, the record with the later time completes the pair. Input, partition and
    offset break ties, so that two records of one partition never change places.

    ``places``: topic → its number in result rows, for the inputs of the pool; ``domains``: topic → its domain, for inputs with a
    source order; ``held``: whether an output is held, so that records have ``row`` and ``changes``.
    """

    places: Mapping[str, int]
    domains: Mapping[str, str] = field(default_factory=dict[str, str])
    held: bool = False

    @property
    def groups(self) -> dict[str | None, list[str]]:
        """Domain → its topics, in the order of their outputs; None: the topics in the order of time."""
        groups: dict[str | None, list[str]] = {}
        for topic in sorted(self.places, key=lambda topic: (topic not in self.domains, self.places[topic])):
            groups.setdefault(self.domains.get(topic), []).append(topic)
        return groups

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts of ``ord``."""
        rank, low = ("rank",) if len(self.groups) > 1 else (), ("low",) if self.domains else ()
        return (*rank, "high", *low, "place", "partition", "offset")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a record carries for its order."""
        order, row = ("order_high", "order_low") if self.domains else (), ("row", "changes") if self.held else ()
        return ("time", *order, *row)

    def carried(self, frame: DataFrame, topic: str) -> DataFrame:
        """The records of a topic with these columns."""
        if not self.domains or topic in self.domains:
            return frame
        return frame.selectExpr("*", "unix_micros(time) AS order_high", "0L AS order_low")

    def sql(self, topic: str, partition: str, offset: str, prefix: str = "") -> str:
        """``ord`` of a topic's record, whose columns have a ``prefix``."""
        values = {
            "rank": str(list(self.groups).index(self.domains.get(topic))),
            "high": f"{prefix}order_high" if self.domains else f"unix_micros({prefix}time)",
            "low": f"{prefix}order_low",
            "place": str(self.places[topic]),
            "partition": partition,
            "offset": offset,
        }
        return f"struct({', '.join(f'{values[name]} AS {name}' for name in self.parts)})"

    def of_parts(self, prefix: str) -> str:
        """``ord`` of its parts, which are in columns named by ``prefix`` and a number; null if the first is null."""
        kinds = {"high": "bigint", "low": "bigint", "offset": "bigint"}
        parts = (f"CAST({prefix}{at} AS {kinds.get(name, 'int')}) AS {name}" for at, name in enumerate(self.parts))
        return f"CASE WHEN {prefix}0 IS NOT NULL THEN struct({', '.join(parts)}) END"

    def is_later(self, topic: str, other: str, prefix: str, other_prefix: str) -> str:
        """Whether a topic's record comes after the record of another topic."""
        sign = ">=" if self.places[topic] > self.places[other] else ">"
        if self.domains.get(topic) is None or self.domains.get(topic) != self.domains.get(other):
            return f"{prefix}time {sign} {other_prefix}time"
        high, low = ([f"{side}order_{part}" for side in (prefix, other_prefix)] for part in ("high", "low"))
        return f"({high[0]} > {high[1]} OR ({high[0]} = {high[1]} AND {low[0]} {sign} {low[1]}))"

    def is_shared(self, topics: Iterable[str]) -> bool:
        """Whether one source orders all records of some topics."""
        domains = {self.domains.get(topic) for topic in topics}
        return len(domains) == 1 and None not in domains

    def sequence(self, topic: str, prefix: str) -> list[str]:
        """The columns that sort the records of one topic."""
        order = ["order_high", "order_low"] if topic in self.domains else []
        return [f"{prefix}{name}" for name in (*order, "partition", "offset")]


@dataclass(frozen=True)
class OutputColumns:
    """How the outputs of one rule go into its topic's columns. A None column: neither rule nor topic has that side."""

    fingerprint: str
    key: tuple[str, DataType, DataType] | None
    """(column, the rule's type, the column's type)."""
    value: tuple[str, DataType, DataType] | None
    headers: bool = False
    """Whether one of the topic's rules gives its records headers."""
    lacking: Sequence[str] = ()
    """Expressions for the paths of fields that a record leaves out, null where it has them."""


Columns: TypeAlias = Callable[[Rule, OutputColumns], list[tuple[str, str]]]
"""A function that returns the columns of a rule's outputs as (name, SQL): ``columns``, or ``etl.failures.failing_sides``."""


@dataclass(frozen=True)
class RuleRecords:
    """The new records of a rule in one batch.

    ``index``: the rule's. ``frames``: side → the records under the side's name (``in_frame``), with the columns that the
    rule's kind adds. A side whose topic has no schema yet has no frame. ``key_types``: the types of the join key's parts.
    ``join``: the definition of the hashes of pending records, None if it is not known yet. ``original``: the hashes are those
    of the versions that kept no definition. ``inputs``: side → all records of its topic, if the rule's records may expire.
    ``lookups``: the types of the values of each look-up; None while a table has no schema. ``arguments``: the type of the
    argument of each aggregate, by the aggregate's name, where all topics have a schema."""

    rule: Rule
    index: int
    frames: Mapping[str, DataFrame]
    key_types: Sequence[DataType] = ()
    join: str | None = None
    original: bool = True
    lookups: Sequence[Sequence[DataType]] | None = None
    inputs: Mapping[str, DataFrame] = field(default_factory=dict[str, "DataFrame"])
    arguments: Mapping[str, DataType] = field(default_factory=dict[str, "DataType"])


@dataclass(frozen=True)
class Emission:
    """The outputs of a rule in one batch. ``target``: their columns, None while an input has no schema. ``columns``: as in
    ``singles``. ``together``: one Spark task runs the whole batch. ``parts``: the rules of all
    outputs, if there may be several of a match."""

    target: OutputColumns | None
    columns: Columns
    ordering: Ordering
    together: bool
    held: bool = False
    """Whether the results have the columns about source rows."""
    rows: Callable[[RuleRecords, DataFrame], DataFrame] | None = None
    """Adds the rows that the records look up, each under its alias, and LOOKED, BLAMED and LOOK_HASH."""
    parts: Sequence[tuple[int, Rule, OutputColumns]] = ()

    @property
    def places(self) -> Mapping[str, int]:
        """Input topic → its number in result rows."""
        return self.ordering.places


class Kind:
    """A kind of rule. Each kind is a module of ``etl.rules``. ``etl.rules.KINDS`` lists the kinds.

    A rule's sides say which records the rule takes, and by which names its expressions see them. A record of a side with a
    join key may be pending. The engine finds the pending records that have the hash of a new record on another side. If
    the rule has a single side, the engine compares with the new records of the same side.
    """

    name: ClassVar[str]
    """The ``type`` of the rules in a pipeline file."""
    join: ClassVar[str] = ""
    """The key of the join key in a pipeline file, where the kind has one."""
    summary: ClassVar[str] = ""
    """The kind in a few words, for ``--explain``."""
    single: ClassVar[bool] = False
    """Whether each record makes one output by itself. The engine then makes the outputs in one pass over the topic, for all
    rules of such kinds (``singles``), and does not call ``records`` and ``results``."""

    def records(
        self, rule: Rule, index: int, inputs: Mapping[str, DataFrame], frames: Mapping[str, DataFrame]
    ) -> RuleRecords:
        """The rule's new records, with the join key's hash (column ``hash``) if the rule has a join key.

        ``inputs``: side → all records of its topic, for the types. ``frames``: side → the rule's new records, from
        ``in_frame``. Both lack a side whose topic has no schema. EtlError for a join key that can't be compared.
        """
        return RuleRecords(rule, index, frames)

    def results(self, records: RuleRecords, pending: Mapping[str, DataFrame], emission: Emission) -> list[DataFrame]:
        """Result frames for every new record, and for each pending record that the batch completes.

        ``records``: from ``records``. ``pending``: side → the pending records that may match, from ``in_frame``.
        """
        raise NotImplementedError

    def key_sql(self, rule: Rule, topic: str, inputs: Mapping[str, DataFrame]) -> str | None:
        """The expressions of the join key that may fail on a topic's record; None if the rule has none. ``inputs``: as in
        ``records``."""
        return None

    def from_sql(self, rule: Rule) -> str:
        """The records that ``zync etl --explain`` selects the outputs from, as the FROM clause of one SQL statement."""
        raise NotImplementedError

    def title(self, rule: Rule) -> str:
        """The rule and its topics, for the asset graph."""
        return f"{rule.name} ({' with '.join(rule.topics)})"

    def reason(self, rule: Rule, topic: str, before: int) -> str:
        """Why a record with a join key is pending, for ``zync pending``. ``before``: the pending records of the same topic and
        key before it."""
        return "its counterpart did not come yet"


def in_frame(frame: DataFrame, name: str, ordering: Ordering) -> DataFrame:
    """The record under one name, as expressions of a rule see it."""
    return frame.selectExpr(f"struct(kafka, key, value) AS {name_sql(name)}", *ordering.columns, "old")


def records_sql(rule: Rule, side: Side) -> str:
    """The records of one side, to read: a table of ``zync etl --explain``, in which each record has its rule."""
    rule_records = f"{name_sql(side.topic)} WHERE rule = '{rule.part_of or rule.name}'"
    return f"(SELECT struct(kafka, key, value) AS {side.name} FROM {rule_records})"


def union(frames: Iterable[DataFrame]) -> DataFrame:
    """The rows of several result frames. A column that a frame lacks is null in the frame's rows."""
    merged_frames = list(frames)
    # In pairs: frame after frame, Spark would analyze the rows of the first frames as many times as there are others.
    while len(merged_frames) > 1:
        pairs = zip_longest(merged_frames[::2], merged_frames[1::2])
        merged_frames = [
            left if right is None else left.unionByName(right, allowMissingColumns=True) for left, right in pairs
        ]
    return merged_frames[0]


def key_names(rule: Rule) -> list[str]:
    """The columns with the parts of a rule's join key."""
    return [f"k{number}" for number in range(len(rule.sides[0].keys))]


def source_sql(place: int, partition: str, offset: str) -> str:
    """A record as an element of ``source``. ``place``: the number of its topic."""
    return f"struct({place} AS place, {partition} AS partition, {offset} AS offset)"
