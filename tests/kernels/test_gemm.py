"""Our matrix product gives what NumPy's gives, for all sizes, strides and threads."""

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest

from mpiscale.kernels.gemm import gemm as gemm_module
from mpiscale.kernels.gemm.gemm import DEPTH, HEIGHT, WIDTH, gemm
from mpiscale.kernels.gemm.product import (
    product_into,
    product_into_numba,
    product_into_reference,
)
from mpiscale.kernels.gemm.register_tile import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    Tile,
    tile_for,
)
from tests.kernels.cases import drawing

ROOT = Path(__file__).parents[2]
# Around one and two tiles, around a block, one row, one column, and nothing.
SHAPES = [
    (0, 3, 2),
    (3, 0, 2),
    (3, 4, 0),
    (1, 1, 1),
    (1, TILE_COLUMNS + 1, 3),
    (TILE_ROWS + 1, 1, 3),
    (TILE_ROWS, TILE_COLUMNS, 16),
    (2 * TILE_ROWS - 1, TILE_COLUMNS - 1, 17),
    (TILE_ROWS + 1, 2 * TILE_COLUMNS + LANES + 1, LANES),
    (33, 4 * LANES, DEPTH + 1),
    (TILE_ROWS, WIDTH + 1, 2 * DEPTH + 5),
    (HEIGHT + 1, 5, 40),
]


def matrix(draw, rows, columns, transposed):
    """A matrix that lies in a wider one, with rows or with columns of unit stride."""
    if transposed:
        return matrix(draw, columns, rows, False).T
    return draw(rows, columns + 3)[:, :columns]


def expected_product(a, b, out, accumulate):
    return a.astype(np.float64) @ b + accumulate * out


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm_equals_the_product_in_float64(shape, accumulate):
    m, n, k = shape
    draw = drawing(np.float32)
    for a_transposed, b_transposed in product([False, True], repeat=2):
        a = matrix(draw, m, k, a_transposed)
        b = matrix(draw, k, n, b_transposed)
        wide = draw(m, n + 2)
        out, beyond = wide[:, :n], wide[:, n:].copy()
        want = expected_product(a, b, out, accumulate)
        gemm(a, b, out, accumulate)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * (k + 1) ** 0.5)
        np.testing.assert_array_equal(wide[:, n:], beyond)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bias_is_added_to_every_row_once(shape):
    m, n, k = shape
    draw = drawing(np.float32)
    for a_transposed in (False, True):
        a, b = matrix(draw, m, k, a_transposed), draw(k, n)
        bias, out = draw(n), np.full((m, n), np.nan, np.float32)
        want = a.astype(np.float64) @ b + bias
        for version in (product_into_reference, product_into_numba):
            version(a, b, out, False, bias)
            np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * (k + 1) ** 0.5)


def test_a_bias_is_shared_out_among_threads(two_threads):
    draw = drawing(np.float32)
    for m, n in ((600, 300), (300, 600)):  # rows are shared out, then columns
        a, b, bias = draw(m, 64), draw(64, n), draw(n)
        out = np.empty((m, n), np.float32)
        gemm(a, b, out, bias=bias)
        np.testing.assert_allclose(out, a.astype(np.float64) @ b + bias, atol=1e-4)


def test_elements_beyond_the_edge_do_not_enter_the_product():
    a, b = np.full((12, 40), np.nan, np.float32), np.full((40, 60), np.nan, np.float32)
    a[:11, :37], b[:37, :50] = 1, 1
    out = np.empty((11, 50), np.float32)
    gemm(a[:11, :37], b[:37, :50], out)
    np.testing.assert_array_equal(out, 37)


BEFORE_A_GUARD_PAGE = """
import ctypes, mmap
import numpy as np
from mpiscale.kernels.gemm.gemm import gemm

def before_a_guard_page(shape):
    # Zeros; a read or write behind the last of them is a segmentation fault.
    size = 4 * shape[0] * shape[1]
    end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard = ctypes.c_void_p(address + end)
    assert ctypes.CDLL(None).mprotect(guard, mmap.PAGESIZE, 0) == 0
    return np.frombuffer(memory, np.float32, size // 4, end - size).reshape(shape)

for m, n, k in ((1, 1, 1), (9, 49, 17), (8, 48, 16), (13, 31, 33)):
    for a in (before_a_guard_page((m, k)), before_a_guard_page((k, m)).T):
        for b in (before_a_guard_page((k, n)), before_a_guard_page((n, k)).T):
            for accumulate in (False, True):
                gemm(a, b, before_a_guard_page((m, n)), accumulate)
print("survived")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does")
def test_memory_behind_the_matrices_is_not_touched():
    command = [sys.executable, "-c", BEFORE_A_GUARD_PAGE]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "survived\n", f"ended with {run.returncode}: {run.stderr}"


def test_nan_and_infinity_go_to_their_row_and_column_only():
    a, b = np.ones((20, 30), np.float32), np.ones((30, 70), np.float32)
    a[3, 5], b[7, 69] = np.nan, np.inf
    out = np.empty((20, 70), np.float32)
    gemm(a, b, out)
    np.testing.assert_array_equal(np.isnan(out).nonzero()[0], 3)
    np.testing.assert_array_equal(np.isinf(out).nonzero()[1], 69)
    np.testing.assert_array_equal(out[4:, :69], 30)


@pytest.mark.parametrize("shape", [(333, 250, 401), (40, 1000, 401)], ids=str)
def test_bits_depend_neither_on_threads_nor_on_strides(shape, two_threads, monkeypatch):
    monkeypatch.setattr(gemm_module, "MULTIPLY_ADDS_PER_THREAD", 2**20)
    m, n, k = shape
    a, b = drawing(np.float32)(m, k), drawing(np.float32)(k, n)
    assert gemm_module._parts(m * n * k) == 2
    results = []
    for threads, order in product([2, 1], "CF"):
        numba.set_num_threads(threads)
        out = np.full((m, n), np.nan, np.float32)
        gemm(np.asarray(a, order=order), np.asarray(b, order=order), out)
        results.append(out)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_small_products_stay_on_one_thread(two_threads):
    assert gemm_module._parts(gemm_module.MULTIPLY_ADDS_PER_THREAD) == 1
    assert gemm_module._parts(2 * gemm_module.MULTIPLY_ADDS_PER_THREAD) == 2


def test_scratch_is_kept_between_calls():
    first = gemm_module._scratch.of(1)
    assert gemm_module._scratch.of(1) is first
    assert first.ctypes.data % gemm_module.ALIGNMENT == 0


def test_arguments_that_do_not_fit_are_errors():
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    out = np.ones((2, 4), np.float32)
    with pytest.raises(TypeError, match="b is of float64, expected float32"):
        gemm(a, b.astype(np.float64), out)
    with pytest.raises(ValueError, match=re.escape("got a (2, 3), b (2, 3), out")):
        gemm(a, a, out)
    with pytest.raises(ValueError, match=r"a has strides .*, expected unit stride"):
        gemm(np.ones((4, 6), np.float32)[::2, ::2], b, out)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected \(4,\)"):
        gemm(a, b, out, bias=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="none if the product is added"):
        gemm(a, b, out, True, np.ones(4, np.float32))
    with pytest.raises(ValueError, match="a bias needs an out whose rows"):
        bias = np.ones(4, np.float32)
        product_into(a, b, np.ones((4, 2), np.float32).T, bias=bias)
    with pytest.raises(ValueError, match=r"out has strides .*transposed product"):
        gemm(a, b, np.ones((4, 2), np.float32).T)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_product_into_takes_any_strides(dtype, accumulate):
    draw = drawing(dtype)
    operands = [draw(9, 14)[:, ::2], draw(7, 9).T, draw(9, 7)]
    for a, b, out in (
        (operands[0], draw(7, 5), draw(9, 5)),
        (operands[1], draw(14, 10)[::2, ::2], draw(9, 5)),
        (operands[2], draw(7, 5), draw(5, 9).T),
        (operands[2], draw(7, 1), draw(9, 1)),
    ):
        want = expected_product(a, b, out, accumulate)
        for version in (product_into_reference, product_into_numba):
            got = out.copy("K")
            version(a, b, got, accumulate)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
def test_16_bit_products_are_computed_in_float32_and_rounded_once(half):
    draw = drawing(half)
    a, b, out = draw(5, 600), draw(600, 7), draw(5, 7)
    want = np.empty((5, 7), np.float32)
    want[:] = out
    product_into(a.astype(np.float32), b.astype(np.float32), want, True)
    product_into(a, b, out, True)
    np.testing.assert_array_equal(out, want.astype(half))


def test_read_only_operands_are_taken():
    a = drawing(np.float32)(9, 9)
    a.flags.writeable = False
    out = np.empty((9, 9), np.float32)
    product_into(a, a.T, out)
    np.testing.assert_allclose(out, a @ a.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "registers"),
    [("avx512f avx2 fma", 32), ("avx2 fma", 16), ("neon", 32), ("sse2", 16)],
)
def test_tile_fits_the_registers(features, registers):
    tile = tile_for(dict.fromkeys(features.split(), True))
    assert isinstance(tile, Tile) and tile.columns == tile.vectors * tile.lanes
    assert tile.rows * tile.vectors + tile.vectors + 1 <= registers
    assert tile.rows * tile.vectors >= 8  # multiply-adds in flight
