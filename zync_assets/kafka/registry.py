"""The schema registry: Avro schemas by id and by subject, over the API that Confluent's registry speaks.

A consumer needs ``GET /schemas/ids/{id}`` once for every id. A producer needs ``POST /subjects/{subject}/versions`` once for
every schema. Confluent's client speaks the API. Its own retries are off, because it repeats a request after a wrong certificate
as after an outage. ``ask`` repeats a request only after an outage, or for an id that the registry may not know yet, and names
the reason of a refusal.

By default, Confluent's client follows no redirects. It also hands an address with user and password to a client that logs
addresses. ``connect`` turns redirects on, and passes the login in properties.

``inline`` makes one document of a schema and the schemas that it refers to by name. A registry keeps shared types under
subjects of their own. A schema that uses a shared type has the type's name and a list of references. Names and namespaces are
resolved as the Avro specification says ("Names"): a name without a dot is in the enclosing namespace, else in none.
"""

from __future__ import annotations

import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

from zync_assets.errors import RegistryError, RegistryUnavailable, SchemaError, SchemaUnknown
from zync_assets.kafka.trust import NO_AUTHORITIES, explanation, load_authorities, missing_file
from zync_assets.pipeline import RegistryConfig
from zync_assets.private import of, private

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED_KINDS = frozenset({"record", "error", "enum", "fixed"})


def inline(schema: str, references: Sequence[str]) -> str:
    """``schema`` with each type from ``references`` (JSON documents) defined at its first use.

    Raises SchemaError for a document that is no JSON, or a name that nothing defines.
    """
    try:
        documents = [json.loads(text) for text in references]
        main = json.loads(schema)
        definitions = {name: item for document in documents for name, item in _definitions(document, "")}
        return json.dumps(_Inliner(definitions).schema(main, ""))
    except ValueError as error:
        raise SchemaError(f"a schema that is no JSON: {error}; register it again") from None
    except RecursionError:
        raise SchemaError("a schema that is nested too deep") from None


def full_name(name: str, namespace: str) -> str:
    """A name with its namespace."""
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _namespace(schema: Mapping[str, Any], enclosing: str) -> str:
    """The namespace of a named type. Names inside the type belong to the same namespace."""
    name = str(schema["name"])
    return name.rpartition(".")[0] if "." in name else str(schema.get("namespace", enclosing))


def _definitions(schema: Any, namespace: str) -> Iterator[tuple[str, tuple[Mapping[str, Any], str]]]:
    """Every named type defined in ``schema`` by its full name, with the namespace that encloses it."""
    if isinstance(schema, list):
        for branch in schema:
            yield from _definitions(branch, namespace)
    elif isinstance(schema, dict):
        inner = namespace
        if schema.get("type") in _NAMED_KINDS:
            inner = _namespace(schema, namespace)
            yield full_name(str(schema["name"]), inner), (schema, namespace)
        for field in schema.get("fields", ()):
            yield from _definitions(field.get("type"), inner)
        for part in ("items", "values", "type"):
            yield from _definitions(schema.get(part), inner)


class _Inliner:
    """Walks a schema in the order in which a parser meets its names."""

    def __init__(self, definitions: Mapping[str, tuple[Mapping[str, Any], str]]) -> None:
        self._definitions = definitions
        self._names: set[str] = set()

    def schema(self, schema: Any, namespace: str) -> Any:
        if isinstance(schema, str):
            return self._name(schema, namespace)
        if isinstance(schema, list):
            return [self.schema(branch, namespace) for branch in schema]
        if not isinstance(schema, dict):
            raise SchemaError(f"{json.dumps(schema)} is no Avro schema; correct it in the registry")
        kind = schema.get("type")
        if kind not in _NAMED_KINDS:
            return {
                **schema,
                **{part: self.schema(schema[part], namespace) for part in ("items", "values") if part in schema},
                "type": kind if kind in ("array", "map") else self.schema(kind, namespace),
            }
        inner = _namespace(schema, namespace)
        name = full_name(str(schema["name"]), inner)
        if name in self._names:
            return name
        self._names.add(name)
        # An explicit namespace, even an empty one: the place it moves to must not lend it another.
        whole = {**schema, "name": name.rpartition(".")[2], "namespace": inner}
        if "fields" in schema:
            whole["fields"] = [{**field, "type": self.schema(field["type"], inner)} for field in schema["fields"]]
        return whole

    def _name(self, name: str, namespace: str) -> Any:
        if name in PRIMITIVES:
            return name
        for candidate in dict.fromkeys((full_name(name, namespace), name)):
            if candidate in self._names:
                return candidate
            if candidate in self._definitions:
                definition, enclosing = self._definitions[candidate]
                return self.schema(definition, enclosing)
        raise SchemaError(f"type {full_name(name, namespace)} is defined nowhere; register its subject and refer to it")


log = logging.getLogger(__name__)
T = TypeVar("T")
Kinds: TypeAlias = type[RegistryError] | tuple[type[RegistryError], ...]

DEFAULTS: Mapping[str, float | int] = {
    "timeout": 10.0,
    # Waits of up to 0.25, 0.5, 1, 2 and 4 seconds: a registry that restarts is back by then.
    "max.retries": 5,
    "retries.wait.ms": 250,
    "retries.max.wait.ms": 4000,
}

_FILES = frozenset({"ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password"})
"""The client reads these files, and the key's password, before it looks at other properties."""
_NUMBERS = frozenset({*DEFAULTS, "cache.capacity", "cache.latest.ttl.sec"})

NOT_FOUND = frozenset({40401, 40402, 40403})
"""The codes of Confluent's API for a subject, a version and a schema that are not there."""

_PASSING = frozenset({408, 429})
"""Statuses below 500 that ask for another try."""

_BECOMES_GET = frozenset({301, 302})
"""Redirects after which clients ask with GET for what was to be posted (RFC 9110, section 15.4)."""


def public(url: str) -> str:
    """One or more addresses, without a user and a password."""
    return ",".join("".join(_parts(address)[::2]) for address in url.split(","))


def _parts(url: str) -> tuple[str, str, str]:
    """An address as scheme with ``://``, user and password, and the rest. Whatever is written before an ``@`` is a login."""
    scheme, separator, location = url.strip().rpartition("://")
    host, slash, path = location.partition("/")
    login, _, host = host.rpartition("@")
    return f"{scheme}{separator}", login, f"{host}{slash}{path}"


def connect(config: RegistryConfig) -> SchemaRegistryClient:
    """Confluent's client, which asks nothing yet. ValueError or TypeError for a property that it does not take."""
    from confluent_kafka.schema_registry import SchemaRegistryClient

    properties: dict[str, Any] = {
        name: float(value) if name in _NUMBERS else value for name, value in config.properties.items()
    }
    login = urlsplit(config.url.split(",")[0].strip())
    if login.username and "basic.auth.user.info" not in properties:
        properties["basic.auth.user.info"] = f"{unquote(login.username)}:{unquote(login.password or '')}"
    if "bearer.auth.token" in properties:
        # Of no meaning outside Confluent's cloud, and asked for by its client.
        properties = {"bearer.auth.credentials.source": "STATIC_TOKEN", "bearer.auth.logical.cluster": "", **properties}
    is_plain = "https:" not in config.url.lower() and not any(name.startswith("ssl.") for name in properties)
    trust = {"ssl.ca.location": NO_AUTHORITIES} if is_plain else {}
    client = SchemaRegistryClient({**DEFAULTS, **properties, **trust, "max.retries": 0, "url": public(config.url)})
    rest: Any = of("confluent-kafka", client, "_rest_client")
    load = partial(load_authorities, of("confluent-kafka", rest, "verify"))
    rest.session.follow_redirects = True
    rest.session.event_hooks = {"response": [_keep_method, load] if is_plain else [_keep_method]}
    return client


def unknown_properties(config: RegistryConfig) -> list[str]:
    """The properties that Confluent's client does not know. Other faults show when it asks."""
    try:
        # Without the files of certificates, which the client reads first.
        connect(
            RegistryConfig(config.url, {name: text for name, text in config.properties.items() if name not in _FILES})
        )
    except (ValueError, TypeError) as error:
        _, mark, names = str(error).partition("Unrecognized properties: ")
        return names.split(", ") if mark else []
    return []


def _keep_method(response: Any) -> None:
    """Post again to where a post is redirected to."""
    if response.status_code in _BECOMES_GET and response.request.method == "POST":
        response.status_code = 308


def ask(config: RegistryConfig, request: Callable[[], T], label: str, passing: Kinds = RegistryUnavailable) -> T:
    """The answer to ``request``; tried again with growing waits after the ``passing`` errors.

    Raises RegistryUnavailable for an outage, and for an address that is no registry's; SchemaUnknown where the registry says
    so; RegistryError for a refusal: the login, a certificate, a schema that is not compatible.
    """
    number = {name: float(config.properties.get(name, value)) for name, value in DEFAULTS.items()}
    tries = int(number["max.retries"])
    for attempt in range(tries + 1):
        try:
            return _request_once(config, request, label)
        except passing as error:
            if attempt >= tries:
                raise
            wait = min(number["retries.wait.ms"] * 2**attempt, number["retries.max.wait.ms"]) / 1000
            log.debug("%s; trying again", error)
            # An id is on its way to this server for a time that is not random. Its records would go into quarantine.
            time.sleep(wait if isinstance(error, SchemaUnknown) else random.uniform(0, wait))
    raise AssertionError("unreachable")


def _request_once(config: RegistryConfig, request: Callable[[], T], label: str) -> T:
    from confluent_kafka.schema_registry import SchemaRegistryError
    from confluent_kafka.schema_registry.error import OAuthTokenError

    httpx: Any = private("confluent-kafka", "confluent_kafka.schema_registry.common", "_httpx_compat").httpx
    at = f"the schema registry at {public(config.url)}"
    try:
        return request()
    except SchemaRegistryError as error:
        raise _answer_error(config, error, at, label) from None
    except httpx.TooManyRedirects:
        raise RegistryError(f"{at} redirects in a circle: {label}; write the last address in registry.url") from None
    except httpx.HTTPError as error:
        raise _silence_error(config, error, at, label) from None
    except OAuthTokenError as error:
        raise RegistryError(
            f"{at}: no token could be had (HTTP status {error.status_code}): {label}; check bearer.auth.client.id,"
            " bearer.auth.client.secret and bearer.auth.issuer.endpoint.url of registry"
        ) from None
    except (json.JSONDecodeError, TypeError, AttributeError):
        raise RegistryError(f"{at}: {label}: the answer is not one of a registry; check `registry:`") from None
    except (ValueError, OSError, httpx.InvalidURL) as error:
        fault = missing_file(config.properties) or f"{_redact(str(error), config)}; check `registry:`"
        raise RegistryError(f"{at}: {label}: {fault}") from None


def _answer_error(config: RegistryConfig, error: SchemaRegistryError, at: str, label: str) -> RegistryError:
    """The error for an answer that is none."""
    status, message = error.http_status_code, _redact(str(error.error_message), config)
    if status >= 500 or status in _PASSING:
        return RegistryUnavailable(f"{at} could not answer: {label}: {message}; try again")
    if status == 401:
        return RegistryError(f"{at} refused the login (HTTP status {status}): {label}; {_login_cure(config)}")
    # A wrong address gives a 404 too, and so does a proxy while the registry restarts. A registry gives its own code.
    if status == 404 and (error.error_code or 0) < min(NOT_FOUND):
        return RegistryUnavailable(f"{at} refused: {label}: {message}; check registry.url, its path too")
    kind = SchemaUnknown if error.error_code in NOT_FOUND else RegistryError
    cure = "; give the login of registry the right to this" if status == 403 else ""
    return kind(f"{at} refused: {label}: {message}{cure}")


def _silence_error(config: RegistryConfig, error: Exception, at: str, label: str) -> RegistryError:
    """The error for no answer: a certificate, or an outage."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return RegistryError(f"{at}: {label}: {_certificate(config, cause, error)}")
        if isinstance(cause, ssl.SSLError) and "ALERT" in str(cause.reason):
            return RegistryError(
                f"{at} refused this client's certificate, or the lack of one: {label}; set ssl.certificate.location and"
                " ssl.key.location of registry"
            )
    return RegistryUnavailable(
        f"no answer from {at}: {label}: {_redact(str(error), config) or type(error).__name__};"
        " check registry.url and that it is up, or give a slow registry a longer timeout."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _certificate(config: RegistryConfig, cause: ssl.SSLCertVerificationError, error: Any) -> str:
    url: Any = error.request.url
    port = url.port or 443
    return explanation(
        cause, url.host, port, config.properties.get("ssl.ca.location"), "ssl.ca.location", "registry.url"
    )


def _login_cure(config: RegistryConfig) -> str:
    if any(name.startswith("bearer.auth.") for name in config.properties):
        return "check bearer.auth.token, or what gives it, of registry"
    if "basic.auth.user.info" in config.properties or "@" in config.url:
        return "check basic.auth.user.info of registry"
    return "it wants one: set basic.auth.user.info or bearer.auth.token of registry"


def _redact(text: str, config: RegistryConfig) -> str:
    """``text`` without the values of the settings, should a library repeat one."""
    logins = [_parts(url)[1] for url in config.url.split(",")]
    for value in sorted({*config.properties.values(), *logins}, key=len, reverse=True):
        if len(value) > 3:
            text = text.replace(value, "***")
    return text


_schemas: dict[tuple[str, int], str] = {}
"""Every schema that this process has seen, by the registry's URL and id."""


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
        self._passing: Kinds = (RegistryUnavailable, SchemaUnknown)
        self._asked = set[int]()

    def __reduce__(self) -> tuple[type[Registry], tuple[RegistryConfig]]:
        return Registry, (self._config,)

    @property
    def url(self) -> str:
        """The address without a user or a password."""
        return public(self._config.url)

    def schema(self, id: int, anew: bool = False) -> str:
        """The Avro schema of that id as one JSON document that needs no other. ``anew``: asks once more in this object.

        SchemaUnknown for an id that the registry says it does not have, SchemaError for a schema of another kind than
        Avro: both are properties of the record that names it. RegistryUnavailable for an outage, RegistryError for any
        other refusal (a password that is wrong, an address that is no registry's): no property of a record.

        An unknown id is asked for again: another server of the registry may have given it to the record's writer a moment ago.
        Once an id stayed unknown, no other id is waited for.
        """
        place = (self._config.url, id)
        if place not in _schemas or (anew and id not in self._asked):
            try:
                schema = self._ask(lambda client: client.get_schema(id), f"schema id {id}", self._passing)
            except SchemaUnknown:
                self._passing = RegistryUnavailable
                raise
            _schemas[place] = self._whole(schema, f"schema id {id}")
            self._asked.add(id)
        return _schemas[place]

    def latest(self, subject: str) -> tuple[int, str] | None:
        """The id and the schema of a subject's latest version; None for an unknown subject."""
        version = self._latest(subject)
        return None if version is None else (int(version.schema_id), self._whole(version.schema, f"subject {subject}"))

    def latest_version(self, subject: str) -> Version | None:
        """A subject's latest version; None for an unknown subject."""
        version = self._latest(subject)
        if version is None:
            return None
        schema = version.schema
        return Version(
            int(version.version), int(version.schema_id), schema.schema_type or "AVRO", str(schema.schema_str)
        )

    def _latest(self, subject: str) -> Any:
        """The latest version as Confluent's client has it; None for an unknown subject."""
        with suppress(SchemaUnknown):
            return self._ask(lambda client: client.get_latest_version(subject), f"subject {subject}")
        return None

    def register(self, subject: str, schema_json: str) -> int:
        """Register a schema under ``subject`` and return its id; the same schema again gives the same id.

        RegistryError, in the registry's own words, for a schema that is not compatible.
        """
        from confluent_kafka.schema_registry import Schema

        def send() -> int:
            schema = Schema(schema_json, "AVRO")
            return self._ask(lambda client: client.register_schema(subject, schema), f"registering subject {subject}")

        try:
            return send()
        except RegistryUnavailable:
            raise
        except RegistryError:
            # A registry may refuse the second of two clients that create a subject at the same moment. The second request
            # finds the subject, and the registry compares the schemas.
            return send()

    def subjects(self) -> list[str]:
        """The names of all subjects, sorted."""
        return sorted(self._ask(lambda client: client.get_subjects(), "listing subjects"))

    def versions(self, subject: str) -> list[int]:
        """The version numbers of a subject, ascending; RegistryError for an unknown subject."""
        return sorted(self._ask(lambda client: client.get_versions(subject), f"subject {subject}"))

    def _whole(self, schema: Schema, label: str) -> str:
        if (schema.schema_type or "AVRO") != "AVRO":
            raise SchemaError(f"{label} at {self.url} is a {schema.schema_type} schema; only AVRO is read here")
        if not schema.references:
            return str(schema.schema_str)
        return inline(str(schema.schema_str), self._references(schema, label))

    def _references(self, schema: Schema, label: str) -> list[str]:
        """The referenced schemas of ``schema``, as JSON. A schema comes after the schemas that it refers to."""
        documents: list[str] = []
        for reference in schema.references or ():
            subject, version = str(reference.subject), int(reference.version or -1)
            reference_label = f"{label}, which refers to subject {subject} version {version}"
            dependency = self._ask(
                lambda client, subject=subject, version=version: client.get_version(subject, version), reference_label
            ).schema
            documents += [*self._references(dependency, label), str(dependency.schema_str)]
        return list(dict.fromkeys(documents))

    def _ask(self, request: Callable[[SchemaRegistryClient], T], label: str, passing: Kinds = RegistryUnavailable) -> T:
        def send() -> T:
            # After a failure, another client: a client keeps each answer.
            client, self._client = self._client or connect(self._config), None
            answer = request(client)
            if getattr(answer, "schema_str", answer) is None:
                raise TypeError("no id or no schema")
            self._client = client
            return answer

        return ask(self._config, send, label, passing)
