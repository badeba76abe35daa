"""A schedule's timeline as text, as a picture, and as a trace.

Text (one column is the shortest pass; every pass is as wide as it is long):

    rank 0 |F0 F1 F2 F3 .  .  .  B0 ...

Pictures need matplotlib (`pip install 'mpiscale[plot]'`). Forwards are blue, backwards
green (with weight gradients teal), weight gradients orange; a rank's later stages are
darker.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpiscale.comm.trace import Slice
from mpiscale.errors import InputError
from mpiscale.parallel.pipeline_parallel.actions import Kind, Schedule
from mpiscale.parallel.pipeline_parallel.simulate_schedule import Span, passes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_COLUMNS = 400
PAUSE = "\0"  # for the rest of a pass: blank, but not idle
COLORS = {
    Kind.F: ("#9ecae1", "#3182bd"),
    Kind.B: ("#a1d99b", "#31a354"),
    Kind.BW: ("#8dd3c7", "#1b9e8a"),
    Kind.W: ("#fdd0a2", "#e6750d"),
}
MEANING = {
    Kind.F: "F forward",
    Kind.B: "B gradient of the input",
    Kind.BW: "BW backward, both",
    Kind.W: "W gradient of the weights",
}


class Timeline(NamedTuple):
    """Something to draw: its title, and when each pass ran or is to run."""

    title: str
    schedule: Schedule
    spans: Sequence[Span]
    unit: str = "time, in units of the costs"


def as_text(timeline: Timeline) -> str:
    """Rows of ranks; a dot is idle time, an apostrophe a rank's second stage."""
    schedule, spans = timeline.schedule, list(timeline.spans)
    lasting = [s.end - s.start for s in spans if s.end > s.start]
    if not lasting:
        raise InputError("nothing to draw: all costs are 0")
    unit, end = min(lasting), max(s.end for s in spans)
    cell = 3 + len(str(schedule.micro_batches - 1))
    width = round(end / unit) * cell
    if width > MOST_COLUMNS * cell:
        raise InputError(
            f"{width} columns of text are too wide to read: the shortest pass is 1/"
            f"{end / unit:.0f} of the step. Write a picture, or give costs nearer to "
            "each other"
        )
    lines = [timeline.title]
    for rank in range(schedule.ranks):
        text = [" "] * width
        for span in passes_of(spans, rank):
            first = round(span.start / unit * cell)
            room = max(round(span.end / unit * cell) - first, 1)
            text[first : first + room] = _label(schedule, span).ljust(room, PAUSE)[
                :room
            ]
        row = "".join(text).replace(" " * cell, " .".ljust(cell))
        lines.append(f"rank {rank:<2}|" + row.replace(PAUSE, " ").rstrip())
    return "\n".join(lines)


def _label(schedule: Schedule, span: Span) -> str:
    kind, stage, m = span.action
    chunk = schedule.stage_map.stages_of(span.rank).index(stage)
    return f"{kind.value}{m}" + "'" * chunk


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """One picture, timelines below each other on one time axis; SVG, PNG or PDF.

    Raises:
        InputError: if matplotlib is missing or the file's type is unknown to it.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "pictures need matplotlib: pip install 'mpiscale[plot]'"
        ) from None
    end = max(span.end for timeline in timelines for span in timeline.spans)
    rows = sum(t.schedule.ranks for t in timelines)
    figure = Figure(
        (12, 1.0 + 0.35 * rows + 0.7 * len(timelines)), layout="constrained"
    )
    axes = figure.subplots(
        len(timelines),
        sharex=True,
        squeeze=False,
        height_ratios=[t.schedule.ranks for t in timelines],
    )
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw_one(axis, timeline, end)
    axes[-1, 0].set_xlabel(timelines[-1].unit)
    handles, labels = _legend(timelines)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with rc_context({"svg.hashsalt": "mpiscale", "svg.fonttype": "none"}):
            dated = {"Date": None} if path.suffix == ".svg" else {}  # always the same
            figure.savefig(path, dpi=150, metadata=dated)
    except ValueError as error:
        raise InputError(f"cannot write {path}: {error}") from None


def _draw_one(axis: Axes, timeline: Timeline, end: float) -> None:
    schedule = timeline.schedule
    for rank in range(schedule.ranks):
        stages = schedule.stage_map.stages_of(rank)
        for span in passes_of(list(timeline.spans), rank):
            shade = stages.index(span.action.stage) > 0
            length = span.end - span.start
            axis.barh(
                rank,
                length,
                left=span.start,
                height=0.86,
                color=COLORS[span.action.kind][shade],
                edgecolor="white",
                linewidth=0.5,
            )
            if length > end / 90:
                axis.text(
                    span.start + length / 2,
                    rank,
                    str(span.action.micro_batch),
                    ha="center",
                    va="center",
                    fontsize=7,
                )
    axis.set_title(timeline.title, fontsize=10, loc="left")
    axis.set_yticks(range(schedule.ranks), [f"rank {r}" for r in range(schedule.ranks)])
    axis.invert_yaxis()
    axis.set_xlim(0, end)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)


def _legend(timelines: Sequence[Timeline]) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    used = {s.action.kind for t in timelines for s in t.spans}
    kinds = [kind for kind in MEANING if kind in used]
    return [Patch(color=COLORS[k][0]) for k in kinds], [MEANING[k] for k in kinds]


def as_slices(timeline: Timeline, process: str, offset: float = 0.0) -> list[Slice]:
    """For a trace: each rank is `process`, rank r; times in seconds."""
    return [
        Slice(
            f"{process}, rank {span.rank}",
            "passes",
            _label(timeline.schedule, span),
            span.start + offset,
            span.end + offset,
            {"stage": span.action.stage, "micro-batch": span.action.micro_batch},
        )
        for rank in range(timeline.schedule.ranks)
        for span in passes_of(list(timeline.spans), rank)
    ]
