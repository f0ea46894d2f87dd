"""The root command loads quickly and prints an error in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import click
import pytest
from click.testing import CliRunner, Result

from zync_assets.cli.main import COMMANDS, Lazy, main
from zync_assets.errors import SetupError

HEAVY = ("pyspark", "dagster", "pandas", "pyarrow", "deltalake", "confluent_kafka", "rich", "sqlglot")


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The result of a command that raises ``error``."""

    @click.command()
    def command() -> None:
        raise error

    module = types.ModuleType("a_command")
    module.__dict__["command"] = command
    monkeypatch.setitem(sys.modules, "a_command", module)
    monkeypatch.setattr("zync_assets.cli.main.COMMANDS", {"command": Lazy("a_command:command", "")})
    return CliRunner().invoke(main, ["command"])


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "zync_assets", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "python -m zync_assets [OPTIONS] COMMAND" in answer.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["local", "status", "--dir", "/nowhere/at/all"]])
def test_nothing_heavy_is_imported_for_a_light_command(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from zync_assets.cli.main import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)

    assert answer.stderr.splitlines()[-1] == "[]"


def test_the_modules_of_the_commands_import_no_pandas() -> None:
    """pyarrow imports pandas at the first conversion of a list. An idle command needs none, and takes 0.15 s less."""
    modules = sorted({entry.target.partition(":")[0] for entry in COMMANDS.values()})
    code = f"import sys, {', '.join(modules)}\nprint('pandas' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert answer.stdout == "False\n"


def test_the_overview_lists_every_command_with_a_word_on_it() -> None:
    overview = CliRunner().invoke(main, ["--help"]).stdout

    for name, entry in COMMANDS.items():
        assert f"  {name} " in overview
        assert entry.help in overview


def test_an_error_of_ours_is_one_line_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_raising(SetupError("port 9092 is occupied: choose another"), monkeypatch)

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: port 9092 is occupied: choose another\n"


def test_ctrl_c_ends_as_a_shell_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_raising(KeyboardInterrupt(), monkeypatch)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_a_closed_stream_is_no_other_file() -> None:
    """As after ``zync … >&- 2>&-``: the first file that is opened must not have the number of a stream."""
    program = """
import os, sys
from zync_assets.cli import main
main._command = lambda name: main.click.Command(name, callback=look)
def look():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(7 if os.open(os.devnull, os.O_RDONLY) > 2 and os.get_inheritable(1) else 8)
main.main(["version"])
"""
    line = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    closed = subprocess.run(line, check=False)
    assert closed.returncode == 7


def test_a_character_that_the_terminal_lacks_is_an_escape() -> None:
    program = "from zync_assets.cli import main; main.main(['produce', '--help'])"
    latin = {**os.environ, "PYTHONIOENCODING": "latin1"}
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=latin)
    assert rb'{"key": \u2026, "value"' in answer.stdout
    program = "from zync_assets.cli.terminal import print_json; print_json('\\U0001f375')"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=latin)
    assert json.loads(answer.stdout) == "\U0001f375"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["no-such-command"])

    assert result.exit_code == 2
    assert "no-such-command" in result.stderr


def test_a_misspelt_command_is_answered_with_the_command() -> None:
    result = CliRunner().invoke(main, ["vaildate", "shop.yaml"])
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: No such command 'vaildate'. Did you mean 'validate'?\n")


def test_the_option_version_is_the_command() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == CliRunner().invoke(main, ["version"]).stdout != ""
