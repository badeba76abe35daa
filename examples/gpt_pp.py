"""Train a GPT or Llama whose layers are on different ranks (pipeline parallelism).

mpirun -n 4 python examples/gpt_pp.py --schedule 1f1b --micro-batches 8
mpirun -n 4 python examples/gpt_pp.py --schedule zb_v --layers 8 --trace runs/zb_v.json
mpirun -n 4 python examples/gpt_pp.py --replicas 2 --split balanced
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpiscale.comm.process_mesh import ProcessMesh
from mpiscale.comm.world import World, run
from mpiscale.errors import InputError
from mpiscale.nn.flat import materialize
from mpiscale.nn.language_model import LanguageModel
from mpiscale.parallel.data_parallel import traffic as dp_traffic
from mpiscale.parallel.data_parallel.bucketed_overlap import BucketedOverlap
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.parallel.pipeline_parallel.schedules import ScheduleName, make_schedule
from mpiscale.parallel.pipeline_parallel.traffic import step_traffic
from mpiscale.parallel.step_traffic import StepTraffic
from mpiscale.train.config import TrainConfig, parse
from mpiscale.train.equip import equip
from mpiscale.train.loop import train
from mpiscale.train.passes import Passes
from mpiscale.train.pipelined import Pipelined
from mpiscale.train.split_blocks import split_blocks
from mpiscale.train.strategy import Strategy, serial_model


@dataclass(frozen=True)
class PipelineConfig(TrainConfig):
    """The flags of every example, and those of a pipeline."""

    out: Path = Path("runs/gpt_pp")
    layers: int = 8
    """Transformer blocks."""
    schedule: ScheduleName = "1f1b"
    """Who computes what when; `mpiscale draw` shows each of them."""
    micro_batches: int = 8
    """Parts into which the samples of a step are cut."""
    chunks: int = 1
    """Stages of each rank, for interleaved_1f1b and looped_bfs."""
    group: int | None = None
    """Micro-batches of a group, for interleaved_1f1b; default: as many as ranks."""
    split: str = "even"
    """Layers of each stage: even, balanced (by measured cost), or such as 3,3,2."""
    replicas: int = 1
    """Pipelines side by side, each on its own samples (data parallelism)."""

    def check(self) -> None:
        """Refuse values that no run could use."""
        super().check()
        if self.replicas < 1:
            raise InputError(f"--replicas must be at least 1, got {self.replicas}")
        samples = self.batch // self.replicas
        if not 1 <= self.micro_batches <= samples:
            raise InputError(
                f"--micro-batches {self.micro_batches}: expected 1 ... {samples}, as "
                f"--batch {self.batch} gives {self.replicas} replicas {samples} "
                "samples each"
            )


def main(world: World) -> None:
    """Train with the ranks as pipelines of equal length."""
    config = parse(world, "Train a language model in a pipeline.", PipelineConfig())
    world, volume = equip(world, config)
    replicas = config.replicas
    mesh = ProcessMesh(world.comm, pp=max(world.size // replicas, 1), dp=replicas)
    pp, dp_group = mesh.along("pp"), mesh.along("dp")
    schedule = make_schedule(
        config.schedule, pp.size, config.micro_batches, config.chunks, config.group
    )
    samples = config.batch // replicas // config.micro_batches
    blocks = split_blocks(world.comm, config, config.split, schedule.stages, samples)

    def passes(world: World, config: TrainConfig, model: LanguageModel) -> Passes:
        return Pipelined(world, config, model, pp, schedule, blocks)

    def data_parallel(model: LanguageModel) -> DataParallel:
        flat = materialize(model, config.seed, config.numpy_dtype)
        return BucketedOverlap(flat, dp_group)

    def traffic(model: LanguageModel, dp: DataParallel) -> StepTraffic:
        assert isinstance(dp, BucketedOverlap)
        samples = np.array_split(np.arange(config.batch), replicas)[dp_group.rank]
        parts = np.array_split(samples, config.micro_batches)
        itemsize = config.numpy_dtype.itemsize
        pipeline = step_traffic(
            schedule,
            [len(part) for part in parts],
            config.length * config.width,
            itemsize,
            dp.parameters,
            dp.grad_dtype.itemsize,
            pp,
            volume,
        )
        if replicas == 1:
            return pipeline
        lengths = [bucket.place.stop - bucket.place.start for bucket in dp.buckets]
        return pipeline + dp_traffic.step_traffic(
            lengths, dp.grad_dtype.itemsize, dp_group, volume
        )

    layout = f"{mesh}; layers of the stages: {', '.join(map(str, blocks))}"
    strategy = Strategy(layout, serial_model, pp, data_parallel, traffic, passes)
    train(world, config, strategy)


if __name__ == "__main__":
    run(main)
