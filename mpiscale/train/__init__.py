"""Training: configuration, the loop, and what it writes."""
