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
    """A rule whose definition differs from the last commit. ``parts``: the keys that changed; empty for a rule that is new,
    removed, renamed or moved. ``text``: the change in words."""

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
    digests = {name: _digest(part) for name, part in parts.items() if part not in (None, [], [[]])}
    if rule.group is None:
        return json.dumps({**digests, _PLACE: place})
    aliases = {side.name: [_digest(side.where), _digest(side.keys)] for side in rule.sides}
    return json.dumps({**digests, _ALIASES: aliases, _PLACE: place})


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
    old_fingerprints, changes, placed_rules = dict(head.rules), list[RuleChange](), list[tuple[int | None, Rule]]()
    for rule in rules:
        if rule.view is not None:
            continue
        old_fingerprint = old_fingerprints.pop(rule.name, None)
        is_renamed = old_fingerprint is None and rule.was is not None and rule.was in old_fingerprints
        if is_renamed:
            old_fingerprint = old_fingerprints.pop(rule.was or "")
        parts = _differences(old_fingerprint, rule) if old_fingerprint is not None else ()
        if old_fingerprint is not None and rule.part_of is None:
            placed_rules.append((json.loads(old_fingerprint).get(_PLACE), rule))
        change_text = f"changed ({', '.join(parts)})"
        if is_renamed:
            text = f"was {rule.was}{f', and {change_text}' if parts else ''}"
            changes.append(RuleChange(rule.name, parts, text))
        elif old_fingerprint is None:
            changes.append(RuleChange(rule.name, (), "is new"))
        elif parts:
            changes.append(RuleChange(rule.name, parts, change_text))
    return [*changes, *_moves(placed_rules), *(RuleChange(name, (), "is gone") for name in old_fingerprints)]


def _moves(rules: Sequence[tuple[int | None, Rule]]) -> Iterator[RuleChange]:
    """The rules that moved past other rules since the last commit. The list is the shortest that explains the present order.
    ``rules``: with the place of each at the last commit. Earlier versions kept no places.

    Rules that plainly take no record of each other may stand in any order.
    """
    swapped_pairs = [
        (behind, before)
        for at, (old, behind) in enumerate(rules)
        for other, before in rules[at + 1 :]
        if old is not None and other is not None and other < old and _may_share(behind, before)
    ]
    while swapped_pairs:
        counts = Counter(rule.name for pair in swapped_pairs for rule in pair)
        moved_name = max(counts, key=lambda name: counts[name])
        passed_names = [rule.name for rule, other in swapped_pairs if other.name == moved_name]
        names_ahead = [other.name for rule, other in swapped_pairs if rule.name == moved_name]
        sides = [("before", names_ahead), ("behind", passed_names)]
        text = " and ".join(f"{word} {', '.join(names)}" for word, names in sides if names)
        yield RuleChange(moved_name, (), f"now stands {text}")
        swapped_pairs = [pair for pair in swapped_pairs if moved_name not in (pair[0].name, pair[1].name)]


def _may_share(rule: Rule, other_rule: Rule) -> bool:
    """Whether a record may be taken by either of two rules."""
    # Spark's workers import this module. The parser of SQL would cost each of them memory.
    from zync_assets.pipeline_file.conditions import are_apart

    return any(
        side.topic == another.topic and not are_apart(side.where, another.where)
        for side in rule.sides
        for another in other_rule.sides
    )


def _differences(old_text: str, rule: Rule) -> tuple[str, ...]:
    """The keys of a rule whose digests differ, as the pipeline file spells them."""
    old: dict[str, Any] = json.loads(old_text)
    new: dict[str, Any] = json.loads(fingerprint(rule))
    ignored_names = {_PLACE, _ALIASES, "complete-when" if _CONDITION in old and _CONDITION in new else _CONDITION}
    names = {_CONDITION: "complete-when"}
    if rule.group is not None:
        names |= {"join-on": "group-by", "topics": "records"}
    if _ALIASES in old and _ALIASES in new:
        pairs = [(digests, new[_ALIASES].get(alias, digests)) for alias, digests in old[_ALIASES].items()]
        ignored_names |= {
            name
            for at, name in enumerate(("where", "join-on"))
            if all(old_digests[at] == new_digests[at] for old_digests, new_digests in pairs)
        }
    changed_names = [name for name in {**old, **new} if name not in ignored_names and old.get(name) != new.get(name)]
    return tuple(names.get(name, name) for name in changed_names)


def report_changes(pipeline: Pipeline, pool: str, head: Head, log: Callable[[str], object] | None) -> None:
    """Log the rules that changed since the last commit. ``log``: None logs nothing. EtlError if the pipeline file says that a
    change of rules stops ETL."""
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
    seen_topics = {topic for topic, _ in head.inputs}
    other_pools = [name for name in pipeline.staging_pools if name != pool]
    for rule in pipeline.rules_of(pool):
        is_known = rule.name in head.rules or rule.was is None or any(rule.was == name for name, _ in head.waiting)
        if is_known or not seen_topics.intersection(rule.topics):
            continue
        for other_pool in other_pools:
            state = staging.open_staging(pipeline.lake, other_pool)
            waiting = {} if state is None else state.head.waiting
            count = sum(count for (name, topic), count in waiting.items() if name == rule.was and topic in seen_topics)
            if count:
                raise EtlError(
                    f"pool {pool}: rule {rule.name} was {rule.was} of pool {other_pool}, where {count} records wait for it. Pools"
                    f" have an account each, and pool {pool} has seen these records. Nothing was done. Give the rule an output of"
                    f" pool {other_pool}; or leave `was` out, and only new records go by the rule; or make the account of pool"
                    f" {pool} by its present rules: {pipeline.command('rebuild', '--topic', rule.out)}"
                )


def renamed_rules(pipeline: Pipeline, pool: str, head: Head) -> tuple[str, ...]:
    """The names of rules for which records still wait: former names of present rules, and rules that the last commit lacked."""
    names = {rule for (rule, _), count in head.waiting.items() if count}
    rules = pipeline.rules_of(pool)
    # Commits of early versions have no rules.
    back = [rule.name for rule in rules if head.rules and rule.name not in head.rules]
    return tuple(name for name in dict.fromkeys([*(rule.was for rule in rules), *back]) if name in names)
