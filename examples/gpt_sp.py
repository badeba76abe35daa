"""Train a GPT or Llama with tensor and sequence parallelism (Megatron-LM).

mpirun -n 4 python examples/gpt_sp.py
mpirun -n 4 python examples/gpt_sp.py --overlap --profile memory --steps 50
"""

from dataclasses import dataclass
from pathlib import Path

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.process_mesh import ProcessMesh
from mpiscale.comm.world import World, run
from mpiscale.nn.language_model import LanguageModel
from mpiscale.parallel.async_tensor_parallel import AsyncSequenceBoundary
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.parallel.sequence_parallel import SequenceBoundary, sequence_parallelize
from mpiscale.parallel.step_traffic import StepTraffic
from mpiscale.parallel.tensor_parallel.tensor_parallelize import tensor_parallelize
from mpiscale.parallel.tensor_parallel.traffic import sequence_step_traffic
from mpiscale.train.config import TrainConfig, parse
from mpiscale.train.equip import equip
from mpiscale.train.loop import train
from mpiscale.train.strategy import Strategy, one_replica


@dataclass(frozen=True)
class SequenceConfig(TrainConfig):
    """The flags of every example, and those of sequence parallelism."""

    out: Path = Path("runs/gpt_sp")
    overlap: bool = False
    """Compute with the tokens that are here while others travel (async TP)."""


def main(world: World) -> None:
    """Train with all ranks in one group that cuts layers and sequences."""
    description = "Train a language model with tensor and sequence parallelism."
    config = parse(world, description, SequenceConfig())
    world, volume = equip(world, config)
    mesh = ProcessMesh(world.comm, tp=world.size)
    tp = mesh.along("tp")
    boundary = AsyncSequenceBoundary if config.overlap else SequenceBoundary

    def build(
        config: TrainConfig, vocabulary: int, comm: Communicator
    ) -> LanguageModel:
        model = config.build_model(vocabulary)
        tensor_parallelize(model, comm)
        sequence_parallelize(model, comm, boundary(comm))
        return model

    def traffic(model: LanguageModel, dp: DataParallel) -> StepTraffic:
        return sequence_step_traffic(
            dp.parameters,
            config.layers,
            config.width,
            config.batch,
            config.length,
            config.label_smoothing,
            config.numpy_dtype,
            tp,
            volume,
        )

    replica = one_replica(world, config)
    train(world, config, Strategy(str(mesh), build, tp, replica, traffic))


if __name__ == "__main__":
    run(main)
