"""The key ``sinks`` of a pipeline file, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.errors import PipelineFileError
from zync_assets_tests.pipeline_file.problems import assert_problem, loaded

TEXT = """\
kafka: {bootstrap.servers: localhost}
lake: ./lake
inputs:
  - {topic: shop.orders, pool: Raw, key-format: string, value-format: json, schema: "id bigint, country string"}
  - {topic: web.orders, pool: Raw, key-format: string, value-format: json, schema: "id bigint, country string"}
sinks:
  - {name: one, type: sqlite, url: shop.db, from: [Raw.shop.*], key: [id]}
  - {name: two, type: sqlite, url: shop.db, from: [Raw.web.*], key: [id], table: others}
"""
SHARED = "from: [Raw.shop.*], key: [id], table: orders"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("name: two", "name: one", 8, "sinks[1].name: `one` is the name of another sink"),
        ("name: two", "name: Raw", 8, "sinks[1].name: `Raw` is the name of a pool"),
        ("name: two", "name: kafka", 8, "sinks[1].name: `kafka` is reserved for Kafka's topics; the assets"),
        (
            "key: [id], table: others",
            "key: [kafka.nope]",
            8,
            "sinks[1].key: names kafka.nope, which no record has; of Kafka there are kafka.topic, kafka.partition,",
        ),
        ("table: others", "table: a.b.c", 8, "sinks[1].table: is a.b.c; write a table as `table` or `schema.table`"),
        ("table: others", "table: shop.", 8, "sinks[1].table: is shop.; write a table as"),
        ("name: two", "name: a b", 8, "sinks[1].name: must consist of letters, digits and _"),
        ("type: sqlite", "type: sqlit", 7, "or a class as package.module:Class; did you mean `sqlite`?"),
        ("type: sqlite, url: shop.db", "type: postgres, url: 'mysql://u:secret@h/d'", 7, "is no address of a postgres"),
        (
            "url: shop.db",
            "url: 'sqlite:///'",
            7,
            "sinks[0].url: is no address of a sqlite database; write a file's path",
        ),
        (
            "type: sqlite, url: shop.db, from: [Raw.shop.*], key: [id]",
            "type: files, url: 's3:/bucket/x', from: [Raw.shop.*]",
            7,
            "sinks[0].url: has one / after s3:; write s3:// for a bucket, or ./ before a folder",
        ),
        *(
            ("type: sqlite, url: shop.db", f"type: {kind}, url: '{begin}{rest}'", 7, f"sinks[0].url: {message}")
            for kind, begin in (
                ("postgres", "postgresql://"),
                ("mysql", "mysql://"),
                ("clickhouse", "clickhouse://"),
                ("databend", "databend://"),
            )
            for rest, message in (
                (
                    "me:S3CRE@TAIL@host:1/shop",
                    "has an @ or a : too many. In a user or a password, write @ as %40",
                ),
                ("me:S3:CRE@host/shop", "has an @ or a : too many"),
                ("me:S3/CRE@host/shop", "has an @ or a : too many"),
                ("me:12/p@S3CRE@host/shop", "has an @ or a : too many"),
                ("me:12#p@S3CRE@host/shop", "has an @ or a : too many"),
                ("me:?p@S3CRE@host/shop", "has an @ or a : too many"),
                ("me:pw@host:abc/shop", "has a port that is no number. Write host:port"),
                ("me:pw@host:99999/shop", "has a port above 65535. Write host:port"),
            )
        ),
        (
            "table: others",
            "table: Zync_positions",
            8,
            "the table Zync_positions; names with zync_ are zync's own tables'",
        ),
        ("Raw.shop.*", "Raw.shops.*", 7, "sinks[0].from: Raw.shops.* is no source"),
        ("Raw.shop.*", "Raw.*", 7, "gives Raw.shop.orders and Raw.web.orders the same table orders"),
        ("table: others", "mode: append", 8, "sinks[1].mode"),
        ("table: others", "table: '{name}'", 8, "knows no {name}; write {topic} or {whole-topic}"),
        ("table: others", "on-bad-record: fail, max-bad-records: 1", 8, "has no effect, because on-bad-record: fail"),
        ("table: others", "before: {where: rand() < 1}", 8, "sinks[1].before.where"),
        (
            "from: [Raw.web.*], key: [id], table: others",
            SHARED,
            8,
            "orders gets the rows of Raw.shop.orders from sink one",
        ),
    ],
)
def test_an_error_names_line_key_and_cure(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert_problem(tmp_path, TEXT, old, new, line, message)
    with pytest.raises(PipelineFileError) as raised:
        loaded(tmp_path, TEXT.replace(old, new, 1))
    assert not any(part in str(raised.value) for part in ("S3", "CRE", "TAIL"))


@pytest.mark.parametrize(
    ("url", "file"),
    [("shop.db", "shop.db"), ("sqlite:///shop.db", "shop.db"), ("sqlite:///a/../b/shop.db", "b/shop.db")],
)
def test_the_path_of_a_database_begins_at_the_pipeline_file(tmp_path: Path, url: str, file: str) -> None:
    text = TEXT.replace("url: shop.db", f"url: '{url}'", 1)
    assert loaded(tmp_path, text).sinks[0].url == f"sqlite:///{tmp_path.resolve() / file}"
    absolute = f"sqlite:///{tmp_path.resolve()}/x.db"
    assert loaded(tmp_path, TEXT.replace("url: shop.db", f"url: '{absolute}'", 1)).sinks[0].url == absolute


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://h/d?foo=S3", "has the option foo, which is unknown; known are ssl_ca, ssl_cert, ssl_key"),
        ("mariadb://h/d?ssl_caa=S3", "has the option ssl_caa, which is unknown; did you mean `ssl_ca`?"),
        ("mysql://h/d?ssl_ca=S3&ssl_ca=CRE", "has the option ssl_ca twice; write it once"),
        ("mysql://h/d?connect_timeout=S3", "has the option connect_timeout, which must be a whole number of seconds"),
        ("mysql://h/d?ssl_disabled=S3", "has the option ssl_disabled, which must be true or false"),
        (
            "postgres://h/d?connect_timeout=S3",
            "has the option connect_timeout, which must be a whole number of seconds",
        ),
        ("postgres://h/d?sslmode=verify-fullS3", "has the option sslmode, which must be one of disable, allow, prefer"),
    ],
)
def test_an_option_of_an_address_that_can_not_work_is_refused(tmp_path: Path, url: str, message: str) -> None:
    kind = url.partition(":")[0].replace("mariadb", "mysql")
    assert_problem(tmp_path, TEXT, "type: sqlite, url: shop.db", f"type: {kind}, url: '{url}'", 7, message)
    with pytest.raises(PipelineFileError) as raised:
        loaded(tmp_path, TEXT.replace("type: sqlite, url: shop.db", f"type: {kind}, url: '{url}'", 1))
    assert not any(part in str(raised.value) for part in ("S3", "CRE"))


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("mysql", "mysql://h/d?charset=utf8mb4&read_timeout=60&ssl_verify_cert=False"),
        ("postgres", "postgresql://h/d?sslmode=require&connect_timeout=3&options=-csearch_path%3Dx"),
    ],
)
def test_an_option_of_an_address_that_works_is_left_alone(tmp_path: Path, kind: str, url: str) -> None:
    text = TEXT.replace("type: sqlite, url: shop.db", f"type: {kind}, url: '{url}'", 1)
    assert loaded(tmp_path, text).sinks[0].url == url


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:p%40w@a:1,b:2/d", "postgresql://u@[::1]:5/d", "postgresql://[::1]/d", "postgresql:///d?host=/tmp"],
)
def test_an_address_may_have_several_hosts_or_none(tmp_path: Path, url: str) -> None:
    text = TEXT.replace("type: sqlite, url: shop.db", f"type: postgres, url: '{url}'", 1)
    assert loaded(tmp_path, text).sinks[0].url == url


@pytest.mark.parametrize(
    ("one", "two", "is_sound"),
    [
        ("", "", False),
        ("before: {where: value.country = 'DE'}", "before: {where: value.country = 'FR'}", False),
        ("before: {where: key < 'm'}", "", False),
        ("before: {where: key < 'm'}", "before: {where: key >= 'm'}", True),
        ("delete: false", "delete: false", True),
        ("delete: false", "", False),
        ("mode: insert", "mode: insert", True),
        ("columns: {rename: {id: other}}", "", True),
    ],
)
def test_two_sinks_that_would_delete_each_other_s_rows_are_refused(
    tmp_path: Path, one: str, two: str, *, is_sound: bool
) -> None:
    text = TEXT.replace("key: [id]}", f"key: [id], {one}}}")
    text = text.replace("from: [Raw.web.*], key: [id], table: others", f"{SHARED}, {two}").replace(", }", "}")
    if is_sound:
        assert len(loaded(tmp_path, text).sinks) == 2
        return
    with pytest.raises(PipelineFileError, match="would delete rows of the other; write one sink for both"):
        loaded(tmp_path, text)


@pytest.mark.parametrize(
    ("one", "two", "is_sound"),
    [
        ("keep, from: [Raw.*]", "'keep/?format=jsonl', from: [Raw.web.*]", False),
        ("keep, from: [Raw.shop.*], table: all", "keep, from: [Raw.web.*], table: all", False),
        ("keep, from: [Raw.shop.*]", "keep, from: [Raw.web.*]", True),
        ("keep, from: [Raw.*]", "other, from: [Raw.*]", True),
        ("keep, from: [Raw.*]", "keep, from: [Raw.*], table: 'other.{whole-topic}'", True),
    ],
)
def test_two_sinks_whose_objects_would_have_the_same_names_are_refused(
    tmp_path: Path, one: str, two: str, *, is_sound: bool
) -> None:
    sinks = f"  - {{name: one, type: files, url: {one}}}\n  - {{name: two, type: files, url: {two}}}\n"
    text = TEXT.partition("  - {name: one")[0] + sinks
    if is_sound:
        assert len(loaded(tmp_path, text).sinks) == 2
        return
    with pytest.raises(
        PipelineFileError, match=r"is the folder of sink one too, and the objects of Raw.web.orders would have"
    ):
        loaded(tmp_path, text)


@pytest.mark.parametrize(
    ("options", "evolve"),
    [("", "own"), ("create: false, ", "none"), ("create: false, evolve: own, ", "own"), ("evolve: add, ", "add")],
)
def test_a_sink_that_makes_no_table_changes_none_by_default(tmp_path: Path, options: str, evolve: str) -> None:
    pipeline = loaded(tmp_path, TEXT.replace("key: [id], table: others", f"{options}key: [id], table: others"))
    assert pipeline.sink("two").evolve == evolve
