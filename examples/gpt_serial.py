"""Train a GPT or Llama on one process: what every parallel run must reproduce.

python examples/gpt_serial.py --steps 50
"""

from dataclasses import dataclass
from pathlib import Path

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.world import World, run
from mpiscale.errors import InputError
from mpiscale.nn.language_model import LanguageModel
from mpiscale.train.config import TrainConfig, parse
from mpiscale.train.loop import train


@dataclass(frozen=True)
class NoTraffic:
    """One rank sends nothing."""

    sent_bytes: int = 0
    formula: str = "nothing: one rank"


def build(config: TrainConfig, vocabulary: int, comm: Communicator) -> LanguageModel:
    """The serial model."""
    return config.build_model(vocabulary)


def main(world: World) -> None:
    """Train on one process."""
    if world.size != 1:
        raise InputError(
            f"gpt_serial.py runs on one rank, got {world.size}: start it with "
            "`python`, or use examples/gpt_tp.py"
        )
    defaults = TrainConfig(out=Path("runs/gpt_serial"))
    config = parse(world, "Train a language model on one process.", defaults)
    train(world, config, build, world.comm, "one process", lambda *_: NoTraffic())


if __name__ == "__main__":
    run(main)
