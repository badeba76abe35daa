"""Zero bubble, one stage a rank: weight gradients wait until there is nothing else.

B, the gradient of a stage's input, is what the stage before waits for; W, the gradient
of its weights, nobody waits for. 1F1B with W put off fills the bubble:

ZB-H1   warm-up as 1F1B's; on stage s the W is s micro-batches behind the B.
        Bubble (P - 1)(F + B - W), a third of 1F1B's if F = B = W; activations as 1F1B.
ZB-H2   up to 2 (P - s) - 1 forwards ahead, W up to 2 s behind.
        Bubble (P - 1)(F + B - 2 W), none if F = B = W; activations about twice.

4 ranks, ZB-H1, rank 1 (warm-up 3, then F B in turn, one W behind):

    F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 ...

Source: P. Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241),
sections 2.1-2.3. Their optimizer step is checked afterwards instead of being waited
for (section 4); here a step ends before the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiscale.parallel.pipeline_parallel.actions import Action, Kind


def zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """The passes of `rank`, which holds stage `rank`; no more memory than 1F1B."""
    return _weights_behind(rank, micro_batches, warm_up=ranks - rank, behind=rank)


def zb_h2(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """The passes of `rank`, which holds stage `rank`; about twice the memory."""
    warm_up = 2 * (ranks - rank) - 1
    return _weights_behind(rank, micro_batches, warm_up, behind=2 * rank)


def _weights_behind(
    stage: int, micro_batches: int, warm_up: int, behind: int
) -> Iterator[Action]:
    """`warm_up` forwards, then B and F in turn, with W `behind` B."""
    forwards = min(warm_up, micro_batches)
    for m in range(forwards):
        yield Action(Kind.F, stage, m)
    for m in range(micro_batches):
        yield Action(Kind.B, stage, m)
        if m >= behind:
            yield Action(Kind.W, stage, m - behind)
        if forwards < micro_batches:
            yield Action(Kind.F, stage, forwards)
            forwards += 1
    for m in range(max(micro_batches - behind, 0), micro_batches):
        yield Action(Kind.W, stage, m)
