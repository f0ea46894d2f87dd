"""The oracle of views: the query of a view in DuckDB's dialect, over the latest rows of its tables.

The oracle shares no code with the package, except for the model of the pipeline file. sqlglot translates each expression.
Collections are sorted here, in Python: null before any value, structs field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa
import sqlglot
from sqlglot import exp

from zync_assets.pipeline import Rule, Shape, View

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Alias → the latest rows of its table."""
Result = dict[str, Any]
"""Key as JSON → value."""


class DuplicateKey(Exception):
    """Two rows of a result have one key."""


@dataclass(frozen=True)
class Oracle:
    """The query of one view. ``schemas``: alias → the columns of its rows."""

    rule: Rule
    schemas: Mapping[str, pa.Schema]

    @property
    def view(self) -> View:
        assert self.rule.view is not None
        return self.rule.view

    @property
    def sql(self) -> str:
        """A column for each expression: those of the key, those of the value, and the choice among duplicates."""
        view = self.view
        parts = [sql for _, sql in _leaves(self.rule.key, ())] + [sql for _, sql in _leaves(self.rule.value, ())]
        parts.append(view.on_duplicate_key or "0")
        selected = ", ".join(f"{_duck(sql)} AS c{at}" for at, sql in enumerate(parts))
        joins = [
            f"{'LEFT ' if join.kind == 'left' else ''}JOIN {join.alias} ON "
            + " AND ".join(f"({_duck(before)}) = ({_duck(own)})" for before, own in join.on)
            for join in view.joins
        ]
        where = [] if view.where is None else [f"WHERE {_duck(view.where)}"]
        grouped = list(dict.fromkeys(name for sql in parts for name in _grouped(sql)))
        groups = [f"GROUP BY {', '.join(grouped)}"] if any(_aggregates(sql) for sql in parts) else []
        return " ".join([f"SELECT {selected} FROM {view.root}", *joins, *where, *groups])

    def result(self, rows: Rows) -> Result:
        """The result for some rows. DuplicateKey for two rows of one key, if the view does not choose."""
        connection = duckdb.connect()
        connection.execute("SET TimeZone = 'UTC'")
        for alias, schema in self.schemas.items():
            connection.register(alias, pa.Table.from_pylist(list(rows[alias]), schema))
        found: dict[str, list[tuple[Any, Any]]] = {}
        for columns in connection.execute(self.sql).fetchall():
            values = iter(columns)
            key, value = _made(self.rule.key, values), _made(self.rule.value, values)
            found.setdefault(key_text(key), []).append((next(values), value))
        for key, several in found.items():
            if len(several) > 1 and self.view.on_duplicate_key is None:
                raise DuplicateKey(f"{key}: {several}")
        return {
            key: plain(max(several, key=lambda each: (each[0] is not None, each[0]))[1])
            for key, several in found.items()
        }


@dataclass
class Table:
    """The latest rows of one topic, by key. ``envelope``: whether its records are those of Debezium."""

    envelope: bool
    rows: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def apply(self, key: Any, value: Mapping[str, Any] | None) -> None:
        """Take the next record of a key's partition."""
        gone = value is None or (self.envelope and value["op"] == "d")
        if gone:
            self.rows.pop(key_text(key), None)
        else:
            assert value is not None
            self.rows[key_text(key)] = value["after"] if self.envelope else value


def folded(records: Sequence[tuple[Any, Any]]) -> Result:
    """The latest value of each key in (key, value) records of an output topic; a tombstone removes the key."""
    found: Result = {}
    for key, value in records:
        if value is None:
            found.pop(key_text(key), None)
        else:
            found[key_text(key)] = plain(value)
    return found


def idle(records: Sequence[tuple[Any, Any]]) -> list[str]:
    """The keys for which a record changes nothing: it repeats the record before it, or removes what is not there."""
    found: list[str] = []
    last: Result = {}
    for key, value in records:
        text = key_text(key)
        if plain(value) == last.get(text):
            found.append(text)
        last[text] = plain(value)
    return found


def key_text(key: Any) -> str:
    return json.dumps(plain(key), sort_keys=True, default=str)


def plain(value: Any) -> Any:
    """A value of Spark or DuckDB in a form in which equal values are equal: no decimals, floats of 12 digits."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    return float(f"{float(value):.12g}") if hasattr(value, "as_tuple") else str(value)


def _leaves(shape: Shape, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(shape, str):
        yield path, shape
    elif shape is not None:
        for name, part in shape.items():
            yield from _leaves(part, (*path, name))


def _made(shape: Shape, values: Iterator[Any]) -> Any:
    """A key or value of the columns of its expressions."""
    if isinstance(shape, str):
        found = next(values)
        return sorted(found or (), key=_place) if _collects(shape) else found
    return None if shape is None else {name: _made(part, values) for name, part in shape.items()}


def _place(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return tuple(_place(part) for part in value.values())
    return (value is not None, value if value is not None else 0)


def _parsed(sql: str) -> exp.Expr:
    return sqlglot.parse_one(sql, dialect="spark")


def _collects(sql: str) -> bool:
    tree = _parsed(sql)
    inner = tree.this if isinstance(tree, exp.Filter) else tree
    return isinstance(inner, exp.ArrayAgg | exp.ArrayUniqueAgg)


def _aggregates(sql: str) -> bool:
    return _parsed(sql).find(exp.AggFunc) is not None


def _grouped(sql: str) -> Iterator[str]:
    """The columns of an expression outside of its aggregates; the whole expression if it has none."""
    tree = _parsed(sql)
    if not _aggregates(sql):
        yield from [_duck(sql)] if tree.find(exp.Column) else []
        return
    for column in tree.find_all(exp.Column):
        if column.find_ancestor(exp.AggFunc, exp.Filter) is None:
            yield column.sql(dialect="duckdb")


def _duck(sql: str) -> str:
    return _parsed(sql).sql(dialect="duckdb")
