"""The command ``zync``: its subcommands by name, each imported when it is asked for."""

from __future__ import annotations

import atexit
import difflib
import errno
import gc
import importlib
import io
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from zync_assets.cli.terminal import check_text, harmless
from zync_assets.conflicts import notes_of
from zync_assets.errors import ZyncError

INTERRUPT_CODE = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""

GARBAGE = 50_000
"""New objects after which garbage is looked for. With Python's own 700 the import of what a command needs takes a fifth
longer: half a million objects, all of which stay."""

# Python looks for garbage once more as it ends. That takes 0.15 s, and the process returns all memory anyway.
atexit.register(gc.freeze)


@dataclass(frozen=True)
class Lazy:
    """``target`` is ``module:attribute``. ``help`` repeats the command's help, so that the overview imports no command."""

    target: str
    help: str


COMMANDS: Mapping[str, Lazy] = {
    "validate": Lazy("zync_assets.cli.validate:validate", "Report every error of a pipeline file."),
    "explain": Lazy("zync_assets.cli.run:explain_", "The SQL of every rule, and how each view is kept."),
    "from-kafka": Lazy("zync_assets.cli.run:from_kafka", "Read the input topics into the raw pools."),
    "etl": Lazy("zync_assets.cli.run:etl", "Transform raw records into the staging pools."),
    "diff": Lazy("zync_assets.cli.diff:diff", "The keys of the outputs that an edit of a file would change."),
    "rebuild": Lazy("zync_assets.cli.run:rebuild", "Compute outputs again from the raw history; publish what differs."),
    "to-kafka": Lazy("zync_assets.cli.run:to_kafka", "Publish the staging pools to the output topics."),
    "sink": Lazy("zync_assets.cli.run:sink", "Write staged topics and raw tables to target databases."),
    "restore": Lazy("zync_assets.cli.topics:restore", "Publish archived records into a topic again."),
    "run": Lazy("zync_assets.cli.run:run", "All three steps and the sinks, again and again."),
    "status": Lazy("zync_assets.cli.status:status", "How far every topic and partition is."),
    "check": Lazy("zync_assets.cli.status:check", "Verify the pools and the output topics."),
    "query": Lazy("zync_assets.cli.query:query", "SQL over the pools."),
    "pending": Lazy("zync_assets.cli.records:pending", "The raw records that wait, and why."),
    "quarantine": Lazy("zync_assets.cli.quarantine:quarantine", "Bad records: list, show, replay, drop."),
    "trace": Lazy("zync_assets.cli.records:trace", "The raw records that made an output."),
    "ls": Lazy("zync_assets.cli.topics:ls", "The subjects of the schema registry."),
    "info": Lazy("zync_assets.cli.topics:info", "The watermarks of a topic."),
    "consume": Lazy("zync_assets.cli.topics:consume", "The records of a topic as JSON lines."),
    "produce": Lazy("zync_assets.cli.topics:produce", "JSON lines into a topic."),
    "local": Lazy("zync_assets.cli.local:local", "A Kafka broker and a schema registry on this machine."),
    "spark": Lazy("zync_assets.cli.local:spark", "Spark servers that stay between commands."),
    "help": Lazy("zync_assets.cli.validate:help_", "The keys of the pipeline file: type, default, example."),
    "demo": Lazy("zync_assets.cli.demo:demo", "The demo, from nothing to its result."),
    "version": Lazy("zync_assets.cli.validate:version", "The versions of everything that matters."),
}


def _command(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name].target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _repair_streams() -> None:
    """Put the null device in the place of each standard stream that is closed, as after ``>&-``. The next file that is opened
    would have the number of the stream, and get what a child process prints.

    A character that the locale's encoding lacks is printed as an escape.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class LazyGroup(click.Group):
    """A group that knows its commands by name, and says an error of ours in one line."""

    def main(self, *args: Any, **settings: Any) -> Any:
        _repair_streams()
        return super().main(*args, **settings)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, COMMANDS, 1)
            ctx.fail(f"No such command '{name}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        check_text(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        gc.set_threshold(GARBAGE)
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            text = error.format_message()
            if harmless(text) == text:
                raise
            raise click.UsageError(harmless(text), error.ctx) from None
        except (ZyncError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise
            for text in (str(error), *notes_of(error)):
                click.echo(f"error: {harmless(text)}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPT_CODE)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Run ``zync version``, as users of other commands expect of ``--version``."""
    if wanted and not ctx.resilient_parsing:
        ctx.invoke(_command("version"))
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", count=True, help="Log to stderr what is done; twice for more.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="As the command version."
)
def main(verbose: int) -> None:
    """Topics in, denormalised topics out: Kafka through a Delta lake and back, exactly once."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
