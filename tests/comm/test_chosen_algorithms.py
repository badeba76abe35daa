"""Strategies see no difference between MPI's collectives and chosen algorithms."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm.algorithms.kinds import AllToAll
from mpiscale.comm.algorithms.ring_all_gather import ring_all_gather
from mpiscale.comm.algorithms.ring_all_reduce import ring_all_reduce
from mpiscale.comm.algorithms.ring_reduce_scatter import ring_reduce_scatter
from mpiscale.comm.chosen_algorithms import Algorithms, with_algorithms
from mpiscale.comm.communicator import Communicator
from tests.communicators import world_communicator


@AllToAll
def direct_all_to_all(send, recv, comm):
    """The shortest text that exchanges: all messages at once."""
    recv[comm.rank][...] = send[comm.rank]
    others = [r for r in range(comm.size) if r != comm.rank]
    yield [comm.Irecv(recv[r], r) for r in others] + [
        comm.Isend(send[r], r) for r in others
    ]


ALL = Algorithms(
    all_reduce=lambda comm: ring_all_reduce,
    reduce_scatter=lambda comm: ring_reduce_scatter,
    all_gather=lambda comm: ring_all_gather,
    all_to_all=lambda comm: direct_all_to_all,
)


def both():
    """(chosen, MPI's own)."""
    comm = world_communicator()
    return with_algorithms(comm, ALL), comm


def results(comm, dtype):
    """Every collective that an algorithm may carry out, on inputs of its rank."""
    p, rank = comm.size, comm.rank
    x = (np.arange(24 * p) % 13 + rank).astype(dtype)
    out = {}

    def record(name, *shape):
        out[name] = np.full(shape, -1).astype(dtype)
        return out[name]

    comm.Allreduce(x.reshape(p, 24), record("all-reduce", p, 24), MPI.MAX)
    out["all-reduce in place"] = x.copy()
    comm.Allreduce(MPI.IN_PLACE, out["all-reduce in place"])
    comm.Allreduce(x[::2], record("all-reduce strided", 24 * p)[::2])
    comm.Reduce_scatter_block(x, record("reduce-scatter", 24))
    out["reduce-scatter in place"] = x.copy()
    comm.Reduce_scatter_block(MPI.IN_PLACE, out["reduce-scatter in place"])
    out["reduce-scatter in place"] = out["reduce-scatter in place"][:24]
    comm.Allgather(x[:5], record("all-gather", p, 5))
    out["all-gather in place"] = np.repeat(x[:p], 3)
    comm.Allgather(MPI.IN_PLACE, out["all-gather in place"])
    counts = [r % 3 for r in range(p)]
    displs = [5 * (p - 1 - r) for r in range(p)]  # with gaps, and backwards
    into = record("all-gather-v", 5 * p)
    comm.Allgatherv(x[: counts[rank]], (into, (counts, displs)))
    comm.Alltoall(x, record("all-to-all", p, 24))
    out["all-to-all in place"] = x.copy()
    comm.Alltoall(MPI.IN_PLACE, out["all-to-all in place"])
    send_counts, recv_counts = [rank] * p, list(range(p))
    of = (x, (send_counts, displs[::-1]))
    comm.Alltoallv(of, (record("all-to-all-v", p * p), recv_counts))
    return out


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
def test_every_collective_gives_what_mpi_gives():
    for dtype in (np.float64, np.int64, np.float16, ml_dtypes.bfloat16):
        chosen, own = both()
        got, expected = results(chosen, dtype), results(own, dtype)
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.mpi(ranks=(3,))
def test_messages_are_in_the_ledger_of_the_group_under_its_name():
    chosen, own = both()
    chosen.Allreduce(np.ones(30), np.empty(30))
    operations = {entry.operation for entry in own.ledger.recent}
    assert operations == {"Isend", "Irecv"}
    assert {entry.group for entry in own.ledger.recent} == {"world"}
    assert all("test_chosen_algorithms" in e.where for e in own.ledger.recent)


@pytest.mark.mpi(ranks=(2, 3))
def test_calls_in_flight_may_be_waited_for_in_any_order():
    chosen, own = both()
    xs = [np.full(70_000, float(i + own.rank)) for i in range(3)]
    totals = [np.empty_like(x) for x in xs]
    requests = [
        chosen.Iallreduce(x, total) for x, total in zip(xs, totals, strict=True)
    ]
    order = (2, 0, 1) if own.rank else (0, 2, 1)
    for i in order:
        if i == 1:
            while not requests[i].Test():
                pass
        requests[i].Wait()
    ranks = own.size * (own.size - 1) / 2
    for i, total in enumerate(totals):
        np.testing.assert_array_equal(total, i * own.size + ranks)


@pytest.mark.mpi(ranks=(4,))
def test_a_part_of_the_group_has_the_same_algorithms():
    chosen, own = both()
    half = chosen.Split(own.rank % 2, own.rank)
    own.ledger.reset()
    total = np.empty(8)
    half.Allreduce(np.full(8, 1.0 + own.rank), total)
    assert total[0] == (4 if own.rank % 2 == 0 else 6)
    assert {entry.operation for entry in own.ledger.recent} == {"Isend", "Irecv"}


@pytest.mark.mpi(ranks=(2,))
def test_messages_of_the_caller_are_not_taken_for_those_of_the_algorithm():
    chosen, own = both()
    other = 1 - own.rank
    inbox = np.zeros(4)
    receive = chosen.Irecv(inbox, other)
    total = np.empty(4)
    chosen.Allreduce(np.full(4, 2.0), total)
    chosen.Send(np.full(4, 7.0), other)
    receive.Wait()
    assert (total == 4).all()
    assert (inbox == 7).all()


@pytest.mark.mpi(ranks=(1,))
def test_it_has_all_of_a_communicator():
    chosen, own = both()
    names = [n for n, _ in inspect.getmembers(Communicator) if not n.startswith("_")]
    for name in names:
        assert hasattr(chosen, name), name
    assert (chosen.rank, chosen.size, chosen.name) == (0, 1, own.name)


@pytest.mark.mpi(ranks=(1,))
def test_wrong_arguments_are_refused():
    chosen, _ = both()
    with pytest.raises(ValueError, match=r"sendbuf must have 3 elements, got 4"):
        chosen.Allreduce(np.ones(4), np.empty(3))
    with pytest.raises(TypeError, match="sendbuf has elements of type float32"):
        chosen.Allreduce(np.ones(3, np.float32), np.empty(3))
    with pytest.raises(ValueError, match=r"MPI\.SUM"):
        chosen.Allreduce(np.ones(3), np.empty(3), MPI.BAND)
