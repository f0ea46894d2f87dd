"""Held outputs: what waits behind an earlier record of its source row, and what ended with the row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from zync_assets_tests.checker.account import Account, Place
from zync_assets_tests.checker.statement import Statement
from zync_assets_tests.model import OneToOne, Pair, Record

Row = tuple[str, str]


def row_of(record: Record) -> Row | None:
    """The source row of a record: its topic and key. A record without a key has none."""
    return None if record.key is None else (record.topic, repr(record.key))


def problems(
    statement: Statement, accounts: Mapping[tuple[str, int], Account], records: Mapping[Place, Record]
) -> Iterator[str]:
    """Records that wait behind nothing, and records that ended without a delete of their row."""
    rows: dict[Row, list[Record]] = defaultdict(list)
    for record in records.values():
        if (row := row_of(record)) is not None:
            rows[row].append(record)
    for (topic, partition), account in sorted(accounts.items()):
        places = {*account.ended, *(offset for offset in account.pending if account.waits(offset))}
        for offset in sorted(places):
            record = records.get((topic, partition, offset))
            rule = None if record is None else statement.rule_of(record)
            if record is None or rule is None:
                continue
            row = row_of(record)
            own = [other for other in rows.get(row, ()) if other is not record] if row is not None else []
            name = f"{topic}/{partition}: offset {offset}"
            if not statement.is_held(rule) and (offset in account.ended or isinstance(rule, OneToOne)):
                yield f"{name} waits or ended, and its output is not held"
            elif offset not in account.ended:
                if isinstance(rule, OneToOne) and not any(
                    _is_before(record, other, accounts, statement) for other in own
                ):
                    yield f"{name} is pending, and no earlier record of its source row is"
            elif _deletes(statement, record):
                if not any(other.place[2] in accounts[other.place[:2]].ended for other in own):
                    yield f"{name} deletes its source row without an output, and no record of the row ended"
            elif not any(_deletes(statement, other) and _may_follow(record, other) for other in own):
                yield f"{name} ended, and no delete of its source row comes after it"


def _is_before(
    record: Record, other: Record, accounts: Mapping[tuple[str, int], Account], statement: Statement
) -> bool:
    """Whether another record of the row is pending for its counterpart, and may come before the record."""
    account = accounts.get((other.topic, other.partition))
    waits = account is not None and account.waits(other.offset)
    return waits and _may_follow(other, record) and isinstance(statement.rule_of(other), Pair)


def _may_follow(record: Record, later: Record) -> bool:
    return record.partition != later.partition or record.offset < later.offset


def _deletes(statement: Statement, record: Record) -> bool:
    rule = statement.rule_of(record)
    if rule is None:
        return record.value is None or (isinstance(record.value, dict) and record.value.get("op") == "d")
    return isinstance(rule, OneToOne) and rule.value(record) is None
