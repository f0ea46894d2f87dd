"""The key ``transactions`` of a pipeline file: the topic of Debezium's transaction metadata, which becomes an input."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from zync_assets.pipeline import Format, Input, Rule, SideFormat, SourceOrder, Transactions, is_topic_name
from zync_assets.pipeline_file.fields import UNNAMED, Fields
from zync_assets.pipeline_file.key import Key, known_names

FORMATS: tuple[Format, ...] = ("avro", "connect-json", "json")
LIMIT_MS = 600_000

TRANSACTIONS = Key(
    "transactions",
    "a mapping",
    "Ends each staging commit between two transactions of the source. A transaction is transformed when all its changes are in"
    " the lake. This takes Debezium's transaction metadata from PostgreSQL, SQL Server, MySQL or MariaDB.",
    "transactions: {topic: shop.transaction}",
    default="a commit may end anywhere",
    keys=(
        Key(
            "topic",
            "a topic",
            "Debezium's transaction topic, which `provide.transaction.metadata` switches on. It is read into the pool and in"
            " the format of the first input, or as `inputs` says if it is listed there.",
            "transactions: {topic: shop.transaction}",
            required=True,
        ),
        Key(
            "format",
            "`avro`, `connect-json` or `json`",
            "The format of the keys and values in the topic.",
            "transactions: {topic: shop.transaction, format: connect-json}",
            default="as the values of the first input",
        ),
        Key(
            "limit",
            "a time: a number with s, m, h, d or w",
            "The time after which an incomplete transaction no longer holds its domain back. The status and the check"
            " `source_order` count such transactions.",
            "transactions: {topic: shop.transaction, limit: 1h}",
            default="10m",
        ),
        Key(
            "domain",
            "one line of text",
            "The domain of the inputs with the changes of the transactions.",
            "transactions: {topic: shop.transaction, domain: shop}",
            default="the only domain, or the topic's name up to its last dot",
        ),
        Key(
            "collections",
            "a mapping of the source's tables to topics",
            "The input topics whose names are not Debezium's own. The changes of an input with neither such a name nor an"
            " entry are not counted, and the end of its topic is read twice instead.",
            "transactions: {topic: shop.transaction, collections: {public.invoices: Invoices}}",
            default="`shop.public.orders` has the changes of `public.orders`",
            open=True,
        ),
    ),
)

_JSON = (
    "status STRING, id STRING, event_count BIGINT,"
    " data_collections ARRAY<STRUCT<data_collection: STRING, event_count: BIGINT>>, ts_ms BIGINT"
)
_FORM = "write a mapping with topic:, such as {topic: shop.transaction}"


def read_transactions(
    fields: Fields, inputs: Mapping[str, Input | None], outputs: Collection[str], rules: Iterable[Rule]
) -> tuple[Transactions, Format | None] | None:
    """The ``transactions`` of a file and their format, where the file has one; None where the key is missing or wrong."""
    if "transactions" not in fields:
        return None
    table = fields.table("transactions")
    if table is None:
        return None
    item = Fields(table, "transactions", fields.problems, known_names(TRANSACTIONS.keys))
    problem_count = len(fields.problems)
    topic = item.text("topic", _FORM)
    form, limit, domain = item.choice("format", FORMATS), item.duration("limit"), item.text("domain")
    if not inputs:
        fields.problem("transactions", "goes with inputs: the file reads no changes; remove it")
    if topic is not None and not is_topic_name(topic):
        item.problem("topic", "is no legal topic name; write the name of Debezium's transaction topic")
    if topic is not None and topic in outputs:
        item.problem("topic", f"`{topic}` is an output; an output is no input of the same pipeline")
    if any(topic in rule.inputs for rule in rules):
        item.problem("topic", f"`{topic}` is read by a rule; the records of this topic are no changes of a table")
    if form is not None and topic in inputs:
        item.problem("format", f"belongs to the input `{topic}`; remove it here")
    collections: dict[str, str] = {}
    names = item.table("collections")
    if names is not None:
        collections = Fields(names, item.key("collections"), item.problems, None).flat()
        for collection, name in collections.items():
            if name not in inputs and UNNAMED not in inputs:
                item.problem("collections", f"{collection}: `{name}` is no input; name a topic of inputs")
    if topic is None or len(fields.problems) > problem_count:
        return None
    return Transactions(topic, domain, (limit or LIMIT_MS) / 1000, collections), form


def with_transaction_topic(
    inputs: tuple[Input, ...], transactions: Transactions, form: Format | None
) -> tuple[Input, ...]:
    """The inputs with the transaction topic, at the end if the file does not list it among them."""
    order = SourceOrder(domain=transactions.domain or transactions.prefix or None, transactions=True)
    if any(item.topic == transactions.topic for item in inputs):
        return tuple(replace(item, order=order) if item.topic == transactions.topic else item for item in inputs)
    if not inputs:
        return ()
    first = inputs[0]
    value = form or (first.value.format if first.value.format in FORMATS else "json")
    key = value if form is not None else first.key.format
    # Nothing reads the keys. Plain JSON has no schema, and text is enough.
    sides = SideFormat("string" if value == "json" else key), SideFormat(value, _JSON if value == "json" else None)
    return (*inputs, Input(transactions.topic, first.pool, *sides, order=order))
