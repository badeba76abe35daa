"""How many passes' activations a rank holds after each of its actions.

After F a pass holds all that its backward needs (M_B bytes); after B only what W still
needs (M_W bytes: the inputs of the products and the gradients of their outputs); after
W or BW nothing.

Source: arXiv:2401.10241, section 2.3, whose letters these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mpiscale.parallel.pipeline_parallel.actions import Action, Kind


class InFlight(NamedTuple):
    """Passes between F and B, and between B and W."""

    before_b: int
    before_w: int

    def bytes(self, m_b: float, m_w: float) -> float:
        """Memory if one pass holds m_b before B and m_w before W."""
        return self.before_b * m_b + self.before_w * m_w


CHANGE = {Kind.F: (1, 0), Kind.B: (-1, 1), Kind.W: (0, -1), Kind.BW: (-1, 0)}


def in_flight(actions: Iterable[Action]) -> Iterator[InFlight]:
    """After each action, in order."""
    before_b = before_w = 0
    for action in actions:
        more_b, more_w = CHANGE.get(action.kind, (0, 0))
        before_b, before_w = before_b + more_b, before_w + more_w
        yield InFlight(before_b, before_w)


def peak_bytes(actions: Iterable[Action], m_b: float = 1.0, m_w: float = 0.0) -> float:
    """The most that a rank ever holds; with the defaults: passes before B."""
    return max((held.bytes(m_b, m_w) for held in in_flight(actions)), default=0.0)
