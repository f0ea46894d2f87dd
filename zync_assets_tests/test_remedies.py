"""Commands in messages are whole, and do what the messages say: each one that the code can print is parsed as a shell and
the command line parse it, and is run in a situation in which it is printed."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

import zync_assets
from zync_assets.cli import quarantine
from zync_assets.cli.main import COMMANDS, main
from zync_assets.lake import tables
from zync_assets.lake.quarantine_table import EVERYTHING
from zync_assets.lake.staging import open_staging
from zync_assets.local import services as local_services
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets.runner import replay_all
from zync_assets_tests.etl.test_streams import SHOP
from zync_assets_tests.etl.test_streams import send as send_changes
from zync_assets_tests.mini import BOTH, JOIN, Mini, die, mini, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGE = Path(zync_assets.__file__).parent
NEEDS_A_FILE = set(COMMANDS) - {"ls", "info", "consume", "produce", "local", "spark", "demo", "version", "help"}
PRINTED = re.compile(rf"\bzync ({'|'.join(sorted(COMMANDS))})\b[^`;,:]*")
HELP = {"cli/demo.py", "cli/query.py"}
"""Modules whose texts show commands by way of example."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string of a module that is no docstring; an expression in it is an ``X``."""
    tree = ast.parse(path.read_text())
    apart = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            apart |= {id(part) for part in node.values}
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.lineno, node.value


def made() -> Iterator[tuple[str, str, list[str]]]:
    """Place, module of the maker (a pipeline's ``command`` or the local services'), and its arguments, of each call."""
    for path in sorted(PACKAGE.rglob("*.py")):
        # Each worker collects this module, and a parse of the whole package takes seconds.
        if "command(" not in (source := path.read_text()):
            continue
        tree = ast.parse(source)
        decorators = {id(part) for node in ast.walk(tree) for part in getattr(node, "decorator_list", ())}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in decorators:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "command" and node.args and isinstance(node.args[0], ast.Constant):
                # The options of a list are in the printed command, which is run below.
                parts = [part for part in node.args if not isinstance(part, ast.Starred)]
                given = [part.value if isinstance(part, ast.Constant) else "some.topic" for part in parts]
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                yield place, "local" if given[0] in ("up", "down") else "pipeline", [str(part) for part in given]


def parsed(text: str) -> None:
    """Parse a command as a shell and click do; an unknown command, option or missing argument is an error."""
    program, *words = shlex.split(text)
    assert program == "zync"
    command: click.Command | None = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"no command {name}"
    with command.make_context(command.name, words):
        pass


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_command_that_needs_a_file_is_made_where_the_file_is_known(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) in HELP:
        return
    for line, text in texts(path):
        for found in PRINTED.finditer(text):
            assert found[1] not in NEEDS_A_FILE, f"{path}:{line}: {found[0]!r} lacks the pipeline file"


@pytest.mark.parametrize(("maker", "words"), [pytest.param(*rest, id=place) for place, *rest in made()])
def test_each_command_that_a_message_prints_can_be_pasted(tmp_path: Path, maker: str, words: list[str]) -> None:
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    (folder / "shop.yaml").write_text("")
    if maker == "local":
        parsed(local_services.command(words[0], folder, *words[2:]))
    else:
        pipeline = Pipeline("shop", folder / "shop.yaml", {}, None, "", {}, (), (), ())
        parsed(pipeline.command(*words))


TWO_POOLS = (
    BOTH
    + "  - {topic: $out.rows, pool: Views, key-format: string, value-format: json, create: {replication-factor: 1}}"
    + JOIN
)
COPY = """
  - {name: copy, type: stateless, in: $right, out: $out.rows, key: in.key, value: {id: in.value.id}}
"""
VIEW = """
  - name: row-view
    type: view
    tables: {r: {topic: $right, key: {id: value.id}, row: value}}
    from: r
    key: CAST(r.id AS STRING)
    value: {id: r.id, v: r.v}
    out: $out.rows
"""
SINK = """
sinks:
  - {name: warehouse, type: sqlite, url: "$url", from: [Raw.$right], table: rows, mode: insert}
"""


class Shop:
    """A pipeline and its commands. A command that is printed ends in a comment for a shell, which names its place."""

    PRINTED = re.compile(r"(zync [^`]*?) #at:(\S+?:\d+)#")

    def __init__(self, it: Mini, patch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
        self.it = it
        self.log = log
        self.pasted: set[str] = set()
        """Places whose commands were printed, and run."""
        real = Pipeline.command

        def command(pipeline: Pipeline, name: str, *options: str) -> str:
            caller = sys._getframe(1)
            place = Path(caller.f_code.co_filename).relative_to(PACKAGE)
            return f"{real(pipeline, name, *options)} #at:{place}:{caller.f_lineno}#"

        patch.setattr(Pipeline, "command", command)

    def zync(self, command: str, *words: str, code: int = 0) -> str:
        """What a command prints, on both streams."""
        return run([*command.split(), str(self.it.pipeline.path), *words], code)

    def paste(self, printed: str, code: int = 0) -> str:
        """Run each command of a message once; what they print."""
        found = dict(self.PRINTED.findall(printed))
        assert found, printed
        self.pasted |= set(found.values())
        return "".join(run(shlex.split(command)[1:], code) for command in found)

    def send_bad(self, value: bytes = b"no JSON") -> None:
        self.it.send(self.it.left, value)


def run(words: list[str], code: int) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == code, (words, done.output, done.exception)
    return done.output


@pytest.mark.slow
def test_each_printed_command_does_what_its_message_says(
    services: Services,
    spark: SparkSession,
    tmp_path: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = mini(services, spark, tmp_path, unique, BOTH + JOIN)
    shop = Shop(it, monkeypatch, caplog)
    tables_and_topics(shop)
    records_in_quarantine(shop, monkeypatch)
    rules_that_changed(shop)
    damage(shop, tmp_path)
    views(shop)
    sinks(shop, tmp_path)
    shop.zync("check")
    for number, (text, situation) in enumerate(OTHERS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        shop.it = mini(services, spark, folder, f"{unique}.{number}", text)
        situation(shop)
    assert shop.pasted == {place for place, maker, _ in made() if maker == "pipeline"}


def tables_and_topics(shop: Shop) -> None:
    it = shop.it
    it.send(it.left, row(1, "l"))
    it.send(it.right, row(1, "r"), row(2, "r"))
    shop.paste(shop.zync("query", f"select * from Raw.`{it.left}`", code=1))
    assert dict(it.next(it.left)) == {0: 1}
    shop.paste(shop.zync("query", f"select * from Staging.`{it.out}`", code=1))
    assert [value["id"] for value in it.values()] == [1]

    shop.zync("to-kafka")
    it.send(it.out, row(0, "by another program"))
    it.send(it.left, row(2, "l"))
    it.step()
    shop.paste(shop.zync("to-kafka", code=1))
    shop.zync("check")


def records_in_quarantine(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    it = shop.it
    shop.send_bad()
    it.step()
    assert "no JSON" in shop.paste(shop.zync("quarantine show", it.left, "999", code=1))
    assert "no JSON" in shop.paste(shop.zync("trace", it.left, "2", code=1))
    monkeypatch.setattr(quarantine, "REASONS", 0)
    assert "no JSON" in shop.paste(shop.zync("quarantine replay", code=1))

    shop.send_bad()
    it.ingest()
    shop.paste(shop.zync("quarantine drop", "--all", code=1))
    assert "no JSON" in shop.paste(shop.zync("quarantine drop", "--offsets", "0:1000000-1000000", code=1))
    assert "2 dropped" in shop.zync("quarantine drop", "--all")

    whole = BOTH + JOIN
    it.edited(BOTH.split("outputs:")[0])
    shop.send_bad()
    shop.zync("from-kafka")
    said = shop.zync("quarantine drop", "--all", code=1)
    it.edited(whole)
    shop.paste(said)
    assert "1 dropped" in shop.zync("quarantine drop", "--all")

    shop.send_bad()
    it.edited(whole.replace("topic: $left,", "topic: $left, max-bad-records: 0,"))
    said = shop.zync("from-kafka", code=1)
    it.edited(whole.replace("topic: $left,", "topic: $left, on-bad-record: fail,"))
    other = shop.zync("from-kafka", code=1)
    it.edited(whole)
    shop.zync("from-kafka")
    assert "no JSON" in shop.paste(said)
    assert "no JSON" in shop.paste(other)
    shop.zync("etl")
    assert "0 replayed, 1 left" in shop.paste(shop.zync("check"), code=1)
    shop.zync("quarantine drop", "--all")


def rules_that_changed(shop: Shop) -> None:
    it = shop.it
    it.send(it.left, row(3, "waits"))
    it.step()
    shop.paste(shop.zync("etl", "--retry-pending", "none-such", code=1))
    it.edited(BOTH + JOIN.replace("name: join", "name: joined"))
    said = shop.zync("check", "--format", "json")
    assert "wait for rule join" in said
    shop.paste(said)
    assert "wait for rule join" not in shop.zync("check", "--format", "json")


def damage(shop: Shop, folder: Path) -> None:
    """Each time the command is run while the damage is there, and again when it is repaired."""
    it = shop.it
    # The look before a later publish does not cover these outputs again, and lifts no block of theirs.
    shop.zync("to-kafka")
    shop.zync("check")
    it.send(it.left, row(4, "l"))
    it.send(it.right, row(4, "r"))
    shop.zync("from-kafka")
    shop.zync("etl")
    state = open_staging(it.lake, "Staging")
    assert state is not None
    file = Path(state.uri(state.ledger_files[0]))
    file.rename(folder / "ledger")
    said = [shop.zync("pending", code=1), shop.zync("status", code=1)]
    for text in said:
        assert file.name in shop.paste(text, code=1)
    (folder / "ledger").rename(file)
    blocked = shop.zync("to-kafka", code=1)
    shop.paste(blocked)
    shop.zync("to-kafka")

    it.send(it.right, row(9, "in a file that is lost"))
    it.ingest()
    file = max(Path(it.lake, "Raw", it.right).glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    file.rename(folder / "raw")
    assert file.name in shop.paste(shop.zync("etl", code=1), code=1)
    (folder / "raw").rename(file)
    shop.zync("check")
    shop.zync("etl")

    table = DeltaTable(f"{it.lake}/Raw/{it.left}")
    version = table.version()
    table.delete("kafka.offset = 0")
    assert "is in Kafka and not in the lake" in shop.paste(shop.zync("trace", it.out, "0"), code=1)
    DeltaTable(f"{it.lake}/Raw/{it.left}").restore(version)
    shop.zync("check")

    shutil.copytree(f"{it.lake}/Staging", folder / "copy")
    it.send(it.right, row(3, "comes"))
    shop.zync("run", "--until-idle")
    shutil.rmtree(f"{it.lake}/Staging")
    shutil.copytree(folder / "copy", f"{it.lake}/Staging")
    tables.forget(it.lake)
    said = [shop.zync("etl", code=1), shop.zync("to-kafka", code=1), shop.zync("check", "--format", "json", code=1)]
    for text in said:
        shop.paste(text)
    shop.zync("run", "--until-idle")
    assert [value["id"] for value in it.values()] == [1, 2, 4, 3]


def views(shop: Shop) -> None:
    it = shop.it
    it.edited(TWO_POOLS + COPY)
    shop.zync("etl")
    it.edited(TWO_POOLS + VIEW)
    shop.paste(shop.zync("etl", code=1))
    it.edited(TWO_POOLS + VIEW.replace("v: r.v", "v: upper(r.v)"))
    said = shop.zync("etl", code=1)
    shop.paste(shop.zync("trace", f"{it.out}.rows", "0"))
    shop.paste(said)
    shop.zync("etl")
    shop.zync("quarantine drop", "--all")
    shop.zync("check", "--state")
    files = Path(it.lake, "Views").glob("*/state-*/**/*.parquet")
    change_a_row(max(files, key=lambda item: item.stat().st_mtime))
    shop.paste(shop.zync("check", "--state", code=1))
    # A rebuild computes the account again. Records that can't be decoded are in quarantine then.
    shop.zync("quarantine drop", "--all")
    shop.zync("check", "--state")
    for file in Path(it.lake, "Views").glob("*/state-*/**/*.parquet"):
        file.unlink()
    shop.paste(shop.zync("check", "--state", code=1))
    shop.zync("check", "--state")


def a_rule_that_moved_to_another_pool(shop: Shop) -> None:
    it = shop.it
    it.send(it.right, row(1, "waits"))
    shop.zync("from-kafka")
    shop.zync("etl")
    moved = JOIN.replace("name: join", "name: moved\n    was: join").replace("out: $out\n", "out: $out.rows\n")
    it.edited(TWO_POOLS.replace(JOIN, moved) + COPY.replace("$out.rows", "$out"))
    shop.paste(shop.zync("etl", code=1))
    shop.zync("etl")


def a_rebuild_without_raw_records(shop: Shop) -> None:
    it = shop.it
    for number in (1, 2):
        # The records of the test are old: retention removes them once they are transformed.
        it.send(it.left, row(number, "l"))
        it.send(it.right, row(number, "r"))
        shop.zync("from-kafka")
        shop.zync("etl")
    shop.paste(shop.zync("rebuild", "--topic", it.out, code=1))


def a_rebuild_of_one_of_two_outputs(shop: Shop) -> None:
    it = shop.it
    it.send(it.left, row(1, "one"), row(2, "two", "u"))
    shop.zync("from-kafka")
    shop.zync("etl")
    it.edited(TWO_OUTPUTS.replace("value.op = 'd'", "value.op = 'u'"))
    shop.paste(shop.zync("rebuild", "--topic", it.out, code=1))
    assert [item["value"] for item in it.staged(f"{it.out}.rows")] == [{"v": "two"}]


def a_late_record(shop: Shop) -> None:
    it = shop.it
    send_changes(it, ("left", "c", 1, "a"))
    send_changes(it, ("right", "c", 1, "new"), lsn=300)
    shop.zync("from-kafka")
    shop.zync("etl")
    send_changes(it, ("left", "u", 1, "b"), lsn=200)
    shop.zync("from-kafka")
    shop.zync("etl")
    said = shop.zync("check", "--format", "json")
    assert "source_order" in said
    shop.paste(said)


def an_index_without_its_rows(shop: Shop) -> None:
    it = shop.it
    it.send(it.left, row(1, "a"))
    it.send(it.right, row(2, "a"))
    shop.zync("from-kafka")
    shop.zync("etl")
    change_a_row(next(Path(it.lake, "Staging").glob("*/state-*/**/index-*/*.parquet")))
    shop.paste(shop.zync("check", "--state", code=1))
    shop.zync("check", "--state")


JOINED = """
transforms:
  - name: pairs
    type: view
    tables:
      l: {topic: $left, key: {id: value.id}, row: value}
      r: {topic: $right, key: {id: value.id}, row: value}
    from: l JOIN r ON l.v = r.v
    key: {l: l.id, r: r.id}
    value: {v: l.v}
    out: $out
"""
TWO_OUTPUTS = TWO_POOLS.replace("pool: Views", "pool: Staging").replace(
    JOIN,
    """
transforms:
  - {type: stateless, where: value.op = 'c', in: $left, out: $out, key: in.value.v, value: {v: in.value.v}}
  - {type: stateless, where: value.op = 'd', in: $left, out: $out.rows, key: in.value.v, value: {v: in.value.v}}
""",
)
NUMBERS = """
transforms:
  - {name: number, type: stateless, in: $left, out: $out, key: in.key, value: {n: CAST(in.value.v AS INT)}}
"""


def a_replay_after_later_records(shop: Shop) -> None:
    it = shop.it
    it.send(it.left, ("k", row(1, "no number")), ("k", row(1, "2")))
    it.step()
    it.edited(BOTH + NUMBERS.replace("CAST(", "try_cast("))
    said = shop.zync("quarantine replay")
    assert [value["n"] for value in it.values()] == [2, None]
    shop.paste(said)
    assert it.values()[-1] == {"n": 2}


LATE = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "id bigint, n int", retention: 30d}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint, n int"}
sinks:
  - {name: lefts, type: sqlite, url: late.db, from: [Raw.$left], table: lefts, key: [value.id], evolve: widen}
  - {name: rights, type: sqlite, url: late.db, from: [Raw.$right], table: rights, key: [value.id], evolve: widen}
"""


def late_records_of_sinks(shop: Shop) -> None:
    """Sinks pass a record whose number is too large. Later the schema has room for the number."""
    it = shop.it
    for topic in (it.left, it.right):
        it.send(topic, {"id": 1, "n": 1}, {"id": 2, "n": 2**40}, {"id": 3, "n": 3})
    shop.zync("from-kafka")
    shop.zync("sink")
    assert it.raw(it.left) == []
    it = shop.it = it.changed("n int", "n bigint")
    file = it.pipeline.path.parent / "late.db"
    with closing(sqlite3.connect(file)) as target, target:
        refusal = "BEGIN SELECT RAISE(ABORT, 'no two'); END"
        target.execute(f"CREATE TRIGGER no_two BEFORE INSERT ON rights WHEN new.id = 2 {refusal}")
    list(replay_all(it.pipeline, lambda: it.spark, EVERYTHING))
    shop.zync("sink")
    with closing(sqlite3.connect(file)) as target, target:
        target.execute("DROP TRIGGER no_two")
    # Retention has removed records around the late one of the first sink: the record stays.
    listing, replay = (text for text in shop.log.messages if "#at:sinks/replay.py" in text)
    assert f"{it.left}" in shop.paste(listing)
    assert "1 replayed, 1 left" in shop.paste(replay, code=1)
    with closing(sqlite3.connect(file)) as target:
        assert target.execute("SELECT n FROM rights WHERE id = 2").fetchone() == (2**40,)


ARCHIVE = """
inputs:
  - {topic: $left, pool: Raw, key-format: string, value-format: json, schema: "id bigint"}
sinks:
  - {name: keep, type: files, url: archive, from: [Raw.$left]}
"""


def an_object_of_a_killed_run(shop: Shop) -> None:
    it = shop.it
    it.send(it.left, {"id": 1})
    shop.zync("from-kafka")
    die(it.pipeline, "sink:merged", "sink")
    said = shop.zync("check", "--rows", code=1)
    assert "a sink has not made 1 object yet" in said
    shop.paste(said)
    shop.zync("check", "--rows")


OTHERS: dict[str, Callable[[Shop], None]] = {
    TWO_POOLS + COPY: a_rule_that_moved_to_another_pool,
    BOTH.replace("pool: Raw,", "pool: Raw, retention: 30d,") + JOIN: a_rebuild_without_raw_records,
    SHOP: a_late_record,
    TWO_OUTPUTS: a_rebuild_of_one_of_two_outputs,
    BOTH.replace("key-format: string, value-format: json, create", "key-format: json, value-format: json, create")
    + JOINED: an_index_without_its_rows,
    BOTH + NUMBERS: a_replay_after_later_records,
    LATE: late_records_of_sinks,
    ARCHIVE: an_object_of_a_killed_run,
}
"""The text of a further pipeline → the situation in which it prints a command."""


def change_a_row(file: Path) -> None:
    """Another program changes a row in a file of the state, and the table's log does not show it."""
    table = pq.read_table(file, partitioning=None)
    (name,) = (name for name in table.column_names if name.startswith("state-row:"))
    rows = table[name].to_pylist()
    rows[0]["v"] = "another text"
    column = pa.array(rows, table.schema.field(name).type)
    pq.write_table(table.set_column(table.column_names.index(name), table.schema.field(name), column), file)
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)


def sinks(shop: Shop, folder: Path) -> None:
    it, file = shop.it, folder / "warehouse.db"
    it.edited(TWO_POOLS + VIEW.replace("v: r.v", "v: upper(r.v)") + SINK.replace("$url", f"sqlite:///{file}"))
    shop.zync("sink")
    with closing(sqlite3.connect(file)) as target, target:
        target.execute("UPDATE zync_positions SET next = 1000000")
    shop.paste(shop.zync("sink", code=1))
    with closing(sqlite3.connect(file)) as target, target:
        target.execute("DROP TABLE zync_positions")
    shop.paste(shop.zync("sink", code=1))
    shop.zync("sink")
    with closing(sqlite3.connect(file)) as target, target:
        assert target.execute("SELECT count(*) FROM rows").fetchone() == (len(it.raw(it.right)),)
        refusal = "BEGIN SELECT RAISE(ABORT, 'too much'); END"
        target.execute(f"CREATE TRIGGER limits BEFORE INSERT ON rows WHEN new.id = 99 {refusal}")
    it.send(it.right, row(99, "r"))
    shop.zync("from-kafka")
    shop.zync("sink")
    with closing(sqlite3.connect(file)) as target, target:
        target.execute("DROP TRIGGER limits")
    # Records of other situations stay in quarantine.
    assert "1 replayed" in shop.paste(shop.zync("check"), code=1)
    with closing(sqlite3.connect(file)) as target:
        assert target.execute("SELECT count(*) FROM rows").fetchone() == (len(it.raw(it.right)),)
