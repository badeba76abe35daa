"""What timed collectives leave: a table, a selection table, JSON, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mpiscale.bench.collectives import MPI_OWN, Point
from mpiscale.comm.cost_model import Level
from mpiscale.comm.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def machine_lines(topology: Topology) -> str:
    """The fitted numbers in the units in which people think of them."""
    machine = topology.machine
    lines = [f"{len(topology.nodes)} nodes: {topology.nodes}, {topology.mpi}"]
    levels = {"same node": machine.inside, "other node": machine.across}
    for name, level in levels.items():
        if level is not None:
            lines.append(f"{name:<11} {_level(level)}")
    gamma, share = machine.gamma_seconds_per_byte, machine.gamma_share_seconds_per_byte
    lines.append(
        f"addition    {1e-9 / gamma:.2f} GB/s by one rank alone, "
        f"{1e-9 / share:.2f} GB/s by all of a node"
    )
    return "\n".join(lines)


def _level(level: Level) -> str:
    rates = [
        f"{1e-9 / slowness:.2f} GB/s" if slowness else "beyond measure"
        for slowness in (level.beta_seconds_per_byte, level.share_seconds_per_byte)
    ]
    return (
        f"alpha {1e6 * level.alpha_seconds:.1f} us, a message alone {rates[0]}, "
        f"all messages of a node {rates[1]}"
    )


def table(points: Sequence[Point]) -> str:
    """A line for each algorithm and size, sizes together."""
    lines = []
    for kind, of_kind in groupby(points, key=lambda point: point.kind):
        lines += [
            f"{kind}, {points[0].ranks} ranks, float32",
            f"{'bytes':>11}  {'algorithm':<19}{'time us':>11}{'algbw GB/s':>12}"
            f"{'busbw GB/s':>12}{'vs mpi':>8}{'model us':>11}{'time/model':>11}",
        ]
        for _, same_size in groupby(of_kind, key=lambda point: point.nbytes):
            group = list(same_size)
            own = next(point.seconds for point in group if point.algorithm == MPI_OWN)
            lines += [_row(point, own) for point in group]
        lines.append("")
    lines.append(
        "vs mpi: MPI's own time over the algorithm's: above 1 the algorithm is faster"
    )
    return "\n".join(lines)


def _row(point: Point, own: float) -> str:
    model = point.model_seconds
    last = f"{'-':>11}{'-':>11}"
    if model is not None:
        last = f"{1e6 * model:>11,.1f}{point.seconds / model:>11.2f}"
    return (
        f"{point.nbytes:>11,}  {point.algorithm:<19}{1e6 * point.seconds:>11,.1f}"
        f"{point.algbw / 1e9:>12.3f}{point.busbw / 1e9:>12.3f}"
        f"{own / point.seconds:>8.2f}{last}"
    )


def selection(points: Sequence[Point]) -> str:
    """For every size: the cheapest by the model, and the fastest that was measured."""
    lines = [f"{'kind':<15}{'bytes':>11}  {'by the model':<20}{'measured':<20}"]
    for (kind, nbytes), same in groupby(points, key=lambda p: (p.kind, p.nbytes)):
        ours = [(p, p.model_seconds) for p in same if p.model_seconds is not None]
        by_model = min(ours, key=lambda pair: pair[1])[0]
        fastest = min(ours, key=lambda pair: pair[0].seconds)[0]
        lines.append(
            f"{kind:<15}{nbytes:>11,}  {by_model.algorithm:<20}{fastest.algorithm:<20}"
        )
    return "\n".join(lines)


def write(points: Sequence[Point], topology: Topology, folder: Path) -> list[str]:
    """Write collectives.json, topology.json, a picture; return what to tell."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "collectives.json"
    rows = [
        asdict(point) | {"algbw": point.algbw, "busbw": point.busbw} for point in points
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n")
    topology.write(folder / "topology.json")
    written = [f"wrote {path}", f"wrote {folder / 'topology.json'}"]
    if find_spec("matplotlib") is None:
        return [*written, "no picture: `pip install 'mpiscale[plot]'` draws it"]
    picture = folder / "collectives.png"
    draw(points, topology, picture)
    return [*written, f"wrote {picture}"]


def draw(points: Sequence[Point], topology: Topology, path: Path) -> None:
    """Time over size, log-log, a panel a kind; dashed: the model. Needs matplotlib."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(point.kind for point in points))
    columns = min(2, len(kinds))
    rows = -(-len(kinds) // columns)
    figure = Figure(figsize=(6 * columns, 4.4 * rows), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, kind in zip(panels, kinds, strict=False):
        _draw_kind(panel, [point for point in points if point.kind == kind])
        panel.set_title(kind)
    figure.suptitle(
        f"{points[0].ranks} ranks on {len(topology.nodes)} node(s), {topology.mpi}; "
        "points: measured, dashed: alpha-beta-gamma model",
        fontsize=9,
    )
    figure.savefig(path)


def _draw_kind(panel: Axes, points: Sequence[Point]) -> None:
    for i, name in enumerate(dict.fromkeys(point.algorithm for point in points)):
        line = [point for point in points if point.algorithm == name]
        sizes = [point.nbytes for point in line]
        colour = "black" if name == MPI_OWN else f"C{i - 1}"
        times = [1e6 * point.seconds for point in line]
        panel.loglog(sizes, times, "o-", color=colour, label=name, ms=3.5, lw=1)
        modelled = [1e6 * p.model_seconds for p in line if p.model_seconds is not None]
        if modelled:
            panel.loglog(sizes, modelled, "--", color=colour, lw=1, alpha=0.7)
    panel.set_xlabel("bytes")
    panel.set_ylabel("us")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
