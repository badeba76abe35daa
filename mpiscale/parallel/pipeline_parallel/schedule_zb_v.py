"""ZB-V: zero bubble with the memory of 1F1B, by two stages a rank in a V.

Rank r holds stage r on the way down and stage 2 P - 1 - r on the way up (`VShape`), so
the first rank also ends the pipeline, and its backward begins at once. With F = B = W
there is no bubble but for filling and draining, and no rank holds more than P
micro-batches' activations (2 P halves).

In the order of time, on rank r:

    2 (P - r) - 1 times   F down
    r times               F up, F down
    P - r times           F up, B up, W up
    until all forwards    F down, B down, W down, F up, B up, W up
    r times               B down, B up
    P - r times           B down, W down
    the rest              W up, W down

The order is that of M >= 2 P - 1 micro-batches; with fewer, those that do not exist are
left out of it. What remains keeps every order that it depends on.

Source: P. Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241),
section 6; the order with F = B = W as torch.distributed.pipelining has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from mpiscale.parallel.pipeline_parallel.actions import Action, Kind

Way = Literal["down", "up"]


def zb_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """The passes of `rank`, which holds the stages rank and 2 P - 1 - rank."""
    stage = {"down": rank, "up": 2 * ranks - 1 - rank}
    done: Counter[tuple[Kind, Way]] = Counter()
    for kind, way in _passes(rank, ranks, max(micro_batches, 2 * ranks - 1)):
        m = done[kind, way]
        done[kind, way] += 1
        if m < micro_batches:
            yield Action(kind, stage[way], m)


def _passes(rank: int, ranks: int, enough: int) -> Iterator[tuple[Kind, Way]]:
    """(kind, way); the k-th of a sort is of micro-batch k."""
    last = ranks - rank
    for _ in range(2 * last - 1):
        yield Kind.F, "down"
    for _ in range(rank):
        yield Kind.F, "up"
        yield Kind.F, "down"
    for _ in range(last):
        yield from ((Kind.F, "up"), (Kind.B, "up"), (Kind.W, "up"))
    ahead = 2 * last - 1 + rank  # forwards down so far
    for k in range(enough - last - rank):
        if ahead + k < enough:
            yield Kind.F, "down"
        yield from ((Kind.B, "down"), (Kind.W, "down"))
        yield from ((Kind.F, "up"), (Kind.B, "up"), (Kind.W, "up"))
    for _ in range(rank):
        yield from ((Kind.B, "down"), (Kind.B, "up"))
    for _ in range(last):
        yield from ((Kind.B, "down"), (Kind.W, "down"))
    for _ in range(rank):
        yield Kind.W, "up"
    for _ in range(rank):
        yield Kind.W, "down"
