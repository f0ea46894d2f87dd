"""Fixtures of the tests of ETL."""

from __future__ import annotations

import pytest

from zync_assets.etl import positions


@pytest.fixture(params=[pytest.param("small", marks=pytest.mark.slow), "large"])
def of_each_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """ETL treats the test's batches as small, as it treats the batches of other tests, or as large."""
    monkeypatch.setattr(positions, "SMALL", positions.SMALL if request.param == "small" else 0)
