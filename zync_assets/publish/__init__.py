"""Publish: staging table → output topic. In order of work: ``plan``, ``encoding``, ``commit``."""
