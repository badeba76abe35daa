"""Linear, Embedding, Dropout, LayerNorm, RMSNorm."""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Constant, Initializer, Normal, Parameter
from mpiscale.nn.placement import Placement
from mpiscale.ops.dropout import dropout
from mpiscale.ops.indexing import embedding
from mpiscale.ops.matmul import linear
from mpiscale.ops.norm import layer_norm, rms_norm
from mpiscale.rng import stream_key
from mpiscale.tensor import Tensor


def transformer_init(width: int, branches: int = 1) -> Normal:
    """Normal numbers of deviation 0.02 sqrt(768 / width) / sqrt(branches).

    GPT-2's 0.02 (Radford et al. 2019) belongs to its width of 768. The same variance
    per output feature at another width keeps small models from starting asleep.

    branches: how many such layers add up in the residual stream.
    """
    return Normal(0.02 * math.sqrt(768 / width / branches))


class Linear(Module):
    """y = x W + b.  x [..., n] -> y [..., m]

    `sections` are the widths of the outputs that one W computes side by side (query,
    key and value; gate and up): whoever cuts W by columns cuts each of them.
    """

    def __init__(
        self,
        n: int,
        sections: tuple[int, ...],
        init: Initializer,
        bias: bool = True,
    ) -> None:
        self.sections = sections
        self.weight = Parameter((n, sum(sections)), init)
        self.bias = Parameter((sum(sections),), Constant(0.0)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> [..., m]"""
        return linear(x, self.weight, self.bias)


class Embedding(Module):
    """Row `id` of a table.  ids [...] -> y [..., d]"""

    def __init__(self, n: int, d: int, init: Initializer) -> None:
        self.weight = Parameter((n, d), init)

    def forward(self, ids: Array) -> Tensor:
        """ids [...] in 0 ... n - 1 -> [..., d]"""
        return embedding(self.weight, ids)


class Dropout(Module):
    """Sets elements to 0 with probability p while training, scales the others up.

    `name` tells its masks from those of other layers; `first_column` and `columns`
    say which features of the activation this rank holds.
    """

    def __init__(self, p: float, name: str) -> None:
        if not 0 <= p < 1:
            raise ValueError(f"dropout must be in [0, 1), got {p}")
        self.p, self.name = p, name

    def forward(
        self,
        x: Tensor,
        placement: Placement,
        first_column: int = 0,
        columns: int | None = None,
    ) -> Tensor:
        """x [b, t, n], features first_column ... of `columns` (default: n) in all."""
        if not self.training or self.p == 0:
            return x
        noise = placement.noise
        if noise is None:
            raise ValueError(
                f"dropout {self.name!r} in training needs placement.noise "
                "(seed, step): pass it, or call model.eval()"
            )
        n = x.shape[-1]
        rows = placement.row_index() * (columns or n)
        column = np.arange(first_column, first_column + n, dtype=np.int64)
        key = stream_key(noise.seed, "dropout", self.name, noise.step)
        return dropout(x, self.p, key, rows, column)


class LayerNorm(Module):
    """Layer norm over the last axis, of length n; the bias may be left out."""

    def __init__(self, n: int, bias: bool = True, eps: float = 1e-5) -> None:
        self.gain = Parameter((n,), Constant(1.0))
        self.bias = Parameter((n,), Constant(0.0)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> [..., n]"""
        return layer_norm(x, self.gain, self.bias, self.eps)


class RMSNorm(Module):
    """RMS norm over the last axis, of length n."""

    def __init__(self, n: int, eps: float = 1e-5) -> None:
        self.gain = Parameter((n,), Constant(1.0))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> [..., n]"""
        return rms_norm(x, self.gain, self.eps)
