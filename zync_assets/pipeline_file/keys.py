"""The keys of ``transforms``. Each kind of rule has a section of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zync_assets.pipeline_file.conditions import split_join
from zync_assets.pipeline_file.fields import Fields
from zync_assets.pipeline_file.key import Key


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
    key, keys = "join-on", ("left-key", "right-key")
    if key not in fields and any(name in fields for name in keys):
        key, sides = keys[0], [fields.text(name, "write the side's part of the join key") for name in keys]
        text = None if None in sides else f"({sides[0]}) = ({sides[1]})"
    else:
        text = fields.text(key, "write an equality of the two sides, such as left.key.ID = right.value.after.ID")
        for name in keys:
            if name in fields:
                fields.problem(name, "says what join-on says; remove one of the two")
    pairs, problems = split_join(text) if text is not None else ((), [])
    for message in problems:
        fields.problem(key, message)
    return {"left": tuple(pair[0] for pair in pairs), "right": tuple(pair[1] for pair in pairs)}


_TABLE = "type: view\ntables: {{o: {{{}}}}}\nfrom: o\nkey: {{ID: o.ID}}\nvalue: {{customer: o.customer}}"

_GROUP = (
    "type: group\nrecords: {{i: Invoices, s: InvoiceStatus}}\ngroup-by: {}\ncomplete-when: bool_or(s.value.done)\n"
    "key: first(i).key\nvalue: {{lines: count(*)}}"
)

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
        Key(
            "left-key",
            "an expression of `left`",
            "The left side of the join key, with `right-key`, in place of `join-on`.",
            "left-key: left.value.after.ID\nright-key: right.value.after.InvoiceID",
            default="`join-on` has both sides",
        ),
        Key(
            "right-key",
            "an expression of `right`",
            "The right side of the join key.",
            "left-key: left.value.after.ID\nright-key: right.value.after.InvoiceID",
            default="`join-on` has both sides",
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
                    default="a tombstone, `op = 'd'` of a Debezium envelope, or a true `__deleted`",
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

GROUP = Section(
    "group",
    "`group` makes an output of several records that belong together",
    sides=(),
    keys=(
        Key(
            "records",
            "a mapping of aliases to topics",
            "The topics of a group rule, each under an alias.",
            _GROUP.format("value.ID"),
        ),
        Key(
            "group-by",
            "an expression, or a mapping of aliases to expressions",
            "What the records of a group share, by `kafka`, `key` and `value` of a record. A null matches nothing.",
            _GROUP.format("{i: value.ID, s: value.InvoiceID}"),
        ),
        Key(
            "complete-when",
            "a condition over aggregates",
            "The group is complete at the first record with which the condition holds. Later records begin the next group.",
            _GROUP.format("value.ID"),
        ),
    ),
    join="group-by",
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

_DENORM = (
    "type: denorm\nleft: Invoices\nright: InvoiceStatus\njoin-on: left.key = right.key\nkey: left.key\nvalue: right.value.after\n"
    "expire-after: 1h\non-expire: {}"
)

EXPIRY = (
    Key(
        "expire-after",
        "a time such as 90s, 10m, 12h or 30d",
        "How long a record of a denorm or a group rule waits, by the time of records. A record expires when the newest time of"
        " the rule's inputs exceeds its own by more than this. A group expires with its first record.",
        _DENORM.format("drop"),
        default="for ever",
    ),
    Key(
        "on-expire",
        "one of the allowed values",
        "What becomes of records that expire. `emit` makes an output of the records that are there; an absent side is null. The"
        " others count as *expired*: with `quarantine`, they are in quarantine too; with `drop`, they are counted alone.",
        _DENORM.format("emit"),
        default="quarantine",
        allowed=("quarantine", "drop", "emit"),
    ),
)
"""The keys of the kinds with a join key."""

_OUT = "type: stateless\nin: Invoices\nout: [{{topic: NewInvoices, key: in.key, value: in.value{}}}]"

OUT = Key(
    "out",
    "a topic of `outputs`, or a list of mappings",
    "The topic that gets the outputs of the rule. A list has a mapping for each output of a match. All outputs of a match are in"
    " one commit.",
    "out: NewInvoices",
    required=True,
    keys=(
        Key("topic", "a topic of `outputs`", "The topic of the output.", _OUT.format(""), required=True),
        Key(
            "where",
            "a condition in Spark SQL",
            "The matches that make the output. A match without any output is *dropped*.",
            _OUT.format(", where: in.value.op = 'c'"),
            default="all",
        ),
        Key("key", "an expression, a mapping of names to expressions, or null", "As `key` of a rule.", _OUT.format("")),
        Key(
            "value",
            "an expression, a mapping of names to expressions, or null",
            "As `value` of a rule.",
            _OUT.format(""),
        ),
        Key(
            "headers", "a mapping, or one expression", "As `headers` of a rule.", _OUT.format(", headers: {a: in.key}")
        ),
        Key(
            "explode", "an expression for an array", "As `explode` of a rule.", _OUT.format(", explode: in.value.lines")
        ),
    ),
)

SECTIONS = {section.kind: section for section in (STATELESS, DENORM, VIEW, GROUP)}
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
            "was",
            "the former name of a rule",
            "The name that the rule had before. Records that wait under the former name wait for the rule.",
            "name: paid\nwas: 1-denorm",
            default="the rule had no other name",
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
        *EXPIRY,
        Key(
            "zed",
            "a program in Zed",
            "Makes the output in zync's own language, in place of `key` and `value`. `where` and `join-on` are Zed too.",
            "type: stateless\nin: Invoices\nzed: '| out:={key: in.key, value: in.value.after}'",
            default="the rule is in Spark SQL",
        ),
        OUT,
        Key(
            "explode",
            "an expression for an array",
            "Makes an output of each element of an array. Expressions of the output see the element as `item`.",
            "type: stateless\nin: Invoices\nexplode: in.value.lines\nkey: {ID: item.ID}\nvalue: {sku: item.sku}",
            default="one output",
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
