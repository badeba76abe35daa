"""AdamW: Adam whose weight decay stays out of the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.adamw import adamw
from mpiscale.nn.flat import FlatParameters


class AdamW:
    """AdamW on flat arrays; matrices decay, gains and biases do not.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", 2019,
    algorithm 2.
    """

    def __init__(
        self,
        flat: FlatParameters,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.flat = flat
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.weight_decay = weight_decay
        self.m: Array = np.zeros_like(flat.grad)
        self.v: Array = np.zeros_like(flat.grad)
        self.steps = 0

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        self.flat.complete_grad()
        self.steps += 1
        end = self.flat.decay_end
        for part, decay in (
            (slice(0, end), self.weight_decay),
            (slice(end, None), 0.0),
        ):
            adamw(
                self.flat.data[part],
                self.flat.grad[part],
                self.m[part],
                self.v[part],
                lr,
                self.beta1,
                self.beta2,
                self.eps,
                decay,
                self.steps,
            )

    def state_dict(self) -> dict[str, Any]:
        """Both moments and the number of steps taken."""
        return {"m": self.m.copy(), "v": self.v.copy(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.m[...], self.v[...] = state["m"], state["v"]
        self.steps = int(state["steps"])
