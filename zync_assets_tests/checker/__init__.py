"""Whether what lies in Kafka and in the lake is exactly once: a second opinion that shares no code with the pipeline.

``evidence`` gathers what is there, past everything that the project has of its own: topics by a plain consumer, Avro by
fastavro, tables by the JSON of their Delta log and their Parquet files. ``verdict`` judges it, by a statement of the
pipeline in plain Python (``statement``). Nothing here imports ``zync_assets``.

    python -m zync_assets_tests.checker --bootstrap-servers S --registry R --lake L --prefix P
"""
