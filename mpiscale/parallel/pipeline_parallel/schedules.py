"""The schedules by name: the placement of stages, the passes, then the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, cast, get_args

from mpiscale.errors import InputError
from mpiscale.parallel.pipeline_parallel.actions import (
    Action,
    Bidirectional,
    Loop,
    Schedule,
    StageMap,
    VShape,
)
from mpiscale.parallel.pipeline_parallel.insert_communication import (
    insert_communication,
)
from mpiscale.parallel.pipeline_parallel.schedule_1f1b import one_forward_one_backward
from mpiscale.parallel.pipeline_parallel.schedule_dualpipe import dualpipe, dualpipe_v
from mpiscale.parallel.pipeline_parallel.schedule_forward_only import forward_only
from mpiscale.parallel.pipeline_parallel.schedule_gpipe import gpipe
from mpiscale.parallel.pipeline_parallel.schedule_interleaved_1f1b import (
    interleaved_1f1b,
)
from mpiscale.parallel.pipeline_parallel.schedule_looped_bfs import looped_bfs
from mpiscale.parallel.pipeline_parallel.schedule_zb_v import zb_v
from mpiscale.parallel.pipeline_parallel.schedule_zero_bubble import zb_h1, zb_h2
from mpiscale.parallel.pipeline_parallel.verify_schedule import verify

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "dualpipe",
    "dualpipe_v",
]
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
LOOPED = ("interleaved_1f1b", "looped_bfs")  # have any number of chunks


def make_schedule(
    name: ScheduleName,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    group: int | None = None,
) -> Schedule:
    """A schedule with its messages, verified.

    Args:
        name: which one.
        ranks: P, of the pipeline.
        micro_batches: M of a step; any number, also fewer than ranks.
        chunks: v, stages of a rank, for those that loop over the ranks.
        group: micro-batches that pass a chunk before the next chunk's turn, for
            interleaved 1F1B; default: P.

    Raises:
        InputError: if the schedule has no such chunks or group.
    """
    _check(name, ranks, micro_batches, chunks, group)
    stage_map = stage_map_of(name, ranks, micro_batches, chunks)
    passes = _passes(name, stage_map, micro_batches, chunks, group or ranks)
    actions = tuple(tuple(passes(rank)) for rank in range(ranks))
    schedule = insert_communication(Schedule(name, stage_map, micro_batches, actions))
    verify(schedule)
    return schedule


def forward_schedule(training: Schedule, micro_batches: int) -> Schedule:
    """Forward passes only, with stages placed as in `training`."""
    stage_map = training.stage_map
    if isinstance(stage_map, Bidirectional):
        stage_map = Bidirectional(stage_map.ranks, down=(micro_batches + 1) // 2)
    actions = tuple(
        tuple(forward_only(rank, stage_map, micro_batches))
        for rank in range(training.ranks)
    )
    passes = Schedule("forward only", stage_map, micro_batches, actions, trains=False)
    schedule = insert_communication(passes)
    verify(schedule)
    return schedule


def stage_map_of(
    name: ScheduleName, ranks: int, micro_batches: int, chunks: int
) -> StageMap:
    """Which rank holds which stage."""
    if name in ("zb_v", "dualpipe_v"):
        return VShape(ranks)
    if name == "dualpipe":
        return Bidirectional(ranks, down=(micro_batches + 1) // 2)
    return Loop(ranks, chunks)


def _passes(
    name: ScheduleName,
    stage_map: StageMap,
    micro_batches: int,
    chunks: int,
    group: int,
) -> Callable[[int], Iterator[Action]]:
    """rank -> its passes"""
    p, m = stage_map.ranks, micro_batches
    passes: dict[ScheduleName, Callable[[int], Iterator[Action]]] = {
        "gpipe": lambda rank: gpipe(rank, m),
        "1f1b": lambda rank: one_forward_one_backward(rank, p, m),
        "interleaved_1f1b": lambda rank: interleaved_1f1b(rank, p, m, chunks, group),
        "looped_bfs": lambda rank: looped_bfs(rank, p, m, chunks),
        "zb_h1": lambda rank: zb_h1(rank, p, m),
        "zb_h2": lambda rank: zb_h2(rank, p, m),
        "zb_v": lambda rank: zb_v(rank, p, m),
        "dualpipe": lambda rank: dualpipe(rank, cast(Bidirectional, stage_map), m),
        "dualpipe_v": lambda rank: dualpipe_v(rank, cast(VShape, stage_map), m),
    }
    return passes[name]


def _check(
    name: str, ranks: int, micro_batches: int, chunks: int, group: int | None
) -> None:
    if name not in NAMES:
        raise InputError(f"there is no schedule {name!r}; known: {', '.join(NAMES)}")
    for what, value in (
        ("ranks", ranks),
        ("micro-batches", micro_batches),
        ("chunks", chunks),
        ("group", 1 if group is None else group),
    ):
        if value < 1:
            raise InputError(f"a pipeline needs at least 1 for {what}, got {value}")
    if chunks > 1 and name not in LOOPED:
        raise InputError(
            f"schedule {name!r} has no --chunks, got {chunks}: use 1, or one of "
            f"{', '.join(LOOPED)}"
        )
    if group is None:
        return
    if name != "interleaved_1f1b":
        raise InputError(f"schedule {name!r} has no --group: interleaved_1f1b has")
    least = min(ranks, micro_batches)
    if not least <= group <= micro_batches:
        raise InputError(
            f"--group {group}: expected {least} ... {micro_batches}; a group must fill "
            f"the {ranks} ranks, or hold all {micro_batches} micro-batches"
        )
