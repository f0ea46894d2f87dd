"""Ingest: source topic → raw table. In order of work: ``plan``, ``source``, ``files``, ``commit``."""
