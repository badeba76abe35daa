"""Train a GPT or Llama whose every layer is cut over the ranks (tensor parallelism).

mpirun -n 8 python examples/gpt_tp.py
mpirun -n 4 python examples/gpt_tp.py --model llama --kv-heads 2 --steps 50
"""

from pathlib import Path

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.process_mesh import ProcessMesh
from mpiscale.comm.world import World, run
from mpiscale.nn.language_model import LanguageModel
from mpiscale.parallel.data_parallel.interface import DataParallel
from mpiscale.parallel.step_traffic import StepTraffic
from mpiscale.parallel.tensor_parallel.tensor_parallelize import tensor_parallelize
from mpiscale.parallel.tensor_parallel.traffic import step_traffic
from mpiscale.train.config import TrainConfig, parse
from mpiscale.train.equip import equip
from mpiscale.train.loop import train
from mpiscale.train.strategy import Strategy, one_replica


def build(config: TrainConfig, vocabulary: int, comm: Communicator) -> LanguageModel:
    """The serial model, then cut over `comm`."""
    model = config.build_model(vocabulary)
    tensor_parallelize(model, comm)
    return model


def main(world: World) -> None:
    """Train with all ranks in one tensor-parallel group."""
    defaults = TrainConfig(out=Path("runs/gpt_tp"))
    config = parse(world, "Train a tensor-parallel language model.", defaults)
    world, volume = equip(world, config)
    mesh = ProcessMesh(world.comm, tp=world.size)
    tp = mesh.along("tp")

    def traffic(model: LanguageModel, dp: DataParallel) -> StepTraffic:
        return step_traffic(
            dp.parameters,
            config.layers,
            config.width,
            config.batch * config.length,
            config.label_smoothing,
            config.numpy_dtype,
            tp,
            volume,
        )

    replica = one_replica(world, config)
    train(world, config, Strategy(str(mesh), build, tp, replica, traffic))


if __name__ == "__main__":
    run(main)
