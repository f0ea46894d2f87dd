"""Merges the ``shape`` of an output into the output's rules. A rule then filters and maps its own outputs.

``value.name`` in a shape stands for the rule's expression of the field ``name``. A rule may lack a field that a field of the
shape needs: the rule's records then omit the shape's field, so that a partial update stays partial. A condition that needs a
missing field is a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sqlglot import exp

from zync_assets.pipeline import RecordShape, Rule, Shape
from zync_assets.pipeline_file.expressions import columns, parse
from zync_assets.sql_text import shape_sql


class Missing(Exception):
    """A shape names a field that the rule does not make; the text is its path."""


def composed(rule: Rule, shape: RecordShape) -> Rule:
    """The rule with the shape's ``where`` as its ``keep`` and the shape's sides made of its own.

    Raises Missing if ``where`` or a side that is one expression needs what the rule does not make, or if no field of a
    side is left.
    """
    made = {"key": rule.key, "value": rule.value}
    keep = None if shape.where is None else _expression(shape.where, made)
    sides = {
        side: _guarded(side, rule.value, _side(part, made, side))
        if not (side == "value" and rule.value is None)
        else None
        for side, part in shape.sides.items()
    }
    return replace(rule, keep=keep, **sides)


def unmade(shape: RecordShape, rules: Sequence[Rule]) -> list[str]:
    """The fields of a shape that no composed rule has."""
    return [
        f"{side}.{'.'.join(path)}"
        for side, part in shape.sides.items()
        for path in _paths(part)
        if not any(_has(getattr(rule, side), path) for rule in rules)
    ]


def _paths(shape: Shape) -> Iterator[tuple[str, ...]]:
    if isinstance(shape, Mapping):
        for name, part in shape.items():
            if isinstance(part, Mapping):
                yield from ((name, *path) for path in _paths(part))
            else:
                yield (name,)


def _has(shape: Shape, path: tuple[str, ...]) -> bool:
    for name in path:
        if not isinstance(shape, Mapping):
            # The rule's shape is a single expression here, which may contain any field.
            return shape is not None
        if name not in shape:
            return False
        shape = shape[name]
    return True


def _guarded(side: str, value: Shape, shape: Shape) -> Shape:
    """A value that is null stays null; one that is a mapping never is."""
    if side == "key" or not isinstance(value, str) or shape is None:
        return shape
    return f"CASE WHEN ({value}) IS NOT NULL THEN {shape_sql(shape)} END"


def _side(shape: Shape, made: Mapping[str, Shape], path: str) -> Shape:
    if shape is None:
        return None
    if isinstance(shape, str):
        return _expression(shape, made)
    kept: dict[str, Shape] = {}
    missing: Missing | None = None
    for name, part in shape.items():
        try:
            kept[name] = _side(part, made, f"{path}.{name}")
        except Missing as error:
            missing = error
    if not kept and missing is not None:
        raise missing
    return kept


def _expression(sql: str, made: Mapping[str, Shape]) -> str:
    """The expression with what the rule makes in place of ``key`` and ``value``."""
    edits: list[tuple[int, int, str]] = []
    for column in parse(sql).tree.find_all(exp.Column):
        if next(columns(column), None) is None:
            continue  # a variable of a lambda function
        parts = column.parts
        root, names = parts[0].name.lower(), [part.name for part in parts[1:]]
        text, used = _found(made[root], names, root)
        edits.append((int(parts[0].meta["start"]), int(parts[used].meta["end"]) + 1, text))
    for start, end, text in sorted(edits, reverse=True):
        sql = f"{sql[:start]}{text}{sql[end:]}"
    return sql


def _found(shape: Shape, names: list[str], path: str) -> tuple[str, int]:
    """The rule's SQL at a path, and the number of names that lead to it. The remaining names follow the SQL."""
    for used, name in enumerate(names):
        if shape is None:
            return "NULL", len(names)
        if isinstance(shape, str):
            return f"({shape})", used
        path = f"{path}.{name}"
        # Prefers the exact name to a name in other case.
        fields = {field.lower(): part for field, part in shape.items()} | dict(shape)
        if name not in fields and name.lower() not in fields:
            raise Missing(path)
        shape = fields[name if name in fields else name.lower()]
    return ("NULL" if shape is None else shape_sql(shape)), len(names)
