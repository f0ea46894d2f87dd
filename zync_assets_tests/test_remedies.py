"""Commands in messages are whole: each one that the code can print is parsed as a shell and the command line parse it."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import zync_assets
from zync_assets.cli.main import COMMANDS, main
from zync_assets.local import services
from zync_assets.pipeline import Pipeline

PACKAGE = Path(zync_assets.__file__).parent
NEEDS_A_FILE = set(COMMANDS) - {"ls", "info", "consume", "produce", "local", "spark", "demo", "version"}
PRINTED = re.compile(rf"\bzync ({'|'.join(sorted(COMMANDS))})\b[^`;,:]*")
HELP = {"cli/demo.py", "cli/query.py"}
"""Modules whose texts show commands by way of example."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string of a module that is no docstring; an expression in it is an ``X``."""
    tree = ast.parse(path.read_text())
    apart = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            apart |= {id(part) for part in node.values}
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.lineno, node.value


def made() -> Iterator[tuple[str, str, list[str]]]:
    """Place, module of the maker (a pipeline's ``command`` or the local services'), and its arguments, of each call."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        decorators = {id(part) for node in ast.walk(tree) for part in getattr(node, "decorator_list", ())}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in decorators:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "command" and node.args and isinstance(node.args[0], ast.Constant):
                given = [part.value if isinstance(part, ast.Constant) else "some.topic" for part in node.args]
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                yield place, "local" if given[0] in ("up", "down") else "pipeline", [str(part) for part in given]


def parsed(text: str) -> None:
    """Parse a command as a shell and click do; an unknown command, option or missing argument is an error."""
    program, *words = shlex.split(text)
    assert program == "zync"
    command: click.Command | None = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"no command {name}"
    with command.make_context(command.name, words):
        pass


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_command_that_needs_a_file_is_made_where_the_file_is_known(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) in HELP:
        return
    for line, text in texts(path):
        for found in PRINTED.finditer(text):
            assert found[1] not in NEEDS_A_FILE, f"{path}:{line}: {found[0]!r} lacks the pipeline file"


@pytest.mark.parametrize(("maker", "words"), [pytest.param(*rest, id=place) for place, *rest in made()])
def test_each_command_that_a_message_prints_can_be_pasted(tmp_path: Path, maker: str, words: list[str]) -> None:
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    (folder / "shop.yaml").write_text("")
    if maker == "local":
        parsed(services.command(words[0], folder, *words[2:]))
    else:
        pipeline = Pipeline("shop", folder / "shop.yaml", {}, None, "", {}, (), (), ())
        parsed(pipeline.command(*words))
