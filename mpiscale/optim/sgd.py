"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.nn.flat import FlatParameters


class SGD:
    """v = momentum v + g;  p = p - lr v (Polyak 1964), on the flat arrays."""

    def __init__(self, flat: FlatParameters, momentum: float = 0.0) -> None:
        self.flat, self.momentum = flat, momentum
        self.velocity: Array | None = np.zeros_like(flat.grad) if momentum else None

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        update = self.flat.complete_grad()
        if self.velocity is not None:
            self.velocity *= self.momentum
            self.velocity += update
            update = self.velocity
        self.flat.data -= (lr * update).astype(self.flat.data.dtype, copy=False)
