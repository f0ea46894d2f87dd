"""A session with a JVM of this process's own."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zync_assets.errors import SetupError
from zync_assets.local.java import find_java
from zync_assets.steps.class_archive import share_classes
from zync_assets.steps.spark_settings import REQUIRED, SECRET

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    for name, value in REQUIRED.items():
        session.conf.set(name, value)
    return session


def use_this_machine() -> None:
    """Point Spark at a Java that it runs on, and its Python workers at this interpreter, which has this package.

    Raises SetupError if there is no such Java.
    """
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.parent.parent)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    share_classes(java)


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start this process's JVM, if there is none yet, with those settings on its command line that hold no secret.

    PySpark would put all of them there, for every user of the machine to read. The session that is made next gets the
    others through the open connection.
    """
    from pyspark import SparkConf, SparkContext

    # PySpark would go where they say, whatever the settings are.
    os.environ.pop("SPARK_REMOTE", None)
    if "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        raise SetupError("This process has a session on a Spark Connect server, and PySpark has one kind in a process.")
    # At its debug level py4j logs all that passes to the JVM: settings, and tasks' code with the connections in it; at its
    # info level that a connection was closed, which nobody asks for.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # Known to Spark's launcher before there is a JVM to ask.
    public = SparkConf(loadDefaults=False)
    public.setAll([(name, value) for name, value in settings.items() if not re.search(SECRET, name)])
    start: Any = SparkContext._ensure_initialized  # pyright: ignore[reportPrivateUsage]
    start(conf=public)
