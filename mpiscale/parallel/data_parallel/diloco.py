"""DiLoCo: replicas train alone for H steps, then agree on one direction.

    inner    every rank: H steps of its own optimizer (AdamW) on its own samples
    outer    delta = start - average over the ranks of where they have come
             start = start - outer_lr (delta + momentum v),  v = momentum v + delta
             every rank goes on from the new start

With H = 1, outer_lr = 1 and no momentum it is the averaging of parameters; with plain
SGD inside and no momentum, local SGD. The optimizer's inner state stays on its rank.

Replicated: the start and the outer velocity v, 2 Psi elements more than plain data
parallelism holds; parameters between two outer steps are each rank's own. Traffic:
2 (N - 1) / N Psi elements in H steps, 1 / H of data parallelism.

A rank's loss is the mean over its own labels, since it steps alone.

Source: A. Douillard et al., "DiLoCo: Distributed low-communication training of
language models", 2023, algorithm 1; S. Stich, "Local SGD converges fast and
communicates little", ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpiscale.backend import Array, DType
from mpiscale.comm.communicator import Communicator
from mpiscale.data.batches import IGNORE, Batch
from mpiscale.nn.flat import FlatParameters, Segment
from mpiscale.optim.sgd import SGD
from mpiscale.parallel.data_parallel.all_reduce_after_backward import (
    AllReduceAfterBackward,
)
from mpiscale.parallel.data_parallel.check_replicas import Replicated
from mpiscale.parallel.data_parallel.interface import Held


@dataclass
class Start:
    """Where all ranks began their inner steps, and the outer gradient; flat."""

    values: Array
    delta: Array

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.values.size

    @property
    def grad_dtype(self) -> DType:
        """Type of the outer gradient."""
        return self.delta.dtype

    def segments(self) -> list[Segment]:
        """All in one; nothing decays here."""
        return [Segment(self.values, self.delta, slice(0, self.size), False)]


class DiLoCo(AllReduceAfterBackward):
    """Replicas that meet every `every` steps.

    Args:
        flat: the materialised model's flat arrays, the same on every rank.
        comm: the replicas.
        every: inner steps between two outer ones, H.
        outer_lr, momentum: of the outer Nesterov step.
    """

    def __init__(
        self,
        flat: FlatParameters,
        comm: Communicator,
        every: int,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        super().__init__(flat, comm)
        self.every, self.outer_lr, self.inner_steps = every, outer_lr, 0
        self.start = Start(flat.data.copy(), np.zeros_like(flat.grad))
        self.outer = SGD(self.start, momentum, nesterov=True)

    def share(self, batch: Batch) -> Batch:
        """This rank's samples, as a batch of its own."""
        mine = super().share(batch)
        return mine.with_valid(int((mine.labels != IGNORE).sum()))

    def total_loss(self, mine: float) -> float:
        """This rank's own loss: to add them up would cost a message a step."""
        return mine

    def finish(self) -> None:
        """Nothing is sent: the gradient is this rank's own."""
        self.flat.complete_grad()

    def publish(self) -> None:
        """After every H-th inner step: the outer step."""
        self.inner_steps += 1
        if self.inner_steps % self.every == 0:
            self._outer_step()

    def _outer_step(self) -> None:
        delta = self.start.delta
        np.subtract(self.start.values, self.flat.data, out=delta)
        if self.comm.size > 1:
            self.comm.Allreduce(MPI.IN_PLACE, delta)
            delta /= self.comm.size
        self.outer.step(self.outer_lr)
        self.flat.data[...] = self.start.values

    def replicated(self, state: dict[str, Array]) -> Iterable[Replicated]:
        """The start; all else is each rank's own."""
        yield Replicated(self.comm, "the outer step's start", self.start.values)

    def held(self) -> Held:
        """Parameters; with the gradients also the start, delta and velocity."""
        velocity = self.outer.velocity
        outer = self.start.values.nbytes + self.start.delta.nbytes
        outer += 0 if velocity is None else velocity.nbytes
        return Held(self.flat.data.nbytes, self.flat.grad.nbytes + outer)
