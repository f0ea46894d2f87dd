"""The note of a field in a writer's schema: Kafka Connect's name, version and parameters, and whether the field is NOT NULL.

A sink of Kafka Connect chooses a column's type by the note: a string with the name ``io.debezium.data.Uuid`` becomes a uuid.
A column keeps the note of its field (``field_notes``), and an output that is a bare column has the note again.

A column's note holds the properties that every writer's schema has. A column without a note may be null and stays without a
note, because its earlier values have no note.

Source: Confluent's and Apicurio's ``AvroData``, which write Connect's schemas into Avro as ``connect.*`` properties; Apache
Kafka, ``org.apache.kafka.connect.json.JsonSchema``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

DECIMAL = "org.apache.kafka.connect.data.Decimal"
PRECISION = "connect.decimal.precision"
DATE = "org.apache.kafka.connect.data.Date"
TIME = "org.apache.kafka.connect.data.Time"
TIMESTAMP = "org.apache.kafka.connect.data.Timestamp"
DEBEZIUM_DATE = "io.debezium.time.Date"
DEBEZIUM_TIMESTAMP = "io.debezium.time.Timestamp"
MICRO_TIMESTAMP = "io.debezium.time.MicroTimestamp"
ZONED_TIMESTAMP = "io.debezium.time.ZonedTimestamp"
VARIABLE_DECIMAL = "io.debezium.data.VariableScaleDecimal"

_IMPLIED = {"time-millis": TIME, "timestamp-millis": TIMESTAMP}
"""Names that the converters give Avro's logical types."""


@dataclass(frozen=True)
class Note:
    """``name``: "" without a name; ``version``: None without a version. ``required``: null only inside a null struct.

    ``item``: the note of an array's items, or of a map's values; ``logical``: Avro's logical type, if Connect has none.
    """

    name: str = ""
    version: int | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    doc: str = ""
    required: bool = False
    item: Note | None = None
    logical: str = ""

    def __bool__(self) -> bool:
        return self != PLAIN

    @property
    def of_items(self) -> Note:
        return self.item or PLAIN


PLAIN = Note()


def connect_note(
    name: object, version: object, parameters: object, doc: object, logical: str = "", *, decimal: bool = False
) -> Note:
    """The note of a type, of the parts of its schema as they stand in JSON; what has another form is ignored.

    A decimal's name and digits are its type's, and no note.
    """
    given = parameters if isinstance(parameters, Mapping) else {}
    kept = {str(key): value for key, value in given.items() if isinstance(value, str)}
    label = name if isinstance(name, str) else _IMPLIED.get(logical, "")
    if decimal or label == DECIMAL:
        kept = {key: value for key, value in kept.items() if key not in ("scale", PRECISION)}
        label, version = "", None
    return Note(
        label,
        version if isinstance(version, int) else 1 if label and not isinstance(name, str) else None,
        tuple(sorted(kept.items())),
        doc if isinstance(doc, str) else "",
        logical="" if label else logical if logical == "timestamp-micros" else "",
    )


def agreed(one: Note, other: Note, *, same_values: bool = False) -> Note:
    """What both say. ``same_values``: the values of the second become such as the first has, whatever they are called."""
    named = one.name == other.name
    return Note(
        one.name if named or same_values else "",
        one.version if (named and one.version == other.version) or same_values else None,
        tuple(pair for pair in one.parameters if pair in other.parameters),
        one.doc if one.doc == other.doc else "",
        one.required and other.required,
        (agreed(one.item, other.item) or None) if one.item and other.item else None,
        one.logical if one.logical == other.logical else "",
    )


def optional(note: Note) -> Note:
    return replace(note, required=False)


def note_text(note: Note) -> str:
    """A note as JSON, without what is empty."""
    return json.dumps(_document(note), separators=(",", ":"), sort_keys=True)


def read_note(text: str) -> Note:
    return _note(json.loads(text))


def _document(note: Note) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": note.name,
        "version": note.version,
        "parameters": dict(note.parameters),
        "doc": note.doc,
        "required": note.required,
        "item": _document(note.item) if note.item else None,
        "logical": note.logical,
    }
    return {key: value for key, value in made.items() if value not in (None, "", False, {})}


def _note(made: Mapping[str, Any]) -> Note:
    item = made.get("item")
    return Note(
        made.get("name", ""),
        made.get("version"),
        tuple(sorted(made.get("parameters", {}).items())),
        made.get("doc", ""),
        made.get("required", False),
        _note(item) if item else None,
        made.get("logical", ""),
    )
