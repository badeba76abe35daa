"""Collective operations, one algorithm a file, on send and receive alone."""
