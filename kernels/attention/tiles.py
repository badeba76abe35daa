"""Heads cut into tiles of TILE positions, zero-padded: no product has a tail."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.attention.block_product import write_transposed
from mpiscale.kernels.gemm.packing import padded
from mpiscale.kernels.gemm.views import unit_stride_row
from mpiscale.kernels.threads import compiled

# Positions: scores of 96 x 96 and the tiles they come from stay in the L2 cache, and 96
# is a multiple of the rows and columns of all register tiles.
TILE = 96
CHUNK = 32  # of scores, a divisor of TILE: loops of known length have no scalar rest


@compiled
def tiles_of(length: int) -> int:
    """How many tiles hold `length` positions."""
    return (length + TILE - 1) // TILE


@compiled
def load_tiles(x: Array, scale: float) -> Array:
    """scale x [t, d] -> [tiles, TILE, padded(d)]; rows of x have unit stride."""
    length, width = x.shape
    zero = x.dtype.type(0)
    tiles = np.empty((tiles_of(length), TILE, padded(width)), x.dtype)
    rows = tiles.reshape(-1, tiles.shape[2])
    for i in range(rows.shape[0]):
        row = unit_stride_row(rows, i)
        if i < length:
            x_row = unit_stride_row(x, i)
            for c in range(width):
                row[c] = scale * x_row[c]
        for c in range(width if i < length else 0, row.size):
            row[c] = zero
    return tiles


@compiled
def load_transposed_tiles(x: Array) -> Array:
    """x [t, d] -> [tiles, d, TILE], for products that run over positions."""
    length, width = x.shape
    tiles = np.empty((tiles_of(length), width, TILE), x.dtype)
    for tile in range(tiles.shape[0]):
        write_transposed(x[tile * TILE : (tile + 1) * TILE], tiles[tile])
    return tiles


@compiled
def store_tiles(tiles: Array, scale: float, x: Array) -> None:
    """x [t, d] = scale tiles [tiles, TILE, d], without the padding."""
    length, width = x.shape
    rows = tiles.reshape(-1, tiles.shape[2])
    for i in range(length):
        row, x_row = unit_stride_row(rows, i), unit_stride_row(x, i)
        for c in range(width):
            x_row[c] = scale * row[c]


@compiled
def visible_keys(query: int, tq: int, tk: int, causal: bool) -> int:
    """How many keys, from the first, `query` sees; causal is aligned to the end."""
    return max(0, min(tk, query + 1 + tk - tq)) if causal else tk


@compiled
def visible_in_tile(visible: int, tile: int) -> int:
    """How many keys of this tile are among the first `visible` ones."""
    return max(0, min(TILE, visible - tile * TILE))


@compiled
def diagonal_shift(tile: int, key_tile: int, tq: int, tk: int, causal: bool) -> int:
    """Row i of this block of scores sees columns up to i + shift."""
    return (tile - key_tile) * TILE + tk - tq if causal else TILE
