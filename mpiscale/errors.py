"""Errors of the user's making, and the messages that several files share."""

from __future__ import annotations


class InputError(ValueError):
    """The user's input can't be used; the message says what to do instead.

    Ranks that all meet the same one end the job together: rank 0 prints its text
    once, without a traceback, and the exit code is 2 (`comm/world.py`).
    """


class NotFiniteError(InputError):
    """Training has met a loss or gradient that is no finite number."""


def block_length(n: int, ranks: int, what: str) -> int:
    """Length of each rank's block when `what`, of length `n`, is cut evenly.

    Raises:
        InputError: if `ranks` does not divide `n`; says the arithmetic and ways out.
    """
    if n % ranks:
        divisors = [d for d in range(1, min(n, ranks) + 1) if n % d == 0]
        raise InputError(
            f"cannot cut {what} (length {n}) into {ranks} equal blocks: "
            f"{n} = {n // ranks} x {ranks} + {n % ranks}. "
            f"Use one of {divisors} ranks, or another length."
        )
    return n // ranks
