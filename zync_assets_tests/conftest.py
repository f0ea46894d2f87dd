from __future__ import annotations

import pytest
from hypothesis import settings

from zync_assets_tests.checks.chain import chain, sound_chain
from zync_assets_tests.network.secured import secured
from zync_assets_tests.s3 import s3
from zync_assets_tests.services import services, spark, unique
from zync_assets_tests.tables import print_tables

__all__ = ["chain", "s3", "secured", "services", "sound_chain", "spark", "unique"]

settings.register_profile("many", max_examples=2_000, deadline=None)

LONG = (
    "test_torture",
    "test_chain",
    "test_crashes",
    "test_kills",
    "test_checker",
    "test_style",
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
"""Modules that take longest; they go first, so that no worker is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = getattr(item, "module", item).__name__.removeprefix("zync_assets_tests.")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    print_tables(terminalreporter)
