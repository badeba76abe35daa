"""What a timed step leaves: a table, a JSON file, a picture."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpiscale.bench.step import Clock, Contestant, StepResult
from mpiscale.train.memory import MIB, memory_table

CLOCK_NAMES: dict[Clock, str] = {"wall_s": "wall time", "cpu_s": "CPU time"}
ENOUGH_PAIRS = 7


def step_report(result: StepResult) -> str:
    """The whole report, as printed."""
    parts = [_heading(result)]
    parts += [_table(result, clock) for clock in result.clocks]
    parts.append(_peaks(result))
    if result.memory:
        parts.append(memory_table([result.memory]))
    return "\n\n".join(parts)


def _heading(result: StepResult) -> str:
    here, pairs = result.machine, len(result.contestants[0].wall_s)
    lines = [
        f"shape     {result.shape}",
        f"machine   {here['cpu']}, {here['cpus']} CPUs allowed, load average "
        f"{here['load_average']:.1f} at the start",
        f"ranks     {result.ranks}, {result.threads} thread(s) each",
        f"steps     {pairs} of each, in turn; medians"
        + (f" (rough: fewer than {ENOUGH_PAIRS})" if pairs < ENOUGH_PAIRS else ""),
        f"removed   {', '.join(result.removed_variables)} from the environment",
    ]
    for one in result.contestants:
        lines.append(f"{one.name}: first loss {one.first_loss:.6f}")
        lines += [f"    {detail}" for detail in one.details]
    return "\n".join(lines)


def _table(result: StepResult, clock: Clock) -> str:
    head = ("ms/step", "tokens/s", "GFLOP/s", "of GEMM peak", "ratio")
    lines = [f"{CLOCK_NAMES[clock]:<18}" + "".join(f"{name:>14}" for name in head)]
    for one in result.contestants:
        row = summary(result, one)[clock]
        cells = (
            f"{1e3 * row['median_s']:,.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops_per_second'] / 1e9:,.1f}",
            f"{row['share_of_gemm_peak']:.1%}",
            f"{row['ratio']:.3f}",
        )
        lines.append(f"{one.name:<18}" + "".join(f"{cell:>14}" for cell in cells))
    lines.append(
        "ratio: its time over mpiscale's, median of the pairs; GEMM peak: "
        f"{result.gemm_peak(clock) / 1e9:,.1f} GFLOP/s"
    )
    return "\n".join(lines)


def _peaks(result: StepResult) -> str:
    head = ("peak MiB", "before model", "idle CPU")
    lines = [f"{'resident memory':<18}" + "".join(f"{name:>14}" for name in head)]
    for one in result.contestants:
        idle = sum(one.idle_cpu_s) / sum(one.wall_s)
        sizes = (one.peak_bytes, one.before_bytes)
        cells = "".join(f"{size / MIB:>14,.1f}" for size in sizes)
        lines.append(f"{one.name:<18}{cells}{idle:>14.1%}")
    lines.append(
        "idle CPU: taken between its steps, as a share of its steps' wall time"
    )
    return "\n".join(lines)


def summary(result: StepResult, one: Contestant) -> dict[Clock, dict[str, float]]:
    """What follows from the times of one contender, by clock."""
    rows: dict[Clock, dict[str, float]] = {}
    for clock in result.clocks:
        seconds = one.median_s(clock)
        flops = result.shape.step_flops / seconds
        rows[clock] = {
            "median_s": seconds,
            "tokens_per_second": result.shape.tokens / seconds,
            "flops_per_second": flops,
            "share_of_gemm_peak": flops / result.gemm_peak(clock),
            "ratio": statistics.median(result.ratios(one, clock)),
        }
    return rows


def as_json(result: StepResult) -> dict[str, Any]:
    """All that was measured, and for each contender what follows from it."""
    fields = asdict(result)
    for entry, one in zip(fields["contestants"], result.contestants, strict=True):
        entry["summary"] = summary(result, one)
    peaks = {clock: result.gemm_peak(clock) for clock in result.clocks}
    step_flops = result.shape.step_flops
    return fields | {"gemm_flops_per_second": peaks, "step_flops": step_flops}


def write_report(result: StepResult, folder: Path, name: str) -> list[str]:
    """Write NAME.json and NAME.png into `folder`; return what to tell the user."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(as_json(result), indent=2) + "\n")
    written = [f"wrote {path}"]
    if find_spec("matplotlib") is None:
        return [*written, "no picture: `pip install 'mpiscale[plot]'` draws it"]
    picture = folder / f"{name}.png"
    draw(result, picture)
    return [*written, f"wrote {picture}"]


def draw(result: StepResult, path: Path) -> None:
    """Bars: time of a step by each clock, and peak memory; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    times, memory = figure.subplots(1, 2)
    names = [one.name for one in result.contestants]
    width = 0.8 / len(result.clocks)
    for i, clock in enumerate(result.clocks):
        places = [
            k + (i - (len(result.clocks) - 1) / 2) * width for k in range(len(names))
        ]
        heights = [1e3 * one.median_s(clock) for one in result.contestants]
        bars = times.bar(places, heights, width * 0.95, label=CLOCK_NAMES[clock])
        times.bar_label(bars, fmt="%.0f")
    times.set_xticks(range(len(names)), names)
    times.set_ylabel("ms per step, median")
    times.margins(y=0.3)  # room for the legend
    times.legend(loc="upper right")
    before = [one.before_bytes / MIB for one in result.contestants]
    peak = [one.peak_bytes / MIB for one in result.contestants]
    memory.bar(names, peak, label="peak")
    memory.bar(names, before, label="before the model was built")
    memory.set_ylabel("resident memory, MiB")
    memory.margins(y=0.3)
    memory.legend(loc="upper right")
    figure.suptitle(
        f"{result.shape}; ranks: {result.ranks}, threads: {result.threads}", fontsize=9
    )
    figure.savefig(path)
