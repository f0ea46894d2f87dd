"""The connections of the ``zync`` command of brimdata: ``~/.zync/kafka.json`` and ``~/.zync/schema_registry.json``.

They are read where a pipeline file has no ``kafka:`` or no ``registry:``. Their keys are zync's own (``cli/flags.go`` of
github.com/brimdata/zync); those with a dot are librdkafka's, or those of Confluent's registry client, as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zync_assets.errors import PipelineFileError, Problem
from zync_assets.pipeline import RegistryConfig
from zync_assets.pipeline_file.fields import listed, suggestion

_KAFKA = {
    "bootstrap_servers": "bootstrap.servers",
    "security_protocol": "security.protocol",
    "sasl_mechanisms": "sasl.mechanism",
    "sasl_username": "sasl.username",
    "sasl_password": "sasl.password",
    "tls_client_cert_file": "ssl.certificate.location",
    "tls_client_key_file": "ssl.key.location",
    "tls_server_ca_cert_file": "ssl.ca.location",
    "tls_server_insecure_skip_verify": "enable.ssl.certificate.verification",
}
_REGISTRY = ("url", "user", "password")


def default_kafka(env: Mapping[str, str]) -> dict[str, str]:
    """librdkafka's properties where neither a file nor an option names a broker.

    ``$KAFKA_BOOTSTRAP_SERVERS`` comes before ``~/.zync/kafka.json``. Empty where there is neither.
    """
    servers = env.get("KAFKA_BOOTSTRAP_SERVERS")
    return {"bootstrap.servers": servers} if servers else home_kafka(env)


def default_registry(env: Mapping[str, str]) -> RegistryConfig | None:
    """The registry of ``$SCHEMA_REGISTRY_URL``, else of ``~/.zync/schema_registry.json``; None where there is neither."""
    url = env.get("SCHEMA_REGISTRY_URL")
    return RegistryConfig(url) if url else home_registry(env)


def home_kafka(env: Mapping[str, str]) -> dict[str, str]:
    """librdkafka's properties from ``kafka.json``; none where there is no such file.

    PipelineFileError, with that file's name, for a file that is no such thing.
    """
    path, given = _read(env, "kafka.json", tuple(_KAFKA))
    found = {_KAFKA.get(key, key): value for key, value in given.items()}
    unverified = given.get("tls_server_insecure_skip_verify")
    if unverified is not None:
        if unverified not in ("true", "false"):
            raise PipelineFileError(str(path), [Problem(1, "tls_server_insecure_skip_verify", "must be true or false")])
        found["enable.ssl.certificate.verification"] = "false" if unverified == "true" else "true"
    return found


def home_registry(env: Mapping[str, str]) -> RegistryConfig | None:
    """The registry of ``schema_registry.json``; None if the file or its ``url`` is missing."""
    path, given = _read(env, "schema_registry.json", _REGISTRY)
    url, user, password = (given.pop(key, "") for key in _REGISTRY)
    if not url:
        return None
    if not url.startswith(("http://", "https://")):
        raise PipelineFileError(str(path), [Problem(1, "url", "must begin with http:// or https://")])
    return RegistryConfig(url, {**({"basic.auth.user.info": f"{user}:{password}"} if user else {}), **given})


def _read(env: Mapping[str, str], name: str, known: tuple[str, ...]) -> tuple[Path, dict[str, str]]:
    """The file's path, and its values as text; empty ones count as left out, as zync has them."""
    if not env.get("HOME"):
        return Path(name), {}
    path = Path(env["HOME"]) / ".zync" / name
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return path, {}
    except (OSError, ValueError) as error:
        # Not the parser's words: they could repeat a secret.
        problem = Problem(getattr(error, "lineno", 1), "", "can't be read as JSON; correct it, or take it away")
        raise PipelineFileError(str(path), [problem]) from None
    if not isinstance(content, dict):
        raise PipelineFileError(str(path), [Problem(1, "", "must be a JSON object")])
    problems: list[Problem] = []
    found: dict[str, str] = {}
    for key, value in content.items():
        if key not in known and "." not in key:
            cure = suggestion(key, known) or f"; known here: {listed(known)}, and names with a dot"
            problems.append(Problem(1, key, f"is no key that is known here{cure}"))
        elif not isinstance(value, str | int | float):
            problems.append(Problem(1, key, "must be one value"))
        elif value != "":
            found[key] = str(value).lower() if isinstance(value, bool) else str(value)
    if problems:
        raise PipelineFileError(str(path), problems)
    return path, found
