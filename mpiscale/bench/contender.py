"""A contender: a process that trains when it is told to, and sleeps in between.

It is told by lines of JSON on its stdin and answers each by one line on its stdout:

    {"do": "build", ...}           -> {"name", "details", "before_bytes"}
    {"do": "step", "number": k}    -> {"loss", "wall_s", "cpu_s", "idle_cpu_s",
                                       "peak_bytes"}
    {"do": "memory"}               -> a MemoryReport, or null
    {"do": "multiply"}             -> {"wall_s", "cpu_s"} of a matrix product

A blocking read takes no CPU time; what threads take that spin before they sleep is
reported as `idle_cpu_s`. The end of stdin ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mpiscale.bench.shapes import AdamWSettings, Shape
from mpiscale.train.memory import MemoryReport, peak_resident_bytes

T = TypeVar("T")
GEMM_SIZE = 1024  # of the product that measures the machine: 2 x 1024^3 operations
GEMM_FLOPS = 2 * GEMM_SIZE**3
GEMM_REPEATS = 8


@dataclass(frozen=True)
class Settings:
    """What a contender has to build.

    Attributes:
        weights: folder of the first values, one .npy a parameter; ours writes them.
        compile: whether PyTorch's model goes through torch.compile.
        memory: whether to find out what the graph keeps.
        ranks: among which the batch is cut.
    """

    shape: Shape
    threads: int
    weights: str
    optimizer: AdamWSettings = field(default_factory=AdamWSettings)
    compile: bool = False
    memory: bool = False
    ranks: int = 1

    @property
    def folder(self) -> Path:
        """`weights` as a path."""
        return Path(self.weights)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Settings:
        """Settings from what `asdict` made of them."""
        shape, optimizer = Shape(**message["shape"]), message["optimizer"]
        made = {"shape": shape, "optimizer": AdamWSettings(**optimizer)}
        return cls(**(message | made))


class Contender(Protocol):
    """A model and its optimizer in one library."""

    name: str
    details: list[str]  # versions and kernels, a line each

    def step(self, number: int) -> float:
        """Train on batch `number` = 1, 2, ...; return this rank's part of the loss."""

    def memory(self, before: int) -> MemoryReport | None:
        """Where the memory goes, if that was asked for and is known."""

    def product(self) -> Callable[[], object]:
        """A call that multiplies two float32 matrices [GEMM_SIZE, GEMM_SIZE]."""


class Session:
    """Answers messages; counts the CPU time between two steps as idle."""

    def __init__(self, build: Callable[[Settings], Contender]) -> None:
        self._build = build
        self._before = 0
        self._idle_since = 0.0

    def answer(self, message: dict[str, Any]) -> Any:
        """The reply to one message."""
        do = message.pop("do")
        if do == "build":
            return self._built(Settings.from_message(message))
        if do == "step":
            return self._step(message["number"])
        if do == "memory":
            report = self._contender.memory(self._before)
            return report and asdict(report)
        if do == "multiply":
            return best_of(GEMM_REPEATS, self._contender.product())
        raise ValueError(f"got do={do!r}, expected build, step, memory or multiply")

    def _built(self, settings: Settings) -> dict[str, Any]:
        self._before = peak_resident_bytes()
        self._contender = self._build(settings)
        self._idle_since = time.process_time()
        return {
            "name": self._contender.name,
            "details": self._contender.details,
            "before_bytes": self._before,
        }

    def _step(self, number: int) -> dict[str, float]:
        idle = time.process_time() - self._idle_since
        loss, took = timed(lambda: self._contender.step(number))
        self._idle_since = time.process_time()
        peak = peak_resident_bytes()
        return {"loss": loss, **took, "idle_cpu_s": idle, "peak_bytes": peak}


def timed(call: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What `call` returns, and its wall time and CPU time of all threads, in s."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return result, {"wall_s": wall, "cpu_s": cpu}


def best_of(repeats: int, call: Callable[[], object]) -> dict[str, float]:
    """The least wall time and the least CPU time of several calls, in s."""
    call()  # the first one packs, wakes threads, touches memory
    times = [timed(call)[1] for _ in range(repeats)]
    return {clock: min(took[clock] for took in times) for clock in times[0]}


def serve(build: Callable[[Settings], Contender]) -> None:
    """Answer until stdin ends; what the libraries print goes to stderr."""
    session = Session(build)
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            replies.write(json.dumps(session.answer(json.loads(line))) + "\n")
            replies.flush()
