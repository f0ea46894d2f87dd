"""The keys of ``inputs`` and ``outputs``, with their descriptions."""

from __future__ import annotations

from typing import get_args

from zync_assets.pipeline import (
    Format,
    OnBadRecord,
    OnDataLoss,
    OnSchemaChange,
    SubjectNameStrategy,
    Unmatched,
)
from zync_assets.pipeline_file.keys import Key
from zync_assets.pipeline_file.rule_keys import input_shape, output_shape

FORMATS: tuple[Format, ...] = get_args(Format)


def _formats(noun: str) -> tuple[Key, ...]:
    return (
        Key(
            "format",
            "a format",
            f"The format of keys and values {noun}. `avro` is Confluent's wire format, `connect-json` is the form of Kafka"
            " Connect's JsonConverter.",
            "format: avro",
            default="avro",
            allowed=FORMATS,
        ),
        Key(
            "key-format",
            "a format",
            f"The format of the keys alone {noun}.",
            "key-format: string",
            default="as `format`",
            allowed=FORMATS,
        ),
        Key(
            "value-format",
            "a format",
            f"The format of the values alone {noun}.",
            "value-format: connect-json",
            default="as `format`",
            allowed=FORMATS,
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
)

CREATE: tuple[Key, ...] = (
    Key("partitions", "a whole number", "The partitions of the new topic.", "create: {partitions: 3}", default="1"),
    Key(
        "replication-factor",
        "a whole number",
        "The replicas of each partition.",
        "create: {replication-factor: 3}",
        default="1",
    ),
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
    output_shape(),
    _strategy("", "keys and values", "topic"),
    _strategy("key-", "keys", "as for both sides"),
    _strategy("value-", "values", "as for both sides"),
    Key(
        "namespace",
        "names with dots between",
        "The namespace of the records in the output's Avro and Connect schemas.",
        "namespace: com.shop",
        default="none",
    ),
)
