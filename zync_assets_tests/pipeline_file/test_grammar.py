"""The grammar describes every key that the reader knows, and every description holds: examples and defaults are loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from zync_assets.lake.stores import KINDS
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load
from zync_assets.pipeline_file.grammar import KEYS, LAKE
from zync_assets.pipeline_file.key import Key

SECTIONS = ("inputs", "outputs", "transforms", "sinks")
OPEN = ("kafka", "registry", "lake", "spark")
ENV = {"KEY": "k", "SECRET": "s", "TOKEN": "t"}
PLACES = list(KEYS.items())


def base() -> dict[str, Any]:
    return {
        "inputs": [{"topic": "Invoices", "pool": "Raw"}, {"topic": "InvoiceStatus", "pool": "Raw"}],
        "outputs": [{"topic": "NewInvoices", "pool": "Staging"}],
        "transforms": [
            {
                "name": "join",
                "type": "denorm",
                "left": "Invoices",
                "right": "InvoiceStatus",
                "join-on": "left.key = right.key",
                "out": "NewInvoices",
                "key": "left.key",
                "value": "left.value.after",
            }
        ],
        "sinks": [{"name": "warehouse", "type": "sqlite", "url": "shop.db", "from": ["Staging.*"]}],
    }


def loaded(folder: Path, file: dict[str, Any]) -> Pipeline:
    """The pipeline of a file; JSON is YAML."""
    path = folder / "shop.yaml"
    path.write_text(json.dumps(file, default=str))
    return load(path, ENV)


def with_part(place: str, part: dict[str, Any]) -> dict[str, Any]:
    """The base file with a part of the section, or of the top level, that the place lies in."""
    file = base()
    section, _, key = place.partition(".")
    if section not in SECTIONS or not key:
        if "output" in part:
            del file["outputs"]
        return file | part
    if part.get("type") in ("stateless", "view", "group") or ("left" in part and "type" in part):
        file[section] = [{"out": "NewInvoices", **part}]
    else:
        file[section][0] |= part
    if "left-key" in part:
        del file[section][0]["join-on"]
    return file


def example(key: Key) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(re.sub("…", "'x'", key.example))


@pytest.mark.parametrize(("place", "key"), PLACES, ids=list(KEYS))
def test_a_key_has_a_description_of_one_to_three_sentences(place: str, key: Key) -> None:
    assert key.type
    assert 1 <= len(re.findall(r"[.](?=\s|$)", key.text)) <= 3, key.text
    assert key.text[0].isupper() or key.text[0] == "`"
    assert key.summary.endswith(".")
    assert place.rpartition(".")[2] in key.example or "." in key.name


@pytest.mark.parametrize(("place", "key"), PLACES, ids=list(KEYS))
def test_the_example_of_a_key_is_legal_and_has_an_effect(place: str, key: Key, tmp_path: Path) -> None:
    given = with_part(place, example(key))
    pipeline = loaded(tmp_path, given)
    # A required key is in the base file with the example's value already.
    if not key.required and given != base() and place not in SECTIONS:
        assert pipeline != loaded(tmp_path, base()) or str(key.default) in key.example


@pytest.mark.parametrize("place", [place for place, key in PLACES if key.allowed])
def test_every_allowed_value_loads_and_the_default_is_what_a_file_without_the_key_means(
    place: str, tmp_path: Path
) -> None:
    key = KEYS[place]
    # Those of tables, look-ups and groups have tests of their own.
    if (
        place in ("transforms.type", "transforms.lookup.missing", "transforms.on-expire")
        or key.name == "key-in-many-partitions"
    ):
        return
    for value in key.allowed:
        part: dict[str, Any] = {key.name: {"true": True, "false": False}.get(value, value)}
        same = loaded(tmp_path, with_part(place, part)) == loaded(tmp_path, base())
        assert same == (value == (key.default if key.default in key.allowed else DEFAULTS[key.name]))


DEFAULTS = {
    "evolve": "own",
    "hold": "true",
    "key-format": "avro",
    "value-format": "avro",
    "key-subject-name-strategy": "topic",
    "value-subject-name-strategy": "topic",
}
"""Keys whose default depends on another key or section → the default in the file of these tests."""


def test_defaults_that_are_numbers_and_texts_are_what_a_file_without_the_key_means(tmp_path: Path) -> None:
    found = loaded(tmp_path, base())
    assert found.settle_seconds == float(KEYS["settle"].default)
    assert found.order_delay == float(KEYS["order-delay"].default)
    assert found.unavailable_value == KEYS["unavailable-value"].default
    created = loaded(tmp_path, with_part("outputs.create", {"create": {}})).outputs[0].create
    assert created is not None
    assert created.partitions == int(KEYS["outputs.create.partitions"].default)
    assert created.replication_factor == int(KEYS["outputs.create.replication-factor"].default)
    assert found.lake == str((tmp_path / KEYS["lake"].default).resolve())
    assert found.kafka == {"bootstrap.servers": "localhost:9092"}
    assert found.registry is not None and found.registry.url == KEYS["registry.url"].default


def test_the_settings_of_every_store_are_described() -> None:
    assert {key.name for key in LAKE} == {"uri", *(name for kind in KINDS.values() for name in kind.settings)}
    assert [name for name in OPEN if not KEYS[name].open] == []
