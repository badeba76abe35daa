"""Which unit is gathered after which, learned from the step before."""

from __future__ import annotations


class GatherOrder:
    """Records the gathers of a step, and foretells those of the next.

    A step that leaves the recorded order gets no more predictions; what it does
    instead is the record for the next.
    """

    def __init__(self) -> None:
        self._recorded: list[int] = []
        self._now: list[int] | None = None  # None outside of a step

    def begin(self) -> None:
        """A step begins."""
        self._now = []

    def end(self) -> None:
        """The step is over: keep its order."""
        self._recorded, self._now = self._now or [], None

    def after(self, unit: int) -> int | None:
        """Note that `unit` was gathered; the one expected next, None if unknown."""
        if self._now is None:
            return None
        self._now.append(unit)
        done = len(self._now)
        if self._now != self._recorded[:done] or done == len(self._recorded):
            return None
        return self._recorded[done]
