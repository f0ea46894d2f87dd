"""The model of a checked pipeline file, with defaults filled in.

``pipeline_file.load_pipeline`` makes the model. The classes are frozen and pickle, because Spark's executors receive the model.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from zync_assets.queries import Expiry, GroupDefinition, Lookup, Shape, View, ViewTable, ZedTypes

Format: TypeAlias = Literal["avro", "connect-json", "json", "string", "bytes"]
Unmatched: TypeAlias = Literal["keep", "drop", "fail"]
SubjectNameStrategy: TypeAlias = Literal["topic", "record", "topic-record"]
OnSchemaChange: TypeAlias = Literal["merge", "error", "quarantine"]
OnDataLoss: TypeAlias = Literal["fail", "continue"]
OnBadRecord: TypeAlias = Literal["fail", "quarantine"]

Headers: TypeAlias = "str | Mapping[str, str]"
"""The headers of a rule's records: a mapping of names to Spark SQL expressions (strings or binary), or one expression of
Kafka's own form, an array of structs of ``key`` and ``value``."""

SHARED = "shared"
"""``spark: {remote: shared}``: a Spark Connect server that is found, or started, on this machine."""

UNAVAILABLE_VALUE = "__debezium_unavailable_value"
"""Debezium's own default of ``unavailable.value.placeholder``."""

NO_SETTINGS: Mapping[str, str] = {}

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")

SOURCE_HEADER = "source"
"""The header that ``provenance: true`` adds for each raw record."""


def is_topic_name(text: str) -> bool:
    """Whether Kafka lets a topic be called so (``org.apache.kafka.common.internals.Topic``)."""
    return _TOPIC_NAME.fullmatch(text) is not None and text not in (".", "..")


KAFKA = "kafka"
"""The first part of a topic's path; no pool can be called that."""


def topic_path(topic: str) -> str:
    """The path of a topic's asset, the subject of its checks: ``kafka/orders``."""
    return f"{KAFKA}/{topic}"


def pool_path(pool: str, topic: str) -> str:
    """The path of a topic's asset in a pool, the subject of its checks: ``Raw/orders``."""
    return f"{pool}/{topic}"


def table_name(pool: str, topic: str) -> str:
    """A topic in a pool as ``zync query`` and messages name it: ``Raw.orders``."""
    return f"{pool}.{topic}"


@dataclass(frozen=True)
class RecordShape:
    """The ``shape`` of an input or an output, which filters and maps every record.

    A record is dropped unless ``where`` is true. ``sides`` replaces the key and the value of the other records. A null value
    stays null.
    """

    where: str | None
    sides: Mapping[str, Shape]


@dataclass(frozen=True)
class SideFormat:
    """How keys or values are encoded. ``ddl``: the Spark DDL type of a ``json`` side, or of what comes without a
    schema on a ``connect-json`` one; None: one string."""

    format: Format
    ddl: str | None = None


@dataclass(frozen=True)
class RegistryConfig:
    """A schema registry with Confluent's API. ``properties``: further properties of confluent-kafka's client.

    Neither is in the repr: a URL may hold a user and a password.
    """

    url: str = field(repr=False)
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)


class LakeUri(str):
    """A place in an object store: its URI, and the settings that open it, under the names that they have in the pipeline file
    (``endpoint``, ``secret-access-key``), or as delta-rs calls its storage options.

    The class is a string, like the path of a folder, and carries the settings into Spark's tasks. The ``repr`` shows only the
    URI, because settings hold secrets. ``lake.storage.join`` passes the settings on to the joined URI.
    """

    settings: Mapping[str, str]

    def __new__(cls, uri: str, settings: Mapping[str, str] = NO_SETTINGS) -> LakeUri:
        lake_uri = super().__new__(cls, uri)
        lake_uri.settings = settings
        return lake_uri


@dataclass(frozen=True)
class SourceOrder:
    """The ``order`` of an input: how its records are compared with the records of other inputs.

    ``time``: by ``kafka.time``. ``by``: by an SQL expression over the record. ``transactions``: by the position in the ids of
    Debezium's transaction records. None of these: by the position that Debezium's connector gives, else by time. ``path``: the
    names of ``by`` where it is a plain field. ``domain``: the name of the total order; None: ``source.name`` of the first
    record, or the pipeline's name for ``by``.
    """

    by: str | None = None
    domain: str | None = None
    time: bool = False
    path: tuple[str, ...] | None = None
    transactions: bool = False


@dataclass(frozen=True)
class Transactions:
    """The topic of Debezium's transaction metadata. The topic is one of the pipeline's inputs, and no rule reads it.

    ``collections``: the source's name of a table (``public.orders``) → the input topic with the changes of the table, for
    topics with other names than Debezium gives them.
    """

    topic: str
    domain: str | None = None
    """The domain whose transactions the topic has. None: ``prefix``, or the only domain."""
    limit: float = 600.0
    """Seconds after which an incomplete transaction no longer holds its domain back."""
    collections: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Debezium's name of the source: all topics of a connector begin with it."""
        return self.topic.rpartition(".")[0]

    def collection(self, topic: str) -> str | None:
        """The source's name of the table that a topic has the changes of; None if its name does not show it."""
        collection = next(
            (name for name, collection_topic in self.collections.items() if collection_topic == topic), None
        )
        table = topic.removeprefix(f"{self.prefix}.")
        return collection or (table if table != topic and table not in self.collections else None)


@dataclass(frozen=True)
class Input:
    """A source topic and the raw pool that it is read into."""

    topic: str
    pool: str
    key: SideFormat
    value: SideFormat
    start: Literal["earliest", "latest"] | int = "earliest"
    """The start of a new pool. An int is a timestamp in milliseconds since the epoch, UTC."""
    unmatched: Unmatched = "keep"
    on_data_loss: OnDataLoss = "fail"
    on_bad_record: OnBadRecord = "quarantine"
    max_bad_records: int | None = None
    """The most records of the topic in quarantine. A batch that would exceed the limit is not committed."""
    on_schema_change: OnSchemaChange = "merge"
    """The action for records whose writer's schema changes the columns."""
    shape: RecordShape | None = None
    """The filter and mapping of every record before the raw pool."""
    retention_ms: int | None = None
    """The age in milliseconds, by its time, at which a raw record may be removed; None: records are kept for ever."""
    order: SourceOrder | None = None
    """None: the order of Debezium's connector, where the records show one, else the order of time."""


@dataclass(frozen=True)
class CreateTopic:
    """The settings for the creation of a missing output topic."""

    partitions: int = 1
    replication_factor: int = 1
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """An output topic and the staging pool that it is published from."""

    topic: str
    pool: str
    key: SideFormat
    value: SideFormat
    create: CreateTopic | None = None
    start_at: Literal["empty", "end"] = "empty"
    """``empty``: the topic must have no records before the first output; ``end``: numbering begins at its end."""
    provenance: bool = False
    """Whether the headers of each record name its raw records."""
    hold: bool = True
    """Whether a change of a source row waits while an earlier record of the row is pending for the output. Without a denorm
    rule, no record is pending (``Rule.held``)."""
    shape: RecordShape | None = None
    """The filter and mapping of every record of the topic. The rules contain the shape already."""
    coalesce: bool = False
    """Whether several changes of one key in a batch become one."""
    key_subject: SubjectNameStrategy = "topic"
    value_subject: SubjectNameStrategy = "topic"
    """The strategy for the name of the subject under which an Avro schema is registered."""
    namespace: str | None = None
    """The namespace of Avro records; None: made of the topic's name."""
    partition_by: str | None = None
    """An expression over ``key`` and ``value`` for the partition; None: Kafka's default partitioner chooses by the key."""
    is_scratch: bool = False
    """Whether the outputs are staged in a scratch pool and never published. Kafka is not asked for the topic: an ACL can't
    allow a name that each command makes anew."""


@dataclass(frozen=True)
class Side:
    """The records of one topic in a rule."""

    name: str
    """The record's name in expressions: ``in``, ``left``, ``right``."""
    topic: str
    where: str | None = None
    """The condition for the topic's records; None: every record but tombstones."""
    keys: tuple[str, ...] = ()
    """The parts of the join key. A record of a side with a join key may be pending."""


@dataclass(frozen=True)
class Rule:
    """A rule of any kind, as the pipeline file has it. ``etl.rules`` has the kinds.

    ``kind``: the rule's ``type``. ``sides``: the records that the rule takes, in the order of the kind's keys.
    """

    kind: str
    name: str
    sides: tuple[Side, ...]
    out: str
    key: Shape
    value: Shape
    headers: Headers | None = None
    keep: str | None = None
    """The output's own condition: an output for which the condition does not hold is dropped."""
    held: bool = False
    """Whether the output is held: a record of the rule waits while an earlier record of its source row is pending."""
    view: View | None = None
    """The query of a rule of kind ``view``, which has one side for each topic of its tables."""
    lookups: tuple[Lookup, ...] = ()
    """The rows that the rule looks up for each of its outputs."""
    zed: ZedTypes | None = None
    """What a rule in Zed leaves to the types of its topics; None: a rule of Spark SQL."""
    was: str | None = None
    """The former name of the rule."""
    group: GroupDefinition | None = None
    """What makes a group of a rule of kind ``group`` complete."""
    expiry: Expiry | None = None
    """How long a pending record of the rule waits; None: for ever."""
    part_of: str | None = None
    """The name of the rule whose further output this is. This rule takes no records of its own, and gets the matches of that
    rule."""
    explode: str | None = None
    """An array: the rule makes an output of each element, which its expressions see as ``item``."""

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(side.topic for side in self.sides)

    @property
    def tables(self) -> tuple[ViewTable, ...]:
        """The tables whose latest rows the rule reads."""
        return self.view.tables if self.view is not None else tuple(item.table for item in self.lookups)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The topics that the rule reads: the topics of its sides and of its tables."""
        return tuple(dict.fromkeys((*self.topics, *(table.topic for table in self.tables))))

    def counterparts(self, side: Side) -> tuple[Side, ...]:
        """The sides whose records may complete a pending record of ``side``: the others, the only one, or all of a group."""
        if self.group is not None:
            return self.sides
        return tuple(counterpart for counterpart in self.sides if counterpart != side) or self.sides

    def side(self, topic: str) -> Side:
        """The side of a topic; KeyError if the rule does not name the topic."""
        return {side.topic: side for side in self.sides}[topic]


MissingField: TypeAlias = Literal["null", "fail"]
OnRuleChange: TypeAlias = Literal["continue", "fail"]
SinkMode: TypeAlias = Literal["upsert", "insert"]
Evolve: TypeAlias = Literal["none", "own", "add", "widen"]
"""The changes of a table that a sink may make. ``own``: new columns of a table that a sink of the pipeline made."""


@dataclass(frozen=True)
class SinkTable:
    """A source of a sink, and the table that the source goes into. ``staged``: an output topic; else an input's raw table."""

    pool: str
    topic: str
    name: str
    staged: bool

    @property
    def source(self) -> str:
        """The source as positions, messages and ``zync query`` name it: ``Staging.orders``."""
        return table_name(self.pool, self.topic)


@dataclass(frozen=True)
class Sink:
    """A target database and the tables that are kept in it.

    ``kind``: the ``type`` of the pipeline file, such as ``sqlite``, or ``package.module:Class``. ``url`` may hold a password
    and is in no repr. ``key``: the names of the key columns; empty: the fields of the record's key. ``include``: the columns
    to write; None: all. ``rename``: column's name in the source → its name in the table. ``where`` and ``added``: SQL over
    ``kafka``, ``key`` and ``value``. ``before``: a function over an Arrow batch, as ``package.module:function``.
    """

    name: str
    kind: str
    url: str = field(repr=False)
    tables: tuple[SinkTable, ...] = ()
    mode: SinkMode = "upsert"
    key: tuple[str, ...] = ()
    include: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    added: Mapping[str, str] = field(default_factory=dict)
    before: str | None = None
    create: bool = True
    evolve: Evolve = "own"
    delete: bool = True
    on_bad_record: OnBadRecord = "quarantine"
    max_bad_records: int | None = None

    def table(self, name: str) -> SinkTable:
        """The table of that name; KeyError if there is none."""
        return {item.name: item for item in self.tables}[name]


@dataclass(frozen=True)
class Pipeline:
    """A whole pipeline. ``lake`` is an absolute path, or the ``LakeUri`` of an object store.

    >>> from pathlib import Path
    >>> from zync_assets import Pipeline, load_pipeline
    >>> _ = Path("shop.yaml").write_text("inputs: [{topic: orders, pool: Raw, format: json}]")
    >>> pipeline: Pipeline = load_pipeline("shop.yaml")
    >>> pipeline.input("orders").pool, pipeline.outputs
    ('Raw', ())
    """

    name: str
    path: Path
    kafka: Mapping[str, str] = field(repr=False)
    registry: RegistryConfig | None
    lake: str
    spark: Mapping[str, str] = field(repr=False)
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    rules: tuple[Rule, ...]
    settle_seconds: float = 45.0
    """How long the high watermark must stand still before a publisher trusts it after an unclean stop."""
    unavailable_value: str | None = UNAVAILABLE_VALUE
    """Debezium's placeholder for what an update left unchanged and the source did not send; None: there is none."""
    consumer_group: str | None = None
    """The consumer group that shows in Kafka how far ingest is; never read."""
    missing_field: MissingField = "null"
    """The treatment of a field in a rule that neither a record nor the registry's newest schema has."""
    on_rule_change: OnRuleChange = "continue"
    """The effect of an edit of rules after their last batch."""
    order_delay: float = 1.0
    """Seconds that a producer may take to send a record after records that come later in the source's order."""
    transactions: Transactions | None = None
    """The topic of the source's transactions. None: a staging commit may end within a transaction."""
    sinks: tuple[Sink, ...] = ()
    """The target databases that the pipeline writes to itself."""

    def command(self, name: str, *options: str) -> str:
        """A ``zync`` command for this pipeline, whole, so that it works when pasted into a shell.

        ``name``: the command, such as ``check`` or ``quarantine list``. No sign of a sentence may follow the command.
        """
        return f"zync {name} {shlex.join([str(self.path), *options])}"

    def input(self, topic: str) -> Input:
        """The input of that name; KeyError if there is none."""
        return {item.topic: item for item in self.inputs}[topic]

    def output(self, topic: str) -> Output:
        """The output of that name; KeyError if there is none."""
        return {item.topic: item for item in self.outputs}[topic]

    def sink(self, name: str) -> Sink:
        """The sink of that name; KeyError if there is none."""
        return {item.name: item for item in self.sinks}[name]

    @property
    def staging_pools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.pool for item in self.outputs))

    def outputs_of(self, pool: str) -> tuple[Output, ...]:
        return tuple(item for item in self.outputs if item.pool == pool)

    def rules_of(self, pool: str) -> tuple[Rule, ...]:
        """The rules whose output topic is in that staging pool, in the file's order."""
        topics = {item.topic for item in self.outputs_of(pool)}
        return tuple(rule for rule in self.rules if rule.out in topics)

    def inputs_of(self, pool: str) -> tuple[Input, ...]:
        """The inputs that the rules of that staging pool name, in the file's order."""
        topics = {topic for rule in self.rules_of(pool) for topic in rule.inputs}
        return tuple(item for item in self.inputs if item.topic in topics)

    def readers_of(self, topic: str) -> tuple[str, ...]:
        """The staging pools whose rules name the input topic, in the file's order."""
        return tuple(pool for pool in self.staging_pools if any(topic in rule.inputs for rule in self.rules_of(pool)))

    def raw_sinks(self, topic: str) -> tuple[tuple[Sink, SinkTable], ...]:
        """The target tables that are written from the raw table of an input topic."""
        tables = ((sink, table) for sink in self.sinks for table in sink.tables)
        return tuple((sink, table) for sink, table in tables if table.topic == topic and not table.staged)

    def joins_of(self, pool: str) -> dict[tuple[str, str], Rule]:
        """(rule's name, input topic) → the rule of that staging pool for which a record of the topic can be pending."""
        rules = self.rules_of(pool)
        return {(rule.name, side.topic): rule for rule in rules for side in rule.sides if side.keys or rule.lookups}
