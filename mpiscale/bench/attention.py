"""Flash attention beside plain attention: time and memory of forward and backward.

Plain attention holds the scores of all pairs of positions, several times over in
backward; flash attention holds a block of them (Dao et al. 2022). Each runs in a
process of its own, so that its peak of resident memory is its own; passes are taken in
turn, as in `conductor.py`.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass

from mpiscale.bench.conductor import alternate, clean_command, contenders

KINDS = ("flash", "plain")


@dataclass(frozen=True)
class AttentionShape:
    """q, k, v [batch, length, heads, head_size], float32, causal."""

    batch: int = 1
    length: int = 2048
    heads: int = 12
    head_size: int = 64


@dataclass(frozen=True)
class AttentionResult:
    """Medians over the passes; seconds of CPU time with one thread, else wall time."""

    seconds: dict[str, float]
    peak_bytes: dict[str, int]  # above what was resident before the first pass
    speedup: float  # median over the pairs of plain's time by flash's

    @property
    def saved_memory(self) -> float:
        """Share of plain attention's peak that flash attention does not need."""
        return 1 - self.peak_bytes["flash"] / self.peak_bytes["plain"]

    def table(self) -> str:
        """Two rows and what they say."""
        lines = [f"{'attention':<10} {'ms':>9} {'peak MiB':>9}"]
        for kind, seconds in self.seconds.items():
            peak = self.peak_bytes[kind] / 2**20
            lines.append(f"{kind:<10} {1e3 * seconds:>9.1f} {peak:>9.1f}")
        lines.append(
            f"flash attention: {self.speedup:.2f} times as fast, "
            f"{self.saved_memory:.0%} less memory"
        )
        return "\n".join(lines)


def measure_attention(
    shape: AttentionShape, threads: int, passes: int
) -> AttentionResult:
    """Forward and backward of both kinds, in turn, after one pass to warm up."""
    commands = [
        clean_command(
            "mpiscale.bench.attention_contender",
            threads,
            json.dumps({"kind": kind, "threads": threads, **asdict(shape)}),
        )
        for kind in KINDS
    ]
    with contenders(commands) as processes:
        replies = alternate(processes, [{}] * (passes + 1))
    timed = {
        kind: [reply["seconds"] for reply in answers[1:]]
        for kind, answers in zip(KINDS, replies, strict=True)
    }
    pairs = zip(timed["plain"], timed["flash"], strict=True)
    return AttentionResult(
        {kind: statistics.median(seconds) for kind, seconds in timed.items()},
        {kind: r[-1]["peak"] for kind, r in zip(KINDS, replies, strict=True)},
        statistics.median(plain / flash for plain, flash in pairs),
    )
