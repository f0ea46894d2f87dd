"""The ``inputs`` and ``outputs`` of a pipeline file, and the parts of a record that rules and shapes make.

The entries of ``inputs`` and ``outputs`` give topics, pools, formats, and the start of a topic. The parts of a record are its
condition, key, value and headers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal, TypeAlias, get_args

from zync_assets.errors import Problem, SchemaError
from zync_assets.pipeline import (
    SOURCE_HEADER,
    CreateTopic,
    Format,
    Headers,
    Input,
    OnBadRecord,
    OnDataLoss,
    OnSchemaChange,
    Output,
    RecordShape,
    Shape,
    SideFormat,
    SourceOrder,
    SubjectNameStrategy,
    Unmatched,
    is_topic_name,
)
from zync_assets.pipeline_file.expressions import RECORD_ROOTS, check_expression, field_path
from zync_assets.pipeline_file.fields import UNNAMED, Fields, kind, suggestion, tables
from zync_assets.pipeline_file.grammar import CREATE, FORMATS, INPUT, ORDER, OUTPUT
from zync_assets.pipeline_file.key import INPUT_HINTS, input_shape, known_names
from zync_assets.pipeline_file.source import Items, Node, Scalar, YamlTable

Check: TypeAlias = Callable[[str], Iterable[str]]
"""The problems of an expression."""


def over(roots: tuple[str, ...] = RECORD_ROOTS) -> Check:
    """The check of expressions over one record, or over named records."""
    return lambda sql: check_expression(sql, roots)


def read_condition(fields: Fields, key: str, check: Check) -> str | None:
    """A condition; None where the key is missing or wrong."""
    node = fields.node(key)
    # `where: true` is a condition too.
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return node.text.lower()
    sql = fields.text(key)
    if sql is None:
        return None
    for message in check(sql):
        fields.problem(key, message)
    return sql


def read_shape(node: Node, path: str, line: int, check: Check, problems: list[Problem]) -> Shape:
    """One expression, a mapping of names to such, or null."""
    if isinstance(node, YamlTable):
        if not node.entries:
            problems.append(Problem(line, path, "has no fields; name at least one"))
        shape: dict[str, Shape] = {}
        for entry in node.entries:
            entry_path = f"{path}.{entry.key}"
            if not entry.key.strip():
                problems.append(Problem(entry.line, entry_path, "a field needs a name"))
            shape[entry.key] = read_shape(entry.node, entry_path, entry.line, check, problems)
        return shape
    if not isinstance(node, Scalar):
        problems.append(Problem(line, path, f"must be an expression, a mapping or null, not {kind(node)}"))
        return None
    if node.value is None:
        return None
    problems.extend(Problem(line, path, message) for message in check(node.text))
    return node.text


def read_headers(fields: Fields, check: Check, provenance: bool) -> Headers | None:
    """The headers of a rule's records; ``provenance``: whether its output adds some of its own."""
    node = fields.node("headers")
    if not isinstance(node, YamlTable):
        sql = fields.text("headers", "write a mapping of names to expressions, or leave the key out") if node else None
        for message in check(sql) if sql is not None else ():
            fields.problem("headers", message)
        return sql
    if not node.entries:
        fields.problem("headers", "is empty; name a header, or leave the key out")
    headers: dict[str, str] = {}
    for entry in node.entries:
        path = f"{fields.key('headers')}.{entry.key}"
        if not entry.key:
            fields.problems.append(Problem(entry.line, path, "a header needs a name"))
        if provenance and entry.key == SOURCE_HEADER:
            message = "is what the output's provenance: true adds; give this header another name"
            fields.problems.append(Problem(entry.line, path, message))
        if not isinstance(entry.node, Scalar) or entry.node.value is None:
            node_kind = kind(entry.node)
            fields.problems.append(Problem(entry.line, path, f"must be one expression, not {node_kind}"))
            continue
        fields.problems.extend(Problem(entry.line, path, message) for message in check(entry.node.text))
        headers[entry.key] = entry.node.text
    return headers


def read_record_shape(
    item: Fields, roots: tuple[str, ...], formats: Mapping[str, str] | None = None
) -> RecordShape | None:
    """The ``shape`` of an input or an output: a filter and a mapping for all of its records. ``formats``: an output's, by
    side."""
    table = item.table("shape")
    if table is None:
        return None
    fields = Fields(table, item.key("shape"), item.problems, known_names(input_shape().keys))
    if not table.entries:
        item.problem("shape", "is empty; write where:, key: or value:, or leave it out")
    sides: dict[str, Shape] = {}
    for side in ("key", "value"):
        node = fields.node(side)
        if node is None:
            continue
        if side == "value" and isinstance(node, Scalar) and node.value is None:
            fields.problem("value", "would make every record a tombstone; name the fields to keep, or leave it out")
        form = (formats or {}).get(side)
        if isinstance(node, YamlTable) and form in ("string", "bytes"):
            fields.problem(side, f"must be one expression, not a mapping: the output's {side} format is {form}")
        sides[side] = read_shape(node, fields.key(side), fields.line_of(side), over(roots), item.problems)
    return RecordShape(read_condition(fields, "where", over(roots)), sides)


_FORM = "{topic: ..., pool: ...}"
TOPIC = "{topic}"
"""The place of an input's topic in the output of a rule for a pattern."""
NO_PATTERN = (
    "is in no rule for a pattern of inputs, such as in: shop.*, and only such a rule puts a topic in place of {topic}; name it"
    " in the rule's out:, or write a plain name here"
)
"""The problem of an output with TOPIC that no rule has. It follows from a problem of a rule or of an input, if there is one."""
_POOL = re.compile(r"[A-Za-z0-9_]+")
_OUTPUT_HINTS: Mapping[str, str] = dict[str, str].fromkeys(
    ("schema", "key-schema", "value-schema"), "it belongs to an input; an output's fields and types come from its rules"
)
_NAMESPACE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def read_inputs(fields: Fields) -> tuple[dict[str, Input | None], dict[str, tuple[str | None, int]]]:
    """The inputs by topic (None: one with problems, or UNNAMED), and each topic's pool and line."""
    node = fields.node("inputs")
    if node is None:
        fields.problem("inputs", "is missing; name the topics to read, a list of {topic: ..., pool: ...}")
    elif not isinstance(node, Items) or not node.items:
        fault = "is empty" if isinstance(node, Items) else f"must be a list, not {kind(node)}"
        fields.problem("inputs", f"{fault}; write a list of {{topic: ..., pool: ...}}")
        node = None
    mappings = tables(node, "inputs", fields.problems, _FORM)
    inputs: dict[str, Input | None] = {**_unnamed_entry(node, mappings)}
    lines: dict[str, tuple[str | None, int]] = {}
    pools: dict[str, str] = {}
    for path, table in mappings:
        item = Fields(table, path, fields.problems, known_names(INPUT), INPUT_HINTS)
        problem_count = len(fields.problems)
        topic, pool = _topic(item, is_output=False), _pool(item)
        key, value = _sides(item, is_output=False)
        start = _start(item)
        shape = read_record_shape(item, RECORD_ROOTS)
        unmatched = item.choice("unmatched", get_args(Unmatched))
        on_data_loss = item.choice("on-data-loss", get_args(OnDataLoss))
        on_bad_record, max_bad_records = _bad_records(item)
        on_schema_change = _on_schema_change(item, key, value)
        retention = item.duration("retention")
        order = _order(item, key, value)
        if order is not None and order.by is not None and order.path is None:
            shape = shape or RecordShape(None, {})  # Spark evaluates the expression, as it evaluates a shape
        _one_spelling(item, pool, pools)
        if topic is None:
            inputs[UNNAMED] = None
            continue
        line = item.line_of("topic")
        if topic in lines:
            first_pool, first_line = lines[topic]
            where = f"into pool {first_pool} " if first_pool else ""
            item.problem(
                "topic",
                f"`{topic}` is read {where}already (line {first_line}); a topic is read into one pool, once",
            )
            inputs[UNNAMED] = None
            continue
        lines[topic] = (pool, line)
        good = pool is not None and len(fields.problems) == problem_count
        options = start, unmatched or "keep", on_data_loss or "fail", on_bad_record, max_bad_records, on_schema_change
        inputs[topic] = Input(topic, pool or "", key, value, *options, shape, retention, order) if good else None
    return inputs, lines


def _unnamed_entry(node: Node | None, mappings: Sequence[object]) -> dict[str, None]:
    """UNNAMED, if the list has items that are no mappings, or if there is no list."""
    is_complete = isinstance(node, YamlTable) or (isinstance(node, Items) and len(mappings) == len(node.items) > 0)
    return {} if is_complete else {UNNAMED: None}


def read_outputs(fields: Fields, input_lines: Mapping[str, tuple[str | None, int]]) -> dict[str, Output | None]:
    """The outputs by topic (None: one with problems, or UNNAMED). ``input_lines``: of ``read_inputs``."""
    name = "output" if "output" in fields and "outputs" not in fields else "outputs"
    if "output" in fields and "outputs" in fields:
        fields.problem("output", f"is the same as outputs (line {fields.line_of('outputs')}); write one of them")
    node = fields.node(name)
    if node is None:
        fields.problem("outputs", "is missing; name the topics to write, a list of {topic: ..., pool: ...}")
    elif isinstance(node, Scalar) or (isinstance(node, Items) and not node.items):
        fault = "is empty" if isinstance(node, Items) else f"must be a list or a mapping, not {kind(node)}"
        fields.problem(name, f"{fault}; write a list of {{topic: ..., pool: ...}}")
    raw = {pool.lower(): (pool, line) for pool, line in input_lines.values() if pool is not None}
    mappings = tables(node, name, fields.problems, _FORM)
    outputs: dict[str, Output | None] = {**_unnamed_entry(node, mappings)}
    lines: dict[str, int] = {}
    pools: dict[str, str] = {}
    for path, table in mappings:
        item = Fields(table, path, fields.problems, known_names(OUTPUT), _OUTPUT_HINTS)
        problem_count = len(fields.problems)
        topic, pool = _topic(item, is_output=True), _pool(item)
        key, value = _sides(item, is_output=True)
        create = _create(item)
        start_at: Literal["empty", "end"] | None = item.choice("start-at", ("end", "empty"))
        provenance = item.flag("provenance")
        hold = "hold" not in item or item.flag("hold")
        shape = read_record_shape(item, ("key", "value"), {"key": key.format, "value": value.format})
        subjects = _subjects(item, key, value)
        extra_options = _namespace(item, key, value), _expression(item, "partition-by", ("key", "value"))
        _one_spelling(item, pool, pools)
        if pool is not None and pool.lower() in raw:
            item.problem(
                "pool",
                f"`{raw[pool.lower()][0]}` is a raw pool (line {raw[pool.lower()][1]}); name another one for outputs",
            )
        if topic is None:
            text = item.node("topic")
            outputs[text.text if isinstance(text, Scalar) and TOPIC in text.text else UNNAMED] = None
            continue
        if topic in input_lines:
            line = input_lines[topic][1]
            item.problem(
                "topic",
                f"`{topic}` is an input too (line {line}); an output is no input of the same pipeline",
            )
            outputs[UNNAMED] = None
        if topic in lines:
            item.problem(
                "topic",
                f"`{topic}` is an output already (line {lines[topic]}); a topic is written from one pool, once",
            )
            outputs[UNNAMED] = None
            continue
        lines[topic] = item.line_of("topic")
        good = pool is not None and len(fields.problems) == problem_count
        options = create, start_at or "empty", provenance, hold, shape, item.flag("coalesce")
        outputs[topic] = Output(topic, pool or "", key, value, *options, *subjects, *extra_options) if good else None
    return outputs


def _subjects(item: Fields, key: SideFormat, value: SideFormat) -> tuple[SubjectNameStrategy, SubjectNameStrategy]:
    strategies = get_args(SubjectNameStrategy)
    default_strategy = item.choice("subject-name-strategy", strategies)
    side_strategies: list[SubjectNameStrategy] = []
    for name, side in (("key", key), ("value", value)):
        strategy = item.choice(f"{name}-subject-name-strategy", strategies)
        if strategy is not None and side.format != "avro":
            item.problem(
                f"{name}-subject-name-strategy", f"goes with avro, and the {name} format is {side.format}; remove it"
            )
        side_strategies.append(strategy or default_strategy or "topic")
    if default_strategy is not None and "avro" not in (key.format, value.format):
        item.problem("subject-name-strategy", "goes with avro, and no side of this output is; remove it")
    return side_strategies[0], side_strategies[1]


def _namespace(item: Fields, key: SideFormat, value: SideFormat) -> str | None:
    text = item.text("namespace") if "namespace" in item else None
    if text is not None and not _NAMESPACE.fullmatch(text):
        item.problem(
            "namespace", "is no Avro namespace: names of letters, digits and `_`, with dots between, as com.shop"
        )
    elif text is not None and not {"avro", "connect-json"} & {key.format, value.format}:
        item.problem("namespace", "goes with avro and connect-json, whose schemas have names; remove it")
    return text


def _on_schema_change(item: Fields, key: SideFormat, value: SideFormat) -> OnSchemaChange:
    choice = item.choice("on-schema-change", get_args(OnSchemaChange))
    if choice is not None and not {key.format, value.format} & {"avro", "connect-json"}:
        item.problem("on-schema-change", "goes with avro and connect-json, whose records come with schemas; remove it")
    return choice or "merge"


def _topic(item: Fields, *, is_output: bool) -> str | None:
    topic = item.text("topic", "name the topic")
    if topic is not None and TOPIC in topic and is_output:
        item.problem("topic", NO_PATTERN)
        return None
    if topic is not None and not is_topic_name(topic):
        item.problem(
            "topic",
            "is no legal topic name: 1 to 249 of letters, digits, `.`, `_` and `-`, and not `.` or `..`",
        )
        return None
    return topic


def _pool(item: Fields) -> str | None:
    pool = item.text("pool", "name the pool")
    if pool is None:
        return None
    if not _POOL.fullmatch(pool):
        item.problem("pool", "must consist of letters, digits and `_`")
        return None
    if pool.lower() == "kafka":
        item.problem("pool", "can't be called kafka: that name stands for the topics themselves")
        return None
    return pool


def _one_spelling(item: Fields, pool: str | None, pools: dict[str, str]) -> None:
    if pool is None:
        return
    first = pools.setdefault(pool.lower(), pool)
    if first != pool:
        item.problem("pool", f"differs from `{first}` in case only; SQL takes them for one: write `{first}`")


def _sides(item: Fields, is_output: bool) -> tuple[SideFormat, SideFormat]:
    default_format = item.choice("format", FORMATS) if "format" in item else "avro"
    known_key = item.choice("key-format", FORMATS) if "key-format" in item else default_format
    known_value = item.choice("value-format", FORMATS) if "value-format" in item else default_format
    key_format, value_format = known_key or "avro", known_value or "avro"
    if is_output:
        return SideFormat(key_format), SideFormat(value_format)
    if "schema" in item and "value-schema" in item:
        item.problem("schema", "is the same as value-schema; write one of them")
    value_key = "value-schema" if "value-schema" in item else "schema"
    return (
        SideFormat(key_format, None if known_key is None else _ddl(item, "key-schema", key_format)),
        SideFormat(value_format, None if known_value is None else _ddl(item, value_key, value_format)),
    )


def _ddl(item: Fields, key: str, side: Format) -> str | None:
    text = item.text(key) if key in item else None
    if text is None:
        return None
    if side not in ("json", "connect-json"):
        side_name = "key" if key == "key-schema" else "value"
        item.problem(
            key,
            f"goes with json and connect-json only, and the {side_name} format is {side}; remove it, or write"
            f" {side_name}-format: json",
        )
        return None
    # Here, not above: Arrow takes its time to load, and few files need it.
    from zync_assets.codecs.spark_types import parse_ddl

    try:
        parse_ddl(text)
    except SchemaError as error:
        item.problem(key, f"{error}; write columns, such as `ID INT, name STRING`, or a type of Spark's DDL")
    return text


def _start(item: Fields) -> Literal["earliest", "latest"] | int:
    """Timestamps: ISO 8601 with a zone, or milliseconds since the epoch."""
    node = item.node("from")
    if node is None:
        return "earliest"
    value = node.value if isinstance(node, Scalar) else None
    if value == "earliest":
        return "earliest"
    if value == "latest":
        return "latest"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            if moment.tzinfo is not None and (millis := round(moment.timestamp() * 1000)) >= 0:
                return millis
        except (ValueError, OverflowError):
            pass
    hint = suggestion(value, ("earliest", "latest")) if isinstance(value, str) else ""
    item.problem(
        "from",
        "must be earliest, latest, a time with its zone such as 2024-05-01T00:00:00Z, "
        f"or milliseconds since 1970{hint}",
    )
    return "earliest"


def _bad_records(item: Fields) -> tuple[OnBadRecord, int | None]:
    on_bad_record = item.choice("on-bad-record", get_args(OnBadRecord))
    limit = item.integer("max-bad-records", 0, (1 << 63) - 1)
    if on_bad_record == "fail" and limit is not None:
        item.problem("max-bad-records", "goes with on-bad-record: quarantine; with fail the first one stops the run")
    return on_bad_record or "quarantine", limit


def _order(item: Fields, key: SideFormat, value: SideFormat) -> SourceOrder | None:
    node = item.node("order")
    if node is None:
        return None
    if isinstance(node, Scalar):
        return SourceOrder(time=True) if item.choice("order", ("time",)) else None
    table = item.table("order")
    if table is None:
        return None
    fields = Fields(table, item.key("order"), item.problems, known_names(ORDER))
    if not table.entries:
        item.problem("order", "is empty; write by: or domain:, or leave it out")
    order_sql, domain = _expression(fields, "by", RECORD_ROOTS), fields.text("domain")
    if order_sql is None:
        return SourceOrder(domain=domain)
    path = field_path(order_sql)
    # Here, not above: Arrow takes its time to load, and few files need it.
    from zync_assets.pipeline_file.plain_types import order_problem

    if message := order_problem(order_sql, path, key, value):
        fields.problem("by", message)
    if path is not None:
        path = (path[0].lower(), *path[1:])
    return SourceOrder(order_sql, domain, path=path)


def _expression(item: Fields, key: str, roots: tuple[str, ...]) -> str | None:
    text = item.text(key)
    problems = [] if text is None else check_expression(text, roots)
    for message in problems:
        item.problem(key, message)
    return None if problems else text


def _create(item: Fields) -> CreateTopic | None:
    table = item.table("create")
    if table is None:
        return None
    create = Fields(table, item.key("create"), item.problems, known_names(CREATE))
    config = create.table("config")
    properties = {} if config is None else Fields(config, create.key("config"), item.problems, None).flat()
    partitions = create.integer("partitions", 1, 100_000)
    replication = create.integer("replication-factor", 1, 32_767)
    return CreateTopic(partitions or 1, replication or 1, properties)
