"""How a training run is laid out over the ranks: what an example decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.world import World
from mpiscale.nn.flat import materialize
from mpiscale.nn.language_model import LanguageModel
from mpiscale.parallel.data_parallel.all_reduce_after_backward import (
    AllReduceAfterBackward,
)
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.train.config import TrainConfig
from mpiscale.train.passes import MakePasses, WholeModel
from mpiscale.train.report import Traffic
from mpiscale.train.warm_up import Build

MakeDataParallel = Callable[[LanguageModel], DataParallel]


@dataclass(frozen=True)
class Strategy:
    """What runs where, and what it sends.

    Attributes:
        mesh: the layout in words.
        build: (config, vocabulary, communicator) -> model, cut but not materialised.
        model_group: the ranks over which the model is spread; alone if none.
        data_parallel: gives the model its values, and says how replicas meet.
        traffic: what a step sends, by its formula.
        passes: forward and backward; may take parts of the model to other ranks.
    """

    mesh: str
    build: Build
    model_group: Communicator
    data_parallel: MakeDataParallel
    traffic: Callable[[LanguageModel, DataParallel], Traffic]
    passes: MakePasses = WholeModel


def serial_model(
    config: TrainConfig, vocabulary: int, comm: Communicator
) -> LanguageModel:
    """A `Build` for strategies that leave the model whole."""
    return config.build_model(vocabulary)


def one_replica(world: World, config: TrainConfig) -> MakeDataParallel:
    """No data parallelism: all ranks train on the same samples. Collective."""
    alone = world.comm.Split(world.rank, 0)

    def make(model: LanguageModel) -> DataParallel:
        flat = materialize(model, config.seed, config.numpy_dtype)
        return AllReduceAfterBackward(flat, alone)

    return make
