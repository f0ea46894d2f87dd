"""Rules as Spark SQL: which records a rule takes, which pair, and what a rule makes. Ingest's shapes use it too."""
