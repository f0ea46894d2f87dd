"""The end: nothing runs any more, all that is left is done, and then the checker and the model say what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from zync_assets_tests.checker.account import Account, read_accounts
from zync_assets_tests.checker.evidence import Evidence, gather
from zync_assets_tests.checker.outputs import sources, staged_sides
from zync_assets_tests.checker.raw import decode
from zync_assets_tests.checker.statement import Statement
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import BAD, Schemas
from zync_assets_tests.model import GARBAGE, OneToOne, Record
from zync_assets_tests.torture.children import start
from zync_assets_tests.torture.events import event_findings
from zync_assets_tests.torture.plan import OUTPUTS
from zync_assets_tests.torture.report import Tally
from zync_assets_tests.torture.world import World

ATTEMPTS = 3


def drain(world: World, tally: Tally) -> None:
    """Run to idle without faults. First recreates a topic to which two publishers wrote, with the printed command."""
    log, marker = world.folder / "drain.log", world.folder / "drain.ready"
    for _ in range(ATTEMPTS):
        code = start(world.pipeline, "run", log, marker, {}, "--until-idle").wait()
        text = log.read_text(errors="replace")
        if code == 0:
            return
        for topic in (getattr(world.shop, name) for name in OUTPUTS):
            if f"--recreate {topic}." in text or f"--recreate {topic}\n" in text:
                tally.count("errors", "topics made anew after a foreign record")
                start(world.pipeline, "to-kafka", log, marker, {}, "--recreate", topic).wait()
    tally.find(f"the last run in peace did not end well: {text[-1500:]}")


def verdict(world: World, tally: Tally) -> None:
    """The checker's findings and the model's, and the numbers of both."""
    statement, schemas = world.statement, Schemas(world.services.registry_url)
    evidence = gather(world.shop.servers, world.folder / "lake", statement, world.pipeline.with_name("shop.db"))
    report = judge(statement, evidence, schemas, drained=True, with_sinks=True)
    for item in report.findings:
        tally.find(f"checker: {item}")
    tally.checked.update(report.numbers)
    for text in differences(world, statement, evidence, schemas):
        tally.find(f"model: {text}")
    for text in event_findings(world, list(_records(statement, evidence, schemas)), schemas, tally.checked):
        tally.find(f"events: {text}")
    if evidence.staging:
        tally.checked["batches"] = evidence.staging.batch or 0
    _judge_views(world, tally, schemas)


def _judge_views(world: World, tally: Tally, schemas: Schemas) -> None:
    """The checker's findings about the pool of views. The output, folded by key, is the result for the latest rows."""
    evidence = gather(world.shop.servers, world.folder / "lake", world.views)
    report = judge(world.views, evidence, schemas, drained=True)
    for item in report.findings:
        tally.find(f"checker, views: {item}")
    if evidence.staging is None:
        tally.find("no view is staged")
    else:
        tally.checked["batches of views"] = evidence.staging.batch or 0
        tally.checked["outputs of views"] = report.numbers["published"]


def differences(world: World, statement: Statement, evidence: Evidence, schemas: Schemas) -> Iterable[str]:
    """The differences between the outputs of the run's many batches and the model's outputs of one batch.

    A key's records share a partition. The pairs and the classes of records are therefore the same for any cut of batches,
    apart from the records of held outputs that wait or ended with their source row. The checker checks these records, and the
    order of outputs. The model gets the other records, and holds nothing.
    """
    staging = evidence.staging
    if staging is None:
        yield "nothing is staged"
        return
    accounts, _ = read_accounts(staging)
    model = replace(world.shop.model(), held=frozenset())
    totals: Counter[tuple[str, int, str]] = Counter()
    others: list[Record] = []
    for record in _records(statement, evidence, schemas):
        account = accounts.get((record.topic, record.partition), Account())
        waits = account.waits(record.offset) and isinstance(
            statement.rule(account.pending[record.offset]["rule"]), OneToOne
        )
        if waits or record.offset in account.ended:
            totals[record.topic, record.partition, "pending" if waits else "done"] += 1
        else:
            others.append(record)
    model.batch(others)
    totals.update(model.totals())
    for topic in (world.shop.new, world.shop.audit):
        wanted = Counter(repr((out.rule, out.source, out.key, out.value)) for out in model.outputs[topic])
        found = Counter(
            repr((row["rule"], tuple(sources(row)), key, value)) for row, key, value in staged_sides(staging, topic)
        )
        for text, count in list(((wanted - found) + (found - wanted)).items())[:5]:
            yield f"{topic}: {wanted[text]} wanted, {found[text]} there: {text} ({count})"
    counted = {
        (row["topic"], row["partition"], row["rule"]): row["count"] for row in staging.of("counted") if row["count"]
    }
    for place in sorted(counted.keys() | totals.keys()):
        if counted.get(place, 0) != totals[place]:
            yield f"{place}: {totals[place]} wanted, {counted.get(place, 0)} counted"


def _records(statement: Statement, evidence: Evidence, schemas: Schemas) -> Iterable[Record]:
    for item in statement.inputs:
        for partition, log in sorted(evidence.logs[item.topic].items()):
            for offset, found in sorted(decode(item, log, schemas).items()):
                value = GARBAGE if found.value is BAD else found.value
                yield Record(item.topic, partition, offset, found.record.timestamp or 0, found.key, value)
