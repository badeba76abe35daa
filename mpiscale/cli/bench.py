"""`mpiscale bench`: a training step or single kernels, measured on this machine."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import (
    OmitArgPrefixes,
    OmitSubcommandPrefixes,
    configure,
    subcommand,
)

from mpiscale.bench.attention import AttentionShape, measure_attention
from mpiscale.bench.conductor import ContenderError, clean_command, mpirun
from mpiscale.bench.contender import Settings
from mpiscale.bench.kernel_report import kernel_table, write_kernels
from mpiscale.bench.shapes import SHAPES, ShapeName
from mpiscale.bench.step import commands, measure_step
from mpiscale.bench.step_report import step_report, write_report
from mpiscale.cli.bench_collectives import BenchCollectives
from mpiscale.errors import InputError

OUT = Path("runs/bench")


@dataclass(frozen=True)
class BenchStep:
    """Time a training step of a GPT: forward, backward, AdamW, in float32.

    Each contender has a process of its own; their steps are taken in turn, A B A B.
    Refuses to report if they do not compute the same loss.

    a: 4 layers, width 256, 8 heads, 8 x 256 tokens, vocabulary 256.

    b: 6 layers, width 384, 6 heads, 16 x 256 tokens, vocabulary 256.

    c: 12 layers, width 768, 12 heads, 2 x 512 tokens, vocabulary 50304.
    """

    shape: ShapeName = "a"
    """Of model and batch."""
    vs: Literal["torch"] | None = None
    """Whom to compare with."""
    compile: bool = False
    """Put PyTorch's model through torch.compile."""
    ranks: int = 1
    """Ranks among which the batch is cut."""
    threads: int = 1
    """Of each contender; one is timed by CPU time too."""
    steps: int = 7
    """Timed steps of each, after 3 to warm up."""
    profile: Literal["memory"] | None = None
    """memory: report where ours goes."""
    out: Path = OUT
    """Folder for the JSON file and the picture."""

    def run(self) -> None:
        """Measure, print, write."""
        self.check()
        settings = Settings(
            SHAPES[self.shape],
            self.threads,
            weights="",
            compile=self.compile,
            memory=self.profile == "memory",
            ranks=self.ranks,
        )
        against_torch = self.vs == "torch"
        result = measure_step(
            settings, self.steps, commands(self.threads, against_torch, self.ranks)
        )
        print("\n" + step_report(result))
        name = f"step-{self.shape}-{self.threads}thread"
        if self.ranks > 1:
            name += f"-{self.ranks}ranks"
        for line in write_report(result, self.out, name):
            print(line)

    def check(self) -> None:
        """Refuse what can't be measured.

        Raises:
            InputError: names the flag, the value and what is expected.
        """
        if self.ranks < 1:
            raise InputError(f"--ranks must be at least 1, got {self.ranks}")
        if SHAPES[self.shape].batch % self.ranks:
            raise InputError(
                f"--ranks {self.ranks} does not divide the {SHAPES[self.shape].batch} "
                f"samples of shape {self.shape}"
            )
        if self.ranks > 1 and mpirun() is None:
            raise InputError("--ranks needs mpirun on the PATH: pip install mpich")
        if self.ranks > 1 and self.profile:
            raise InputError("--profile memory is for one rank: leave --ranks out")
        _check_at_least_1("steps", self.steps)
        _check_at_least_1("threads", self.threads)
        if self.compile and self.vs is None:
            raise InputError("--compile is PyTorch's: add --vs torch")
        _check_torch(self.vs)


@dataclass(frozen=True)
class BenchKernels:
    """Time each kernel beside its reference, PyTorch's op and the memory's speed."""

    shape: ShapeName = "a"
    """Whose sizes they get; see `mpiscale bench step --help`."""
    vs: Literal["torch"] | None = None
    """Whom to compare with."""
    threads: int = 1
    """One is timed by CPU time, more by wall time."""
    out: Path = OUT
    """Folder for the JSON file."""

    def run(self) -> None:
        """Measure in a process with a clean environment, print, write."""
        _check_at_least_1("threads", self.threads)
        _check_torch(self.vs)
        asked = {
            "shape": asdict(SHAPES[self.shape]),
            "threads": self.threads,
            "torch": self.vs == "torch",
        }
        command = clean_command(
            "mpiscale.bench.kernels", self.threads, json.dumps(asked)
        )
        print(f"timing each kernel at shape {self.shape}: {SHAPES[self.shape]}")
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ContenderError(f"{' '.join(command)} ended with {done.returncode}")
        measured = json.loads(done.stdout)
        print(kernel_table(measured))
        name = f"kernels-{self.shape}-{self.threads}thread"
        print(write_kernels(measured, self.out, name))


@dataclass(frozen=True)
class BenchAttention:
    """Time flash attention beside plain attention, and compare their memory."""

    length: int = 2048
    """Queries and keys."""
    heads: int = 12
    """Each of its own key and value."""
    head_size: int = 64
    """Features of a head."""
    batch: int = 1
    """Sequences."""
    threads: int = 1
    """One is timed by CPU time, more by wall time."""
    passes: int = 5
    """Timed passes, forward and backward, after one to warm up."""

    def run(self) -> None:
        """Measure and print."""
        for flag in ("length", "heads", "head_size", "batch", "threads", "passes"):
            _check_at_least_1(flag.replace("_", "-"), getattr(self, flag))
        shape = AttentionShape(self.batch, self.length, self.heads, self.head_size)
        print(f"causal attention, forward and backward, float32: {shape}")
        print(measure_attention(shape, self.threads, self.passes).table())


@configure(OmitArgPrefixes, OmitSubcommandPrefixes)
def bench(
    what: Annotated[BenchStep, subcommand("step")]
    | Annotated[BenchKernels, subcommand("kernels")]
    | Annotated[BenchAttention, subcommand("attention")]
    | Annotated[BenchCollectives, subcommand("collectives")],
) -> None:
    """Measure a training step, single kernels, or attention."""
    what.run()


def _check_at_least_1(flag: str, value: int) -> None:
    if value < 1:
        raise InputError(f"--{flag} must be at least 1, got {value}")


def _check_torch(vs: Literal["torch"] | None) -> None:
    if vs == "torch" and find_spec("torch") is None:
        raise InputError(
            "--vs torch needs PyTorch, which is not installed: `pip install torch`, "
            "or leave --vs out"
        )
