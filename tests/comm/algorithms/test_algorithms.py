"""Every algorithm gives what MPI's own collective gives, for any ranks and sizes."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm.algorithms.binomial_tree import (
    binomial_broadcast,
    binomial_gather,
    binomial_reduce,
    binomial_scatter,
)
from mpiscale.comm.algorithms.bruck_all_to_all import bruck_all_to_all
from mpiscale.comm.algorithms.chain_broadcast import chain, chain_broadcast
from mpiscale.comm.algorithms.double_binary_tree_all_reduce import (
    double_binary_tree,
    double_binary_tree_all_reduce,
)
from mpiscale.comm.algorithms.hierarchical_all_gather import hierarchical_all_gather
from mpiscale.comm.algorithms.hierarchical_all_reduce import hierarchical_all_reduce
from mpiscale.comm.algorithms.hierarchical_all_to_all import hierarchical_all_to_all
from mpiscale.comm.algorithms.node_groups import node_groups
from mpiscale.comm.algorithms.pairwise_all_to_all import pairwise_all_to_all
from mpiscale.comm.algorithms.rabenseifner_all_reduce import rabenseifner_all_reduce
from mpiscale.comm.algorithms.recursive_doubling_all_gather import (
    recursive_doubling_all_gather,
)
from mpiscale.comm.algorithms.recursive_doubling_all_reduce import (
    recursive_doubling_all_reduce,
)
from mpiscale.comm.algorithms.recursive_halving_reduce_scatter import (
    recursive_halving_reduce_scatter,
)
from mpiscale.comm.algorithms.ring_all_gather import ring_all_gather
from mpiscale.comm.algorithms.ring_all_reduce import ring_all_reduce
from mpiscale.comm.algorithms.ring_reduce_scatter import ring_reduce_scatter
from mpiscale.comm.mpi import MpiCommunicator
from tests.communicators import world_communicator

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
LARGE = 70_001  # elements: far above the size that MPI sends without being asked
OPS = (
    (np.add, MPI.SUM),
    (np.maximum, MPI.MAX),
    (np.minimum, MPI.MIN),
    (np.multiply, MPI.PROD),
)


class SynchronousSends(MpiCommunicator):
    """No send is done before its receiver is there: nothing relies on buffers."""

    def Isend(self, buf, dest, tag=0):  # noqa: N802
        plan = self._plan.send("Isend", buf, dest)
        return self._start(plan, self.mpi.Issend, dest, tag)


def communicators():
    """The kinds of communicators that an algorithm may be given."""
    return world_communicator(), SynchronousSends(MPI.COMM_WORLD)


def placements(p):
    """Which node each rank is on: one node, one each, blocks, dealt out, uneven."""
    yield [0] * p
    yield list(range(p))
    yield [r // 2 for r in range(p)]
    yield [r % 2 for r in range(p)]
    yield [min(r, 2) for r in range(p)]


def all_groups(comm):
    return [node_groups(comm, nodes[comm.rank]) for nodes in placements(comm.size)]


def all_reduces(comm):
    yield from (
        ring_all_reduce,
        recursive_doubling_all_reduce,
        rabenseifner_all_reduce,
        double_binary_tree_all_reduce,
        double_binary_tree(segment_bytes=2_000),
    )
    yield from map(hierarchical_all_reduce, all_groups(comm))


def all_gathers(comm):
    yield from (ring_all_gather, recursive_doubling_all_gather)
    yield from map(hierarchical_all_gather, all_groups(comm))


def all_to_alls(comm):
    yield from (pairwise_all_to_all, bruck_all_to_all)
    yield from map(hierarchical_all_to_all, all_groups(comm))


def sizes(p):
    return (0, 1, p - 1, p + 1, 1000, LARGE)


def integers(n, seed, dtype=np.float64):
    """Small whole numbers: sums of them are exact in every type and order."""
    return np.random.default_rng(seed).integers(1, 4, n).astype(dtype)


@pytest.mark.mpi(ranks=RANKS)
def test_all_reduces_equal_mpi():
    for comm in communicators():
        for algorithm in all_reduces(comm):
            for n in sizes(comm.size):
                x = np.random.default_rng(comm.rank).normal(size=n)
                expected = np.empty(n)
                MPI.COMM_WORLD.Allreduce(x, expected)
                total = algorithm(x, comm)
                np.testing.assert_allclose(
                    total, expected, rtol=1e-12, atol=1e-12, err_msg=f"{algorithm} {n}"
                )
                from_0 = MPI.COMM_WORLD.bcast(total)
                np.testing.assert_array_equal(total, from_0)  # bit for bit


@pytest.mark.mpi(ranks=(2, 3, 4))
def test_all_reduces_of_all_types_operations_and_strides():
    comm = MPI.COMM_WORLD  # a bare communicator of mpi4py
    dtypes = (np.float64, np.float32, np.int64, np.float16, ml_dtypes.bfloat16)
    for algorithm in all_reduces(comm):
        for dtype in dtypes:
            for ufunc, op in OPS:
                x = integers(60, comm.rank, dtype).reshape(6, 10)[:, ::-3].T
                before, exact = x.copy(), np.empty(x.shape)
                comm.Allreduce(np.ascontiguousarray(x, np.float64), exact, op)
                np.testing.assert_array_equal(algorithm(x, comm, ufunc), exact)
                np.testing.assert_array_equal(x, before)
                assert algorithm(x, comm, ufunc, out=x) is x
                np.testing.assert_array_equal(x, exact)
        assert algorithm(np.array(2.0), comm) == 2 * comm.size  # 0-d


@pytest.mark.mpi(ranks=(4,))
def test_all_reduces_round_16_bit_sums_once():
    comm = MPI.COMM_WORLD
    for algorithm in all_reduces(comm):
        for half in (np.float16, ml_dtypes.bfloat16):
            x = np.full(10, 2048 if comm.rank == 0 else 3, half)
            expected = np.full(10, 2057, np.float32).astype(half)
            np.testing.assert_array_equal(algorithm(x, comm), expected)


@pytest.mark.mpi(ranks=RANKS)
def test_reduce_scatters_equal_mpi():
    for comm in communicators():
        p, rank = comm.size, comm.rank
        uneven = [(3 * r) % 5 for r in range(p)]  # some are 0
        for algorithm in (ring_reduce_scatter, recursive_halving_reduce_scatter):
            for n in (*sizes(p), None):
                counts = None if n is not None else uneven
                n = sum(uneven) if n is None else n
                x = integers(n, rank)
                lengths = counts or [n // p + (r < n % p) for r in range(p)]
                expected = np.empty(lengths[rank])
                MPI.COMM_WORLD.Reduce_scatter(x, expected, lengths)
                got = algorithm(x, comm, counts=counts)
                np.testing.assert_array_equal(got, expected, err_msg=f"{algorithm} {n}")
                start = sum(lengths[:rank])
                mine = x[start : start + lengths[rank]]
                algorithm(x, comm, out=mine, counts=counts)  # x is working space
                np.testing.assert_array_equal(mine, expected)


@pytest.mark.mpi(ranks=RANKS)
def test_all_gathers_equal_mpi():
    for comm in communicators():
        p, rank = comm.size, comm.rank
        for algorithm in all_gathers(comm):
            for counts in (
                [0] * p,
                [1] * p,
                [(3 * r) % 5 for r in range(p)],
                [9001] * p,
            ):
                x = integers(counts[rank], rank, ml_dtypes.bfloat16)
                words = np.empty(sum(counts), np.uint16)
                MPI.COMM_WORLD.Allgatherv(x.view(np.uint16), [words, counts])
                expected = words.view(ml_dtypes.bfloat16)
                got = algorithm(x, comm, counts=counts)
                np.testing.assert_array_equal(got, expected, err_msg=repr(algorithm))
                whole = np.zeros_like(expected)
                start = sum(counts[:rank])
                mine = whole[start : start + counts[rank]]
                mine[...] = x
                algorithm(mine, comm, out=whole, counts=counts)  # in place
                np.testing.assert_array_equal(whole, expected)


@pytest.mark.mpi(ranks=RANKS)
def test_all_to_alls_equal_mpi():
    for comm in communicators():
        p, rank = comm.size, comm.rank
        for algorithm in all_to_alls(comm):
            for block in (0, 1, 3, 2001):
                x = integers(p * block, rank, np.float16)
                expected = np.empty_like(x)
                words = x.view(np.uint16)
                MPI.COMM_WORLD.Alltoall(words, expected.view(np.uint16))
                got = algorithm(x, comm)
                np.testing.assert_array_equal(got, expected, err_msg=repr(algorithm))
                algorithm(x, comm, out=x)
                np.testing.assert_array_equal(x, expected)
            table = np.random.default_rng(0).integers(0, 4, (p, p))  # [from, to]
            send, recv = table[rank].tolist(), table[:, rank].tolist()
            x, expected = integers(sum(send), rank), np.empty(sum(recv))
            MPI.COMM_WORLD.Alltoallv([x, send], [expected, recv])
            got = algorithm(x, comm, send_counts=send, recv_counts=recv)
            np.testing.assert_array_equal(got, expected, err_msg=repr(algorithm))


@pytest.mark.mpi(ranks=RANKS)
def test_rooted_operations_equal_mpi_for_every_root():
    for comm in communicators():
        p, rank = comm.size, comm.rank
        counts = [(3 * r) % 5 for r in range(p)]
        whole = integers(sum(counts), 7)
        start = sum(counts[:rank])
        mine = whole[start : start + counts[rank]]
        for root in range(p):
            for n in (0, 1, 1000, LARGE if root == p - 1 else 7):
                x = integers(n, rank)
                expected = np.empty(n)
                MPI.COMM_WORLD.Reduce(x, expected, root=root)
                total = binomial_reduce(x, comm, root=root)
                if rank == root:
                    np.testing.assert_array_equal(total, expected)
                else:
                    assert total is None
                for broadcast in (binomial_broadcast, chain_broadcast, chain(1000)):
                    y = x.copy()
                    broadcast(y, comm, root=root)
                    np.testing.assert_array_equal(y, integers(n, root))
            gathered = binomial_gather(mine, comm, root, counts)
            if rank == root:
                np.testing.assert_array_equal(gathered, whole)
            else:
                assert gathered is None
            out = np.empty(counts[rank])
            binomial_scatter(whole if rank == root else None, out, comm, root, counts)
            np.testing.assert_array_equal(out, mine)


@pytest.mark.mpi(ranks=(3, 4))
def test_algorithms_go_on_when_tested_and_repeat_to_the_bit():
    comm, other = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
    for algorithm in all_reduces(comm):
        x = np.random.default_rng(comm.rank).normal(size=LARGE)
        first = algorithm(x, comm)
        for _ in range(2):
            one, two = algorithm.start(x, comm), algorithm.start(x, other)
            while not (one.Test() and two.Test()):
                pass
            assert one.Wait()
            np.testing.assert_array_equal(one.result, first)
        if "hierarchical" in repr(algorithm):
            break  # its groups are its own: two at a time would mix
    comm.Free()
    other.Free()


@pytest.mark.mpi(ranks=(3,))
def test_wrong_arguments_are_refused_with_what_was_expected():
    comm = MPI.COMM_WORLD
    x = np.ones(6)
    with pytest.raises(ValueError, match="out must be like x, float64 of shape"):
        ring_all_reduce(x, comm, out=np.ones(5))
    with pytest.raises(ValueError, match=r"expected 3 counts >= 0.* got \[1, 2\]"):
        ring_reduce_scatter(x, comm, counts=[1, 2])
    with pytest.raises(ValueError, match="x must have 2 elements, got 6"):
        ring_all_gather(x, comm, counts=[2, 2, 2])
    with pytest.raises(ValueError, match="x and out share memory"):
        ring_reduce_scatter(x, comm, out=x[1:3])
    with pytest.raises(ValueError, match="pass both send_counts and recv_counts"):
        pairwise_all_to_all(x, comm, send_counts=[2, 2, 2])
    with pytest.raises(ValueError, match="cannot cut x"):
        pairwise_all_to_all(np.ones(7), comm)
    with pytest.raises(ValueError, match=r"root must be a rank, 0 ... 2, got 3"):
        binomial_broadcast(x, comm, root=3)
    with pytest.raises(TypeError, match="x on the root must be an array of type"):
        binomial_scatter(None, np.ones(6), MPI.COMM_SELF)


@pytest.mark.mpi(ranks=(4,))
def test_nodes_are_found_by_shared_memory():
    groups = node_groups(world_communicator())
    assert groups.nodes == [[0, 1, 2, 3]]
    assert groups.inside.size == groups.carriers == 4
    assert groups.across is not None
    assert groups.across.size == 1
