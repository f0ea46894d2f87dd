"""ETL: raw tables → staging table. In order of work: ``plan``, ``batch``, ``output_files``, ``commit``."""
