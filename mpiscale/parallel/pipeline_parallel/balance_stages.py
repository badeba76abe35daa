"""Blocks to stages so that the slowest stage is as fast as it can be.

A pipeline runs at the pace of its slowest stage, and the head's product with the whole
vocabulary can cost as much as several blocks. Consecutive parts of costs c are cut into
stages by dynamic programming over the prefix sums: the least maximum for the first j
parts in i stages is

    best[i][j] = min over k of  max(best[i - 1][k], c_{k + 1} + ... + c_j)

Source: D. Narayanan et al., "PipeDream", SOSP 2019 (arXiv:1806.03377), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpiscale.errors import InputError


def balanced_split(
    before: float, blocks: Sequence[float], after: float, stages: int
) -> list[int]:
    """Blocks of each stage; the first also has `before`, the last `after`.

    Args:
        before: cost of the embedding, in any unit; not negative.
        blocks: cost of each block.
        after: cost of final norm, head and loss.
        stages: how many; the first and last of several may get no block.

    Raises:
        InputError: if the stages between first and last can't all have a block.
    """
    layers = len(blocks)
    if max(stages - 2, 1) > layers:
        raise InputError(
            f"{layers} layers cannot fill {stages} pipeline stages: use at most "
            f"{layers + 2} stages (ranks x chunks), or more layers"
        )
    sums = [0.0, *accumulate(blocks)]

    def cost(stage: int, first: int, end: int) -> float:
        ends = (before if stage == 0 else 0) + (after if stage == stages - 1 else 0)
        return sums[end] - sums[first] + ends

    best = [(cost(0, 0, j), [j]) for j in range(layers + 1)]
    for stage in range(1, stages):
        least = 0 if stage == stages - 1 else 1
        best = [
            min(
                (max(best[k][0], cost(stage, k, j)), [*best[k][1], j - k])
                for k in range(j - least + 1)
            )
            if j >= least
            else (float("inf"), [])
            for j in range(layers + 1)
        ]
    return best[layers][1]
