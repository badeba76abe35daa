"""How long a collective takes: the textbook's formulas, and a model of shared links.

*Textbook* (Hockney's model). A message of m bytes takes alpha + beta m, adding m bytes
takes gamma m. For p ranks and n bytes in all (lg is the logarithm to base 2):

collective       algorithm            alpha        beta               gamma
all-reduce       recursive doubling   lg p         n lg p             n lg p
                 Rabenseifner         2 lg p       2 (p - 1) / p n    (p - 1) / p n
                   p no power of two  2 floor(lg p) + 2   + 2 n       + n
                 ring                 2 (p - 1)    2 (p - 1) / p n    (p - 1) / p n
reduce-scatter   ring                 p - 1        (p - 1) / p n      (p - 1) / p n
                 recursive halving    lg p         (p - 1) / p n      (p - 1) / p n
all-gather       ring                 p - 1        (p - 1) / p n
                 recursive doubling   lg p         (p - 1) / p n
all-to-all       Bruck                lg p         n / 2 lg p
                 pairwise             p - 1        n
broadcast        binomial tree        lg p         n lg p
                 scatter, ring        lg p + p-1   2 (p - 1) / p n
reduce           binomial tree        lg p         n lg p             n lg p
gather, scatter  binomial tree        lg p         (p - 1) / p n

(of an all-to-all, n is what one rank sends, and the exchange with itself is counted).

*Shared links.* The textbook's messages do not disturb each other. On a node they share
one memory, and one network card: k messages at once get what the card can do, once a
single one cannot fill it. So a step of messages (`message_patterns.py`) takes, on the
node where it takes longest,

    alpha + max(beta m, share M) + max(gamma a, gamma_share A)

m, M: bytes of the largest message and of all messages of the node; a, A: bytes that the
busiest rank adds or copies, and all ranks of the node. A `Level` holds alpha, beta and
share for messages that stay on a node, another one for those that leave it.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005; W. Gropp, L.
Olson, P. Samfass, "Modeling MPI communication performance on SMP nodes: is it time to
retire the ping pong test", EuroMPI 2016 (the max-rate model).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpiscale.comm.message_patterns import Message, Nodes, Pattern


class Terms(NamedTuple):
    """Coefficients of alpha, and of beta and gamma in bytes."""

    alpha: float
    beta: float
    gamma: float = 0.0

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """The time; alpha in seconds, beta and gamma in seconds per byte."""
        return self.alpha * alpha + self.beta * beta + self.gamma * gamma


def _rabenseifner(p: int, n: float) -> Terms:
    once = (p - 1) / p * n
    if p & (p - 1):
        return Terms(2 * math.floor(math.log2(p)) + 2, 2 * once + 2 * n, once + n)
    return Terms(2 * math.log2(p), 2 * once, once)


def _tree(p: int, n: float) -> Terms:
    return Terms(math.log2(p), n * math.log2(p))


def _halves(p: int, n: float) -> Terms:
    return Terms(math.log2(p), (p - 1) / p * n)


def _ring(p: int, n: float) -> Terms:
    return Terms(p - 1, (p - 1) / p * n)


def _added(terms: Terms) -> Terms:
    """All that is received is added."""
    return terms._replace(gamma=terms.beta)


TEXTBOOK: dict[str, Callable[[int, float], Terms]] = {
    "recursive doubling all-reduce": lambda p, n: _added(_tree(p, n)),
    "Rabenseifner all-reduce": _rabenseifner,
    "ring all-reduce": lambda p, n: Terms(
        2 * (p - 1), 2 * (p - 1) / p * n, (p - 1) / p * n
    ),
    "ring reduce-scatter": lambda p, n: _added(_ring(p, n)),
    "recursive halving reduce-scatter": lambda p, n: _added(_halves(p, n)),
    "ring all-gather": _ring,
    "recursive doubling all-gather": _halves,
    "Bruck all-to-all": lambda p, n: Terms(math.log2(p), n / 2 * math.log2(p)),
    "pairwise all-to-all": lambda p, n: Terms(p - 1, n),
    "binomial tree broadcast": _tree,
    "scatter and ring all-gather broadcast": lambda p, n: Terms(
        math.log2(p) + p - 1, 2 * (p - 1) / p * n
    ),
    "binomial tree reduce": lambda p, n: _added(_tree(p, n)),
    "binomial tree gather": _halves,
    "binomial tree scatter": _halves,
}


@dataclass(frozen=True)
class Level:
    """Messages of one kind: inside a node, or from node to node.

    Attributes:
        alpha_seconds: of a step, whatever its size.
        beta_seconds_per_byte: of a message that is alone.
        share_seconds_per_byte: of all messages of a node, when all its ranks send.
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    share_seconds_per_byte: float

    def bytes_seconds(self, sizes: Sequence[int]) -> float:
        """Time that the bytes of a node's messages take."""
        return max(
            max(sizes, default=0) * self.beta_seconds_per_byte,
            sum(sizes) * self.share_seconds_per_byte,
        )


@dataclass(frozen=True)
class Machine:
    """What the times of messages and additions are on a set of nodes.

    Attributes:
        inside, across: messages that stay on a node, and that leave it; None where
            there is only one node.
        gamma_seconds_per_byte: of an addition while other ranks do nothing.
        gamma_share_seconds_per_byte: of all additions of a node whose ranks all add.
    """

    inside: Level
    across: Level | None
    gamma_seconds_per_byte: float
    gamma_share_seconds_per_byte: float


def pattern_seconds(
    pattern: Pattern, nodes: Nodes, itemsize: int, machine: Machine
) -> float:
    """Time of a pattern of messages, in seconds: its steps, one after the other.

    Args:
        pattern: sizes in elements.
        nodes: the ranks of each node.
        itemsize: bytes of an element.
        machine: its measured numbers.
    """
    node_of = {rank: h for h, ranks in enumerate(nodes) for rank in ranks}
    return sum(
        max(
            _step_seconds(step, h, node_of, itemsize, machine)
            for h in range(len(nodes))
        )
        for step in pattern
    )


def _step_seconds(
    step: list[Message], node: int, node_of: dict[int, int], itemsize: int, m: Machine
) -> float:
    """Time of one step on one node: what its ranks send, get and add."""
    inside: list[int] = []
    leaving: list[int] = []
    arriving: list[int] = []
    added: Counter[int] = Counter()
    for message in step:
        a, b = node_of[message.source], node_of[message.dest]
        size = message.size * itemsize
        if node not in (a, b):
            continue
        if message.source == message.dest:  # copied, as fast as it would be added
            added[message.dest] += size
            continue
        lanes = inside if a == b else leaving if a == node else arriving
        lanes.append(size)
        if message.added and b == node:
            added[message.dest] += size
    alpha, transfer = 0.0, 0.0
    if inside:
        alpha, transfer = m.inside.alpha_seconds, m.inside.bytes_seconds(inside)
    if leaving or arriving:
        if m.across is None:
            raise ValueError("messages between nodes, but only one node was measured")
        alpha = max(alpha, m.across.alpha_seconds)
        both = max(m.across.bytes_seconds(leaving), m.across.bytes_seconds(arriving))
        transfer = max(transfer, both)
    adding = max(
        max(added.values(), default=0) * m.gamma_seconds_per_byte,
        sum(added.values()) * m.gamma_share_seconds_per_byte,
    )
    return alpha + transfer + adding
