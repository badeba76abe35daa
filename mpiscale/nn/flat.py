"""Flat buffers: all parameters of a model in one array, their gradients in another.

`parameter.data` and `parameter.grad` are views. Optimizers, clipping, data parallelism
and ZeRO work on the flat arrays, in a few large pieces. Parameters that decay come
first, so that weight decay applies to one range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpiscale.backend import Array, DType, accumulation_dtype
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Parameter


class Segment(NamedTuple):
    """Neighbours in a flat array that an optimizer updates alike.

    Attributes:
        data, grad: [n] values and gradients.
        state: where the optimizer's state of these elements lies in its own arrays.
        decays: whether weight decay applies.
    """

    data: Array
    grad: Array
    state: slice
    decays: bool


class Piece(NamedTuple):
    """The part of one parameter in which this rank holds the complete gradient.

    Attributes:
        place: of these elements in the parameter's own order (C order).
        data, grad: [n] values and gradients.
        state: where the optimizer's state of these elements lies in its own arrays.
    """

    parameter: Parameter
    place: slice
    data: Array
    grad: Array
    state: slice


class FlatParameters:
    """The flat arrays of a model and where each parameter lies in them.

    Attributes:
        data: [n] all parameters of this rank.
        grad: [n] their gradients; 16-bit parameters have float32 gradients.
        decay_end: parameters before this index decay, those after it do not.
    """

    def __init__(self, parameters: list[Parameter], dtype: DType) -> None:
        self.parameters = decaying_first(parameters)
        self.places = flat_places(self.parameters)
        size = self.places[-1].stop if self.places else 0
        self.data: Array = np.zeros(size, dtype)
        self.grad: Array = np.zeros(size, accumulation_dtype(dtype))
        decaying = [
            place.stop
            for parameter, place in zip(self.parameters, self.places, strict=True)
            if parameter.decays
        ]
        self.decay_end = decaying[-1] if decaying else 0
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.data = self.data[place].reshape(parameter.local_shape)
            parameter.grad_space = space_in(self.grad, place, parameter)
            parameter.grad = None

    @property
    def size(self) -> int:
        """Number of elements on this rank."""
        return self.data.size

    @property
    def grad_dtype(self) -> DType:
        """Type of the gradients."""
        return self.grad.dtype

    def place(self, parameter: Parameter) -> slice:
        """Where `parameter` lies in the flat arrays."""
        for candidate, place in zip(self.parameters, self.places, strict=True):
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
            fill_missing_grad(parameter)
        return self.grad

    def segments(self) -> list[Segment]:
        """What an optimizer updates: those that decay, and the others."""
        self.complete_grad()
        end = self.decay_end
        parts = ((slice(0, end), True), (slice(end, self.size), False))
        return [
            Segment(self.data[part], self.grad[part], part, decays)
            for part, decays in parts
        ]

    def pieces(self) -> list[Piece]:
        """Every parameter, whole."""
        self.complete_grad()
        return [
            Piece(
                parameter,
                slice(0, place.stop - place.start),
                self.data[place],
                self.grad[place],
                place,
            )
            for parameter, place in zip(self.parameters, self.places, strict=True)
        ]


def decaying_first(parameters: list[Parameter]) -> list[Parameter]:
    """The order in flat arrays: those that decay first, else as in the model."""
    return sorted(
        parameters, key=lambda p: not p.decays
    )  # sorted() keeps ties in order


def flat_places(parameters: list[Parameter]) -> list[slice]:
    """Where each parameter lies in a flat array of all, one after the other."""
    sizes = [math.prod(p.local_shape) for p in parameters]
    ends = np.cumsum([0, *sizes]).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


def space_in(flat: Array, place: slice, parameter: Parameter) -> Callable[[], Array]:
    """For `Tensor.grad_space`: the parameter's gradient is a view of `flat`."""
    view = flat[place].reshape(parameter.local_shape)
    return lambda: view


def fill_missing_grad(parameter: Parameter) -> None:
    """A parameter that the loss did not use has gradient zero."""
    if parameter.grad is None:
        assert parameter.grad_space is not None
        parameter.grad = parameter.grad_space()
        parameter.grad[...] = 0


def materialize(model: Module, seed: int, dtype: DType) -> FlatParameters:
    """Give a model its values, one parameter at a time, in flat buffers.

    Each parameter is drawn whole from (seed, full name) and cut to this rank's part,
    so that the values do not depend on the layout and a rank never holds more than one
    whole parameter.
    """
    name_parameters(model)
    flat = FlatParameters(list(model.parameters()), dtype)
    for parameter in flat.parameters:
        parameter.data[...] = parameter.draw(seed, dtype)
    return flat


def name_parameters(model: Module) -> None:
    """Tell each parameter its full name, unless it has one from before a cut."""
    for name, parameter in model.named_parameters():
        parameter.name = parameter.name or name
