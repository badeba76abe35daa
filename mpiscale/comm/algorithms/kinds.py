"""The kinds of collective operations, each a decorator for the algorithms of its kind.

An algorithm is written once, as steps on a flat array that MPI can carry
(`running.py`). Its kind makes the call that users want out of it:

    @AllReduce
    def ring_all_reduce(x, total, comm, op): ...   steps: x [n] -> total [n]

    y = ring_all_reduce(x, comm)                   any shape, strides and type of number
    ring_all_reduce(x, comm, np.maximum, out=x)    in place
    request = ring_all_reduce.start(x, comm)       non-blocking: .Test(), .Wait()

op is a NumPy ufunc of two arrays, associative and commutative: np.add, np.maximum,
np.minimum, np.multiply. 16-bit floats are reduced in float32 and rounded once. All
arguments but x are alike on all ranks. The communicator may be any one of ours or of
mpi4py; its messages have tag 0, so nobody else may use that meanwhile.

kind            x on rank r        result on rank r
AllReduce       [n]                the sum over the ranks
ReduceScatter   [n], in p chunks   chunk r of the sum
AllGather       chunk r            [n], all chunks in the order of the ranks
AllToAll        p chunks           chunk r of each rank's x, in the order of the ranks
Broadcast       [n]                the root's, in x itself
Reduce          [n]                the sum on the root, None elsewhere
Gather          chunk r            [n], all chunks, on the root; None elsewhere
Scatter         p chunks on root   chunk r

Where chunks may differ in length, `counts` gives their numbers of elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec

import numpy as np

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.checks import (
    Counts,
    array_of,
    check_length,
    check_root,
    checked_counts,
    is_chunk_of,
)
from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.running import Running, Steps
from mpiscale.comm.buffers import Landing, carried_dtype, outgoing
from mpiscale.comm.communicator import Communicator
from mpiscale.errors import block_length

P = ParamSpec("P")


class Algorithm(Generic[P]):
    """A collective written as steps; the kinds below add the calls."""

    def __init__(self, steps: Callable[P, Steps]) -> None:
        self.steps = steps
        self.name, self.__doc__ = steps.__name__, steps.__doc__

    def __repr__(self) -> str:
        return self.name


class AllReduce(Algorithm[[Array, Array, Communicator, np.ufunc]]):
    """steps(x [n], total [n], comm, op): fill total with the sum of x over the ranks.

    x stays as it is, unless it is total: in place. There are at least two ranks.
    """

    def __call__(
        self, x: Array, comm: Communicator, op: np.ufunc = np.add, out: Any = None
    ) -> Array:
        """Return the sum of every rank's x, in `out` if given; out=x is in place."""
        return self.start(x, comm, op, out).value()

    def start(
        self, x: Array, comm: Communicator, op: np.ufunc = np.add, out: Any = None
    ) -> Running:
        """Start to reduce; x and out must be left alone until the request is done."""
        terms, landing = _terms_and_sums(x, out)
        steps = self.steps(terms, landing.wire, comm, op)
        if comm.size == 1:
            steps = _copy(terms, landing.wire)
        return Running(steps, landing.finish, landing.target)


class ReduceScatter(Algorithm[[Chunks, Chunks, Communicator, np.ufunc]]):
    """steps(x, sums, comm, op): leave in sums[rank] the sum of x[rank] over the ranks.

    x stays as it is, unless it is sums: in place. The other chunks of sums are working
    space. There are at least two ranks.
    """

    def __call__(
        self,
        x: Array,
        comm: Communicator,
        op: np.ufunc = np.add,
        out: Any = None,
        counts: Counts = None,
    ) -> Array:
        """Return chunk `rank` of the sum of every rank's x, flat.

        counts: of the chunks; by default x is cut as by `np.array_split`. If out is the
        memory of chunk `rank` of x, then x itself is the working space, and its other
        chunks are lost.
        """
        return self.start(x, comm, op, out, counts).value()

    def start(
        self,
        x: Array,
        comm: Communicator,
        op: np.ufunc = np.add,
        out: Any = None,
        counts: Counts = None,
    ) -> Running:
        """Start to reduce; x and out must be left alone until the request is done."""
        counts = checked_counts(counts, x.size, comm.size)
        out = array_of(x, counts[comm.rank], out)
        in_place = is_chunk_of(x, counts, comm.rank, out)
        terms, landing = _terms_and_sums(x, x if in_place else None)
        sums = Chunks(landing.wire, counts)
        steps = self.steps(Chunks(terms, counts), sums, comm, op)
        if comm.size == 1:
            steps = _copy(terms, landing.wire)

        def finish() -> None:
            out[...] = sums[comm.rank].reshape(out.shape)

        return Running(steps, finish, out)


class AllGather(Algorithm[[Chunks, Communicator]]):
    """steps(chunks, comm): fill all chunks; chunk `rank` is there already."""

    def __call__(
        self, x: Array, comm: Communicator, out: Any = None, counts: Counts = None
    ) -> Array:
        """Return every rank's x, flat, one after the other; x may be its part of out.

        counts: elements of each rank's x, where they differ.
        """
        return self.start(x, comm, out, counts).value()

    def start(
        self, x: Array, comm: Communicator, out: Any = None, counts: Counts = None
    ) -> Running:
        """Start to gather; x and out must be left alone until the request is done."""
        counts = [x.size] * comm.size if counts is None else list(counts)
        checked_counts(counts, sum(counts), comm.size)
        check_length("x", x.size, counts[comm.rank])
        out = array_of(x, sum(counts), out)
        in_place = is_chunk_of(out, counts, comm.rank, x)
        landing = Landing(out, "out", filled=in_place)
        chunks = Chunks(landing.wire, counts)
        if not in_place:
            chunks[comm.rank][...] = outgoing(x, "x")
        return Running(self.steps(chunks, comm), landing.finish, out)


class AllToAll(Algorithm[[Chunks, Chunks, Communicator]]):
    """steps(send, recv, comm): send[s] goes to rank s, recv[r] comes from rank r."""

    def __call__(
        self,
        x: Array,
        comm: Communicator,
        out: Any = None,
        send_counts: Counts = None,
        recv_counts: Counts = None,
    ) -> Array:
        """Return, flat, the chunk that each rank had for this one.

        Without counts x is cut into equal chunks. With them both are needed: elements
        for each rank, and from each rank.
        """
        return self.start(x, comm, out, send_counts, recv_counts).value()

    def start(
        self,
        x: Array,
        comm: Communicator,
        out: Any = None,
        send_counts: Counts = None,
        recv_counts: Counts = None,
    ) -> Running:
        """Start to exchange; x and out must be left alone until the request is done."""
        if (send_counts is None) != (recv_counts is None):
            raise ValueError("pass both send_counts and recv_counts, or neither")
        alike = send_counts is None
        if send_counts is None or recv_counts is None:
            block = block_length(x.size, comm.size, "x")
            send_counts = recv_counts = [block] * comm.size
        checked_counts(send_counts, x.size, comm.size)
        out = array_of(x, sum(recv_counts), out)
        checked_counts(recv_counts, out.size, comm.size)
        wire, landing = outgoing(x, "x"), Landing(out, "out")
        if array_module(x).may_share_memory(wire, landing.wire):
            wire = wire.copy()
        send = Chunks(wire, send_counts, alike)
        recv = Chunks(landing.wire, recv_counts, alike)
        return Running(self.steps(send, recv, comm), landing.finish, out)


class Broadcast(Algorithm[[Array, Communicator, int]]):
    """steps(x [n], comm, root): fill x with the root's."""

    def __call__(self, x: Array, comm: Communicator, root: int = 0) -> Array:
        """Fill x with the root's x, and return it."""
        return self.start(x, comm, root).value()

    def start(self, x: Array, comm: Communicator, root: int = 0) -> Running:
        """Start to broadcast; x must be left alone until the request is done."""
        check_root(root, comm.size)
        landing = Landing(x, "x", filled=True)
        return Running(self.steps(landing.wire, comm, root), landing.finish, x)


class Reduce(Algorithm[[Array, Array, Communicator, np.ufunc, int]]):
    """steps(x [n], total [n], comm, op, root): leave the sum in the root's total.

    The others' total is working space. There are at least two ranks.
    """

    def __call__(
        self, x: Array, comm: Communicator, op: np.ufunc = np.add, root: int = 0
    ) -> Array | None:
        """Return the sum of every rank's x on the root, None on the others."""
        running = self.start(x, comm, op, root)
        running.Wait()
        return running.result

    def start(
        self, x: Array, comm: Communicator, op: np.ufunc = np.add, root: int = 0
    ) -> Running:
        """Start to reduce; x must be left alone until the request is done."""
        check_root(root, comm.size)
        terms, landing = _terms_and_sums(x, None)
        result = landing.target if comm.rank == root else None
        steps = self.steps(terms, landing.wire, comm, op, root)
        if comm.size == 1:
            steps = _copy(terms, landing.wire)
        return Running(steps, landing.finish, result)


class Gather(Algorithm[[Array, Chunks, Communicator, int]]):
    """steps(mine [counts[rank]], chunks, comm, root): fill the root's chunks.

    On other ranks chunks.flat is empty; their counts are right.
    """

    def __call__(
        self, x: Array, comm: Communicator, root: int = 0, counts: Counts = None
    ) -> Array | None:
        """Return every rank's x on the root, flat and in order; None on the others.

        counts: elements of each rank's x, where they differ.
        """
        running = self.start(x, comm, root, counts)
        running.Wait()
        return running.result

    def start(
        self, x: Array, comm: Communicator, root: int = 0, counts: Counts = None
    ) -> Running:
        """Start to gather; x must be left alone until the request is done."""
        check_root(root, comm.size)
        counts = [x.size] * comm.size if counts is None else list(counts)
        checked_counts(counts, sum(counts), comm.size)
        check_length("x", x.size, counts[comm.rank])
        is_root = comm.rank == root
        out = array_module(x).empty(sum(counts) if is_root else 0, x.dtype)
        chunks = Chunks(out.view(carried_dtype(x.dtype)), counts)
        steps = self.steps(outgoing(x, "x"), chunks, comm, root)
        return Running(steps, result=out if is_root else None)


class Scatter(Algorithm[[Chunks, Array, Communicator, int]]):
    """steps(chunks, mine [counts[rank]], comm, root): fill mine from the root's chunks.

    On other ranks chunks.flat is empty; their counts are right.
    """

    def __call__(
        self,
        x: Array | None,
        out: Array,
        comm: Communicator,
        root: int = 0,
        counts: Counts = None,
    ) -> Array:
        """Fill out with chunk `rank` of the root's x, and return it.

        x: on the root alone. counts: of the chunks, where they differ.
        """
        return self.start(x, out, comm, root, counts).value()

    def start(
        self,
        x: Array | None,
        out: Array,
        comm: Communicator,
        root: int = 0,
        counts: Counts = None,
    ) -> Running:
        """Start to scatter; x and out must be left alone until the request is done."""
        check_root(root, comm.size)
        counts = [out.size] * comm.size if counts is None else list(counts)
        check_length("out", out.size, counts[comm.rank])
        landing = Landing(out, "out")
        if comm.rank == root:
            if x is None or x.dtype != out.dtype:
                raise TypeError(f"x on the root must be an array of type {out.dtype}")
            checked_counts(counts, x.size, comm.size)
            chunks = Chunks(outgoing(x, "x"), counts)
        else:
            chunks = Chunks(landing.wire[:0], counts)
        steps = self.steps(chunks, landing.wire, comm, root)
        return Running(steps, landing.finish, out)


def _terms_and_sums(x: Array, out: Array | None) -> tuple[Array, Landing]:
    """x flat, and flat space for the sums, which ends up in out (new if None).

    Both are the same memory if out is x.
    """
    target = array_module(x).empty(x.shape, x.dtype) if out is None else out
    if (target.shape, target.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"out must be like x, {x.dtype} of shape {x.shape}, got {target.dtype} of "
            f"shape {target.shape}"
        )
    landing = Landing(target, "out", reduced=True, filled=target is x)
    if target is x:
        return landing.wire, landing
    terms = outgoing(x, "x", reduced=True)
    if array_module(x).may_share_memory(terms, landing.wire):
        terms = terms.copy()
    return terms, landing


def _copy(source: Array, target: Array) -> Steps:
    """What a reduction over one rank has to do."""
    if target is not source:
        target[...] = source
    yield ()
