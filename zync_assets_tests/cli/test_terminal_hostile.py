"""Arguments that mean harm, or nothing: each is an error with a cure, at once, and no stack trace. No broker is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from zync_assets.cli.main import main
from zync_assets.cli.terminal import MAX_OFFSET, MAX_PARTITION
from zync_assets.lake import quarantine_table, raw, staging, storage
from zync_assets.lake.head import Head, OutputPosition, Position
from zync_assets.lake.log import DataFile
from zync_assets.lake.staging import BASE_SCHEMA
from zync_assets_tests.lake.rows import SCHEMA, bad_records, file, records

NOWHERE = {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", "SCHEMA_REGISTRY_URL": "http://127.0.0.1:1"}
FILE = """
kafka: {bootstrap.servers: "127.0.0.1:1"}
lake: ./lake
inputs: [{topic: a, pool: Raw, key-format: string, value-format: json, value-schema: id bigint}]
outputs: [{topic: o, pool: Staging, format: string}]
transforms: [{name: r, type: stateless, in: a, out: o, key: in.key, value: in.key}]
"""
NAMES = {
    "path": "../..",
    "sql": "a'; drop table x --",
    "nul": "a\0b",
    "long": "x" * 10_000,
    "unicode": "日本\u202e",
    "format": "%s{0}",
    "empty": "",
    "quote": "`",
    "terminal": "\x1b[2J",
    "no UTF-8": "\udcff",
    "lake": "~quarantine",
    "account": "#account",
    "dot": ".",
}
NUMBERS = [
    "-1",
    "9223372036854775808",
    "9" * 400,
    "9" * 5000,
    "1.5",
    "1e3",
    "0x10",
    "nan",
    "",
    " ",
    "1_0",
    "٣",
    "²",
    "%s{0}",
]


def make_pipeline(folder: Path) -> Path:
    """A pipeline whose lake has a raw record, a quarantined one and an output."""
    path, lake = folder / "p.yaml", str(folder / "lake")
    path.write_text(FILE)
    bad = file(storage.quarantine_uri(lake, "Raw", "a"), bad_records([1]), quarantine_table.file_name(1))
    quarantine_table.add(lake, "Raw", "a", None, [bad], lambda: None)
    raw_uri = storage.raw_uri(lake, "Raw", "a")
    good = file(raw_uri, records([0]))
    raw.commit_advance(
        raw_uri, None, raw.RawAdvance("a", "id", SCHEMA, [good], {0: 0}, {0: 2}, bad={0: 1}, attempts={0: 1})
    )
    uri, name = storage.staging_uri(lake, "Staging"), "batch-000000000001-000000000000/topic=o/part-0.parquet"
    storage.make_folder(storage.join(uri, name.rsplit("/", 1)[0]))
    place = {"topic": "o", "partition": 0, "offset": 0}
    row = {
        "kafka": place,
        "rule": "r",
        "schema": "s",
        "source": [{**place, "topic": "a"}],
        "key:o": "k0",
        "value:o": "k0",
    }
    schema = pa.schema([*BASE_SCHEMA, ("key:o", pa.string()), ("value:o", pa.string())])
    columns = pa.schema([schema.field(column) for column in row])
    pq.write_table(pa.Table.from_pylist([row], schema=columns), storage.join(uri, name))
    counts = {("a", 0, "done"): 1, ("a", 0, "quarantined"): 1}
    head = Head(1, {("a", 0): Position(0, 2, 2)}, {("o", 0): OutputPosition(0, 1, None, None)}, counts)
    made = DataFile(name, storage.file_size(storage.join(uri, name)), 1, 0, 0, 0, group="o")
    staging.commit_batch(lake, "Staging", None, head, schema, [made])
    return path


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("hostile")))


def zync(*arguments: str, stdin: str | bytes = b'"x"\n') -> Result:
    return CliRunner(env=NOWHERE).invoke(main, arguments, input=stdin)


def refused(*arguments: str, stdin: str | bytes = b'"x"\n') -> str:
    """The error text of a command with bad arguments."""
    found = zync(*arguments, stdin=stdin)
    assert found.exit_code in (1, 2), (arguments, found.output)
    assert isinstance(found.exception, SystemExit), (arguments, found.exception)
    said = found.output
    assert "rror: " in said
    assert len(said) < 1_000
    assert not set(said) & {"\x1b", "\0", "\u202e", "\udcff"}
    assert "bootstrap" not in said, "a broker was asked"
    return said


def test_the_pipeline_is_one_that_commands_work_on(pipeline: str) -> None:
    """The other tests rely on a working pipeline, so that every error comes from the arguments."""
    outputs = [json.loads(line) for line in zync("trace", pipeline, "o", "0", "--format", "json").stdout.splitlines()]
    assert [(row["role"], row["offset"]) for row in outputs] == [("output", 0), ("in", 0)]
    listed = zync("quarantine", "list", pipeline, "--offsets", "0:1", "--format", "json")
    assert json.loads(listed.stdout)["offset"] == 1
    far = ("--offsets", f"{MAX_PARTITION}:0-{MAX_OFFSET}")
    assert zync("quarantine", "list", pipeline, *far, "--format", "json").stdout == ""


Calls = Iterator[tuple[str, ...]]


def named(p: str, name: str) -> Calls:
    """Every place of the command line where a topic, a pool or a rule is named."""
    yield "trace", p, name, "0"
    yield "quarantine", "show", p, name, "0"
    for command in ("list", "replay", "drop"):
        yield "quarantine", command, p, "--topic", name
    yield "from-kafka", p, "--topic", name
    yield "to-kafka", p, "--topic", name
    yield "to-kafka", p, "--recreate", name
    yield "etl", p, "--retry-pending", name
    yield "info", "--", name
    yield "consume", "--", name
    yield "produce", "--", name
    yield "query", p, f"select * from Raw.`{name}`"
    yield "query", p, f"select * from `{name}`.a"
    if name:
        yield "query", p, f"select * from {name}.a"
    yield "query", p, f"select * from Raw.`a{name}`; select 1"


def filed(name: str) -> Calls:
    """Every place where a file is named that has to be there."""
    for command in ("validate", "status", "check", "pending", "from-kafka", "etl", "to-kafka", "run"):
        yield command, "--", name
    yield "query", name, "select 1"
    yield "trace", name, "o", "0"
    yield "info", "a", "--pipeline", name
    yield "produce", "a", "--schema", name
    yield "produce", "--", "a", name
    yield "ls", "--pipeline", name


def numbered(p: str, text: str) -> Calls:
    """Every place where an offset, a range, a partition, a count, a time or a port is asked for."""
    yield "trace", p, "o", "--", text
    yield "trace", p, "o", "0", "--partition", text
    yield "quarantine", "show", p, "a", "--", text
    yield "quarantine", "show", p, "a", "1", "--partition", text
    for command in ("list", "replay", "drop"):
        for span in (f"{text}:0", f"0:{text}", f"0:0-{text}", f"0:{text}-{text}", text):
            yield "quarantine", command, p, "--offsets", span
    for option in ("--from", "--count", "--partition"):
        yield "consume", "a", option, text
    yield "produce", "a", "--create", "--partitions", text
    yield "local", "up", "--kafka-port", text
    yield "local", "up", "--registry-port", text
    if text not in ("", "1.5"):
        yield "run", p, "--exit-after", text


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_that_means_harm_is_refused(pipeline: str, name: str) -> None:
    for arguments in named(pipeline, name):
        refused(*arguments)


@pytest.mark.parametrize("name", [name for name in NAMES.values() if name != "x" * 10_000])
def test_a_file_that_is_none_is_refused(name: str) -> None:
    for arguments in filed(name):
        if arguments[0] != "validate" or {"\0", "\udcff"} & set(name):
            refused(*arguments)
        else:
            assert zync(*arguments).exit_code == 1


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_that_is_none_is_refused(pipeline: str, text: str) -> None:
    for arguments in numbered(pipeline, text):
        refused(*arguments)


def test_ranges_that_run_backwards_are_refused(pipeline: str) -> None:
    for command in ("list", "replay", "drop"):
        assert "0:17-99" in refused("quarantine", command, pipeline, "--offsets", "0:5-4")
        assert "0:17-99" in refused("quarantine", command, pipeline, "--offsets", f"{MAX_PARTITION + 1}:0")


def test_what_is_nowhere_is_said(pipeline: str) -> None:
    """The greatest numbers that there can be are no error in themselves: nothing is there."""
    assert "is not staged; Staging holds offsets 0 to 0" in refused("trace", pipeline, "o", str(MAX_OFFSET))
    assert "is not staged" in refused("trace", pipeline, "o", "0", "--partition", str(MAX_PARTITION))
    assert "not in quarantine" in refused("quarantine", "show", pipeline, "a", str(MAX_OFFSET))


@pytest.mark.parametrize(
    "sql",
    [
        "select " + "(" * 5_000 + "1" + ")" * 5_000,
        "select " + "array(" * 3_000,
        "select '" + "x" * 2_000_000 + "'",
        "select 1 -- \x1b[2J\nfrom",
        "select * from Raw.a; drop table Raw.a",
        "drop table Raw.a",
        "select * from {0}",
        "%s",
    ],
)
def test_a_query_that_means_harm_is_refused(pipeline: str, sql: str) -> None:
    assert "query" in refused("query", pipeline, sql)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        "9" * 5_000,
        b"\xff\xfe",
        '{"value": 1, "partition": 2147483648}',
        '{"value": 1, "timestamp": 9223372036854775808}',
        '{"value": 1, "timestamp": ' + "9" * 4_000 + "}",
        '{"value": 1, "headers": [["k", "v"]], "partition": -1}',
        '{"a": 9223372036854775808}',
        '{"a/b": 1}',
        '{"a": [1, "x"]}',
    ],
)
def test_a_line_that_means_harm_is_refused(line: Any) -> None:
    assert "line" in refused("produce", "a", "--create", stdin=line) or '"a' in str(line)
