"""Interleaved 1F1B: several chunks a rank make the bubble smaller.

Rank r holds the stages r, P + r, 2 P + r, ... (`Loop`). Micro-batches go in groups of
g >= P (usually P): a group passes the first chunk, then the second, ...; then the next
group comes. Backward goes through the chunks the other way. In these two orders the
rank does one forward, one backward, in turn, after a warm-up of

    2 (P - r - 1) + (v - 1) g     forwards (v chunks)

A group must fill the pipeline: with fewer than P micro-batches in it the first rank
waits for the second chunk's input while the last one waits for a gradient of the first
rank. So where g does not divide M, the rest is spread over the groups.

Bubble (P - 1)(F + B + W) / v when g = P divides M; messages v times as many; the first
stage holds (P v + P - 1) chunks' activations, 1 + (P - 1) / (P v) of what 1F1B holds.

Source: D. Narayanan et al., "Efficient large-scale language model training on GPU
clusters", SC 2021 (arXiv:2104.04473), section 2.2.2; Llama 3, 2024 (arXiv:2407.21783),
section 3.3.2, for groups of any size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpiscale.parallel.pipeline_parallel.actions import Action, Kind


def interleaved_1f1b(
    rank: int, ranks: int, micro_batches: int, chunks: int, group: int
) -> Iterator[Action]:
    """The passes of `rank`, which holds the stages rank + P chunk."""
    groups = np.array_split(np.arange(micro_batches), max(micro_batches // group, 1))
    passes = [
        (chunk, int(m)) for part in groups for chunk in range(chunks) for m in part
    ]
    forward = [Action(Kind.F, rank + ranks * chunk, m) for chunk, m in passes]
    backward = [
        Action(Kind.BW, rank + ranks * (chunks - 1 - chunk), m) for chunk, m in passes
    ]
    ahead = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * len(
        groups[0]
    )
    warm_up = min(ahead, len(passes))
    yield from forward[:warm_up]
    for k in range(len(passes) - warm_up):
        yield forward[warm_up + k]
        yield backward[k]
    yield from backward[len(passes) - warm_up :]
