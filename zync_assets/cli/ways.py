"""How keys and values are decoded and encoded, for ``zync status``: column by column, or record by record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from zync_assets.codecs.native import Way, decode_way, plain_way
from zync_assets.errors import RegistryError, SchemaError
from zync_assets.kafka.registry import Registry
from zync_assets.lake.raw import RawState
from zync_assets.lake.staging import StagingState
from zync_assets.pipeline import Input, Output, RegistryConfig

_QUICK = {"max.retries": "0", "timeout": "2"}
"""Who asks for a status waits for it: a registry that does not answer at once is left out."""


def quick_registry(config: RegistryConfig | None) -> Registry | None:
    return Registry(replace(config, properties={**config.properties, **_QUICK})) if config else None


def input_way(item: Input, state: RawState | None, registry: Registry | None) -> str | None:
    """The way of all writer schemas that came; before the first record, of those that are registered for the topic. None
    where there are none, or the registry does not answer."""
    ways: dict[str, list[Way]] = {}
    for side, of in (("key", item.key), ("value", item.value)):
        if of.format != "avro":
            column = state.schema.field(side).type if state and side in state.schema.names else None
            ways[side] = [plain_way(of, column)]
            continue
        ids = [known.id for known in (state.writers if state else ()) if known.side == side and known.id is not None]
        try:
            ways[side] = _of_registered(registry, ids, f"{item.topic}-{side}")
        except (RegistryError, SchemaError):
            ways[side] = []
    return _told(ways["key"], ways["value"])


def _of_registered(registry: Registry | None, ids: Iterable[int], subject: str) -> list[Way]:
    if registry is None:
        return []
    found: list[Way] = [decode_way(registry.schema(number)) for number in ids]
    latest = None if found else registry.latest(subject)
    if latest is not None:
        found.append(decode_way(latest[1]))
    return found


def output_way(item: Output, state: StagingState | None) -> str | None:
    """The way of all schemas that rules have for the topic; None before the first output."""
    texts = [json.loads(text) for topic, text in (state.head.schemas.values() if state else ()) if topic == item.topic]
    ways: dict[str, list[Way]] = {}
    for side, of in (("key", item.key), ("value", item.value)):
        schemas = [json.dumps(text[side]["schema"]) for text in texts if text[side]["schema"] is not None]
        ways[side] = [decode_way(schema) for schema in schemas] if of.format == "avro" else [plain_way(of, None)]
    return _told(ways["key"], ways["value"])


def _told(key: Iterable[Way], value: Iterable[Way]) -> str | None:
    """One word where both sides take one way, or one side is not known yet."""
    sides = {"key": " and ".join(sorted(set(key))), "value": " and ".join(sorted(set(value)))}
    known = {name: ways for name, ways in sides.items() if ways}
    if len(set(known.values())) <= 1:
        return next(iter(known.values()), None)
    return ", ".join(f"{name} {ways}" for name, ways in known.items())
