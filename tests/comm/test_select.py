"""The cheapest all-reduce by a topology file, and what its name promises to send."""

import weakref
from typing import get_args

import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm.algorithms.node_groups import nodes_of
from mpiscale.comm.chosen_algorithms import Algorithms, with_algorithms
from mpiscale.comm.cost_model import Level, Machine
from mpiscale.comm.mpi import MpiCommunicator
from mpiscale.comm.select import (
    ALL_REDUCE_NAMES,
    all_reduce_named,
    all_reduce_volume,
    cheapest,
    cheapest_all_reduce,
)
from mpiscale.comm.topology import Topology
from mpiscale.errors import InputError
from mpiscale.train.config import AllReduceName

ONE_NODE = Machine(Level(1e-6, 1e-10, 5e-11), None, 1e-10, 5e-11)
SIZES = (1, 3, 1001, 300_001)


def measured(machine):
    return Topology("2026-01-31", "MPICH 5", [[0]], ["a"], machine)


@pytest.mark.mpi(ranks=(1, 3, 4))
def test_every_name_sums_and_sends_what_its_volume_says():
    world = MpiCommunicator(MPI.COMM_WORLD)
    topology = measured(ONE_NODE)
    for name in ALL_REDUCE_NAMES[1:]:
        auto = name == "auto"
        make = cheapest_all_reduce(topology) if auto else all_reduce_named(name)
        volume = all_reduce_volume(name, topology if auto else None)
        comm = with_algorithms(world, Algorithms(all_reduce=make))
        for n in SIZES:
            x = np.arange(n, dtype=np.float32) % 7
            total = np.empty_like(x)
            world.ledger.reset()
            comm.Allreduce(x, total)
            sent = world.ledger.sent_bytes()
            np.testing.assert_array_equal(total, comm.size * x)  # small integers
            assert sent == volume.elements(n, 4, comm) * 4, (name, n)


@pytest.mark.mpi(ranks=(4,))
def test_auto_takes_another_algorithm_for_another_size():
    world = MpiCommunicator(MPI.COMM_WORLD)
    nodes = nodes_of(world)
    names = {cheapest("all-reduce", nodes, n, 4, ONE_NODE) for n in SIZES}
    assert {"recursive-doubling", "rabenseifner"} <= names


@pytest.mark.mpi(ranks=(2,))
def test_auto_refuses_ranks_on_several_nodes_if_one_was_measured(monkeypatch):
    world = MpiCommunicator(MPI.COMM_WORLD)
    monkeypatch.setattr("mpiscale.comm.select.nodes_of", lambda comm: [[0], [1]])
    with pytest.raises(InputError, match="on 2 nodes, but the topology file has no"):
        cheapest_all_reduce(measured(ONE_NODE))(world)


@pytest.mark.mpi(ranks=(1,))
def test_a_volume_keeps_the_groups_whose_nodes_it_knows():
    comm = MpiCommunicator(MPI.COMM_WORLD).Split(0, 0)
    volume, alive = all_reduce_volume("ring"), weakref.ref(comm)
    volume.elements(1, 4, comm)
    del comm
    assert alive() is not None


def test_the_flag_offers_all_names():
    assert get_args(AllReduceName) == ALL_REDUCE_NAMES
