"""Replicas must stay equal to the bit; this finds the first tensor that did not.

Every rank computes a digest of each tensor that others hold too; the digests, 8 bytes
each, are compared over the group. A difference names tensor, ranks and step, on all
ranks of the group. What makes replicas drift apart: a parameter that one rank does not
update, a rank that reads other data, memory that goes bad.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator

DIGEST_BYTES = 8


class Replicated(NamedTuple):
    """An array that all ranks of `comm` hold with the same values.

    name: for messages: "value of blocks.0.norm1.gain".
    """

    comm: Communicator
    name: str
    array: Array


class ReplicaError(RuntimeError):
    """Ranks that hold the same tensor have different values."""


def check_replicas(step: int, tensors: Iterable[Replicated]) -> None:
    """Compare every tensor over its group of ranks; collective.

    Raises:
        ReplicaError: on all ranks of a group whose ranks differ.
    """
    groups: dict[int, list[Replicated]] = {}
    for tensor in tensors:
        groups.setdefault(id(tensor.comm), []).append(tensor)
    for group in groups.values():
        _compare(step, group[0].comm, group)


def _compare(step: int, comm: Communicator, tensors: Sequence[Replicated]) -> None:
    mine = np.array([digest(tensor.array) for tensor in tensors], np.uint64)
    everyone = np.empty((comm.size, len(mine)), np.uint64)
    comm.Allgather(mine, everyone)
    differ = np.flatnonzero((everyone != everyone[0]).any(axis=0))
    if differ.size == 0:
        return
    first = int(differ[0])
    alike: dict[int, list[int]] = {}
    for rank, number in enumerate(everyone[:, first].tolist()):
        alike.setdefault(number, []).append(rank)
    camps = " and ".join(str(ranks) for ranks in alike.values())
    rest = f"; {differ.size - 1} more tensors differ" if differ.size > 1 else ""
    raise ReplicaError(
        f"after step {step} {tensors[first].name} differs between ranks {camps} of the "
        f"{comm.size} that hold it{rest}. They were equal at the check before: look at "
        "what happened since"
    )


def digest(x: Array) -> int:
    """A number that depends on every bit of `x`."""
    words = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    hashed = hashlib.blake2b(words.data, digest_size=DIGEST_BYTES)
    return int.from_bytes(hashed.digest(), "little")
