"""What a strategy says that a training step sends; tests hold the ledger against it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one rank sends in a training step, and the formula they come from."""

    sent_bytes: int
    formula: str
