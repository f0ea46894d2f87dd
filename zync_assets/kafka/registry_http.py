"""Requests to a schema registry: tried again where that helps, redirected where that is safe, refused with the reason.

Confluent's client speaks the API. Its own retries are off: it tries a wrong certificate again as it does an outage. It does
not follow redirects, and it hands an address with user and password to a client that logs addresses.
"""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from zync_assets.errors import RegistryError, RegistryUnavailable, SchemaUnknown
from zync_assets.pipeline import RegistryConfig
from zync_assets.private import of, private
from zync_assets.tls import explained

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULTS: Mapping[str, float | int] = {
    "timeout": 10.0,
    # Waits of up to 0.25, 0.5, 1, 2 and 4 seconds: a registry that restarts is back by then.
    "max.retries": 5,
    "retries.wait.ms": 250,
    "retries.max.wait.ms": 4000,
}

_NUMBERS = frozenset({*DEFAULTS, "cache.capacity", "cache.latest.ttl.sec"})

NOT_FOUND = frozenset({40401, 40402, 40403})
"""The codes of Confluent's API for a subject, a version and a schema that are not there."""

_PASSING = frozenset({408, 429})
"""Statuses below 500 that ask for another try."""

_BECOMES_GET = frozenset({301, 302})
"""Redirects after which clients ask with GET for what was to be posted (RFC 9110, section 15.4)."""


def public(url: str) -> str:
    """One or more addresses, without a user and a password."""
    return ",".join(_public(each) for each in url.split(","))


def _public(url: str) -> str:
    scheme, _, rest = _parts(url)
    return f"{scheme}{rest}"


def _parts(url: str) -> tuple[str, str, str]:
    """An address as scheme with ``://``, user and password, and the rest. Whatever is written before an ``@`` is a login."""
    scheme, separator, rest = url.strip().rpartition("://")
    host, slash, path = rest.partition("/")
    login, _, host = host.rpartition("@")
    return f"{scheme}{separator}", login, f"{host}{slash}{path}"


def connect(config: RegistryConfig) -> SchemaRegistryClient:
    """Confluent's client, which asks nothing yet. ValueError or TypeError for a property that it does not take."""
    from confluent_kafka.schema_registry import SchemaRegistryClient

    given: dict[str, Any] = {
        name: float(value) if name in _NUMBERS else value for name, value in config.properties.items()
    }
    login = urlsplit(config.url.split(",")[0].strip())
    if login.username and "basic.auth.user.info" not in given:
        given["basic.auth.user.info"] = f"{unquote(login.username)}:{unquote(login.password or '')}"
    if "bearer.auth.token" in given:
        # Of no meaning outside Confluent's cloud, and asked for by its client.
        given = {"bearer.auth.credentials.source": "STATIC_TOKEN", "bearer.auth.logical.cluster": "", **given}
    client = SchemaRegistryClient({**DEFAULTS, **given, "max.retries": 0, "url": public(config.url)})
    session: Any = of("confluent-kafka", client, "_rest_client").session
    session.follow_redirects = True
    session.event_hooks = {"response": [_keep_method]}
    return client


def _keep_method(response: Any) -> None:
    """Post again to where a post is redirected to."""
    if response.status_code in _BECOMES_GET and response.request.method == "POST":
        response.status_code = 308


def ask(config: RegistryConfig, request: Callable[[], T], what: str) -> T:
    """The answer to ``request``; tried again with growing waits while the registry does not answer.

    Raises RegistryUnavailable for an outage; SchemaUnknown where the registry says so; RegistryError for a refusal: the
    login, a certificate, a schema that is not compatible, an address that is no registry's.
    """
    number = {name: float(config.properties.get(name, value)) for name, value in DEFAULTS.items()}
    tries = int(number["max.retries"])
    for attempt in range(tries + 1):
        try:
            return _once(config, request, what)
        except RegistryUnavailable as error:
            if attempt >= tries:
                raise
            wait = min(number["retries.wait.ms"] * 2**attempt, number["retries.max.wait.ms"]) / 1000
            log.debug("%s; trying again", error)
            time.sleep(random.uniform(0, wait))
    raise AssertionError("unreachable")


def _once(config: RegistryConfig, request: Callable[[], T], what: str) -> T:
    from confluent_kafka.schema_registry import SchemaRegistryError
    from confluent_kafka.schema_registry.error import OAuthTokenError

    httpx: Any = private("confluent-kafka", "confluent_kafka.schema_registry.common", "_httpx_compat").httpx
    at = f"the schema registry at {public(config.url)}"
    try:
        return request()
    except SchemaRegistryError as error:
        raise _answered(config, error, at, what) from None
    except httpx.TooManyRedirects:
        raise RegistryError(f"{at} redirects in a circle: {what}; write the last address in registry.url") from None
    except httpx.HTTPError as error:
        raise _unanswered(config, error, at, what) from None
    except OAuthTokenError as error:
        raise RegistryError(
            f"{at}: no token could be had (HTTP status {error.status_code}): {what}; check bearer.auth.client.id,"
            " bearer.auth.client.secret and bearer.auth.issuer.endpoint.url of registry"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise RegistryError(f"{at}: {what}: {_hidden(str(error), config)}; check `registry:`") from None


def _answered(config: RegistryConfig, error: SchemaRegistryError, at: str, what: str) -> RegistryError:
    """The error for an answer that is none."""
    status, said = error.http_status_code, _hidden(str(error.error_message), config)
    if status >= 500 or status in _PASSING:
        return RegistryUnavailable(f"{at} could not answer: {what}: {said}; try again")
    if status in (401, 403):
        return RegistryError(f"{at} refused the login (HTTP status {status}): {what}; {_login_cure(config)}")
    # Of a 404 only the code tells: a wrong address gives one too.
    kind = SchemaUnknown if error.error_code in NOT_FOUND else RegistryError
    return kind(f"{at} refused: {what}: {said}")


def _unanswered(config: RegistryConfig, error: Exception, at: str, what: str) -> RegistryError:
    """The error for no answer: a certificate, or an outage."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return RegistryError(f"{at}: {what}: {_certificate(config, cause, error)}")
        if isinstance(cause, ssl.SSLError) and "ALERT" in str(cause.reason):
            return RegistryError(
                f"{at} refused this client's certificate, or the lack of one: {what}; set ssl.certificate.location and"
                " ssl.key.location of registry"
            )
    return RegistryUnavailable(
        f"no answer from {at}: {what}: {_hidden(str(error), config) or type(error).__name__};"
        " check registry.url and that it is up"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _certificate(config: RegistryConfig, cause: ssl.SSLCertVerificationError, error: Any) -> str:
    url: Any = error.request.url
    port = url.port or 443
    return explained(cause, url.host, port, config.properties.get("ssl.ca.location"), "ssl.ca.location", "registry.url")


def _login_cure(config: RegistryConfig) -> str:
    if any(name.startswith("bearer.auth.") for name in config.properties):
        return "check bearer.auth.token, or what gives it, of registry"
    if "basic.auth.user.info" in config.properties or "@" in config.url:
        return "check basic.auth.user.info of registry"
    return "it wants one: set basic.auth.user.info or bearer.auth.token of registry"


def _hidden(text: str, config: RegistryConfig) -> str:
    """``text`` without the values of the settings, should a library repeat one."""
    logins = [_parts(url)[1] for url in config.url.split(",")]
    for value in sorted({*config.properties.values(), *logins}, key=len, reverse=True):
        if len(value) > 3:
            text = text.replace(value, "***")
    return text
