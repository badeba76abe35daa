"""Communication that explains its own hangs: `--debug-comm`."""
