"""Planner: turns the arguments of a communicator's call into a checked `Call`.

Nothing is sent here, so every error comes before the first byte. All that depends on
rank, number of ranks, the limit on counts and where the arrays lie is decided here;
`mpi.py` and `nccl.py` carry it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiscale.backend import FLOAT32, Array, DType, array_module, is_half
from mpiscale.comm import traffic
from mpiscale.comm.buffers import (
    BlockSpec,
    Landing,
    block_spec,
    check_apart,
    check_array,
    check_receivable,
    outgoing,
)
from mpiscale.comm.communicator import Blocks, SendBuffer
from mpiscale.comm.device_buffers import Access
from mpiscale.comm.pending import Call, Piece, cut_columns, cut_flat

REDUCTIONS = (MPI.SUM, MPI.MAX, MPI.MIN, MPI.PROD)


@dataclass(frozen=True)
class Planner:
    """Plans the calls of one rank among `size`; max_count in elements."""

    rank: int
    size: int
    max_count: int
    access: Access

    # Messages between two ranks

    def send(self, operation: str, buf: Array, dest: int) -> Call:
        """Pieces: (part of buf)."""
        wire = outgoing(buf, "buf")
        pieces = cut_flat(self.access.for_sending(wire), self.max_count)
        sent, transport = self._bytes_to(dest, wire), self._transport(wire, buf.dtype)
        return Call(operation, buf.nbytes, sent, pieces, peer=dest, transport=transport)

    def receive(self, operation: str, buf: Array, source: int) -> Call:
        """Pieces: (part of buf)."""
        landing = Landing(buf, "buf", filled=True)
        self._check_source(landing.wire, source)
        arrival = self.access.for_receiving(landing, filled=True)
        pieces = cut_flat(arrival.wire, self.max_count)
        transport = self._transport(landing.wire, buf.dtype)
        return Call(operation, buf.nbytes, 0, pieces, arrival.finish, source, transport)

    def send_receive(
        self,
        sendbuf: Array,
        dest: int,
        sendtag: int,
        recvbuf: Array | None,
        source: int,
    ) -> Call:
        """One piece: (sendbuf, dest, sendtag, recvbuf, source)."""
        wire = outgoing(sendbuf, "sendbuf")
        landing = Landing(recvbuf, "recvbuf", filled=True)
        self._check_source(landing.wire, source)
        check_apart(wire, landing.wire)
        sent, transport = self._bytes_to(dest, wire), self._transport(wire, wire.dtype)
        arrival = self.access.for_receiving(landing, filled=True)
        of, into = self.access.for_sending(wire), arrival.wire
        pieces = [Piece((of, dest, sendtag, into, source))]
        return Call(
            "Sendrecv", sendbuf.nbytes, sent, pieces, arrival.finish, dest, transport
        )

    def _bytes_to(self, dest: int, wire: Array) -> int:
        return 0 if dest in (self.rank, MPI.PROC_NULL) else wire.nbytes

    def _check_source(self, wire: Array, source: int) -> None:
        if wire.size > self.max_count and source == MPI.ANY_SOURCE:
            raise ValueError(
                f"a message of {wire.size} elements comes in pieces of "
                f"{self.max_count}, all of which must be from one rank: pass source"
            )

    # Collective operations on equal blocks

    def broadcast(self, operation: str, buf: Array, root: int) -> Call:
        """Pieces: (part of buf)."""
        call = (
            self.send(operation, buf, root)
            if self.rank == root
            else self.receive(operation, buf, root)
        )
        call.sent = traffic.broadcast_sent(buf.nbytes, self.size, self.rank, root)
        return call

    def reduce(
        self, sendbuf: SendBuffer, recvbuf: Array | None, op: MPI.Op, root: int
    ) -> Call:
        """Pieces: (part of sendbuf, part of recvbuf)."""
        check_reduction(op)
        if self.rank == root:
            call, _, _ = self._collective("Reduce", sendbuf, 1, recvbuf, 1, True)
        else:
            sendbuf = check_array(sendbuf, "sendbuf off the root")
            wire = outgoing(sendbuf, "sendbuf", reduced=True)
            row = self.access.for_sending(wire)[np.newaxis]
            sent = traffic.reduce_sent(wire.nbytes, self.rank, root)
            pieces = cut_columns(row, None, self.max_count)
            call = Call("Reduce", sendbuf.nbytes, sent, pieces)
            call.transport = self._transport(wire, sendbuf.dtype)
        call.peer = root
        return call

    def all_reduce(
        self, operation: str, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op
    ) -> Call:
        """Pieces: (part of sendbuf, part of recvbuf)."""
        check_reduction(op)
        call, n, itemsize = self._collective(operation, sendbuf, 1, recvbuf, 1, True)
        call.sent = itemsize * traffic.all_reduce_sent(n, self.size, self.rank)
        return call

    def reduce_scatter(
        self, operation: str, sendbuf: SendBuffer, recvbuf: Array, op: MPI.Op
    ) -> Call:
        """Pieces: (columns of sendbuf [p, n], columns of recvbuf [1, n])."""
        check_reduction(op)
        block, p = recvbuf, self.size
        if isinstance(sendbuf, MPI.InPlaceType):
            sendbuf = flat_copy(recvbuf)
            block = array_module(sendbuf).empty(sendbuf.size // p, sendbuf.dtype)
        call, n, itemsize = self._collective(operation, sendbuf, p, block, 1, True)
        call.sent = itemsize * traffic.reduce_scatter_sent(n, p)
        if block is not recvbuf:
            call.finish = then_fill_start(call.finish, recvbuf, block)
        return call

    def all_gather(self, operation: str, sendbuf: SendBuffer, recvbuf: Array) -> Call:
        """Pieces: (columns of sendbuf [1, n], columns of recvbuf [p, n])."""
        p = self.size
        call, n, itemsize = self._collective(operation, sendbuf, 1, recvbuf, p)
        call.sent = itemsize * traffic.all_gather_sent([n] * p, self.rank)
        return call

    def all_to_all(self, operation: str, sendbuf: SendBuffer, recvbuf: Array) -> Call:
        """Pieces: (columns of sendbuf [p, n], columns of recvbuf [p, n])."""
        if isinstance(sendbuf, MPI.InPlaceType):
            sendbuf = flat_copy(recvbuf)
        p = self.size
        call, n, itemsize = self._collective(operation, sendbuf, p, recvbuf, p)
        call.sent = itemsize * traffic.all_to_all_sent([n] * p, self.rank)
        return call

    def _collective(
        self,
        operation: str,
        sendbuf: SendBuffer,
        send_rows: int,
        recvbuf: Array | None,
        recv_rows: int,
        reduced: bool = False,
    ) -> tuple[Call, int, int]:
        """The call, sent still to be filled in; elements of a row; bytes of one."""
        in_place = isinstance(sendbuf, MPI.InPlaceType)
        landing = Landing(recvbuf, "recvbuf", reduced, filled=in_place)
        arrival = self.access.for_receiving(landing, filled=in_place)
        target, recv = landing.target, as_rows(arrival.wire, recv_rows, "recvbuf")
        if isinstance(sendbuf, MPI.InPlaceType):
            send: SendBuffer = sendbuf
        else:
            check_alike(operation, sendbuf, send_rows, target, recv_rows)
            wire = outgoing(sendbuf, "sendbuf", reduced)
            check_apart(wire, landing.wire)
            send = as_rows(self.access.for_sending(wire), send_rows, "sendbuf")
        pieces = cut_columns(send, recv, self.max_count)
        call = Call(operation, target.nbytes, 0, pieces, arrival.finish)
        call.transport = self._transport(landing.wire, target.dtype)
        return call, recv.shape[1], recv.itemsize

    # Collective operations on blocks of any lengths

    def all_gather_blocks(self, sendbuf: SendBuffer, recvbuf: Blocks) -> Call:
        """One piece: (sendbuf, [recvbuf, (counts, displs)])."""
        into = block_spec(recvbuf, self.size, "recvbuf")
        landing = Landing(into.array, "recvbuf", filled=True)
        if isinstance(sendbuf, MPI.InPlaceType):
            send: SendBuffer = sendbuf
        else:
            check_array(sendbuf, "sendbuf")
            check_block(sendbuf.dtype, sendbuf.size, into, self.rank)
            wire = outgoing(sendbuf, "sendbuf")
            check_apart(wire, landing.wire)
            send = self.access.for_sending(wire)
        sent = into.array.itemsize * traffic.all_gather_sent(into.counts, self.rank)
        return self._into_blocks("Allgatherv", send, into, landing, sent)

    def all_to_all_blocks(
        self, sendbuf: Blocks | MPI.InPlaceType, recvbuf: Blocks
    ) -> Call:
        """One piece: (sendbuf, recvbuf), each [array, (counts, displs)]."""
        into = block_spec(recvbuf, self.size, "recvbuf")
        landing = Landing(into.array, "recvbuf", filled=True)
        if isinstance(sendbuf, MPI.InPlaceType):
            of = into._replace(array=flat_copy(into.array))
        else:
            of = block_spec(sendbuf, self.size, "sendbuf")
        check_block(of.array.dtype, of.counts[self.rank], into, self.rank)
        wire = outgoing(of.array, "sendbuf")
        check_apart(wire, landing.wire)
        sent = wire.itemsize * traffic.all_to_all_sent(of.counts, self.rank)
        send = [self.access.for_sending(wire), (of.counts, of.displs)]
        return self._into_blocks("Alltoallv", send, into, landing, sent)

    def _into_blocks(
        self, operation: str, send: Any, into: BlockSpec, landing: Landing, sent: int
    ) -> Call:
        """The call that receives into blocks; one piece."""
        arrival = self.access.for_receiving(landing, filled=True)
        pieces = [Piece((send, [arrival.wire, (into.counts, into.displs)]))]
        call = Call(operation, into.nbytes, sent, pieces, arrival.finish)
        call.transport = self._transport(landing.wire, into.array.dtype)
        return call

    def _transport(self, wire: Array, dtype: DType) -> str:
        """What the ledger says about how elements of `dtype` travel as `wire`."""
        name = self.access.transport(wire)
        as_float32 = is_half(dtype) and wire.dtype == FLOAT32
        return f"{name}, float32" if as_float32 else name


def check_reduction(op: MPI.Op) -> None:
    """Refuse operations of which the checks of types here know nothing."""
    if op not in REDUCTIONS:
        raise ValueError("op must be MPI.SUM, MPI.MAX, MPI.MIN or MPI.PROD")


def check_alike(
    operation: str, sendbuf: Array, send_rows: int, recvbuf: Array, recv_rows: int
) -> None:
    """Refuse buffers of different types, or of lengths that don't fit together."""
    check_array(sendbuf, "sendbuf")
    check_same_type(sendbuf.dtype, recvbuf.dtype)
    if sendbuf.size * recv_rows != recvbuf.size * send_rows:
        send_blocks = f"{send_rows} x n" if send_rows > 1 else "n"
        recv_blocks = f"{recv_rows} x n" if recv_rows > 1 else "n"
        raise ValueError(
            f"{operation}: sendbuf must have {send_blocks} elements and recvbuf "
            f"{recv_blocks}, got {sendbuf.size} and {recvbuf.size}"
        )


def check_block(dtype: DType, sent: int, into: BlockSpec, rank: int) -> None:
    """Refuse a block for this rank itself that differs from what it expects."""
    check_same_type(dtype, into.array.dtype)
    if sent != into.counts[rank]:
        raise ValueError(
            f"rank {rank} sends itself a block of {sent} elements, but entry {rank} "
            f"of the counts of recvbuf is {into.counts[rank]}: make them equal"
        )


def check_same_type(sent: DType, received: DType) -> None:
    """Refuse to receive a type other than the one sent: MPI does not convert."""
    if sent != received:
        raise TypeError(
            f"sendbuf has elements of type {sent}, recvbuf {received}: convert one "
            "of them with astype"
        )


def as_rows(wire: Array, rows: int, role: str) -> Array:
    """wire [rows * n] -> [rows, n], a view."""
    if wire.size % rows:
        raise ValueError(
            f"{role} must hold equal blocks for {rows} ranks, got {wire.size} elements "
            f"= {wire.size // rows} x {rows} + {wire.size % rows}"
        )
    return wire.reshape(rows, wire.size // rows)


def flat_copy(recvbuf: Array) -> Array:
    """A copy of a receive buffer that holds the input too -> [recvbuf.size]."""
    check_receivable(recvbuf, "recvbuf")
    return recvbuf.flatten()


def then_fill_start(
    finish: Callable[[], None], recvbuf: Array, block: Array
) -> Callable[[], None]:
    """After `finish`, put `block` at the start of `recvbuf`; the rest stays."""

    def finish_and_fill() -> None:
        finish()
        recvbuf.flat[: block.size] = block

    return finish_and_fill
