"""Topics in, denormalised topics out, nothing lost, nothing twice.

The public API. A name is imported when it is first used, so that the command line loads neither Dagster nor Spark.

    >>> import zync_assets
    >>> zync_assets.load_pipeline
    <function load_pipeline at ...>
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zync_assets.assets.build import build_definitions
    from zync_assets.assets.component import ZyncPipelineComponent
    from zync_assets.assets.resources import KafkaResource, RegistryResource
    from zync_assets.errors import (
        AuthenticationFailed,
        BadRecords,
        BrokerUnavailable,
        CertificateRejected,
        CheckFailed,
        CommitConflict,
        DataLoss,
        EtlError,
        FieldMissing,
        ForeignRecord,
        KafkaError,
        LakeError,
        LakeUnavailable,
        LeaderMissing,
        NotAuthorized,
        PartitionsChanged,
        PipelineFileError,
        Problem,
        RangeUnknown,
        RecordTooLarge,
        RegistryError,
        RegistryUnavailable,
        SchemaChanged,
        SchemaError,
        SchemaUnknown,
        SetupError,
        SinkError,
        SparkLost,
        SparkUnavailable,
        TableDamaged,
        TableLocked,
        TableUnfit,
        TableUnsupported,
        TargetRefused,
        TargetUnavailable,
        TopicMissing,
        TopicRecreated,
        TopicTruncated,
        TrustError,
        ZyncError,
    )
    from zync_assets.pipeline import Pipeline
    from zync_assets.pipeline_file import load_pipeline

__version__ = version("zync-assets")

__all__ = [
    "AuthenticationFailed",
    "BadRecords",
    "BrokerUnavailable",
    "CertificateRejected",
    "CheckFailed",
    "CommitConflict",
    "DataLoss",
    "EtlError",
    "FieldMissing",
    "ForeignRecord",
    "KafkaError",
    "KafkaResource",
    "LakeError",
    "LakeUnavailable",
    "LeaderMissing",
    "NotAuthorized",
    "PartitionsChanged",
    "Pipeline",
    "PipelineFileError",
    "Problem",
    "RangeUnknown",
    "RecordTooLarge",
    "RegistryError",
    "RegistryResource",
    "RegistryUnavailable",
    "SchemaChanged",
    "SchemaError",
    "SchemaUnknown",
    "SetupError",
    "SinkError",
    "SparkLost",
    "SparkUnavailable",
    "TableDamaged",
    "TableLocked",
    "TableUnfit",
    "TableUnsupported",
    "TargetRefused",
    "TargetUnavailable",
    "TopicMissing",
    "TopicRecreated",
    "TopicTruncated",
    "TrustError",
    "ZyncError",
    "ZyncPipelineComponent",
    "build_definitions",
    "load_pipeline",
]

_MODULES = {
    "KafkaResource": "zync_assets.assets.resources",
    "Pipeline": "zync_assets.pipeline",
    "RegistryResource": "zync_assets.assets.resources",
    "ZyncPipelineComponent": "zync_assets.assets.component",
    "build_definitions": "zync_assets.assets.build",
    "load_pipeline": "zync_assets.pipeline_file",
}
"""Exported name → its module; the other names are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(import_module(_MODULES.get(name, "zync_assets.errors")), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
