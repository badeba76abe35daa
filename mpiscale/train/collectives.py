"""The run's communicator: with MPI's all-reduce, or another one by its name."""

from __future__ import annotations

from dataclasses import dataclass

from mpiscale.comm.agreement import on_some_ranks
from mpiscale.comm.chosen_algorithms import Algorithms, with_algorithms
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.select import (
    all_reduce_named,
    all_reduce_volume,
    cheapest_all_reduce,
)
from mpiscale.comm.topology import Topology, read_topology
from mpiscale.comm.traffic import AllReduceVolume
from mpiscale.comm.world import World
from mpiscale.train.config import TrainConfig


@dataclass(frozen=True)
class Collectives:
    """What a run's ranks communicate with.

    Attributes:
        comm: all ranks.
        volume: what its all-reduces send.
    """

    comm: Communicator
    volume: AllReduceVolume


def chosen_collectives(world: World, config: TrainConfig) -> Collectives:
    """All ranks, with the all-reduce that the flags ask for. Collective.

    Raises:
        InputError: on all ranks, if the topology file can't be read.
    """
    topology = _read_by_rank_0(world, config)
    volume = all_reduce_volume(config.all_reduce, topology)
    if config.all_reduce == "mpi":
        return Collectives(world.comm, volume)
    if topology is not None:
        make = cheapest_all_reduce(topology)
    else:
        make = all_reduce_named(config.all_reduce)
    return Collectives(with_algorithms(world.comm, Algorithms(make)), volume)


def _read_by_rank_0(world: World, config: TrainConfig) -> Topology | None:
    found: list[Topology | None] = [None]

    def read() -> None:
        if config.topology is not None:
            found[0] = read_topology(config.topology)

    on_some_ranks(world.comm, world.rank == 0, read)
    topology: Topology | None = world.comm.bcast(found[0])
    return topology
