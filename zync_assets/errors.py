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
    │   ├── DataLoss               offsets are gone that were not ingested yet
    │   ├── ForeignRecord          an output topic holds a record that staging does not
    │   └── RecordTooLarge
    ├── RegistryError          the schema registry said no
    │   ├── RegistryUnavailable    no answer; trying again may help
    │   └── SchemaUnknown          the registry has no such id, subject or version
    ├── SchemaError            a schema that can't be parsed, mapped or merged
    │   └── SchemaChanged          a writer's schema is new, and the pipeline file accepts none
    ├── LakeError              a table of the lake
    │   ├── LakeUnavailable        no answer from the object store, or it has trouble; trying again may help
    │   ├── CommitConflict         another writer committed first
    │   ├── TableDamaged           another program took or changed what the table's log says; a finding of a check
    │   └── TableUnsupported       the table asks for a feature that is not known here
    ├── BadRecords             records that the pipeline file does not let into quarantine, or too many of them
    ├── EtlError               a batch that can't be transformed
    ├── RangeUnknown           a partition key of Dagster that is no range of the asset
    └── CheckFailed            the account, the numbering or a topic is wrong

Every message names the thing, the place and the cure. A user never sees a stack trace of one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ZyncError(Exception):
    """Base of all errors that this package raises on purpose."""


@dataclass(frozen=True)
class Problem:
    """One error of a pipeline file. ``line`` counts from 1; ``key`` is the dotted path of the key."""

    line: int
    key: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.key}: {self.message}" if self.key else f"line {self.line}: {self.message}"


class PipelineFileError(ZyncError):
    """The problems of one pipeline file."""

    def __init__(self, path: str, problems: Sequence[Problem]) -> None:
        self.path = path
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{path}, {problem}" for problem in self.problems))


class SetupError(ZyncError):
    """This machine lacks something, or something is in the way."""


class SparkUnavailable(SetupError):
    """A Spark Connect server did not answer."""


class SparkLost(SetupError):
    """A part of Spark ended in the middle of a step: a Spark Connect server, or a task's Python worker."""


class KafkaError(ZyncError):
    """The broker or a topic."""


class BrokerUnavailable(KafkaError):
    """No broker answered in time."""


class LeaderMissing(BrokerUnavailable):
    """A partition has no leader, so nobody reads it or writes to it. Other partitions may go on."""


class TrustError(KafkaError):
    """Broker and client do not trust each other as they are set up."""


class AuthenticationFailed(TrustError):
    """The broker did not take the user, the password, the token or the client's certificate; or no token could be had."""


class CertificateRejected(TrustError):
    """The broker's certificate was not signed by a trusted CA, is for another host, or is not valid now."""


class NotAuthorized(KafkaError):
    """The broker knows who asks and does not let them: an ACL is missing."""


class TopicMissing(KafkaError):
    """A required topic does not exist."""


class TopicRecreated(KafkaError):
    """A topic was created again: its topic id differs from the id that the pool was made from."""


class DataLoss(KafkaError):
    """Kafka no longer holds offsets that were not ingested yet."""


class ForeignRecord(KafkaError):
    """An output topic holds a record that differs from staging's at the same offset."""


class RecordTooLarge(KafkaError):
    """A record is larger than its output topic takes."""


class RegistryError(ZyncError):
    """The schema registry refused a request."""


class RegistryUnavailable(RegistryError):
    """The schema registry did not answer."""


class SchemaUnknown(RegistryError):
    """The schema registry answered that it does not know an id, subject or version."""


class SchemaError(ZyncError):
    """A schema that can't be parsed, mapped to the lake's types, or merged."""


class SchemaChanged(SchemaError):
    """A writer's schema changes the columns, and the pipeline file says ``on-schema-change: error``."""


class LakeError(ZyncError):
    """A table of the lake."""


class LakeUnavailable(LakeError):
    """The object store did not answer, or reported an internal failure."""


class CommitConflict(LakeError):
    """Another writer committed first; nothing of this commit is visible."""


class TableDamaged(LakeError):
    """Another program changed a table: a file in its log is missing, or its files contradict its counters."""


class TableUnsupported(LakeError):
    """A table uses a feature of the Delta protocol that this package does not know."""


class BadRecords(ZyncError):
    """Records that can't be decoded or transformed, and that the pipeline file does not let pass into quarantine."""


class EtlError(ZyncError):
    """A batch that can't be transformed."""


class FieldMissing(EtlError):
    """A rule names a field that no record of its topic has had so far."""


class RangeUnknown(ZyncError):
    """A partition key of Dagster names no range of offsets that an asset has."""


class CheckFailed(ZyncError):
    """The account, the numbering or a topic is not what it must be."""
