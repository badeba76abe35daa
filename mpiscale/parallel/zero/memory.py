"""How many bytes of model state a rank holds under each stage of ZeRO.

stage   parameters        gradients         optimizer's state
0       p Psi             g Psi             K Psi
1       p Psi             g Psi             K Psi / N
2       p Psi             g Psi / N         K Psi / N
3       p Psi / N         g Psi / N         K Psi / N

p, g, K bytes for each of Psi parameters: 4, 4, 8 for AdamW in float32; 2, 2, 12 for
Adam in mixed precision, whose K counts a float32 copy of the parameters.

Source: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models", SC 2020, section 5 and table 1.
"""

from __future__ import annotations

from typing import NamedTuple


class StateBytes(NamedTuple):
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float


def state_bytes(
    stage: int,
    parameters: int,
    ranks: int,
    parameter_bytes: int = 4,
    gradient_bytes: int = 4,
    optimizer_bytes: int = 8,
) -> StateBytes:
    """Model state on one of `ranks` ranks, in bytes.

    Raises:
        ValueError: if there is no such stage.
    """
    if stage not in range(4):
        raise ValueError(f"ZeRO has stages 0, 1, 2 and 3, got {stage}")
    share = parameters / ranks
    return StateBytes(
        parameter_bytes * (share if stage >= 3 else parameters),
        gradient_bytes * (share if stage >= 2 else parameters),
        optimizer_bytes * (share if stage >= 1 else parameters),
    )
