"""PostgreSQL → Debezium → zync → Debezium's JDBC sink → PostgreSQL.

The sink makes of zync's topics the tables that it makes of Debezium's own.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any

import pytest

from zync_assets.kafka.topics import survey
from zync_assets.local.services import Services
from zync_assets_tests.connect import Postgres, postgres, sink_settings, source_settings, worker
from zync_assets_tests.mini import Mini, mini

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TABLE = """
CREATE TABLE items (
  id bigint PRIMARY KEY,
  moment timestamptz NOT NULL,
  token uuid NOT NULL,
  doc jsonb,
  wall timestamp NOT NULL,
  wall_millis timestamp(3),
  day date NOT NULL,
  opens time,
  small smallint NOT NULL,
  whole integer,
  name varchar(20) NOT NULL,
  note text,
  price numeric(10, 2) NOT NULL,
  weight numeric,
  ratio double precision,
  share real,
  good boolean NOT NULL,
  picture bytea,
  tags text[],
  numbers integer[],
  state text NOT NULL DEFAULT 'new'
)
"""
ROWS = """
INSERT INTO items VALUES
  (1, '2024-02-29 10:00:00.123456+00', '0f8fad5b-d9cb-469f-a165-70867728950e', '{"a": 1}', '2024-02-29 10:00:00.123456',
   '2024-02-29 10:00:00.123', '2024-02-29', '10:00:00.123456', 3, 70000, 'first', 'text', 12.30, 1.5000, 0.1, 0.5, true,
   '\\x00ff', '{a,NULL,b}', '{1,2}'),
  (2, '1913-07-05 23:59:59.999999-05', '00000000-0000-0000-0000-000000000000', NULL, '1913-07-05 23:59:59.999999',
   NULL, '1913-07-05', NULL, -3, NULL, 'second', NULL, -0.01, NULL, NULL, NULL, false, NULL, NULL, NULL),
  (3, '2024-07-01 00:00:00+00', '00000000-0000-0000-0000-000000000000', NULL, '2024-07-01', NULL, '2024-07-01', NULL, 0,
   NULL, 'third', NULL, 0, NULL, NULL, NULL, true, NULL, NULL, NULL)
"""
CHANGES = ("UPDATE items SET small = 4, note = NULL WHERE id = 1", "DELETE FROM items WHERE id = 3")
RECORDS = 6
"""Three rows, an update, a delete and its tombstone."""

COMPUTED = """{id: in.value.after.id, moment: CAST(in.value.after.moment AS TIMESTAMP),
  wall: CAST(in.value.after.moment AS TIMESTAMP_NTZ), day: CAST(in.value.after.moment AS DATE),
  small: CAST(in.value.after.small + 0 AS SMALLINT), price: "CAST(in.value.after.price * 2 AS DECIMAL(12, 2))",
  name: upper(in.value.after.name)}"""
FORMATS = ("avro", "connect-json")
BARE = [*itertools.product(FORMATS, FORMATS)]
"""Format of Debezium's topic, and of zync's."""
CASES = [(*case, "bare", "in.value.after") for case in BARE]
CASES += [(formats, formats, "whole", "in.value") for formats in FORMATS]
CASES += [(formats, formats, "computed", COMPUTED) for formats in FORMATS]


KINDS = {
    "id": ("bigint", "NO"),
    "moment": ("timestamp with time zone", "NO"),
    "token": ("uuid", "NO"),
    "doc": ("jsonb", "YES"),
    "wall": ("timestamp without time zone", "NO"),
    "wall_millis": ("timestamp without time zone", "YES"),
    "day": ("date", "NO"),
    "opens": ("time without time zone", "YES"),
    "small": ("smallint", "NO"),
    "whole": ("integer", "YES"),
    "name": ("character varying", "NO"),
    "note": ("text", "YES"),
    "price": ("numeric", "NO"),
    "weight": ("double precision", "YES"),
    "ratio": ("double precision", "YES"),
    "share": ("real", "YES"),
    "good": ("boolean", "NO"),
    "picture": ("bytea", "YES"),
    "tags": ("ARRAY", "YES"),
    "numbers": ("ARRAY", "YES"),
    "state": ("text", "NO"),
}
"""The columns that the sink makes: type, and whether they may be null. It makes a numeric without digits a double."""
UNCOMPARED = ("_catalog", "column_default", "ordinal_position", "dtd_identifier")
"""What may differ in information_schema: the database's name, places, and defaults."""


def source(formats: str) -> str:
    return f"$left-{formats}.public.items"


def pipeline() -> str:
    """A pool takes a record once: the topics of one pool have different sources."""
    lines = [
        "inputs:",
        *(f"  - {{topic: {source(given)}, pool: Raw, format: {given}}}" for given in FORMATS),
        "outputs:",
    ]
    rules = ["transforms:"]
    for given, made, kind, value in CASES:
        name, pool = f"{given}-{made}-{kind}", made.replace("-", "_") if kind == "bare" else kind
        lines.append(f"  - {{topic: $out-{name}, pool: {pool}, format: {made}, create: {{replication-factor: 1}}}}")
        common = f"type: stateless, in: {source(given)}, out: $out-{name}, key: in.key"
        rules.append(f"  - {{{common}, name: {name}, where: value.op <> 'd', value: {value}}}")
        rules.append(f"  - {{{common}, name: {name}-gone, where: value.op = 'd', value: null}}")
    return "\n".join([*lines, *rules])


@dataclass(frozen=True)
class Target:
    """A table as the sink made it. ``columns``: name → what information_schema says of it; ``rows``: column → value, by id."""

    columns: Mapping[str, Mapping[str, Any]]
    rows: list[Mapping[str, Any]]


def target(server: Postgres, database: str) -> Target:
    said = "SELECT to_jsonb(c) FROM information_schema.columns c WHERE table_name = 'items' ORDER BY ordinal_position"
    columns = [
        {name: value for name, value in row[0].items() if not name.endswith(UNCOMPARED)}
        for row in server.run(database, said)
    ]
    names = [column["column_name"] for column in columns]
    rows = server.run(database, "SELECT * FROM items ORDER BY id") if columns else []
    return Target(
        {column["column_name"]: column for column in columns}, [dict(zip(names, row, strict=True)) for row in rows]
    )


@dataclass(frozen=True)
class Chain:
    """Where the tables are that the sinks made: ``control-<format>`` and ``<format>-<format>-<kind>``."""

    server: Postgres

    def target(self, name: str) -> Target:
        return target(self.server, name)


def sink(server: Postgres, database: str, topic: str) -> dict[str, str]:
    server.run("postgres", f'CREATE DATABASE "{database}"')
    return sink_settings(server, database, "items", topic)


def settled(found: Target) -> bool:
    """Whether the sink has written all changes."""
    return {row["id"]: row["small"] for row in found.rows} == {1: 4, 2: -3}


@pytest.fixture(scope="module")
def chain(services: Services, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    folder, unique = tmp_path_factory.mktemp("chain"), "t" + secrets.token_hex(4)
    it = mini(services, spark, folder, unique, pipeline())
    with postgres() as server, worker(services, folder, "America/New_York") as connect:
        server.run("postgres", "CREATE DATABASE source")
        server.run("source", TABLE, ROWS)
        topics = {given: Template(source(given)).substitute(left=it.left) for given in FORMATS}
        for given, topic in topics.items():
            prefix, slot = topic.removesuffix(".public.items"), given.replace("-", "_")
            settings = source_settings(server, "source", "public.items", prefix, slot)
            settings |= {"column.propagate.source.type": ".+"}
            connect.start(f"source-{given}", settings, given)
        for topic in topics.values():
            connect.wait(f"the snapshot in {topic}", lambda topic=topic: end(it, topic) == 3)
        server.run("source", *CHANGES)
        for given, topic in topics.items():
            connect.wait(f"the changes in {topic}", lambda topic=topic: end(it, topic) == RECORDS)
            connect.start(f"control-{given}", sink(server, f"control-{given}", topic), given)
        it.ingest()
        for pool in it.pipeline.staging_pools:
            it.etl(pool)
        for given, made, kind, _ in CASES:
            name = f"{given}-{made}-{kind}"
            it.publish(f"{it.out}-{name}")
            connect.start(name, sink(server, name, f"{it.out}-{name}"), made)
        found = Chain(server)
        for name in [*(f"control-{given}" for given in FORMATS), *("-".join(case[:3]) for case in CASES)]:
            connect.wait(f"all changes in {name}", lambda name=name: settled(found.target(name)))
        yield found


def end(it: Mini, topic: str) -> int:
    state = survey(it.pipeline.kafka, [topic]).states.get(topic)
    return state.partitions[0].end if state else 0


@pytest.mark.parametrize(("given", "made"), BARE)
def test_a_bare_column_makes_the_table_that_debezium_s_own_topic_makes(chain: Chain, given: str, made: str) -> None:
    found, control = chain.target(f"{given}-{made}-bare"), chain.target(f"control-{given}")
    assert found.columns == control.columns
    assert found.rows == control.rows
    assert {name: (column["data_type"], column["is_nullable"]) for name, column in control.columns.items()} == KINDS


@pytest.mark.parametrize("formats", FORMATS)
def test_a_whole_record_is_an_envelope_to_the_sink(chain: Chain, formats: str) -> None:
    assert chain.target(f"{formats}-{formats}-whole") == chain.target(f"control-{formats}")


@pytest.mark.parametrize("formats", FORMATS)
def test_computed_columns_make_columns_of_their_types_with_the_same_values(chain: Chain, formats: str) -> None:
    found = chain.target(f"{formats}-{formats}-computed")
    assert {name: column["data_type"] for name, column in found.columns.items()} == {
        "id": "bigint",
        "moment": "timestamp with time zone",
        "wall": "timestamp without time zone",
        "day": "date",
        "small": "smallint",
        "price": "numeric",
        "name": "text",
    }
    expected = chain.server.run(
        "source",
        "SELECT id, moment, timezone('UTC', moment), timezone('UTC', moment)::date, small, price * 2, upper(name)"
        " FROM items ORDER BY id",
    )
    assert [tuple(row.values()) for row in found.rows] == expected
