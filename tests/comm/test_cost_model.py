"""The cost model: bytes of real runs, the textbook's times, shared links."""

import json
from pathlib import Path

import numpy as np
import pytest

from mpiscale.comm import message_patterns as patterns
from mpiscale.comm.algorithms.binomial_tree import (
    binomial_broadcast,
    binomial_gather,
    binomial_reduce,
    binomial_scatter,
)
from mpiscale.comm.algorithms.bruck_all_to_all import bruck_all_to_all
from mpiscale.comm.algorithms.chain_broadcast import chain
from mpiscale.comm.algorithms.chunks import even_counts
from mpiscale.comm.algorithms.double_binary_tree_all_reduce import (
    Tree,
    double_binary_tree,
)
from mpiscale.comm.algorithms.hierarchical_all_gather import hierarchical_all_gather
from mpiscale.comm.algorithms.hierarchical_all_reduce import hierarchical_all_reduce
from mpiscale.comm.algorithms.hierarchical_all_to_all import hierarchical_all_to_all
from mpiscale.comm.algorithms.node_groups import node_groups
from mpiscale.comm.algorithms.pairwise_all_to_all import pairwise_all_to_all
from mpiscale.comm.cost_model import TEXTBOOK, Level, Machine, pattern_seconds
from mpiscale.comm.message_patterns import Message, sent_by
from mpiscale.comm.select import NAMED, cheapest, named, seconds
from mpiscale.errors import InputError
from tests.communicators import world_communicator

WORKED = Path(__file__).parents[1] / "reference" / "collectives_worked_points.json"
NAMES = {
    "allgather recursive doubling": "recursive doubling all-gather",
    "allgather ring": "ring all-gather",
    "allreduce Rabenseifner": "Rabenseifner all-reduce",
    "allreduce recursive doubling": "recursive doubling all-reduce",
    "allreduce ring": "ring all-reduce",
    "alltoall Bruck": "Bruck all-to-all",
    "alltoall pairwise (beta coefficient n)": "pairwise all-to-all",
    "bcast binomial": "binomial tree broadcast",
    "bcast scatter + ring allgather": "scatter and ring all-gather broadcast",
}
SIZES = (0, 1, 7, 64, 1001)


def placements(p):
    """Which node each rank is on: one node, one each, blocks, dealt out, uneven."""
    yield [0] * p
    yield list(range(p))
    yield [r // 2 for r in range(p)]
    yield [r % 2 for r in range(p)]
    yield [min(r, 2) for r in range(p)]


def uneven(n, p):
    """n cut into p chunks of very different lengths, some of them empty."""
    cuts = sorted(np.random.default_rng(n).integers(0, n + 1, p - 1).tolist())
    return [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


def check(comm, pattern, call, itemsize=4):
    """A call sends what the pattern says, on this rank, to the byte."""
    comm.ledger.reset()
    call()
    sent = [t for key, t in comm.ledger.totals.items() if key.operation == "Isend"]
    messages, elements = sent_by(pattern, comm.rank)
    assert sum(total.calls for total in sent) == messages
    assert sum(total.sent for total in sent) == elements * itemsize


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 5, 6, 7, 8, 9))
def test_the_ledger_equals_the_pattern_for_every_all_reduce_and_reduce_scatter():
    comm = world_communicator()
    p = comm.size
    for n in SIZES:
        x = np.ones(n, np.float32)
        for name, entry in NAMED["all-reduce"].items():
            if name != "hierarchical":
                algorithm = entry.make(comm)
                pattern = entry.pattern([range(p)], n, 4)
                check(comm, pattern, lambda a=algorithm, x=x: a(x, comm))
        for segment in (1, 3, 50):
            pattern = patterns.double_binary_tree_all_reduce(p, n, segment)
            if p > 1:
                tree = double_binary_tree(4 * segment)
                check(comm, pattern, lambda a=tree, x=x: a(x, comm))
        for counts in (even_counts(n, p), uneven(n, p)):
            for name in NAMED["reduce-scatter"]:
                algorithm = named("reduce-scatter", name).make(comm)
                pattern = getattr(patterns, algorithm.name)(counts)
                check(
                    comm,
                    pattern,
                    lambda a=algorithm, x=x, c=counts: a(x, comm, counts=c),
                )


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 5, 6, 7, 8, 9))
def test_the_ledger_equals_the_pattern_for_gathers_trees_and_exchanges():
    comm = world_communicator()
    p, rank = comm.size, comm.rank
    for n in SIZES:
        x = np.ones(n, np.float32)
        check(
            comm,
            patterns.binomial_broadcast(p, n),
            lambda x=x: binomial_broadcast(x, comm),
        )
        check(
            comm, patterns.binomial_reduce(p, n), lambda x=x: binomial_reduce(x, comm)
        )
        for segment in (1, 100):
            pattern = patterns.chain_broadcast(p, n, segment) if p > 1 else []
            check(comm, pattern, lambda x=x, s=segment: chain(4 * s)(x, comm))
        for counts in (even_counts(n, p), uneven(n, p)):
            mine = x[: counts[rank]]
            check(
                comm,
                patterns.binomial_gather(counts),
                lambda m=mine, c=counts: binomial_gather(m, comm, counts=c),
            )
            check(
                comm,
                patterns.binomial_scatter(counts),
                lambda x=x, m=mine, c=counts: binomial_scatter(
                    x, m.copy(), comm, counts=c
                ),
            )
            for name in ("ring", "recursive-doubling"):
                algorithm = named("all-gather", name).make(comm)
                pattern = getattr(patterns, algorithm.name)(counts)
                check(
                    comm,
                    pattern,
                    lambda a=algorithm, m=mine, c=counts: a(m, comm, counts=c),
                )
        lengths = [uneven(n, p) for _ in range(p)]
        lengths = [row[r:] + row[:r] for r, row in enumerate(lengths)]
        check(
            comm,
            patterns.pairwise_all_to_all(lengths),
            lambda x=x, m=lengths: pairwise_all_to_all(
                x, comm, send_counts=m[rank], recv_counts=[row[rank] for row in m]
            ),
        )
        even = np.ones(p * n, np.float32)
        pattern = patterns.bruck_all_to_all(p, n)
        check(comm, pattern, lambda x=even: bruck_all_to_all(x, comm))


@pytest.mark.mpi(ranks=(1, 2, 3, 4, 5, 6, 7, 8, 9))
def test_the_ledger_equals_the_pattern_for_two_levels():
    comm = world_communicator()
    p = comm.size
    for placement in placements(p):
        groups = node_groups(comm, placement[comm.rank])
        nodes = groups.nodes
        for n in SIZES:
            x = np.ones(n, np.float32)
            check(
                comm,
                patterns.hierarchical_all_reduce(nodes, n),
                lambda x=x, g=groups: hierarchical_all_reduce(g)(x, comm),
            )
            counts = uneven(n, p)
            check(
                comm,
                patterns.hierarchical_all_gather(nodes, counts),
                lambda x=x, g=groups, c=counts: hierarchical_all_gather(g)(
                    x[: c[comm.rank]], comm, counts=c
                ),
            )
            even = np.ones(p * n, np.float32)
            check(
                comm,
                patterns.hierarchical_all_to_all(nodes, [[n] * p] * p),
                lambda x=even, g=groups: hierarchical_all_to_all(g)(x, comm),
            )


def test_the_formulas_equal_all_worked_points():
    points = json.loads(WORKED.read_text())["tables"]["points"]["records"]
    assert len(points) == 216
    for point in points:
        terms = TEXTBOOK[NAMES[point["algorithm"]]](point["processes"], point["bytes"])
        microseconds = 1e6 * terms.seconds(1e-6, 1e-10)
        assert microseconds == pytest.approx(point["time_us"], rel=0, abs=5.001e-5), (
            point
        )


@pytest.mark.parametrize("p", (2, 4, 8, 16))
def test_patterns_take_the_textbooks_time_where_links_are_not_shared(p):
    alpha, beta, gamma = 3e-6, 2e-10, 1e-10
    machine = Machine(Level(alpha, beta, 0.0), None, gamma, 0.0)
    free_copies = Machine(Level(alpha, beta, 0.0), None, 0.0, 0.0)
    nodes, n = [range(p)], 720 * p
    for kind, name, formula in (
        ("all-reduce", "ring", "ring all-reduce"),
        ("all-reduce", "rabenseifner", "Rabenseifner all-reduce"),
        ("all-reduce", "recursive-doubling", "recursive doubling all-reduce"),
        ("reduce-scatter", "ring", "ring reduce-scatter"),
        ("reduce-scatter", "recursive-halving", "recursive halving reduce-scatter"),
        ("all-gather", "ring", "ring all-gather"),
        ("all-gather", "recursive-doubling", "recursive doubling all-gather"),
        ("all-to-all", "bruck", "Bruck all-to-all"),
    ):
        model = machine if "reduce" in kind else free_copies
        got = seconds(kind, name, nodes, n, 4, model)
        expected = TEXTBOOK[formula](p, 4 * n).seconds(alpha, beta, gamma)
        assert got == pytest.approx(expected, rel=1e-12), name
    # The textbook counts the exchange with itself, too: n for (p - 1) / p n.
    got = seconds("all-to-all", "pairwise", nodes, n, 4, machine)
    assert got == pytest.approx((p - 1) * (alpha + 4 * n / p * beta), rel=1e-12)
    for pattern, formula in (
        (patterns.binomial_broadcast(p, n), "binomial tree broadcast"),
        (patterns.binomial_reduce(p, n), "binomial tree reduce"),
        (patterns.binomial_gather([n // p] * p), "binomial tree gather"),
        (patterns.binomial_scatter([n // p] * p), "binomial tree scatter"),
    ):
        got = pattern_seconds(pattern, nodes, 4, machine)
        expected = TEXTBOOK[formula](p, 4 * n).seconds(alpha, beta, gamma)
        assert got == pytest.approx(expected, rel=1e-12), formula


@pytest.mark.parametrize("p", (3, 5, 6, 7, 9))
def test_rabenseifners_other_ranks_cost_a_message_before_and_after(p):
    machine = Machine(Level(1e-6, 1e-10, 0.0), None, 1e-10, 0.0)
    k = p.bit_length() - 1
    n = 720 << k
    got = seconds("all-reduce", "rabenseifner", [range(p)], n, 4, machine)
    inner = (2**k - 1) / 2**k * 4 * n
    expected = (
        (2 * k + 2) * 1e-6 + (2 * inner + 8 * n) * 1e-10 + (inner + 4 * n) * 1e-10
    )
    assert got == pytest.approx(expected, rel=1e-12)


def test_the_textbook_counts_those_messages_too():
    # Thakur et al. (2005), section 4.5: p no power of two.
    terms = TEXTBOOK["Rabenseifner all-reduce"](6, 600)
    assert terms == (2 * 2 + 2, (2 * 5 / 6 + 2) * 600, (1 + 5 / 6) * 600)


@pytest.mark.parametrize("p", (2, 4, 6, 8, 16, 3, 5, 7, 9))
def test_leaves_of_one_tree_are_inner_nodes_of_the_other(p):
    inner = [
        {r for r in range(p) if Tree(r, p, second).children} for second in (False, True)
    ]
    roots = [
        [r for r in range(p) if Tree(r, p, second).parent is None]
        for second in (False, True)
    ]
    assert len(roots[0]) == len(roots[1]) == 1 and roots[0] != roots[1]
    both = inner[0] & inner[1]
    assert both <= ({0} if p % 2 else set())
    assert max(len(Tree(r, p, s).children) for r in range(p) for s in (0, 1)) <= 2


def test_messages_of_a_node_share_its_links():
    inside, across = Level(1e-6, 1e-9, 4e-10), Level(1e-5, 8e-9, 8e-9)
    machine = Machine(inside, across, 5e-10, 3e-10)
    nodes = [[0, 1], [2, 3]]
    alone = [[Message(0, 1, 1000)]]
    assert pattern_seconds(alone, nodes, 1, machine) == pytest.approx(2e-6)
    four = [[Message(0, 1, 1000), Message(1, 0, 1000), Message(2, 3, 10)]]
    assert pattern_seconds(four, nodes, 1, machine) == pytest.approx(2e-6)
    shared = [[Message(0, 1, 1000)] * 4]
    assert pattern_seconds(shared, nodes, 1, machine) == pytest.approx(1e-6 + 1.6e-6)
    crossing = [[Message(0, 2, 1000), Message(1, 3, 1000), Message(2, 0, 500)]]
    assert pattern_seconds(crossing, nodes, 1, machine) == pytest.approx(1e-5 + 1.6e-5)
    added = [[Message(0, 1, 1000, True), Message(1, 0, 1000, True)]]
    assert pattern_seconds(added, nodes, 1, machine) == pytest.approx(2e-6 + 6e-7)
    with pytest.raises(ValueError, match="only one node was measured"):
        pattern_seconds(crossing, nodes, 1, Machine(inside, None, 0, 0))


def test_the_cheapest_depends_on_size_and_on_where_ranks_are():
    inside, across = Level(1e-6, 1e-10, 5e-11), Level(2e-5, 8e-9, 8e-9)
    machine = Machine(inside, across, 1e-10, 5e-11)
    one_node = [list(range(8))]
    assert cheapest("all-reduce", one_node, 2, 4, machine) == "recursive-doubling"
    assert cheapest("all-reduce", one_node, 1 << 22, 4, machine) == "rabenseifner"
    blocks, dealt_out = (
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    )
    assert cheapest("all-reduce", blocks, 1 << 22, 4, machine) == "hierarchical"
    # Halving begins with partners p / 2 apart: here they share a node.
    assert cheapest("all-reduce", dealt_out, 1 << 22, 4, machine) == "rabenseifner"
    assert cheapest("all-to-all", one_node, 8, 4, machine) == "bruck"
    assert cheapest("all-to-all", one_node, 1 << 22, 4, machine) == "pairwise"
    with pytest.raises(InputError, match=r"no all-gather called 'x': choose one of"):
        named("all-gather", "x")


def test_copies_cost_time_but_are_not_sent():
    machine = Machine(Level(1e-6, 1e-9, 4e-10), None, 5e-10, 3e-10)
    pattern = [patterns.copies([1000, 400])]
    assert sent_by(pattern, 0) == (0, 0)
    assert pattern_seconds(pattern, [[0, 1]], 1, machine) == pytest.approx(5e-7)
    assert pattern_seconds(pattern, [[0], [1]], 1, machine) == pytest.approx(5e-7)
