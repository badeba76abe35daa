"""A thread on every rank that tells rank 0 what the rank does; rank 0 looks for hangs.

The main thread notes on its `Board` where it begins and ends to wait. Several times a
second the watcher sends the board to rank 0's watcher, over a communicator of its own.
When boards with a waiting rank have not changed for the timeout, rank 0 prints the
wait-for graph; if it is a deadlock, it ends the job.

A board that is not sent may be out of date: a watcher is silent while its main thread
is in a call that keeps Python's lock. Such a rank computes, whatever its last word.

The watchers call MPI while main threads wait in it, so MPI must have been started with
MPI_THREAD_MULTIPLE, as mpi4py does by default.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from mpi4py import MPI

from mpiscale.comm.debug.wait_for_graph import (
    CollectiveCall,
    GroupKey,
    RankState,
    deadlocked,
    report,
)
from mpiscale.comm.ending import abort, end_together, say
from mpiscale.comm.ledger import COMM_FOLDER
from mpiscale.errors import InputError

LONGEST_NAP_S = 0.25
LOOKS_PER_TIMEOUT = 8


@dataclass(frozen=True)
class Waiting:
    """What the main thread waits for; see `RankState`."""

    text: str
    where: str
    peers: tuple[int, ...] = ()
    any_peer: bool = False
    collective: CollectiveCall | None = None


class Board:
    """What the main thread of this rank does; written by it, read by the watcher."""

    def __init__(self) -> None:
        self.waiting: Waiting | None = None
        self.arrivals: Counter[GroupKey] = Counter()
        self.in_flight: dict[int, str] = {}
        self.groups: Counter[tuple[int, ...]] = Counter()
        self.changes = 0

    def new_group(self, ranks: tuple[int, ...]) -> GroupKey:
        """Names a new group of these world ranks, alike on all of them."""
        self.groups[ranks] += 1
        return ranks, self.groups[ranks]

    @contextmanager
    def wait(self, waiting: Waiting) -> Iterator[None]:
        """Note that the block waits."""
        outer, self.waiting = self.waiting, waiting
        self.changes += 1
        try:
            yield
        finally:
            self.waiting = outer
            self.changes += 1


@dataclass(frozen=True)
class Note:
    """What a watcher sends: a state, and a number that grows when anything happens."""

    state: RankState
    changes: int
    leaves: bool = False


class Watcher:
    """Sends this rank's board to rank 0; there, collects all and looks for hangs.

    Args:
        comm: of all ranks; collective.
        timeout_s: how long ranks may wait without any change before rank 0 speaks.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise InputError(
                "debug-comm needs MPI_THREAD_MULTIPLE, and this MPI was started with "
                "less: leave MPI4PY_RC_THREAD_LEVEL unset, or use another MPI"
            )
        self.board, self.timeout_s = Board(), timeout_s
        self._comm = comm.Dup()
        self._main = threading.main_thread().ident
        self._notes: dict[int, Note] = {}
        self._heard: dict[int, float] = {}  # when, by this rank's clock
        self._quiet_since = time.monotonic()
        self._reported: list[int] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # runs before mpi4py's own, which ends MPI

    def close(self) -> None:
        """Stop; all ranks do, at the end of the job."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        nap = min(LONGEST_NAP_S, self.timeout_s / LOOKS_PER_TIMEOUT)
        sending: MPI.Request | None = None
        while not self._stop.wait(nap):
            note = self._note()
            if self._comm.rank == 0:
                self._collect(note)
                self._judge()
            elif sending is None or sending.Test():
                sending = self._comm.isend(note, 0)
        self._leave(sending)

    def _leave(self, sending: MPI.Request | None) -> None:
        """Let no message be lost: rank 0 waits for everybody's last note."""
        last = replace(self._note(), leaves=True)
        if self._comm.rank:
            if sending is not None:
                sending.Wait()
            self._comm.send(last, 0)
            return
        while sum(note.leaves for note in self._notes.values()) < self._comm.size - 1:
            self._receive(self._comm.recv())

    def _collect(self, own: Note) -> None:
        self._receive(own)
        while self._comm.Iprobe():
            self._receive(self._comm.recv())

    def _receive(self, note: Note) -> None:
        rank, now = note.state.rank, time.monotonic()
        before = self._notes.get(rank)
        if before is None or before.changes != note.changes:
            self._quiet_since = now
            self._reported = None
        self._notes[rank], self._heard[rank] = note, now

    def _judge(self) -> None:
        """Speak when nothing has changed for long and somebody waits."""
        quiet = time.monotonic() - self._quiet_since
        states = {rank: self._last_word(rank) for rank in self._notes}
        waits = any(state.doing == "waits" for state in states.values())
        if quiet < self.timeout_s or not waits or len(states) < self._comm.size:
            return
        stuck = deadlocked(states)
        if stuck:
            abort(report(states, quiet), 1)
        if self._reported is None:
            self._reported = stuck
            say(report(states, quiet))

    def _last_word(self, rank: int) -> RankState:
        """The rank's state; it doesn't wait any more if its watcher has gone silent."""
        state = self._notes[rank].state
        silent = time.monotonic() - self._heard[rank]
        if state.doing != "waits" or silent < self.timeout_s / 2:
            return state
        text = f"a call that keeps Python's lock, silent for {silent:.0f} s"
        return replace(
            state, doing="computes", text=text, where=f"last seen at {state.where}"
        )

    def _note(self) -> Note:
        board, rank = self.board, self._comm.rank
        changes, waiting = board.changes, board.waiting
        arrivals, in_flight = dict(board.arrivals), tuple(board.in_flight.values())
        if waiting is not None:
            state = RankState(
                rank,
                "waits",
                waiting.text,
                waiting.where,
                waiting.peers,
                waiting.any_peer,
                waiting.collective,
                arrivals,
                in_flight,
            )
        else:
            state = self._unblocked(rank, arrivals)
        return Note(state, changes)

    def _unblocked(self, rank: int, arrivals: dict[GroupKey, int]) -> RankState:
        """The main thread is in no call of ours: where is it?"""
        frame = sys._current_frames().get(self._main or 0)
        inside: FrameType | None = frame
        while inside is not None:
            if inside.f_code is end_together.__code__:
                return RankState(rank, "finished", arrivals=arrivals)
            inside = inside.f_back
        while frame is not None and frame.f_code.co_filename.startswith(COMM_FOLDER):
            frame = frame.f_back
        if frame is None:
            return RankState(rank, "finished", arrivals=arrivals)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return RankState(
            rank, "computes", frame.f_code.co_name, where, arrivals=arrivals
        )
