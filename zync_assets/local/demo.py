"""The demo's files in the repository, and the demo's own services."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zync_assets.errors import SetupError
from zync_assets.local.services import Services, status

TOPICS = ("Invoices", "InvoiceStatus")
BATCHES = 4


def demo_folder() -> Path:
    """The folder ``demo`` of the repository: below the current folder, else beside the package.

    Raises SetupError where it is in neither place.
    """
    for base in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (base / "demo" / "invoices.yaml").is_file():
            return base / "demo"
    raise SetupError("the demo's files are not here: run this in a clone of the repository, which has a folder demo.")


def demo_services_folder() -> Path:
    """The folder of the demo's services and lake: ZYNC_DEMO_DIR, else ``~/.zync/demo``."""
    return Path(os.environ.get("ZYNC_DEMO_DIR") or Path.home() / ".zync" / "demo")


def demo_environment(services: Services | None = None) -> dict[str, str]:
    """The environment in which the demo's pipeline is loaded: this process's, with the demo's own services and lake.

    Without ``services``, the services of the last demo; without a last demo, only the environment of this process.
    """
    found = services or status(demo_services_folder())
    return {**os.environ, **addresses(found)} if found else dict(os.environ)


def addresses(services: Services) -> Mapping[str, str]:
    """The environment variables of the demo's pipeline file."""
    return {
        "KAFKA_BOOTSTRAP_SERVERS": services.bootstrap_servers,
        "SCHEMA_REGISTRY_URL": services.registry_url,
        "ZYNC_LAKE": str(services.lake),
    }
