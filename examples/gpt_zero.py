"""Train a GPT or Llama whose state is divided among the replicas (ZeRO).

mpirun -n 4 python examples/gpt_zero.py --stage 2
mpirun -n 4 python examples/gpt_zero.py --stage 3 --layers 6 --width 256 --steps 30
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.process_mesh import ProcessMesh
from mpiscale.comm.traffic import AllReduceVolume
from mpiscale.comm.world import World, run
from mpiscale.nn.flat import materialize
from mpiscale.nn.language_model import LanguageModel
from mpiscale.parallel.data_parallel import traffic as dp_traffic
from mpiscale.parallel.data_parallel.all_reduce_after_backward import (
    AllReduceAfterBackward,
)
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.parallel.step_traffic import StepTraffic
from mpiscale.parallel.zero import traffic as zero_traffic
from mpiscale.parallel.zero.memory import state_bytes
from mpiscale.parallel.zero.sharded import Sharded
from mpiscale.parallel.zero.zero1_optimizer_state import Zero1
from mpiscale.parallel.zero.zero2_gradients import Zero2
from mpiscale.parallel.zero.zero3_parameters import Zero3
from mpiscale.train.config import TrainConfig, parse
from mpiscale.train.equip import equip
from mpiscale.train.loop import train
from mpiscale.train.strategy import Strategy, serial_model

STAGES: dict[int, type[Zero1 | Zero2 | Zero3]] = {1: Zero1, 2: Zero2, 3: Zero3}
MIB = 2**20


@dataclass(frozen=True)
class ZeroConfig(TrainConfig):
    """The flags of every example, and those of ZeRO."""

    out: Path = Path("runs/gpt_zero")
    stage: Literal[0, 1, 2, 3] = 3
    """Cut: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""


def memory_table(
    world: World, config: ZeroConfig, dp: DataParallel, parameters: int
) -> None:
    """Model state that every rank holds between steps, beside the formula."""
    itemsize, grad_itemsize = config.numpy_dtype.itemsize, dp.grad_dtype.itemsize
    optimizer = 2 * grad_itemsize  # AdamW's two moments
    mine = (*dp.held(), dp.size * optimizer)
    rows = world.comm.gather(mine)
    if rows is None:
        return
    formula = state_bytes(
        config.stage, parameters, world.size, itemsize, grad_itemsize, optimizer
    )
    print("state, MiB    parameters    gradients    optimizer         held")
    named = [(f"rank {rank}", row) for rank, row in enumerate(rows)]
    for name, row in [*named, ("formula", formula)]:
        cells = "".join(f"{value / MIB:>13.3f}" for value in (*row, sum(row)))
        print(f"{name:<11}{cells}")


def main(world: World) -> None:
    """Train with all ranks as replicas that share their state."""
    config = parse(world, "Train a language model with ZeRO.", ZeroConfig())
    world, volume = equip(world, config)
    mesh = ProcessMesh(world.comm, dp=world.size)
    replicas = mesh.along("dp")
    alone = world.comm.Split(world.rank, 0)

    def data_parallel(model: LanguageModel) -> DataParallel:
        seed, dtype = config.seed, config.numpy_dtype
        dp: DataParallel
        if config.stage == 0:
            dp = AllReduceAfterBackward(materialize(model, seed, dtype), replicas)
        else:
            dp = STAGES[config.stage](model, replicas, seed, dtype)
        total = sum(p.full_size for p in dp.parameters)
        memory_table(world, config, dp, total)
        return dp

    def traffic(model: LanguageModel, dp: DataParallel) -> StepTraffic:
        return step_traffic(config, dp, replicas, volume)

    strategy = Strategy(str(mesh), serial_model, alone, data_parallel, traffic)
    train(world, config, strategy)


def step_traffic(
    config: ZeroConfig, dp: DataParallel, comm: Communicator, volume: AllReduceVolume
) -> StepTraffic:
    """What a step of this stage sends."""
    grad_itemsize = dp.grad_dtype.itemsize
    if not isinstance(dp, Sharded):
        return dp_traffic.step_traffic([dp.size], grad_itemsize, comm, volume)
    return zero_traffic.step_traffic(
        config.stage,
        [unit.chunk for unit in dp.units],
        config.numpy_dtype.itemsize,
        grad_itemsize,
        config.accumulate,
        comm,
        volume=volume,
    )


if __name__ == "__main__":
    run(main)
