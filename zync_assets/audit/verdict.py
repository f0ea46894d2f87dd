"""The result of a blocking check, kept in the lake: a failure blocks what was looked at until the check passes over it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from zync_assets.audit.result import CheckResult
from zync_assets.errors import LakeError
from zync_assets.lake.checked import Checked, keep_failure, keep_pass, open_checked
from zync_assets.pipeline import Pipeline

_log = logging.getLogger(__name__)


def judged(pipeline: Pipeline, pool: str, look: Callable[[], CheckResult], *, soon: bool = False) -> CheckResult:
    """Run a blocking check of a pool and keep its result. A check that raises has not looked: nothing is kept.

    A check that passes is a failure all the same while a block stands that it did not look at whole. A lake that can't be
    written keeps nothing; a warning says so. ``soon``: a pass need not be committed at once.
    """
    # Before the look: a block that comes meanwhile is not lifted by it.
    before = open_checked(pipeline.lake, pool)
    found = look()
    if found.look is None:
        return found
    now = before
    try:
        now = (
            keep_pass(before, found.look, soon=soon)
            if found.passed
            else keep_failure(before, found.look, found.summary)
        )
    except LakeError as error:
        _log.warning("the result of check %s of %s is not kept: %s", found.name, found.subject, error)
    return _with_blocks(pipeline, found, now) if found.passed else found


def _with_blocks(pipeline: Pipeline, found: CheckResult, now: Checked) -> CheckResult:
    assert found.look is not None
    standing = [
        item for item in now.blocks_of([found.look.subject], [found.look.table]) if item.look.check == found.name
    ]
    if not standing:
        return found
    summary = f"this look passed, and an earlier one failed that it does not cover: {standing[0]} {lifted(pipeline)}"
    return replace(found, passed=False, summary=summary, numbers={**found.numbers, "blocks": len(standing)})


def lifted(pipeline: Pipeline) -> str:
    """The way out of a block."""
    return f"Repair the lake; then this lifts the block: {pipeline.command('check')}"
