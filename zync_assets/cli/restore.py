"""``zync restore``: archived records back into a topic."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from zync_assets.cli.terminal import TOPIC, Format, excerpt, format_option, print_rows
from zync_assets.errors import ZyncError
from zync_assets.pipeline_file import load

COLUMNS = ("topic", "partition", "verified", "sent")


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option("--from", "source", required=True, metavar="ARCHIVE", help="Raw.Topic, or files:URL/topic.")
@click.option("--to", "topic", required=True, metavar="TOPIC", type=TOPIC, help="The topic; made if it is missing.")
@click.option("--since", metavar="TIME", help="The first time to restore, as in 2026-11-23T03:00Z.")
@click.option("--until", metavar="TIME", help="The time before which records are restored.")
@format_option
def restore(pipeline: Path, source: str, topic: str, since: str | None, until: str | None, fmt: Format) -> None:
    """Publish archived records of PIPELINE into a topic again, in order, with their keys, headers and timestamps.

    A second run with the same options goes on where the first one stopped.
    """
    from zync_assets.publish.restore import restore as restored

    made = restored(load(pipeline), source, topic, _micros("--since", since), _micros("--until", until))
    print_rows((vars(item) for item in made), COLUMNS, fmt)


def _micros(option: str, text: str | None) -> int | None:
    """A time in microseconds since the epoch. A time without a zone is in UTC."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ZyncError(f"{option} {excerpt(text)} is no time. Write it as in 2026-11-23T03:00Z.") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1_000_000)
