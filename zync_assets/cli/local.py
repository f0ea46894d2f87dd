"""``zync local`` and ``zync spark``: services and Spark servers on this machine.

``zync local``: a broker and a registry on this machine.

``zync spark``: the Spark servers that stay between commands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from zync_assets.cli.terminal import Format, Whole, format_option, print_json, print_rows
from zync_assets.errors import SetupError
from zync_assets.local import services
from zync_assets.local.services import (
    Services,
)
from zync_assets.pipeline import SHARED
from zync_assets.spark import shared_servers
from zync_assets.spark.shared_servers import Server

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
    _show(services.up(state_dir, kafka_port=kafka_port, registry_port=registry_port, lake=lake), fmt)


@local.command()
@_dir_option
@click.option("--clean", is_flag=True, help="Remove topics, schemas and the services' lake too.")
def down(state_dir: Path, clean: bool) -> None:
    """Stop both. Topics and schema ids are there again after the next `up`, unless --clean is given."""
    running_services = services.status(state_dir)
    if running_services is None or not services.down(state_dir, clean=clean):
        click.echo("nothing runs", err=True)
    elif clean:
        click.echo(f"stopped; {running_services.state_dir} and {running_services.lake} are removed", err=True)
    else:
        click.echo("stopped", err=True)


@local.command()
@_dir_option
@format_option
def status(state_dir: Path, fmt: Format) -> None:
    """Show what runs, and where."""
    state = services.status(state_dir)
    if state is not None:
        _show(state, fmt)
    elif fmt == "json":
        print_json({"running": False})
    else:
        click.echo(
            f"no services in {state_dir.expanduser()}. Start them: {services.command('up', state_dir.expanduser())}",
            err=True,
        )


def _show(state: Services, fmt: Format) -> None:
    if fmt == "json":
        print_json(
            {
                "running": state.running,
                "bootstrap_servers": state.bootstrap_servers,
                "registry_url": state.registry_url,
                "kafka_pid": state.kafka_pid,
                "registry_pid": state.registry_pid,
                "state_dir": state.state_dir,
                "lake": state.lake,
            }
        )
        return
    rows = [
        _row("Kafka", state.bootstrap_servers, state.kafka_pid),
        _row("schema registry", state.registry_url, state.registry_pid),
    ]
    print_rows(rows, ["service", "address", "state", "pid"], fmt)
    if state.running:
        click.echo(f"export KAFKA_BOOTSTRAP_SERVERS={state.bootstrap_servers}")
        click.echo(f"export SCHEMA_REGISTRY_URL={state.registry_url}")


def _row(service: str, address: str, pid: int | None) -> dict[str, object]:
    return {"service": service, "address": address, "state": "stopped" if pid is None else "running", "pid": pid}


COLUMNS = ("address", "master", "pid", "minutes", "folder")


@click.group()
def spark() -> None:
    """Spark servers of yours on this machine, which commands and Dagster's runs share.

    `spark: {remote: shared}` in a pipeline file, or SPARK_REMOTE=shared where the file names no master, uses one, and
    starts it where none runs with the same settings, environment and code. It ends after half an hour without use.
    """


@spark.command("up")
@click.argument("pipeline", type=click.Path(path_type=Path), required=False)
@format_option
def spark_up(pipeline: Path | None, fmt: Format) -> None:
    """Start the server of PIPELINE, or one with the default settings, and return when it answers."""
    # Here: the reader of pipeline files is slow to load, and the other commands do without it.
    from zync_assets.pipeline_file import load
    from zync_assets.spark.session import shared_server
    from zync_assets.spark.settings import spark_settings

    model = None if pipeline is None else load(pipeline)
    own = {"remote": SHARED} if model is None else dict(model.spark)
    if own.get("remote") != SHARED:
        raise SetupError(
            f"{pipeline}: spark: has no `remote: shared`, so that nothing would use a server of this machine."
        )
    settings = spark_settings(own, "" if model is None else model.lake)
    _show_servers([shared_server(settings)], fmt)


@spark.command("down")
def spark_down() -> None:
    """Stop every Spark server. A step that runs on a server fails, and commits nothing."""
    # Silent servers first: a server that is starting may listen a moment later, and is then found by ``find_all``.
    silent = shared_servers.find_silent()
    folders = dict.fromkeys([*silent, *(server.folder for server in shared_servers.find_all())])
    for folder in folders:
        shared_servers.stop(folder)
    click.echo(f"stopped {len(folders)}" if folders else "nothing runs", err=True)


@spark.command("status")
@format_option
def spark_status(fmt: Format) -> None:
    """Show which run."""
    silent, servers = shared_servers.find_silent(), shared_servers.find_all()
    if servers:
        _show_servers(servers, fmt)
    for folder in silent:
        click.echo(f"starting or ending: the server of {folder}", err=True)
    if not servers and not silent:
        click.echo("nothing runs: `zync spark up` starts one", err=True)


def _show_servers(servers: Sequence[Server], fmt: Format) -> None:
    rows: list[dict[str, object]] = [
        {
            "address": f"127.0.0.1:{server.port}",
            "master": server.master,
            "pid": server.pid,
            "minutes": int((time.time() - server.start_time) / 60),
            "folder": str(server.folder),
        }
        for server in servers
    ]
    print_rows(rows, COLUMNS, fmt)
