"""The few things that depend on the kind of array or on the C library."""

import resource
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from mpiscale.backend import accumulation_dtype, array_module, is_float, is_half

FREE_AND_ALLOCATE = """
import resource, sys
import numpy as np
from mpiscale.backend import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def touch():
    x = [np.ones(500_000) for _ in range(4)]
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode):
    done = subprocess.run(
        [sys.executable, "-c", FREE_AND_ALLOCATE, mode],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_freed_memory_is_used_again_without_page_faults():
    pages = 20 * 4 * 4_000_000 // resource.getpagesize()
    assert page_faults("default") > pages / 600  # huge pages count once
    assert page_faults("keep") < 50


def test_types_and_what_they_are_summed_in():
    half, bfloat = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    assert [is_half(d) for d in (half, bfloat, single, double)] == [1, 1, 0, 0]
    assert all(is_float(d) for d in (half, bfloat, single, double))
    assert not is_float(np.dtype(np.int64))
    sums = [accumulation_dtype(d) for d in (half, bfloat, single, double)]
    assert sums == [single, single, single, double]


def test_arrays_of_unknown_kind_are_refused_by_name():
    assert array_module(np.zeros(1)) is np
    with pytest.raises(TypeError, match=r"got builtins\.list"):
        array_module([1.0])
