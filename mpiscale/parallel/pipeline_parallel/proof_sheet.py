"""What a verified schedule costs, before anything runs: bubble, memory, messages.

bubble rate     1 - (all ranks' busy time) / (P x the longest span of a rank), where a
                rank's span is from the start of its first pass to the end of its last
peak            the most activations that a rank holds, M_B before B and M_W before W
messages        between each pair of ranks, with the bytes of one activation

For ranks that take equally long this bubble rate is that of P. Qi et al., "Zero bubble
pipeline parallelism", 2023 (arXiv:2401.10241), table 5: (cost - m (F + B + W)) / cost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mpiscale.parallel.pipeline_parallel.actions import SENDS, Schedule
from mpiscale.parallel.pipeline_parallel.activations_in_flight import peak_bytes
from mpiscale.parallel.pipeline_parallel.simulate_schedule import (
    Costs,
    CostTable,
    Span,
    passes_of,
    simulate,
)


@dataclass(frozen=True)
class ProofSheet:
    """Figures of one schedule for given costs.

    Attributes:
        spans: when everything runs, in the unit of the costs.
        cost: the longest span of a rank.
        bubble: idle time within `cost`, a rank's average.
        peaks: of each rank, in passes before B (a pass through one stage counts one).
        messages: (from rank, to rank) -> how many.
    """

    schedule: Schedule
    costs: Costs | CostTable
    spans: list[Span]
    cost: float
    bubble: float
    peaks: list[int]
    messages: dict[tuple[int, int], int]

    @property
    def bubble_rate(self) -> float:
        """Share of the cost that is idle, 0 ... 1."""
        return self.bubble / self.cost

    def text(self, activation_bytes: int | None = None) -> str:
        """A few lines; activation_bytes: of one micro-batch's hidden states."""
        lines = [
            f"bubble {100 * self.bubble_rate:.2f} % of a step: {self.bubble:g} of "
            f"{self.cost:g}",
            "passes in flight, at most: "
            + "  ".join(f"rank {rank}: {n}" for rank, n in enumerate(self.peaks)),
            "messages: "
            + (
                "  ".join(self._edge(*edge, activation_bytes) for edge in self._edges())
                or "none"
            ),
        ]
        return "\n".join(lines)

    def _edges(self) -> list[tuple[int, int, int]]:
        return [(a, b, n) for (a, b), n in sorted(self.messages.items())]

    def _edge(self, a: int, b: int, n: int, activation_bytes: int | None) -> str:
        size = "" if activation_bytes is None else f" ({n * activation_bytes:,} B)"
        return f"{a}->{b}: {n}{size}"


def prove(schedule: Schedule, costs: Costs | CostTable | None = None) -> ProofSheet:
    """The figures of a verified schedule; costs: F = B = W = 1 if left out."""
    costs = costs or Costs()
    spans = simulate(schedule, costs)
    cost, bubble = bubble_of(spans, schedule.ranks)
    peaks = [int(peak_bytes(actions)) for actions in schedule.actions]
    return ProofSheet(
        schedule, costs, spans, cost, bubble, peaks, messages_between(schedule)
    )


def bubble_of(spans: list[Span], ranks: int) -> tuple[float, float]:
    """(longest span of a rank, idle time in it on average)"""
    longest, busy = 0.0, 0.0
    for rank in range(ranks):
        passes = passes_of(spans, rank)
        if passes:
            longest = max(longest, passes[-1].end - passes[0].start)
            times = {(span.start, span.end) for span in passes}  # side by side: once
            busy += sum(end - start for start, end in times)
    return longest, longest - busy / ranks


def messages_between(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(from rank, to rank) -> messages in a step."""
    count: Counter[tuple[int, int]] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                to = schedule.receiver(action)
                assert to is not None
                count[rank, to] += 1
    return dict(count)
