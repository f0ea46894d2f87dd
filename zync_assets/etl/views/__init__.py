"""Views: output topics that always equal a query over the latest rows of the source tables."""
