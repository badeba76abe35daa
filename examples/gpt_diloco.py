"""Train a GPT or Llama on ranks that meet only every so many steps (DiLoCo).

mpirun -n 4 python examples/gpt_diloco.py --every 20
"""

from dataclasses import dataclass
from pathlib import Path

from mpiscale.comm.process_mesh import ProcessMesh
from mpiscale.comm.world import World, run
from mpiscale.errors import InputError
from mpiscale.nn.flat import materialize
from mpiscale.nn.language_model import LanguageModel
from mpiscale.parallel.data_parallel.diloco import DiLoCo
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.parallel.data_parallel.traffic import diloco_traffic
from mpiscale.parallel.step_traffic import StepTraffic
from mpiscale.train.config import TrainConfig, parse
from mpiscale.train.equip import equip
from mpiscale.train.loop import train
from mpiscale.train.strategy import Strategy, serial_model


@dataclass(frozen=True)
class DiLoCoConfig(TrainConfig):
    """The flags of every example, and those of DiLoCo."""

    out: Path = Path("runs/gpt_diloco")
    every: int = 20
    """Inner steps between two outer ones."""
    outer_lr: float = 0.7
    """Learning rate of the outer steps."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer steps."""

    def check(self) -> None:
        """Refuse values that no run could use."""
        super().check()
        if self.every < 1:
            raise InputError(f"--every must be at least 1, got {self.every}")
        if self.steps % self.every:
            raise InputError(
                f"--steps {self.steps} must be a multiple of --every {self.every}: "
                "between two outer steps the ranks' parameters differ"
            )


def main(world: World) -> None:
    """Train with all ranks as replicas that meet now and then."""
    config = parse(world, "Train a language model with DiLoCo.", DiLoCoConfig())
    world, volume = equip(world, config)
    mesh = ProcessMesh(world.comm, dp=world.size)
    replicas = mesh.along("dp")
    alone = world.comm.Split(world.rank, 0)

    def data_parallel(model: LanguageModel) -> DataParallel:
        flat = materialize(model, config.seed, config.numpy_dtype)
        return DiLoCo(
            flat, replicas, config.every, config.outer_lr, config.outer_momentum
        )

    def traffic(model: LanguageModel, dp: DataParallel) -> StepTraffic:
        return diloco_traffic(
            dp.size, dp.grad_dtype.itemsize, config.every, replicas, volume
        )

    strategy = Strategy(str(mesh), serial_model, alone, data_parallel, traffic)
    train(world, config, strategy)


if __name__ == "__main__":
    run(main)
