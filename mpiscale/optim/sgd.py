"""Stochastic gradient descent, plain, with momentum, or with Nesterov's."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.optim.updatable import Updatable


class SGD:
    """v = momentum v + g;  p = p - lr v (Polyak 1964), on the flat arrays.

    nesterov: p = p - lr (g + momentum v) instead, with the new v (Nesterov 1983, as
    written by Sutskever et al. 2013, section 2.1).
    """

    def __init__(
        self, target: Updatable, momentum: float = 0.0, nesterov: bool = False
    ) -> None:
        self.target, self.momentum, self.nesterov = target, momentum, nesterov
        self.velocity: Array | None = None
        if momentum:
            self.velocity = np.zeros(target.size, target.grad_dtype)

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        for data, grad, state, _ in self.target.segments():
            update = grad
            if self.velocity is not None:
                velocity = self.velocity[state]
                velocity *= self.momentum
                velocity += grad
                update = velocity
                if self.nesterov:
                    update = grad + self.momentum * velocity
            data -= (lr * update).astype(data.dtype, copy=False)
