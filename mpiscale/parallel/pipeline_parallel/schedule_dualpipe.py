"""DualPipe and DualPipeV: two streams of micro-batches, forward beside backward.

DualPipe (`Bidirectional`) holds the model twice, and feeds half of the micro-batches in
at either end: rank r has stage r of one stream and stage P - 1 - r of the other. In the
middle of the step a forward of one stream stands next to a backward of the other, so
that one computes while the other's messages travel. Weight gradients are put off where
that shortens the ends.

DualPipeV folds the pipeline instead (`VShape`): the second stream is the way back up,
and nothing is held twice. Rank r of P ranks then does what ranks r and 2 P - 1 - r of
DualPipe do. So one order serves both; on "half rank" h of H it is

    2 (H - h - 1) times         F a                       a: the stream that begins here
    h + 1 times                 F a, F b                  b: the other one
    H - h - 1 times             B b, W b, F b
    n - 2 H + h + 1 times       F a, BW b, F b, BW a      n: micro-batches a stream
    H - h - 1 times             BW b, F b, BW a
    h + 1 times                 BW b, BW a;  the second half of them as B, its W later
    H - h - 1 times             W, B a
    h + 1 times                 W

where W takes the oldest B whose W is missing. It is the order of n >= 2 H; with fewer
micro-batches those that do not exist are left out.

Bubble (P / 2 - 1)(F + BW - 3 W + what F and BW do not overlap); activations P + 1.

Source: DeepSeek-V3, 2024 (arXiv:2412.19437), section 3.2.1 and table 2; deepseek-ai/
DualPipe on GitHub; for the V: sail-sg, "Cut-in-half", 2025.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from mpiscale.parallel.pipeline_parallel.actions import (
    Action,
    Bidirectional,
    Kind,
    VShape,
)

Stream = Literal["a", "b"]


class Pass(NamedTuple):
    """One pass of micro-batch `m` of a stream."""

    kind: Kind
    stream: Stream
    m: int


def dualpipe(
    rank: int, stage_map: Bidirectional, micro_batches: int
) -> Iterator[Action]:
    """The passes of `rank`, which holds the stages rank and P - 1 - rank."""
    ranks, down = stage_map.ranks, stage_map.down
    half, half_ranks = min(rank, ranks - 1 - rank), (ranks + 1) // 2
    goes_down = (rank, range(down))  # a stream's stage on this rank, its micro-batches
    goes_up = (ranks - 1 - rank, range(down, micro_batches))
    a, b = (goes_down, goes_up) if rank == half else (goes_up, goes_down)
    for kind, stream, m in _passes(half, half_ranks, max(down, 2 * half_ranks)):
        stage, numbers = a if stream == "a" else b
        if m < len(numbers):
            yield Action(kind, stage, numbers[m])


def dualpipe_v(rank: int, stage_map: VShape, micro_batches: int) -> Iterator[Action]:
    """The passes of `rank`, which holds the stages rank and 2 P - 1 - rank."""
    ranks = stage_map.ranks
    stages = {"a": rank, "b": 2 * ranks - 1 - rank}
    for kind, stream, m in _passes(rank, ranks, max(micro_batches, 2 * ranks)):
        if m < micro_batches:
            yield Action(kind, stages[stream], m)


def _passes(half: int, half_ranks: int, n: int) -> Iterator[Pass]:
    """Half rank `half` of `half_ranks`, `n` micro-batches a stream."""
    count: Counter[tuple[Kind, Stream]] = Counter()
    missing: deque[tuple[Stream, int]] = deque()  # passes whose W is put off
    for kind, stream in _order(half, half_ranks, n):
        if kind is Kind.W:
            yield Pass(kind, *missing.popleft())
            continue
        forward = kind is Kind.F
        m = count[Kind.F if forward else Kind.BW, stream]
        count[Kind.F if forward else Kind.BW, stream] += 1
        yield Pass(kind, stream, m)
        if kind is Kind.B:
            missing.append((stream, m))


def _order(h: int, half_ranks: int, n: int) -> Iterator[tuple[Kind, Stream]]:
    """The table above, line by line; of W the stream is found in the order of B."""
    before = half_ranks - h - 1
    for _ in range(2 * before):
        yield Kind.F, "a"
    for _ in range(h + 1):
        yield from ((Kind.F, "a"), (Kind.F, "b"))
    for _ in range(before):
        yield from ((Kind.B, "b"), (Kind.W, "b"), (Kind.F, "b"))
    for _ in range(n - 2 * half_ranks + h + 1):
        yield from ((Kind.F, "a"), (Kind.BW, "b"), (Kind.F, "b"), (Kind.BW, "a"))
    for _ in range(before):
        yield from ((Kind.BW, "b"), (Kind.F, "b"), (Kind.BW, "a"))
    for k in range(2 * (h + 1)):  # the last h + 1 of them without W
        yield Kind.B if k > h else Kind.BW, "a" if k % 2 else "b"
    for _ in range(before):
        yield from ((Kind.W, "a"), (Kind.B, "a"))
    for _ in range(h + 1):
        yield Kind.W, "a"
