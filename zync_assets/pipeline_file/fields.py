"""Typed access to a mapping of a pipeline file: each wrong key or value becomes a problem, with what would be right.

No message repeats a value that came from the environment, nor one from a section that may hold secrets.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

from zync_assets.errors import Problem
from zync_assets.pipeline_file.source import Items, Node, Scalar, YamlEntry, YamlTable

Choice = TypeVar("Choice", bound=str)

UNNAMED = ""
"""In place of the topic of an input or an output that a problem keeps from being known."""
TLS_FILES = ("ssl_ca", "ssl_cert", "ssl_key")
TLS_SWITCHES = ("ssl_disabled", "ssl_verify_cert", "ssl_verify_identity")
MYSQL_OPTIONS = (
    *TLS_FILES,
    *TLS_SWITCHES,
    *("connect_timeout", "read_timeout", "write_timeout", "charset", "collation", "unix_socket", "bind_address"),
    *("init_command", "program_name", "read_default_file", "read_default_group"),
)
"""Options of a URL of MySQL: those of TLS that the sink reads, and those of PyMySQL that are texts or seconds."""
_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_MILLIS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_HINTED = re.compile(r"([\w-]+):")
"""The keys that a hint names."""
_LAST_PORT = 65_535
_HTTP = re.compile(r"https?://[^\s/]")
_DURATION = re.compile(r"([0-9]{1,6})\s?([smhdw])")


def suggestion(word: str, words: Iterable[str]) -> str:
    """``; did you mean `x`?`` or nothing."""
    closest_word = _closest(word, words)
    return f"; did you mean `{closest_word}`?" if closest_word is not None else ""


def _closest(word: str, words: Iterable[str]) -> str | None:
    candidates = list(words)
    matches = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    if not matches:
        lower_case = {item.lower(): item for item in candidates}
        matches = [
            lower_case[item] for item in difflib.get_close_matches(word.lower(), list(lower_case), n=1, cutoff=0.6)
        ]
    return matches[0] if matches else None


def word_list(words: Iterable[str]) -> str:
    """``a, b, c``, or ``none`` where there is nothing to list. UNNAMED is left out."""
    return ", ".join(filter(None, words)) or "none"


def authority_fault(url: str) -> str | None:
    """The fault of a URL's user, password, host and port, without their text; None if there is none.

    A password with a bare @ or / would end up in the host's name, which errors show and DNS is asked for.
    """
    authority, *remainder = re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)
    user, at, hosts = authority.rpartition("@")
    cure = "In a user or a password, write @ as %40, : as %3A, / as %2F, ? as %3F and # as %23"
    if "@" in user or (at and ":" in user.partition(":")[2]) or any("@" in text for text in remainder):
        return f"has an @ or a : too many. {cure}"
    for host in hosts.split(","):
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if name and port and not port.isdigit():
            return f"has a port that is no number. Write host:port. {cure}"
        if name and port and int(port) > _LAST_PORT:
            return f"has a port above {_LAST_PORT}. Write host:port"
    return None


def http_fault(urls: str) -> str | None:
    """The fault of one or more addresses of HTTP, without their text; None if there is none."""
    for url in urls.split(","):
        if not _HTTP.match(url.strip()):
            return "must begin with http:// or https:// and a host"
        try:
            _ = urlsplit(url.strip()).port
        except ValueError:
            return "has a host or a port that is none; write it as http://host:8081. In a password, write / as %2F"
    return None


def one_slash(folder: str) -> str | None:
    """The fault of a folder that begins as a URI of a bucket with one slash; None for another folder."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)", folder)
    return f"has one / after {match[1]}:; write {match[1]}:// for a bucket, or ./ before a folder" if match else None


def option_fault(sink_type: str, url: str) -> str | None:
    """The fault of the options in a URL of MySQL or PostgreSQL, without their values; None if there is none.

    >>> option_fault("mysql", "mysql://h/d?char_set=utf8mb4")
    'has the option char_set, which is unknown; did you mean `charset`?'
    """
    if sink_type not in ("mysql", "postgres"):
        return None
    options = parse_qsl(url.partition("?")[2], keep_blank_values=True)
    names = [name for name, _ in options]
    if sink_type == "mysql":
        for name in names:
            if name not in MYSQL_OPTIONS:
                hint = suggestion(name, MYSQL_OPTIONS) or f"; known are {word_list(MYSQL_OPTIONS)}"
                return f"has the option {name}, which is unknown{hint}"
            if names.count(name) > 1:
                return f"has the option {name} twice; write it once"
    for name, value in options:
        if name.endswith("_timeout") and not re.fullmatch(
            "[1-9][0-9]{0,6}" if sink_type == "mysql" else "-?[0-9]+", value
        ):
            return f"has the option {name}, which must be a whole number of seconds"
        if name in TLS_SWITCHES and value.lower() not in ("true", "false"):
            return f"has the option {name}, which must be true or false"
        if name == "sslmode" and value not in _SSL_MODES:
            return (
                f"has the option sslmode, which must be one of {word_list(_SSL_MODES)}{suggestion(value, _SSL_MODES)}"
            )
    return None


def kind(node: Node) -> str:
    """The kind of a node in words, without the node's value."""
    if isinstance(node, Items):
        return "a list"
    if isinstance(node, YamlTable):
        return "a mapping"
    value = node.value
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "a boolean"
    return "a number" if isinstance(value, int | float) else "text"


class Fields:
    """The keys of one mapping. Making it reports the keys that are not in ``names``; ``hints`` has a cure for some.

    A misspelt key counts as the key that it means. The misspelt key is then the only problem.
    ``places``: key → its path in the file, for keys of another mapping.
    """

    def __init__(
        self,
        node: YamlTable,
        path: str,
        problems: list[Problem],
        names: Sequence[str] | None,
        hints: Mapping[str, str] | None = None,
        places: Mapping[str, str] | None = None,
    ) -> None:
        self.line = node.line
        self.path = path
        self.places = places or {}
        self.problems = problems
        self.entries: dict[str, YamlEntry] = {entry.key: entry for entry in node.entries}
        if names is None:
            return
        for entry in node.entries:
            if entry.key in names:
                continue
            hint = (hints or {}).get(entry.key)
            absent = [name for name in names if name not in self.entries]
            words = _HINTED.findall(hint) if hint else [_closest(entry.key, absent)]
            meant = [name for name in absent if name in words]
            cure = f"; {hint}" if hint else suggestion(entry.key, absent) or f"; known here: {word_list(names)}"
            explains = tuple(map(self.key, (entry.key, *meant)))
            problems.append(Problem(entry.line, explains[0], f"is no key that is known here{cure}", explains))
            if len(meant) == 1:
                self.entries[meant[0]] = replace(entry, key=meant[0])

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def key(self, key: str) -> str:
        """The path of a key in the file, such as ``outputs[0].topic``."""
        return self.places.get(key) or (f"{self.path}.{key}" if self.path else key)

    def line_of(self, key: str) -> int:
        """The line of a key; of the mapping where the key is missing."""
        return self.entries[key].line if key in self.entries else self.line

    def problem(self, key: str, message: str) -> None:
        """A problem with a key; a missing one is reported on the mapping's first line."""
        self.problems.append(Problem(self.line_of(key), self.key(key) if key else self.path, message))

    def node(self, key: str) -> Node | None:
        """The node of a key; None where the key is missing."""
        return self.entries[key].node if key in self.entries else None

    def text(self, key: str, hint: str | None = None) -> str | None:
        """Text that is not empty. ``hint``: what to write where the key is missing; None: it may be."""
        node = self.node(key)
        if node is None:
            if hint is not None:
                self.problem(key, f"is missing; {hint}")
            return None
        if not isinstance(node, Scalar):
            self.problem(key, f"must be text, not {kind(node)}")
            return None
        value = node.value
        if value is None or node.text.strip() == "":
            self.problem(key, f"is empty; {hint or 'write a value, or leave the key out'}")
            return None
        if not isinstance(value, str) and not node.has_variable:
            self.problem(key, f"must be text, not {kind(node)}; put it in quotes")
            return None
        return node.text

    def choice(self, key: str, choices: Sequence[Choice]) -> Choice | None:
        """One of some words; None where the key is missing or wrong."""
        word = self.text(key)
        if word is None:
            return None
        for item in choices:
            if word == item:
                return item
        self.problem(key, f"must be one of {word_list(choices)}{suggestion(word, choices)}")
        return None

    def integer(self, key: str, minimum: int, maximum: int) -> int | None:
        """A whole number within two bounds, both included; None where the key is missing or wrong."""
        node = self.node(key)
        if node is None:
            return None
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.problem(key, f"must be a whole number from {minimum} to {maximum}")
            return None
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where the key is missing."""
        node = self.node(key)
        if node is None:
            return False
        value = node.value if isinstance(node, Scalar) else None
        if not isinstance(value, bool):
            self.problem(key, "must be true or false")
            return False
        return value

    def number(self, key: str) -> float | None:
        """A finite number that is not negative."""
        node = self.node(key)
        if node is None:
            return None
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            self.problem(key, "must be a number that is not negative")
            return None
        return float(value)

    def duration(self, key: str) -> int | None:
        """A time such as 30d, in milliseconds."""
        node = self.node(key)
        if node is None:
            return None
        match = _DURATION.fullmatch(node.text.strip()) if isinstance(node, Scalar) else None
        if match is None or not int(match[1]):
            self.problem(key, "must be a time, such as 90m, 12h, 30d or 8w")
            return None
        return int(match[1]) * _MILLIS[match[2]]

    def names(self, key: str) -> list[str]:
        """A list of texts that are not empty; one text counts as a list of one."""
        node = self.node(key)
        if node is None:
            return []
        items = node.items if isinstance(node, Items) else (node,)
        names = [item.text for item in items if isinstance(item, Scalar) and isinstance(item.value, str) and item.text]
        if len(names) != len(items) or not names:
            self.problem(key, "must be a list of names, such as [ID]")
            return []
        if len(set(names)) != len(names):
            self.problem(key, "has a name twice")
        return names

    def table(self, key: str, form: str = "") -> YamlTable | None:
        """A mapping. ``form``: what to write in place of another node."""
        node = self.node(key)
        if node is None or isinstance(node, YamlTable):
            return node
        self.problem(key, f"must be a mapping, not {kind(node)}{form and f'; write {form}'}")
        return None

    def flat(self) -> dict[str, str]:
        """All keys as properties: scalars only, booleans as ``true`` and ``false``, numbers as the file writes them."""
        properties: dict[str, str] = {}
        for entry in self.entries.values():
            if not isinstance(entry.node, Scalar):
                self.problem(entry.key, f"must be one value, not {kind(entry.node)}")
                continue
            value = entry.node.value
            if value is None:
                self.problem(entry.key, "is empty; write a value, or leave the key out ('' for empty text)")
            elif isinstance(value, bool):
                properties[entry.key] = "true" if value else "false"
            else:
                properties[entry.key] = entry.node.text
        return properties


def tables(node: Node | None, path: str, problems: list[Problem], form: str = "") -> list[tuple[str, YamlTable]]:
    """(path, mapping) for each mapping of a list. A single mapping counts as a list of one. ``form``: as ``Fields.table``."""
    if isinstance(node, YamlTable):
        return [(path, node)]
    if not isinstance(node, Items):
        return []
    mappings: list[tuple[str, YamlTable]] = []
    for index, item in enumerate(node.items):
        item_path = f"{path}[{index}]"
        if isinstance(item, YamlTable):
            mappings.append((item_path if item.at is None else f"{path}[{item.at}]", item))
        else:
            message = f"must be a mapping, not {kind(item)}{form and f'; write {form}'}"
            problems.append(Problem(item.line, item_path, message))
    return mappings
