"""Train a GPT or Llama on one process: what every parallel run must reproduce.

python examples/gpt_serial.py --steps 50
"""

from dataclasses import dataclass
from pathlib import Path

from mpiscale.comm.world import World, run
from mpiscale.errors import InputError
from mpiscale.train.config import TrainConfig, parse
from mpiscale.train.loop import train
from mpiscale.train.strategy import Strategy, one_replica, serial_model


@dataclass(frozen=True)
class NoTraffic:
    """One rank sends nothing."""

    sent_bytes: int = 0
    formula: str = "nothing: one rank"


def main(world: World) -> None:
    """Train on one process."""
    if world.size != 1:
        raise InputError(
            f"gpt_serial.py runs on one rank, got {world.size}: start it with "
            "`python`, or use examples/gpt_tp.py"
        )
    defaults = TrainConfig(out=Path("runs/gpt_serial"))
    config = parse(world, "Train a language model on one process.", defaults)
    strategy = Strategy(
        mesh="one process",
        build=serial_model,
        model_group=world.comm,
        data_parallel=one_replica(world, config),
        traffic=lambda model, dp: NoTraffic(),
    )
    train(world, config, strategy)


if __name__ == "__main__":
    run(main)
