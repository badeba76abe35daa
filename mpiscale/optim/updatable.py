"""What an optimizer updates: flat arrays, whole or a rank's share of them."""

from __future__ import annotations

from typing import Protocol

from mpiscale.backend import DType
from mpiscale.nn.flat import Segment


class Updatable(Protocol):
    """Values with complete gradients, in a few large segments."""

    @property
    def size(self) -> int:
        """Elements of the optimizer's state arrays."""

    @property
    def grad_dtype(self) -> DType:
        """Type of gradients, and so of the optimizer's state."""

    def segments(self) -> list[Segment]:
        """All elements that this rank updates, each once."""
