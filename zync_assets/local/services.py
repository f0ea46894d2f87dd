"""Starts, finds, stops and removes a user's own Kafka broker and schema registry on 127.0.0.1.

The files of both services lie in one folder, the state folder. This module never touches processes of other folders, nor
files that were in the folder before. The demo has a state folder of its own, which is found here too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil
from filelock import FileLock

from zync_assets.errors import SetupError
from zync_assets.local import java, processes, startup
from zync_assets.local.startup import (
    FILE,
    LABELS,
    NAMES,
    Name,
    Setup,
    State,
    await_ready,
    check_free,
    launch,
    load,
    running,
    settle,
)

LOCK = "services.lock"
TARGET_URL = "ZYNC_TARGET_URL"
"""The environment variable with the address of the demo's target database."""
NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Services:
    """Where the services are. A pid is None while a service does not run; its address is then the last one.

    ``lake`` is the folder that ``down(clean=True)`` removes together with them.
    """

    bootstrap_servers: str
    registry_url: str
    state_dir: Path
    lake: Path
    kafka_pid: int | None
    registry_pid: int | None

    @property
    def running(self) -> bool:
        """Whether both run."""
        return self.kafka_pid is not None and self.registry_pid is not None


def up(
    state_dir: Path,
    *,
    kafka_port: int | None = None,
    registry_port: int | None = None,
    lake: Path | None = None,
    broker_properties: Mapping[str, str] = NO_PROPERTIES,
) -> Services:
    """Start the services that do not run yet, and return when both services answer.

    ``kafka_port`` and ``registry_port`` default to the ports of the last start, or to free ports if these are occupied.
    ``lake`` is the folder that belongs to the services (default: ``lake`` in the state folder). The folder must be missing
    or empty at the first start. ``broker_properties`` are further Kafka broker settings.

    Raises SetupError for a missing Java, for missing jars without a network, for an occupied port, and for a service that
    does not start (with its last log lines). A failed call stops the services that it has started.
    """
    home = state_dir.expanduser().resolve()
    ports: dict[Name, int | None] = {"kafka": kafka_port, "registry": registry_port}
    with _folder_lock(home):
        state = _open(home, lake)
        missing_services: list[Name] = [name for name in NAMES if not _runs(home, state, name, ports[name])]
        for name in NAMES:
            if name not in missing_services:
                await_ready(home, state, name)
        if not missing_services:
            return _services(home, state)
        for name in missing_services:
            check_free(name, ports[name])
        tool = java.find_java()
        setup = Setup(home, tool, java.resolve(tool), ports, broker_properties)
        try:
            for name in missing_services:
                state = launch(setup, state, name)
            for name in missing_services:
                state = settle(setup, state, name)
        except BaseException:
            _stop(load(home), missing_services, gently=True)
            raise
        return _services(home, state)


def status(state_dir: Path) -> Services | None:
    """The services of a state folder that run; None for a folder without services."""
    home = state_dir.expanduser().resolve()
    state = load(home)
    return None if state is None else _services(home, state)


def down(state_dir: Path, *, clean: bool = False) -> bool:
    """Stop the services of that folder, and with ``clean`` remove their topics, their schemas and their lake.

    Returns whether there was something to stop or to remove. Raises SetupError when it can't be done.
    """
    home = state_dir.expanduser().resolve()
    if load(home) is None:
        return False
    with _folder_lock(home):
        state = load(home)
        any_ran = _stop(state, NAMES, gently=not clean)
        if clean:
            if state is not None:
                _remove(state, home)
            # The lock's file goes last, and the folder only when nobody put anything else there.
            (home / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                home.rmdir()
    return any_ran or (clean and state is not None)


@contextlib.contextmanager
def _folder_lock(home: Path) -> Generator[None]:
    """One ``up`` or ``down`` of a folder at a time."""
    try:
        lock = _acquire(home)
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        raise SetupError(f"The folder {home} can't be used for the local services: {error}.") from error


def _acquire(home: Path) -> FileLock:
    """The lock of the folder, held; the folder is made where it is missing."""
    lock = FileLock(home / LOCK)
    while True:
        try:
            home.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            # Another process that cleans may take the folder away between the two looks of mkdir.
            if home.is_file() or home.is_symlink():
                raise
        # It may also do so while this process waits: begin again.
        with contextlib.suppress(FileNotFoundError):
            lock.acquire()
            return lock


def _open(home: Path, lake: Path | None) -> State:
    """The state of the folder, or a new state. SetupError if the folders of a new state hold foreign files."""
    lake_path = None if lake is None else str(lake.expanduser().resolve())
    state = load(home)
    if state is None:
        state = State(lake=lake_path or str(home / "lake"))
        for path in (home / "kafka", home / "registry", Path(state.lake)):
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise SetupError(
                    f"{path} holds something that these services did not make: choose another folder, or move it."
                )
    elif lake_path not in (None, state.lake):
        raise SetupError(
            f"The services in {home} belong to the lake {state.lake}, not to {lake_path}: "
            f"choose another folder for another lake, or remove them: {command('down', home, '--clean')}"
        )
    return state


def command(name: str, home: Path, *options: str) -> str:
    """A ``zync local`` command for the services in a folder, whole, so that it works when pasted into a shell."""
    return f"zync local {name} {shlex.join(['--dir', str(home), *options])}"


def _runs(home: Path, state: State, name: Name, port: int | None) -> bool:
    entry = state.entry(name)
    if entry is None or running(state, name) is None:
        return False
    if port not in (None, entry.port):
        raise SetupError(
            f"{LABELS[name]} runs already, on port {entry.port} and not on {port}: "
            f"stop it first: {command('down', home)}"
        )
    return True


def _stop(state: State | None, names: Iterable[Name], *, gently: bool) -> bool:
    """Stop these services at the same time; whether any of them ran."""
    pids = [running(state, name) for name in names] if state else []
    targets = [psutil.Process(pid) for pid in pids if pid is not None]
    processes.stop(targets, gently=gently)
    return bool(targets)


def _remove(state: State, home: Path) -> None:
    """Remove everything of the services; what says that it is ours goes last."""
    for path in (Path(state.lake), home / "kafka", home / "registry"):
        if path.exists():
            shutil.rmtree(path)
    (home / FILE).unlink()


def _services(home: Path, state: State) -> Services:
    return Services(
        bootstrap_servers=f"127.0.0.1:{state.kafka.port}" if state.kafka else "",
        registry_url=startup.registry_url(state.registry.port) if state.registry else "",
        state_dir=home,
        lake=Path(state.lake),
        kafka_pid=running(state, "kafka"),
        registry_pid=running(state, "registry"),
    )


def demo_folder() -> Path:
    """The folder ``demo`` of the repository: below the current folder, else beside the package.

    Raises SetupError where it is in neither place.
    """
    for base in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (base / "demo" / "invoices.yaml").is_file():
            return base / "demo"
    raise SetupError("the demo's files are not here: run this in a clone of the repository, which has a folder demo.")


def demo_services_folder() -> Path:
    """The folder of the demo's services and lake: ZYNC_DEMO_DIR, else ``~/.zync/demo``."""
    return Path(os.environ.get("ZYNC_DEMO_DIR") or Path.home() / ".zync" / "demo")


def demo_environment(services: Services | None = None) -> dict[str, str]:
    """The environment in which the demo's pipeline is loaded: this process's, with the demo's own services and lake.

    Without ``services``, the services of the last demo; without a last demo, only the environment of this process.
    """
    local_services = services or status(demo_services_folder())
    return {**os.environ, **addresses(local_services)} if local_services else dict(os.environ)


def addresses(services: Services) -> Mapping[str, str]:
    """The environment variables of the demo's pipeline file. A target database of the user's own stays as it is."""
    own = str(services.lake / "warehouse.db")
    target = {TARGET_URL: own} if os.environ.get(TARGET_URL) in (None, "", own) else {}
    return target | {
        "KAFKA_BOOTSTRAP_SERVERS": services.bootstrap_servers,
        "SCHEMA_REGISTRY_URL": services.registry_url,
        "ZYNC_LAKE": str(services.lake),
    }
