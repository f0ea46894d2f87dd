"""Every check of a pipeline, over everything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zync_assets.audit.result import CheckResult
from zync_assets.audit.verdict import judged
from zync_assets.checks import raw_checks, staging_checks, topic_checks
from zync_assets.pipeline import Pipeline


def run_all(pipeline: Pipeline) -> Iterator[CheckResult]:
    """The results one by one, in the order of the data's way. The results of blocking
    checks are kept in the lake. Raises ZyncError where a check can't look."""
    for item in pipeline.inputs:
        for check in raw_checks.BLOCKING.values():
            yield judged(pipeline, item.pool, partial(check, pipeline, item.topic, None))
        yield raw_checks.schema_change(pipeline, item.topic)
        yield raw_checks.quarantine_size(pipeline, item.topic)
    for pool in pipeline.staging_pools:
        yield judged(pipeline, pool, partial(staging_checks.exactly_once_done_coverage, pipeline, pool))
        for output in pipeline.outputs_of(pool):
            yield judged(pipeline, pool, partial(staging_checks.contiguous_output_offsets, pipeline, output.topic))
        yield staging_checks.pending_age(pipeline, pool)
        for output in pipeline.outputs_of(pool):
            yield topic_checks.staging_equals_topic(pipeline, output.topic)
