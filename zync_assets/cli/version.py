"""``zync version``: what a bug report should say."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

from zync_assets.cli.output import Format, format_option, print_json, print_rows
from zync_assets.errors import SetupError
from zync_assets.local.java import find_java, java_version

PACKAGES = (
    "pyspark",
    "deltalake",
    "dagster",
    "dagster-pyspark",
    "confluent-kafka",
    "pyarrow",
    "fastavro",
    "pyruhvro",
)
ABSENT = "not installed"


@click.command()
@format_option
def version(fmt: Format) -> None:
    """Show the versions of zync and of everything that matters to it."""
    versions = {
        "zync-assets": _package("zync-assets"),
        "python": platform.python_version(),
        "java": _java(),
        **{name: _package(name) for name in PACKAGES},
        "librdkafka": _librdkafka(),
        "records": _records(),
    }
    if fmt == "json":
        print_json(versions)
    else:
        rows = [{"component": name, "version": said} for name, said in versions.items()]
        print_rows(rows, ["component", "version"], fmt)


def _package(name: str) -> str:
    try:
        return installed(name)
    except PackageNotFoundError:
        return ABSENT


def _java() -> str:
    try:
        return java_version(find_java())
    except SetupError as error:
        return f"none that fits: {error}"


def _librdkafka() -> str:
    try:
        from zync_assets.kafka.client import librdkafka_version
    except ImportError:
        return ABSENT
    return librdkafka_version()


def _records() -> str:
    """How records get into Kafka and out of it."""
    try:
        from zync_assets.kafka.librdkafka import way
    except ImportError:
        return ABSENT
    try:
        return way()
    except SetupError as error:
        return f"none: {error}"
