from __future__ import annotations

from collections.abc import Generator

import pytest

from zync_assets.codecs import arrays


@pytest.fixture(scope="module", params=["by numpy", "by compiled loops"])
def both_ways(request: pytest.FixtureRequest) -> Generator[None]:
    """However much a process has decoded, it decodes alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "ENOUGH", 0 if request.param == "by compiled loops" else 1 << 60)
        yield
