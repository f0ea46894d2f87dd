"""The account: below seen, every existing record of each input is in exactly one class, and in the right one."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from zync_assets_tests.checker.evidence import ABSENT, Evidence, Raw, Row, Staging
from zync_assets_tests.checker.statement import Statement
from zync_assets_tests.model import Pair, Record

RANGES = ("done", "unmatched", "dropped", "quarantined", "expired")

Place = tuple[str, int, int]


@dataclass
class Account:
    """One input partition's ledger. ``spans``: (first, end, class, entry), sorted. ``ended``: the offsets of records that are
    done without an output, since their source row was deleted."""

    spans: list[tuple[int, int, str, Row]] = field(default_factory=list)
    pending: dict[int, Row] = field(default_factory=dict)
    completed: Counter[int] = field(default_factory=Counter)
    became: dict[int, str] = field(default_factory=dict)
    twice: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    def kind(self, offset: int) -> str | None:
        """The class of an offset now."""
        span = self._span(offset)
        if span is None:
            return None
        kind = span[2]
        return self.became.get(offset, "done") if kind == "pending" and offset in self.completed else kind

    def waits(self, offset: int) -> bool:
        return offset in self.pending and offset not in self.completed

    def failed(self, offset: int) -> bool:
        """Whether ETL put the record into quarantine: the entry says why. It is in the raw pool like any other."""
        span = self._span(offset)
        return span is not None and span[2] == "quarantined" and span[3]["text"] is not None

    def _span(self, offset: int) -> tuple[int, int, str, Row] | None:
        at = bisect_right(self.spans, offset, key=lambda span: span[0]) - 1
        return self.spans[at] if at >= 0 and offset < self.spans[at][1] else None


def read_accounts(staging: Staging) -> tuple[dict[tuple[str, int], Account], list[str]]:
    """(input topic, partition) → account, and the kinds of entries that are not known here."""
    accounts: dict[tuple[str, int], Account] = defaultdict(Account)
    strange: set[str] = set()
    for row in staging.ledger:
        account = accounts[row["topic"], row["partition"]]
        if row["kind"] == "ended":
            account.spans.append((row["first"], row["end"], "done", row))
            account.ended.update(range(row["first"], row["end"]))
        elif row["kind"] in RANGES:
            account.spans.append((row["first"], row["end"], row["kind"], row))
        elif row["kind"] == "pending":
            if row["first"] in account.pending:
                account.twice.append(row["first"])
            account.pending[row["first"]] = row
            account.spans.append((row["first"], row["end"], "pending", row))
        elif row["kind"] == "completed":
            account.completed[row["first"]] += 1
            if row["text"] == "ended":
                account.ended.add(row["first"])
            elif row["text"] is not None:
                account.became[row["first"]] = row["text"]
        else:
            strange.add(row["kind"])
    for account in accounts.values():
        account.spans.sort(key=lambda span: span[:2])
    return dict(accounts), sorted(strange)


def problems(
    statement: Statement,
    evidence: Evidence,
    staging: Staging,
    accounts: Mapping[tuple[str, int], Account],
    records: Mapping[Place, Record],
    numbers: Counter[str],
) -> Iterator[str]:
    """``records``: what can be decoded of the inputs."""
    if staging.heads != 1:
        yield f"the account has {staging.heads} heads"
    seen = {(row["topic"], row["partition"]): row for row in staging.of("seen")}
    counted = {(row["topic"], row["partition"], row["rule"]): row["count"] for row in staging.of("counted")}
    found: Counter[tuple[str, int, str]] = Counter()
    blind: set[tuple[str, int]] = set()
    for place in sorted({*seen, *accounts}):
        topic, partition = place
        raw, position, account = evidence.raw.get(topic), seen.get(place), accounts.get(place, Account())
        name = f"{topic}/{partition}"
        if raw is None or position is None:
            yield f"{name}: it is in the account without a raw table or without a position"
            continue
        yield from (f"{name}: {text}" for text in _cover(account, position))
        yield from (f"{name}: {text}" for text in _position(raw, partition, position))
        held = _existing(raw, partition, position["end"])
        gone = _removed(evidence, topic, partition, position["first"])
        existing = dict.fromkeys(gone or (), False) | held
        for offset, bad in sorted(existing.items()):
            kind = account.kind(offset)
            found[topic, partition, kind or "no class"] += 1
            if not bad and (account.failed(offset) or (kind == "expired" and offset not in held)):
                continue
            if (text := _wrong(statement, records.get((topic, partition, offset)), bad, kind)) is not None:
                yield f"{name}: offset {offset} {text}"
        for offset in account.pending:
            if offset not in held and not (offset in account.completed and offset < raw.kept.get(partition, 0)):
                yield f"{name}: offset {offset} is pending and not in the raw pool"
        if gone is None:
            blind.add(place)
            continue
        yield from (f"{name}: {text}" for text in _entries(account, existing, raw, partition))
        if position["count"] != len(existing):
            yield f"{name}: {position['count']} records were counted below seen, and {len(existing)} are there"
    for (topic, partition, kind), count in sorted(((Counter(counted) - found) + (found - Counter(counted))).items()):
        if (topic, partition) in blind:
            continue
        yield f"{topic}/{partition}: {counted.get((topic, partition, kind), 0)} records were counted as {kind}, off by {count}"
    yield from _waiting(staging, accounts)
    for (_, _, kind), count in found.items():
        numbers[kind] += count


def _removed(evidence: Evidence, topic: str, partition: int, first: int) -> set[int] | None:
    """The offsets from ``first`` on that the raw pool's retention removed: the topic still has them; None where it has not."""
    raw, log = evidence.raw[topic], evidence.logs[topic].get(partition)
    kept = raw.kept.get(partition, 0)
    if first < kept and (log is None or log.low > first):
        return None
    absent = [row for row in raw.quarantine if row["stage"] in ABSENT and row["kafka"]["partition"] == partition]
    left_out = [range(row["kafka"]["offset"], row["end"]) for row in absent]
    offsets = {item.offset for item in log.records if first <= item.offset < kept} if log else set[int]()
    return {offset for offset in offsets if not any(offset in span for span in left_out)}


def _existing(raw: Raw, partition: int, seen: int) -> dict[int, bool]:
    """Offset → whether it is in quarantine, for all records below seen."""
    rows = [(row, False) for item in raw.files for row in item.rows]
    rows += [(row, True) for row in raw.quarantine if row["stage"] not in ABSENT]
    return {
        row["kafka"]["offset"]: bad
        for row, bad in rows
        if row["kafka"]["partition"] == partition and row["kafka"]["offset"] < seen
    }


def _cover(account: Account, position: Row) -> Iterator[str]:
    """The ledger's entries follow each other from the first offset to seen."""
    reached = position["first"]
    for first, end, kind, _ in account.spans:
        if first > reached:
            yield f"offsets {reached} to {first - 1} are in no class"
        elif first < reached:
            yield f"offset {first} is in the account twice, as {kind} too"
        if kind == "pending" and end != first + 1:
            yield f"a pending entry goes from {first} to {end}"
        reached = max(reached, end)
    if reached != position["end"]:
        yield f"the account goes up to {reached}, and seen is {position['end']}"
    for offset in account.twice:
        yield f"offset {offset} is pending twice"
    for offset, times in account.completed.items():
        if times > 1 or offset not in account.pending:
            yield f"offset {offset} was completed {times} times, and was {'' if offset in account.pending else 'not '}pending"


def _position(raw: Raw, partition: int, position: Row) -> Iterator[str]:
    upcoming = raw.next.get(partition, 0)
    first, kept = raw.first.get(partition, -1), raw.kept.get(partition, 0)
    # A staging pool that came after retention removed something begins there.
    begins = position["first"] == first or first < position["first"] <= kept
    if position["end"] > upcoming or position["end"] < kept or not begins:
        yield (
            f"the account goes from {position['first']} to {position['end']}, the raw pool from"
            f" {raw.first.get(partition)} to {upcoming}"
        )
    if position["text"] is not None and position["text"] != raw.id:
        yield f"the account is of the raw table {position['text']}, and {raw.id} is there"


def _wrong(statement: Statement, record: Record | None, bad: bool, kind: str | None) -> str | None:
    """The error text for a record in a wrong class; None for the right class."""
    if kind is None:
        return "is in no class"
    if bad or kind == "quarantined":
        return None if bad and kind == "quarantined" else f"is {kind}, and {'in' if bad else 'not in'} quarantine"
    if record is None:
        return None
    rule = statement.rule_of(record)
    if record.topic in statement.tables:
        return None if kind == "done" else f"is {kind}; a record of a view's table is done"
    if isinstance(rule, Pair) or (rule is not None and statement.is_held(rule)):
        expected = {"done", "pending"}
    elif rule is not None:
        expected = {"done"}
    elif record.value is None or statement.inputs[statement.place(record.topic)].drops:
        expected = {"dropped"}
    else:
        expected = {"unmatched"}
    if kind not in expected:
        return f"is {kind}; by its rule, {rule.name if rule else 'none'}, it is {' or '.join(sorted(expected))}"
    return None


def _entries(account: Account, existing: Mapping[int, bool], raw: Raw, partition: int) -> Iterator[str]:
    """Counts of ledger entries; what retention removed is counted by the entry."""
    lost = [row for row in raw.quarantine if row["stage"] in ABSENT and row["kafka"]["partition"] == partition]
    offsets = sorted(existing)
    for first, end, kind, row in account.spans:
        if row["count"] is None or any(first < item["end"] and item["kafka"]["offset"] < end for item in lost):
            continue
        held = bisect_right(offsets, end - 1) - bisect_right(offsets, first - 1)
        if row["count"] != held:
            yield f"the entry {kind} {first} to {end} counts {row['count']} records, and {held} are there"


def _waiting(staging: Staging, accounts: Mapping[tuple[str, int], Account]) -> Iterator[str]:
    found: Counter[tuple[str, str]] = Counter()
    for (topic, _), account in accounts.items():
        found.update((row["rule"], topic) for at, row in account.pending.items() if at not in account.completed)
    counted = Counter({(row["rule"], row["topic"]): row["count"] for row in staging.of("waiting")})
    for rule, topic in sorted((found - counted) | (counted - found)):
        yield f"{counted[rule, topic]} records of {topic} were counted as waiting for {rule}, and {found[rule, topic]} are"


def missed_pairs(
    statement: Statement, accounts: Mapping[tuple[str, int], Account], records: Mapping[Place, Record]
) -> Iterator[str]:
    """Records that wait for each other, and a join key that the ledger gives another hash on the other side."""
    waiting: dict[tuple[str, object], set[str]] = defaultdict(set)
    for (topic, partition), account in sorted(accounts.items()):
        for offset, row in account.pending.items():
            record, rule = records.get((topic, partition, offset)), statement.rule(row["rule"])
            if offset in account.completed or record is None or not isinstance(rule, Pair):
                continue
            join = rule.join(record)
            if (join is None) != (row["hash"] is None):
                yield f"{topic}/{partition}: offset {offset} has the join key {join} and the hash {row['hash']}"
            if join is not None:
                waiting[rule.name, join].add(topic)
    for (rule, join), topics in waiting.items():
        if len(topics) > 1:
            yield f"rule {rule}: records with the join key {join} wait on both sides"
