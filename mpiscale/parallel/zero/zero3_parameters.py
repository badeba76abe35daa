"""ZeRO stage 3: parameters are cut too; a layer is whole only while it runs.

    forward     gather 1 | layer 1 | release    gather 2 | layer 2 | release   ...
    backward    gather 2 | layer 2 | release, reduce-scatter    gather 1 | ...
    update      chunks alone; nobody needs whole parameters

The order of the gathers of one step is recorded, and in the next step the gather that
comes next is started one ahead, so that it runs during the computation before it
(`gather_order.py`).

Traffic: each unit is gathered for forward and for backward and its gradient reduced,
3 (N - 1) / N Psi elements a step with one micro-batch, and as much again for each
further one. A rank holds

    Psi (bytes of a parameter + of a gradient + K) / N,

and for a while the whole parameters of two units and the whole gradients of those that
backward is at.

What lies outside of lists of layers (embeddings, last norm, head) is one unit: gathered
by its first module, released by its last, so that a table used at both ends is gathered
once a pass.

Source: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models", SC 2020, sections 5.3 (P_os+g+p) and 7; Y. Zhao et al., "PyTorch
FSDP: Experiences on scaling fully sharded data parallel", VLDB 2023, for units.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Request
from mpiscale.nn.module import Module
from mpiscale.parallel.data_parallel.check_replicas import Replicated
from mpiscale.parallel.data_parallel.interface import Held
from mpiscale.parallel.zero.buffer_pool import BufferPool
from mpiscale.parallel.zero.gather_order import GatherOrder
from mpiscale.parallel.zero.sharded import Sharded
from mpiscale.parallel.zero.unit import running_modules
from mpiscale.parallel.zero.zero2_gradients import Zero2
from mpiscale.tensor import Tensor

END_OF_BACKWARD = -1
RELEASED = "its rank holds a part; ZeRO-3 gathers it while its layer runs"


class Zero3(Zero2):
    """Chunks of everything on every rank; a layer's parameters meet while it runs."""

    def _allocate(self, seed: int) -> None:
        self._allocate_grads()
        self._gathers = self.comm.Split(0, self.comm.rank)  # reductions go their way
        self._value_pool = BufferPool(self.dtype)
        self._whole: dict[int, Array] = {}  # gathered units
        self._arriving: dict[int, tuple[Array, Request]] = {}
        self._order_of_gathers = GatherOrder()
        self.value_chunks = []
        for unit in self.units:
            chunk = np.zeros(unit.chunk, self.dtype)
            unit.draw(chunk, seed, self.dtype)
            self.value_chunks.append(chunk)
            unit.without_values(RELEASED)
        self._wrap_modules()

    def _wrap_modules(self) -> None:
        """Let every layer gather its units before it runs, and release them after."""
        unit_of = {id(p): i for i, u in enumerate(self.units) for p in u.parameters}
        needs = [
            (module, sorted({unit_of[id(p)] for p in module.parameters()}))
            for module in running_modules(self.model)
        ]
        last_of = {i: module for module, units in needs for i in units}
        for module, units in needs:
            ending = [i for i in units if last_of[i] is module]
            self._wrap(module, units, ending)

    def _wrap(self, module: Module, units: list[int], ending: list[int]) -> None:
        inner = module.forward  # type: ignore[attr-defined]

        def gather() -> None:
            for i in units:
                self._gather(i)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            gather()
            y = inner(*args, **kwargs)
            for i in ending:
                self._release(i)
            return before_backward(y, gather)

        module.forward = forward  # type: ignore[attr-defined]

    # Gathering and releasing

    def _gather(self, i: int) -> None:
        """Unit i has its values when this returns, and the next one is on its way."""
        if i in self._whole:
            return
        if i not in self._arriving:
            self._start_gather(i)
        whole, request = self._arriving.pop(i)
        request.Wait()
        self._whole[i] = whole
        self.units[i].attach_values(whole)
        upcoming = self._order_of_gathers.after(i)
        if upcoming is not None and upcoming not in self._arriving.keys() | self._whole:
            self._start_gather(upcoming)

    def _start_gather(self, i: int) -> None:
        self._agree(i)
        whole = self._value_pool.take(self.units[i].padded)
        request = self._gathers.Iallgather(self.value_chunks[i], whole)
        self._arriving[i] = whole, request

    def _agree(self, i: int) -> None:
        """Refuse to gather different units on different ranks, which would hang."""
        asked = np.empty(self.comm.size, np.int64)
        self._gathers.Allgather(np.array([i]), asked)
        if (asked != i).any():
            words = map(self._words, asked.tolist())
            wants = "; ".join(f"rank {r}: {unit}" for r, unit in enumerate(words))
            raise RuntimeError(
                f"ranks do not run the same layers in the same order ({wants}): under "
                "ZeRO-3 every rank must call every layer equally often, because all "
                "of them hold a part of it. Call it on an empty batch where there is "
                "nothing to compute"
            )

    def _words(self, i: int) -> str:
        if i == END_OF_BACKWARD:
            return "the end of backward"
        return self.units[i].name or "embeddings and head"

    def _release(self, i: int) -> None:
        """Give up unit i's whole values."""
        whole = self._whole.pop(i, None)
        if whole is None:
            return
        self.units[i].without_values(RELEASED)
        if sys.getrefcount(whole) > 2:  # this name, and the argument of getrefcount
            raise RuntimeError(
                f"something keeps values of {self._words(i)} after its layer has run; "
                "they would be overwritten. An op must read `parameter.data` in its "
                "backward, not keep the array"
            )
        self._value_pool.give_back(whole)

    # The step

    def _start(self, i: int) -> Request:
        """Unit i's gradients are complete: its values are not needed any more."""
        self._release(i)
        return super()._start(i)

    def zero_grad(self) -> None:
        """Forget all gradients, at the beginning of a step."""
        super().zero_grad()
        self._order_of_gathers.begin()

    def _finish_backward(self) -> None:
        self._agree(END_OF_BACKWARD)
        super()._finish_backward()

    def finish(self) -> None:
        """Wait until the chunks are sums over all micro-batches of all ranks."""
        super().finish()
        self._order_of_gathers.end()

    def publish(self) -> None:
        """Whole values are stale now; the next use gathers them anew."""
        for whole, request in self._arriving.values():
            request.Wait()
            self._value_pool.give_back(whole)
        self._arriving.clear()
        for i in list(self._whole):
            self._release(i)

    def replicated(self, state: dict[str, Array]) -> Iterable[Replicated]:
        """What the replicas have in common: `comm`'s ranks hold nothing alike."""
        return Sharded.replicated(self, state)

    def arrays(self) -> list[Array]:
        """What is gathered now; whole gradients where there are any."""
        return [*self._whole.values(), *self._whole_grads.values()]

    def held(self) -> Held:
        """This rank's chunks."""
        return Held(
            sum(chunk.nbytes for chunk in self.value_chunks),
            sum(chunk.nbytes for chunk in self.grad_chunks),
        )


def before_backward(y: Tensor, call: Callable[[], None]) -> Tensor:
    """`y` itself, but `call()` comes first when backward reaches it."""

    def backward(grad: Array) -> tuple[Array]:
        call()
        return (grad,)

    return Tensor.from_op(y.data, (y,), backward)
