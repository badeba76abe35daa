"""Each collective against NumPy on what all ranks put in: types, layouts, limits."""

import math

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm import traffic
from mpiscale.comm.communicator import Waitall
from mpiscale.comm.mpi import UNLIMITED, MpiCommunicator, default_max_count
from tests.comm.kinds_of_arrays import layouts
from tests.communicators import world_communicator

RANKS = (1, 2, 3, 4)
LIMITS = (1, 7, 1024, None)
SIZES = (0, 1, 7, 8, 23)
REDUCTIONS = [
    (MPI.SUM, np.add),
    (MPI.PROD, np.multiply),
    (MPI.MAX, np.maximum),
    (MPI.MIN, np.minimum),
]


def communicator(max_count=None):
    return world_communicator(max_count=max_count)


def inputs(comm, *shape, dtype=np.float64):
    """All ranks' inputs [p, *shape], the same on every rank; small integers."""
    drawn = np.random.default_rng(7).integers(-3, 4, (comm.size, *shape))
    return drawn.astype(dtype)


def limits_and_sizes():
    cases = [(limit, n) for limit in LIMITS for n in SIZES]
    return [*cases, (1024, 1024), (1024, 1025), (1024, 3 * 1024 + 2), (None, 5000)]


@pytest.mark.mpi(ranks=RANKS)
def test_all_reduce_equals_numpy_under_every_limit_and_operation():
    for limit, n in limits_and_sizes():
        comm = communicator(limit)
        x = inputs(comm, n)
        mine = x[comm.rank]
        for op, ufunc in REDUCTIONS:
            expected = ufunc.reduce(x)
            blocking, started, in_place = np.empty(n), np.empty(n), mine.copy()
            comm.Allreduce(mine, blocking, op)
            comm.Iallreduce(mine, started, op).Wait()
            comm.Allreduce(MPI.IN_PLACE, in_place, op=op)
            for result in (blocking, started, in_place):
                np.testing.assert_array_equal(result, expected, f"{limit} {n}")


@pytest.mark.mpi(ranks=RANKS)
def test_reduce_and_broadcast_equal_numpy_from_every_root():
    for limit, n in limits_and_sizes():
        comm = communicator(limit)
        x = inputs(comm, n)
        for root in range(comm.size):
            is_root = comm.rank == root
            total = np.empty(n) if is_root else None
            comm.Reduce(x[comm.rank], total, root=root)
            in_place = x[comm.rank].copy()
            if is_root:
                comm.Reduce(MPI.IN_PLACE, in_place, root=root)
            else:
                comm.Reduce(in_place, None, root=root)
            if total is not None:
                np.testing.assert_array_equal(total, x.sum(axis=0), f"{limit} {n}")
                np.testing.assert_array_equal(in_place, x.sum(axis=0))
            for broadcast in (comm.Bcast, lambda *a, c=comm: c.Ibcast(*a).Wait()):
                y = x[comm.rank].copy()
                broadcast(y, root)
                np.testing.assert_array_equal(y, x[root], f"{limit} {n}")


@pytest.mark.mpi(ranks=RANKS)
def test_reduce_scatter_equals_numpy_under_every_limit():
    for limit, n in limits_and_sizes():
        comm = communicator(limit)
        x = inputs(comm, comm.size, n)
        mine, expected = x[comm.rank], x.sum(axis=0)[comm.rank]
        blocking, started, in_place = np.empty(n), np.empty(n), mine.copy()
        comm.Reduce_scatter_block(mine, blocking)
        comm.Ireduce_scatter_block(mine, started).Wait()
        comm.Reduce_scatter_block(MPI.IN_PLACE, in_place)
        for result in (blocking, started, in_place[0]):
            np.testing.assert_array_equal(result, expected, f"{limit} {n}")
        np.testing.assert_array_equal(in_place[1:], mine[1:])


@pytest.mark.mpi(ranks=RANKS)
def test_all_gather_and_all_to_all_equal_numpy_under_every_limit():
    for limit, n in limits_and_sizes():
        comm = communicator(limit)
        x = inputs(comm, comm.size, n)
        mine = x[comm.rank]
        gathered = np.full((3, comm.size, n), np.nan)
        gathered[2, comm.rank] = mine[0]
        comm.Allgather(mine[0], gathered[0])
        comm.Iallgather(mine[0], gathered[1]).Wait()
        comm.Allgather(MPI.IN_PLACE, gathered[2])
        exchanged = np.full((3, comm.size, n), np.nan)
        exchanged[2] = mine
        comm.Alltoall(mine, exchanged[0])
        comm.Ialltoall(mine, exchanged[1]).Wait()
        comm.Alltoall(MPI.IN_PLACE, exchanged[2])
        for way in range(3):
            np.testing.assert_array_equal(gathered[way], x[:, 0], f"{limit} {n}")
            np.testing.assert_array_equal(exchanged[way], x[:, comm.rank])


@pytest.mark.mpi(ranks=RANKS)
def test_all_gather_of_uneven_blocks_under_every_limit():
    for limit in LIMITS:
        comm = communicator(limit)
        for counts in ([11, 0, 8, 7][: comm.size], [400] * comm.size):
            displs = [sum(counts[r + 1 :]) + 1 for r in range(comm.size)]  # backwards
            blocks = [np.arange(n) + 1000.0 * r for r, n in enumerate(counts)]
            packed = np.zeros(sum(counts))
            comm.Allgatherv(blocks[comm.rank], (packed, counts))
            np.testing.assert_array_equal(packed, np.concatenate(blocks))
            spread = np.zeros(sum(counts) + 2)
            comm.Allgatherv(blocks[comm.rank], (spread, (counts, displs)))
            backwards = [[0.0], *reversed(blocks), [0.0]]
            np.testing.assert_array_equal(spread, np.concatenate(backwards))
            comm.Allgatherv(MPI.IN_PLACE, (packed, counts))
            np.testing.assert_array_equal(packed, np.concatenate(blocks))


@pytest.mark.mpi(ranks=RANKS)
def test_all_to_all_of_uneven_blocks_under_every_limit():
    for limit in LIMITS:
        comm = communicator(limit)
        for scale in (1, 400):
            p, rank = comm.size, comm.rank
            counts = scale * np.array(
                [[(2 * s + d) % 3 for d in range(p)] for s in range(p)]
            )
            sent, received = counts[rank], counts[:, rank]
            blocks = [
                [np.full(n, 10.0 * s + d) for d, n in enumerate(c)]
                for s, c in enumerate(counts)
            ]
            got = np.zeros(received.sum())
            comm.Alltoallv((np.concatenate(blocks[rank]), sent), (got, received))
            expected = [blocks[s][rank] for s in range(p)]
            np.testing.assert_array_equal(got, np.concatenate(expected))
            apart = np.zeros(received.sum() + p)  # one unused element after each block
            displs = [int(received[:s].sum()) + s for s in range(p)]
            comm.Alltoallv(
                (np.concatenate(blocks[rank]), sent), (apart, (received, displs))
            )
            with_gaps = [part for block in expected for part in (block, [0.0])]
            np.testing.assert_array_equal(apart, np.concatenate(with_gaps))


@pytest.mark.mpi(ranks=(3,))
def test_all_to_all_in_place_with_equal_blocks():
    for limit in LIMITS:
        comm = communicator(limit)
        x = inputs(comm, 3, 4)
        y = x[comm.rank].copy()
        comm.Alltoallv(MPI.IN_PLACE, y)
        np.testing.assert_array_equal(y, x[:, comm.rank])


@pytest.mark.mpi(ranks=(1, 3))
def test_arrays_of_every_layout_are_sent_and_filled():
    for limit in (None, 1):
        comm = communicator(limit)
        p, rank = comm.size, comm.rank
        x = inputs(comm, p, 4)
        total = x.sum(axis=0)
        for name, send in layouts(x[rank]):
            for other, recv in layouts(np.zeros((p, 4))):
                message = f"{name} -> {other}"
                comm.Allreduce(send, recv)
                np.testing.assert_array_equal(recv, total, message)
                comm.Alltoall(send, recv)
                np.testing.assert_array_equal(recv, x[:, rank], message)
                comm.Allgather(send[0], recv)
                np.testing.assert_array_equal(recv, x[:, 0], message)
                comm.Reduce_scatter_block(send, recv[:1])
                np.testing.assert_array_equal(recv[0], total[rank], message)
        for name, both in layouts(x[rank]):
            comm.Allreduce(MPI.IN_PLACE, both)
            np.testing.assert_array_equal(both, total, name)
        for name, both in layouts(x[rank]):
            comm.Reduce_scatter_block(MPI.IN_PLACE, both)
            np.testing.assert_array_equal(both, [total[rank], *x[rank][1:]], name)
        for name, both in layouts(x[rank]):
            comm.Allgather(MPI.IN_PLACE, both)
            np.testing.assert_array_equal(both, x[range(p), range(p)], name)
        for name, both in layouts(x[rank]):
            comm.Bcast(both, root=p - 1)
            np.testing.assert_array_equal(both, x[p - 1], name)


@pytest.mark.mpi(ranks=(2,))
def test_non_blocking_calls_fill_strided_arrays_when_done():
    comm = communicator()
    x = inputs(comm, 3, 4)
    for name, y in layouts(np.zeros((3, 4))):
        comm.Iallreduce(x[comm.rank].T.copy().T, y).Wait()
        np.testing.assert_array_equal(y, x.sum(axis=0), name)
        y[...] = 0
        request = comm.Ibcast(y if comm.rank else x[0], root=0)
        while not request.Test():
            pass
        assert request.Test() and request.Wait()  # further calls do no harm
        if comm.rank:
            np.testing.assert_array_equal(y, x[0], name)


@pytest.mark.mpi(ranks=(2,))
def test_buffers_live_until_the_call_is_done_even_if_the_request_is_dropped():
    comm = MpiCommunicator(MPI.COMM_WORLD)  # in debug mode nothing starts unwaited for
    for _ in range(20):
        y = np.zeros((300, 400))
        comm.Iallreduce(np.ones((300, 400)).T.copy().T, y.T.reshape(400, 300).T)
        np.full(120_000, np.nan)  # would take the place of a freed buffer
    in_flight = list(comm._in_flight)
    assert len(in_flight) == 20
    Waitall(in_flight)
    assert not comm._in_flight
    assert all(math.isfinite(entry.end) for entry in comm.ledger.recent)


@pytest.mark.mpi(ranks=RANKS)
def test_half_precision_is_summed_in_float32_and_rounded_once():
    for half in (np.float16, ml_dtypes.bfloat16):
        for limit in (None, 7):
            comm = communicator(limit)
            x = np.full((4, 16), 0.001, half)
            x[:, ::2] = 1
            x[0] *= (
                256  # later terms of 1 or 0.001 would be lost or rounded, one by one
            )
            x = x[: comm.size]
            expected = x.astype(np.float32).sum(axis=0).astype(half)
            total = np.empty(16, half)
            comm.Allreduce(x[comm.rank], total)
            np.testing.assert_array_equal(total, expected)
            in_place = x[comm.rank].copy()
            comm.Iallreduce(MPI.IN_PLACE, in_place).Wait()
            np.testing.assert_array_equal(in_place, expected)
            if comm.size in (1, 2, 4):
                block = np.empty(16 // comm.size, half)
                comm.Reduce_scatter_block(x[comm.rank], block)
                mine = expected.reshape(comm.size, -1)[comm.rank]
                np.testing.assert_array_equal(block, mine)
            gathered = np.empty((comm.size, 16), half)
            comm.Allgather(x[comm.rank], gathered)
            np.testing.assert_array_equal(gathered, x)


@pytest.mark.mpi(ranks=(3,))
def test_ledger_says_what_half_precision_really_sends():
    comm = communicator()
    x = np.ones(9, np.float16)
    comm.Allreduce(x, np.empty_like(x))
    entry = comm.ledger.recent[-1]
    assert (entry.payload, entry.transport) == (18, "mpi, float32")
    assert entry.sent == 4 * traffic.all_reduce_sent(9, 3, comm.rank)
    comm.Bcast(x)
    assert comm.ledger.recent[-1].transport == "mpi"


@pytest.mark.mpi(ranks=(1, 3))
def test_ledger_books_the_formula_of_each_collective():
    comm = communicator()
    p, rank, n = comm.size, comm.rank, 5
    flat, blocks = np.zeros(n, np.int32), np.zeros((p, n), np.int32)
    calls = [
        (
            lambda: comm.Allreduce(flat, np.empty_like(flat)),
            traffic.all_reduce_sent(n, p, rank),
        ),
        (lambda: comm.Reduce_scatter_block(blocks, flat), (p - 1) * n),
        (lambda: comm.Allgather(flat, blocks), (p - 1) * n),
        (lambda: comm.Alltoall(blocks, np.empty_like(blocks)), (p - 1) * n),
        (lambda: comm.Bcast(flat, root=p - 1), 0 if rank == (p - 2) % p else n),
        (lambda: comm.Reduce(flat, np.empty_like(flat), root=0), n if rank else 0),
        (comm.Barrier, 0),
    ]
    for call, elements in calls:
        call()
        entry = comm.ledger.recent[-1]
        assert entry.sent == (4 * elements if p > 1 else 0), entry.operation
        assert (entry.group, entry.group_size) == ("world", p)
        assert entry.where.startswith(__file__)


@pytest.mark.mpi(ranks=(2,))
def test_limits_do_not_change_what_the_ledger_says():
    booked = []
    for limit in (None, 1):
        comm = communicator(limit)
        comm.Allgather(np.zeros(9), np.zeros((2, 9)))
        comm.Alltoallv(np.zeros(9), np.zeros(10 - 2 * comm.rank))
        booked.append([(e.operation, e.payload, e.sent) for e in comm.ledger.recent])
    assert booked[0] == booked[1]


@pytest.mark.mpi(ranks=(2,))
def test_mismatches_are_refused_before_anything_is_sent():
    comm = communicator()
    refused = [
        (lambda: comm.Allreduce(np.zeros(3), np.zeros(4)), "got 3 and 4"),
        (lambda: comm.Allreduce(np.zeros(3), np.zeros(3, "f4")), "convert one"),
        (lambda: comm.Reduce_scatter_block(np.zeros(4), np.zeros(3)), "got 4 and 3"),
        (lambda: comm.Reduce_scatter_block(np.zeros(5), np.zeros(2)), "got 5 and 2"),
        (lambda: comm.Allgather(np.zeros(2), np.zeros(3)), "equal blocks for 2 ranks"),
        (lambda: comm.Alltoall(np.zeros(3), np.zeros(3)), "equal blocks for 2 ranks"),
        (lambda: comm.Allreduce([1.0], np.zeros(1)), "must be a NumPy array"),
        (lambda: comm.Allreduce(np.zeros(2), np.zeros(2), MPI.LAND), "op must be"),
        (lambda: comm.Reduce(np.zeros(2), None, root=comm.rank), "recvbuf must be"),
        (lambda: comm.Reduce(MPI.IN_PLACE, None, root=1 - comm.rank), "off the root"),
        (lambda: comm.Allgatherv(np.zeros(2), (np.zeros(4), [1, 3])), "sends itself"),
        (
            lambda: comm.Alltoallv((np.zeros(4), [2, 2]), (np.zeros(2), [1, 1])),
            "sends itself",
        ),
    ]
    x = np.zeros(4)
    refused += [(lambda: comm.Allreduce(x, x), "share memory")]
    for call, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
        assert not comm.ledger.recent
    comm.Barrier()  # nobody is left behind in a collective


def test_default_limit_is_what_the_library_can_count():
    expected = UNLIMITED if "MPICH" in MPI.Get_library_version() else 2**31 - 1
    assert default_max_count() == expected
    with pytest.raises(ValueError, match="at least 1 element"):
        communicator(0)


@pytest.mark.mpi(ranks=(4,))
def test_split_communicators_share_ledger_and_limit():
    comm = communicator(7)
    part = comm.Split(comm.rank % 2, key=-comm.rank)
    assert (part.size, part.rank) == (2, 1 - comm.rank // 2)
    total = np.array([comm.rank])
    part.Allreduce(MPI.IN_PLACE, total)
    assert total == [2, 4][comm.rank % 2]
    assert comm.ledger.sent_bytes(group=f"world/{comm.rank % 2}") == 8
    assert part.max_count == 7
