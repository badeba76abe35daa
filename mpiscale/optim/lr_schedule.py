"""Learning rate: linear warm-up, then half a cosine down to a floor."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupCosine:
    """lr(k) for step k = 1, 2, ...: a function of k alone, so it needs no state.

    k <= warmup:  peak k / warmup
    then:         floor + (peak - floor) (1 + cos(pi f)) / 2,
                  f = (k - warmup) / (steps - warmup)

    Source: I. Loshchilov, F. Hutter, "SGDR", 2017, eq. 5.
    """

    peak: float
    warmup: int
    steps: int
    floor: float = 0.0

    def __call__(self, k: int) -> float:
        """Learning rate of step k, counted from 1."""
        if k < 1:
            raise ValueError(f"steps are counted from 1, got {k}")
        if k <= self.warmup:
            return self.peak * k / self.warmup
        done = min(1.0, (k - self.warmup) / max(1, self.steps - self.warmup))
        return (
            self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * done)) / 2
        )
