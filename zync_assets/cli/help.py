"""``zync help``: the reference of the pipeline file, printed from the grammar that reads the file."""

from __future__ import annotations

import textwrap

import click

from zync_assets.cli.arguments import shown
from zync_assets.cli.output import Format, format_option, print_json
from zync_assets.pipeline_file.grammar import KEYS
from zync_assets.pipeline_file.keys import Key, found, near

_WIDTH = 100
_COLUMNS = ("key", "type", "required", "default", "allowed", "text", "example")


@click.command("help")
@click.argument("key", required=False)
@format_option
def help_(key: str | None, fmt: Format) -> None:
    """Describe the keys of a pipeline file: all of them, or KEY, such as inputs.retention.

    A description has the type, the default, the allowed values and an example. Reads no file, and starts no JVM.
    """
    if key is None:
        chosen = list(KEYS)
    else:
        path = found(KEYS, key)
        if path is None:
            raise click.UsageError(_unknown(key))
        chosen = [path, *(below for below in KEYS if below.startswith(f"{path}."))]
    if fmt == "json":
        for path in chosen:
            print_json(dict(zip(_COLUMNS, _cells(path, KEYS[path]), strict=True)))
    elif key is None:
        click.echo(
            "The keys of a pipeline file. `zync help KEY` describes one of them, `zync COMMAND --help` a command.\n"
        )
        click.echo(_overview(chosen))
    else:
        click.echo(_page(chosen[0], KEYS[chosen[0]], chosen[1:]))


def _fill(text: str, first: str = "", others: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _unknown(key: str) -> str:
    context = click.get_current_context().find_root()
    if isinstance(context.command, click.Group) and key in context.command.list_commands(context):
        return f"`{key}` is a command, not a key of the pipeline file; run `zync {key} --help`"
    close = near(KEYS, key)
    cure = f"; near keys: {', '.join(f'`{path}`' for path in close)}" if close else ""
    return f"`{shown(key)}` is no key of the pipeline file{cure}; `zync help` lists every key"


def _cells(path: str, key: Key) -> tuple[object, ...]:
    return path, key.type, key.required, key.default or None, list(key.allowed), key.text, key.example


def _overview(chosen: list[str]) -> str:
    """A line for each key: its path, and the first sentence of its text."""
    width = max(map(len, chosen))
    indent = " " * (width + 2)
    return "\n".join(_fill(KEYS[path].summary, first=f"{path:<{width}}  ", others=indent) for path in chosen)


def _page(path: str, key: Key, below: list[str]) -> str:
    facts = [("type", key.type)]
    if key.allowed:
        facts.append(("allowed", ", ".join(key.allowed)))
    if key.required:
        facts.append(("default", "none; the key is required"))
    elif key.default:
        facts.append(("default", key.default))
    parts = [
        path,
        _fill(key.text),
        "\n".join(_fill(text, first=f"{name:<9}", others=" " * 9) for name, text in facts),
        f"example\n{textwrap.indent(key.example, '    ')}",
    ]
    if below:
        parts.append(f"keys below\n{textwrap.indent(_overview(below), '    ')}")
    return "\n\n".join(parts)
