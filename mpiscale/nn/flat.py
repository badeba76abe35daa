"""Flat buffers: all parameters of a model in one array, their gradients in another.

`parameter.data` and `parameter.grad` are views. Optimizers, clipping, data parallelism
and ZeRO work on the flat arrays, in a few large pieces. Parameters that decay come
first, so that weight decay applies to one range.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from mpiscale.backend import Array, DType, accumulation_dtype
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Parameter


class FlatParameters:
    """The flat arrays of a model and where each parameter lies in them.

    Attributes:
        data: [n] all parameters of this rank.
        grad: [n] their gradients; 16-bit parameters have float32 gradients.
        decay_end: parameters before this index decay, those after it do not.
    """

    def __init__(self, parameters: list[Parameter], dtype: DType) -> None:
        self.parameters = sorted(parameters, key=lambda p: not p.decays)  # stable
        sizes = [math.prod(p.local_shape) for p in self.parameters]
        ends = np.cumsum([0, *sizes])
        self.data: Array = np.zeros(int(ends[-1]), dtype)
        self.grad: Array = np.zeros(self.data.size, accumulation_dtype(dtype))
        decaying = sum(p.decays for p in self.parameters)
        self.decay_end = int(ends[decaying])
        self._places = [slice(int(a), int(b)) for a, b in pairwise(ends)]
        for parameter, place in zip(self.parameters, self._places, strict=True):
            parameter.data = self.data[place].reshape(parameter.local_shape)
            parameter.grad_buffer = self.grad[place].reshape(parameter.local_shape)
            parameter.grad = None

    @property
    def size(self) -> int:
        """Number of elements on this rank."""
        return self.data.size

    def place(self, parameter: Parameter) -> slice:
        """Where `parameter` lies in the flat arrays."""
        for candidate, place in zip(self.parameters, self._places, strict=True):
            if candidate is parameter:
                return place
        raise KeyError(f"{parameter.name!r} is not among these parameters")

    def zero_grad(self) -> None:
        """Forget all gradients; the next backward writes instead of adding."""
        for parameter in self.parameters:
            parameter.grad = None

    def complete_grad(self) -> Array:
        """The flat gradient, with zeros for parameters that the loss did not use."""
        for parameter in self.parameters:
            if parameter.grad is None:
                assert parameter.grad_buffer is not None
                parameter.grad_buffer[...] = 0
                parameter.grad = parameter.grad_buffer
        return self.grad


def materialize(model: Module, seed: int, dtype: DType) -> FlatParameters:
    """Give a model its values, one parameter at a time, in flat buffers.

    Each parameter is drawn whole from (seed, full name) and cut to this rank's part,
    so that the values do not depend on the layout and a rank never holds more than one
    whole parameter.
    """
    for name, parameter in model.named_parameters():
        parameter.name = name
    flat = FlatParameters(list(model.parameters()), dtype)
    for parameter in flat.parameters:
        parameter.data[...] = parameter.draw(seed, dtype)
    return flat
