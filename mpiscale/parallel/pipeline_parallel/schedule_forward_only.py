"""Forward passes alone: for evaluation and generation.

Every rank takes its stages one after the other, and all micro-batches through each. A
stage needs only the one before it, so no ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiscale.parallel.pipeline_parallel.actions import Action, Kind, StageMap


def forward_only(
    rank: int, stage_map: StageMap, micro_batches: int
) -> Iterator[Action]:
    """The passes of `rank`."""
    for stage in stage_map.stages_of(rank):
        for m in range(micro_batches):
            if stage_map.rank_of(stage, m) == rank:
                yield Action(Kind.F, stage, m)
