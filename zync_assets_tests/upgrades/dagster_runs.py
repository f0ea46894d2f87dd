"""Ticks of a pipeline's sensor and the runs that they ask for, in the Dagster instance at ``$DAGSTER_HOME``.

The code of any version runs this file: it names nothing that was called otherwise in one of them. The argument is the
pipeline file. The sensor's cursor is left in ``cursor.json`` in the instance's folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dagster import AddDynamicPartitionsRequest, DagsterInstance, SensorResult, build_sensor_context

from zync_assets.assets.build import build_definitions
from zync_assets.pipeline_file import load

TICKS = 8


def settle(path: Path, instance: DagsterInstance, cursor: str | None) -> str | None:
    """Tick and run until a tick asks for nothing; the cursor after it."""
    definitions = build_definitions(load(path))
    [sensor] = definitions.get_repository_def().sensor_defs
    for _ in range(TICKS):
        result = sensor(build_sensor_context(instance=instance, cursor=cursor, definitions=definitions))
        assert isinstance(result, SensorResult)
        for event in result.asset_events:
            instance.report_runless_asset_event(event)
        for request in result.dynamic_partitions_requests or ():
            assert isinstance(request, AddDynamicPartitionsRequest)
            instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        cursor = result.cursor
        if not result.run_requests:
            return cursor
        for request in result.run_requests:
            job = definitions.resolve_job_def(request.job_name or "")
            selection = list(request.asset_selection) if request.asset_selection else None
            assert job.execute_in_process(instance=instance, tags=dict(request.tags), asset_selection=selection).success
    raise AssertionError("the sensor does not come to rest")


if __name__ == "__main__":
    home = Path(os.environ["DAGSTER_HOME"])
    with DagsterInstance.get() as found:
        (home / "cursor.json").write_text(settle(Path(sys.argv[1]), found, None) or "")
