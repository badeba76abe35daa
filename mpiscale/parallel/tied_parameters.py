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
from mpiscale.nn.parameter import Parameter
from mpiscale.optim.clip import sum_of_squares

Region = tuple[slice, ...]


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


def synchronise(parameters: Iterable[Parameter]) -> None:
    """Give every holder the sum of their gradients, one message per group of ranks."""
    groups: dict[int, tuple[Communicator, list[Array]]] = {}
    for parameter in parameters:
        for tie in parameter.ties:
            if tie.reduction == "sum" and tie.comm.size > 1:
                assert parameter.grad is not None, "complete_grad() comes first"
                group = groups.setdefault(id(tie.comm), (tie.comm, []))
                group[1].append(parameter.grad[tie.region])
    for comm, views in groups.values():
        _sum_in_place(views, comm)


def _sum_in_place(views: list[Array], comm: Communicator) -> None:
    mine = np.concatenate([view.reshape(-1) for view in views])
    total = np.empty_like(mine)
    comm.Allreduce(mine, total)
    ends = np.cumsum([view.size for view in views])[:-1]
    for view, part in zip(views, np.split(total, ends), strict=True):
        view[...] = part.reshape(view.shape)


def gradient_norm(parameters: Iterable[Parameter], comm: Communicator) -> float:
    """L2 norm of the gradient of the whole model, the same on all ranks.

    comm: the ranks over which the model is spread.
    """
    mine = np.array([sum(_squares_counted_here(p) for p in parameters)])
    total = np.empty_like(mine)
    comm.Allreduce(mine, total)
    return math.sqrt(total[0])


def _squares_counted_here(parameter: Parameter) -> float:
    grad = parameter.grad
    assert grad is not None, "complete_grad() comes first"
    elsewhere = [tie.region for tie in parameter.ties if not tie.counts_here]
    if not elsewhere:
        return sum_of_squares(grad)
    counted = np.ones(grad.shape, bool)
    for region in elsewhere:
        counted[region] = False
    return sum_of_squares(grad[counted])
