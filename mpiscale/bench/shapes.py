"""The GPT steps that are timed: their shapes, their data, their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpiscale.backend import Array
from mpiscale.train.flops import model_flops_per_token

ShapeName = Literal["a", "b", "c"]


@dataclass(frozen=True)
class Shape:
    """A GPT-2 and its batch: tied head, float32, no dropout."""

    layers: int
    width: int
    heads: int
    length: int  # tokens in a sample
    batch: int  # samples in a step
    vocabulary: int

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.length

    @property
    def step_flops(self) -> int:
        """Floating-point operations of a step: see `model_flops_per_token`.

        A block has matrices of 3 d d, d d, 4 d d and 4 d d; the head's is V d.
        """
        d = self.width
        matrices = self.layers * 12 * d * d + self.vocabulary * d
        per_token = model_flops_per_token(matrices, self.layers, d, self.length)
        return per_token * self.tokens

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, width {self.width}, {self.heads} heads, "
            f"{self.batch} x {self.length} tokens, vocabulary {self.vocabulary}"
        )


SHAPES: dict[ShapeName, Shape] = {
    "a": Shape(4, 256, 8, 256, 8, 256),
    "b": Shape(6, 384, 6, 256, 16, 256),
    "c": Shape(12, 768, 12, 512, 2, 50304),  # GPT-2 small, vocabulary padded
}


@dataclass(frozen=True)
class AdamWSettings:
    """The optimizer of all contenders; matrices decay, gains and biases do not."""

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


def batch(shape: Shape, step: int) -> tuple[Array, Array]:
    """Token ids and labels of a step, each [batch, length] int64; the same for all."""
    rng = np.random.default_rng(step)
    size = (shape.batch, shape.length + 1)
    ids = rng.integers(0, shape.vocabulary, size)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
