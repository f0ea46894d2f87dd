"""The checks of the asset graph and of ``zync check``: plain Python over Delta logs, Parquet columns and Kafka; no JVM.

A check returns a CheckResult, also for what is wrong; it raises a ZyncError only when it can't look.
"""
