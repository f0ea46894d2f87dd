"""Values for columns of MySQL, without a server."""

from __future__ import annotations

from datetime import date, datetime

import pyarrow as pa
import pytest
from sqlalchemy.dialects import mysql

from zync_assets.errors import TargetRefused
from zync_assets.sinks.mysql_types import stored_values

DAYS = (date(1000, 1, 1), date.max)


def test_a_time_with_a_zone_is_stored_in_utc_or_refused() -> None:
    column = mysql.DATETIME(fsp=6)
    assert stored_values(pa.array(["2026-01-01T01:00:00+02:00"]), column, "at", DAYS) == [datetime(2025, 12, 31, 23)]
    for text in ("0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00", "0999-12-31T00:00:00Z", "soon"):
        with pytest.raises(TargetRefused, match=f"the column at is {text[:19]}"):
            stored_values(pa.array([text]), column, "at", DAYS)
