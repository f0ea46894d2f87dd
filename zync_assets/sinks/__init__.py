"""One step: staged topics and raw tables → the tables of a target database."""
