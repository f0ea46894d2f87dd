"""``zync spark``: the Spark servers that stay between commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from zync_assets.cli.output import Format, format_option, print_rows
from zync_assets.errors import SetupError
from zync_assets.local import spark_servers
from zync_assets.local.spark_servers import Server
from zync_assets.pipeline import SHARED
from zync_assets.pipeline_file import load

COLUMNS = ("address", "master", "pid", "minutes", "folder")


@click.group()
def spark() -> None:
    """Spark servers of yours on this machine, which commands and Dagster's runs share.

    `spark: {remote: shared}` in a pipeline file, or SPARK_REMOTE=shared where the file names no master, uses one, and
    starts it where none runs with the same settings, environment and code. It ends after half an hour without use.
    """


@spark.command()
@click.argument("pipeline", type=click.Path(path_type=Path), required=False)
@format_option
def up(pipeline: Path | None, fmt: Format) -> None:
    """Start the server of PIPELINE, or one with the default settings, and return when it answers."""
    from zync_assets.steps.connect import shared_server
    from zync_assets.steps.spark_settings import spark_settings

    loaded = None if pipeline is None else load(pipeline)
    own = {"remote": SHARED} if loaded is None else dict(loaded.spark)
    if own.get("remote") != SHARED:
        raise SetupError(
            f"{pipeline}: spark: has no `remote: shared`, so that nothing would use a server of this machine."
        )
    settings = spark_settings(own, "" if loaded is None else loaded.lake)
    _show([shared_server(settings)], fmt)


@spark.command()
def down() -> None:
    """Stop every Spark server. A step that runs on a server fails, and commits nothing."""
    # Silent servers first: a server that is starting may listen a moment later, and is then found by ``find_all``.
    silent = spark_servers.find_silent()
    folders = dict.fromkeys([*silent, *(server.folder for server in spark_servers.find_all())])
    for folder in folders:
        spark_servers.stop(folder)
    click.echo(f"stopped {len(folders)}" if folders else "nothing runs", err=True)


@spark.command()
@format_option
def status(fmt: Format) -> None:
    """Show which run."""
    silent, servers = spark_servers.find_silent(), spark_servers.find_all()
    if servers:
        _show(servers, fmt)
    for folder in silent:
        click.echo(f"starting or ending: the server of {folder}", err=True)
    if not servers and not silent:
        click.echo("nothing runs: `zync spark up` starts one", err=True)


def _show(servers: Sequence[Server], fmt: Format) -> None:
    rows: list[dict[str, object]] = [
        {
            "address": f"127.0.0.1:{server.port}",
            "master": server.master,
            "pid": server.pid,
            "minutes": int((time.time() - server.started) / 60),
            "folder": str(server.folder),
        }
        for server in servers
    ]
    print_rows(rows, COLUMNS, fmt)
