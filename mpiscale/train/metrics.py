"""What a run leaves and shows: metrics.jsonl, progress lines, a loss curve."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl; floats are written in full precision."""

    step: int  # counted from 1
    loss: float  # nats per token
    grad_norm: float  # before clipping
    lr: float
    bytes_sent: int  # by this rank, in this step
    tokens_per_second: float
    model_flops_per_second: float


class MetricsFile:
    """metrics.jsonl in the run's folder; that of an earlier run is kept, numbered."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            n = 1
            while (old := folder / f"metrics.{n}.jsonl").exists():
                n += 1
            self.path.rename(old)
        self._file: TextIO = self.path.open("x")

    def write(self, metrics: StepMetrics) -> None:
        """Append a line; it is on disk when this returns, so a kill loses no step."""
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class Progress:
    """One line per interval; in a terminal it also moves, with every step.

    Args:
        steps: of the whole run.
        every: steps between two lines that stay.
        moves: whether stdout is a terminal.
    """

    def __init__(self, steps: int, every: int, moves: bool) -> None:
        self.steps, self.every, self.moves = steps, every, moves
        self.started = time.monotonic()
        self._width = 0

    def show(self, metrics: StepMetrics) -> None:
        """Print what is due after this step."""
        stays = metrics.step % self.every == 0 or metrics.step in (1, self.steps)
        if not (stays or self.moves):
            return
        line = self._line(metrics)
        if self.moves:
            sys.stdout.write("\r" + line.ljust(self._width) + ("\n" if stays else ""))
            self._width = 0 if stays else len(line)
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def _line(self, m: StepMetrics) -> str:
        left = (time.monotonic() - self.started) / m.step * (self.steps - m.step)
        return (
            f"step {m.step:>{len(str(self.steps))}}/{self.steps}  loss {m.loss:.6f}  "
            f"lr {m.lr:.2e}  grad norm {m.grad_norm:.3f}  "
            f"{m.tokens_per_second:,.0f} tokens/s  "
            f"{m.model_flops_per_second / 1e9:.2f} GFLOP/s  ETA {duration(left)}"
        )


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03 or 2:03."""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def draw_loss_curve(
    losses: list[float], validation: float | None, path: Path, title: str
) -> None:
    """Write the loss over the steps as a PNG; needs the extra `plot` (matplotlib)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, linewidth=1.2, label="training")
    if validation is not None:
        axes.plot(
            [len(losses)], [validation], "o", label=f"validation {validation:.3f}"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
