"""Looped breadth-first pipeline: several chunks a rank, all micro-batches through each.

Rank r holds the stages r, P + r, 2 P + r, ... (`Loop`). 2 ranks, 2 chunks, 3
micro-batches; F0' is of the second chunk:

    rank 0  F0 F1 F2 F0'F1'F2'       BW0'BW1'BW2'BW0 BW1 BW2
    rank 1     F0 F1 F2 F0'F1'F2'BW0'BW1'BW2'BW0 BW1 BW2

Bubble (P - 1)(F + B + W) / v for v chunks, when M >= P; memory as GPipe's, which it is
for v = 1. All micro-batches pass a chunk one after the other, so its weights are
gathered (ZeRO-3) and its gradients reduced once a step, while others compute.

Source: J. Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023
(arXiv:2211.05953), section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiscale.parallel.pipeline_parallel.actions import Action, Kind


def looped_bfs(
    rank: int, ranks: int, micro_batches: int, chunks: int
) -> Iterator[Action]:
    """The passes of `rank`, which holds the stages rank + P chunk."""
    for chunk in range(chunks):
        for m in range(micro_batches):
            yield Action(Kind.F, rank + ranks * chunk, m)
    for chunk in reversed(range(chunks)):
        for m in range(micro_batches):
            yield Action(Kind.BW, rank + ranks * chunk, m)
