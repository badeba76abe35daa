# ruff: noqa: N802  (the names are mpi4py's)
"""The interface of a communicator: mpi4py's own names, argument order and meaning.

A textbook algorithm is written on this surface only, so it runs on an
`MpiCommunicator` (checked, recorded in a ledger), on any other implementation, and on
a bare `mpi4py.MPI.Comm`.

Upper case moves arrays, lower case pickles small objects. An array is handed over as
itself: a slice says what to send, its dtype says the type. `MPI.IN_PLACE` as sendbuf
means that the receive buffer holds the input. Only Allgatherv and Alltoallv take a
specification (array, counts) or (array, (counts, displs)), all in elements.

operation             sendbuf of each rank    recvbuf of each rank
Allreduce             [n]                     [n]   sum (or other op) over the ranks
Reduce                [n]                     [n]   the same, on the root alone
Reduce_scatter_block  [p, n]                  [n]   block `rank` of the sum
Allgather             [n]                     [p, n]   block r comes from rank r
Alltoall              [p, n]                  [p, n]   block s goes to s, r comes from r
Bcast                 [n] on the root         [n] elsewhere, in the same argument
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from mpiscale.backend import Array

if TYPE_CHECKING:  # importing mpi4py.MPI starts MPI; an interface should not
    from mpi4py import MPI

SendBuffer: TypeAlias = "Array | MPI.InPlaceType"
Integers: TypeAlias = "Sequence[int] | Array"
Blocks: TypeAlias = (
    "Array | tuple[Array, Integers] | tuple[Array, tuple[Integers, Integers]]"
)


class Request(Protocol):
    """A non-blocking call in flight: neither touch its buffers nor forget it."""

    def Wait(self) -> Literal[True]:
        """Return when the call is done and the buffers may be used."""

    def Test(self) -> bool:
        """Whether the call is done; does not wait, but lets MPI move on."""


class Communicator(Protocol):
    """A group of p ranks that send and receive arrays; see the module's table."""

    name: str

    @property
    def rank(self) -> int:
        """This process's number in the group, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """The number of ranks, p."""

    def Split(self, color: int = ..., key: int = ...) -> Communicator:
        """A communicator of the ranks with the same color, ordered by (key, rank)."""

    # Messages between two ranks

    def Send(self, buf: Array, dest: int, tag: int = ...) -> None:
        """Send `buf`; may wait until the receiver is there."""

    def Recv(self, buf: Array, source: int = ..., tag: int = ...) -> None:
        """Wait for a message and put it into `buf`."""

    def Sendrecv(
        self,
        sendbuf: Array,
        dest: int,
        sendtag: int = ...,
        recvbuf: Array | None = ...,
        source: int = ...,
        recvtag: int = ...,
    ) -> None:
        """Send one message and receive another, at the same time: no deadlock."""

    def Isend(self, buf: Array, dest: int, tag: int = ...) -> Request:
        """Start to send `buf`, which must not change until the request is done."""

    def Irecv(self, buf: Array, source: int = ..., tag: int = ...) -> Request:
        """Start to receive into `buf`, which is filled when the request is done."""

    # Collective operations: every rank of the group calls them, in the same order

    def Barrier(self) -> None:
        """Wait until every rank is here."""

    def Bcast(self, buf: Array, root: int = ...) -> None:
        """Give every rank the root's `buf`."""

    def Reduce(
        self,
        sendbuf: SendBuffer,
        recvbuf: Array | None,
        op: MPI.Op = ...,
        root: int = ...,
    ) -> None:
        """Give the root the sum over the ranks; recvbuf may be None elsewhere."""

    def Allreduce(self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = ...) -> None:
        """Give every rank the sum over the ranks."""

    def Reduce_scatter_block(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = ...
    ) -> None:
        """Give rank r block r of the sum over the ranks."""

    def Allgather(self, sendbuf: SendBuffer, recvbuf: Array) -> None:
        """Give every rank all ranks' arrays, one after the other."""

    def Allgatherv(self, sendbuf: SendBuffer, recvbuf: Blocks) -> None:
        """The same with blocks of any lengths, counts[r] elements from rank r."""

    def Alltoall(self, sendbuf: SendBuffer, recvbuf: Array) -> None:
        """Send block s to rank s; receive block r from rank r."""

    def Alltoallv(self, sendbuf: Blocks | MPI.InPlaceType, recvbuf: Blocks) -> None:
        """The same with blocks of any lengths."""

    # The same without waiting

    def Ibarrier(self) -> Request:
        """Start a Barrier."""

    def Ibcast(self, buf: Array, root: int = ...) -> Request:
        """Start a Bcast."""

    def Iallreduce(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = ...
    ) -> Request:
        """Start an Allreduce."""

    def Ireduce_scatter_block(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = ...
    ) -> Request:
        """Start a Reduce_scatter_block."""

    def Iallgather(self, sendbuf: SendBuffer, recvbuf: Array) -> Request:
        """Start an Allgather."""

    def Ialltoall(self, sendbuf: SendBuffer, recvbuf: Array) -> Request:
        """Start an Alltoall."""

    # Small Python objects, pickled; arrays are refused

    def send(self, obj: Any, dest: int, tag: int = ...) -> None:
        """Send a picklable object."""

    def recv(self, buf: None = ..., source: int = ..., tag: int = ...) -> Any:
        """Wait for an object and return it; `buf` is there for mpi4py's sake."""

    def bcast(self, obj: Any, root: int = ...) -> Any:
        """The root's object, on every rank."""

    def gather(self, sendobj: Any, root: int = ...) -> list[Any] | None:
        """All ranks' objects in rank order on the root, None elsewhere."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """All ranks' objects in rank order, on every rank."""

    def allreduce(self, sendobj: Any, op: MPI.Op = ...) -> Any:
        """The sum (or other op) of all ranks' objects, on every rank."""


def Waitall(requests: Iterable[Request]) -> None:
    """Wait for all `requests`: of any communicator, or of mpi4py itself."""
    for request in requests:
        request.Wait()
