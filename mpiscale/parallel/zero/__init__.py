"""ZeRO: data parallelism whose ranks do not all hold the same state."""
