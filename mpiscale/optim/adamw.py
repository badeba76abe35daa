"""AdamW: Adam whose weight decay stays out of the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.adamw import adamw
from mpiscale.optim.updatable import Updatable


class AdamW:
    """AdamW on flat arrays; matrices decay, gains and biases do not.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Attributes:
        m, v: [target.size] the moments.

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", 2019,
    algorithm 2.
    """

    def __init__(
        self,
        target: Updatable,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.target = target
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.weight_decay = weight_decay
        self.m: Array = np.zeros(target.size, target.grad_dtype)
        self.v: Array = np.zeros(target.size, target.grad_dtype)
        self.steps = 0

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        self.steps += 1
        for data, grad, state, decays in self.target.segments():
            adamw(
                data,
                grad,
                self.m[state],
                self.v[state],
                lr,
                self.beta1,
                self.beta2,
                self.eps,
                self.weight_decay if decays else 0.0,
                self.steps,
            )

    def state_dict(self) -> dict[str, Any]:
        """Both moments and the number of steps taken."""
        return {"m": self.m.copy(), "v": self.v.copy(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.m[...], self.v[...] = state["m"], state["v"]
        self.steps = int(state["steps"])
