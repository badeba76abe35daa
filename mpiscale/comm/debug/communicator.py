# ruff: noqa: N802  (the names are mpi4py's)
"""DebugCommunicator: an MpiCommunicator whose mistakes show, and say where they are.

- Every wait is noted on the rank's board, so that a hang can be explained
  (`watcher.py`).
- Collective calls are compared between the ranks before they are made
  (`agreement.py`).
- All sends are synchronous: a program that only works because MPI buffers small
  messages hangs here with any message, and the hang is explained.
- A buffer that changes while it is being sent is found when the send is done.
- A buffer that is to be filled by Irecv holds NaN, or the largest integer, until then:
  whoever reads it too early, or reads more of it than arrived, sees that.

It is slower: each collective costs a small all-gather more, each send the wait for its
receiver.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
from mpi4py import MPI

from mpiscale.backend import Array, is_on_device
from mpiscale.comm.communicator import Request
from mpiscale.comm.debug.agreement import (
    RECORD_BYTES,
    CollectiveMismatchError,
    compare,
    record,
)
from mpiscale.comm.debug.wait_for_graph import CollectiveCall
from mpiscale.comm.debug.watcher import Board, Waiting, Watcher
from mpiscale.comm.ledger import Ledger, calling_line, human_bytes, short_path
from mpiscale.comm.mpi import MpiCommunicator
from mpiscale.comm.pending import Call, nothing

T = TypeVar("T")
TO_ONE = {"Send", "Isend", "send"}
FROM_ONE = {"Recv", "Irecv", "recv"}
BOTH = {"Sendrecv"}
COUNTS_MAY_DIFFER = {"Alltoallv", "gather", "allgather", "allreduce", "bcast"}


class BufferChangedError(RuntimeError):
    """An array was written to while MPI was still sending it."""


class DebugCommunicator(MpiCommunicator):
    """See the module. `watcher` is shared by all communicators of a rank."""

    def __init__(
        self,
        comm: MPI.Comm,
        watcher: Watcher,
        ledger: Ledger | None = None,
        name: str = "world",
        max_count: int | None = None,
        cuda_aware: bool = False,
    ) -> None:
        super().__init__(comm, ledger, name, max_count, cuda_aware)
        self._watcher, self._board = watcher, watcher.board
        self._shadow = comm.Dup()
        everybody, mine = MPI.COMM_WORLD.Get_group(), comm.Get_group()
        ranks = mine.Translate_ranks(list(range(comm.size)), everybody)
        self._world_ranks = tuple(ranks)
        self._group = self._board.new_group(self._world_ranks)
        self._agreeing: deque[Agreement] = deque()
        # Of the queue and the requests in it: several threads may move calls on.
        self._agreeing_lock = threading.Lock()

    def Split(self, color: int = 0, key: int = 0) -> DebugCommunicator:
        """A communicator of the ranks with the same color, ordered by (key, rank)."""
        if color < 0:
            raise ValueError(f"color must be at least 0 on every rank, got {color}")
        self._agree(self._waiting(Call("Split", 0, 0, []), ()), "Split").wait()
        part, name = self.mpi.Split(color, key), f"{self.name}/{color}"
        return DebugCommunicator(
            part, self._watcher, self.ledger, name, self.max_count, self.cuda_aware
        )

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send a picklable object."""
        self._send_object(obj, dest, tag, self.mpi.ssend)

    def Irecv(
        self, buf: Array, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Request:
        """Start to receive into `buf`, which is filled when the request is done."""
        if source != MPI.PROC_NULL:
            poison(buf)
        return super().Irecv(buf, source, tag)

    # How calls are carried out

    def _run(self, call: Call, function: Callable[..., None], *last: Any) -> None:
        call.pieces = list(call.pieces)
        waiting = self._waiting(call, last)
        if waiting.collective is not None:
            self._agree(waiting, self._must_agree(call, last)).wait()
        with self._board.wait(waiting):
            super()._run(call, self._synchronous(call, function), *last)

    def _start(
        self, call: Call, function: Callable[..., MPI.Request], *last: Any
    ) -> Request:
        call.pieces = list(call.pieces)
        waiting, begin = self._waiting(call, last), super()._start
        request = DebugRequest(self._board, waiting, self._sent_arrays(call))

        def start() -> None:
            request.started = begin(call, self._synchronous(call, function), *last)

        if waiting.collective is None:
            start()
        else:
            must_agree = self._must_agree(call, last)
            request.agreement = self._agree(waiting, must_agree, start)
        return request

    def _timed(
        self,
        operation: str,
        call: Callable[[], T],
        sent: Callable[[T], int],
        peer: int | None = None,
    ) -> T:
        plan = Call(operation, 0, 0, [], peer=peer)
        waiting = self._waiting(plan, ())
        if waiting.collective is not None:
            self._agree(waiting, self._must_agree(plan, ())).wait()
        with self._board.wait(waiting):
            return super()._timed(operation, call, sent, peer)

    def _synchronous(self, call: Call, function: Callable[..., T]) -> Callable[..., T]:
        chosen: dict[str, Any] = {"Send": self.mpi.Ssend, "Isend": self.mpi.Issend}
        return chosen.get(call.operation, function)

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
        arriving = comm.Irecv(recv, source, recvtag)
        MPI.Request.Waitall([comm.Issend(send, dest, sendtag), arriving])

    # What is said about a call

    def _waiting(self, call: Call, last: tuple[Any, ...]) -> Waiting:
        """Says what the call waits for; notes that a collective call has arrived."""
        text, where = self._words(call, last), short_path(calling_line())
        if call.operation in TO_ONE | FROM_ONE | BOTH:
            anybody = call.operation in FROM_ONE and call.peer == MPI.ANY_SOURCE
            return Waiting(text, where, self._peers(call), any_peer=anybody)
        self._board.arrivals[self._group] += 1
        number = self._board.arrivals[self._group]
        return Waiting(text, where, collective=CollectiveCall(self._group, number))

    def _peers(self, call: Call) -> tuple[int, ...]:
        peers = [call.peer]
        if call.operation in BOTH:
            (arguments, _), *_ = call.pieces
            peers.append(arguments[4])
        if MPI.ANY_SOURCE in peers:
            others = range(self.size)
            return tuple(self._world_ranks[r] for r in others if r != self.rank)
        real = [p for p in peers if p is not None and p != MPI.PROC_NULL]
        return tuple(dict.fromkeys(self._world_ranks[p] for p in real))

    def _words(self, call: Call, last: tuple[Any, ...]) -> str:
        """The call in words: operation, elements, peer, tag, op."""
        operation, parts = call.operation, [call.operation]
        wires = self._wires(call)
        if wires:
            parts.append(f"of {wires[0].size} {wires[0].dtype}")
        if operation in TO_ONE | FROM_ONE | BOTH:
            peer = "any rank" if call.peer == MPI.ANY_SOURCE else f"rank {call.peer}"
            parts.append(f"{'from' if operation in FROM_ONE else 'to'} {peer}")
            tags = [_sent_tag(call)] if operation in BOTH else list(last[1:2])
            parts += [f"tag {tag}" for tag in tags if tag >= 0]
            parts.append(f"({human_bytes(call.payload)})")
            if operation in BOTH:
                parts.append(_received_words(call, last))
        elif call.peer is not None:
            parts.append(f"root {call.peer}")
        parts += [_op_name(op) for op in last if isinstance(op, MPI.Op)]
        return " ".join(parts)

    def _must_agree(self, call: Call, last: tuple[Any, ...]) -> str:
        """What has to be alike on all ranks of the group."""
        ops = [_op_name(op) for op in last if isinstance(op, MPI.Op)]
        wires = self._wires(call)
        lengths = [] if call.operation in COUNTS_MAY_DIFFER else [call.payload]
        if call.operation == "Allgatherv":
            into = call.pieces[0].arguments[1]  # type: ignore[index]
            lengths = list(into[1][0])
        kinds = {str(wire.dtype) for wire in wires}
        if call.operation == "Barrier":
            kinds = set()
        return repr((call.operation, call.peer, ops, lengths, sorted(kinds)))

    def _wires(self, call: Call) -> list[Array]:
        arrays = []
        for argument in (a for piece in call.pieces for a in piece.arguments):
            inside = argument[0] if isinstance(argument, list) else argument
            if isinstance(inside, np.ndarray) or is_on_device(inside):
                arrays.append(inside)
        return arrays

    def _sent_arrays(self, call: Call) -> list[Array]:
        if call.operation != "Isend":
            return []
        return [wire for wire in self._wires(call) if isinstance(wire, np.ndarray)]

    # Agreement

    def _agree(
        self, waiting: Waiting, must_agree: str, then: Callable[[], None] = nothing
    ) -> Agreement:
        """Start to compare a call with the other ranks'; `then` starts it itself."""
        mine = record(must_agree, f"{waiting.text} at {waiting.where}")
        with self._agreeing_lock:
            agreement = Agreement(self, waiting, mine, then)
            self._agreeing.append(agreement)
        return agreement


class Agreement:
    """One collective call on its way to be found the same on all ranks, or not.

    Whoever waits or tests moves on all calls before it, too.
    """

    def __init__(
        self,
        comm: DebugCommunicator,
        waiting: Waiting,
        mine: Array,
        then: Callable[[], None],
    ) -> None:
        self.comm, self.waiting, self._mine, self._then = comm, waiting, mine, then
        self._all = np.empty((comm.size, RECORD_BYTES), np.uint8)
        self._request = comm._shadow.Iallgather(mine, self._all)
        self._done = False
        self._error: CollectiveMismatchError | None = None

    def wait(self) -> None:
        """Return when this and all earlier calls are known to agree, and are started.

        Raises:
            CollectiveMismatchError: on all ranks.
        """
        with self.comm._agreeing_lock:
            while not self._done:
                first = self.comm._agreeing[0]
                with self.comm._board.wait(first.waiting):
                    first._request.Wait()
                first._end()
            self._raise()

    def test(self) -> bool:
        """The same without waiting: whether it is so."""
        with self.comm._agreeing_lock:
            while not self._done:
                first = self.comm._agreeing[0]
                if not first._request.Test():
                    return False
                first._end()
            self._raise()
        return True

    def _end(self) -> None:
        self.comm._agreeing.popleft()
        self._done = True
        then, self._then = self._then, nothing  # it refers to the caller's buffers
        try:
            compare(self._all, self.comm.name)
        except CollectiveMismatchError as error:
            self._error = error
        self._raise()
        then()

    def _raise(self) -> None:
        """As often as it is asked: a thread that tests must not swallow the error."""
        if self._error is not None:
            raise self._error


class DebugRequest:
    """A non-blocking call that waits on the board, and whose send buffer is watched."""

    started: Request  # once there is no agreement to wait for

    def __init__(self, board: Board, waiting: Waiting, sent: list[Array]) -> None:
        self._board, self._waiting, self._sent = board, waiting, sent
        self._before = [zlib.crc32(wire.view(np.uint8).data) for wire in sent]
        self.agreement: Agreement | None = None
        board.in_flight[id(self)] = f"{waiting.text}, {waiting.where}"

    def Wait(self) -> Literal[True]:
        """Return when the call is done and the buffers may be used."""
        self._board.in_flight.pop(id(self), None)  # shown as what is waited in
        if self.agreement is not None:
            self.agreement.wait()
        with self._board.wait(self._waiting):
            self.started.Wait()
        self._finish()
        return True

    def Test(self) -> bool:
        """Whether the call is done; does not wait, but lets MPI move on."""
        if self.agreement is not None and not self.agreement.test():
            return False
        done = self.started.Test()
        if done:
            self._finish()
        return done

    def _finish(self) -> None:
        self._board.in_flight.pop(id(self), None)
        self.agreement = None
        after = [zlib.crc32(wire.view(np.uint8).data) for wire in self._sent]
        self._sent, before = [], self._before
        if after and after != before:
            raise BufferChangedError(
                f"{self._waiting.text} at {self._waiting.where}: the array was changed "
                "before the send was done; wait for the request first, or send a copy"
            )


def poison(buf: Array) -> None:
    """Fill `buf` with what no computation takes for data; what is no array stays."""
    if not isinstance(buf, np.ndarray) or not buf.flags.writeable:
        return  # refused, or on a GPU
    if buf.dtype.kind in "iu":
        buf.fill(np.iinfo(buf.dtype).max)
    elif buf.dtype.kind != "b":
        buf.fill(np.nan)


def _sent_tag(call: Call) -> int:
    (arguments, _), *_ = call.pieces
    tag: int = arguments[2]
    return tag


def _received_words(call: Call, last: tuple[Any, ...]) -> str:
    """The other half of a Sendrecv."""
    (arguments, _), *_ = call.pieces
    wire, source, tag = arguments[3], arguments[4], last[0]
    peer = "any rank" if source == MPI.ANY_SOURCE else f"rank {source}"
    tags = f" tag {tag}" if tag >= 0 else ""
    return f"and of {wire.size} {wire.dtype} from {peer}{tags}"


def _op_name(op: MPI.Op) -> str:
    names = ((MPI.SUM, "SUM"), (MPI.MAX, "MAX"), (MPI.MIN, "MIN"), (MPI.PROD, "PROD"))
    return next((name for known, name in names if known == op), repr(op))
