"""Parameter: a leaf tensor that knows its full shape and how it is first drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpiscale import rng
from mpiscale.backend import Array, DType
from mpiscale.tensor import Tensor

Shape = tuple[int, ...]


class Initializer(Protocol):
    """Draws the whole parameter; the same for every (seed, name)."""

    def __call__(self, shape: Shape, dtype: DType, seed: int, name: str) -> Array:
        """Values of `shape`."""


class Shard(Protocol):
    """Which part of a parameter a rank holds (`parallel/sharding.py`)."""

    def shape_of(self, full: Shape) -> Shape:
        """Shape of the part of an array of shape `full`."""

    def cut(self, full: Array) -> Array:
        """The part itself."""


@dataclass(frozen=True)
class Normal:
    """Normal numbers of mean 0."""

    std: float

    def __call__(self, shape: Shape, dtype: DType, seed: int, name: str) -> Array:
        """Values of `shape`, keyed by (seed, name)."""
        return (self.std * rng.normal(shape, np.dtype(np.float64), seed, name)).astype(
            dtype
        )


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def __call__(self, shape: Shape, dtype: DType, seed: int, name: str) -> Array:
        """Values of `shape`."""
        return np.full(shape, self.value, dtype)


class Parameter(Tensor):
    """A tensor that is learned.

    It is built as a shape only. A strategy may then set `shard`; after that,
    `materialize` (nn/flat.py) draws the values and keeps this rank's part.
    """

    def __init__(self, shape: Shape, init: Initializer) -> None:
        super().__init__(_no_values())
        del self.data
        self.full_shape, self.init = shape, init
        self.shard: Shard | None = None
        self.ties: list[Any] = []  # declared by parallel/tied_parameters.py
        self.name = ""
        self.absent = "call materialize(model, seed, dtype) first"
        self.requires_grad = True

    def __getattr__(self, attribute: str) -> Any:  # called only where there is none
        if attribute == "data":
            name = self.__dict__.get("name") or "a parameter"
            raise RuntimeError(f"{name} has no values: {self.absent}")
        raise AttributeError(attribute)

    def __repr__(self) -> str:
        part = "" if self.shard is None else f", {self.shard}"
        state = "" if "data" in self.__dict__ else ", no values yet"
        return f"Parameter({self.name!r}, {self.full_shape}{part}{state})"

    @property
    def local_shape(self) -> Shape:
        """Shape of this rank's part."""
        if self.shard is None:
            return self.full_shape
        return self.shard.shape_of(self.full_shape)

    @property
    def full_size(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.full_shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to gains and biases."""
        return len(self.full_shape) >= 2

    def draw(self, seed: int, dtype: DType) -> Array:
        """This rank's part of the first values: drawn whole by name, then cut."""
        full = self.init(self.full_shape, dtype, seed, self.name)
        return full if self.shard is None else self.shard.cut(full)


def _no_values() -> Array:
    return np.empty(0, np.float32)
