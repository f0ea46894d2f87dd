"""Spark: sessions, settings, tasks, and the lake's files as Spark's frames."""
