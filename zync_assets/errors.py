"""The one exception tree.

    ZyncError
    ├── PipelineFileError      the pipeline file; carries every problem of the file
    ├── SetupError             this machine: Java, ports, jars, local services
    │   ├── SparkUnavailable       no answer from a Spark Connect server; trying again may help
    │   └── SparkLost              a server, or a Python worker, ended in the middle of a step; trying again may help
    ├── KafkaError             the broker or a topic
    │   ├── BrokerUnavailable      no answer; trying again may help
    │   │   └── LeaderMissing          a partition has no leader; the others have
    │   ├── TrustError             one side does not trust the other; trying again won't help
    │   │   ├── AuthenticationFailed   the broker refused the user, the password, the token or the client's certificate
    │   │   └── CertificateRejected    the broker's certificate is for another host, or of an unknown CA
    │   ├── NotAuthorized          an ACL is missing
    │   ├── TopicMissing
    │   ├── TopicRecreated         the topic is another one than the pool's
    │   ├── PartitionsChanged      an output topic has other partitions than its outputs are numbered for
    │   ├── DataLoss               offsets are gone that were not ingested yet
    │   │   └── TopicTruncated         records are gone that were ingested; their offsets may have other records now
    │   ├── ForeignRecord          an output topic holds a record that staging does not
    │   └── RecordTooLarge
    ├── RegistryError          the schema registry said no
    │   ├── RegistryUnavailable    no answer; trying again may help
    │   └── SchemaUnknown          the registry has no such id, subject or version
    ├── SchemaError            a schema that can't be parsed, mapped or merged
    │   └── SchemaChanged          a writer's schema is new, and the pipeline file accepts none
    ├── LakeError              a table of the lake
    │   ├── LakeUnavailable        no answer from the object store, or trouble there, or a full disk; trying again may help
    │   ├── CommitConflict         another writer committed first
    │   ├── TableDamaged           another program took or changed what the table's log says; a finding of a check
    │   └── TableUnsupported       the table asks for a feature that is not known here
    ├── SinkError              the target database of a sink, or a table in it
    │   ├── TargetUnavailable      no answer, a deadlock or a timeout; trying again may help
    │   │   └── TableLocked            another program holds a lock on the table
    │   ├── TargetRefused          the target refused a record: a constraint, or a value out of range
    │   └── TableUnfit             a table lacks a column, a type or a key, and the sink may not or can't change it
    ├── BadRecords             records that the pipeline file does not let into quarantine, or too many of them
    ├── EtlError               a batch that can't be transformed
    ├── RangeUnknown           a partition key of Dagster that is no range of the asset
    └── CheckFailed            the account, the numbering or a topic is wrong

Every message names the thing, the place and the cure. A user never sees a stack trace of one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class ZyncError(Exception):
    """Base of all errors that this package raises on purpose.

    >>> from zync_assets import ZyncError, load_pipeline
    >>> try:
    ...     load_pipeline("absent.yaml")
    ... except ZyncError as error:
    ...     print(type(error).__name__)
    PipelineFileError
    """


@dataclass(frozen=True)
class Problem:
    """One error of a pipeline file. ``line`` counts from 1, and 0 is the file as a whole; ``key`` is the dotted path of the key.

    >>> from zync_assets import Problem
    >>> str(Problem(3, "inputs[0].pool", "is missing"))
    'line 3: inputs[0].pool: is missing'
    """

    line: int
    key: str
    message: str
    explains: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The keys whose other problems follow from this problem."""

    def __str__(self) -> str:
        return ": ".join(
            [*([f"line {self.line}"] if self.line else []), *([self.key] if self.key else []), self.message]
        )


class PipelineFileError(ZyncError):
    """The problems of one pipeline file.

    >>> from pathlib import Path
    >>> from zync_assets import PipelineFileError, load_pipeline
    >>> _ = Path("shop.yaml").write_text("inputs: [{topic: orders, pol: Raw}]")
    >>> try:
    ...     load_pipeline("shop.yaml")
    ... except PipelineFileError as error:
    ...     print(error.problems[0].line, error.problems[0].key)
    1 inputs[0].pol
    """

    def __init__(self, path: str, problems: Sequence[Problem]) -> None:
        self.path = path
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{path}{', ' if problem.line else ': '}{problem}" for problem in self.problems))


class SetupError(ZyncError):
    """This machine lacks something, or something is in the way.

    >>> from zync_assets import SetupError, ZyncError
    >>> issubclass(SetupError, ZyncError)
    True
    """


class SparkUnavailable(SetupError):
    """A Spark Connect server did not answer.

    >>> from zync_assets import SetupError, SparkUnavailable
    >>> issubclass(SparkUnavailable, SetupError)
    True
    """


class SparkLost(SetupError):
    """A part of Spark ended in the middle of a step: a Spark Connect server, or a task's Python worker.

    >>> from zync_assets import SetupError, SparkLost
    >>> issubclass(SparkLost, SetupError)
    True
    """


class KafkaError(ZyncError):
    """The broker or a topic.

    >>> from zync_assets import KafkaError, ZyncError
    >>> issubclass(KafkaError, ZyncError)
    True
    """


class BrokerUnavailable(KafkaError):
    """No broker answered in time.

    >>> from zync_assets import BrokerUnavailable
    >>> def step(attempt: int) -> str:
    ...     if attempt == 0:
    ...         raise BrokerUnavailable("no answer")
    ...     return "done"
    >>> for attempt in range(2):
    ...     try:
    ...         print(step(attempt))
    ...     except BrokerUnavailable as error:
    ...         print(f"{error}; trying again")
    no answer; trying again
    done
    """


class LeaderMissing(BrokerUnavailable):
    """A partition has no leader, so nobody reads it or writes to it. Other partitions may go on.

    >>> from zync_assets import BrokerUnavailable, LeaderMissing
    >>> issubclass(LeaderMissing, BrokerUnavailable)
    True
    """


class TrustError(KafkaError):
    """Broker and client do not trust each other as they are set up.

    >>> from zync_assets import KafkaError, TrustError
    >>> issubclass(TrustError, KafkaError)
    True
    """


class AuthenticationFailed(TrustError):
    """The broker did not take the user, the password, the token or the client's certificate; or no token could be had.

    >>> from zync_assets import AuthenticationFailed, TrustError
    >>> issubclass(AuthenticationFailed, TrustError)
    True
    """


class CertificateRejected(TrustError):
    """The broker's certificate was not signed by a trusted CA, is for another host, or is not valid now.

    >>> from zync_assets import CertificateRejected, TrustError
    >>> issubclass(CertificateRejected, TrustError)
    True
    """


class NotAuthorized(KafkaError):
    """The broker knows who asks and does not let them: an ACL is missing.

    >>> from zync_assets import KafkaError, NotAuthorized
    >>> issubclass(NotAuthorized, KafkaError)
    True
    """


class TopicMissing(KafkaError):
    """A required topic does not exist.

    >>> from zync_assets import KafkaError, TopicMissing
    >>> issubclass(TopicMissing, KafkaError)
    True
    """


class TopicRecreated(KafkaError):
    """A topic was created again: its topic id differs from the id that the pool was made from.

    >>> from zync_assets import KafkaError, TopicRecreated
    >>> issubclass(TopicRecreated, KafkaError)
    True
    """


class PartitionsChanged(KafkaError):
    """An output topic has more partitions, or fewer, than its outputs are numbered for.

    >>> from zync_assets import KafkaError, PartitionsChanged
    >>> issubclass(PartitionsChanged, KafkaError)
    True
    """


class DataLoss(KafkaError):
    """Kafka no longer holds offsets that were not ingested yet.

    >>> from zync_assets import DataLoss, KafkaError
    >>> issubclass(DataLoss, KafkaError)
    True
    """


class TopicTruncated(DataLoss):
    """A topic lost records that were ingested. The offsets of these records are free, or later records have taken them.

    >>> from zync_assets import DataLoss, TopicTruncated
    >>> issubclass(TopicTruncated, DataLoss)
    True
    """


class ForeignRecord(KafkaError):
    """An output topic holds a record that differs from staging's at the same offset.

    >>> from zync_assets import ForeignRecord, KafkaError
    >>> issubclass(ForeignRecord, KafkaError)
    True
    """


class RecordTooLarge(KafkaError):
    """A record is larger than its output topic takes.

    >>> from zync_assets import KafkaError, RecordTooLarge
    >>> issubclass(RecordTooLarge, KafkaError)
    True
    """


class RegistryError(ZyncError):
    """The schema registry refused a request.

    >>> from zync_assets import RegistryError, ZyncError
    >>> issubclass(RegistryError, ZyncError)
    True
    """


class RegistryUnavailable(RegistryError):
    """The schema registry did not answer.

    >>> from zync_assets import RegistryError, RegistryUnavailable
    >>> issubclass(RegistryUnavailable, RegistryError)
    True
    """


class SchemaUnknown(RegistryError):
    """The schema registry answered that it does not know an id, subject or version.

    >>> from zync_assets import RegistryError, SchemaUnknown
    >>> issubclass(SchemaUnknown, RegistryError)
    True
    """


class SchemaError(ZyncError):
    """A schema that can't be parsed, mapped to the lake's types, or merged.

    >>> from zync_assets import SchemaError, ZyncError
    >>> issubclass(SchemaError, ZyncError)
    True
    """


class SchemaChanged(SchemaError):
    """A writer's schema changes the columns, and the pipeline file says ``on-schema-change: error``.

    >>> from zync_assets import SchemaChanged, SchemaError
    >>> issubclass(SchemaChanged, SchemaError)
    True
    """


class LakeError(ZyncError):
    """A table of the lake.

    >>> from zync_assets import LakeError, ZyncError
    >>> issubclass(LakeError, ZyncError)
    True
    """


class LakeUnavailable(LakeError):
    """The object store did not answer, or reported an internal failure; or the disk of the lake is full.

    >>> from zync_assets import LakeError, LakeUnavailable
    >>> issubclass(LakeUnavailable, LakeError)
    True
    """


class CommitConflict(LakeError):
    """Another writer committed first; nothing of this commit is visible.

    >>> from zync_assets import CommitConflict, LakeError
    >>> issubclass(CommitConflict, LakeError)
    True
    """


class TableDamaged(LakeError):
    """Another program changed a table: a file in its log is missing, or its files contradict its counters.

    >>> from zync_assets import LakeError, TableDamaged
    >>> issubclass(TableDamaged, LakeError)
    True
    """


class TableUnsupported(LakeError):
    """A table uses a feature of the Delta protocol that this package does not know.

    >>> from zync_assets import LakeError, TableUnsupported
    >>> issubclass(TableUnsupported, LakeError)
    True
    """


class SinkError(ZyncError):
    """The target database of a sink, or a table in it.

    >>> from zync_assets import SinkError, ZyncError
    >>> issubclass(SinkError, ZyncError)
    True
    """


class TargetUnavailable(SinkError):
    """The target did not answer, or ended a transaction for a reason that passes: a deadlock, a lock or a timeout.

    >>> from zync_assets import SinkError, TargetUnavailable
    >>> issubclass(TargetUnavailable, SinkError)
    True
    """


class TableLocked(TargetUnavailable):
    """Another program holds a lock on a table of the target. Other tables can be written meanwhile.

    >>> from zync_assets import TableLocked, TargetUnavailable
    >>> issubclass(TableLocked, TargetUnavailable)
    True
    """


class TargetRefused(SinkError):
    """The target refused the records of a batch. The message is the target's own.

    >>> from zync_assets import SinkError, TargetRefused
    >>> issubclass(TargetRefused, SinkError)
    True
    """


class TableUnfit(SinkError):
    """A table of the target can't hold the records of its source. The message has the DDL that makes the table
    fit, if such DDL exists.

    ``missing``: the columns that the table lacks.

    >>> from zync_assets import SinkError, TableUnfit
    >>> issubclass(TableUnfit, SinkError)
    True
    """

    def __init__(self, message: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class BadRecords(ZyncError):
    """Records that can't be decoded or transformed, and that the pipeline file does not let pass into quarantine.

    >>> from zync_assets import BadRecords, ZyncError
    >>> issubclass(BadRecords, ZyncError)
    True
    """


class EtlError(ZyncError):
    """A batch that can't be transformed.

    >>> from zync_assets import EtlError, ZyncError
    >>> issubclass(EtlError, ZyncError)
    True
    """


class FieldMissing(EtlError):
    """A rule or an input's shape names a field that no record of its topic has had so far.

    >>> from zync_assets import EtlError, FieldMissing
    >>> issubclass(FieldMissing, EtlError)
    True
    """


class RangeUnknown(ZyncError):
    """A partition key of Dagster names no range of offsets that an asset has.

    >>> from zync_assets import RangeUnknown, ZyncError
    >>> issubclass(RangeUnknown, ZyncError)
    True
    """


class CheckFailed(ZyncError):
    """The account, the numbering or a topic is not what it must be.

    >>> from zync_assets import CheckFailed, ZyncError
    >>> issubclass(CheckFailed, ZyncError)
    True
    """
