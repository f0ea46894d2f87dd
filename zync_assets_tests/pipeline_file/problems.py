"""A pipeline file as text, and the problem that an edit of the text causes."""

from __future__ import annotations

from pathlib import Path

import pytest

from zync_assets.errors import PipelineFileError
from zync_assets.pipeline import Pipeline
from zync_assets.pipeline_file import load


def loaded(folder: Path, text: str) -> Pipeline:
    """The pipeline of the text."""
    path = folder / "shop.yaml"
    path.write_text(text)
    return load(path, {"SCHEMA_REGISTRY_URL": "http://localhost:8081"})


def assert_problem(folder: Path, text: str, old: str, new: str, line: int, message: str) -> None:
    """Assert that the text with ``new`` in place of ``old`` has a problem in that line with that message."""
    assert old in text
    with pytest.raises(PipelineFileError) as raised:
        loaded(folder, text.replace(old, new, 1))
    found = [(problem.line, f"{problem.key}: {problem.message}") for problem in raised.value.problems]
    assert any(at == line and message in text for at, text in found), found
