"""First use of the compiled kernels: one rank of each node compiles, the others wait.

Compiled code is cached on disk: this costs seconds once and milliseconds later. Eight
ranks that compile the same kernels on two cores would take eight times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.world import World, polite_barrier
from mpiscale.nn.flat import materialize
from mpiscale.nn.language_model import LanguageModel
from mpiscale.nn.placement import Noise, Placement
from mpiscale.optim.adamw import AdamW
from mpiscale.train.config import TrainConfig

Build = Callable[[TrainConfig, int, Communicator], LanguageModel]


def compile_kernels(world: World, config: TrainConfig, build: Build) -> None:
    """Have every kernel that a run of `config` uses compiled and cached.

    Args:
        world: all ranks; collective.
        config: of the run.
        build: (config, vocabulary, communicator) -> model, cut as in the run.
    """
    alone = world.comm.Split(world.rank, 0)
    if world.local_rank == 0:
        _one_layer_step(config, build, alone)
    polite_barrier(world.comm)


def _one_layer_step(config: TrainConfig, build: Build, alone: Communicator) -> None:
    """A training step on one rank: the run's types and batch, one layer, not cut.

    Sizes matter: whether a kernel runs on several threads depends on them, and the
    version for several threads is compiled apart. This rank holds a whole layer and the
    whole embedding for as long as that takes.
    """
    model = build(replace(config, layers=1), config.vocab, alone)
    flat = materialize(model, config.seed, config.numpy_dtype)
    shape = (config.batch, config.length)
    tokens = np.zeros(shape, np.int64)
    placement = Placement.whole(*shape, Noise(config.seed, 0))
    model.loss(tokens, tokens, placement).backward()
    AdamW(flat).step(config.lr)
