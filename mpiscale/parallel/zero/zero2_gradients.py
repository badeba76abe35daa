"""ZeRO stage 2: gradients are cut too; only parameters are whole.

A layer's gradient exists whole only from its backward to its reduction, which starts
as soon as it is complete and leaves this rank's chunk of the sum:

    backward           layer 3 | layer 2 | layer 1 | rest
    reduce-scatter              [ 3 ]     [ 2 ]      [ 1 ] [ rest ]
    update, all-gather                                             as in stage 1

Traffic: 2 (N - 1) / N Psi elements in a step of one micro-batch; each further one adds
a reduce-scatter, (N - 1) / N Psi, since its whole gradients cannot be kept: `no_sync()`
defers nothing here. The chunks are added up, in float32 or better. A rank holds

    Psi (bytes of a parameter) + Psi (bytes of a gradient + K) / N,

and for a while the whole gradients of the layers that backward is at.

Source: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models", SC 2020, sections 5.2 (P_os+g) and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.algorithms.running import Running
from mpiscale.comm.communicator import Request
from mpiscale.nn.parameter import Parameter
from mpiscale.parallel.data_parallel.interface import Held
from mpiscale.parallel.data_parallel.start_when_ready import StartWhenReady
from mpiscale.parallel.zero.buffer_pool import BufferPool
from mpiscale.parallel.zero.whole_values import WholeValues


class Zero2(WholeValues):
    """Whole parameters on every rank; gradients are reduced layer by layer."""

    def _allocate(self, seed: int) -> None:
        self._allocate_grads()
        self._allocate_values(seed)

    def _allocate_grads(self) -> None:
        """Chunks for the sums; whole gradients are made when backward needs them."""
        self.grad_chunks = [np.zeros(u.chunk, self.grad_dtype) for u in self.units]
        self._whole_grads: dict[int, Array] = {}  # by index of the unit
        self._grad_pool = BufferPool(self.grad_dtype)
        for i, unit in enumerate(self.units):
            for parameter, place in zip(unit.parameters, unit.places, strict=True):
                parameter.grad_space = self._space(i, place, parameter)
        # Backward completes the layers from the last to the first, and then the rest.
        self._order = sorted(
            range(len(self.units)), key=lambda i: (not self.units[i].name, -i)
        )
        self._reduction = StartWhenReady(
            [self.units[i].parameters for i in self._order],
            lambda turn: self._start(self._order[turn]),
        )

    def _space(self, i: int, place: slice, p: Parameter) -> Callable[[], Array]:
        """For `Tensor.grad_space`: a view of the unit's whole gradient, made if new."""

        def space() -> Array:
            if i not in self._whole_grads:
                whole = self._grad_pool.take(self.units[i].padded)
                whole[self.units[i].size :] = 0
                self._whole_grads[i] = whole
            return self._whole_grads[i][place].reshape(p.local_shape)

        return space

    def _start(self, i: int) -> Request:
        """Start the reduce-scatter of unit i; its sum is added to the chunk."""
        unit = self.units[i]
        unit.fill_missing_grads()
        whole = self._whole_grads.pop(i)
        for parameter in unit.parameters:
            parameter.grad = None  # the whole gradient is not ours any more
        total = np.empty(unit.chunk, self.grad_dtype)
        request = self.comm.Ireduce_scatter_block(whole, total)

        def done() -> None:
            self.grad_chunks[i] += total
            self._grad_pool.give_back(whole)

        return Running(iter([(request,)]), done)

    def zero_grad(self) -> None:
        """Forget all gradients, at the beginning of a step."""
        super().zero_grad()
        for chunk in self.grad_chunks:
            chunk[...] = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside is reduced all the same, and added to the chunks."""
        yield
        self._finish_backward()

    def _finish_backward(self) -> None:
        """Start what no gradient has started; wait until the sums are in the chunks."""
        self._reduction.finish()

    def finish(self) -> None:
        """Wait until the chunks are sums over all micro-batches of all ranks."""
        self._finish_backward()
        self._sum_over_replicas()

    def arrays(self) -> list[Array]:
        """Every unit's values; whole gradients where there are any."""
        return self._values + list(self._whole_grads.values())

    def held(self) -> Held:
        """All values; this rank's chunks of the gradients."""
        return Held(
            sum(values.nbytes for values in self._values),
            sum(chunk.nbytes for chunk in self.grad_chunks),
        )
