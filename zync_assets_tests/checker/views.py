"""Views: the output topic, folded by key, is the view's result for the latest rows below seen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zync_assets_tests.checker import outputs
from zync_assets_tests.checker.account import Account, Place
from zync_assets_tests.checker.evidence import Staging
from zync_assets_tests.checker.statement import Statement
from zync_assets_tests.model import Record


def problems(
    statement: Statement, staging: Staging, accounts: Mapping[tuple[str, int], Account], records: Mapping[Place, Record]
) -> Iterator[str]:
    """Keys whose last record is not the result, and records that change nothing."""
    for view in statement.views:
        rows = {topic: _latest(topic, accounts, records) for topic in view.tables}
        expected = {_text(key): value for key, value in view.result(rows)}
        found: dict[str, Any] = {}
        for row, key, value in outputs.staged_sides(staging, view.out):
            if value == found.get(_text(key)):
                yield f"{view.out}: offset {row['kafka']['offset']} repeats the record before it, of the key {_text(key)}"
            found[_text(key)] = value
        for key in sorted({*found, *expected}):
            if not outputs.equal(found.get(key), expected.get(key)):
                yield f"{view.out}: the key {key} has {found.get(key)}; the view's result is {expected.get(key)}"


def _latest(
    topic: str, accounts: Mapping[tuple[str, int], Account], records: Mapping[Place, Record]
) -> dict[str, dict[str, Any]]:
    """Key → the row of the key's last record that is done. The records are envelopes of Debezium and tombstones."""
    found: dict[str, dict[str, Any]] = {}
    for (name, partition, offset), record in sorted(records.items()):
        account = accounts.get((name, partition))
        if name != topic or account is None or account.kind(offset) != "done":
            continue
        if record.value is None or record.value["op"] == "d" or record.value["after"] is None:
            found.pop(_text(record.key), None)
        else:
            found[_text(record.key)] = record.value["after"]
    return found


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
