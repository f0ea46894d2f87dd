"""The Spark session of this process: a JVM of its own, or a Spark Connect server.

A Connect server runs at an address of the user's choice, or it is the shared server of this user on this machine.

``python -m zync_assets.spark.session FOLDER`` runs the steps on a handful of rows, so that Java loads the classes for an
archive (``settings.archive_classes``).
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zync_assets.errors import SetupError, SparkUnavailable
from zync_assets.local.java import find_java
from zync_assets.local.processes import (
    children,
    children_outlive_sigterm,
    interrupts_later,
    jvm_output,
    kill_children,
    python_environment,
)
from zync_assets.pipeline import SHARED
from zync_assets.private import of, private
from zync_assets.spark import shared_servers
from zync_assets.spark.failures import cause_line, interrupt_of, spark_failures
from zync_assets.spark.settings import SECRET, keep_classes, share_classes, spark_settings
from zync_assets.spark.sql import PINS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession

_COMPILER, _LISTS = "spark.sql.codegen.wholeStage", "spark.sql.optimizer.inSetConversionThreshold"
INTERPRETED = 200_000
"""The most rows that Spark handles without compiled stages."""


def local_session(settings: Mapping[str, str]) -> SparkSession:
    """The session of this process, made at the first call.

    SetupError if there is no Java that Spark runs on, if Spark refuses the settings, or if the JVM runs already and lacks jars
    that ``settings`` name.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    use_this_machine()
    start_jvm(settings)
    with spark_failures(_start_error):
        # PySpark's context installs a handler of Ctrl-C that calls the JVM, even in the middle of a call to the JVM.
        if private("pyspark", "pyspark.SparkContext", "_active_spark_context") is None:
            with interrupts_later():
                SparkContext.getOrCreate(SparkConf().setAll(list(settings.items())))
        builder = SparkSession.builder
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    if jars := settings.get("spark.jars"):
        # Spark reads the list once, as the JVM starts.
        jvm_jars = session.sparkContext.getConf().get("spark.jars", "")
        if missing_jars := sorted(set(jars.split(",")) - set((jvm_jars or "").split(","))):
            raise SetupError(
                f"spark: the JVM of this process started without {Path(missing_jars[0]).name}, which this pipeline needs."
                " Another pipeline of the process started the JVM: use a process for each of the two, or begin with this"
                " pipeline."
            )
    return prepare(session)


def _start_error(reason: str) -> SetupError:
    return SetupError(f"Spark did not start: {reason.rstrip('.')}. Correct master: or a property under spark:.")


def set_compiler(session: SparkSession, spark: Mapping[str, str], rows: int) -> None:
    """Have Spark compile whole stages of the queries that follow, if they read many rows. ``spark:`` of the pipeline wins.

    A small query is interpreted in less time than its code takes to compile: off, 24 tests of small batches took 88 CPU
    seconds instead of 136. Compiled code compares with the few values of an ``IN`` one by one. Spark's hash set of them takes
    4 % of a large batch, but no list is a part of the code then. Results do not depend on the compiler.
    """
    is_large = rows > INTERPRETED
    for name, value in ((_COMPILER, str(is_large).lower()), (_LISTS, "10" if is_large else "0")):
        if not {name, name.removeprefix("spark.")} & set(spark):
            session.conf.set(name, value)


def prepare(session: SparkSession) -> SparkSession:
    """The session with the settings that results depend on."""
    for name, value in PINS.items():
        session.conf.set(name, value)
    return session


def use_this_machine() -> None:
    """Point Spark at a Java that it runs on, and its Python workers at this interpreter.

    Raises SetupError if no fitting Java is found.
    """
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.parent.parent)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    share_classes(java)


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start this process's JVM, unless it runs already. Its command line holds only the settings without secrets.

    PySpark would put every setting on the command line, which every user of the machine can read. The next session sends
    the secret settings through the open connection.
    """
    from pyspark import SparkConf
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    # PySpark would go where they say, whatever the settings are.
    os.environ.pop("SPARK_REMOTE", None)
    if "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        raise SetupError("This process has a session on a Spark Connect server, and PySpark has one kind in a process.")
    # py4j's debug level logs every message to the JVM, and so logs settings and connections with their secrets. The info
    # level logs each closed connection, which helps nobody.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # Known to Spark's launcher before there is a JVM to ask.
    public = SparkConf(loadDefaults=False)
    public.setAll([(name, value) for name, value in settings.items() if not re.search(SECRET, name)])
    if private("pyspark", "pyspark.SparkContext", "_gateway") is None:
        start: Any = private("pyspark", "pyspark.SparkContext", "_ensure_initialized")
        # Spark's Python workers inherit the environment of the JVM.
        # The JVM ends later than this process. Who reads this process's stdout to its end does not wait for the JVM.
        with interrupts_later(), _variables(python_environment()), jvm_output() as (output, first_words):
            earlier = children()
            try:
                with children_outlive_sigterm():
                    gateway = launch_gateway(public, {"stdout": output, "stderr": output})
            except PySparkRuntimeError as error:
                raise _start_error(first_words() or cause_line(error)) from None
            except KeyboardInterrupt:
                # PySpark removes the folder in which the JVM writes its port. The JVM would stay for ever.
                kill_children(earlier)
                raise
            start(gateway=gateway)
            keep_classes(gateway.jvm)


@contextmanager
def _variables(values: Mapping[str, str]) -> Generator[None]:
    """This process's environment with these variables."""
    previous_values = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


ANSWER_SECONDS = 10.0
"""How long a server may take to answer a new client."""
_RETRIES: Mapping[str, Any] = {"max_retries": 7, "max_backoff": 5000}
"""How long a server may be away while something runs: some 20 seconds. PySpark's own would be a quarter of an hour."""
_SHARED_RETRIES: Mapping[str, Any] = {"max_retries": 3, "max_backoff": 1000}
"""On this machine there is no network to come back."""

_OF_SESSIONS = ("spark.sql.", "spark.python.sql.")
"""Properties that a session may have; the others are a server's own."""

_log = logging.getLogger(__name__)
_sessions: dict[str, tuple[_Target, SparkSession]] = {}
"""The sessions of this process, by the URL, or the folder of the server, that they are on."""


@dataclass(frozen=True)
class _Target:
    """A server: ``key`` finds this process's session on it, ``label`` is how an error names it, ``cure`` what to do when it
    is away. ``token``: of a shared server; another's is in its URL."""

    key: str = field(repr=False)
    label: str
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
    label = f"Spark Connect server {public_url(url)}"
    cure = "Start it, correct spark: remote: (or SPARK_REMOTE), or write `shared` to have one started on this machine."
    session_settings = {name: value for name, value in settings.items() if name.startswith(_OF_SESSIONS)}
    return _session(_Target(url, label, cure, url), {**session_settings, **PINS})


def _shared_session(settings: Mapping[str, str]) -> SparkSession:
    server = shared_server(settings)
    label = f"shared Spark server of {server.folder}"
    cure = "`zync spark status` shows it; `zync spark down` stops it, and the next command starts another."
    url = f"sc://localhost:{server.port}"
    return _session(_Target(str(server.folder), label, cure, url, server.secret), PINS)


def shared_server(settings: Mapping[str, str]) -> shared_servers.Server:
    """The shared server with these settings, started where none runs."""
    settings = servers_own(settings)
    folder = shared_servers.folder_of(settings)
    server = shared_servers.find(folder)
    if server is None:
        print("Starting a Spark server, which stays for the next commands (about 10 seconds) …", file=sys.stderr)
        # Looks for Java in this process, so that the user sees an error. The server inherits the environment.
        use_this_machine()
        server = shared_servers.start(folder, settings)
    return server


def servers_own(settings: Mapping[str, str]) -> dict[str, str]:
    """The pipeline's Spark properties for the start of a shared server."""
    return {name: value for name, value in settings.items() if name != "spark.remote"}


def public_url(url: str) -> str:
    """A server's URL without the login and parameters, which may hold secrets."""
    return re.sub(r"//[^/@]*@", "//", url.partition(";")[0]).rstrip("/")


def _session(target: _Target, settings: Mapping[str, str]) -> SparkSession:
    from pyspark.errors import PySparkException

    entry = _sessions.get(target.key)
    if entry is not None:
        try:
            if entry[0] == target:
                _set(entry[1], settings)
                return entry[1]
        except PySparkException as error:
            _log.info("%s gave up this session: %s", target.label, type(error).__name__)
        # PySpark would go on asking it here and there.
        _drop(_sessions.pop(target.key)[1])
    session = _connect(target)
    try:
        _set(session, settings)
    except PySparkException as error:
        _drop(session)
        raise SetupError(f"The {target.label} refuses: {_reason(error)}. {target.cure}") from None
    _sessions[target.key] = target, session
    return session


def _connect(target: _Target) -> SparkSession:
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
            f"spark: remote: {public_url(target.url)} is no URL of a Spark Connect server: write sc://host:port, with"
            " `/;token=…` and the like after it where need be (a `=` in a value as %3D), or shared."
        ) from None
    session: Any = RemoteSession.builder.channelBuilder(builder).create()
    client = session.client
    retries = _RETRIES if target.token is None else _SHARED_RETRIES
    client.set_retry_policies([DefaultPolicy(**retries)])
    try:
        grpc.channel_ready_future(of("pyspark", client, "_channel")).result(timeout=ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        client.close()
        raise SparkUnavailable(f"The {target.label} does not answer. {target.cure}") from None
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    return session


def _set(session: Any, settings: Mapping[str, str]) -> None:
    """In one request; it also shows whether the server still has the session."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        of("pyspark", session.conf, "_set_all")(dict(settings), silent=True)
    for warning in messages:
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

    class LocalBuilder(DefaultChannelBuilder):
        @property
        def endpoint(self) -> str:
            return f"127.0.0.1:{self._port}"

    builder = LocalBuilder(target.url)
    builder.set(DefaultChannelBuilder.PARAM_TOKEN, target.token)
    return builder


def _reason(error: Exception) -> str:
    text = str(error)
    if "UNAUTHENTICATED" in text:
        return "it does not know this token"
    return cause_line(error)


Session = Callable[[], "SparkSession"]
"""Gives the session. A step calls it only when there is work: the first call may start a JVM."""


def lazy_session(spark: SparkSession | Session) -> Session:
    """A function that returns the session, the same at each call. Accepts a session or such a function.

    Each further call of ``spark_session`` would set the session's own settings again, in the middle of a search.
    """
    return cache(spark) if callable(spark) else lambda: spark


def spark_session(spark: Mapping[str, str], lake: str = "", *, long: bool = False) -> SparkSession:
    """The session of this process, created at the first call: in the process's own JVM, or on the server ``remote``.

    Raises SetupError if no fitting Java is found, or the server does not answer. ``lake`` and ``long``: as for
    ``settings``.
    """
    return session_with(spark_settings(spark, lake, long=long))


def session_with(settings: Mapping[str, str]) -> SparkSession:
    """The session with these Spark properties; see ``spark_session``."""
    _hush()
    if "spark.remote" in settings:
        return remote_session(settings)

    return local_session(settings)


def _hush() -> None:
    """Silence PySpark's loggers. PySpark logs each raised error to stderr as JSON with the plan; zync prints one line."""
    from pyspark.logger import PySparkLogger

    # py4j logs a Ctrl-C with its stack, and raises it after that.
    for name in (None, "py4j.clientserver"):
        logging.getLogger(name).addFilter(_is_no_interrupt)

    # Spark Connect warns of an unreachable server, and raises an error soon after.
    warnings.filterwarnings("ignore", message=r"\[RETRIES_EXCEEDED\]")
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel("CRITICAL")


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return record.exc_info is None or interrupt_of(record.exc_info[1]) is None


def rehearse(spark: SparkSession, folder: Path) -> None:
    """Do what the steps do, on a handful of rows, so that the classes for it are loaded."""
    rows = spark.range(10, numPartitions=2).selectExpr(
        "named_struct('partition', 0, 'offset', id) AS kafka", "id % 5 AS k", "timestamp_millis(id) AS time"
    )
    rows.mapInArrow(_identity, rows.schema).write.parquet(str(folder / "raw"))
    raw = spark.read.schema(rows.schema).parquet(str(folder / "raw"))
    ranks = raw.selectExpr(
        "*", "xxhash64(k) AS hash", "row_number() OVER (PARTITION BY k ORDER BY kafka.offset) AS rank"
    )
    left, right = (ranks.selectExpr("k", "rank", "hash", f"kafka AS {side}", "time") for side in ("a", "b"))
    matches = left.join(right.drop("hash", "time"), ["k", "rank"], "full_outer").selectExpr(
        "'out' AS kind",
        "array(a, b) AS source",
        "time",
        "CASE WHEN a IS NOT NULL THEN named_struct('x', k) END AS value",
    )
    single = raw.where("k = 1").selectExpr("'pending' AS kind", "array(kafka) AS source", "time")
    all_rows = matches.unionByName(single, allowMissingColumns=True).selectExpr("*", "0 AS bucket")
    sorted_rows = all_rows.repartitionById(1, "bucket").sortWithinPartitions("kind", "time").persist()
    sources = sorted_rows.selectExpr("kind", "posexplode(source) AS (place, of)")
    sources.groupBy("kind").agg({"*": "count", "place": "sum"}).collect()
    outputs = sorted_rows.where("kind = 'out'").selectExpr("*", "monotonically_increasing_id() AS offset")
    outputs.write.option("compression", "snappy").parquet(str(folder / "staged"))
    leftovers = raw.join(raw.where("k = 2").select("k"), "k", "left_semi").join(raw.where("k = 3"), "k", "left_anti")
    leftovers.selectExpr("kafka.partition AS partition", "k DIV 2 AS span").distinct().collect()
    sorted_rows.unpersist()


def _identity(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _main(folder: Path) -> None:
    spark = spark_session({"master": "local[2]"})
    gateway: Any = of("pyspark", spark.sparkContext, "_gateway")
    rehearse(spark, folder)
    spark.stop()
    process = gateway.proc  # the JVM, which writes the archive as it ends
    process.stdin.close()
    process.wait()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
