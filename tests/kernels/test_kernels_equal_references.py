"""The compiled version of every kernel gives what its NumPy reference gives."""

import ml_dtypes
import numba
import numpy as np
import pytest

from mpiscale.backend import is_half
from mpiscale.kernels.threads import ELEMENTS_PER_THREAD
from tests.kernels.cases import CASES, drawing, results

every_kernel = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Odd sizes, sizes around a vector's and a tile's, one column, one row, no row.
SHAPES = [(0, 4), (1, 1), (5, 1), (3, 7), (2, 64), (65, 16), (131, 33)]

# Outputs that stay in float32 or float64 for 16-bit inputs: sums over a row.
STATISTICS = {
    "layer_norm": 2,
    "rms_norm": 1,
    "logits_statistics": 4,
    "flash_attention": 1,
}


@every_kernel
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 1e-5)], ids=["f64", "f32"]
)
def test_compiled_equals_reference(case, dtype, rtol):
    for rows, width in SHAPES:
        args = case.arguments(drawing(dtype), rows, width)
        expected = results(case.reference, args)
        for want, got in zip(expected, results(case.compiled, args), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            # An element that is a small difference of large ones has their error.
            atol = rtol * max(1, np.abs(want[np.isfinite(want)]).max(initial=0))
            np.testing.assert_allclose(got, want, rtol, atol, err_msg=f"{rows, width}")


@every_kernel
def test_two_threads_give_the_same_bits_as_one(case, two_threads):
    # Uneven halves, and enough elements that the kernel does use both.
    args = case.arguments(drawing(np.float32), 2 * ELEMENTS_PER_THREAD // 32 + 101, 33)
    if case.name.startswith("flash"):
        args = case.arguments(drawing(np.float32), 70, 129)
    on_two = results(case.compiled, args)
    numba.set_num_threads(1)
    for two, one in zip(on_two, results(case.compiled, args), strict=True):
        np.testing.assert_array_equal(two, one)


@every_kernel
@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
def test_16_bit_arrays_are_computed_in_float32(case, half):
    args = case.arguments(drawing(half), 5, 16)
    wide = tuple(
        a.astype(np.float32) if isinstance(a, np.ndarray) and is_half(a.dtype) else a
        for a in args
    )
    got, want = results(case.public, args), results(case.public, wide)
    for narrow, exact in zip(got, want, strict=True):
        assert narrow.dtype in (half, exact.dtype)
        np.testing.assert_array_equal(narrow, exact.astype(narrow.dtype))
    outputs = got[: len(got) - sum(isinstance(a, np.ndarray) for a in args)]
    wide_outputs = sum(output.dtype != half for output in outputs)
    assert wide_outputs == STATISTICS.get(case.name, 0)


@every_kernel
def test_any_leading_shape_is_rows(case):
    if case.name in ("rope", "adamw", "dropout") or "flash" in case.name:
        pytest.skip("takes one shape")
    if "entropy" in case.name or "logits" in case.name:
        pytest.skip("takes rows of logits")
    args = case.arguments(drawing(np.float32), 6, 5)
    as_cube = tuple(
        a.reshape(2, 3, *a.shape[1:])
        if isinstance(a, np.ndarray) and len(a) == 6
        else a
        for a in args
    )
    for flat, cube in zip(
        results(case.public, args), results(case.public, as_cube), strict=True
    ):
        np.testing.assert_array_equal(cube.reshape(flat.shape), flat)
