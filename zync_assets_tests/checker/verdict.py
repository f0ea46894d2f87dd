"""The judgement: evidence and statement → report."""

from __future__ import annotations

from collections.abc import Mapping

from zync_assets_tests.checker import account, held, outputs, raw, sinks, views
from zync_assets_tests.checker.account import Place
from zync_assets_tests.checker.evidence import Evidence, Staging
from zync_assets_tests.checker.findings import Report
from zync_assets_tests.checker.raw import Decoded
from zync_assets_tests.checker.statement import Statement
from zync_assets_tests.checker.wire import Schemas
from zync_assets_tests.model import Record


def judge(
    statement: Statement, evidence: Evidence, schemas: Schemas, *, drained: bool = False, with_sinks: bool = False
) -> Report:
    """Whether all that was done is exactly once; with ``drained``, whether nothing is left to do either. ``with_sinks``: looks at
    the tables of the sinks."""
    report = Report()
    decoded = {
        item.topic: {number: raw.decode(item, log, schemas) for number, log in evidence.logs[item.topic].items()}
        for item in statement.inputs
    }
    for item in statement.inputs:
        if (found := evidence.raw.get(item.topic)) is not None:
            logs = evidence.logs[item.topic]
            report.add("raw", raw.problems(item.topic, found, logs, decoded[item.topic], report.numbers))
    records = _records(evidence, decoded)
    if evidence.staging is not None:
        _judge_staging(report, statement, evidence, evidence.staging, records, schemas)
    elif any(log.records for item in statement.outputs for log in evidence.logs[item.topic].values()):
        report.add("topic", iter(["an output topic holds records, and nothing is staged"]))
    if drained:
        report.add("rest", outputs.is_left(statement, evidence.logs, _reached(evidence), evidence.staging))
    if with_sinks:
        report.add("sinks", sinks.problems(statement, evidence, report.numbers, drained=drained))
    return report


def _records(evidence: Evidence, decoded: Mapping[str, Mapping[int, Mapping[int, Decoded]]]) -> dict[Place, Record]:
    """All input records that can be decoded; what retention has taken since, the raw pool alone knows."""
    found: dict[Place, Record] = {}
    for topic, logs in decoded.items():
        table = evidence.raw.get(topic)
        for row in (row for item in table.files for row in item.rows) if table else ():
            partition, offset = row["kafka"]["partition"], row["kafka"]["offset"]
            if partition in logs and offset < evidence.logs[topic][partition].low:
                found[topic, partition, offset] = Record(topic, partition, offset, 0, row.get("key"), row.get("value"))
        for partition, visible in logs.items():
            for offset, item in visible.items():
                if not item.bad:
                    found[topic, partition, offset] = Record(
                        topic, partition, offset, item.record.timestamp or 0, item.key, item.value
                    )
    return found


def _judge_staging(
    report: Report,
    statement: Statement,
    evidence: Evidence,
    staging: Staging,
    records: dict[Place, Record],
    schemas: Schemas,
) -> None:
    accounts, strange = account.read_accounts(staging)
    report.add("account", (f"the ledger has entries {kind}, which are not known here" for kind in strange))
    report.add("account", account.problems(statement, evidence, staging, accounts, records, report.numbers))
    report.add("account", account.missed_pairs(statement, accounts, records))
    report.add("account", held.problems(statement, accounts, records))
    report.add("sources", outputs.made_once(statement, staging, accounts))
    report.add("sources", outputs.made_at_all(statement, staging, accounts, records))
    report.add("sources", outputs.pairs(statement, staging, records))
    report.add("content", views.problems(statement, staging, accounts, records))
    times = {
        (topic, partition, offset): time
        for topic, found in evidence.raw.items()
        for partition in found.next
        for offset, time in raw.times(found, partition, evidence.logs[topic].get(partition)).items()
    }
    for item in statement.outputs:
        report.add("numbering", outputs.numbering(staging, item))
        report.add("content", outputs.content(statement, staging, item, records, report.numbers))
        report.add("order", outputs.order(staging, item, statement.place, times, records))
        logs = evidence.logs[item.topic]
        report.add("topic", outputs.published(staging, item, logs, schemas, evidence.published, report.numbers))


def _reached(evidence: Evidence) -> dict[tuple[str, int], tuple[int, int]]:
    seen = (
        {(row["topic"], row["partition"]): row["end"] for row in evidence.staging.of("seen")}
        if evidence.staging
        else {}
    )
    return {
        (topic, partition): (upcoming, seen.get((topic, partition), 0))
        for topic, found in evidence.raw.items()
        for partition, upcoming in found.next.items()
    }
