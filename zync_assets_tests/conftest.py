from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import settings

from zync_assets.local.java import cache_dir
from zync_assets_tests.checks.chain import chain, sound_chain
from zync_assets_tests.network.secured import secured
from zync_assets_tests.s3 import s3
from zync_assets_tests.services import services, spark, unique
from zync_assets_tests.tables import print_tables

__all__ = ["chain", "s3", "secured", "services", "sound_chain", "spark", "unique"]

# Without files of byte code, each of the run's hundreds of processes would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("default", deadline=None)
settings.load_profile("default")
settings.register_profile("many", max_examples=2_000, deadline=None)

ORDER = (
    # These need no service: on a fresh machine the jars of the services are fetched meanwhile.
    "test_style",
    "codecs.avro.test_decoder_generated",
    "codecs.test_evolution_generated",
    "codecs.connect.test_codec_generated",
    "codecs.json.test_columns",
    # These take longest: no worker is to be left alone with one of them at the end.
    "test_chain",
    "test_crashes",
    "test_kills",
    "test_checker",
    "test_topics_as_they_are",
    "test_secrets",
    "cli.test_run_rights",
    "assets.test_graph_webserver",
    "checks.test_output_checks_staging",
    "test_exactly_once",
    "test_upkeep_retention",
    "test_lake_faults",
    "etl.test_commit",
    "ingest.test_shape",
    "etl.test_failure_search",
    "assets.test_graph",
    "local.test_services",
    "test_packages",
)
"""Modules that go first."""

FETCHED = {
    "services": ("services", "java.resolve(java.find_java())"),
    "s3": ("tests-s3", "java.bundle_folder(BUNDLE, java.find_java)"),
}
"""Fixtures whose jars come from the network where this machine has them not yet: what their folders' names begin with, and
what brings them."""

SLOW_SECONDS = 1800
"""The time limit of a slow test that names none. The limit ends a test that hangs."""

FETCH = """
from zync_assets.local import java
from zync_assets_tests.s3 import BUNDLE
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares of the chosen tests; K counts on past N")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_share(config, items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))

    def place(item: pytest.Item) -> int:
        name = getattr(item, "module", item).__name__.removeprefix("zync_assets_tests.")
        return ORDER.index(name) if name in ORDER else len(ORDER)

    items.sort(key=place)
    used = {name for item in items for name in getattr(item, "fixturenames", ())}
    wanted = [(folder, work) for name, (folder, work) in FETCHED.items() if name in used]
    if missing := [work for folder, work in wanted if not any(cache_dir().glob(f"{folder}-*"))]:
        # A separate process, because tests change the environment. A test that needs the jars waits for the process, and
        # reports a failed download.
        script = "\n".join([FETCH, *missing])
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def keep_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other shares. Neighbouring tests go to different shares, which divides a file's tests evenly."""
    asked = config.getoption("--share")
    if asked is None:
        return
    number, count = (int(part) for part in asked.split("/"))
    mine, others = [], []
    for place, item in enumerate(sorted(items, key=lambda item: item.nodeid)):
        (mine if place % count == number % count else others).append(item)
    items[:] = mine
    config.hook.pytest_deselected(items=others)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    print_tables(terminalreporter)
