"""Kafka Connect's JSON: schemas and payloads."""
