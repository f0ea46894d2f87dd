"""Private names of libraries that zync cannot do without. A library that lacks one is an error with a cure."""

from __future__ import annotations

import importlib
from importlib.metadata import requires, version
from typing import Any

from zync_assets.errors import SetupError

NAMES = (
    # Reads deep values without ending the process, as fastavro's compiled reader does.
    ("fastavro", "fastavro", "_read_py"),
    # The HTTP library whose errors the registry's client raises.
    ("confluent-kafka", "confluent_kafka.schema_registry.common", "_httpx_compat"),
    ("dagster", "dagster._core.storage.asset_check_execution_record", "AssetCheckExecutionRecordStatus"),
    ("dagster", "dagster._core.storage.tags", "GRPC_INFO_TAG"),
    ("dagster", "dagster._core.storage.tags", "ASSET_PARTITION_RANGE_START_TAG"),
    ("dagster", "dagster._core.storage.tags", "ASSET_PARTITION_RANGE_END_TAG"),
    ("dagster", "dagster._core.storage.tags", "PARTITION_NAME_TAG"),
    # The JVM is started with settings that hold no secret.
    ("pyspark", "pyspark.SparkContext", "_gateway"),
    ("pyspark", "pyspark.SparkContext", "_ensure_initialized"),
    ("pyspark", "pyspark.SparkContext", "_active_spark_context"),
    ("pyspark", "pyspark.SparkContext", "_jvm"),
    # All settings of a session in one request.
    ("pyspark", "pyspark.sql.connect.conf.RuntimeConf", "_set_all"),
)
"""Package, module or class, name."""


def private(package: str, place: str, name: str) -> Any:
    """The name of a module or class of the package. SetupError if the library lacks the name."""
    assert (package, place, name) in NAMES
    try:
        return of(package, _owner(place), name)
    except ImportError:
        raise _missing_name_error(package, f"{place}.{name}") from None


def of(package: str, owner: Any, name: str) -> Any:
    """The attribute of an object, module or class of the package. SetupError if the library lacks the name."""
    try:
        return getattr(owner, name)
    except AttributeError:
        pass
    try:
        return importlib.import_module(f"{owner.__name__}.{name}")
    except (AttributeError, ImportError):
        raise _missing_name_error(package, f"{getattr(owner, '__name__', type(owner).__name__)}.{name}") from None


def put(package: str, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object of the package. SetupError if the library lacks the name."""
    of(package, owner, name)
    setattr(owner, name, value)


def _owner(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name) if name[0].isupper() else importlib.import_module(place)


def _missing_name_error(package: str, missing_name: str) -> SetupError:
    """``missing_name``: the name that the library lacks."""
    requirement = next((text for text in requires("zync-assets") or () if text.startswith(package)), package)
    return SetupError(
        f"{package} {version(package)} has no {missing_name}, which zync needs; install a version that it was tried with:"
        f" pip install '{requirement}'"
    )
