"""The lower-case half of an MPI communicator: small Python objects, pickled.

Sent bytes are those of the pickles: along a chain for bcast and allreduce, around the
ring for allgather, straight to the root for gather.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from mpiscale.comm import traffic
from mpiscale.comm.buffers import check_object
from mpiscale.comm.ledger import Ledger

T = TypeVar("T")


class MpiObjects:
    """A group of ranks that exchange objects; `MpiCommunicator` adds the arrays."""

    def __init__(self, comm: MPI.Comm, ledger: Ledger | None, name: str) -> None:
        self.mpi = comm
        self.rank, self.size, self.name = comm.rank, comm.size, name
        self.ledger = Ledger() if ledger is None else ledger

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send a picklable object."""
        self._send_object(obj, dest, tag, self.mpi.send)

    def _send_object(
        self, obj: Any, dest: int, tag: int, send: Callable[[Any, int, int], None]
    ) -> None:
        check_object(obj, "send")
        n = 0 if dest in (self.rank, MPI.PROC_NULL) else pickled_size(obj)
        self._timed("send", lambda: send(obj, dest, tag), lambda _: n, dest)

    def recv(
        self, buf: None = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Any:
        """Wait for an object and return it; `buf` is there for mpi4py's sake."""
        return self._timed(
            "recv", lambda: self.mpi.recv(buf, source, tag), lambda _: 0, source
        )

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The root's object, on every rank."""
        check_object(obj, "bcast")

        def sent(result: Any) -> int:
            n = pickled_size(result)
            return traffic.broadcast_sent(n, self.size, self.rank, root)

        return self._timed("bcast", lambda: self.mpi.bcast(obj, root), sent, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """All ranks' objects in rank order on the root, None elsewhere."""
        check_object(sendobj, "gather")
        n = 0 if self.rank == root else pickled_size(sendobj)
        return self._timed(
            "gather", lambda: self.mpi.gather(sendobj, root), lambda _: n, root
        )

    def allgather(self, sendobj: Any) -> list[Any]:
        """All ranks' objects in rank order, on every rank."""
        check_object(sendobj, "allgather")

        def sent(results: list[Any]) -> int:
            return traffic.all_gather_sent(list(map(pickled_size, results)), self.rank)

        return self._timed("allgather", lambda: self.mpi.allgather(sendobj), sent)

    def allreduce(self, sendobj: Any, op: MPI.Op = MPI.SUM) -> Any:
        """The sum (or other op) of all ranks' objects, on every rank."""
        check_object(sendobj, "allreduce")

        def sent(result: Any) -> int:
            n, p = pickled_size(result), self.size
            to_first = traffic.reduce_sent(n, self.rank, root=0)
            return to_first + traffic.broadcast_sent(n, p, self.rank, root=0)

        return self._timed("allreduce", lambda: self.mpi.allreduce(sendobj, op), sent)

    def _timed(
        self,
        operation: str,
        call: Callable[[], T],
        sent: Callable[[T], int],
        peer: int | None = None,
    ) -> T:
        """Make the call and book it; its size may be known only afterwards."""
        entry = self.ledger.begin(operation, 0, 0, self.name, self.size, peer)
        result = call()
        self.ledger.end(entry)
        n = sent(result)
        self.ledger.add_bytes(entry, payload=n, sent=n)
        return result


def pickled_size(obj: Any) -> int:
    """Bytes of `obj` as mpi4py sends it."""
    return len(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
