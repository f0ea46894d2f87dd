"""What the pipelines of a code location share (source topics), and what one pipeline alone may have (tables of a lake).

A code location is a process. ``Definitions.merge`` shows no pipeline the others, so this module remembers each pipeline
file that the process has built. A file that is built again takes the place of its earlier definitions.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagster import AssetKey

from zync_assets.assets.checks import reachable
from zync_assets.assets.graph import Labels, source
from zync_assets.assets.names import Names, SourceTopic
from zync_assets.errors import SetupError

_topics: dict[AssetKey, SourceTopic] = {}
_tables: dict[tuple[str, str, str], Names] = {}
"""(lake, pool, topic) → the pipeline that has the table's asset."""


def claim_tables(names: Names) -> None:
    """Note the tables of a pipeline as its assets. SetupError for a table that is an asset of another pipeline file."""
    pipeline = names.pipeline
    lake = str(pipeline.lake).rstrip("/")
    tables = [(lake, item.pool, item.topic) for item in (*pipeline.inputs, *pipeline.outputs)]
    for table in tables:
        other = _tables.get(table)
        if other is not None and other.file != names.file and other.file.exists():
            place = "/".join(table[1:])
            raise SetupError(
                f"{other.file} and {names.file} both name table {place} of lake {lake}, and a table is one asset."
                f" Write the rules of both files into one file, or name another pool than {table[1]} in one of them, or"
                " leave one of them out of this code location."
            )
    _tables.update(dict.fromkeys(tables, names))


def sources(names: Names, labels: Labels, resources: Mapping[str, object]) -> dict[str, SourceTopic]:
    """Input topic → the topic's asset. It is the asset of another pipeline that reads the topic from the same brokers, or
    it is made now. ``resources``: of this pipeline."""
    found: dict[str, SourceTopic] = {}
    for item in names.pipeline.inputs:
        key = names.topic_key(item.topic)
        there = _topics.get(key)
        if (
            there is None
            or there.file == names.file
            or not there.file.exists()
            or not _same_brokers(names, there.names)
        ):
            reader = {name: resources[name] for name in (names.resource("kafka_io"), names.resource("spark"))}
            made = source(names, labels, item.topic)
            there = _topics[key] = SourceTopic(names, made, reachable(names, item.topic), reader)
        found[item.topic] = there
    return found


def _same_brokers(names: Names, others: Names) -> bool:
    """Whether two pipelines name a broker in common; true where the environment does not say yet which they name."""
    mine, theirs = _brokers(names), _brokers(others)
    return not mine or not theirs or bool(mine & theirs)


def _brokers(names: Names) -> set[str]:
    try:
        properties = names.pipeline.kafka
        text = properties.get("bootstrap.servers") or properties.get("metadata.broker.list") or ""
    except SetupError:
        return set()
    return {item.strip().lower() for item in text.split(",") if item.strip()}
