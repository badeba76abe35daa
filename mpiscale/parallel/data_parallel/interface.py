"""What training needs of data parallelism, whichever of its forms is chosen.

One training step, with the gradients of several micro-batches accumulated:

    dp.zero_grad()
    for every micro-batch but the last:
        with dp.no_sync():
            loss.backward()
    loss.backward()
    dp.finish()                    the sum over all micro-batches of all ranks
    norm = gradient_norm(dp.pieces(), *dp.shard_groups, model_group)
    dp.clip(norm, max_norm)
    optimizer.step(lr)             optimizer = AdamW(dp)
    dp.publish()                   every rank has the values it computes with

Gradients are summed, never averaged: each loss is a sum over a rank's own labels,
divided by the number of labels of the global batch. A rank with few labels then weighs
little, and the sum is the serial run's gradient whatever the cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from mpiscale.backend import Array, DType
from mpiscale.comm.communicator import Communicator
from mpiscale.data.batches import Batch
from mpiscale.nn.flat import Piece, Segment
from mpiscale.nn.parameter import Parameter
from mpiscale.optim.clip import clip
from mpiscale.parallel.data_parallel.check_replicas import Replicated


class Held(NamedTuple):
    """Bytes of parameters and gradients that a rank holds between two steps."""

    parameters: int
    gradients: int


class DataParallel(ABC):
    """A model whose ranks of `comm` train on different samples.

    Attributes:
        comm: the ranks over which samples are divided; the others of the model's ranks
            work on the same samples.
        parameters: in the order of the flat arrays.
        replicas: ranks of other groups like `comm` that hold the same (hybrid
            sharding); samples are divided over both. None: there is one group.
        shard_groups: the ranks that together hold each gradient once; none where every
            rank holds all of them.
    """

    comm: Communicator
    parameters: list[Parameter]
    replicas: Communicator | None = None
    shard_groups: tuple[Communicator, ...] = ()
    _synchronising = True

    @property
    def sample_groups(self) -> tuple[Communicator, ...]:
        """The dimensions of the mesh over which samples are divided."""
        groups = (self.comm, self.replicas)
        return tuple(group for group in groups if group is not None)

    @property
    def samples(self) -> tuple[int, int]:
        """Which part of the global batch is this rank's, and of how many."""
        part, parts = 0, 1
        for group in self.sample_groups:
            part, parts = part + parts * group.rank, parts * group.size
        return part, parts

    def share(self, batch: Batch) -> Batch:
        """This rank's samples of the global batch."""
        return batch.part(*self.samples)

    def total_loss(self, mine: float) -> float:
        """The loss of the global batch, from this rank's part of it."""
        return sum_over(mine, self.sample_groups)

    def zero_grad(self) -> None:
        """Forget all gradients, at the beginning of a step."""
        for parameter in self.parameters:
            parameter.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside are added up, but not yet sent."""
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = True

    def complete(self, parameters: Iterable[Parameter]) -> None:
        """Say that no pass of this step will add to these gradients any more.

        For pipelines, which run all their passes inside `no_sync`: a stage is complete
        while others still compute.
        """
        before, self._synchronising = self._synchronising, True
        for parameter in parameters:
            if parameter.on_grad_ready is not None:
                parameter.on_grad_ready(parameter)
        self._synchronising = before

    @abstractmethod
    def finish(self) -> None:
        """Complete this rank's gradients: after it they are sums over `comm`."""

    @abstractmethod
    def segments(self) -> list[Segment]:
        """What this rank's optimizer updates."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """The same, parameter by parameter."""

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale the gradients, whose global norm is `norm`, to at most max_norm."""
        for segment in self.segments():
            clip(segment.grad, norm, max_norm)

    def publish(self) -> None:  # noqa: B027  (most forms have nothing to do)
        """Give every rank the updated values it needs, after the optimizer's step."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Elements of an optimizer's state arrays on this rank."""

    @property
    @abstractmethod
    def grad_dtype(self) -> DType:
        """Type of the gradients."""

    def replicated(self, state: dict[str, Array]) -> Iterable[Replicated]:
        """All that several ranks must hold alike, after a step.

        state: name -> array of the optimizer's state, flat as `segments` says.
        """
        for piece in self.pieces():
            name = piece.parameter.name
            ties = [t.comm for t in piece.parameter.ties if not t.region]
            for comm in (*self.replica_groups, *ties):
                yield Replicated(comm, f"value of {name}", piece.data)
                yield Replicated(comm, f"gradient of {name}", piece.grad)
                for kind, array in state.items():
                    yield Replicated(comm, f"{kind} of {name}", array[piece.state])

    @property
    @abstractmethod
    def replica_groups(self) -> tuple[Communicator, ...]:
        """The ranks that hold the same pieces, along each dimension of the mesh."""

    @abstractmethod
    def arrays(self) -> list[Array]:
        """The flat arrays of values and gradients that a graph may refer to."""

    @abstractmethod
    def held(self) -> Held:
        """What stays in this rank's memory between two steps."""


def sum_over(mine: float, groups: Iterable[Communicator]) -> float:
    """The sum of a number over the ranks of all groups, one dimension after another."""
    total = np.array([mine])
    for comm in groups:
        comm.Allreduce(total.copy(), total)
    return float(total[0])
