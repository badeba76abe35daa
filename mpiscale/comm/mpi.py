# ruff: noqa: N802  (the names are mpi4py's)
"""MpiCommunicator: arrays over mpi4py, checked, cut to size and recorded.

What it adds to a bare `mpi4py.MPI.Comm`, whose names and meaning it keeps:

- arrays of any strides, and 16-bit floats (`buffers.py` says how);
- arrays on a GPU, whether MPI is CUDA-aware or not (`device_buffers.py`);
- errors before anything is sent, where MPI would read the wrong memory or hang
  (`planner.py`);
- messages longer than a count of MPI can say, in pieces (`pending.py`);
- buffers of non-blocking calls that live until the call is done;
- every call in the ledger, with the line that made it.

16-bit floats are moved as they are, two bytes each. Reductions convert them to float32,
sum in float32 and round the result once: they send four bytes an element, and so says
the ledger (transport "mpi, float32"). Arrays on a GPU are staged through the host where
MPI is not CUDA-aware (transport "mpi, staged").
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpiscale.backend import Array
from mpiscale.comm.communicator import Blocks, Request, SendBuffer
from mpiscale.comm.device_buffers import DirectAccess, StagedAccess
from mpiscale.comm.ledger import Ledger
from mpiscale.comm.mpi_objects import MpiObjects
from mpiscale.comm.pending import Call, MpiRequest, Piece, block_of, flat_parts
from mpiscale.comm.planner import Planner
from mpiscale.comm.streams import settled

UNLIMITED = sys.maxsize
LARGEST_C_INT = 2**31 - 1


def default_max_count() -> int:
    """How many elements one call may carry: counts are C ints in many libraries.

    MPI 4 knows large counts, and MPICH carries them out; Open MPI 5 refuses them.
    Seen in: mpi4py/mpi4py #575, pmodels/mpich #2257.
    """
    is_mpich = "MPICH" in MPI.Get_library_version()
    return UNLIMITED if MPI.Get_version() >= (4, 0) and is_mpich else LARGEST_C_INT


class MpiCommunicator(MpiObjects):
    """A group of ranks over MPI; the methods are described in `communicator.py`.

    Args:
        comm: the communicator of mpi4py; `.mpi` is the way back to it.
        ledger: where calls are recorded; a new one if None. `Split` hands it on.
        name: the group's name in the ledger.
        max_count: elements that one call of MPI may carry; None: as many as the
            library can. All ranks must use the same. A longer message goes in pieces:
            then it must fill its receive buffer, and the receiver must name its
            source. Under any limit Alltoallv exchanges pairwise.
        cuda_aware: whether MPI may be given pointers to GPU memory. It must be known
            for certain (`cuda_aware.py`): an MPI that is not crashes.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        ledger: Ledger | None = None,
        name: str = "world",
        max_count: int | None = None,
        cuda_aware: bool = False,
    ) -> None:
        if max_count is not None and max_count < 1:
            raise ValueError(f"max_count must be at least 1 element, got {max_count}")
        super().__init__(comm, ledger, name)
        self.max_count = default_max_count() if max_count is None else max_count
        self.cuda_aware = cuda_aware
        access = DirectAccess() if cuda_aware else StagedAccess()
        self._plan = Planner(self.rank, self.size, self.max_count, access)
        self._in_flight: set[MpiRequest] = set()
        self._pairs: MPI.Comm | None = None

    def Split(self, color: int = 0, key: int = 0) -> MpiCommunicator:
        """A communicator of the ranks with the same color, ordered by (key, rank)."""
        if color < 0:
            raise ValueError(f"color must be at least 0 on every rank, got {color}")
        part, name = self.mpi.Split(color, key), f"{self.name}/{color}"
        return MpiCommunicator(part, self.ledger, name, self.max_count, self.cuda_aware)

    # Messages between two ranks

    def Send(self, buf: Array, dest: int, tag: int = 0) -> None:
        """Send `buf`; may wait until the receiver is there."""
        self._run(self._plan.send("Send", buf, dest), self.mpi.Send, dest, tag)

    def Isend(self, buf: Array, dest: int, tag: int = 0) -> Request:
        """Start to send `buf`, which must not change until the request is done."""
        plan = self._plan.send("Isend", buf, dest)
        return self._start(plan, self.mpi.Isend, dest, tag)

    def Recv(
        self, buf: Array, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> None:
        """Wait for a message and put it into `buf`."""
        plan = self._plan.receive("Recv", buf, source)
        self._run(plan, self.mpi.Recv, source, tag)

    def Irecv(
        self, buf: Array, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Request:
        """Start to receive into `buf`, which is filled when the request is done."""
        plan = self._plan.receive("Irecv", buf, source)
        return self._start(plan, self.mpi.Irecv, source, tag)

    def Sendrecv(
        self,
        sendbuf: Array,
        dest: int,
        sendtag: int = 0,
        recvbuf: Array | None = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
    ) -> None:
        """Send one message and receive another, at the same time: no deadlock.

        The two may differ in length and type, as they concern different ranks.
        """
        plan = self._plan.send_receive(sendbuf, dest, sendtag, recvbuf, source)
        self._run(plan, self._send_and_receive, recvtag, self.mpi)

    # Collective operations

    def Barrier(self) -> None:
        """Wait until every rank is here."""
        self._run(Call("Barrier", 0, 0, [Piece(())]), self.mpi.Barrier)

    def Ibarrier(self) -> Request:
        """Start a Barrier."""
        return self._start(Call("Ibarrier", 0, 0, [Piece(())]), self.mpi.Ibarrier)

    def Bcast(self, buf: Array, root: int = 0) -> None:
        """Give every rank the root's `buf`."""
        self._run(self._plan.broadcast("Bcast", buf, root), self.mpi.Bcast, root)

    def Ibcast(self, buf: Array, root: int = 0) -> Request:
        """Start a Bcast."""
        plan = self._plan.broadcast("Ibcast", buf, root)
        return self._start(plan, self.mpi.Ibcast, root)

    def Reduce(
        self,
        sendbuf: SendBuffer,
        recvbuf: Array | None,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
    ) -> None:
        """Give the root the sum over the ranks; recvbuf may be None elsewhere."""
        plan = self._plan.reduce(sendbuf, recvbuf, op, root)
        self._run(plan, self.mpi.Reduce, op, root)

    def Allreduce(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> None:
        """Give every rank the sum over the ranks."""
        plan = self._plan.all_reduce("Allreduce", sendbuf, recvbuf, op)
        self._run(plan, self.mpi.Allreduce, op)

    def Iallreduce(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> Request:
        """Start an Allreduce."""
        plan = self._plan.all_reduce("Iallreduce", sendbuf, recvbuf, op)
        return self._start(plan, self.mpi.Iallreduce, op)

    def Reduce_scatter_block(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> None:
        """Give rank r block r of the sum over the ranks.

        In place, recvbuf holds the input of all blocks, and then, at its start, the
        result; its other blocks stay as they were.
        """
        operation = "Reduce_scatter_block"
        plan = self._plan.reduce_scatter(operation, sendbuf, recvbuf, op)
        self._run(plan, self.mpi.Reduce_scatter_block, op)

    def Ireduce_scatter_block(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> Request:
        """Start a Reduce_scatter_block."""
        operation = "Ireduce_scatter_block"
        plan = self._plan.reduce_scatter(operation, sendbuf, recvbuf, op)
        return self._start(plan, self.mpi.Ireduce_scatter_block, op)

    def Allgather(self, sendbuf: SendBuffer, recvbuf: Array) -> None:
        """Give every rank all ranks' arrays, one after the other."""
        plan = self._plan.all_gather("Allgather", sendbuf, recvbuf)
        self._run(plan, self.mpi.Allgather)

    def Iallgather(self, sendbuf: SendBuffer, recvbuf: Array) -> Request:
        """Start an Allgather."""
        plan = self._plan.all_gather("Iallgather", sendbuf, recvbuf)
        return self._start(plan, self.mpi.Iallgather)

    def Allgatherv(self, sendbuf: SendBuffer, recvbuf: Blocks) -> None:
        """The same with blocks of any lengths, counts[r] elements from rank r."""
        plan = self._plan.all_gather_blocks(sendbuf, recvbuf)
        self._run(plan, self._gather_blocks)

    def Alltoall(self, sendbuf: SendBuffer, recvbuf: Array) -> None:
        """Send block s to rank s; receive block r from rank r."""
        plan = self._plan.all_to_all("Alltoall", sendbuf, recvbuf)
        self._run(plan, self.mpi.Alltoall)

    def Ialltoall(self, sendbuf: SendBuffer, recvbuf: Array) -> Request:
        """Start an Alltoall."""
        plan = self._plan.all_to_all("Ialltoall", sendbuf, recvbuf)
        return self._start(plan, self.mpi.Ialltoall)

    def Alltoallv(self, sendbuf: Blocks | MPI.InPlaceType, recvbuf: Blocks) -> None:
        """The same with blocks of any lengths."""
        plan = self._plan.all_to_all_blocks(sendbuf, recvbuf)
        self._run(plan, self._exchange_blocks)

    # How a plan is carried out

    def _run(self, call: Call, function: Callable[..., None], *last: Any) -> None:
        entry = call.begin(self.ledger, self.name, self.size)
        for piece in call.pieces:
            function(*piece.arguments, *last)
            piece.finish()
        call.finish()
        self.ledger.end(entry)

    def _start(
        self, call: Call, function: Callable[..., MPI.Request], *last: Any
    ) -> Request:
        entry = call.begin(self.ledger, self.name, self.size)

        def when_done(request: MpiRequest) -> None:
            call.finish()
            self._in_flight.discard(request)
            self.ledger.end(entry)

        pieces = list(call.pieces)
        requests = [function(*piece.arguments, *last) for piece in pieces]
        request = MpiRequest(requests, pieces, when_done)
        self._in_flight.add(request)  # a caller that drops it must not free buffers
        return request

    def _send_and_receive(
        self,
        send: Array,
        dest: int,
        sendtag: int,
        recv: Array,
        source: int,
        recvtag: int,
        comm: MPI.Comm,
    ) -> None:
        if max(send.size, recv.size) <= self.max_count:
            comm.Sendrecv(send, dest, sendtag, recv, source, recvtag)
            return
        # The two directions may have different numbers of pieces.
        into, of = flat_parts(recv, self.max_count), flat_parts(send, self.max_count)
        requests = [comm.Irecv(part, source, recvtag) for part in into]
        requests += [comm.Isend(part, dest, sendtag) for part in of]
        MPI.Request.Waitall(requests)

    def _gather_blocks(self, send: SendBuffer, into: list[Any]) -> None:
        wire, (counts, displs) = into
        if sum(counts) <= self.max_count:
            self.mpi.Allgatherv(send, into)
            return
        for root, (start, n) in enumerate(zip(displs, counts, strict=True)):
            block = wire[start : start + n]
            if root == self.rank and not isinstance(send, MPI.InPlaceType):
                block[:] = send
                settled(block)
            for part in flat_parts(block, self.max_count):
                self.mpi.Bcast(part, root)

    def _exchange_blocks(self, of: list[Any], into: list[Any]) -> None:
        if self.max_count == UNLIMITED:
            self.mpi.Alltoallv(of, into)
            return
        if self._pairs is None:  # so that no receive of the user's can match
            self._pairs = self.mpi.Dup()
        p, rank = self.size, self.rank
        for step in range(p):
            dest, source = (rank + step) % p, (rank - step) % p
            send, recv = block_of(of, dest), block_of(into, source)
            self._send_and_receive(send, dest, 0, recv, source, 0, self._pairs)
