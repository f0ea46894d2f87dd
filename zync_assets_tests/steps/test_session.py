"""What the process that runs Spark's JVM shows of a session's settings."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, psutil
from zync_assets.steps.session import spark_session
from zync_assets_tests.network.processes import arguments, family, listening
made = spark_session(
    {"master": "local[1]", "spark.hadoop.fs.s3a.secret.key": "hidden", "spark.hadoop.shown": "plain", "spark.ui.enabled": "true"}
)
assert made.range(3).mapInArrow(lambda batches: batches, "id long").count() == 3
ours = family(psutil.Process())
hadoop = made.sparkContext._jsc.hadoopConfiguration()
print(json.dumps([sorted(arguments(ours)), hadoop.get("fs.s3a.secret.key"), list(listening(ours))]))
"""


def test_a_session_shows_no_secret_and_listens_on_loopback() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    words, secret, places = json.loads(done.stdout.splitlines()[-1])
    assert "spark.hadoop.shown=plain" in words
    assert not any("hidden" in word for word in words if "spark_session" not in word)
    assert secret == "hidden"
    assert "hidden" not in done.stderr
    # The driver, its block manager, the way to Python, and the pages.
    assert len(places) >= 4
    assert {address.removeprefix("::ffff:") for address, _ in places} == {"127.0.0.1"}, places
