"""Sessions on a Spark Connect server: one that runs somewhere, or the shared one of this user on this machine."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zync_assets.errors import SetupError, SparkUnavailable
from zync_assets.local import spark_servers
from zync_assets.pipeline import SHARED
from zync_assets.private import of, private
from zync_assets.spark_pins import PINS
from zync_assets.steps.failures import said
from zync_assets.steps.local_session import use_this_machine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANSWER_SECONDS = 10.0
"""How long a server may take to answer a new client."""
_RETRIES: Mapping[str, Any] = {"max_retries": 7, "max_backoff": 5000}
"""How long a server may be away while something runs: some 20 seconds. PySpark's own would be a quarter of an hour."""
_RETRIES_SHARED: Mapping[str, Any] = {"max_retries": 3, "max_backoff": 1000}
"""On this machine there is no network to come back."""

_OF_SESSIONS = ("spark.sql.", "spark.python.sql.")
"""Properties that a session may have; the others are a server's own."""

_log = logging.getLogger(__name__)
_sessions: dict[str, tuple[_Target, SparkSession]] = {}
"""The sessions of this process, by the URL, or the folder of the server, that they are on."""


@dataclass(frozen=True)
class _Target:
    """A server: ``key`` finds this process's session on it, ``said`` is how an error names it, ``cure`` what to do when it
    is away. ``token``: of a shared server; another's is in its URL."""

    key: str = field(repr=False)
    said: str
    cure: str
    url: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def remote_session(settings: Mapping[str, str]) -> SparkSession:
    """This process's session on the server that ``spark.remote`` names, with the settings that results depend on.

    Made at the first call, and again where the server gave it up, as it does after a long rest. Raises SetupError if the
    server does not answer or refuses; a shared one that does not run is started.
    """
    if settings["spark.remote"] == SHARED:
        return _shared_session(settings)
    url = settings["spark.remote"]
    said = f"Spark Connect server {shown(url)}"
    cure = "Start it, correct spark: remote: (or SPARK_REMOTE), or write `shared` to have one started on this machine."
    own = {name: value for name, value in settings.items() if name.startswith(_OF_SESSIONS)}
    return _session(_Target(url, said, cure, url), {**own, **PINS})


def _shared_session(settings: Mapping[str, str]) -> SparkSession:
    server = shared_server(settings)
    said = f"shared Spark server of {server.folder}"
    cure = "`zync spark status` shows it; `zync spark down` stops it, and the next command starts another."
    url = f"sc://localhost:{server.port}"
    return _session(_Target(str(server.folder), said, cure, url, server.secret), PINS)


def shared_server(settings: Mapping[str, str]) -> spark_servers.Server:
    """The shared server with these settings, started where none runs."""
    settings = servers_own(settings)
    folder = spark_servers.folder_of(settings)
    found = spark_servers.find(folder)
    if found is None:
        print("Starting a Spark server, which stays for the next commands (about 10 seconds) …", file=sys.stderr)
        # Looks for Java in this process, so that the user sees an error. The server inherits the environment.
        use_this_machine()
        found = spark_servers.start(folder, settings)
    return found


def servers_own(settings: Mapping[str, str]) -> dict[str, str]:
    """The pipeline's Spark properties for the start of a shared server."""
    return {name: value for name, value in settings.items() if name != "spark.remote"}


def shown(url: str) -> str:
    """A server's URL without the login and parameters, which may hold secrets."""
    return re.sub(r"//[^/@]*@", "//", url.partition(";")[0]).rstrip("/")


def _session(target: _Target, settings: Mapping[str, str]) -> SparkSession:
    from pyspark.errors import PySparkException

    known = _sessions.get(target.key)
    if known is not None:
        try:
            if known[0] == target:
                _set(known[1], settings)
                return known[1]
        except PySparkException as error:
            _log.info("%s gave up this session: %s", target.said, type(error).__name__)
        # PySpark would go on asking it here and there.
        _drop(_sessions.pop(target.key)[1])
    made = _connected(target)
    try:
        _set(made, settings)
    except PySparkException as error:
        _drop(made)
        raise SetupError(f"The {target.said} refuses: {_reason(error)}. {target.cure}") from None
    _sessions[target.key] = target, made
    return made


def _connected(target: _Target) -> SparkSession:
    import grpc
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client.retries import DefaultPolicy
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    if private("pyspark", "pyspark.SparkContext", "_active_spark_context") is not None:
        raise SetupError("This process has a Spark session of its own already, and PySpark has one kind in a process.")
    os.environ.pop("SPARK_REMOTE", None)
    try:
        builder = _channel(target)
    except PySparkException:
        # PySpark's error may quote the token.
        raise SetupError(
            f"spark: remote: {shown(target.url)} is no URL of a Spark Connect server: write sc://host:port, with"
            " `/;token=…` and the like after it where need be (a `=` in a value as %3D), or shared."
        ) from None
    session: Any = RemoteSession.builder.channelBuilder(builder).create()
    client = session.client
    retries = _RETRIES if target.token is None else _RETRIES_SHARED
    client.set_retry_policies([DefaultPolicy(**retries)])
    try:
        grpc.channel_ready_future(of("pyspark", client, "_channel")).result(timeout=ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        client.close()
        raise SparkUnavailable(f"The {target.said} does not answer. {target.cure}") from None
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    return session


def _set(session: Any, settings: Mapping[str, str]) -> None:
    """In one request; it also shows whether the server still has the session."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        of("pyspark", session.conf, "_set_all")(dict(settings), silent=True)
    for warning in told:
        text = str(warning.message).partition("\n")[0]
        # That a pin is deprecated is nothing that a user can change.
        if not any(f"'{name}'" in text for name in PINS):
            _log.warning("%s", text)


def _drop(session: Any) -> None:
    """Close a session without a word to its server, which does not know it."""
    session.release_session_on_close = False
    session.stop()


@atexit.register
def _release() -> None:
    """Stop this process's sessions. Otherwise their cached data would stay on the server until the session's timeout."""
    for key in list(_sessions):
        session: Any = _sessions.pop(key)[1]
        session.client.set_retry_policies([])
        session.stop()


def _channel(target: _Target) -> Any:
    """The builder of the connection.

    PySpark accepts a login without TLS only for the name ``localhost``. Another user's server may answer to this name on
    another address.
    """
    from pyspark.sql.connect.client import DefaultChannelBuilder

    if target.token is None:
        return DefaultChannelBuilder(target.url)

    class Here(DefaultChannelBuilder):
        @property
        def endpoint(self) -> str:
            return f"127.0.0.1:{self._port}"

    builder = Here(target.url)
    builder.set(DefaultChannelBuilder.PARAM_TOKEN, target.token)
    return builder


def _reason(error: Exception) -> str:
    text = str(error)
    if "UNAUTHENTICATED" in text:
        return "it does not know this token"
    return said(error)
