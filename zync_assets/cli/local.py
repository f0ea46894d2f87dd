"""``zync local``: a broker and a registry on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zync_assets.cli.arguments import Whole
from zync_assets.cli.output import Format, format_option, print_json, print_rows
from zync_assets.local import services as local_services
from zync_assets.local.services import Services

_Command = TypeVar("_Command", bound=Callable[..., Any])
PORT = Whole(1, 65535)


def _dir_option(command: _Command) -> _Command:
    option = click.option(
        "--dir",
        "state_dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="ZYNC_LOCAL_DIR",
        default=Path("~/.zync/local"),
        show_default="$ZYNC_LOCAL_DIR or ~/.zync/local",
        help="The folder of the services' data, logs and state.",
    )
    return option(command)


@click.group()
def local() -> None:
    """A real Kafka broker and a real schema registry on 127.0.0.1, no Docker.

    They need a Java 17 or 21. The first start fetches 180 MB from Maven Central, once per user.
    """


@local.command()
@_dir_option
@click.option("--kafka-port", type=PORT, help="The broker's port.  [default: the last one, else a free one]")
@click.option("--registry-port", type=PORT, help="The registry's port.  [default: the last one, else a free one]")
@click.option(
    "--lake",
    type=click.Path(path_type=Path),
    help="The lake that belongs to these services, missing or empty at first: `down --clean` removes it with them.  "
    "[default: lake in the services' folder]",
)
@format_option
def up(state_dir: Path, kafka_port: int | None, registry_port: int | None, lake: Path | None, fmt: Format) -> None:
    """Start both and return when they answer; nothing happens to one that runs."""
    _show(local_services.up(state_dir, kafka_port=kafka_port, registry_port=registry_port, lake=lake), fmt)


@local.command()
@_dir_option
@click.option("--clean", is_flag=True, help="Remove topics, schemas and the services' lake too.")
def down(state_dir: Path, clean: bool) -> None:
    """Stop both. Topics and schema ids are there again after the next `up`, unless --clean is given."""
    before = local_services.status(state_dir)
    if before is None or not local_services.down(state_dir, clean=clean):
        click.echo("nothing runs", err=True)
    elif clean:
        click.echo(f"stopped; {before.state_dir} and {before.lake} are removed", err=True)
    else:
        click.echo("stopped", err=True)


@local.command()
@_dir_option
@format_option
def status(state_dir: Path, fmt: Format) -> None:
    """Show what runs, and where."""
    services = local_services.status(state_dir)
    if services is not None:
        _show(services, fmt)
    elif fmt == "json":
        print_json({"running": False})
    else:
        click.echo(
            f"no services in {state_dir.expanduser()}. Start them: {local_services.command('up', state_dir.expanduser())}",
            err=True,
        )


def _show(services: Services, fmt: Format) -> None:
    if fmt == "json":
        print_json(
            {
                "running": services.running,
                "bootstrap_servers": services.bootstrap_servers,
                "registry_url": services.registry_url,
                "kafka_pid": services.kafka_pid,
                "registry_pid": services.registry_pid,
                "state_dir": services.state_dir,
                "lake": services.lake,
            }
        )
        return
    rows = [
        _row("Kafka", services.bootstrap_servers, services.kafka_pid),
        _row("schema registry", services.registry_url, services.registry_pid),
    ]
    print_rows(rows, ["service", "address", "state", "pid"], fmt)
    if services.running:
        click.echo(f"export KAFKA_BOOTSTRAP_SERVERS={services.bootstrap_servers}")
        click.echo(f"export SCHEMA_REGISTRY_URL={services.registry_url}")


def _row(service: str, address: str, pid: int | None) -> dict[str, object]:
    return {"service": service, "address": address, "state": "stopped" if pid is None else "running", "pid": pid}
