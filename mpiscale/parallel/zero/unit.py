"""A unit: parameters that are gathered and reduced together, cut into a chunk a rank.

The unit's parameters lie one after the other in a flat array, which is padded so that
N ranks have chunks of one length c = ceil(n / N):

    parameters   |  weight 0 1 2 3 4 5 6  |  bias 7 8  | padding |     n = 9, N = 4
    chunks       |  0 1 2  |  3 4 5  |  6 7 8  |  - - -  |             c = 3

The padding is carried by collectives, and by nothing else: `real` says how much of a
chunk is not padding, and optimizers, norms and checkpoints see only that. A rank may
have nothing real at all (fewer elements than ranks).

Within a unit, parameters that decay come first, so that a chunk has at most two kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpiscale.backend import Array, DType
from mpiscale.comm.communicator import Communicator
from mpiscale.nn.flat import (
    Piece,
    Segment,
    decaying_first,
    fill_missing_grad,
    flat_places,
)
from mpiscale.nn.module import Module
from mpiscale.nn.parameter import Parameter


class Unit:
    """One unit's layout on rank `comm.rank`.

    Args:
        name: for messages.
        parameters: of the unit.
        comm: the ranks that share it.
        start: where the chunk begins in arrays of all this rank's chunks.

    Attributes:
        size: elements of the parameters, n.
        chunk: elements of a rank's chunk, padding included, c.
        real: elements of this rank's chunk that are no padding.
        padded: N c.
        state: where those of this rank's chunk lie in arrays of all its chunks, which
            hold no padding.
    """

    def __init__(
        self, name: str, parameters: Sequence[Parameter], comm: Communicator, start: int
    ) -> None:
        self.name, self.parameters = name, decaying_first(list(parameters))
        self.places = flat_places(self.parameters)
        self.size = self.places[-1].stop if self.places else 0
        self.chunk = -(-self.size // comm.size)
        self.padded = self.chunk * comm.size
        self.first = comm.rank * self.chunk
        self.real = min(max(self.size - self.first, 0), self.chunk)
        self.state = slice(start, start + self.real)

    def mine(self, flat: Array) -> Array:
        """This rank's chunk of the unit's flat array, padding included."""
        return flat[self.first : self.first + self.chunk]

    def attach_values(self, flat: Array) -> None:
        """Let the parameters' values be views of `flat` [padded]."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.data = flat[place].reshape(parameter.local_shape)

    def without_values(self, reason: str) -> None:
        """Let the parameters have no values; who asks for them is told the reason."""
        for parameter in self.parameters:
            vars(parameter).pop("data", None)
            parameter.absent = reason

    def draw(self, flat: Array, seed: int, dtype: DType) -> None:
        """First values, one parameter at a time, as a serial model has them.

        flat: the whole unit [padded], or this rank's chunk of it [chunk].
        """
        first = 0 if flat.size == self.padded else self.first
        for parameter, place in zip(self.parameters, self.places, strict=True):
            start, stop = max(place.start, first), min(place.stop, first + flat.size)
            if start < stop:
                whole = parameter.draw(seed, dtype).reshape(-1)
                part = whole[start - place.start : stop - place.start]
                flat[start - first : stop - first] = part

    def fill_missing_grads(self) -> None:
        """Parameters that the loss did not use have gradient zero."""
        for parameter in self.parameters:
            fill_missing_grad(parameter)

    def pieces(self, values: Array, grads: Array) -> list[Piece]:
        """The parts of parameters in this rank's chunks of values and gradients."""
        found = []
        first, end = self.first, self.first + self.real
        for parameter, place in zip(self.parameters, self.places, strict=True):
            start, stop = max(place.start, first), min(place.stop, end)
            if start < stop:
                here = slice(start - first, stop - first)
                offset = self.state.start
                state = slice(offset + here.start, offset + here.stop)
                within = slice(start - place.start, stop - place.start)
                found.append(Piece(parameter, within, values[here], grads[here], state))
        return found

    def segments(self, values: Array, grads: Array) -> list[Segment]:
        """The chunk's elements that decay, and the others."""
        decaying = sum(
            piece.data.size
            for piece in self.pieces(values, grads)
            if piece.parameter.decays
        )
        offset = self.state.start
        found = []
        for start, stop, decays in ((0, decaying, True), (decaying, self.real, False)):
            if start < stop:
                state = slice(offset + start, offset + stop)
                part = slice(start, stop)
                found.append(Segment(values[part], grads[part], state, decays))
        return found


def make_units(
    groups: Sequence[tuple[str, Sequence[Parameter]]], comm: Communicator
) -> list[Unit]:
    """Units of these names and parameters, and where their chunks lie."""
    units: list[Unit] = []
    start = 0
    for name, parameters in groups:
        unit = Unit(name, parameters, comm, start)
        units.append(unit)
        start = unit.state.stop
    return units


def layer_groups(model: Module) -> list[tuple[str, list[Parameter]]]:
    """The model's layers, and the rest: the usual units.

    Every member of a list of modules, such as `blocks.3`, is a unit; so is all that
    lies outside of lists (embeddings, last norm, head), named "". A parameter that is
    reached by several paths belongs to the first.
    """
    groups: dict[str, list[Parameter]] = {"": []}
    for name, parameter in model.named_parameters():
        groups.setdefault(layer_of(name), []).append(parameter)
    return [(name, parameters) for name, parameters in groups.items() if parameters]


def layer_of(name: str) -> str:
    """`blocks.3.mlp.up.weight` -> `blocks.3`; "" for what lies in no list."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def running_modules(model: Module) -> Iterator[Module]:
    """The modules that are called with a unit's parameters, in the model's order.

    They are the layers, and outside of lists every module with parameters of its own.
    """
    for path, module in model.named_modules():
        if layer_of(path) == path and path:
            yield module
        elif not layer_of(path):
            if any(isinstance(value, Parameter) for value in vars(module).values()):
                yield module
