"""The story of a pipeline with three sinks, which targets of several kinds play: Debezium's envelopes are upserted, all and
those that meet a condition, and plain records are appended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zync_assets.checks.remote_checks import sink_results
from zync_assets.checks.state_checks import rows_match
from zync_assets.local.services import Services
from zync_assets.sinks.steps import sink_all
from zync_assets_tests.mini import mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = """
inputs:
  - {topic: $left, pool: Raw, key-format: json, key-schema: "id bigint", value-format: json,
     schema: "before struct<id: bigint>, after struct<id: bigint, v string, n struct<a: int>>, op string"}
  - {topic: $right, pool: Raw, key-format: string, value-format: json, schema: "id bigint, v string"}
sinks:
  - {name: house, type: KIND, url: "URL", from: [Raw.$left], table: rows}
  - {name: some, type: KIND, url: "URL", from: [Raw.$left], table: some, before: {where: value.after.v <> 'd'}}
  - {name: log, type: KIND, url: "URL", from: [Raw.$right], table: log, mode: insert}
"""


def play(
    services: Services,
    spark: SparkSession,
    folder: Path,
    unique: str,
    kind: str,
    url: str,
    query: Callable[[str], list[tuple[Any, ...]]],
    final: str = "",
) -> None:
    """Write two batches, and compare rows and checks. ``query``: asks the target; ``final``: stands after a table's name."""
    it = mini(services, spark, folder, unique, PIPELINE.replace("KIND", kind).replace("URL", url))

    def change(op: str, key: int, v: str | None = None) -> tuple[bytes, Any]:
        after = None if op == "d" else {"id": key, "v": v, "n": {"a": key}}
        return f'{{"id": {key}}}'.encode(), {"before": None, "after": after, "op": op}

    it.send(it.left, change("c", 1, "a"), change("c", 2, "b"), change("c", 3, "c"), change("d", 3), change("c", 4, "e"))
    it.send(it.right, {"id": 1, "v": "x"}, {"id": 1, "v": "x"})
    it.ingest()
    assert sum(made.records for made in sink_all(it.pipeline, lambda: spark)) == 10
    it.send(it.left, change("u", 1, "__debezium_unavailable_value"), change("d", 2), change("u", 4, "d"))
    it.ingest()
    assert sum(made.records for made in sink_all(it.pipeline, lambda: spark)) == 6
    assert list(sink_all(it.pipeline, lambda: spark)) == []
    assert query(f'SELECT id, v, n FROM "rows"{final} ORDER BY id') == [(1, "a", '{"a":1}'), (4, "d", '{"a":4}')]
    # A row that no longer meets the condition goes. A value that was not sent leaves it where it is.
    assert query(f'SELECT id, v, n FROM "some"{final}') == [(1, "a", '{"a":1}')]
    assert query(f"SELECT kafka_offset, id, v FROM log{final} ORDER BY 1") == [(0, 1, "x"), (1, 1, "x")]
    results = list(sink_results(it.pipeline))
    assert [result.passed for result in results] == [True] * len(results)
    for sink in it.pipeline.sinks:
        assert rows_match(it.pipeline, lambda: spark, sink, sink.tables[0]).passed
