"""Heads cut into tiles of TILE positions, zero-padded: no product has a tail."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.threads import compiled

TILE = 64  # positions; scores of 64 x 64 and the tiles they come from stay in the cache


@compiled
def tiles_of(length: int) -> int:
    """How many tiles hold `length` positions."""
    return (length + TILE - 1) // TILE


@compiled
def load_tiles(x: Array, scale: float) -> Array:
    """scale x [t, d] -> [tiles, TILE, d]."""
    length, width = x.shape
    tiles = np.zeros((tiles_of(length), TILE, width), x.dtype)
    for i in range(length):
        row = tiles[i // TILE, i % TILE]
        for c in range(width):
            row[c] = scale * x[i, c]
    return tiles


@compiled
def load_transposed_tiles(x: Array) -> Array:
    """x [t, d] -> [tiles, d, TILE], for products that run over positions."""
    length, width = x.shape
    tiles = np.zeros((tiles_of(length), width, TILE), x.dtype)
    for i in range(length):
        tile = tiles[i // TILE]
        for c in range(width):
            tile[c, i % TILE] = x[i, c]
    return tiles


@compiled
def store_tiles(tiles: Array, scale: float, x: Array) -> None:
    """x [t, d] = scale tiles [tiles, TILE, d], without the padding."""
    length, width = x.shape
    for i in range(length):
        row = tiles[i // TILE, i % TILE]
        for c in range(width):
            x[i, c] = scale * row[c]


@compiled
def visible_keys(query: int, tq: int, tk: int, causal: bool) -> int:
    """How many keys, from the first, `query` sees; causal is aligned to the end."""
    return max(0, min(tk, query + 1 + tk - tq)) if causal else tk


@compiled
def visible_in_tile(visible: int, tile: int) -> int:
    """How many keys of this tile are among the first `visible` ones."""
    return max(0, min(TILE, visible - tile * TILE))
