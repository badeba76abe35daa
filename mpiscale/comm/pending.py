# ruff: noqa: N802  (the names are mpi4py's)
"""Calls of MPI that are still to be made or in flight, as data.

A `Call` is one call of a communicator: its line in the ledger and its `Piece`s, each
one call of MPI on at most so many elements as a count can say. One small loop carries
out every blocking call, another starts every non-blocking one (`mpi.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mpi4py import MPI

from mpiscale.backend import Array, array_module
from mpiscale.comm.buffers import Landing, parts
from mpiscale.comm.communicator import SendBuffer
from mpiscale.comm.ledger import Entry, Ledger
from mpiscale.comm.streams import settled


def nothing() -> None:
    """Nothing is left to do."""


class Piece(NamedTuple):
    """One call of MPI: its leading arguments, and what to do when it is done."""

    arguments: tuple[Any, ...]
    finish: Callable[[], None] = nothing


@dataclass(slots=True)
class Call:
    """One call of a communicator; payload and sent in bytes."""

    operation: str
    payload: int
    sent: int
    pieces: Iterable[Piece]
    finish: Callable[[], None] = nothing
    peer: int | None = None
    transport: str = "mpi"

    def begin(self, ledger: Ledger, group: str, size: int) -> Entry:
        """Open its line in the ledger."""
        return ledger.begin(
            self.operation,
            self.payload,
            self.sent,
            group,
            size,
            self.peer,
            self.transport,
        )


def block_of(blocks: list[Any], rank: int) -> Array:
    """The block for `rank` in [array, (counts, displs)], a view."""
    array, (counts, displs) = blocks
    return array[displs[rank] : displs[rank] + counts[rank]]


def flat_parts(wire: Array, longest: int) -> Iterator[Array]:
    """Consecutive views of `wire` [n] of at most `longest` elements, at least one."""
    return (wire[part] for part in parts(wire.size, longest))


def cut_flat(wire: Array, longest: int) -> Iterator[Piece]:
    """Calls on consecutive parts of `wire` [n]."""
    if wire.size <= longest:  # nearly always, and quicker
        return iter((Piece((wire,)),))
    return (Piece((part,)) for part in flat_parts(wire, longest))


def cut_columns(send: SendBuffer, recv: Array | None, longest: int) -> Iterator[Piece]:
    """Calls on the same columns of send [rows, n] and recv [other rows, n].

    Block r of a collective is row r, so a call on some columns of every row is the
    same collective on shorter blocks. `longest` limits the elements of a whole matrix.
    """
    matrices = [] if isinstance(send, MPI.InPlaceType) else [send]
    matrices += [] if recv is None else [recv]
    rows, n = max(m.shape[0] for m in matrices), matrices[0].shape[1]
    if rows * n <= longest:
        yield Piece((send, recv))
        return
    for part in parts(n, max(1, longest // rows)):
        if isinstance(send, MPI.InPlaceType):
            some: SendBuffer = send
        else:
            some = array_module(send).ascontiguousarray(send[:, part])
        if recv is None:  # then send is one row, of which a part is contiguous
            yield Piece((some, None))
        else:
            landing = Landing(recv[:, part], "recvbuf", filled=send is MPI.IN_PLACE)
            settled(landing.wire)  # the copy above, too
            yield Piece((some, landing.wire), landing.finish)


class MpiRequest:
    """A non-blocking call in flight, possibly in several pieces.

    Holds every buffer until MPI is done with it; then copies what arrived in a
    temporary to its place, once.
    """

    def __init__(
        self,
        requests: list[MPI.Request],
        pieces: list[Piece],
        when_done: Callable[[MpiRequest], None],
    ) -> None:
        self._requests, self._pieces, self._when_done = requests, pieces, when_done
        self._done = False

    def Wait(self) -> Literal[True]:
        """Return when the call is done and the buffers may be used."""
        if not self._done:
            for request in self._requests:
                request.Wait()
            self._finish()
        return True

    def Test(self) -> bool:
        """Whether the call is done; does not wait, but lets MPI move on."""
        if not self._done and all([request.Test() for request in self._requests]):
            self._finish()
        return self._done

    def _finish(self) -> None:
        self._done = True
        for piece in self._pieces:
            piece.finish()
        self._pieces = []
        self._when_done(self)
