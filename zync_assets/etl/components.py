"""The independent components of a staging pool: rules that share no topic with the rules of other components.

Each row of a query has the columns of all output topics of the query. The plan of a single query therefore grows with the square
of the number of topics. A batch of one bucket has a query for each few components.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from zync_assets.pipeline import Rule

MOST_TOPICS = 16
"""Topics, inputs and outputs, of the components that share a query. A larger component has a query of its own."""

Place: TypeAlias = tuple[Literal["in", "out", "views"], str]
"""A topic as an input or as an output, or all views."""
_VIEWS: Place = "views", ""


@dataclass(frozen=True)
class Component:
    """The topics of some rules. No rule outside of the component reads or writes one of them. ``views``: whether the views of
    the pool are among the rules: they share the state of their tables."""

    inputs: frozenset[str]
    outputs: frozenset[str]
    views: bool = False

    def __or__(self, other: Component) -> Component:
        return Component(self.inputs | other.inputs, self.outputs | other.outputs, self.views or other.views)

    @property
    def topics(self) -> int:
        return len(self.inputs) + len(self.outputs)


def whole(rules: Iterable[Rule], inputs: Iterable[str]) -> Component:
    """All rules as one component. ``inputs``: the topics that the pool reads."""
    return Component(frozenset(inputs), frozenset(rule.out for rule in rules), views=True)


def components(rules: Sequence[Rule], inputs: Iterable[str]) -> list[Component]:
    """The components of a pool in the order of its inputs. Neighbours with MOST_TOPICS together are one.

    ``inputs``: all input topics of the pool, also topics without a rule. Rules for A → X, B → X, and C → Y:

        [Component({A, B}, {X}), Component({C}, {Y})]
    """
    neighbours: dict[Place, set[Place]] = {}
    for rule in rules:
        places: list[Place] = [("in", topic) for topic in rule.topics] if rule.view is None else [_VIEWS]
        for place in places:
            neighbours.setdefault(place, set()).add(("out", rule.out))
            neighbours.setdefault(("out", rule.out), set()).add(place)
    result: list[Component] = []
    known_places: set[Place] = set()
    topics = dict.fromkeys([*inputs, *(topic for rule in rules for topic in rule.topics)])
    starts: list[Place] = [*(("in", topic) for topic in topics), *([_VIEWS] if _VIEWS in neighbours else [])]
    for start in starts:
        if start in known_places:
            continue
        reached_places, queue = {start}, [start]
        while queue:
            further = neighbours.get(queue.pop(), set()) - reached_places
            reached_places |= further
            queue += further
        known_places |= reached_places
        component = Component(_topics(reached_places, "in"), _topics(reached_places, "out"), _VIEWS in reached_places)
        if result and result[-1].topics + component.topics <= MOST_TOPICS:
            result[-1] |= component
        else:
            result.append(component)
    return result


def _topics(places: Iterable[Place], side: str) -> frozenset[str]:
    return frozenset(place[1] for place in places if place[0] == side)
