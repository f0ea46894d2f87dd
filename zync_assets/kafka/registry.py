"""The schema registry: Avro schemas by id and by subject, over the API that Confluent's registry speaks.

Two addresses count here: ``GET /schemas/ids/{id}``, which a consumer needs for every id once, and
``POST /subjects/{subject}/versions``, which a producer needs for every schema once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from zync_assets.errors import SchemaError, SchemaUnknown
from zync_assets.kafka.references import full_name, inline
from zync_assets.kafka.registry_http import ask, connect, public
from zync_assets.pipeline import RegistryConfig, SubjectNameStrategy

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

T = TypeVar("T")

_schemas: dict[tuple[str, int], str] = {}
"""Every schema that this process has seen, by the registry's URL and id: an id never changes its meaning."""

_lock = threading.Lock()


def subject_name(strategy: SubjectNameStrategy, topic: str, side: str, schema: str) -> str:
    """The subject that a schema is registered under, as Confluent's serializers have it: ``<topic>-<key or value>``, the
    record's full name, or ``<topic>-<full name>``. SchemaError for a schema without a name, where one is needed."""
    if strategy == "topic":
        return f"{topic}-{side}"
    document = json.loads(schema)
    if not isinstance(document, dict) or document.get("type") != "record":
        raise SchemaError(
            f"topic {topic}: its {side}s have no record's name for subject-name-strategy {strategy}. Make them records (a"
            f" mapping of names to expressions), or set {side}-subject-name-strategy: topic."
        )
    full = full_name(document["name"], document.get("namespace", ""))
    return full if strategy == "record" else f"{topic}-{full}"


@dataclass(frozen=True)
class Version:
    """A version of a subject. ``type``: ``AVRO``, ``JSON`` or ``PROTOBUF``; ``schema``: the registered text."""

    number: int
    id: int
    type: str
    schema: str


class Registry:
    """A schema registry. Creates its client at the first request. Pickles as its configuration, without the client."""

    def __init__(self, config: RegistryConfig) -> None:
        self._config = config
        self._client: SchemaRegistryClient | None = None

    def __reduce__(self) -> tuple[type[Registry], tuple[RegistryConfig]]:
        return Registry, (self._config,)

    @property
    def url(self) -> str:
        """The address without a user or a password."""
        return public(self._config.url)

    def schema(self, id: int) -> str:
        """The Avro schema of that id as one JSON document that needs no other.

        SchemaUnknown for an id that the registry says it does not have, SchemaError for a schema of another kind than
        Avro: both are properties of the record that names it. RegistryUnavailable for an outage, RegistryError for any
        other refusal (a password that is wrong, an address that is no registry's): no property of a record.
        """
        place = (self._config.url, id)
        if place not in _schemas:
            found = self._ask(lambda client: client.get_schema(id), f"schema id {id}")
            text = self._whole(found, f"schema id {id}")
            with _lock:
                _schemas[place] = text
        return _schemas[place]

    def latest(self, subject: str) -> tuple[int, str] | None:
        """The id and the schema of a subject's latest version; None for an unknown subject."""
        try:
            found = self._ask(lambda client: client.get_latest_version(subject), f"subject {subject}")
        except SchemaUnknown:
            return None
        return int(found.schema_id or 0), self._whole(found.schema, f"subject {subject}")

    def last_version(self, subject: str) -> Version | None:
        """A subject's latest version; None for an unknown subject."""
        try:
            found = self._ask(lambda client: client.get_latest_version(subject), f"subject {subject}")
        except SchemaUnknown:
            return None
        kind = found.schema.schema_type or "AVRO"
        return Version(int(found.version or 0), int(found.schema_id or 0), kind, str(found.schema.schema_str))

    def register(self, subject: str, schema_json: str) -> int:
        """Register a schema under ``subject`` and return its id; the same schema again gives the same id.

        RegistryError, in the registry's own words, for a schema that is not compatible.
        """
        from confluent_kafka.schema_registry import Schema

        schema = Schema(schema_json, "AVRO")
        return self._ask(lambda client: client.register_schema(subject, schema), f"registering subject {subject}")

    def subjects(self) -> list[str]:
        """The names of all subjects, sorted."""
        return sorted(self._ask(lambda client: client.get_subjects(), "listing subjects"))

    def versions(self, subject: str) -> list[int]:
        """The version numbers of a subject, ascending; RegistryError for an unknown subject."""
        return sorted(self._ask(lambda client: client.get_versions(subject), f"subject {subject}"))

    def _whole(self, schema: Schema, what: str) -> str:
        if (schema.schema_type or "AVRO") != "AVRO":
            raise SchemaError(f"{what} at {self.url} is a {schema.schema_type} schema; only AVRO is read here")
        if not schema.references:
            return str(schema.schema_str)
        return inline(str(schema.schema_str), self._referenced(schema, what))

    def _referenced(self, schema: Schema, what: str) -> list[str]:
        """The referenced schemas of ``schema``, as JSON. A schema comes after the schemas that it refers to."""
        found: list[str] = []
        for reference in schema.references or ():
            subject, version = str(reference.subject), int(reference.version or -1)
            where = f"{what}, which refers to subject {subject} version {version}"
            other = self._ask(
                lambda client, subject=subject, version=version: client.get_version(subject, version), where
            ).schema
            found += [*self._referenced(other, what), str(other.schema_str)]
        return list(dict.fromkeys(found))

    def _ask(self, request: Callable[[SchemaRegistryClient], T], what: str) -> T:
        def once() -> T:
            if self._client is None:
                self._client = connect(self._config)
            return request(self._client)

        return ask(self._config, once, what)
