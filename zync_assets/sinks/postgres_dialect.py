"""PostgreSQL's errors with their cures, where a later try does not help, and the texts of values for PostgreSQL."""

from __future__ import annotations

import decimal
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects.postgresql import ARRAY, DOMAIN, HSTORE, dialect
from sqlalchemy.engine import Connection

from zync_assets.codecs.arrays import pc
from zync_assets.codecs.evolution import variable_decimal
from zync_assets.sinks.sql_types import POSITIONS, QUARANTINE, SqlType, with_single_percents

_LOGIN_ERRORS: Mapping[str, str] = {
    "certificate verify failed": "Name the file of its CA in the url, ?sslrootcert=FILE; sslmode=require would trust any server.",
    "server does not support SSL": "Turn TLS on at the server. In a network that you trust, write ?sslmode=disable in the url.",
    "does not match host name": "Write the host's name as the server's certificate has it in the url.",
    "password authentication failed": "Correct the user or the password in the url.",
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


def column_values(values: pa.Array, existing: SqlType) -> pa.Array:
    """The values for a column of a type that ``PostgresTarget.holds`` takes beside the type of new columns."""
    existing = existing.data_type if isinstance(existing, DOMAIN) else existing
    if isinstance(existing, sa.Numeric) and pa.types.is_string(values.type):
        return _mapped_texts(values, _digits)
    if isinstance(existing, HSTORE) and pa.types.is_string(values.type):
        return _mapped_texts(values, _hstore)
    if isinstance(existing, ARRAY) and is_local_times(values.type) and getattr(existing.item_type, "timezone", False):
        return values.cast(pa.list_(pa.timestamp("us", tz="UTC")))
    return values


def is_local_times(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_timestamp(kind.value_type) and kind.value_type.tz is None


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
