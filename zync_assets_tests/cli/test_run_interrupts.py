"""Ctrl-C and SIGTERM in the commands that use Spark: in one line, at once, and nothing is lost."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from string import Template

import psutil
import pytest

from zync_assets.local import processes
from zync_assets.local.services import Services
from zync_assets.pipeline import Pipeline
from zync_assets_tests.mini import BOTH, JOIN, log_of, make_pipeline, read_topic, row, run, send, start

INTERRUPT = """
import os, psutil, signal, sys, threading, time
def stack():
    frame, names = sys._current_frames()[threading.main_thread().ident], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names
def interrupt():
    while not names <= stack():
        time.sleep(0.001)
    if everywhere:
        # systemd's KillMode=control-group.
        for process in psutil.Process().children(recursive=True):
            process.terminate()
        os.kill(os.getpid(), signal.SIGTERM)
        return
    os.killpg(0, signal.SIGINT)
    while again:
        time.sleep(0.05)
        if not names <= stack():
            return
        os.killpg(0, signal.SIGINT)
# A shell starts its background jobs deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt, daemon=True).start()
"""
"""Sends Ctrl-C to the whole process group once all functions of a set are under way in the main thread. With ``everywhere``,
the process and all its children get SIGTERM instead."""


def interrupted(
    pipeline: Pipeline,
    command: str,
    *functions: str,
    again: bool = False,
    everywhere: bool = False,
    options: Sequence[str] = (),
) -> tuple[int, str]:
    """The exit code and the words of a command, whose JVM must end as well.

    ``again``: Ctrl-C is sent on and on while the functions are under way. ``everywhere``: SIGTERM to all processes instead.
    """
    mark = secrets.token_hex()
    values = f"names, again, everywhere = {set(functions)!r}, {again!r}, {everywhere!r}"
    process = start(pipeline, command, *options, first=f"{values}\n{INTERRUPT}\nos.environ['MARK'] = '{mark}'")
    try:
        code = process.wait(280)
    finally:
        process.kill()
    # Java's launcher and the JVM.
    family = [each for each in psutil.process_iter() if mark_of(each) == mark]
    assert processes.wait(family, 60) == []
    return code, log_of(pipeline).read_text()


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("MARK")
    except psutil.Error:
        return None


@pytest.fixture
def pipeline(services: Services, tmp_path: Path, unique: str) -> Pipeline:
    """A pipeline with a record in each of two topics that make one output."""
    names = {name: f"{unique}.{name}" for name in ("left", "right", "out")}
    pipeline = make_pipeline(services, tmp_path, Template(BOTH + JOIN).substitute(names), name=unique, partitions=1)
    for item in pipeline.inputs:
        send(pipeline, item.topic, [row(1, "x")])
    return pipeline


START, CONTEXT, QUERY, IDLE = (
    ("launch_gateway",),
    ("_do_init", "send_command"),
    ("collect", "send_command"),
    ("_sleep",),
)


@pytest.mark.slow
def test_a_command_ends_in_one_line_and_the_next_one_does_its_work(pipeline: Pipeline) -> None:
    run(pipeline, "from-kafka")
    for moment in (START, CONTEXT, QUERY):
        assert interrupted(pipeline, "etl", *moment) == (130, "interrupted\n")
    assert "records 1 " in run(pipeline, "etl")


def test_a_second_ctrl_c_ends_the_start_of_a_jvm_at_once(pipeline: Pipeline) -> None:
    assert interrupted(pipeline, "from-kafka", *START, again=True) == (130, "interrupted\n")


def test_sigterm_to_all_processes_fails_no_batch_that_is_under_way(pipeline: Pipeline) -> None:
    """With --until-idle, the exit code says that there is more to do."""
    code, text = interrupted(pipeline, "run", *QUERY, options=["--until-idle"], everywhere=True)
    assert (code, text.startswith("ingest"), text.endswith("interrupted\n")) == (130, True, True), text
    assert "error" not in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("moment", [START, CONTEXT, IDLE], ids=["start", "context", "idle"])
def test_sigterm_to_all_processes_at_every_moment(pipeline: Pipeline, moment: tuple[str, ...]) -> None:
    code, text = interrupted(pipeline, "run", *moment, everywhere=True)
    assert (code, "ingest" in text, "error" in text, "Traceback" in text) == (0, True, False, False), text


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [[(IDLE, "ingest")], [(START, "ingest"), (QUERY, "ingest"), (IDLE, "etl")]],
    ids=["between two rounds", "at every moment"],
)
def test_the_command_of_all_steps_ends_after_its_commit(
    pipeline: Pipeline, moments: list[tuple[tuple[str, ...], str]]
) -> None:
    for moment, step in moments:
        code, text = interrupted(pipeline, "run", *moment)
        assert (code, text.startswith(step), "warning" in text, "Traceback" in text) == (0, True, False, False), text
    assert len(read_topic(pipeline, pipeline.outputs[0].topic)) == 1
