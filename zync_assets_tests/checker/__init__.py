"""Checks that Kafka and the lake hold every record exactly once. The checker shares no code with the pipeline.

``evidence`` reads topics with a plain consumer, Avro with fastavro, and tables through the JSON of their Delta log and their
Parquet files. ``verdict`` compares the evidence with a statement of the pipeline in plain Python (``statement``). No module
here imports ``zync_assets``.

    python -m zync_assets_tests.checker --bootstrap-servers S --registry R --lake L --prefix P
"""
