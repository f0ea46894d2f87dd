"""The tables that zync keeps in an SQL target: the positions of its sources, and the records that it refused."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from zync_assets.sinks.target import Place

BOOK = sa.MetaData()
"""The tables that zync keeps in a target."""

_NAME = sa.String(255)


def _place_columns() -> list[sa.Column[Any]]:
    """The columns of a source's partition, the begin of a primary key."""
    names = [sa.Column(name, _NAME, primary_key=True) for name in ("pipeline", "sink", "source")]
    return [*names, sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False)]


POSITIONS = sa.Table(
    "zync_positions",
    BOOK,
    *_place_columns(),
    sa.Column("next", sa.BigInteger, nullable=False),
    sa.Column("origin", _NAME, nullable=False),
)
QUARANTINE = sa.Table(
    "zync_quarantine",
    BOOK,
    *_place_columns(),
    sa.Column("offset", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("key", sa.Text),
    sa.Column("error", sa.Text),
)


def place_values(place: Place) -> dict[str, str]:
    """A place as values of the columns of the book."""
    return {"pipeline": place.pipeline, "sink": place.sink, "source": place.source}


def at_place(table: sa.Table, place: Place) -> list[sa.ColumnElement[bool]]:
    """The condition for the rows of a place, in a table of the book."""
    return [table.c[name] == value for name, value in place_values(place).items()]
