"""Views on small topics: after every batch, the folded output is the query's result over the latest rows."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from zync_assets.audit.guard import contiguous_output_offsets, exactly_once_done_coverage
from zync_assets.checks.state_checks import state_equals_raw
from zync_assets.cli.query import rewrite, run_query, tables_of
from zync_assets.errors import EtlError
from zync_assets.etl import positions
from zync_assets.etl.commit import commit_staging
from zync_assets.etl.plan import plan_etl, read_raw, transform
from zync_assets.etl.rules import explain_rules
from zync_assets.etl.views import changes, maintenance, state, state_fold, state_index
from zync_assets.etl.views.state import state_files
from zync_assets.etl.views.tables import stored_tables
from zync_assets.lake import staging
from zync_assets.local.services import Services
from zync_assets.runner import rebuild_all
from zync_assets_tests.mini import Mini, die, make_pipeline, mini_of, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = {
    "o": "id bigint, customer bigint, status string",
    "c": "id bigint, name string",
    "l": "id bigint, order_id bigint, qty bigint, note string",
}


@dataclass
class Shop:
    """Three tables as topics, the rows that they have by now, and one view a rule."""

    it: Mini
    topics: Mapping[str, str]
    rows: dict[str, dict[int, dict[str, Any]]] = field(default_factory=lambda: {alias: {} for alias in TABLES})

    def send(self, alias: str, *records: tuple[int, dict[str, Any] | None]) -> None:
        """Records (id, the rest of the row, or None for a delete)."""
        sent: list[tuple[str, Any]] = []
        for key, rest in records:
            row = None if rest is None else {"id": key, **rest}
            sent.append((json.dumps({"id": key}), row))
            self.rows[alias].pop(key, None)
            if row is not None:
                self.rows[alias][key] = row
        self.it.send(self.topics[alias], *sent)

    def folded(self, topic: str) -> dict[str, Any]:
        """Key → value of an output topic, tombstones applied."""
        found: dict[str, Any] = {}
        for row in self.it.staged(topic):
            key = json.dumps(row["key"])
            if row["value"] is None:
                assert key in found, f"a tombstone for {key}, which has no row"
                del found[key]
            else:
                assert found.get(key) != row["value"], f"the same value of {key} again"
                found[key] = row["value"]
        return found

    def expected(self, sql: str) -> dict[str, Any]:
        """Key → value, by DuckDB. ``sql``: its columns are key and value."""
        database = duckdb.connect()
        for alias, columns in TABLES.items():
            database.execute(f"CREATE TABLE {alias} ({columns})")
            names = [column.split()[0] for column in columns.split(", ")]
            rows = [[row.get(name) for name in names] for row in self.rows[alias].values()]
            if rows:
                database.executemany(f"INSERT INTO {alias} VALUES ({', '.join('?' * len(names))})", rows)
        rows = database.execute(sql).fetchall()
        found = {json.dumps(key): value for key, value in rows}
        assert len(found) == len(rows)
        return found

    def check(self, views: Mapping[str, str]) -> None:
        """``views``: output topic → the query of its view."""
        for topic, sql in views.items():
            assert self.folded(topic) == self.expected(sql), topic
        results = [contiguous_output_offsets(self.it.pipeline, topic) for topic in views]
        results.append(exactly_once_done_coverage(self.it.pipeline, "Staging"))
        assert [result for result in results if not result.passed] == []


Make = Callable[..., Shop]


@pytest.fixture
def make(services: Services, spark: SparkSession, tmp_path: Path, unique: str) -> Make:
    """``make(*views)``: a pipeline with the three tables, and views whose outputs are ``out0``, ``out1`` … . ``edit``: changes
    the file's text."""

    def made(*views: str, partitions: int = 1, edit: Callable[[str], str] = str) -> Shop:
        topics = {alias: f"{unique}.{alias}" for alias in TABLES}
        text = edit(pipeline_text(topics, [f"{unique}.out{at}" for at, _ in enumerate(views)], views))
        return Shop(mini_of(make_pipeline(services, tmp_path, text, partitions=partitions), spark), topics)

    return made


def pipeline_text(topics: Mapping[str, str], outs: Sequence[str], views: Sequence[str]) -> str:
    """The file's text after ``HEADER``. ``topics``: alias → input; ``views``: the rules' keys but for ``type`` and ``out``."""
    lines = ["inputs:"]
    lines += [
        f"  - {{topic: {topic}, pool: Raw, format: json, key-schema: id bigint, value-schema: '{TABLES[alias]}'}}"
        for alias, topic in topics.items()
    ]
    lines += ["outputs:", *(f"  - {{topic: {out}, pool: Staging, format: json, create: {{}}}}" for out in outs)]
    lines.append("transforms:")
    for out, view in zip(outs, views, strict=True):
        own = {alias: topic for alias, topic in topics.items() if f"{alias}." in view}
        own |= {"p": topics["o"]} if "p." in view else {}
        lines += [f"  - type: view\n    out: {out}\n    tables: {json.dumps(own)}", indent(view.strip("\n"), "    ")]
    return "\n".join(lines) + "\n"


DOCUMENTS = """
from: o JOIN c ON o.customer = c.id LEFT JOIN l ON l.order_id = o.id
where: o.status <> 'draft'
key: {id: o.id}
value:
  id: o.id
  customer: c.name
  lines: collect_list(CASE WHEN l.id IS NOT NULL THEN struct(l.id, l.qty) END)
  total: sum(l.qty)
"""
DOCUMENTS_SQL = """
    SELECT {'id': o.id}, {'id': o.id, 'customer': c.name,
        'lines': coalesce(list({'id': l.id, 'qty': l.qty} ORDER BY l.id, l.qty) FILTER (l.id IS NOT NULL), []),
        'total': sum(l.qty)::bigint}
    FROM o JOIN c ON o.customer = c.id LEFT JOIN l ON o.id = l.order_id WHERE o.status <> 'draft' GROUP BY o.id, c.name"""
ROWS = """
from: o JOIN c ON o.customer = c.id JOIN l ON l.order_id = o.id
key: {order: o.id, line: l.id}
value: {name: c.name, qty: l.qty}
"""
ROWS_SQL = """
    SELECT {'order': o.id, 'line': l.id}, {'name': c.name, 'qty': l.qty}
    FROM o JOIN c ON o.customer = c.id JOIN l ON o.id = l.order_id"""
TOTALS = """
from: c LEFT JOIN o ON c.id = o.customer
key: {customer: c.id}
value: {orders: count(o.id), open: count(*) FILTER (WHERE o.status = 'open'), name: c.name}
"""
TOTALS_SQL = """
    SELECT {'customer': c.id}, {'orders': count(o.id), 'open': count(*) FILTER (o.status = 'open'), 'name': c.name}
    FROM c LEFT JOIN o ON c.id = o.customer GROUP BY c.id, c.name"""


NAMED = """
from: o JOIN c ON o.customer = c.id
key: "concat(o.id, '-', c.name)"
value: {status: o.status}
"""
"""No field of the key is of one table alone."""
NAMED_SQL = "SELECT concat(o.id, '-', c.name), {'status': o.status} FROM o JOIN c ON o.customer = c.id"


@pytest.mark.slow
def test_a_document_follows_its_tables(make: Make) -> None:
    shop = make(DOCUMENTS)
    out = shop.it.out
    shop.send("c", (1, {"name": "Ann"}), (2, {"name": "Bob"}))
    shop.send("o", (10, {"customer": 1, "status": "open"}), (11, {"customer": 2, "status": "draft"}))
    shop.send(
        "l", (100, {"order_id": 10, "qty": 3}), (101, {"order_id": 10, "qty": 4}), (102, {"order_id": 99, "qty": 9})
    )
    assert shop.it.step() is not None
    shop.check({out: DOCUMENTS_SQL})
    shop.send("c", (1, {"name": "Anna"}))
    shop.send("o", (11, {"customer": 2, "status": "open"}))
    shop.send("l", (101, None))
    assert shop.it.step() is not None
    shop.check({out: DOCUMENTS_SQL})
    shop.send("o", (10, None))
    assert shop.it.step() is not None
    shop.check({out: DOCUMENTS_SQL})
    staged = len(shop.it.staged())
    shop.send("l", (101, {"order_id": 11, "qty": 1, "note": "unused"}))
    shop.it.step()
    shop.send("l", (101, {"order_id": 11, "qty": 1, "note": "changed"}))
    shop.it.step()
    shop.check({out: DOCUMENTS_SQL})
    assert len(shop.it.staged()) == staged + 1
    _, rows = run_query(
        shop.it.pipeline, rewrite(f"select key, value from Staging.`{out}`@latest", tables_of(shop.it.pipeline))
    )
    assert {json.dumps(row["key"]): row["value"] for row in rows} == shop.folded(out)


ABSENT = {
    "from: o LEFT JOIN c ON c.id = o.customer\nwhere: c.id IS NULL\nkey: {id: o.id}\nvalue: {x: o.status}": """
        SELECT {'id': o.id}, {'x': o.status} FROM o LEFT JOIN c ON c.id = o.customer WHERE c.id IS NULL""",
    "from: o LEFT JOIN c ON c.id = o.customer\nwhere: c.id IS NULL\nkey: {s: o.status}\nvalue: {n: count(*)}": """
        SELECT {'s': o.status}, {'n': count(*)} FROM o LEFT JOIN c ON c.id = o.customer WHERE c.id IS NULL GROUP BY o.status""",
    "from: o LEFT JOIN c ON c.id = o.customer\nkey: {id: o.id}\nvalue: CASE WHEN c.id IS NULL THEN struct(o.status AS x) END": """
        SELECT {'id': o.id}, {'x': o.status} FROM o LEFT JOIN c ON c.id = o.customer WHERE c.id IS NULL""",
    "from: l LEFT JOIN o ON o.id = l.order_id LEFT JOIN c ON c.id = o.customer\nwhere: coalesce(c.name, '') <> 'x'\n"
    "key: {id: l.id}\nvalue: {q: l.qty, s: o.status}": """
        SELECT {'id': l.id}, {'q': l.qty, 's': o.status}
        FROM l LEFT JOIN o ON o.id = l.order_id LEFT JOIN c ON c.id = o.customer WHERE coalesce(c.name, '') <> 'x'""",
}  # fmt: skip
"""Views whose rows come and go with the absence of a joined row, each with its query for DuckDB."""


OPTIONAL = {
    "from: o LEFT JOIN c ON c.id = o.customer\nkey: {name: \"coalesce(c.name, 'none')\"}\nvalue: {n: count(*)}": """
        SELECT {'name': coalesce(c.name, 'none')}, {'n': count(*)}
        FROM o LEFT JOIN c ON c.id = o.customer GROUP BY c.name""",
    "from: o LEFT JOIN c ON c.id = o.customer\nkey: {o: o.id, c: 'coalesce(c.id, -1)'}\nvalue: {s: o.status}": """
        SELECT {'o': o.id, 'c': coalesce(c.id, -1)}, {'s': o.status} FROM o LEFT JOIN c ON c.id = o.customer""",
    "from: l LEFT JOIN o ON o.id = l.order_id LEFT JOIN c ON c.id = o.customer\n"
    "key: {s: \"coalesce(o.status, '?')\", n: \"coalesce(c.name, '?')\"}\nvalue: {q: sum(l.qty)}": """
        SELECT {'s': coalesce(o.status, '?'), 'n': coalesce(c.name, '?')}, {'q': sum(l.qty)}
        FROM l LEFT JOIN o ON o.id = l.order_id LEFT JOIN c ON c.id = o.customer GROUP BY o.status, c.name""",
    "from: o LEFT JOIN c ON c.id = o.customer LEFT JOIN l ON l.order_id = o.id\n"
    "key: {k: \"concat(coalesce(c.name, '-'), coalesce(l.note, '-'))\"}\nvalue: {n: count(*)}": """
        SELECT {'k': concat(coalesce(c.name, '-'), coalesce(l.note, '-'))}, {'n': count(*)}
        FROM o LEFT JOIN c ON c.id = o.customer LEFT JOIN l ON l.order_id = o.id
        GROUP BY concat(coalesce(c.name, '-'), coalesce(l.note, '-'))""",
}  # fmt: skip
"""Views whose key depends on a row that a LEFT JOIN may lack, each with its query for DuckDB."""


_FROM = "o LEFT JOIN c ON c.id = o.customer {} l ON l.id = coalesce(c.id, 2)"
DEFAULTED = {
    f"from: {_FROM.format('LEFT JOIN')}\nkey: {{id: o.id}}\nvalue: {{n: c.name, q: l.qty}}": f"""
        SELECT {{'id': o.id}}, {{'n': c.name, 'q': l.qty}} FROM {_FROM.format('LEFT JOIN')}""",
    f"from: {_FROM.format('JOIN')}\nkey: {{l: l.id}}\nvalue: {{n: count(*), s: max(o.status)}}": f"""
        SELECT {{'l': l.id}}, {{'n': count(*), 's': max(o.status)}} FROM {_FROM.format('JOIN')} GROUP BY l.id""",
    f"from: {_FROM.format('LEFT JOIN')}\nkey: {{o: o.id, l: 'coalesce(l.id, -1)'}}\nvalue: {{n: c.name}}": f"""
        SELECT {{'o': o.id, 'l': coalesce(l.id, -1)}}, {{'n': c.name}} FROM {_FROM.format('LEFT JOIN')}""",
    f"from: {_FROM.format('JOIN')} LEFT JOIN p ON p.id = coalesce(l.order_id, 1)\nkey: {{s: \"coalesce(p.status, '?')\"}}\n"
    "value: {n: count(*)}": f"""
        SELECT {{'s': coalesce(p.status, '?')}}, {{'n': count(*)}}
        FROM {_FROM.format('JOIN')} LEFT JOIN o AS p ON p.id = coalesce(l.order_id, 1) GROUP BY coalesce(p.status, '?')""",
}  # fmt: skip
"""Views with a join that finds rows for a missing row, each with its query for DuckDB."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_random_changes(make: Make, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small batches, in large ones, in large ones that touch many keys, and in both; with folds of state between them."""
    # Each look-up by another column than the key asks the index.
    monkeypatch.setattr(state_index, "SHARE", 0)
    monkeypatch.setattr(state_fold, "RUNS", 2)
    if seed:
        # A large batch writes slices of about three records.
        monkeypatch.setattr(positions, "SMALL", 0)
        monkeypatch.setattr(state, "TASK_RECORDS", 3)
        monkeypatch.setattr(changes, "SAMPLE", 2)
    if seed == 2:
        monkeypatch.setattr(maintenance, "FEW", 0)
        monkeypatch.setattr(state, "FEW_RECORDS", 0)
    shop = make(DOCUMENTS, ROWS, TOTALS, NAMED, *ABSENT, *OPTIONAL, *DEFAULTED)
    outs = [item.topic for item in shop.it.pipeline.outputs]
    queries = DOCUMENTS_SQL, ROWS_SQL, TOTALS_SQL, NAMED_SQL, *ABSENT.values(), *OPTIONAL.values(), *DEFAULTED.values()
    views = dict(zip(outs, queries, strict=True))
    chance = random.Random(seed)
    for batch in range(5):
        if seed == 3:
            monkeypatch.setattr(positions, "SMALL", 20_000 * (batch % 2))
        for _ in range(chance.randint(1, 25)):
            alias = chance.choice("oolllc" if batch else "oc")  # lines come late
            key = chance.randint(0, 8)
            gone = chance.random() < 0.2
            made: dict[str, Any] = {
                "o": {"customer": chance.choice([None, *range(5)]), "status": chance.choice(["open", "draft", "paid"])},
                "c": {"name": chance.choice(["x", "y"])},
                "l": {
                    "order_id": chance.choice([None, *range(9)]),
                    "qty": chance.randint(1, 3),
                    "note": chance.choice("ab"),
                },
            }[alias]
            shop.send(alias, (key, None if gone else made))
        shop.it.step()
        shop.check(views)


@pytest.mark.slow
def test_a_long_history_is_taken_in_batches_of_files(make: Make) -> None:
    """All tables come before the first batch. No batch takes more than two files of ten records."""
    shop = make(DOCUMENTS)
    pipeline, spark = shop.it.pipeline, shop.it.spark
    for first in range(0, 40, 10):
        numbers = range(first, first + 10)
        shop.send("c", *((id % 7, {"name": f"name {id}"}) for id in numbers))
        shop.send("o", *((id, {"customer": id % 7, "status": "open"}) for id in numbers))
        shop.send("l", *((id, {"order_id": id // 2, "qty": id}) for id in numbers))
        shop.it.ingest()
    batches: list[int] = []
    while not (plan := plan_etl(pipeline, "Staging", limit=15)).nothing_to_do:
        slices = {topic: read_raw(spark, pipeline, plan, topic) for topic in plan.ranges}
        done = commit_staging(pipeline, transform(spark, plan, slices))
        batches.append(sum(part.end - part.first for parts in done.consumed.values() for part in parts))
        contiguous = contiguous_output_offsets(pipeline, shop.it.out)
        assert contiguous.passed, contiguous
    assert sum(batches) == 120 and max(batches) <= 20
    shop.check({shop.it.out: DOCUMENTS_SQL})


@pytest.mark.slow
def test_a_fold_of_all_files_drops_deleted_rows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of ten rows, each of which comes and goes, is empty. A row that comes again is a new one."""
    monkeypatch.setattr(state_fold, "RUNS", 2)
    shop = make("from: o\nkey: {id: o.id}\nvalue: {status: o.status}")
    sql = "SELECT {'id': o.id}, {'status': o.status} FROM o"
    for status in ("open", "paid", None, None):
        shop.send("o", *((id, None if status is None else {"status": status}) for id in range(10)))
        shop.it.step()
        shop.check({shop.it.out: sql})
    state = staging.open_staging(shop.it.pipeline.lake, "Staging")
    assert state is not None
    [table] = stored_tables(state.head)
    shop.send("o", (1, None))
    shop.it.step()
    state = staging.open_staging(shop.it.pipeline.lake, "Staging")
    assert state is not None and sum(item.records for item in state_files(state, table).versions) <= 11
    shop.send("o", (1, {"status": "new"}))
    shop.it.step()
    shop.check({shop.it.out: sql})
    assert state_equals_raw(shop.it.pipeline, "Staging", lambda: shop.it.spark).numbers == {"rows": 1}


POINTS = ("etl:state-written", "fold:written", "fold:committed")
"""The crash points of views."""
FOLDS = "from zync_assets.etl.views import state_fold; state_fold.RUNS = 2"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_batch_or_fold_run_again_ends_as_if_nothing_had_been(make: Make, point: str) -> None:
    """The command as a real process, killed with its JVM and workers. Before the batch, a table has files for a fold."""
    shop = make(DOCUMENTS)
    shop.send("o", (10, {"customer": 1, "status": "open"}), (11, {"customer": 1, "status": "open"}))
    shop.send("l", (100, {"order_id": 10, "qty": 3}), (101, {"order_id": 11, "qty": 4}))
    for name in ("Ann", "Anna", "Anne"):
        shop.send("c", (1, {"name": name}))
        shop.it.step()
    shop.send("c", (1, {"name": "Ana"}))
    shop.send("o", (11, None))
    die(shop.it.pipeline, point, "run", "--until-idle", first=FOLDS)
    run(shop.it.pipeline, "run", "--until-idle", first=FOLDS)
    shop.check({shop.it.out: DOCUMENTS_SQL})
    shop.send("l", (101, {"order_id": 10, "qty": 5}))
    shop.it.step()
    shop.check({shop.it.out: DOCUMENTS_SQL})
    assert state_equals_raw(shop.it.pipeline, "Staging", lambda: shop.it.spark).passed


@pytest.mark.slow
def test_a_rebuild_stages_the_differences(make: Make) -> None:
    shop = make(DOCUMENTS)
    out, path = shop.it.out, shop.it.pipeline.path
    shop.send("c", (1, {"name": "Ann"}), (2, {"name": "Bob"}))
    shop.send("o", *((id, {"customer": 1 + id % 2, "status": "open"}) for id in range(4)))
    shop.send("l", (1, {"order_id": 1, "qty": 3}), (2, {"order_id": 2, "qty": 4}))
    shop.it.step()
    path.write_text(
        path.read_text().replace("<> 'draft'", "<> 'draft' AND o.id < 3").replace("c.name", "upper(c.name)")
    )
    edited = Shop(shop.it.loaded(), shop.topics, shop.rows)
    edited.send("c", (2, {"name": "Bo"}))
    edited.it.ingest()
    with pytest.raises(EtlError, match=r"the definition of view .* changed .* zync rebuild"):
        edited.it.etl()
    sql = DOCUMENTS_SQL.replace("<> 'draft'", "<> 'draft' AND o.id < 3").replace("c.name,", "upper(c.name),", 1)
    assert len(list(rebuild_all(edited.it.pipeline, lambda: edited.it.spark, "views"))) == 1
    edited.it.etl()
    edited.check({out: sql})
    staged = len(edited.it.staged())
    assert staged == 4 + 4 + 1  # a tombstone and three other names; then Bob's order is Bo's
    # The state from raw is the same state.
    list(rebuild_all(edited.it.pipeline, lambda: edited.it.spark, "state"))
    assert len(edited.it.staged()) == staged
    state = staging.open_staging(edited.it.lake, "Staging")
    assert state is not None
    indexed = {item.group for item in state.files if (item.group or "").startswith("#index:")}
    assert indexed == {f"#index:{shop.topics['o']}:customer", f"#index:{shop.topics['l']}:order_id"}
    result = state_equals_raw(edited.it.pipeline, "Staging", lambda: edited.it.spark)
    assert (result.passed, result.numbers) == (True, {"rows": 8})
    edited.send("l", (2, None))
    edited.it.step()
    edited.check({out: sql})


@pytest.mark.slow
def test_an_edit_of_the_fields_of_a_views_key_needs_another_topic(make: Make) -> None:
    shop = make(TOTALS)
    shop.send("c", (1, {"name": "Ann"}))
    shop.it.step()
    path = shop.it.pipeline.path
    path.write_text(path.read_text().replace("{customer: c.id}", "{id: c.id}"))
    edited = shop.it.loaded()
    with pytest.raises(
        EtlError, match=r"staged keys have \{customer\}, and .* rules have \{id\}\..*another output topic"
    ):
        list(rebuild_all(edited.pipeline, lambda: edited.spark, "views"))
    assert len(edited.staged()) == 1


@pytest.mark.slow
def test_equal_values_of_two_types_find_each_other(make: Make) -> None:
    """Spark says that '01' and 1 are equal. A reference may be larger than the key's type."""
    view = "from: c LEFT JOIN o ON o.customer = c.{}\nkey: {{id: c.{}}}\nvalue: {{orders: count(o.id)}}"
    views = [view.format(name, name) for name in ("name", "small")]
    shop = make(*views, edit=lambda text: text.replace("name string", "name string, small int"))
    shop.send("c", (1, {"name": "01", "small": 7}), (2, {"name": "1", "small": 8}), (3, {"name": "7", "small": 9}))
    shop.send("o", (1, {"customer": 1}), (2, {"customer": 7}))
    shop.it.step()
    texts, numbers = (output.topic for output in shop.it.pipeline.outputs)
    assert shop.folded(texts) == {
        '{"id": "01"}': {"orders": 1},
        '{"id": "1"}': {"orders": 1},
        '{"id": "7"}': {"orders": 1},
    }
    for batch, customer in enumerate((1, 3_000_000_000), 1):
        shop.send("o", (batch + 2, {"customer": customer}))
        shop.it.step()
        assert shop.folded(texts)['{"id": "01"}'] == shop.folded(texts)['{"id": "1"}'] == {"orders": 2}
    assert shop.folded(numbers)['{"id": 7}'] == {"orders": 1}
    assert state_equals_raw(shop.it.pipeline, "Staging", lambda: shop.it.spark).passed


@pytest.mark.slow
def test_a_result_row_without_a_value_is_none(make: Make) -> None:
    """A null value is a tombstone. A key that was never in the topic gets none, and a rebuild finds nothing to do."""
    shop = make(
        "from: o JOIN c ON o.customer = c.id\nkey: {id: o.id}\nvalue: CASE WHEN c.id > 1 THEN struct(c.name AS name) END"
    )
    shop.send("c", (1, {"name": "Ann"}), (2, {"name": "Ben"}))
    shop.send("o", (1, {"customer": 1}), (2, {"customer": 2}))
    shop.it.step()
    assert shop.folded(shop.it.out) == {'{"id": 2}': {"name": "Ben"}}
    shop.send("o", (2, {"customer": 1}), (3, {"customer": 1}))
    shop.it.step()
    assert (shop.folded(shop.it.out), len(shop.it.staged())) == ({}, 2)
    shop.send("o", (2, None))
    shop.it.step()
    list(rebuild_all(shop.it.pipeline, lambda: shop.it.spark, "state"))
    assert len(shop.it.staged()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["k0", "version", "gone_partition", "old_row"])
def test_an_alias_may_be_any_word(make: Make, alias: str) -> None:
    view = "from: o JOIN c ON o.customer = c.id\nkey: {id: o.id}\nvalue: {name: c.name}"
    shop = make(view, edit=lambda text: re.sub(r'(?<![.\w])o(?=[ ."])', alias, text))
    shop.send("c", (1, {"name": "Ann"}), (2, {"name": "Ben"}))
    for customer in (1, 2):
        shop.send("o", (1, {"customer": customer}), (2, {"customer": customer}))
        shop.it.step()
    shop.send("c", (2, {"name": "Bob"}))
    shop.it.step()
    assert shop.folded(shop.it.out) == {'{"id": 1}': {"name": "Bob"}, '{"id": 2}': {"name": "Bob"}}


def test_the_shown_query_reads_flat_records_as_they_are(make: Make) -> None:
    shop = make(ROWS)
    for text in (" before a raw table", ", read from a raw table"):
        query = explain_rules(shop.it.pipeline)[0].sql
        assert "THEN struct(value AS row) END" in query and "value.op" not in query, text
        shop.send("c", (1, {"name": "Ann"}))
        shop.it.ingest()


@pytest.mark.slow
def test_a_lost_file_of_the_state_is_made_again(make: Make) -> None:
    shop = make(TOTALS)
    shop.send("c", (1, {"name": "Ann"}), (2, {"name": "Ben"}))
    shop.it.step()
    lost = list(Path(shop.it.lake, "Staging").rglob("state-*/gone=0/*.parquet"))
    assert lost
    for path in lost:
        path.unlink()
    result = state_equals_raw(shop.it.pipeline, "Staging", lambda: shop.it.spark)
    assert not result.passed
    assert "is in the Delta log and can't be read" in result.summary
    assert result.summary.endswith(f"Run: {shop.it.pipeline.command('rebuild', '--state')}")
    list(rebuild_all(shop.it.pipeline, lambda: shop.it.spark, "state"))
    assert state_equals_raw(shop.it.pipeline, "Staging", lambda: shop.it.spark).passed
    shop.send("c", (2, {"name": "Bob"}))
    shop.it.step()
    shop.check({shop.it.out: TOTALS_SQL})


@pytest.mark.slow
def test_rows_that_no_view_can_show(make: Make) -> None:
    shop = make("from: o\nkey: {customer: o.customer}\nvalue: {id: o.id}")
    shop.send("o", (1, {"customer": 7}), (2, {"customer": None}))
    shop.it.step()
    assert [row["value"] for row in shop.it.staged()] == [{"id": 1}]
    assert shop.it.classes(shop.topics["o"]) == {"done": 1, "quarantined": 1}
    shop.send("o", (3, {"customer": 7}))
    shop.it.ingest()
    with pytest.raises(EtlError, match=r'two result rows have the key .*"customer":7.*"id":1.*"id":3') as caught:
        shop.it.etl()
    assert "on-duplicate-key" in str(caught.value) and "z_" not in str(caught.value)


@pytest.mark.parametrize(
    ("large", "views", "batches"),
    [
        (False, [*ABSENT.items()][:1] + [*OPTIONAL.items()][3:], 3),
        pytest.param(False, [*ABSENT.items(), *OPTIONAL.items(), *DEFAULTED.items()], 6, marks=pytest.mark.slow),
        pytest.param(True, [*ABSENT.items(), *OPTIONAL.items(), *DEFAULTED.items()], 6, marks=pytest.mark.slow),
    ],
    ids=["few", "all", "large"],
)
def test_rows_that_a_joined_row_takes_away_come_back_when_it_is_gone(
    make: Make, large: bool, views: list[tuple[str, str]], batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(positions, "SMALL", 0)
    shop = make(*(view for view, _ in views))
    queries = {f"{shop.topics['o'][:-2]}.out{at}": sql for at, (_, sql) in enumerate(views)}
    shop.send("o", (1, {"customer": 7, "status": "a"}), (2, {"customer": 8, "status": "a"}))
    shop.send("l", (1, {"order_id": 1, "qty": 1}), (2, {"order_id": 3, "qty": 2}))
    shop.send("c", (9, {"name": "Zoe"}))
    shop.it.step()
    shop.check(queries)
    changed: list[dict[str, list[tuple[int, dict[str, Any] | None]]]] = [
        {"c": [(7, {"name": "Ann"})]},
        {"c": [(8, {"name": "Ben"})], "o": [(3, {"customer": 7, "status": "b"})]},
        {"c": [(7, None)]},
        {"c": [(7, {"name": "x"}), (8, None)], "o": [(1, {"customer": 9, "status": "a"})]},
        {"o": [(1, {"customer": 7, "status": "b"}), (3, None)], "c": [(7, {"name": "y"})]},
        {"c": [(7, None), (8, {"name": "Bob"})], "l": [(1, {"order_id": 3, "qty": 1})]},
    ]
    for records in changed[:batches]:
        for alias, each in records.items():
            shop.send(alias, *each)
        shop.it.step()
        shop.check(queries)
        assert all(len(row["source"]) > 0 for topic in queries for row in shop.it.staged(topic))


@pytest.mark.slow
def test_the_deletion_that_brings_a_row_with_a_null_key_back_goes_into_quarantine(make: Make) -> None:
    """The row has no record of the batch; its touched key has."""
    shop = make(
        "from: o LEFT JOIN c ON c.id = o.customer\nwhere: c.id IS NULL\nkey: {s: o.status}\nvalue: {n: count(*)}"
    )
    [out] = [item.topic for item in shop.it.pipeline.outputs]
    shop.send("o", (1, {"customer": 7}), (2, {"customer": 8, "status": "a"}))
    shop.send("c", (7, {"name": "Ann"}))
    shop.it.step()
    shop.send("c", (7, None))
    shop.it.step()
    assert shop.it.classes(shop.topics["c"]) == {"done": 1, "quarantined": 1}
    shop.send("o", (3, {"customer": 8, "status": "a"}))
    shop.it.step()
    assert shop.folded(out) == {'{"s": "a"}': {"n": 2}}
