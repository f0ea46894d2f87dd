"""Connect schemas by hand, and a change of a MySQL table as Debezium has it."""

from __future__ import annotations

import decimal
from typing import Any

from zync_assets_tests.codecs.connect_generated import base64_of
from zync_assets_tests.codecs.generated import fewest_bytes

TIME = "io.debezium.time"
DATA = "io.debezium.data"
CONNECT = "org.apache.kafka.connect.data"


def field(name: str, type: str | dict[str, Any], logical: str | None = None, **more: Any) -> dict[str, Any]:
    """A struct's field, optional unless ``more`` says otherwise."""
    schema = type if isinstance(type, dict) else {"type": type}
    return {"optional": True, **schema, **({"name": logical, "version": 1} if logical else {}), "field": name, **more}


def struct(*fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields), "optional": False, **more}


def decimal_of(digits: str, scale: int) -> str:
    return base64_of(fewest_bytes(int(decimal.Decimal(digits).scaleb(scale))))


MYSQL_ROW = (
    field("id", "int64", optional=False),
    field("name", "string"),
    field("price", "bytes", f"{CONNECT}.Decimal", parameters={"scale": "2", "connect.decimal.precision": "10"}),
    field("active", "int16", optional=False, default=1),
    field("size", "string", f"{DATA}.Enum", parameters={"allowed": "S,M,L"}),
    field("tags", "string", f"{DATA}.EnumSet", parameters={"allowed": "a,b"}),
    field("made_on", "int32", f"{TIME}.Date"),
    field("sold_at", "int64", f"{TIME}.Timestamp"),
    field("seen_at", "string", f"{TIME}.ZonedTimestamp"),
    field("opens", "int64", f"{TIME}.MicroTime"),
    field("year", "int32", f"{TIME}.Year"),
    field("notes", "string", f"{DATA}.Json"),
    field("flags", "bytes", f"{DATA}.Bits", parameters={"length": "12"}),
    field("place", struct(field("x", "double"), field("y", "double"), field("wkb", "bytes"), field("srid", "int32"))),
)
MYSQL_SOURCE = struct(
    field("version", "string", optional=False),
    field("connector", "string", optional=False),
    field("snapshot", "string", f"{DATA}.Enum", parameters={"allowed": "true,false"}, default="false"),
    field("db", "string", optional=False),
    field("gtid", "string"),
    field("pos", "int64", optional=False),
    field("row", "int32", optional=False),
    name="io.debezium.connector.mysql.Source",
)
TRANSACTION = struct(
    field("id", "string", optional=False),
    field("total_order", "int64", optional=False),
    optional=True,
    name="event.block",
)


def envelope(source: dict[str, Any], *row: dict[str, Any]) -> dict[str, Any]:
    table = struct(*row, optional=True, name="shop.Value")
    return struct(
        field("before", table),
        field("after", table),
        field("source", source, optional=False),
        field("transaction", TRANSACTION),
        field("op", "string", optional=False),
        field("ts_ms", "int64"),
        name="shop.Envelope",
        version=2,
    )


MYSQL_AFTER = {
    "id": 7,
    "name": "Tür „A“",
    "price": decimal_of("-12.30", 2),
    "active": 1,
    "size": "M",
    "tags": "a,b",
    "made_on": 19_782,
    "sold_at": 1_709_200_800_123,
    "seen_at": "2024-02-29T10:00:00Z",
    "opens": 36_000_000_000,
    "year": 2024,
    "notes": '{"a": [1]}',
    "flags": "AQg=",
    "place": {"x": 1.5, "y": -2, "wkb": "AQEAAAA=", "srid": None},
}
MYSQL = {
    "before": None,
    "after": MYSQL_AFTER,
    "source": {
        "version": "3.0.0",
        "connector": "mysql",
        "snapshot": "false",
        "db": "shop",
        "gtid": None,
        "pos": 194,
        "row": 0,
    },
    "transaction": None,
    "op": "c",
    "ts_ms": 1_709_200_800_500,
}
