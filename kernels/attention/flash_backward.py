"""Flash attention, backward: probabilities are computed again, tile by tile.

One item is a key-value head with all query heads that read it, so that its dk and dv
are summed by one thread.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.attention.block_product import (
    add_transposed,
    add_weighted,
    write_scores,
)
from mpiscale.kernels.attention.tiles import (
    CHUNK,
    TILE,
    diagonal_shift,
    load_tiles,
    load_transposed_tiles,
    store_tiles,
    tiles_of,
    visible_in_tile,
    visible_keys,
)
from mpiscale.kernels.exp import exp_of_nonpositive
from mpiscale.kernels.gemm.packing import padded
from mpiscale.kernels.gemm.views import block, unit_stride_row
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
        dvalues = np.zeros((keys.shape[0], TILE, padded(v.shape[3])), v.dtype)
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
    rows = min(TILE, tq - first)
    p = np.empty((TILE, TILE), queries.dtype)[:rows]
    ds = np.empty((TILE, TILE), queries.dtype)[:rows]
    seen_by_last = visible_keys(first + rows - 1, tq, tk, causal)
    for key_tile in range(tiles_of(seen_by_last)):
        shift = diagonal_shift(tile, key_tile, tq, tk, causal)
        write_scores(queries[:rows], keys_t[key_tile], p, shift)
        write_scores(douts[:rows], values_t[key_tile], ds, shift)
        for i in range(rows):
            n = 0  # a row that saw no key has no gradient
            if lse[first + i] != -np.inf:
                seen = visible_keys(first + i, tq, tk, causal)
                n = visible_in_tile(seen, key_tile)
            _scores_to_gradients(p, ds, i, n, lse[first + i], delta[first + i])
        add_transposed(p, douts[:rows], dvalues[key_tile], shift)
        add_transposed(ds, queries[:rows], dkeys[key_tile], shift)
        add_weighted(ds, keys[key_tile], dqueries[:rows], shift)


@compiled
def _scores_to_gradients(
    p: Array, ds: Array, i: int, n: int, lse: float, delta: float
) -> None:
    """Row i of p: scores -> probabilities; of ds: gradients of p -> of the scores.

    Both are 0 from n on.
    """
    end = 0
    while end < n:
        p_chunk = unit_stride_row(block(p, i, 1, end, CHUNK), 0)
        ds_chunk = unit_stride_row(block(ds, i, 1, end, CHUNK), 0)
        for j in range(CHUNK):
            e = exp_of_nonpositive(p_chunk[j] - lse)
            p_chunk[j] = e
            ds_chunk[j] = e * (ds_chunk[j] - delta)
        end += CHUNK
    p_row, ds_row = unit_stride_row(p, i), unit_stride_row(ds, i)
    for j in range(n, TILE):
        p_row[j] = 0
        ds_row[j] = 0


@compiled
def _row_dots(a: Array, b: Array) -> Array:
    """sum_c a [n, c] b [n, c] -> [n]."""
    dots = np.empty(a.shape[0], a.dtype)
    for i in range(a.shape[0]):
        a_row, b_row = unit_stride_row(a, i), unit_stride_row(b, i)
        dot = a.dtype.type(0)
        for c in range(a_row.size):
            dot += a_row[c] * b_row[c]
        dots[i] = dot
    return dots
