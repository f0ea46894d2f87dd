"""Quarantine: bad records are decoded once more, or given up."""
