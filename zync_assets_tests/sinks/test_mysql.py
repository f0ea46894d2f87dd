"""MySQL as a target, on a MariaDB server of the tests' own: the conformance of any target, and what is MySQL's own."""

from __future__ import annotations

import math
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from datetime import time as clock
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pymysql
import pytest

from zync_assets.codecs.fields import BITS, DEBEZIUM_DATE, ZONED_TIMESTAMP
from zync_assets.errors import SinkError, TableUnfit, TargetRefused, TargetUnavailable
from zync_assets.pipeline import Evolve
from zync_assets.sinks.mysql import MysqlTarget
from zync_assets.sinks.target import Column, Merge, TableSpec
from zync_assets_tests.mariadb import ANOTHER_HOST, Server, mariadb
from zync_assets_tests.sinks.batches import apply, apply_days, assert_defaults_of_older_rows_alone, one, spec, text
from zync_assets_tests.sinks.conformance import ORIGIN, PLACE, assert_conforms, assert_refuses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mariadbd") is None, reason="no MariaDB here: apt-get install mariadb-server"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with mariadb() as running:
        yield running


@pytest.fixture
def database(server: Server, unique: str) -> str:
    server.run("mysql", f"CREATE DATABASE {unique}")
    return unique


@pytest.mark.parametrize("seed", [1, 2])
def test_mysql_conforms(server: Server, database: str, seed: int) -> None:
    def load_tables() -> list[str]:
        return [name for (name,) in server.run(database, "SHOW TABLES") if name.startswith("zync_load")]

    assert_conforms("mysql", server.url(database), load_tables, seed=seed)


def test_a_partial_update_needs_no_column_that_may_be_null(server: Server, database: str) -> None:
    target = MysqlTarget(server.url(database))
    server.run(
        database,
        "CREATE TABLE `rows` (id bigint PRIMARY KEY, name text NOT NULL, price decimal(9,2) NOT NULL DEFAULT 7)",
    )
    table = spec(id=pa.int64(), name=pa.string(), price=pa.decimal128(9, 2))
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"name": "a", "price": Decimal("1.50")}), one(2, {"name": "b"})])
    apply(target, table, [one(1, {"price": Decimal("2.50")}), one(2, {"name": "B"})])
    found = server.run(database, "SELECT id, name, price FROM `rows` ORDER BY id")
    assert found == [(1, "a", Decimal("2.50")), (2, "B", Decimal("7.00"))]
    before = target.progress(PLACE)
    with pytest.raises(SinkError, match="doesn't have a default value"):
        apply(target, table, [one(3, {"price": Decimal(1)})])
    assert target.progress(PLACE) == before


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("id varchar(100) NOT NULL, v text, UNIQUE KEY (id(3))", "no primary key or unique constraint is on (id)"),
        ("id varchar(100) NOT NULL, v text, PRIMARY KEY (id(3))", "no primary key or unique constraint is on (id)"),
        ("id text NOT NULL, v text", "no primary key or unique constraint is on (id)"),
        ("id varchar(100) PRIMARY KEY, v text", "the key's column id takes texts for equal that differ"),
        (
            "id varchar(100) CHARACTER SET latin1 PRIMARY KEY CHECK (id <> ''), v text",
            "the key's column id takes texts for equal that differ",
        ),
        (
            "id varchar(100) COLLATE utf8mb4_bin PRIMARY KEY, v text",
            "the key's column id takes texts for equal that differ",
        ),
    ],
)
def test_a_key_that_takes_different_texts_for_equal_is_refused(
    server: Server, database: str, columns: str, problem: str
) -> None:
    server.run(database, f"CREATE TABLE `rows` ({columns}) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci")
    target, table = MysqlTarget(server.url(database)), spec(id=pa.string(), v=pa.string())
    with pytest.raises(TableUnfit) as error:
        target.prepare(table, create=False, evolve="none")
    assert problem in str(error.value)
    server.run(database, *str(error.value).split("run:")[1].strip().removesuffix(";").split("; "))
    with suppress(TableUnfit):
        target.prepare(table, create=False, evolve="none")
        problem = ""
    if problem:
        # The column has an index now, and is compared as before.
        with pytest.raises(TableUnfit, match="the key's column id takes texts for equal that differ") as error:
            target.prepare(table, create=False, evolve="none")
        server.run(database, str(error.value).split("run:\n")[1])
    target.prepare(table, create=False, evolve="none")
    if "(3)" in columns:
        # The index is there still. It takes no two keys with the same beginning, and no row gets the values of another.
        with pytest.raises(TargetRefused, match="Duplicate entry 'abc'"):
            apply(target, table, [text("abc", "1"), text("abcd", "3")])
        return
    apply(target, table, [text("abc", "1"), text("ABC", "2"), text("abcd", "3"), text("abc ", "4")])
    found = server.run(database, "SELECT id, v FROM `rows` ORDER BY v")
    assert found == [("abc", "1"), ("ABC", "2"), ("abcd", "3"), ("abc ", "4")]


def test_a_record_with_the_values_of_another_unique_index_is_refused(server: Server, database: str) -> None:
    server.run(database, "CREATE TABLE `rows` (id bigint PRIMARY KEY, name varchar(9) UNIQUE, n int)")
    target, table = MysqlTarget(server.url(database)), spec(id=pa.int64(), name=pa.string(), n=pa.int32())
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"name": "a", "n": 1})])
    with pytest.raises(TargetRefused, match="Duplicate entry 'a'"):
        apply(target, table, [one(2, {"name": "a", "n": 2})])
    apply(target, table, [one(1, {"name": "b", "n": 3}), one(2, {"name": "a", "n": 2})])
    assert server.run(database, "SELECT id, name, n FROM `rows` ORDER BY id") == [(1, "b", 3), (2, "a", 2)]


def test_a_row_without_a_partition_and_a_division_by_zero_are_refused(server: Server, database: str) -> None:
    columns = "id bigint PRIMARY KEY, v bigint, half bigint AS (100 / v) STORED"
    server.run(
        database, f"CREATE TABLE `rows` ({columns}) PARTITION BY RANGE (id) (PARTITION low VALUES LESS THAN (10))"
    )
    target, table = MysqlTarget(server.url(database)), spec(id=pa.int64(), v=pa.int64())
    target.prepare(table, create=False, evolve="none")
    with pytest.raises(TargetRefused, match="no partition for value 10"):
        apply(target, table, [one(10, {"v": 1})])
    with pytest.raises(TargetRefused, match="Division by 0"):
        apply(target, table, [one(1, {"v": 0})])


def test_an_error_of_a_trigger_is_a_refusal_whatever_its_number(server: Server, database: str) -> None:
    signal = "IF new.id = 2 THEN SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 30001, MESSAGE_TEXT = 'no two'; END IF;"
    several = "IF new.id = 3 THEN SET new.v = (SELECT 'a' UNION SELECT 'b'); END IF;"
    server.run(
        database,
        "CREATE TABLE `rows` (id bigint PRIMARY KEY, v varchar(9))",
        f"CREATE TRIGGER checked BEFORE INSERT ON `rows` FOR EACH ROW BEGIN {signal} {several} END",
    )
    target, table = MysqlTarget(server.url(database)), spec(id=pa.int64(), v=pa.string())
    target.prepare(table, create=False, evolve="none")
    for id, words in ((2, "no two"), (3, "Subquery returns more than 1 row")):
        with pytest.raises(TargetRefused, match=words):
            apply(target, table, [text(id, "v")])
    apply(target, table, [text(1, "v")])


def test_a_delete_that_cascades_is_refused(server: Server, database: str) -> None:
    table, target = spec(id=pa.int64(), v=pa.string()), MysqlTarget(server.url(database))
    target.prepare(table, create=True, evolve="none")
    apply(target, table, [text(1, "a")])
    key = "`a key` FOREIGN KEY (id) REFERENCES `rows` (id) ON DELETE CASCADE"
    server.run(database, f"CREATE TABLE `child 5%` (id bigint, CONSTRAINT {key})", "INSERT INTO `child 5%` VALUES (1)")
    reset = Merge(PLACE, table, ORIGIN, {}, {}, clear=True)
    with pytest.raises(TableUnfit, match="table rows: a delete also deletes or changes rows of other tables") as error:
        target.merge(reset)
    with pytest.raises(TableUnfit, match="a delete also deletes"):
        apply(target, table, [one(7, None)])
    assert (target.progress(PLACE).next, server.run(database, "SELECT id FROM `child 5%`")) == ({0: 1}, [(1,)])
    apply(target, table, [text(1, "b")])
    # A session may switch foreign keys off.
    MysqlTarget(f"{server.url(database)}?init_command=SET%20foreign_key_checks%3D0").merge(reset)
    assert server.run(database, "SELECT id FROM `child 5%`") == [(1,)]
    server.run(database, str(error.value).partition("\n")[2], "INSERT INTO `rows` VALUES (2, 'b')")
    target.merge(reset)
    assert server.run(database, "SELECT id FROM `rows`") == []


def test_values_that_mysql_would_change_are_refused(server: Server, database: str) -> None:
    target = MysqlTarget(server.url(database))
    server.run(
        database,
        "CREATE TABLE `rows` (id bigint PRIMARY KEY, v varchar(3), e enum('a', 'b'), j json, n double, d date, t datetime(6))",
    )
    table = spec(
        id=pa.int64(),
        v=pa.string(),
        e=pa.string(),
        j=pa.string(),
        n=pa.float64(),
        d=pa.date32(),
        t=pa.timestamp("us", "UTC"),
    )
    for fields, words in (
        ({"v": "long"}, "Data too long for column 'v'"),
        ({"e": "c"}, "the column e is c; its values are a, b"),
        ({"e": "2"}, "the column e is 2; its values are a, b"),
        ({"e": "A"}, "the column e is A; its values are a, b"),
        ({"v": "ab  "}, "the column v is 'ab  ', and takes a text of 3 characters"),
        ({"j": "{"}, "CONSTRAINT `rows.j` failed"),
        ({"n": math.nan}, "the column n is nan"),
        ({"d": date(999, 1, 1)}, "the column d is 0999-01-01; MySQL's dates go from 1000-01-01"),
        ({"t": datetime(1, 1, 1)}, "the column t is 0001-01-01 00:00:00; MySQL's dates go from"),
    ):
        assert words in assert_refuses(target, table, [one(1, fields)])
    good = {"v": "abc", "e": "b", "j": '{"a": 1.10}', "n": 0.5, "d": date(1000, 1, 1), "t": datetime(2026, 1, 2, 3)}
    apply(target, table, [one(1, good)])
    assert server.run(database, "SELECT v, e, j, n, d, t FROM `rows`") == [tuple(good.values())]


BETWEEN = Decimal(2**64 - 1)
"""The largest number without a sign."""


@pytest.mark.parametrize(
    ("kind", "column", "value", "text", "odd"),
    [
        ("char(5)", Column("v", pa.string()), "ab", "ab", "abcdef"),
        ("set('x', 'y', 'z')", Column("v", pa.string()), "x,z", "x,z", "z,x"),
        ("tinytext", Column("v", pa.string()), "a ", "a ", "a" + 255 * " "),
        ("year", Column("v", pa.int32()), 2024, "2024", 24),
        ("tinyint", Column("v", pa.int16()), -128, "-128", 128),
        ("tinyint unsigned", Column("v", pa.int16()), 255, "255", -1),
        ("mediumint", Column("v", pa.int32()), 2**23 - 1, "8388607", 2**23),
        ("int unsigned", Column("v", pa.int64()), 2**32 - 1, "4294967295", -1),
        ("bigint unsigned", Column("v", pa.int64()), 5, "5", -1),
        ("bigint unsigned", Column("v", pa.decimal128(38, 0)), BETWEEN, str(BETWEEN), BETWEEN + 1),
        ("bit(1)", Column("v", pa.bool_()), True, "1", None),
        ("bit(12)", Column("v", pa.binary(), note=BITS), b"\x01\x08", "2049", b"\x00\x10"),
        ("binary(3)", Column("v", pa.binary()), b"ab\0", "ab\0", b"ab"),
        ("float", Column("v", pa.float32()), 3.4028234663852886e38, "3.40282e38", None),
        ("date", Column("v", pa.int32(), note=DEBEZIUM_DATE), -1, "1969-12-31", -(10**6)),
        ("time(3)", Column("v", pa.time64("us")), clock(1, 2, 3, 4000), "01:02:03.004", clock(1, 2, 3, 4)),
        ("datetime", Column("v", pa.timestamp("us")), datetime(1969, 1, 2), "1969-01-02 00:00:00", datetime(1, 1, 1)),
        (
            "timestamp(3) null",
            Column("v", pa.timestamp("us", "UTC")),
            datetime(2024, 1, 2, 0, 0, 0, 5000, UTC),
            "2024-01-02 00:00:00.005",
            datetime(2024, 1, 2, 0, 0, 0, 5, UTC),
        ),
        (
            "timestamp null",
            Column("v", pa.string(), note=ZONED_TIMESTAMP),
            "2024-01-02T02:00:00+02:00",
            "2024-01-02 00:00:00",
            "2024-01-02T00:00:00.5Z",
        ),
    ],
)
def test_a_value_of_debezium_goes_into_the_type_that_it_comes_from(
    server: Server, database: str, kind: str, column: Column, value: Any, text: str, odd: Any
) -> None:
    target = MysqlTarget(server.url(database))
    server.run(database, f"CREATE TABLE `rows` (id bigint PRIMARY KEY, v {kind})")
    table = TableSpec("rows", (Column("id", pa.int64()), column), ("id",), "upsert")
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"v": value}), one(2, {"v": None})])
    query = f"SELECT CAST({'v + 0' if kind.startswith('bit') else 'v'} AS CHAR) FROM `rows` ORDER BY id"
    with server.connected(database) as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(query)
        assert list(cursor.fetchall()) == [(text,), (None,)]
    found = {row["id"]: row["v"] for batch in target.rows(table) for row in batch.to_pylist()}
    read = "2024-01-02T00:00:00Z" if column.note == ZONED_TIMESTAMP else value
    assert found == {1: read, 2: None}
    if odd is not None:
        assert_refuses(target, table, [one(3, {"v": odd})])


def test_a_number_of_days_becomes_a_date_in_a_new_column_alone(server: Server, database: str) -> None:
    apply_days(MysqlTarget(server.url(database)))
    rows = server.run(database, "SELECT old, day FROM `rows` ORDER BY id")
    assert rows == [(-1, None), (19782, date(2024, 2, 29)), (None, date(1969, 12, 31))]


@pytest.mark.parametrize("kind", ["bit(8)", "year", "binary(4)", "varbinary(4)", "inet6", "point"])
def test_a_text_does_not_go_into_a_column_that_would_change_it(server: Server, database: str, kind: str) -> None:
    server.run(database, f"CREATE TABLE `rows` (id bigint PRIMARY KEY, v {kind})")
    with pytest.raises(TableUnfit, match=r"column v is .*, and its source is string; change the column to LONGTEXT"):
        MysqlTarget(server.url(database)).prepare(spec(id=pa.int64(), v=pa.string()), create=False, evolve="none")


@pytest.mark.parametrize("key", [("id",), ("id", 'Part "x" 5%s')])
def test_a_delete_reads_only_the_rows_of_its_keys(server: Server, database: str, key: tuple[str, ...]) -> None:
    target = MysqlTarget(server.url(database))
    columns = (*(Column(name, pa.int64()) for name in key), Column("v", pa.string()))
    table = TableSpec("rows", columns, key, "upsert")
    server.run(database, f"CREATE TABLE `rows` ({', '.join(f'`{name}` bigint NOT NULL' for name in key)}, v text)")
    server.run(database, f"ALTER TABLE `rows` ADD PRIMARY KEY ({', '.join(f'`{name}`' for name in key)})")
    numbers = ", ".join(["seq"] * len(key))
    server.run(database, f"INSERT INTO `rows` SELECT {numbers}, 'a' FROM seq_1_to_5000", "ANALYZE TABLE `rows`")
    target.prepare(table, create=False, evolve="none")
    marks = {"zync_op": pa.string(), "zync_set": pa.string(), "zync_offset": pa.int64()}
    rows = pa.RecordBatch.from_pylist(
        [dict.fromkeys(key, number) | {"zync_op": "d", "zync_offset": number} for number in range(1, 21)],
        pa.schema([*((item.name, item.type) for item in columns), *marks.items()]),
    )
    count = "SELECT sum(variable_value) FROM information_schema.global_status WHERE variable_name LIKE 'handler_read%'"
    with target.run(PLACE) as name:
        load = target.load(table, name, iter([rows]))
        before = server.run(database, count)[0][0]
        target.merge(Merge(PLACE, table, ORIGIN, {0: None}, {0: 20}, (load,)))
    assert server.run(database, count)[0][0] - before < 5000
    assert server.run(database, "SELECT count(*), min(id) FROM `rows`") == [(4980, 21)]


def test_keys_that_differ_in_case_or_in_spaces_are_two_rows(server: Server, database: str) -> None:
    target = MysqlTarget(server.url(database))
    table = spec(id=pa.string(), v=pa.string())
    target.prepare(table, create=True, evolve="none")
    keys = ["a", "A", "a ", "ä"]
    marks = {"zync_op": pa.string(), "zync_set": pa.string(), "zync_offset": pa.int64()}
    rows = pa.RecordBatch.from_pylist(
        [{"id": key, "v": key, "zync_op": "u", "zync_offset": at} for at, key in enumerate(keys)],
        pa.schema([("id", pa.string()), ("v", pa.string()), *marks.items()]),
    )
    with target.run(PLACE) as name:
        target.merge(Merge(PLACE, table, ORIGIN, {0: None}, {0: 4}, (target.load(table, name, iter([rows])),)))
    assert {tuple(row) for row in server.run(database, "SELECT id, v FROM `rows`")} == {(key, key) for key in keys}


def test_a_column_is_widened_or_the_error_has_the_ddl(server: Server, database: str) -> None:
    target = MysqlTarget(server.url(database))
    target.prepare(spec(id=pa.int64(), n=pa.int32(), p=pa.decimal128(5, 2)), create=True, evolve="none")
    new = spec(id=pa.int64(), n=pa.int64(), p=pa.decimal128(7, 4), more=pa.string())
    with pytest.raises(
        TableUnfit, match=r"Set evolve: widen, or run:\nALTER TABLE `rows` MODIFY `n` BIGINT DEFAULT NULL"
    ) as error:
        target.prepare(new, create=True, evolve="add")
    assert "more" not in str(error.value)  # The sink may add the column.
    target.prepare(new, create=True, evolve="widen")
    found = server.run(
        database,
        f"SELECT column_type FROM information_schema.columns WHERE table_schema = '{database}' AND table_name = 'rows'"
        " ORDER BY ordinal_position",
    )
    assert [row[0] for row in found] == ["bigint(20)", "bigint(20)", "decimal(7,4)", "longtext"]
    # Debezium makes a smallint of a tinyint. The column takes its values as it is, and is widened if the sink may.
    server.run(database, "CREATE TABLE small (id bigint PRIMARY KEY, n tinyint)")
    small = replace(spec(id=pa.int64(), n=pa.int16()), name="small")
    for evolve, kind in (("none", "tinyint(4)"), ("widen", "smallint(6)")):
        target.prepare(small, create=True, evolve=evolve)
        columns = f"SELECT column_type FROM information_schema.columns WHERE table_schema = '{database}'"
        assert server.run(database, f"{columns} AND table_name = 'small' AND column_name = 'n'")[0][0] == kind


@pytest.mark.parametrize("evolve", ["none", "widen"])
def test_a_widened_column_keeps_what_the_user_has_given_it(server: Server, database: str, evolve: Evolve) -> None:
    target = MysqlTarget(server.url(database))
    server.run(
        database,
        "CREATE TABLE `5%` (`i d%` int NOT NULL AUTO_INCREMENT PRIMARY KEY COMMENT '5%, a', n int NOT NULL DEFAULT 7"
        " CHECK (n <> 13 and n % 20 <> 1), p decimal(5,2) INVISIBLE CHECK (p > 0))",
    )
    shown = "SHOW CREATE TABLE `5%`"
    before = server.run(database, shown)[0][1]
    table = replace(spec(**{"i d%": pa.int64(), "n": pa.int64(), "p": pa.decimal128(9, 2)}), name="5%")
    if evolve == "none":
        with pytest.raises(TableUnfit) as error:
            target.prepare(table, create=True, evolve=evolve)
        server.run(database, *str(error.value).split("run:\n")[1].removesuffix(";").split(";\n"))
    target.prepare(table, create=True, evolve=evolve)
    after = before.replace("int(11)", "bigint(20)").replace("decimal(5,2)", "decimal(9,2)")
    assert server.run(database, shown)[0][1] == after


def test_an_outage_is_no_refusal_and_no_error_has_the_password(server: Server, database: str) -> None:
    server.run("mysql", f"CREATE USER u{database}@'127.0.0.1' IDENTIFIED BY 'right'")
    for address, is_outage, cure in (
        (f"mysql://root:secret@127.0.0.1:1/{database}", True, "Can't connect to MySQL server"),
        (f"mysql://u{database}:secret@127.0.0.1:{server.port}/{database}", False, "(error 1045). Correct the url."),
        (
            server.url("nothing"),
            False,
            "Unknown database 'nothing' (error 1049). Correct the url, or create the database.",
        ),
    ):
        with pytest.raises(SinkError) as error:
            MysqlTarget(address).progress(PLACE)
        assert "secret" not in str(error.value) and cure in str(error.value)
        assert isinstance(error.value, TargetUnavailable) == is_outage
    table = spec(id=pa.int64(), name=pa.string())
    target = MysqlTarget(server.url(database) + "?init_command=SET%20innodb_lock_wait_timeout%3D1")
    target.prepare(table, create=True, evolve="none")
    apply(target, table, [one(1, {"name": "a"})])
    options: dict[str, Any] = {"host": "127.0.0.1", "port": server.port, "user": "root", "database": database}
    with closing(pymysql.connect(**options)) as blocker, blocker.cursor() as cursor:
        cursor.execute("UPDATE `rows` SET name = 'b' WHERE id = 1")
        with pytest.raises(TargetUnavailable, match="Lock wait timeout"):
            apply(target, table, [one(1, {"name": "c"})])
    apply(target, table, [one(1, {"name": "c"})])
    assert server.run(database, "SELECT name FROM `rows`") == [("c",)]


def test_a_server_on_another_host_must_have_a_certificate_that_the_system_trusts(
    server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.run("mysql", f"CREATE USER u{database} IDENTIFIED BY 'secret'", f"GRANT ALL ON {database}.* TO u{database}")

    def cipher(options: str) -> str:
        target = MysqlTarget(f"mysql://u{database}:secret@{ANOTHER_HOST}:{server.port}/{database}?{options}")
        with target.connection() as connection:
            return connection.exec_driver_sql("SHOW STATUS LIKE 'Ssl_cipher'").one()[1]

    ca, another = f"ssl_ca={server.authority.path}", server.authority.client("client")
    own = f"ssl_cert={another.certificate}&ssl_key={another.key}"
    for options, cure in (
        ("", "Name the file of its CA in the url, ?ssl_ca=FILE"),
        ("ssl_disabled=false", "Name the file of its CA in the url, ?ssl_ca=FILE"),
        (own, "Name the file of its CA in the url, ?ssl_ca=FILE"),
        ("ssl_ca=/absent.pem", "a file of the sink's url can't be used, of ssl_ca=/absent.pem: "),
        ("ssl_verify_cert=1", "the sink's url has the option ssl_verify_cert, which must be true or false."),
        ("ssl_mode=REQUIRED", "the sink's url has the option ssl_mode, which is unknown"),
        ("foo=x", "the sink's url has the option foo, which is unknown; known are ssl_ca, "),
    ):
        with pytest.raises(SinkError) as error:
            cipher(options)
        assert cure in str(error.value) and "secret" not in str(error.value)
        assert not isinstance(error.value, TargetUnavailable)
    for options in (ca, f"{ca}&ssl_verify_identity=true", "ssl_verify_cert=false"):
        assert cipher(options).startswith("TLS_")
    assert cipher("ssl_disabled=true") == ""
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority.path))
    assert cipher("read_timeout=99").startswith("TLS_")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the option is Linux's")
def test_a_statement_ends_when_the_host_of_the_server_is_gone(server: Server, database: str) -> None:
    with MysqlTarget(server.url(database)).engine().connect() as connection:
        own: Any = connection.connection.driver_connection
        # PyMySQL sets the time limit of a socket as it reads.
        connection.exec_driver_sql("SELECT 1")
        assert own._sock.gettimeout() is None
        assert own._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert own._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_the_least_rights_are_enough(server: Server, database: str) -> None:
    user = f"w{database}"[:16]
    server.run(
        database,
        "CREATE TABLE `rows` (id bigint PRIMARY KEY, name text)",
        f"CREATE USER {user}@'127.0.0.1'",
        f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, DROP ON {database}.* TO {user}@'127.0.0.1'",
    )
    target = MysqlTarget(server.url(database, user))
    table = spec(id=pa.int64(), name=pa.string())
    target.prepare(table, create=False, evolve="none")
    apply(target, table, [one(1, {"name": "a"}), one(2, {"name": "b"})])
    apply(target, table, [one(1, None), one(2, {"name": "B"})])
    assert server.run(database, "SELECT * FROM `rows`") == [(2, "B")]


def test_a_record_that_is_longer_than_a_packet_is_refused_and_no_outage(server: Server, database: str) -> None:
    server.run(database, "SET GLOBAL max_allowed_packet = 1048576")
    try:
        target, table = MysqlTarget(server.url(database)), spec(id=pa.int64(), v=pa.string(), b=pa.binary())
        target.prepare(table, create=True, evolve="none")
        # The texts grow by their escapes. The statement has some bytes beside them.
        apply(target, table, [one(1, {"v": "x" * 1_048_300}), one(2, {"b": b"\0" * 524_000})])
        for record in (one(3, {"v": "'" * 524_280}), one(4, {"b": b"\0" * 524_280}), one(5, {"v": "é" * 524_280})):
            with pytest.raises(TargetRefused, match="max_allowed_packet is 1048576"):
                apply(target, table, [record])
    finally:
        server.run(database, "SET GLOBAL max_allowed_packet = 16777216")
    assert server.run(database, "SELECT id, length(v), length(b) FROM `rows`") == [
        (1, 1_048_300, None),
        (2, None, 524_000),
    ]


def test_a_server_that_is_set_to_read_only_is_an_outage_with_its_cure(server: Server, database: str) -> None:
    user, table = f"u{database}"[:30], spec(id=pa.int64(), name=pa.string())
    server.run(database, f"CREATE USER {user}@'127.0.0.1'", f"GRANT ALL ON {database}.* TO {user}@'127.0.0.1'")
    target = MysqlTarget(server.url(database, user))
    target.prepare(table, create=True, evolve="none")
    server.run(database, "SET GLOBAL read_only = 1")
    try:
        with pytest.raises(
            TargetUnavailable, match=r"read-only.*\(error 1290\). .* write the primary's address in the url"
        ):
            apply(target, table, [one(1, {"name": "a"})])
    finally:
        server.run(database, "SET GLOBAL read_only = 0")
    apply(target, table, [one(1, {"name": "a"})])
    assert server.run(database, "SELECT id, name FROM `rows`") == [(1, "a")]


def test_a_missing_right_is_cured_by_the_grant_of_the_error(server: Server, database: str) -> None:
    user = f"w{database}"[:16]
    server.run(database, f"CREATE USER {user}@'%'", f"CREATE USER {user}@'127.0.0.1'")
    target, table = MysqlTarget(server.url(database, user)), spec(id=pa.int64(), name=pa.string())
    for rights in ((), ("CREATE",), ("CREATE", "SELECT")):
        if rights:
            server.run(database, f"GRANT {', '.join(rights)} ON {database}.* TO {user}@'127.0.0.1'")
        with pytest.raises(SinkError, match=r"denied .*\(error 1\d\d\d\)\. Run:\nGRANT") as error:
            target.prepare(table, create=True, evolve="none")
            apply(target, table, [one(1, {"name": "a"})])
    server.run(database, str(error.value).partition("Run:\n")[2])
    target.prepare(table, create=True, evolve="none")
    apply(target, table, [one(1, {"name": "a"})])
    assert server.run(database, "SELECT * FROM `rows`") == [(1, "a")]


@pytest.mark.parametrize("name", ["a`b", "snow \N{SNOWMAN} \N{PILE OF POO}"])
def test_a_name_that_mysql_has_not_is_found(name: str) -> None:
    assert MysqlTarget.odd_names.search(name)
    assert not MysqlTarget.odd_names.search('Part "Name" of 5% \N{SNOWMAN}')


def test_a_reset_and_a_first_batch_under_way_follow_each_other(server: Server, database: str) -> None:
    """Nobody sees the position of the batch before its transaction ends. The row that the batch changed was there before."""
    table, target = spec(id=pa.int64(), v=pa.string()), MysqlTarget(server.url(database))
    target.prepare(table, create=True, evolve="none")
    server.run(database, "INSERT INTO `rows` VALUES (1, 'old'), (2, 'old')")
    reset, place = Merge(PLACE, table, ORIGIN, {}, {}, clear=True), (PLACE.pipeline, PLACE.sink, PLACE.source)
    # The server aborts one of the two transactions. The sink then repeats the aborted work.
    with ThreadPoolExecutor(1) as pool, server.connected(database) as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute("BEGIN")
        cursor.execute("SELECT * FROM zync_positions FOR UPDATE")
        cursor.execute("UPDATE `rows` SET v = 'a' WHERE id = 1")
        done = pool.submit(target.merge, reset)
        server.await_locked()
        with suppress(pymysql.OperationalError):
            cursor.execute("INSERT INTO zync_positions VALUES (%s, %s, %s, 0, 1, %s)", (*place, ORIGIN))
            cursor.execute("COMMIT")
        with suppress(TargetUnavailable):
            done.result()
    left = server.run(database, "SELECT * FROM `rows`")
    assert (left, target.progress(PLACE).next) in [([], {}), ([(1, "a"), (2, "old")], {0: 1})]


def test_two_runs_at_one_time_remove_the_load_tables_of_killed_runs(server: Server, database: str) -> None:
    """While one run removes a table, the other can't look for it: MariaDB refuses that to a connection with a lock."""
    left = [f"{PLACE.load_prefix}{'0' * 16}_{number}_0" for number in range(20)]
    target, other = (MysqlTarget(server.url(database)) for _ in range(2))
    target.prepare(spec(id=pa.int64()), create=True, evolve="none")
    server.run(database, *[f"CREATE TABLE {name} (id int, v longtext)" for name in left])

    def begin(each: MysqlTarget) -> None:
        with each.run(PLACE):
            pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(begin, (target, other)))
    assert server.run(database, "SHOW TABLES LIKE 'zync_load%'") == []


def test_a_server_that_says_nothing_is_an_outage_and_a_long_statement_is_none(
    server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zync_assets.sinks.mysql.CONNECT_SECONDS", 1)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        target = MysqlTarget(f"mysql://root@127.0.0.1:{silent.getsockname()[1]}/{database}")
        with pytest.raises(TargetUnavailable, match="Lost connection"):
            target.progress(PLACE)
    url = f"{server.url(database)}?program_name=zync"
    with MysqlTarget(url).connection() as connection:
        assert connection.exec_driver_sql("SELECT SLEEP(2)").scalar() == 0


def test_the_default_of_a_new_column_is_for_older_rows_alone(server: Server, database: str) -> None:
    assert_defaults_of_older_rows_alone(MysqlTarget(server.url(database)))


def test_the_default_of_an_instant_in_another_zone_is_its_time_in_utc(server: Server, database: str) -> None:
    target, table = MysqlTarget(server.url(database)), spec(id=pa.int64(), v=pa.string())
    target.prepare(table, create=True, evolve="none")
    apply(target, table, [one(1, {"v": "a"})])
    instant = Column("at", pa.string(), note=ZONED_TIMESTAMP, default=pa.scalar("2024-01-02T03:04:05.25+02:00"))
    target.prepare(replace(table, columns=(*table.columns, instant)), create=False, evolve="add")
    assert server.run(database, "SELECT at FROM `rows`") == [(datetime(2024, 1, 2, 1, 4, 5, 250_000),)]
