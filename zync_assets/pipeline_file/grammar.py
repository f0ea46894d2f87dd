"""Every key of the pipeline file, as a tree, with its description."""

from __future__ import annotations

from typing import get_args

from zync_assets.pipeline import (
    UNAVAILABLE_VALUE,
    Format,
    OnBadRecord,
    OnDataLoss,
    OnSchemaChange,
    SubjectNameStrategy,
    Unmatched,
)
from zync_assets.pipeline_file.key import KAFKA, LAKE, REGISTRY, SPARK, Key, input_shape, output_shape, paths
from zync_assets.pipeline_file.keys import rule_keys
from zync_assets.pipeline_file.sinks import SINKS
from zync_assets.pipeline_file.transactions import TRANSACTIONS

FORMATS: tuple[Format, ...] = get_args(Format)


def _formats(noun: str) -> tuple[Key, ...]:
    def format_key(side: str, summary: str, example: str, default: str = "as `format`") -> Key:
        return Key(f"{side}format", "a format", summary, f"{side}format: {example}", default=default, allowed=FORMATS)

    general_summary = (
        f"The format of keys and values {noun}. `avro` is Confluent's wire format, `connect-json` is the form of Kafka"
        " Connect's JsonConverter."
    )
    return (
        format_key("", general_summary, "avro", "avro"),
        format_key("key-", f"The format of the keys alone {noun}.", "string"),
        format_key("value-", f"The format of the values alone {noun}.", "connect-json"),
    )


ORDER: tuple[Key, ...] = (
    Key(
        "by",
        "an expression in Spark SQL",
        "The order of a record: an integer, a timestamp, a date, or a struct of two of these. It sees `kafka`, `key` and"
        " `value`, before the shape. A record for which it is null has the order of the record before it.",
        "order: {by: value.lsn, domain: shop}",
        default="the position that Debezium's connector gives",
    ),
    Key(
        "domain",
        "one line of text",
        "The name of the order. Inputs of one domain are compared by it, and other inputs by time.",
        "order: {domain: shop}",
        default="`source.name` of the first record; for `by` the pipeline's name",
    ),
)
INPUT: tuple[Key, ...] = (
    Key("topic", "a topic", "The topic to read. A topic is read into one pool.", "topic: Invoices", required=True),
    Key(
        "pool",
        "letters, digits and _",
        "The raw pool that gets the records of the topic. The raw table is `Pool.Topic`.",
        "pool: Raw",
        required=True,
    ),
    *_formats("in the topic"),
    Key(
        "schema",
        "a Spark DDL",
        "The type of JSON values. Without it, a `json` value is one string. It also reads `connect-json` values that come"
        " without a schema.",
        "format: json\nschema: ID INT, name STRING",
        default="one string",
    ),
    Key(
        "key-schema",
        "a Spark DDL",
        "The type of JSON keys.",
        "key-format: json\nkey-schema: ID INT",
        default="one string",
    ),
    Key(
        "value-schema",
        "a Spark DDL",
        "The type of JSON values; another name of `schema`.",
        "value-format: json\nvalue-schema: ID INT, name STRING",
        default="one string",
    ),
    Key(
        "from",
        "`earliest`, `latest`, a time with its zone, or milliseconds since 1970",
        "The place where the first ingest begins. New partitions of the topic are read from offset 0, whatever `from`"
        " says.",
        "from: 2024-05-01T00:00:00Z",
        default="earliest",
    ),
    Key(
        "unmatched",
        "one of the allowed values",
        "The fate of a record that no rule of a staging pool takes. `keep` keeps it for `--retry-unmatched`, `drop`"
        " counts it as dropped, `fail` stops ETL.",
        "unmatched: drop",
        default="keep",
        allowed=get_args(Unmatched),
    ),
    Key(
        "on-data-loss",
        "one of the allowed values",
        "The effect of records that Kafka removed before ingest. `fail` stops with their offsets. `continue` counts them"
        " as dropped.",
        "on-data-loss: continue",
        default="fail",
        allowed=get_args(OnDataLoss),
    ),
    Key(
        "on-bad-record",
        "one of the allowed values",
        "The effect of a record that can't be decoded or transformed. `quarantine` keeps it whole beside the pool."
        " `fail` stops at the first one.",
        "on-bad-record: fail",
        default="quarantine",
        allowed=get_args(OnBadRecord),
    ),
    Key(
        "max-bad-records",
        "a whole number",
        "The highest number of records of the topic in quarantine. A batch that would exceed it stops the run, and"
        " commits nothing.",
        "max-bad-records: 100",
        default="no limit",
    ),
    Key(
        "on-schema-change",
        "one of the allowed values",
        "The effect of a new writer schema. `merge` widens the raw table, `error` stops before the batch is committed."
        " `quarantine` puts records of the new schema into quarantine.",
        "on-schema-change: error",
        default="merge",
        allowed=get_args(OnSchemaChange),
    ),
    input_shape(),
    Key(
        "retention",
        "a time: a number with s, m, h, d or w",
        "The age at which raw records are removed. No record goes while a staging pool of the file still needs it, or any"
        " record before it. Name all staging pools that read the input in one file.",
        "retention: 30d",
        default="records are kept for ever",
    ),
    Key(
        "order",
        "`time`, or a mapping of `by` and `domain`",
        "The order of the records in their source. Debezium's envelopes from PostgreSQL, MySQL, MariaDB, SQL Server and MongoDB"
        " show it, and all other records are in the order of time. `time` sets the order of time for envelopes too.",
        "order: {by: value.lsn, domain: shop}",
        default="the position that Debezium's connector gives, else time",
        keys=ORDER,
    ),
)

CREATE: tuple[Key, ...] = (
    Key("partitions", "a whole number", "The partitions of the new topic.", "create: {partitions: 3}", default="1"),
    Key("replication-factor", "a whole number", "The replicas of a partition.", "create: {replication-factor: 3}", "1"),
    Key(
        "config",
        "a mapping of Kafka's topic properties",
        "The configuration of the new topic.",
        "create: {config: {retention.ms: -1}}",
        default="the brokers' defaults",
        open=True,
    ),
)

_STRATEGIES = get_args(SubjectNameStrategy)


def _strategy(prefix: str, noun: str, default: str) -> Key:
    return Key(
        f"{prefix}subject-name-strategy",
        "one of the allowed values",
        f"The registry's subject for the Avro schemas of {noun}. `topic` is `TOPIC-key` or `TOPIC-value`. `record` is the"
        " record's full name, `topic-record` puts the topic before it.",
        f"{prefix}subject-name-strategy: record",
        default=default,
        allowed=_STRATEGIES,
    )


OUTPUT: tuple[Key, ...] = (
    Key(
        "topic",
        "a topic",
        "The topic to write. An output is no input of the same file.",
        "topic: NewInvoices",
        required=True,
    ),
    Key(
        "pool",
        "letters, digits and _",
        "The staging pool that numbers the outputs of the topic. One ETL commit covers one staging pool.",
        "pool: Staging",
        required=True,
    ),
    *_formats("of the outputs"),
    Key(
        "create",
        "a mapping",
        "Makes the topic where it is missing, with these properties.",
        "create: {partitions: 1, replication-factor: 3, config: {retention.ms: -1}}",
        default="a missing topic is an error",
        keys=CREATE,
    ),
    Key(
        "start-at",
        "one of the allowed values",
        "The number of the first output. `empty` begins at 0 and refuses a topic with records. `end` begins at the end of"
        " the topic.",
        "start-at: end",
        default="empty",
        allowed=("empty", "end"),
    ),
    Key(
        "provenance",
        "true or false",
        "Adds a header `source` for each raw record that made the output.",
        "provenance: true",
        default="false",
        allowed=("true", "false"),
    ),
    Key(
        "hold",
        "true or false",
        "Lets a change wait while an earlier record of its source row is pending. A delete of a pending row ends the"
        " waiting, and nothing is emitted.",
        "hold: false",
        default="true if a denorm rule feeds it",
        allowed=("true", "false"),
    ),
    output_shape(),
    Key(
        "coalesce",
        "true or false",
        "Makes one output of several changes of one key in a batch. A field that the last change leaves out is as an earlier one"
        " has it. The number of outputs depends on where batches are cut.",
        "coalesce: true",
        default="false",
        allowed=("true", "false"),
    ),
    _strategy("", "keys and values", "topic"),
    _strategy("key-", "keys", "as for both sides"),
    _strategy("value-", "values", "as for both sides"),
    Key(
        "namespace",
        "names with dots between",
        "The namespace of the records in the output's Avro and Connect schemas.",
        "namespace: com.shop",
        "none",
    ),
    Key(
        "partition-by",
        "an expression over `key` and `value`",
        "The partition of each record, a whole number, modulo the partitions. Null is partition 0. All records of a key need"
        " one partition, tombstones too.",
        "partition-by: key.customer_id",
        "Kafka's default partitioner",
    ),
)

_OUTPUTS = "The topics to write, each with the staging pool that holds its outputs."

FILE: tuple[Key, ...] = (
    Key(
        "name",
        "letters, digits, `.`, `_` and `-`",
        "The pipeline's name. In Dagster it stands before the names of jobs, sensors and partitions.",
        "name: invoices",
        default="the file's name without its suffix",
    ),
    Key(
        "kafka",
        "a mapping of librdkafka's properties",
        "The connection to Kafka. Any property of librdkafka is legal, under librdkafka's own name.",
        "kafka: {bootstrap.servers: 'broker:9092', security.protocol: SSL}",
        default="$KAFKA_BOOTSTRAP_SERVERS, else ~/.zync/kafka.json, else localhost:9092",
        keys=KAFKA,
        open=True,
    ),
    Key(
        "registry",
        "a mapping of `url` and properties",
        "The schema registry. The properties are those of Confluent's client for Python.",
        "registry: {url: 'https://registry:8081', timeout: 10}",
        default="$SCHEMA_REGISTRY_URL, else ~/.zync/schema_registry.json, else http://localhost:8081",
        keys=REGISTRY,
        open=True,
    ),
    Key(
        "lake",
        "a folder, a URI, or a mapping of `uri` and settings",
        "The place of the Delta tables. A relative folder begins at the file. delta-rs's own storage options are legal"
        " beside `uri` too.",
        "lake: ./shop-lake",
        default="./lake",
        keys=LAKE,
        open=True,
    ),
    Key(
        "spark",
        "a mapping of `master` or `remote`, and Spark's properties",
        "The Spark session. Properties begin with `spark.`. Properties that results depend on (ANSI mode, time zone,"
        " `spark.sql.legacy.…`) are fixed, and a file that changes one is not valid.",
        'spark: {master: "local[2]", spark.sql.shuffle.partitions: 24}',
        default="$SPARK_REMOTE, else master local[*]",
        keys=SPARK,
        open=True,
    ),
    Key(
        "consumer-group",
        "a consumer group",
        "A group that shows in Kafka how far ingest is. zync writes its offsets after each commit, and never reads them.",
        "consumer-group: shop-pipeline",
        default="none",
    ),
    Key(
        "settle",
        "a number of seconds",
        "The time that the high watermark must stand still after an unclean stop of a publisher. Then the next publisher"
        " compares the topic with staging.",
        "settle: 90",
        default="45",
    ),
    Key(
        "order-delay",
        "a number of seconds",
        "The time that a record may come after records that are later in the order of its source. An idle topic holds the"
        " other topics of its domain back for this time.",
        "order-delay: 5",
        default="1",
    ),
    TRANSACTIONS,
    Key(
        "missing-field",
        "one of the allowed values",
        "The effect of a named field that neither a record nor the registry's newest schema has. A rule or an input's"
        " `shape` names the field. `null` gives null and one warning, and `fail` stops ETL, or ingest for a shape.",
        "missing-field: fail",
        default="null",
        allowed=("null", "fail"),
    ),
    Key(
        "on-rule-change",
        "one of the allowed values",
        "The effect of an edit of rules after their last batch. `continue` tells which rules changed, and goes on with the new"
        " ones. `fail` stops ETL until the old rules are back or the key is gone.",
        "on-rule-change: fail",
        default="continue",
        allowed=("continue", "fail"),
    ),
    Key(
        "unavailable-value",
        "text, or null",
        "Debezium's `unavailable.value.placeholder`. An output field with the placeholder is left out of its record; null"
        " means that there is none.",
        "unavailable-value: __gap",
        default=UNAVAILABLE_VALUE,
    ),
    Key(
        "inputs",
        "a list of mappings",
        "The topics to read, each with the raw pool that gets its records. A file of inputs alone ingests.",
        "inputs: [{topic: Invoices, pool: Raw}, {topic: InvoiceStatus, pool: Raw, format: avro}]",
        keys=INPUT,
    ),
    Key(
        "outputs",
        "a list of mappings",
        f"{_OUTPUTS} A file of outputs alone publishes a pool that another file fills.",
        "outputs: [{topic: NewInvoices, pool: Staging, start-at: end}]",
        keys=OUTPUT,
    ),
    Key(
        "output",
        "a mapping, or a list of mappings",
        f"{_OUTPUTS} Another name of `outputs`, with the same keys.",
        "output: {topic: NewInvoices, pool: Staging, start-at: end}",
    ),
    Key(
        "transforms",
        "a list of rules",
        "The rules that make outputs of raw records. Within a staging pool, the first rule that matches a record takes it.",
        "transforms: [{type: stateless, in: Invoices, out: NewInvoices, key: in.key, value: in.value}]",
        keys=rule_keys(),
    ),
    SINKS,
)

KEYS = dict(paths(FILE))
"""Path, such as ``inputs.retention`` → key."""
