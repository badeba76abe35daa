"""Messages between two ranks, of arrays and of objects."""

import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm.communicator import Communicator, Waitall
from tests.comm.kinds_of_arrays import layouts
from tests.communicators import world_communicator

RANKS = (1, 2, 3, 4)


def communicator(max_count=None):
    return world_communicator(max_count=max_count)


def as_interface(comm: MPI.Comm) -> Communicator:
    return comm  # a type checker refuses it if the interface isn't mpi4py's


@pytest.mark.mpi(ranks=RANKS)
def test_ring_shift_of_messages_below_and_above_the_eager_limit():
    comm = communicator()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for n in (25, 16_000, 2_500_000):  # 100 B, 64 kB, 10 MB
        got = np.empty(n, np.float32)
        comm.Sendrecv(np.full(n, comm.rank, np.float32), right, 0, got, left)
        assert (got == left).all()
        got[:] = -1
        mine = np.full(n, comm.rank, np.float32)
        Waitall([comm.Irecv(got, left), comm.Isend(mine, right)])
        assert (got == left).all()


@pytest.mark.mpi(ranks=(2,))
def test_transposed_array_arrives_as_it_looks():
    comm = communicator()
    if comm.rank == 0:
        comm.Send(np.arange(6.0).reshape(2, 3).T, dest=1)
    else:
        y = np.empty((3, 2))
        comm.Recv(y, source=0)
        np.testing.assert_array_equal(y, [[0, 3], [1, 4], [2, 5]])


@pytest.mark.mpi(ranks=(2,))
def test_every_layout_goes_into_every_layout():
    values = np.arange(12.0).reshape(3, 4)
    for limit in (None, 1, 5):
        comm = communicator(limit)
        for name, x in layouts(values):
            for other, y in layouts(np.zeros((3, 4))):
                if comm.rank == 0:
                    comm.Send(x, 1, tag=3)
                    comm.Isend(x, 1, tag=4).Wait()
                else:
                    comm.Recv(y, 0, tag=3)
                    np.testing.assert_array_equal(y, values, f"{name} -> {other}")
                    y[...] = 0
                    comm.Irecv(y, 0, tag=4).Wait()
                    np.testing.assert_array_equal(y, values, f"{name} -> {other}")
                z = np.zeros((3, 8))
                comm.Sendrecv(x, 1 - comm.rank, 0, z[:, ::2], 1 - comm.rank)
                np.testing.assert_array_equal(z[:, ::2], values)
                assert not z[:, 1::2].any()


@pytest.mark.mpi(ranks=(2,))
def test_messages_of_every_size_under_every_limit():
    for limit in (1, 7, 1024, None):
        comm = communicator(limit)
        other = 1 - comm.rank
        sizes = {0, 1, 7, 8, 23} | ({1024, 1025, 3074} if limit != 1 else set())
        for n in sizes:
            m = n + 5 * comm.rank  # the two directions differ in length
            got = np.empty(n + 5 * other)
            comm.Sendrecv(np.arange(m), other, 0, got.view(np.int64), other)
            np.testing.assert_array_equal(got.view(np.int64), range(got.size))


@pytest.mark.mpi(ranks=(2,))
def test_scalars_read_only_and_broadcast_arrays_can_be_sent():
    comm = communicator()
    if comm.rank == 0:
        read_only = np.arange(3.0)
        read_only.flags.writeable = False
        for x in (np.array(5.0), read_only, np.broadcast_to(2.0, (2, 2))):
            comm.Send(x, 1)
    else:
        for expected in (np.array(5.0), np.arange(3.0), np.full((2, 2), 2.0)):
            y = np.empty_like(expected)
            comm.Recv(y, 0)
            np.testing.assert_array_equal(y, expected)


@pytest.mark.mpi(ranks=(2,))
def test_shorter_message_leaves_the_rest_of_the_buffer():
    comm = communicator()
    if comm.rank == 0:
        comm.Send(np.ones(2), 1)
    else:
        y = np.full(8, 7.0)
        comm.Recv(y[::2], 0)
        np.testing.assert_array_equal(y, [1, 7, 1, 7, 7, 7, 7, 7])


@pytest.mark.mpi(ranks=(1, 2))
def test_wrong_buffers_are_refused_before_anything_is_sent():
    comm = communicator(4)
    x = np.zeros(6)
    refused = [
        (lambda: comm.Send([1, 2], 0), "must be a NumPy array"),
        (lambda: comm.Send((x, MPI.DOUBLE), 0), "must be a NumPy array"),
        (lambda: comm.Isend(np.zeros(2, ">f4"), 0), "byte-swapped"),
        (lambda: comm.Recv(np.broadcast_to(1.0, 3), 0), "read-only"),
        (lambda: comm.Recv(x), "pass source"),
        (lambda: comm.Sendrecv(x, 0, 0, x[1:], 0), "share memory"),
        (lambda: comm.Sendrecv(x, 0), "must be a NumPy array, got NoneType"),
        (lambda: comm.send(x, 0), "use Send"),
        (lambda: comm.bcast(x), "use Bcast"),
        (lambda: comm.gather(x), "use Gather"),
        (lambda: comm.allgather(x), "use Allgather"),
        (lambda: comm.allreduce(x), "use Allreduce"),
    ]
    for call, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert not comm.ledger.recent


@pytest.mark.mpi(ranks=(3,))
def test_ledger_counts_what_goes_to_others():
    comm = communicator()
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    x, y = np.zeros(10), np.empty(10)
    comm.Sendrecv(x, right, 0, y, left)
    entry = comm.ledger.recent[-1]
    assert (entry.operation, entry.sent, entry.peer) == ("Sendrecv", 80, right)
    comm.Sendrecv(x, comm.rank, 0, y, comm.rank)
    comm.Send(x, MPI.PROC_NULL)
    request = comm.Irecv(y, left)
    comm.Send(x, right)
    request.Wait()
    assert comm.ledger.sent_bytes() == 160
    assert all(e.where.startswith(__file__) for e in comm.ledger.recent)


@pytest.mark.mpi(ranks=RANKS)
def test_objects_travel_by_the_lower_case_methods():
    comm = communicator()
    p, rank = comm.size, comm.rank
    assert comm.bcast({"root": rank}, root=p - 1) == {"root": p - 1}
    assert comm.allgather((rank, "x")) == [(r, "x") for r in range(p)]
    assert comm.gather(rank) == (list(range(p)) if rank == 0 else None)
    assert comm.allreduce(rank) == p * (p - 1) // 2
    assert comm.allreduce(rank, op=MPI.MAX) == p - 1
    if p > 1:
        if rank == 0:
            comm.send("hello", dest=1, tag=5)
        elif rank == 1:
            assert comm.recv(source=0, tag=5) == "hello"
    assert (comm.ledger.sent_bytes() > 0) == (p > 1)
    sent = comm.ledger.sent_bytes()
    comm.allgather("y" * 1000)
    assert comm.ledger.sent_bytes() - sent >= 1000 * (p - 1)


@pytest.mark.mpi(ranks=(1,))
def test_mpi4py_communicator_is_a_communicator():
    assert as_interface(MPI.COMM_WORLD).size == 1
