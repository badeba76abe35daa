"""Flash attention, backward: probabilities are computed again, tile by tile.

One item is a key-value head with all query heads that read it, so that its dk and dv
are summed by one thread.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.attention.block_product import add_product
from mpiscale.kernels.attention.tiles import (
    TILE,
    load_tiles,
    load_transposed_tiles,
    store_tiles,
    tiles_of,
    visible_in_tile,
    visible_keys,
)
from mpiscale.kernels.exp import exp
from mpiscale.kernels.threads import compiled, row_kernel


@row_kernel
def backward_heads(
    lo: int,
    hi: int,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    scale: float,
    causal: bool,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Key-value heads [lo, hi) of the b hk ones; shapes as in `reference.py`."""
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    one = q.dtype.type(1)
    for item in range(lo, hi):
        batch, kv_head = item // kv_heads, item % kv_heads
        keys = load_tiles(k[batch, :, kv_head], one)
        keys_t = load_transposed_tiles(k[batch, :, kv_head])
        values_t = load_transposed_tiles(v[batch, :, kv_head])
        dkeys = np.zeros_like(keys)
        dvalues = np.zeros((keys.shape[0], TILE, v.shape[3]), v.dtype)
        shared = keys, keys_t, values_t, dkeys, dvalues
        for head in range(kv_head * group, (kv_head + 1) * group):
            queries = load_tiles(q[batch, :, head], scale)
            douts = load_tiles(dout[batch, :, head], one)
            delta = _row_dots(dout[batch, :, head], out[batch, :, head])
            dqueries = np.zeros_like(queries)
            for tile in range(queries.shape[0]):
                mine = queries[tile], douts[tile], dqueries[tile]
                statistics = lse[batch, head], delta
                _backward_tile(tile, k.shape[1], causal, statistics, mine, shared)
            store_tiles(dqueries, scale, dq[batch, :, head])
        store_tiles(dkeys, one, dk[batch, :, kv_head])
        store_tiles(dvalues, one, dv[batch, :, kv_head])


@compiled
def _backward_tile(
    tile: int,
    tk: int,
    causal: bool,
    statistics: tuple[Array, Array],
    mine: tuple[Array, Array, Array],
    shared: tuple[Array, Array, Array, Array, Array],
) -> None:
    """Add one tile of queries' part to its own gradients and to the shared ones.

    `queries` is scaled, so dkeys is complete, while dqueries still lacks the scale.
    """
    lse, delta = statistics
    queries, douts, dqueries = mine
    keys, keys_t, values_t, dkeys, dvalues = shared
    tq = lse.size
    first = tile * TILE
    last = min(first + TILE, tq) - 1
    # Two allocations: in halves of one, LLVM would not vectorise the products.
    p = np.empty((TILE, TILE), queries.dtype)
    ds = np.empty((TILE, TILE), queries.dtype)
    for key_tile in range(tiles_of(visible_keys(last, tq, tk, causal))):
        p[:], ds[:] = 0, 0
        add_product(queries, keys_t[key_tile], p)
        add_product(douts, values_t[key_tile], ds)
        for i in range(TILE):
            n = 0  # a row of padding, or one that saw no key, has no gradient
            if first + i <= last and lse[first + i] != -np.inf:
                seen = visible_keys(first + i, tq, tk, causal)
                n = visible_in_tile(seen, key_tile)
            row = min(first + i, last)
            _scores_to_gradients(p[i], ds[i], n, lse[row], delta[row])
        add_product(p.T, douts, dvalues[key_tile])
        add_product(ds.T, queries, dkeys[key_tile])
        add_product(ds, keys[key_tile], dqueries)


@compiled
def _scores_to_gradients(p: Array, ds: Array, n: int, lse: float, delta: float) -> None:
    """p: scores -> probabilities; ds: gradients of p -> of the scores; 0 from n on."""
    for j in range(n):
        p[j] = exp(p[j] - lse)
        ds[j] = p[j] * (ds[j] - delta)
    for j in range(n, TILE):
        p[j] = ds[j] = 0


@compiled
def _row_dots(a: Array, b: Array) -> Array:
    """sum_c a [n, c] b [n, c] -> [n]."""
    dots = np.zeros(a.shape[0], a.dtype)
    for i in range(a.shape[0]):
        for c in range(a.shape[1]):
            dots[i] += a[i, c] * b[i, c]
    return dots
