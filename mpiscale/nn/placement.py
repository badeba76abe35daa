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
        resident: which of the columns this rank holds between the layers; None: all,
            but for sequence parallelism. Norms, dropout and position embeddings see
            these; attention sees all.
    """

    samples: Array
    positions: Array
    length: int
    noise: Noise | None = None
    resident: slice | None = None

    @classmethod
    def whole(cls, batch: int, length: int, noise: Noise | None = None) -> Placement:
        """One rank that holds all of it."""
        return cls(np.arange(batch), np.arange(length), length, noise)

    @property
    def resident_positions(self) -> Array:
        """Place of each resident column within its sequence."""
        return (
            self.positions if self.resident is None else self.positions[self.resident]
        )

    def row_index(self) -> Array:
        """Index of each resident token in the global batch, [b * t] int64."""
        rows = self.samples[:, None] * self.length + self.resident_positions
        return rows.reshape(-1).astype(np.int64)
