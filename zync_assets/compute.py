"""Arrow's compute functions: they are made when pyarrow is imported, so that a type checker knows none of them."""

from __future__ import annotations

from typing import Any

import pyarrow.compute

pc: Any = pyarrow.compute
