"""`mpiscale bench collectives`, under mpirun: algorithms, MPI's own, and the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpiscale.errors import InputError

Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]


@dataclass(frozen=True)
class BenchCollectives:
    """Time all-reduce, reduce-scatter, all-gather and all-to-all by every algorithm.

    mpirun -n 4 mpiscale bench collectives

    Fits the cost model to this machine, times every algorithm beside MPI's own, and
    writes a topology file, which `--all-reduce auto --topology FILE` reads.
    """

    kinds: tuple[Kind, ...] = (
        "all-reduce",
        "reduce-scatter",
        "all-gather",
        "all-to-all",
    )
    """Which collectives."""
    smallest: int = 8
    """Bytes of the smallest size."""
    largest: int = 64 << 20
    """Bytes of the largest size."""
    factor: int = 8
    """From one size to the next."""
    repeats: int = 15
    """Timings of each small size; large ones are timed less often, at least 5 times."""
    out: Path = Path("runs/bench")
    """Folder for JSON, topology file and picture."""

    def run(self) -> None:
        """Measure on all ranks; rank 0 prints and writes."""
        # These start MPI: not before somebody wants to measure.
        from mpiscale.bench.collectives_run import measure
        from mpiscale.comm.world import World, run

        def main(world: World) -> None:
            self.check(world.size)
            measure(world, self.kinds, self.sizes(), self.repeats, self.out)

        run(main)

    def check(self, ranks: int) -> None:
        """Refuse what can't be measured.

        Raises:
            InputError: names the flag, the value and what is expected.
        """
        if not self.kinds:
            raise InputError("--kinds must name at least one collective")
        if not 1 <= self.smallest <= self.largest:
            raise InputError(
                f"sizes must be 1 <= --smallest <= --largest bytes, got "
                f"{self.smallest} and {self.largest}"
            )
        if self.factor < 2 or self.repeats < 1:
            raise InputError(
                "--factor must be at least 2 and --repeats at least 1, got "
                f"{self.factor} and {self.repeats}"
            )
        if ranks < 2:
            raise InputError(
                "one rank sends no messages: start it with "
                "`mpirun -n 4 mpiscale bench collectives`"
            )

    def sizes(self) -> list[int]:
        """From the smallest to the largest, which is always among them."""
        sizes = [self.smallest]
        while sizes[-1] * self.factor < self.largest:
            sizes.append(sizes[-1] * self.factor)
        return [*sizes, self.largest] if self.largest > sizes[-1] else sizes
