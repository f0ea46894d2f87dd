"""Rewrites a pipeline's rules from the topics' field names to the lake's field names.

A pipeline file has the topics' names. Spark sees the columns of the lake. This module looks up references to fields in the
types of the raw tables. A rule's own fields get names that the staging table can hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from zync_assets.codecs.field_notes import has_other_names, lake_type_of, topic_type_of
from zync_assets.errors import EtlError
from zync_assets.lake import staging
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import StagingState
from zync_assets.names import lake_name, original_name
from zync_assets.pipeline import Headers, Pipeline, RecordShape, Rule, Shape, Stateless
from zync_assets.pipeline_file.expressions import SqlProblem
from zync_assets.pipeline_file.references import in_lake_names
from zync_assets.records import KAFKA_TYPE

Rewrite = Callable[[str], str]


def with_lake_names(pipeline: Pipeline, raw: Mapping[str, RawState | None], state: StagingState | None) -> Pipeline:
    """The pipeline with rules that name fields as the lake does. ``raw``: the states of the inputs' tables; ``state``: the
    staging pool's.

    EtlError for a name that may be two fields which differ in case alone.
    """
    types = {topic: _record_type(None if found is None else found.schema) for topic, found in raw.items()}
    renamed = any(has_other_names(type) for type in types.values())
    made: dict[str, _Made] = {}
    have = {item.name: item.type for item in state.schema} if state is not None else {}
    rules: list[Rule] = []
    for rule in pipeline.rules:
        columns = {"key": staging.key_column(rule.out), "value": staging.value_column(rule.out)}
        sides = {side: made.setdefault(column, _Made.of(have.get(column))) for side, column in columns.items()}
        rules.append(_renamed(rule, types, sides, renamed))
    return replace(pipeline, rules=tuple(rules))


def shape_in_lake_names(shape: RecordShape, key: pa.DataType, value: pa.DataType) -> RecordShape:
    """An input's shape over decoded records of some types, which have the lake's names. SqlProblem as ``in_lake_names``."""
    roots = {"kafka": KAFKA_TYPE, "key": with_notes(key), "value": with_notes(value)}
    renamed = any(has_other_names(type) for type in roots.values())
    rewrite = _rewriting(roots, renamed)
    sides = {side: _Made().shape(part, rewrite) for side, part in shape.sides.items()}
    return replace(shape, where=None if shape.where is None else rewrite(shape.where), sides=sides)


def with_notes(type: pa.DataType) -> pa.DataType:
    """A type of lake names that came from Spark, which keeps no notes, with the names of its fields in the topic."""
    return lake_type_of(topic_type_of(type))


def _record_type(schema: pa.Schema | None) -> pa.StructType:
    """The type of a record, ``struct<kafka, key, value>``, as far as it is known."""
    known = [] if schema is None else [schema.field(name) for name in ("key", "value") if name in schema.names]
    return pa.struct([pa.field("kafka", KAFKA_TYPE), *known])


@dataclass
class _Made:
    """The fields that rules make in one struct of an output: name in the topic → name in the lake, and what is inside."""

    names: dict[str, str] = field(default_factory=dict[str, str])
    inner: dict[str, _Made] = field(default_factory=dict)

    @classmethod
    def of(cls, type: pa.DataType | None) -> _Made:
        made = cls()
        if type is not None and pa.types.is_struct(type):
            for at in range(type.num_fields):
                item = type.field(at)
                made.names[original_name(item.name)] = item.name
                made.inner[original_name(item.name)] = cls.of(item.type)
        return made

    def shape(self, shape: Shape, rewrite: Rewrite) -> Shape:
        if shape is None:
            return None
        if isinstance(shape, str):
            return rewrite(shape)
        made: dict[str, Shape] = {}
        for name, part in shape.items():
            if name not in self.names:
                self.names[name] = lake_name(name, self.names.values())
            made[self.names[name]] = self.inner.setdefault(name, _Made()).shape(part, rewrite)
        return made


_ODD = re.compile(r"`[^`]*[ ,;{}()=%\x00-\x1f\x7f][^`]*`")
"""A quoted name that may have another one in the lake."""


def _rewriting(roots: Mapping[str, pa.DataType | None], renamed: bool) -> Rewrite:
    """A function that rewrites an expression. ``renamed``: whether a field of the roots has another name in the lake.

    Without such a field, most expressions stay as they are and are not parsed.
    """
    return lambda sql: in_lake_names(sql, roots) if renamed or _ODD.search(sql) else sql


def _renamed(rule: Rule, types: Mapping[str, pa.StructType], made: Mapping[str, _Made], renamed: bool) -> Rule:
    def rewriting(roots: Mapping[str, pa.DataType | None]) -> Rewrite:
        def rewrite(sql: str) -> str:
            try:
                return _rewriting(roots, renamed)(sql)
            except SqlProblem as problem:
                raise EtlError(f"rule {rule.name}: {sql}: {problem}") from None

        return rewrite

    def condition(where: str | None, topic: str) -> str | None:
        own = {name: _side(types.get(topic), name) for name in ("kafka", "key", "value")}
        return None if where is None else rewriting(own)(where)

    if isinstance(rule, Stateless):
        rewrite = rewriting({"in": types.get(rule.input)})
        rule = replace(rule, where=condition(rule.where, rule.input))
    else:
        rewrite = rewriting({"left": types.get(rule.left), "right": types.get(rule.right)})
        rule = replace(
            rule,
            where_left=condition(rule.where_left, rule.left),
            where_right=condition(rule.where_right, rule.right),
            join_on=tuple((rewrite(left), rewrite(right)) for left, right in rule.join_on),
        )
    return replace(
        rule,
        key=made["key"].shape(rule.key, rewrite),
        value=made["value"].shape(rule.value, rewrite),
        headers=_headers(rule.headers, rewrite),
        keep=None if rule.keep is None else rewrite(rule.keep),
    )


def _side(type: pa.StructType | None, name: str) -> pa.DataType | None:
    return None if type is None or type.get_field_index(name) < 0 else type.field(name).type


def _headers(headers: Headers | None, rewrite: Rewrite) -> Headers | None:
    if headers is None or isinstance(headers, str):
        return None if headers is None else rewrite(headers)
    return {name: rewrite(sql) for name, sql in headers.items()}
