"""How kernels are chosen, compiled, shared out among threads and kept on disk."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import types

from mpiscale.kernels import (
    adamw,
    cross_entropy,
    dropout,
    gelu,
    norm,
    rope,
    softmax,
    swiglu,
    threads,
)
from mpiscale.kernels.attention import block_product, flash_backward, flash_forward
from mpiscale.kernels.bench import largest_error
from mpiscale.kernels.cache import kernel_cache_folder
from mpiscale.kernels.choose import choose, implementation

ROOT = Path(__file__).parents[2]
NOT_AN_ARRAY: Any = [[1.0]]
MODULES = (
    adamw,
    cross_entropy,
    dropout,
    gelu,
    norm,
    rope,
    softmax,
    swiglu,
    flash_forward,
    flash_backward,
)
ROW_KERNELS = {
    kernel.body.__name__: kernel
    for module in MODULES
    for kernel in vars(module).values()
    if isinstance(kernel, threads.RowKernel)
}


def test_unknown_implementation_is_an_error(monkeypatch):
    monkeypatch.setenv("MPISCALE_KERNELS", "fortran")
    with pytest.raises(ValueError, match="'fortran', expected 'numba' or 'reference'"):
        implementation()


def test_environment_can_choose_the_references(monkeypatch):
    def version(x):
        return "reference"

    def fast_version(x):
        return "compiled"

    monkeypatch.setenv("MPISCALE_KERNELS", "reference")
    assert choose(version, fast_version)(np.ones(1)) == "reference"
    monkeypatch.setenv("MPISCALE_KERNELS", "numba")
    assert choose(version, fast_version)(np.ones(1)) == "compiled"


def test_arrays_of_mixed_precision_are_an_error():
    s = np.ones((1, 2), np.float32)
    with pytest.raises(TypeError, match="got float32 and float64, expected arrays of"):
        softmax.softmax_backward(s, s.astype(np.float64))


def test_arrays_that_are_not_floats_are_an_error():
    with pytest.raises(TypeError, match="got no array of floats"):
        softmax.softmax(np.arange(3))
    with pytest.raises(TypeError, match=r"a NumPy or CuPy array, got builtins\.list"):
        softmax.softmax(NOT_AN_ARRAY)


def test_wrong_shape_is_an_error_not_a_read_out_of_bounds():
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"gain has shape \(4,\), expected \(3,\)"):
        norm.layer_norm_numba(x, np.ones(4), None, 1e-5)


def test_kernels_refuse_to_be_imported_under_a_second_name():
    code = "import kernels"
    with pytest.raises(subprocess.CalledProcessError) as failure:
        run_python(code)
    assert "expected `import mpiscale.kernels`" in failure.value.stderr


@threads.row_kernel
def count_visits(lo, hi, visits):
    for row in range(lo, hi):
        visits[row] += 1


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 100_003])
def test_every_row_is_visited_once(rows, two_threads):
    visits = np.zeros(max(rows, 1) + 2, np.int64)
    count_visits(rows, visits)
    np.testing.assert_array_equal(visits[:rows], 1)
    np.testing.assert_array_equal(visits[rows:], 0)


def test_small_work_stays_on_one_thread(two_threads):
    few = np.zeros((9, threads.ELEMENTS_PER_THREAD // 9))
    assert threads._threads_for(9, (few,)) == 1
    assert threads._threads_for(9, (np.zeros((9, 4 * few.shape[1])),)) == 2


@threads.row_kernel
def address(lo, hi, table, position):
    for row in range(lo, hi):
        position[0] = row * table.shape[1]
        table[row, 0] = 1


def test_rows_beyond_two_to_the_31_elements_are_reached(tmp_path):
    """As in microsoft/onnxruntime #28108; a sparse file stands for the memory."""
    row, shape = 239_675, (262_144, 8_960)
    path = tmp_path / "table"
    with path.open("wb") as file:
        file.truncate(shape[0] * shape[1])
    table = np.asarray(np.memmap(path, np.int8, "r+", shape=shape))
    position = np.zeros(1, np.int64)
    address.serial(row, row + 1, table, position)
    assert position[0] == 2_147_488_000
    assert table[row, 0] == 1 and table.reshape(-1)[position[0]] == 1


SMALL_INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")


@pytest.mark.parametrize(
    "name", ["_rotate_positions", "forward_heads", "_dropout_rows"]
)
def test_kernels_have_no_index_below_64_bits(name):
    args = [float_array(4)] + [float_array(3)] * 2 + [float_array(4)]
    if name == "forward_heads":
        out, lse = float_array(4), float_array(2)
        args = [float_array(4)] * 3 + [types.float32, types.boolean, out, lse]
    if name == "_dropout_rows":
        word, offsets = types.uint64, types.Array(types.int64, 1, "C")
        x = float_array(2)
        args = [x, word, types.float32, word, offsets, offsets, x]
    kernel = fresh(ROW_KERNELS[name].body, types.int64, types.int64, *args)
    (overload,) = kernel.overloads.values()
    used = {str(kind) for kind in overload.type_annotation.typemap.values()}
    assert "int64" in used and not used.intersection(SMALL_INTEGERS)


def float_array(ndim):
    return types.Array(types.float32, ndim, "C")


def fresh(function, *signature):
    """Compiled here and now: from the cache, code cannot be inspected."""
    kernel = threads._njit(getattr(function, "py_func", function))
    kernel.compile(signature)
    return kernel


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 instructions"
)
@pytest.mark.parametrize(
    ("function", "args", "instruction"),
    [
        ("_softmax_rows", [2, 2], "vmaxps"),
        ("_softmax_rows", [2, 2], "vfmadd"),
        ("_gelu_elements", [1, 1], "vfmadd"),
        ("_gelu_backward_elements", [1, 1, 1], "vfmadd"),
        ("_gelu_tanh_elements", [1, 1], "vdivps"),
        ("_swiglu_rows", [2, 2], "vdivps"),
        ("_softmax_backward_rows", [2, 2, 2], "vfmadd"),
        ("_rms_norm_backward_blocks", [2, 2, 1, None, 2, 2], "vfmadd"),
        ("_layer_norm_rows", [2, 1, 1, 0, 2, None, None], "vfmadd"),
        ("_layer_norm_backward_blocks", [2, 2, 1, None, None, 2, 2, 2], "vfmadd"),
        ("_adamw_elements", [1, 1, 1, 1] + 6 * ["f"], "vsqrtps"),
    ],
)
def test_compiled_loops_are_vectorised(function, args, instruction):
    kinds = {
        None: types.Array(types.float64, 1, "C"),
        0: types.float64,
        1: float_array(1),
        2: float_array(2),
        "f": types.float32,
    }
    signature = types.int64, types.int64, *(kinds[a] for a in args)
    assert wide_instructions(fresh(ROW_KERNELS[function].body, *signature), instruction)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 instructions"
)
@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("_layer_norm_rows", "matrix vector vector eps matrix sums sums"),
        (
            "_layer_norm_backward_blocks",
            "matrix matrix vector sums sums matrix matrix matrix",
        ),
        ("_rms_norm_rows", "matrix vector eps matrix sums"),
        ("_rms_norm_backward_blocks", "matrix matrix vector sums matrix matrix"),
    ],
)
def test_norm_loops_neither_convert_nor_divide(function, args):
    """A sum's division by n, if it is done in the type of x, moves into the loop."""
    kinds = {
        "matrix": float_array(2),
        "vector": float_array(1),
        "sums": types.Array(types.float64, 1, "C"),
        "eps": types.float64,
    }
    signature = types.int64, types.int64, *(kinds[name] for name in args.split())
    kernel = fresh(ROW_KERNELS[function].body, *signature)
    assert wide_instructions(kernel, "vmulps") + wide_instructions(kernel, "vfmadd")
    assert not wide_instructions(kernel, "vcvtps2pd")
    assert not wide_instructions(kernel, "vdivps")


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 instructions"
)
def test_block_products_inside_the_attention_tile_are_vectorised():
    tile, tiles, row = float_array(2), float_array(3), float_array(1)
    integers = types.int64, types.int64, types.boolean
    arrays = (types.UniTuple(*kind) for kind in ((row, 2), (tile, 3), (tiles, 5)))
    backward = fresh(flash_backward._backward_tile, *integers, *arrays)
    # With the products that fill the tile's own scores left scalar, it had 13.
    assert wide_instructions(backward, "vfmadd") >= 3 * block_product.UNROLL
    product = fresh(block_product.add_product, tile, tile, tile)
    assert wide_instructions(product, "vfmadd") >= block_product.UNROLL


def wide_instructions(kernel, name):
    (assembly,) = kernel.inspect_asm().values()
    return len(re.findall(rf"{name}\w*\s.*[yz]mm", assembly))


def run_python(code, **environment):
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout.strip()


COMPILE = """
import numpy as np
from mpiscale.kernels.softmax import softmax_numba, softmax_reference
for dtype in (np.float32, np.float64):
    x = np.random.default_rng(0).standard_normal((5, 33)).astype(dtype)
    np.testing.assert_allclose(softmax_numba(x), softmax_reference(x), 1e-5)
from mpiscale.kernels.softmax import _softmax_rows
print(sum(_softmax_rows.serial.stats.cache_hits.values()))
"""


def test_processes_that_compile_the_same_kernel_at_once_are_all_right(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    hits = [int(p.communicate(timeout=120)[0]) for p in processes]
    assert [p.returncode for p in processes] == [0] * 4
    # Two variants: each is compiled by one process and read by the three others.
    assert sum(hits) == 2 * 3
    (folder,) = (tmp_path / "mpiscale").iterdir()
    assert len(list(folder.glob("_softmax_rows-*.nbc"))) == 2


def test_cache_that_cannot_be_written_is_replaced_with_a_warning(tmp_path):
    base = tmp_path / "file"
    base.write_text("not a folder")
    with pytest.warns(UserWarning, match=f"in {base}.*set XDG_CACHE_HOME") as warned:
        folder = kernel_cache_folder(base)
    assert folder.is_dir() and str(folder) in str(warned[0].message)


def test_benchmark_reports_a_table():
    command = [sys.executable, "-m", "mpiscale.kernels.softmax", "--rows", "8"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert re.search(r"softmax_backward +\d+\.\d{3} +\d+\.\d{3} +\d+\.\d", run.stdout)


def test_benchmark_takes_nan_for_an_error():
    assert not largest_error(np.ones(2), np.array([1, np.nan])) <= 1e3


def test_kernels_run_on_no_more_threads_than_granted():
    assert numba.get_num_threads() == 1
    big = np.zeros((64, threads.ELEMENTS_PER_THREAD))
    assert threads._threads_for(64, (big,)) == 1
