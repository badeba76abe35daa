"""Data parallelism: every rank trains on its own samples of the global batch."""
