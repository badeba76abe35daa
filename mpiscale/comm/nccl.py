# ruff: noqa: N802  (the names are mpi4py's)
"""NcclCommunicator: arrays of GPUs over NCCL, with the same checks and the same ledger.

    comm = NcclCommunicator(world.comm.mpi, world.comm.ledger)
    comm.Allreduce(x, total)            x and total are CuPy arrays

Everything runs in the order of streams. A call queues its work on CuPy's current stream
and returns; what the program queues there afterwards sees the result. So a blocking
call and its I... form followed by Wait are the same. For communication beside
computation, start it on a stream of its own, and call Wait on the one that computes:

    messages.wait_event(cupy.cuda.get_current_stream().record())    x must be ready
    with messages:
        request = comm.Iallreduce(x, total)
    ...
    request.Wait()

What differs from MPI:

- Isend and Irecv are collected, and start together at the first Wait or Test, or at
  the next call of anything else: NCCL would otherwise run them one after the other,
  and two ranks that send first would wait for each other for ever.
- Messages between two ranks arrive in the order in which they were sent. There are no
  tags, the source must be named, and a message fills its buffer.
- 16-bit floats are summed in float32 and rounded once, as over MPI, and the ledger says
  so ("nccl, float32"). NCCL would sum them in their own type, rounding at every hop.
- Objects (lower case) and barriers go over MPI.

If a rank or the network fails, the job ends (`nccl_watch.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpiscale.backend import Array
from mpiscale.comm.communicator import Blocks, Request, SendBuffer
from mpiscale.comm.ledger import Ledger
from mpiscale.comm.mpi_objects import MpiObjects
from mpiscale.comm.nccl_calls import Cuda, Message, NcclCalls, import_cuda
from mpiscale.comm.nccl_checks import (
    NcclAccess,
    check_one_rank_for_each_gpu,
    check_source,
    check_summable,
    check_tag,
)
from mpiscale.comm.nccl_request import NcclRequest
from mpiscale.comm.nccl_watch import NcclWatch
from mpiscale.comm.pending import Call, MpiRequest
from mpiscale.comm.planner import Planner


class NcclCommunicator(MpiObjects):
    """A group of ranks, each with a GPU; the methods are as in `communicator.py`.

    Args:
        comm: the same ranks over MPI; collective. Each has made its GPU the current one
            (`world.start(device="cuda")` does).
        ledger: where calls are recorded; a new one if None. `Split` hands it on.
        name: the group's name in the ledger.
        cuda: CuPy and its NCCL; None: those that are installed.
        watch: asks for failures; a new one if None. `Split` hands it on.

    Raises:
        InputError: if CuPy or NCCL is missing, or two ranks have the same GPU.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        ledger: Ledger | None = None,
        name: str = "world",
        cuda: Cuda | None = None,
        watch: NcclWatch | None = None,
    ) -> None:
        super().__init__(comm, ledger, name)
        self._cuda = import_cuda() if cuda is None else cuda
        cupy, nccl = self._cuda
        check_one_rank_for_each_gpu(comm, cupy.cuda.Device().pci_bus_id)
        unique = comm.bcast(nccl.get_unique_id() if self.rank == 0 else None)
        self.nccl = nccl.NcclCommunicator(self.size, unique, self.rank)
        self._calls = NcclCalls(self.nccl, self._cuda, self.rank, self.size)
        self._plan = Planner(self.rank, self.size, sys.maxsize, NcclAccess())
        self._collected: list[tuple[NcclRequest, list[Message]]] = []
        self.failed, self._failing = False, threading.Lock()
        self._watch = NcclWatch() if watch is None else watch
        self._watch.add(self)

    def Split(self, color: int = 0, key: int = 0) -> NcclCommunicator:
        """A communicator of the ranks with the same color, ordered by (key, rank)."""
        if color < 0:
            raise ValueError(f"color must be at least 0 on every rank, got {color}")
        part, name = self.mpi.Split(color, key), f"{self.name}/{color}"
        return NcclCommunicator(part, self.ledger, name, self._cuda, self._watch)

    def check(self) -> None:
        """Raise RuntimeError if NCCL has failed; what is in flight is given up."""
        with self._failing:
            try:
                self.nccl.check_async_error()
            except self._cuda.nccl.NcclError as error:
                self.failed = True
                self.nccl.abort()  # or kernels would wait for ever
                raise RuntimeError(
                    f"NCCL failed on rank {self.rank} of {self.size} in group "
                    f"{self.name!r}: {error}. A rank or the network between two has "
                    "gone; NCCL_DEBUG=INFO makes NCCL say more"
                ) from error

    # Messages between two ranks

    def Send(self, buf: Array, dest: int, tag: int = 0) -> None:
        """Send `buf`, in the order of the current stream."""
        self._send("Send", buf, dest, tag).Wait()

    def Isend(self, buf: Array, dest: int, tag: int = 0) -> NcclRequest:
        """Collect a message, to be sent together with others."""
        return self._send("Isend", buf, dest, tag)

    def Recv(
        self, buf: Array, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> None:
        """Receive into `buf`, in the order of the current stream."""
        self._receive("Recv", buf, source, tag).Wait()

    def Irecv(
        self, buf: Array, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> NcclRequest:
        """Collect a message, to be received together with others."""
        return self._receive("Irecv", buf, source, tag)

    def Sendrecv(
        self,
        sendbuf: Array,
        dest: int,
        sendtag: int = 0,
        recvbuf: Array | None = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
    ) -> None:
        """Send one message and receive another, at the same time."""
        check_tag(sendtag)
        check_tag(recvtag)
        check_source(source)
        call = self._plan.send_receive(sendbuf, dest, sendtag, recvbuf, source)
        (piece,) = call.pieces
        send, _, _, recv, _ = piece.arguments
        self._collect(call, (True, send, dest), (False, recv, source)).Wait()

    def _send(self, operation: str, buf: Array, dest: int, tag: int) -> NcclRequest:
        check_tag(tag)
        call = self._plan.send(operation, buf, dest)
        (piece,) = call.pieces
        return self._collect(call, (True, piece.arguments[0], dest))

    def _receive(
        self, operation: str, buf: Array, source: int, tag: int
    ) -> NcclRequest:
        check_tag(tag)
        check_source(source)
        call = self._plan.receive(operation, buf, source)
        (piece,) = call.pieces
        return self._collect(call, (False, piece.arguments[0], source))

    # Collective operations

    def Barrier(self) -> None:
        """Wait until every rank is here, and what it has queued is done."""
        self._barrier("Barrier").Wait()

    def Ibarrier(self) -> Request:
        """Start a Barrier, when what this rank has queued is done."""
        return self._barrier("Ibarrier")

    def _barrier(self, operation: str) -> MpiRequest:
        self._launch_collected()
        self._cuda.cupy.cuda.get_current_stream().synchronize()
        entry = Call(operation, 0, 0, []).begin(self.ledger, self.name, self.size)
        requests = [self.mpi.Ibarrier()]
        return MpiRequest(requests, [], lambda _: self.ledger.end(entry))

    def Bcast(self, buf: Array, root: int = 0) -> None:
        """Give every rank the root's `buf`."""
        call = self._plan.broadcast("Bcast", buf, root)
        self._start(call, self._calls.broadcast, root).Wait()

    def Ibcast(self, buf: Array, root: int = 0) -> NcclRequest:
        """Start a Bcast."""
        call = self._plan.broadcast("Ibcast", buf, root)
        return self._start(call, self._calls.broadcast, root)

    def Reduce(
        self,
        sendbuf: SendBuffer,
        recvbuf: Array | None,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
    ) -> None:
        """Give the root the sum over the ranks; recvbuf may be None elsewhere."""
        check_summable(sendbuf, recvbuf)
        call = self._plan.reduce(sendbuf, recvbuf, op, root)
        self._start(call, self._calls.reduce, op, root).Wait()

    def Allreduce(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> None:
        """Give every rank the sum over the ranks."""
        self._all_reduce("Allreduce", sendbuf, recvbuf, op).Wait()

    def Iallreduce(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> NcclRequest:
        """Start an Allreduce."""
        return self._all_reduce("Iallreduce", sendbuf, recvbuf, op)

    def _all_reduce(
        self, operation: str, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op
    ) -> NcclRequest:
        check_summable(sendbuf, recvbuf)
        call = self._plan.all_reduce(operation, sendbuf, recvbuf, op)
        return self._start(call, self._calls.all_reduce, op)

    def Reduce_scatter_block(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> None:
        """Give rank r block r of the sum over the ranks."""
        self._reduce_scatter("Reduce_scatter_block", sendbuf, recvbuf, op).Wait()

    def Ireduce_scatter_block(
        self, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op = MPI.SUM
    ) -> NcclRequest:
        """Start a Reduce_scatter_block."""
        return self._reduce_scatter("Ireduce_scatter_block", sendbuf, recvbuf, op)

    def _reduce_scatter(
        self, operation: str, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op
    ) -> NcclRequest:
        check_summable(sendbuf, recvbuf)
        call = self._plan.reduce_scatter(operation, sendbuf, recvbuf, op)
        return self._start(call, self._calls.reduce_scatter, op)

    def Allgather(self, sendbuf: SendBuffer, recvbuf: Array) -> None:
        """Give every rank all ranks' arrays, one after the other."""
        call = self._plan.all_gather("Allgather", sendbuf, recvbuf)
        self._start(call, self._calls.all_gather).Wait()

    def Iallgather(self, sendbuf: SendBuffer, recvbuf: Array) -> NcclRequest:
        """Start an Allgather."""
        call = self._plan.all_gather("Iallgather", sendbuf, recvbuf)
        return self._start(call, self._calls.all_gather)

    def Allgatherv(self, sendbuf: SendBuffer, recvbuf: Blocks) -> None:
        """The same with blocks of any lengths, counts[r] elements from rank r."""
        call = self._plan.all_gather_blocks(sendbuf, recvbuf)
        self._start(call, self._calls.all_gather_blocks).Wait()

    def Alltoall(self, sendbuf: SendBuffer, recvbuf: Array) -> None:
        """Send block s to rank s; receive block r from rank r."""
        call = self._plan.all_to_all("Alltoall", sendbuf, recvbuf)
        self._start(call, self._calls.all_to_all).Wait()

    def Ialltoall(self, sendbuf: SendBuffer, recvbuf: Array) -> NcclRequest:
        """Start an Alltoall."""
        call = self._plan.all_to_all("Ialltoall", sendbuf, recvbuf)
        return self._start(call, self._calls.all_to_all)

    def Alltoallv(self, sendbuf: Blocks | MPI.InPlaceType, recvbuf: Blocks) -> None:
        """The same with blocks of any lengths."""
        call = self._plan.all_to_all_blocks(sendbuf, recvbuf)
        self._start(call, self._calls.all_to_all_blocks).Wait()

    # How a plan is carried out

    def _start(
        self, call: Call, function: Callable[..., None], *last: Any
    ) -> NcclRequest:
        self._launch_collected()  # in the order of the calls
        request = self._request(call)
        (piece,) = call.pieces
        function(*piece.arguments, *last)
        request.launched()
        return request

    def _collect(self, call: Call, *messages: tuple[bool, Array, int]) -> NcclRequest:
        request = self._request(call)
        started = [
            Message(sends, wire, peer, request.stream)
            for sends, wire, peer in messages
            if wire.size and peer != MPI.PROC_NULL
        ]
        self._collected.append((request, started))
        return request

    def _launch_collected(self) -> None:
        collected, self._collected = self._collected, []
        messages = [message for _, started in collected for message in started]
        if messages:
            self._calls.messages(messages)
        for request, _ in collected:
            request.launched()

    def _request(self, call: Call) -> NcclRequest:
        self.check()
        entry = call.begin(self.ledger, self.name, self.size)

        def finish() -> None:
            call.finish()
            self.ledger.end(entry)

        cupy, launch = self._cuda.cupy, self._launch_collected
        return NcclRequest(cupy, launch, self.check, finish)
