"""NCCL's operations on CuPy arrays: pointers, counts and type codes, queued on streams.

NCCL has no all-to-all and no operation on blocks of any lengths. They are groups of its
own calls, which start together and so can't wait for each other:

all-to-all         a send to and a receive from each rank
all-gather of      a broadcast from each rank
uneven blocks

What is only moved is counted in bytes, so that elements may be of any type.

Source: NCCL user guide, "Point-to-point communication" and "Group calls".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from mpi4py import MPI

from mpiscale.backend import Array
from mpiscale.comm.communicator import SendBuffer
from mpiscale.comm.pending import block_of
from mpiscale.errors import InputError

NAMES_OF_OPS = (
    (MPI.SUM, "SUM"),
    (MPI.PROD, "PROD"),
    (MPI.MAX, "MAX"),
    (MPI.MIN, "MIN"),
)


class Cuda(NamedTuple):
    """CuPy and its module for NCCL."""

    cupy: ModuleType
    nccl: ModuleType


def import_cuda() -> Cuda:
    """CuPy with NCCL.

    Raises:
        InputError: if one of them is not installed.
    """
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise InputError(
            f"NCCL needs CuPy ({error}): pip install 'mpiscale[cuda12]'"
        ) from error
    if not nccl.available:
        raise InputError("CuPy finds no NCCL: pip install nvidia-nccl-cu12")
    return Cuda(cupy, nccl)


class Message(NamedTuple):
    """One message to or from a peer, for the stream on which its array is ready."""

    sends: bool
    wire: Array
    peer: int
    stream: Any


class NcclCalls:
    """The calls of one rank on `comm`, a communicator of `cupy.cuda.nccl`.

    All arrays are wires: contiguous, on this rank's GPU. Collectives run on the current
    stream.
    """

    def __init__(self, comm: Any, cuda: Cuda, rank: int, size: int) -> None:
        self._comm, self._cuda, self._rank, self._size = comm, cuda, rank, size
        self._byte: int = cuda.nccl.NCCL_UINT8

    def all_reduce(self, send: SendBuffer, recv: Array, op: MPI.Op) -> None:
        """send [n] -> recv [n]"""
        self._reduce(self._comm.allReduce, _pointers(send, recv), recv, op)

    def reduce(
        self, send: SendBuffer, recv: Array | None, op: MPI.Op, root: int
    ) -> None:
        """send [n] -> recv [n] on the root, None elsewhere"""
        if recv is not None:
            self._reduce(self._comm.reduce, _pointers(send, recv), recv, op, root)
        elif not isinstance(send, MPI.InPlaceType):
            self._reduce(self._comm.reduce, (_pointer(send), 0), send, op, root)

    def reduce_scatter(self, send: Array, recv: Array, op: MPI.Op) -> None:
        """send [p, n] -> recv [1, n]"""
        self._reduce(self._comm.reduceScatter, _pointers(send, recv), recv, op)

    def _reduce(
        self,
        call: Callable[..., None],
        pointers: tuple[int, int],
        like: Array,
        op: MPI.Op,
        *root: int,
    ) -> None:
        if like.size:
            nccl = self._cuda.nccl
            code = getattr(nccl, f"NCCL_{like.dtype.name.upper()}")
            name = next(name for known, name in NAMES_OF_OPS if known == op)
            kind = getattr(nccl, f"NCCL_{name}")
            call(*pointers, like.size, code, kind, *root, self._stream())

    def broadcast(self, wire: Array, root: int) -> None:
        """wire [n] on the root -> wire [n] everywhere"""
        self._broadcast(wire, wire, root)

    def all_gather(self, send: SendBuffer, recv: Array) -> None:
        """send [1, n] -> recv [p, n]"""
        if recv.size:
            mine = recv[self._rank]
            of, into = _pointers(send, mine)[0], _pointer(recv)
            stream = self._stream()
            self._comm.allGather(of, into, mine.nbytes, self._byte, stream)

    def all_gather_blocks(self, send: SendBuffer, into: list[Any]) -> None:
        """send [counts[rank]] -> into: [array, (counts, displs)]"""
        with self.group():
            for root in range(self._size):
                block = block_of(into, root)
                own = root == self._rank and not isinstance(send, MPI.InPlaceType)
                self._broadcast(send if own else block, block, root)

    def all_to_all(self, send: Array, recv: Array) -> None:
        """send [p, n] -> recv [p, n]"""
        self._exchange((send[r], recv[r]) for r in range(self._size))

    def all_to_all_blocks(self, of: list[Any], into: list[Any]) -> None:
        """of, into: [array, (counts, displs)]"""
        ranks = range(self._size)
        self._exchange((block_of(of, r), block_of(into, r)) for r in ranks)

    def messages(self, messages: Iterable[Message]) -> None:
        """Start all of them together."""
        with self.group():
            for sends, wire, peer, stream in messages:
                call = self._comm.send if sends else self._comm.recv
                call(_pointer(wire), wire.nbytes, self._byte, peer, stream.ptr)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Calls in this block start together at its end."""
        self._cuda.nccl.groupStart()
        try:
            yield
        finally:
            self._cuda.nccl.groupEnd()

    def _exchange(self, blocks: Iterable[tuple[Array, Array]]) -> None:
        stream = self._cuda.cupy.cuda.get_current_stream()
        pairs = [
            (Message(True, send, peer, stream), Message(False, recv, peer, stream))
            for peer, (send, recv) in enumerate(blocks)
        ]
        self.messages(m for pair in pairs for m in pair if m.wire.size)

    def _broadcast(self, send: Any, recv: Array, root: int) -> None:
        if recv.size:
            of, into = _pointer(send), _pointer(recv)
            args = recv.nbytes, self._byte, root, self._stream()
            self._comm.broadcast(of, into, *args)

    def _stream(self) -> int:
        return self._cuda.cupy.cuda.get_current_stream().ptr


def _pointers(send: SendBuffer, recv: Array) -> tuple[int, int]:
    """For NCCL two equal pointers mean that an operation is in place."""
    into = _pointer(recv)
    return into if isinstance(send, MPI.InPlaceType) else _pointer(send), into


def _pointer(wire: Any) -> int:
    return int(wire.data.ptr)
