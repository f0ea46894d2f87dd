"""The process of a shared Spark Connect server: a local session with Spark's Connect plugin, watched until nobody uses it.

``shared_servers`` starts it. The JVM is this process's child and ends with it, however it ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zync_assets.private import of
from zync_assets.spark import shared_servers
from zync_assets.spark.session import local_session
from zync_assets.spark.sql import PINS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_SECONDS = 5.0
"""How often it is asked whether somebody is there."""

_PLUGIN = "org.apache.spark.sql.connect.SparkConnectPlugin"
_CONNECT = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
    # The server interrupts the queries of a killed client, and removes the client's session later. A living client attaches
    # to its queries again within seconds. A client whose idle session was removed creates another session.
    "spark.connect.execute.manager.detachedTimeout": "30s",
    "spark.connect.session.manager.defaultSessionTimeout": "10m",
}


def serve(folder: Path) -> None:
    """Start the folder's server. Returns when the server is idle, is stopped, or its JVM ends."""
    arguments = shared_servers.load(folder)
    assert arguments is not None
    signal.signal(signal.SIGTERM, _stop)
    session = local_session(_settings(arguments))
    service = _service(session)
    jvm: subprocess.Popen[bytes] = of("pyspark", session.sparkContext, "_gateway").proc
    try:
        shared_servers.announce(folder, arguments.token, service.localPort())
        _watch(session, service, jvm, arguments.idle_seconds)
    finally:
        shared_servers.withdraw(folder, arguments.token)
    session.stop()


def _settings(arguments: shared_servers.StartArguments) -> Mapping[str, str]:
    plugins = [text for text in (arguments.settings.get("spark.plugins"), _PLUGIN) if text]
    server_settings = {"spark.plugins": ",".join(plugins), "spark.connect.authenticate.token": arguments.secret}
    # Every session begins with the settings of the server's own.
    return {**_CONNECT, **arguments.settings, **PINS, **server_settings}


def _service(session: SparkSession) -> Any:
    jvm: Any = of("pyspark", session.sparkContext, "_jvm")
    return getattr(getattr(jvm, "org.apache.spark.sql.connect.service.SparkConnectService$"), "MODULE$")


def _watch(session: SparkSession, service: Any, jvm: subprocess.Popen[bytes], idle_seconds: float) -> None:
    last_use, cache_is_clear = time.monotonic(), True
    while time.monotonic() - last_use < idle_seconds:
        try:
            jvm.wait(min(LOOK_SECONDS, idle_seconds))
        except subprocess.TimeoutExpired:
            pass
        else:
            sys.exit("Spark's JVM ended.")
        if not service.sessionManager().listActiveSessions().isEmpty():
            last_use, cache_is_clear = time.monotonic(), False
        elif not cache_is_clear:
            # A killed client leaves cached data behind. Spark does not know the owner of a cache.
            session.catalog.clearCache()
            cache_is_clear = True


def _stop(number: int, frame: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    serve(Path(sys.argv[2]))
