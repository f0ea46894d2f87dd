"""A key of the pipeline file: the name that the reader accepts, and the description that ``zync help`` prints.

The readers take their known names from these definitions. A key without a description therefore does not exist. The keys of
``transforms`` and of ``shape`` are here too. Each kind of rule has a section of its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zync_assets.pipeline_file.conditions import split_join
from zync_assets.pipeline_file.fields import Fields

_INDEX = re.compile(r"\[[0-9]*\]")


@dataclass(frozen=True)
class Key:
    """One key of one mapping.

    ``type``: the form of the value, in words. ``text``: one to three sentences. ``example``: YAML at the place of the
    key, with the keys that it needs beside it. ``default``: the value, or the effect, where the file lacks the key.
    ``required``: the file must have the key. ``allowed``: every legal value, where there is a list. ``keys``: the
    known keys below this one. ``open``: other names below this one are legal too.
    """

    name: str
    type: str
    text: str
    example: str
    default: str = ""
    required: bool = False
    allowed: Sequence[str] = ()
    keys: tuple[Key, ...] = ()
    open: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of the text."""
        return re.split(r"(?<=[.])\s", self.text, maxsplit=1)[0]


def known_names(keys: Sequence[Key]) -> tuple[str, ...]:
    """The names of keys, for the reader of their mapping."""
    return tuple(key.name for key in keys)


def paths(keys: Sequence[Key], above: str = "") -> Iterator[tuple[str, Key]]:
    """Every key with its path, such as ``inputs.retention``, in the order of the grammar."""
    for key in keys:
        path = f"{above}.{key.name}" if above else key.name
        yield path, key
        yield from paths(key.keys, path)


def found(known: Mapping[str, Key], path: str) -> str | None:
    """The known path that ``path`` means; None for an unknown one.

    ``inputs[0].topic`` means ``inputs.topic``. A name below an open key, such as a property of librdkafka, means the
    open key.
    """
    plain = _INDEX.sub("", path)
    if plain in known:
        return plain
    return next((above for above, key in known.items() if key.open and plain.startswith(f"{above}.")), None)


def near(known: Mapping[str, Key], path: str) -> list[str]:
    """At most three known paths that resemble an unknown one, the closest first."""
    plain = _INDEX.sub("", path).lower()
    last = plain.rpartition(".")[2]
    by_path = difflib.get_close_matches(plain, list(known), n=3, cutoff=0.75)
    by_name = [
        place
        for name in difflib.get_close_matches(last, {key.name for key in known.values()}, n=3, cutoff=0.75)
        for place, key in known.items()
        if key.name == name
    ]
    return list(dict.fromkeys([*by_path, *by_name]))[:3]


def input_shape() -> Key:
    """The key ``shape`` of an input."""
    return Key(
        "shape",
        "a mapping",
        "Filters and maps each record before the record reaches the lake. The lake never gets the rest, except for"
        " quarantined records, which stay whole.",
        "shape: {where: value.op <> 'r', value: value.after}",
        default="none",
        keys=_shape("`kafka`, `key` and `value` of the record"),
    )


def output_shape() -> Key:
    """The key ``shape`` of an output."""
    return Key(
        "shape",
        "a mapping",
        "Filters and maps each output of the rules before it is numbered. The inputs of a filtered output are *dropped*.",
        "shape: {value: {ID: value.ID}}",
        default="none",
        keys=_shape("`key` and `value` of the output"),
    )


def _shape(roots: str) -> tuple[Key, ...]:
    return (
        Key(
            "where",
            "a condition in Spark SQL",
            f"Keeps the records for which the condition holds; null counts as no. It sees {roots}.",
            "shape: {where: value.ID IS NOT NULL}",
            default="all are kept",
        ),
        Key(
            "key",
            "an expression, or a mapping of names to expressions",
            "The new key.",
            "shape: {key: key}",
            default="the key as it is",
        ),
        Key(
            "value",
            "an expression, or a mapping of names to expressions",
            "The new value. A null value stays null.",
            "shape: {value: {ID: value.ID}}",
            default="the value as it is",
        ),
    )


@dataclass(frozen=True)
class Section:
    """The section of one kind of rule in the grammar.

    ``text``: the kind in a clause. ``sides``: the keys that name a topic each; expressions see a record of the topic
    under the same name. ``keys``: all keys of the kind alone. ``where``: the keys of ``where`` as a mapping, for a kind with
    several sides. ``join``: the key of the join key, where the kind has one. ``read_join``: reads the join key, as side →
    parts.
    """

    kind: str
    text: str
    sides: tuple[str, ...]
    keys: tuple[Key, ...]
    where: tuple[Key, ...] = ()
    join: str = ""
    read_join: Callable[[Fields], Mapping[str, tuple[str, ...]]] = lambda fields: {}


def _read_join_on(fields: Fields) -> Mapping[str, tuple[str, ...]]:
    text = fields.text("join-on", "write an equality of the two sides, such as left.key.ID = right.value.after.ID")
    pairs, problems = split_join(text) if text is not None else ((), [])
    for message in problems:
        fields.problem("join-on", message)
    return {"left": tuple(pair[0] for pair in pairs), "right": tuple(pair[1] for pair in pairs)}


_TABLE = "type: view\ntables: {{o: {{{}}}}}\nfrom: o\nkey: {{ID: o.ID}}\nvalue: {{customer: o.customer}}"

STATELESS = Section(
    "stateless",
    "`stateless` makes an output of one record",
    sides=("in",),
    keys=(
        Key(
            "in",
            "a topic of `inputs`",
            "The topic of a stateless rule. Its expressions see the record as `in`.",
            "type: stateless\nin: Invoices\nkey: in.key\nvalue: in.value",
        ),
    ),
)

DENORM = Section(
    "denorm",
    "`denorm` makes an output of two records with the same join key",
    sides=("left", "right"),
    keys=(
        Key(
            "left",
            "a topic of `inputs`",
            "The first topic of a denorm rule. Expressions see its record as `left`.",
            "left: Invoices",
        ),
        Key(
            "right",
            "a topic of `inputs`",
            "The second topic of a denorm rule. Expressions see its record as `right`.",
            "right: InvoiceStatus",
        ),
        Key(
            "join-on",
            "equalities joined by AND",
            "The join key of a denorm rule. Each equality compares an expression of `left` with one of `right`. The k-th left"
            " record of a key pairs with the k-th right record; a null key matches nothing.",
            "join-on: left.value.after.ID = right.value.after.InvoiceID",
        ),
    ),
    where=(
        Key(
            "left",
            "a condition in Spark SQL",
            "The condition on records of the left topic.",
            "where: {left: value.op = 'c'}",
            default="all records but tombstones",
        ),
        Key(
            "right",
            "a condition in Spark SQL",
            "The condition on records of the right topic.",
            "where: {right: value.op = 'c'}",
            default="all records but tombstones",
        ),
    ),
    join="join-on",
    read_join=_read_join_on,
)

VIEW = Section(
    "view",
    "`view` keeps its topic equal to a query over the latest rows of tables",
    sides=(),
    keys=(
        Key(
            "tables",
            "a mapping of aliases to topics, or to mappings",
            "The tables of a view, each with its alias and its topic. Expressions see the latest row of each key by alias.",
            "type: view\ntables: {o: Invoices, s: {topic: InvoiceStatus, row: value}}\n"
            "from: o JOIN s ON o.ID = s.InvoiceID\nkey: o.ID\nvalue: {status: s.status}",
            keys=(
                Key(
                    "topic",
                    "a topic of `inputs`",
                    "The input with the changes of the table. Several aliases and views may use one input.",
                    f"{_TABLE.format('topic: Invoices')}",
                ),
                Key(
                    "key",
                    "an expression, or a mapping of names to expressions",
                    "The key of a row, by `kafka`, `key` and `value` of the record. The last record of a key has its latest row.",
                    f"{_TABLE.format('topic: Invoices, key: key.ID')}",
                    default="the record's key",
                ),
                Key(
                    "row",
                    "an expression in Spark SQL",
                    "The row of a record.",
                    f"{_TABLE.format('topic: Invoices, row: value')}",
                    default="`value.after` of a Debezium envelope, else `value`",
                ),
                Key(
                    "deleted",
                    "a condition in Spark SQL",
                    "The records that delete their row.",
                    f"{_TABLE.format('topic: Invoices, deleted: value IS NULL OR value.gone')}",
                    default="a tombstone, or `op = 'd'` of a Debezium envelope",
                ),
                Key(
                    "key-in-many-partitions",
                    "one of the allowed values",
                    "What to do with a key that comes in several partitions: stop, or use the record with the latest time.",
                    f"{_TABLE.format('topic: Invoices, key-in-many-partitions: latest-time')}",
                    default="fail",
                    allowed=["fail", "latest-time"],
                ),
            ),
            open=True,
        ),
        Key(
            "from",
            "aliases joined by equalities",
            "The joins of a view: JOIN and LEFT JOIN on equalities. Each join compares a table with one table before it. A null"
            " join key matches nothing.",
            "type: view\ntables: {o: Invoices, s: InvoiceStatus}\nfrom: o LEFT JOIN s ON s.InvoiceID = o.ID\n"
            "key: {ID: o.ID}\nvalue: {status: s.status}",
        ),
        Key(
            "on-duplicate-key",
            "an expression in Spark SQL",
            "The choice among several rows of one key of a view: the greatest stays.",
            "type: view\ntables: {s: InvoiceStatus}\nfrom: s\nkey: {ID: s.InvoiceID}\nvalue: {status: s.status}\n"
            "on-duplicate-key: s.ID",
            default="several are an error",
        ),
    ),
)

_LOOKUP = (
    "type: stateless\nin: Invoices\nlookup: {{s: {{table: InvoiceStatus, on: s.InvoiceID = in.value.after.ID, missing: {}}}}}\n"
    "key: in.key\nvalue: {{status: s.status}}"
)

LOOKUP = Key(
    "lookup",
    "a mapping of aliases to mappings",
    "The rows that a stateless or a denorm rule looks up for its output, each under an alias. Expressions of `key`, `value` and"
    " `headers` see the latest row by alias. A later change of the row emits nothing.",
    _LOOKUP.format("null"),
    default="none",
    keys=(
        Key(
            "table",
            "a topic of `inputs`",
            "The input with the changes of the table. No rule of the pool may take its records as events.",
            _LOOKUP.format("quarantine"),
            required=True,
        ),
        Key(
            "on",
            "equalities joined by AND",
            "The row to look up. Each equality compares an expression of the alias with one of the record. At most one row may"
            " have the values.",
            _LOOKUP.format("null"),
            required=True,
        ),
        Key(
            "missing",
            "one of the allowed values",
            "What happens if no row is there. With `wait`, the record is pending until the row comes. With `null`, the columns"
            " are null, and with `quarantine`, the record goes into quarantine.",
            _LOOKUP.format("wait"),
            required=True,
            allowed=("null", "quarantine", "wait"),
        ),
        Key(
            "wait",
            "a time such as 90s, 10m, 12h or 30d",
            "How long a record waits for its row. Then it goes into quarantine.",
            _LOOKUP.format("wait, wait: 1h"),
            default="10m",
        ),
        *(key for key in next(key.keys for key in VIEW.keys if key.name == "tables") if key.name != "topic"),
    ),
    open=True,
)

SECTIONS = {section.kind: section for section in (STATELESS, DENORM, VIEW)}
"""``type`` of a rule → its section."""


def joining_kinds() -> str:
    """The kinds of rules with a join key, in words: a record can be pending for such a rule alone."""
    return " or ".join(section.kind for section in SECTIONS.values() if section.join)


def rule_keys() -> tuple[Key, ...]:
    """The keys of a rule of any kind."""
    kinds = tuple(SECTIONS.values())
    return (
        Key(
            "name",
            "one line of text",
            "The rule's name in the account, among pending records and in the outputs. Name the rules of a file that will be"
            " edited.",
            "name: new-invoice",
            default="position and type: `1-denorm`",
        ),
        Key(
            "type",
            "one of the allowed values",
            f"The kind of rule. {'; '.join(section.text for section in kinds)}.",
            "type: denorm",
            required=True,
            allowed=sorted(SECTIONS),
        ),
        Key(
            "where",
            "a condition in Spark SQL, or for a denorm rule a mapping of `left` and `right`",
            "The records that the rule takes, by `kafka`, `key` and `value`. The first rule of a staging pool that names the"
            " topic and whose `where` holds gets the record. For a view, `where` is a condition on the joined rows.",
            "where: value.op IN ('c', 'r')",
            default="all records but tombstones",
            keys=tuple(key for section in kinds for key in section.where),
        ),
        *(key for section in kinds for key in section.keys),
        LOOKUP,
        Key(
            "out",
            "a topic of `outputs`",
            "The topic that gets the outputs of the rule.",
            "out: NewInvoices",
            required=True,
        ),
        Key(
            "key",
            "an expression, a mapping of names to expressions, or null",
            "The key of the output. Mappings nest as deep as needed.",
            "key: {ID: left.value.after.ID}",
            required=True,
        ),
        Key(
            "value",
            "an expression, a mapping of names to expressions, or null",
            "The value of the output; null makes a tombstone. A field that the mapping does not name is left out, a field that"
            " it sets to `NULL` is erased. An aggregate in the value of a view groups by `key`.",
            "value: {ID: left.value.after.ID, status: right.value.after.status}",
            required=True,
        ),
        Key(
            "headers",
            "a mapping of names to expressions, or one expression",
            "The headers of the output, strings or binary; a null header is left out. `in.kafka.headers` passes all headers of"
            " the record on.",
            "headers: {origin: left.kafka.topic}",
            default="none",
        ),
    )
