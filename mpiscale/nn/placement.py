"""Where the tokens that a rank computes stand in the global batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiscale.backend import Array


@dataclass(frozen=True)
class Noise:
    """What random masks depend on, besides the layer and the element's place."""

    seed: int
    step: int


@dataclass(frozen=True)
class Placement:
    """Global coordinates of the local tokens [b, t].

    Position embeddings and RoPE read `positions`; dropout reads all of it, so that a
    mask is the same however the batch and the sequence are cut.

    Attributes:
        samples: [b] index of each row within the global batch.
        positions: [t] place of each column within its sequence.
        length: tokens of a whole sequence.
        noise: seed and step of this pass; None where nothing is random.
    """

    samples: Array
    positions: Array
    length: int
    noise: Noise | None = None

    @classmethod
    def whole(cls, batch: int, length: int, noise: Noise | None = None) -> Placement:
        """One rank that holds all of it."""
        return cls(np.arange(batch), np.arange(length), length, noise)

    def row_index(self) -> Array:
        """Index of each token among all tokens of the global batch, [b * t] int64."""
        rows = self.samples[:, None] * self.length + self.positions
        return rows.reshape(-1).astype(np.int64)
