"""`mpiscale draw`: a pipeline schedule's timeline, bubble, memory and messages."""

from __future__ import annotations

from pathlib import Path

from mpiscale.comm.trace import write_trace
from mpiscale.errors import InputError
from mpiscale.parallel.pipeline_parallel.draw_schedule import (
    Timeline,
    as_slices,
    as_text,
)
from mpiscale.parallel.pipeline_parallel.draw_schedule import (
    draw as draw_picture,
)
from mpiscale.parallel.pipeline_parallel.proof_sheet import prove
from mpiscale.parallel.pipeline_parallel.schedules import ScheduleName, make_schedule
from mpiscale.parallel.pipeline_parallel.simulate_schedule import Costs


def draw(
    schedule: ScheduleName = "1f1b",
    stages: int = 4,
    micro_batches: int = 8,
    chunks: int = 1,
    group: int | None = None,
    costs: str = "1,1,1,0",
    out: Path | None = None,
) -> None:
    """Show a pipeline schedule: who computes what when, and what that costs.

    Args:
        schedule: Which one.
        stages: Ranks of the pipeline, P.
        micro_batches: Micro-batches of a step, M.
        chunks: Stages of a rank, for interleaved_1f1b and looped_bfs.
        group: Micro-batches of a group, for interleaved_1f1b; default: P.
        costs: Of forward, input gradient, weight gradient, message: F,B,W,C.
        out: Also write a picture (.svg, .png, .pdf) or a trace for Perfetto (.json).
    """
    sheet = prove(
        make_schedule(schedule, stages, micro_batches, chunks, group), _costs(costs)
    )
    title = f"{schedule}, {stages} ranks, {micro_batches} micro-batches"
    if chunks > 1:
        title += f", {chunks} chunks"
    rate = 100 * sheet.bubble_rate
    timeline = Timeline(f"{title}: bubble {rate:.1f} %", sheet.schedule, sheet.spans)
    print(as_text(timeline))
    print(sheet.text())
    if out is None:
        return
    if out.suffix == ".json":
        write_trace(out, as_slices(timeline, "predicted"))
    else:
        draw_picture([timeline], out)
    print(f"wrote {out}")


def _costs(text: str) -> Costs:
    try:
        numbers = [float(part) for part in text.split(",")]
        if len(numbers) not in (3, 4) or min(numbers) < 0 or sum(numbers[:3]) == 0:
            raise ValueError
    except ValueError:
        raise InputError(
            f"--costs {text!r}: expected F,B,W or F,B,W,C, numbers not below 0, such "
            "as 1,1,1,0.1"
        ) from None
    return Costs(*numbers)
