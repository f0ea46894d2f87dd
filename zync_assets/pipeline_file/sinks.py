"""The key ``sinks`` of a pipeline file: target databases, and the tables that are kept in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

from zync_assets.errors import Problem
from zync_assets.lake import stores
from zync_assets.pipeline import KAFKA, Evolve, Input, LakeUri, OnBadRecord, Output, Sink, SinkMode, SinkTable
from zync_assets.pipeline_file.conditions import is_of_key
from zync_assets.pipeline_file.expressions import RECORD_ROOTS, check_expression
from zync_assets.pipeline_file.fields import (
    Fields,
    authority_fault,
    kind,
    one_slash,
    option_fault,
    suggestion,
    tables,
    word_list,
)
from zync_assets.pipeline_file.key import SINK_HINTS, Key, known_names
from zync_assets.pipeline_file.source import Items, Scalar, YamlTable

FILES = "files"

SCHEMES: Mapping[str, tuple[str, ...]] = {
    "sqlite": ("sqlite:///",),
    "postgres": ("postgresql://", "postgres://"),
    "clickhouse": ("clickhouse://", "chdb:///"),
    "databend": ("databend://",),
    "mysql": ("mysql://", "mariadb://"),
    FILES: (),
}
"""Type of a sink → how its URL begins. The path of a file is a URL of SQLite too, and that of a folder one of files."""

COORDINATES = ("topic", "partition", "offset")
"""The parts of `kafka` that a key may name."""

_NAME = re.compile(r"[A-Za-z0-9_]+")
_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*")
_PLACE = re.compile(r"\{([^{}]*)\}")

_COLUMNS = (
    Key(
        "include",
        "a list of columns",
        "The columns to write. The key columns are written in any case.",
        "columns: {include: [ID, customer]}",
        default="all columns",
    ),
    Key(
        "rename",
        "a mapping of columns to columns",
        "The names that columns of the source have in the table.",
        "columns: {rename: {customer: customer_name}}",
        default="none",
        open=True,
    ),
)
_BEFORE = (
    Key(
        "where",
        "a condition in Spark SQL",
        "What to write; null counts as no. It sees `kafka`, `key` and `value`. A row that does not meet it any more is deleted.",
        "before: {where: value.ID > 0}",
        default="everything",
    ),
    Key(
        "set",
        "a mapping of columns to expressions",
        "Columns that are made, or replaced, by an expression in Spark SQL.",
        "before: {set: {origin: kafka.topic}}",
        default="none",
        open=True,
    ),
    Key(
        "function",
        "package.module:function",
        "A Python function from an Arrow batch of the columns to one of as many rows, in the same order, with the same keys. Its"
        " module is installed, or its folder is in PYTHONPATH.",
        "before: {function: 'shop.sinks:clean'}",
        default="none",
    ),
)
SINK = (
    Key("name", "letters, digits and _", "The name of the sink.", "name: warehouse", required=True),
    Key(
        "type",
        "a type of target, or package.module:Class",
        "The kind of the target database. A class of one's own extends `zync_assets.sinks.target.Target`.",
        "type: sqlite",
        required=True,
    ),
    Key(
        "url",
        "a URL",
        "The address of the target database. It may hold a password, and is in no log and no error.",
        "url: shop.db",
        required=True,
    ),
    Key(
        "from",
        "a list of `Pool.Topic`",
        "The sources: staged topics, or raw tables as they are. `*` stands for any characters.",
        "from: [Staging.*]",
        required=True,
    ),
    Key(
        "table",
        "a name with {topic} in it",
        "The table of a source. `{topic}` is the last part of the topic's name, `{whole-topic}` the whole name with _ for each"
        " dot.",
        "table: 'shop.{topic}'",
        default="{topic}",
    ),
    Key(
        "mode",
        "one of the allowed values",
        "`upsert` keeps one row per key. `insert` appends every record with its topic, partition and offset.",
        "mode: insert",
        default="upsert",
        allowed=get_args(SinkMode),
    ),
    Key(
        "key",
        "a list of columns",
        "The key columns: fields of the record's key, else of its value, or `kafka.topic`, `kafka.partition`, `kafka.offset`. One"
        " name also names a key that is a single value.",
        "key: [ID]",
        default="the fields of the record's key; with `insert` the coordinates in Kafka",
    ),
    Key(
        "columns",
        "a mapping",
        "The columns to write, and their names in the table.",
        "columns: {include: [ID, customer], rename: {customer: customer_name}}",
        default="all columns, under their own names",
        keys=_COLUMNS,
    ),
    Key(
        "before",
        "a mapping",
        "Filters and changes the records before they are written.",
        "before: {where: value.ID > 0, set: {origin: kafka.topic}}",
        default="none",
        keys=_BEFORE,
    ),
    Key(
        "create",
        "true or false",
        "Makes a table that is missing, with a primary key and comments.",
        "create: false",
        default="true",
        allowed=("true", "false"),
    ),
    Key(
        "evolve",
        "one of the allowed values",
        "The changes of a table that the sink may make. `own` adds columns to a table that a sink of the pipeline made, `add` to"
        " every table. `widen` also widens the types of columns.",
        "evolve: add",
        default="own, or none with create: false",
        allowed=get_args(Evolve),
    ),
    Key(
        "delete",
        "true or false",
        "Whether tombstones, and Debezium's deletes, delete rows. If not, they are left out.",
        "delete: false",
        default="true",
        allowed=("true", "false"),
    ),
    Key(
        "on-bad-record",
        "one of the allowed values",
        "The effect of a record that the target refuses. `quarantine` notes it with the target's message, `fail` stops.",
        "on-bad-record: fail",
        default="quarantine",
        allowed=get_args(OnBadRecord),
    ),
    Key(
        "max-bad-records",
        "a whole number",
        "The highest number of records of a source in the sink's quarantine. The table stops before one more.",
        "max-bad-records: 100",
        default="no limit",
    ),
)
SINKS = Key(
    "sinks",
    "a list of mappings",
    "The target databases that zync writes to itself, exactly once, with the tables that it keeps there.",
    "sinks: [{name: warehouse, type: sqlite, url: shop.db, from: [Staging.NewInvoices]}]",
    default="none",
    keys=SINK,
)


def read_sinks(
    fields: Fields, inputs: Mapping[str, Input | None], outputs: Mapping[str, Output | None], path: Path
) -> tuple[Sink, ...]:
    """The sinks of a file. ``inputs`` and ``outputs``: by topic; ``path``: the file's, where paths of databases begin."""
    node = fields.node("sinks")
    if node is None:
        return ()
    if not isinstance(node, Items | YamlTable):
        fields.problem("sinks", f"must be a list, not {kind(node)}; write a list of {{name: ..., type: ..., url: ...}}")
        return ()
    sources = [SinkTable(item.pool, item.topic, "", staged=False) for item in inputs.values() if item is not None]
    sources += [SinkTable(item.pool, item.topic, "", staged=True) for item in outputs.values() if item is not None]
    # A source with a problem of its own is not known here, and the file is refused anyway.
    is_whole = all(item is not None for item in (*inputs.values(), *outputs.values()))
    sinks: dict[str, Sink] = {}
    for place, table in tables(node, "sinks", fields.problems):
        item = Fields(table, place, fields.problems, known_names(SINK), SINK_HINTS)
        sink = _sink(item, sources, path, is_whole=is_whole)
        if sink.name and sink.name in sinks:
            item.problem("name", f"`{sink.name}` is the name of another sink; give each sink a name of its own")
        if sink.name == KAFKA or sink.name in {source.pool for source in sources}:
            use = "is reserved for Kafka's topics" if sink.name == KAFKA else "is the name of a pool"
            item.problem("name", f"`{sink.name}` {use}; the assets of a sink need a name of their own")
        for rival in sinks.values():
            _check_sharing(item, sink, rival)
        sinks[sink.name] = sink
    return tuple(sinks.values())


def _sink(item: Fields, sources: list[SinkTable], path: Path, *, is_whole: bool) -> Sink:
    name = item.text("name", "write a name for the sink") or ""
    if name and not _NAME.fullmatch(name):
        item.problem("name", "must consist of letters, digits and _")
    sink_type = _type(item)
    mode = item.choice("mode", get_args(SinkMode)) or ("insert" if sink_type == FILES else "upsert")
    columns, before = _nested_fields(item, "columns", _COLUMNS), _nested_fields(item, "before", _BEFORE)
    include = columns.names("include") if columns is not None and "include" in columns else None
    limit = item.integer("max-bad-records", 0, 2**53) if "max-bad-records" in item else None
    on_bad_record = item.choice("on-bad-record", get_args(OnBadRecord)) or "quarantine"
    if limit is not None and on_bad_record == "fail":
        item.problem("max-bad-records", "has no effect, because on-bad-record: fail stops before the first; remove it")
    if sink_type == FILES:
        _check_files(item, mode, before)
    create = item.flag("create") if "create" in item else True
    return Sink(
        name,
        sink_type,
        _url(item, sink_type, path),
        _tables(item, sources, sink_type, is_whole=is_whole),
        mode,
        _key(item),
        None if include is None else tuple(include),
        {} if columns is None else _rename(columns),
        None if before is None else _condition(before),
        {} if before is None else _added_columns(before),
        None if before is None else _function(before),
        create=create,
        evolve=item.choice("evolve", get_args(Evolve)) or ("own" if create else "none"),
        delete=item.flag("delete") if "delete" in item else True,
        on_bad_record=on_bad_record,
        max_bad_records=limit,
    )


def _check_sharing(item: Fields, sink: Sink, rival: Sink) -> None:
    """A problem for two sinks that upsert one source into one table: each sink deletes rows of the other. Conditions on the key
    divide the rows between the sinks. Objects with the same names are a problem too: one would stand for the other."""
    folders = [writer.url.partition("?")[0].rstrip("/") for writer in (sink, rival)]
    names = {table.name for table in rival.tables}
    twins = [table for table in sink.tables if table.name in names]
    if sink.kind == rival.kind == FILES and folders[0] and folders[0] == folders[1] and twins:
        item.problem(
            "url",
            f"is the folder of sink {rival.name} too, and the objects of {twins[0].source} would have the names of that sink's"
            f" objects in {twins[0].name}; write one sink for both, or give one another url or table",
        )
    tables = [table for table in twins if table in rival.tables]
    targets = [(writer.kind, writer.url, writer.mode, writer.key, writer.rename) for writer in (sink, rival)]
    if not tables or targets[0] != targets[1] or sink.mode == "insert" or not (sink.delete or rival.delete):
        return
    if not all(writer.where is not None and is_of_key(writer.where) for writer in (sink, rival)):
        item.problem(
            "table",
            f"{tables[0].name} gets the rows of {tables[0].source} from sink {rival.name} too, and each of the two would delete"
            " rows of the other; write one sink for both, give one another table, or let each have a condition on the key"
            " alone, such as before: {where: key.id < 1000}",
        )


def _check_files(item: Fields, mode: SinkMode, before: Fields | None) -> None:
    """Objects have whole records. What would change rows has no meaning."""
    if mode != "insert":
        item.problem("mode", "must be insert: objects are never changed")
    useless = [key for key in ("key", "columns", "delete", "evolve") if key in item]
    for fields, keys in ((item, useless), (before, [key for key in ("set", "function") if before and key in before])):
        for key in keys:
            if fields is not None:
                fields.problem(key, "has no effect, because type: files keeps whole records; remove it")


def _type(item: Fields) -> str:
    text = item.text("type", f"write one of {word_list(SCHEMES)}") or ""
    if text and text not in SCHEMES and not _CLASS.fullmatch(text):
        item.problem(
            "type",
            f"must be one of {word_list(SCHEMES)}, or a class as package.module:Class{suggestion(text, SCHEMES)}",
        )
    return text


def _url(item: Fields, sink_type: str, path: Path) -> str:
    """The URL, never repeated in a message: it may hold a password."""
    url = item.text("url", "write the address of the target database") or ""
    file = url.removeprefix("sqlite:///")
    if sink_type == "sqlite" and file and "://" not in file:
        return f"sqlite:///{(path.absolute().parent / Path(file).expanduser()).resolve()}"
    if sink_type == FILES:
        return _files_url(item, url, path) if url else ""
    starts = SCHEMES.get(sink_type, ())
    if url and starts and (not url.startswith(starts) or not file):
        form = "a file's path, or sqlite:////path" if sink_type == "sqlite" else f"{starts[0]}user:password@host/db"
        item.problem("url", f"is no address of a {sink_type} database; write {form}")
    elif starts and (fault := authority_fault(url) or option_fault(sink_type, url)) is not None:
        item.problem("url", fault)
    return url


def _files_url(item: Fields, url: str, path: Path) -> str:
    """The absolute path of a folder, or the URI of a bucket with the settings that open it."""
    base, mark, query = url.partition("?")
    # Here alone: these load pyarrow, which the reference of the keys does without.
    from zync_assets.lake import archive, storage

    if storage.is_store(base):
        if stores.scheme(base) not in stores.KINDS:
            names = word_list(f"{name}://" for name in stores.KINDS)
            item.problem("url", f"is in no kind of store that is known here; known are {names}, or write a folder")
            return ""
        url = LakeUri(url, stores.with_environment(base, {}, os.environ))
    elif fault := one_slash(base):
        item.problem("url", fault)
    else:
        url = f"{(path.absolute().parent / Path(base).expanduser()).resolve()}{mark}{query}"
    try:
        archive.parse_url(url)
    except ValueError as error:
        item.problem("url", str(error))
    return url


def _tables(item: Fields, sources: list[SinkTable], sink_type: str, *, is_whole: bool) -> tuple[SinkTable, ...]:
    if "from" not in item:
        item.problem("from", "is missing; name the sources, a list of Pool.Topic")
    is_files = sink_type == FILES
    template = item.text("table") or "{topic}" if "table" in item else "{name}" if is_files else "{topic}"
    parts = template.split(".")
    if is_files and "/" in template:
        item.problem("table", "must be the name of one folder, without /")
    elif not is_files and sink_type in SCHEMES and (len(parts) > 2 or not all(parts)):
        item.problem("table", f"is {template}; write a table as `table` or `schema.table`")
    for place in _PLACE.findall(template):
        if place not in ("topic", "whole-topic") and "table" in item:
            item.problem("table", f"knows no {{{place}}}; write {{topic}} or {{whole-topic}}")
    table_by_name: dict[str, SinkTable] = {}
    for pattern in item.names("from"):
        matches = [source for source in sources if fnmatchcase(source.source, pattern)]
        if not matches and is_whole:
            names = [source.source for source in sources]
            item.problem("from", f"{pattern} is no source; there are {word_list(names)}{suggestion(pattern, names)}")
        for source in matches:
            place = {
                "topic": source.topic.rpartition(".")[2],
                "whole-topic": source.topic.replace(".", "_"),
                "name": source.topic,
            }
            name = _PLACE.sub(lambda match, place=place: place.get(match[1], ""), template)
            twin = table_by_name.get(name)
            if twin is not None and twin.source != source.source:
                item.problem(
                    "table",
                    f"gives {twin.source} and {source.source} the same table {name}; write {{whole-topic}}, or a sink for"
                    " each",
                )
            if not is_files and name.rpartition(".")[2].lower().startswith("zync_"):
                item.problem(
                    "table", f"gives {source.source} the table {name}; names with zync_ are zync's own tables'"
                )
            table_by_name[name] = SinkTable(source.pool, source.topic, name, source.staged)
    return tuple(table_by_name.values())


def _nested_fields(item: Fields, key: str, keys: tuple[Key, ...]) -> Fields | None:
    table = item.table(key)
    return None if table is None else Fields(table, item.key(key), item.problems, known_names(keys))


def _key(item: Fields) -> tuple[str, ...]:
    names = item.names("key")
    for name in names:
        side, dot, column = name.partition(".")
        if dot and side == KAFKA and column not in COORDINATES:
            coordinates = word_list(f"kafka.{coordinate}" for coordinate in COORDINATES)
            item.problem("key", f"names {name}, which no record has; of Kafka there are {coordinates}")
    return tuple(names)


def _rename(columns: Fields) -> dict[str, str]:
    table = columns.table("rename")
    if table is None:
        return {}
    new_names = Fields(table, columns.key("rename"), columns.problems, None).flat()
    twice = [name for name in new_names.values() if list(new_names.values()).count(name) > 1]
    if twice:
        columns.problem("rename", f"gives the name {twice[0]} to two columns")
    return new_names


def _condition(before: Fields) -> str | None:
    sql = before.text("where") if "where" in before else None
    for message in check_expression(sql, RECORD_ROOTS) if sql is not None else ():
        before.problem("where", message)
    return sql


def _added_columns(before: Fields) -> dict[str, str]:
    table = before.table("set")
    return {} if table is None else dict(_expressions(table, before.key("set"), before.problems))


def _expressions(table: YamlTable, path: str, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    for entry in table.entries:
        entry_path = f"{path}.{entry.key}"
        if not isinstance(entry.node, Scalar) or entry.node.value is None:
            problems.append(Problem(entry.line, entry_path, f"must be one expression, not {kind(entry.node)}"))
            continue
        problems.extend(
            Problem(entry.line, entry_path, message) for message in check_expression(entry.node.text, RECORD_ROOTS)
        )
        yield entry.key, entry.node.text


def _function(before: Fields) -> str | None:
    name = before.text("function") if "function" in before else None
    if name is not None and not _CLASS.fullmatch(name):
        before.problem("function", "must name a function, as in package.module:function")
    return name
