"""``zync validate``, ``zync help`` and ``zync version``: the commands that need nothing but this machine.

``zync validate`` reports every error of a pipeline file. ``zync help`` prints the reference of the pipeline file, from the
grammar that reads the file. ``zync version`` prints the versions for a bug report.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

import click

from zync_assets.cli.terminal import Format, excerpt, format_option, print_json, print_rows
from zync_assets.errors import PipelineFileError, SetupError
from zync_assets.local.java import find_java, java_version
from zync_assets.pipeline import Pipeline, Rule
from zync_assets.pipeline_file import load
from zync_assets.pipeline_file.grammar import KEYS
from zync_assets.pipeline_file.key import Key, found, near
from zync_assets.pipeline_file.outs import unheld


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@format_option
def validate(pipeline: Path, fmt: Format) -> None:
    """Report every error of the file PIPELINE, with line, key and cure; exit code 1 when there is one.

    Starts no JVM and asks no broker.
    """
    # Here alone: it loads pyarrow, which the reference of the keys does without.
    from zync_assets.pipeline_file.plain_types import unknown_fields

    try:
        model = load(pipeline)
        problems, notes = unknown_fields(model)
        if problems:
            raise PipelineFileError(str(pipeline), problems)
        _report_good(model, pipeline, fmt, notes)
    except PipelineFileError as error:
        _report_bad(error, fmt)
        raise SystemExit(1) from None


def _report_good(model: Pipeline, file: Path, fmt: Format, notes: Sequence[str]) -> None:
    rules = [rule for rule in model.rules if rule.part_of is None]
    counts = {"inputs": len(model.inputs), "rules": len(rules), "outputs": len(model.outputs)}
    counts |= {"sinks": len(model.sinks)} if model.sinks else {}
    notes = [
        *notes,
        *(
            f"output {topic} is not held, since {reason}: changes of a source row may overtake a pending record of the row"
            for topic, reason in unheld(model.rules, model.outputs).items()
        ),
    ]
    notes += [
        f"rule {rule.name}, expire-after: the inputs have an order of their source. Where neighbouring records in it have"
        f" times that differ, a record that waits nearly {rule.expiry.text} may expire or not, as the batches are cut. Use a"
        " much longer time, or order: time for these inputs."
        for rule in model.rules
        if rule.expiry is not None and rule.part_of is None and _is_ordered(model, rule)
    ]
    notes += [
        f"output {topic} has records of rule {name} that expire, on-expire: emit, beside those of {' and '.join(others)}: such a"
        " record comes after later changes of its row, and may overwrite newer values or bring a deleted row back. Use"
        " on-expire: quarantine, or an output of its own."
        for topic, name, others in _overwritten_outputs(model)
    ]
    if fmt == "json":
        print_json({"file": str(file), "ok": True, "name": model.name, **counts, **({"notes": notes} if notes else {})})
    else:
        summary = ", ".join(f"{count} {name if count != 1 else name[:-1]}" for name, count in counts.items())
        click.echo(f"OK: {file} ({model.name}): {summary}")
        for note in notes:
            click.echo(f"note: {note}")


def _overwritten_outputs(model: Pipeline) -> Iterator[tuple[str, str, list[str]]]:
    """Outputs to which a rule emits records that expire: the output, the rule, and the other rules of the output."""
    for output in model.outputs:
        rules = [rule for rule in model.rules if rule.out == output.topic]
        names = list(dict.fromkeys(rule.part_of or rule.name for rule in rules))
        for name in names if len(names) > 1 else ():
            expiry = next(rule.expiry for rule in model.rules if rule.name == name)
            if expiry is not None and expiry.action == "emit":
                yield output.topic, name, [other_name for other_name in names if other_name != name]


def _is_ordered(model: Pipeline, rule: Rule) -> bool:
    """Whether the file gives the records of a rule an order of their source."""
    orders = (model.input(topic).order for topic in rule.topics)
    return model.transactions is not None or any(order is not None and not order.time for order in orders)


def _report_bad(error: PipelineFileError, fmt: Format) -> None:
    for problem in error.problems:
        if fmt == "json":
            print_json(
                {"file": error.path, "line": problem.line or None, "key": problem.key, "message": problem.message}
            )
        else:
            place = f"{error.path}:{problem.line}" if problem.line else error.path
            click.echo(": ".join([place, *([problem.key] if problem.key else []), problem.message]))


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
        paths = list(KEYS)
    else:
        path = found(KEYS, key)
        if path is None:
            raise click.UsageError(_unknown_key_text(key))
        paths = [path, *(below for below in KEYS if below.startswith(f"{path}."))]
    if fmt == "json":
        for path in paths:
            print_json(dict(zip(_COLUMNS, _cells(path, KEYS[path]), strict=True)))
    elif key is None:
        click.echo(
            "The keys of a pipeline file. `zync help KEY` describes one of them, `zync COMMAND --help` a command.\n"
        )
        click.echo(_overview(paths))
    else:
        click.echo(_page(paths[0], KEYS[paths[0]], paths[1:]))


def _fill(text: str, first: str = "", indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _unknown_key_text(key: str) -> str:
    context = click.get_current_context().find_root()
    if isinstance(context.command, click.Group) and key in context.command.list_commands(context):
        return f"`{key}` is a command, not a key of the pipeline file; run `zync {key} --help`"
    close = near(KEYS, key)
    cure = f"; near keys: {', '.join(f'`{path}`' for path in close)}" if close else ""
    return f"`{excerpt(key)}` is no key of the pipeline file{cure}; `zync help` lists every key"


def _cells(path: str, key: Key) -> tuple[object, ...]:
    return path, key.type, key.required, key.default or None, list(key.allowed), key.text, key.example


def _overview(paths: list[str]) -> str:
    """A line for each key: its path, and the first sentence of its text."""
    width = max(map(len, paths))
    indent = " " * (width + 2)
    return "\n".join(_fill(KEYS[path].summary, first=f"{path:<{width}}  ", indent=indent) for path in paths)


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
        "\n".join(_fill(text, first=f"{name:<9}", indent=" " * 9) for name, text in facts),
        f"example\n{textwrap.indent(key.example, '    ')}",
    ]
    if below:
        parts.append(f"keys below\n{textwrap.indent(_overview(below), '    ')}")
    return "\n\n".join(parts)


PACKAGES = (
    "pyspark",
    "deltalake",
    "dagster",
    "dagster-pyspark",
    "confluent-kafka",
    "pyarrow",
    "fastavro",
    "pyruhvro",
)
ABSENT = "not installed"


@click.command()
@format_option
def version(fmt: Format) -> None:
    """Show the versions of zync and of everything that matters to it."""
    versions = {
        "zync-assets": _package("zync-assets"),
        "python": platform.python_version(),
        "java": _java(),
        **{name: _package(name) for name in PACKAGES},
        "librdkafka": _librdkafka(),
        "records": _records(),
    }
    if fmt == "json":
        print_json(versions)
    else:
        rows = [{"component": name, "version": text} for name, text in versions.items()]
        print_rows(rows, ["component", "version"], fmt)


def _package(name: str) -> str:
    try:
        return package_version(name)
    except PackageNotFoundError:
        return ABSENT


def _java() -> str:
    try:
        return java_version(find_java())
    except SetupError as error:
        return f"none that fits: {error}"


def _librdkafka() -> str:
    try:
        from zync_assets.kafka.client import librdkafka_version
    except ImportError:
        return ABSENT
    return librdkafka_version()


def _records() -> str:
    """How records get into Kafka and out of it."""
    try:
        from zync_assets.kafka.librdkafka import way
    except ImportError:
        return ABSENT
    try:
        return way()
    except SetupError as error:
        return f"none: {error}"
