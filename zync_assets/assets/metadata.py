"""The metadata of a materialised range: offsets, rows, schema, lag."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from dagster import (
    AssetKey,
    AssetMaterialization,
    MetadataValue,
    TableColumn,
    TableColumnConstraints,
    TableSchema,
)

from zync_assets.assets.extents import Extent
from zync_assets.offsets import format_key

Metadata = dict[str, Any]


def of_extent(extent: Extent, schema: pa.Schema | None = None) -> Metadata:
    """The metadata of one key. An empty range has no ``last``. A range with an unknown number of rows has no ``rows``."""
    found: Metadata = {"first": extent.first, "complete": extent.complete, "time": MetadataValue.timestamp(time.time())}
    if extent.last is not None:
        found["last"] = extent.last
    if extent.rows is not None:
        found["rows"] = extent.rows
        found["dagster/partition_row_count"] = extent.rows
    if schema is not None:
        found["dagster/column_schema"] = column_schema(schema)
    return found


def column_schema(schema: pa.Schema) -> TableSchema:
    """An Arrow schema as Dagster shows one."""
    return TableSchema(
        columns=[
            TableColumn(item.name, str(item.type), constraints=TableColumnConstraints(nullable=item.nullable))
            for item in schema
        ]
    )


def materialization(
    key: AssetKey, extent: Extent, schema: pa.Schema | None = None, more: Mapping[str, Any] | None = None
) -> AssetMaterialization:
    """The materialisation event of one key, for work that was done outside the reporting run."""
    return AssetMaterialization(
        key, partition=format_key(extent.key), metadata={**of_extent(extent, schema), **(more or {})}
    )
