"""Time a training step of each contender, in turn; refuse if they do not agree."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mpiscale.bench.conductor import (
    REMOVED_VARIABLES,
    ContenderProcess,
    alternate,
    clean_command,
    contenders,
    mpirun,
)
from mpiscale.bench.contender import GEMM_FLOPS, Settings
from mpiscale.bench.machine import machine
from mpiscale.bench.shapes import Shape
from mpiscale.bench.start import ON_RANKS
from mpiscale.train.memory import MemoryReport

Clock = Literal["wall_s", "cpu_s"]
OURS = "mpiscale.bench.mpiscale_gpt"
TORCH = "mpiscale.bench.torch_gpt"
WARM_UP_STEPS = 3
LOSS_TOLERANCE = 1e-4  # relative: float32 sums in another order
PRODUCT_ROUNDS = 3
PAUSE_S = 0.05


class DisagreementError(RuntimeError):
    """The contenders do not compute the same thing: their times mean nothing."""


@dataclass(frozen=True)
class Contestant:
    """What was measured of one contender; lists hold a value a timed step.

    Attributes:
        idle_cpu_s: CPU time that it took before each step, while the others worked.
        before_bytes: peak resident memory before the model was built.
        product_wall_s: least time of a product of two 1024 x 1024 matrices.
    """

    name: str
    details: list[str]
    first_loss: float
    losses: list[float]
    wall_s: list[float]
    cpu_s: list[float]
    idle_cpu_s: list[float]
    peak_bytes: int
    before_bytes: int
    product_wall_s: float
    product_cpu_s: float

    def median_s(self, clock: Clock) -> float:
        """The median time of a step."""
        return statistics.median(getattr(self, clock))


@dataclass(frozen=True)
class StepResult:
    """Everything that was measured; the first contender is ours."""

    shape: Shape
    threads: int
    ranks: int
    contestants: list[Contestant]
    memory: MemoryReport | None
    machine: dict[str, Any]
    removed_variables: tuple[str, ...] = REMOVED_VARIABLES

    @property
    def clocks(self) -> list[Clock]:
        """The clocks that mean something: CPU time only where one thread does all.

        CPU time does not count what other processes take from this one; with several
        threads it does not show how well the work is shared out.
        """
        alone = self.threads == self.ranks == 1
        return ["wall_s", "cpu_s"] if alone else ["wall_s"]

    def ratios(self, other: Contestant, clock: Clock) -> list[float]:
        """`other`'s time over ours, pair by pair; above 1 we are faster."""
        ours = getattr(self.contestants[0], clock)
        theirs = getattr(other, clock)
        return [b / a for a, b in zip(ours, theirs, strict=True)]

    def gemm_peak(self, clock: Clock) -> float:
        """FLOP/s of the better library's product of 1024 x 1024 matrices, on all ranks.

        Timed on one rank while the others sleep.
        """
        return (
            self.ranks
            * GEMM_FLOPS
            / min(getattr(c, f"product_{clock}") for c in self.contestants)
        )


def measure_step(
    settings: Settings,
    steps: int,
    commands: Sequence[Sequence[str]],
    say: Callable[[str], None] = print,
) -> StepResult:
    """Build all contenders, warm them up, and time `steps` steps of each in turn.

    Args:
        settings: for all of them; `weights` is set here.
        steps: timed steps of each.
        commands: that start the contenders, ours first: it writes the weights.
        say: is told what happens next; it may take minutes.

    Raises:
        DisagreementError: if the losses of the first step differ by more than 1e-4.
        ContenderError: if a contender fails.
    """
    here = machine()
    with tempfile.TemporaryDirectory() as weights, contenders(commands) as processes:
        message = asdict(replace(settings, weights=weights))
        say("building the models")
        built = [process.ask(do="build", **message) for process in processes]
        names = [reply["name"] for reply in built]
        say(f"warming up: {WARM_UP_STEPS} steps of each")
        first = alternate(processes, _steps(1, 1))
        check_same_loss(names, [replies[0]["loss"] for replies in first])
        alternate(processes, _steps(2, WARM_UP_STEPS - 1))
        say(f"timing: {steps} steps of each, in turn")
        timed = alternate(processes, _steps(WARM_UP_STEPS + 1, steps), PAUSE_S)
        memory = processes[0].ask(do="memory")
        products = _products(processes)
    contestants = [
        _contestant(*parts) for parts in zip(built, first, timed, products, strict=True)
    ]
    report = MemoryReport(**memory) if memory else None
    return StepResult(
        settings.shape, settings.threads, settings.ranks, contestants, report, here
    )


def commands(threads: int, against_torch: bool, ranks: int = 1) -> list[list[str]]:
    """The commands that start our contender and, if wanted, PyTorch's."""
    modules = [OURS, TORCH] if against_torch else [OURS]
    if ranks == 1:
        return [clean_command(module, threads) for module in modules]
    launcher = [mpirun() or "mpirun", "-n", str(ranks)]
    return [
        [*launcher, *clean_command(module, threads, ON_RANKS)] for module in modules
    ]


def check_same_loss(names: Sequence[str], losses: Sequence[float]) -> None:
    """Refuse contenders whose first losses differ.

    Raises:
        DisagreementError: names the losses.
    """
    for name, loss in zip(names, losses, strict=True):
        if not abs(loss - losses[0]) <= LOSS_TOLERANCE * abs(losses[0]):  # NaN too
            raise DisagreementError(
                f"loss of the first step is {losses[0]:.7g} in {names[0]} and "
                f"{loss:.7g} in {name}, expected the same to {LOSS_TOLERANCE:g} "
                "relative: they do not compute the same thing, so nothing is reported. "
                "Find the difference first"
            )


def _steps(first: int, count: int) -> list[dict[str, Any]]:
    return [{"do": "step", "number": k} for k in range(first, first + count)]


def _products(processes: Sequence[ContenderProcess]) -> list[list[dict[str, float]]]:
    return alternate(processes, [{"do": "multiply"}] * PRODUCT_ROUNDS, PAUSE_S)


def _contestant(
    built: dict[str, Any],
    first: list[dict[str, float]],
    timed: list[dict[str, float]],
    products: list[dict[str, float]],
) -> Contestant:
    return Contestant(
        name=built["name"],
        details=built["details"],
        first_loss=first[0]["loss"],
        losses=[reply["loss"] for reply in timed],
        wall_s=[reply["wall_s"] for reply in timed],
        cpu_s=[reply["cpu_s"] for reply in timed],
        idle_cpu_s=[reply["idle_cpu_s"] for reply in timed],
        peak_bytes=int(timed[-1]["peak_bytes"]),
        before_bytes=built["before_bytes"],
        product_wall_s=min(reply["wall_s"] for reply in products),
        product_cpu_s=min(reply["cpu_s"] for reply in products),
    )
