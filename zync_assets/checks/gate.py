"""The gate before ETL in Dagster: every raw record of a batch has passed the blocking checks of its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from zync_assets.audit.verdict import judged, lifted
from zync_assets.checks.raw_checks import BLOCKING, raw_look
from zync_assets.errors import CheckFailed
from zync_assets.lake import raw
from zync_assets.lake.checked import open_checked
from zync_assets.offsets import OffsetRange
from zync_assets.pipeline import Pipeline


def require_checked(pipeline: Pipeline, ranges: Mapping[str, Sequence[OffsetRange]]) -> None:
    """CheckFailed unless the blocking checks have passed over the given offsets of each input topic.

    The checks run here over what they have not passed yet: the run that ingested it may have died before its checks, or
    ``zync`` ingested it. Offsets that have passed cost no look at a record. Raises BrokerUnavailable.
    """
    for topic, parts in ranges.items():
        pool = pipeline.input(topic).pool
        state = raw.open_raw(pipeline.lake, pool, topic)
        if state is None or not parts:
            continue
        checked = open_checked(pipeline.lake, pool)
        for name, check in BLOCKING.items():
            look = raw_look(name, pipeline, topic, state, parts)
            firsts = [max(part.first, checked.passed(look, (topic, part.partition)) or 0) for part in parts]
            new = [
                OffsetRange(part.partition, first, part.end)
                for part, first in zip(parts, firsts, strict=True)
                if first < part.end
            ]
            if not new:
                continue
            found = judged(pipeline, pool, partial(check, pipeline, topic, new))
            if not found.passed:
                how = "" if lifted(pipeline) in found.summary else f" {lifted(pipeline)}"
                raise CheckFailed(f"{found.subject}: {name}: {found.summary} Nothing was transformed.{how}")
