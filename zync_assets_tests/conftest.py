from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

import pytest
from hypothesis import settings

from zync_assets.errors import SetupError
from zync_assets.local import jars
from zync_assets.local.java import find_java
from zync_assets_tests.checks.chain import chain, sound_chain
from zync_assets_tests.network.secured import secured
from zync_assets_tests.s3 import BUNDLE, s3
from zync_assets_tests.services import services, spark, unique
from zync_assets_tests.tables import print_tables

__all__ = ["chain", "s3", "secured", "services", "sound_chain", "spark", "unique"]

settings.register_profile("many", max_examples=2_000, deadline=None)

ORDER = (
    # These need no service: on a fresh machine the jars of the services are fetched meanwhile.
    "test_style",
    "codecs.test_avro_generated",
    "codecs.test_evolution_generated",
    "codecs.test_connect_generated",
    "codecs.test_json_columns",
    # These take longest: no worker is to be left alone with one of them at the end.
    "test_torture",
    "test_chain",
    "test_crashes",
    "test_kills",
    "test_checker",
    "test_topics_as_they_are",
    "test_secrets",
    "cli.test_rights",
    "assets.test_webserver",
    "checks.test_staging_checks",
    "test_exactly_once",
    "steps.test_retention",
    "steps.test_lake_faults",
    "steps.test_etl",
    "steps.test_shape_input",
    "steps.test_failing",
    "assets.test_graph",
    "local.test_services",
    "test_packages",
)
"""Modules that go first."""

FETCHED: dict[str, Callable[[], object]] = {
    "services": lambda: jars.resolve(find_java()),
    "s3": lambda: jars.fetched(BUNDLE, find_java),
}
"""Fixtures whose jars come from the network, where this machine has them not yet."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = getattr(item, "module", item).__name__.removeprefix("zync_assets_tests.")
        return ORDER.index(name) if name in ORDER else len(ORDER)

    items.sort(key=place)
    used = {name for item in items for name in getattr(item, "fixturenames", ())}
    Thread(target=_fetch, args=([name for name in FETCHED if name in used],), daemon=True).start()


def _fetch(names: Sequence[str]) -> None:
    for name in names:
        # A test that needs them tries again, and says what is wrong.
        with suppress(SetupError):
            FETCHED[name]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    print_tables(terminalreporter)
