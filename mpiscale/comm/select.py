"""Algorithms by name, and the cheapest of a kind for a size on a measured machine.

    with_algorithms(comm, Algorithms(all_reduce=all_reduce_named("ring")))
    with_algorithms(comm, Algorithms(all_reduce=cheapest_all_reduce(topology)))

"mpi" is MPI's own: nothing is chosen then. "auto" needs a topology file, with which
each call takes the algorithm that the cost model finds cheapest for its size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm import message_patterns as patterns
from mpiscale.comm.algorithms.bruck_all_to_all import bruck_all_to_all
from mpiscale.comm.algorithms.chunks import even_counts
from mpiscale.comm.algorithms.double_binary_tree_all_reduce import (
    SEGMENT_BYTES,
    double_binary_tree_all_reduce,
)
from mpiscale.comm.algorithms.hierarchical_all_gather import hierarchical_all_gather
from mpiscale.comm.algorithms.hierarchical_all_reduce import hierarchical_all_reduce
from mpiscale.comm.algorithms.hierarchical_all_to_all import hierarchical_all_to_all
from mpiscale.comm.algorithms.kinds import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
)
from mpiscale.comm.algorithms.node_groups import node_groups, nodes_of
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
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.cost_model import Machine, pattern_seconds
from mpiscale.comm.message_patterns import Nodes, Pattern, sent_by
from mpiscale.comm.topology import Topology
from mpiscale.comm.traffic import OPTIMAL, AllReduceVolume
from mpiscale.errors import InputError

Kind: TypeAlias = AllReduce | ReduceScatter | AllGather | AllToAll


class Named(NamedTuple):
    """An algorithm, and the messages it sends.

    make: (communicator) -> the algorithm for its ranks; collective.
    pattern: (nodes, n elements, itemsize) -> messages. n is what an all-reduce reduces,
        what a reduce-scatter or all-to-all starts from, what an all-gather ends with;
        blocks are even.
    """

    make: Callable[[Communicator], Kind]
    pattern: Callable[[Nodes, int, int], Pattern]


def _ranks(nodes: Nodes) -> int:
    return sum(map(len, nodes))


def _cut(nodes: Nodes, n: int) -> list[int]:
    return even_counts(n, _ranks(nodes))


def _blocks(nodes: Nodes, n: int) -> list[list[int]]:
    return [[n // _ranks(nodes)] * _ranks(nodes)] * _ranks(nodes)


NAMED: dict[str, dict[str, Named]] = {
    "all-reduce": {
        "ring": Named(
            lambda comm: ring_all_reduce,
            lambda nodes, n, _: patterns.ring_all_reduce(_ranks(nodes), n),
        ),
        "recursive-doubling": Named(
            lambda comm: recursive_doubling_all_reduce,
            lambda nodes, n, _: patterns.recursive_doubling_all_reduce(
                _ranks(nodes), n
            ),
        ),
        "rabenseifner": Named(
            lambda comm: rabenseifner_all_reduce,
            lambda nodes, n, _: patterns.rabenseifner_all_reduce(_ranks(nodes), n),
        ),
        "double-binary-tree": Named(
            lambda comm: double_binary_tree_all_reduce,
            lambda nodes, n, itemsize: patterns.double_binary_tree_all_reduce(
                _ranks(nodes), n, max(1, SEGMENT_BYTES // itemsize)
            ),
        ),
        "hierarchical": Named(
            lambda comm: hierarchical_all_reduce(node_groups(comm)),
            lambda nodes, n, _: patterns.hierarchical_all_reduce(nodes, n),
        ),
    },
    "reduce-scatter": {
        "ring": Named(
            lambda comm: ring_reduce_scatter,
            lambda nodes, n, _: patterns.ring_reduce_scatter(_cut(nodes, n)),
        ),
        "recursive-halving": Named(
            lambda comm: recursive_halving_reduce_scatter,
            lambda nodes, n, _: patterns.recursive_halving_reduce_scatter(
                _cut(nodes, n)
            ),
        ),
    },
    "all-gather": {
        "ring": Named(
            lambda comm: ring_all_gather,
            lambda nodes, n, _: patterns.ring_all_gather(_cut(nodes, n)),
        ),
        "recursive-doubling": Named(
            lambda comm: recursive_doubling_all_gather,
            lambda nodes, n, _: patterns.recursive_doubling_all_gather(_cut(nodes, n)),
        ),
        "hierarchical": Named(
            lambda comm: hierarchical_all_gather(node_groups(comm)),
            lambda nodes, n, _: patterns.hierarchical_all_gather(nodes, _cut(nodes, n)),
        ),
    },
    "all-to-all": {
        "pairwise": Named(
            lambda comm: pairwise_all_to_all,
            lambda nodes, n, _: patterns.pairwise_all_to_all(_blocks(nodes, n)),
        ),
        "bruck": Named(
            lambda comm: bruck_all_to_all,
            lambda nodes, n, _: patterns.bruck_all_to_all(
                _ranks(nodes), n // _ranks(nodes)
            ),
        ),
        "hierarchical": Named(
            lambda comm: hierarchical_all_to_all(node_groups(comm)),
            lambda nodes, n, _: patterns.hierarchical_all_to_all(
                nodes, _blocks(nodes, n)
            ),
        ),
    },
}
ALL_REDUCE_NAMES = ("mpi", *NAMED["all-reduce"], "auto")


def named(kind: str, name: str) -> Named:
    """The algorithm of a kind ("all-reduce", ...) with this name.

    Raises:
        InputError: if there is none; lists the names.
    """
    if name not in NAMED[kind]:
        raise InputError(
            f"there is no {kind} called {name!r}: choose one of {list(NAMED[kind])}"
        )
    return NAMED[kind][name]


def all_reduce_named(name: str) -> Callable[[Communicator], AllReduce]:
    """Makes the all-reduce of this name, for `Algorithms`."""
    made = named("all-reduce", name).make
    return lambda comm: _as_all_reduce(made(comm))


def _as_all_reduce(algorithm: Kind) -> AllReduce:
    assert isinstance(algorithm, AllReduce)
    return algorithm


def all_reduce_volume(name: str, topology: Topology | None = None) -> AllReduceVolume:
    """What the all-reduce of this name sends: see `Named`; collective once a group."""
    if name == "mpi":
        return OPTIMAL

    # By group, which is kept: another one with its id would not ask for its nodes.
    found: dict[int, tuple[Communicator, list[list[int]]]] = {}

    def elements(n: int, itemsize: int, comm: Communicator) -> int:
        if id(comm) not in found:
            found[id(comm)] = comm, nodes_of(comm)
        nodes, chosen = found[id(comm)][1], name
        if topology is not None:
            chosen = cheapest("all-reduce", nodes, n, itemsize, topology.machine)
        pattern = named("all-reduce", chosen).pattern(nodes, n, itemsize)
        return sent_by(pattern, comm.rank)[1] if comm.size > 1 else 0

    return AllReduceVolume(elements, f"({name} all-reduce)")


def cheapest(kind: str, nodes: Nodes, n: int, itemsize: int, machine: Machine) -> str:
    """Name of the algorithm that the model finds fastest.

    Args:
        kind: "all-reduce", "reduce-scatter", "all-gather" or "all-to-all".
        nodes: the ranks of each node.
        n: elements, as for `Named`.
        itemsize: bytes of an element.
        machine: its measured numbers.
    """
    return min(
        NAMED[kind], key=lambda name: seconds(kind, name, nodes, n, itemsize, machine)
    )


def seconds(
    kind: str, name: str, nodes: Nodes, n: int, itemsize: int, machine: Machine
) -> float:
    """Time of an algorithm by the model, in seconds."""
    pattern = named(kind, name).pattern(nodes, n, itemsize)
    return pattern_seconds(pattern, nodes, itemsize, machine)


def cheapest_all_reduce(topology: Topology) -> Callable[[Communicator], AllReduce]:
    """Makes an all-reduce that is, for every size, the cheapest on this machine.

    Making it raises InputError if ranks are on several nodes, but one was measured.
    """

    def make(comm: Communicator) -> AllReduce:
        nodes = nodes_of(comm)
        if len(nodes) > 1 and topology.machine.across is None:
            raise InputError(
                f"the ranks are on {len(nodes)} nodes, but the topology file has no "
                "times of messages between nodes: run `mpiscale bench collectives` "
                "on several nodes, or name an algorithm instead of auto"
            )
        algorithms = {
            name: _as_all_reduce(entry.make(comm))
            for name, entry in NAMED["all-reduce"].items()
        }

        @lru_cache
        def choice(n: int, itemsize: int) -> AllReduce:
            name = cheapest("all-reduce", nodes, n, itemsize, topology.machine)
            return algorithms[name]

        def cheapest_all_reduce(
            x: Array, total: Array, comm: Communicator, op: np.ufunc
        ) -> Steps:
            """Fill `total` with the sum of the flat array x over the ranks."""
            yield from choice(x.size, x.itemsize).steps(x, total, comm, op)

        return AllReduce(cheapest_all_reduce)

    return make
