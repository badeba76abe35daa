"""Train a GPT or Llama on every rank, each on its own samples (data parallelism).

mpirun -n 4 python examples/gpt_dp.py
mpirun -n 2 python examples/gpt_dp.py --no-overlap --accumulate 4 --steps 50
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpiscale.backend import BFLOAT16
from mpiscale.comm.algorithms.bfloat16_all_reduce import bfloat16_all_reduce
from mpiscale.comm.chosen_algorithms import Algorithms, with_algorithms
from mpiscale.comm.process_mesh import ProcessMesh
from mpiscale.comm.world import World, run
from mpiscale.errors import InputError
from mpiscale.nn.flat import materialize
from mpiscale.nn.language_model import LanguageModel
from mpiscale.nn.layers import Embedding
from mpiscale.parallel.data_parallel.all_reduce_after_backward import (
    AllReduceAfterBackward,
)
from mpiscale.parallel.data_parallel.bucketed_overlap import BucketedOverlap
from mpiscale.parallel.data_parallel.gathered_lookups import GatheredLookups
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.parallel.data_parallel.traffic import lookups_traffic, step_traffic
from mpiscale.parallel.step_traffic import StepTraffic
from mpiscale.train.config import TrainConfig, parse
from mpiscale.train.equip import equip
from mpiscale.train.loop import train
from mpiscale.train.strategy import Strategy, serial_model


@dataclass(frozen=True)
class DataParallelConfig(TrainConfig):
    """The flags of every example, and those of data parallelism."""

    out: Path = Path("runs/gpt_dp")
    overlap: bool = True
    """Sum gradients bucket by bucket while backward runs, or all of them after it."""
    compress: bool = False
    """Send gradients as bfloat16: half the bytes, roundings of up to 0.4 percent."""

    gather_lookups: bool = False
    """Exchange the embedding's gradient as the rows that were looked up."""

    def check(self) -> None:
        """Refuse values that no run could use."""
        super().check()
        if self.compress and (self.dtype, self.all_reduce) != ("float32", "mpi"):
            raise InputError(
                "--compress is an all-reduce of float32 gradients: it needs --dtype "
                f"float32 and no --all-reduce, got {self.dtype} and {self.all_reduce}"
            )
        if self.gather_lookups and not self.overlap:
            raise InputError("--gather-lookups goes with --overlap: leave one out")


def main(world: World) -> None:
    """Train with all ranks as replicas."""
    description = "Train a language model with data parallelism."
    config = parse(world, description, DataParallelConfig())
    world, volume = equip(world, config)
    mesh = ProcessMesh(world.comm, dp=world.size)
    replicas = mesh.along("dp")
    gradients = replicas
    if config.compress:
        algorithms = Algorithms(all_reduce=lambda comm: bfloat16_all_reduce)
        gradients = with_algorithms(replicas, algorithms)
    alone = world.comm.Split(world.rank, 0)

    def data_parallel(model: LanguageModel) -> DataParallel:
        flat = materialize(model, config.seed, config.numpy_dtype)
        if not config.overlap:
            return AllReduceAfterBackward(flat, replicas, gradients)
        lookups = None
        if config.gather_lookups:
            embedding = model.token_embedding
            assert isinstance(embedding, Embedding), "the model is whole"
            lookups = GatheredLookups(embedding, replicas, config.tied)
        return BucketedOverlap(flat, replicas, gradients, lookups=lookups)

    def traffic(model: LanguageModel, dp: DataParallel) -> StepTraffic:
        lengths = [dp.size]
        if isinstance(dp, BucketedOverlap):
            lengths = [bucket.place.stop - bucket.place.start for bucket in dp.buckets]
        itemsize = dp.grad_dtype.itemsize
        if config.compress:  # its own algorithm, whatever --all-reduce says
            traffic = step_traffic(lengths, BFLOAT16.itemsize, replicas)
        else:
            traffic = step_traffic(lengths, itemsize, replicas, volume)
        if not config.gather_lookups:
            return traffic
        samples = np.array_split(np.arange(config.batch), world.size)
        tokens = [config.length * len(part) for part in samples]
        lookups = lookups_traffic(tokens, config.width, itemsize, replicas)
        return traffic + lookups

    strategy = Strategy(str(mesh), serial_model, alone, data_parallel, traffic)
    train(world, config, strategy)


if __name__ == "__main__":
    run(main)
