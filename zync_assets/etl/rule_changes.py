"""Edits of rules: each ETL commit keeps the fingerprints of the pool's rules, and the next one compares them.

A fingerprint has a digest for each part of a rule, so that a message can name the parts that changed. It has the rule's place
too: of two rules that would take a record, the first one gets it. Views have definitions of their own (``etl.views``), and no
fingerprints.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zync_assets.errors import EtlError
from zync_assets.lake import staging
from zync_assets.lake.head import Head
from zync_assets.pipeline import Pipeline, Rule

_KEPT = "New records go by the new rules; staged outputs and their numbers stay as they are."


@dataclass(frozen=True)
class RuleChange:
    """One rule of which the pipeline file says something else than at the last commit.

    ``parts``: the keys that changed; empty for a rule that is new, gone, renamed or moved. ``text``: the change in words.
    """

    rule: str
    parts: tuple[str, ...]
    text: str


_PLACE = "place"
_CONDITION = "condition"
"""``complete-when`` alone. Fingerprints of earlier versions have it together with the aggregates of all parts."""


_ALIASES = "aliases"
"""Alias → the digests of the ``where`` and the key of its records, for a group. A topic that joins or leaves ``records`` changes
none of them. Earlier versions kept the digests of all aliases together alone."""


def fingerprint(rule: Rule, place: int = 0) -> str:
    """The parts of a rule with a digest each, and its place among the rules of its pool, as JSON."""
    parts: dict[str, object] = {
        "type": rule.kind,
        "topics": [(side.name, side.topic) for side in rule.sides],
        "where": [side.where for side in rule.sides],
        "join-on": [side.keys for side in rule.sides],
        "out": rule.out,
        "key": rule.key,
        "value": rule.value,
        "headers": rule.headers,
        "shape": rule.keep,
        "lookup": [repr(item) for item in rule.lookups],
        "zed": repr(rule.zed.records) if rule.zed is not None else None,
        "complete-when": repr(rule.group) if rule.group is not None else None,
        _CONDITION: rule.group.complete if rule.group is not None else None,
        "expire-after": repr(rule.expiry) if rule.expiry is not None else None,
        "explode": rule.explode,
    }
    found = {name: _digest(part) for name, part in parts.items() if part not in (None, [], [[]])}
    if rule.group is None:
        return json.dumps({**found, _PLACE: place})
    aliases = {side.name: [_digest(side.where), _digest(side.keys)] for side in rule.sides}
    return json.dumps({**found, _ALIASES: aliases, _PLACE: place})


def _digest(part: object) -> str:
    text = json.dumps(part, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def fingerprints(rules: Iterable[Rule]) -> dict[str, str]:
    """Name → fingerprint of each rule but views."""
    return {rule.name: fingerprint(rule, place) for place, rule in enumerate(rules) if rule.view is None}


def rule_changes(rules: Iterable[Rule], head: Head) -> list[RuleChange]:
    """The changes of a pool's rules since its last commit. Empty if the commit is of a version that kept no fingerprints."""
    if not head.rules:
        return []
    known, found, kept = dict(head.rules), list[RuleChange](), list[tuple[int | None, Rule]]()
    for rule in rules:
        if rule.view is not None:
            continue
        before = known.pop(rule.name, None)
        renamed = before is None and rule.was is not None and rule.was in known
        if renamed:
            before = known.pop(rule.was or "")
        parts = _differences(before, rule) if before is not None else ()
        if before is not None and rule.part_of is None:
            kept.append((json.loads(before).get(_PLACE), rule))
        changed = f"changed ({', '.join(parts)})"
        if renamed:
            text = f"was {rule.was}{f', and {changed}' if parts else ''}"
            found.append(RuleChange(rule.name, parts, text))
        elif before is None:
            found.append(RuleChange(rule.name, (), "is new"))
        elif parts:
            found.append(RuleChange(rule.name, parts, changed))
    return [*found, *_moves(kept), *(RuleChange(name, (), "is gone") for name in known)]


def _moves(rules: Sequence[tuple[int | None, Rule]]) -> Iterator[RuleChange]:
    """The rules that now stand before others that they stood behind, or behind others, as few of them as explain the order.

    ``rules``: with the place of each at the last commit. Earlier versions kept no places. Rules that plainly take no record
    of each other may stand in any order.
    """
    swapped = [
        (behind, before)
        for at, (old, behind) in enumerate(rules)
        for other, before in rules[at + 1 :]
        if old is not None and other is not None and other < old and _may_share(behind, before)
    ]
    while swapped:
        counts = Counter(rule.name for pair in swapped for rule in pair)
        moved = max(counts, key=lambda name: counts[name])
        passed = [rule.name for rule, other in swapped if other.name == moved]
        ahead = [other.name for rule, other in swapped if rule.name == moved]
        sides = [("before", ahead), ("behind", passed)]
        text = " and ".join(f"{word} {', '.join(names)}" for word, names in sides if names)
        yield RuleChange(moved, (), f"now stands {text}")
        swapped = [pair for pair in swapped if moved not in (pair[0].name, pair[1].name)]


def _may_share(one: Rule, other: Rule) -> bool:
    """Whether a record may be taken by either of two rules."""
    # Spark's workers import this module. The parser of SQL would cost each of them memory.
    from zync_assets.pipeline_file.conditions import are_apart

    return any(
        side.topic == another.topic and not are_apart(side.where, another.where)
        for side in one.sides
        for another in other.sides
    )


def _differences(before: str, rule: Rule) -> tuple[str, ...]:
    """The keys of a rule whose digests differ, as the pipeline file spells them."""
    old: dict[str, Any] = json.loads(before)
    new: dict[str, Any] = json.loads(fingerprint(rule))
    ignored = {_PLACE, _ALIASES, "complete-when" if _CONDITION in old and _CONDITION in new else _CONDITION}
    names = {_CONDITION: "complete-when"}
    if rule.group is not None:
        names |= {"join-on": "group-by", "topics": "records"}
    if _ALIASES in old and _ALIASES in new:
        pairs = [(digests, new[_ALIASES].get(alias, digests)) for alias, digests in old[_ALIASES].items()]
        ignored |= {
            name for at, name in enumerate(("where", "join-on")) if all(one[at] == other[at] for one, other in pairs)
        }
    changed = [name for name in {**old, **new} if name not in ignored and old.get(name) != new.get(name)]
    return tuple(names.get(name, name) for name in changed)


def report_changes(pipeline: Pipeline, pool: str, head: Head, log: Callable[[str], object] | None) -> None:
    """Tell which rules changed since the last commit. ``log``: None tells nobody.

    EtlError if the pipeline file says that a change of rules stops ETL.
    """
    changes = rule_changes(pipeline.rules_of(pool), head)
    if not changes:
        return
    said = "; ".join(f"rule {change.rule} {change.text}" for change in changes)
    place = f"pool {pool}: since batch {head.batch}, {said}."
    if pipeline.on_rule_change == "fail":
        raise EtlError(
            f"{place} Nothing was done, because the pipeline file has `on-rule-change: fail`. Put the old rules back, or accept"
            " the new ones: leave the key out until the next batch is committed."
        )
    if log is not None:
        log(f"{place} {_KEPT}")


def refuse_moves(pipeline: Pipeline, pool: str, head: Head) -> None:
    """EtlError for a rule that is new in the pool, and whose former name has waiting records in another pool. The account of
    this pool has its own classes for these records.

    A pool that has not seen the rule's topics reads all their records, and takes any rule.
    """
    seen = {topic for topic, _ in head.inputs}
    others = [name for name in pipeline.staging_pools if name != pool]
    for rule in pipeline.rules_of(pool):
        is_known = rule.name in head.rules or rule.was is None or any(rule.was == name for name, _ in head.waiting)
        if is_known or not seen.intersection(rule.topics):
            continue
        for other in others:
            state = staging.open_staging(pipeline.lake, other)
            waiting = {} if state is None else state.head.waiting
            count = sum(count for (name, topic), count in waiting.items() if name == rule.was and topic in seen)
            if count:
                raise EtlError(
                    f"pool {pool}: rule {rule.name} was {rule.was} of pool {other}, where {count} records wait for it. Pools have"
                    f" an account each, and pool {pool} has seen these records. Nothing was done. Give the rule an output of"
                    f" pool {other}; or leave `was` out, and only new records go by the rule; or make the account of pool"
                    f" {pool} by its present rules: {pipeline.command('rebuild', '--topic', rule.out)}"
                )


def renamed_rules(pipeline: Pipeline, pool: str, head: Head) -> tuple[str, ...]:
    """The names of rules for which records still wait: former names of present rules, and rules that the last commit lacked."""
    names = {rule for (rule, _), count in head.waiting.items() if count}
    rules = pipeline.rules_of(pool)
    # Commits of early versions have no rules.
    back = [rule.name for rule in rules if head.rules and rule.name not in head.rules]
    return tuple(name for name in dict.fromkeys([*(rule.was for rule in rules), *back]) if name in names)
