"""The names behind the numbers in result rows (see ``matching``). Full names would double the size of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zync_assets.pipeline import Pipeline


@dataclass(frozen=True)
class Labels:
    """``topics``: of the inputs, by place; ``rules`` and ``outs``: names and output topics of a pool's rules, by index."""

    topics: Sequence[str]
    rules: Sequence[str]
    outs: Sequence[str]

    def rule(self, index: int | None) -> str | None:
        return None if index is None else self.rules[index]

    def of_topic(self, out: str) -> str:
        """The indexes of an output topic's rules, as a list in SQL."""
        return ", ".join(str(index) for index, name in enumerate(self.outs) if name == out) or "NULL"


def labels_of(pipeline: Pipeline, pool: str) -> Labels:
    """The labels of a staging pool's batches: all inputs of the file, and the pool's own rules."""
    rules = pipeline.rules_of(pool)
    return Labels([item.topic for item in pipeline.inputs], [rule.name for rule in rules], [rule.out for rule in rules])
