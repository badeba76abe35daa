"""ZeRO stage 1: the optimizer's state is cut; parameters and gradients are whole.

    backward          every rank has the gradient of its own samples, whole
    reduce-scatter    rank r gets the sum over all ranks in its chunk r
    update            rank r updates chunk r, with chunk r of the optimizer's state
    all-gather        every rank gets all chunks of the updated parameters

A reduce-scatter and an all-gather are the two halves of a ring all-reduce, so the
traffic is that of plain data parallelism: 2 (N - 1) / N Psi elements a step. With K
bytes of optimizer state for each of Psi parameters a rank holds

    Psi (bytes of a parameter + of a gradient) + K Psi / N.

Gradients of several micro-batches are added up first and sent once a step.

Source: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models", SC 2020, sections 5.1 (P_os) and 7.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.nn.flat import space_in
from mpiscale.parallel.data_parallel.interface import Held
from mpiscale.parallel.zero.whole_values import WholeValues


class Zero1(WholeValues):
    """Whole parameters and gradients on every rank; each updates its own chunks."""

    def _allocate(self, seed: int) -> None:
        self._allocate_values(seed)
        self._grads = [np.zeros(unit.padded, self.grad_dtype) for unit in self.units]
        for unit, grads in zip(self.units, self._grads, strict=True):
            for parameter, place in zip(unit.parameters, unit.places, strict=True):
                parameter.grad_space = space_in(grads, place, parameter)
        self.grad_chunks = self._mine(self._grads)

    def finish(self) -> None:
        """Reduce-scatter: this rank's chunk becomes the sum over all ranks."""
        for unit, grads, mine in zip(
            self.units, self._grads, self.grad_chunks, strict=True
        ):
            unit.fill_missing_grads()
            total = np.empty_like(mine)
            self.comm.Reduce_scatter_block(grads, total)
            mine[...] = total
        self._sum_over_replicas()

    def arrays(self) -> list[Array]:
        """Every unit's."""
        return self._values + self._grads

    def held(self) -> Held:
        """All values and all gradients."""
        return Held(
            sum(values.nbytes for values in self._values),
            sum(grads.nbytes for grads in self._grads),
        )
