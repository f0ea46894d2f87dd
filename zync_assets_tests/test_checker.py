"""The checker itself: it shares no code with the pipeline, passes a sound lake, and finds each kind of damage.

Damage to the lake is real: in the files, or through the Delta log with right statistics. Kafka's records can't be rewritten,
so the tests change the records after the read.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.lake import raw, staging, tables
from zync_assets.lake.log import DataFile, LakeTable
from zync_assets.lake.staging import StagingState
from zync_assets.local.services import Services
from zync_assets_tests.checker import statement as statements
from zync_assets_tests.checker.evidence import Evidence, gather_lake, gather_logs
from zync_assets_tests.checker.findings import Report
from zync_assets_tests.checker.logs import Log, LogRecord
from zync_assets_tests.checker.statement import Statement
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import Schemas
from zync_assets_tests.checks.damage import Rows, append_again, change_account, edit, exchange, overwrite, take_out
from zync_assets_tests.mini import ingest, publish, transform
from zync_assets_tests.shop import Shop, changes, make_shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent


def reached_modules(start: Path) -> dict[str, set[str]]:
    """Module of the tests that the checker imports, directly or not → the names that the module imports."""
    found: dict[str, set[str]] = {}
    waiting = sorted(start.glob("*.py"))
    while waiting:
        path = waiting.pop()
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        found[str(path.relative_to(HERE))] = names
        for name in names:
            other = HERE.parent / (name.replace(".", "/") + ".py")
            if name.startswith("zync_assets_tests.") and other.exists() and str(other.relative_to(HERE)) not in found:
                waiting.append(other)
    return found


def test_the_checker_shares_no_code_with_the_pipeline() -> None:
    found = reached_modules(HERE / "checker")
    assert {"model.py", "shop_rules.py", "checker/verdict.py"} <= set(found)
    for path, names in found.items():
        for name in names:
            assert name.split(".")[0] not in ("zync_assets", "deltalake", "pyspark"), f"{path} imports {name}"
    script = "import sys, zync_assets_tests.checker.__main__\nprint([n for n in sys.modules if n.startswith('zync_assets.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=HERE.parent)
    assert done.stdout.strip() == "[]"


@dataclass(frozen=True)
class Sound:
    """A shop whose records went through every step in two batches, and the logs of its topics."""

    shop: Shop
    statement: Statement
    logs: dict[str, dict[int, Log]]
    schemas: Schemas
    prefix: str


@dataclass(frozen=True)
class Patient:
    """A copy of the sound one, to be damaged: ``lake`` on disk, ``logs`` in memory."""

    shop: Shop
    lake: Path
    logs: dict[str, dict[int, Log]]

    def raw(self, topic: str, place: int = 0) -> tuple[LakeTable, DataFile]:
        state = raw.open_raw(str(self.lake), "Raw", topic)
        assert state is not None
        return state.table, raw.raw_files(state)[place]

    @property
    def staging(self) -> StagingState:
        state = staging.open_staging(str(self.lake), "Staging")
        assert state is not None
        return state

    def outputs(self, place: int = 0) -> tuple[LakeTable, DataFile]:
        state = self.staging
        return state.table, state.output_files(self.shop.new)[place]

    def quarantine(self) -> tuple[LakeTable, DataFile]:
        opened = tables.open_table(f"{self.lake}/~quarantine/Raw/{self.shop.orders}")
        assert opened is not None
        return opened, opened.files[0]

    def relog(self, topic: str, partition: int, change: Callable[[list[LogRecord]], list[LogRecord]]) -> None:
        log = self.logs[topic][partition]
        records = change(list(log.records))
        self.logs[topic][partition] = Log(log.low, max(log.end, records[-1].offset + 1), tuple(records))


@pytest.fixture(scope="module")
def sound(services: Services, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("sound")
    shop = make_shop(services, folder, folder.name)
    whole = list(changes(shop, range(230), seed=1))
    late = [place for place, change in enumerate(whole) if place > 500 or (change[0] == shop.status and place % 7 == 0)]
    early = sorted({*range(len(whole))} - {*late})
    for places in (early, late):
        shop.produce(whole[place] for place in places)
        ingest(shop.pipeline)
        assert transform(shop.pipeline) == 1
        publish(shop.pipeline)
    statement = statements.shop(folder.name)
    logs = gather_logs(services.bootstrap_servers, statement)
    return Sound(shop, statement, logs, Schemas(services.registry_url), folder.name)


@pytest.fixture
def patient(sound: Sound, tmp_path: Path) -> Patient:
    lake = tmp_path / "lake"
    shutil.copytree(sound.shop.pipeline.lake, lake)
    return Patient(sound.shop, lake, {topic: dict(logs) for topic, logs in sound.logs.items()})


def verdict(sound: Sound, patient: Patient) -> Report:
    evidence: Evidence = gather_lake(patient.lake, sound.statement, patient.logs)
    return judge(sound.statement, evidence, sound.schemas, drained=True)


@pytest.mark.slow
def test_what_is_sound_passes(sound: Sound, patient: Patient) -> None:
    report = verdict(sound, patient)
    assert report.sound, str(report)
    sent = sum(len(log) for log in sound.shop.sent.values())
    classes = {name: report.numbers[name] for name in ("done", "pending", "unmatched", "dropped", "quarantined")}
    assert sum(classes.values()) == sent == report.numbers["raw records"] + report.numbers["quarantined records"]
    assert all(classes.values())
    assert report.numbers["published"] == report.numbers["outputs"] > 200


@pytest.mark.slow
def test_the_command_says_so(sound: Sound, services: Services) -> None:
    where = ["--bootstrap-servers", services.bootstrap_servers, "--registry", services.registry_url]
    which = ["--lake", sound.shop.pipeline.lake, "--prefix", sound.prefix, "--drained", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "zync_assets_tests.checker", *where, *which],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["sound"]


def swapped(rows: Rows, names: tuple[str, ...]) -> Rows:
    """The first two rows with the values of some columns exchanged; their offsets stay."""
    one, two = rows[0], rows[1]
    taken = {name: (two[name], one[name]) for name in names}
    changed = [{**row, **{name: pair[place] for name, pair in taken.items()}} for place, row in enumerate((one, two))]
    return [*changed, *rows[2:]]


def renumbered(rows: Rows, by: int) -> Rows:
    return [{**row, "kafka": {**row["kafka"], "offset": row["kafka"]["offset"] + by}} for row in rows]


def other_schema(rows: Rows) -> Rows:
    """The first row with the output schema of a row of another rule."""
    other = next(row["schema"] for row in rows if row["schema"] != rows[0]["schema"])
    return [{**rows[0], "schema": other}, *rows[1:]]


def reclassed(kind: str, other: str) -> Callable[[Patient], None]:
    def run(patient: Patient) -> None:
        left = [1]

        def change(row: dict[str, Any]) -> dict[str, Any]:
            return {**row, "kind": other} if left and not left.clear() else row

        change_account(patient.staging, edit(change, kind=kind))

    return run


def without_one(**where: object) -> Callable[[Patient], None]:
    """The account without the first entry that has these values."""

    def run(patient: Patient) -> None:
        left = [1]
        change_account(patient.staging, edit(lambda row: None if left and not left.clear() else row, **where))

    return run


def columns(patient: Patient) -> tuple[str, ...]:
    return (f"key:{patient.shop.new}", f"value:{patient.shop.new}", "rule", "source", "schema")


def sent_on(records: list[LogRecord]) -> list[LogRecord]:
    """All from the third record on one offset later, and the second once more before them."""
    later = [replace(item, offset=item.offset + 1) for item in records[2:]]
    return [*records[:2], replace(records[1], offset=records[2].offset), *later]


def log_swapped(records: list[LogRecord]) -> list[LogRecord]:
    one, two = records[0], records[1]
    return [replace(two, offset=one.offset), replace(one, offset=two.offset), *records[2:]]


MUTATIONS: dict[str, tuple[Callable[[Patient], object], set[str]]] = {
    "raw: a record is lost": (lambda it: exchange(*it.raw(it.shop.orders), lambda rows: rows[1:]), {"raw"}),
    "raw: a record is there twice": (lambda it: append_again(*it.raw(it.shop.orders)), {"raw"}),
    "raw: two records are swapped": (
        lambda it: overwrite(*it.raw(it.shop.status), lambda rows: swapped(rows, ("key", "value"))),
        {"raw"},
    ),
    "raw: a record is renumbered": (
        lambda it: exchange(*it.raw(it.shop.orders, -1), lambda rows: [*rows[:-1], *renumbered(rows[-1:], 1)]),
        {"raw"},
    ),
    "raw: a whole file is gone": (lambda it: take_out(*it.raw(it.shop.status)), {"raw"}),
    "raw: the quarantine is lost": (lambda it: take_out(*it.quarantine()), {"raw"}),
    "raw: a record that the topic has not": (
        lambda it: it.relog(it.shop.orders, 0, lambda records: [*records[:3], *records[4:]]),
        {"raw"},
    ),
    "account: a done fact is lost": (without_one(kind="done"), {"account"}),
    "account: a pending fact is lost": (without_one(kind="pending", rule="new-order"), {"account"}),
    "account: an unmatched fact is lost": (without_one(kind="unmatched"), {"account"}),
    "account: a completed fact is lost": (without_one(kind="completed"), {"account", "sources"}),
    "account: a fact is there twice": (
        lambda it: append_again(it.staging.table, it.staging.ledger_files[0]),
        {"account"},
    ),
    "account: an output without a done fact": (reclassed("done", "unmatched"), {"account", "sources"}),
    "account: an unmatched record is called done": (reclassed("unmatched", "done"), {"account", "sources"}),
    "account: a dropped record is called unmatched": (reclassed("dropped", "unmatched"), {"account"}),
    "account: a done fact without output": (lambda it: take_out(*it.outputs()), {"sources", "numbering"}),
    "account: a counter is off": (
        lambda it: change_account(
            it.staging, edit(lambda row: {**row, "count": row["count"] + 1}, kind="counted", rule="done"), head=True
        ),
        {"account"},
    ),
    "account: seen is set back": (
        lambda it: change_account(
            it.staging, edit(lambda row: {**row, "end": row["end"] - 1}, kind="seen", partition=0), head=True
        ),
        {"account"},
    ),
    "account: a join key's hash is gone": (
        lambda it: change_account(it.staging, edit(lambda row: {**row, "hash": None}, kind="pending")),
        {"account"},
    ),
    "outputs: a record is lost": (lambda it: exchange(*it.outputs(), lambda rows: rows[1:]), {"numbering", "sources"}),
    "outputs: a record is lost and the rest renumbered": (
        lambda it: exchange(*it.outputs(-1), lambda rows: renumbered(rows[1:], -1)),
        {"numbering", "sources", "topic"},
    ),
    "outputs: a record is there twice": (
        lambda it: exchange(*it.outputs(-1), lambda rows: [*rows, *renumbered(rows[-1:], 1)]),
        {"numbering", "sources"},
    ),
    "outputs: two records are swapped": (
        lambda it: overwrite(*it.outputs(), lambda rows: swapped(rows, columns(it))),
        {"order", "topic"},
    ),
    "outputs: two values are swapped": (
        lambda it: overwrite(*it.outputs(), lambda rows: swapped(rows, columns(it)[1:2])),
        {"content", "topic"},
    ),
    "outputs: two sources are swapped": (
        lambda it: overwrite(*it.outputs(), lambda rows: swapped(rows, ("source",))),
        {"content"},
    ),
    "outputs: a record is renumbered": (
        lambda it: overwrite(*it.outputs(-1), lambda rows: [*rows[:-1], *renumbered(rows[-1:], 1)]),
        {"numbering"},
    ),
    "outputs: a partial update became a whole one": (lambda it: overwrite(*it.outputs(), other_schema), {"content"}),
    "topic: a record is lost": (
        lambda it: it.relog(it.shop.new, 0, lambda records: [*records[:5], *records[6:]]),
        {"topic"},
    ),
    "topic: a record is there twice": (lambda it: it.relog(it.shop.new, 0, sent_on), {"topic"}),
    "topic: two records are swapped": (lambda it: it.relog(it.shop.new, 0, log_swapped), {"topic"}),
    "topic: a foreign record at the end": (
        lambda it: it.relog(it.shop.new, 0, lambda rs: [*rs, replace(rs[-1], offset=rs[-1].offset + 1)]),
        {"topic"},
    ),
    "topic: the last record is not there yet": (
        lambda it: it.logs[it.shop.new].update({0: shorter(it.logs[it.shop.new][0])}),
        {"rest"},
    ),
}


def shorter(log: Log) -> Log:
    return Log(log.low, log.end - 1, log.records[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_damage_is_caught(
    sound: Sound, patient: Patient, name: str, record_property: Callable[[str, object], None]
) -> None:
    damage, kinds = MUTATIONS[name]
    damage(patient)
    report = verdict(sound, patient)
    first = str(report.findings[0]) if report.findings else "NOT FOUND"
    record_property("table: what the checker catches", f"{name} | {first}")
    assert kinds <= report.kinds, str(report)
