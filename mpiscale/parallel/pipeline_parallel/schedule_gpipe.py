"""GPipe: all micro-batches forward, then all backward.

4 ranks, 4 micro-batches, F = 1, BW = 2:

    rank 0  F0F1F2F3                  BW3 BW2 BW1 BW0
    rank 1    F0F1F2F3            BW3 BW2 BW1 BW0
    rank 2      F0F1F2F3      BW3 BW2 BW1 BW0
    rank 3        F0F1F2F3BW3 BW2 BW1 BW0

Bubble (P - 1)(F + B + W). Every stage holds the activations of all M micro-batches: its
memory grows with M.

Source: Y. Huang et al., "GPipe", NeurIPS 2019 (arXiv:1811.06965), figure 2c.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiscale.parallel.pipeline_parallel.actions import Action, Kind


def gpipe(rank: int, micro_batches: int) -> Iterator[Action]:
    """The passes of `rank`, which holds stage `rank`."""
    for m in range(micro_batches):
        yield Action(Kind.F, rank, m)
    for m in reversed(range(micro_batches)):
        yield Action(Kind.BW, rank, m)
