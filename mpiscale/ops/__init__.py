"""Differentiable operations: forward and backward of each on one screen."""

from mpiscale.ops import operators

operators.bind()
