"""Views in a pipeline file: what the model holds, and what is refused, with the place and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.errors import PipelineFileError
from zync_assets.pipeline import Rule, Shape, Side, View, ViewTable
from zync_assets.pipeline_file import load
from zync_assets.pipeline_file.view_expressions import grouped, ordered
from zync_assets.queries import ViewJoin

HEAD = """\
inputs:
  - {topic: shop.orders, pool: Raw}
  - {topic: shop.customers, pool: Raw}
  - {topic: shop.lines, pool: Raw}
outputs:
  - {topic: Documents, pool: Staging}
  - {topic: Others, pool: Staging}
  - {topic: Events, pool: Events}
transforms:
"""
ORDER = {
    "name": "order-document",
    "type": "view",
    "tables": "{o: {topic: shop.orders}, c: shop.customers, l: {topic: shop.lines, key: '{id: value.id}', row: value,"
    " deleted: value IS NULL}}",
    "from": "o JOIN c ON o.customer_id = c.id LEFT JOIN l ON l.order_id = o.id",
    "where": "o.status <> 'draft'",
    "key": "{id: o.id}",
    "value": "{id: o.id, customer: c.name, lines: 'collect_list(struct(l.position, l.sku))', total: sum(l.qty * l.price)}",
    "out": "Documents",
}


def rule(**changes: str | None) -> str:
    """A rule as the file has it; None leaves a key out."""
    keys = ORDER | {name.replace("_", "-").rstrip("-"): text for name, text in changes.items()}
    lines = [f"{name}: {text}" for name, text in keys.items() if text is not None]
    return "  - " + "\n    ".join(lines) + "\n"


def read(folder: Path, *rules: str) -> tuple[Rule, ...]:
    file = folder / "shop.yaml"
    file.write_text(HEAD + "".join(rules))
    return load(file, {}).rules


def problems(folder: Path, *rules: str) -> list[str]:
    with pytest.raises(PipelineFileError) as caught:
        read(folder, *rules)
    return [f"{problem.key}: {problem.message}" for problem in caught.value.problems]


@pytest.mark.parametrize(
    "text", ["oo JOIN c ON oo.a = c.a", "o AS oo JOIN c ON oo.a = c.a", "o oo JOIN c ON oo.a = c.a"]
)
def test_an_alias_that_from_alone_has_is_one_problem(tmp_path: Path, text: str) -> None:
    [problem] = problems(tmp_path, rule(from_=text, where="oo.b", key="{id: oo.id}", value="{n: sum(oo.n)}"))
    assert problem.startswith("transforms[0].from: `")


def test_one_fault_of_a_view_is_one_problem(tmp_path: Path) -> None:
    [misspelt] = problems(tmp_path, rule(from_="oo JOIN c ON o.customer_id = c.id", value="{id: o.id}"))
    assert "`oo` is no alias" in misspelt
    [missing] = problems(tmp_path, rule(key=None))
    assert "key: is missing" in missing


def test_a_view_is_its_tables_and_its_joins(tmp_path: Path) -> None:
    [found] = read(tmp_path, rule())
    value: Shape = {
        "id": "o.id",
        "customer": "c.name",
        "lines": "collect_list(struct(l.position, l.sku))",
        "total": "sum(l.qty * l.price)",
    }
    tables = (
        ViewTable("o", "shop.orders"),
        ViewTable("c", "shop.customers"),
        ViewTable("l", "shop.lines", {"id": "value.id"}, "value", "value IS NULL"),
    )
    joins = (
        ViewJoin("inner", "c", (("o.customer_id", "c.id"),), "o"),
        ViewJoin("left", "l", (("o.id", "l.order_id"),), "o"),
    )
    sides = Side("o", "shop.orders"), Side("c", "shop.customers"), Side("l", "shop.lines")
    view = View(tables, "o", joins, "o.status <> 'draft'")
    assert found == Rule("view", "order-document", sides, "Documents", {"id": "o.id"}, value, view=view)


def test_a_key_in_many_partitions_fails_or_goes_by_time(tmp_path: Path) -> None:
    def table(word: str) -> str:
        entry = f"{{topic: shop.orders, key-in-many-partitions: {word}}}"
        return rule(tables=f"{{o: {entry}}}", from_="o", value="{id: o.id}")

    found = [read(tmp_path, table(word))[0].view for word in ("fail", "latest-time")]
    assert [view.tables[0].by_time for view in found if view is not None] == [False, True]
    assert problems(tmp_path, table("last")) == [
        "transforms[0].tables.o.key-in-many-partitions: must be one of fail, latest-time"
    ]


def test_a_topic_with_two_aliases_is_one_side_and_two_views_use_one_input(tmp_path: Path) -> None:
    first, second = read(
        tmp_path,
        rule(
            tables="{a: shop.orders, b: shop.orders}",
            from_="a LEFT OUTER JOIN b ON a.parent = b.id AND coalesce(a.kind, 0) = (b.kind)",
            where=None,
            key="a.id",
            value="{parent: b.id}",
            on_duplicate_key="a.revision",
        ),
        rule(name="other", tables="{o: shop.orders}", from_="o", value="{id: o.id}", out="Others"),
    )
    assert first.sides == (Side("a", "shop.orders"),)
    assert first.view is not None and second.view is not None
    assert first.view.joins == (
        ViewJoin("left", "b", (("a.parent", "b.id"), ("coalesce(a.kind, 0)", "(b.kind)")), "a"),
    )
    assert first.view.on_duplicate_key == "a.revision"
    assert (second.view.root, second.view.joins) == ("o", ())


@pytest.mark.parametrize(
    "changes",
    [
        {"where": "o.status IN ('a', 'b') AND exists(o.tags, t -> t = c.tag)"},
        {"where": "true"},
        {"where": "o.country = c.country AND l.id IS NULL"},
        {"value": "{n: count(*), big: count(DISTINCT l.sku) FILTER (WHERE l.qty > 1), mean: avg(l.price) + 1}"},
        {
            "value": "{all: bool_and(l.ok), any: bool_or(l.ok), top: 'max(struct(l.price, l.sku)).sku', low: min(l.price)}"
        },
        {"value": "{skus: collect_set(l.sku), ids: 'coalesce(array_agg(l.id), array())'}"},
        {"value": "to_json(struct(o, c))"},
        {"key": "{id: o.id, customer: c.id}"},
        {"key": "upper(O.ID)"},
        {"headers": "{origin: c.country, lines: 'CAST(count(l.id) AS STRING)'}"},
        {"on-duplicate-key": "max(l.revision)"},
        {"from": "o INNER JOIN c ON c.id = o.customer_id LEFT JOIN l ON CASE WHEN l.ok THEN l.order_id END = o.id"},
        {"from": "'`o` join C on left(o.customer_id, 2) = c.id left join l on right(l.order_id, 3) = c.`join`'"},
        {"from": "l JOIN o ON l.order_id = o.id JOIN c ON (o.customer_id = c.id) AND o.region = c.region"},
    ],
)
def test_a_view_that_can_be_maintained_is_legal(changes: dict[str, str], tmp_path: Path) -> None:
    [found] = read(tmp_path, rule(**changes))
    assert found.view is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": None}, "tables: is missing; write {o: shop.orders}"),
        ({"tables": "{}"}, "tables: is empty; write"),
        ({"tables": "[shop.orders]"}, "tables: must be a mapping of aliases, not a list"),
        ({"tables": "{o: shop.order, c: shop.customers, l: shop.lines}"}, "tables.o: `shop.order` is no input of this"),
        (
            {"tables": "{o: {topic: Others}, c: shop.customers, l: shop.lines}"},
            "tables.o.topic: `Others` is an output, not",
        ),
        (
            {"tables": "{o: {key: key}, c: shop.customers, l: shop.lines}"},
            "tables.o.topic: is missing; name a topic of",
        ),
        ({"tables": "{o: {topic: shop.orders, rows: value}, c: shop.customers, l: shop.lines}"}, "did you mean `row`?"),
        (
            {"tables": "{o: {topic: shop.orders, key: o.id}, c: shop.customers, l: shop.lines}"},
            "tables.o.key: `o.id` is not",
        ),
        (
            {"tables": "{o: {topic: shop.orders, key: null}, c: shop.customers, l: shop.lines}"},
            "must not be null; a row",
        ),
        (
            {"tables": "{o: {topic: shop.orders, row: rand()}, c: shop.customers, l: shop.lines}"},
            "tables.o.row: `rand()` is",
        ),
        (
            {"tables": "{o: {topic: shop.orders, deleted: op}, c: shop.customers, l: shop.lines}"},
            "tables.o.deleted: `op` is",
        ),
        (
            {"tables": "{o: shop.orders, c: shop.customers, l: shop.lines, x: shop.lines}"},
            "tables: `x` is not joined; join",
        ),
        (
            {"tables": "{o: shop.orders, c: shop.customers, l: shop.lines, O: shop.lines}"},
            "differs from `o` in case only",
        ),
        (
            {"tables": "{o: shop.orders, c: shop.customers, l: shop.lines, value: shop.lines}"},
            "tables.value: is a word of its",
        ),
        (
            {"tables": "{o: shop.orders, c: shop.customers, l: shop.lines, z_v: shop.lines}"},
            "tables.z_v: begins with `z_`",
        ),
        (
            {"tables": "{o: shop.orders, c: shop.customers, l: shop.lines, left: shop.lines}"},
            "tables.left: is a word of SQL",
        ),
        (
            {"tables": "{o: shop.orders, c: shop.customers, l: shop.lines, a b: shop.lines}"},
            "is no alias; write letters",
        ),
        ({"from": None}, "from: is missing; name the joined aliases"),
        (
            {"from": "o JOIN c ON o.customer_id < c.id"},
            "is no equality of the two sides; must be equalities joined by AND",
        ),
        ({"from": "o JOIN c ON o.customer_id < c.id"}, "put another condition into `where:`"),
        ({"from": "o LEFT JOIN l ON l.order_id = o.id AND l.ok"}, "CASE WHEN l.open THEN l.order_id END = o.id"),
        ({"from": "o LEFT JOIN l ON l.order_id = o.id AND l.kind = 1"}, "`l.kind = 1` does not compare l with a table"),
        ({"from": "o JOIN c ON o.customer_id <=> c.id"}, "use `=`; a null join key matches nothing"),
        ({"from": "o JOIN c ON o.customer_id = c.id OR o.x = c.x"}, "OR is not supported"),
        ({"from": "o JOIN c ON o.a + c.b = c.id"}, "`o.a + c.b` mixes c and o; a side is of one table"),
        ({"from": "o JOIN c ON c.a = c.b"}, "`c.a = c.b` does not compare c with a table before it"),
        ({"from": "o JOIN c ON o.customer_id = l.id JOIN l ON l.order_id = o.id"}, "`l` is joined later, or never"),
        (
            {"from": "o JOIN c ON o.cid = c.id JOIN l ON l.a = o.a AND l.b = c.b"},
            "the joins form a tree: keep one table",
        ),
        ({"from": "o JOIN c ON o.customer_id = x.id"}, "no table of the view has the alias `x`; aliases: o, c, l"),
        ({"from": "o JOIN c ON customer_id = c.id"}, "`customer_id` is not known here; write `o.customer_id`"),
        ({"from": "o JOIN c ON sum(o.a) = c.id"}, "only the `value:` of a view aggregates"),
        ({"from": "o RIGHT JOIN c ON o.cid = c.id"}, "RIGHT JOIN is not supported; begin with the table on the right"),
        ({"from": "o FULL OUTER JOIN c ON o.cid = c.id"}, "FULL JOIN is not supported; write a view with a LEFT JOIN"),
        ({"from": "o CROSS JOIN c"}, "CROSS JOIN is not supported: a change would touch every row"),
        ({"from": "o NATURAL JOIN c"}, "NATURAL JOIN is not supported; name the columns"),
        ({"from": "o LEFT SEMI JOIN c ON o.cid = c.id"}, "SEMI JOIN is not supported"),
        ({"from": "o LEFT ANTI JOIN c ON o.cid = c.id"}, "ANTI JOIN is not supported"),
        ({"from": "o JOIN LATERAL c ON o.cid = c.id"}, "LATERAL is not supported"),
        ({"from": "o, c"}, "must not hold `,`; write JOIN … ON with an equality"),
        ({"from": "o JOIN c USING (id)"}, "must not hold USING, which names no table; write ON o.… = c.…"),
        ({"from": "o JOIN c"}, "JOIN c has no ON; write ON o.… = c.…"),
        ({"from": "o JOIN c ON"}, "nothing follows ON of c"),
        ({"from": "o LEFT c ON o.a = c.a"}, "the word JOIN is missing after LEFT"),
        ({"from": "o JOIN (c JOIN l ON c.a = l.a) ON o.a = c.a"}, "must not hold parentheses around tables"),
        ({"from": "o JOIN o ON o.a = o.b"}, "joins `o` twice; give the topic a second alias"),
        ({"from": "o JOIN cc ON o.a = cc.b"}, "`cc` is no alias of `tables:`; aliases: o, c, l"),
        ({"from": "shop.orders"}, "`shop` is no alias of `tables:`"),
        ({"from": "o AS x JOIN c ON x.a = c.a"}, "`AS` can't stand after `o`; `tables:` names the aliases"),
        ({"from": "SELECT * FROM o"}, "must be an expression, not a statement"),
        ({"from": "o JOIN c ON o.a = c.a -- why"}, "holds a comment"),
        ({"from": "o JOIN c ON o.a = 'c"}, "a quote or a comment is not closed"),
        ({"where": "sum(l.qty) > 1"}, "where: `sum()` is an aggregate; only the `value:` of a view aggregates"),
        ({"where": "o.id IN (SELECT c.id)"}, "where: must not hold a query; a view joins its tables in `from:`"),
        ({"where": "{left: o.a}"}, "where: must be one expression over the rows of the view's tables"),
        ({"key": None}, "key: is missing; write one expression or a mapping"),
        ({"key": "{id: l.id}"}, "key: `key.id` is null where the LEFT JOIN finds no row, and a row without a key goes"),
        ({"key": "{id: (l.id.x)}"}, "write coalesce((l.id.x), …), or JOIN `l`"),
        ({"key": "null"}, "key: names no column; a view needs a key"),
        (
            {"key": "{id: o.id, part: {x: null}}"},
            "key: holds a null, and a row with a null in its key goes into quarantine",
        ),
        ({"key": "{id: 1}"}, "key: names no column; a view needs a key"),
        ({"key": "count(*)"}, "key: `count()` is an aggregate; only the `value:` of a view aggregates"),
        ({"key": "max(o.id)"}, "key: `max()` is an aggregate; only the `value:` of a view aggregates"),
        ({"value": None}, "value: is missing"),
        ({"value": "null"}, "value: must not be null; a view makes its tombstones itself"),
        (
            {"value": "{n: row_number() OVER (ORDER BY o.id)}"},
            "value.n: must not hold a window function; a view can't be",
        ),
        ({"value": "{n: rank()}"}, "value.n: `rank()` is a window function; a view can't be maintained with it"),
        ({"value": "{n: (SELECT max(c.id) FROM c)}"}, "value.n: must not hold a query"),
        ({"value": "{n: exists(SELECT 1)}"}, "value.n: must not hold a query"),
        ({"value": "{n: o.*}"}, "value.n: must not hold `*`; name the fields"),
        ({"value": "{n: first(l.sku)}"}, "the aggregates of a view are count, sum, min, max, avg"),
        ({"value": "{n: first(l.sku)}"}, "(use min or max)"),
        ({"value": "{n: stddev(l.qty)}"}, "`stddev()` is an aggregate; the aggregates of a view are count"),
        ({"value": "{n: 'max_by(l.sku, l.qty)'}"}, "use max(struct(y, x)).x"),
        ({"value": "{n: sum(count(*))}"}, "`count()` stands in another aggregate"),
        (
            {"value": "{n: collect_list(l.sku ORDER BY l.position)}"},
            "must not hold ORDER BY; a collection is ordered by its",
        ),
        ({"value": "{n: explode(o.tags)}"}, "`explode()` makes rows; a view has a row for each joined row"),
        ({"value": "{n: now()}"}, "`now()` is not deterministic; use a column of a table"),
        ({"value": "{n: uuid()}"}, "`uuid()` is not deterministic"),
        ({"value": "{n: current_date}"}, "`current_date` is not deterministic"),
        ({"value": "{n: upr(o.x)}"}, "Spark has no function `upr`; did you mean `upper`?"),
        ({"value": "{n: x.name}"}, "no table of the view has the alias `x`; aliases: o, c, l"),
        ({"value": "{n: name}"}, "write `o.name` or `c.name` or `l.name` (text is written 'name')"),
        ({"value": "{n: value.after.name}"}, "a view sees rows, not records: write `o.name`"),
        ({"value": "{n: o.value.after.name}"}, "`o` is a row of the table already: write `o.name`"),
        ({"on-duplicate-key": "max(o.revision)", "value": "o.id"}, "on-duplicate-key: `max()` is an aggregate; only"),
        ({"on-duplicate-key": "rand()"}, "on-duplicate-key: `rand()` is not deterministic"),
        ({"headers": "{a: x.y}"}, "headers.a: `x.y` is not known here"),
        ({"join-on": "o.a = c.a"}, "join-on: belongs to a rule of type denorm; a view rule has `tables` and `from`"),
        ({"in": "shop.orders"}, "in: belongs to a rule of type stateless; a view rule has"),
    ],
)
def test_what_can_t_be_maintained_is_refused_with_place_and_cure(
    changes: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    assert any(message in problem for problem in problems(tmp_path, rule(**changes))), problems(
        tmp_path, rule(**changes)
    )


def test_all_problems_of_a_view_are_reported_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        rule(
            from_="o RIGHT JOIN c ON a = c.b FULL JOIN l ON o.a < l.b", where="rank() = 1", value="{n: z.a, m: rand()}"
        ),
    )
    assert [problem.split(":")[0].removeprefix("transforms[0].") for problem in found] == [
        *("from", "from", "where", "value.n", "value.m"),
    ]


STATELESS = "  - {name: event, type: stateless, in: shop.lines, out: %s, key: in.key, value: in.value}\n"


def test_a_topic_is_a_table_or_an_event_input_of_a_pool(tmp_path: Path) -> None:
    message = (
        "transforms[1].in: `shop.lines` is a table of view `order-document` (line 10) in the pool Staging; a topic is a table"
        " or an event input of a pool: use two pools, one for views, one for other rules"
    )
    assert problems(tmp_path, rule(), STATELESS % "Others") == [message]
    [found] = problems(tmp_path, STATELESS % "Others", rule())
    assert found.startswith("transforms[1].tables: `shop.lines` is an event input of rule `event` (line 10)")
    assert len(read(tmp_path, rule(), STATELESS % "Events")) == 2


def test_a_view_has_a_topic_of_its_own_without_a_shape(tmp_path: Path) -> None:
    [found] = problems(tmp_path, rule(), rule(name="second"))
    assert "out: `Documents` is the topic of view `order-document` (line 10); a view has a topic of its own" in found
    file = tmp_path / "shop.yaml"
    file.write_text(
        HEAD.replace("Documents, pool: Staging", "Documents, pool: Staging, shape: {where: value.id > 1}") + rule()
    )
    with pytest.raises(PipelineFileError, match="has a shape; put it into `where:`"):
        load(file, {})


@pytest.mark.parametrize(
    ("sql", "made"),
    [
        ("collect_list(struct(l.a, l.b))", "sort_array(collect_list(struct(l.a, l.b)))"),
        ("size(Collect_Set(l.a)) + 1", "size(sort_array(Collect_Set(l.a))) + 1"),
        ("array_agg(l.a) FILTER (WHERE l.a > (1))", "sort_array(array_agg(l.a) FILTER (WHERE l.a > (1)))"),
        ("o.collect_list", "o.collect_list"),
        ("'collect_list(x)'", "'collect_list(x)'"),
    ],
)
def test_a_collection_is_sorted_with_its_filter(sql: str, made: str) -> None:
    assert ordered(sql) == made


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("upper(c.name)", ("upper(c.name)",)),
        ("sum(l.qty)", ()),
        ("o.discount * sum(l.qty * o.rate) + o.discount", ("o.discount",)),
        ("transform(sort_array(collect_list(l.a)), x -> x + o.b)", ("o.b",)),
        ("'text'", ()),
    ],
)
def test_an_expression_groups_by_its_columns_outside_aggregates(sql: str, columns: tuple[str, ...]) -> None:
    assert grouped(sql) == columns
