"""Benchmarks: a training step and single kernels, against PyTorch where it is there."""
