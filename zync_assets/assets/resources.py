"""Dagster resources: the connections to broker and registry, and the Spark session of a run.

The connections have typed fields, with secrets by ``EnvVar``, and take the place of a pipeline file's ``kafka:`` and
``registry:``. An ``EnvVar`` is read in the process that connects, when the process first connects. Dagster's pages show the
name of the ``EnvVar`` alone.

A run has one Spark session, which starts at its first use. Checks therefore start no JVM.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dagster import ConfigurableResource, DagsterInvalidConfigError, InitResourceContext, ResourceDefinition, resource
from dagster_pyspark import LazyPySparkResource
from dagster_spark.utils import flatten_dict
from pydantic import Field, field_validator

from zync_assets.errors import SetupError
from zync_assets.pipeline import Pipeline, RegistryConfig
from zync_assets.pipeline_file.fields import http_fault
from zync_assets.pipeline_file.key import kafka_faults
from zync_assets.spark.session import session_with
from zync_assets.spark.settings import spark_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_VARIABLE = re.compile(r'environment variable "(\w+)"')


def _secret(description: str) -> Any:
    return Field(
        default=None, repr=False, description=f"{description} Give an EnvVar: Dagster's pages show what is not one."
    )


def _path_text(value: object) -> object:
    """A path as text. Dagster's configuration has text alone."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_paths_as_text = field_validator("ssl_ca_location", "ssl_certificate_location", "ssl_key_location", mode="before")(
    _path_text
)


class KafkaResource(ConfigurableResource, extra="forbid", hide_input_in_errors=True):
    """The connection to the broker. ``properties`` takes any other librdkafka property, under librdkafka's name.

    Dagster's pages show an ``EnvVar`` by its name. Any other value is shown whole.

        >>> from dagster import EnvVar
        >>> from zync_assets import KafkaResource
        >>> kafka = KafkaResource(
        ...     bootstrap_servers="broker:9093",
        ...     security_protocol="SASL_SSL",
        ...     sasl_mechanism="SCRAM-SHA-512",
        ...     sasl_username="zync",
        ...     sasl_password=EnvVar("KAFKA_PASSWORD"),
        ...     properties={"socket.timeout.ms": "5000"},
        ... )
        >>> kafka.bootstrap_servers, "sasl_password" in repr(kafka)
        ('broker:9093', False)
    """

    bootstrap_servers: str = Field(description="host:port, or several with commas.")
    security_protocol: str | None = Field(default=None, description="PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.")
    sasl_mechanism: str | None = Field(default=None, description="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER.")
    sasl_username: str | None = Field(default=None, description="For PLAIN and SCRAM.")
    sasl_password: str | None = _secret("For PLAIN and SCRAM.")
    sasl_oauthbearer_method: str | None = Field(default=None, description="oidc: tokens for client credentials.")
    sasl_oauthbearer_client_id: str | None = Field(default=None, description="For oidc.")
    sasl_oauthbearer_client_secret: str | None = _secret("For oidc.")
    sasl_oauthbearer_token_endpoint_url: str | None = Field(default=None, description="For oidc.")
    sasl_oauthbearer_config: str | None = Field(
        default=None, repr=False, description="What oauth_cb gets, such as region=…."
    )
    oauth_cb: str | None = Field(default=None, description="module:function that makes tokens.")
    ssl_ca_location: str | None = Field(
        default=None, description="The file of the CA that signed the broker's certificate."
    )
    ssl_certificate_location: str | None = Field(default=None, description="The client's certificate.")
    ssl_key_location: str | None = Field(default=None, description="The client's key.")
    ssl_key_password: str | None = _secret("Of the client's key.")
    properties: dict[str, str] = Field(default={}, repr=False, description="Any other property of librdkafka.")
    _paths = _paths_as_text

    def settings(self) -> dict[str, str]:
        """The properties as librdkafka spells them, which librdkafka checks without a broker.

        SetupError for an environment variable that is not there, and for a property that librdkafka refuses.
        """
        properties = _settings(self, {"oauth_cb": "oauth_cb"})
        for key, reason in kafka_faults(properties):
            raise SetupError(f"KafkaResource: {key} {reason}")
        return properties


class RegistryResource(ConfigurableResource, extra="forbid", hide_input_in_errors=True):
    """How to reach the schema registry. ``properties``: any other property of Confluent's client.

    >>> from dagster import EnvVar
    >>> from zync_assets import RegistryResource
    >>> registry = RegistryResource(url="https://registry:8081", basic_auth_user_info=EnvVar("REGISTRY_LOGIN"))
    >>> registry.url, "basic_auth_user_info" in repr(registry)
    ('https://registry:8081', False)
    """

    url: str = Field(repr=False, description="http:// or https://; several with commas.")
    basic_auth_user_info: str | None = _secret("user:password.")
    bearer_auth_token: str | None = _secret("A token.")
    ssl_ca_location: str | None = Field(default=None, description="The file of the CA that signed its certificate.")
    ssl_certificate_location: str | None = Field(default=None, description="The client's certificate.")
    ssl_key_location: str | None = Field(default=None, description="The client's key.")
    ssl_key_password: str | None = _secret("Of the client's key.")
    properties: dict[str, str] = Field(default={}, repr=False, description="Any other property of Confluent's client.")
    _paths = _paths_as_text

    def settings(self) -> dict[str, str]:
        """The properties as Confluent's client spells them.

        SetupError for an environment variable that is not there, and for an address that is none.
        """
        properties = _settings(self, {})
        if fault := http_fault(properties["url"]):
            raise SetupError(f"RegistryResource: url {fault}")
        return properties


def _settings(resource: KafkaResource | RegistryResource, names: Mapping[str, str]) -> dict[str, str]:
    try:
        config: Any = resource.process_config_and_initialize()
    except DagsterInvalidConfigError as error:
        # The rest of its text shows the configuration.
        missing_names = ", ".join(dict.fromkeys(_VARIABLE.findall(str(error))))
        cure = (
            f"the environment has no {missing_names}; set it"
            if missing_names
            else "its configuration is not valid; correct it"
        )
        raise SetupError(f"{type(resource).__name__}: {cure}") from None
    fields = {
        names.get(name, name.replace("_", ".")): str(value)
        for name, value in config
        if name != "properties" and value is not None
    }
    return {**config.properties, **fields}


class _LazyProperties(Mapping[str, str]):
    """A resource's properties, looked up at their first use. A pickle for Spark's tasks has the looked-up values."""

    def __init__(self, resource: KafkaResource | RegistryResource, without: frozenset[str] = frozenset()) -> None:
        self._resource = resource
        self._without = without

    @cached_property
    def _values(self) -> dict[str, str]:
        return {name: value for name, value in self._resource.settings().items() if name not in self._without}

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (self._values,)


def with_connections(pipeline: Pipeline, kafka: KafkaResource | None, registry: RegistryResource | None) -> Pipeline:
    """The pipeline with the connections of these resources, where they are given."""
    if kafka is not None:
        pipeline = replace(pipeline, kafka=_LazyProperties(kafka))
    if registry is not None:
        # The address is looked up now: it is no secret, and a pipeline without one can't be loaded.
        address = registry.settings()["url"]
        pipeline = replace(pipeline, registry=RegistryConfig(address, _LazyProperties(registry, frozenset({"url"}))))
    return pipeline


class _Spark(LazyPySparkResource):
    """dagster-pyspark's, its session made as the ``zync`` command makes it."""

    def _init_session(self) -> None:
        self._spark_session = session(self)


def spark_resource(pipeline: Pipeline) -> ResourceDefinition:
    """A pipeline's resource ``spark``, a ``LazyPySparkResource`` with the settings of the pipeline's ``spark:``.

    It is made in a function, not declared with its configuration: Dagster's pages show that of a declared one, and
    ``spark:`` may hold an object store's secret.
    """

    @resource(description="The Spark session of a run, made when it is first needed, with the pipeline's `spark:`.")
    def spark(_: InitResourceContext) -> LazyPySparkResource:
        return _Spark(spark_config=spark_settings(pipeline.spark, pipeline.lake))

    return spark


def session(spark: LazyPySparkResource) -> SparkSession:
    """The resource's session with the settings that results depend on.

    SetupError if there is no Java that Spark runs on; a session on a remote Spark needs none.
    """
    return session_with({name: str(value) for name, value in flatten_dict(spark.spark_config)})
