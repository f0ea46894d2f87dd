"""Describes the schema changes in a raw table within some offset ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from zync_assets.codecs.avro_types import arrow_type
from zync_assets.codecs.schema_diff import differences
from zync_assets.errors import RegistryError, SchemaError
from zync_assets.kafka.registry import Registry
from zync_assets.lake.raw import RawState, WriterSchema
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline


def schema_changes(
    pipeline: Pipeline, state: RawState, ranges: Iterable[OffsetRange] | None
) -> Mapping[str, list[str]]:
    """Side → one text per writer schema that changed the columns: the schema's first record and its changes.

    The registry holds the schemas. If the registry does not answer, the texts omit the changes.
    """
    parts = None if ranges is None else list(ranges)
    registry = Registry(pipeline.registry) if pipeline.registry else None
    found: dict[str, list[str]] = {"key": [], "value": []}
    for side, texts in found.items():
        writers = [item for item in state.writers if item.side == side]
        for before, item in pairwise(writers):
            if item.changes and (parts is None or any(_is_in(item, part) for part in parts)):
                what = f"partition {item.partition}, offset {item.offset}: {_diff(registry, before, item)}".rstrip(": ")
                name = "a new schema" if item.id is None else f"id {item.id}"
                texts.append(f"{name} from {what}")
    return found


def _is_in(item: WriterSchema, part: OffsetRange) -> bool:
    return part.partition == item.partition and part.first <= item.offset < part.end


def _diff(registry: Registry | None, before: WriterSchema, item: WriterSchema) -> str:
    if registry is None or before.id is None or item.id is None:
        return ""
    try:
        types = [arrow_type(registry.schema(schema.id)) for schema in (before, item) if schema.id is not None]
    except (RegistryError, SchemaError):
        return ""
    return "; ".join(differences(types[0], types[1], item.side))
