"""Every method of a communicator that moves arrays, on arrays of any library.

Each check takes the array's library (NumPy, CuPy or its stand-in), puts in what it
draws, and compares what comes out with NumPy on what all ranks put in.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

REDUCTIONS = [
    (MPI.SUM, np.add),
    (MPI.PROD, np.multiply),
    (MPI.MAX, np.maximum),
    (MPI.MIN, np.minimum),
]


def layouts(xp, values):
    """Arrays of `xp` that hold the 2-D `values`, by the name of their layout."""
    m, n = values.shape
    spread = xp.asarray(np.zeros((2 * m, 3 * n), values.dtype))
    stepped = spread[::2, 1::3]
    stepped[...] = xp.asarray(values)
    yield "C", xp.asarray(values.copy())
    yield "transposed", xp.asarray(values.T.copy()).T
    yield "stepped", stepped
    yield "negative stride", xp.asarray(values[::-1, ::-1].copy())[::-1, ::-1]


def inputs(comm, *shape, dtype=np.float32):
    """All ranks' inputs [p, *shape], the same on every rank; small integers."""
    drawn = np.random.default_rng(7).integers(-3, 4, (comm.size, *shape))
    return drawn.astype(dtype)


class Checked:
    """Calls on arrays of `xp`, compared with NumPy."""

    def __init__(self, comm, xp):
        self.comm, self.xp = comm, xp
        self.host = np.array if xp is np else xp.asnumpy

    def put(self, x):
        return self.xp.asarray(x.copy())

    def room(self, *shape, dtype=np.float32):
        return self.put(np.full(shape, 99, dtype))

    def same(self, got, expected, message=""):
        np.testing.assert_array_equal(self.host(got), expected, message)

    def all(self, n, dtype=np.float32):
        """Every method, with blocks of n elements."""
        self.all_reduce(n, dtype)
        self.reduce_and_broadcast(n, dtype)
        self.reduce_scatter(n, dtype)
        self.all_gather_and_all_to_all(n, dtype)
        self.uneven_all_gather(n, dtype)
        self.uneven_all_to_all(n, dtype)
        self.messages(n, dtype)
        self.comm.Barrier()

    def all_reduce(self, n, dtype):
        comm, x = self.comm, inputs(self.comm, n, dtype=dtype)
        mine = self.put(x[comm.rank])
        for op, ufunc in REDUCTIONS:
            blocking, started = self.room(n, dtype=dtype), self.room(n, dtype=dtype)
            in_place = self.put(x[comm.rank])
            comm.Allreduce(mine, blocking, op)
            request = comm.Iallreduce(mine, started, op)
            comm.Allreduce(MPI.IN_PLACE, in_place, op=op)
            request.Wait()
            for result in (blocking, started, in_place):
                expected = ufunc.reduce(x, dtype=dtype)
                self.same(result, expected, f"{ufunc} {n} {dtype}")

    def reduce_and_broadcast(self, n, dtype):
        comm, x = self.comm, inputs(self.comm, n, dtype=dtype)
        for root in range(comm.size):
            is_root = comm.rank == root
            total = self.room(n, dtype=dtype) if is_root else None
            comm.Reduce(self.put(x[comm.rank]), total, root=root)
            in_place = self.put(x[comm.rank])
            if is_root:
                comm.Reduce(MPI.IN_PLACE, in_place, root=root)
                self.same(total, x.sum(axis=0, dtype=dtype), f"Reduce {n}")
                self.same(in_place, x.sum(axis=0, dtype=dtype))
            else:
                comm.Reduce(in_place, None, root=root)
            y, z = self.put(x[comm.rank]), self.put(x[comm.rank])
            comm.Bcast(y, root)
            request = comm.Ibcast(z, root)
            while not request.Test():
                pass
            self.same(y, x[root], f"Bcast {n}")
            self.same(z, x[root], f"Ibcast {n}")

    def reduce_scatter(self, n, dtype):
        comm, x = self.comm, inputs(self.comm, self.comm.size, n, dtype=dtype)
        total = x.sum(axis=0, dtype=dtype)[comm.rank]
        mine, in_place = self.put(x[comm.rank]), self.put(x[comm.rank])
        blocking, started = self.room(n, dtype=dtype), self.room(n, dtype=dtype)
        comm.Reduce_scatter_block(mine, blocking)
        comm.Ireduce_scatter_block(mine, started).Wait()
        comm.Reduce_scatter_block(MPI.IN_PLACE, in_place)
        for result in (blocking, started):
            self.same(result, total, f"Reduce_scatter_block {n}")
        self.same(in_place, [total, *x[comm.rank][1:]], f"in place {n}")

    def all_gather_and_all_to_all(self, n, dtype):
        comm = self.comm
        x = inputs(comm, comm.size, n, dtype=dtype)
        mine = self.put(x[comm.rank])
        for name, expected, send in (
            ("gather", x[:, 0], mine[0]),
            ("toall", x[:, comm.rank], mine),
        ):
            blocking = self.room(comm.size, n, dtype=dtype)
            started = self.room(comm.size, n, dtype=dtype)
            own = x[comm.rank].copy()
            own[comm.rank] = own[0] if name == "gather" else own[comm.rank]
            in_place = self.put(own)
            getattr(comm, f"All{name}")(send, blocking)
            getattr(comm, f"Iall{name}")(send, started).Wait()
            getattr(comm, f"All{name}")(MPI.IN_PLACE, in_place)
            for result in (blocking, started, in_place):
                self.same(result, expected, f"{name} {n}")

    def uneven_all_gather(self, n, dtype):
        comm = self.comm
        counts = [n, 0, 2 * n + 1, 1][: comm.size]
        displs = [sum(counts[r + 1 :]) + 1 for r in range(comm.size)]  # backwards
        blocks = [np.arange(k).astype(dtype) + r for r, k in enumerate(counts)]
        mine, packed = self.put(blocks[comm.rank]), self.room(sum(counts), dtype=dtype)
        comm.Allgatherv(mine, (packed, counts))
        self.same(packed, np.concatenate(blocks), f"Allgatherv {n}")
        comm.Allgatherv(MPI.IN_PLACE, (packed, counts))
        self.same(packed, np.concatenate(blocks), f"Allgatherv {n}")
        spread = self.room(sum(counts) + 2, dtype=dtype)
        comm.Allgatherv(mine, (spread, (counts, displs)))
        gaps = np.full(1, 99, dtype)
        backwards = np.concatenate([gaps, *reversed(blocks), gaps])
        self.same(spread, backwards, f"Allgatherv {n}")

    def uneven_all_to_all(self, n, dtype):
        comm, p = self.comm, self.comm.size
        counts = [[n * ((2 * s + d) % 3) for d in range(p)] for s in range(p)]
        blocks = [
            [np.full(k, s + 4 * d, dtype) for d, k in enumerate(row)]
            for s, row in enumerate(counts)
        ]
        sent, received = counts[comm.rank], [row[comm.rank] for row in counts]
        send = self.put(np.concatenate(blocks[comm.rank]))
        got = self.room(sum(received), dtype=dtype)
        comm.Alltoallv((send, sent), (got, received))
        self.same(got, np.concatenate([row[comm.rank] for row in blocks]))
        same = self.put(np.concatenate([np.full(n, s, dtype) for s in range(p)]))
        comm.Alltoallv(MPI.IN_PLACE, (same, [n] * p))
        self.same(same, np.full(n * p, comm.rank, dtype))

    def messages(self, n, dtype):
        comm, x = self.comm, inputs(self.comm, n, dtype=dtype)
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        mine, both, started = (self.put(x[comm.rank]) for _ in range(3))
        comm.Sendrecv(mine, right, 0, both, left, 0)
        requests = [comm.Irecv(started, left), comm.Isend(mine, right)]
        while not all([request.Test() for request in requests]):
            pass
        self.same(both, x[left], f"Sendrecv {n}")
        self.same(started, x[left], f"Isend {n}")
        nobody = self.room(n, dtype=dtype)
        comm.Sendrecv(mine, MPI.PROC_NULL, 0, nobody, MPI.PROC_NULL, 0)
        self.same(nobody, np.full(n, 99, dtype))
        if comm.rank == 0 and comm.size > 1:
            comm.Send(mine, 1)
        elif comm.rank == 1:
            comm.Recv(both, 0)
            self.same(both, x[0], f"Send {n}")

    def every_layout(self):
        """From and into arrays of every layout, in place too."""
        comm, p, rank = self.comm, self.comm.size, self.comm.rank
        x = inputs(comm, p, 4)
        total, blank = x.sum(axis=0), np.zeros((p, 4), np.float32)
        for name, send in layouts(self.xp, x[rank]):
            for other, recv in layouts(self.xp, blank):
                message = f"{name} -> {other}"
                comm.Allreduce(send, recv)
                self.same(recv, total, message)
                comm.Alltoall(send, recv)
                self.same(recv, x[:, rank], message)
                comm.Allgather(send[0], recv)
                self.same(recv, x[:, 0], message)
                comm.Reduce_scatter_block(send, recv[:1])
                self.same(recv[0], total[rank], message)
                comm.Sendrecv(send, (rank + 1) % p, 0, recv, (rank - 1) % p, 0)
                self.same(recv, x[(rank - 1) % p], message)
        for name, both in layouts(self.xp, x[rank]):
            comm.Allreduce(MPI.IN_PLACE, both)
            self.same(both, total, name)
        for name, both in layouts(self.xp, x[rank]):
            comm.Reduce_scatter_block(MPI.IN_PLACE, both)
            self.same(both, [total[rank], *x[rank][1:]], name)
        for name, both in layouts(self.xp, x[rank]):
            comm.Ibcast(both, root=p - 1).Wait()
            self.same(both, x[p - 1], name)

    def half_precision(self, half):
        """16-bit floats: sums in float32, rounded once; moved as they are."""
        comm = self.comm
        x = np.full((4, 8 * comm.size), 0.001, half)
        x[:, ::2] = 1
        x[0] *= 256  # later terms of 1 or 0.001 would be lost or rounded, one by one
        x = x[: comm.size]
        mine = self.put(x[comm.rank])
        expected = x.astype(np.float32).sum(axis=0).astype(half)
        total, block = self.room(*mine.shape, dtype=half), self.room(8, dtype=half)
        comm.Allreduce(mine, total)
        self.same(total, expected)
        comm.Reduce_scatter_block(mine, block)
        self.same(block, expected.reshape(comm.size, 8)[comm.rank])
        gathered = self.room(*x.shape, dtype=half)
        comm.Allgather(mine, gathered)
        self.same(gathered, x)
