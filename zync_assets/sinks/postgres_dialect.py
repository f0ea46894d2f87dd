"""PostgreSQL's errors with their cures, where a later try does not help, and the texts of values for PostgreSQL."""

from __future__ import annotations

import decimal
import json
import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects.postgresql import (
    ARRAY,
    BIT,
    DOMAIN,
    HSTORE,
    INTERVAL,
    MONEY,
    OID,
    TSVECTOR,
    BitString,
    dialect,
)
from sqlalchemy.engine import Connection

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.evolution import bits_number, number_bits, variable_decimal
from zync_assets.codecs.fields import BITS, DEBEZIUM_DATE, POINT, VARIABLE_DECIMAL, ZONED_TIME, ZONED_TIMESTAMP
from zync_assets.codecs.fields import TSVECTOR as TSVECTOR_NOTE
from zync_assets.errors import TargetRefused
from zync_assets.sinks.sql_types import (
    POSITIONS,
    QUARANTINE,
    SqlType,
    fitting,
    with_single_percents,
)
from zync_assets.sinks.target import Column

_LOGIN_ERRORS: Mapping[str, str] = {
    "certificate verify failed": "Name the file of its CA in the url, ?sslrootcert=FILE; sslmode=require would trust any server.",
    "server does not support SSL": "Turn TLS on at the server. In a network that you trust, write ?sslmode=disable in the url.",
    "does not match host name": "Write the host's name as the server's certificate has it in the url.",
    "password authentication failed": "Correct the user or the password in the url.",
    "is not permitted to log in": "Give the role the right to log in, ALTER ROLE ... LOGIN, or correct the user in the url.",
    "no pg_hba.conf entry": "Let the server's pg_hba.conf take this host, user and database.",
    "does not exist": "Correct the url, or create it.",
    r"invalid (integer value|\S+ value:)": "Correct the option in the url, or its variable such as PGSSLMODE.",
}
"""Texts of failed logins that no waiting cures → the cure. A failed login has no SQLSTATE."""
_STATEMENT_ERRORS: Mapping[str, str] = {
    "statement timeout": "A batch takes longer than statement_timeout allows: raise it for the role, ALTER ROLE ... SET.",
    "in a read-only transaction": "The server is a standby, or set to read only: write the primary's address in the url.",
}
"""Texts of failed statements that no waiting cures → the cure."""
CASCADES = sa.text(
    """
SELECT format('ALTER TABLE %s DROP CONSTRAINT %I;', conrelid::regclass, conname) FROM pg_constraint
WHERE contype = 'f' AND confdeltype IN ('c', 'n', 'd') AND conparentid = 0 AND conrelid <> confrelid
AND confrelid = to_regclass(:table) AND current_setting('session_replication_role') <> 'replica' ORDER BY 1
""".replace("::", r"\:\:")
)
"""The statements that remove the foreign keys by which the deletes of a table delete or change rows of other tables."""
_TABLE_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def lasting_cure(error: exc.DBAPIError, url: sa.URL) -> str | None:
    """The cure of a login or a statement that failed for good; None for an outage, and for an error without such a cure."""
    text = str(error.orig)
    if getattr(error.orig, "sqlstate", None) is not None:
        return next((cure for words, cure in _STATEMENT_ERRORS.items() if words in text), None)
    if "permission denied for database" in text:
        names = dialect()
        quote = names.identifier_preparer.quote
        grant = f"GRANT CONNECT ON DATABASE {quote(url.database or '')} TO {quote(url.username or '')};"
        return f"Run:\n{with_single_percents(grant, names)}"
    return next((cure for words, cure in _LOGIN_ERRORS.items() if re.search(words, text)), None)


def missing_rights(connection: Connection, table: str | None) -> str:
    """The statements that make the table's schema, and grant the role of a connection what a sink needs and the role lacks.

    ``table``: the target table as the pipeline file names it, None if no table was in use.
    """
    quote = connection.dialect.identifier_preparer.quote
    role, current_schema = connection.execute(sa.select(sa.func.current_user(), sa.func.current_schema())).one()
    own_schema = current_schema or "public"  # a schema that the role may not use is not current
    schema, _, name = (table or "").rpartition(".")
    needs = [("SCHEMA", quote(own_schema), ["USAGE", "CREATE"], sa.func.has_schema_privilege, own_schema)]
    classes = sa.table("pg_class", *map(sa.column, ("oid", "relname", "relnamespace")))
    spaces = sa.table("pg_namespace", *map(sa.column, ("oid", "nspname")))
    own_places = [(own_schema, POSITIONS.name), (own_schema, QUARANTINE.name)]
    places = [*own_places, *([(schema or own_schema, name)] if name else [])]
    is_there = False
    for place in places:
        table_id = connection.execute(
            sa.select(classes.c.oid)
            .join_from(classes, spaces, classes.c.relnamespace == spaces.c.oid)
            .where(spaces.c.nspname == place[0], classes.c.relname == place[1])
        ).scalar()
        is_there = table_id is not None
        if is_there:
            text = ".".join(map(quote, place))
            needs.append(("TABLE", text, list(_TABLE_RIGHTS), sa.func.has_table_privilege, table_id))
    lines: list[str] = []
    if schema:
        if connection.execute(sa.select(spaces.c.oid).where(spaces.c.nspname == schema)).first() is None:
            lines.append(f"CREATE SCHEMA {quote(schema)};")
        else:
            # The sink makes a table that is missing.
            rights = ["USAGE"] if is_there else ["USAGE", "CREATE"]
            needs.insert(1, ("SCHEMA", quote(schema), rights, sa.func.has_schema_privilege, schema))
    for kind, text, rights, has_right, subject in needs:
        lacks = [right for right in rights if not connection.execute(sa.select(has_right(subject, right))).scalar()]
        if lacks:
            lines.append(f"GRANT {', '.join(lacks)} ON {kind} {text} TO {quote(role)};")
    if not lines:
        return f"Only the owner may do so. Run what the table needs as its owner, or make {quote(role)} its owner."
    return "Run:\n" + with_single_percents("\n".join(lines), connection.dialect)


def lock_holders(connection: Connection, table: str | None) -> str:
    """The sessions that hold a lock on a table, and the way to end them. ``table``: as the pipeline file names it."""
    schema, _, name = (table or "").rpartition(".")
    quote = connection.dialect.identifier_preparer.quote
    locks = sa.table("pg_locks", *map(sa.column, ("pid", "relation", "granted")))
    sessions = sa.table("pg_stat_activity", *map(sa.column, ("pid", "application_name", "usename")))
    query = sa.select(sessions.c.pid, sessions.c.application_name, sessions.c.usename).distinct()
    query = query.join_from(locks, sessions, locks.c.pid == sessions.c.pid).where(
        locks.c.relation == sa.func.to_regclass(".".join(map(quote, [schema, name] if schema else [name]))),
        locks.c.granted,
        sessions.c.pid != sa.func.pg_backend_pid(),
    )
    rows = connection.execute(query.order_by(sessions.c.pid)).all()
    if not rows:
        return "The session that held a lock on the table has ended by now."
    holders = ", ".join(f"{pid} ({application or 'no name'}, user {user})" for pid, application, user in rows)
    return f"Sessions with a lock on the table: {holders}. Let them commit, or run SELECT pg_terminate_backend({rows[0][0]})."


_EXACT = decimal.Context(prec=decimal.MAX_PREC, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)


def is_plain(kind: pa.DataType) -> bool:
    """Whether values of a type are written alike in Python's JSON and in the lake's."""
    kinds = pa.types
    return kinds.is_string(kind) or kinds.is_boolean(kind) or kinds.is_integer(kind)


def copied_text(column: pa.Array, *, as_json: bool = False) -> pa.Array:
    """The values as PostgreSQL reads them in a CSV field. An empty text differs from a null: Arrow puts it in quotes.
    ``as_json``: lists are JSON, and no array literals."""
    kinds, kind = pa.types, column.type
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return column
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return _mapped_texts(column, lambda value: "\\x" + value.hex())
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return _mapped_texts(column, json.dumps) if as_json else _arrays(column)
    if kinds.is_timestamp(kind) and kind.tz is not None:
        return pc.binary_join_element_wise(column.cast(pa.timestamp("us")).cast(pa.string()), "+00", "")
    return column.cast(pa.string())


class NamedType(sa.types.UserDefinedType[str]):
    """A type of PostgreSQL that SQLAlchemy does not know."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        return self.name


NAMED_TYPES = {name: partial(NamedType, name) for name in ("xml", "ltree", "point")}
"""Name → what SQLAlchemy makes of a column of the type."""


def own_type_holds(existing: SqlType, column: Column) -> bool | None:
    """Whether a column of a type of PostgreSQL's own holds the values of a source's column, or refuses them by an error. None if
    SQL's types alone decide."""
    kind, note = column.type, column.note
    is_text = pa.types.is_string(kind)
    match existing:
        case sa.Float():
            return None
        case sa.Numeric() if note == VARIABLE_DECIMAL:
            # With a precision, the type would round.
            return existing.precision is None
        case sa.Date() if note == DEBEZIUM_DATE:
            return True
        case sa.DateTime() if note == ZONED_TIMESTAMP:
            return bool(existing.timezone)
        case sa.Time() if existing.timezone:
            return note == ZONED_TIME
        case INTERVAL():
            # Fields and digits of a second would be cut.
            return is_text and existing.fields is None and existing.precision in (None, 6)
        case BIT() if pa.types.is_boolean(kind):
            return existing.length == 1
        case BIT():
            # Debezium leaves out the zeros before the first one.
            return is_text or (note == BITS and not existing.varying)
        case OID():
            return pa.types.is_integer(kind)
        case TSVECTOR():
            # The type sorts the words of another text.
            return note == TSVECTOR_NOTE
        case HSTORE() if pa.types.is_map(kind):
            return pa.types.is_string(kind.key_type) and pa.types.is_string(kind.item_type)
        case ARRAY() if pa.types.is_list(kind):
            is_held = own_type_holds(existing.item_type, Column("", kind.value_type))
            return None if is_held is not False and not isinstance(existing.item_type, HSTORE) else False
        case NamedType(name="point"):
            return note == POINT
        case MONEY() | sa.types.NullType():
            # A money has the digits and the point of the server's locale.
            return False
        case _:
            # The types name and "char" cut texts.
            return False if type(existing) is sa.String and existing.length is None else None


def column_values(values: pa.Array, existing: SqlType, name: str) -> pa.Array:
    """The values for a column of a type that ``PostgresTarget.holds`` takes beside the type of new columns. TargetRefused for a
    value that the column would change without a word."""
    existing, kinds = base_type(existing), pa.types
    is_text = kinds.is_string(values.type)
    if isinstance(existing, sa.Numeric) and is_text:
        return _mapped_texts(values, _digits)
    if isinstance(existing, HSTORE) and is_text:
        return _mapped_texts(values, _hstore)
    if isinstance(existing, NamedType) and existing.name == "point":
        return _mapped_texts(values, _point)
    if isinstance(existing, BIT) and not is_text:
        length = existing.length or 1
        return _mapped_texts(values, lambda value: format(bits_number(value), f"0{length}b"))
    if isinstance(existing, OID) and pc.any(pc.less(values, 0)).as_py():
        raise TargetRefused(f"the column {name} is below 0, and an oid is not")
    if isinstance(existing, ARRAY) and is_local_times(values.type) and getattr(existing.item_type, "timezone", False):
        return values.cast(pa.list_(pa.timestamp("us", tz="UTC")))
    return fitting(values, existing, name)


def base_type(existing: SqlType) -> SqlType:
    """The type of a domain, and any other type itself."""
    return existing.data_type if isinstance(existing, DOMAIN) else existing


def read_value(value: Any, column: Column) -> Any:
    """A value of a column of a type of PostgreSQL's own, as the source has it; another value as it is."""
    kinds, kind = pa.types, column.type
    if isinstance(value, BitString):
        if kinds.is_string(kind):
            return str(value)
        number = int(value or "0", 2)
        return number == 1 if kinds.is_boolean(kind) else number_bits(number)
    if isinstance(value, Decimal) and column.note == VARIABLE_DECIMAL:
        return as_source(value, as_json=column.as_json)
    if isinstance(value, str) and column.note == POINT and value.startswith("("):
        x, y = map(float, value.strip("()").split(","))
        wkb = b64encode(struct.pack("<BIdd", 1, 1, x, y)).decode()
        return json.dumps({"x": x, "y": y, "wkb": wkb, "srid": None})
    return value


def is_local_times(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_timestamp(kind.value_type) and kind.value_type.tz is None


def _point(text: str) -> str:
    parts = json.loads(text)
    return f"({parts['x']},{parts['y']})"


def _digits(text: str) -> str:
    """A VariableScaleDecimal, as digits or as the JSON of its struct, as digits."""
    if not text.startswith("{"):
        return text
    parts = json.loads(text)
    number = int.from_bytes(b64decode(parts["value"]), "big", signed=True)
    return format(Decimal(number).scaleb(-parts["scale"], _EXACT), "f")


def _hstore(text: str) -> str:
    """The JSON that Debezium makes of an hstore as an hstore; another text as it is."""
    try:
        pairs = json.loads(text)
    except ValueError:
        return text
    if not isinstance(pairs, dict) or not all(isinstance(item, str | None) for item in pairs.values()):
        return text
    return ",".join(f"{_item(name)}=>{_item(item)}" for name, item in pairs.items())


def as_source(value: Decimal, *, as_json: bool) -> str:
    """A numeric as ``_digits`` got it."""
    text = format(value, "f")
    parts: dict[str, Any] = (variable_decimal(text) or {}) if as_json else {}
    return json.dumps({**parts, "value": b64encode(parts["value"]).decode()}) if parts else text


def _mapped_texts(column: pa.Array, change: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else change(value) for value in column.to_pylist()], pa.string())


def _arrays(column: pa.Array) -> pa.Array:
    """Lists as PostgreSQL's array literals."""
    items = copied_text(column.flatten()).to_pylist()
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
    texts: list[str | None] = []
    at = 0
    for length, is_there in zip(lengths, column.is_valid().to_pylist(), strict=True):
        texts.append("{" + ",".join(map(_item, items[at : at + length])) + "}" if is_there else None)
        at += length
    return pa.array(texts, pa.string())


def _item(text: str | None) -> str:
    return "NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
