"""Objects of an archive: JSON lines are read one by one, however large an object is."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from zync_assets.errors import LakeError
from zync_assets.lake.archive import ArchiveObject
from zync_assets.lake.archive_objects import check_object, json_line, read_lines, write_object


def test_json_lines_are_read_one_by_one(tmp_path: Path) -> None:
    item = ArchiveObject("t", "2026-11-23T03-00", 0, 0, 9999, ".jsonl.gz")
    values = random.Random(1)
    lines = [json_line({"kafka": {"offset": at}, "value": values.randbytes(100)}) for at in range(10_000)]
    path = tmp_path / item.path
    path.parent.mkdir(parents=True)
    content = gzip.compress(b"".join(lines), mtime=0)
    path.write_bytes(content[: len(content) // 2])
    rows = read_lines(str(tmp_path), item)
    assert next(rows)["kafka"]["offset"] == 0
    text = r"0-9999\.jsonl\.gz can't be read: .*\. Restore it from a copy\."
    with pytest.raises(LakeError, match=text):
        list(rows)
    for damage in (content[: len(content) // 2], b"{}", content[:100] + bytes(100) + content[200:]):
        path.write_bytes(damage)
        with pytest.raises(LakeError, match=text):
            check_object(str(tmp_path), item)
    path.write_bytes(content)
    check_object(str(tmp_path), item)
    write_object(str(tmp_path), "copy.jsonl.gz", [item.path])
    assert gzip.decompress((tmp_path / "copy.jsonl.gz").read_bytes()) == b"".join(lines)
