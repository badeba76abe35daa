"""What a strategy says that a training step sends; tests hold the ledger against it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one rank sends in a training step, and the formula they come from."""

    sent_bytes: int
    formula: str

    def __add__(self, other: StepTraffic) -> StepTraffic:
        """Both in one step."""
        first, _, legend = self.formula.partition("\n")
        formula = f"{first}\n+ {other.formula}\n{legend}".rstrip()
        return StepTraffic(self.sent_bytes + other.sent_bytes, formula)
