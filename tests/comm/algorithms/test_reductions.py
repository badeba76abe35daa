"""All-reduce, reduce-scatter and all-gather: traffic by formula, types, repetition."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm.algorithms.chunks import Chunks, block, even_counts
from mpiscale.comm.algorithms.double_binary_tree_all_reduce import (
    Tree,
    double_binary_tree,
    double_binary_tree_all_reduce,
)
from mpiscale.comm.algorithms.folded import Folded
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
from tests.communicators import world_communicator

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
SEGMENT = 25  # elements
ALL_REDUCES = (
    ring_all_reduce,
    recursive_doubling_all_reduce,
    rabenseifner_all_reduce,
    double_binary_tree_all_reduce,
    double_binary_tree(segment_bytes=8 * SEGMENT),
)
REDUCE_SCATTERS = (ring_reduce_scatter, recursive_halving_reduce_scatter)
UFUNCS = (np.add, np.maximum, np.minimum, np.multiply)


# What a rank sends, (messages, elements), for chunks of these lengths


def ring_reduce_scatter_sends(counts, p, rank):
    return p - 1, sum(counts) - counts[rank]


def ring_all_gather_sends(counts, p, rank):
    return p - 1, sum(counts) - counts[(rank + 1) % p]


def recursive_halving_reduce_scatter_sends(counts, p, rank):
    n, lg, pair = sum(counts), p.bit_length() - 1, 2 * (p - 2 ** (p.bit_length() - 1))
    if rank >= pair:
        return lg, n - counts[rank]
    if rank % 2 == 0:
        return 1, n
    both = counts[rank - 1] + counts[rank]
    return lg + 1, n - both + counts[rank - 1]


def recursive_doubling_all_gather_sends(counts, p, rank):
    ranks = Folded(p, rank)
    if ranks.sits_out:
        return 1, counts[rank]
    merged = ranks.merged(Chunks(np.empty(sum(counts)), counts)).counts
    lg = ranks.size.bit_length() - 1
    n = sum(sum(merged[block(ranks.number, 2**k)]) for k in range(lg))
    if ranks.in_pair:
        return lg + 2, n + sum(counts) - counts[rank - 1]
    return lg, n


def recursive_doubling_all_reduce_sends(n, p, rank):
    lg, pair = p.bit_length() - 1, 2 * (p - 2 ** (p.bit_length() - 1))
    messages = lg if rank >= pair else (lg + 1 if rank % 2 else 1)
    return messages, messages * n


def rabenseifner_all_reduce_sends(n, p, rank):
    ranks = Folded(p, rank)
    if ranks.sits_out:
        return 1, n
    counts, number = even_counts(n, ranks.size), ranks.number
    halving = recursive_halving_reduce_scatter_sends(counts, ranks.size, number)
    doubling = recursive_doubling_all_gather_sends(counts, ranks.size, number)
    back = ranks.in_pair
    return halving[0] + doubling[0] + back, halving[1] + doubling[1] + back * n


def double_binary_tree_all_reduce_sends(n, p, rank):
    messages = elements = 0
    for second, half in ((False, n - n // 2), (True, n // 2)):
        tree = Tree(rank, p, second)
        receivers = len(tree.children) + (tree.parent is not None)
        messages += receivers * max(1, -(-half // SEGMENT))
        elements += receivers * half
    return messages, elements


def ring_all_reduce_sends(n, p, rank):
    counts = even_counts(n, p)
    there, back = (
        ring_reduce_scatter_sends(counts, p, rank),
        ring_all_gather_sends(counts, p, rank),
    )
    return there[0] + back[0], there[1] + back[1]


def sends_of(call):
    """What `call` sends on this rank, from the ledger: (messages, elements of 8 B)."""
    comm = world_communicator()
    call(comm)
    totals = comm.ledger.totals.items()
    messages = sum(total.calls for key, total in totals if key.operation == "Isend")
    assert comm.ledger.sent_bytes() % 8 == 0
    return messages, comm.ledger.sent_bytes() // 8


@pytest.mark.mpi(ranks=RANKS)
def test_all_reduces_send_what_their_formulas_say():
    p, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    formulas = (
        (ring_all_reduce, ring_all_reduce_sends),
        (recursive_doubling_all_reduce, recursive_doubling_all_reduce_sends),
        (rabenseifner_all_reduce, rabenseifner_all_reduce_sends),
        (ALL_REDUCES[-1], double_binary_tree_all_reduce_sends),
    )
    for algorithm, formula in formulas:
        for n in (0, 1, p - 1, p + 1, 1000):
            got = sends_of(lambda comm, a=algorithm, n=n: a(np.ones(n), comm))
            assert got == (formula(n, p, rank) if p > 1 else (0, 0)), (algorithm, n)


@pytest.mark.mpi(ranks=RANKS)
def test_reduce_scatters_and_all_gathers_send_what_their_formulas_say():
    p, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    scatters = (
        (ring_reduce_scatter, ring_reduce_scatter_sends),
        (recursive_halving_reduce_scatter, recursive_halving_reduce_scatter_sends),
    )
    gathers = (
        (ring_all_gather, ring_all_gather_sends),
        (recursive_doubling_all_gather, recursive_doubling_all_gather_sends),
    )
    for counts in ([0] * p, [7] * p, [(3 * r) % 5 for r in range(p)]):
        x, mine = np.ones(sum(counts)), np.ones(counts[rank])
        for algorithm, formula in scatters:
            got = sends_of(
                lambda comm, a=algorithm, x=x, c=counts: a(x, comm, counts=c)
            )
            assert got == (formula(counts, p, rank) if p > 1 else (0, 0)), algorithm
        for algorithm, formula in gathers:
            got = sends_of(
                lambda comm, a=algorithm, x=mine, c=counts: a(x, comm, counts=c)
            )
            assert got == (formula(counts, p, rank) if p > 1 else (0, 0)), algorithm


@pytest.mark.mpi(ranks=(2, 3, 4, 7))
def test_reduce_scatters_of_all_types_operations_and_strides():
    comm = MPI.COMM_WORLD
    p, rank = comm.size, comm.rank
    counts = [(3 * r + 2) % 5 for r in range(p)]  # the last of them may be long
    start, n = sum(counts[:rank]), sum(counts)
    dtypes = (np.float64, np.float32, np.int64, np.float16, ml_dtypes.bfloat16)
    for dtype in dtypes:
        terms = np.random.default_rng(0).integers(1, 3, (p, n)).astype(dtype)
        x = np.repeat(terms[rank], 3)[::3]  # strided
        for ufunc in UFUNCS:
            whole = ufunc.reduce(terms.astype(np.float64), axis=0)
            expected = whole[start : start + counts[rank]]
            for algorithm in REDUCE_SCATTERS:
                got = algorithm(x, comm, ufunc, counts=counts)
                assert got.dtype == dtype
                np.testing.assert_array_equal(got.astype(np.float64), expected)
                np.testing.assert_array_equal(x, terms[rank])
                work = x.copy()
                mine = work[start : start + counts[rank]]
                assert algorithm(work, comm, ufunc, out=mine, counts=counts) is mine
                np.testing.assert_array_equal(mine.astype(np.float64), expected)


@pytest.mark.mpi(ranks=(4, 7))
def test_a_hundred_repeats_give_the_same_bits():
    comm = MPI.COMM_WORLD
    x = np.random.default_rng(comm.rank).normal(size=1000).astype(np.float32)
    for algorithm in ALL_REDUCES:
        first = algorithm(x, comm).tobytes()
        assert comm.bcast(first) == first
        in_place = x.copy()
        assert algorithm(in_place, comm, out=in_place).tobytes() == first
        assert all(algorithm(x, comm).tobytes() == first for _ in range(100))


@pytest.mark.mpi(ranks=(4, 7))
def test_steps_may_be_given_two_views_of_the_same_memory():
    comm = MPI.COMM_WORLD
    for algorithm in ALL_REDUCES:
        x = np.arange(100.0) + comm.rank
        for requests in algorithm.steps(x[:], x[:], comm, np.add):
            for request in requests:
                request.Wait()
        expected = comm.size * (np.arange(100.0) + (comm.size - 1) / 2)
        np.testing.assert_array_equal(x, expected, err_msg=repr(algorithm))


@pytest.mark.mpi(ranks=(4, 7))
def test_out_may_overlap_x():
    comm = MPI.COMM_WORLD
    for algorithm in ALL_REDUCES:
        memory = np.arange(101.0)
        x, out = memory[:-1], memory[1:]
        algorithm(x, comm, out=out)
        np.testing.assert_array_equal(out, comm.size * np.arange(100.0))


def test_the_two_trees_of_eight_ranks_are_those_of_nccl():
    first, second = (
        [Tree(rank, 8, second).parent for rank in range(8)] for second in (False, True)
    )
    assert first == [None, 2, 4, 2, 0, 6, 4, 6]
    assert second == [1, 3, 1, 7, 5, 3, 5, None]


def test_the_two_trees_share_the_work():
    for p in range(2, 70):
        for rank in range(p):
            trees = Tree(rank, p, False), Tree(rank, p, True)
            busy = all(tree.children for tree in trees)
            assert not busy or (rank == 0 and p % 2), (p, rank)
            halves = sum(len(t.children) + (t.parent is not None) for t in trees)
            assert halves <= 4, (p, rank)
            for tree, second in zip(trees, (False, True), strict=True):
                assert (tree.parent is None) == (tree.depth == 0)
                assert tree.levels <= (p - 1).bit_length(), (p, rank)
                for child, height in tree.children:
                    below = Tree(child, p, second)
                    assert (below.parent, below.height) == (rank, height)
                    assert below.depth == tree.depth + 1
