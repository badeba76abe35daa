"""1F1B (PipeDream-flush): after a warm-up one forward, one backward, in turn.

4 ranks, 8 micro-batches, F = 1, BW = 2:

    rank 0  F0F1F2F3            BW0 F4BW1 F5BW2 F6BW3 F7BW4   BW5   BW6   BW7
    rank 1    F0F1F2        BW0 F3BW1 F4BW2 F5BW3 F6BW4 F7BW5   BW6   BW7
    rank 2      F0F1    BW0 F2BW1 F3BW2 F4BW3 F5BW4 F6BW5 F7BW6   BW7
    rank 3        F0BW0 F1BW1 F2BW2 F3BW3 F4BW4 F5BW5 F6BW6 F7BW7

Bubble (P - 1)(F + B + W), as GPipe's. But a backward frees what a forward holds: stage
s has at most min(M, P - s) micro-batches in flight, whatever M is.

Source: D. Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML
2021 (arXiv:2006.09503), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiscale.parallel.pipeline_parallel.actions import Action, Kind


def one_forward_one_backward(
    rank: int, ranks: int, micro_batches: int
) -> Iterator[Action]:
    """The passes of `rank`, which holds stage `rank`."""
    warm_up = min(ranks - rank - 1, micro_batches)
    for m in range(warm_up):
        yield Action(Kind.F, rank, m)
    for m in range(micro_batches - warm_up):
        yield Action(Kind.F, rank, warm_up + m)
        yield Action(Kind.BW, rank, m)
    for m in range(micro_batches - warm_up, micro_batches):
        yield Action(Kind.BW, rank, m)
