"""Collective calls are compared before they are made: all ranks must call the same.

Every rank sends a digest of its call and its description to all others, in one
all-gather of fixed length. Where the digests differ, every rank raises the same error,
which names both lines:

    ranks do not make the same collective call on group world:
      rank 0: Allreduce of 10 float32 (MPI_SUM) at train.py:12
      ranks 1, 2: Allgather of 5 float32 at train.py:14
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mpiscale.backend import Array

DIGEST_BYTES = 16
RECORD_BYTES = 512


class CollectiveMismatchError(RuntimeError):
    """Ranks of a group call different collectives, or one with different arguments."""


def record(must_agree: str, text: str) -> Array:
    """[RECORD_BYTES] bytes: a digest of what must agree, and the call in words."""
    digest = hashlib.blake2b(must_agree.encode(), digest_size=DIGEST_BYTES).digest()
    words = text.encode()[-(RECORD_BYTES - DIGEST_BYTES) :]
    padded = (digest + words).ljust(RECORD_BYTES, b"\0")
    return np.frombuffer(padded, np.uint8).copy()


def compare(records: Array, group: str) -> None:
    """Refuse calls that differ.  records [ranks, RECORD_BYTES]

    Raises:
        CollectiveMismatchError: the same on all ranks.
    """
    if (records[:, :DIGEST_BYTES] == records[0, :DIGEST_BYTES]).all():
        return
    alike: dict[bytes, list[int]] = {}
    for rank, row in enumerate(records):
        alike.setdefault(row[:DIGEST_BYTES].tobytes(), []).append(rank)
    lines = [f"ranks do not make the same collective call on group {group}:"]
    for ranks in alike.values():
        words = records[ranks[0], DIGEST_BYTES:].tobytes().rstrip(b"\0")
        lines.append(f"  {_ranks(ranks)}: {words.decode(errors='replace')}")
    raise CollectiveMismatchError("\n".join(lines))


def _ranks(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"
