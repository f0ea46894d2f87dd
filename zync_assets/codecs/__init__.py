"""Codecs: Kafka payloads ↔ typed Arrow columns. Pure, without I/O."""
