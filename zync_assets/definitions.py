"""The module that Dagster loads: the asset graph of one pipeline. Needs no network and no JVM.

Two environment variables configure the module. ``ZYNC_PIPELINE`` is the pipeline file; default: the first demo's file. A file of
the folder ``demo`` has the services and the lake of `zync demo`, unless the environment names others. ``ZYNC_SENSOR`` is
``running`` or ``stopped``, the sensor's state at the start; default: running for the demo's files only.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dagster import Definitions, in_process_executor

from zync_assets.errors import SetupError
from zync_assets.local.services import demo_environment, demo_folder


def load_definitions(env: Mapping[str, str] | None = None) -> Definitions:
    """The definitions that the environment asks for. ``env``: the variables; None: of this process.

    Raises PipelineFileError for a broken file; SetupError where there is none, or for a ZYNC_SENSOR that is neither.
    """
    with _no_collector():
        return _load(os.environ if env is None else env)


@contextmanager
def _no_collector() -> Generator[None]:
    """Within it, Python's garbage collector is off.

    Each run of Dagster loads this module. Modules and definitions are objects that stay, and the collector would look at all of
    them again and again: a tenth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(env: Mapping[str, str]) -> Definitions:
    # With the collector off.
    from zync_assets.assets.build import build_definitions
    from zync_assets.pipeline_file import load

    path_text = env.get("ZYNC_PIPELINE")
    if env.get("ZYNC_SENSOR") not in (None, "", "running", "stopped"):
        raise SetupError(f"ZYNC_SENSOR is {env['ZYNC_SENSOR']!r}; it must be running or stopped.")
    path = _existing_path(Path(path_text).expanduser()) if path_text else demo_folder() / "invoices.yaml"
    is_demo = not path_text or _is_demo(path)
    sensor = env.get("ZYNC_SENSOR") or ("running" if is_demo else "stopped")
    overrides = env if path_text else {}
    pipeline = load(path, {**demo_environment(), **overrides} if is_demo else env)
    definitions = build_definitions(pipeline, sensor_running=sensor == "running")
    # The executor of a run without one of the jobs, as from Dagster's UI: such a run has one Spark session too.
    return Definitions.merge(definitions, Definitions(executor=in_process_executor))


def _existing_path(path: Path) -> Path:
    """The path of an existing file. Looks for a relative path in the current folder, then beside the package."""
    for place in (path, Path(__file__).resolve().parents[1] / path):
        if place.is_file():
            return place
    raise SetupError(f"ZYNC_PIPELINE is {path}, and there is no such file (looked in {Path.cwd()}).")


def _is_demo(path: Path) -> bool:
    """Whether a pipeline file is one of the demos."""
    with suppress(SetupError):
        return path.resolve().parent == demo_folder().resolve()
    return False


defs = load_definitions()
