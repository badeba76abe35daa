"""A parameter, or a part of it, that several ranks hold: declared once, here.

A `Tie` names the ranks and what their gradients are to each other:

reduction   the ranks' gradients         example
same        are equal already            a norm's gain under tensor parallelism
sum         are terms of a sum           a key/value head that several ranks replicate

From the declarations follow the synchronisation after backward and the global norm, in
which every logical element counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator
from mpiscale.nn.flat import Piece
from mpiscale.nn.parameter import Parameter
from mpiscale.optim.clip import sum_of_squares

Region = tuple[slice, ...]
Index = slice | Array


@dataclass(frozen=True)
class Tie:
    """`comm`'s ranks hold the same values in `region` (of each rank's own part)."""

    comm: Communicator
    reduction: Literal["same", "sum"]
    region: Region = ()

    @property
    def counts_here(self) -> bool:
        """Whether this rank's copy is the one that a sum over all ranks includes."""
        return self.comm.rank == 0


def synchronise(pieces: Iterable[Piece]) -> None:
    """Give every holder the sum of their gradients, one message per group of ranks.

    All holders of a tie have the same piece of the parameter.
    """
    groups: dict[int, tuple[Communicator, list[tuple[Array, Index]]]] = {}
    for piece in pieces:
        for tie in piece.parameter.ties:
            if tie.reduction == "sum" and tie.comm.size > 1:
                _, tied = groups.setdefault(id(tie.comm), (tie.comm, []))
                tied.append((piece.grad, _elements(piece, tie)))
    for comm, tied in groups.values():
        _sum_in_place(tied, comm)


def summed_elements(parameters: Iterable[Parameter]) -> list[tuple[Communicator, int]]:
    """Groups of ranks, and of how many elements `synchronise` sums gradients there."""
    groups: dict[int, tuple[Communicator, int]] = {}
    for parameter in parameters:
        for tie in parameter.ties:
            if tie.reduction == "sum" and tie.comm.size > 1:
                _, so_far = groups.get(id(tie.comm), (tie.comm, 0))
                region = parameter.data[tie.region]
                groups[id(tie.comm)] = tie.comm, so_far + region.size
    return list(groups.values())


def _sum_in_place(tied: list[tuple[Array, Index]], comm: Communicator) -> None:
    terms = [grad[elements] for grad, elements in tied]
    mine = np.concatenate(terms)
    total = np.empty_like(mine)
    comm.Allreduce(mine, total)
    ends = np.cumsum([term.size for term in terms])[:-1]
    for (grad, elements), part in zip(tied, np.split(total, ends), strict=True):
        grad[elements] = part


def gradient_norm(pieces: Iterable[Piece], *groups: Communicator) -> float:
    """L2 norm of the gradient of the whole model, the same on all ranks.

    groups: the ranks over which the gradient is spread: along each dimension of the
        mesh that cuts the model, or the pieces of its gradients.
    """
    mine_alone = sum(_squares_counted_here(piece) for piece in pieces)
    squares = np.array([mine_alone], np.float64)  # also where there is no piece
    for comm in groups:
        mine = squares.copy()
        comm.Allreduce(mine, squares)
    return math.sqrt(squares[0])


def _squares_counted_here(piece: Piece) -> float:
    elsewhere = [tie for tie in piece.parameter.ties if not tie.counts_here]
    if not elsewhere:
        return sum_of_squares(piece.grad)
    counted = np.ones(piece.grad.size, bool)
    for tie in elsewhere:
        counted[_elements(piece, tie)] = False
    return sum_of_squares(piece.grad[counted])


def _elements(piece: Piece, tie: Tie) -> Index:
    """Which elements of the piece the tie is about, as an index into its arrays."""
    if not tie.region:
        return slice(None)
    tied = np.zeros(piece.parameter.local_shape, bool)
    tied[tie.region] = True
    return tied.reshape(-1)[piece.place]
