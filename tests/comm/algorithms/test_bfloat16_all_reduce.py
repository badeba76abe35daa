"""The all-reduce with 16-bit messages: its error bound, its bytes, what it refuses."""

import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm.algorithms.bfloat16_all_reduce import bfloat16_all_reduce
from mpiscale.comm.chosen_algorithms import Algorithms, with_algorithms
from mpiscale.comm.traffic import all_reduce_sent
from tests.communicators import world_communicator

U = 2.0**-8  # unit roundoff of 8 significant bits


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 8))
def test_the_error_keeps_its_bound_and_ranks_agree_to_the_bit():
    for comm in (MPI.COMM_WORLD, world_communicator()):
        for n in (0, 1, 5, 1000, 70_000):
            x = np.random.default_rng(comm.rank).normal(size=n).astype(np.float32)
            everyone = np.empty((comm.size, n), np.float32)
            comm.Allgather(x, everyone)
            wide = everyone.astype(np.float64)
            total = bfloat16_all_reduce(x.copy(), comm)
            exact, magnitude = wide.sum(axis=0), np.abs(wide).sum(axis=0)
            bound = U * (1 + U) * magnitude + U * np.abs(exact)
            if comm.size > 1:
                assert (np.abs(total - exact) <= bound + 1e-6 * magnitude).all()
                assert n < 1000 or (total != exact).any()  # it does round
            else:
                assert (total == x).all()
            totals = np.empty((comm.size, n), np.float32)
            comm.Allgather(total, totals)
            assert (totals == totals[0]).all()


@pytest.mark.mpi(ranks=(1, 2, 3, 4))
def test_the_messages_have_half_the_bytes():
    comm = world_communicator()
    for n in (0, 3, 1001):
        before = comm.ledger.sent_bytes()
        bfloat16_all_reduce(np.ones(n, np.float32), comm)
        sent = comm.ledger.sent_bytes() - before
        assert sent == 2 * all_reduce_sent(n, comm.size, comm.rank)


@pytest.mark.mpi(ranks=(2,))
def test_what_it_would_spoil_is_refused():
    comm = world_communicator()
    with pytest.raises(TypeError, match="sums of float32, got add of float64"):
        bfloat16_all_reduce(np.ones(3), comm)
    with pytest.raises(TypeError, match="got maximum of float32"):
        bfloat16_all_reduce(np.ones(3, np.float32), comm, np.maximum)


@pytest.mark.mpi(ranks=(3,))
def test_any_strategy_can_be_given_it():
    comm = world_communicator()
    chosen = with_algorithms(comm, Algorithms(lambda _: bfloat16_all_reduce))
    x = np.full(5, 1 + 2.0**-12, np.float32)  # 2^-12 is lost
    total = np.empty_like(x)
    requests = [chosen.Iallreduce(x, total) for _ in range(2)]
    assert all(request.Wait() for request in requests)
    assert (total == 3).all()
