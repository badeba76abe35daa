"""What products are made of: the micro-kernel, packing, attention's blocks."""

import re

import numba
import numpy as np
import pytest
from numba import types

from mpiscale.kernels import threads
from mpiscale.kernels.attention import block_product, flash_attention
from mpiscale.kernels.attention.tiles import TILE
from mpiscale.kernels.gemm import micro_kernel, packing
from mpiscale.kernels.gemm.register_tile import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    VECTORS,
)
from tests.kernels.cases import drawing


@pytest.mark.parametrize("accumulate", [False, True])
def test_tiles_of_all_sizes_equal_the_product(accumulate):
    draw = drawing(np.float32)
    a, b = draw(TILE_ROWS, 19), draw(19, TILE_COLUMNS)
    for rows in range(1, TILE_ROWS + 1):
        for columns in range(1, TILE_COLUMNS + 1):
            width = packing.padded(columns)
            c = draw(rows, columns)
            want = a[:rows] @ b[:, :columns] + accumulate * c
            panel = np.ascontiguousarray(b[:, :width])
            micro_kernel.multiply_tile(a[:rows], panel, c, accumulate)
            np.testing.assert_allclose(c, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(LANES < 8, reason="reads instructions of AVX2 and AVX-512")
def test_accumulators_stay_in_registers():
    matrix = types.Array(types.float32, 2, "A")
    kernel = threads._njit(micro_kernel._multiply_edge.py_func)
    kernel.compile((matrix, matrix, matrix, types.boolean))
    (assembly,) = kernel.inspect_asm().values()
    blocks = re.split(r"\n\.L\w+:", assembly)
    loops = [block for block in blocks if block.count("vfmadd") >= TILE_ROWS]
    assert loops
    on_stack = re.compile(r"mm\d+, .*\(%rsp\)|\(%rsp\), .*mm\d")
    assert not [block for block in loops if on_stack.search(block)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [1, LANES, TILE_COLUMNS, 4 * LANES, 5 * LANES + 1])
def test_panels_hold_the_matrix_and_zeros(n, transposed):
    k = 2 * LANES + 3
    b = drawing(np.float32)(n, k).T if transposed else drawing(np.float32)(k, n)
    panels = np.full(k * packing.padded(n), np.nan, np.float32)
    packing.pack_panels(b, transposed, panels)
    column = 0
    while column < n:
        width = packing.panel_width(n - column)
        panel = packing.panel_at(panels, k, column, width)
        inside = min(width, n - column)
        want = b[:, column : column + width]
        np.testing.assert_array_equal(panel[:, :inside], want)
        np.testing.assert_array_equal(panel[:, inside:], 0)
        column += width
    assert column == packing.padded(n)


def test_panels_are_as_even_as_may_be():
    for vectors in range(1, 30):
        left, widths = vectors * LANES, []
        while left > 0:
            widths.append(packing.panel_width(left) // LANES)
            left -= widths[-1] * LANES
        assert sum(widths) == vectors and max(widths) <= VECTORS
        assert max(widths) - min(widths) <= 1


@numba.njit
def all_products(q, keys_t, x, scores, weighted, gathered, shift):
    block_product.write_scores(q, keys_t, scores, shift)
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            if j > i + shift:
                scores[i, j] = 0
    block_product.add_weighted(scores, x, weighted, shift)
    block_product.add_transposed(scores, q, gathered, shift)


@pytest.mark.parametrize("shift", [-200, -70, -5, 0, 7, 64, 200])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_block_products_count_what_the_mask_leaves(dtype, shift):
    draw = drawing(dtype)
    for rows in (1, TILE_ROWS, 51, TILE):
        q, keys_t, x = draw(rows, 2 * LANES), draw(2 * LANES, TILE), draw(TILE, LANES)
        scores = np.full((rows, TILE), np.nan, dtype)
        weighted, gathered = draw(rows, LANES), draw(TILE, 2 * LANES)
        visible = np.arange(TILE) <= np.arange(rows)[:, None] + shift
        want = np.where(visible, q @ keys_t, 0)
        wants = want, weighted + want @ x, gathered + want.T @ q
        all_products(q, keys_t, x, scores, weighted, gathered, shift)
        for got, expected in zip((scores, weighted, gathered), wants, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_float32_attention_equals_reference_around_its_tiles(causal):
    lengths = (1, TILE_ROWS, 50, TILE - 1, TILE, TILE + 1, 2 * TILE + 7)
    draw = drawing(np.float32)
    for n, tq in enumerate(lengths):
        tk, d = lengths[(3 * n + 1) % len(lengths)], (1, 16, 63, 64, 80)[n % 5]
        q, k, v = draw(2, tq, 2, d), draw(2, tk, 1, d), draw(2, tk, 1, d + 1)
        forward, dout = (q, k, v, d**-0.5, causal), draw(2, tq, 2, d + 1)
        results = []
        for version in ("reference", "numba"):
            out, lse = getattr(flash_attention, f"flash_attention_{version}")(*forward)
            backward = getattr(flash_attention, f"flash_attention_backward_{version}")
            gradients = backward(q, k, v, out, lse, dout, *forward[3:])
            results.append((out, lse, *gradients))
        for want, got in zip(*results, strict=True):
            np.testing.assert_allclose(got, want, 1e-4, 1e-4, err_msg=f"{tq=} {tk=}")


def test_attention_takes_inputs_of_any_strides():
    draw = drawing(np.float32)
    q, k, v = (draw(1, 20, 2, 32)[..., ::2] for _ in range(3))
    out, _ = flash_attention.flash_attention_numba(q, k, v, 0.25, True)
    want, _ = flash_attention.flash_attention_reference(q, k, v, 0.25, True)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
