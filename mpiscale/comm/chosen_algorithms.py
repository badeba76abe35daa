# ruff: noqa: N802  (the names are mpi4py's)
"""A communicator whose collectives are carried out by chosen algorithms.

    ring = with_algorithms(comm, Algorithms(all_reduce=lambda comm: ring_all_reduce))
    ring.Allreduce(x, total)       every strategy given `ring` now uses the ring

So no strategy knows which algorithm it runs on. The kinds that are not chosen, and all
other calls, go to the communicator itself. The algorithms' messages travel on a
communicator of their own, so they can't be taken for those of the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from mpi4py import MPI

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.checks import check_length
from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.kinds import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
)
from mpiscale.comm.algorithms.running import Running, nothing
from mpiscale.comm.buffers import BlockSpec, block_spec
from mpiscale.comm.communicator import Blocks, Communicator, Request, SendBuffer
from mpiscale.errors import block_length

UFUNCS = (
    (MPI.SUM, np.add),
    (MPI.MAX, np.maximum),
    (MPI.MIN, np.minimum),
    (MPI.PROD, np.multiply),
)


@dataclass(frozen=True)
class Algorithms:
    """Makes each kind's algorithm for a group of ranks; None: the communicator's own.

    Called once for each communicator, on all its ranks: a hierarchical algorithm has
    to find the nodes first.
    """

    all_reduce: Callable[[Communicator], AllReduce] | None = None
    reduce_scatter: Callable[[Communicator], ReduceScatter] | None = None
    all_gather: Callable[[Communicator], AllGather] | None = None
    all_to_all: Callable[[Communicator], AllToAll] | None = None


def with_algorithms(comm: Communicator, algorithms: Algorithms) -> Communicator:
    """The same group of ranks, with these algorithms; collective."""
    return cast(Communicator, ChosenAlgorithms(comm, algorithms))


class ChosenAlgorithms:
    """Stands for `inner`, except that the chosen kinds run as steps of messages.

    Calls in flight are carried out one after the other, in the order in which they
    were started, which is the same on all ranks; so messages of two calls never mix.
    """

    def __init__(self, inner: Communicator, algorithms: Algorithms) -> None:
        self.inner, self.algorithms, self.name = inner, algorithms, inner.name
        self._messages = inner.Split(0, inner.rank)
        self._messages.name = inner.name
        self._queue: deque[Queued] = deque()
        made = {
            kind: make(self._messages)
            for kind, make in vars(algorithms).items()
            if make is not None
        }
        self._all_reduce: AllReduce | None = made.get("all_reduce")
        self._reduce_scatter: ReduceScatter | None = made.get("reduce_scatter")
        self._all_gather: AllGather | None = made.get("all_gather")
        self._all_to_all: AllToAll | None = made.get("all_to_all")

    def __getattr__(self, name: str) -> Any:  # called only for what is not here
        return getattr(self.inner, name)

    def Split(self, color: int = 0, key: int = 0) -> Communicator:
        """A communicator of the ranks with the same color, with the same choice."""
        return with_algorithms(self.inner.Split(color, key), self.algorithms)

    # All-reduce

    def Allreduce(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> None:
        """Give every rank the sum over the ranks."""
        self.Iallreduce(sendbuf, recvbuf, op).Wait()

    def Iallreduce(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> Request:
        """Start an Allreduce."""
        algorithm = self._all_reduce
        if algorithm is None:
            return self.inner.Iallreduce(sendbuf, recvbuf, op)
        x = _input(sendbuf, recvbuf, recvbuf.size)
        x, ufunc = x.reshape(recvbuf.shape), _ufunc(op)
        return self._start(lambda: algorithm.start(x, self._messages, ufunc, recvbuf))

    # Reduce-scatter

    def Reduce_scatter_block(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> None:
        """Give rank r block r of the sum over the ranks."""
        self.Ireduce_scatter_block(sendbuf, recvbuf, op).Wait()

    def Ireduce_scatter_block(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> Request:
        """Start a Reduce_scatter_block."""
        algorithm = self._reduce_scatter
        if algorithm is None:
            return self.inner.Ireduce_scatter_block(sendbuf, recvbuf, op)
        ufunc = _ufunc(op)
        if isinstance(sendbuf, MPI.InPlaceType):
            n = block_length(recvbuf.size, self.inner.size, "recvbuf")
            x, out = recvbuf.flatten(), array_module(recvbuf).empty(n, recvbuf.dtype)
        else:
            x, out = _input(sendbuf, recvbuf, recvbuf.size * self.inner.size), recvbuf

        def finish() -> None:
            if out is not recvbuf:
                recvbuf.flat[: out.size] = out

        return self._start(
            lambda: algorithm.start(x, self._messages, ufunc, out), finish
        )

    # All-gather

    def Allgather(self, sendbuf: SendBuffer, recvbuf: Array) -> None:
        """Give every rank all ranks' arrays, one after the other."""
        self.Iallgather(sendbuf, recvbuf).Wait()

    def Iallgather(self, sendbuf: SendBuffer, recvbuf: Array) -> Request:
        """Start an Allgather."""
        if self._all_gather is None:
            return self.inner.Iallgather(sendbuf, recvbuf)
        n = block_length(recvbuf.size, self.inner.size, "recvbuf")
        spec = block_spec((recvbuf, [n] * self.inner.size), self.inner.size, "recvbuf")
        return self._gather_blocks(self._all_gather, sendbuf, spec)

    def Allgatherv(self, sendbuf: SendBuffer, recvbuf: Blocks) -> None:
        """The same with blocks of any lengths, counts[r] elements from rank r."""
        if self._all_gather is None:
            self.inner.Allgatherv(sendbuf, recvbuf)
            return
        spec = block_spec(recvbuf, self.inner.size, "recvbuf")
        self._gather_blocks(self._all_gather, sendbuf, spec).Wait()

    def _gather_blocks(
        self, algorithm: AllGather, sendbuf: SendBuffer, into: BlockSpec
    ) -> Request:
        mine = into.array.reshape(-1)[into.slices()[self.inner.rank]]
        x = _input(sendbuf, mine, into.counts[self.inner.rank])
        packed = Packed(into)
        return self._start(
            lambda: algorithm.start(x, self._messages, packed.array, into.counts),
            packed.unpack,
        )

    # All-to-all

    def Alltoall(self, sendbuf: SendBuffer, recvbuf: Array) -> None:
        """Send block s to rank s; receive block r from rank r."""
        self.Ialltoall(sendbuf, recvbuf).Wait()

    def Ialltoall(self, sendbuf: SendBuffer, recvbuf: Array) -> Request:
        """Start an Alltoall."""
        algorithm = self._all_to_all
        if algorithm is None:
            return self.inner.Ialltoall(sendbuf, recvbuf)
        x = _input(sendbuf, recvbuf, recvbuf.size)
        return self._start(lambda: algorithm.start(x, self._messages, recvbuf))

    def Alltoallv(self, sendbuf: Blocks | MPI.InPlaceType, recvbuf: Blocks) -> None:
        """The same with blocks of any lengths."""
        algorithm = self._all_to_all
        if algorithm is None:
            self.inner.Alltoallv(sendbuf, recvbuf)
            return
        into = block_spec(recvbuf, self.inner.size, "recvbuf")
        in_place = isinstance(sendbuf, MPI.InPlaceType)
        of = into if in_place else block_spec(sendbuf, self.inner.size, "sendbuf")
        flat = of.array.reshape(-1)
        x = array_module(flat).concatenate([flat[block] for block in of.slices()])
        packed = Packed(into)
        self._start(
            lambda: algorithm.start(
                x, self._messages, packed.array, of.counts, into.counts
            ),
            packed.unpack,
        ).Wait()

    def _start(
        self, begin: Callable[[], Running], finish: Callable[[], None] = nothing
    ) -> Queued:
        queued = Queued(self._queue, begin, finish)
        self._queue.append(queued)
        queued.Test()
        return queued


class Queued:
    """A call that begins when all calls before it in the queue are done."""

    def __init__(
        self,
        queue: deque[Queued],
        begin: Callable[[], Running],
        finish: Callable[[], None],
    ) -> None:
        self._queue, self._begin, self._finish = queue, begin, finish
        self._running: Running | None = None
        self._done = False

    def Wait(self) -> Literal[True]:
        """Return when the call is done and its arrays may be used."""
        while not self._done:
            self._queue[0]._run(waiting=True)
        return True

    def Test(self) -> bool:
        """Whether the call is done; does not wait, but moves the queue on."""
        while not self._done and self._queue[0]._run(waiting=False):
            pass
        return self._done

    def _run(self, waiting: bool) -> bool:
        """Move on the first call of the queue; whether it is done."""
        if self._running is None:
            self._running = self._begin()
        self._done = self._running.Wait() if waiting else self._running.Test()
        if self._done:
            self._queue.popleft()
            self._finish()
        return self._done


class Packed:
    """Blocks at any places of an array, as one array [sum of counts] without gaps."""

    def __init__(self, spec: BlockSpec) -> None:
        self._spec = spec
        flat, n = spec.array.reshape(-1), sum(spec.counts)
        self._chunks = Chunks(flat[:n], spec.counts)
        is_view = spec.array.flags.c_contiguous
        self._in_place = is_view and self._chunks.starts[:-1] == spec.displs
        if not self._in_place:
            array = array_module(flat).empty(n, flat.dtype)
            self._chunks = Chunks(array, spec.counts)

    @property
    def array(self) -> Array:
        """The blocks, one after the other; the array itself if it has no gaps."""
        return self._chunks.flat

    def unpack(self) -> None:
        """Bring the blocks to their places."""
        if self._in_place:
            return
        for r, block in enumerate(self._spec.slices()):
            self._spec.array.flat[block] = self._chunks[r]


def _input(sendbuf: SendBuffer, in_place: Array, n: int) -> Array:
    """What this rank gives: sendbuf, or what the receive buffer holds -> n elements."""
    if isinstance(sendbuf, MPI.InPlaceType):
        return in_place
    check_length("sendbuf", sendbuf.size, n)
    if sendbuf.dtype != in_place.dtype:
        raise TypeError(
            f"sendbuf has elements of type {sendbuf.dtype}, recvbuf {in_place.dtype}: "
            "convert one of them with astype"
        )
    return sendbuf


def _ufunc(op: MPI.Op) -> np.ufunc:
    for known, ufunc in UFUNCS:
        if op == known:
            return ufunc
    raise ValueError("op must be one of MPI.SUM, MPI.MAX, MPI.MIN, MPI.PROD")
