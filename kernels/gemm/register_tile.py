"""How large a tile of C the registers hold: the one number that depends on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding


@dataclass(frozen=True)
class Tile:
    """A tile of C in registers: `rows` rows of `vectors` vectors of `lanes` floats.

    Each step of the k loop loads `vectors` vectors of B and broadcasts `rows` elements
    of A for rows * vectors multiply-adds: a tile should be large and nearly square. It
    must fit the registers beside the vectors of B and one element of A, and hold more
    accumulators than multiply-adds are in flight (latency 4 x 2 units = 8).
    """

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        """Columns of the widest tile."""
        return self.vectors * self.lanes


def tile_for(features: Mapping[str, bool]) -> Tile:
    """The tile for a CPU with these features, under LLVM's names for them."""
    if features.get("avx512f"):
        return Tile(rows=8, vectors=3, lanes=16)  # 24 + 3 + 1 of 32 registers
    if features.get("avx2") and features.get("fma"):
        return Tile(rows=6, vectors=2, lanes=8)  # 12 + 2 + 1 of 16
    if features.get("neon"):
        return Tile(rows=8, vectors=2, lanes=4)  # 16 + 2 + 2 of 32
    return Tile(rows=4, vectors=2, lanes=4)  # 8 + 2 + 1 of 16


TILE = tile_for(llvmlite.binding.get_host_cpu_features())
# Compiled code knows no classes, but constants.
TILE_ROWS, TILE_COLUMNS = TILE.rows, TILE.columns
VECTORS, LANES = TILE.vectors, TILE.lanes
