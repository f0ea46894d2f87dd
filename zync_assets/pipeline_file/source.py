"""YAML as a tree of nodes that know their line, with ``${NAME}`` taken from the environment.

The module reads the parser's event stream. It accepts no tags, anchors and aliases, and bounds size and depth. No file can
therefore make it run or grow without end. YAML 1.2's core schema gives the types of plain scalars
(https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)
from ruamel.yaml.reader import ReaderError

from zync_assets.errors import Problem

MAX_BYTES = 1 << 19
MAX_DEPTH = 32
MAX_PROBLEMS = 100
UNSET = "\ufffd"
"""In a text, in place of a variable that the environment lacks. A problem that repeats it follows from the variable."""

_VARIABLE = re.compile(
    r"(?P<escaped>\$\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<has_default>:-(?P<default>[^{}]{0,1000}))?\}|(?P<bad>\$\{)"
)
_PLAIN = dict(zip("\uff1a\uff0c\uff5b\uff5d\u3010\u3011\u201c\u201d\u2018\u2019", ":,{}[]\"\"''", strict=True))
"""Punctuation of other keyboards and of word processors → that of YAML."""
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Scalar:
    """``text``: what the file says, after substitution; ``plain``: not quoted, so it may be a number or the like."""

    line: int
    text: str = field(repr=False)
    is_plain: bool
    has_variable: bool
    column: int = 0
    """The characters before the text in its first line; of a block, before each line."""
    style: str = ""
    """``|`` and ``>`` for blocks, else nothing."""

    def place(self, line: int, column: int) -> tuple[int, int]:
        """Line and column in the file of a place in the text, as far as the text stands in the file as it is."""
        if self.style == "|":
            return self.line + line, self.column + column
        return (self.line, self.column + column) if line == 1 and not self.style else (self.line, self.column + 1)

    @property
    def value(self) -> str | int | float | bool | None:
        if not self.is_plain:
            return self.text
        if _NULL.fullmatch(self.text):
            # An empty or odd value of a variable is text all the same.
            return self.text if self.has_variable else None
        if _BOOL.fullmatch(self.text):
            return self.text.lower() == "true"
        if _INT.fullmatch(self.text):
            return int(self.text)
        if _FLOAT.fullmatch(self.text):
            return float(self.text)
        return self.text


@dataclass(frozen=True)
class Items:
    """A YAML sequence."""

    line: int
    items: tuple[Node, ...]


@dataclass(frozen=True)
class YamlEntry:
    """A key of a mapping with its value; ``line`` is the key's."""

    key: str
    line: int
    node: Node


@dataclass(frozen=True)
class YamlTable:
    """A YAML mapping; keys are unique. ``at``: the mapping's number in its list, if a pattern made other mappings of the list."""

    line: int
    entries: tuple[YamlEntry, ...]
    at: int | None = None


Node: TypeAlias = "Scalar | Items | YamlTable"


def read(path: Path, env: Mapping[str, str]) -> tuple[Node | None, list[Problem]]:
    """The file's one document (None: nothing can be made of it), and what is wrong with it as YAML."""
    text, problem = _read_text(path)
    if problem is not None:
        return None, [problem]
    return parse(text, env)


def parse(text: str, env: Mapping[str, str]) -> tuple[Node | None, list[Problem]]:
    """As ``read``, of a text."""
    if len(text) > MAX_BYTES:
        return None, [Problem(1, "", f"the file is larger than {MAX_BYTES >> 10} KiB; no pipeline needs that")]
    composer = _Composer(env, text.split("\n"))
    try:
        return composer.document(YAML(typ="safe", pure=True).parse(text)), composer.problems
    except _Stop:
        return None, composer.problems
    except MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else composer.line
        at = f", column {mark.column + 1}" if mark is not None else ""
        # Only the parser's own words: its snippet of the file could hold a secret.
        fault = str(error.problem or error.context)
        message = f"is no YAML{at}: {fault}{_hint(composer.lines, line, fault)}"
        return None, [*composer.problems, Problem(line, "", message)]
    except ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        return None, [
            *composer.problems,
            Problem(line, "", "is no YAML: a character that YAML does not allow"),
        ]
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError, NotImplementedError):
        # The parser meets some malformed input with a bare error of its own making.
        return None, [*composer.problems, Problem(composer.line, "", "is no YAML from here on")]


def _hint(lines: Sequence[str], line: int, fault: str) -> str:
    """A hint on the fault of a line that is no YAML, or of the line before. ``fault``: the parser's words."""
    if line <= len(lines) and re.match(r" *\t", lines[line - 1]):
        return "; indent with spaces, not with tabs"
    for text in reversed(lines[max(0, line - 2) : line]):
        if wide := re.search(f"[{''.join(_PLAIN)}]", text):
            return f"; the line has the character {wide[0]}, write {_PLAIN[wide[0]]}"
        if re.search(r"[{\[,][^'\"#]*\$\{", text):
            return '; in braces or brackets, put ${NAME} in quotes: "${NAME}"'
        if re.search(r"[{\[][^'\"#]*\([^()]*,", text):
            return "; in braces or brackets, put an expression that has a comma in quotes"
    return "; the items of a list, and the keys of a mapping, begin in one column" if "<block end>" in fault else ""


def _read_text(path: Path) -> tuple[str, Problem | None]:
    try:
        if not path.exists():
            return "", Problem(0, "", f"does not exist{_looked_in(path)}; name a pipeline file that does")
        if not path.is_file():
            return "", Problem(0, "", "is a folder or the like; name a pipeline file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the name is no path"
        return "", Problem(0, "", f"can't be read: {reason}")
    if len(data) > MAX_BYTES:
        return "", Problem(1, "", f"the file is larger than {MAX_BYTES >> 10} KiB; no pipeline needs that")
    try:
        return data.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return "", Problem(line, "", "is not UTF-8; save the file as UTF-8")


def _looked_in(path: Path) -> str:
    """The folder that a relative path begins in."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"


class _Stop(Exception):
    """The file can't be read further; the problem is noted."""


class _Composer:
    def __init__(self, env: Mapping[str, str], lines: Sequence[str]) -> None:
        self.env = env
        self.lines = lines
        self.problems: list[Problem] = []
        self.line = 1

    def document(self, events: Iterator[Event]) -> Node | None:
        root: Node | None = None
        for event in events:
            self.line = _line(event)
            if isinstance(event, StreamStartEvent | StreamEndEvent):
                continue
            if isinstance(event, DocumentStartEvent):
                if root is not None:
                    self._stop("", "a second document begins here; a pipeline file holds one")
                root = self.node(self._next(events), events, "", 0)
        return root

    def node(self, event: Event, events: Iterator[Event], path: str, depth: int) -> Node:
        line = _line(event)
        if isinstance(event, AliasEvent):
            self._stop(path, f"aliases are not supported; write the value in place of *{event.anchor}")
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor:
            self._problem(line, path, f"anchors are not supported; remove &{anchor}")
        if tag:
            self._problem(line, path, "tags are not supported; remove it, or put text in quotes")
        if depth > MAX_DEPTH:
            self._stop(path, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, MappingStartEvent):
            return self._table(line, events, path, depth, in_braces=bool(event.flow_style))
        if isinstance(event, SequenceStartEvent):
            return self._items(line, events, path, depth)
        assert isinstance(event, ScalarEvent)
        return self._scalar(event, line, path)

    def _table(self, line: int, events: Iterator[Event], path: str, depth: int, *, in_braces: bool) -> YamlTable:
        entries: dict[str, YamlEntry] = {}
        cut_path = ""
        while not isinstance(event := self._next(events), MappingEndEvent):
            if not isinstance(event, ScalarEvent):
                self._stop(path, "a key must be text, not a list or a mapping")
            anchor: Any = event.anchor
            if anchor:
                self._problem(_line(event), path, f"anchors are not supported; remove &{anchor}")
            key, key_line = str(event.value), _line(event)
            key_path = f"{path}.{key}" if path else key
            node = self.node(self._next(events), events, key_path, depth + 1)
            if cut_path and isinstance(node, Scalar) and not node.text:
                message = "ends at a comma; in braces, put an expression that has a comma in quotes"
                self._problem(key_line, cut_path, message, explains=(cut_path,))
                continue
            mark = next((character for character in _PLAIN if character in key), None)
            if in_braces and mark and event.style is None and isinstance(node, Scalar) and not node.text:
                message = f"has the character {mark}; write {_PLAIN[mark]} and a space, or put the key in quotes"
                self._problem(key_line, key_path, message, explains=(key_path, f"{path}.{key.partition(mark)[0]}"))
                continue
            is_open = (
                in_braces and isinstance(node, Scalar) and node.is_plain and node.text.count("(") > node.text.count(")")
            )
            cut_path = key_path if is_open else ""
            if key in entries:
                self._problem(key_line, key_path, f"is here twice; it is on line {entries[key].line} already")
            else:
                entries[key] = YamlEntry(key, key_line, node)
        return YamlTable(line, tuple(entries.values()))

    def _items(self, line: int, events: Iterator[Event], path: str, depth: int) -> Items:
        nodes: list[Node] = []
        while not isinstance(event := self._next(events), SequenceEndEvent):
            nodes.append(self.node(event, events, f"{path}[{len(nodes)}]", depth + 1))
        return Items(line, tuple(nodes))

    def _scalar(self, event: ScalarEvent, line: int, path: str) -> Scalar:
        is_plain = event.style is None
        has_variable = False

        def replace(match: re.Match[str]) -> str:
            nonlocal has_variable
            if match["escaped"]:
                return "${"
            if match["bad"]:
                self._problem(
                    line,
                    path,
                    "`${` begins no ${NAME} or ${NAME:-default}; write $${ for the characters themselves",
                )
                return match[0]
            has_variable = True
            value = self.env.get(match["name"])
            if match["has_default"]:
                # As in a shell, an empty variable counts as unset where there is a default.
                return value or match["default"]
            if value is None:
                name = match["name"]
                cure = f"set it, or write ${{{name}:-default}}"
                # Kafka Connect has a dollar sign there.
                cure = "the name of a sink's topic is {topic}" if name == "topic" else cure
                message = f"the environment has no {name}; {cure}"
                self._problem(line, path, message, explains=(path,))
                return UNSET
            return value

        text = _VARIABLE.sub(replace, str(event.value))
        style = event.style if event.style in ("|", ">") else ""
        return Scalar(line, text, is_plain, has_variable, self._column(event, style), style)

    def _column(self, event: ScalarEvent, style: str) -> int:
        if style:
            block = (text for text in self.lines[_line(event) :] if text.strip())
            first = next(block, "")
            return len(first) - len(first.lstrip())
        mark: Any = event.start_mark
        return int(mark.column) + (event.style is not None)

    def _next(self, events: Iterator[Event]) -> Event:
        event = next(events)
        self.line = _line(event)
        return event

    def _problem(self, line: int, path: str, message: str, explains: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(line, path, message, explains))
        if len(self.problems) >= MAX_PROBLEMS:
            raise _Stop

    def _stop(self, path: str, message: str) -> NoReturn:
        self._problem(self.line, path, message)
        raise _Stop


def _line(event: Event) -> int:
    mark: Any = event.start_mark
    return int(mark.line) + 1
