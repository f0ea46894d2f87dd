"""Fixtures of the tests of ETL."""

from __future__ import annotations

import pytest

from zync_assets.etl import positions


@pytest.fixture(params=[pytest.param("small", marks=pytest.mark.slow), "large"])
def of_each_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's batches are taken for small ones, as those of all other tests, and for large ones."""
    monkeypatch.setattr(positions, "SMALL", positions.SMALL if request.param == "small" else 0)
