"""The pipeline file: its valid contents, and its errors with line, key and cure."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zync_assets.cli.validate import validate
from zync_assets.errors import PipelineFileError, Problem
from zync_assets.etl.rules import explain_rules
from zync_assets.pipeline import (
    CreateTopic,
    Input,
    Pipeline,
    RecordShape,
    RegistryConfig,
    Side,
    SideFormat,
    SourceOrder,
    Transactions,
)
from zync_assets.pipeline_file import load
from zync_assets.pipeline_file.source import MAX_BYTES, Scalar, YamlTable, parse

DEMO = Path(__file__).resolve().parents[2] / "demo"

GOOD = """\
inputs:
  - {topic: A, pool: Raw}
  - {topic: B, pool: Raw}
outputs:
  - {topic: C, pool: Staging}
transforms:
  - type: denorm
    where: value.op = 'c'
    left: A
    right: B
    join-on: left.key = right.key
    out: C
    key: left.key
    value: {a: left.value.a, more: {b: right.value.b, none: null}}
  - type: stateless
    where: value.op = 'u'
    in: A
    out: C
    key: in.key
    value: null
"""


def read(folder: Path, text: str, **env: str) -> Pipeline:
    file = folder / "shop.yaml"
    file.write_text(text)
    return load(file, env)


def explained(pipeline: Pipeline) -> str:
    return "\n".join(statement.sql for statement in explain_rules(pipeline))


def problems(folder: Path, text: str, **env: str) -> tuple[Problem, ...]:
    with pytest.raises(PipelineFileError) as caught:
        read(folder, text, **env)
    return caught.value.problems


def test_a_file_of_inputs_alone_ingests_and_a_file_of_outputs_alone_publishes(tmp_path: Path) -> None:
    ingests = read(tmp_path, "inputs: [{topic: A, pool: Raw}]")
    assert ([item.topic for item in ingests.inputs], ingests.outputs, ingests.rules) == (["A"], (), ())
    publishes = read(tmp_path, "output: {topic: C, pool: Staging}")
    assert (publishes.inputs, [item.topic for item in publishes.outputs], publishes.rules) == ((), ["C"], ())


def test_inputs_with_outputs_need_rules_and_rules_need_both(tmp_path: Path) -> None:
    both = "inputs: [{topic: A, pool: Raw}]\noutputs: [{topic: C, pool: Staging}]\n"
    assert [found.key for found in problems(tmp_path, both)] == ["transforms"]
    assert "of inputs alone, which ingests" in problems(tmp_path, both)[0].message
    rule = "transforms: [{type: stateless, in: A, out: C, key: in.key, value: in.value}]\n"
    assert {found.key for found in problems(tmp_path, rule)} >= {"inputs", "outputs"}
    assert {found.key for found in problems(tmp_path, "name: empty\n")} == {"inputs", "outputs", "transforms"}


def test_an_output_that_a_denorm_rule_feeds_is_held_unless_the_file_says_no(tmp_path: Path) -> None:
    text = (DEMO / "invoices.yaml").read_text()
    assert {rule.held for rule in read(tmp_path, text).rules} == {True}
    refused = text.replace("topic: NewInvoices, pool", "topic: NewInvoices, hold: false, pool")
    assert {rule.held for rule in read(tmp_path, refused).rules} == {False}
    copy = """
    inputs: [{topic: A, pool: Raw}]
    outputs: [{topic: C, pool: Staging, hold: true}]
    transforms: [{type: stateless, in: A, out: C, key: in.key, value: in.value}]
    """
    assert [rule.held for rule in read(tmp_path, copy).rules] == [False], "nothing can be pending"


def test_the_demo_s_file() -> None:
    pipeline = load(DEMO / "invoices.yaml", {})
    assert pipeline.name == "invoices"
    assert pipeline.lake == str(DEMO.resolve() / "lake")
    assert pipeline.kafka == {"bootstrap.servers": "localhost:9092"}
    assert [item.topic for item in pipeline.inputs] == ["Invoices", "InvoiceStatus"]
    assert pipeline.output("NewInvoices").create == CreateTopic(1, 1, {"retention.ms": "-1"})
    new, update, delete = pipeline.rules
    where = "value.op IN ('c', 'r')"
    assert (new.kind, new.sides) == (
        "denorm",
        (
            Side("left", "Invoices", where, ("left.value.after.ID",)),
            Side("right", "InvoiceStatus", where, ("right.value.after.InvoiceID",)),
        ),
    )
    assert (update.kind, update.topics) == ("stateless", ("InvoiceStatus",))
    assert update.value == {"ID": "in.value.after.InvoiceID", "invoice_status": "in.value.after.status"}
    assert delete.value is None
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline


def test_a_path_may_be_text(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text("inputs: [{topic: T, pool: Raw, format: string}]")
    assert load(str(path)) == load(path)


def test_defaults(tmp_path: Path) -> None:
    pipeline = read(tmp_path, GOOD)
    assert pipeline.name == "shop"
    assert pipeline.lake == str(tmp_path.resolve() / "lake")
    assert pipeline.kafka == {"bootstrap.servers": "localhost:9092"}
    assert pipeline.registry == RegistryConfig("http://localhost:8081")
    assert pipeline.spark == {"master": "local[*]"}
    assert pipeline.settle_seconds == 45
    assert pipeline.unavailable_value == "__debezium_unavailable_value"
    assert pipeline.input("A").start == "earliest"
    assert pipeline.input("A").value == SideFormat("avro")
    assert pipeline.output("C").create is None
    denorm, stateless = pipeline.rules
    assert (denorm.name, stateless.name) == ("1-denorm", "2-stateless")
    assert [side.where for side in denorm.sides] == ["value.op = 'c'"] * 2
    assert denorm.value == {"a": "left.value.a", "more": {"b": "right.value.b", "none": None}}


def test_the_topic_of_the_transactions_is_the_last_input(tmp_path: Path) -> None:
    """It has the pool and the format of the first input, unless it is listed among the inputs."""
    rest = """
inputs: [{topic: shop.public.orders, pool: R, format: connect-json}, {topic: bills, pool: R2}%s]
outputs: [{topic: o, pool: S, key-format: string}]
transforms: [{name: s, type: stateless, in: bills, out: o, key: null, value: in.value}]
"""
    pipeline = read(
        tmp_path, f"transactions: {{topic: shop.transaction, collections: {{public.bills: bills}}}}{rest % ''}"
    )
    found = pipeline.transactions
    assert found is not None
    assert found == Transactions("shop.transaction", collections={"public.bills": "bills"})
    assert [found.collection(topic) for topic in ("shop.public.orders", "bills", "other")] == [
        "public.orders",
        "public.bills",
        None,
    ]
    order = SourceOrder(domain="shop", transactions=True)
    form = SideFormat("connect-json")
    assert pipeline.inputs[2:] == (Input("shop.transaction", "R", form, form, order=order),)
    assert pipeline.inputs_of("S") == (pipeline.input("bills"),)
    listed = ", {topic: shop.transaction, pool: R2, retention: 7d}"
    text = "transactions: {topic: shop.transaction, limit: 1h, domain: d}"
    pipeline = read(tmp_path, text + rest % listed)
    assert pipeline.transactions == Transactions("shop.transaction", "d", 3600.0)
    tx = pipeline.inputs[2]
    assert (tx.pool, tx.retention_ms, tx.order) == ("R2", 7 * 86_400_000, SourceOrder(domain="d", transactions=True))
    json = read(tmp_path, f"transactions: {{topic: tx, format: json}}{rest % ''}").inputs[2]
    assert json.value.ddl is not None and "data_collections" in json.value.ddl


def test_every_option(tmp_path: Path) -> None:
    pipeline = read(
        tmp_path,
        """
name: all
kafka: {bootstrap.servers: "h:1", enable.ssl.certificate.verification: false, fetch.max.bytes: 0100, sasl.password: "${PW}"}
registry: {url: "https://r", basic.auth.user.info: "u:${PW}"}
lake: s3://bucket/folder/
spark: {remote: "sc://h", spark.sql.shuffle.partitions: 4}
settle: 1.5
order-delay: 0.5
unavailable-value: null
inputs:
  - {topic: shop.a, pool: R, format: json, schema: "ID INT, s STRING", key-format: string, from: latest, unmatched: drop}
  - {topic: shop_a, pool: R2, value-format: bytes, from: 2024-05-01T02:00:00+02:00, on-data-loss: continue, max-bad-records: 9}
  - {topic: n, pool: R, format: json, key-schema: bigint, from: 1714521600000, unmatched: fail, retention: 30d}
  - {topic: t, pool: R, format: string, order: time}
  - {topic: d, pool: R, order: {domain: shop}}
  - {topic: p, pool: R, order: {by: value.source.lsn}}
  - {topic: e, pool: R, order: {by: "bigint(value.at)", domain: shop}}
  - {topic: s, pool: R, order: {by: "named_struct('high', CAST(value.source.scn AS bigint), 'low', value.n)"}}
output: {topic: o, pool: S, key-format: string, create: {partitions: 3, config: {compression.type: lz4}}, start-at: end}
transforms:
  - {name: j, type: denorm, where: {left: value.a = 1}, left: shop.a, right: n, join-on: left.key = right.key,
     out: o, key: null, value: {v: left.value, one: 1, yes: true}}
""",
        PW="0${X}7",
    )
    assert pipeline.kafka["enable.ssl.certificate.verification"] == "false"
    assert pipeline.kafka["fetch.max.bytes"] == "0100"
    assert pipeline.kafka["sasl.password"] == "0${X}7"
    assert pipeline.registry == RegistryConfig("https://r", {"basic.auth.user.info": "u:0${X}7"})
    assert "0${X}7" not in repr(pipeline)
    assert pipeline.lake == "s3://bucket/folder"
    assert pipeline.spark == {"remote": "sc://h", "spark.sql.shuffle.partitions": "4"}
    assert pipeline.settle_seconds == 1.5
    assert pipeline.order_delay == 0.5
    assert pipeline.unavailable_value is None
    a, b, n, *ordered = pipeline.inputs
    assert [item.order for item in (a, *ordered)] == [
        None,
        SourceOrder(time=True),
        SourceOrder(domain="shop"),
        SourceOrder("value.source.lsn", path=("value", "source", "lsn")),
        SourceOrder("bigint(value.at)", "shop"),
        SourceOrder("named_struct('high', CAST(value.source.scn AS bigint), 'low', value.n)"),
    ]
    assert [item.shape for item in ordered] == [None, None, None, RecordShape(None, {}), RecordShape(None, {})]
    assert (a.key, a.value, a.start, a.unmatched) == (
        SideFormat("string"),
        SideFormat("json", "ID INT, s STRING"),
        "latest",
        "drop",
    )
    assert (b.key, b.value, b.start, b.on_data_loss) == (
        SideFormat("avro"),
        SideFormat("bytes"),
        1714521600000,
        "continue",
    )
    assert (n.key, n.value, n.start, n.unmatched) == (SideFormat("json", "bigint"), SideFormat("json"), b.start, "fail")
    assert (a.retention_ms, n.retention_ms) == (None, 30 * 86_400_000)
    (out,) = pipeline.outputs
    assert out.create == CreateTopic(3, 1, {"compression.type": "lz4"})
    assert out.start_at == "end"
    (rule,) = pipeline.rules
    assert ([side.where for side in rule.sides], rule.key) == (["value.a = 1", None], None)
    assert rule.value == {"v": "left.value", "one": "1", "yes": "true"}


def test_a_shape_is_a_filter_and_a_mapping(tmp_path: Path) -> None:
    shape = "shape: {where: value.a > 1, key: null, value: {a: value.a, deep: {b: key.b}}}"
    pipeline = read(tmp_path, GOOD.replace("{topic: A, pool: Raw}", f"{{topic: A, pool: Raw, {shape}}}"))
    made = pipeline.input("A").shape
    assert made is not None
    assert (made.where, made.sides) == ("value.a > 1", {"key": None, "value": {"a": "value.a", "deep": {"b": "key.b"}}})
    assert pipeline.input("B").shape is None
    assert "CASE WHEN value IS NOT NULL THEN named_struct('a', (value.a)" in explained(pipeline)
    shaped = GOOD.replace("C, pool: Staging}", "C, pool: Staging, shape: {where: key is not null, key: {k: key}}}")
    assert [rule.keep for rule in read(tmp_path, shaped).rules] == ["(left.key) is not null", "(in.key) is not null"]
    assert "named_struct('k', ((in.key))) AS key" in explained(read(tmp_path, shaped))


def test_an_earlier_rule_leaves_nothing_only_to_rules_of_its_own_staging_pool(tmp_path: Path) -> None:
    two = GOOD.replace("pool: Staging}\n", "pool: Staging}\n  - {topic: D, pool: Other}\n")
    copy = "  - {name: copy, type: stateless, where: value.op = 'u', in: A, out: OUT, key: in.key, value: in.value}\n"
    pipeline = read(tmp_path, two + copy.replace("OUT", "D"))
    said = explained(pipeline)
    assert "-- A, for Staging: the first rule of the pool" in said
    assert said.count("THEN 'copy'") == 1
    (problem,) = problems(tmp_path, two + copy.replace("OUT", "C"))
    assert problem.message.startswith("never matches: rule `2-stateless`")


def test_headers_are_a_mapping_or_one_expression(tmp_path: Path) -> None:
    text = GOOD.replace("value: null", "value: null\n    headers: {table: \"'a'\", 'x y': in.value.b}")
    both = text.replace("    key: left.key\n", "    key: left.key\n    headers: left.kafka.headers\n")
    one, other = read(tmp_path, both).rules
    assert one.headers == "left.kafka.headers"
    assert other.headers == {"table": "'a'", "x y": "in.value.b"}
    named = text.replace("topic: C", "topic: C, provenance: true").replace("table:", "source:")
    (problem,) = problems(tmp_path, named)
    assert (problem.line, problem.key) == (21, "transforms[1].headers.source")
    assert "provenance" in problem.message


def test_a_file_without_avro_needs_no_registry(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD.replace("}\n", ", format: json}\n", 3)).registry is None


@pytest.mark.parametrize(
    ("lake", "path"), [("../x/./y", "x/y"), ("/data/lake", "/data/lake"), ("file:///data/my%20lake", "/data/my lake")]
)
def test_folders_are_relative_to_the_file(tmp_path: Path, lake: str, path: str) -> None:
    assert read(tmp_path, f"lake: {lake}\n{GOOD}").lake == str((tmp_path.parent / path).resolve())


# (what is replaced in GOOD, by what, line, key, part of the message)
ERRORS = [
    ("inputs:", "input:", 1, "input", "did you mean `inputs`|write inputs:"),
    ("inputs:", "lakes: x\ninputs:", 1, "lakes", "did you mean `lake`?"),
    ("inputs:", "name: [a]\ninputs:", 1, "name", "must be text, not a list"),
    ("inputs:", "name: 7\ninputs:", 1, "name", "put it in quotes"),
    ("{topic: A, pool: Raw}", "{topic: A\uff0c pool: Raw}", 2, "", "column 20: "),
    ("{topic: A, pool: Raw}", "{topic: A\uff0c pool: Raw}", 2, "", "; the line has the character \uff0c, write ,"),
    (
        "{topic: A, pool: Raw}",
        "{topic\uff1aA, pool: Raw}",
        2,
        "inputs[0].topic\uff1aA",
        "has the character \uff1a; write :",
    ),
    ("{topic: A, pool: Raw}", "{topic: ${X}, pool: Raw}", 2, "", 'put ${NAME} in quotes: "${NAME}"'),
    (
        "left: A",
        "left: A\n    headers: {x: coalesce(left.key, '0')}",
        10,
        "",
        "; in braces or brackets, put an expression that has a comma in quotes",
    ),
    (
        "value: {a: left.value.a,",
        "value: {a: coalesce(left.value.a, 0),",
        14,
        "transforms[0].value.a",
        "ends at a comma; in braces, put an expression that has a comma in quotes",
    ),
    ("inputs:", "name: a b\ninputs:", 1, "name", "letters, digits"),
    ("inputs:", "name:\ninputs:", 1, "name", "is empty"),
    ("inputs:", "name: x\nname: y\ninputs:", 2, "name", "is here twice; it is on line 1"),
    ("inputs:", "settle: soon\ninputs:", 1, "settle", "a number that is not negative"),
    ("inputs:", "unavailable-value: ''\ninputs:", 1, "unavailable-value", "or null where there is none"),
    ("inputs:", "unavailable-value: hex:0\ninputs:", 1, "unavailable-value", "pairs of hexadecimal digits"),
    ("inputs:", "transactions: tx\ninputs:", 1, "transactions", "must be a mapping"),
    ("inputs:", "transactions: {limit: 1h}\ninputs:", 1, "transactions.topic", "is missing"),
    ("inputs:", "transactions: {topic: C}\ninputs:", 1, "transactions.topic", "an output is no input"),
    ("inputs:", "transactions: {topic: A}\ninputs:", 1, "transactions.topic", "read by a rule"),
    ("inputs:", "transactions: {topic: tx, limit: 9}\ninputs:", 1, "transactions.limit", "must be a time, such as 90m"),
    ("inputs:", "kafka: {bootstrap_servers: h}\ninputs:", 1, "kafka.bootstrap_servers", "write bootstrap.servers"),
    ("inputs:", "kafka: {security.protocl: SSL}\ninputs:", 1, "kafka.security.protocl", "mean `security.protocol`?"),
    ("inputs:", "kafka:\n  sasl.pasword: x\ninputs:", 2, "kafka.sasl.pasword", "did you mean `sasl.password`?"),
    ("inputs:", "kafka: {security.protocol: TLS}\ninputs:", 1, "kafka.security.protocol", "PLAINTEXT, SSL, SASL_"),
    (
        "inputs:",
        "kafka: {bootstrap.servers: 'http://b:9092'}\ninputs:",
        1,
        "kafka.bootstrap.servers",
        "must be host:port",
    ),
    ("inputs:", "kafka: {fetch.min.bytes: many}\ninputs:", 1, "kafka.fetch.min.bytes", "that librdkafka does not take"),
    ("inputs:", "kafka: {quite.other: 1}\ninputs:", 1, "kafka.quite.other", "CONFIGURATION.md"),
    ("inputs:", "kafka: h\ninputs:", 1, "kafka", "write {bootstrap.servers: 'host:9092'}"),
    ("inputs:", "registry: {urls: http://r}\ninputs:", 1, "registry.urls", "did you mean `url`?"),
    ("inputs:", "registry: http://r\ninputs:", 1, "registry", "write {url: 'http://host:8081'}"),
    ("inputs:", "spark: local\ninputs:", 1, "spark", "write {master: 'local[*]'}"),
    ("{topic: A, pool: Raw}", "A", 2, "inputs[0]", "must be a mapping, not text; write {topic: ..., pool: ...}"),
    ("inputs:", "transactions: {topic: tx, format: string}\ninputs:", 1, "transactions.format", "must be one of"),
    (
        "inputs:",
        "transactions: {topic: tx, collections: {x.y: Z}}\ninputs:",
        1,
        "transactions.collections",
        "is no input",
    ),
    ("inputs:", "order-delay: 1s\ninputs:", 1, "order-delay", "a number that is not negative"),
    ("inputs:", "settle: -1\ninputs:", 1, "settle", "a number that is not negative"),
    ("inputs:", "kafka: here\ninputs:", 1, "kafka", "must be a mapping, not text"),
    ("inputs:", "kafka:\n  a.b: [1]\ninputs:", 2, "kafka.a.b", "must be one value, not a list"),
    ("inputs:", "registry:\n  url: localhost\ninputs:", 2, "registry.url", "http:// or https://"),
    ("inputs:", "registry:\n  url: http://host:abc\ninputs:", 2, "registry.url", "has a host or a port that is none"),
    (
        "inputs:",
        "registry: {url: 'http://a:1,http://b:99999'}\ninputs:",
        1,
        "registry.url",
        "write it as http://host:8081",
    ),
    ("inputs:", "lake: file:x\nspark: {master: a, remote: b}\ninputs:", 2, "spark.remote", "excludes master"),
    ("inputs:", "spark: {master: lokal}\ninputs:", 1, "spark.master", "must be local, local[N], local[*], spark://"),
    ("inputs:", "spark: {master: 'local[0]'}\ninputs:", 1, "spark.master", "must be local"),
    ("inputs:", "spark: {remote: share}\ninputs:", 1, "spark.remote", "must be sc://host:port"),
    ("inputs:", "spark: {sql.ansi: a}\ninputs:", 1, "spark.sql.ansi", "did you mean `spark.sql.ansi`?"),
    (
        "inputs:",
        "spark:\n  spark.sql.timestampType: TIMESTAMP_NTZ\ninputs:",
        2,
        "spark.spark.sql.timestampType",
        "is always TIMESTAMP_LTZ here, because results or secrets depend on it; remove the line",
    ),
    (
        "inputs:",
        "spark: {spark.sql.legacy.json.enableDateTimeParsingFallback: true}\ninputs:",
        1,
        "spark.spark.sql.legacy.json.enableDateTimeParsingFallback",
        "as an older version did",
    ),
    ("inputs:", "spark: {spark.master: a}\ninputs:", 1, "spark.spark.master", "write master:"),
    ("inputs:", "lake: s3://\ninputs:", 1, "lake", "names no bucket"),
    ("inputs:", "lake: s3:/bucket/x\ninputs:", 1, "lake", "has one / after s3:; write s3:// for a bucket"),
    ("inputs:", "lake: file://host/x\ninputs:", 1, "lake", "needs an absolute path"),
    ("inputs:", "lake: ${NOWHERE}\ninputs:", 1, "lake", "the environment has no NOWHERE; set it, or write ${NOWHERE:-"),
    ("inputs:", "lake: ${a b}\ninputs:", 1, "lake", "write $${"),
    ("inputs:", "lake: &x y\ninputs:", 1, "lake", "anchors are not supported"),
    ("inputs:", "lake: *x\ninputs:", 1, "lake", "aliases are not supported"),
    ("inputs:", "lake: !!str y\ninputs:", 1, "lake", "tags are not supported"),
    ("{topic: A, pool: Raw}", "{pool: Raw}", 2, "inputs[0].topic", "is missing; name the topic"),
    ("{topic: A, pool: Raw}", "{topic: A}", 2, "inputs[0].pool", "is missing; name the pool"),
    ("{topic: A, pool: Raw}", "A", 2, "inputs[0]", "must be a mapping, not text"),
    ("{topic: A, pool: Raw}", "{topic: A/b, pool: Raw}", 2, "inputs[0].topic", "no legal topic name"),
    ("{topic: A, pool: Raw}", "{topic: '..', pool: Raw}", 2, "inputs[0].topic", "no legal topic name"),
    ("{topic: A, pool: Raw}", "{topic: A, pool: Raw-1}", 2, "inputs[0].pool", "letters, digits and `_`"),
    ("{topic: A, pool: Raw}", "{topic: A, pool: Kafka}", 2, "inputs[0].pool", "can't be called kafka"),
    ("{topic: B, pool: Raw}", "{topic: B, pool: raw}", 3, "inputs[1].pool", "in case only"),
    ("{topic: B, pool: Raw}", "{topic: B, pool: Raw}\n  - {topic: A, pool: R2}", 4, "inputs[2].topic", "into pool Raw"),
    ("A, pool: Raw}", "A, pool: Raw, fromat: avro}", 2, "inputs[0].fromat", "did you mean `format`?"),
    ("A, pool: Raw}", "A, pool: Raw, format: arvo}", 2, "inputs[0].format", "did you mean `avro`?"),
    ("A, pool: Raw}", "A, pool: Raw, format: connect}", 2, "inputs[0].format", "did you mean `connect-json`?"),
    ("A, pool: Raw}", "A, pool: Raw, schema: a INT}", 2, "inputs[0].schema", "goes with json and connect-json only"),
    ("A, pool: Raw}", "A, pool: Raw, format: json, schema: a FOO}", 2, "inputs[0].schema", "Spark's DDL"),
    ("A, pool: Raw}", "A, pool: Raw, from: erliest}", 2, "inputs[0].from", "did you mean `earliest`?"),
    ("A, pool: Raw}", "A, pool: Raw, from: 2024-05-01T00:00:00}", 2, "inputs[0].from", "with its zone"),
    ("A, pool: Raw}", "A, pool: Raw, from: -5}", 2, "inputs[0].from", "milliseconds since 1970"),
    ("A, pool: Raw}", "A, pool: Raw, unmatched: no}", 2, "inputs[0].unmatched", "one of keep, drop, fail"),
    ("A, pool: Raw}", "A, pool: Raw, on-bad-record: skip}", 2, "inputs[0].on-bad-record", "one of fail, quarantine"),
    ("A, pool: Raw}", "A, pool: Raw, retention: 30}", 2, "inputs[0].retention", "must be a time"),
    ("A, pool: Raw}", "A, pool: Raw, retention: 0d}", 2, "inputs[0].retention", "such as 90m, 12h, 30d"),
    ("A, pool: Raw}", "A, pool: Raw, retention: 9999999999999d}", 2, "inputs[0].retention", "such as 90m, 12h, 30d"),
    ("A, pool: Raw}", "A, pool: Raw, order: tiem}", 2, "inputs[0].order", "did you mean `time`?"),
    ("A, pool: Raw}", "A, pool: Raw, order: {}}", 2, "inputs[0].order", "write by: or domain:"),
    ("A, pool: Raw}", "A, pool: Raw, order: [time]}", 2, "inputs[0].order", "must be a mapping"),
    ("A, pool: Raw}", "A, pool: Raw, order: {by: in.value.x}}", 2, "inputs[0].order.by", "value"),
    ("A, pool: Raw}", "A, pool: Raw, order: {by: rand()}}", 2, "inputs[0].order.by", "rand"),
    ("A, pool: Raw}", "A, pool: Raw, order: {domian: d}}", 2, "inputs[0].order.domian", "did you mean `domain`?"),
    ("A, pool: Raw}", "A, pool: Raw, format: string, order: {by: value}}", 2, "inputs[0].order.by", "is string"),
    (
        "A, pool: Raw}",
        'A, pool: Raw, format: json, schema: "s STRUCT<a: BIGINT, b: DOUBLE>", order: {by: value.s}}',
        2,
        "inputs[0].order.by",
        "an order is an integer, a timestamp, a date, or a struct of two of these",
    ),
    ("A, pool: Raw}", "A, pool: Raw, max-bad-records: -1}", 2, "inputs[0].max-bad-records", "whole number from 0"),
    (
        "A, pool: Raw}",
        "A, pool: Raw, on-bad-record: fail, max-bad-records: 3}",
        2,
        "inputs[0].max-bad-records",
        "goes with on-bad-record: quarantine",
    ),
    (
        "A, pool: Raw}",
        "A, pool: Raw, on-schema-change: ok}",
        2,
        "inputs[0].on-schema-change",
        "merge, error, quarantine",
    ),
    (
        "A, pool: Raw}",
        "A, pool: Raw, format: string, on-schema-change: error}",
        2,
        "inputs[0].on-schema-change",
        "goes with avro and connect-json",
    ),
    ("A, pool: Raw}", "A, pool: Raw, on-data-loss: go}", 2, "inputs[0].on-data-loss", "one of fail, continue"),
    ("C, pool: Staging}", "C, pool: Staging, namespace: 1.x}", 5, "outputs[0].namespace", "is no Avro namespace"),
    ("C, pool: Staging}", "C, pool: Staging, format: json, namespace: x}", 5, "outputs[0].namespace", "goes with avro"),
    (
        "C, pool: Staging}",
        "C, pool: Staging, subject-name-strategy: name}",
        5,
        "outputs[0].subject-name-strategy",
        "one of topic, record, topic-record",
    ),
    (
        "C, pool: Staging}",
        "C, pool: Staging, key-format: string, key-subject-name-strategy: record}",
        5,
        "outputs[0].key-subject-name-strategy",
        "the key format is string",
    ),
    ("C, pool: Staging", "C, pool: S, shape: {value: {a b: value.a}}", 14, "transforms[0].value", "no name in Avro"),
    ("C, pool: Staging", "C, pool: S, shape: {where: kafka.offset > 1}", 5, "outputs[0].shape.where", "not known here"),
    ("C, pool: Staging", "C, pool: S, shape: {where: value.z = 1}", 12, "transforms[0].out", "needs `value.z`"),
    ("C, pool: Staging", "C, pool: S, shape: {value: {a: value.a, z: value.z}}", 12, "transforms[0].out", "`value.z`"),
    (
        "C, pool: Staging",
        "C, pool: S, format: string, shape: {key: {a: key}}",
        5,
        "outputs[0].shape.key",
        "not a mapping",
    ),
    ("A, pool: Raw}", "A, pool: Raw, shape: {}}", 2, "inputs[0].shape", "is empty; write where:, key: or value:"),
    ("A, pool: Raw}", "A, pool: Raw, shape: [x]}", 2, "inputs[0].shape", "must be a mapping"),
    ("A, pool: Raw}", "A, pool: Raw, shape: {were: a}}", 2, "inputs[0].shape.were", "did you mean `where`?"),
    ("A, pool: Raw}", "A, pool: Raw, shape: {where: in.value.a = 1}}", 2, "inputs[0].shape.where", "write `value.a`"),
    ("A, pool: Raw}", "A, pool: Raw, shape: {value: {a: rand()}}}", 2, "inputs[0].shape.value.a", "not deterministic"),
    ("A, pool: Raw}", "A, pool: Raw, shape: {value: null}}", 2, "inputs[0].shape.value", "a tombstone"),
    ("outputs:", "output: {topic: D, pool: S}\noutputs:", 4, "output", "the same as outputs"),
    ("topic: C, pool: Staging", "topic: C, pool: Raw", 5, "outputs[0].pool", "is a raw pool"),
    ("topic: C, pool: Staging", "topic: A, pool: Staging", 5, "outputs[0].topic", "is an input too (line 2)"),
    ("{topic: C, pool: Staging}", "{topic: C, pool: S}\n  - {topic: C, pool: T}", 6, "outputs[1].topic", "already"),
    ("C, pool: Staging", "C, pool: Staging, schema: a INT", 5, "outputs[0].schema", "belongs to an input"),
    ("C, pool: Staging", "C, pool: S, create: true", 5, "outputs[0].create", "must be a mapping"),
    ("C, pool: Staging", "C, pool: S, create: {partitions: 0}", 5, "outputs[0].create.partitions", "from 1"),
    ("C, pool: Staging", "C, pool: S, create: {replicas: 1}", 5, "outputs[0].create.replicas", "replication-factor"),
    ("C, pool: Staging", "C, pool: S, start-at: begin", 5, "outputs[0].start-at", "one of end, empty"),
    ("C, pool: Staging", "C, pool: S, value-format: string", 14, "transforms[0].value", "not a mapping"),
    ("type: denorm", "type: denrom", 7, "transforms[0].type", "did you mean `denorm`?"),
    ("- type: denorm", "- name: x", 7, "transforms[0].type", "is missing; write one of denorm, group, stateless"),
    ("- type: denorm", "- name: 2-stateless\n    type: denorm", 16, "transforms[1].name", "names are unique"),
    ("    left: A\n", "", 7, "transforms[0].left", "is missing; name a topic of inputs (A, B)"),
    ("    right: B\n", "", 7, "transforms[0].right", "is missing"),
    ("    join-on: left.key = right.key\n", "", 7, "transforms[0].join-on", "is missing; write an equality"),
    ("    left: A\n", "    left: A\n    in: B\n", 10, "transforms[0].in", "belongs to a rule of type stateless"),
    ("    in: A\n", "", 15, "transforms[1].in", "is missing"),
    ("    in: A\n", "    in: A\n    left: B\n", 18, "transforms[1].left", "belongs to a rule of type denorm"),
    ("    in: A\n", "    in: A\n    right: B\n", 18, "transforms[1].right", "belongs to a rule of type denorm"),
    ("left.key = right.key", "left.key > right.key", 11, "transforms[0].join-on", "no equality of the two sides"),
    ("right: B", "right: A", 10, "transforms[0].right", "joins two topics"),
    ("right: B", "right: D", 10, "transforms[0].right", "`D` is no input of this file; inputs: A, B"),
    ("right: B", "right: C", 10, "transforms[0].right", "`C` is an output, not an input"),
    ("in: A", "in: AA", 17, "transforms[1].in", "did you mean `A`?"),
    ("out: C\n    key: left", "out: D\n    key: left", 12, "transforms[0].out", "`D` is no output of this file"),
    ("out: C\n    key: left", "out: B\n    key: left", 12, "transforms[0].out", "`B` is an input, not an output"),
    ("    key: in.key\n", "", 15, "transforms[1].key", "or `key: null`"),
    ("    value: null\n", "", 15, "transforms[1].value", "`value: null` for a tombstone"),
    ("value: null", "value: {}", 20, "transforms[1].value", "has no fields"),
    ("value: null", "value: [in.key]", 20, "transforms[1].value", "not a list"),
    ("value: null", "value: {a: {b: value.x}}", 20, "transforms[1].value.a.b", "write `in.value.x`"),
    ("value: null", "value: rand()", 20, "transforms[1].value", "not deterministic"),
    ("value: null", "value: null\n    headers: {n: [1]}", 21, "transforms[1].headers.n", "one expression, not a list"),
    ("value: null", "value: null\n    headers: {n: value.x}", 21, "transforms[1].headers.n", "write `in.value.x`"),
    (
        "value: null",
        "value: null\n    headers: {n: null}",
        21,
        "transforms[1].headers.n",
        "one expression, not nothing",
    ),
    ("value: null", "value: null\n    headers: {}", 21, "transforms[1].headers", "name a header"),
    ("value: null", "value: null\n    headers: value.h", 21, "transforms[1].headers", "write `in.value.h`"),
    ("C, pool: Staging", "C, pool: S, provenance: on-top", 5, "outputs[0].provenance", "must be true or false"),
    ("C, pool: Staging", "C, pool: S, hold: maybe", 5, "outputs[0].hold", "must be true or false"),
    ("value: null", "value: null\n    zed: x", 20, "transforms[1].value", "remove one of the two"),
    ("where: value.op = 'u'", "where: value.op = ", 16, "transforms[1].where", "does not parse"),
    ("where: value.op = 'u'", "where: in.value.op = 'u'", 16, "transforms[1].where", "write `value.op`"),
    ("where: value.op = 'u'", "where: {left: true}", 16, "transforms[1].where", "only a denorm rule"),
    ("where: value.op = 'c'", "where: {rigth: true}", 8, "transforms[0].where.rigth", "did you mean `right`?"),
    ("where: value.op = 'u'", "where: value.op in ('c')", 16, "transforms[1].where", "rule `1-denorm` (line 7)"),
    ("    where: value.op = 'c'\n", "", 15, "transforms[1].where", "never matches"),
]


@pytest.mark.parametrize(("old", "new", "line", "key", "message"), ERRORS, ids=[f"{e[3]}: {e[4]}" for e in ERRORS])
def test_an_error_names_line_key_and_cure(
    tmp_path: Path, old: str, new: str, line: int, key: str, message: str
) -> None:
    assert old in GOOD
    found = problems(tmp_path, GOOD.replace(old, new, 1))
    fitting = [item for item in found if item.key == key and any(part in item.message for part in message.split("|"))]
    assert [item.line for item in fitting] == [line], found


_SINK = "inputs:", "sinks: [{name: w, type: sqlite, url: t.db, from: [Raw.A], %s: %s}]\ninputs:"
OF_OTHER_TOOLS = [
    (
        "inputs:",
        "kafka: {sasl.jaas.config: x}\ninputs:",
        1,
        "kafka.sasl.jaas.config",
        "write sasl.username and sasl.pass",
    ),
    ("inputs:", "kafka: {ssl.truststore.location: x}\ninputs:", 1, "kafka.ssl.truststore.location", "ssl.ca.location"),
    ("inputs:", "registry: {user: x}\ninputs:", 1, "registry.user", "is no property of Confluent's client"),
    ("inputs:", "registry: {timout: 5}\ninputs:", 1, "registry.timout", "did you mean `timeout`?"),
    ("inputs:", "sources:", 1, "sources", "write inputs:"),
    ("transforms:", "models:", 6, "models", "write transforms:"),
    ("A, pool: Raw", "A, value.converter: avro, pool: Raw", 2, "inputs[0].value.converter", "write value-format:"),
    (_SINK[0], _SINK[1] % ("insert.mode", "upsert"), 1, "sinks[0].insert.mode", "write mode:"),
    (_SINK[0], _SINK[1] % ("pk.fields", "[id]"), 1, "sinks[0].pk.fields", "write key:"),
    (_SINK[0], _SINK[1] % ("fields.whitelist", "[id]"), 1, "sinks[0].fields.whitelist", "write columns: {include"),
    (_SINK[0], _SINK[1] % ("table", "'${topic}'"), 1, "sinks[0].table", "topic is {topic}"),
    (_SINK[0], _SINK[1] % ("password", "secret"), 1, "sinks[0].password", "is a part of `url`"),
]


@pytest.mark.parametrize(("old", "new", "line", "key", "message"), OF_OTHER_TOOLS, ids=[e[3] for e in OF_OTHER_TOOLS])
def test_a_key_of_another_tool_is_one_problem_with_the_key_to_write(
    tmp_path: Path, old: str, new: str, line: int, key: str, message: str
) -> None:
    (found,) = problems(tmp_path, GOOD.replace(old, new, 1))
    assert (found.line, found.key) == (line, key)
    assert message in found.message


def test_the_properties_of_a_registry_s_client_are_known(tmp_path: Path) -> None:
    login = "bearer.auth.credentials.source: STATIC_TOKEN, bearer.auth.token: x, bearer.auth.logical.cluster: y"
    properties = f"cache.capacity: 5, ssl.ca.location: /nowhere.pem, {login}"
    assert read(tmp_path, f"registry: {{url: 'http://r', {properties}}}\n{GOOD}").registry is not None


# (what is replaced in GOOD, by what, the key of the one problem)
CAUSES = [
    ("{topic: A, pool", "{pool", "inputs[0].topic"),
    ("{topic: A, pool", "{topik: A, pool", "inputs[0].topik"),
    ("{topic: A, pool", "{topic: 'A B', pool", "inputs[0].topic"),
    ("{topic: A, pool: Raw}", "A", "inputs[0]"),
    ("{topic: A, pool", "{topic: '${NO}', pool", "inputs[0].topic"),
    ("A, pool: Raw", "A, pool: '${NO}'", "inputs[0].pool"),
    ("A, pool: Raw", "A, pool: Raw, fromat: json, schema: a INT", "inputs[0].fromat"),
    ("A, pool: Raw", "A, pool: Raw, format: jsno, schema: a INT", "inputs[0].format"),
    ("A, pool: Raw", "A, pool: Raw, max-bad-records: '${NO}'", "inputs[0].max-bad-records"),
    ("A, pool: Raw", "A, pool: Raw, partition: 3", "inputs[0].partition"),
    ("{topic: C, pool", "{pool", "outputs[0].topic"),
    ("C, pool: Staging", "C, pool: Staging, schema: a INT", "outputs[0].schema"),
    ("{topic: A, pool", "{topic: B, pool", "inputs[1].topic"),
    ("{topic: C, pool", "{topic: A, pool", "outputs[0].topic"),
    ("inputs:", "lake: {uri: 's3://b/x', acces-key-id: a, secret-access-key: b}\ninputs:", "lake.acces-key-id"),
    ("inputs:", "imputs:", "imputs"),
    ("outputs:", "outpts:", "outpts"),
    ("inputs:\n  - {topic: A, pool: Raw}\n  - {topic: B, pool: Raw}", "inputs: A", "inputs"),
    ("outputs:\n  - {topic: C, pool: Staging}\n", "", "outputs"),
    ("transforms:", "rules:", "rules"),
    ("inputs:", "registry: {url: '${NO}'}\ninputs:", "registry.url"),
    ("inputs:", "kafka: {oauth_cb: '${NO}'}\ninputs:", "kafka.oauth_cb"),
    ("inputs:", "lake: {uri: '${NO}', region: x}\ninputs:", "lake.uri"),
    ("inputs:", "transactions: {topic: t, collections: {x.y: '${NO}'}}\ninputs:", "transactions.collections.x.y"),
    ("right: B", "right: '${NO}'", "transforms[0].right"),
    ("    join-on", "    join_on", "transforms[0].join_on"),
    ("left.key = right.key", "left.key = '${NO}'", "transforms[0].join-on"),
    ("where: value.op = 'u'", "where: ${NO}", "transforms[1].where"),
    ("in: A", "inn: A", "transforms[1].inn"),
    ("type: stateless", "typ: stateless", "transforms[1].typ"),
    ("    key: in.key\n    value: null", "    select: x", "transforms[1].select"),
    ("value: null", "value: c.x\n    lookup: [c]", "transforms[1].lookup"),
    ("value: null", "value: item.x\n    explode: [c]", "transforms[1].explode"),
    ("value: null", "value: null\nsinks: {name: w, type: '${NO}', url: x, from: '*'}", "sinks.type"),
    ("value: null", "value: null\nsinks: {name: w, type: sqlite, url: x, from: ['${NO}']}", "sinks.from[0]"),
    ("value: null", "value: null\nsinks: {name: w, type: files, url: '${NO}://x', from: '*'}", "sinks.url"),
]


@pytest.mark.parametrize(("old", "new", "key"), CAUSES, ids=[f"{cause[2]}: {cause[1][-24:]!r}" for cause in CAUSES])
def test_a_cause_is_reported_without_the_problems_that_follow_from_it(
    tmp_path: Path, old: str, new: str, key: str
) -> None:
    assert old in GOOD
    assert [problem.key for problem in problems(tmp_path, GOOD.replace(old, new, 1))] == [key]


def test_a_cause_hides_no_other_problem(tmp_path: Path) -> None:
    text = GOOD.replace("inputs:", "imputs:").replace("B, pool: Raw", "B, pool: Raw, from: now")
    text = (
        text.replace("right: B", "right: '${NO}'").replace("in: A", "inn: AA").replace("value: null", "value: rand()")
    )
    keys = ["imputs", "inputs[1].from", "transforms[0].right", "transforms[1].inn", "transforms[1].value"]
    assert [problem.key for problem in problems(tmp_path, text)] == keys


def test_a_shape_lacks_no_field_that_a_rule_with_a_problem_may_make(tmp_path: Path) -> None:
    shaped = GOOD.replace("C, pool: Staging}", "C, pool: Staging, shape: {value: {m: value.more}}}")
    text = shaped.replace("left.key = right.key", "left.key > right.key")
    assert [problem.key for problem in problems(tmp_path, text)] == ["transforms[0].join-on"]


def test_outputs_with_a_problem_share_no_pool(tmp_path: Path) -> None:
    two = GOOD.replace("pool: Staging}\n", "pool: '${NO}'}\n  - {topic: D, pool: '${NO}'}\n")
    copy = "  - {type: stateless, where: value.op = 'u', in: A, out: D, key: in.key, value: in.value}\n"
    assert [problem.key for problem in problems(tmp_path, two + copy)] == ["outputs[0].pool", "outputs[1].pool"]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "is empty"),
        ("# nothing\n", 1, "is empty"),
        ("- a", 1, "must be a mapping, not a list"),
        ("a: [1", 1, "is no YAML"),
        ("inputs:\n\t- a", 2, "indent with spaces, not with tabs"),
        ("inputs:\n  - {topic: A, pool: R}\n   - {topic: B, pool: R}", 3, "begin in one column"),
        ("a: 1\n---\nb: 2", 2, "second document"),
        ("a: 1\nb: \x07", 2, "a character that YAML does not allow"),
        ("[" * 100_000, 1, "nested deeper"),
        ("a: 1\n" * MAX_BYTES, 1, "larger than"),
    ],
)
def test_what_is_no_pipeline_at_all(tmp_path: Path, text: str, line: int, message: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert problem.line == line
    assert message in problem.message


def test_aliases_can_t_multiply(tmp_path: Path) -> None:
    bomb = "a: &a [x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n"
    assert any("aliases" in problem.message for problem in problems(tmp_path, bomb))


def test_no_such_file_no_file_and_no_text(tmp_path: Path) -> None:
    for path, message in [
        (tmp_path / "x.yaml", "x.yaml: does not exist; name a pipeline file"),
        (tmp_path, f"{tmp_path}: is a folder"),
        (tmp_path / "b", "b, line 2: is not UTF-8"),
    ]:
        (tmp_path / "b").write_bytes(b"a: 1\nb: \xff")
        with pytest.raises(PipelineFileError, match=message):
            load(path, {})


def test_a_file_that_is_missing_has_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(validate, ["shop.yaml"])
    assert run.exit_code == 1
    assert run.output == f"shop.yaml: does not exist in {tmp_path}; name a pipeline file that does\n"
    run = CliRunner().invoke(validate, ["shop.yaml", "--format", "json"])
    assert json.loads(run.output)["line"] is None


def test_all_errors_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    text = (
        GOOD.replace("pool: Raw}", "pool: R-w}").replace("left: A", "left: Z").replace("value: null", "value: rand()")
    )
    found = problems(tmp_path, "inptus: x\n" + text)
    assert [problem.line for problem in found] == [1, 3, 4, 10, 21]


def test_the_parts_that_must_be_there(tmp_path: Path) -> None:
    found = problems(tmp_path, "name: x")
    assert [problem.key for problem in found] == ["inputs", "outputs", "transforms"]
    for empty in ("transforms: []", "transforms:", "transforms: {}"):
        head = GOOD[: GOOD.index("transforms:")]
        (problem,) = problems(tmp_path, head + empty)
        assert (problem.line, problem.key) == (6, "transforms")
        assert "at least one rule" in problem.message


def test_spark_remote_counts_where_the_file_names_no_spark(tmp_path: Path) -> None:
    def spark(text: str) -> dict[str, str]:
        return dict(read(tmp_path, text + GOOD, SPARK_REMOTE="shared").spark)

    assert spark("") == {"remote": "shared"}
    assert spark("spark: {spark.sql.x: 1}\n") == {"remote": "shared", "spark.sql.x": "1"}
    assert spark("spark: {master: yarn}\n") == {"master": "yarn"}
    assert spark("spark: {remote: 'sc://h:1/;token=t'}\n") == {"remote": "sc://h:1/;token=t"}
    assert spark("spark: {remote: shared, master: 'local[2]'}\n") == {"remote": "shared", "master": "local[2]"}
    for text in ("", "spark: {spark.sql.x: 1}\n"):
        (problem,) = problems(tmp_path, text + GOOD, SPARK_REMOTE="local;token=hunter2")
        assert problem.key == "spark" and "SPARK_REMOTE must be sc://host:port" in problem.message
        assert "hunter2" not in problem.message


@pytest.mark.parametrize(
    "master",
    ["local", "local[ 3 ]", "local[*, 2]", "local-cluster[2,1,1024]", "spark://a:7077,b:7077", "k8s://https://h:6443"],
)
def test_a_master_of_spark(tmp_path: Path, master: str) -> None:
    assert read(tmp_path, f"spark: {{master: '{master}'}}\n{GOOD}").spark == {"master": master}


def test_a_registry_of_the_environment_that_is_no_url_is_named(tmp_path: Path) -> None:
    text = "inputs: [{topic: A, pool: Raw}]"
    (problem,) = problems(tmp_path, text, SCHEMA_REGISTRY_URL="registry:8081")
    assert problem.key == "registry"
    assert "environment variable SCHEMA_REGISTRY_URL must begin with http:// or https:// and a host" in problem.message
    (problem,) = problems(tmp_path, text, SCHEMA_REGISTRY_URL="http://me:hunter2/x@registry:8081")
    assert "environment variable SCHEMA_REGISTRY_URL has a host or a port that is none" in problem.message
    assert "hunter2" not in problem.message
    (problem,) = problems(tmp_path, "kafka: {security.protocol: '${PW}'}\n" + text, PW="hunter2")
    assert "hunter2" not in str(problem)


def test_a_secret_is_never_said(tmp_path: Path) -> None:
    text = """\
kafka: {sasl.password: "${PW}", x: [1], bootstrap.servers: "${PW}"}
registry: {url: "${PW}", k: {}}
spark: {master: "${PW}", remote: "${PW}"}
"""
    with pytest.raises(PipelineFileError) as caught:
        read(tmp_path, text + GOOD, PW="hunter2")
    assert len(caught.value.problems) == 4
    assert "hunter2" not in str(caught.value)


NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), max_size=20)


def scalar(text: str, env: dict[str, str]) -> str:
    node, found = parse(f"a: {json.dumps(text)}", env)
    assert found == []
    assert isinstance(node, YamlTable)
    value = node.entries[0].node
    assert isinstance(value, Scalar)
    return value.text


@given(NAMES, TEXTS, TEXTS.filter(lambda text: "{" not in text and "}" not in text))
def test_variables_are_replaced_once_and_as_they_are(name: str, value: str, default: str) -> None:
    assert scalar(f"<${{{name}}}>", {name: value}) == f"<{value}>"
    assert scalar(f"<${{{name}:-{default}}}>", {}) == f"<{default}>"
    assert scalar(f"<${{{name}:-{default}}}>", {name: value}) == f"<{value or default}>"
    assert scalar(f"<$${{{name}}}>", {name: value}) == f"<${{{name}}}>"


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"], exclude_characters="$"), max_size=30))
def test_text_without_variables_stays(text: str) -> None:
    assert scalar(text, {}) == text


LINES = st.lists(st.sampled_from([*GOOD.splitlines(), "- [a", "  x: {", "? y", "!t z", "&a", "*a", "--- |", "${", "}"]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(max_size=80) | st.text(alphabet="ab:-[]{}&*!|>'\"%@?, \n\t#$", max_size=60) | LINES.map("\n".join))
def test_any_text_is_a_pipeline_or_a_pipeline_file_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "any.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load(file, {})
    except PipelineFileError as error:
        assert error.problems
        assert all(problem.line >= 1 for problem in error.problems)


def test_validate_says_ok_or_every_error(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("right: B", "right: D").replace("pool: Staging", "pool: Raw"))
    run = CliRunner().invoke(validate, [str(good)])
    assert (run.exit_code, run.output) == (0, f"OK: {good} (good): 2 inputs, 2 rules, 1 output\n")
    run = CliRunner().invoke(validate, [str(bad)])
    assert run.exit_code == 1
    assert [line.split(" ")[0] for line in run.output.splitlines()] == [
        f"{bad}:5:",
        f"{bad}:10:",
    ]
    run = CliRunner().invoke(validate, [str(bad), "--format", "json"])
    assert run.exit_code == 1
    first, second = (json.loads(line) for line in run.output.splitlines())
    assert (first["line"], first["key"]) == (5, "outputs[0].pool")
    assert (second["line"], second["key"]) == (10, "transforms[0].right")


def test_the_demo_s_data_fit_together() -> None:
    expected = json.loads((DEMO / "expected.json").read_text())
    topics = {item.topic for item in load(DEMO / "invoices.yaml", {}).inputs}
    for state in expected["after"]:
        records = [json.loads(line) for line in (DEMO / state["batch"]).read_text().splitlines()]
        assert {record["topic"] for record in records} <= topics
        assert [row["offset"] for row in state["output"]] == list(range(len(state["output"])))
    assert [len(state["output"]) for state in expected["after"]] == [2, 3, 5, 8]
    assert [len(state["pending"]) for state in expected["after"]] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("form", "value", "message"),
    [
        ("string", "struct(in.value.a)", "a string output takes one string column"),
        ("string", "in.kafka", "a string output takes one string column"),
        ("string", "in.value", "not struct<`a`:int"),
        ("bytes", "(in.value.a)", "a bytes output takes one binary or string column, not int"),
        ("bytes", "5", "a bytes output takes one binary or string column"),
        ("string", "in.value.a", None),
        ("bytes", "in.key", None),
        ("bytes", "to_json(in.value)", None),
    ],
)
def test_a_type_that_is_plain_to_see_fits_the_output_s_format(
    tmp_path: Path, form: str, value: str, message: str | None
) -> None:
    text = f"""
inputs: [{{topic: A, pool: Raw, key-format: string, value-format: json, schema: "a int"}}]
outputs: [{{topic: C, pool: Staging, key-format: string, value-format: {form}}}]
transforms: [{{type: stateless, in: A, out: C, key: in.key, value: {value}}}]
"""
    if message is None:
        read(tmp_path, text)
    else:
        (problem,) = problems(tmp_path, text)
        assert problem.key == "transforms[0].value"
        assert message in problem.message
