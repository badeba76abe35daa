"""Attention that never holds a score for every pair of positions."""
