"""The run's world as its flags want it: which all-reduce, whether to watch hangs."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

from mpiscale.comm.agreement import on_some_ranks
from mpiscale.comm.chosen_algorithms import Algorithms, with_algorithms
from mpiscale.comm.mpi import MpiCommunicator
from mpiscale.comm.select import (
    all_reduce_named,
    all_reduce_volume,
    cheapest_all_reduce,
)
from mpiscale.comm.topology import Topology, read_topology
from mpiscale.comm.traffic import AllReduceVolume
from mpiscale.comm.world import World, debugging
from mpiscale.train.config import TrainConfig


class Equipped(NamedTuple):
    """A world whose communicator does what the flags ask for.

    volume: what its all-reduces send, for formulas.
    """

    world: World
    volume: AllReduceVolume


def equip(world: World, config: TrainConfig) -> Equipped:
    """Give the world the all-reduce and the hang diagnosis of the flags. Collective.

    Raises:
        InputError: on all ranks, if the topology file can't be read.
    """
    if config.debug_comm:
        world = debugging(world, config.debug_timeout)
    topology = _read_by_rank_0(world, config)
    volume = all_reduce_volume(config.all_reduce, topology)
    if config.all_reduce == "mpi":
        return Equipped(world, volume)
    if topology is not None:
        make = cheapest_all_reduce(topology)
    else:
        make = all_reduce_named(config.all_reduce)
    chosen = with_algorithms(world.comm, Algorithms(make))
    return Equipped(replace(world, comm=cast(MpiCommunicator, chosen)), volume)


def _read_by_rank_0(world: World, config: TrainConfig) -> Topology | None:
    found: list[Topology | None] = [None]

    def read() -> None:
        if config.topology is not None:
            found[0] = read_topology(config.topology)

    on_some_ranks(world.comm, world.rank == 0, read)
    topology: Topology | None = world.comm.bcast(found[0])
    return topology
