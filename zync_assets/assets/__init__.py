"""Dagster: the asset graph of a pipeline."""
