"""Python processes that this package needs beside its own: Spark's workers, a shared Spark server, a rehearsal.

None of them may import from the current folder. A user's file ``re.py`` there would stand in for Python's own ``re``.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import zync_assets

_ORIGIN = "import importlib.util as u; found = u.find_spec('zync_assets'); print(found.origin if found else '')"


def python_environment() -> dict[str, str]:
    """The environment variables with which a Python process imports this package, and nothing from the current folder."""
    return {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}


def python_path() -> str:
    """PYTHONPATH for a process in another folder: absolute, and with this package where it is not installed."""
    # Python takes an empty part for the current folder.
    given = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    root = Path(zync_assets.__file__).resolve().parents[1]
    own = [] if _is_installed(root) else [str(root)]
    return os.pathsep.join(dict.fromkeys([*own, *given]))


@functools.cache
def _is_installed(root: Path) -> bool:
    """Whether Python finds this package in ``root`` by itself. Of an editable install only Python knows."""
    if root.name in ("site-packages", "dist-packages"):
        return True
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = subprocess.run([sys.executable, "-P", "-c", _ORIGIN], env=bare, capture_output=True, text=True, check=False)
    return asked.stdout.strip() == str(root / "zync_assets" / "__init__.py")
