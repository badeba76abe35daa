"""Flash attention, forward: tiles of queries against tiles of keys, online softmax.

For each tile of queries, the tiles of keys come one after the other. With the largest
score m so far and the sum l of e^(score - m), a new tile with a larger maximum m' first
scales what is there by e^(m - m').

Source: T. Dao et al., "FlashAttention", NeurIPS 2022; online softmax: M. Milakov,
N. Gimelshein, 2018.
"""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.attention.block_product import add_weighted, write_scores
from mpiscale.kernels.attention.tiles import (
    TILE,
    diagonal_shift,
    load_tiles,
    load_transposed_tiles,
    tiles_of,
    visible_in_tile,
    visible_keys,
)
from mpiscale.kernels.exp import exp_of_nonpositive
from mpiscale.kernels.gemm.views import unit_stride_row
from mpiscale.kernels.row_maximum import maximum
from mpiscale.kernels.threads import compiled, row_kernel


@row_kernel
def forward_heads(
    lo: int,
    hi: int,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    causal: bool,
    out: Array,
    lse: Array,
) -> None:
    """Heads [lo, hi) of the b h heads; shapes as in `reference.py`."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    one = q.dtype.type(1)
    for item in range(lo, hi):
        batch, head = item // heads, item % heads
        queries = load_tiles(q[batch, :, head], scale)
        keys = load_transposed_tiles(k[batch, :, head // group])
        values = load_tiles(v[batch, :, head // group], one)
        _forward_head(
            queries, keys, values, k.shape[1], causal, out[batch, :, head], lse[item]
        )


@compiled
def _forward_head(
    queries: Array,
    keys: Array,
    values: Array,
    tk: int,
    causal: bool,
    out: Array,
    lse: Array,
) -> None:
    tq = lse.size
    kind = queries.dtype.type
    scores = np.empty((TILE, TILE), queries.dtype)
    weighted = np.empty((TILE, values.shape[2]), queries.dtype)
    largest = np.empty(TILE, queries.dtype)
    total = np.empty(TILE, queries.dtype)
    for tile in range(queries.shape[0]):
        first = tile * TILE
        rows = min(TILE, tq - first)
        weighted[:], largest[:], total[:] = kind(0), kind(-np.inf), kind(0)
        seen_by_last = visible_keys(first + rows - 1, tq, tk, causal)
        for key_tile in range(tiles_of(seen_by_last)):
            shift = diagonal_shift(tile, key_tile, tq, tk, causal)
            write_scores(queries[tile, :rows], keys[key_tile], scores[:rows], shift)
            for i in range(rows):
                seen = visible_keys(first + i, tq, tk, causal)
                n = visible_in_tile(seen, key_tile)
                total[i], largest[i] = _online_softmax(
                    unit_stride_row(scores, i),
                    n,
                    total[i],
                    largest[i],
                    unit_stride_row(weighted, i),
                )
            add_weighted(scores[:rows], values[key_tile], weighted[:rows], shift)
        for i in range(rows):
            row, out_row = unit_stride_row(weighted, i), unit_stride_row(out, first + i)
            _finish_row(row, total[i], out_row)
            lse[first + i] = largest[i] + math.log(total[i])


@compiled
def _online_softmax(
    scores: Array, n: int, total: float, largest: float, weighted: Array
) -> tuple[float, float]:
    """Turn the first n scores into e^(score - new maximum), the others into 0.

    Scales `weighted` to the new maximum; gives the new sum and the new maximum. Loops
    over all TILE scores, a number that LLVM knows, are faster than over the first n.
    """
    zero, nothing = scores.dtype.type(0), scores.dtype.type(-np.inf)
    for j in range(n, TILE):
        scores[j] = nothing
    new_largest = largest
    for j in range(TILE):
        new_largest = maximum(new_largest, scores[j])
    # Nothing seen so far: -inf - (-inf) would be NaN, -inf - 0 gives e^-inf = 0.
    shift = new_largest if new_largest != nothing else zero
    added = zero
    for j in range(TILE):
        e = exp_of_nonpositive(scores[j] - shift)
        scores[j] = e
        added += e
    if new_largest != largest:  # seldom, after the first tiles
        rescale = exp_of_nonpositive(largest - shift)
        total *= rescale
        for c in range(weighted.size):
            weighted[c] *= rescale
    return total + added, new_largest


@compiled
def _finish_row(weighted: Array, total: float, out: Array) -> None:
    """out = weighted / total, or 0 if the query saw no key."""
    zero, one = weighted.dtype.type(0), weighted.dtype.type(1)
    factor = one / total if total != zero else zero
    for c in range(out.size):
        out[c] = weighted[c] * factor
