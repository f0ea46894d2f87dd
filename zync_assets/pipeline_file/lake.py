"""The key ``lake``: a folder, an object store's URI, or a mapping of ``uri`` and what opens that store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from zync_assets.pipeline import LakeUri
from zync_assets.pipeline_file.fields import Fields, kind, listed, suggestion
from zync_assets.pipeline_file.source import Scalar, Table
from zync_assets.stores import GENERAL, KINDS, Kind, with_environment

DEFAULT_LAKE = "./lake"

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def read_lake(fields: Fields, path: Path, env: Mapping[str, str]) -> str:
    """An absolute path, or a ``LakeUri`` with its settings."""
    node = fields.node("lake")
    if isinstance(node, Table):
        return _of_mapping(Fields(node, "lake", fields.problems, None), path, env)
    if node is not None and not isinstance(node, Scalar):
        fields.problem("lake", f"must be a folder, a URI or a mapping with uri:, not {kind(node)}")
        return ""
    text = fields.text("lake") if node is not None else DEFAULT_LAKE
    return "" if text is None else _place(fields, "lake", text, {}, path, env)


def _of_mapping(lake: Fields, path: Path, env: Mapping[str, str]) -> str:
    settings = lake.flat()
    uri = settings.pop("uri", None)
    if uri is None:
        if "uri" not in lake:
            lake.problem("uri", "is missing; write the URI of the bucket and folder, as in s3://bucket/folder")
        return ""
    return _place(lake, "uri", uri, settings, path, env)


def _place(fields: Fields, key: str, text: str, settings: Mapping[str, str], path: Path, env: Mapping[str, str]) -> str:
    found = _URI.match(text)
    if found is None or found[1].lower() == "file":
        for name in settings:
            fields.problem(name, "is a setting of an object store, and the lake is a folder; remove it")
        return _folder(fields, key, text, path)
    store = KINDS.get(found[1].lower())
    if store is None:
        known = listed(f"{name}://" for name in KINDS)
        fields.problem(key, f"is in no kind of store that is known here; known are {known}, or write a folder")
        return ""
    if not text[found.end() :].strip("/"):
        fields.problem(key, "names no bucket or folder; write it as in s3://bucket/folder")
        return ""
    _check(fields, store, settings)
    uri = text.rstrip("/")
    return LakeUri(uri, with_environment(uri, settings, env))


def _check(fields: Fields, store: Kind, settings: Mapping[str, str]) -> None:
    for name in settings:
        if name not in store.settings and name not in GENERAL and not name.startswith(store.prefix):
            known = ("uri", *store.settings)
            fields.problem(
                name,
                f"is no setting of {store.name}; there are {listed(known)}, and delta-rs's own storage options"
                f" ({store.prefix}…){suggestion(name, known)}",
            )
    if "endpoint" in settings and not re.match(r"https?://[^\s/]", settings["endpoint"]):
        fields.problem("endpoint", "must begin with http:// or https:// and a host")
    if ("access-key-id" in settings) != ("secret-access-key" in settings):
        given, other = sorted(("access-key-id", "secret-access-key"), key=lambda name: name not in settings)
        fields.problem(given, f"takes {other}: beside it")


def _folder(fields: Fields, key: str, text: str, path: Path) -> str:
    if _URI.match(text):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            fields.problem(key, "a file: URI needs an absolute path, as in file:///data/lake; or write a folder")
        text = unquote(parts.path)
    try:
        return str((path.absolute().parent / Path(text).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError):
        fields.problem(key, "is no path that this system takes; write a folder")
        return ""
