"""A session with a JVM of this process's own."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from zync_assets.errors import SetupError
from zync_assets.local.java import find_java
from zync_assets.local.python import python_environment
from zync_assets.private import private
from zync_assets.spark_pins import PINS
from zync_assets.steps.class_archive import share_classes
from zync_assets.steps.spark_settings import SECRET

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JUNK = b"WARNING: Using incubator modules"
"""How the line begins that Java prints about a module which Spark asks for. No option of Java's turns it off."""


def local_session(settings: Mapping[str, str]) -> SparkSession:
    """The session of this process, made at the first call; SetupError if there is no Java that Spark runs on."""
    from pyspark.sql import SparkSession

    use_this_machine()
    start_jvm(settings)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    return prepared(builder.getOrCreate())


def prepared(session: SparkSession) -> SparkSession:
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
        # The JVM hands its environment on to the Python workers that it starts.
        with _variables(python_environment()), _filtered_stderr() as stderr:
            start(gateway=launch_gateway(public, {"stderr": stderr}))


@contextmanager
def _variables(values: Mapping[str, str]) -> Generator[None]:
    """This process's environment with these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _filtered_stderr() -> Generator[int]:
    """A file descriptor for the stderr of a process that is started within. A thread copies the process's lines to this
    process's stderr, but for _JUNK, until the process ends."""
    source, sink = os.pipe()
    threading.Thread(target=_copy, args=(source,), name="stderr of Spark's JVM", daemon=True).start()
    try:
        yield sink
    finally:
        os.close(sink)


def _copy(source: int) -> None:
    with open(source, "rb", buffering=0) as lines, suppress(OSError):
        for line in lines:
            if not line.startswith(_JUNK):
                os.write(2, line)
