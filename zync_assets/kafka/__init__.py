"""Kafka and the schema registry. Nothing above this folder knows confluent-kafka."""
