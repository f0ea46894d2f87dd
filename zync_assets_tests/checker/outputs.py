"""The outputs: numbered without a gap, each made of done records by its rule, in order, and as the topic has them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zync_assets_tests.checker import held
from zync_assets_tests.checker.account import Account, Place
from zync_assets_tests.checker.evidence import OutputFile, Row, Staging
from zync_assets_tests.checker.logs import Log, partition_of
from zync_assets_tests.checker.statement import Output, Statement
from zync_assets_tests.checker.wire import BAD, Schemas
from zync_assets_tests.model import OneToOne, Record


def sources(row: Row) -> list[Place]:
    return [(item["topic"], item["partition"], item["offset"]) for item in row["source"] or ()]


def numbering(staging: Staging, output: Output) -> Iterator[str]:
    """Rows of each partition go from base to before next, file by file, each once."""
    known = {row["partition"]: row for row in staging.of("output") if row["topic"] == output.topic}
    files = staging.outputs.get(output.topic, [])
    if sorted(known) != list(range(len(known))):
        yield f"{output.topic}: the account has the output positions {sorted(known)}"
        return
    reached = {partition: row["first"] for partition, row in known.items()}
    for item in files:
        for row in item.rows:
            topic, partition, offset = (row["kafka"][name] for name in ("topic", "partition", "offset"))
            if topic != output.topic or offset != reached.get(partition):
                yield f"{output.topic}: {topic}/{partition}: {offset} is staged where {reached.get(partition)} should be"
            reached[partition] = offset + 1
        yield from _statistics(item)
    for partition, row in known.items():
        if reached[partition] != row["end"]:
            yield f"{output.topic}: staging goes up to {reached[partition]}, and the account's next number is {row['end']}"


def _statistics(item: OutputFile) -> Iterator[str]:
    offsets = [row["kafka"]["offset"] for row in item.rows]
    if len({row["kafka"]["partition"] for row in item.rows}) > 1:
        yield f"file {item.file.path.name}: it holds outputs of several partitions"
    if (item.file.records, item.file.low, item.file.high) != (len(offsets), offsets[0], offsets[-1]):
        yield f"file {item.file.path.name}: its statistics are not what it holds"


def made_once(statement: Statement, staging: Staging, accounts: Mapping[tuple[str, int], Account]) -> Iterator[str]:
    """Each output is of done records. Each done record is in exactly one output, but for a view's, which may be in many."""
    made: Counter[Place] = Counter()
    for topic in sorted(staging.outputs):
        for row in staging.current(topic):
            found = sources(row)
            if not found:
                yield f"{topic}: offset {row['kafka']['offset']} was made of nothing"
            made.update(found)
            for place in found:
                account = accounts.get(place[:2])
                kind = account.kind(place[2]) if account else None
                if kind != "done":
                    yield f"{topic}: offset {row['kafka']['offset']} was made of {place}, which is {kind or 'in no class'}"
    for place, times in sorted(made.items()):
        if times > 1 and place[0] not in statement.tables:
            yield f"{place} is in {times} outputs"


def made_at_all(
    statement: Statement, staging: Staging, accounts: Mapping[tuple[str, int], Account], records: Mapping[Place, Record]
) -> Iterator[str]:
    """Done records without an output, apart from those whose source row ended, and from those of a view's table."""
    made = {place for topic in staging.outputs for row in staging.current(topic) for place in sources(row)}
    for topic, partition, offset in sorted(records):
        if topic in statement.tables or offset < staging.rebuilt(topic, partition):
            continue
        account = accounts.get((topic, partition))
        is_made = (topic, partition, offset) in made
        if account and account.kind(offset) == "done" and is_made == (offset in account.ended):
            yield f"{topic}/{partition}: offset {offset} is done and {'ended, and in an' if is_made else 'in no'} output"


def content(
    statement: Statement, staging: Staging, output: Output, records: Mapping[Place, Record], numbers: Counter[str]
) -> Iterator[str]:
    """Check that each output equals the result of its rule for the output's sources. ``views`` checks those of views."""
    if statement.is_view(output.topic):
        return
    texts = {row["rule"]: json.loads(row["text"]) for row in staging.of("schema") if row["topic"] == output.topic}
    for row in staging.current(output.topic):
        numbers["outputs"] += 1
        place = f"{output.topic}: offset {row['kafka']['offset']}"
        rule, of = statement.rule(row["rule"]), [records.get(source) for source in sources(row)]
        if rule is None or rule.out != output.topic or any(item is None for item in of):
            yield f"{place} is of the rule {row['rule']} and of {sources(row)}: there is no such rule or record"
            continue
        found: list[Any] = of
        takers = [statement.rule_of(item) for item in found]
        topics = [rule.topic] if isinstance(rule, OneToOne) else [rule.left, rule.right]
        if [item.topic for item in found] != topics or any(taker is not rule for taker in takers):
            yield f"{place}: the rule {rule.name} does not take {sources(row)}"
            continue
        if row["schema"] not in texts:
            yield f"{place} has the output schema {row['schema']}, which the account does not have"
            continue
        for side, made in (("key", rule.key(*found)), ("value", rule.value(*found))):
            if not equal(staged(row, output.topic, side, texts[row["schema"]]), made):
                yield f"{place}: its {side} is not what the rule {rule.name} makes of {sources(row)}"


def staged_sides(staging: Staging, topic: str) -> Iterator[tuple[Row, Any, Any]]:
    """The rows of an output topic, each with its key and value as its output schema has them."""
    texts = {row["rule"]: json.loads(row["text"]) for row in staging.of("schema") if row["topic"] == topic}
    for row in (row for item in staging.outputs.get(topic, []) for row in item.rows):
        text = texts[row["schema"]]
        yield row, staged(row, topic, "key", text), staged(row, topic, "value", text)


def staged(row: Row, topic: str, side: str, text: Mapping[str, Any]) -> Any:
    """One side of a staged row: the fields of its output schema, without the fields that the row omits."""
    value, schema = row.get(f"{side}:{topic}"), text[side]["schema"]
    if value is None or schema is None:
        return None
    return _shaped(value, schema, f"{side}.", set(row.get("left_out") or ()))


def _shaped(value: Any, schema: Any, prefix: str, left_out: set[str]) -> Any:
    if isinstance(schema, list):
        schema = next((item for item in schema if item != "null"), None)
    if not isinstance(value, dict) or not isinstance(schema, dict) or schema.get("type") != "record":
        return value
    return {
        item["name"]: _shaped(value.get(item["name"]), item["type"], f"{prefix}{item['name']}.", left_out)
        for item in schema["fields"]
        if prefix + item["name"] not in left_out
    }


def equal(one: Any, other: Any) -> bool:
    """Equal with the same fields: a null and a missing field differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


def pairs(statement: Statement, staging: Staging, records: Mapping[Place, Record]) -> Iterator[str]:
    """Of a join key whose records lie in one partition a side, the k-th left one is with the k-th right one."""
    joined: dict[tuple[str, object], list[tuple[Place, Place]]] = defaultdict(list)
    for topic in staging.outputs:
        for row in staging.current(topic):
            rule, of = statement.rule(row["rule"]), sources(row)
            if rule is not None and not isinstance(rule, OneToOne) and len(of) == 2 and of[0] in records:
                joined[rule.name, rule.join(records[of[0]])].append((of[0], of[1]))
                if of[1] in records and rule.join(records[of[1]]) != rule.join(records[of[0]]):
                    yield f"rule {rule.name}: {of[0]} and {of[1]} were joined and have different join keys"
    for (rule_name, key), found in joined.items():
        lefts, rights = zip(*found, strict=True)
        if len({place[1] for place in lefts}) == 1 == len({place[1] for place in rights}):
            for left, right in zip(sorted(lefts), sorted(rights), strict=True):
                if (left, right) not in found:
                    yield f"rule {rule_name}, join key {key}: {left} is not joined with {right}"


def order(
    staging: Staging,
    output: Output,
    place_of: Callable[[str], int],
    times: Mapping[Place, int],
    records: Mapping[Place, Record],
) -> Iterator[str]:
    """Check the order of outputs within a batch: by time, place, partition and offset of the completing input.

    A record of a held output follows the outputs of the earlier records of its source row. Skips outputs with an input that
    retention removed, because the input's time is lost, and the records of a batch that may follow such an output.
    """
    cuts, before, lost = staging.cuts.get(output.topic, set()), None, False
    reached: dict[held.Row, list[tuple[Place, tuple[int, int, int, int]]]] = defaultdict(list)
    partition = 0
    for row in staging.current(output.topic):
        offset = row["kafka"]["offset"]
        if (row["kafka"]["partition"], offset) in cuts or row["kafka"]["partition"] != partition:
            before, lost, partition = None, False, row["kafka"]["partition"]
            reached.clear()
        found = sources(row)
        if any(of not in times for of in found):
            lost = output.held
            continue
        if lost and len(found) == 1:
            continue
        possible = max((times[of], place_of(of[0]), of[1], of[2]) for of in found)
        rows = [(of, held.row_of(records[of])) for of in found if output.held and of in records]
        if len(found) == 1:
            earlier = [at for of, own in rows if own is not None for other, at in reached[own] if other[2] < of[2]]
            possible = max([possible, *earlier])
        for of, own in rows:
            if own is not None:
                reached[own].append((of, possible))
        if before is not None and possible < before:
            yield f"{output.topic}: offset {offset} became possible at {possible}, before the output ahead of it"
        before = possible


def published(
    staging: Staging,
    output: Output,
    logs: Mapping[int, Log],
    schemas: Schemas,
    marks: Mapping[str, int],
    numbers: Counter[str],
) -> Iterator[str]:
    """The record at offset k of the topic is the one that staging numbers k; nothing else is in the topic."""
    positions = {row["partition"]: row for row in staging.of("output") if row["topic"] == output.topic}
    for partition, log in logs.items():
        place = output.topic if len(logs) == 1 else f"{output.topic}/{partition}"
        rows = {
            row["kafka"]["offset"]: row
            for item in staging.outputs.get(output.topic, [])
            for row in item.rows
            if row["kafka"]["partition"] == partition
        }
        position = positions.get(partition)
        base, end = (position["first"], position["end"]) if position else (0, 0)
        yield from _equal(place, output, log, rows, base, end, _texts(staging, output), schemas, numbers)
        if len(positions) > 1:
            for record in (record for record in log.records if record.offset >= base):
                if partition != (partition_of(record.key, len(logs)) if record.key is not None else 0):
                    yield f"{place}: the key of the record at offset {record.offset} is of another partition"
        ids = (f"zync:{name}:{output.topic}:{partition}" for name in ("verified", "window"))
        verified, window = (marks.get(name, base) for name in ids)
        if verified > log.end or verified > end or window > end:
            yield (
                f"{place}: published up to {verified}, announced {window}, and the topic ends at {log.end}, staging at {end}"
            )


def _texts(staging: Staging, output: Output) -> dict[str, Any]:
    return {row["rule"]: json.loads(row["text"]) for row in staging.of("schema") if row["topic"] == output.topic}


def _equal(
    place: str,
    output: Output,
    log: Log,
    rows: Mapping[int, Row],
    base: int,
    end: int,
    texts: Mapping[str, Any],
    schemas: Schemas,
    numbers: Counter[str],
) -> Iterator[str]:
    held = {record.offset: record for record in log.records if record.offset >= base}
    numbers["published"] += len(held)
    for offset in range(max(base, log.low), log.end):
        if offset not in held:
            yield f"{place}: there is no record at offset {offset}"
        elif offset not in rows:
            yield f"{place}: the record at offset {offset} is not in staging, which ends at {end}"
        else:
            record, row = held[offset], rows[offset]
            text = texts.get(row["schema"])
            for side, form, payload in (("key", output.key, record.key), ("value", output.value, record.value)):
                value = schemas.decode(form, payload)
                if text is None or value is BAD or not equal(value, staged(row, output.topic, side, text)):
                    yield f"{place}: the {side} of the record at offset {offset} is not staging's"
            own = tuple((pair["key"], pair["value"]) for pair in row.get("headers") or ())
            if text is not None and not text.get("provenance") and record.headers != own:
                yield f"{place}: the headers of the record at offset {offset} are not staging's"


def is_left(
    statement: Statement,
    logs: Mapping[str, Mapping[int, Log]],
    reached: Mapping[tuple[str, int], Sequence[int]],
    staging: Staging | None,
) -> Iterator[str]:
    """The undone work of an idle pipeline. ``reached``: input partition → (next offset, seen)."""
    for item in statement.inputs:
        for partition, log in logs[item.topic].items():
            upcoming, seen = reached.get((item.topic, partition), (0, 0))
            visible = any(record.offset >= min(upcoming, seen) for record in log.records)
            if visible:
                yield f"{item.topic}/{partition}: it ends at {log.end}, is ingested up to {upcoming}, transformed up to {seen}"
    for row in staging.of("output") if staging else ():
        log = logs[row["topic"]].get(row["partition"])
        if row["end"] > (log.end if log else row["first"]):
            yield f"{row['topic']}: staging ends at {row['end']}, the topic at {log.end if log else 'nothing'}"
