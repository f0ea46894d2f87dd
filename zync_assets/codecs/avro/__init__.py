"""Avro: schemas, columns and single records."""
