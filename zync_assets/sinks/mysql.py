"""The target MySQL or MariaDB, through PyMySQL.

DDL commits implicitly here. The transaction of the merge therefore has none: tables are made before it, and load tables are
made, filled and committed by the tasks. A killed run leaves load tables only, as everywhere.

A run holds a lock of the server (GET_LOCK) for its whole time. A load table whose run holds no lock is what a killed run left.

Each session has a strict sql_mode, so that the server refuses a value that it would cut otherwise, and the time zone UTC. New
tables are InnoDB's, and compare texts byte by byte: two keys that differ in their case alone are two rows.

TLS: a server on another host must show a certificate for its host's name that the system trusts. Options of the URL change this
(``tls_options``).
"""

from __future__ import annotations

import re
import secrets
import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from typing import Any
from warnings import catch_warnings, simplefilter

import pyarrow as pa
import pymysql
import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import mysql
from sqlalchemy.dialects.mysql import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.sql.elements import Grouping

from zync_assets.errors import SinkError, TableLocked, TargetRefused, TargetUnavailable
from zync_assets.pipeline_file.fields import TLS_FILES, TLS_SWITCHES, option_fault
from zync_assets.private import of, put
from zync_assets.sinks.fold import DELETE, OP, REPLACE
from zync_assets.sinks.mysql_types import (
    TEXTS,
    digits_of,
    foreign_key_drops,
    holds,
    read_value,
    refuse_large,
    signed_bits,
    stored_values,
)
from zync_assets.sinks.server_watch import TCP_OPTIONS, watch_server
from zync_assets.sinks.sql import SqlTarget
from zync_assets.sinks.sql_types import (
    BOOK,
    DIGITS,
    SqlType,
    ddl_text,
    is_padded,
    loose_key,
    missing_key,
    standard_type,
    with_single_percents,
)
from zync_assets.sinks.target import LOCAL_HOSTS, Column, Merge, Place, TableSpec, load_names, tls_fault

CONNECT_SECONDS = 10
KEY_LENGTH = 255
"""Characters of a text, or bytes, in a key. InnoDB's keys have 3072 bytes."""

_MODES = "STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION"
_WAITS = "lock_wait_timeout = 10, innodb_lock_wait_timeout = 10"
"""Seconds. Other sinks and steps wait as long as a statement waits for a lock."""
_SESSION = (
    f"SET SESSION sql_mode = '{_MODES}', {_WAITS}, time_zone = '+00:00', TRANSACTION_ISOLATION = 'READ-COMMITTED'"
)
_MARIADB_SESSION = _SESSION.replace("TRANSACTION_ISOLATION", "tx_isolation")

# https://dev.mysql.com/doc/mysql-errors/8.0/en/server-error-reference.html, https://mariadb.com/kb/en/mariadb-error-codes/
_PASSING = {
    *{1021, 1037, 1038, 1040, 1041, 1053, 1079, 1114, 1158, 1159, 1160, 1161, 1203, 1213, 1226, 1290, 1317, 1684, 1836},
}
_PASSING_CLIENT = {2002, 2003, 2006, 2013, 2055}
"""Errors of the server, and of the client: connections, shutdown, locks, deadlocks, DDL, memory, disks."""
_REFUSALS = {
    *{1048, 1062, 1172, 1242, 1264, 1265, 1292, 1364, 1365, 1366, 1406, 1411, 1451, 1452, 1525, 1526, 1644, 1690},
    *{3140, 3141, 3819, 4025},
}
"""Nulls, duplicates, values out of range, too long or of the wrong form, foreign keys, checks, triggers, partitions."""
_OF_USERS = 10_000
"""Servers send no such numbers. A trigger's SIGNAL may set one by MYSQL_ERRNO."""
_LOCKED = 1205
"""Another program has held a lock for too long."""
_DENIED = {1044, 1142, 1143, 1227}
_WRONG_PASSWORD = 1045
_READ_ONLY = {1290, 1836}
_LOGIN = {1049, _WRONG_PASSWORD}
_RIGHTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER"
"""A missing right, an unknown database or a wrong password, and the rights that a sink needs."""


_BYTEWISE = ("nopad_bin", "0900_bin")
"""The ends of the names of collations that compare byte by byte, spaces at the end too: in MariaDB, and in MySQL."""
_PREFIXES = sa.text(
    "SELECT DISTINCT index_name FROM information_schema.statistics"
    " WHERE table_schema = :schema AND table_name = :name AND sub_part IS NOT NULL"
)
"""Indexes of the beginnings of values."""
_COLLATIONS = sa.text(
    "SELECT column_name, collation_name FROM information_schema.columns WHERE table_schema = :schema AND table_name = :name"
)


class MysqlTarget(SqlTarget):
    """A database of a MySQL or MariaDB server."""

    days = (date(1000, 1, 1), date.max)
    odd_instants = re.compile(r"(?![1-9]\d{3}-)|.*\.\d{6}\d*[1-9]")
    infinities = False
    ignores_case = True
    name_limit = 64, "characters"
    # SQLAlchemy does not find a column whose name has a backtick. Names have no characters outside of Unicode's first plane.
    odd_names = re.compile("[`\U00010000-\U0010ffff]")

    def make_engine(self) -> Engine:
        if (fault := option_fault("mysql", self.url)) is not None:
            raise SinkError(f"the sink's url {fault}.")
        url = sa.make_url(self.url).set(drivername="mysql+pymysql")
        timeouts = {"connect_timeout": CONNECT_SECONDS, "read_timeout": CONNECT_SECONDS}
        options: dict[str, Any] = {**timeouts, "charset": "utf8mb4"}
        arguments = {name: value for name, value in options.items() if name not in url.query}
        tls = {name: str(value) for name, value in url.query.items() if name.startswith("ssl")}
        if tls or (url.host or "") not in LOCAL_HOSTS:
            arguments |= tls_options(tls)
        engine = sa.create_engine(url.difference_update_query(tls), poolclass=sa.pool.NullPool, connect_args=arguments)
        event.listen(engine, "connect", _begin_session)
        watch_server(engine, lambda connection: of("PyMySQL", connection, "_sock"), TCP_OPTIONS)
        if "read_timeout" in arguments:
            event.listen(engine, "connect", _end_timeout)
        return engine

    def sort(self, error: exc.DBAPIError) -> type[SinkError]:
        code = _code(error)
        if code == _LOCKED:
            return TableLocked
        if code in _PASSING_CLIENT or code in _PASSING:
            return TargetUnavailable
        return TargetRefused if code in _REFUSALS or code >= _OF_USERS else SinkError

    def error_text(self, error: exc.DBAPIError) -> str:
        arguments: Any = getattr(error.orig, "args", ())
        return f"{arguments[1]} (error {arguments[0]})" if len(arguments) == 2 else super().error_text(error)

    def error(self, error: exc.DBAPIError) -> SinkError:
        fault, code, cure = tls_fault(super().error(error), "ssl_ca", "ssl_disabled=true"), _code(error), None
        if code in _DENIED:
            match = re.search("'[^']*'@'[^']*'", str(fault))
            user = match[0] if match else "the user"
            # The host of an account may be a pattern, which the message does not have.
            with suppress(exc.SQLAlchemyError), self.engine().connect() as connection:
                name, _, host = connection.execute(sa.select(sa.func.current_user())).scalar_one().rpartition("@")
                user = f"'{name}'@'{host}'"
            quote = mysql.dialect().identifier_preparer.quote_identifier
            database = with_single_percents(quote(self.engine().url.database or ""), mysql.dialect())
            cure = f"Run:\nGRANT {_RIGHTS} ON {database}.* TO {user};"
        elif code in _LOGIN:
            cure = "Correct the url." if code == _WRONG_PASSWORD else "Correct the url, or create the database."
        elif code in _READ_ONLY:
            cure = "A replica, or a server that is set to read only, takes no rows: write the primary's address in the url."
        return fault if cure is None else type(fault)(f"{str(fault).rstrip('.')}. {cure}")

    @contextmanager
    def run(self, place: Place) -> Generator[str]:
        number = secrets.token_hex(8)
        with self.errors(), self.engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.select(sa.func.get_lock(_lock(number), CONNECT_SECONDS)))
            for name in load_names(sa.inspect(connection).get_table_names(), place):
                owner = name.removeprefix(place.load_prefix).partition("_")[0]
                if connection.execute(sa.select(sa.func.is_used_lock(_lock(owner)))).scalar() is None:
                    self.drop([name])
            yield f"{place.load_prefix}{number}_"

    @contextmanager
    def merging(self, merge: Merge) -> Generator[Connection]:
        if not merge.clear:
            with super().merging(merge) as connection:
                yield connection
            return
        # Positions that are not there are locked too: no first batch can begin, or be committed, while the table is emptied.
        new_connection = self.engine().connect().execution_options(isolation_level="REPEATABLE READ")
        with self.errors(), new_connection as connection, connection.begin():
            yield connection

    def cascades(self, connection: Connection, spec: TableSpec) -> Sequence[str]:
        return foreign_key_drops(connection, spec)

    def create_book(self, connection: Connection) -> None:
        for table in BOOK.sorted_tables:
            self._with_options(table.to_metadata(sa.MetaData())).create(connection, checkfirst=True)

    # ---- tables

    def new_table(self, spec: TableSpec) -> sa.Table:
        return self._with_options(super().new_table(spec))

    def load_table(self, table: sa.Table, spec: TableSpec, name: str, schema: str | None) -> sa.Table:
        """With the table's character set, and not with the database's."""
        load = super().load_table(table, spec, name, schema)
        charset_options = {key: value for key, value in table.kwargs.items() if key.endswith(("charset", "collate"))}
        load.kwargs.update({**charset_options, "mysql_engine": "InnoDB"})
        return load

    def _with_options(self, table: sa.Table) -> sa.Table:
        """The table as InnoDB's, which compares texts byte by byte, spaces at their ends too."""
        dialect: Any = self.engine().dialect
        collation = f"utf8mb4_{_BYTEWISE[0] if dialect.is_mariadb else _BYTEWISE[1]}"
        options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
        table.kwargs.update({f"mysql_{name}": value for name, value in options.items()})
        return table

    def column_type(self, column: Column, *, in_key: bool) -> SqlType:
        kinds, kind = pa.types, column.type
        if kinds.is_floating(kind):
            # A FLOAT is read with six digits.
            return mysql.DOUBLE()
        if kinds.is_time(kind):
            return mysql.TIME(fsp=6)
        if kinds.is_binary(kind) or kinds.is_large_binary(kind):
            return mysql.VARBINARY(KEY_LENGTH) if in_key else mysql.LONGBLOB()
        standard = super().column_type(column, in_key=in_key)
        if isinstance(standard, sa.DateTime):
            return mysql.DATETIME(fsp=6)
        if column.as_json or isinstance(standard, sa.Text):
            return mysql.VARCHAR(KEY_LENGTH) if in_key else mysql.LONGTEXT()
        return standard

    def default(self, column: Column, kind: SqlType) -> Any:
        text = super().default(column, kind)
        if text is None:
            return None
        if pa.types.is_boolean(column.type):
            return str(int(text == "true"))
        if isinstance(kind, mysql.DATETIME):
            # MariaDB's literals have no zone.
            (value,) = stored_values(pa.array([column.default], column.type), kind, column.name, self.days)
            return value.isoformat()
        # A type of texts takes a DEFAULT as an expression only.
        return Grouping(sa.literal(text)) if isinstance(kind, TEXTS) else text

    def key_problem(self, connection: Connection, table: sa.Table, spec: TableSpec) -> str | None:
        if spec.mode == "insert":
            return None
        place = {"schema": table.schema or self.engine().url.database, "name": table.name}
        unfit = connection.execute(_PREFIXES, place).scalars().all()
        collations = {row[0]: row[1] for row in connection.execute(_COLLATIONS, place).all()}
        wrong = [
            name
            for name in spec.key
            if is_padded(table.c[name].type) or not (collations.get(name) or _BYTEWISE[0]).endswith(_BYTEWISE)
        ]
        with _quietly():
            problem = missing_key(connection, table, spec.key, unfit)
        if problem is not None:
            # An index takes no text without a length.
            wrong = [name for name in spec.key if isinstance(table.c[name].type, TEXTS)]
        ddl = [self.widening(table, name, self._key_text(table.c[name].type)) for name in wrong]
        if problem is None:
            return loose_key(connection, wrong, ddl)
        return problem.replace("; run: ", "; run: " + "".join(f"{ddl_text(item, connection)}; " for item in ddl))

    def _key_text(self, existing: Any) -> SqlType:
        """The type of a text in a key, of the length of an existing column."""
        dialect: Any = self.engine().dialect
        collation = f"utf8mb4_{_BYTEWISE[0] if dialect.is_mariadb else _BYTEWISE[1]}"
        return mysql.VARCHAR(getattr(existing, "length", None) or KEY_LENGTH, charset="utf8mb4", collation=collation)

    def holds(self, existing: SqlType, column: Column) -> bool:
        return holds(existing, column)

    def holds_all(self, existing: SqlType, column: Column) -> bool:
        bits = signed_bits(existing)
        is_small = pa.types.is_integer(column.type) and 0 < bits < column.type.bit_width
        return not is_small and super().holds_all(existing, column)

    def load_type(self, existing: SqlType) -> SqlType:
        """A TIMESTAMP of older servers takes no nulls, unless its definition says so."""
        return mysql.DATETIME(fsp=existing.fsp) if isinstance(existing, mysql.TIMESTAMP) else existing

    def reflect(self, connection: Connection, name: str, schema: str | None) -> sa.Table:
        with _quietly():
            return super().reflect(connection, name, schema)

    def wider(self, existing: SqlType, column: Column) -> SqlType | None:
        kinds, kind = pa.types, column.type
        bits = signed_bits(existing)
        if kinds.is_integer(kind) and bits:
            # Not the type of a new column: MySQL would read Debezium's numbers of days as dates of another form.
            return standard_type(kind)
        if not isinstance(existing, mysql.DECIMAL) and not bits:
            return None
        if kinds.is_decimal(kind) or kinds.is_integer(kind):
            whole_digits, scale = digits_of(kind)
            old_scale = 0 if bits else existing.scale or 0  # pyright: ignore[reportAttributeAccessIssue]
            old_whole = DIGITS.get(bits, 10) if bits else (existing.precision or 10) - old_scale  # pyright: ignore
            scale, whole_digits = max(scale, old_scale), max(whole_digits, old_whole)
            return mysql.DECIMAL(whole_digits + scale, scale) if scale <= 30 and whole_digits + scale <= 65 else None
        return None

    def widening(self, table: sa.Table, name: str, larger: SqlType) -> Any:
        """The present definition of the column with another type. MODIFY drops what it does not say: the DEFAULT, the comment,
        AUTO_INCREMENT, and MariaDB's CHECK of a column."""
        quote: Any = self.engine().dialect.identifier_preparer
        place, column = quote.format_table(table), quote.quote_identifier(name)
        with self.engine().connect() as connection:
            definitions = connection.exec_driver_sql(f"SHOW CREATE TABLE {place}").one()[1]
        place, column = (with_single_percents(text, self.engine().dialect) for text in (place, column))
        kind = r"\w+(?:\([\d,]+\))?(?: unsigned)?(?: zerofill)?(?: CHARACTER SET \w+)?(?: COLLATE \w+)?"
        found = re.search(rf"^  {re.escape(column)} {kind}(.*?),?$", definitions, re.M)
        rest = found[1] if found else " NULL" if table.c[name].nullable else " NOT NULL"
        new_kind = larger.compile(self.engine().dialect)
        return sa.DDL(f"ALTER TABLE {place} MODIFY {column} {new_kind}{rest}".replace("%", "%%"))

    # ---- values

    def write(self, connection: Connection, table: sa.Table, rows: Iterator[pa.RecordBatch]) -> None:
        quote = connection.dialect.identifier_preparer
        for batch in rows:
            columns = [
                stored_values(batch.column(name), table.c[name].type, name, self.days) for name in batch.schema.names
            ]
            names = ", ".join(quote.quote(name) for name in batch.schema.names)
            marks = ", ".join(["%s"] * len(columns))
            # PyMySQL joins the rows of such a statement into statements of many rows. The names have their percent signs twice.
            statement = f"INSERT INTO {quote.format_table(table)} ({names}) VALUES ({marks})"
            if batch.num_rows:
                values = list(zip(*columns, strict=True))
                refuse_large(connection, statement, values, batch.nbytes)
                connection.exec_driver_sql(statement, values)

    def upserts(
        self, table: sa.Table, rows: sa.Select[Any], key: Sequence[str], others: Sequence[str]
    ) -> Sequence[sa.Executable]:
        """Not ON DUPLICATE KEY UPDATE: it would update the row of another key that has the values of another unique index."""
        new_rows = rows.subquery()
        is_same_key = sa.and_(*(table.c[name] == new_rows.c[name] for name in key))
        is_absent = ~sa.exists(sa.select(sa.literal(1)).select_from(table).where(is_same_key).correlate(new_rows))
        insertion = insert(table).from_select([*key, *others], sa.select(new_rows).where(is_absent))
        return [
            *(
                [sa.update(table).where(is_same_key).values({name: new_rows.c[name] for name in others})]
                if others
                else []
            ),
            insertion,
        ]

    def removal(self, table: sa.Table, rows: sa.Table, key: Sequence[str]) -> sa.Executable:
        """A join of the load table and the table. With IN, MariaDB 10 would read the whole table for each key."""
        conditions = [table.c[name] == rows.c[name] for name in key]
        return sa.delete(table).where(*conditions, rows.c[OP].in_([DELETE, REPLACE]))

    def _reflect_table(self, connection: Connection, spec: TableSpec) -> sa.Table:
        table = super()._reflect_table(connection, spec)
        for column in table.c:
            if isinstance(column.type, (mysql.DOUBLE, mysql.FLOAT)):
                # SQLAlchemy would make decimals of ten digits of its values.
                column.type.asdecimal = False
        return table

    def read_column(self, table: sa.Table, column: Column) -> sa.ColumnElement[Any]:
        """A set as text, in the order of its type. A FLOAT as a double: it has six digits otherwise."""
        found = super().read_column(table, column)
        if isinstance(found.type, mysql.SET):
            return sa.cast(found, sa.CHAR)
        return found + sa.literal_column("0e0", sa.Double()) if isinstance(found.type, mysql.FLOAT) else found

    def value(self, column: Column, value: Any) -> Any:
        return super().value(column, read_value(value, column))


@contextmanager
def _quietly() -> Generator[None]:
    """Without a warning for a column of a type that SQLAlchemy does not know: no record may name it."""
    with catch_warnings():
        simplefilter("ignore", exc.SAWarning)
        yield


def _begin_session(connection: Any, record: object) -> None:
    with connection.cursor() as cursor:
        try:
            cursor.execute(_SESSION)
        except pymysql.MySQLError:
            # MariaDB before 11.1 calls the variable otherwise.
            cursor.execute(_MARIADB_SESSION)


def _end_timeout(connection: Any, record: object) -> None:
    """Ends the read timeout after the handshake: PyMySQL has one timeout, and a statement may take long."""
    put("PyMySQL", connection, "_read_timeout", None)


def _lock(number: str) -> str:
    return f"zync_{number}"


def tls_options(query: Mapping[str, str]) -> dict[str, Any]:
    """The options of PyMySQL for the options of a URL whose names begin with ``ssl``.

    PyMySQL itself takes the text "false" for true, and verifies no certificate beside a client's own.
    SinkError for a file that can't be read.

    >>> tls_options({"ssl_disabled": "true"})
    {'ssl_disabled': True}
    """
    switches = {name: value.lower() for name, value in query.items() if name in TLS_SWITCHES}
    if switches.get("ssl_disabled") == "true":
        return {"ssl_disabled": True}
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca"))
        if "ssl_cert" in query:
            context.load_cert_chain(query["ssl_cert"], query.get("ssl_key"))
    except OSError as error:
        files = ", ".join(f"{name}={query[name]}" for name in TLS_FILES if name in query)
        raise SinkError(f"a file of the sink's url can't be used, of {files}: {error}. Name PEM files.") from None
    # A certificate that the server made for itself lacks what the strict mode asks for.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.check_hostname = "false" not in (switches.get("ssl_verify_cert"), switches.get("ssl_verify_identity"))
    if switches.get("ssl_verify_cert") == "false":
        context.verify_mode = ssl.CERT_NONE
    return {"ssl": context}


def _code(error: exc.DBAPIError) -> int:
    arguments: Any = getattr(error.orig, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else 0
