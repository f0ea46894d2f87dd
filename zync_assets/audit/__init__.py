"""Audit: the account of a staging pool, looked at from the lake alone. The checks report it, and publish refuses by it.

Nothing here starts a JVM or asks Kafka.
"""
