"""A training run's settings: one dataclass, from the command line or a YAML file."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import tyro
import yaml

from mpiscale.backend import DType
from mpiscale.comm.world import World
from mpiscale.errors import InputError
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.models.llama import Llama, LlamaConfig

AllReduceName = Literal[
    "mpi",
    "ring",
    "recursive-doubling",
    "rabenseifner",
    "double-binary-tree",
    "hierarchical",
    "auto",
]


@dataclass(frozen=True)
class TrainConfig:
    """Flags shared by all training examples."""

    steps: int = 300
    """Training steps."""
    seed: int = 1
    """Of weights, order of the data, dropout and generated text."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of parameters and arithmetic."""
    data: Path | None = None
    """A text file or a folder of them; default: the source of Python's library."""
    cache: Path | None = None
    """Folder for prepared text; default: ~/.cache/mpiscale."""
    out: Path = Path("runs/example")
    """Folder for metrics.jsonl and the loss curve."""

    model: Literal["gpt", "llama"] = "gpt"
    """GPT-2 (learned positions, GELU) or Llama (RoPE, RMS norm, SwiGLU)."""
    layers: int = 2
    """Transformer blocks."""
    width: int = 128
    """Features of the residual stream."""
    heads: int = 8
    """Attention heads."""
    kv_heads: int | None = None
    """Key/value heads, a divisor of heads; default: as many as heads."""
    hidden: int | None = None
    """Features inside Llama's MLP; default: about 8/3 width."""
    vocab: int = 256
    """256: bytes; more: a byte-pair encoding of that size is trained on the data."""
    length: int = 128
    """Tokens in a sample."""
    batch: int = 16
    """Samples in the global batch of a step."""
    accumulate: int = 1
    """Micro-batches into which each rank cuts its samples of a step."""
    tied: bool = True
    """Whether the head uses the embedding's table."""
    dropout: float = 0.0
    """Probability of dropping an element of the residual branches (GPT)."""

    lr: float = 8e-3
    """Peak learning rate."""
    warmup: int = 50
    """Steps until the peak."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices."""
    clip: float = 1.0
    """Largest global gradient norm."""
    label_smoothing: float = 0.0
    """Share of the target spread over the whole vocabulary."""

    all_reduce: AllReduceName = "mpi"
    """Which algorithm sums over ranks: MPI's own, one of ours, or the cheapest."""
    topology: Path | None = None
    """For --all-reduce auto: what `mpiscale bench collectives` has measured."""
    debug_comm: bool = False
    """Compare collective calls, and explain hangs: who waits for whom, and where."""
    debug_timeout: float = 30.0
    """For --debug-comm: seconds without progress that count as a hang."""
    log_every: int = 20
    """Steps between two printed lines."""
    eval_batches: int = 8
    """Batches of the validation split used for the validation loss."""
    check_replicas: int = 0
    """Every so many steps compare what several ranks must hold alike; 0: never."""
    profile: Literal["memory"] | None = None
    """memory: say at the end what each rank's memory held."""
    trace: Path | None = None
    """Write the latest steps' timeline here, for https://ui.perfetto.dev."""
    sample: int = 160
    """Tokens of text generated at the end; 0: none."""
    temperature: float = 0.8
    """Of the generated text; 0 takes the most likely token."""

    @property
    def numpy_dtype(self) -> DType:
        """`dtype` as NumPy's."""
        return np.dtype(self.dtype)

    def check(self) -> None:
        """Refuse values that no run could use.

        Raises:
            InputError: names the flag, the value and what is expected.
        """
        at_least = {"steps": 1, "layers": 1, "width": 1, "heads": 1, "length": 1}
        at_least |= {
            "batch": 1,
            "accumulate": 1,
            "warmup": 0,
            "log_every": 1,
            "sample": 0,
            "eval_batches": 0,
            "check_replicas": 0,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise InputError(
                    f"--{flag} must be at least {least}, got {getattr(self, name)}"
                )
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise InputError(
                    f"--{flag} must be in [0, 1), got {getattr(self, name)}"
                )
        for name in ("lr", "clip", "debug_timeout"):
            flag = name.replace("_", "-")
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(
                    f"--{flag} must be positive and finite, got {getattr(self, name)}"
                )
        for name in ("temperature", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise InputError(
                    f"--{flag} must be at least 0, got {getattr(self, name)}"
                )
        if (self.all_reduce == "auto") != (self.topology is not None):
            raise InputError(
                "--all-reduce auto and --topology FILE go together; `mpirun -n 4 "
                "mpiscale bench collectives` writes the file"
            )
        if self.model == "llama" and self.dropout:
            raise InputError("--dropout is for --model gpt: Llama has none")
        if self.model == "gpt" and self.hidden is not None:
            raise InputError("--hidden is for --model llama: GPT-2's MLP is 4 width")

    def build_model(self, vocabulary: int) -> GPT | Llama:
        """The serial model; its parameters are shapes until they are materialised."""
        if self.model == "llama":
            return Llama(
                LlamaConfig(
                    vocabulary=vocabulary,
                    length=self.length,
                    layers=self.layers,
                    width=self.width,
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                    hidden=self.hidden or _llama_hidden(self.width),
                    tied=self.tied,
                    label_smoothing=self.label_smoothing,
                )
            )
        return GPT(
            GPTConfig(
                vocabulary=vocabulary,
                length=self.length,
                layers=self.layers,
                width=self.width,
                heads=self.heads,
                kv_heads=self.kv_heads,
                dropout=self.dropout,
                tied=self.tied,
                label_smoothing=self.label_smoothing,
            )
        )


def _llama_hidden(width: int) -> int:
    """8/3 width, rounded up to a multiple of 64: as many weights as GELU's 4 width."""
    return -(-8 * width // (3 * 64)) * 64


Config = TypeVar("Config", bound=TrainConfig)


def parse(
    world: World,
    description: str,
    defaults: Config,
    args: Sequence[str] | None = None,
) -> Config:
    """Settings from `--config FILE.yaml`, then from flags, which win.

    Rank 0 reads them and prints help or errors; all ranks return the same settings, or
    leave with the same exit code.
    """
    config: Config | None = None
    problem: int | str | None = None
    if world.rank == 0:
        try:
            config = _parse_here(description, defaults, args)
            config.check()
        except InputError as error:
            problem = str(error)
        except SystemExit as leaving:
            problem = leaving.code if isinstance(leaving.code, int) else 1
    config, problem = world.comm.bcast((config, problem))
    if isinstance(problem, str):
        raise InputError(problem)
    if config is None:
        sys.exit(problem)
    return config


def _parse_here(
    description: str, defaults: Config, args: Sequence[str] | None
) -> Config:
    finder = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, usage="--config FILE.yaml"
    )
    finder.add_argument("--config", type=Path)
    found, flags = finder.parse_known_args(args)
    if found.config is not None:
        flags = yaml_flags(found.config, type(defaults)) + flags
    text = f"{description}\n\n--config FILE.yaml sets any of these; flags win over it."
    return tyro.cli(type(defaults), default=defaults, args=flags, description=text)


def yaml_flags(path: Path, kind: type[TrainConfig] = TrainConfig) -> list[str]:
    """The settings in a YAML file as command-line flags.

    Raises:
        InputError: if there is no such file, it is no mapping, or a key is unknown.
    """
    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read --config {path}: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(
            f"--config {path} must hold `name: value` lines, got "
            f"{type(settings).__name__}"
        )
    known = [field.name for field in fields(kind)]
    flags: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {known}"
            raise InputError(f"--config {path}: unknown key {key!r}; {hint}")
        if not isinstance(value, (str, int, float, type(None))):
            raise InputError(
                f"--config {path}: {key} must be a single value, got {value!r}"
            )
        flags += _as_flag(name.replace("_", "-"), value)
    return flags


def _as_flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
