"""A stand-in for `cupy.cuda.nccl`: carries out its calls over MPI, when streams run.

Names, arguments and codes are those of the original (tests/reference/
nccl_signatures.json). As there, a call only queues work on a stream, messages without
a partner in their group wait for it on the stream, and a message of another length
than expected is an error. 16-bit floats would be summed in their own type.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI

from tests.comm.strict_device_array import Stream, behind_pointer

TABLE = json.loads(
    (Path(__file__).parents[1] / "reference" / "nccl_signatures.json").read_text()
)
globals().update(TABLE["constants"])
OPS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum}  # by their codes
TYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64".split()
available = True
_group = SimpleNamespace(depth=0, calls=[])
_numbers = itertools.count()


class NcclError(RuntimeError):
    pass


def get_unique_id():
    """128 bytes; here they say who may tell the others."""
    numbers = [MPI.COMM_WORLD.rank, next(_numbers)]
    return np.array(numbers + [0] * 30, np.int32).tobytes()


def groupStart():  # noqa: N802
    _group.depth += 1


def groupEnd():  # noqa: N802
    _group.depth -= 1
    calls, _group.calls = _group.calls, []
    queue_together(calls)


def queue_together(calls):
    """One piece of work for which all streams of the group wait."""
    if not calls:
        return
    streams = list({call.stream.ptr: call.stream for call in calls}.values())
    first, *others = streams
    for other in others:
        first.wait_event(other.record())
    first.queue.append(lambda: run(calls))
    end = first.record()
    for other in others:
        other.wait_event(end)


def run(calls):
    """Start all messages, then carry out the collectives, then wait."""
    requests = [call.start() for call in calls if call.is_message]
    for call in calls:
        if not call.is_message:
            call.start()
    for request, nbytes in requests:
        status = MPI.Status()
        request.Wait(status)
        if nbytes is not None and status.Get_count(MPI.BYTE) != nbytes:
            raise NcclError(f"expected {nbytes} bytes, got {status.Get_count()}")


class NcclCommunicator:
    """Ranks that gave the same unique id."""

    def __init__(self, ndev, commId, rank):  # noqa: N803
        root, number = np.frombuffer(commId, np.int32)[:2].tolist()
        world, tag = MPI.COMM_WORLD, 1000 + number
        world.isend((rank, world.rank), root, tag)
        if world.rank == root:
            places = sorted(
                world.recv(source=MPI.ANY_SOURCE, tag=tag) for _ in range(ndev)
            )
            members = [place for _, place in places]
            for member in members:
                world.isend(members, member, tag + 5000)
        members = world.recv(source=root, tag=tag + 5000)
        self._mpi = world.Create_group(world.group.Incl(members), tag)
        self.aborted, self.failure = False, None

    def check_async_error(self):
        if self.failure:
            raise self.failure

    def abort(self):
        self.aborted = True

    def destroy(self):
        self._mpi.Free()

    def rank_id(self):
        return self._mpi.rank

    def size(self):
        return self._mpi.size

    def send(self, sendbuf, count, datatype, peer, stream):
        wire = memory(sendbuf, count, datatype).view(np.uint8)
        # Synchronous: it is done when the receiver is there, as with NCCL.
        self._message(stream, lambda: (self._mpi.Issend(wire, peer), None))

    def recv(self, recvbuf, count, datatype, peer, stream):
        wire = memory(recvbuf, count, datatype).view(np.uint8)
        self._message(stream, lambda: (self._mpi.Irecv(wire, peer), wire.nbytes))

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        send, recv = (memory(p, count, datatype) for p in (sendbuff, recvbuff))

        def start():
            if self._mpi.rank == root:
                recv[...] = send
            self._mpi.Bcast(recv.view(np.uint8), root)

        self._collective(stream, start)

    def bcast(self, buff, count, datatype, root, stream):
        self.broadcast(buff, buff, count, datatype, root, stream)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):  # noqa: N802
        send, recv = (memory(p, count, datatype) for p in (sendbuf, recvbuf))

        def start():
            recv[...] = self._sum(send, op)

        self._collective(stream, start)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        send = memory(sendbuf, count, datatype)
        is_root = self._mpi.rank == root
        recv = memory(recvbuf, count, datatype) if is_root else None

        def start():
            total = self._sum(send, op)
            if is_root:
                recv[...] = total

        self._collective(stream, start)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):  # noqa: N802
        send = memory(sendbuf, recvcount * self._mpi.size, datatype)
        recv = memory(recvbuf, recvcount, datatype)

        def start():
            first = self._mpi.rank * recvcount
            recv[...] = self._sum(send, op)[first : first + recvcount]

        self._collective(stream, start)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):  # noqa: N802
        send = memory(sendbuf, count, datatype)
        recv = memory(recvbuf, count * self._mpi.size, datatype)

        def start():
            recv.view(np.uint8)[...] = self._all(send).view(np.uint8).reshape(-1)

        self._collective(stream, start)

    def _all(self, send):
        gathered = np.empty((self._mpi.size, send.size), send.dtype)
        self._mpi.Allgather(send.copy().view(np.uint8), gathered.view(np.uint8))
        return gathered

    def _sum(self, send, op):
        """One after the other, in the type itself."""
        total, *others = self._all(send)
        for other in others:
            total = OPS[op](total, other, dtype=send.dtype)
        return total

    def _message(self, stream, start):
        self._queue(stream, start, True)

    def _collective(self, stream, start):
        self._queue(stream, start, False)

    def _queue(self, stream, start, is_message):
        assert not self.aborted
        stream = Stream.by_pointer[stream]
        call = SimpleNamespace(stream=stream, start=start, is_message=is_message)
        if _group.depth:
            _group.calls.append(call)
        else:
            queue_together([call])


def memory(pointer, count, datatype):
    """What a call reads or writes, as an array of the type with this code."""
    dtype = np.dtype(TYPES[datatype])
    assert count, "NCCL has been given nothing to do"
    return behind_pointer(pointer, count * dtype.itemsize).view(dtype)
